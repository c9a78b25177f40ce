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

/* How long the ranks that are here poll before they ask whether the others can still come; how long they sleep then. */
enum { PATIENCE_S = 1, NAP_US = 1000 };

int comm_wait_for_all(struct file *file) {
    if (file->size == 1)
        return MPI_SUCCESS;
    if (file->group == 0)
        return mpi.Barrier(file->comm) == MPI_SUCCESS ? MPI_SUCCESS : MPI_ERR_INTERN;
    /* A daemon knows when rank 0 is gone, which no MPI library tells here: nobody waits for it for ever. */
    MPI_Request request;
    int there = 0, code = mpi.Ibarrier(file->comm, &request);
    time_t begun = time(NULL), asked = begun;
    while (code == MPI_SUCCESS && !there) {
        code = mpi.Test(&request, &there, MPI_STATUS_IGNORE);
        time_t now = time(NULL);
        if (there || now - begun <= PATIENCE_S) {
            sched_yield();
            continue;
        }
        if (now != asked && shared_is_lost(file)) {
            /* Not for any other file, and not to be freed: the barrier is still under way in it. */
            file->comm = MPI_COMM_NULL;
            return MPI_ERR_IO;
        }
        asked = now;
        usleep(NAP_US);
    }
    return code == MPI_SUCCESS ? MPI_SUCCESS : MPI_ERR_INTERN;
}
