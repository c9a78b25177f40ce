/*
 * A parallel program that writes checkpoints, as simulations do: mpirun -n 4 checkpoint DIR STEPS MIB
 *
 * Each rank has MIB of state, computes briefly, and at every step writes it twice: to a file of its own and into its
 * part of one file that all ranks share. A checkpoint is synced and then renamed into place, and the one before the
 * last is removed. At the end each rank reads the last checkpoint back and checks it. Uses plain POSIX calls, without
 * regard to the file system of DIR.
 */
#include <errno.h>
#include <fcntl.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define RECORD (1 << 20)

static int rank, ranks;

static void fail(const char *what, const char *path)
{
    fprintf(stderr, "checkpoint: rank %d: %s %s: %s\n", rank, what, path, strerror(errno));
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* One step of a reversible generator: the state after STEP steps is the same in every run. */
static void compute(uint64_t *state, size_t words, int step)
{
    for (size_t i = 0; i < words; i++)
        state[i] = (state[i] ^ (state[i] >> 29)) * 0x9e3779b97f4a7c15u + i + (uint64_t)step;
}

static void put(const char *path, int flags, off_t offset, const char *bytes, size_t length)
{
    int fd = open(path, O_WRONLY | O_CREAT | flags, 0644);
    if (fd < 0)
        fail("open", path);
    for (size_t done = 0; done < length;) {
        size_t left = length - done < RECORD ? length - done : RECORD;
        ssize_t n = pwrite(fd, bytes + done, left, offset + (off_t)done);
        if (n <= 0)
            fail("pwrite", path);
        done += (size_t)n;
    }
    if (fsync(fd) != 0)
        fail("fsync", path);
    if (close(fd) != 0)
        fail("close", path);
}

static void check(const char *path, off_t offset, const char *bytes, size_t length)
{
    static char record[RECORD];
    int fd = open(path, O_RDONLY);
    if (fd < 0)
        fail("open", path);
    for (size_t done = 0; done < length;) {
        size_t left = length - done < RECORD ? length - done : RECORD;
        ssize_t n = pread(fd, record, left, offset + (off_t)done);
        if (n <= 0)
            fail("pread", path);
        if (memcmp(record, bytes + done, (size_t)n) != 0) {
            fprintf(stderr, "checkpoint: rank %d: %s differs from what was written\n", rank, path);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
        done += (size_t)n;
    }
    close(fd);
}

static void name(char *path, size_t room, const char *dir, int step, const char *which)
{
    snprintf(path, room, "%s/step%03d.%s", dir, step, which);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 4) {
        if (rank == 0)
            fprintf(stderr, "usage: checkpoint DIR STEPS MIB\n");
        MPI_Finalize();
        return 2;
    }
    const char *dir = argv[1];
    int steps = atoi(argv[2]);
    size_t length = (size_t)atoi(argv[3]) << 20;
    uint64_t *state = malloc(length);
    if (!state)
        fail("malloc", argv[3]);
    for (size_t i = 0; i < length / 8; i++)
        state[i] = i * (uint64_t)(rank + 1);

    double in_checkpoints = 0;
    char own[64], path[4096], shared[4096], ready[4096];
    snprintf(own, sizeof own, "rank%04d", rank);
    for (int step = 1; step <= steps; step++) {
        compute(state, length / 8, step);
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        name(path, sizeof path, dir, step, own);
        put(path, O_TRUNC, 0, (char *)state, length);
        name(shared, sizeof shared, dir, step, "writing");
        put(shared, 0, (off_t)rank * (off_t)length, (char *)state, length);
        MPI_Barrier(MPI_COMM_WORLD);
        name(ready, sizeof ready, dir, step, "all");
        if (rank == 0 && rename(shared, ready) != 0)
            fail("rename", shared);
        if (step > 2) {
            name(path, sizeof path, dir, step - 2, own);
            if (unlink(path) != 0)
                fail("unlink", path);
            name(path, sizeof path, dir, step - 2, "all");
            if (rank == 0 && unlink(path) != 0)
                fail("unlink", path);
        }
        MPI_Barrier(MPI_COMM_WORLD);
        in_checkpoints += MPI_Wtime() - start;
    }
    name(path, sizeof path, dir, steps, own);
    check(path, 0, (char *)state, length);
    check(ready, (off_t)rank * (off_t)length, (char *)state, length);
    struct stat st;
    if (stat(ready, &st) != 0 || st.st_size != (off_t)length * ranks)
        fail("stat", ready);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0)
        printf("%d checkpoints of %zu MiB by %d ranks took %.2f s\n", steps, 2 * (length >> 20) * (size_t)ranks, ranks,
               in_checkpoints);
    free(state);
    MPI_Finalize();
    return 0;
}
