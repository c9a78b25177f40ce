/*
 * Reads and writes: from a buffer and a datatype to bytes of a view, and from those to calls on the file.
 *
 * Memory and file are each a walk over blocks. One range of the file is one preadv or pwritev of all pieces of memory
 * that belong to it. Many ranges are passed to libforebay.so as a list, which moves the ranges in one backing file
 * together. Gaps are never written. So no data that another rank wrote meanwhile is overwritten, and no lock is needed.
 * In atomic mode an access holds a lock on all bytes that it touches (shared.c).
 */
#include "driver.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    PARTS_MAX = 1024,            /* pieces of memory in one call, the kernel's limit */
    RUNS_MAX = 1024,             /* ranges of the file in one call, so that the lists stay in the cache */
    CALL_BYTES_MAX = 0x40000000, /* largest transfer of one system call */
};

/* Transfers all bytes of `parts` at `offset`; fewer at the end of the file, or a negative errno. Changes `parts`. */
int64_t transfer_run(struct file *file, bool writes, struct iovec *parts, int count, int64_t offset) {
    int64_t done = 0;
    if (file->fd < 0)
        return writes ? forebay.file_pwritev(file->data, parts, count, offset)
                      : forebay.file_preadv(file->data, parts, count, offset);
    while (count > 0) {
        int64_t n;
        if (count == 1 || parts->iov_len > CALL_BYTES_MAX) {
            size_t bytes = parts->iov_len > CALL_BYTES_MAX ? CALL_BYTES_MAX : parts->iov_len;
            n = writes ? pwrite(file->fd, parts->iov_base, bytes, offset + done)
                       : pread(file->fd, parts->iov_base, bytes, offset + done);
        } else {
            n = writes ? pwritev(file->fd, parts, count, offset + done) : preadv(file->fd, parts, count, offset + done);
        }
        if (n < 0) {
            if (errno == EINTR)
                continue;
            return -errno;
        }
        if (n == 0 && parts->iov_len > 0)
            return writes ? -EIO : done;
        done += n;
        while (count > 0 && (size_t)n >= parts->iov_len) {
            n -= parts->iov_len;
            parts++;
            count--;
        }
        if (count > 0) {
            parts->iov_base = (char *)parts->iov_base + n;
            parts->iov_len -= n;
        }
    }
    return done;
}

/* Ranges of the file and the memory that belongs to them, at most as many as one call accepts. */
struct batch {
    int run_count, part_count;
    int64_t bytes;
    struct forebay_run runs[RUNS_MAX];
    struct iovec parts[PARTS_MAX];
};

/* Adds a range and its memory, and joins neighbours. False when the batch is full. */
static bool batch_add(struct batch *batch, int64_t offset, int64_t bytes, struct walk *memory) {
    struct forebay_run *last = batch->run_count > 0 ? &batch->runs[batch->run_count - 1] : NULL;
    if (last != NULL && last->offset + last->bytes == offset)
        last->bytes += bytes;
    else
        batch->runs[batch->run_count++] = (struct forebay_run){offset, bytes};
    while (bytes > 0) {
        int64_t here;
        char *address = (char *)(intptr_t)walk_next(memory, bytes, &here);
        struct iovec *part = batch->part_count > 0 ? &batch->parts[batch->part_count - 1] : NULL;
        if (part != NULL && (char *)part->iov_base + part->iov_len == address)
            part->iov_len += here;
        else
            batch->parts[batch->part_count++] = (struct iovec){address, here};
        batch->bytes += here;
        bytes -= here;
    }
    return batch->run_count < RUNS_MAX && batch->part_count < PARTS_MAX;
}

/* The next ranges with their memory, up to the given number of ranges and bytes. */
static void batch_fill(struct batch *batch, struct walk *runs, struct walk *memory, int64_t bytes, int most) {
    batch->run_count = batch->part_count = 0;
    batch->bytes = 0;
    bool room = true;
    while (room && batch->bytes < bytes) {
        /* The part of a range whose memory is in one piece. */
        struct walk ahead = *memory;
        int64_t piece, run;
        walk_next(&ahead, bytes - batch->bytes, &piece);
        int64_t at = walk_next(runs, piece, &run);
        room = batch_add(batch, at, run, memory) && batch->run_count < most;
    }
}

static int move(struct file *file, const struct view *view, bool writes, int64_t position, void *buffer, int64_t bytes,
                const struct flat *memory, int64_t *done) {
    struct walk runs, pieces;
    struct batch batch;
    int most = !writes && strcmp(file->hints[HINT_romio_ds_read], "disable") == 0 ? 1 : RUNS_MAX;
    walk_start(&runs, view->file, view->disp, position);
    walk_start(&pieces, memory, (int64_t)(intptr_t)buffer, 0);
    while (*done < bytes) {
        batch_fill(&batch, &runs, &pieces, bytes - *done, most);
        int64_t n;
        if (batch.run_count == 1)
            n = transfer_run(file, writes, batch.parts, batch.part_count, batch.runs[0].offset);
        else if (writes)
            n = forebay.file_write_runs(file->data, batch.parts, batch.part_count, batch.runs, batch.run_count);
        else
            n = forebay.file_read_runs(file->data, batch.parts, batch.part_count, batch.runs, batch.run_count);
        if (n < 0)
            return class_of(n);
        *done += n;
        if (n < batch.bytes)
            return MPI_SUCCESS; /* the end of the file */
    }
    return MPI_SUCCESS;
}

int transfer(struct file *file, const struct view *view, bool writes, int64_t position, void *buffer, int64_t count,
             const struct flat *memory, int64_t *done) {
    *done = 0;
    int64_t bytes = count * memory->size;
    if (bytes == 0)
        return MPI_SUCCESS;
    if (!file->atomic)
        return move(file, view, writes, position, buffer, bytes, memory, done);
    int64_t first, end;
    uint64_t lock = 0;
    int code = view_span(view, position, bytes, &first, &end);
    if (code == MPI_SUCCESS)
        code = shared_lock(file, writes, first, end - 1, &lock);
    if (code != MPI_SUCCESS)
        return code;
    code = move(file, view, writes, position, buffer, bytes, memory, done);
    int unlocked = shared_unlock(file, lock);
    return code != MPI_SUCCESS ? code : unlocked;
}

static const struct flat bytes_flat = {.size = 1,
                                       .extent = 1,
                                       .count = 1,
                                       .blocks = (struct block[]){{0, 1}},
                                       .before = (int64_t[]){0},
                                       .dense = true,
                                       .rising = true,
                                       .apart = true};

/*
 * `transfer` for data with another representation in the file, where an item takes `item` bytes. Also returns the
 * number of bytes in memory.
 */
static int transfer_converted(struct file *file, const struct view *view, bool writes, int64_t position, void *buffer,
                              int64_t count, MPI_Datatype type, int64_t item, int64_t *done, int64_t *in_memory) {
    int64_t bytes = count * item;
    *done = *in_memory = 0;
    if (bytes == 0)
        return MPI_SUCCESS;
    char *copy = malloc(bytes);
    if (copy == NULL)
        return MPI_ERR_NO_MEM;
    int code = MPI_SUCCESS;
    if (writes)
        code = datarep_convert(view->rep, true, buffer, count, type, item, copy, bytes, in_memory);
    if (code == MPI_SUCCESS)
        code = transfer(file, view, writes, position, copy, bytes, &bytes_flat, done);
    if (code == MPI_SUCCESS && !writes && *done > 0)
        code = datarep_convert(view->rep, false, buffer, count, type, item, copy, *done, in_memory);
    free(copy);
    return code;
}

/* Copies `bytes` bytes of a buffer to the places of a walk over memory. */
static void copy_out(struct walk *memory, const char *from, int64_t bytes) {
    while (bytes > 0) {
        int64_t here;
        char *to = (char *)(intptr_t)walk_next(memory, bytes, &here);
        memcpy(to, from, here);
        from += here;
        bytes -= here;
    }
}

/* Transfers through aggregators, for which the memory must be one piece. */
static int transfer_together(struct file *file, const struct view *view, bool writes, int64_t position, void *buffer,
                             int64_t count, const struct flat *memory, const struct together *all, int64_t *done) {
    int64_t bytes = all->code == MPI_SUCCESS ? count * memory->size : 0;
    bool copied = bytes > 0 && !memory->dense && !(memory->count == 1 && count == 1);
    char *packed = bytes > 0 ? (char *)buffer + memory->blocks[0].offset : NULL;
    struct walk pieces;
    if (bytes > 0)
        walk_start(&pieces, memory, (int64_t)(intptr_t)buffer, 0);
    struct exchange *exchange = exchange_take();
    if (copied)
        packed = exchange_packed(exchange, bytes);
    if (copied && packed != NULL && writes)
        for (int64_t at = 0, here; at < bytes; at += here) {
            const char *from = (const char *)(intptr_t)walk_next(&pieces, bytes - at, &here);
            memcpy(packed + at, from, here);
        }
    int code = two_phase(file, view, writes, position, packed, bytes, all, exchange, done);
    if (copied && packed != NULL && !writes && *done > 0)
        copy_out(&pieces, packed, *done);
    exchange_give_back(exchange);
    return code;
}

/* Checks that need no transfer. */
static int check(struct file *file, bool writes, enum pointer pointer, int64_t offset, const void *buffer, int64_t count,
                 MPI_Datatype type, const struct flat **memory, int64_t *item) {
    if (writes && (file->amode & MPI_MODE_RDONLY))
        return MPI_ERR_READ_ONLY;
    if (!writes && (file->amode & MPI_MODE_WRONLY))
        return MPI_ERR_ACCESS;
    if ((file->amode & MPI_MODE_SEQUENTIAL) && pointer != SHARED && pointer != ORDERED)
        return MPI_ERR_UNSUPPORTED_OPERATION;
    if (count < 0)
        return MPI_ERR_COUNT;
    if (pointer == AT_OFFSET && offset < 0)
        return MPI_ERR_ARG;
    int code = flat_of(type, file->comm, memory);
    if (code != MPI_SUCCESS)
        return code;
    *item = (*memory)->size;
    if (file->view.rep != NULL) {
        const struct flat *in_file;
        struct flat *own;
        code = flat_in_file(type, file->view.rep, file->comm, &in_file, &own);
        if (code != MPI_SUCCESS)
            return code;
        *item = in_file->size;
        if (own != NULL)
            flat_free(own);
        /* The program may have registered a function for one direction only. */
        if (*item != (*memory)->size && !datarep_converts(file->view.rep, writes))
            return MPI_ERR_CONVERSION;
    }
    int64_t larger = *item > (*memory)->size ? *item : (*memory)->size;
    if (larger > 0 && count > INT64_MAX / larger)
        return MPI_ERR_COUNT;
    int64_t bytes = count * *item;
    if (bytes % file->view.etype_size != 0)
        return MPI_ERR_IO;
    if (bytes > 0 && buffer == MPI_BOTTOM && (*memory)->blocks[0].offset == 0)
        return MPI_ERR_BUFFER;
    if (file->view.file->size == 0 && bytes > 0)
        return MPI_ERR_IO;
    if ((pointer == SHARED || pointer == ORDERED) && !shared_there(file))
        return MPI_ERR_UNSUPPORTED_OPERATION;
    return MPI_SUCCESS;
}

/*
 * Where an access of `bytes` bytes begins in the view's data, and which part of the file it touches. MPI_ERR_ARG when
 * that exceeds an offset.
 */
static int reach(const struct view *view, int64_t offset, int64_t bytes, int64_t *position, struct together *mine) {
    if (offset < 0 || offset > (INT64_MAX - bytes) / view->etype_size)
        return MPI_ERR_ARG;
    *position = offset * view->etype_size;
    mine->bytes = bytes;
    /* In a view without gaps an access is one run. */
    mine->run = view_run(view) < bytes ? view_run(view) : bytes;
    return bytes > 0 ? view_span(view, *position, bytes, &mine->first, &mine->last) : MPI_SUCCESS;
}

int access_file(struct file *file, bool writes, enum pointer pointer, int flags, int64_t offset, void *buffer,
                int64_t count, MPI_Datatype type, int64_t *bytes) {
    const struct flat *memory = NULL;
    *bytes = 0;
    bool together = (flags & COLLECTIVE) && may_two_phase(file, writes);
    struct together all;
    if (pointer == ORDERED)
        shared_by_all(file);
    int64_t item = 0, moved = 0;
    int code = check(file, writes, pointer, offset, buffer, count, type, &memory, &item);
    int64_t asked = code == MPI_SUCCESS ? count * item : 0;
    int64_t etypes = code == MPI_SUCCESS ? asked / file->view.etype_size : 0;
    if (pointer == ORDERED) {
        /* Ranks get their positions in rank order. A rank with an error gets none. */
        int64_t before = 0, start = 0;
        if (!shared_there(file))
            return code;
        mpi.Exscan(&etypes, &before, 1, MPI_INT64_T, MPI_SUM, file->comm);
        if (file->rank == 0)
            before = 0;
        if (file->rank == file->size - 1) {
            int moved = shared_move(file, before + etypes, &start);
            if (moved != MPI_SUCCESS)
                start = -moved; /* classes are positive */
        }
        mpi.Bcast(&start, 1, MPI_INT64_T, file->size - 1, file->comm);
        if (start < 0 && code == MPI_SUCCESS)
            code = (int)-start;
        offset = start + before;
    }
    if (code != MPI_SUCCESS && !together)
        return code;
    struct together mine = {.code = code};
    int64_t position = 0;
    if (pointer == SHARED)
        code = shared_move(file, etypes, &offset);
    pthread_mutex_lock(&file->lock);
    struct view view = file->view;
    if (pointer == INDIVIDUAL)
        offset = file->position;
    if (code == MPI_SUCCESS)
        mine.code = code = reach(&view, offset, asked, &position, &mine);
    if (pointer == INDIVIDUAL && writes && code == MPI_SUCCESS)
        file->position += etypes;
    pthread_mutex_unlock(&file->lock);
    bool exchanged = together;
    together = together && wants_two_phase(file, writes, &mine, &all);
    int64_t start = exchanged && choice_is_known(file) ? choice_clock() : 0;
    if (together && all.code != MPI_SUCCESS && pointer == INDIVIDUAL && writes && code == MPI_SUCCESS) {
        /* Wrong arguments of another rank prevent this one's write, so its position stays. */
        pthread_mutex_lock(&file->lock);
        if (file->position == offset + etypes)
            file->position = offset;
        pthread_mutex_unlock(&file->lock);
    }
    if (together)
        code = transfer_together(file, &view, writes, position, buffer, count, memory, &all, &moved);
    else if (code != MPI_SUCCESS)
        return code;
    else if (view.rep != NULL && datarep_converts(view.rep, writes))
        code = transfer_converted(file, &view, writes, position, buffer, count, type, item, &moved, bytes);
    else
        code = transfer(file, &view, writes, position, buffer, count, memory, &moved);
    if (start != 0)
        file->choice.measured_ns = choice_clock() - start;
    if (view.rep == NULL || !datarep_converts(view.rep, writes))
        *bytes = moved;
    if (pointer == INDIVIDUAL && !writes && moved > 0) {
        pthread_mutex_lock(&file->lock);
        file->position = offset + (moved + view.etype_size - 1) / view.etype_size;
        pthread_mutex_unlock(&file->lock);
    }
    return code;
}
