/*
 * The interface between libforebay_mpi.so, which programs call, and the driver of one MPI, which it loads. Neither
 * links an MPI.
 */
#ifndef FOREBAY_MPI_TABLE_H
#define FOREBAY_MPI_TABLE_H

#include <stddef.h>
#include <stdint.h>

#define FOREBAY_MPI_TABLE_VERSION 2

/* One call that the driver implements. */
struct forebay_mpi_call {
    const char *name; /* as programs call it, without the P of PMPI_ */
    void (*function)(void);
};

/*
 * One call that reaches the driver whatever its arguments are. `native` is where the driver finds the MPI library's own
 * function.
 */
struct forebay_mpi_always {
    const char *name; /* in full: MPI_ or PMPI_, or a Fortran name */
    void (*function)(void);
    void (**native)(void);
};

struct forebay_mpi_table {
    uint32_t version;
    uintptr_t first;   /* handles of Forebay's files are the addresses from here ... */
    uintptr_t extent;  /* ... over this many bytes */
    const struct forebay_mpi_call *calls;
    const struct forebay_mpi_always *always;
    int (*pnetcdf_look)(const char *path, int *format, int (*native)(const char *, int *));
};

/*
 * The function that a driver exports: returns its table, or NULL when `mpi`, a handle of dlopen(3), lacks a function
 * that the driver needs. `directory` contains Forebay's libraries and ends in a slash.
 */
typedef const struct forebay_mpi_table *forebay_mpi_driver_function(void *mpi, const char *directory);

#endif
