/*
 * The calls of forebay.h on one volume by ranks that have it open at once: puts VOLUME. The volume has 4 MiB or more.
 * FOREBAY_POOL is the pool, on each rank that of its node.
 */
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <forebay.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>

/* A block crosses stripes and pages. Words of atomic operations are on different stripes, and blocks behind them. */
enum { BLOCK = 150001, WORDS = 8, WORD_STEP = 64 << 10, DATA = WORDS * WORD_STEP + 13, RANKS_MAX = 16, ROUNDS = 4 };
enum { ADDS = 60, LOCKED = 25, RECORD = 4099, RECORDS = 30, PARTS = 20, PART = 5000, MESSAGES = 30, WAIT_MS = 60000 };

static forebay_pool *pool;
static forebay_volume *volume;

static void barrier(void) { MPI_Barrier(MPI_COMM_WORLD); }

/* Bytes that differ between ranks, rounds and positions. */
static void fill(unsigned char *data, int bytes, int of, int round) {
    uint32_t x = (uint32_t)(of * 7919 + round * 104729 + 1);
    for (int i = 0; i < bytes; i++) {
        x = x * 1664525 + 1013904223;
        data[i] = (unsigned char)(x >> 24);
    }
}

static bool is_filled(const unsigned char *data, int bytes, int of, int round) {
    unsigned char *wanted = malloc(bytes);
    fill(wanted, bytes, of, round);
    bool same = memcmp(data, wanted, bytes) == 0;
    free(wanted);
    return same;
}

static int64_t word_at(int word) { return (int64_t)(word % WORDS) * WORD_STEP + 8 * (word / WORDS); }

static uint64_t sum_of(uint64_t mine) {
    uint64_t sum = 0;
    MPI_Allreduce(&mine, &sum, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    return sum;
}

/* Every word is 0 again, on all ranks. */
static void clear_words(void) {
    barrier();
    uint64_t zero = 0;
    for (int word = rank; word < WORDS * 2; word += size)
        CHECK(forebay_volume_put(volume, &zero, 8, word_at(word)) == 0);
    barrier();
}

static void opens(const char *name) {
    forebay_volume *other = NULL;
    char words[200] = "";
    CHECK(forebay_volume_open(pool, "there-is-none", O_RDWR, &other) == -ENOENT && other == NULL);
    CHECK(forebay_attach_error(words, sizeof words) > 0 && strstr(words, "there-is-none") != NULL);
    CHECK(forebay_volume_open(pool, name, O_RDONLY, &other) == 0);
    CHECK(forebay_volume_put(other, "x", 1, 0) == -EBADF);
    long long bytes = forebay_volume_size(other), least = 0, most = 0;
    MPI_Allreduce(&bytes, &least, 1, MPI_LONG_LONG, MPI_MIN, MPI_COMM_WORLD);
    MPI_Allreduce(&bytes, &most, 1, MPI_LONG_LONG, MPI_MAX, MPI_COMM_WORLD);
    CHECK(least == most && least >= 4 << 20);
    CHECK(forebay_volume_get(other, words, 2, bytes - 1) == -ERANGE);
    CHECK(forebay_volume_put(volume, words, 2, bytes - 1) == -ERANGE);
    CHECK(forebay_volume_discard(volume, 0, 4096) == -EOPNOTSUPP);
    CHECK(forebay_volume_close(other) == 0);
}

/* A put that has returned is what every rank gets after a barrier. `ours`: by memory of forebay_alloc. */
static void blocks(bool ours) {
    void *from = NULL, *to = NULL;
    if (ours) {
        CHECK(forebay_alloc(pool, BLOCK, &from) == 0 && forebay_alloc(pool, BLOCK, &to) == 0);
    } else {
        from = malloc(BLOCK), to = malloc(BLOCK);
        CHECK(forebay_register(pool, from, BLOCK) == 0);
    }
    for (int round = 0; round < ROUNDS; round++) {
        fill(from, BLOCK, rank, round + ours * ROUNDS);
        CHECK(forebay_volume_put(volume, from, BLOCK, DATA + (int64_t)rank * BLOCK) == 0);
        barrier();
        for (int i = 0; i < size; i++) {
            int of = (rank + i) % size;
            memset(to, 0, BLOCK);
            CHECK(forebay_volume_get(volume, to, BLOCK, DATA + (int64_t)of * BLOCK) == 0);
            CHECK(is_filled(to, BLOCK, of, round + ours * ROUNDS));
        }
        barrier();
    }
    CHECK(forebay_volume_flush(volume) == 0);
    if (ours) {
        CHECK(forebay_free(from) == 0 && forebay_free(to) == 0 && forebay_free(to) == -EINVAL);
    } else {
        CHECK(forebay_unregister(from) == 0);
        free(from);
        free(to);
    }
}

/* Ranks put records in turn by one list each, and get those of the next rank by a list. */
static void lists(void) {
    struct forebay_run mine[RECORDS], next[RECORDS];
    int other = (rank + 1) % size, all = RECORD * RECORDS;
    int64_t room = (forebay_volume_size(volume) - DATA) / RECORD / size;
    int count = room < RECORDS ? (int)room : RECORDS, bytes = RECORD * count;
    for (int i = 0; i < count; i++) {
        mine[i] = (struct forebay_run){DATA + ((int64_t)i * size + rank) * RECORD, RECORD};
        next[i] = (struct forebay_run){DATA + ((int64_t)i * size + other) * RECORD, RECORD};
    }
    unsigned char *data = malloc(all), *back = calloc(all, 1);
    fill(data, bytes, rank, 100);
    CHECK(forebay_volume_putv(volume, data, bytes, mine, count) == 0);
    barrier();
    CHECK(forebay_volume_getv(volume, back, bytes, next, count) == 0);
    CHECK(is_filled(back, bytes, other, 100));
    /* Between the records of one rank are those of the others. */
    fill(data, bytes, other, 100);
    for (int i = 0; i < count; i++) {
        CHECK(forebay_volume_get(volume, back, RECORD, next[i].offset) == 0);
        CHECK(memcmp(back, data + i * RECORD, RECORD) == 0);
    }
    CHECK(forebay_volume_putv(volume, data, bytes - 1, mine, count) == -EINVAL);
    barrier();
    free(data);
    free(back);
}

static int compare(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Each value that a word had is given to one rank. */
static void adds(void) {
    clear_words();
    uint64_t was[ADDS], *all = malloc(sizeof was * size), sum = 0;
    for (int word = 0; word < WORDS; word++) {
        for (int i = 0; i < ADDS; i++)
            CHECK(forebay_volume_fetch_add(volume, word_at(word), 1, &was[i]) == 0);
        for (int i = 1; i < ADDS; i++)
            CHECK(was[i] > was[i - 1]);
        MPI_Allgather(was, ADDS, MPI_UINT64_T, all, ADDS, MPI_UINT64_T, MPI_COMM_WORLD);
        qsort(all, (size_t)ADDS * size, sizeof *all, compare);
        for (int i = 0; i < ADDS * size; i++)
            sum += all[i] != (uint64_t)i;
        CHECK(sum == 0);
    }
    free(all);
    CHECK(forebay_volume_fetch_add(volume, 4, 1, was) == -EINVAL);
}

/* What ranks swap in and out of a word is what they have put in. */
static void swaps(void) {
    clear_words();
    uint64_t in = 0, out = 0, last = 0;
    for (int i = 0; i < ADDS; i++) {
        uint64_t token = ((uint64_t)(rank + 1) << 32) + i + 1, was = 0;
        CHECK(forebay_volume_swap(volume, word_at(3), token, &was) == 0);
        in += token;
        out += was;
    }
    barrier();
    CHECK(forebay_volume_get(volume, &last, 8, word_at(3)) == 0);
    CHECK(last != 0 && sum_of(in) == sum_of(out) + last);
}

/* A lock of compare-and-swap, with which ranks change bytes that no call changes atomically. */
static void locks(void) {
    clear_words();
    uint64_t was = 1, count = 0;
    for (int i = 0; i < LOCKED; i++) {
        double start = MPI_Wtime();
        do {
            CHECK(forebay_volume_cas(volume, word_at(1), 0, rank + 1, &was) == 0);
        } while (was != 0 && MPI_Wtime() - start < WAIT_MS / 1000);
        CHECK(was == 0);
        CHECK(forebay_volume_get(volume, &count, 8, word_at(2)) == 0);
        count++;
        sched_yield(); /* others try meanwhile */
        CHECK(forebay_volume_put(volume, &count, 8, word_at(2)) == 0);
        CHECK(forebay_volume_fence(volume) == 0);
        CHECK(forebay_volume_swap(volume, word_at(1), 0, &was) == 0 && was == (uint64_t)rank + 1);
    }
    barrier();
    CHECK(forebay_volume_get(volume, &count, 8, word_at(2)) == 0);
    CHECK(count == (uint64_t)LOCKED * size);
    CHECK(forebay_volume_cas(volume, word_at(1), 7, 8, &was) == 0 && was == 0);
}

/* Without MPI: a rank puts and then raises a word, and the next rank gets when it sees that. */
static void messages(void) {
    clear_words();
    int before = (rank + size - 1) % size;
    unsigned char *data = malloc(PART), *back = malloc(PART);
    for (int i = 1; i <= MESSAGES; i++) {
        uint64_t was = 0, seen = 0;
        fill(data, PART, rank, 1000 + i);
        int64_t slot = i % 2 * RANKS_MAX;
        CHECK(forebay_volume_put(volume, data, PART, DATA + (slot + rank) * PART) == 0);
        CHECK(forebay_volume_fence(volume) == 0);
        CHECK(forebay_volume_fetch_add(volume, word_at(rank), 1, &was) == 0);
        double start = MPI_Wtime();
        do {
            CHECK(forebay_volume_fetch_add(volume, word_at(before), 0, &seen) == 0);
        } while (seen < (uint64_t)i && MPI_Wtime() - start < WAIT_MS / 1000);
        CHECK(forebay_volume_get(volume, back, PART, DATA + (slot + before) * PART) == 0);
        CHECK(is_filled(back, PART, before, 1000 + i));
        /* Two slots: the rank before may be one message ahead. */
        if (i % 2 == 0)
            barrier();
    }
    free(data);
    free(back);
}

static int states[PARTS];

/* Takes `count` completions; every state is there once. */
static void taken(forebay_queue *queue, int count, uint64_t *sum) {
    struct forebay_completion done[7];
    int seen[PARTS] = {0}, left = count;
    while (left > 0) {
        int got = forebay_queue_wait(queue, done, 7, WAIT_MS);
        CHECK(got > 0);
        if (got <= 0)
            break;
        left -= got;
        for (int i = 0; i < got; i++) {
            CHECK(done[i].result == 0);
            seen[(int *)done[i].state - states]++;
            *sum += done[i].was;
        }
    }
    for (int i = 0; i < count; i++)
        CHECK(seen[i] == 1);
    CHECK(forebay_queue_wait(queue, done, 7, 0) == 0);
}

/* Calls that are started, on all ranks at once. What a rank has taken from its queue all ranks get. */
static void queues(void) {
    clear_words();
    forebay_queue *queue = NULL;
    CHECK(forebay_queue_create(rank % 2 ? FOREBAY_QUEUE_SPIN : 0, &queue) == 0);
    unsigned char *data = malloc(PARTS * PART), *back = calloc(PARTS, PART);
    fill(data, PARTS * PART, rank, 50);
    uint64_t sum = 0, last = 0;
    int64_t own = DATA + (int64_t)rank * PARTS * PART, other = (rank + 1) % size;
    for (int i = 0; i < PARTS; i++)
        CHECK(forebay_volume_put_start(volume, data + i * PART, PART, own + i * PART, queue, &states[i]) == 0);
    taken(queue, PARTS, &sum);
    CHECK(forebay_volume_flush(volume) == 0);
    barrier();
    for (int i = 0; i < PARTS; i++)
        CHECK(forebay_volume_get_start(volume, back + i * PART, PART, DATA + (other * PARTS + i) * PART, queue,
                                       &states[i]) == 0);
    taken(queue, PARTS, &sum);
    CHECK(is_filled(back, PARTS * PART, (int)other, 50));
    sum = 0;
    for (int i = 0; i < PARTS; i++)
        CHECK(forebay_volume_fetch_add_start(volume, word_at(5), 1, queue, &states[i]) == 0);
    taken(queue, PARTS, &sum);
    uint64_t count = (uint64_t)PARTS * size;
    CHECK(sum_of(sum) == count * (count - 1) / 2);
    barrier();
    CHECK(forebay_volume_get(volume, &last, 8, word_at(5)) == 0 && last == count);
    /* One rank's exchange succeeds. */
    barrier();
    sum = 0;
    CHECK(forebay_volume_cas_start(volume, word_at(5), count, rank + 7777, queue, &states[0]) == 0);
    taken(queue, 1, &sum);
    CHECK(sum_of(sum == count) == 1);
    sum = 0;
    barrier();
    CHECK(forebay_volume_swap_start(volume, word_at(5), 0, queue, &states[0]) == 0);
    taken(queue, 1, &sum);
    CHECK(sum_of(sum >= 7777) == 1);
    CHECK(forebay_queue_close(queue) == 0);
    free(data);
    free(back);
}

/* Bytes of this node are mapped, and are those that any rank has put; bytes of other nodes are not. */
static void maps(void) {
    int64_t end = DATA + (int64_t)size * BLOCK;
    unsigned char *data = malloc(end), *all = malloc(end);
    fill(data, BLOCK, rank, 70);
    CHECK(forebay_volume_put(volume, data, BLOCK, DATA + (int64_t)rank * BLOCK) == 0);
    barrier();
    CHECK(forebay_volume_get(volume, all, end, 0) == 0);
    int mapped = 0, steps = 0;
    for (int64_t at = 0; at < end; at += WORD_STEP, steps++) {
        void *address = NULL;
        size_t bytes = 0;
        int code = forebay_volume_map(volume, at, &address, &bytes);
        CHECK(code == 0 ? bytes > 0 : code == -EOPNOTSUPP);
        if (code == 0) {
            size_t some = bytes < WORD_STEP ? bytes : WORD_STEP;
            if ((int64_t)some > end - at)
                some = (size_t)(end - at);
            CHECK(memcmp(address, all + at, some) == 0);
            mapped++;
        }
    }
    /* PUTS_MAPPED: "all" of it, or "part" of it. */
    const char *wanted = getenv("PUTS_MAPPED");
    CHECK(wanted == NULL || (strcmp(wanted, "all") == 0 ? mapped == steps : mapped > 0 && mapped < steps));
    barrier();
    free(data);
    free(all);
}

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 2 || size > RANKS_MAX)
        return 2;
    CHECK(forebay_attach(NULL, &pool) == 0);
    CHECK(forebay_volume_open(pool, argv[1], O_RDWR, &volume) == 0);
    if (volume == NULL)
        return end();
    opens(argv[1]);
    blocks(false);
    blocks(true);
    lists();
    adds();
    swaps();
    locks();
    messages();
    queues();
    maps();
    barrier();
    CHECK(forebay_volume_close(volume) == 0);
    return end();
}
