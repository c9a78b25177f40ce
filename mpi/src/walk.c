/* Walks over the bytes of a datatype's blocks, one copy of it behind the other. */
#include "driver.h"

void walk_start(struct walk *walk, const struct flat *flat, int64_t base, int64_t position) {
    *walk = (struct walk){flat, base, 0, 0, 0};
    if (flat->size == 0)
        return;
    walk->tile = position / flat->size;
    int64_t within = position % flat->size, low = 0, high = flat->count - 1;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (flat->before[middle] <= within)
            low = middle;
        else
            high = middle - 1;
    }
    walk->index = low;
    walk->within = within - flat->before[low];
}

int64_t walk_next(struct walk *walk, int64_t most, int64_t *bytes) {
    const struct flat *flat = walk->flat;
    if (flat->dense) {
        int64_t at = walk->base + flat->blocks[0].offset + walk->tile * flat->extent + walk->within;
        walk->within += most;
        walk->tile += walk->within / flat->size;
        walk->within %= flat->size;
        *bytes = most;
        return at;
    }
    int64_t start = 0, got = 0;
    while (got < most) {
        const struct block *block = &flat->blocks[walk->index];
        int64_t at = walk->base + walk->tile * flat->extent + block->offset + walk->within;
        if (got == 0)
            start = at;
        else if (at != start + got)
            break;
        int64_t here = block->bytes - walk->within;
        if (here > most - got)
            here = most - got;
        got += here;
        walk->within += here;
        if (walk->within == block->bytes) {
            walk->within = 0;
            if (++walk->index == flat->count) {
                walk->index = 0;
                walk->tile++;
            }
        }
    }
    *bytes = got;
    return start;
}
