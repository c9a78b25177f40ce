/*
 * The decision whether a collective call goes through aggregators (exchange.c), or each rank moves its own data.
 */
#include "driver.h"
#include "exchange.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    WINDOW_BYTES = 4 << 20, /* unless cb_buffer_size is set */
    WINDOW_BYTES_MIN = 4096,
    SHORT_RUN_BYTES = 32768,  /* largest data inside a request to another node */
    RUNS_FEW = 8,             /* fewer runs do not justify an exchange between ranks */
    READ_BYTES_MIN = 1 << 20, /* for one rank: reading less, with the gaps, is faster than an exchange */
    SPARSE = 4,               /* in a range this many times the ranks' data most bytes are gaps */
};

/*
 * Without a calibration: decides between the two ways, from values that are the same on all ranks. On a medium of this node each rank is
 * faster alone, as libforebay.so moves many short runs at a time. If data are on other nodes, each short run that is
 * written is a request. Short runs are read with the gaps between them, which with many bytes costs more than an
 * exchange (measured: docs/decisions/0021). If most of the range is gaps, the ranks' runs do not combine to long ones.
 */
static bool pays_by_rule(const struct file *file, bool writes, const struct together *all) {
    int64_t runs = all->bytes / (all->run > 0 ? all->run : 1), range = all->last - all->first;
    return file->far && all->run <= SHORT_RUN_BYTES && runs >= RUNS_FEW && (writes || all->bytes >= READ_BYTES_MIN) &&
           range / SPARSE / file->size <= all->bytes;
}

static const char *hint_of(const struct file *file, bool writes) {
    return file->hints[writes ? HINT_romio_cb_write : HINT_romio_cb_read];
}

static void tell(const struct file *file, bool writes, bool together, int64_t run, const char *why) {
    if (!debug() || file->rank != 0)
        return;
    char runs[64] = "in one run";
    if (run < INT64_MAX)
        snprintf(runs, sizeof runs, "in runs of %lld bytes", (long long)run);
    fprintf(stderr, "forebay: %s: collective %s is %s (hint: %s; %s; data on %s; %s)\n", file->path,
            writes ? "write" : "read", together ? "two-phase" : "independent",
            hint_of(file, writes)[0] != 0 ? hint_of(file, writes) : "automatic", runs,
            !file->far   ? "this node"
            : file->near ? "other nodes"
                         : "nodes without ranks",
            why);
}

/* Whether calls with the file's views can be two-phase, unless a hint says so. */
static bool can_pay(struct file *file, bool writes) {
    if (choice_is_known(file))
        return choice_may(file, writes);
    return file->far && file->shortest_run <= SHORT_RUN_BYTES;
}

bool may_two_phase(struct file *file, bool writes) {
    const char *hint = hint_of(file, writes);
    const char *why = "as asked";
    /* An aggregator's window is a range of the file, so the data for it must be one range of each rank's data. */
    if (file->size == 1)
        why = "one rank";
    else if (!file->apart || file->atomic || file->view.rep != NULL)
        why = "the view, its representation or atomic mode rules two-phase out";
    else if (strcmp(hint, "enable") == 0 || (strcmp(hint, "disable") != 0 && can_pay(file, writes)))
        return true;
    else if (strcmp(hint, "disable") != 0)
        why = choice_is_known(file) ? "the model says that no exchange pays"
              : file->far           ? "long runs"
                                    : "ranks are fast alone";
    tell(file, writes, false, file->shortest_run, why);
    return false;
}

bool wants_two_phase(struct file *file, bool writes, const struct together *mine, struct together *all) {
    /* The last two numbers are times of the last call. By the first of them the ranks correct predictions alike. */
    enum { WORDS = 7 };
    int64_t words[WORDS] = {mine->code, 0, -INT64_MAX, 0, 0, file->choice.measured_ns, file->choice.file_ns};
    int64_t most[WORDS] = {0};
    if (mine->code == MPI_SUCCESS && mine->bytes > 0) {
        words[1] = mine->bytes;
        words[2] = -mine->first;
        words[3] = mine->last;
        words[4] = mine->run;
    }
    if (mpi.Allreduce(words, most, WORDS, MPI_INT64_T, MPI_MAX, file->comm) != MPI_SUCCESS)
        most[0] = MPI_ERR_INTERN;
    *all = (struct together){.code = (int)most[0], .bytes = most[1], .first = -most[2], .last = most[3], .run = most[4]};
    if (all->bytes == 0)
        all->first = all->last;
    bool asked = strcmp(hint_of(file, writes), "enable") == 0, together = asked;
    char why[160] = "as asked";
    struct forebay_times times;
    if (choice_is_known(file)) {
        choice_learn(file, most[5], most[6]);
        bool model = choice_together(file, writes, all, &times);
        together = asked || model;
        choice_note(file, writes, together, &times);
        all->aggregators = times.aggregators;
        if (!asked)
            snprintf(why, sizeof why, "the model predicts %lld us two-phase (aggregators: %lld) and %lld independent",
                     (long long)(times.collective_ns / 1000), (long long)times.aggregators,
                     (long long)(times.independent_ns / 1000));
    } else if (!asked) {
        together = pays_by_rule(file, writes, all);
        snprintf(why, sizeof why, "at most %lld bytes of a rank, in a range of %lld", (long long)all->bytes,
                 (long long)(all->last - all->first));
    }
    tell(file, writes, together, all->run, why);
    return together;
}

void aggregators_of(const struct file *file, int *aggregators, int64_t *window) {
    int64_t nodes = atoll(file->hints[HINT_cb_nodes]);
    if (nodes < 1)
        nodes = file->processors;
    *aggregators = (int)(nodes < 1 ? 1 : nodes < file->size ? nodes : file->size);
    *window = atoll(file->hints[HINT_cb_buffer_size]);
    if (*window <= 0)
        *window = WINDOW_BYTES;
    /* Counts of bytes, and of numbers, two for each piece of one byte or more, go to the MPI library as int. */
    int64_t most = (int64_t)0x20000000 / file->size;
    if (most > WINDOW_BYTES_MAX)
        most = WINDOW_BYTES_MAX;
    if (*window > most)
        *window = most;
    if (*window < WINDOW_BYTES_MIN)
        *window = WINDOW_BYTES_MIN;
}
