/*
 * State shared by ranks on several nodes, under load: storm FILE RECORDS ROUNDS. Each rank writes equally many records
 * by the shared pointer, independently and in order. Together they make up the file: no record is lost, duplicated or
 * overwritten, whichever daemon was killed meanwhile. Then all ranks write the same strided bytes in atomic mode,
 * ROUNDS times, and read them.
 */
#include "check.h"

enum { PIECES = 64, STRIDE = 5000 };

static void pointer(const char *name, int records) {
    MPI_File file;
    MPI_Offset bytes = 0, at = -1;
    OK(MPI_File_open(MPI_COMM_WORLD, name, MPI_MODE_RDWR | MPI_MODE_CREATE, MPI_INFO_NULL, &file));
    OK(MPI_File_set_size(file, 0));
    OK(MPI_File_set_view(file, 0, MPI_INT, MPI_INT, "native", MPI_INFO_NULL));
    for (int i = 0; i < records; i++) {
        int record[2] = {rank, i};
        if (i % 50 == 49)
            OK(MPI_File_write_ordered(file, record, 2, MPI_INT, MPI_STATUS_IGNORE));
        else
            OK(MPI_File_write_shared(file, record, 2, MPI_INT, MPI_STATUS_IGNORE));
    }
    MPI_Barrier(MPI_COMM_WORLD);
    OK(MPI_File_get_size(file, &bytes));
    CHECK(bytes == (MPI_Offset)records * size * 8);
    OK(MPI_File_get_position_shared(file, &at));
    CHECK(at == (MPI_Offset)records * size * 2);
    int *all = malloc(bytes), *next = calloc(size, sizeof *next), wrong = 0;
    OK(MPI_File_read_at(file, 0, all, (int)(bytes / 4), MPI_INT, MPI_STATUS_IGNORE));
    for (MPI_Offset i = 0; i < bytes / 8; i++) {
        int of = all[2 * i];
        wrong += of < 0 || of >= size || all[2 * i + 1] != next[of]++;
    }
    CHECK(wrong == 0);
    OK(MPI_File_seek_shared(file, 0, MPI_SEEK_SET));
    /* Each record is read by one rank. */
    int record[2], sum = 0, *times = calloc((size_t)size * records, sizeof *times);
    MPI_Status status;
    for (int got = 2; got == 2;) {
        OK(MPI_File_read_shared(file, record, 2, MPI_INT, &status));
        MPI_Get_count(&status, MPI_INT, &got);
        if (got == 2 && record[0] >= 0 && record[0] < size && record[1] >= 0 && record[1] < records)
            times[record[0] * records + record[1]]++;
        CHECK(got == 2 || got == 0);
    }
    MPI_Allreduce(MPI_IN_PLACE, times, size * records, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    for (int i = 0; i < size * records; i++) {
        sum += times[i];
        if (times[i] != 1 && rank == 0)
            printf("record %d of rank %d was read %d times\n", i % records, i / records, times[i]);
    }
    CHECK(sum == records * size);
    OK(MPI_File_get_position_shared(file, &at));
    /* At the end of the file each rank has read once. */
    CHECK(at == (MPI_Offset)(records + 1) * size * 2);
    free(times);
    free(all);
    free(next);
    OK(MPI_File_close(&file));
}

static void atomic(const char *name, int rounds) {
    MPI_File file;
    MPI_Datatype strided;
    int mine[PIECES], back[PIECES];
    MPI_Type_vector(PIECES, 1, STRIDE, MPI_INT, &strided);
    MPI_Type_commit(&strided);
    OK(MPI_File_open(MPI_COMM_WORLD, name, MPI_MODE_RDWR | MPI_MODE_CREATE, MPI_INFO_NULL, &file));
    OK(MPI_File_set_view(file, 0, MPI_INT, strided, "native", MPI_INFO_NULL));
    OK(MPI_File_set_atomicity(file, 1));
    for (int round = 0; round < rounds; round++) {
        int torn = 0;
        for (int i = 0; i < PIECES; i++)
            mine[i] = rank * rounds + round;
        if (round % 2 == 0 || round == 1)
            OK(MPI_File_write_at(file, 0, mine, PIECES, MPI_INT, MPI_STATUS_IGNORE));
        OK(MPI_File_read_at(file, 0, back, PIECES, MPI_INT, MPI_STATUS_IGNORE));
        for (int i = 1; i < PIECES; i++)
            torn += back[i] != back[0];
        CHECK(torn == 0);
    }
    MPI_Type_free(&strided);
    OK(MPI_File_close(&file));
}

int main(int argc, char **argv) {
    char name[4200];
    begin(&argc, &argv);
    if (argc != 4)
        return 2;
    snprintf(name, sizeof name, "%s.pointer", argv[1]);
    pointer(name, atoi(argv[2]));
    snprintf(name, sizeof name, "%s.atomic", argv[1]);
    atomic(name, atoi(argv[3]));
    return end();
}
