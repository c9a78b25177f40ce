/*
 * Between libforebay_mpi.so, which programs call, and the driver of one MPI, which it loads. Neither links an MPI.
 */
#ifndef FOREBAY_MPI_TABLE_H
#define FOREBAY_MPI_TABLE_H

#include <stddef.h>
#include <stdint.h>

#define FOREBAY_MPI_TABLE_VERSION 2

/* One call that the driver answers. */
struct forebay_mpi_call {
    const char *name; /* as programs call it, without the P of PMPI_ */
    void (*function)(void);
};

/* One call that the driver answers whatever its arguments are; `native` is where it finds the MPI library's own. */
struct forebay_mpi_always {
    const char *name; /* in full: MPI_ or PMPI_, or a Fortran name */
    void (*function)(void);
    void (**native)(void);
};

struct forebay_mpi_table {
    uint32_t version;
    uintptr_t first;   /* own files are the addresses from here ... */
    uintptr_t extent;  /* ... over so many bytes */
    const struct forebay_mpi_call *calls;
    const struct forebay_mpi_always *always;
    int (*pnetcdf_look)(const char *path, int *format, int (*native)(const char *, int *));
};

/* What a driver exports: gives its table, or NULL when `mpi`, a handle of dlopen(3), lacks what it needs. `directory` is
 * where Forebay's libraries are, with a slash behind. */
typedef const struct forebay_mpi_table *forebay_mpi_driver_function(void *mpi, const char *directory);

#endif
