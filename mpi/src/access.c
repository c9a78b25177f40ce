/*
 * Reads and writes: from a buffer and a datatype to bytes of a view, and from those to calls on the file.
 *
 * Memory and file are each a walk over blocks; each run of file bytes is one preadv or pwritev, of as many pieces of
 * memory as lie in it. Reads of many small runs go through a buffer that takes in the gaps; writes never do, so that
 * nothing that another rank wrote meanwhile is put back, and nothing needs a lock. In atomic mode one access at a time
 * holds the lock in the page that the ranks share.
 */
#include "driver.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    PARTS_MAX = 512,              /* pieces of memory in one call */
    SIEVE_BYTES = 256 << 10,      /* of a buffer that takes in gaps: it stays in the cache (1 MiB: 0.6 times as fast) */
    SIEVE_GAP_BYTES = 8192,       /* gaps of fewer bytes on average are read too: as long as a call for each run takes */
    CALL_BYTES_MAX = 0x40000000,  /* in one system call */
};

/* All bytes of `parts` at `offset`; fewer at the end of the file, or a negative errno. Changes `parts`. */
int64_t transfer_run(struct file *file, bool writes, struct iovec *parts, int count, int64_t offset) {
    int64_t done = 0;
    if (file->fd < 0) {
        for (int i = 0; i < count; i++) {
            char *at = parts[i].iov_base;
            size_t left = parts[i].iov_len;
            while (left > 0) {
                int64_t n = writes ? forebay.file_pwrite(file->data, at, left, offset + done)
                                   : forebay.file_pread(file->data, at, left, offset + done);
                if (n < 0)
                    return n;
                if (n == 0 && writes)
                    return -EIO; /* a medium that takes nothing and does not say why */
                done += n;
                at += n;
                left -= n;
                if (left > 0 && !writes)
                    return done;
            }
        }
        return done;
    }
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

/* Copies `bytes` bytes between a walk over memory and a buffer. */
static void copy_out(struct walk *memory, const char *from, int64_t bytes) {
    while (bytes > 0) {
        int64_t here;
        char *to = (char *)(intptr_t)walk_next(memory, bytes, &here);
        memcpy(to, from, here);
        from += here;
        bytes -= here;
    }
}

/* Reads runs with the gaps between them: as many as fit the buffer. Returns bytes of data, 0 at the end of the file. */
static int64_t sieve(struct file *file, struct walk *runs, struct walk *memory, int64_t most, char *buffer) {
    struct walk ahead = *runs;
    int64_t first = -1, last = 0, left = most;
    while (left > 0) {
        struct walk before = ahead;
        int64_t bytes, at = walk_next(&ahead, left, &bytes);
        if (first < 0)
            first = at;
        if (at + bytes - first > SIEVE_BYTES) {
            if (last == 0)
                last = first + SIEVE_BYTES; /* one run that is longer than the buffer: a part of it */
            ahead = before;
            break;
        }
        last = at + bytes;
        left -= bytes;
    }
    struct iovec whole = {buffer, last - first};
    int64_t got = transfer_run(file, false, &whole, 1, first);
    if (got < 0)
        return got;
    int64_t done = 0;
    while (done < most) {
        struct walk before = *runs;
        int64_t bytes, at = walk_next(runs, most - done, &bytes);
        int64_t here = first + got - at;
        if (here >= bytes) {
            copy_out(memory, buffer + (at - first), bytes);
            done += bytes;
            continue;
        }
        *runs = before;
        if (here > 0) {
            walk_next(runs, here, &bytes);
            copy_out(memory, buffer + (at - first), here);
            done += here;
        }
        break;
    }
    return done;
}

static bool sieves(const struct file *file, const struct flat *view, int64_t bytes) {
    if (strcmp(file->hints[HINT_romio_ds_read], "disable") == 0 || view->dense || view->count == 0 || !view->apart)
        return false;
    return bytes > 2 * view->size / view->count && (view->extent - view->size) / view->count < SIEVE_GAP_BYTES;
}

static int move(struct file *file, const struct view *view, bool writes, int64_t position, void *buffer, int64_t bytes,
                const struct flat *memory, int64_t *done) {
    struct walk runs, pieces;
    walk_start(&runs, view->file, view->disp, position);
    walk_start(&pieces, memory, (int64_t)(intptr_t)buffer, 0);
    if (!writes && sieves(file, view->file, bytes)) {
        char *room = atomic_exchange(&file->spare, NULL);
        if (room == NULL)
            room = malloc(SIEVE_BYTES);
        if (room == NULL)
            return MPI_ERR_NO_MEM;
        int64_t n = 1;
        while (*done < bytes && n > 0) {
            n = sieve(file, &runs, &pieces, bytes - *done, room);
            if (n > 0)
                *done += n;
        }
        free(atomic_exchange(&file->spare, room));
        return n < 0 ? class_of(n) : MPI_SUCCESS;
    }
    while (*done < bytes) {
        int64_t run, at = walk_next(&runs, bytes - *done, &run);
        if (at < 0 || at > INT64_MAX - run)
            return MPI_ERR_ARG;
        while (run > 0) {
            struct iovec parts[PARTS_MAX];
            int count = 0;
            int64_t here = 0;
            while (count < PARTS_MAX && here < run) {
                int64_t piece, address = walk_next(&pieces, run - here, &piece);
                parts[count++] = (struct iovec){(void *)(intptr_t)address, piece};
                here += piece;
            }
            int64_t n = transfer_run(file, writes, parts, count, at);
            if (n < 0)
                return class_of(n);
            *done += n;
            if (n < here)
                return MPI_SUCCESS; /* the end of the file */
            at += here;
            run -= here;
        }
    }
    return MPI_SUCCESS;
}

static int lock_atomic(struct file *file) {
    if (!file->atomic || file->shared == NULL)
        return MPI_SUCCESS;
    int result = pthread_mutex_lock(&file->shared->atomic);
    if (result == EOWNERDEAD) {
        /* What a rank was writing when it died is as its calls left it. */
        pthread_mutex_consistent(&file->shared->atomic);
        result = 0;
    }
    return result == 0 ? MPI_SUCCESS : MPI_ERR_IO;
}

static void unlock_atomic(struct file *file) {
    if (file->atomic && file->shared != NULL)
        pthread_mutex_unlock(&file->shared->atomic);
}

int transfer(struct file *file, const struct view *view, bool writes, int64_t position, void *buffer, int64_t count,
             const struct flat *memory, int64_t *done) {
    *done = 0;
    int64_t bytes = count * memory->size;
    if (bytes == 0)
        return MPI_SUCCESS;
    int code = lock_atomic(file);
    if (code != MPI_SUCCESS)
        return code;
    code = move(file, view, writes, position, buffer, bytes, memory, done);
    unlock_atomic(file);
    return code;
}

static const struct flat bytes_flat = {.size = 1,
                                       .extent = 1,
                                       .count = 1,
                                       .blocks = (struct block[]){{0, 1}},
                                       .before = (int64_t[]){0},
                                       .dense = true,
                                       .rising = true,
                                       .apart = true};

/* As `transfer`, of data that lies in the file as the standard's external32. */
static int transfer_external(struct file *file, const struct view *view, bool writes, int64_t position, void *buffer,
                             int64_t count, MPI_Datatype type, const struct flat *memory, int64_t *done) {
    MPI_Aint bytes = 0, at = 0;
    *done = 0;
    if (count == 0 || memory->size == 0)
        return MPI_SUCCESS;
    if (count > INT_MAX)
        return MPI_ERR_COUNT;
    if (mpi.Pack_external_size("external32", (int)count, type, &bytes) != MPI_SUCCESS)
        return MPI_ERR_CONVERSION;
    /* Numbers that are longer or shorter there would move all that follows. */
    if (bytes < count * memory->size)
        return MPI_ERR_CONVERSION;
    char *packed = malloc(bytes);
    if (packed == NULL)
        return MPI_ERR_NO_MEM;
    /* Of a read too: what lies behind the end of the file is to stay as it is in memory. */
    int code = MPI_SUCCESS;
    if (mpi.Pack_external("external32", buffer, (int)count, type, packed, bytes, &at) != MPI_SUCCESS ||
        at != count * memory->size)
        code = MPI_ERR_CONVERSION;
    if (code == MPI_SUCCESS)
        code = transfer(file, view, writes, position, packed, count * memory->size, &bytes_flat, done);
    if (code == MPI_SUCCESS && !writes) {
        at = 0;
        if (mpi.Unpack_external("external32", packed, bytes, &at, buffer, (int)count, type) != MPI_SUCCESS)
            code = MPI_ERR_CONVERSION;
    }
    free(packed);
    return code;
}

/* Through aggregators, where a rank whose arguments are wrong (`code`) takes part too: memory is made one piece first. */
static int transfer_together(struct file *file, const struct view *view, bool writes, int64_t position, void *buffer,
                             int64_t count, const struct flat *memory, int code, int64_t *done) {
    int64_t bytes = code == MPI_SUCCESS ? count * memory->size : 0;
    bool copied = bytes > 0 && !memory->dense && !(memory->count == 1 && count == 1);
    char *packed = bytes > 0 ? (char *)buffer + memory->blocks[0].offset : NULL;
    struct walk pieces;
    if (bytes > 0)
        walk_start(&pieces, memory, (int64_t)(intptr_t)buffer, 0);
    if (copied && (packed = malloc(bytes)) == NULL) {
        code = MPI_ERR_NO_MEM;
        bytes = 0;
    }
    if (copied && packed != NULL && writes)
        for (int64_t at = 0, here; at < bytes; at += here) {
            const char *from = (const char *)(intptr_t)walk_next(&pieces, bytes - at, &here);
            memcpy(packed + at, from, here);
        }
    code = two_phase(file, view, writes, position, packed, bytes, code, done);
    if (copied && packed != NULL && !writes && *done > 0)
        copy_out(&pieces, packed, *done);
    if (copied)
        free(packed);
    return code;
}

/* What can be told to be wrong before anything is moved. */
static int check(struct file *file, bool writes, enum pointer pointer, int64_t offset, const void *buffer, int64_t count,
                 MPI_Datatype type, const struct flat **memory) {
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
    if ((*memory)->size > 0 && count > INT64_MAX / (*memory)->size)
        return MPI_ERR_COUNT;
    int64_t bytes = count * (*memory)->size;
    if (bytes % file->view.etype_size != 0)
        return MPI_ERR_IO;
    if (bytes > 0 && buffer == MPI_BOTTOM && (*memory)->blocks[0].offset == 0)
        return MPI_ERR_BUFFER;
    if (file->view.file->size == 0 && bytes > 0)
        return MPI_ERR_IO;
    if ((pointer == SHARED || pointer == ORDERED) && file->shared == NULL)
        return MPI_ERR_UNSUPPORTED_OPERATION;
    if (offset > 0 && offset > (INT64_MAX - bytes) / file->view.etype_size)
        return MPI_ERR_ARG;
    return MPI_SUCCESS;
}

int access_file(struct file *file, bool writes, enum pointer pointer, int flags, int64_t offset, void *buffer,
                int64_t count, MPI_Datatype type, int64_t *bytes) {
    const struct flat *memory = NULL;
    *bytes = 0;
    bool together = (flags & COLLECTIVE) && wants_two_phase(file, writes);
    int code = check(file, writes, pointer, offset, buffer, count, type, &memory);
    int64_t asked = code == MPI_SUCCESS ? count * memory->size : 0;
    int64_t etypes = code == MPI_SUCCESS ? asked / file->view.etype_size : 0;
    if (pointer == ORDERED) {
        /* Ranks take their places in order; who fails takes none. */
        int64_t before = 0, all = 0, start = 0;
        if (file->shared == NULL)
            return code;
        mpi.Exscan(&etypes, &before, 1, MPI_INT64_T, MPI_SUM, file->comm);
        if (file->rank == 0)
            before = 0;
        if (file->rank == file->size - 1) {
            all = before + etypes;
            start = atomic_fetch_add(&file->shared->position, all);
        }
        mpi.Bcast(&start, 1, MPI_INT64_T, file->size - 1, file->comm);
        offset = start + before;
    }
    if (code != MPI_SUCCESS && !together)
        return code;
    pthread_mutex_lock(&file->lock);
    struct view view = file->view;
    if (pointer == INDIVIDUAL) {
        offset = file->position;
        if (writes)
            file->position += etypes;
    }
    pthread_mutex_unlock(&file->lock);
    if (pointer == SHARED)
        offset = atomic_fetch_add(&file->shared->position, etypes);
    int64_t position = offset * view.etype_size;
    if (together)
        code = transfer_together(file, &view, writes, position, buffer, count, memory, code, bytes);
    else if (view.external32)
        code = transfer_external(file, &view, writes, position, buffer, count, type, memory, bytes);
    else
        code = transfer(file, &view, writes, position, buffer, count, memory, bytes);
    if (pointer == INDIVIDUAL && !writes && *bytes > 0) {
        pthread_mutex_lock(&file->lock);
        file->position = offset + (*bytes + view.etype_size - 1) / view.etype_size;
        pthread_mutex_unlock(&file->lock);
    }
    return code;
}
