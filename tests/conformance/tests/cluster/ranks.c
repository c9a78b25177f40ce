/* MPI ranks on several nodes of a pool write one striped file together and one file each. Every rank compares what its
 * neighbour wrote, byte for byte. Usage: ranks DIRECTORY */

#include "../../../../mpi/tests/end.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BYTES = 3 * 1024 * 1024 + 17 };

static int rank, count;

static void must(int error, const char *what)
{
    if (error != MPI_SUCCESS) {
        char text[MPI_MAX_ERROR_STRING];
        int length;
        MPI_Error_string(error, text, &length);
        fprintf(stderr, "rank %d: %s: %s\n", rank, what, text);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

static void fill(char *buffer, int of)
{
    for (int i = 0; i < BYTES; i++)
        buffer[i] = (char)(i * 31 + i / 4096 + of * 7);
}

static void check(MPI_File file, MPI_Offset at, int of, const char *what)
{
    char *expected = malloc(BYTES), *found = calloc(1, BYTES);
    fill(expected, of);
    must(MPI_File_read_at(file, at, found, BYTES, MPI_BYTE, MPI_STATUS_IGNORE), what);
    if (memcmp(expected, found, BYTES) != 0) {
        fprintf(stderr, "rank %d: %s holds other bytes than rank %d wrote\n", rank, what, of);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    free(expected);
    free(found);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &count);
    char path[4096], *mine = malloc(BYTES);
    int next = (rank + 1) % count;
    MPI_File shared, own;
    MPI_Info info;
    MPI_Offset size;

    MPI_Info_create(&info);
    MPI_Info_set(info, "striping_factor", "4");
    fill(mine, rank);
    snprintf(path, sizeof path, "%s/shared", argv[1]);
    int mode = MPI_MODE_CREATE | MPI_MODE_RDWR;
    must(MPI_File_open(MPI_COMM_WORLD, path, mode, info, &shared), path);
    must(MPI_File_write_at_all(shared, (MPI_Offset)rank * BYTES, mine, BYTES, MPI_BYTE, MPI_STATUS_IGNORE), path);
    snprintf(path, sizeof path, "%s/own%d", argv[1], rank);
    must(MPI_File_open(MPI_COMM_SELF, path, mode, MPI_INFO_NULL, &own), path);
    must(MPI_File_write_at(own, 0, mine, BYTES, MPI_BYTE, MPI_STATUS_IGNORE), path);
    must(MPI_File_close(&own), path);
    must(MPI_File_sync(shared), "sync");
    MPI_Barrier(MPI_COMM_WORLD);

    check(shared, (MPI_Offset)next * BYTES, next, "the shared file");
    must(MPI_File_get_size(shared, &size), "size");
    if (size != (MPI_Offset)count * BYTES) {
        fprintf(stderr, "rank %d: the shared file has %lld bytes\n", rank, (long long)size);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    snprintf(path, sizeof path, "%s/own%d", argv[1], next);
    must(MPI_File_open(MPI_COMM_SELF, path, MPI_MODE_RDONLY, MPI_INFO_NULL, &own), path);
    check(own, 0, next, path);
    must(MPI_File_close(&own), path);
    must(MPI_File_close(&shared), "close");
    MPI_Info_free(&info);
    if (rank == 0)
        printf("all %d ranks read what their neighbours wrote\n", count);
    end_ranks(0);
    return 0;
}
