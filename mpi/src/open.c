/*
 * Open, close, delete.
 *
 * Rank 0 opens first, and makes the file where that was asked for; then all others open what is there, so that O_EXCL
 * holds for the ranks together. What rank 0 found out comes with its answer: whether the path leaves the pool, in which
 * case all go to the MPI library, the hints, and a memfd with what the ranks share. They map it through /proc, while
 * rank 0 keeps it open; it goes with its last user, whoever dies. Ranks of other nodes find no such file: for them there
 * is no shared file pointer.
 */
#include "open.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    STRIPE_BYTES = 1 << 20, /* 64 KiB: writes of 1 MiB 0.7 times as fast, as pages of the medium stay small */
    STRIPES_MAX = 256,
    STRIPES_A_RANK = 2,    /* so that two ranks seldom meet on one, ... */
    STRIPES_UNASKED = 8,   /* ... and at most as many as each rank can open without noticing */
};

/* What rank 0 tells the others. */
struct told {
    int64_t code;   /* the opinion of all ranks about their arguments */
    int64_t answer; /* 0 or a negative errno */
    int64_t pid, memfd;
    uint64_t nonce;
    int64_t processors; /* for how many aggregators there are: the same on all ranks */
    char hints[HINT_COUNT][HINT_BYTES];
};

static int check_amode(int amode) {
    int access = amode & (MPI_MODE_RDONLY | MPI_MODE_WRONLY | MPI_MODE_RDWR);
    if (access != MPI_MODE_RDONLY && access != MPI_MODE_WRONLY && access != MPI_MODE_RDWR)
        return MPI_ERR_AMODE;
    if (access == MPI_MODE_RDONLY && (amode & (MPI_MODE_CREATE | MPI_MODE_EXCL)))
        return MPI_ERR_AMODE;
    if (access == MPI_MODE_RDWR && (amode & MPI_MODE_SEQUENTIAL))
        return MPI_ERR_AMODE;
    return MPI_SUCCESS;
}

static int flags_of(int amode, bool first) {
    int flags = amode & MPI_MODE_RDONLY ? O_RDONLY : amode & MPI_MODE_WRONLY ? O_WRONLY : O_RDWR;
    if (first && (amode & MPI_MODE_CREATE))
        flags |= O_CREAT;
    if (first && (amode & MPI_MODE_EXCL))
        flags |= O_EXCL;
    return flags;
}

static mode_t umask_of_process(void) {
    /* Asked for without changing it, which another thread could see. */
    char line[256];
    unsigned mask = 022;
    FILE *status = fopen("/proc/self/status", "re");
    while (status != NULL && fgets(line, sizeof line, status) != NULL)
        if (sscanf(line, "Umask: %o", &mask) == 1)
            break;
    if (status != NULL)
        fclose(status);
    return mask;
}

static int64_t open_data(struct file *file, int flags) {
    forebay_pool *pool = forebay_attached();
    if (pool == NULL)
        return -EIO;
    long count = atol(file->hints[HINT_striping_factor]), bytes = atol(file->hints[HINT_striping_unit]);
    uint32_t wanted = (uint32_t)count;
    if (count < 1 || count > STRIPES_MAX) {
        /* Ranks that write one backing file queue on its lock. The directory's layout goes first. */
        int several = file->size * STRIPES_A_RANK < STRIPES_UNASKED ? file->size * STRIPES_A_RANK : STRIPES_UNASKED;
        wanted = (uint32_t)(file->size > 1 ? several : 1) | FOREBAY_STRIPES_DEFAULT;
    }
    /* Stripes are powers of two from 4 KiB to 1 GiB: the next one up. */
    long unit = 4096;
    while (unit < bytes && unit < 1L << 30)
        unit *= 2;
    mode_t mode = flags & O_CREAT ? 0666 & ~umask_of_process() : 0;
    int64_t answer = forebay.file_open(pool, file->path, flags, mode, wanted, bytes > 0 ? unit : STRIPE_BYTES, &file->data);
    if (answer == 0)
        file->fd = forebay.file_fd(file->data) >= 0 ? forebay.file_fd(file->data) : -1;
    return answer;
}

static void shared_init(struct shared *shared, uint64_t nonce) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&shared->atomic, &attributes);
    pthread_mutexattr_destroy(&attributes);
    shared->nonce = nonce;
}

static struct shared *shared_map(int fd) {
    void *page = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return page == MAP_FAILED ? NULL : page;
}

static void shared_make(struct file *file, struct told *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    told->pid = getpid();
    told->nonce = (uint64_t)now.tv_sec * 1000000007u + now.tv_nsec * 4099u + (uintptr_t)file;
    told->memfd = -1;
    if (file->size == 1) {
        /* Nobody else is to find it. */
        void *page = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        file->shared = page == MAP_FAILED ? NULL : page;
        if (file->shared != NULL)
            shared_init(file->shared, told->nonce);
        return;
    }
    file->memfd = memfd_create("forebay-mpi", MFD_CLOEXEC);
    if (file->memfd < 0 || ftruncate(file->memfd, sizeof(struct shared)) != 0)
        return;
    file->shared = shared_map(file->memfd);
    if (file->shared == NULL)
        return;
    shared_init(file->shared, told->nonce);
    told->memfd = file->memfd;
}

static void shared_join(struct file *file, const struct told *told) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)told->pid, (long long)told->memfd);
    int fd = told->memfd >= 0 ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    struct stat st;
    if (fstat(fd, &st) == 0 && st.st_size == sizeof(struct shared))
        file->shared = shared_map(fd);
    close(fd);
    if (file->shared != NULL && file->shared->nonce != told->nonce) {
        munmap(file->shared, sizeof(struct shared));
        file->shared = NULL;
    }
}

static void shared_leave(struct file *file) {
    if (file->shared != NULL)
        munmap(file->shared, sizeof(struct shared));
    if (file->memfd >= 0)
        close(file->memfd);
    file->shared = NULL;
    file->memfd = -1;
}

static void file_free(struct file *file) {
    shared_leave(file);
    if (file->data != NULL)
        forebay.file_close(file->data);
    if (file->comm != MPI_COMM_NULL)
        mpi.Comm_free(&file->comm);
    view_free(&file->view);
    pthread_mutex_destroy(&file->lock);
    free(file->path);
    free(file);
}

/*
 * The file as far as one rank makes it by itself, with its handle. What goes wrong is in `code` and not yet told to the
 * others: `comm`, the file's own communicator, is there before anything that can fail on one rank alone.
 */
static struct file *file_make(MPI_Comm comm, const char *path, int amode, int *code) {
    struct file *file = calloc(1, sizeof *file);
    *code = MPI_ERR_NO_MEM;
    if (file == NULL)
        return NULL;
    file->fd = file->memfd = -1;
    file->amode = amode;
    file->widest_run = INT64_MAX;
    file->apart = true;
    file->comm = comm;
    pthread_mutex_init(&file->lock, NULL);
    mpi.Comm_rank(comm, &file->rank);
    mpi.Comm_size(comm, &file->size);
    file->view.etype = file->view.filetype = MPI_DATATYPE_NULL;
    file->handle = MPI_FILE_NULL;
    handler_default(&file->handler);
    file->path = strdup(path);
    if (file->path == NULL)
        return file;
    *code = view_default(&file->view, comm);
    if (*code == MPI_SUCCESS && handle_make(file) == MPI_FILE_NULL)
        *code = MPI_ERR_NO_MEM;
    return file;
}

/* An open that fails on all ranks: nothing of it stays. */
static int open_failed(struct file *file, int code) {
    handler_drop(&file->handler);
    if (file->handle != MPI_FILE_NULL)
        handle_free(file->handle);
    file_free(file);
    return code;
}

static void layout_note(struct file *file) {
    uint32_t count = 1, bytes = STRIPE_BYTES;
    forebay.file_layout(file->data, &count, &bytes);
    snprintf(file->hints[HINT_striping_factor], HINT_BYTES, "%u", count);
    snprintf(file->hints[HINT_striping_unit], HINT_BYTES, "%u", bytes);
}

/* Asked for once: it is a file to be read. */
static int64_t processors(void) {
    static _Atomic int64_t known;
    if (known == 0)
        known = sysconf(_SC_NPROCESSORS_ONLN) > 0 ? sysconf(_SC_NPROCESSORS_ONLN) : 1;
    return known;
}

/* On rank 0 what all ranks think of their arguments, as `agree`; elsewhere anything. */
static int tell_first(MPI_Comm comm, int size, int code, int64_t value) {
    int64_t mine[3] = {code, value, ~value}, all[3] = {code, value, ~value};
    if (size > 1 && mpi.Reduce(mine, all, 3, MPI_INT64_T, MPI_MAX, 0, comm) != MPI_SUCCESS)
        return MPI_ERR_INTERN;
    return all[0] != MPI_SUCCESS ? (int)all[0] : all[1] == ~all[2] ? MPI_SUCCESS : MPI_ERR_NOT_SAME;
}

int file_open(MPI_Comm comm, const char *path, int amode, MPI_Info info, MPI_File *out, bool *elsewhere) {
    int code = MPI_SUCCESS, inter = 0, size = 0;
    MPI_Comm own = MPI_COMM_NULL;
    *elsewhere = false;
    if (comm == MPI_COMM_NULL)
        return MPI_ERR_COMM;
    if (mpi.Comm_test_inter(comm, &inter) != MPI_SUCCESS || inter || mpi.Comm_dup(comm, &own) != MPI_SUCCESS)
        return MPI_ERR_COMM;
    mpi.Comm_set_errhandler(own, MPI_ERRORS_RETURN);
    mpi.Comm_size(own, &size);
    struct file *file = file_make(own, path, amode, &code);
    if (file == NULL) {
        struct told nothing = {.code = tell_first(own, size, code, amode)};
        if (size > 1)
            mpi.Bcast(&nothing, sizeof nothing, MPI_BYTE, 0, own);
        mpi.Comm_free(&own);
        return code;
    }
    if (code == MPI_SUCCESS)
        code = check_amode(amode);
    hints_read(file, info, true);
    struct told told = {.code = tell_first(own, size, code, amode)};
    if (file->rank == 0 && told.code == MPI_SUCCESS) {
        told.answer = open_data(file, flags_of(amode, true));
        told.processors = processors();
        if (told.answer == 0) {
            shared_make(file, &told);
            layout_note(file);
        }
        memcpy(told.hints, file->hints, sizeof told.hints);
    }
    if (file->size > 1)
        mpi.Bcast(&told, sizeof told, MPI_BYTE, 0, file->comm);
    if (told.code != MPI_SUCCESS)
        return open_failed(file, (int)told.code);
    file->processors = told.processors;
    int64_t answer = told.answer;
    if (file->rank != 0 && answer == 0) {
        memcpy(file->hints, told.hints, sizeof told.hints);
        answer = open_data(file, flags_of(amode, false));
        shared_join(file, &told);
    }
    /* A symbolic link out of the pool: the file is the MPI library's. */
    *elsewhere = told.answer == -EXDEV;
    if (*elsewhere)
        return open_failed(file, MPI_ERR_BAD_FILE);
    int64_t mine[2] = {class_of(answer), file->shared == NULL}, all[2] = {mine[0], mine[1]};
    if (file->size > 1)
        mpi.Allreduce(mine, all, 2, MPI_INT64_T, MPI_MAX, file->comm);
    if (all[0] != MPI_SUCCESS)
        return open_failed(file, (int)all[0]);
    /* A page that not all ranks could join is nobody's, or calls that wait for all would wait for ever. */
    if (all[1]) {
        shared_leave(file);
        if (debug() && file->rank == 0)
            fprintf(stderr, "forebay: %s: its ranks share no memory: no shared file pointer, no atomic mode\n", file->path);
    }
    if (amode & MPI_MODE_APPEND) {
        int64_t bytes = forebay.file_size(file->data);
        file->position = bytes > 0 ? bytes : 0;
        if (file->rank == 0 && file->shared != NULL)
            atomic_store(&file->shared->position, file->position);
        agree(file, MPI_SUCCESS, 0); /* nobody moves the end before all have seen it */
    }
    if (debug() && file->rank == 0)
        fprintf(stderr, "forebay: %s: open by %d ranks, striping_factor %s, striping_unit %s%s\n", file->path,
                file->size, file->hints[HINT_striping_factor], file->hints[HINT_striping_unit],
                file->fd >= 0 ? ", by descriptor" : "");
    *out = file->handle;
    return MPI_SUCCESS;
}

int file_close(struct file *file) {
    int code = MPI_SUCCESS;
    if (file->split != SPLIT_NONE)
        code = MPI_ERR_OTHER; /* it is closed all the same: its end cannot come any more */
    if (file->amode & MPI_MODE_DELETE_ON_CLOSE) {
        /* All have let go of it before its name goes. */
        forebay.file_close(file->data);
        file->data = NULL;
        mpi.Barrier(file->comm);
        int64_t answer = file->rank == 0 ? forebay.unlink(forebay_attached(), file->path) : 0;
        mpi.Bcast(&answer, 1, MPI_INT64_T, 0, file->comm);
        if (code == MPI_SUCCESS)
            code = class_of(answer);
    }
    handler_drop(&file->handler);
    handle_free(file->handle);
    file_free(file);
    return code;
}

int file_delete(const char *path, bool *elsewhere) {
    forebay_pool *pool = forebay_attached();
    int64_t answer = pool != NULL ? forebay.unlink(pool, path) : -EIO;
    *elsewhere = answer == -EXDEV;
    return class_of(answer);
}
