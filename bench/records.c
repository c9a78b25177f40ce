/*
 * Records of all ranks in turn in one file, written and read by collective calls: records FILE BYTES_OF_A_RANK. Rank 0
 * prints a JSON object of MB/s (10^6) by operation, record and way: as the driver chooses, each rank alone, and through
 * aggregators. The second of two passes is timed, and the data that it reads are compared.
 */
#include "ranks.h"

#include <stdlib.h>
#include <string.h>

static const int records[] = {64, 1024, 4096, 16384, 32768, 65536};
enum { RECORDS = sizeof records / sizeof *records, WAYS = 3 };
static const char *const ways[WAYS] = {"automatic", "independent", "two-phase"};
static const char *const hints[WAYS] = {"automatic", "disable", "enable"};

static MPI_File open_file(const char *path, int record, const char *cb) {
    MPI_File file;
    MPI_Info info;
    MPI_Datatype whole, turn;
    MPI_Info_create(&info);
    MPI_Info_set(info, "romio_cb_write", cb);
    MPI_Info_set(info, "romio_cb_read", cb);
    must(MPI_File_open(MPI_COMM_WORLD, (char *)path, MPI_MODE_RDWR | MPI_MODE_CREATE, info, &file), "open");
    MPI_Info_free(&info);
    must(MPI_File_set_size(file, 0), "set_size");
    MPI_Type_contiguous(record, MPI_BYTE, &whole);
    MPI_Type_create_resized(whole, 0, (MPI_Aint)record * size, &turn);
    MPI_Type_commit(&turn);
    must(MPI_File_set_view(file, (MPI_Offset)record * rank, MPI_BYTE, turn, "native", MPI_INFO_NULL), "set_view");
    MPI_Type_free(&whole);
    MPI_Type_free(&turn);
    return file;
}

/* Seconds from a common start until all ranks have finished. */
static double pass(MPI_File file, int writes, unsigned char *data, int bytes) {
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    must(writes ? MPI_File_write_at_all(file, 0, data, bytes, MPI_BYTE, MPI_STATUS_IGNORE)
                : MPI_File_read_at_all(file, 0, data, bytes, MPI_BYTE, MPI_STATUS_IGNORE),
         writes ? "write" : "read");
    MPI_Barrier(MPI_COMM_WORLD);
    return MPI_Wtime() - start;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (argc != 3)
        return 2;
    int bytes = atoi(argv[2]) / 65536 * 65536;
    unsigned char *data = malloc(bytes), *back = calloc(bytes, 1);
    for (int i = 0; i < bytes; i++)
        data[i] = (unsigned char)(i * 7 + i / 251 + rank);
    for (int r = 0; r < RECORDS; r++)
        for (int way = 0; way < WAYS; way++) {
            MPI_File file = open_file(argv[1], records[r], hints[way]);
            double seconds[2];
            for (int turn = 0; turn < 2; turn++) {
                seconds[1] = pass(file, 1, data, bytes);
                memset(back, 0, bytes);
                seconds[0] = pass(file, 0, back, bytes);
            }
            if (memcmp(data, back, bytes) != 0) {
                fprintf(stderr, "rank %d read other bytes than were written\n", rank);
                MPI_Abort(MPI_COMM_WORLD, 1);
            }
            must(MPI_File_close(&file), "close");
            for (int writes = 1; writes >= 0; writes--) {
                char name[64];
                snprintf(name, sizeof name, "%s, %d bytes: %s", writes ? "write" : "read", records[r], ways[way]);
                tell(name, (double)bytes * size / seconds[writes] / 1e6);
            }
        }
    if (rank == 0)
        printf("}\n");
    free(data);
    free(back);
    MPI_Finalize();
    return 0;
}
