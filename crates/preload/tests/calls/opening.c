/* Flags of open that are seldom used, descriptors of O_PATH, and paths that end in a slash. */
#include "calls.h"

/* What fails on every descriptor of O_PATH. */
static void refuses_calls_on_it(int fd)
{
    char text[8];
    struct timespec times[2] = {{1, 0}, {2, 0}};
    FAILS(fchmod(fd, 0600), EBADF);
    FAILS(fchown(fd, -1, -1), EBADF);
    FAILS(futimens(fd, times), EBADF);
    FAILS(fsetxattr(fd, "user.a", "1", 1, 0), EBADF);
    FAILS(fgetxattr(fd, "user.a", text, sizeof text), EBADF);
    FAILS(flistxattr(fd, text, sizeof text), EBADF);
    FAILS(fremovexattr(fd, "user.a"), EBADF);
    FAILS(read(fd, text, 1), EBADF);
    FAILS(ftruncate(fd, 0), EBADF);
    FAILS(fsync(fd), EBADF);
}

static int same_inode(int fd, const char *path)
{
    struct stat a, b;
    return fstat(fd, &a) == 0 && lstat(path, &b) == 0 && a.st_ino == b.st_ino && a.st_dev == b.st_dev &&
           a.st_mode == b.st_mode && a.st_nlink == b.st_nlink && a.st_uid == b.st_uid && a.st_size == b.st_size;
}

void test_path_descriptors(void)
{
    char text[PATH_MAX], through[64];
    struct stat st;
    struct statx x;
    /* The first directory of the pool that the process opens, with a number that one of the kernel's had. */
    CHECK(mkdir("first", 0700) == 0);
    int proc = open("/proc", O_RDONLY);
    CHECK(proc >= 0 && faccessat(proc, "self", F_OK, 0) == 0 && close(proc) == 0);
    int first = open("first", O_PATH | O_RDWR);
    CHECK(first == proc && mkdirat(first, "in", 0700) == 0 && exists("first/in") && close(first) == 0);
    put("f", "12345");
    CHECK(chmod("f", 0444) == 0 && mkdir("d", 0700) == 0);
    int fd = open("f", O_PATH), dir = open("d", O_PATH | O_DIRECTORY);
    CHECK(fd >= 0 && dir >= 0 && same_inode(fd, "f") && same_inode(dir, "d"));
    refuses_calls_on_it(fd);
    refuses_calls_on_it(dir);
    CHECK(stat("f", &st) == 0 && (st.st_mode & 07777) == 0444 && holds("f", "12345"));
    /* By its link in /proc, and by an empty path, it can be changed. */
    snprintf(through, sizeof through, "/proc/self/fd/%d", fd);
    CHECK(chmod(through, 0640) == 0 && stat("f", &st) == 0 && (st.st_mode & 07777) == 0640);
    CHECK(fchownat(fd, "", -1, getgid(), AT_EMPTY_PATH) == 0);
    CHECK(faccessat(fd, "", R_OK, AT_EMPTY_PATH) == 0 && faccessat(dir, "", X_OK, AT_EMPTY_PATH) == 0);
    FAILS(faccessat(fd, "", X_OK, AT_EMPTY_PATH), EACCES);
    CHECK(close(fd) == 0 && close(dir) == 0);
    fd = open("/proc/self/status", O_RDONLY);
    CHECK(fd >= 0 && faccessat(fd, "", F_OK, AT_EMPTY_PATH) == 0 && close(fd) == 0);
    FAILS(faccessat(fd, "", F_OK, AT_EMPTY_PATH), EBADF);
    CHECK(faccessat(AT_FDCWD, "", X_OK, AT_EMPTY_PATH) == 0);
    /* Nothing to change: nothing is looked for. */
    struct timespec omit[2] = {{0, UTIME_OMIT}, {0, UTIME_OMIT}};
    CHECK(utimensat(AT_FDCWD, under("none"), omit, 0) == 0);
    FAILS(futimens(AT_FDCWD, omit), EBADF);
    FAILS(mknod(under("none/x"), S_IFDIR | 0700, 0), EPERM);
    FAILS(mknod(under("none/x"), S_IFLNK | 0700, 0), EINVAL);
    FAILS(linkat(-1, "", AT_FDCWD, under("x"), AT_EMPTY_PATH), EBADF);

    /* All other flags are ignored with it. */
    FAILS(open("none", O_PATH | O_CREAT, 0600), ENOENT);
    CHECK(!exists("none"));
    fd = open("f", O_PATH | O_CREAT | O_EXCL | O_TRUNC | O_RDWR, 0600);
    CHECK(fd >= 0 && holds("f", "12345") && (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY && close(fd) == 0);
    dir = open("d", O_PATH | O_TMPFILE | O_RDWR, 0600);
    CHECK(dir >= 0 && same_inode(dir, "d") && mkdirat(dir, "e", 0700) == 0 && exists("d/e") && close(dir) == 0);
    FAILS(open("f", O_PATH | O_DIRECTORY), ENOTDIR);

    /* A symbolic link itself. */
    CHECK(symlink("f", "l") == 0 && symlink("none", "lost") == 0 && symlink("d", "to-d") == 0);
    int link = open("l", O_PATH | O_NOFOLLOW | O_CLOEXEC), lost = open("lost", O_PATH | O_NOFOLLOW);
    CHECK(link >= 0 && lost >= 0 && same_inode(link, "l") && same_inode(lost, "lost"));
    CHECK((fcntl(link, F_GETFD) & FD_CLOEXEC) && !(fcntl(lost, F_GETFD) & FD_CLOEXEC));
    CHECK(fstat(link, &st) == 0 && S_ISLNK(st.st_mode) && st.st_nlink == 1);
    CHECK(fstatat(link, "", &st, AT_EMPTY_PATH) == 0 && S_ISLNK(st.st_mode));
    CHECK(statx(lost, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &x) == 0 && S_ISLNK(x.stx_mode) && x.stx_size == 4);
    CHECK(readlinkat(link, "", text, sizeof text) == 1 && text[0] == 'f');
    CHECK(readlinkat(lost, "", text, sizeof text) == 4 && memcmp(text, "none", 4) == 0);
    refuses_calls_on_it(link);
    FAILS(openat(link, "x", O_RDONLY), ENOTDIR);
    FAILS(fchdir(link), ENOTDIR);
    snprintf(through, sizeof through, "/proc/self/fd/%d", link);
    FAILS(open(through, O_RDONLY), ELOOP);
    CHECK(stat(through, &st) == 0 && S_ISLNK(st.st_mode));
    CHECK(fchownat(link, "", -1, getgid(), AT_EMPTY_PATH) == 0);
    if (geteuid() == 0) {
        CHECK(linkat(link, "", AT_FDCWD, "l2", AT_EMPTY_PATH) == 0 && lstat("l2", &st) == 0);
        CHECK(S_ISLNK(st.st_mode) && st.st_nlink == 2 && same_inode(link, "l2") && unlink("l2") == 0);
    }
    int twin = dup(link);
    CHECK(rename("l", "moved") == 0 && same_inode(twin, "moved"));
    CHECK(unlink("moved") == 0 && fstat(twin, &st) == 0 && S_ISLNK(st.st_mode) && st.st_nlink == 0);
    CHECK(readlinkat(twin, "", text, sizeof text) == 1);
    CHECK(close(link) == 0 && close(lost) == 0 && close(twin) == 0);
    FAILS(open("to-d", O_PATH | O_NOFOLLOW | O_DIRECTORY), ENOTDIR);
    fd = open("to-d/", O_PATH | O_NOFOLLOW);
    CHECK(fd >= 0 && same_inode(fd, "d") && close(fd) == 0);
    fd = open("to-d", O_PATH);
    CHECK(fd >= 0 && same_inode(fd, "d") && close(fd) == 0);
    memset(text, 'x', sizeof text);
    text[900] = 0;
    CHECK(symlink(text, "long") == 0 && (fd = open("long", O_PATH | O_NOFOLLOW)) >= 0);
    char back[PATH_MAX];
    CHECK(readlinkat(fd, "", back, sizeof back) == 900 && memcmp(back, text, 900) == 0 && close(fd) == 0);
}

void test_open_flags(void)
{
    struct stat st;
    put("f", "1");
    CHECK(mkdir("d", 0755) == 0 && symlink("d", "to-d") == 0);
    FAILS(open("d", O_TMPFILE | O_RDONLY, 0600), EINVAL);
    FAILS(open("d", O_TMPFILE | O_RDWR | O_CREAT, 0600), EINVAL);
    FAILS(open("f", O_TMPFILE | O_RDWR, 0600), ENOTDIR);
    FAILS(open("none", O_TMPFILE | O_RDWR, 0600), ENOENT);
    FAILS(open("to-d", O_TMPFILE | O_RDWR | O_NOFOLLOW, 0600), ENOTDIR);
    int fd = open("to-d", O_TMPFILE | O_RDWR, 0600);
    CHECK(fd >= 0 && close(fd) == 0);
    if (geteuid() == 0) {
        CHECK(chown("d", -1, 4321) == 0 && chmod("d", 02770) == 0);
        fd = open("d", O_TMPFILE | O_RDWR, 0640);
        CHECK(fd >= 0 && fstat(fd, &st) == 0 && st.st_gid == 4321 && (st.st_mode & 07777) == 0640);
        CHECK(linkat(fd, "", AT_FDCWD, "d/named", AT_EMPTY_PATH) == 0);
        CHECK(stat("d/named", &st) == 0 && st.st_gid == 4321 && (st.st_mode & 07777) == 0640 && close(fd) == 0);
    }
}

void test_slashes(void)
{
    const int flags = O_RDWR | O_CREAT;
    put("f", "f");
    put("g", "g");
    CHECK(mkdir("d", 0755) == 0 && mkdir("e", 0755) == 0 && mkdir("d/sub", 0755) == 0);
    CHECK(symlink("d", "to-d") == 0 && symlink("new/", "to-new") == 0 && symlink("f/", "to-f") == 0);

    /* What is wrong on the way to the last name comes first, then a slash behind it. */
    FAILS(open("new/", flags, 0600), EISDIR);
    FAILS(open("f/", flags, 0600), EISDIR);
    FAILS(open("d/", flags, 0600), EISDIR);
    FAILS(open("d/", flags | O_EXCL, 0600), EISDIR);
    FAILS(open("none/new/", flags, 0600), ENOENT);
    FAILS(open("f/new/", flags, 0600), ENOTDIR);
    FAILS(open("to-new", flags, 0600), EISDIR);
    FAILS(open("to-f", flags, 0600), EISDIR);
    FAILS(open("d/.", flags, 0600), EISDIR);
    FAILS(open("d/./", flags | O_EXCL, 0600), EEXIST);
    FAILS(open("d/sub/../", flags, 0600), EISDIR);
    FAILS(open("to-f", O_RDONLY), ENOTDIR);

    FAILS(mknod("new/", S_IFREG | 0600, 0), ENOENT);
    FAILS(mknod("f/", S_IFREG | 0600, 0), EEXIST);
    FAILS(mkfifo("d/", 0600), EEXIST);
    FAILS(mkfifo("new/", 0600), ENOENT);
    FAILS(symlink("x", "f/"), EEXIST);
    FAILS(symlink("x", "new/"), ENOENT);
    FAILS(link("f", "g/"), EEXIST);
    FAILS(link("f", "new/"), ENOENT);
    FAILS(link("f/", "new"), ENOTDIR);

    /* What is wrong with the new name comes before that the old one is a directory. */
    FAILS(link("d", "f"), EEXIST);
    FAILS(link("d", "d"), EEXIST);
    FAILS(link("d", "e/"), EEXIST);
    FAILS(link("d", "."), EEXIST);
    FAILS(link("d", "none/x"), ENOENT);
    FAILS(link("d", "f/x"), ENOTDIR);
    FAILS(link("d", "new/"), ENOENT);
    FAILS(link("d", "new"), EPERM);
    FAILS(link("none", "f"), ENOENT);

    FAILS(rename("f", "new/"), ENOTDIR);
    FAILS(rename("f/", "new"), ENOTDIR);
    FAILS(rename("f", "g/"), ENOTDIR);
    FAILS(rename("f", "d/"), ENOTDIR);
    FAILS(rename("to-d/", "new"), ENOTDIR);
    FAILS(rename("none", "new/"), ENOENT);
    FAILS(rename("none/", "new"), ENOENT);
    FAILS(renameat2(AT_FDCWD, "f", AT_FDCWD, "g/", RENAME_NOREPLACE), EEXIST);
    FAILS(renameat2(AT_FDCWD, "f", AT_FDCWD, "new/", RENAME_NOREPLACE), ENOTDIR);
    FAILS(renameat2(AT_FDCWD, "f", AT_FDCWD, "g/", RENAME_EXCHANGE), ENOTDIR);
    FAILS(renameat2(AT_FDCWD, "f/", AT_FDCWD, "g", RENAME_EXCHANGE), ENOTDIR);
    FAILS(renameat2(AT_FDCWD, "d", AT_FDCWD, "f/", RENAME_EXCHANGE), ENOTDIR);
    FAILS(renameat2(AT_FDCWD, "f/", AT_FDCWD, "d", RENAME_EXCHANGE), ENOTDIR);
    FAILS(renameat2(AT_FDCWD, "f", AT_FDCWD, "new/", RENAME_EXCHANGE), ENOENT);
    FAILS(renameat2(AT_FDCWD, "none", AT_FDCWD, "new/", 8), EINVAL);
    FAILS(renameat2(AT_FDCWD, "none", AT_FDCWD, "new", RENAME_EXCHANGE | RENAME_NOREPLACE), EINVAL);
    CHECK(holds("f", "f") && holds("g", "g") && exists("d/sub"));
    /* A file takes the place of a directory whose name has a slash. */
    CHECK(renameat2(AT_FDCWD, "f", AT_FDCWD, "e/", RENAME_EXCHANGE) == 0 && holds("e", "f"));
    CHECK(renameat2(AT_FDCWD, "f/", AT_FDCWD, "e", RENAME_EXCHANGE) == 0 && holds("f", "f"));
    CHECK(rename("e/", "h/") == 0 && !exists("e") && exists("h") && mkdir("made/", 0700) == 0 && rmdir("made/") == 0);
    CHECK(rename("h", "d/sub/") == 0 && !exists("h"));

    /* Two file systems: what is wrong with a path comes first, and rename does not look for its source. */
    FAILS(rename("none", "/proc/none"), EXDEV);
    FAILS(rename("f/x", "/proc/none"), ENOTDIR);
    FAILS(rename("/proc/none", "x"), EXDEV);
    FAILS(rename("/proc/version/x", "x"), ENOTDIR);
    FAILS(renameat(-1, "x", AT_FDCWD, under("y")), EBADF);
    FAILS(renameat(AT_FDCWD, under("f"), -1, "x"), EBADF);
    FAILS(link("none", "/proc/none"), ENOENT);
    FAILS(link("/proc/none", "x"), ENOENT);
    FAILS(linkat(AT_FDCWD, under("none"), AT_FDCWD, "x", 0x8000), EINVAL);
    FAILS(renameat2(AT_FDCWD, "none", AT_FDCWD, "/proc/none", 8), EINVAL);
}
