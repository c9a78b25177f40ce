/*
 * PnetCDF's check of a file's format before it opens the file. In `ncmpi_open` rank 0 opens the file by open(2) and
 * reads its first bytes. A descriptor of a file with several backing files needs a copy into one (docs/decisions/0015).
 * So ncmpi_inq_file_format, which does the check, gets a file in memory with the beginning of the file. Only PnetCDF
 * knows the formats. Tests: mpi/tests/pnetcdf.c.
 */
#include "driver.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

/* PnetCDF reads some bytes at 0 and, to find those of HDF5, at 512, 1024, 2048, ... */
enum { LOOK_BYTES = 64 << 10 };

/* Copies the file's beginning to `memory`. Beyond it PnetCDF finds nothing. */
static bool copy_start(forebay_file *data, int memory) {
    static const size_t step = 4096;
    struct rlimit longest;
    /* A file that exceeds the process's limit raises a signal. */
    if (getrlimit(RLIMIT_FSIZE, &longest) != 0 || longest.rlim_cur < LOOK_BYTES + step)
        return false;
    char bytes[step];
    int64_t at = 0, got = 0;
    do {
        struct iovec part = {bytes, step};
        got = forebay.file_preadv(data, &part, 1, at);
        if (got < 0 || (got > 0 && pwrite(memory, bytes, got, at) != got))
            return false;
        at += got;
    } while (got > 0 && at < LOOK_BYTES);
    return true;
}

int pnetcdf_look(const char *path, int *format, int (*native)(const char *, int *)) {
    char room[4096], name[64];
    const char *there;
    enum place place = path != NULL ? place_of(path, room, &there) : OUTSIDE;
    forebay_pool *pool = place != OUTSIDE ? forebay_attached() : NULL;
    forebay_file *data = NULL;
    if (pool == NULL || (place == IN_VOLUME ? forebay.volume_file_open(pool, there, O_RDONLY, &data)
                                            : forebay.file_open(pool, there, O_RDONLY, 0, 0, 0, &data)) != 0)
        return native(path, format);
    /* A file with a descriptor is opened by its name, unless open(2) cannot use that name. */
    bool is_name = there == room;
    int memory = is_name && forebay.file_fd(data) >= 0 ? -1 : memfd_create("forebay", MFD_CLOEXEC);
    bool copied = memory >= 0 && copy_start(data, memory);
    forebay.file_close(data);
    snprintf(name, sizeof name, "/proc/self/fd/%d", memory);
    /* Without /proc there is no name. */
    int answer = native(copied && access(name, R_OK) == 0 ? name : path, format);
    if (memory >= 0)
        close(memory);
    return answer;
}
