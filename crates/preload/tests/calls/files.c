/* Files: streams, attributes, names, descriptors. */
#include "calls.h"

void test_stdio(void)
{
    char line[64];
    FILE *f = fopen("s", "w");
    CHECK(f && fputs("one\n", f) >= 0 && fclose(f) == 0);
    f = fopen(under("s"), "a+");
    CHECK(f && fputs("two\n", f) >= 0);
    rewind(f);
    CHECK(fgets(line, sizeof line, f) && strcmp(line, "one\n") == 0 && fclose(f) == 0);
    CHECK(holds("s", "one\ntwo\n"));
    f = fopen("s", "r+e");
    CHECK(f && (fcntl(fileno(f), F_GETFD) & FD_CLOEXEC));
    CHECK(fputs("ONE", f) >= 0 && fclose(f) == 0 && holds("s", "ONE\ntwo\n"));
    CHECK(fopen("s", "wx") == NULL && errno == EEXIST);
    CHECK(fopen("s", "q") == NULL && errno == EINVAL);
    CHECK(fopen("none", "r") == NULL && errno == ENOENT);
    CHECK(fopen("none/x", "w") == NULL && errno == ENOENT);
    f = fopen("s", "r");
    CHECK(f && fgets(line, sizeof line, f));
    f = freopen("t", "w", f);
    CHECK(f && fputs("again", f) >= 0);
    f = freopen(under("s"), "r", f);
    CHECK(f && fgets(line, sizeof line, f) && strcmp(line, "ONE\n") == 0 && holds("t", "again"));
    CHECK(fclose(f) == 0);
    f = fopen("c", "w,ccs=UTF-8");
    CHECK(f && fclose(f) == 0 && exists("c"));
}

void test_attributes(void)
{
    struct stat st;
    struct statx x;
    put("f", "12345");
    CHECK(symlink("f", "l") == 0 && mkdir("d", 0755) == 0);
    int fd = open("f", O_RDWR), dir = open(".", O_RDONLY);
    CHECK(fchmod(fd, 0604) == 0 && stat("f", &st) == 0 && (st.st_mode & 07777) == 0604);
    CHECK(fstat(fd, &st) == 0 && (st.st_mode & 07777) == 0604 && st.st_size == 5);
    CHECK(chmod("l", 0640) == 0 && fchmodat(dir, "f", 0600, 0) == 0 && lstat("f", &st) == 0);
    CHECK((st.st_mode & 07777) == 0600);
    FAILS(fchmodat(dir, "l", 0600, AT_SYMLINK_NOFOLLOW), EOPNOTSUPP);
    CHECK(fchown(fd, -1, getgid()) == 0 && chown("f", getuid(), -1) == 0 && lchown("l", -1, -1) == 0);
    CHECK(fchownat(fd, "", -1, -1, AT_EMPTY_PATH) == 0 && fchownat(dir, "l", -1, -1, AT_SYMLINK_NOFOLLOW) == 0);
    struct timespec times[2] = {{100, 1000}, {200, 2000}};
    CHECK(utimensat(dir, "f", times, 0) == 0 && stat("f", &st) == 0);
    CHECK(st.st_atim.tv_sec == 100 && st.st_mtim.tv_sec == 200 && st.st_mtim.tv_nsec == 2000);
    times[0].tv_nsec = UTIME_OMIT, times[1].tv_sec = 300;
    CHECK(futimens(fd, times) == 0 && fstat(fd, &st) == 0 && st.st_mtime == 300 && st.st_atime == 100);
    CHECK(utimensat(AT_FDCWD, "l", times, AT_SYMLINK_NOFOLLOW) == 0 && lstat("l", &st) == 0 && st.st_mtime == 300);
    struct timeval old[2] = {{11, 5}, {12, 6}}, bad[2] = {{1, 1000000}, {1, 0}};
    CHECK(utimes("f", old) == 0 && stat("f", &st) == 0 && st.st_atime == 11 && st.st_mtim.tv_nsec == 6000);
    FAILS(utimes("f", bad), EINVAL);
    CHECK(lutimes("l", old) == 0 && futimes(fd, old) == 0 && futimesat(dir, "d", old) == 0);
    CHECK(stat("d", &st) == 0 && st.st_mtime == 12);
    struct utimbuf oldest = {21, 22};
    CHECK(utime("f", &oldest) == 0 && stat("f", &st) == 0 && st.st_mtime == 22 && utime("f", NULL) == 0);
    const char *volatile none = NULL;
    FAILS(utimensat(dir, none, times, 0), EINVAL);
    CHECK(statx(dir, "f", 0, STATX_BASIC_STATS, &x) == 0 && x.stx_size == 5 && stat("f", &st) == 0);
    CHECK(x.stx_ino == st.st_ino && x.stx_mode == st.st_mode);
    struct statx y;
    CHECK(statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &y) == 0 && y.stx_ino == x.stx_ino);
    CHECK(y.stx_dev_minor == x.stx_dev_minor && y.stx_mode == x.stx_mode && y.stx_nlink == 1);
    CHECK(fstatat(fd, "", &st, AT_EMPTY_PATH) == 0 && st.st_ino == x.stx_ino);
    CHECK(fstatat(AT_FDCWD, "", &st, AT_EMPTY_PATH) == 0 && S_ISDIR(st.st_mode));
    FAILS(fstatat(dir, "f", &st, 0x40000000), EINVAL);
    CHECK(truncate("f", 3) == 0 && holds("f", "123") && ftruncate(fd, 1) == 0 && holds("f", "1"));
    FAILS(truncate("d", 0), EISDIR);
    FAILS(truncate("f", -1), EINVAL);
    CHECK(access("f", R_OK | W_OK) == 0 && euidaccess("f", R_OK) == 0 && eaccess("d", X_OK) == 0);
    FAILS(access("f", X_OK), EACCES);
    CHECK(faccessat(dir, "l", F_OK, AT_SYMLINK_NOFOLLOW) == 0 && faccessat(dir, "f", R_OK, AT_EACCESS) == 0);
    struct statvfs v, fv;
    struct statfs s, fs;
    CHECK(statvfs(".", &v) == 0 && fstatvfs(fd, &fv) == 0 && v.f_blocks == fv.f_blocks && v.f_namemax == 255);
    CHECK(statfs("f", &s) == 0 && fstatfs(dir, &fs) == 0 && s.f_blocks == fs.f_blocks && s.f_blocks > 0);
    FAILS(statfs("none", &s), ENOENT);
    mode_t before = umask(0);
    CHECK(mkdir("open", 0777) == 0 && stat("open", &st) == 0 && (st.st_mode & 0777) == 0777);
    umask(077);
    CHECK(mknod("node", S_IFREG | 0666, 0) == 0 && stat("node", &st) == 0 && (st.st_mode & 0777) == 0600);
    CHECK(umask(before) == 077);
    CHECK(close(fd) == 0 && close(dir) == 0);
}

void test_xattrs(void)
{
    char value[64], names[256];
    put("f", "");
    CHECK(symlink("f", "l") == 0);
    int fd = open("f", O_RDWR);
    if (setxattr("f", "user.a", "1", 1, 0) != 0 && errno == EOPNOTSUPP) {
        fprintf(stderr, "no extended attributes here\n");
        return;
    }
    CHECK(setxattr("l", "user.b", "22", 2, XATTR_CREATE) == 0 && fsetxattr(fd, "user.c", "333", 3, 0) == 0);
    FAILS(setxattr("f", "user.a", "1", 1, XATTR_CREATE), EEXIST);
    FAILS(fsetxattr(fd, "user.z", "1", 1, XATTR_REPLACE), ENODATA);
    CHECK(getxattr("f", "user.b", value, sizeof value) == 2 && memcmp(value, "22", 2) == 0);
    CHECK(fgetxattr(fd, "user.b", NULL, 0) == 2 && lgetxattr("f", "user.c", value, 64) == 3);
    FAILS(getxattr("f", "user.c", value, 1), ERANGE);
    FAILS(getxattr("f", "user.none", value, 64), ENODATA);
    ssize_t n = listxattr("f", names, sizeof names);
    CHECK(n == 21 && flistxattr(fd, NULL, 0) == 21 && llistxattr("l", names, sizeof names) >= 0);
    CHECK(removexattr("f", "user.a") == 0 && fremovexattr(fd, "user.b") == 0 && lremovexattr("f", "user.c") == 0);
    CHECK(listxattr("f", names, sizeof names) == 0);
    CHECK(close(fd) == 0);
}

void test_names(void)
{
    char template[] = "tmp.XXXXXX", suffixed[] = "tmp.XXXXXX.c", dir[] = "dir.XXXXXX", bad[] = "tmp.XXXXX";
    put("a", "a");
    put("b", "b");
    CHECK(renameat2(AT_FDCWD, "a", AT_FDCWD, "b", RENAME_EXCHANGE) == 0 && holds("a", "b") && holds("b", "a"));
    FAILS(renameat2(AT_FDCWD, "a", AT_FDCWD, "b", RENAME_NOREPLACE), EEXIST);
    int here = open(".", O_RDONLY | O_DIRECTORY);
    CHECK(renameat(here, "a", here, "c") == 0 && !exists("a") && holds("c", "b"));
    CHECK(link("c", "h") == 0 && linkat(here, "c", here, "h2", 0) == 0);
    struct stat st;
    CHECK(stat("h2", &st) == 0 && st.st_nlink == 3);
    CHECK(symlink("c", "s") == 0 && linkat(here, "s", here, "sl", 0) == 0 && lstat("sl", &st) == 0);
    CHECK(S_ISLNK(st.st_mode) && linkat(here, "s", here, "sf", AT_SYMLINK_FOLLOW) == 0);
    CHECK(lstat("sf", &st) == 0 && S_ISREG(st.st_mode));
    char text[16];
    CHECK(readlink("s", text, 1) == 1 && readlinkat(here, "s", text, sizeof text) == 1);
    FAILS(readlink("c", text, sizeof text), EINVAL);
    FAILS(readlink("s", text, 0), EINVAL);
    CHECK(symlinkat("x", here, "sx") == 0 && mkdirat(here, "m", 0700) == 0);
    CHECK(unlinkat(here, "sx", 0) == 0 && unlinkat(here, "m", AT_REMOVEDIR) == 0);
    FAILS(rename("c", "/proc/forebay-calls-never"), EXDEV);
    FAILS(link("/proc/self/status", "c2"), EXDEV);
    /* What is wrong with either name is found before the two file systems are compared. */
    FAILS(rename("c", "/proc/forebay-calls-never/x"), ENOENT);
    FAILS(rename("never/c", "/proc/forebay-calls-never"), ENOENT);
    FAILS(rename("/proc/self/status", "never/c"), ENOENT);
    FAILS(rename("/proc/forebay-calls-never/x", "c2"), ENOENT);
    FAILS(link("c", "/proc/forebay-calls-never/x"), ENOENT);
    FAILS(link("c", "/proc/version"), EEXIST);
    FAILS(link("/proc/version", "c"), EEXIST);
    FAILS(link("/proc/version", "never/c"), ENOENT);
    FAILS(link("/proc/forebay-calls-never", "never/c"), ENOENT);
    FAILS(rename("none", "x"), ENOENT);
    int fd = mkstemp(template);
    CHECK(fd >= 0 && fstat(fd, &st) == 0 && (st.st_mode & 07777) == 0600 && exists(template) && close(fd) == 0);
    fd = mkostemps(suffixed, 2, O_CLOEXEC | O_APPEND);
    CHECK(fd >= 0 && (fcntl(fd, F_GETFL) & O_APPEND) && strcmp(suffixed + 10, ".c") == 0 && close(fd) == 0);
    CHECK(mkdtemp(dir) == dir && stat(dir, &st) == 0 && (st.st_mode & 07777) == 0700);
    FAILS(mkstemp(bad), EINVAL);
    CHECK(creat("cr", 0640) >= 0 && stat("cr", &st) == 0 && st.st_size == 0);
    fd = open(".", O_TMPFILE | O_RDWR, 0600);
    CHECK(fd >= 0 && write(fd, "x", 1) == 1 && close(fd) == 0);
    fd = open("c", O_PATH);
    CHECK(fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && close(fd) == 0);
    FAILS(open("s", O_RDONLY | O_NOFOLLOW), ELOOP);
    FAILS(open("c", O_RDONLY | O_DIRECTORY), ENOTDIR);
    FAILS(open("c/", O_RDONLY), ENOTDIR);
    FAILS(openat(fd = open("c", O_RDONLY), "x", O_RDONLY), ENOTDIR);
    FAILS(openat(-5, "x", O_RDONLY), EBADF);
    CHECK(mkfifo("p", 0600) == 0 && mkfifoat(here, "p2", 0600) == 0 && stat("p", &st) == 0 && S_ISFIFO(st.st_mode));
    CHECK(close(here) == 0);
    FAILS(openat(here, "c", O_RDONLY), EBADF);
}

void test_descriptors(void)
{
    struct stat a, b;
    put("f", "abc");
    CHECK(mkdir("d", 0755) == 0);
    int fd = open("f", O_RDWR), dir = open("d", O_RDONLY);
    CHECK(dup2(dir, 90) == 90 && close(dir) == 0 && mkdirat(90, "e", 0755) == 0 && exists("d/e"));
    CHECK(fstat(90, &a) == 0 && stat("d", &b) == 0 && a.st_ino == b.st_ino && a.st_nlink == 3);
    int again = fcntl(fd, F_DUPFD, 95);
    CHECK(again >= 95 && fstat(again, &a) == 0 && stat("f", &b) == 0 && a.st_ino == b.st_ino);
    char *map = mmap(NULL, 3, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(map != MAP_FAILED && map[1] == 'b');
    map[1] = 'X';
    CHECK(holds("f", "aXc") && munmap(map, 3) == 0);
    CHECK(unlink("f") == 0 && fstat(fd, &a) == 0 && a.st_nlink == 0 && pwrite(fd, "Y", 1, 0) == 1);
    pid_t pid = fork();
    if (pid == 0)
        _exit(openat(90, "e", O_RDONLY) >= 0 && fchdir(90) == 0 && exists("e") ? 0 : 1);
    CHECK(exit_status(pid) == 0);
    /* Closed, and opened again as another file under the same number. */
    CHECK(close(90) == 0 && open("/", O_RDONLY) >= 0);
    dir = open("/", O_RDONLY | O_DIRECTORY);
    CHECK(dup2(dir, 90) == 90 && fstatat(90, "tmp", &a, 0) == 0);
    FAILS(fstatat(90, "e", &a, 0), ENOENT);
    put("src", "0123456789");
    int in = open("src", O_RDONLY), out = open("dst", O_CREAT | O_WRONLY, 0600);
    CHECK(copy_file_range(in, NULL, out, NULL, 10, 0) == 10 && holds("dst", "0123456789"));
    CHECK(close_range(3, ~0U, 0) == 0);
    put("after", "closed"); /* the library's own descriptors were closed too */
    CHECK(holds("after", "closed") && mkdir("after-dir", 0755) == 0 && open("after-dir", O_RDONLY) >= 0);
}
