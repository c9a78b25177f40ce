/*
 * Errors: from errno to MPI's classes, and the error handlers of files.
 *
 * A file keeps the function of its handler. MPI has no call that returns it, so it is noted when the handler is
 * created. The driver returns error classes, which are valid error codes with the texts of the MPI library. For a
 * handler whose creation was not seen, the MPI library calls it on MPI_FILE_NULL.
 */
#include "driver.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

int class_of(int64_t negative_errno) {
    switch (-negative_errno) {
    case 0:
        return MPI_SUCCESS;
    case ENOENT:
        return MPI_ERR_NO_SUCH_FILE;
    case EEXIST:
        return MPI_ERR_FILE_EXISTS;
    case EACCES:
    case EPERM:
        return MPI_ERR_ACCESS;
    case EROFS:
        return MPI_ERR_READ_ONLY;
    case ENOSPC:
        return MPI_ERR_NO_SPACE;
    case EDQUOT:
        return MPI_ERR_QUOTA;
    case EISDIR:
    case ENOTDIR:
    case ENAMETOOLONG:
    case ELOOP:
    case EXDEV:
    case ENXIO:
        return MPI_ERR_BAD_FILE;
    case EBUSY:
    case ETXTBSY:
        return MPI_ERR_FILE_IN_USE;
    case EINVAL:
        return MPI_ERR_ARG;
    case EOPNOTSUPP:
        return MPI_ERR_UNSUPPORTED_OPERATION;
    case ENOMEM:
    case EMFILE:
    case ENFILE:
        return MPI_ERR_NO_MEM;
    default:
        return MPI_ERR_IO;
    }
}

enum { NOTED_MAX = 1024 };
static struct handler noted[NOTED_MAX];
static int noted_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void handler_remember(MPI_Errhandler handle, void (*function)(void), bool fortran) {
    pthread_mutex_lock(&lock);
    int at = 0;
    while (at < noted_count && noted[at].handle != handle)
        at++;
    if (at < NOTED_MAX) {
        noted[at] = (struct handler){handle, function, fortran};
        if (at == noted_count)
            noted_count++;
    }
    pthread_mutex_unlock(&lock);
}

/* Handlers that end the program. MPICH 4.0.2 accepts MPI_ERRORS_ABORT for none of its own files. */
static bool is_fatal(MPI_Errhandler handle) {
#if defined(MPI_ERRORS_ABORT) && !defined(OPEN_MPI)
    if (handle == MPI_ERRORS_ABORT)
        return true;
#endif
    return handle == MPI_ERRORS_ARE_FATAL;
}

static bool is_predefined(MPI_Errhandler handle) { return handle == MPI_ERRORS_RETURN || is_fatal(handle); }

static struct handler look_up(MPI_Errhandler handle) {
    struct handler found = {handle, NULL, false};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < noted_count; i++)
        if (noted[i].handle == handle)
            found = noted[i];
    pthread_mutex_unlock(&lock);
    return found;
}

/*
 * Makes another reference to a handler. MPI returns references only from an object that has the handler, so the handler
 * is set for MPI_FILE_NULL for a moment.
 */
static MPI_Errhandler reference(MPI_Errhandler handle) {
    static pthread_mutex_t borrowed = PTHREAD_MUTEX_INITIALIZER;
    if (is_predefined(handle))
        return handle;
    MPI_Errhandler before, again = handle;
    pthread_mutex_lock(&borrowed);
    mpi.File_get_errhandler(MPI_FILE_NULL, &before);
    mpi.File_set_errhandler(MPI_FILE_NULL, handle);
    mpi.File_get_errhandler(MPI_FILE_NULL, &again);
    mpi.File_set_errhandler(MPI_FILE_NULL, before);
    if (!is_predefined(before))
        mpi.Errhandler_free(&before);
    pthread_mutex_unlock(&borrowed);
    return again;
}

void handler_set(struct handler *out, MPI_Errhandler handle) {
    *out = look_up(handle);
    out->handle = reference(handle);
}

void handler_default(struct handler *out) {
    MPI_Errhandler handle = MPI_ERRORS_RETURN;
    mpi.File_get_errhandler(MPI_FILE_NULL, &handle);
    *out = look_up(handle);
}

MPI_Errhandler handler_again(const struct handler *handler) { return reference(handler->handle); }

void handler_drop(struct handler *handler) {
    if (!is_predefined(handler->handle))
        mpi.Errhandler_free(&handler->handle);
}

int fail(struct file *file, int code) {
    if (code == MPI_SUCCESS)
        return code;
    struct handler handler;
    if (file != NULL)
        handler = file->handler;
    else
        handler_default(&handler);
    MPI_File handle = file != NULL ? file->handle : MPI_FILE_NULL;
    int answer = code; /* the handler may change it */
    if (is_fatal(handler.handle)) {
        char words[MPI_MAX_ERROR_STRING] = "";
        int bytes = 0;
        mpi.Error_string(code, words, &bytes);
        fprintf(stderr, "forebay: %s: %s: errors of this file are fatal\n",
                file != NULL && file->path != NULL ? file->path : "MPI-IO", words);
        mpi.Abort(file != NULL && file->comm != MPI_COMM_NULL ? file->comm : MPI_COMM_WORLD, code);
    } else if (handler.function != NULL && handler.fortran) {
        MPI_Fint number = file != NULL ? handle_c2f(handle) : 0, fortran_answer = code;
        ((void (*)(MPI_Fint *, MPI_Fint *, ...))handler.function)(&number, &fortran_answer);
        answer = fortran_answer;
    } else if (handler.function != NULL) {
        ((void (*)(MPI_File *, int *, ...))handler.function)(&handle, &answer);
    } else if (handler.handle != MPI_ERRORS_RETURN) {
        MPI_Errhandler before;
        mpi.File_get_errhandler(MPI_FILE_NULL, &before);
        mpi.File_set_errhandler(MPI_FILE_NULL, handler.handle);
        mpi.File_call_errhandler(MPI_FILE_NULL, code);
        mpi.File_set_errhandler(MPI_FILE_NULL, before);
        if (!is_predefined(before))
            mpi.Errhandler_free(&before);
    }
    if (file == NULL)
        handler_drop(&handler);
    return answer;
}
