/*
 * The memory of two-phase calls (exchange.h).
 */
#include "exchange.h"

#include <stdlib.h>

#include "driver.h"

enum {
    KEPT = 2,                   /* a call has the memory of two rounds at most */
    KEPT_BYTES_MAX = 16 << 20,  /* of all parts of a round's memory, between calls; what an aggregator needs by default is 8 */
};

bool grow(void *where, int64_t *room, int64_t count, size_t bytes) {
    if (count <= *room)
        return true;
    void **block = where;
    void *grown = realloc(*block, (count + count / 2) * bytes);
    if (grown == NULL)
        return false;
    *block = grown;
    *room = count + count / 2;
    return true;
}

/* A part of the memory: the address of its pointer, its room, and the bytes of an item. */
struct part {
    void *where;
    int64_t *room;
    int64_t bytes;
};
enum { PARTS = 7 };

static void list_parts(struct exchange *memory, struct part *parts) {
    const struct part all[PARTS] = {
        {&memory->packed, &memory->packed_room, 1},
        {&memory->data[0], &memory->data_room[0], 1},
        {&memory->data[1], &memory->data_room[1], 1},
        {&memory->window, &memory->window_room, 1},
        {&memory->located, &memory->located_room, sizeof(struct located)},
        {&memory->pieces[0], &memory->piece_room[0], sizeof(struct piece)},
        {&memory->pieces[1], &memory->piece_room[1], sizeof(struct piece)},
    };
    for (int i = 0; i < PARTS; i++)
        parts[i] = all[i];
}

bool renew(char **block, int64_t *room, int64_t bytes) {
    if (bytes <= *room)
        return true;
    free(*block);
    *block = malloc(bytes);
    *room = *block != NULL ? bytes : 0;
    return *block != NULL;
}

/* Frees the longest parts, until no more than so many bytes are left. */
static void exchange_trim(struct exchange *memory, int64_t kept_bytes) {
    struct part parts[PARTS];
    list_parts(memory, parts);
    for (;;) {
        int64_t all = 0, most = 0;
        struct part *longest = parts;
        for (int i = 0; i < PARTS; i++) {
            int64_t bytes = *parts[i].room * parts[i].bytes;
            all += bytes;
            if (bytes > most) {
                most = bytes;
                longest = &parts[i];
            }
        }
        if (all <= kept_bytes || most == 0)
            return;
        void **block = longest->where;
        free(*block);
        *block = NULL;
        *longest->room = 0;
    }
}

/* Of calls that ended. Calls of other threads meanwhile have memory of their own. */
static struct exchange *_Atomic kept[KEPT];

struct exchange *exchange_take(void) {
    for (int i = 0; i < KEPT; i++) {
        struct exchange *memory = atomic_exchange(&kept[i], NULL);
        if (memory != NULL)
            return memory;
    }
    return calloc(1, sizeof(struct exchange));
}

void exchange_give_back(struct exchange *memory) {
    if (memory == NULL)
        return;
    exchange_trim(memory, KEPT_BYTES_MAX);
    for (int i = 0; i < KEPT; i++) {
        struct exchange *none = NULL;
        if (atomic_compare_exchange_strong(&kept[i], &none, memory))
            return;
    }
    exchange_trim(memory, 0);
    free(memory);
}

char *exchange_packed(struct exchange *memory, int64_t bytes) {
    return memory != NULL && renew(&memory->packed, &memory->packed_room, bytes) ? memory->packed : NULL;
}
