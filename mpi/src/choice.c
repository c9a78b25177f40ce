/*
 * The model's part in the choice between two-phase and independent access (docs/decisions/0049).
 *
 * Ranks that decide differently wait for each other for ever. So everything that a decision uses is the same on all ranks:
 * rank 0's calibration, which the others get in the open's exchange; the pattern, from the call's exchange; and
 * corrections, which follow from times that the call's exchange has, in place of an own time. A rank may report any time:
 * the choice can become wrong by that, but not different. Calls without an exchange teach nothing. Files begin with the
 * corrections that rank 0 has from earlier ones, which travel with its calibration.
 */
#include "driver.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    SWITCHED_OFF = -1,        /* in place of a calibration's first number */
    PING_BYTES = 8,
    PING_COUNT = 16,
    DATA_BYTES = 64 << 10,
    DATA_COUNT = 8,
    WARM_COUNT = 2,           /* not counted: connections are made */
    REQUEST_COUNT = 8,
    PING_TAG = 1,
    SLEEP_US = 200,           /* of the ranks that do not measure */
    GATE_BYTES = 16 << 20,    /* of a rank, in the best case for an exchange */
    BLOCK_BYTES = 64 << 10,   /* of a rank with one range, in the best case */
    FACTOR_ONE = 1024,        /* of corrections */
};

/* This process's calibration, which is sent if it is rank 0. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct forebay_calibration known;
static bool is_read, is_measured;
/* What files of so many ranks have taught this process, if it is rank 0. */
static struct choice_learnt learnt[REACHES];
static int learnt_ranks;

int64_t choice_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* How many ranks of the job are on this node, from the launcher; 0 if it does not say. */
static int64_t ranks_here(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMIX_LOCAL_SIZE"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const char *set = getenv(names[i]);
        if (set != NULL && atoll(set) > 0)
            return atoll(set);
    }
    return 0;
}

int64_t choice_place(void) {
    /* Ranks that share memory may use different nodes of a pool, each with a pool directory of its own. */
    uint64_t hash = (uint64_t)shared_node();
    const char *pool = getenv("FOREBAY_POOL");
    for (const char *at = pool != NULL ? pool : ""; *at != 0; at++)
        hash = (hash ^ (unsigned char)*at) * 1099511628211u;
    return (int64_t)(hash >> 1);
}

/* Whether data of the file are on nodes of the ranks (0), there and on others (1), or on others alone (2). */
static int reach_of(const struct file *file) { return !file->far ? 0 : file->near ? 1 : 2; }

/*
 * A quarter nearer to none: a way that was slow once is not taken, so nothing teaches that it has become faster.
 */
static void fade(struct forebay_corrections *corrections) {
    for (size_t way = 0; way < sizeof corrections->factors / sizeof *corrections->factors; way++)
        if (corrections->factors[way] != 0)
            corrections->factors[way] += (FACTOR_ONE - corrections->factors[way]) / 4;
}

void choice_keep(const struct file *file) {
    const struct choice *choice = &file->choice;
    if (file->rank != 0 || file->size == 1 || !choice_is_known(file))
        return;
    struct choice_learnt now = {.one_place = choice->one_place, .corrections = choice->corrections};
    /* No exchange followed the last call. In a two-phase one this rank has waited for the others. */
    if (choice->is_known && choice->together)
        forebay.model_learn(&now.corrections, choice->writes, true, choice->plain_ns, choice->measured_ns);
    /* Another file may have taught something since this one was opened. */
    if (memcmp(&now.corrections, &choice->begun_with, sizeof now.corrections) == 0)
        return;
    fade(&now.corrections);
    pthread_mutex_lock(&lock);
    if (learnt_ranks != file->size)
        memset(learnt, 0, sizeof learnt);
    learnt_ranks = file->size;
    learnt[reach_of(file)] = now;
    pthread_mutex_unlock(&lock);
}

void choice_offer(const struct file *file, struct choice_offer *mine) {
    forebay_pool *pool = forebay_attached();
    pthread_mutex_lock(&lock);
    if (!is_read && pool != NULL) {
        const char *named = getenv("FOREBAY_MODEL");
        int found = forebay.model_calibration(pool, &known);
        if (found < 0) {
            char words[1024] = "";
            forebay.attach_error(words, sizeof words);
            fprintf(stderr, "forebay: warning: collective I/O is chosen without a calibration: %s\n", words);
        }
        if (found <= 0)
            memset(&known, 0, sizeof known);
        /* After an error the rule decides, as without the model. */
        if (found < 0 || (named != NULL && strcmp(named, "off") == 0))
            known.numbers[0] = SWITCHED_OFF;
        is_read = true;
    }
    mine->calibration = known;
    mine->is_measured = is_measured;
    if (learnt_ranks == file->size)
        memcpy(mine->learnt, learnt, sizeof learnt);
    pthread_mutex_unlock(&lock);
    mine->place = choice_place();
    int64_t here = ranks_here();
    mine->nodes = here > 0 && here < file->size ? (file->size + here - 1) / here : 1;
}

/*
 * The least time of a message and back, halved. `buffer` has room for it. Where ranks share processors and wait without
 * sleeping, most messages wait for a processor. A time that is too long would rule two-phase calls out for ever, as ways
 * that are not taken teach nothing; one that is too short is corrected by the first calls.
 */
static int64_t ping(const struct file *file, int peer, char *buffer, int bytes, int count) {
    int64_t least = INT64_MAX;
    for (int i = -WARM_COUNT; i < count; i++) {
        int64_t start = choice_clock();
        if (file->rank == 0) {
            mpi.Send(buffer, bytes, MPI_BYTE, peer, PING_TAG, file->comm);
            mpi.Recv(buffer, bytes, MPI_BYTE, peer, PING_TAG, file->comm, MPI_STATUS_IGNORE);
        } else {
            mpi.Recv(buffer, bytes, MPI_BYTE, 0, PING_TAG, file->comm, MPI_STATUS_IGNORE);
            mpi.Send(buffer, bytes, MPI_BYTE, 0, PING_TAG, file->comm);
        }
        int64_t took = (choice_clock() - start) / 2;
        if (i >= 0 && took < least)
            least = took;
    }
    return least;
}

/* The least time of a request for data on another node; 0 if this rank has all data on its own. */
static int64_t request_time(const struct file *file) {
    int64_t least = 0;
    for (int i = 0; i < REQUEST_COUNT && forebay.file_elsewhere(file->data) > 0; i++) {
        int64_t start = choice_clock();
        if (forebay.file_size(file->data) < 0)
            return 0;
        int64_t took = choice_clock() - start;
        least = least == 0 || took < least ? took : least;
    }
    return least;
}

/* Some milliseconds, once in a job: later opens find the result on rank 0. */
static void measure(struct file *file, int64_t first_place, int64_t processors) {
    int64_t mine = choice_place() != first_place ? -file->rank : -file->size, peer = mine;
    mpi.Allreduce(&mine, &peer, 1, MPI_INT64_T, MPI_MAX, file->comm);
    peer = -peer;
    int64_t values[3] = {0, 0, 0}, all[3] = {0};
    char *buffer = file->rank == 0 || file->rank == peer ? calloc(1, DATA_BYTES) : NULL;
    char small[PING_BYTES] = {0};
    /* Without memory for the larger message both send the smaller one only. */
    int64_t has_memory = file->rank == 0 || file->rank == peer ? buffer != NULL : 1, without = 0;
    int64_t lacks = !has_memory;
    mpi.Allreduce(&lacks, &without, 1, MPI_INT64_T, MPI_MAX, file->comm);
    if (peer < file->size && (file->rank == 0 || file->rank == peer)) {
        int64_t message = ping(file, (int)peer, small, PING_BYTES, PING_COUNT);
        int64_t data = without ? 0 : ping(file, (int)peer, buffer, DATA_BYTES, DATA_COUNT);
        if (file->rank == 0) {
            values[0] = message > 0 ? message : 1;
            values[1] = data > message ? (data - message) * 1000 / (DATA_BYTES - PING_BYTES) : 1;
        }
        values[2] = request_time(file);
    }
    free(buffer);
    /* The ranks that only wait sleep: some libraries poll, and ranks may be more than processors. */
    MPI_Request told;
    int there = 0, code = mpi.Iallreduce(values, all, 3, MPI_INT64_T, MPI_MAX, file->comm, &told);
    for (bool again = false; code == MPI_SUCCESS && !there; again = true) {
        if (again)
            usleep(SLEEP_US);
        code = mpi.Test(&told, &there, MPI_STATUS_IGNORE);
    }
    /* A request takes as long as a message and its answer, at least. */
    int64_t request = all[2] > 2 * all[0] ? all[2] : 2 * all[0];
    struct forebay_calibration *found = &file->choice.calibration;
    if (forebay.model_quick(all[0], all[1] > 0 ? all[1] : 1, request, processors, found) < 0)
        memset(found, 0, sizeof *found);
    if (file->rank != 0)
        return;
    pthread_mutex_lock(&lock);
    known = *found;
    is_measured = true;
    if (known.numbers[0] == 0)
        known.numbers[0] = SWITCHED_OFF;
    pthread_mutex_unlock(&lock);
    if (debug())
        fprintf(stderr,
                "forebay: %s: measured for the choice: a message %lld ns, its data %lld ps a byte, a request %lld ns\n",
                file->path, (long long)all[0], (long long)all[1], (long long)request);
}

void choice_start(struct file *file, const struct choice_offer *first, bool one_place) {
    struct choice *choice = &file->choice;
    choice->calibration = first->calibration;
    choice->one_place = one_place;
    if (first->learnt[reach_of(file)].one_place == choice->one_place)
        choice->corrections = first->learnt[reach_of(file)].corrections;
    choice->begun_with = choice->corrections;
    choice->nodes = one_place ? 1 : first->nodes > 1 ? first->nodes : 2;
    choice->gate_run = -1;
    choice->end = -1;
    /* A document has what the medium takes, and at most the messages of another day. */
    if (first->calibration.numbers[0] >= 0 && !first->is_measured && file->size > 1 && !one_place && file->far)
        measure(file, first->place, file->processors);
    if (choice->calibration.numbers[0] < 0)
        memset(&choice->calibration, 0, sizeof choice->calibration);
}

bool choice_is_known(const struct file *file) { return file->choice.calibration.numbers[0] != 0; }

/* The model's answer for a pattern of all ranks. */
static bool predict(const struct file *file, bool writes, int64_t bytes, int64_t run, int64_t gap, bool continued,
                    const struct forebay_corrections *corrections, struct forebay_times *times) {
    int aggregators = 1;
    int64_t window = 0;
    aggregators_of(file, &aggregators, &window);
    /* A file has at most so many nodes as backing files. How many of them are on nodes without ranks is not known. */
    int64_t backing_files = atoll(file->hints[HINT_striping_factor]), nodes = file->choice.nodes;
    int64_t spread = backing_files < nodes ? backing_files : nodes;
    struct forebay_pattern pattern = {
        .ranks = file->size,
        .nodes = file->choice.nodes < file->size ? file->choice.nodes : file->size,
        .aggregators = aggregators,
        .bytes = bytes,
        .run_bytes = run,
        .gap_bytes = gap,
        .buffer_bytes = window,
        /* The calibration has measured a file with several backing files, on the targets of one node. */
        .targets = file->far && file->near && spread > 1 ? spread : 1,
        .writes = writes,
        .far = reach_of(file),
        .fewer_aggregators = atoll(file->hints[HINT_cb_nodes]) < 1,
        .continued = continued,
    };
    return forebay.model_predict(&file->choice.calibration, corrections, &pattern, times) == 1;
}

/*
 * The best case for an exchange: the ranks' runs fill the range, and there are many. Where each rank has one range, these
 * are short, and follow each other: on a medium with seeks, few long accesses are faster. Without corrections, which would
 * close the gate for ever after one slow call.
 */
bool choice_may(struct file *file, bool writes) {
    struct choice *choice = &file->choice;
    int aggregators;
    int64_t window;
    aggregators_of(file, &aggregators, &window);
    /* Fewer may be chosen where no hint says how many. */
    aggregators = 2 * aggregators + (atoll(file->hints[HINT_cb_nodes]) < 1);
    if (choice->gate_run != file->shortest_run || choice->gate_aggregators != aggregators ||
        choice->gate_window != window) {
        static const struct forebay_corrections none;
        struct forebay_times times;
        int64_t run = file->shortest_run, gap = 0;
        choice->gate_run = run;
        choice->gate_aggregators = aggregators;
        choice->gate_window = window;
        bool has_runs = run < GATE_BYTES && run > 0 && !__builtin_mul_overflow(run, file->size - 1, &gap);
        for (int way = 0; way < 2; way++)
            choice->gate[way] = has_runs ? predict(file, way, GATE_BYTES, run, gap, true, &none, &times)
                                         : predict(file, way, BLOCK_BYTES, BLOCK_BYTES, 0, true, &none, &times);
    }
    return choice->gate[writes];
}

bool choice_together(struct file *file, bool writes, const struct together *all, struct forebay_times *times) {
    int64_t run = all->run > 0 ? all->run : 1, bytes = all->bytes > 0 ? all->bytes : 0;
    int64_t runs = bytes / run + (bytes % run != 0);
    int64_t of_each = runs > 0 ? (all->last - all->first) / runs : 0; /* of the range, to the next run of a rank */
    int64_t gap = runs > 1 && of_each > run ? of_each - run : 0;
    bool continued = all->first == file->choice.end;
    file->choice.end = all->last;
    memset(times, 0, sizeof *times);
    return predict(file, writes, bytes, run, gap, continued, &file->choice.corrections, times);
}

void choice_note(struct file *file, bool writes, bool together, const struct forebay_times *times) {
    struct choice *choice = &file->choice;
    choice->is_known = true;
    choice->writes = writes;
    choice->together = together;
    choice->predicted_ns = together ? times->collective_ns : times->independent_ns;
    choice->plain_ns = together ? times->collective_plain_ns : times->independent_plain_ns;
    choice->measured_ns = choice->file_ns = 0;
}

static void count(struct choice *choice, int64_t measured_ns, int64_t file_ns) {
    if (!choice->is_known || measured_ns <= 0)
        return;
    __typeof__(choice->tally[0][0]) *tally = &choice->tally[choice->writes][choice->together];
    tally->calls++;
    /* Any number may have been reported. */
    if (__builtin_add_overflow(tally->predicted_ns, choice->predicted_ns, &tally->predicted_ns))
        tally->predicted_ns = INT64_MAX;
    if (__builtin_add_overflow(tally->measured_ns, measured_ns, &tally->measured_ns))
        tally->measured_ns = INT64_MAX;
    if (__builtin_add_overflow(tally->file_ns, file_ns > 0 ? file_ns : 0, &tally->file_ns))
        tally->file_ns = INT64_MAX;
}

void choice_learn(struct file *file, int64_t measured_ns, int64_t file_ns) {
    struct choice *choice = &file->choice;
    count(choice, measured_ns, file_ns);
    if (choice->is_known)
        forebay.model_learn(&choice->corrections, choice->writes, choice->together, choice->plain_ns, measured_ns);
    choice->is_known = false;
}

void choice_report(struct file *file) {
    struct choice *choice = &file->choice;
    if (!debug() || file->rank != 0)
        return;
    /* The last call's times are those of this rank, as no exchange followed. */
    count(choice, choice->measured_ns, choice->file_ns);
    choice->is_known = false;
    for (int way = 0; way < 4; way++) {
        __typeof__(choice->tally[0][0]) *tally = &choice->tally[way & 1][way >> 1];
        if (tally->calls == 0)
            continue;
        char of_file[64] = "";
        if (way >> 1)
            snprintf(of_file, sizeof of_file, ", of which %lld in the file",
                     (long long)(tally->file_ns / tally->calls / 1000));
        fprintf(stderr, "forebay: %s: %lld collective %s were %s: predicted %lld us each, measured %lld%s\n", file->path,
                (long long)tally->calls, way & 1 ? "writes" : "reads", way >> 1 ? "two-phase" : "independent",
                (long long)(tally->predicted_ns / tally->calls / 1000),
                (long long)(tally->measured_ns / tally->calls / 1000), of_file);
    }
}
