/*
 * MPI_Register_datarep. The driver uses a representation for files of the pool, and the MPI library uses it for all
 * others. So the call also goes to the MPI library, whose objections to a function concern views of its own files. The
 * driver's registration comes first, as Fortran's calls lead to the C function. MPICH passes Fortran's functions on as
 * if they were C functions. Open MPI makes C functions of them, but in mpi_f08 takes the program's function for the one
 * that means none.
 *
 * The functions take arguments of the same lengths, by reference, in all three interfaces of Fortran.
 */
#include "register.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* Runs the calls without the error handler of MPI_FILE_NULL. */
#define QUIETLY(...)                                                                                                   \
    MPI_Errhandler handler_before = MPI_ERRORS_RETURN;                                                                 \
    mpi.File_get_errhandler(MPI_FILE_NULL, &handler_before);                                                           \
    mpi.File_set_errhandler(MPI_FILE_NULL, MPI_ERRORS_RETURN);                                                         \
    __VA_ARGS__                                                                                                        \
    mpi.File_set_errhandler(MPI_FILE_NULL, handler_before);                                                            \
    if (handler_before != MPI_ERRORS_RETURN && handler_before != MPI_ERRORS_ARE_FATAL)                                 \
        mpi.Errhandler_free(&handler_before);

static int registered(const char *name, int code, int native) {
    if (debug() && code == MPI_SUCCESS && native != MPI_SUCCESS)
        fprintf(stderr, "forebay: %s: the MPI library refuses this data representation for its own files\n", name);
    return fail(NULL, code);
}

int register_by(datarep_function *native, const char *name, MPI_Datarep_conversion_function *read,
                       MPI_Datarep_conversion_function *write, MPI_Datarep_extent_function *extent, void *state) {
    struct conversions own = {CONVERSIONS_C, (void (*)(void))read, (void (*)(void))write, (void (*)(void))extent, state};
    int code = datarep_register(name, &own, NULL);
    QUIETLY(int its = native(name, read, write, extent, state);)
    return registered(name, code, its);
}

#if MPI_VERSION >= 4
int register_c_by(datarep_function_c *native, const char *name, MPI_Datarep_conversion_function_c *read,
                         MPI_Datarep_conversion_function_c *write, MPI_Datarep_extent_function *extent, void *state) {
    struct conversions own = {CONVERSIONS_LARGE, (void (*)(void))read, (void (*)(void))write, (void (*)(void))extent, state};
    int code = datarep_register(name, &own, NULL);
    QUIETLY(int its = native(name, read, write, extent, state);)
    return registered(name, code, its);
}
#endif

static const char *fortran_name(const char *name, size_t bytes, char room[MPI_MAX_DATAREP_STRING + 2]) {
    while (bytes > 0 && name[bytes - 1] == ' ')
        bytes--;
    if (bytes > MPI_MAX_DATAREP_STRING)
        return NULL;
    memcpy(room, name, bytes);
    room[bytes] = 0;
    return room;
}

static void (*unless_null(void (*function)(void)))(void) {
    static const char *const names[] = {"mpi_conversion_fn_null_", "mpi_conversion_fn_null__",
                                        "__mpi_f08_callbacks_MOD_mpi_conversion_fn_null"}; /* in gfortran's mpi_f08 */
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if ((void *)function == dlsym(RTLD_DEFAULT, names[i]))
            return NULL;
    return function;
}

void register_fortran_by(fortran_datarep_function *native, const char *name, void (*read)(void), void (*write)(void),
                         void (*extent)(void), MPI_Aint *state, MPI_Fint *code, size_t bytes) {
    char room[MPI_MAX_DATAREP_STRING + 2];
    struct conversions own = {CONVERSIONS_FORTRAN, unless_null(read), unless_null(write), extent, NULL};
    const char *as_c = fortran_name(name, bytes, room);
    MPI_Fint its = MPI_SUCCESS;
    int own_code = datarep_register(as_c, &own, state);
    QUIETLY(native(name, read, write, extent, state, &its, bytes);)
    own_code = registered(as_c, own_code, its);
    if (code != NULL)
        *code = own_code;
}
