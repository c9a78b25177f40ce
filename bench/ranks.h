/*
 * Shared by the measurements with ranks: this rank's number, calls that must succeed, and the JSON object that rank 0
 * prints.
 */
#ifndef RANKS_H
#define RANKS_H

#include <mpi.h>
#include <stdio.h>

static int rank, size, printed;

static void must(int code, const char *what) {
    if (code == MPI_SUCCESS)
        return;
    char words[MPI_MAX_ERROR_STRING];
    int bytes;
    MPI_Error_string(code, words, &bytes);
    fprintf(stderr, "rank %d: %s: %s\n", rank, what, words);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Prints a name and its value; the first call opens the object. */
static void tell(const char *name, double value) {
    if (rank == 0)
        printf("%s\"%s\": %.6g", printed++ ? ", " : "{", name, value);
}

#endif
