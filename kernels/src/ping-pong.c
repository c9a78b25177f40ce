/*
 * Times messages between rank 0 and the first rank on another node, and between rank 0 and the first other rank on its
 * own node, where there are such ranks. Prints a line of JSON for each pair and size: the median and the quartiles of half
 * of the time there and back, of the fastest of five batches: in a slower one both ranks may have shared a processor.
 * `forebay model calibrate --mpi` reads them.
 */
#include <mpi.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BATCHES = 5, WARM_COUNT = 5, COUNT = 31, TAG = 1 };

static const char HELP[] =
    "Usage: ping-pong\n"
    "\n"
    "Times messages between rank 0 and another node, and between rank 0 and another rank on its node. Prints lines of JSON:\n"
    "same_node, bytes, and the median, first and third quartile of the time of a message (ns, low_ns, high_ns), of the\n"
    "fastest of five batches.\n"
    "\n"
    "Examples:\n"
    "  mpirun -n 2 --map-by node ping-pong\n"
    "  forebay model calibrate --mpi \"mpirun -n 2 --map-by node $HOME/kernels/ping-pong\"\n";

static int by_value(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* Sleeps, so that the scheduler may find another processor for a rank. */
static void pause_shortly(void) {
    static const struct timespec pause = {.tv_nsec = 2000000};
    nanosleep(&pause, NULL);
}

/* Fills in the sorted times of a batch. */
static void batch(int rank, int peer, char *buffer, int bytes, double times[COUNT]) {
    pause_shortly();
    for (int i = -WARM_COUNT; i < COUNT; i++) {
        double start = MPI_Wtime();
        if (rank == 0) {
            MPI_Send(buffer, bytes, MPI_BYTE, peer, TAG, MPI_COMM_WORLD);
            MPI_Recv(buffer, bytes, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        } else {
            MPI_Recv(buffer, bytes, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            MPI_Send(buffer, bytes, MPI_BYTE, 0, TAG, MPI_COMM_WORLD);
        }
        if (i >= 0)
            times[i] = (MPI_Wtime() - start) / 2 * 1e9;
    }
    qsort(times, COUNT, sizeof times[0], by_value);
}

static void ping(int rank, int peer, bool same_node, char *buffer, int bytes) {
    double times[COUNT], other[COUNT];
    batch(rank, peer, buffer, bytes, times);
    for (int i = 1; i < BATCHES; i++) {
        batch(rank, peer, buffer, bytes, other);
        if (other[COUNT / 2] < times[COUNT / 2])
            memcpy(times, other, sizeof times);
    }
    if (rank != 0)
        return;
    printf("{\"same_node\": %s, \"bytes\": %d, \"ns\": %.0f, \"low_ns\": %.0f, \"high_ns\": %.0f}\n",
           same_node ? "true" : "false", bytes, times[COUNT / 2], times[COUNT / 4], times[COUNT - 1 - COUNT / 4]);
}

/* A barrier whose ranks sleep, for they must not take processor time from the two that measure. */
static void wait_for_all(void) {
    MPI_Request all;
    int is_done = 0;
    MPI_Ibarrier(MPI_COMM_WORLD, &all);
    for (;;) {
        MPI_Test(&all, &is_done, MPI_STATUS_IGNORE);
        if (is_done)
            return;
        pause_shortly();
    }
}

int main(int argc, char **argv) {
    static const int sizes[] = {8, 4 << 10, 32 << 10, 256 << 10, 1 << 20};
    enum { SIZES = sizeof sizes / sizeof sizes[0] };
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc > 1 || ranks < 2) {
        bool is_help = argc > 1 && strcmp(argv[1], "--help") == 0;
        if (rank == 0)
            fprintf(is_help ? stdout : stderr, "%s%s", is_help ? "" : "ping-pong: takes no argument, and needs two ranks\n\n",
                    HELP);
        MPI_Finalize();
        return is_help ? 0 : 2;
    }
    char *names = calloc(ranks, MPI_MAX_PROCESSOR_NAME), own[MPI_MAX_PROCESSOR_NAME] = "", *buffer = calloc(1, sizes[SIZES - 1]);
    int bytes;
    if (names == NULL || buffer == NULL)
        MPI_Abort(MPI_COMM_WORLD, 1);
    MPI_Get_processor_name(own, &bytes);
    MPI_Allgather(own, sizeof own, MPI_BYTE, names, sizeof own, MPI_BYTE, MPI_COMM_WORLD);
    for (int same = 0; same < 2; same++) {
        int peer = 1;
        while (peer < ranks && (strcmp(names, names + (size_t)peer * sizeof own) == 0) != same)
            peer++;
        for (int i = 0; i < SIZES && peer < ranks; i++)
            if (rank == 0 || rank == peer)
                ping(rank, peer, same, buffer, sizes[i]);
        wait_for_all();
    }
    free(names);
    free(buffer);
    MPI_Finalize();
    return 0;
}
