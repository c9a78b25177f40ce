/*
 * The communicators of files. Creating one takes as long as the rest of an open. So a program's communicator keeps one,
 * its resident, for the files that are opened with it. An open takes the resident if all ranks find it free, which
 * costs no extra message, and otherwise creates another. So the order in which files are closed does not matter.
 *
 * A resident is freed with the program's communicator. If that lives longer, it is freed with MPI_COMM_SELF, the first
 * to be freed in MPI_Finalize. A resident that a file still uses is then freed with the file. There are few residents,
 * as MPI libraries have some two thousand numbers for communicators. None has a copy of the attributes of the program's
 * communicator.
 */
#include "driver.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { RESIDENTS_MAX = 16 };

struct resident {
    MPI_Comm comm;
    int64_t id;  /* the same on all ranks, unique in the program's communicator */
    bool in_use; /* a file that is open uses it */
    bool orphan; /* the program's communicator was freed */
    struct resident *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int keyval = MPI_KEYVAL_INVALID, end_keyval = MPI_KEYVAL_INVALID;
static struct resident *all;
static bool ended;
static int count;
static int64_t last_id;

static int copy_none(MPI_Comm comm, int key, void *extra, void *value, void *out, int *flag) {
    (void)comm, (void)key, (void)extra, (void)value, (void)out;
    *flag = 0;
    return MPI_SUCCESS;
}

/* The caller holds the lock. */
static void unlist(const struct resident *resident) {
    struct resident **at = &all;
    while (*at != NULL && *at != resident)
        at = &(*at)->next;
    if (*at != NULL) {
        *at = resident->next;
        count--;
    }
}

/* Called when the program frees its communicator. */
static int forget(MPI_Comm comm, int key, void *value, void *extra) {
    (void)comm, (void)key, (void)extra;
    struct resident *resident = value;
    pthread_mutex_lock(&lock);
    bool in_use = resident->in_use;
    resident->orphan = true;
    if (!in_use)
        unlist(resident);
    pthread_mutex_unlock(&lock);
    if (in_use)
        return MPI_SUCCESS;
    if (resident->comm != MPI_COMM_NULL)
        mpi.Comm_free(&resident->comm);
    free(resident);
    return MPI_SUCCESS;
}

/*
 * Called when MPI_Finalize begins. Residents of the program's remaining communicators are freed now, as later calls
 * could not free them.
 */
static int end(MPI_Comm comm, int key, void *value, void *extra) {
    (void)comm, (void)key, (void)value, (void)extra;
    MPI_Comm free_ones[RESIDENTS_MAX];
    int found = 0;
    pthread_mutex_lock(&lock);
    ended = true;
    for (struct resident *at = all; at != NULL && found < RESIDENTS_MAX; at = at->next)
        if (!at->in_use && at->comm != MPI_COMM_NULL) {
            free_ones[found++] = at->comm;
            at->comm = MPI_COMM_NULL;
        }
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < found; i++)
        mpi.Comm_free(&free_ones[i]);
    return MPI_SUCCESS;
}

static void make_keyvals(void) {
    if (mpi.Comm_create_keyval(copy_none, forget, &keyval, NULL) != MPI_SUCCESS)
        keyval = MPI_KEYVAL_INVALID;
    else if (mpi.Comm_create_keyval(copy_none, end, &end_keyval, NULL) != MPI_SUCCESS ||
             mpi.Comm_set_attr(MPI_COMM_SELF, end_keyval, NULL) != MPI_SUCCESS)
        keyval = MPI_KEYVAL_INVALID; /* then every file gets a communicator of its own */
}

static struct resident *resident_of(MPI_Comm comm) {
    struct resident *resident = NULL;
    int found = 0;
    pthread_once(&once, make_keyvals);
    if (keyval == MPI_KEYVAL_INVALID || mpi.Comm_get_attr(comm, keyval, &resident, &found) != MPI_SUCCESS || !found)
        return NULL;
    return resident;
}

void comm_offer(MPI_Comm comm, struct comm_offer *mine) {
    struct resident *resident = resident_of(comm);
    pthread_mutex_lock(&lock);
    mine->resident = resident != NULL && !resident->in_use && !ended ? resident->id : 0;
    mine->not_resident = ~mine->resident;
    mine->next = last_id + 1;
    mine->full = count >= RESIDENTS_MAX;
    pthread_mutex_unlock(&lock);
}

int comm_take(struct file *file, MPI_Comm comm, const struct comm_offer *all_offer) {
    struct resident *resident = resident_of(comm);
    if (all_offer->resident > 0 && all_offer->resident == ~all_offer->not_resident && resident != NULL) {
        pthread_mutex_lock(&lock);
        resident->in_use = true;
        pthread_mutex_unlock(&lock);
        file->resident = resident;
        file->comm = resident->comm;
        return MPI_SUCCESS;
    }
    MPI_Group group;
    int code = mpi.Comm_group(comm, &group);
    if (code == MPI_SUCCESS) {
        code = mpi.Comm_create(comm, group, &file->comm);
        mpi.Group_free(&group);
    }
    if (code != MPI_SUCCESS) {
        file->comm = MPI_COMM_NULL;
        return MPI_ERR_COMM;
    }
    mpi.Comm_set_errhandler(file->comm, MPI_ERRORS_RETURN);
    pthread_mutex_lock(&lock);
    if (last_id < all_offer->next)
        last_id = all_offer->next;
    bool late = ended;
    pthread_mutex_unlock(&lock);
    if (resident != NULL || late || all_offer->full || keyval == MPI_KEYVAL_INVALID || (resident = calloc(1, sizeof *resident)) == NULL)
        return MPI_SUCCESS;
    *resident = (struct resident){.comm = file->comm, .id = all_offer->next, .in_use = true};
    if (mpi.Comm_set_attr(comm, keyval, resident) != MPI_SUCCESS) {
        free(resident);
        return MPI_SUCCESS;
    }
    pthread_mutex_lock(&lock);
    resident->next = all;
    all = resident;
    count++;
    pthread_mutex_unlock(&lock);
    file->resident = resident;
    return MPI_SUCCESS;
}

void comm_give_back(struct file *file) {
    struct resident *resident = file->resident;
    if (file->comm == MPI_COMM_NULL)
        return;
    if (resident == NULL) {
        mpi.Comm_free(&file->comm);
        return;
    }
    pthread_mutex_lock(&lock);
    resident->in_use = false;
    bool orphan = resident->orphan;
    bool goes = orphan || ended;
    if (goes)
        resident->comm = MPI_COMM_NULL;
    if (orphan)
        unlist(resident);
    pthread_mutex_unlock(&lock);
    if (goes)
        mpi.Comm_free(&file->comm);
    file->comm = MPI_COMM_NULL;
    file->resident = NULL;
    if (orphan)
        free(resident);
}

enum {
    POLL_S = 1, /* ranks poll for this time before they query whether the others can still arrive */
    SLEEP_US = 1000,  /* then they sleep for this time between polls */
    /*
     * An interruption of this many seconds is final, as it is for the daemons (LOCKS_OF_UNREACHED_MS of crates/types).
     * A shorter one does not mean that rank 0 has ended, and most ranks do not notice it.
     */
    OUTAGE_S = 60,
    LAST_MESSAGE_S = 5, /* rank 0 has ended the group, and its last message is under way */
};

static time_t seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec;
}

/*
 * Waits until `request`, in which all ranks of a group take part, is done. MPI_ERR_IO when that may never happen; then
 * `*lost` is the daemon's answer. The daemon detects the end of rank 0. The MPI library does not report it here, so
 * without the daemon the wait might never end.
 *
 * When all ranks have arrived (`all_came`) the wait is short, and rank 0 ends the group after it. So the wait is
 * limited to the longest interruption. A rank that finds the group ended waits for the last messages only.
 */
static int wait_for(struct file *file, MPI_Request *request, bool all_came, int64_t *lost) {
    time_t begun = seconds(), asked = begun, unreached = 0, gone = 0;
    for (;;) {
        int there = 0, code = mpi.Test(request, &there, MPI_STATUS_IGNORE);
        if (code != MPI_SUCCESS || there)
            return code == MPI_SUCCESS ? MPI_SUCCESS : MPI_ERR_INTERN;
        time_t now = seconds();
        if (now - begun <= POLL_S) {
            sched_yield();
            continue;
        }
        bool leaves = all_came ? now - begun > OUTAGE_S || (gone != 0 && now - gone > LAST_MESSAGE_S)
                               : gone != 0 || (unreached != 0 && now - unreached > OUTAGE_S);
        if (leaves)
            return MPI_ERR_IO;
        if (now != asked && gone == 0) {
            *lost = shared_ask(file);
            asked = seconds(); /* an answer may take a long time */
            gone = *lost == -ESTALE ? asked : 0;
            unreached = *lost >= 0 ? 0 : unreached != 0 ? unreached : asked;
            continue;
        }
        usleep(SLEEP_US);
    }
}

/* Begins the second of the two waits of a close. */
static int end_begin(struct file *file, int code, MPI_Request *request) {
    file->close_codes[0] = file->close_codes[1] = code;
    return mpi.Iallreduce(&file->close_codes[0], &file->close_codes[1], 1, MPI_INT64_T, MPI_MAX, file->comm, request);
}

/*
 * Requests of this rank are still in progress. So their communicator is not reused and not freed, and neither is
 * `file`.
 */
static void leave(struct file *file) {
    file->comm = MPI_COMM_NULL;
    file->has_left = true;
}

int comm_wait_for_all(struct file *file) {
    if (file->size == 1)
        return MPI_SUCCESS;
    if (file->group == 0)
        return mpi.Barrier(file->comm) == MPI_SUCCESS ? MPI_SUCCESS : MPI_ERR_INTERN;
    MPI_Request request;
    if (mpi.Ibarrier(file->comm, &request) != MPI_SUCCESS)
        return MPI_ERR_INTERN;
    int64_t lost = 0;
    int code = wait_for(file, &request, false, &lost);
    if (code == MPI_SUCCESS)
        return MPI_SUCCESS;
    /* The other ranks may still arrive, through the barrier in progress. Then they must not wait for this rank. */
    end_begin(file, code, &request);
    leave(file);
    if (code == MPI_ERR_IO)
        shared_class(file, lost);
    return code;
}

int comm_end(struct file *file, int code, int unknown) {
    MPI_Request request;
    int64_t lost = 0;
    if (end_begin(file, code, &request) != MPI_SUCCESS)
        return MPI_ERR_INTERN;
    int waited = wait_for(file, &request, true, &lost);
    if (waited == MPI_SUCCESS)
        return (int)file->close_codes[1];
    leave(file);
    return waited == MPI_ERR_IO ? unknown : waited;
}
