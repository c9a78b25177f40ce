/*
 * A rank that is killed between its accesses, in atomic mode, whose lock it may hold: dies FILE. Data stay in the file
 * if the call that wrote them has returned on any rank; another program checks that block i consists of bytes i + 1.
 */
#include "check.h"

#include <signal.h>
#include <unistd.h>

enum { BLOCK = 100000 };

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 2)
        return 2;
    MPI_File file;
    static char block[BLOCK];
    memset(block, rank + 1, sizeof block);
    OK(MPI_File_open(MPI_COMM_WORLD, argv[1], MPI_MODE_RDWR | MPI_MODE_CREATE, MPI_INFO_NULL, &file));
    OK(MPI_File_set_atomicity(file, 1));
    OK(MPI_File_write_at(file, (MPI_Offset)rank * BLOCK, block, BLOCK, MPI_BYTE, MPI_STATUS_IGNORE));
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == size - 1)
        kill(getpid(), SIGKILL);
    /* Until the launcher kills it. */
    for (;;)
        MPI_File_write_at(file, (MPI_Offset)rank * BLOCK, block, BLOCK, MPI_BYTE, MPI_STATUS_IGNORE);
}
