/* How ranks end, also those of one host that believe they are on several. */
#ifndef END_H
#define END_H

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { OTHERS_LEAVE_US = 300 * 1000, LAUNCHER_READS_S = 2, LOOKS_EACH_US = 100 * 1000 };

/* Finalizes MPI. With CHECK_WITHOUT_END in its environment, a rank ends without that and with this exit status: with
 * ranks of one host that believe they are on several, MPICH 4.0's MPI_Finalize sometimes hangs. */
static inline void end_ranks(int status) {
    if (getenv("CHECK_WITHOUT_END") == NULL) {
        MPI_Finalize();
        return;
    }
    fflush(stdout);
    /* A rank that leaves the barrier first may cut the connection on which another still waits in it. */
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Barrier(MPI_COMM_WORLD);
    usleep(OTHERS_LEAVE_US);
    /* MPICH's launcher counts a rank whose connection ends after the rank itself as killed. (That of a rank below
     * `forebay run` ends with that program, which has it too.) It signals the end of each connection to all ranks, which
     * interrupts their sleep. */
    if (getenv("PMI_FD") != NULL)
        close(atoi(getenv("PMI_FD")));
    for (time_t last = time(NULL) + LAUNCHER_READS_S; time(NULL) < last;)
        usleep(LOOKS_EACH_US);
    _exit(status);
}

#endif
