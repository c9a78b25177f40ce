/*
 * Two-phase collective access: ranks send their pieces to aggregators, and each aggregator moves one window of the file
 * after the other in long runs.
 *
 * The range of bytes that all ranks touch is divided into one domain for each aggregator. In each round every
 * aggregator serves one window of cb_buffer_size bytes of its domain. A view's displacements rise, so a rank's data for
 * a window are one slice of its data and the list of runs that say where the slice goes. Rounds in which no rank has
 * data are skipped. Windows with gaps are written run by run: nothing is read to be written back. Where two ranks write
 * one byte, that of the higher rank stays.
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
    struct piece *pieces[2];
    char *data[2], *buffer;
    int64_t piece_room[2], data_room[2];
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
    bool good = (a->buffer = malloc(a->window)) != NULL && (a->slice = calloc(size, sizeof *a->slice)) != NULL;
    for (int way = 0; way < 2; way++) {
        int **counts[4] = {&a->piece_words[way], &a->piece_at[way], &a->data_bytes[way], &a->data_at[way]};
        for (int i = 0; i < 4; i++)
            good = (*counts[i] = calloc(size, sizeof(int))) != NULL && good;
        good = (a->sizes[way] = calloc(2 * size, sizeof(int64_t))) != NULL && good;
    }
    return good;
}

static void discard(struct access *a) {
    for (int way = 0; way < 2; way++) {
        free(a->piece_words[way]);
        free(a->piece_at[way]);
        free(a->data_bytes[way]);
        free(a->data_at[way]);
        free(a->sizes[way]);
        free(a->pieces[way]);
        free(a->data[way]);
    }
    free(a->buffer);
    free(a->slice);
}

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

/* Lists this rank's runs in every aggregator's window of a round. */
static bool list_pieces(struct access *a, int64_t round) {
    int64_t count = 0, data = 0;
    size_t size = a->file->size;
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
            if (!grow(&a->pieces[0], &a->piece_room[0], count + 1, sizeof(struct piece)))
                return false;
            struct piece *piece = &a->pieces[0][count];
            piece->offset = walk_next(&runs, to - at, &piece->bytes);
            at += piece->bytes;
        }
        a->piece_words[0][rank] = (int)(count * PIECE_WORDS) - a->piece_at[0][rank];
        a->slice[rank] = from - a->position;
        a->data_at[0][rank] = (int)data;
        a->data_bytes[0][rank] = (int)(to - from);
        data += to - from;
    }
    return grow(&a->data[0], &a->data_room[0], data + 1, 1) &&
           grow(&a->pieces[0], &a->piece_room[0], 1, sizeof(struct piece));
}

/* Sends to each rank the sizes of this rank's data for it, and allocates memory for the data to receive. */
static bool exchange_counts(struct access *a) {
    int size = a->file->size;
    int64_t pieces = 0, data = 0;
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
    /* The lists of a round must fit an int too. */
    return pieces < INT32_MAX && grow(&a->data[1], &a->data_room[1], data + 1, 1) &&
           grow(&a->pieces[1], &a->piece_room[1], pieces / PIECE_WORDS + 1, sizeof(struct piece));
}

static int by_offset(const void *left, const void *right) {
    int64_t a = ((const struct piece *)left)->offset, b = ((const struct piece *)right)->offset;
    return a < b ? -1 : a > b;
}

/* Copies between the others' data and the window that begins at `first`; returns the number of pieces. */
static int64_t place(struct access *a, bool writes, int64_t first) {
    int64_t count = 0;
    char *data = a->data[1];
    for (int r = 0; r < a->file->size; r++)
        for (int64_t left = a->piece_words[1][r] / PIECE_WORDS; left > 0; left--) {
            const struct piece *piece = &a->pieces[1][count++];
            char *here = a->buffer + (piece->offset - first);
            memcpy(writes ? here : data, writes ? data : here, piece->bytes);
            data += piece->bytes;
        }
    return count;
}

/* The aggregator's half of a round. */
static int serve(struct access *a, bool writes, int64_t first, int64_t last) {
    int64_t count = 0, n = 0, low = last, high = first;
    for (int r = 0; r < a->file->size; r++)
        count += a->piece_words[1][r] / PIECE_WORDS;
    if (count == 0)
        return MPI_SUCCESS;
    if (!writes) {
        for (int64_t i = 0; i < count; i++) {
            const struct piece *piece = &a->pieces[1][i];
            low = piece->offset < low ? piece->offset : low;
            high = piece->offset + piece->bytes > high ? piece->offset + piece->bytes : high;
        }
        struct iovec whole = {a->buffer + (low - first), high - low};
        n = transfer_run(a->file, false, &whole, 1, low);
        if (n >= 0 && n < high - low)
            memset(a->buffer + (low - first) + n, 0, high - low - n);
        place(a, false, first);
        return n < 0 ? class_of(n) : MPI_SUCCESS;
    }
    place(a, true, first);
    qsort(a->pieces[1], count, sizeof(struct piece), by_offset);
    for (int64_t i = 0; i < count && n >= 0;) {
        struct forebay_run runs[RUNS_MAX];
        struct iovec parts[RUNS_MAX];
        int used = 0;
        for (; i < count && used < RUNS_MAX; used++) {
            low = a->pieces[1][i].offset;
            high = low;
            for (; i < count && a->pieces[1][i].offset <= high; i++) {
                int64_t end = a->pieces[1][i].offset + a->pieces[1][i].bytes;
                high = end > high ? end : high;
            }
            runs[used] = (struct forebay_run){low, high - low};
            parts[used] = (struct iovec){a->buffer + (low - first), high - low};
        }
        n = used == 1 ? transfer_run(a->file, true, parts, 1, low)
                      : forebay.file_write_runs(a->file->data, parts, used, runs, used);
    }
    return n < 0 ? class_of(n) : MPI_SUCCESS;
}

static void copy_slices(struct access *a, bool to_packed) {
    for (int r = 0; r < a->file->size; r++) {
        char *slice = a->packed + a->slice[r], *data = a->data[0] + a->data_at[0][r];
        if (a->data_bytes[0][r] > 0)
            memcpy(to_packed ? slice : data, to_packed ? data : slice, a->data_bytes[0][r]);
    }
}

/* Moves on to the next round in which any rank has data. */
static int one_round(struct access *a, bool writes, int64_t *which, int *result) {
    MPI_Comm comm = a->file->comm;
    int64_t round = *which;
    bool good = list_pieces(a, round);
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
    mpi.Alltoallv(a->pieces[0], a->piece_words[0], a->piece_at[0], MPI_INT64_T, a->pieces[1], a->piece_words[1],
                  a->piece_at[1], MPI_INT64_T, comm);
    if (writes) {
        copy_slices(a, false);
        mpi.Alltoallv(a->data[0], a->data_bytes[0], a->data_at[0], MPI_BYTE, a->data[1], a->data_bytes[1],
                      a->data_at[1], MPI_BYTE, comm);
    }
    for (int g = 0; g < a->aggregators; g++) {
        int64_t first, last;
        window_of(a, g, round, &first, &last);
        if (rank_of(a, g) == a->file->rank && first < last) {
            int64_t start = choice_clock();
            int served = serve(a, writes, first, last);
            a->file->choice.file_ns += choice_clock() - start;
            *result = *result != MPI_SUCCESS ? *result : served;
        }
    }
    if (!writes) {
        mpi.Alltoallv(a->data[1], a->data_bytes[1], a->data_at[1], MPI_BYTE, a->data[0], a->data_bytes[0],
                      a->data_at[0], MPI_BYTE, comm);
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
              const struct together *all, int64_t *done) {
    struct access a = {.file = file, .view = view, .position = position, .packed = packed, .bytes = bytes};
    *done = 0;
    if (all->code != MPI_SUCCESS)
        return all->code;
    a.first = all->first;
    a.last = all->last;
    int code = writes ? MPI_SUCCESS : cut_to_size(&a);
    if (code != MPI_SUCCESS || a.last <= a.first)
        return code;
    plan(&a, all->aggregators);
    bool has_memory = make(&a) && (packed != NULL || bytes == 0);
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
