/*
 * Two-phase collective access: ranks send their pieces to aggregators, and each aggregator moves one window of the file
 * after the other in long runs.
 *
 * The range of bytes that all ranks touch is divided into one domain for each aggregator. In each round every
 * aggregator serves one window of cb_buffer_size bytes of its domain. A view's displacements rise, so a rank's data for
 * a window are one slice of its data and the list of runs that say where the slice goes. Rounds in which no rank has
 * data are skipped. Windows with gaps are written run by run: nothing is read to be written back. Where two ranks write
 * one byte, that of the higher rank stays.
 *
 * Messages go from and to the ranks' own memory. Few pieces that are apart go between backing files of this node and the
 * memory of messages directly; others through a copy of the window. The process keeps the memory of a call for the next
 * one, since pages of fresh memory cost as much as copies.
 */
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    WINDOW_BYTES = 4 << 20, /* unless cb_buffer_size is set */
    WINDOW_BYTES_MIN = 4096,
    WINDOW_BYTES_MAX = 64 << 20,
    RUNS_MAX = 512,           /* of one call */
    DIRECT_BYTES = 1024,      /* mean length of pieces from which on they are not copied to a window */
    KEPT_BYTES_MAX = WINDOW_BYTES_MAX + 4096, /* of each part of the memory of calls, between two of them */
    SHORT_RUN_BYTES = 32768,  /* largest data inside a request to another node */
    RUNS_FEW = 8,             /* fewer runs do not justify an exchange between ranks */
    READ_BYTES_MIN = 1 << 20, /* for one rank: reading less, with the gaps, is faster than an exchange */
    SPARSE = 4,               /* in a range this many times the ranks' data most bytes are gaps */
    ALIGNMENT_BYTES = 4096,   /* of domains, so that two aggregators do not share a page */
};

/*
 * Without a calibration: decides between the two ways, from values that are the same on all ranks. On a medium of this node each rank is
 * faster alone, as libforebay.so moves many short runs at a time. If data are on other nodes, each short run that is
 * written is a request. Short runs are read with the gaps between them, which with many bytes costs more than an
 * exchange (measured: docs/decisions/0021). If most of the range is gaps, the ranks' runs do not combine to long ones.
 */
static bool pays_by_rule(const struct file *file, bool writes, const struct together *all) {
    int64_t runs = all->bytes / (all->run > 0 ? all->run : 1), range = all->last - all->first;
    return file->far && all->run <= SHORT_RUN_BYTES && runs >= RUNS_FEW && (writes || all->bytes >= READ_BYTES_MIN) &&
           range / SPARSE / file->size <= all->bytes;
}

static const char *hint_of(const struct file *file, bool writes) {
    return file->hints[writes ? HINT_romio_cb_write : HINT_romio_cb_read];
}

static void tell(const struct file *file, bool writes, bool together, int64_t run, const char *why) {
    if (!debug() || file->rank != 0)
        return;
    char runs[64] = "in one run";
    if (run < INT64_MAX)
        snprintf(runs, sizeof runs, "in runs of %lld bytes", (long long)run);
    fprintf(stderr, "forebay: %s: collective %s is %s (hint: %s; %s; data on %s; %s)\n", file->path,
            writes ? "write" : "read", together ? "two-phase" : "independent",
            hint_of(file, writes)[0] != 0 ? hint_of(file, writes) : "automatic", runs,
            !file->far   ? "this node"
            : file->near ? "other nodes"
                         : "nodes without ranks",
            why);
}

/* Whether calls with the file's views can be two-phase, unless a hint says so. */
static bool can_pay(struct file *file, bool writes) {
    if (choice_is_known(file))
        return choice_may(file, writes);
    return file->far && file->shortest_run <= SHORT_RUN_BYTES;
}

bool may_two_phase(struct file *file, bool writes) {
    const char *hint = hint_of(file, writes);
    const char *why = "as asked";
    /* An aggregator's window is a range of the file, so the data for it must be one range of each rank's data. */
    if (file->size == 1)
        why = "one rank";
    else if (!file->apart || file->atomic || file->view.rep != NULL)
        why = "the view, its representation or atomic mode rules two-phase out";
    else if (strcmp(hint, "enable") == 0 || (strcmp(hint, "disable") != 0 && can_pay(file, writes)))
        return true;
    else if (strcmp(hint, "disable") != 0)
        why = choice_is_known(file) ? "the model says that no exchange pays"
              : file->far           ? "long runs"
                                    : "ranks are fast alone";
    tell(file, writes, false, file->shortest_run, why);
    return false;
}

bool wants_two_phase(struct file *file, bool writes, const struct together *mine, struct together *all) {
    /* The last two numbers are times of the last call. By the first of them the ranks correct predictions alike. */
    enum { WORDS = 7 };
    int64_t words[WORDS] = {mine->code, 0, -INT64_MAX, 0, 0, file->choice.measured_ns, file->choice.file_ns};
    int64_t most[WORDS] = {0};
    if (mine->code == MPI_SUCCESS && mine->bytes > 0) {
        words[1] = mine->bytes;
        words[2] = -mine->first;
        words[3] = mine->last;
        words[4] = mine->run;
    }
    if (mpi.Allreduce(words, most, WORDS, MPI_INT64_T, MPI_MAX, file->comm) != MPI_SUCCESS)
        most[0] = MPI_ERR_INTERN;
    *all = (struct together){.code = (int)most[0], .bytes = most[1], .first = -most[2], .last = most[3], .run = most[4]};
    if (all->bytes == 0)
        all->first = all->last;
    bool asked = strcmp(hint_of(file, writes), "enable") == 0, together = asked;
    char why[160] = "as asked";
    struct forebay_times times;
    if (choice_is_known(file)) {
        choice_learn(file, most[5], most[6]);
        bool model = choice_together(file, writes, all, &times);
        together = asked || model;
        choice_note(file, writes, together, &times);
        all->aggregators = times.aggregators;
        if (!asked)
            snprintf(why, sizeof why, "the model predicts %lld us two-phase (aggregators: %lld) and %lld independent",
                     (long long)(times.collective_ns / 1000), (long long)times.aggregators,
                     (long long)(times.independent_ns / 1000));
    } else if (!asked) {
        together = pays_by_rule(file, writes, all);
        snprintf(why, sizeof why, "at most %lld bytes of a rank, in a range of %lld", (long long)all->bytes,
                 (long long)(all->last - all->first));
    }
    tell(file, writes, together, all->run, why);
    return together;
}

struct piece {
    int64_t offset, bytes;
};
enum { PIECE_WORDS = sizeof(struct piece) / sizeof(int64_t) };

/* A piece and its data in memory. */
struct located {
    int64_t offset, bytes;
    char *data;
};

/*
 * Memory of two-phase calls. In arrays, index 0 is for sending and 1 for receiving. `data[0]` is used only where a rank's
 * data are too far from each other for the counts of messages.
 */
struct exchange {
    struct piece *pieces[2];
    struct located *located;
    char *data[2], *window, *packed;
    int64_t piece_room[2], located_room, data_room[2], window_room, packed_room;
};

/* The state of one access on one rank. In arrays, index 0 is for sending and 1 for receiving. */
struct access {
    struct file *file;
    const struct view *view;
    int64_t first, last, domain, window; /* of the file */
    int64_t position, bytes;             /* this rank's part of the view's data */
    char *packed;
    int aggregators;
    int *piece_words[2], *piece_at[2], *data_bytes[2], *data_at[2]; /* a piece is PIECE_WORDS numbers */
    int64_t *sizes[2], *slice; /* two numbers for each rank; the start of a rank's slice in `packed` */
    struct exchange *memory;
};

void aggregators_of(const struct file *file, int *aggregators, int64_t *window) {
    int64_t nodes = atoll(file->hints[HINT_cb_nodes]);
    if (nodes < 1)
        nodes = file->processors;
    *aggregators = (int)(nodes < 1 ? 1 : nodes < file->size ? nodes : file->size);
    *window = atoll(file->hints[HINT_cb_buffer_size]);
    if (*window <= 0)
        *window = WINDOW_BYTES;
    /* Counts of bytes, and of numbers, two for each piece of one byte or more, go to the MPI library as int. */
    int64_t most = (int64_t)0x20000000 / file->size;
    if (most > WINDOW_BYTES_MAX)
        most = WINDOW_BYTES_MAX;
    if (*window > most)
        *window = most;
    if (*window < WINDOW_BYTES_MIN)
        *window = WINDOW_BYTES_MIN;
}

static void plan(struct access *a, int64_t aggregators) {
    aggregators_of(a->file, &a->aggregators, &a->window);
    if (aggregators > 0 && aggregators < a->aggregators)
        a->aggregators = (int)aggregators;
    int64_t blocks = (a->last - a->first - 1) / a->aggregators / ALIGNMENT_BYTES + 1;
    a->domain = blocks <= INT64_MAX / ALIGNMENT_BYTES ? blocks * ALIGNMENT_BYTES : a->last - a->first;
}

static int rank_of(const struct access *a, int aggregator) {
    return (int)((int64_t)aggregator * a->file->size / a->aggregators);
}

/*
 * The range that an aggregator serves from a round on; empty after the end of its domain. Ranges may extend to the
 * greatest offset.
 */
static void rest_of(const struct access *a, int aggregator, int64_t round, int64_t *first, int64_t *last) {
    int64_t before, skipped;
    *first = *last = a->last;
    if (__builtin_mul_overflow(aggregator, a->domain, &before) || before >= a->last - a->first)
        return;
    int64_t bytes = a->last - a->first - before;
    if (bytes > a->domain)
        bytes = a->domain;
    if (__builtin_mul_overflow(round, a->window, &skipped) || skipped >= bytes)
        return;
    *first = a->first + before + skipped;
    *last = a->first + before + bytes;
}

static void window_of(const struct access *a, int aggregator, int64_t round, int64_t *first, int64_t *last) {
    rest_of(a, aggregator, round, first, last);
    if (*last - *first > a->window)
        *last = *first + a->window;
}

/* The start and end of this rank's data in a range; equal when there are none. */
static void data_of(const struct access *a, int64_t first, int64_t last, int64_t *from, int64_t *to) {
    *from = *to = 0;
    if (first >= last || a->bytes == 0)
        return;
    int64_t begin = view_bytes_before(a->view, first), end = view_bytes_before(a->view, last);
    begin = begin > a->position ? begin : a->position;
    end = end < a->position + a->bytes ? end : a->position + a->bytes;
    if (begin < end) {
        *from = begin;
        *to = end;
    }
}

/* The first round from this one on in which this rank has data; INT64_MAX when there is none. */
static int64_t next_round(const struct access *a, int64_t round) {
    int64_t next = INT64_MAX;
    for (int g = 0; g < a->aggregators; g++) {
        int64_t first, last, from, to;
        rest_of(a, g, round, &first, &last);
        data_of(a, first, last, &from, &to);
        if (from == to)
            continue;
        int64_t here = round + (view_offset(a->view, from) - first) / a->window;
        next = here < next ? here : next;
    }
    return next;
}

static bool make(struct access *a) {
    size_t size = a->file->size;
    bool good = (a->slice = calloc(size, sizeof *a->slice)) != NULL;
    for (int way = 0; way < 2; way++) {
        int **counts[4] = {&a->piece_words[way], &a->piece_at[way], &a->data_bytes[way], &a->data_at[way]};
        for (int i = 0; i < 4; i++)
            good = (*counts[i] = calloc(size, sizeof(int))) != NULL && good;
        good = (a->sizes[way] = calloc(2 * size, sizeof(int64_t))) != NULL && good;
    }
    return good;
}

static void give_back(void *where, int64_t *room, size_t bytes, int64_t kept_bytes) {
    void **block = where;
    if (*room <= kept_bytes / (int64_t)bytes)
        return;
    free(*block);
    *block = NULL;
    *room = 0;
}

/* Makes room for so many bytes, whose contents do not count. */
static bool renew(char **block, int64_t *room, int64_t bytes) {
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

/* Of the last call that ended. Calls of other threads meanwhile have memory of their own. */
static struct exchange *_Atomic kept;

struct exchange *exchange_take(void) {
    struct exchange *memory = atomic_exchange(&kept, NULL);
    return memory != NULL ? memory : calloc(1, sizeof *memory);
}

void exchange_give_back(struct exchange *memory) {
    if (memory == NULL)
        return;
    exchange_trim(memory, KEPT_BYTES_MAX);
    memory = atomic_exchange(&kept, memory);
    if (memory != NULL) {
        exchange_trim(memory, 0);
        free(memory);
    }
}

char *exchange_packed(struct exchange *memory, int64_t bytes) {
    return memory != NULL && renew(&memory->packed, &memory->packed_room, bytes) ? memory->packed : NULL;
}

static void discard(struct access *a) {
    for (int way = 0; way < 2; way++) {
        free(a->piece_words[way]);
        free(a->piece_at[way]);
        free(a->data_bytes[way]);
        free(a->data_at[way]);
        free(a->sizes[way]);
    }
    free(a->slice);
}

/* Makes room for so many items, with the contents that are there. */
static bool grow(void *where, int64_t *room, int64_t count, size_t bytes) {
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

/*
 * Lists this rank's runs in every aggregator's window of a round. `*own` is where the addresses of messages begin: in this
 * rank's memory, or in the copy of it.
 */
static bool list_pieces(struct access *a, int64_t round, char **own) {
    int64_t count = 0, data = 0, least = -1, most = 0;
    size_t size = a->file->size;
    struct exchange *m = a->memory;
    memset(a->piece_words[0], 0, size * sizeof(int));
    memset(a->data_bytes[0], 0, size * sizeof(int));
    for (int g = 0; g < a->aggregators; g++) {
        int64_t first, last, from, to;
        window_of(a, g, round, &first, &last);
        data_of(a, first, last, &from, &to);
        if (from == to)
            continue;
        int rank = rank_of(a, g);
        struct walk runs;
        walk_start(&runs, a->view->file, a->view->disp, from);
        a->piece_at[0][rank] = (int)(count * PIECE_WORDS);
        for (int64_t at = from; at < to; count++) {
            if (!grow(&m->pieces[0], &m->piece_room[0], count + 1, sizeof(struct piece)))
                return false;
            struct piece *piece = &m->pieces[0][count];
            piece->offset = walk_next(&runs, to - at, &piece->bytes);
            at += piece->bytes;
        }
        a->piece_words[0][rank] = (int)(count * PIECE_WORDS) - a->piece_at[0][rank];
        a->slice[rank] = from - a->position;
        a->data_at[0][rank] = (int)data;
        a->data_bytes[0][rank] = (int)(to - from);
        data += to - from;
        /* Aggregators serve one part of the file after the other, and so do these bytes. */
        least = least < 0 ? a->slice[rank] : least;
        most = a->slice[rank] - least;
    }
    *own = NULL;
    if (data > 0 && most <= INT32_MAX) {
        *own = a->packed + least;
        for (size_t r = 0; r < size; r++)
            a->data_at[0][r] = a->data_bytes[0][r] > 0 ? (int)(a->slice[r] - least) : 0;
    }
    return (*own != NULL || renew(&m->data[0], &m->data_room[0], data + 1)) &&
           grow(&m->pieces[0], &m->piece_room[0], 1, sizeof(struct piece));
}

/* Sends to each rank the sizes of this rank's data for it, and allocates memory for the data to receive. */
static bool exchange_counts(struct access *a) {
    int size = a->file->size;
    int64_t pieces = 0, data = 0;
    struct exchange *m = a->memory;
    for (int r = 0; r < size; r++) {
        a->sizes[0][2 * r] = a->piece_words[0][r];
        a->sizes[0][2 * r + 1] = a->data_bytes[0][r];
    }
    mpi.Alltoall(a->sizes[0], 2, MPI_INT64_T, a->sizes[1], 2, MPI_INT64_T, a->file->comm);
    for (int r = 0; r < size; r++) {
        a->piece_at[1][r] = (int)pieces;
        a->data_at[1][r] = (int)data;
        a->piece_words[1][r] = (int)a->sizes[1][2 * r];
        a->data_bytes[1][r] = (int)a->sizes[1][2 * r + 1];
        pieces += a->sizes[1][2 * r];
        data += a->sizes[1][2 * r + 1];
    }
    int64_t count = pieces / PIECE_WORDS;
    /* The lists of a round must fit an int too. */
    return pieces < INT32_MAX && renew(&m->data[1], &m->data_room[1], data + 1) &&
           grow(&m->pieces[1], &m->piece_room[1], count + 1, sizeof(struct piece)) &&
           grow(&m->located, &m->located_room, count + 1, sizeof(struct located)) &&
           (data == 0 || renew(&m->window, &m->window_room, a->window));
}

static int by_offset(const void *left, const void *right) {
    int64_t a = ((const struct located *)left)->offset, b = ((const struct located *)right)->offset;
    return a < b ? -1 : a > b;
}

/* The pieces of all ranks, with their data in the memory of messages, in the order of ranks. */
static int64_t locate(const struct access *a) {
    int64_t count = 0;
    struct exchange *m = a->memory;
    char *data = m->data[1];
    for (int r = 0; r < a->file->size; r++)
        for (int64_t left = a->piece_words[1][r] / PIECE_WORDS; left > 0; left--, count++) {
            m->located[count] = (struct located){m->pieces[1][count].offset, m->pieces[1][count].bytes, data};
            data += m->pieces[1][count].bytes;
        }
    return count;
}

/* Copies between the others' data and the window that begins at `first`. */
static void copy_window(const struct access *a, bool writes, int64_t count, int64_t first) {
    for (int64_t i = 0; i < count; i++) {
        struct located *piece = &a->memory->located[i];
        char *here = a->memory->window + (piece->offset - first);
        memcpy(writes ? here : piece->data, writes ? piece->data : here, piece->bytes);
    }
}

/* The aggregator's half of a round in which others write. */
static int serve_write(struct access *a, int64_t count, bool direct, int64_t first) {
    struct located *all = a->memory->located;
    if (!direct) {
        copy_window(a, true, count, first);
        qsort(all, count, sizeof *all, by_offset);
    }
    for (int64_t i = 0; i < count;) {
        struct forebay_run runs[RUNS_MAX];
        struct iovec parts[RUNS_MAX];
        int used = 0, used_parts = 0;
        /* A piece is at most one part and one run more. */
        while (i < count && used < RUNS_MAX && used_parts < RUNS_MAX) {
            int64_t low = all[i].offset, high = low;
            for (; i < count && all[i].offset <= high && used_parts < RUNS_MAX; i++) {
                int64_t end = all[i].offset + all[i].bytes;
                if (direct)
                    parts[used_parts++] = (struct iovec){all[i].data, all[i].bytes};
                high = end > high ? end : high;
            }
            if (!direct)
                parts[used_parts++] = (struct iovec){a->memory->window + (low - first), high - low};
            runs[used++] = (struct forebay_run){low, high - low};
        }
        int64_t n = used == 1 ? transfer_run(a->file, true, parts, used_parts, runs[0].offset)
                              : forebay.file_write_runs(a->file->data, parts, used_parts, runs, used);
        if (n < 0)
            return class_of(n);
    }
    return MPI_SUCCESS;
}

/* The aggregator's half of a round in which others read. The pieces are in the range from `low` to `high`. */
static int serve_read(struct access *a, int64_t count, bool direct, int64_t first, int64_t low, int64_t high) {
    struct located *all = a->memory->located;
    struct iovec parts[RUNS_MAX];
    for (int64_t i = 0; direct && i < count; i++)
        parts[i] = (struct iovec){all[i].data, all[i].bytes};
    if (!direct)
        parts[0] = (struct iovec){a->memory->window + (low - first), high - low};
    int64_t n = transfer_run(a->file, false, parts, direct ? (int)count : 1, low);
    /* What is behind the end of the file, or was not read, is zeros. */
    int64_t end = low + (n > 0 ? n : 0);
    for (int64_t i = count - 1; direct && i >= 0 && all[i].offset + all[i].bytes > end; i--) {
        int64_t good = end > all[i].offset ? end - all[i].offset : 0;
        memset(all[i].data + good, 0, all[i].bytes - good);
    }
    if (!direct && end < high)
        memset(a->memory->window + (end - first), 0, high - end);
    if (!direct)
        copy_window(a, false, count, first);
    return n < 0 ? class_of(n) : MPI_SUCCESS;
}

/* The aggregator's half of a round. Its window begins at `first`. */
static int serve(struct access *a, bool writes, int64_t first) {
    struct located *all = a->memory->located;
    int64_t count = locate(a), bytes = 0;
    if (count == 0)
        return MPI_SUCCESS;
    int64_t low = all[0].offset, high = low;
    for (int64_t i = 0; i < count; i++) {
        bytes += all[i].bytes;
        low = all[i].offset < low ? all[i].offset : low;
        high = all[i].offset + all[i].bytes > high ? all[i].offset + all[i].bytes : high;
    }
    /* To and from other nodes travels memory in one piece. */
    bool direct = count <= RUNS_MAX && bytes >= count * DIRECT_BYTES && (writes || bytes == high - low) &&
                  forebay.file_elsewhere(a->file->data) == 0;
    if (direct) {
        qsort(all, count, sizeof *all, by_offset);
        for (int64_t i = 1; i < count && direct; i++)
            direct = all[i - 1].offset + all[i - 1].bytes <= all[i].offset;
        /* Of pieces that overlap those of higher ranks must be copied last. */
        if (!direct)
            locate(a);
    }
    return writes ? serve_write(a, count, direct, first) : serve_read(a, count, direct, first, low, high);
}

static void copy_slices(struct access *a, bool to_packed) {
    for (int r = 0; r < a->file->size; r++) {
        char *slice = a->packed + a->slice[r], *data = a->memory->data[0] + a->data_at[0][r];
        if (a->data_bytes[0][r] > 0)
            memcpy(to_packed ? slice : data, to_packed ? data : slice, a->data_bytes[0][r]);
    }
}

/* Moves on to the next round in which any rank has data. */
static int one_round(struct access *a, bool writes, int64_t *which, int *result) {
    MPI_Comm comm = a->file->comm;
    int64_t round = *which;
    struct exchange *m = a->memory;
    char *own = NULL;
    bool good = list_pieces(a, round, &own);
    if (!good) {
        /* The others get no pieces from this rank, and then its failure. */
        memset(a->piece_words[0], 0, a->file->size * sizeof(int));
        memset(a->data_bytes[0], 0, a->file->size * sizeof(int));
    }
    good = exchange_counts(a) && good;
    int64_t mine[2] = {good ? MPI_SUCCESS : MPI_ERR_NO_MEM, -next_round(a, round + 1)}, all[2];
    if (mpi.Allreduce(mine, all, 2, MPI_INT64_T, MPI_MAX, comm) != MPI_SUCCESS)
        return MPI_ERR_INTERN;
    if (all[0] != MPI_SUCCESS)
        return (int)all[0];
    *which = -all[1];
    mpi.Alltoallv(m->pieces[0], a->piece_words[0], a->piece_at[0], MPI_INT64_T, m->pieces[1], a->piece_words[1],
                  a->piece_at[1], MPI_INT64_T, comm);
    bool copied = own == NULL;
    if (copied)
        own = m->data[0];
    if (writes) {
        if (copied)
            copy_slices(a, false);
        mpi.Alltoallv(own, a->data_bytes[0], a->data_at[0], MPI_BYTE, m->data[1], a->data_bytes[1], a->data_at[1],
                      MPI_BYTE, comm);
    }
    for (int g = 0; g < a->aggregators; g++) {
        int64_t first, last;
        window_of(a, g, round, &first, &last);
        if (rank_of(a, g) == a->file->rank && first < last) {
            int64_t start = choice_clock();
            int served = serve(a, writes, first);
            a->file->choice.file_ns += choice_clock() - start;
            *result = *result != MPI_SUCCESS ? *result : served;
        }
    }
    if (!writes) {
        mpi.Alltoallv(m->data[1], a->data_bytes[1], a->data_at[1], MPI_BYTE, own, a->data_bytes[0], a->data_at[0],
                      MPI_BYTE, comm);
        if (copied)
            copy_slices(a, true);
    }
    return MPI_SUCCESS;
}

/* Limits a read to the file's size, as rank 0 reads it; returns an error class. */
static int cut_to_size(struct access *a) {
    int64_t size = a->file->rank == 0 ? forebay.file_size(a->file->data) : 0;
    mpi.Bcast(&size, 1, MPI_INT64_T, 0, a->file->comm);
    if (size < 0)
        return class_of(size);
    int64_t left = view_bytes_before(a->view, size) - a->position;
    a->bytes = left < 0 ? 0 : left < a->bytes ? left : a->bytes;
    a->last = a->last < size ? a->last : size;
    return MPI_SUCCESS;
}

int two_phase(struct file *file, const struct view *view, bool writes, int64_t position, char *packed, int64_t bytes,
              const struct together *all, struct exchange *memory, int64_t *done) {
    struct access a = {
        .file = file, .view = view, .position = position, .packed = packed, .bytes = bytes, .memory = memory};
    *done = 0;
    if (all->code != MPI_SUCCESS)
        return all->code;
    a.first = all->first;
    a.last = all->last;
    int code = writes ? MPI_SUCCESS : cut_to_size(&a);
    if (code != MPI_SUCCESS || a.last <= a.first)
        return code;
    plan(&a, all->aggregators);
    bool has_memory = make(&a) && memory != NULL && (packed != NULL || bytes == 0);
    code = agree(file, has_memory ? MPI_SUCCESS : MPI_ERR_NO_MEM, 0);
    int result = MPI_SUCCESS;
    /* Round 0 always has data, since the range begins with the first byte of some rank. */
    for (int64_t round = 0; code == MPI_SUCCESS && round < INT64_MAX;)
        code = one_round(&a, writes, &round, &result);
    if (code == MPI_SUCCESS)
        code = agree(file, result, 0);
    if (code == MPI_SUCCESS)
        *done = a.bytes;
    discard(&a);
    return code;
}
