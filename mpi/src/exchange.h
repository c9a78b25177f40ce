/*
 * Memory of two-phase calls, which the process keeps for later ones: pages of fresh memory cost as much as copies. Shared
 * by exchange.c and exchange_memory.c.
 */
#ifndef FOREBAY_MPI_EXCHANGE_H
#define FOREBAY_MPI_EXCHANGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { WINDOW_BYTES_MAX = 64 << 20 }; /* of the file, that an aggregator handles in a round */

struct piece {
    int64_t offset, bytes;
};

/* A piece and its data in memory. */
struct located {
    int64_t offset, bytes;
    char *data;
};

/*
 * The memory of one round. In arrays, index 0 is for sending and 1 for receiving. `data[0]` is used only where a rank's
 * data are too far from each other for the counts of messages.
 */
struct exchange {
    struct piece *pieces[2];
    struct located *located;
    char *data[2], *window, *packed;
    int64_t piece_room[2], located_room, data_room[2], window_room, packed_room;
};

/* Makes room for so many items, with the contents that are there. `where` is the address of a pointer. */
bool grow(void *where, int64_t *room, int64_t count, size_t bytes);
/* Makes room for so many bytes, whose contents do not count. */
bool renew(char **block, int64_t *room, int64_t bytes);

#endif
