/*
 * State that the ranks of one open share: the shared file pointer, and the lock of atomic mode.
 *
 * A process keeps one memfd, divided into slots, for all files that it opens as rank 0. Other ranks map it through
 * /proc, once for all files. So an open needs no system call for it, unless it is the first with that rank 0. A slot
 * counts the ranks that have its file open, and is free when all have closed it. A slot in use by a rank that dies is
 * not reused. Ranks on another node, or in another PID namespace, cannot open the memfd.
 *
 * If some rank cannot, the ranks have a group instead (forebay.h), which the node of the file's first backing file
 * keeps. Each use of pointer or lock is then a request, and none waits for another rank to make a call. Rank 0 makes
 * the group when a file is opened, and ends it when all ranks have closed it. A pool of one node has no groups. There
 * all ranks are on one node, and rank 0 gives them memory that has a name in /dev/shm while they open it.
 *
 * /proc may be hidden from a rank, which then cannot open the memfd. At first only that rank knows. The first
 * collective call that needs the memory determines it for all ranks (shared_by_all). The slot of that file may stay in
 * use. From the next open on, the rank reports in advance that it cannot open the memfd (shared_is_hidden), and the
 * ranks use memory with a name at once.
 *
 * Locks: `lock` guards the lists of memfds; it is taken last.
 */
#include "driver.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { ARENA_BYTES = 64 << 10, SLOT_BYTES = 128, SLOTS = ARENA_BYTES / SLOT_BYTES };
_Static_assert(sizeof(struct shared) <= SLOT_BYTES, "a slot is one of SLOTS");

/* Shared memory that this process created, or mapped from another. Never freed. */
struct arena {
    struct arena *next;
    int64_t pid, memfd;
    bool was_named; /* ranks that cannot use /proc may have mapped it */
    uint64_t nonce; /* also in the first slot, which no file uses */
    char *base;
    int free; /* where the search for a free slot begins */
    ino_t inode;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct arena *own, *others;
static _Atomic bool hidden; /* this process could not open another's memfd */

static struct shared *slot_of(const struct arena *arena, int64_t slot) {
    return (struct shared *)(arena->base + slot * SLOT_BYTES);
}

static char *map(int fd) {
    void *base = mmap(NULL, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return base == MAP_FAILED ? NULL : base;
}

/* The path of the memory without /proc. */
static void name_of(uint64_t nonce, char name[64]) { snprintf(name, 64, "/dev/shm/forebay-mpi-%016llx", (unsigned long long)nonce); }

static struct arena *arena_make(bool named) {
    struct arena *arena = calloc(1, sizeof *arena);
    if (arena == NULL)
        return NULL;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    arena->nonce = (uint64_t)now.tv_sec * 1000000007u + (uint64_t)now.tv_nsec * 4099u + (uintptr_t)arena + (uint64_t)getpid() * 65537u;
    char name[64];
    name_of(arena->nonce, name);
    int fd = named ? open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600) : memfd_create("forebay-mpi", MFD_CLOEXEC);
    struct stat st;
    /* A store to space that only ftruncate reserved would raise SIGBUS when /dev/shm is full. */
    int failed = fd < 0 ? errno : named ? posix_fallocate(fd, 0, ARENA_BYTES) : ftruncate(fd, ARENA_BYTES);
    if (failed != 0 || fstat(fd, &st) != 0 || (arena->base = map(fd)) == NULL) {
        if (fd >= 0) {
            close(fd);
            if (named)
                unlink(name);
        }
        free(arena);
        return NULL;
    }
    arena->pid = getpid();
    arena->memfd = fd;
    arena->was_named = named;
    arena->inode = st.st_ino;
    arena->free = 1;
    slot_of(arena, 0)->nonce = arena->nonce;
    arena->next = own;
    own = arena;
    return arena;
}

/* False if the program has closed the memfd: the number may then belong to another file. */
static bool is_open(const struct arena *arena) {
    struct stat st;
    return fstat((int)arena->memfd, &st) == 0 && st.st_ino == arena->inode;
}

static int64_t slot_take(struct arena *arena, int ranks) {
    for (int tries = 1; tries < SLOTS; tries++) {
        int at = arena->free;
        arena->free = at + 1 < SLOTS ? at + 1 : 1;
        struct shared *shared = slot_of(arena, at);
        int nobody = 0;
        if (atomic_compare_exchange_strong(&shared->users, &nobody, ranks))
            return at;
    }
    return -1;
}

/* Takes a slot for the file, in memory without a name, or in memory that has or had one. */
static void make_in(struct file *file, struct arena *arena, bool named, struct shared_place *place) {
    int64_t slot = arena != NULL ? slot_take(arena, file->size) : -1;
    if (slot < 0 && (arena = arena_make(named)) != NULL)
        slot = slot_take(arena, file->size);
    if (slot < 0)
        return;
    file->shared = slot_of(arena, slot);
    atomic_store(&file->shared->position[file->turn], 0);
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&file->shared->atomic, &attributes);
    pthread_mutexattr_destroy(&attributes);
    *place = (struct shared_place){arena->pid, arena->memfd, (int64_t)arena->nonce, slot};
}

void shared_make(struct file *file, struct shared_place *place) {
    *place = (struct shared_place){.slot = -1};
    pthread_mutex_lock(&lock);
    make_in(file, own != NULL && is_open(own) ? own : NULL, false, place);
    pthread_mutex_unlock(&lock);
}

/* Maps another process's memory. */
static struct arena *arena_join(const struct shared_place *place, bool named) {
    char path[64];
    if (named)
        name_of((uint64_t)place->nonce, path);
    else
        snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)place->pid, (long long)place->memfd);
    struct stat st;
    struct arena *arena = NULL;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        if (!named && (errno == EACCES || errno == EPERM || errno == ENOENT))
            atomic_store(&hidden, true);
        return NULL;
    }
    if (fstat(fd, &st) == 0 && st.st_size == ARENA_BYTES && (arena = calloc(1, sizeof *arena)) != NULL)
        arena->base = map(fd);
    close(fd);
    if (arena == NULL || arena->base == NULL || slot_of(arena, 0)->nonce != (uint64_t)place->nonce) {
        if (arena != NULL && arena->base != NULL)
            munmap(arena->base, ARENA_BYTES);
        free(arena);
        return NULL;
    }
    arena->pid = place->pid;
    arena->memfd = place->memfd;
    arena->nonce = (uint64_t)place->nonce;
    arena->next = others;
    others = arena;
    return arena;
}

static void join(struct file *file, const struct shared_place *place, bool named) {
    if (place->slot < 1 || place->slot >= SLOTS)
        return;
    pthread_mutex_lock(&lock);
    struct arena *arena = others;
    while (arena != NULL && (arena->nonce != (uint64_t)place->nonce || arena->pid != place->pid))
        arena = arena->next;
    if (arena == NULL)
        arena = arena_join(place, named);
    pthread_mutex_unlock(&lock);
    if (arena != NULL)
        file->shared = slot_of(arena, place->slot);
}

void shared_join(struct file *file, const struct shared_place *place) { join(file, place, false); }

void shared_leave(struct file *file) {
    if (file->shared != NULL)
        atomic_fetch_sub(&file->shared->users, 1);
    file->shared = NULL;
}

void shared_drop(struct file *file) {
    if (file->shared != NULL)
        atomic_store(&file->shared->users, 0);
    file->shared = NULL;
}

bool shared_is_hidden(void) {
    return atomic_load(&hidden);
}

void shared_by_all(struct file *file) {
    if (!file->shared_known) {
        int64_t mine = file->shared == NULL, any = mine;
        if (file->size > 1)
            mpi.Allreduce(&mine, &any, 1, MPI_INT64_T, MPI_MAX, file->comm);
        shared_settle(file, any != 0);
    }
}

/* Rank 0 gives its memory a name for the other ranks, or creates new memory. Returns whether all ranks have it. */
static bool named_begin(struct file *file, bool anew, int64_t position) {
    struct shared_place place = {.slot = -1};
    if (file->rank == 0) {
        pthread_mutex_lock(&lock);
        struct arena *arena = own;
        while (arena != NULL && (anew || !arena->was_named))
            arena = arena->next;
        if (arena != NULL || anew)
            make_in(file, arena, true, &place);
        pthread_mutex_unlock(&lock);
        if (file->shared != NULL)
            atomic_store(&file->shared->position[file->turn], position);
    }
    mpi.Bcast(&place, sizeof place, MPI_BYTE, 0, file->comm);
    if (file->rank != 0)
        join(file, &place, true);
    int64_t mine = file->shared == NULL, any = mine;
    mpi.Allreduce(&mine, &any, 1, MPI_INT64_T, MPI_MAX, file->comm);
    if (file->rank == 0) {
        char name[64];
        name_of((uint64_t)place.nonce, name);
        if (place.slot >= 0)
            unlink(name); /* if the ranks had the memory already, it has no name */
        if (any)
            shared_drop(file);
    }
    if (any)
        file->shared = NULL;
    return !any;
}

/*
 * Rank 0 makes a group and sends its number to all. If it cannot, the ranks use memory that all can open, if there is
 * any.
 */
static void group_begin(struct file *file, int64_t position) {
    int64_t answer = 0;
    uint64_t group = 0;
    if (file->rank == 0)
        answer = forebay.file_group_make(file->data, position, &group);
    mpi.Bcast(&group, sizeof group, MPI_BYTE, 0, file->comm);
    file->group = group;
    bool named = group == 0 && (named_begin(file, false, position) || named_begin(file, true, position));
    if (!debug() || file->rank != 0)
        return;
    if (group != 0)
        fprintf(stderr, "forebay: %s: its ranks share no memory: a daemon keeps their file pointer and locks\n", file->path);
    else if (named)
        fprintf(stderr, "forebay: %s: its ranks do not see each other in /proc: they met in /dev/shm\n",
                file->path);
    else
        fprintf(stderr, "forebay: %s: its ranks share no memory: no shared file pointer, no atomic mode (%s)\n",
                file->path, strerror((int)-answer));
}

void shared_settle(struct file *file, bool is_missed) {
    file->shared_known = true;
    if (!is_missed)
        return;
    /* A rank that missed the slot cannot leave it. So rank 0 leaves it for all, and no rank uses it any more. */
    int64_t position = file->shared != NULL ? atomic_load(&file->shared->position[file->turn]) : 0;
    if (file->rank == 0)
        shared_drop(file);
    file->shared = NULL;
    if (file->size > 1)
        group_begin(file, position);
}

bool shared_there(const struct file *file) { return file->shared != NULL || file->group != 0; }

void shared_end(struct file *file) {
    if (file->group != 0 && file->rank == 0)
        forebay.file_group_end(file->data, file->group); /* without this call it ends with the process */
    file->group = 0;
}

int shared_class(struct file *file, int64_t answer) {
    if ((answer == -ESTALE || answer == -EIO) && !atomic_exchange(&file->group_lost, true))
        fprintf(stderr, "forebay: %s: its ranks' shared file pointer and locks are not available: %s\n", file->path,
                answer == -ESTALE ? "rank 0, which made them, is gone, or the node that kept them was"
                                  : "the node that keeps them does not answer (forebay status)");
    return class_of(answer);
}

int64_t shared_ask(const struct file *file) { return forebay.file_group_move(file->data, file->group, 0); }

/*
 * The two pointers alternate, so that the end of a view and the start of the next need one collective call. No rank
 * uses the pointer of two views ago any more, as all have been in a set_view since. No rank uses the next one before
 * all are in this call.
 */
void shared_prepare(struct file *file) {
    if (file->rank == 0 && file->shared != NULL)
        atomic_store(&file->shared->position[!file->turn], 0);
}

int shared_turn(struct file *file, bool is_missed) {
    file->turn = !file->turn;
    if (file->group != 0)
        return shared_seek(file, 0);
    if (!file->shared_known)
        shared_settle(file, is_missed);
    return MPI_SUCCESS;
}

int shared_move(struct file *file, int64_t by, int64_t *before) {
    if (file->shared != NULL) {
        *before = atomic_fetch_add(&file->shared->position[file->turn], by);
        return MPI_SUCCESS;
    }
    int64_t answer = forebay.file_group_move(file->data, file->group, by);
    if (answer < 0)
        return shared_class(file, answer);
    *before = answer;
    return MPI_SUCCESS;
}

int shared_seek(struct file *file, int64_t position) {
    /* No rank uses the pointer before it is set, and no rank resets it after another has used it. */
    int64_t answer = 0;
    if (file->rank == 0 && file->shared != NULL)
        atomic_store(&file->shared->position[file->turn], position);
    else if (file->rank == 0)
        answer = forebay.file_group_seek(file->data, file->group, position);
    if (file->shared == NULL)
        return agree(file, shared_class(file, answer), 0);
    mpi.Barrier(file->comm);
    return MPI_SUCCESS;
}

int shared_lock(struct file *file, bool writes, int64_t first, int64_t last, uint64_t *lock) {
    if (file->shared == NULL) {
        int64_t bytes = last - first + 1;
        return shared_class(file, forebay.file_group_lock(file->data, file->group, writes, first, bytes, lock));
    }
    int result = pthread_mutex_lock(&file->shared->atomic);
    if (result == EOWNERDEAD) {
        /* The data that a rank was writing when it died are as its calls left them. */
        pthread_mutex_consistent(&file->shared->atomic);
        result = 0;
    }
    return result == 0 ? MPI_SUCCESS : MPI_ERR_IO;
}

int shared_unlock(struct file *file, uint64_t lock) {
    if (file->shared == NULL)
        return shared_class(file, forebay.file_group_unlock(file->data, file->group, lock));
    pthread_mutex_unlock(&file->shared->atomic);
    return MPI_SUCCESS;
}

int64_t shared_node(void) {
    static _Atomic int64_t known;
    if (known == 0) {
        /* This boot of the kernel, and this PID namespace. Within both, /proc/PID is the same process. */
        uint64_t hash = 1469598103934665603u;
        char words[256] = "";
        FILE *boot = fopen("/proc/sys/kernel/random/boot_id", "re");
        if (boot == NULL || fgets(words, sizeof words, boot) == NULL)
            gethostname(words, sizeof words - 1);
        if (boot != NULL)
            fclose(boot);
        struct stat st = {0};
        if (stat("/proc/self/ns/pid", &st) == 0)
            snprintf(words + strlen(words), sizeof words - strlen(words), "%lld", (long long)st.st_ino);
        for (const char *at = words; *at != 0; at++)
            hash = (hash ^ (unsigned char)*at) * 1099511628211u;
        known = (int64_t)(hash >> 2 | 1);
    }
    return known;
}
