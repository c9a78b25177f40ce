/*
 * The calls as MPI defines them: the checks of arguments, then the functions of the other files that do the work, then
 * the error handler.
 *
 * Every function here that takes a file gets one of Forebay's (entries.S), or one that was closed. The forms for large
 * counts differ only in the type of the count. A nonblocking access is done when its call returns. It completes as a
 * generalized request, which mixes with all others in MPI_Waitall. So no part of it waits for other ranks.
 */
#include "driver.h"
#include "open.h"
#include "register.h"
#include "table.h"
#include "calls.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The file of a handle. Returns from the caller with the error of a handle that was closed. */
#define FILE_OF(file, handle)                                                                                          \
    struct file *file = file_of(handle);                                                                               \
    if (file == NULL)                                                                                                  \
        return fail(NULL, MPI_ERR_FILE);

static void set_status(MPI_Status *status, int64_t bytes) {
    if (status == MPI_STATUS_IGNORE)
        return;
    mpi.Status_set_elements_x(status, MPI_BYTE, bytes);
    mpi.Status_set_cancelled(status, 0);
}

/* ---- calls that always reach the driver: open, close, delete, handles from Fortran, error handlers ---- */

typedef int open_function(MPI_Comm, const char *, int, MPI_Info, MPI_File *);
typedef int close_function(MPI_File *);
typedef int delete_function(const char *, MPI_Info);
typedef MPI_File f2c_function(MPI_Fint);
typedef int create_function(MPI_File_errhandler_function *, MPI_Errhandler *);

static int open_by(open_function *native, MPI_Comm comm, const char *name, int amode, MPI_Info info, MPI_File *out) {
    char room[4096];
    const char *path;
    enum place place = name != NULL && out != NULL ? place_of(name, room, &path) : OUTSIDE;
    if (place == OUTSIDE)
        return native(comm, name, amode, info, out);
    bool elsewhere;
    *out = MPI_FILE_NULL;
    int code = file_open(comm, place, path, amode, info, out, &elsewhere);
    return elsewhere ? native(comm, name, amode, info, out) : fail(NULL, code);
}

static int close_by(close_function *native, MPI_File *handle) {
    if (handle == NULL || !is_ours(*handle))
        return native(handle);
    FILE_OF(file, *handle)
    int code = file_close(file);
    *handle = MPI_FILE_NULL;
    return code;
}

static int delete_by(delete_function *native, const char *name, MPI_Info info) {
    char room[4096];
    const char *path;
    enum place place = name != NULL ? place_of(name, room, &path) : OUTSIDE;
    bool elsewhere = true;
    int code = place != OUTSIDE ? file_delete(place, path, &elsewhere) : MPI_SUCCESS;
    return elsewhere ? native(name, info) : fail(NULL, code);
}

static MPI_File f2c_by(f2c_function *native, MPI_Fint number) {
    MPI_File handle;
    return handle_f2c(number, &handle) ? handle : native(number);
}

static int create_by(create_function *native, MPI_File_errhandler_function *function, MPI_Errhandler *out) {
    int code = native(function, out);
    if (code == MPI_SUCCESS && out != NULL)
        handler_remember(*out, (void (*)(void))function, false);
    return code;
}

/* Defines each of them twice, for the name and the profiling name of the MPI library's own function. */
#define TWICE(result, name, by, parameters, ...)                                                                       \
    static void (*native_##name)(void), (*native_p_##name)(void);                                                      \
    static result name parameters { return by((void *)native_##name, __VA_ARGS__); }                                   \
    static result p_##name parameters { return by((void *)native_p_##name, __VA_ARGS__); }

TWICE(int, File_open, open_by, (MPI_Comm comm, const char *name, int amode, MPI_Info info, MPI_File *out), comm, name,
      amode, info, out)
TWICE(int, File_close, close_by, (MPI_File * handle), handle)
TWICE(int, File_delete, delete_by, (const char *name, MPI_Info info), name, info)
TWICE(MPI_File, File_f2c, f2c_by, (MPI_Fint number), number)
TWICE(int, File_create_errhandler, create_by, (MPI_File_errhandler_function * function, MPI_Errhandler *out), function,
      out)

TWICE(int, Register_datarep, register_by,
      (const char *name, MPI_Datarep_conversion_function *read, MPI_Datarep_conversion_function *write,
       MPI_Datarep_extent_function *extent, void *state),
      name, read, write, extent, state)
#if MPI_VERSION >= 4
TWICE(int, Register_datarep_c, register_c_by,
      (const char *name, MPI_Datarep_conversion_function_c *read, MPI_Datarep_conversion_function_c *write,
       MPI_Datarep_extent_function *extent, void *state),
      name, read, write, extent, state)
#endif

static MPI_Errhandler errhandler_f2c(MPI_Fint number) {
#ifdef OPEN_MPI
    return mpi.Errhandler_f2c(number);
#else
    return (MPI_Errhandler)number;
#endif
}

#define FORTRAN_CREATE(name)                                                                                           \
    static void (*native_##name)(void);                                                                                \
    static void name(void (*function)(void), MPI_Fint *out, MPI_Fint *code) {                                          \
        ((void (*)(void (*)(void), MPI_Fint *, MPI_Fint *))native_##name)(function, out, code);                        \
        handler_remember(errhandler_f2c(*out), function, true);                                                        \
    }
FORTRAN_CREATE(mpi_file_create_errhandler_)
FORTRAN_CREATE(mpi_file_create_errhandler__)
FORTRAN_CREATE(pmpi_file_create_errhandler_)
FORTRAN_CREATE(pmpi_file_create_errhandler__)
FORTRAN_CREATE(ompi_file_create_errhandler_f)
FORTRAN_CREATE(mpi_file_create_errhandler_f08_)
FORTRAN_CREATE(pmpir_file_create_errhandler_f08_)

#define FORTRAN_DATAREP(name)                                                                                          \
    static void (*native_##name)(void);                                                                                \
    static void name(const char *datarep, void (*read)(void), void (*write)(void), void (*extent)(void),               \
                     MPI_Aint *state, MPI_Fint *code, size_t bytes) {                                                  \
        register_fortran_by((void *)native_##name, datarep, read, write, extent, state, code, bytes);                  \
    }
FOREBAY_FORTRAN_DATAREP(FORTRAN_DATAREP)

/* ---- the file itself ---- */

static MPI_Fint File_c2f(MPI_File handle) { return handle_c2f(handle); }

/* Rank 0 executes `act`, and all ranks get the result. `value` must be the same on all ranks. */
static int by_rank_0(struct file *file, int code, int64_t value, int (*act)(const forebay_file *, int64_t)) {
    if (code == MPI_SUCCESS && (file->amode & MPI_MODE_RDONLY))
        code = MPI_ERR_READ_ONLY;
    if (code == MPI_SUCCESS && (file->amode & MPI_MODE_SEQUENTIAL))
        code = MPI_ERR_UNSUPPORTED_OPERATION;
    code = agree(file, code, value);
    if (code != MPI_SUCCESS)
        return fail(file, code);
    int64_t answer = file->rank == 0 ? act(file->data, value) : 0;
    if (file->size > 1)
        mpi.Bcast(&answer, 1, MPI_INT64_T, 0, file->comm);
    return fail(file, class_of(answer));
}

static int File_set_size(MPI_File handle, MPI_Offset size) {
    FILE_OF(file, handle)
    return by_rank_0(file, size < 0 ? MPI_ERR_ARG : MPI_SUCCESS, size, forebay.file_truncate);
}

static int File_preallocate(MPI_File handle, MPI_Offset size) {
    FILE_OF(file, handle)
    return by_rank_0(file, size < 0 ? MPI_ERR_ARG : MPI_SUCCESS, size, forebay.file_allocate);
}

static int File_get_size(MPI_File handle, MPI_Offset *size) {
    FILE_OF(file, handle)
    if (size == NULL)
        return fail(file, MPI_ERR_ARG);
    int64_t bytes = forebay.file_size(file->data);
    if (bytes < 0)
        return fail(file, class_of(bytes));
    *size = bytes;
    return MPI_SUCCESS;
}

static int File_get_group(MPI_File handle, MPI_Group *group) {
    FILE_OF(file, handle)
    return group == NULL ? fail(file, MPI_ERR_ARG) : fail(file, mpi.Comm_group(file->comm, group));
}

static int File_get_amode(MPI_File handle, int *amode) {
    FILE_OF(file, handle)
    if (amode == NULL)
        return fail(file, MPI_ERR_ARG);
    *amode = file->amode;
    return MPI_SUCCESS;
}

static int File_set_info(MPI_File handle, MPI_Info info) {
    FILE_OF(file, handle)
    hints_read(file, info, false);
    /* All ranks get rank 0's hints, as their choices must be the same. */
    mpi.Bcast(file->hints, sizeof file->hints, MPI_BYTE, 0, file->comm);
    return MPI_SUCCESS;
}

static int File_get_info(MPI_File handle, MPI_Info *info) {
    FILE_OF(file, handle)
    if (info == NULL)
        return fail(file, MPI_ERR_ARG);
    *info = hints_give(file);
    return *info == MPI_INFO_NULL ? fail(file, MPI_ERR_NO_MEM) : MPI_SUCCESS;
}

static int File_set_view(MPI_File handle, MPI_Offset disp, MPI_Datatype etype, MPI_Datatype filetype,
                         const char *datarep, MPI_Info info) {
    FILE_OF(file, handle)
    return fail(file, file_set_view(file, disp, etype, filetype, datarep, info));
}

static int give(MPI_Datatype type, MPI_Datatype *out) {
    *out = type;
    return type_is_predefined(type) ? MPI_SUCCESS : mpi.Type_dup(type, out);
}

static int File_get_view(MPI_File handle, MPI_Offset *disp, MPI_Datatype *etype, MPI_Datatype *filetype, char *datarep) {
    FILE_OF(file, handle)
    if (disp == NULL || etype == NULL || filetype == NULL || datarep == NULL)
        return fail(file, MPI_ERR_ARG);
    *disp = file->view.disp;
    strcpy(datarep, datarep_name(file->view.rep));
    int code = give(file->view.etype, etype);
    return fail(file, code == MPI_SUCCESS ? give(file->view.filetype, filetype) : code);
}

static int type_extent(MPI_File handle, MPI_Datatype type, MPI_Count *extent) {
    FILE_OF(file, handle)
    const struct flat *flat;
    struct flat *own = NULL;
    int code = extent == NULL ? MPI_ERR_ARG : flat_in_file(type, file->view.rep, file->comm, &flat, &own);
    if (code == MPI_SUCCESS)
        *extent = flat->extent;
    if (own != NULL)
        flat_free(own);
    return fail(file, code);
}

static int File_get_type_extent(MPI_File handle, MPI_Datatype type, MPI_Aint *extent) {
    MPI_Count answer = 0;
    int code = type_extent(handle, type, extent != NULL ? &answer : NULL);
    if (code == MPI_SUCCESS)
        *extent = (MPI_Aint)answer;
    return code;
}

static int File_set_atomicity(MPI_File handle, int flag) {
    FILE_OF(file, handle)
    shared_by_all(file);
    int code = agree(file, flag && !shared_there(file) ? MPI_ERR_UNSUPPORTED_OPERATION : MPI_SUCCESS, flag != 0);
    if (code == MPI_SUCCESS)
        file->atomic = flag != 0;
    return fail(file, code);
}

static int File_get_atomicity(MPI_File handle, int *flag) {
    FILE_OF(file, handle)
    if (flag == NULL)
        return fail(file, MPI_ERR_ARG);
    *flag = file->atomic;
    return MPI_SUCCESS;
}

/*
 * Returns when all ranks have entered it. Programs written for OMPIO rely on that: afterwards all data that the ranks
 * wrote can be read.
 */
static int File_sync(MPI_File handle) {
    FILE_OF(file, handle)
    return fail(file, agree(file, class_of(forebay.file_sync(file->data)), 0));
}

static int File_set_errhandler(MPI_File handle, MPI_Errhandler errhandler) {
    FILE_OF(file, handle)
    struct handler before = file->handler;
    handler_set(&file->handler, errhandler);
    handler_drop(&before);
    return MPI_SUCCESS;
}

static int File_get_errhandler(MPI_File handle, MPI_Errhandler *errhandler) {
    FILE_OF(file, handle)
    if (errhandler == NULL)
        return fail(file, MPI_ERR_ARG);
    *errhandler = handler_again(&file->handler);
    return MPI_SUCCESS;
}

static int File_call_errhandler(MPI_File handle, int code) {
    FILE_OF(file, handle)
    fail(file, code);
    return MPI_SUCCESS;
}

/* ---- pointers ---- */

/* The position of `offset` from `whence`, in etypes. */
static int seek_to(struct file *file, int64_t offset, int whence, int64_t current, int64_t *out) {
    int64_t base = 0;
    if (whence == MPI_SEEK_CUR) {
        base = current;
    } else if (whence == MPI_SEEK_END) {
        int64_t size = forebay.file_size(file->data);
        if (size < 0)
            return class_of(size);
        base = (view_bytes_before(&file->view, size) + file->view.etype_size - 1) / file->view.etype_size;
    } else if (whence != MPI_SEEK_SET) {
        return MPI_ERR_ARG;
    }
    if (__builtin_add_overflow(base, offset, out) || *out < 0)
        return MPI_ERR_ARG;
    return MPI_SUCCESS;
}

static int not_sequential(const struct file *file) {
    return file->amode & MPI_MODE_SEQUENTIAL ? MPI_ERR_UNSUPPORTED_OPERATION : MPI_SUCCESS;
}

static int File_seek(MPI_File handle, MPI_Offset offset, int whence) {
    FILE_OF(file, handle)
    int code = not_sequential(file);
    int64_t position = 0;
    pthread_mutex_lock(&file->lock);
    if (code == MPI_SUCCESS)
        code = seek_to(file, offset, whence, file->position, &position);
    if (code == MPI_SUCCESS)
        file->position = position;
    pthread_mutex_unlock(&file->lock);
    return fail(file, code);
}

static int File_get_position(MPI_File handle, MPI_Offset *offset) {
    FILE_OF(file, handle)
    int code = offset == NULL ? MPI_ERR_ARG : not_sequential(file);
    if (code == MPI_SUCCESS)
        *offset = file->position;
    return fail(file, code);
}

static int File_get_byte_offset(MPI_File handle, MPI_Offset offset, MPI_Offset *disp) {
    FILE_OF(file, handle)
    int code = offset < 0 || disp == NULL ? MPI_ERR_ARG : not_sequential(file);
    int64_t position = 0, end = 0, at = file->view.disp;
    if (code == MPI_SUCCESS && __builtin_mul_overflow(offset, file->view.etype_size, &position))
        code = MPI_ERR_ARG;
    if (code == MPI_SUCCESS && file->view.file->size > 0)
        code = view_span(&file->view, position, 1, &at, &end);
    if (code == MPI_SUCCESS)
        *disp = file->view.file->apart ? at : view_offset(&file->view, position);
    return fail(file, code);
}

static int File_seek_shared(MPI_File handle, MPI_Offset offset, int whence) {
    FILE_OF(file, handle)
    shared_by_all(file);
    int64_t position = 0;
    int code = not_sequential(file);
    if (code == MPI_SUCCESS && !shared_there(file))
        code = MPI_ERR_UNSUPPORTED_OPERATION;
    if (code == MPI_SUCCESS && whence == MPI_SEEK_CUR)
        code = shared_move(file, 0, &position);
    if (code == MPI_SUCCESS)
        code = seek_to(file, offset, whence, position, &position);
    /* All ranks read the position that SEEK_CUR starts from before it changes. */
    int kind = whence == MPI_SEEK_SET ? 0 : whence == MPI_SEEK_CUR ? 1 : 2;
    code = agree(file, code, offset > INT64_MAX / 4 || offset < -INT64_MAX / 4 ? offset : offset * 4 + kind);
    return fail(file, code == MPI_SUCCESS ? shared_seek(file, position) : code);
}

static int File_get_position_shared(MPI_File handle, MPI_Offset *offset) {
    FILE_OF(file, handle)
    int64_t position = 0;
    int code = offset == NULL ? MPI_ERR_ARG : shared_there(file) ? MPI_SUCCESS : MPI_ERR_UNSUPPORTED_OPERATION;
    if (code == MPI_SUCCESS)
        code = shared_move(file, 0, &position);
    if (code == MPI_SUCCESS)
        *offset = position;
    return fail(file, code);
}

/* ---- data ---- */

static int blocking(MPI_File handle, bool writes, enum pointer pointer, int flags, int64_t offset, const void *buffer,
                    int64_t count, MPI_Datatype type, MPI_Status *status) {
    FILE_OF(file, handle)
    int64_t bytes = 0;
    int code = access_file(file, writes, pointer, flags, offset, (void *)buffer, count, type, &bytes);
    if (code == MPI_SUCCESS)
        set_status(status, bytes);
    return fail(file, code);
}

static int query(void *state, MPI_Status *status) {
    set_status(status, *(int64_t *)state);
    status->MPI_SOURCE = MPI_ANY_SOURCE;
    status->MPI_TAG = MPI_ANY_TAG;
    return MPI_SUCCESS;
}

static int forget(void *state) {
    free(state);
    return MPI_SUCCESS;
}

static int cancel(void *state, int complete) {
    (void)state, (void)complete;
    return MPI_SUCCESS;
}

static int nonblocking(MPI_File handle, bool writes, enum pointer pointer, int64_t offset, const void *buffer,
                       int64_t count, MPI_Datatype type, MPI_Request *request) {
    FILE_OF(file, handle)
    if (request == NULL)
        return fail(file, MPI_ERR_ARG);
    int64_t *bytes = calloc(1, sizeof *bytes);
    if (bytes == NULL)
        return fail(file, MPI_ERR_NO_MEM);
    int code = access_file(file, writes, pointer, 0, offset, (void *)buffer, count, type, bytes);
    if (code == MPI_SUCCESS)
        code = mpi.Grequest_start(query, forget, cancel, bytes, request);
    if (code != MPI_SUCCESS) {
        free(bytes);
        *request = MPI_REQUEST_NULL; /* for a program that waits for the request despite the error */
        return fail(file, code);
    }
    return mpi.Grequest_complete(*request);
}

static int begin(MPI_File handle, bool writes, enum pointer pointer, enum split split, int64_t offset,
                 const void *buffer, int64_t count, MPI_Datatype type) {
    FILE_OF(file, handle)
    if (file->split != SPLIT_NONE)
        return fail(file, MPI_ERR_OTHER);
    int64_t bytes = 0;
    int code = access_file(file, writes, pointer, 0, offset, (void *)buffer, count, type, &bytes);
    if (code != MPI_SUCCESS)
        return fail(file, code);
    file->split = split;
    file->split_writes = writes;
    file->split_bytes = bytes;
    return MPI_SUCCESS;
}

static int end(MPI_File handle, bool writes, enum split split, MPI_Status *status) {
    FILE_OF(file, handle)
    if (file->split != split || file->split_writes != writes)
        return fail(file, MPI_ERR_OTHER);
    file->split = SPLIT_NONE;
    set_status(status, file->split_bytes);
    return MPI_SUCCESS;
}

/* The forms of an access: by offset or by the individual pointer; with a status, with a request, or split in two. */
#define AT(name, count_type, constant, ...)                                                                            \
    static int name(MPI_File handle, MPI_Offset offset, constant void *buffer, count_type count, MPI_Datatype type,    \
                    MPI_Status *status) {                                                                              \
        return blocking(handle, __VA_ARGS__, offset, buffer, count, type, status);                                     \
    }
#define HERE(name, count_type, constant, ...)                                                                          \
    static int name(MPI_File handle, constant void *buffer, count_type count, MPI_Datatype type, MPI_Status *status) { \
        return blocking(handle, __VA_ARGS__, 0, buffer, count, type, status);                                          \
    }
#define LATER_AT(name, count_type, constant, ...)                                                                      \
    static int name(MPI_File handle, MPI_Offset offset, constant void *buffer, count_type count, MPI_Datatype type,    \
                    MPI_Request *request) {                                                                            \
        return nonblocking(handle, __VA_ARGS__, offset, buffer, count, type, request);                                 \
    }
#define LATER(name, count_type, constant, ...)                                                                         \
    static int name(MPI_File handle, constant void *buffer, count_type count, MPI_Datatype type,                       \
                    MPI_Request *request) {                                                                            \
        return nonblocking(handle, __VA_ARGS__, 0, buffer, count, type, request);                                      \
    }
#define BEGIN_AT(name, count_type, constant, ...)                                                                      \
    static int name(MPI_File handle, MPI_Offset offset, constant void *buffer, count_type count, MPI_Datatype type) {  \
        return begin(handle, __VA_ARGS__, offset, buffer, count, type);                                                \
    }
#define BEGIN(name, count_type, constant, ...)                                                                         \
    static int name(MPI_File handle, constant void *buffer, count_type count, MPI_Datatype type) {                     \
        return begin(handle, __VA_ARGS__, 0, buffer, count, type);                                                     \
    }
#define END(name, ...)                                                                                                 \
    static int name(MPI_File handle, void *buffer, MPI_Status *status) {                                               \
        (void)buffer;                                                                                                  \
        return end(handle, __VA_ARGS__, status);                                                                       \
    }
#define END_CONST(name, ...)                                                                                           \
    static int name(MPI_File handle, const void *buffer, MPI_Status *status) {                                         \
        (void)buffer;                                                                                                  \
        return end(handle, __VA_ARGS__, status);                                                                       \
    }

#define ACCESSES(suffix, count_type)                                                                                   \
    AT(File_read_at##suffix, count_type, , false, AT_OFFSET, 0)                                                        \
    AT(File_read_at_all##suffix, count_type, , false, AT_OFFSET, COLLECTIVE)                                           \
    AT(File_write_at##suffix, count_type, const, true, AT_OFFSET, 0)                                                   \
    AT(File_write_at_all##suffix, count_type, const, true, AT_OFFSET, COLLECTIVE)                                      \
    HERE(File_read##suffix, count_type, , false, INDIVIDUAL, 0)                                                        \
    HERE(File_read_all##suffix, count_type, , false, INDIVIDUAL, COLLECTIVE)                                           \
    HERE(File_write##suffix, count_type, const, true, INDIVIDUAL, 0)                                                   \
    HERE(File_write_all##suffix, count_type, const, true, INDIVIDUAL, COLLECTIVE)                                      \
    HERE(File_read_shared##suffix, count_type, , false, SHARED, 0)                                                     \
    HERE(File_write_shared##suffix, count_type, const, true, SHARED, 0)                                                \
    HERE(File_read_ordered##suffix, count_type, , false, ORDERED, 0)                                                   \
    HERE(File_write_ordered##suffix, count_type, const, true, ORDERED, 0)                                              \
    LATER_AT(File_iread_at##suffix, count_type, , false, AT_OFFSET)                                                    \
    LATER_AT(File_iread_at_all##suffix, count_type, , false, AT_OFFSET)                                                \
    LATER_AT(File_iwrite_at##suffix, count_type, const, true, AT_OFFSET)                                               \
    LATER_AT(File_iwrite_at_all##suffix, count_type, const, true, AT_OFFSET)                                           \
    LATER(File_iread##suffix, count_type, , false, INDIVIDUAL)                                                         \
    LATER(File_iread_all##suffix, count_type, , false, INDIVIDUAL)                                                     \
    LATER(File_iwrite##suffix, count_type, const, true, INDIVIDUAL)                                                    \
    LATER(File_iwrite_all##suffix, count_type, const, true, INDIVIDUAL)                                                \
    LATER(File_iread_shared##suffix, count_type, , false, SHARED)                                                      \
    LATER(File_iwrite_shared##suffix, count_type, const, true, SHARED)                                                 \
    BEGIN_AT(File_read_at_all_begin##suffix, count_type, , false, AT_OFFSET, SPLIT_AT)                                 \
    BEGIN_AT(File_write_at_all_begin##suffix, count_type, const, true, AT_OFFSET, SPLIT_AT)                            \
    BEGIN(File_read_all_begin##suffix, count_type, , false, INDIVIDUAL, SPLIT_INDIVIDUAL)                              \
    BEGIN(File_write_all_begin##suffix, count_type, const, true, INDIVIDUAL, SPLIT_INDIVIDUAL)                         \
    BEGIN(File_read_ordered_begin##suffix, count_type, , false, ORDERED, SPLIT_ORDERED)                                \
    BEGIN(File_write_ordered_begin##suffix, count_type, const, true, ORDERED, SPLIT_ORDERED)

ACCESSES(, int)
END(File_read_at_all_end, false, SPLIT_AT)
END_CONST(File_write_at_all_end, true, SPLIT_AT)
END(File_read_all_end, false, SPLIT_INDIVIDUAL)
END_CONST(File_write_all_end, true, SPLIT_INDIVIDUAL)
END(File_read_ordered_end, false, SPLIT_ORDERED)
END_CONST(File_write_ordered_end, true, SPLIT_ORDERED)
#if MPI_VERSION >= 4
ACCESSES(_c, MPI_Count)

static int File_get_type_extent_c(MPI_File handle, MPI_Datatype type, MPI_Count *extent) {
    return type_extent(handle, type, extent);
}
#endif

/* Each function has the type that mpi.h declares. The compiler checks it; this never runs. */
#define CHECK(name) _Static_assert(__builtin_types_compatible_p(__typeof__(name), __typeof__(PMPI_##name)), #name);
#define CHECK_LARGE(name)                                                                                              \
    _Static_assert(__builtin_types_compatible_p(__typeof__(name##_c), __typeof__(PMPI_##name##_c)), #name "_c");
FOREBAY_ALWAYS(CHECK)
FOREBAY_ON_FILE(CHECK)

#define CALL(name) {"MPI_" #name, (void (*)(void))name},
#define CALL_LARGE(name) {"MPI_" #name "_c", (void (*)(void))name##_c},
static const struct forebay_mpi_call calls[] = {FOREBAY_ON_FILE(CALL)
#if MPI_VERSION >= 4
                                                    FOREBAY_COUNTED(CALL_LARGE) CALL_LARGE(File_get_type_extent)
#endif
                                                        {NULL, NULL}};
#if MPI_VERSION >= 4
FOREBAY_COUNTED(CHECK_LARGE)
CHECK_LARGE(Register_datarep)
#endif

#define ALWAYS(name)                                                                                                   \
    {"MPI_" #name, (void (*)(void))name, &native_##name}, {"PMPI_" #name, (void (*)(void))p_##name, &native_p_##name},
#define FORTRAN(name) {#name, (void (*)(void))name, &native_##name},
static const struct forebay_mpi_always always[] = {FOREBAY_ALWAYS(ALWAYS) FOREBAY_FORTRAN(FORTRAN)
#if MPI_VERSION >= 4
                                                       ALWAYS(Register_datarep_c)
#endif
                                                           FOREBAY_FORTRAN_DATAREP(FORTRAN)
                                                               {NULL, NULL, NULL}};

__attribute__((visibility("default"))) forebay_mpi_driver_function forebay_mpi_driver;

const struct forebay_mpi_table *forebay_mpi_driver(void *library, const char *directory) {
    static struct forebay_mpi_table table = {
        .version = FOREBAY_MPI_TABLE_VERSION, .calls = calls, .always = always, .pnetcdf_look = pnetcdf_look};
    if (!native_find(library))
        return NULL;
    forebay_found_at(directory);
    table.first = (uintptr_t)handle_range;
    table.extent = (uintptr_t)HANDLES_MAX * HANDLE_BYTES;
    return &table;
}
