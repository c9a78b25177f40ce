/*
 * The memory of two-phase calls (exchange.h).
 */
#include "exchange.h"

#include <stdlib.h>

#include "driver.h"

enum {
    KEPT = 2,                                 /* a call has the memory of two rounds at most */
    KEPT_BYTES_MAX = WINDOW_BYTES_MAX + 4096, /* of each part, between calls */
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

static void give_back(void *where, int64_t *room, size_t bytes, int64_t kept_bytes) {
    void **block = where;
    if (*room <= kept_bytes / (int64_t)bytes)
        return;
    free(*block);
    *block = NULL;
    *room = 0;
}

bool renew(char **block, int64_t *room, int64_t bytes) {
    if (bytes <= *room)
        return true;
    free(*block);
    *block = malloc(bytes);
    *room = *block != NULL ? bytes : 0;
    return *block != NULL;
}

/* Frees what is longer. */
static void exchange_trim(struct exchange *memory, int64_t kept_bytes) {
    for (int way = 0; way < 2; way++) {
        give_back(&memory->pieces[way], &memory->piece_room[way], sizeof(struct piece), kept_bytes);
        give_back(&memory->data[way], &memory->data_room[way], 1, kept_bytes);
    }
    give_back(&memory->located, &memory->located_room, sizeof(struct located), kept_bytes);
    give_back(&memory->window, &memory->window_room, 1, kept_bytes);
    give_back(&memory->packed, &memory->packed_room, 1, kept_bytes);
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
