/*
 * Collective access to records of the ranks in turn; the file is the same with every way of access: records FILE
 * BYTES_OF_A_RECORD RECORDS_OF_A_RANK [WAY_OF_WRITES WAY_OF_READS]. The ways, `together` or `alone`, are the expected
 * ones for calls with wrong arguments on rank 0. RECORDS_HINTS are key=value, separated by blanks. RECORDS_SPREAD is
 * the length of a turn, as a multiple of the length of its records. With RECORDS_IDLE set the last rank has a view of
 * bytes and no records.
 */
#include "check.h"

#include <stdbool.h>

static int record, count, busy, spread = 1; /* `busy`: number of ranks with records */

static unsigned char byte_of(int of, long at) { return (unsigned char)(at * 7 + at / 251 + of * 31); }

static MPI_Offset turn(void) { return (MPI_Offset)record * busy * spread; }

static void set_view(MPI_File file) {
    if (rank >= busy) {
        OK(MPI_File_set_view(file, 0, MPI_BYTE, MPI_BYTE, "native", MPI_INFO_NULL));
        return;
    }
    MPI_Datatype whole, own;
    MPI_Type_contiguous(record, MPI_BYTE, &whole);
    MPI_Type_create_resized(whole, 0, (MPI_Aint)turn(), &own);
    MPI_Type_commit(&own);
    OK(MPI_File_set_view(file, (MPI_Offset)rank * record, MPI_BYTE, own, "native", MPI_INFO_NULL));
    MPI_Type_free(&whole);
    MPI_Type_free(&own);
}

/*
 * Rank 0's arguments are wrong: it gets an error. Through aggregators all ranks do, and their data and pointers are
 * unchanged.
 */
static void misused(MPI_File file, const char *write_way, const char *read_way) {
    int bytes = rank < busy ? record * count : 0;
    bool together = strcmp(write_way, "together") == 0;
    unsigned char *other = malloc(bytes + 1), *data = malloc(bytes + 1);
    for (long i = 0; i < bytes; i++)
        other[i] = byte_of(rank + 1, i);
    OK(MPI_File_seek(file, rank == 0 ? 0 : record, MPI_SEEK_SET));
    int code = MPI_File_write_all(file, other, rank == 0 ? -1 : bytes, MPI_BYTE, MPI_STATUS_IGNORE);
    CHECK(class_of(code) == (rank == 0 || together ? MPI_ERR_COUNT : MPI_SUCCESS));
    MPI_Offset at = -1;
    OK(MPI_File_get_position(file, &at));
    CHECK(at == (rank == 0 ? 0 : together ? record : record + bytes));
    MPI_Barrier(MPI_COMM_WORLD);
    OK(MPI_File_read_at(file, record, data, bytes - record < 0 ? 0 : bytes - record, MPI_BYTE, MPI_STATUS_IGNORE));
    int wrong = 0;
    for (long i = record; i < bytes; i++)
        wrong += data[i - record] != (rank == 0 || together ? byte_of(rank, i) : other[i - record]);
    CHECK(wrong == 0);
    MPI_Barrier(MPI_COMM_WORLD);
    /* Invalid offsets. A driver that does not check them would loop for ever, or read beyond all data. */
    static const MPI_Offset far[] = {-1, (MPI_Offset)1 << 62, ((MPI_Offset)1 << 62) + ((MPI_Offset)1 << 61)};
    together = strcmp(read_way, "together") == 0;
    for (int i = 0; i < 3; i++) {
        code = MPI_File_read_at_all(file, rank == 0 ? far[i] : 0, data, bytes, MPI_BYTE, MPI_STATUS_IGNORE);
        CHECK(class_of(code) == (rank == 0 || together ? MPI_ERR_ARG : MPI_SUCCESS));
    }
    together = strcmp(write_way, "together") == 0;
    for (int i = 0; i < 3; i++) {
        code = MPI_File_write_at_all(file, rank == 0 ? far[i] : 0, other, bytes, MPI_BYTE, MPI_STATUS_IGNORE);
        CHECK(class_of(code) == (rank == 0 || together ? MPI_ERR_ARG : MPI_SUCCESS));
    }
    free(other);
    free(data);
}

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 4 && argc != 6)
        return 2;
    busy = size - (getenv("RECORDS_IDLE") != NULL);
    if (getenv("RECORDS_SPREAD") != NULL)
        spread = atoi(getenv("RECORDS_SPREAD"));
    record = atoi(argv[2]);
    count = atoi(argv[3]);
    long bytes = rank < busy ? (long)record * count : 0;
    unsigned char *data = malloc(bytes), *back = calloc(1, bytes + record + 1);
    for (long i = 0; i < bytes; i++)
        data[i] = byte_of(rank, i);
    MPI_Info info;
    MPI_Info_create(&info);
    const char *hints = getenv("RECORDS_HINTS");
    char key[64], value[64];
    for (int used = 0; hints != NULL && sscanf(hints, " %63[^=]=%63s%n", key, value, &used) == 2; hints += used)
        MPI_Info_set(info, key, value);
    MPI_File file;
    MPI_Status status;
    int got = 0;
    OK(MPI_File_open(MPI_COMM_WORLD, argv[1], MPI_MODE_RDWR | MPI_MODE_CREATE, info, &file));
    MPI_Info_free(&info);
    OK(MPI_File_set_size(file, 0));
    set_view(file);
    OK(MPI_File_write_all(file, data, (int)bytes, MPI_BYTE, &status));
    MPI_Get_count(&status, MPI_BYTE, &got);
    CHECK(got == bytes);
    /* Up to the end of the file; nothing follows. */
    OK(MPI_File_seek(file, 0, MPI_SEEK_SET));
    back[bytes] = 99;
    OK(MPI_File_read_all(file, back, (int)bytes + (rank < busy), MPI_BYTE, &status));
    MPI_Get_count(&status, MPI_BYTE, &got);
    CHECK(got == bytes && memcmp(data, back, bytes) == 0 && back[bytes] == 99);
    /* Each rank's records are in its turns. */
    MPI_Barrier(MPI_COMM_WORLD);
    OK(MPI_File_set_view(file, 0, MPI_BYTE, MPI_BYTE, "native", MPI_INFO_NULL));
    int of = (rank + 1) % busy, wrong = 0;
    for (long i = 0; i < count; i += 1 + count / 50) {
        OK(MPI_File_read_at(file, i * turn() + (MPI_Offset)of * record, back, record, MPI_BYTE, MPI_STATUS_IGNORE));
        for (long at = 0; at < record; at++)
            wrong += back[at] != byte_of(of, i * record + at);
    }
    CHECK(wrong == 0);
    MPI_Offset end_of_file = 0;
    OK(MPI_File_get_size(file, &end_of_file));
    CHECK(end_of_file == (count - 1) * turn() + (MPI_Offset)busy * record);
    MPI_Barrier(MPI_COMM_WORLD);
    set_view(file);
    if (argc == 6)
        misused(file, argv[4], argv[5]);
    OK(MPI_File_close(&file));
    free(data);
    free(back);
    return end();
}
