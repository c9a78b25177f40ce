/*
 * Collective calls at points of a grid: points FILE POINTS WAYS REPETITIONS [AGGREGATORS]. The file POINTS has a line for
 * each point:
 *
 *   number kind run bytes spread calls
 *
 * Each rank writes, and reads, `bytes` in each of `calls` calls. Kind `blocks`: the rank's bytes of a call are one range,
 * the next rank's follow. Kind `runs`: they are runs of `run` bytes, the ranks take turns, and `spread` - 1 times as
 * many bytes as all ranks' are gaps. WAYS is a list of independent, collective, automatic (by hints) and default
 * (without hints), separated by commas. AGGREGATORS is the hint cb_nodes of the first three.
 *
 * In each repetition all points are measured in all ways and both directions, in another order. Rank 0 prints a line of
 * JSON for each measurement: seconds of a call, from a common start of all calls until all ranks have finished them.
 * Every byte of the file follows from its offset, and the ranks compare what they read.
 */
#include "ranks.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { POINTS_MAX = 256, WAYS_MAX = 4, STEP_BYTES = 4 << 20 };

struct point {
    int number, is_runs, run, bytes, spread, calls;
};

static struct point points[POINTS_MAX];
static int point_count, way_count, ways[WAYS_MAX];
static const char *aggregators;
static const char *const names[WAYS_MAX] = {"independent", "collective", "automatic", "default"};
static const char *const hints[WAYS_MAX] = {"disable", "enable", "automatic", NULL};

static void stop(const char *why, const char *what) {
    fprintf(stderr, "rank %d: %s: %s\n", rank, why, what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static uint64_t word_of(uint64_t place) {
    uint64_t x = place + 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    return x ^ (x >> 27);
}

/* The file's contents in a range; offset and bytes are multiples of 8. */
static void contents(void *data, uint64_t offset, uint64_t bytes) {
    uint64_t *words = data;
    for (uint64_t i = 0; i < bytes / 8; i++)
        words[i] = word_of(offset / 8 + i);
}

static uint64_t stride_of(const struct point *p) { return (uint64_t)p->run * size * p->spread; }

static uint64_t extent_of(const struct point *p) {
    if (!p->is_runs)
        return (uint64_t)p->bytes * size * p->calls;
    return stride_of(p) * (p->bytes / p->run) * p->calls;
}

/* What this rank's data of all calls are. */
static void contents_of_rank(const struct point *p, char *data) {
    if (!p->is_runs)
        for (int k = 0; k < p->calls; k++)
            contents(data + (size_t)k * p->bytes, ((uint64_t)k * size + rank) * p->bytes, p->bytes);
    else
        for (uint64_t i = 0; i < (uint64_t)p->calls * (p->bytes / p->run); i++)
            contents(data + i * p->run, i * stride_of(p) + (uint64_t)rank * p->run, p->run);
}

static void read_points(const char *path) {
    FILE *file = fopen(path, "r");
    char kind[16];
    struct point p;
    if (file == NULL)
        stop(path, "cannot be opened");
    while (point_count < POINTS_MAX &&
           fscanf(file, "%d %15s %d %d %d %d", &p.number, kind, &p.run, &p.bytes, &p.spread, &p.calls) == 6) {
        p.is_runs = strcmp(kind, "runs") == 0;
        if (p.run < 8 || p.run % 8 != 0 || p.bytes % p.run != 0 || p.spread < 1 || p.calls < 1)
            stop(path, "has a point that makes no sense");
        points[point_count++] = p;
    }
    fclose(file);
}

static void read_ways(const char *list) {
    for (int way = 0; way < WAYS_MAX; way++)
        if (strstr(list, names[way]) != NULL)
            ways[way_count++] = way;
    if (way_count == 0)
        stop(list, "names no way");
}

static MPI_File open_file(const char *path, const char *way) {
    MPI_File file;
    MPI_Info info = MPI_INFO_NULL;
    if (way != NULL) {
        MPI_Info_create(&info);
        MPI_Info_set(info, "romio_cb_write", way);
        MPI_Info_set(info, "romio_cb_read", way);
        if (aggregators != NULL)
            MPI_Info_set(info, "cb_nodes", aggregators);
    }
    must(MPI_File_open(MPI_COMM_WORLD, (char *)path, MPI_MODE_RDWR | MPI_MODE_CREATE, info, &file), "open");
    if (way != NULL)
        MPI_Info_free(&info);
    return file;
}

/* Makes the file as long as the longest point, so that every range has its contents. */
static void make(const char *path) {
    uint64_t extent = 0;
    for (int i = 0; i < point_count; i++)
        extent = extent_of(&points[i]) > extent ? extent_of(&points[i]) : extent;
    MPI_File file = open_file(path, "disable");
    char *data = malloc(STEP_BYTES);
    if (data == NULL)
        stop(path, "no memory");
    for (uint64_t at = (uint64_t)rank * STEP_BYTES; at < extent; at += (uint64_t)size * STEP_BYTES) {
        contents(data, at, STEP_BYTES);
        must(MPI_File_write_at(file, (MPI_Offset)at, data, STEP_BYTES, MPI_BYTE, MPI_STATUS_IGNORE), "write");
    }
    free(data);
    must(MPI_File_close(&file), "close");
}

static void measure(const char *path, const struct point *p, int way, int writes) {
    size_t all = (size_t)p->bytes * p->calls;
    char *data = malloc(all), *expected = malloc(all);
    if (data == NULL || expected == NULL)
        stop(path, "no memory");
    contents_of_rank(p, expected);
    if (writes)
        memcpy(data, expected, all);
    else
        memset(data, 0, all);
    MPI_File file = open_file(path, hints[way]);
    if (p->is_runs) {
        MPI_Datatype run, turn;
        MPI_Type_contiguous(p->run, MPI_BYTE, &run);
        MPI_Type_create_resized(run, 0, (MPI_Aint)stride_of(p), &turn);
        MPI_Type_commit(&turn);
        must(MPI_File_set_view(file, (MPI_Offset)p->run * rank, MPI_BYTE, turn, "native", MPI_INFO_NULL), "set_view");
        MPI_Type_free(&run);
        MPI_Type_free(&turn);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    for (int k = 0; k < p->calls; k++) {
        MPI_Offset at = p->is_runs ? (MPI_Offset)k * p->bytes : ((MPI_Offset)k * size + rank) * p->bytes;
        char *here = data + (size_t)k * p->bytes;
        must(writes ? MPI_File_write_at_all(file, at, here, p->bytes, MPI_BYTE, MPI_STATUS_IGNORE)
                    : MPI_File_read_at_all(file, at, here, p->bytes, MPI_BYTE, MPI_STATUS_IGNORE),
             writes ? "write" : "read");
    }
    MPI_Barrier(MPI_COMM_WORLD);
    double seconds = (MPI_Wtime() - start) / p->calls;
    must(MPI_File_close(&file), "close");
    if (memcmp(data, expected, all) != 0)
        stop(path, "other bytes than were written");
    if (rank == 0)
        printf("{\"point\": %d, \"writes\": %s, \"way\": \"%s\", \"seconds\": %.9g}\n", p->number,
               writes ? "true" : "false", names[way], seconds);
    free(data);
    free(expected);
}

/* MPI_Finalize, except where it may not return: in MPICH 4.0.2 with UCX over TCP ranks wait for others that make no progress. */
static void end(void) {
    fflush(stdout);
#ifdef MPICH_VERSION
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) {
        usleep(300000); /* the launcher passes on what was printed */
        MPI_Abort(MPI_COMM_WORLD, 0);
    }
    pause();
#else
    MPI_Finalize();
#endif
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (argc != 5 && argc != 6)
        stop("points", "FILE POINTS WAYS REPETITIONS [AGGREGATORS]");
    aggregators = argv[5];
    read_points(argv[2]);
    read_ways(argv[3]);
    make(argv[1]);
    int count = point_count * way_count * 2, *order = malloc((count + 1) * sizeof *order);
    for (int repetition = 0; repetition < atoi(argv[4]); repetition++) {
        /* The same order on all ranks. */
        for (int i = 0; i < count; i++) {
            int other = (int)(word_of((uint64_t)repetition * 100003 + i) % (uint64_t)(i + 1));
            order[i] = order[other];
            order[other] = i;
        }
        for (int i = 0; i < count; i++) {
            int at = order[i];
            measure(argv[1], &points[at / 2 / way_count], ways[at / 2 % way_count], at % 2);
        }
    }
    free(order);
    end();
    return 0;
}
