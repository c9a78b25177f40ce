/*
 * io-modelling: single reads and writes of one size, each timed by itself, in several orders. What counts is the
 * distribution of the times, not the bandwidth. See README.md.
 */
#include "kernel.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>

enum { ORDERS = 4, OPERATIONS = 2, MAX_PHASES = ORDERS * OPERATIONS };
static const char *const order_names[ORDERS] = {"sequential", "random", "strided", "reverse"};
static const char *const operation_names[OPERATIONS] = {"write", "read"};

static uint64_t count = 10000, size = 4096, stride = 16;
static int access_way = POSIX, files, operations;
static bool direct, sync_each;
static const char *orders_text = "sequential,random", *times_path;

static const struct option options[] = {
    {"count", COUNT, &count, "N", "timed calls of each rank in each phase", 1, 1 << 28},
    {"size", SIZE, &size, "SIZE", "bytes of a call", 1, 1 << 30},
    {"orders", TEXT, &orders_text, "ORDER,...",
     "sequential; random: each block once; strided: every N-th block, then those after them; reverse", 0, 0},
    {"stride", COUNT, &stride, "N", "blocks from one to the next in the strided order", 2, 1 << 28},
    {"operations", CHOICE, &operations, "both|write|read", "write leaves its file; read needs one that is there", 0,
     0},
    {"api", CHOICE, &access_way, "posix|independent", "POSIX calls or MPI-IO", 0, 0},
    {"files", CHOICE, &files, "shared|rank", "one file with a part for each rank, or one file for each rank", 0, 0},
    {"direct", FLAG, &direct, NULL, "past the page cache (O_DIRECT); needs --api posix", 0, 0},
    {"sync-each", FLAG, &sync_each, NULL, "fsync or MPI_File_sync after each write, timed with it", 0, 0},
    {"times", TEXT, &times_path, "PATH",
     "write every call to this file, a line each:\nphase,rank,number,offset,start_seconds,seconds", 0, 0},
    {NULL, FLAG, NULL, NULL, NULL, 0, 0},
};

static const struct kernel kernel = {
    "io-modelling",
    "distribution of the times of single reads and writes",
    "Each rank writes its blocks, one timed call a block, in each order, and then reads them in each order. Results\n"
    "are the percentiles of all calls of a phase, and their number by powers of two of a microsecond.",
    "  mpirun -n 1 io-modelling --verify /forebay/blocks\n"
    "  mpirun -n 4 io-modelling --size 1MiB --count 1000 --orders sequential,random,strided --json /forebay/blocks\n"
    "  mpirun -n 2 io-modelling --direct --operations write --keep --times times.csv /scratch/blocks",
    options,
};

/* One call: its block, when it began since the start of the phase, how long it took. */
struct call {
    uint64_t block;
    double start, seconds;
};

static int read_orders(int orders[ORDERS]) {
    int found = 0;
    for (const char *at = orders_text; *at != 0;) {
        int length = (int)strcspn(at, ","), which = 0;
        while (which < ORDERS && !((int)strlen(order_names[which]) == length &&
                                   strncmp(order_names[which], at, (size_t)length) == 0))
            which++;
        if (which == ORDERS)
            refuse("--orders: there is no '%.*s'; write some of sequential,random,strided,reverse", length, at);
        for (int i = 0; i < found; i++)
            if (orders[i] == which)
                refuse("--orders: '%.*s' is there twice; write it once", length, at);
        orders[found++] = which;
        at += at[length] == ',' ? length + 1 : length;
    }
    if (found == 0)
        refuse("--orders is empty; write some of sequential,random,strided,reverse");
    return found;
}

/* The numbers of the blocks in their order, each once. */
static void arrange(struct call *calls, int order) {
    uint64_t next = 0;
    if (order == 2)
        for (uint64_t first = 0; first < stride; first++)
            for (uint64_t block = first; block < count; block += stride)
                calls[next++].block = block;
    else
        for (uint64_t i = 0; i < count; i++)
            calls[i].block = order == 3 ? count - 1 - i : i;
    if (order == 1)
        for (uint64_t i = count - 1; i > 0; i--) {
            uint64_t other = mix(settings.seed + 1000 + (uint64_t)rank, i) % (i + 1), block = calls[i].block;
            calls[i].block = calls[other].block;
            calls[other].block = block;
        }
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Times in sorted order to the phase's members of JSON and to its line. */
static void summarize(struct phase *phase, double *times, uint64_t n) {
    static const double percents[] = {1, 5, 25, 50, 75, 90, 95, 99, 99.9};
    char *json = malloc(8192), *text = malloc(512);
    if (json == NULL || text == NULL)
        fail("no memory for the results");
    double sum = 0, squares = 0;
    qsort(times, n, sizeof *times, by_value);
    for (uint64_t i = 0; i < n; i++)
        sum += times[i];
    for (uint64_t i = 0; i < n; i++)
        squares += (times[i] - sum / (double)n) * (times[i] - sum / (double)n);
    int at = sprintf(json, "\"call_seconds\": {\"min\": %.9f, \"mean\": %.9f, \"max\": %.9f, \"deviation\": %.9f",
                     times[0], sum / (double)n, times[n - 1], sqrt(squares / (double)n));
    double shown[9];
    for (int i = 0; i < 9; i++) {
        /* The smallest time that so many percent of the calls do not exceed. */
        uint64_t place = (uint64_t)ceil(percents[i] / 100 * (double)n);
        shown[i] = times[place > 0 ? place - 1 : 0];
        at += sprintf(json + at, ", \"p%g\": %.9f", percents[i], shown[i]);
    }
    at += sprintf(json + at, "}, \"calls_by_microseconds\": [");
    bool first = true;
    uint64_t done = 0;
    for (int power = 0; done < n && power < 60; power++) {
        uint64_t begin = done;
        while (done < n && times[done] < ldexp(1e-6, power))
            done++;
        if (done > begin) {
            at += sprintf(json + at, "%s{\"below\": %.0f, \"calls\": %" PRIu64 "}", first ? "" : ", ", ldexp(1, power),
                          done - begin);
            first = false;
        }
    }
    sprintf(json + at, "]");
    sprintf(text, "    a call, in us: min %.1f  p5 %.1f  p50 %.1f  p95 %.1f  p99 %.1f  p99.9 %.1f  max %.1f",
            times[0] * 1e6, shown[1] * 1e6, shown[3] * 1e6, shown[6] * 1e6, shown[7] * 1e6, shown[8] * 1e6,
            times[n - 1] * 1e6);
    phase->json = json;
    phase->text = text;
}

/* Brings the calls of all ranks to rank 0, rank by rank. */
static void collect(struct phase *phase, const struct call *calls, uint64_t base, FILE *raw) {
    double *times = rank == 0 ? allocate(count * (uint64_t)ranks * sizeof *times) : NULL;
    struct call *from_rank = rank == 0 ? allocate(count * sizeof *from_rank) : NULL;
    /* A call has three words; count is small enough for one message. */
    int words = (int)(count * 3);
    if (rank != 0) {
        MPI_Send(calls, words, MPI_UINT64_T, 0, 0, MPI_COMM_WORLD);
        return;
    }
    for (int r = 0; r < ranks; r++) {
        const struct call *theirs = r == 0 ? calls : from_rank;
        if (r != 0)
            MPI_Recv(from_rank, words, MPI_UINT64_T, r, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        for (uint64_t i = 0; i < count; i++) {
            times[(uint64_t)r * count + i] = theirs[i].seconds;
            uint64_t offset = (files ? 0 : base * (uint64_t)r) + theirs[i].block * size;
            if (raw != NULL)
                fprintf(raw, "%s,%d,%" PRIu64 ",%" PRIu64 ",%.9f,%.9f\n", phase->name, r, i, offset, theirs[i].start,
                        theirs[i].seconds);
        }
    }
    summarize(phase, times, count * (uint64_t)ranks);
    free(times);
    free(from_rank);
}

int main(int argc, char **argv) {
    kernel_begin(argc, argv, &kernel);
    int orders[ORDERS], order_count = read_orders(orders), phase_count = 0;
    if (direct && access_way != POSIX)
        refuse("--direct needs --api posix");
    if (direct && size % 512 != 0)
        refuse("--size: %" PRIu64 " does not suit --direct; write a multiple of 512, better of 4KiB", size);
    if (settings.verify && operations == 1)
        refuse("--verify needs reads; write --operations both or --operations read");
    if (sync_each && !files && access_way != POSIX)
        refuse("--sync-each with MPI-IO needs --files rank, since MPI_File_sync is a call of all ranks of a file");

    uint64_t base = count * size;
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s", settings.path);
    if (files)
        file_own_path(path, rank);
    struct file file;
    file_open(&file, files ? MPI_COMM_SELF : MPI_COMM_WORLD, path, (enum access)access_way,
              operations == 2 ? READ : CREATE, direct ? O_DIRECT : 0);
    FILE *raw = NULL;
    char refusal[PATH_MAX + 200] = "";
    if (times_path != NULL && rank == 0) {
        raw = fopen(times_path, "w");
        if (raw == NULL)
            snprintf(refusal, sizeof refusal, "--times: %s cannot be written: %s", times_path, strerror(errno));
        else
            fprintf(raw, "phase,rank,number,offset,start_seconds,seconds\n");
    }
    agree(refusal[0] != 0 ? refusal : NULL);

    struct call *calls = allocate(count * sizeof *calls);
    char *data = allocate(size), *expected = allocate(size), names[MAX_PHASES][32];
    struct phase phases[MAX_PHASES] = {0};
    /* Each pass over the file writes other bytes; a run that only reads finds those of the last. */
    uint64_t stream = settings.seed * ORDERS + (files ? (uint64_t)rank << 32 : 0) + (uint64_t)order_count;
    for (int operation = 0; operation < OPERATIONS; operation++)
        for (int o = 0; o < order_count; o++) {
            if (operations == 2 - operation)
                continue;
            struct phase *phase = &phases[phase_count];
            snprintf(names[phase_count], sizeof names[0], "%s-%s", order_names[orders[o]], operation_names[operation]);
            phase->name = names[phase_count++];
            arrange(calls, orders[o]);
            MPI_Barrier(MPI_COMM_WORLD);
            double start = MPI_Wtime();
            for (uint64_t i = 0; i < count; i++) {
                uint64_t offset = (files ? 0 : base * (uint64_t)rank) + calls[i].block * size;
                uint64_t content = stream - (operation == 0 ? (uint64_t)(order_count - 1 - o) : 0);
                if (operation == 0)
                    pattern(data, size, content, offset);
                else if (settings.verify)
                    memset(data, 0xee, size);
                double before = phase->seconds;
                phase_start(phase);
                if (operation == 0)
                    file_write(&file, offset, data, size);
                else
                    file_read(&file, offset, data, size);
                if (operation == 0 && sync_each)
                    file_sync(&file);
                phase_stop(phase, size, 1);
                calls[i].start = phase->started - start;
                calls[i].seconds = phase->seconds - before;
                if (operation == 1 && settings.verify) {
                    pattern(expected, size, content, offset);
                    verify(path, offset, expected, data, size);
                }
            }
            if (operation == 0 && settings.sync) {
                phase_start(phase);
                file_sync(&file);
                phase_stop(phase, 0, 0);
            }
            collect(phase, calls, base, raw);
        }
    file_close(&file);
    bool unwritten = raw != NULL && fclose(raw) != 0;
    snprintf(refusal, sizeof refusal, "--times: %s was not written whole: %s", times_path ? times_path : "",
             strerror(errno));
    agree(unwritten ? refusal : NULL);
    if (operations != 1 && !settings.keep && (files || rank == 0))
        file_remove(path, (enum access)access_way);
    free(calls);
    free(data);
    free(expected);
    return kernel_end(phases, phase_count);
}
