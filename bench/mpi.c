/*
 * One shared file written and read by all ranks: mpi FILE BYTES_PER_RANK. Rank 0 prints a JSON object with GB/s (10^9)
 * for each pattern, and microseconds for an open with its close and for the smallest call.
 *
 * Patterns: "segmented", each rank its own part in transfers of 1 MiB; "interleaved", records of 47,001 bytes of the
 * ranks in turn (io500's hard case); "nested view", runs of 4 KiB of the ranks in turn within blocks of 256 KiB a rank,
 * in transfers of 1 MiB. Each independent and collective. Each write is to a new file. Only the transfers are timed;
 * the data read are compared. Before the patterns a file of that size is written and removed, because the host may have
 * reclaimed memory that a virtual machine did not use for some seconds.
 */
#include "ranks.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { TRANSFER = 1 << 20, RECORD = 47001, RUN = 4096, RUNS = 64, OPENS = 100, CALLS = 20000 };

static const char *path;

/* Seconds from a common start until all ranks have finished. */
static double since(double start) {
    MPI_Barrier(MPI_COMM_WORLD);
    return MPI_Wtime() - start;
}

static MPI_File open_file(int amode) {
    MPI_File file;
    must(MPI_File_open(MPI_COMM_WORLD, (char *)path, amode, MPI_INFO_NULL, &file), "open");
    return file;
}

static void set_nested(MPI_File file) {
    MPI_Datatype run, inner, outer, all;
    MPI_Type_contiguous(RUN, MPI_BYTE, &run);
    MPI_Type_vector(RUNS / 2, 1, size, run, &inner);
    MPI_Type_create_hvector(2, 1, (MPI_Aint)RUN * RUNS / 2 * size, inner, &outer);
    MPI_Type_create_resized(outer, 0, (MPI_Aint)RUN * RUNS * size, &all);
    MPI_Type_commit(&all);
    must(MPI_File_set_view(file, (MPI_Offset)rank * RUN, MPI_BYTE, all, "native", MPI_INFO_NULL), "set_view");
    MPI_Type_free(&run);
    MPI_Type_free(&inner);
    MPI_Type_free(&outer);
    MPI_Type_free(&all);
}

enum pattern { SEGMENTED, INTERLEAVED, NESTED, PATTERNS };
static const char *const names[PATTERNS] = {"segmented", "interleaved", "nested view"};

/* All transfers of one pass; data read must equal the data written. */
static double pass(MPI_File file, enum pattern pattern, int collective, int writes, int64_t bytes, unsigned char *buffer) {
    int transfer = pattern == INTERLEAVED ? RECORD : TRANSFER;
    int64_t count = bytes / transfer;
    long wrong = 0;
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    for (int64_t i = 0; i < count; i++) {
        MPI_Offset at = pattern == SEGMENTED     ? (rank * count + i) * transfer
                        : pattern == INTERLEAVED ? (i * size + rank) * transfer
                                                 : i * transfer;
        if (writes) {
            buffer[0] = (unsigned char)(i * 7 + rank);
            must(collective ? MPI_File_write_at_all(file, at, buffer, transfer, MPI_BYTE, MPI_STATUS_IGNORE)
                            : MPI_File_write_at(file, at, buffer, transfer, MPI_BYTE, MPI_STATUS_IGNORE),
                 "write");
        } else {
            must(collective ? MPI_File_read_at_all(file, at, buffer, transfer, MPI_BYTE, MPI_STATUS_IGNORE)
                            : MPI_File_read_at(file, at, buffer, transfer, MPI_BYTE, MPI_STATUS_IGNORE),
                 "read");
            wrong += buffer[0] != (unsigned char)(i * 7 + rank) || buffer[transfer - 1] != (unsigned char)(rank + 1);
        }
    }
    double seconds = since(start);
    if (wrong > 0) {
        fprintf(stderr, "rank %d: %ld transfers read other bytes than were written\n", rank, wrong);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return (double)count * transfer * size / seconds / 1e9;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (argc != 3)
        return 2;
    path = argv[1];
    int64_t bytes = atoll(argv[2]);
    unsigned char *buffer = malloc(TRANSFER);
    memset(buffer, rank, TRANSFER);
    MPI_File before = open_file(MPI_MODE_RDWR | MPI_MODE_CREATE | MPI_MODE_DELETE_ON_CLOSE);
    pass(before, SEGMENTED, 0, 1, bytes, buffer);
    must(MPI_File_close(&before), "close");
    for (int pattern = 0; pattern < PATTERNS; pattern++)
        for (int collective = 0; collective < 2; collective++) {
            char label[64];
            const char *kind = collective ? "collective" : "independent";
            MPI_File file = open_file(MPI_MODE_RDWR | MPI_MODE_CREATE | MPI_MODE_DELETE_ON_CLOSE);
            if (pattern == NESTED)
                set_nested(file);
            memset(buffer, rank + 1, TRANSFER);
            snprintf(label, sizeof label, "write %s, %s", names[pattern], kind);
            tell(label, pass(file, pattern, collective, 1, bytes, buffer));
            snprintf(label, sizeof label, "read %s, %s", names[pattern], kind);
            tell(label, pass(file, pattern, collective, 0, bytes, buffer));
            must(MPI_File_close(&file), "close");
        }
    MPI_File file = open_file(MPI_MODE_RDWR | MPI_MODE_CREATE);
    MPI_Offset length;
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    for (int i = 0; i < CALLS; i++)
        must(MPI_File_get_position(file, &length), "get_position");
    tell("us of the smallest call", since(start) / CALLS * 1e6);
    must(MPI_File_close(&file), "close");
    MPI_Barrier(MPI_COMM_WORLD);
    start = MPI_Wtime();
    for (int i = 0; i < OPENS; i++) {
        file = open_file(MPI_MODE_RDWR);
        must(MPI_File_close(&file), "close");
    }
    tell("us of an open and close", since(start) / OPENS * 1e6);
    if (rank == 0) {
        must(MPI_File_delete((char *)path, MPI_INFO_NULL), "delete");
        printf("}\n");
    }
    free(buffer);
    MPI_Finalize();
    return 0;
}
