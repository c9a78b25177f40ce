/*
 * Open, close, delete.
 *
 * To open a file, all ranks open it at once and exchange their results in one reduction, in which only rank 0
 * contributes to the values that it alone decides. To create a file, rank 0 creates it first, so that O_EXCL holds for
 * the ranks together, and then the others open it. Rank 0's values also say whether the path leaves the pool, in which
 * case all ranks call the MPI library, and give the hints and the place of the shared memory (shared.c). Ranks that
 * share no memory get a group from a daemon after that.
 */
#include "open.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    STRIPE_BYTES = 1 << 20, /* with 64 KiB, writes of 1 MiB reach 0.7 of the speed, as pages of the medium stay small */
    STRIPES_MAX = 256,
    STRIPES_A_RANK = 2,    /* so that two ranks seldom write to one, ... */
    STRIPES_UNASKED = 8,   /* ... and at most as many as each rank opens without a noticeable delay */
};

/* The values that rank 0 sends to the others. */
struct decided {
    int64_t answer; /* 0 or a negative errno */
    struct shared_place place;
    int64_t processors; /* determines the number of aggregators, so all ranks must use the same */
    struct choice_offer choice;
    char hints[HINT_COUNT][HINT_BYTES];
};

/* The values that all ranks exchange; the result is the maximum of each number. */
struct exchange {
    /* All ranks have the same number if the greatest number and the greatest complement match. */
    int64_t code, amode, not_amode, node, not_node;
    int64_t answer; /* an error class */
    int64_t hidden; /* some rank cannot open the memory of others */
    int64_t far;    /* for some rank, data of the file are on another node */
    int64_t near;   /* for some rank, data of the file are on its node */
    struct comm_offer comm;
    int64_t name, not_name;   /* a hash of the file's name */
    int64_t place, not_place; /* the pool's node */
    struct decided first;
};
enum {
    EXCHANGE_NUMBERS = sizeof(struct exchange) / sizeof(int64_t),
    DECIDED_NUMBERS = sizeof(struct decided) / sizeof(int64_t),
};
_Static_assert(HINT_BYTES % sizeof(int64_t) == 0, "hints are sent as numbers");

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
    /* The umask, without changing it, which another thread could see. */
    char line[256];
    unsigned mask = 0;
    bool known = false;
    FILE *status = fopen("/proc/self/status", "re");
    while (status != NULL && !known && fgets(line, sizeof line, status) != NULL)
        known = sscanf(line, "Umask: %o", &mask) == 1;
    if (status != NULL)
        fclose(status);
    if (!known) {
        /* /proc is missing, or too old. */
        mask = umask(077);
        umask(mask);
    }
    return mask;
}

/* Read once, as each query reads a file. */
static int64_t processors(void) {
    static _Atomic int64_t known;
    if (known == 0)
        known = sysconf(_SC_NPROCESSORS_ONLN) > 0 ? sysconf(_SC_NPROCESSORS_ONLN) : 1;
    return known;
}

/* An error in a specifier is one in a name, whatever it means elsewhere. */
static int64_t in_name(int64_t answer) { return answer == -EINVAL ? -ENXIO : answer; }

static int64_t open_volume(struct file *file, forebay_pool *pool, int flags) {
    int64_t answer = in_name(forebay.volume_file_open(pool, file->path, flags, &file->data));
    /* A program that creates files by `forebay:` names learns that a volume is to be there before. */
    if (answer < 0 && file->rank == 0 && (debug() || (answer == -ENOENT && (flags & O_CREAT)))) {
        char words[1024] = "";
        forebay.attach_error(words, sizeof words);
        fprintf(stderr, "forebay: %s%s\n", words[0] != '\0' ? words : strerror((int)-answer),
                answer == -ENOENT && (flags & O_CREAT) ? " (forebay volume create makes one)" : "");
    }
    return answer;
}

static int64_t open_data(struct file *file, int flags) {
    forebay_pool *pool = forebay_attached();
    if (pool == NULL)
        return -EIO;
    if (file->place == IN_VOLUME)
        return open_volume(file, pool, flags);
    long count = atol(file->hints[HINT_striping_factor]), bytes = atol(file->hints[HINT_striping_unit]);
    uint32_t wanted = (uint32_t)count;
    if (count < 1 || count > STRIPES_MAX) {
        /*
         * Ranks that write one backing file queue for its lock, as many at a time as there are processors. The
         * directory's layout takes precedence.
         */
        int64_t writers = file->size < processors() ? file->size : processors();
        int64_t several = writers * STRIPES_A_RANK < STRIPES_UNASKED ? writers * STRIPES_A_RANK : STRIPES_UNASKED;
        wanted = (uint32_t)(file->size > 1 ? several : 1) | FOREBAY_STRIPES_DEFAULT;
    }
    /* Stripes are powers of two from 4 KiB to 1 GiB: round up. */
    long unit = 4096;
    while (unit < bytes && unit < 1L << 30)
        unit *= 2;
    mode_t mode = flags & O_CREAT ? 0666 & ~umask_of_process() : 0;
    int64_t answer = forebay.file_open(pool, file->path, flags, mode, wanted, bytes > 0 ? unit : STRIPE_BYTES, &file->data);
    if (answer == 0)
        file->fd = forebay.file_fd(file->data) >= 0 ? forebay.file_fd(file->data) : -1;
    return answer;
}

static void file_free(struct file *file) {
    shared_leave(file);
    if (file->data != NULL)
        forebay.file_close(file->data);
    comm_give_back(file);
    view_free(&file->view);
    pthread_mutex_destroy(&file->lock);
    free(file->path);
    if (!file->has_left)
        free(file);
}

/*
 * Creates the file and its handle as far as one rank can alone. A failure is in `code`, and the others do not know it
 * yet.
 */
static struct file *file_make(MPI_Comm comm, enum place place, const char *path, int amode, int *code) {
    struct file *file = calloc(1, sizeof *file);
    *code = MPI_ERR_NO_MEM;
    if (file == NULL)
        return NULL;
    file->fd = -1;
    file->amode = amode;
    file->place = place;
    file->shortest_run = INT64_MAX;
    file->apart = true;
    file->comm = MPI_COMM_NULL;
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

/* Frees everything after an open that fails on all ranks. */
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

/* What this rank contributes before anything is opened. */
static struct exchange contribution(const struct file *file, MPI_Comm comm, int code, int amode) {
    struct exchange mine = {.code = code, .amode = amode, .not_amode = ~(int64_t)amode, .answer = MPI_SUCCESS};
    mine.node = shared_node();
    mine.not_node = ~mine.node;
    mine.hidden = shared_is_hidden();
    comm_offer(comm, &mine.comm);
    uint64_t hash = 1469598103934665603u;
    for (const char *at = file->path; at != NULL && *at != 0; at++)
        hash = (hash ^ (unsigned char)*at) * 1099511628211u;
    mine.name = (int64_t)(hash >> 1);
    mine.not_name = ~mine.name;
    mine.place = choice_place();
    mine.not_place = ~mine.place;
    int64_t *numbers = (int64_t *)&mine.first;
    for (int i = 0; i < DECIDED_NUMBERS && file->rank != 0; i++)
        numbers[i] = INT64_MIN;
    return mine;
}

/* Opens or creates the file on this rank. Rank 0 gets its layout. */
static int64_t open_here(struct file *file, bool makes, struct decided *decided) {
    int64_t answer = open_data(file, flags_of(file->amode, makes));
    if (file->rank != 0)
        return answer;
    decided->answer = answer;
    decided->place.slot = -1;
    decided->processors = processors();
    if (answer == 0) {
        shared_make(file, &decided->place);
        layout_note(file);
        if (file->size > 1)
            choice_offer(file, &decided->choice);
    }
    memcpy(decided->hints, file->hints, sizeof decided->hints);
    return answer;
}

static int64_t is_far(const struct file *file) {
    return file->data != NULL && forebay.file_elsewhere(file->data) > 0;
}

static int64_t is_near(const struct file *file) {
    uint32_t count = 1, bytes = 0;
    return file->data == NULL || forebay.file_layout(file->data, &count, &bytes) < 0 ||
           forebay.file_elsewhere(file->data) < (int64_t)count;
}

/* The second half of an open that creates a file: rank 0 creates it, then the others open it. */
static int open_made(struct file *file, struct decided *decided, int64_t *far, int64_t *near) {
    int64_t answer = file->rank == 0 ? open_here(file, true, decided) : 0;
    if (file->size > 1)
        mpi.Bcast(decided, sizeof *decided, MPI_BYTE, 0, file->comm);
    if (file->rank != 0 && decided->answer == 0)
        answer = open_here(file, false, NULL);
    int64_t mine[3] = {class_of(answer != 0 ? answer : decided->answer), is_far(file), is_near(file)};
    int64_t all[3] = {mine[0], mine[1], mine[2]};
    if (file->size > 1 && mpi.Allreduce(mine, all, 3, MPI_INT64_T, MPI_MAX, file->comm) != MPI_SUCCESS)
        return MPI_ERR_INTERN;
    *far = all[1];
    *near = all[2];
    return (int)all[0];
}

/* For ranks that passed different names: checks whether links make them one file. */
static int agree_on_file(struct file *file) {
    uint64_t number = 0;
    int64_t answer = forebay.file_number(file->data, &number);
    return agree(file, class_of(answer), (int64_t)number);
}

int file_open(MPI_Comm comm, enum place place, const char *path, int amode, MPI_Info info, MPI_File *out,
              bool *elsewhere) {
    int code = MPI_SUCCESS, inter = 0;
    *elsewhere = false;
    if (comm == MPI_COMM_NULL)
        return MPI_ERR_COMM;
    if (mpi.Comm_test_inter(comm, &inter) != MPI_SUCCESS || inter)
        return MPI_ERR_COMM;
    struct file *file = file_make(comm, place, path, amode, &code);
    if (file == NULL) {
        struct file nobody = {.rank = -1};
        struct exchange mine = contribution(&nobody, comm, code, amode), all;
        mpi.Allreduce(&mine, &all, EXCHANGE_NUMBERS, MPI_INT64_T, MPI_MAX, comm);
        return code;
    }
    if (code == MPI_SUCCESS)
        code = check_amode(amode);
    hints_read(file, info, true);
    struct exchange mine = contribution(file, comm, code, amode), all;
    bool makes = amode & MPI_MODE_CREATE;
    if (code == MPI_SUCCESS && !makes)
        mine.answer = class_of(open_here(file, false, &mine.first));
    mine.far = is_far(file);
    mine.near = is_near(file);
    all = mine;
    if (file->size > 1 && mpi.Allreduce(&mine, &all, EXCHANGE_NUMBERS, MPI_INT64_T, MPI_MAX, comm) != MPI_SUCCESS)
        all.code = MPI_ERR_INTERN;
    code = all.code != MPI_SUCCESS ? (int)all.code : all.amode == ~all.not_amode ? MPI_SUCCESS : MPI_ERR_NOT_SAME;
    if (code == MPI_SUCCESS && (makes || all.answer == MPI_SUCCESS))
        code = comm_take(file, comm, &all.comm);
    if (code == MPI_SUCCESS)
        code = makes ? open_made(file, &all.first, &all.far, &all.near) : (int)all.answer;
    if (code == MPI_SUCCESS && all.name != ~all.not_name)
        code = agree_on_file(file);
    /* A symbolic link out of the pool: the MPI library opens the file. */
    *elsewhere = code != MPI_SUCCESS && all.code == MPI_SUCCESS && all.first.answer == -EXDEV;
    if (code != MPI_SUCCESS) {
        shared_drop(file);
        return open_failed(file, code);
    }
    file->processors = all.first.processors;
    memcpy(file->hints, all.first.hints, sizeof file->hints);
    file->far = all.far;
    file->near = all.near;
    file->one_node = all.node == ~all.not_node;
    choice_start(file, &all.first.choice, all.place == ~all.not_place);
    bool together = file->one_node && !all.hidden && all.first.place.slot >= 0;
    if (!together)
        shared_drop(file);
    else if (file->rank != 0)
        shared_join(file, &all.first.place);
    if (!together || file->size == 1)
        shared_settle(file, !together);
    if (amode & MPI_MODE_APPEND) {
        int64_t bytes = forebay.file_size(file->data);
        file->position = bytes > 0 ? bytes : 0;
        shared_by_all(file); /* otherwise ranks with memory and ranks without would wait in different calls */
        /* No rank moves the end before all have read it. */
        code = shared_there(file) ? shared_seek(file, file->position) : agree(file, MPI_SUCCESS, 0);
        if (code != MPI_SUCCESS) {
            shared_end(file);
            return open_failed(file, code);
        }
    }
    if (debug() && file->rank == 0)
        fprintf(stderr, "forebay: %s: open by %d ranks, striping_factor %s, striping_unit %s%s\n", file->path,
                file->size, file->hints[HINT_striping_factor], file->hints[HINT_striping_unit],
                file->place == IN_VOLUME ? ", in a volume" : file->fd >= 0 ? ", by descriptor" : "");
    *out = file->handle;
    return MPI_SUCCESS;
}

static int64_t remove_named(enum place place, const char *path) {
    forebay_pool *pool = forebay_attached();
    if (pool == NULL)
        return -EIO;
    return place == IN_VOLUME ? in_name(forebay.volume_file_unlink(pool, path)) : forebay.unlink(pool, path);
}

/* On rank 0: removes the file if the program requested it; returns an error class. */
static int delete_on_close(const struct file *file) {
    bool deletes = file->rank == 0 && (file->amode & MPI_MODE_DELETE_ON_CLOSE);
    return deletes ? class_of(remove_named(file->place, file->path)) : MPI_SUCCESS;
}

/* Where the store is attached so, waits until it has the data; returns an error class. */
static int close_data(struct file *file) {
    int code = class_of(forebay.file_close(file->data));
    file->data = NULL;
    file->fd = -1;
    return code;
}

/* Close for ranks that share memory, or share nothing. */
static int close_together(struct file *file) {
    int mine = close_data(file);
    int code = comm_wait_for_all(file);
    if (code != MPI_SUCCESS)
        return code;
    if (!(file->amode & MPI_MODE_DELETE_ON_CLOSE))
        return mine;
    code = delete_on_close(file);
    if (file->size > 1)
        mpi.Bcast(&code, 1, MPI_INT, 0, file->comm);
    return code != MPI_SUCCESS ? code : mine;
}

/*
 * Close for ranks with a group at a daemon. They query the group through the open file while they wait, so each closes
 * the file after the waits. In a pool of several nodes an open file blocks no other call. Rank 0 ends the group when no
 * rank uses it any more, or when rank 0 leaves; then the others do not wait.
 */
static int close_apart(struct file *file) {
    int code = comm_wait_for_all(file);
    if (code == MPI_SUCCESS) {
        bool cannot_receive = file->rank != 0 && (file->amode & MPI_MODE_DELETE_ON_CLOSE);
        int mine = delete_on_close(file);
        code = comm_end(file, mine, cannot_receive ? MPI_ERR_IO : mine);
    }
    shared_end(file);
    int mine = close_data(file);
    return code != MPI_SUCCESS ? code : mine;
}

/*
 * Programs rely on this: no close returns before all ranks have finished with the file, as with ROMIO and OMPIO. Then
 * all written data can be read, and the file can be opened in another mode and removed. So every rank takes part, even
 * after an error.
 */
int file_close(struct file *file) {
    choice_keep(file);
    choice_report(file);
    /* The split call can no longer be ended, so the file is closed nevertheless. */
    int code = file->split != SPLIT_NONE ? MPI_ERR_OTHER : MPI_SUCCESS;
    int closed = file->group != 0 ? close_apart(file) : close_together(file);
    if (code == MPI_SUCCESS)
        code = closed;
    code = fail(file, code);
    handler_drop(&file->handler);
    handle_free(file->handle);
    file_free(file);
    return code;
}

int file_delete(enum place place, const char *path, bool *elsewhere) {
    int64_t answer = remove_named(place, path);
    *elsewhere = answer == -EXDEV;
    return class_of(answer);
}
