/*
 * Collective access to records that lie by turns, the same bytes whichever way they go: records FILE BYTES_OF_A_RECORD
 * RECORDS_OF_A_RANK. RECORDS_HINTS are key=value, and more after blanks.
 */
#include "check.h"

static int record, count;

static unsigned char byte_of(int of, long at) { return (unsigned char)(at * 7 + at / 251 + of * 31); }

static void set_view(MPI_File file) {
    MPI_Datatype whole, own;
    MPI_Type_contiguous(record, MPI_BYTE, &whole);
    MPI_Type_create_resized(whole, 0, (MPI_Aint)record * size, &own);
    MPI_Type_commit(&own);
    OK(MPI_File_set_view(file, (MPI_Offset)rank * record, MPI_BYTE, own, "native", MPI_INFO_NULL));
    MPI_Type_free(&whole);
    MPI_Type_free(&own);
}

/* One rank's arguments are wrong: nobody waits for ever, and it hears so. */
static void misused(MPI_File file, unsigned char *data) {
    int code = MPI_File_write_at_all(file, 0, data, rank == 0 ? -1 : record * count, MPI_BYTE, MPI_STATUS_IGNORE);
    CHECK(rank != 0 || class_of(code) == MPI_ERR_COUNT);
    code = MPI_File_read_at_all(file, rank == 0 ? -1 : 0, data, record * count, MPI_BYTE, MPI_STATUS_IGNORE);
    CHECK(rank != 0 || class_of(code) == MPI_ERR_ARG);
}

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 4)
        return 2;
    record = atoi(argv[2]);
    count = atoi(argv[3]);
    long bytes = (long)record * count;
    unsigned char *data = malloc(bytes), *back = calloc(1, bytes + 1);
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
    /* Up to the end of the file, behind which there is nothing more. */
    OK(MPI_File_seek(file, 0, MPI_SEEK_SET));
    back[bytes] = 99;
    OK(MPI_File_read_all(file, back, (int)bytes + 1, MPI_BYTE, &status));
    MPI_Get_count(&status, MPI_BYTE, &got);
    CHECK(got == bytes && memcmp(data, back, bytes) == 0 && back[bytes] == 99);
    /* Each rank's records where its turn is. */
    MPI_Barrier(MPI_COMM_WORLD);
    OK(MPI_File_set_view(file, 0, MPI_BYTE, MPI_BYTE, "native", MPI_INFO_NULL));
    int of = (rank + 1) % size, wrong = 0;
    for (long i = 0; i < count; i += 1 + count / 50) {
        OK(MPI_File_read_at(file, (MPI_Offset)(i * size + of) * record, back, record, MPI_BYTE, MPI_STATUS_IGNORE));
        for (long at = 0; at < record; at++)
            wrong += back[at] != byte_of(of, i * record + at);
    }
    CHECK(wrong == 0);
    MPI_Offset end_of_file = 0;
    OK(MPI_File_get_size(file, &end_of_file));
    CHECK(end_of_file == (MPI_Offset)bytes * size);
    MPI_Barrier(MPI_COMM_WORLD);
    set_view(file);
    misused(file, data);
    OK(MPI_File_close(&file));
    free(data);
    free(back);
    return end();
}
