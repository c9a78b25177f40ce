/* Copies a file by MPI-IO to one outside: copy FROM TO. */
#include "check.h"

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 3 || size != 1)
        return 2;
    MPI_File from = MPI_FILE_NULL;
    OK(MPI_File_open(MPI_COMM_WORLD, argv[1], MPI_MODE_RDONLY, MPI_INFO_NULL, &from));
    FILE *to = fopen(argv[2], "wx");
    CHECK(to != NULL);
    static char bytes[1 << 16];
    int count = failures == 0 ? sizeof bytes : 0;
    while (count > 0) {
        MPI_Status status;
        OK(MPI_File_read(from, bytes, sizeof bytes, MPI_BYTE, &status));
        MPI_Get_count(&status, MPI_BYTE, &count);
        CHECK(fwrite(bytes, 1, count, to) == (size_t)count);
    }
    CHECK(to != NULL && fclose(to) == 0);
    if (from != MPI_FILE_NULL)
        OK(MPI_File_close(&from));
    return end();
}
