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
 * memory of messages directly; others through a copy of the window.
 *
 * If data are on other nodes, a thread moves the window of one round while the ranks exchange the data of another one: of
 * the next one in a write, of the one before in a read. It calls nothing of the MPI library. Data of this node are moved by
 * processors that the ranks need themselves.
 */
#include "driver.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "exchange.h"

enum {
    RUNS_MAX = 512,         /* of one call */
    DIRECT_BYTES = 1024,    /* mean length of pieces from which on they are not copied to a window */
    ALIGNMENT_BYTES = 4096, /* of domains, so that two aggregators do not share a page */
};
enum { PIECE_WORDS = sizeof(struct piece) / sizeof(int64_t) };

/* A round on one rank. In arrays, index 0 is for sending and 1 for receiving. */
struct round {
    int *piece_words[2], *piece_at[2], *data_bytes[2], *data_at[2]; /* a piece is PIECE_WORDS numbers */
    int64_t *sizes[2], *slice; /* two numbers for each rank; the start of a rank's slice in `packed` */
    char *own;                 /* where the messages of this rank's data begin; NULL: in the copy of them */
    struct exchange *memory;
    const struct access *access;
    bool serves;               /* this rank has a window, which begins at `first` */
    int64_t first;
    bool is_moving;            /* by `thread`; else it was moved */
    pthread_t thread;
    int result;                /* of moving it */
    int64_t file_ns;           /* that it took */
};

/* The state of one access on one rank. */
struct access {
    struct file *file;
    const struct view *view;
    bool writes;
    int64_t first, last, domain, window; /* of the file */
    int64_t position, bytes;             /* this rank's part of the view's data */
    char *packed;
    int aggregators;
    bool overlaps;          /* there is a second round */
    struct round rounds[2];
};

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

static bool make_round(struct round *r, const struct access *a, struct exchange *memory) {
    size_t size = a->file->size;
    r->access = a;
    r->memory = memory;
    bool good = (r->slice = calloc(size, sizeof *r->slice)) != NULL && memory != NULL;
    for (int way = 0; way < 2; way++) {
        int **counts[4] = {&r->piece_words[way], &r->piece_at[way], &r->data_bytes[way], &r->data_at[way]};
        for (int i = 0; i < 4; i++)
            good = (*counts[i] = calloc(size, sizeof(int))) != NULL && good;
        good = (r->sizes[way] = calloc(2 * size, sizeof(int64_t))) != NULL && good;
    }
    return good;
}

static void discard_round(struct round *r) {
    for (int way = 0; way < 2; way++) {
        free(r->piece_words[way]);
        free(r->piece_at[way]);
        free(r->data_bytes[way]);
        free(r->data_at[way]);
        free(r->sizes[way]);
    }
    free(r->slice);
}

/*
 * Lists this rank's runs in every aggregator's window of a round, and the slices of its data that are for them.
 */
static bool list_pieces(const struct access *a, struct round *r, int64_t round) {
    int64_t count = 0, data = 0, least = -1, most = 0;
    size_t size = a->file->size;
    struct exchange *m = r->memory;
    memset(r->piece_words[0], 0, size * sizeof(int));
    memset(r->data_bytes[0], 0, size * sizeof(int));
    for (int g = 0; g < a->aggregators; g++) {
        int64_t first, last, from, to;
        window_of(a, g, round, &first, &last);
        data_of(a, first, last, &from, &to);
        if (from == to)
            continue;
        int rank = rank_of(a, g);
        struct walk runs;
        walk_start(&runs, a->view->file, a->view->disp, from);
        r->piece_at[0][rank] = (int)(count * PIECE_WORDS);
        for (int64_t at = from; at < to; count++) {
            if (!grow(&m->pieces[0], &m->piece_room[0], count + 1, sizeof(struct piece)))
                return false;
            struct piece *piece = &m->pieces[0][count];
            piece->offset = walk_next(&runs, to - at, &piece->bytes);
            at += piece->bytes;
        }
        r->piece_words[0][rank] = (int)(count * PIECE_WORDS) - r->piece_at[0][rank];
        r->slice[rank] = from - a->position;
        r->data_at[0][rank] = (int)data;
        r->data_bytes[0][rank] = (int)(to - from);
        data += to - from;
        /* Aggregators serve one part of the file after the other, and so do these bytes. */
        least = least < 0 ? r->slice[rank] : least;
        most = r->slice[rank] - least;
    }
    r->own = NULL;
    if (data > 0 && most <= INT32_MAX) {
        r->own = a->packed + least;
        for (size_t i = 0; i < size; i++)
            r->data_at[0][i] = r->data_bytes[0][i] > 0 ? (int)(r->slice[i] - least) : 0;
    }
    return (r->own != NULL || renew(&m->data[0], &m->data_room[0], data + 1)) &&
           grow(&m->pieces[0], &m->piece_room[0], 1, sizeof(struct piece));
}

/* Sends to each rank the sizes of this rank's data for it, and allocates memory for the data to receive. */
static bool exchange_counts(const struct access *a, struct round *r) {
    int size = a->file->size;
    int64_t pieces = 0, data = 0;
    struct exchange *m = r->memory;
    for (int i = 0; i < size; i++) {
        r->sizes[0][2 * i] = r->piece_words[0][i];
        r->sizes[0][2 * i + 1] = r->data_bytes[0][i];
    }
    mpi.Alltoall(r->sizes[0], 2, MPI_INT64_T, r->sizes[1], 2, MPI_INT64_T, a->file->comm);
    for (int i = 0; i < size; i++) {
        r->piece_at[1][i] = (int)pieces;
        r->data_at[1][i] = (int)data;
        r->piece_words[1][i] = (int)r->sizes[1][2 * i];
        r->data_bytes[1][i] = (int)r->sizes[1][2 * i + 1];
        pieces += r->sizes[1][2 * i];
        data += r->sizes[1][2 * i + 1];
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
static int64_t locate(const struct round *r) {
    int64_t count = 0;
    struct exchange *m = r->memory;
    char *data = m->data[1];
    for (int i = 0; i < r->access->file->size; i++)
        for (int64_t left = r->piece_words[1][i] / PIECE_WORDS; left > 0; left--, count++) {
            m->located[count] = (struct located){m->pieces[1][count].offset, m->pieces[1][count].bytes, data};
            data += m->pieces[1][count].bytes;
        }
    return count;
}

/* Copies between the others' data and the window. */
static void copy_window(const struct round *r, int64_t count) {
    bool writes = r->access->writes;
    for (int64_t i = 0; i < count; i++) {
        struct located *piece = &r->memory->located[i];
        char *here = r->memory->window + (piece->offset - r->first);
        memcpy(writes ? here : piece->data, writes ? piece->data : here, piece->bytes);
    }
}

/* The aggregator's half of a round in which others write. */
static int serve_write(const struct round *r, int64_t count, bool direct) {
    struct file *file = r->access->file;
    struct located *all = r->memory->located;
    if (!direct) {
        copy_window(r, count);
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
                parts[used_parts++] = (struct iovec){r->memory->window + (low - r->first), high - low};
            runs[used++] = (struct forebay_run){low, high - low};
        }
        int64_t n = used == 1 ? transfer_run(file, true, parts, used_parts, runs[0].offset)
                              : forebay.file_write_runs(file->data, parts, used_parts, runs, used);
        if (n < 0)
            return class_of(n);
    }
    return MPI_SUCCESS;
}

/* The aggregator's half of a round in which others read. The pieces are in the range from `low` to `high`. */
static int serve_read(const struct round *r, int64_t count, bool direct, int64_t low, int64_t high) {
    struct located *all = r->memory->located;
    struct iovec parts[RUNS_MAX];
    for (int64_t i = 0; direct && i < count; i++)
        parts[i] = (struct iovec){all[i].data, all[i].bytes};
    if (!direct)
        parts[0] = (struct iovec){r->memory->window + (low - r->first), high - low};
    int64_t n = transfer_run(r->access->file, false, parts, direct ? (int)count : 1, low);
    /* What is behind the end of the file, or was not read, is zeros. */
    int64_t end = low + (n > 0 ? n : 0);
    for (int64_t i = count - 1; direct && i >= 0 && all[i].offset + all[i].bytes > end; i--) {
        int64_t good = end > all[i].offset ? end - all[i].offset : 0;
        memset(all[i].data + good, 0, all[i].bytes - good);
    }
    if (!direct && end < high)
        memset(r->memory->window + (end - r->first), 0, high - end);
    if (!direct)
        copy_window(r, count);
    return n < 0 ? class_of(n) : MPI_SUCCESS;
}

/* The aggregator's half of a round. */
static int serve(const struct round *r) {
    const struct access *a = r->access;
    struct located *all = r->memory->located;
    int64_t count = locate(r), bytes = 0;
    if (count == 0)
        return MPI_SUCCESS;
    int64_t low = all[0].offset, high = low;
    for (int64_t i = 0; i < count; i++) {
        bytes += all[i].bytes;
        low = all[i].offset < low ? all[i].offset : low;
        high = all[i].offset + all[i].bytes > high ? all[i].offset + all[i].bytes : high;
    }
    /* To and from other nodes travels memory in one piece. */
    bool direct = count <= RUNS_MAX && bytes >= count * DIRECT_BYTES && (a->writes || bytes == high - low) &&
                  forebay.file_elsewhere(a->file->data) == 0;
    if (direct) {
        qsort(all, count, sizeof *all, by_offset);
        for (int64_t i = 1; i < count && direct; i++)
            direct = all[i - 1].offset + all[i - 1].bytes <= all[i].offset;
        /* Of pieces that overlap those of higher ranks must be copied last. */
        if (!direct)
            locate(r);
    }
    return a->writes ? serve_write(r, count, direct) : serve_read(r, count, direct, low, high);
}

static void copy_slices(const struct access *a, struct round *r) {
    for (int i = 0; i < a->file->size; i++) {
        char *slice = a->packed + r->slice[i], *data = r->memory->data[0] + r->data_at[0][i];
        if (r->data_bytes[0][i] > 0)
            memcpy(a->writes ? data : slice, a->writes ? slice : data, r->data_bytes[0][i]);
    }
}

/* Tells the aggregators the pieces of a round, and finds the next one in which any rank has data. */
static int begin_round(const struct access *a, struct round *r, int64_t *which) {
    MPI_Comm comm = a->file->comm;
    int64_t round = *which;
    bool good = list_pieces(a, r, round);
    if (!good) {
        /* The others get no pieces from this rank, and then its failure. */
        memset(r->piece_words[0], 0, a->file->size * sizeof(int));
        memset(r->data_bytes[0], 0, a->file->size * sizeof(int));
    }
    good = exchange_counts(a, r) && good;
    int64_t mine[2] = {good ? MPI_SUCCESS : MPI_ERR_NO_MEM, -next_round(a, round + 1)}, all[2];
    if (mpi.Allreduce(mine, all, 2, MPI_INT64_T, MPI_MAX, comm) != MPI_SUCCESS)
        return MPI_ERR_INTERN;
    if (all[0] != MPI_SUCCESS)
        return (int)all[0];
    *which = -all[1];
    mpi.Alltoallv(r->memory->pieces[0], r->piece_words[0], r->piece_at[0], MPI_INT64_T, r->memory->pieces[1],
                  r->piece_words[1], r->piece_at[1], MPI_INT64_T, comm);
    r->serves = false;
    for (int g = 0; g < a->aggregators; g++) {
        int64_t first, last;
        window_of(a, g, round, &first, &last);
        if (rank_of(a, g) == a->file->rank && first < last) {
            r->serves = true;
            r->first = first;
        }
    }
    return MPI_SUCCESS;
}

/* Sends a round's data: to the aggregators in a write, from them in a read. */
static void exchange_data(const struct access *a, struct round *r) {
    char *own = r->own != NULL ? r->own : r->memory->data[0], *others = r->memory->data[1];
    if (a->writes && r->own == NULL)
        copy_slices(a, r);
    if (a->writes)
        mpi.Alltoallv(own, r->data_bytes[0], r->data_at[0], MPI_BYTE, others, r->data_bytes[1], r->data_at[1], MPI_BYTE,
                      a->file->comm);
    else
        mpi.Alltoallv(others, r->data_bytes[1], r->data_at[1], MPI_BYTE, own, r->data_bytes[0], r->data_at[0], MPI_BYTE,
                      a->file->comm);
    if (!a->writes && r->own == NULL)
        copy_slices(a, r);
}

static void *move_window(void *round) {
    struct round *r = round;
    int64_t start = choice_clock();
    r->result = serve(r);
    r->file_ns = choice_clock() - start;
    return NULL;
}

/* Moves this rank's window of a round; if `aside`, by a thread if there can be one. `finish_moving` follows. */
static void start_moving(struct round *r, bool aside) {
    r->is_moving = false;
    r->result = MPI_SUCCESS;
    r->file_ns = 0;
    if (!r->serves)
        return;
    if (aside) {
        /* The program's handlers run on its own threads. */
        sigset_t every, before;
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &before);
        r->is_moving = pthread_create(&r->thread, NULL, move_window, r) == 0;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    if (!r->is_moving)
        move_window(r);
}

/* Waits until the window is moved, and keeps the first error in `*result`. */
static void finish_moving(struct access *a, struct round *r, int *result) {
    if (r->is_moving)
        pthread_join(r->thread, NULL);
    r->is_moving = false;
    a->file->choice.file_ns += r->file_ns;
    *result = *result != MPI_SUCCESS ? *result : r->result;
}

/* An error class that is the same on all ranks; that of this rank's own windows is in `*result`. */
static int write_rounds(struct access *a, int *result) {
    struct round *moving = NULL;
    int code = MPI_SUCCESS;
    /* Round 0 always has data, since the range begins with the first byte of some rank. */
    int64_t which = 0;
    for (int slot = 0; code == MPI_SUCCESS && which < INT64_MAX; slot ^= a->overlaps) {
        struct round *r = &a->rounds[slot];
        code = begin_round(a, r, &which);
        if (code == MPI_SUCCESS)
            exchange_data(a, r);
        if (moving != NULL)
            finish_moving(a, moving, result);
        moving = NULL;
        if (code == MPI_SUCCESS) {
            start_moving(r, a->overlaps && which < INT64_MAX);
            moving = r;
        }
    }
    if (moving != NULL)
        finish_moving(a, moving, result);
    return code;
}

static int read_rounds(struct access *a, int *result) {
    int64_t which = 0;
    struct round *r = &a->rounds[0];
    int code = begin_round(a, r, &which);
    if (code == MPI_SUCCESS)
        start_moving(r, a->overlaps && which < INT64_MAX);
    for (int slot = 0; code == MPI_SUCCESS;) {
        bool is_last = which == INT64_MAX;
        struct round *next = &a->rounds[slot ^= a->overlaps];
        if (a->overlaps && !is_last)
            code = begin_round(a, next, &which);
        finish_moving(a, r, result);
        if (code != MPI_SUCCESS)
            break;
        if (a->overlaps && !is_last)
            start_moving(next, true);
        exchange_data(a, r);
        if (is_last)
            break;
        if (!a->overlaps) {
            code = begin_round(a, next, &which);
            if (code == MPI_SUCCESS)
                start_moving(next, false);
        }
        r = next;
    }
    return code;
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
        .file = file, .view = view, .writes = writes, .position = position, .packed = packed, .bytes = bytes};
    *done = 0;
    if (all->code != MPI_SUCCESS)
        return all->code;
    a.first = all->first;
    a.last = all->last;
    int code = writes ? MPI_SUCCESS : cut_to_size(&a);
    if (code != MPI_SUCCESS || a.last <= a.first)
        return code;
    plan(&a, all->aggregators);
    /* The same on all ranks, as hints are rank 0's. */
    a.overlaps = file->far && a.domain > a.window;
    struct exchange *second = a.overlaps ? exchange_take() : NULL;
    bool has_memory = make_round(&a.rounds[0], &a, memory) && (packed != NULL || bytes == 0);
    has_memory = (!a.overlaps || make_round(&a.rounds[1], &a, second)) && has_memory;
    code = agree(file, has_memory ? MPI_SUCCESS : MPI_ERR_NO_MEM, 0);
    int result = MPI_SUCCESS;
    if (code == MPI_SUCCESS)
        code = writes ? write_rounds(&a, &result) : read_rounds(&a, &result);
    if (code == MPI_SUCCESS)
        code = agree(file, result, 0);
    if (code == MPI_SUCCESS)
        *done = a.bytes;
    discard_round(&a.rounds[0]);
    discard_round(&a.rounds[1]);
    exchange_give_back(second);
    return code;
}
