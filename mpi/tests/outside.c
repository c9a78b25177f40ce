/* A native file and a Forebay file, open at once. outside NATIVE_FILE POOL_FILE */
#include "check.h"

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 3)
        return 2;
    MPI_File files[2];
    MPI_Request requests[2];
    MPI_Status statuses[2];
    int data[2] = {rank, rank + 100}, back[2] = {-1, -1};
    for (int f = 0; f < 2; f++) {
        OK(MPI_File_open(MPI_COMM_WORLD, argv[1 + f], MPI_MODE_RDWR | MPI_MODE_CREATE, MPI_INFO_NULL, &files[f]));
        OK(MPI_File_set_view(files[f], 0, MPI_INT, MPI_INT, "native", MPI_INFO_NULL));
        OK(MPI_File_iwrite_at(files[f], rank, &data[f], 1, MPI_INT, &requests[f]));
    }
    OK(MPI_Waitall(2, requests, statuses));
    for (int f = 0; f < 2; f++) {
        OK(MPI_File_read_at_all(files[f], rank, &back[f], 1, MPI_INT, MPI_STATUS_IGNORE));
        CHECK(back[f] == data[f]);
        CHECK(MPI_File_f2c(MPI_File_c2f(files[f])) == files[f]);
        OK(MPI_File_close(&files[f]));
    }
    MPI_File none;
    char missing[4200];
    snprintf(missing, sizeof missing, "%s.none", argv[1]);
    FAILS(MPI_ERR_NO_SUCH_FILE, MPI_File_open(MPI_COMM_WORLD, missing, MPI_MODE_RDONLY, MPI_INFO_NULL, &none));
    return end();
}
