/* Files of the kernels by POSIX calls and by MPI-IO; see kernel.h. */
#include "kernel.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <unistd.h>

const char *file_error(int code) {
    static char text[MPI_MAX_ERROR_STRING];
    int length;
    MPI_Error_string(code, text, &length);
    return text;
}

MPI_Info file_hints(void) {
    MPI_Info info = MPI_INFO_NULL;
    if (settings.hints == NULL)
        return info;
    MPI_Info_create(&info);
    for (const char *at = settings.hints; *at != 0;) {
        char name[MPI_MAX_INFO_KEY], value[MPI_MAX_INFO_VAL];
        size_t length = strcspn(at, ","), equals = strcspn(at, "=,");
        if (at[equals] != '=' || equals == 0 || equals >= sizeof name || length - equals - 1 >= sizeof value ||
            length == equals + 1)
            refuse("--hints: '%.*s' is no hint; write NAME=VALUE", (int)length, at);
        snprintf(name, sizeof name, "%.*s", (int)equals, at);
        snprintf(value, sizeof value, "%.*s", (int)(length - equals - 1), at + equals + 1);
        MPI_Info_set(info, name, value);
        at += at[length] == ',' ? length + 1 : length;
    }
    return info;
}

void file_own_path(char path[PATH_MAX], int of_rank) { snprintf(path, PATH_MAX, "%s.%05d", settings.path, of_rank); }

static int open_posix(struct file *file, MPI_Comm comm, enum mode mode, int flags) {
    int in_comm, code = 0;
    MPI_Comm_rank(comm, &in_comm);
    int how = (mode == READ ? O_RDONLY : O_RDWR) | flags | O_CLOEXEC;
    if (mode == CREATE && in_comm == 0) {
        file->fd = open(file->path, how | O_CREAT | O_TRUNC, 0666);
        code = file->fd < 0 ? errno : 0;
    }
    /* The others open what the first has made. */
    if (mode == CREATE)
        MPI_Bcast(&code, 1, MPI_INT, 0, comm);
    if (code == 0 && (mode != CREATE || in_comm != 0)) {
        file->fd = open(file->path, how);
        code = file->fd < 0 ? errno : 0;
    }
    return code;
}

static int open_mpi(struct file *file, MPI_Comm comm, enum mode mode) {
    MPI_Info info = file_hints();
    int amode = mode == READ ? MPI_MODE_RDONLY : mode == UPDATE ? MPI_MODE_RDWR : MPI_MODE_RDWR | MPI_MODE_CREATE;
    int code = MPI_File_open(comm, file->path, amode, info, &file->mpi);
    if (code == MPI_SUCCESS && mode == CREATE)
        code = MPI_File_set_size(file->mpi, 0);
    if (info != MPI_INFO_NULL)
        MPI_Info_free(&info);
    return code;
}

void file_open(struct file *file, MPI_Comm comm, const char *path, enum access access, enum mode mode, int flags) {
    snprintf(file->path, sizeof file->path, "%s", path);
    file->access = access;
    file->fd = -1;
    char text[PATH_MAX + MPI_MAX_ERROR_STRING + 200];
    bool failed;
    const char *reason, *remedy = "";
    if (access == POSIX) {
        int code = open_posix(file, comm, mode, flags);
        failed = code != 0;
        reason = strerror(code);
        if (code == ENOENT && strchr(path, ':') != NULL)
            remedy = "; names with a prefix need an --api of MPI-IO: independent or collective";
        else if (code == EINVAL && (flags & O_DIRECT) != 0)
            remedy = "; the file system has no direct I/O: leave out --direct";
    } else {
        int code = open_mpi(file, comm, mode);
        failed = code != MPI_SUCCESS;
        reason = file_error(code);
    }
    if (failed && mode == READ && *remedy == 0)
        remedy = "; a run that only reads needs files that an earlier run left";
    else if (failed && *remedy == 0)
        remedy = "; its directory must exist and be writable on every node";
    snprintf(text, sizeof text, "%s cannot be opened: %s%s", path, reason, remedy);
    agree(failed ? text : NULL);
}

/* The first call on a file that failed on this rank. */
static char failure[PATH_MAX + MPI_MAX_ERROR_STRING + 200];

bool file_failed(void) { return failure[0] != 0; }

__attribute__((format(printf, 2, 3))) static void fails(const struct file *file, const char *format, ...) {
    if (file_failed())
        return;
    va_list words;
    va_start(words, format);
    int length = snprintf(failure, sizeof failure, "rank %d: %s: ", rank, file->path);
    vsnprintf(failure + length, sizeof failure - (size_t)length, format, words);
    va_end(words);
}

static void fails_at(const struct file *file, const char *what, uint64_t offset, uint64_t bytes, const char *why,
                     bool full) {
    fails(file, "%s of %" PRIu64 " bytes at offset %" PRIu64 ": %s%s", what, bytes, offset, why,
          full ? "; make room, or write less" : "");
}

static bool is_full(int code) {
    int class = MPI_SUCCESS;
    MPI_Error_class(code, &class);
    return class == MPI_ERR_NO_SPACE || class == MPI_ERR_QUOTA;
}

static const char file_ends[] = "the file ends before; read it with the options that it was written with";

/* One element of so many bytes: counts of MPI are int. */
static MPI_Datatype bytes_type(uint64_t bytes) {
    enum { BLOCK = 1 << 20 };
    MPI_Datatype block, type, parts[2];
    int blocks = (int)(bytes / BLOCK), lengths[2] = {blocks, (int)(bytes % BLOCK)};
    MPI_Aint places[2] = {0, (MPI_Aint)blocks * BLOCK};
    MPI_Type_contiguous(BLOCK, MPI_BYTE, &block);
    parts[0] = block;
    parts[1] = MPI_BYTE;
    MPI_Type_create_struct(2, lengths, places, parts, &type);
    MPI_Type_commit(&type);
    MPI_Type_free(&block);
    return type;
}

static void move(struct file *file, uint64_t offset, void *data, uint64_t bytes, bool write) {
    const char *what = write ? "write" : "read";
    /* Other ranks may wait for this one in a collective call. */
    if (file_failed())
        bytes = 0;
    if (file_failed() && file->access != COLLECTIVE)
        return;
    if (file->access == POSIX) {
        for (uint64_t done = 0; done < bytes;) {
            char *at = (char *)data + done;
            off_t from = (off_t)(offset + done);
            ssize_t moved = write ? pwrite(file->fd, at, bytes - done, from) : pread(file->fd, at, bytes - done, from);
            if (moved < 0 && errno == EINTR)
                continue;
            if (moved <= 0) {
                fails_at(file, what, offset + done, bytes - done, moved < 0 ? strerror(errno) : file_ends,
                         moved < 0 && (errno == ENOSPC || errno == EDQUOT));
                return;
            }
            done += (uint64_t)moved;
        }
        return;
    }
    bool large = bytes > INT_MAX, all = file->access == COLLECTIVE;
    MPI_Datatype type = large ? bytes_type(bytes) : MPI_BYTE;
    int count = large ? 1 : (int)bytes;
    MPI_Status status;
    MPI_Offset from = (MPI_Offset)offset;
    int code = write ? (all ? MPI_File_write_at_all : MPI_File_write_at)(file->mpi, from, data, count, type, &status)
                     : (all ? MPI_File_read_at_all : MPI_File_read_at)(file->mpi, from, data, count, type, &status);
    MPI_Count moved = 0;
    if (code == MPI_SUCCESS && bytes > 0)
        MPI_Get_elements_x(&status, type, &moved);
    if (code != MPI_SUCCESS)
        fails_at(file, what, offset, bytes, file_error(code), is_full(code));
    else if ((uint64_t)moved != bytes)
        fails_at(file, what, offset, bytes, write ? "fewer bytes were written" : file_ends, false);
    if (large)
        MPI_Type_free(&type);
}

void file_write(struct file *file, uint64_t offset, const void *data, uint64_t bytes) {
    move(file, offset, (void *)data, bytes, true);
}

void file_read(struct file *file, uint64_t offset, void *data, uint64_t bytes) {
    move(file, offset, data, bytes, false);
}

void file_sync(struct file *file) {
    if (file->access == POSIX) {
        if (fsync(file->fd) != 0)
            fails(file, "fsync: %s", strerror(errno));
        return;
    }
    int code = MPI_File_sync(file->mpi);
    if (code != MPI_SUCCESS)
        fails(file, "MPI_File_sync: %s", file_error(code));
}

void file_close(struct file *file) {
    int code = MPI_SUCCESS;
    if (file->access == POSIX && close(file->fd) != 0)
        fails(file, "close: %s", strerror(errno));
    if (file->access != POSIX)
        code = MPI_File_close(&file->mpi);
    if (code != MPI_SUCCESS)
        fails(file, "MPI_File_close: %s", file_error(code));
    agree(file_failed() ? failure : NULL);
}

void file_remove(const char *path, enum access access) {
    if (access == POSIX)
        unlink(path);
    else
        MPI_File_delete(path, MPI_INFO_NULL);
}
