/*
 * Calls on open files without a name, made in every way that leaves them without one; and calls with pointers to
 * unmapped memory.
 */
#include "calls.h"
#include <sys/inotify.h>

struct way {
    const char *name;
    int (*open)(void);
};

static int made(const char *name, int flags)
{
    put(name, "12345");
    CHECK(chmod(name, 0640) == 0);
    int fd = open(name, flags);
    CHECK(fd >= 0);
    return fd;
}

static int temporary(void)
{
    int fd = open(".", O_TMPFILE | O_RDWR, 0640);
    CHECK(fd >= 0 && write(fd, "12345", 5) == 5);
    return fd;
}

static int unlinked(void)
{
    int fd = made("n", O_RDWR);
    CHECK(unlink("n") == 0);
    return fd;
}

static int read_only(void)
{
    int fd = made("n", O_RDONLY);
    CHECK(unlink("n") == 0);
    return fd;
}

static int linked_and_unlinked(void)
{
    char path[64];
    int fd = temporary();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    CHECK(linkat(AT_FDCWD, path, AT_FDCWD, "n", AT_SYMLINK_FOLLOW) == 0 && unlink("n") == 0);
    return fd;
}

static int replaced(void)
{
    int fd = made("n", O_RDWR);
    put("over", "other");
    CHECK(rename("over", "n") == 0 && unlink("n") == 0);
    return fd;
}

static int renamed(void)
{
    int fd = made("n", O_RDWR);
    CHECK(rename("n", "m") == 0 && unlink("m") == 0);
    return fd;
}

static int of_two_names(void)
{
    int fd = made("n", O_RDWR);
    CHECK(link("n", "m") == 0 && unlink("n") == 0 && unlink("m") == 0);
    return fd;
}

static int unlinked_by_another(void)
{
    int fd = made("n", O_RDWR);
    pid_t pid = child();
    if (pid == 0)
        _exit(unlink("n") != 0);
    CHECK(exit_status(pid) == 0);
    return fd;
}

static int duplicated(void)
{
    int first = unlinked(), fd = dup(first);
    CHECK(fd >= 0 && close(first) == 0);
    return fd;
}

static int directory(void)
{
    CHECK(mkdir("d", 0750) == 0);
    int fd = open("d", O_RDONLY | O_DIRECTORY);
    CHECK(fd >= 0 && rmdir("d") == 0);
    return fd;
}

static unsigned mode_of(int fd)
{
    struct stat st;
    CHECK(fstat(fd, &st) == 0);
    return st.st_mode & 07777;
}

static void attributes_of(int fd, const char *link)
{
    struct stat st;
    struct statx x;
    int is_root = geteuid() == 0;
    CHECK(fchmod(fd, 0604) == 0 && mode_of(fd) == 0604);
    CHECK(fchown(fd, -1, getegid()) == 0 && fchown(fd, geteuid(), -1) == 0);
    CHECK(fstat(fd, &st) == 0 && st.st_uid == geteuid() && st.st_gid == getegid());
    struct timespec times[2] = {{100, 1000}, {200, 2000}};
    CHECK(futimens(fd, times) == 0);
    if (S_ISDIR(st.st_mode))
        return; /* attributes set on a directory without a name are visible to this process alone */
    CHECK(fstat(fd, &st) == 0 && st.st_mtime == 200 && st.st_atim.tv_nsec == 1000);
    CHECK(chmod(link, 0611) == 0 && mode_of(fd) == 0611);
    pid_t pid = child();
    if (pid == 0)
        _exit(fchmod(fd, 0640) != 0);
    CHECK(exit_status(pid) == 0 && mode_of(fd) == 0640);
    CHECK(fchownat(fd, "", -1, -1, AT_EMPTY_PATH) == 0);
    if (is_root) {
        CHECK(fchown(fd, 12, 34) == 0 && fstat(fd, &st) == 0 && st.st_uid == 12 && st.st_gid == 34);
        CHECK(fchownat(fd, "", 13, -1, AT_EMPTY_PATH) == 0 && fstat(fd, &st) == 0 && st.st_uid == 13);
        CHECK(chown(link, -1, 35) == 0 && fstat(fd, &st) == 0 && st.st_uid == 13 && st.st_gid == 35);
        CHECK(statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &x) == 0 && x.stx_uid == 13 && x.stx_gid == 35);
        CHECK(fchown(fd, 0, 0) == 0);
    }
    times[1].tv_sec = 300;
    CHECK(utimensat(AT_FDCWD, link, times, 0) == 0 && fstat(fd, &st) == 0 && st.st_mtime == 300);
    struct timeval old[2] = {{11, 5}, {12, 6}};
    CHECK(futimes(fd, old) == 0 && fstat(fd, &st) == 0 && st.st_mtime == 12);
    CHECK(futimens(fd, NULL) == 0 && fstat(fd, &st) == 0 && st.st_mtime > 300);
    CHECK(st.st_nlink == 0);
    CHECK(mode_of(fd) == 0640);
}

static void data_of(int fd)
{
    struct stat st;
    char text[8];
    CHECK(fchmod(fd, 06755) == 0 && fchown(fd, -1, getegid()) == 0 && mode_of(fd) == 0755);
    CHECK(fchmod(fd, 0640) == 0);
    CHECK(pread(fd, text, 5, 0) == 5 && memcmp(text, "12345", 5) == 0);
    int writes = (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY;
    if (writes)
        CHECK(ftruncate(fd, 3) == 0 && pwrite(fd, "xy", 2, 3) == 2 && fallocate(fd, 0, 0, 10) == 0);
    CHECK(fstat(fd, &st) == 0 && st.st_size == (writes ? 10 : 5) && st.st_nlink == 0 && S_ISREG(st.st_mode));
}

static void values_of(int fd, const char *link)
{
    char value[8], list[256];
    errno = 0;
    if (fsetxattr(fd, "user.one", "123", 3, 0) != 0 && errno == EOPNOTSUPP)
        return; /* the medium does not support extended attributes */
    CHECK(errno == 0 && fgetxattr(fd, "user.one", value, sizeof value) == 3 && memcmp(value, "123", 3) == 0);
    CHECK(fgetxattr(fd, "user.one", NULL, 0) == 3);
    CHECK(setxattr(link, "user.two", "4", 1, XATTR_CREATE) == 0);
    FAILS(fsetxattr(fd, "user.two", "5", 1, XATTR_CREATE), EEXIST);
    FAILS(fsetxattr(fd, "user.three", "5", 1, XATTR_REPLACE), ENODATA);
    CHECK(getxattr(link, "user.two", value, sizeof value) == 1 && value[0] == '4');
    ssize_t bytes = flistxattr(fd, list, sizeof list);
    CHECK(bytes == 2 * (ssize_t)sizeof "user.one" && flistxattr(fd, NULL, 0) >= bytes);
    CHECK(fremovexattr(fd, "user.one") == 0 && flistxattr(fd, list, sizeof list) == sizeof "user.two");
    FAILS(fgetxattr(fd, "user.one", value, sizeof value), ENODATA);
    FAILS(fremovexattr(fd, "user.one"), ENODATA);
    CHECK(removexattr(link, "user.two") == 0 && flistxattr(fd, list, sizeof list) == 0);
}

void test_nameless(void)
{
    static const struct way ways[] = {
        {"made without a name", temporary},      {"unlinked", unlinked},
        {"unlinked, for reading", read_only},    {"linked and unlinked", linked_and_unlinked},
        {"replaced", replaced},                  {"renamed and unlinked", renamed},
        {"of two names", of_two_names},          {"unlinked by another", unlinked_by_another},
        {"duplicated", duplicated},              {"directory", directory},
    };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        int before = failures, fd = ways[i].open();
        int is_directory = ways[i].open == directory;
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        attributes_of(fd, link);
        if (!is_directory) {
            values_of(fd, link);
            data_of(fd);
        }
        CHECK(close(fd) == 0);
        if (failures != before)
            fprintf(stderr, "of a file that is %s\n", ways[i].name);
    }
}

void test_pointers(void)
{
    static void *volatile wild[] = {
        NULL, (void *)1, (void *)4095,
#ifdef __x86_64__
        (void *)-1, (void *)0xffff800000000000,
#endif
    };
    char value[8];
    struct stat st;
    char *none[] = {NULL};
    put("f", "12345");
    CHECK(symlink("f", "l") == 0);
    int fd = open("f", O_RDWR), dir = open(".", O_RDONLY), watch = inotify_init();
    CHECK(setxattr("f", "user.one", "1", 1, 0) == 0 && fd >= 0 && dir >= 0);
    for (size_t i = 0; i < sizeof wild / sizeof *wild; i++) {
        char *bad = wild[i];
        FAILS(open(bad, O_RDONLY), EFAULT);
        FAILS(openat(dir, bad, O_RDONLY | O_CREAT, 0600), EFAULT);
        FAILS(stat(bad, &st), EFAULT);
        FAILS(lstat(bad, &st), EFAULT);
        FAILS(fstatat(dir, bad, &st, 0), EFAULT);
        FAILS(access(bad, F_OK), EFAULT);
        FAILS(chmod(bad, 0600), EFAULT);
        FAILS(chown(bad, -1, -1), EFAULT);
        FAILS(lchown(bad, -1, -1), EFAULT);
        FAILS(truncate(bad, 0), EFAULT);
        FAILS(mkdir(bad, 0700), EFAULT);
        FAILS(rmdir(bad), EFAULT);
        FAILS(unlink(bad), EFAULT);
        FAILS(mknod(bad, S_IFREG | 0600, 0), EFAULT);
        FAILS(mkfifo(bad, 0600), EFAULT);
        FAILS(symlink(bad, "s"), EFAULT);
        FAILS(symlink("f", bad), EFAULT);
        FAILS(link(bad, "g"), EFAULT);
        FAILS(link("f", bad), EFAULT);
        FAILS(linkat(fd, "", dir, bad, AT_EMPTY_PATH), EFAULT);
        FAILS(rename(bad, "g"), EFAULT);
        FAILS(rename("f", bad), EFAULT);
        FAILS(renameat(dir, "f", dir, bad), EFAULT);
        FAILS(renameat2(AT_FDCWD, "f", AT_FDCWD, bad, RENAME_NOREPLACE), EFAULT);
        FAILS(rename(under("f"), bad), EFAULT);
        FAILS(link(under("f"), bad), EFAULT);
        FAILS(readlink(bad, value, sizeof value), EFAULT);
        FAILS(readlink("l", bad, 8), EFAULT);
        FAILS(chdir(bad), EFAULT);
        FAILS(execve(bad, none, none), EFAULT);
        struct statfs space;
        FAILS(statfs(bad, &space), EFAULT);
        FAILS(statfs("f", (struct statfs *)bad), EFAULT);
        FAILS(stat("f", (struct stat *)bad), EFAULT);
        FAILS(lstat("l", (struct stat *)bad), EFAULT);
        FAILS(fstat(fd, (struct stat *)bad), EFAULT);
        FAILS(statx(AT_FDCWD, "f", 0, STATX_BASIC_STATS, (struct statx *)bad), EFAULT);
        FAILS(stat("missing", (struct stat *)bad), ENOENT);
        FAILS(getxattr(bad, "user.one", value, sizeof value), EFAULT);
        FAILS(getxattr("f", bad, value, sizeof value), EFAULT);
        FAILS(getxattr("f", "user.one", bad, 8), EFAULT);
        FAILS(fgetxattr(fd, bad, value, sizeof value), EFAULT);
        FAILS(fgetxattr(fd, "user.one", bad, 8), EFAULT);
        FAILS(setxattr("f", bad, value, 1, 0), EFAULT);
        FAILS(setxattr("f", "user.two", bad, 1, 0), EFAULT);
        FAILS(fsetxattr(fd, "user.two", bad, 1, 0), EFAULT);
        FAILS(listxattr("f", bad, 64), EFAULT);
        FAILS(flistxattr(fd, bad, 64), EFAULT);
        FAILS(removexattr("f", bad), EFAULT);
        FAILS(fremovexattr(fd, bad), EFAULT);
        FAILS(inotify_add_watch(watch, bad, IN_OPEN), EFAULT);
        if (i > 0) { /* null times mean the present, and the C library refuses a null path */
            FAILS(utimensat(AT_FDCWD, bad, NULL, 0), EFAULT);
            FAILS(utimensat(AT_FDCWD, "f", (struct timespec *)bad, 0), EFAULT);
            FAILS(futimens(fd, (struct timespec *)bad), EFAULT);
        }
    }
    CHECK(stat("f", &st) == 0 && st.st_nlink == 1 && !exists("g") && !exists("s"));
    CHECK(close(fd) == 0 && close(dir) == 0 && close(watch) == 0);
}
