/* Shared by the test programs: a check that counts failures, and an exit status that all ranks agree on. */
#ifndef CHECK_H
#define CHECK_H

#include "end.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int failures, rank, size;

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            failures++;                                                                                                \
            printf("%s:%d: rank %d: %s\n", __FILE__, __LINE__, rank, #condition);                                      \
            fflush(stdout);                                                                                            \
        }                                                                                                              \
    } while (0)

/* The call succeeds. */
#define OK(call) CHECK((call) == MPI_SUCCESS)

static inline int class_of(int code) {
    int class = -1;
    MPI_Error_class(code, &class);
    return class;
}
/* The call fails with this class. */
#define FAILS(class, call)                                                                                             \
    do {                                                                                                               \
        int got = class_of(call);                                                                                      \
        if (got != (class)) {                                                                                          \
            failures++;                                                                                                \
            printf("%s:%d: rank %d: %s: class %d, not %s\n", __FILE__, __LINE__, rank, #call, got, #class);            \
            fflush(stdout);                                                                                            \
        }                                                                                                              \
    } while (0)

static inline void begin(int *argc, char ***argv) {
    MPI_Init(argc, argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
}

static inline int end(void) {
    int all = 0;
    MPI_Allreduce(&failures, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0)
        printf(all == 0 ? "passed\n" : "FAILED: %d checks\n", all);
    end_ranks(all != 0);
    return all != 0;
}

#endif
