/*
 * The files' own communicators. To make one takes as long as all the rest of an open, so a program's communicator keeps one,
 * its resident, which the files that are opened by it use in turn: an open takes it if all ranks find it free, as they tell
 * each other anyway, and makes another if not. Which of several files is closed first then matters to nobody.
 *
 * A resident goes with the program's communicator, or, where that lives longer, with MPI_COMM_SELF, which is the first to go
 * in MPI_Finalize. One that a file still uses then goes with the file. There are few of them: MPI libraries have some two
 * thousand numbers for communicators. None has a copy of what the program attached to its own.
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
    int64_t id;  /* the same on all ranks, and of no other resident of this program's communicator */
    bool in_use; /* by a file that is open */
    bool orphan; /* the program's communicator is gone */
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

/* With the lock held. */
static void unlist(const struct resident *resident) {
    struct resident **at = &all;
    while (*at != NULL && *at != resident)
        at = &(*at)->next;
    if (*at != NULL) {
        *at = resident->next;
        count--;
    }
}

/* The program frees its communicator. */
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

/* MPI_Finalize has begun: the communicators of the program that are left go when no other can be freed any more. */
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
        keyval = MPI_KEYVAL_INVALID; /* every file has its own then */
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
    PATIENCE_S = 1, /* so long ranks poll before they ask whether the others can still come */
    NAP_US = 1000,  /* so long they sleep between polls then */
    /*
     * An interruption of so many seconds is final, as it is for the daemons (LOCKS_OF_UNREACHED_MS of crates/types). A
     * shorter one says nothing of rank 0, and most ranks do not notice it.
     */
    OUTAGE_S = 60,
    PARTING_S = 5, /* rank 0 has ended the group, and its last message is under way */
};

static time_t seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec;
}

/*
 * Waits until `request` is done, in which all ranks of a group take part. MPI_ERR_IO where it may never be; `*lost` is
 * then what the daemon answered. A daemon knows when rank 0 is gone, which no MPI library tells here: nobody waits for
 * it for ever.
 *
 * When all ranks have come (`all_came`) the wait is short, and rank 0 ends the group after it. So the wait lasts no
 * longer than an interruption may, and who finds the group gone waits for the last messages alone.
 */
static int wait_for(struct file *file, MPI_Request *request, bool all_came, int64_t *lost) {
    time_t begun = seconds(), asked = begun, unheard = 0, gone = 0;
    for (;;) {
        int there = 0, code = mpi.Test(request, &there, MPI_STATUS_IGNORE);
        if (code != MPI_SUCCESS || there)
            return code == MPI_SUCCESS ? MPI_SUCCESS : MPI_ERR_INTERN;
        time_t now = seconds();
        if (now - begun <= PATIENCE_S) {
            sched_yield();
            continue;
        }
        bool leaves = all_came ? now - begun > OUTAGE_S || (gone != 0 && now - gone > PARTING_S)
                               : gone != 0 || (unheard != 0 && now - unheard > OUTAGE_S);
        if (leaves)
            return MPI_ERR_IO;
        if (now != asked && gone == 0) {
            *lost = shared_ask(file);
            asked = seconds(); /* an answer may take long */
            gone = *lost == -ESTALE ? asked : 0;
            unheard = *lost >= 0 ? 0 : unheard != 0 ? unheard : asked;
            continue;
        }
        usleep(NAP_US);
    }
}

/* Begins the second of the two waits of a close. */
static int part_begin(struct file *file, int code, MPI_Request *request) {
    file->parting[0] = file->parting[1] = code;
    return mpi.Iallreduce(&file->parting[0], &file->parting[1], 1, MPI_INT64_T, MPI_MAX, file->comm, request);
}

/*
 * Requests of this rank are still under way: their communicator is for no other file, and is not freed; nor is `file`.
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
    /* The others may all come yet, by way of the barrier that is under way. They are not to wait for this rank then. */
    part_begin(file, code, &request);
    leave(file);
    if (code == MPI_ERR_IO)
        shared_class(file, lost);
    return code;
}

int comm_part(struct file *file, int code, int unheard) {
    MPI_Request request;
    int64_t lost = 0;
    if (part_begin(file, code, &request) != MPI_SUCCESS)
        return MPI_ERR_INTERN;
    int waited = wait_for(file, &request, true, &lost);
    if (waited == MPI_SUCCESS)
        return (int)file->parting[1];
    leave(file);
    return waited == MPI_ERR_IO ? unheard : waited;
}
