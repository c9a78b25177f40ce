/* register.c: MPI_Register_datarep. Each function gets the MPI library's own function. */
#ifndef FOREBAY_MPI_REGISTER_H
#define FOREBAY_MPI_REGISTER_H

#include "driver.h"

typedef int datarep_function(const char *, MPI_Datarep_conversion_function *, MPI_Datarep_conversion_function *,
                             MPI_Datarep_extent_function *, void *);
int register_by(datarep_function *native, const char *name, MPI_Datarep_conversion_function *read,
                MPI_Datarep_conversion_function *write, MPI_Datarep_extent_function *extent, void *state);

#if MPI_VERSION >= 4
typedef int datarep_function_c(const char *, MPI_Datarep_conversion_function_c *, MPI_Datarep_conversion_function_c *,
                               MPI_Datarep_extent_function *, void *);
int register_c_by(datarep_function_c *native, const char *name, MPI_Datarep_conversion_function_c *read,
                  MPI_Datarep_conversion_function_c *write, MPI_Datarep_extent_function *extent, void *state);
#endif

/*
 * The call as gfortran makes it; `bytes` is the length of the name, with trailing blanks. `code` may be NULL in
 * mpi_f08.
 */
typedef void fortran_datarep_function(const char *, void (*)(void), void (*)(void), void (*)(void), MPI_Aint *, MPI_Fint *,
                                      size_t);
void register_fortran_by(fortran_datarep_function *native, const char *name, void (*read)(void), void (*write)(void),
                         void (*extent)(void), MPI_Aint *state, MPI_Fint *code, size_t bytes);

#endif
