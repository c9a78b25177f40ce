/*
 * Random operations on files, compared with their contents in memory: `exerciser DIRECTORY SEED OPERATIONS [OTHER]`.
 *
 * Each file has two descriptors, of two opens. Every operation goes through either of them, through a mapping, or by
 * name. Every read, of any kind, must return the data written last. Exit status 0 when it always does; otherwise
 * the program prints the seed, the operation, and those before it.
 *
 * OTHER is the same directory through another interface, as an absolute path. Then the second descriptor comes from an
 * open there, and operations by name use either interface.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FILES = 3, LENGTH_MAX = 200000, PIECE_MAX = 40000, LOGGED = 24 };

struct file {
    char name[32];
    unsigned generation;
    int fds[2];
    long length;
    unsigned char *model;
};

static struct file files[FILES];
static const char *other;
static unsigned long seed, state, operation;
static char logged[LOGGED][128];
static unsigned char piece[PIECE_MAX];

static unsigned long dice(unsigned long below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (state >> 8) % below;
}

#define LOG(...) snprintf(logged[operation % LOGGED], sizeof logged[0], __VA_ARGS__)
#define MUST(holds)                                                                                          \
    do {                                                                                                     \
        if (!(holds))                                                                                        \
            failed(__LINE__, #holds);                                                                        \
    } while (0)

static void failed(int line, const char *what)
{
    fprintf(stderr, "exerciser.c:%d: %s (errno: %s)\nseed %lu, operation %lu, after\n", line, what, strerror(errno), seed, operation);
    for (unsigned long i = operation >= LOGGED ? operation - LOGGED + 1 : 0; i <= operation; i++)
        fprintf(stderr, "%8lu %s\n", i, logged[i % LOGGED]);
    exit(1);
}

static void compare(const struct file *file, long at, const unsigned char *found, long length, const char *way)
{
    for (long i = 0; i < length; i++)
        if (found[i] != file->model[at + i]) {
            fprintf(stderr, "%s: byte %ld of %s is %02x and not %02x\n", way, at + i, file->name, found[i], file->model[at + i]);
            failed(__LINE__, way);
        }
}

/* A name through the first or the second interface, valid until the second call after this one. */
static const char *by(int door, const char *name)
{
    static char paths[2][512];
    static int turn;
    if (!door || !other)
        return name;
    turn = !turn;
    snprintf(paths[turn], sizeof paths[0], "%s/%s", other, name);
    return paths[turn];
}

/* A name through either interface. */
static const char *any(const char *name)
{
    return by(dice(2), name);
}

/* All calls that return a file's length agree. */
static void check_length(struct file *file)
{
    struct stat by_name, by_fd;
    int door = dice(2);
    MUST(stat(by(door, file->name), &by_name) == 0 && by_name.st_size == file->length);
    for (int i = 0; i < 2; i++) {
        MUST(fstat(file->fds[i], &by_fd) == 0 && by_fd.st_size == file->length && by_fd.st_ino == by_name.st_ino);
        /* Each interface shows its own device number. */
        MUST((other && i != door) || by_fd.st_dev == by_name.st_dev);
        MUST(by_fd.st_mtim.tv_nsec == by_name.st_mtim.tv_nsec);
    }
    MUST(lseek(file->fds[dice(2)], 0, SEEK_END) == file->length);
}

static void check_all(struct file *file)
{
    static unsigned char whole[LENGTH_MAX + 1];
    int fd = open(any(file->name), O_RDONLY);
    MUST(fd >= 0 && read(fd, whole, sizeof whole) == file->length && close(fd) == 0);
    compare(file, 0, whole, file->length, "read anew");
    check_length(file);
}

static void open_both(struct file *file, int flags)
{
    for (int i = 0; i < 2; i++)
        MUST((file->fds[i] = open(by(i, file->name), O_RDWR | (i ? 0 : flags), 0600)) >= 0);
}

static void close_both(struct file *file)
{
    MUST(close(file->fds[0]) == 0 && close(file->fds[1]) == 0);
}

/* A range within the file. Its length may be 0. */
static long within(const struct file *file, long *length)
{
    long at = dice(file->length + 1), rest = file->length - at, most = rest < PIECE_MAX ? rest : PIECE_MAX;
    *length = dice(most + 1);
    return at;
}

/* A range that may extend beyond the end, or begin there. */
static long anywhere(long *length)
{
    *length = 1 + dice(dice(4) ? 5000 : PIECE_MAX);
    return dice(LENGTH_MAX - *length);
}

static void fill(long length)
{
    unsigned long pattern = dice(1UL << 40);
    for (long i = 0; i < length; i++)
        piece[i] = (pattern >> (i % 5 * 8)) + i;
}

static void grew(struct file *file, long to)
{
    if (to > file->length)
        file->length = to;
}

static void wrote(struct file *file, long at, long length)
{
    memcpy(file->model + at, piece, length);
    grew(file, at + length);
}

static void cut(struct file *file, long to)
{
    if (to < file->length)
        memset(file->model + to, 0, file->length - to);
    file->length = to;
}

static void reads(struct file *file, int fd)
{
    long length, at = within(file, &length);
    LOG("pread of %s at %ld, %ld bytes", file->name, at, length);
    MUST(pread(fd, piece, length, at) == length);
    compare(file, at, piece, length, "pread");
    MUST(pread(fd, piece, 10, file->length) == 0);
}

static void reads_in_parts(struct file *file, int fd)
{
    long length, at = within(file, &length), half = length / 3;
    struct iovec parts[2] = {{piece, half}, {piece + half, length - half}};
    LOG("readv of %s at %ld, %ld bytes", file->name, at, length);
    MUST(lseek(fd, at, SEEK_SET) == at && readv(fd, parts, 2) == length && lseek(fd, 0, SEEK_CUR) == at + length);
    compare(file, at, piece, length, "readv");
}

static void writes(struct file *file, int fd)
{
    long length, at = anywhere(&length);
    LOG("pwrite of %s at %ld, %ld bytes", file->name, at, length);
    fill(length);
    MUST(pwrite(fd, piece, length, at) == length);
    wrote(file, at, length);
}

static void writes_in_parts(struct file *file, int fd)
{
    long length, at = anywhere(&length), half = length / 2;
    struct iovec parts[2] = {{piece, half}, {piece + half, length - half}};
    LOG("writev of %s at %ld, %ld bytes", file->name, at, length);
    fill(length);
    MUST(lseek(fd, at, SEEK_SET) == at && writev(fd, parts, 2) == length);
    wrote(file, at, length);
}

static void appends(struct file *file, int fd)
{
    long length = 1 + dice(3000);
    if (file->length + length > LENGTH_MAX)
        return;
    LOG("append to %s, %ld bytes", file->name, length);
    fill(length);
    int flags = fcntl(fd, F_GETFL);
    MUST(fcntl(fd, F_SETFL, flags | O_APPEND) == 0 && write(fd, piece, length) == length && fcntl(fd, F_SETFL, flags) == 0);
    wrote(file, file->length, length);
}

static void map_reads(struct file *file, int fd)
{
    long length, at = within(file, &length);
    if (length == 0)
        return;
    long from = at & ~4095L, bytes = at + length - from;
    LOG("load from %s at %ld, %ld bytes", file->name, at, length);
    int kind = dice(2) ? MAP_SHARED : MAP_PRIVATE;
    unsigned char *mapped = mmap(NULL, bytes, PROT_READ, kind, fd, from);
    MUST(mapped != MAP_FAILED);
    compare(file, at, mapped + (at - from), length, "load");
    /* Behind the end of the file its last page holds zeros. */
    long end = from + ((bytes + 4095) & ~4095L);
    for (long i = file->length; i < end && at + length == file->length; i++)
        MUST(mapped[i - from] == 0);
    MUST(munmap(mapped, bytes) == 0);
}

static void map_writes(struct file *file, int fd)
{
    long length, at = within(file, &length);
    if (length == 0)
        return;
    long from = at & ~4095L, bytes = at + length - from;
    LOG("store to %s at %ld, %ld bytes", file->name, at, length);
    fill(length);
    unsigned char *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, from);
    MUST(mapped != MAP_FAILED);
    memcpy(mapped + (at - from), piece, length);
    wrote(file, at, length);
    if (dice(2)) {
        MUST(pread(fd, piece, length, at) == length);
        compare(file, at, piece, length, "pread of what was stored");
    }
    if (dice(3) == 0)
        MUST(msync(mapped, bytes, dice(2) ? MS_SYNC : MS_ASYNC) == 0);
    MUST(munmap(mapped, bytes) == 0);
}

static void truncates(struct file *file, int fd)
{
    long to = dice(8) ? dice(LENGTH_MAX) : 0;
    int by_name = dice(2);
    LOG("truncate of %s to %ld by %s", file->name, to, by_name ? "name" : "descriptor");
    MUST((by_name ? truncate(any(file->name), to) : ftruncate(fd, to)) == 0);
    cut(file, to);
}

static void punches(struct file *file, int fd)
{
    long length, at = anywhere(&length);
    LOG("hole in %s at %ld, %ld bytes", file->name, at, length);
    MUST(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, length) == 0);
    if (at < file->length)
        memset(file->model + at, 0, at + length < file->length ? length : file->length - at);
}

static void reserves(struct file *file, int fd)
{
    long length, at = anywhere(&length);
    int keeps = dice(2);
    LOG("room in %s at %ld, %ld bytes%s", file->name, at, length, keeps ? ", keeping its length" : "");
    MUST(fallocate(fd, keeps ? FALLOC_FL_KEEP_SIZE : 0, at, length) == 0);
    if (!keeps)
        grew(file, at + length);
}

static void copies(struct file *file, int fd)
{
    struct file *from = &files[dice(FILES)];
    long length, at = within(from, &length);
    if (from == file || length == 0)
        return;
    loff_t in = at, out = dice(LENGTH_MAX - length);
    LOG("copy from %s at %ld to %s at %ld, %ld bytes", from->name, at, file->name, (long)out, length);
    long to = out, done = 0;
    while (done < length) {
        /* The kernel does not copy between interfaces. */
        ssize_t n = copy_file_range(from->fds[fd == file->fds[1]], &in, fd, &out, length - done, 0);
        MUST(n > 0);
        done += n;
    }
    memcpy(file->model + to, from->model + at, length);
    grew(file, to + length);
}

static void reopens(struct file *file)
{
    static const int kinds[] = {0, O_CREAT, O_TRUNC, O_CREAT | O_TRUNC, O_APPEND, O_SYNC};
    int flags = kinds[dice(sizeof kinds / sizeof *kinds)];
    LOG("open of %s anew, flags %o", file->name, flags);
    close_both(file);
    open_both(file, flags);
    if (flags & O_APPEND) {
        MUST(close(file->fds[0]) == 0 && (file->fds[0] = open(file->name, O_RDWR)) >= 0);
    }
    if (flags & O_TRUNC)
        cut(file, 0);
}

static void renames(struct file *file)
{
    char to[32];
    snprintf(to, sizeof to, "file%d.%u", (int)(file - files), ++file->generation);
    LOG("rename of %s to %s", file->name, to);
    int door = dice(2);
    MUST(rename(by(door, file->name), by(door, to)) == 0 && access(any(file->name), F_OK) == -1 && errno == ENOENT);
    strcpy(file->name, to);
}

/* The name is removed, but open descriptors keep the file. Then a new file gets the name. */
static void replaces(struct file *file)
{
    struct stat st;
    LOG("unlink of %s, and another of its name", file->name);
    MUST(unlink(any(file->name)) == 0);
    for (int i = 0; i < 2; i++)
        MUST(fstat(file->fds[i], &st) == 0 && st.st_nlink == 0 && st.st_size == file->length);
    int fd = open(any(file->name), O_RDWR | O_CREAT | O_EXCL, 0600);
    MUST(fd >= 0);
    reads(file, file->fds[1]);
    close_both(file);
    MUST(close(fd) == 0);
    open_both(file, 0);
    cut(file, 0);
}

static void syncs(int fd)
{
    LOG("sync");
    MUST((dice(2) ? fsync(fd) : fdatasync(fd)) == 0);
}

static void step(void)
{
    struct file *file = &files[dice(FILES)];
    int fd = file->fds[dice(2)];
    LOG("nothing");
    switch (dice(40)) {
    case 0 ... 5: reads(file, fd); break;
    case 6 ... 7: reads_in_parts(file, fd); break;
    case 8 ... 12: writes(file, fd); break;
    case 13 ... 14: writes_in_parts(file, fd); break;
    case 15 ... 16: appends(file, fd); break;
    case 17 ... 20: map_reads(file, fd); break;
    case 21 ... 24: map_writes(file, fd); break;
    case 25 ... 27: truncates(file, fd); break;
    case 28 ... 29: punches(file, fd); break;
    case 30 ... 31: reserves(file, fd); break;
    case 32 ... 33: copies(file, fd); break;
    case 34 ... 35: reopens(file); break;
    case 36: renames(file); break;
    case 37: replaces(file); break;
    case 38: syncs(fd); break;
    default: LOG("check of %s", file->name); check_all(file);
    }
    check_length(file);
}

int main(int argc, char **argv)
{
    if (argc < 4 || argc > 5 || chdir(argv[1]) != 0)
        return 2;
    other = argv[4];
    seed = strtoul(argv[2], NULL, 10);
    state = seed * 2654435761UL | 1;
    unsigned long operations = strtoul(argv[3], NULL, 10);
    for (int i = 0; i < 10; i++)
        dice(1);
    for (int i = 0; i < FILES; i++) {
        snprintf(files[i].name, sizeof files[i].name, "file%d", i);
        MUST((files[i].model = calloc(1, LENGTH_MAX)) != NULL);
        open_both(&files[i], O_CREAT | O_EXCL);
    }
    for (operation = 0; operation < operations; operation++)
        step();
    for (int i = 0; i < FILES; i++) {
        check_all(&files[i]);
        close_both(&files[i]);
        MUST(unlink(any(files[i].name)) == 0);
    }
    return 0;
}
