/*
 * Calls that shells and common programs seldom make, one section each: `calls ROOT SECTION`. ROOT is an empty directory,
 * in the pool or, to prove the test itself, in a plain file system. Exit status 0 when every check holds.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <glob.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

extern char **environ;

static const char *root;
static int failures;

#define CHECK(holds)                                                                        \
    do {                                                                                    \
        errno = 0;                                                                          \
        if (!(holds)) {                                                                     \
            fprintf(stderr, "calls.c:%d: %s (errno: %s)\n", __LINE__, #holds, strerror(errno)); \
            failures++;                                                                     \
        }                                                                                   \
    } while (0)
/* The call fails with this errno. */
#define FAILS(call, why) CHECK((call) == -1 && errno == (why))

static void put(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    CHECK(fd >= 0);
    CHECK(write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    CHECK(close(fd) == 0);
}

static int holds(const char *path, const char *text)
{
    char buffer[4096];
    int fd = open(path, O_RDONLY);
    if (fd < 0)
        return 0;
    ssize_t n = read(fd, buffer, sizeof buffer);
    close(fd);
    return n == (ssize_t)strlen(text) && memcmp(buffer, text, n) == 0;
}

static int exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

static const char *under(const char *name)
{
    static char path[8][PATH_MAX];
    static int next;
    next = (next + 1) % 8;
    snprintf(path[next], PATH_MAX, "%s/%s", root, name);
    return path[next];
}

static int exit_status(pid_t pid)
{
    int status = -1;
    if (pid <= 0 || waitpid(pid, &status, 0) != pid || !WIFEXITED(status))
        return -1;
    return WEXITSTATUS(status);
}

static void test_stdio(void)
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

static int only_x(const struct dirent *e) { return e->d_name[0] == 'x'; }

static void test_directories(void)
{
    char name[32], buffer[65536];
    CHECK(mkdir("d", 0755) == 0);
    for (int i = 0; i < 3000; i++) {
        snprintf(name, sizeof name, "d/%c%d", i % 3 ? 'y' : 'x', i);
        int fd = open(name, O_CREAT | O_EXCL | O_WRONLY, 0600);
        if (fd < 0 || close(fd) != 0) {
            CHECK(!"made");
            break;
        }
    }
    DIR *d = opendir("d");
    CHECK(d != NULL);
    int count = 0, dots = 0;
    struct dirent *e;
    long half = 0;
    char after[256] = "";
    errno = 0;
    while ((e = readdir(d))) {
        if (e->d_name[0] == '.')
            dots++;
        else
            CHECK(e->d_type == DT_REG);
        if (++count == 1500)
            half = telldir(d);
        if (count == 1501)
            strcpy(after, e->d_name);
    }
    CHECK(errno == 0);
    CHECK(count == 3002 && dots == 2);
    seekdir(d, half);
    e = readdir(d);
    CHECK(e && strcmp(e->d_name, after) == 0);
    rewinddir(d);
    struct stat st, st2;
    int own = 0, above = 0;
    for (count = 0; (e = readdir(d)); count++) {
        if (strcmp(e->d_name, ".") == 0)
            own = stat("d", &st) == 0 && st.st_ino == e->d_ino;
        if (strcmp(e->d_name, "..") == 0)
            above = stat(".", &st) == 0 && st.st_ino == e->d_ino;
    }
    CHECK(count == 3002 && own && above);
    int fd = dirfd(d);
    CHECK(fd >= 0 && fstat(fd, &st) == 0 && stat("d", &st2) == 0);
    CHECK(st.st_ino == st2.st_ino && st.st_dev == st2.st_dev && S_ISDIR(st.st_mode) && st.st_nlink == 2);
    CHECK(fstatat(fd, "x0", &st, 0) == 0 && unlinkat(fd, "x0", 0) == 0 && !exists("d/x0"));
    struct dirent entry, *out;
    rewinddir(d);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    for (count = 0; readdir_r(d, &entry, &out) == 0 && out; count++)
        ;
#pragma GCC diagnostic pop
    CHECK(count == 3001);
    CHECK(closedir(d) == 0);
    CHECK(fcntl(fd, F_GETFD) == -1);
    fd = open("d", O_RDONLY | O_DIRECTORY);
    CHECK(fd >= 0);
    d = fdopendir(dup(fd));
    for (count = 0; d && readdir(d); count++)
        ;
    CHECK(count == 3001 && dirfd(d) != fd && closedir(d) == 0);
    CHECK(lseek(fd, 0, SEEK_SET) == 0);
    ssize_t n;
    count = 0;
    while ((n = getdents64(fd, buffer, sizeof buffer)) > 0)
        for (ssize_t at = 0; at < n; count++)
            at += ((struct dirent *)(buffer + at))->d_reclen;
    CHECK(n == 0 && count == 3001);
    struct dirent **list;
    CHECK(scandir("d", &list, only_x, alphasort) == 999);
    CHECK(strcmp(list[0]->d_name, "x1002") == 0 && strcmp(list[998]->d_name, "x999") == 0);
    for (int i = 0; i < 999; i++)
        free(list[i]);
    free(list);
    n = scandirat(fd, ".", &list, NULL, versionsort);
    CHECK(n == 3001);
    for (int i = 0; i < n; i++)
        free(list[i]);
    free(list);
    FAILS(scandir("none", &list, NULL, NULL), ENOENT);
    CHECK(opendir("d/x3") == NULL && errno == ENOTDIR);
    CHECK(opendir("none") == NULL && errno == ENOENT);
    CHECK(opendir("") == NULL && errno == ENOENT);
    CHECK(close(fd) == 0);
}

static char seen[8192];
static int levels;
static int visit(const char *path, const struct stat *st, int kind, struct FTW *f)
{
    size_t at = strlen(seen);
    struct stat now;
    const char *shown = strncmp(path, root, strlen(root)) ? path : path + strlen(root);
    snprintf(seen + at, sizeof seen - at, "%s:%d:%d ", shown, kind, f->level);
    if (kind != FTW_NS && kind != FTW_SLN)
        CHECK(lstat(path, &now) == 0 || levels);
    if (levels) /* FTW_CHDIR: seen from the directory that holds it, or, at its end, from within */
        CHECK(lstat(kind == FTW_DP ? "." : path + f->base, &now) == 0 && now.st_ino == st->st_ino);
    return 0;
}
static int stop_at_b(const char *path, const struct stat *st, int kind, struct FTW *f)
{
    (void)st, (void)kind;
    return strcmp(path + f->base, "b") == 0 ? 77 : 0;
}
static int visit_old(const char *path, const struct stat *st, int kind)
{
    (void)path, (void)st;
    levels += kind == FTW_F;
    return 0;
}

static void test_walks(void)
{
    char here[PATH_MAX], now[PATH_MAX];
    CHECK(mkdir("t", 0755) == 0 && mkdir("t/a", 0755) == 0 && mkdir("t/a/b", 0755) == 0);
    put("t/a/b/f", "f");
    CHECK(symlink("a/b/f", "t/l") == 0 && symlink("nowhere", "t/a/n") == 0);
    CHECK(nftw(under("t"), visit, 8, FTW_PHYS) == 0);
    CHECK(strstr(seen, "/t:1:0 ") && strstr(seen, "/t/a/b/f:0:3 ") && strstr(seen, "/t/l:4:1 "));
    seen[0] = 0;
    CHECK(nftw("t", visit, 8, FTW_DEPTH) == 0);
    CHECK(strstr(seen, "t:5:0 ") && strstr(seen, "t/l:0:1 ") && strstr(seen, "t/a/n:6:2 "));
    CHECK(strstr(seen, "t/a/b/f:0:3 ") < strstr(seen, "t/a/b:5:2 "));
    seen[0] = 0;
    levels = 1;
    CHECK(getcwd(here, sizeof here) != NULL);
    CHECK(nftw(under("t"), visit, 8, FTW_CHDIR | FTW_PHYS | FTW_DEPTH) == 0);
    CHECK(strstr(seen, "/t/a/b/f:0:3 ") != NULL);
    CHECK(getcwd(now, sizeof now) && strcmp(here, now) == 0);
    CHECK(nftw("t", stop_at_b, 8, FTW_PHYS) == 77);
    levels = 0;
    CHECK(ftw("t", visit_old, 8) == 0 && levels == 2);
    FAILS(nftw("none", visit, 8, 0), ENOENT);

    glob_t g;
    CHECK(glob("t/*", 0, NULL, &g) == 0 && g.gl_pathc == 2 && strcmp(g.gl_pathv[0], "t/a") == 0);
    globfree(&g);
    CHECK(glob(under("t/*/*/f"), GLOB_MARK, NULL, &g) == 0 && g.gl_pathc == 1);
    globfree(&g);
    CHECK(glob("t/{a,z}", GLOB_BRACE, NULL, &g) == 0 && g.gl_pathc == 1);
    globfree(&g);
    CHECK(glob("t/q*", 0, NULL, &g) == GLOB_NOMATCH);
}

static void test_paths(void)
{
    char buffer[PATH_MAX], small[4];
    CHECK(mkdir("a", 0755) == 0 && mkdir("a/b", 0755) == 0);
    put("a/b/f", "f");
    CHECK(symlink("b", "a/s") == 0 && symlink(under("a"), "abs") == 0 && symlink("loop", "loop") == 0);
    CHECK(realpath("a/s/../s/./f", buffer) && strcmp(buffer, under("a/b/f")) == 0);
    CHECK(realpath(under("abs/b//f"), buffer) && strcmp(buffer, under("a/b/f")) == 0);
    char *made = realpath(".", NULL);
    CHECK(made && strcmp(made, root) == 0);
    free(made);
    made = canonicalize_file_name("abs/s");
    CHECK(made && strcmp(made, under("a/b")) == 0);
    free(made);
    CHECK(realpath("none", NULL) == NULL && errno == ENOENT);
    CHECK(realpath("a/b/f/x", NULL) == NULL && errno == ENOTDIR);
    CHECK(realpath("a/b/f/", NULL) == NULL && errno == ENOTDIR);
    CHECK(realpath("a/b/f/..", NULL) == NULL && errno == ENOTDIR);
    CHECK(realpath("loop", NULL) == NULL && errno == ELOOP);
    CHECK(realpath("", NULL) == NULL && errno == ENOENT);

    CHECK(getcwd(buffer, sizeof buffer) == buffer && strcmp(buffer, root) == 0);
    CHECK(getcwd(small, sizeof small) == NULL && errno == ERANGE);
    CHECK(getcwd(buffer, 0) == NULL && errno == EINVAL);
    made = getcwd(NULL, 0);
    CHECK(made && strcmp(made, root) == 0);
    free(made);
    made = getcwd(NULL, PATH_MAX);
    CHECK(made && strcmp(made, root) == 0);
    free(made);
    made = get_current_dir_name();
    CHECK(made && strcmp(made, root) == 0);
    free(made);
    CHECK(chdir("abs/s") == 0 && getcwd(buffer, sizeof buffer) && strcmp(buffer, under("a/b")) == 0);
    CHECK(chdir("..") == 0 && getcwd(buffer, sizeof buffer) && strcmp(buffer, under("a")) == 0);
    CHECK(exists("b/f") && exists("./b/f") && exists("../a/b/f") && exists(".././a//s/f"));
    CHECK(rename("b", "moved") == 0 && chdir("moved") == 0 && rename(under("a/moved"), under("top")) == 0);
    CHECK(getcwd(buffer, sizeof buffer) && strcmp(buffer, under("top")) == 0 && exists("f"));
    FAILS(chdir("f"), ENOTDIR);
    FAILS(chdir("none"), ENOENT);
    int fd = open("..", O_RDONLY | O_DIRECTORY);
    CHECK(fd >= 0 && chdir("/") == 0 && getcwd(buffer, sizeof buffer) && strcmp(buffer, "/") == 0);
    CHECK(fchdir(fd) == 0 && getcwd(buffer, sizeof buffer) && strcmp(buffer, root) == 0);
    CHECK(close(fd) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        if (chdir("top") != 0 || !exists("f"))
            _exit(1);
        _exit(0);
    }
    CHECK(exit_status(pid) == 0 && exists("top/f"));
    pid = vfork();
    if (pid == 0)
        _exit(chdir("top") == 0 && exists("f") ? 0 : 1);
    CHECK(exit_status(pid) == 0 && exists("top/f") && !exists("f"));
    CHECK(getcwd(buffer, sizeof buffer) && strcmp(buffer, root) == 0);
    char longest[PATH_MAX + 2];
    memset(longest, 'x', PATH_MAX + 1);
    longest[PATH_MAX + 1] = 0;
    FAILS(open(longest, O_RDONLY), ENAMETOOLONG);
    FAILS(open("", O_RDONLY), ENOENT);
    FAILS(mkdir(".", 0755), EEXIST);
    FAILS(rmdir("."), EINVAL);
    FAILS(unlink("top"), EISDIR);
    FAILS(rmdir("top"), ENOTEMPTY);
    CHECK(remove("top/f") == 0 && remove("top") == 0 && !exists("top"));
}

/* Between the kernel's tree and the root, in both directions. OUTSIDE is a directory of the kernel's. */
static void test_crossings(void)
{
    char outside[] = "/tmp/forebay-calls-XXXXXX", path[PATH_MAX], buffer[PATH_MAX], up[PATH_MAX];
    CHECK(mkdtemp(outside) != NULL);
    put("f", "inside");
    snprintf(path, sizeof path, "%s/link", outside);
    CHECK(symlink(root, path) == 0);
    snprintf(path, sizeof path, "%s/link/f", outside);
    CHECK(holds(path, "inside"));
    struct stat a, b;
    CHECK(stat(path, &a) == 0 && stat("f", &b) == 0 && a.st_ino == b.st_ino && a.st_dev == b.st_dev);
    snprintf(path, sizeof path, "%s/link/new", outside);
    put(path, "new");
    CHECK(holds("new", "new") && access(path, R_OK) == 0);
    CHECK(realpath(path, buffer) && strcmp(buffer, under("new")) == 0);
    snprintf(up, sizeof up, "%s/link/newer", outside);
    CHECK(rename(path, up) == 0 && exists("newer") && link(up, "linked") == 0 && unlink(up) == 0);
    FILE *f = fopen(path, "w");
    CHECK(f && fclose(f) == 0 && exists("new"));
    snprintf(path, sizeof path, "%s/link", outside);
    DIR *d = opendir(path);
    CHECK(d && readdir(d) && closedir(d) == 0);
    CHECK(readlink(path, buffer, sizeof buffer) == (ssize_t)strlen(root));
    CHECK(chdir(path) == 0 && getcwd(buffer, sizeof buffer) && strcmp(buffer, root) == 0 && exists("f"));

    CHECK(symlink(outside, "out") == 0);
    put("out/o", "outside");
    snprintf(path, sizeof path, "%s/o", outside);
    CHECK(holds(path, "outside") && holds("out/o", "outside") && holds("out/link/f", "inside"));
    CHECK(rename("out/o", "out/p") == 0 || errno == EXDEV);
    snprintf(up, sizeof up, "%s/..%s/o", root, outside);
    if (strrchr(root, '/') == root) /* the prefix's parent is / */
        CHECK(exists(up) || exists("out/p"));
    snprintf(up, sizeof up, "/tmp/..%s/f", root);
    CHECK(holds(up, "inside"));
    snprintf(up, sizeof up, "//%s///./f", root);
    CHECK(holds(up, "inside"));
    CHECK(chdir("/") == 0 && holds(root + 1, "") == 0);
    snprintf(up, sizeof up, "%s/f", root + 1);
    CHECK(holds(up, "inside"));
    snprintf(up, sizeof up, "tmp/../%s/f", root + 1);
    CHECK(holds(up, "inside"));
    CHECK(chdir(root) == 0);
    unlink("out/o"), unlink("out/p"), unlink("out/link");
    CHECK(rmdir(outside) == 0);
}

static void test_attributes(void)
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

static void test_xattrs(void)
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

static void test_names(void)
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

/* Started by test_exec: prints its arguments, a variable, and where it works. */
static int report(int argc, char **argv)
{
    char here[PATH_MAX];
    printf("%s", argv[0]);
    for (int i = 2; i < argc; i++)
        printf(" %s", argv[i]);
    printf(" %s %s\n", getenv("MARK") ? getenv("MARK") : "-", getcwd(here, sizeof here) ? here : "?");
    return 0;
}

static char answer[4096];

#define RUN(call)                                           \
    (__extension__({                                        \
        int ends[2];                                        \
        CHECK(pipe(ends) == 0);                             \
        fflush(NULL);                                       \
        pid_t pid_ = fork();                                \
        if (pid_ == 0) {                                    \
            dup2(ends[1], 1);                               \
            call;                                           \
            _exit(errno);                                   \
        }                                                   \
        close(ends[1]);                                     \
        ssize_t n_, at_ = 0;                                \
        while ((n_ = read(ends[0], answer + at_, sizeof answer - 1 - at_)) > 0) \
            at_ += n_;                                      \
        answer[at_] = 0;                                    \
        close(ends[0]);                                     \
        exit_status(pid_);                                  \
    }))

static void said(int line, const char *text)
{
    char wanted[PATH_MAX * 2];
    snprintf(wanted, sizeof wanted, "%s %s\n", text, root);
    if (strcmp(answer, wanted) != 0) {
        fprintf(stderr, "calls.c:%d: said \"%s\", expected \"%s\"\n", line, answer, wanted);
        failures++;
    }
}
#define SAID(text) said(__LINE__, text)

static void copy_self(const char *to)
{
    char buffer[65536];
    int in = open("/proc/self/exe", O_RDONLY), out = open(to, O_WRONLY | O_CREAT, 0755);
    ssize_t n;
    while ((n = read(in, buffer, sizeof buffer)) > 0)
        CHECK(write(out, buffer, n) == n);
    CHECK(n == 0 && close(in) == 0 && close(out) == 0);
}

static void test_exec(void)
{
    char script[PATH_MAX + 64], path[PATH_MAX * 2], expected[PATH_MAX + 64];
    CHECK(mkdir("bin", 0755) == 0);
    copy_self("bin/prog");
    snprintf(script, sizeof script, "#!%s/bin/prog report\n", root);
    put("bin/own", script);
    put("bin/shell", "#! /bin/sh -u \nexec printf '%s %s %s -' \"$0\" \"$1\" \"$#\" && exit 9\n");
    put("bin/plain", "printf 'plain %s -' \"$1\"\n");
    put("bin/none", "#!/none/at/all\n");
    put("bin/text", "text");
    put("bin/turns", "#!bin/turns\n");
    for (const char *const *name = (const char *const[]){"own", "shell", "plain", "none", "turns", NULL}; *name; name++) {
        snprintf(path, sizeof path, "bin/%s", *name);
        CHECK(chmod(path, 0755) == 0);
    }
    char *args[] = {"zero", "report", "one", NULL};
    char *marked[] = {"MARK=m", "LD_PRELOAD", "FOREBAY_POOL", "FOREBAY_PREFIX", NULL};
    for (int i = 1; i < 4; i++) { /* the door, for an environment of one's own */
        const char *value = getenv(marked[i]);
        snprintf(path, sizeof path, "%s=%s", marked[i], value ? value : "");
        marked[i] = value ? strdup(path) : "NONE=";
    }
    unsetenv("MARK");
    CHECK(RUN(execv(under("bin/prog"), args)) == 0);
    SAID("zero one -");
    CHECK(RUN(execve("bin/prog", args, marked)) == 0);
    SAID("zero one m");
    CHECK(RUN(execl("./bin/prog", "z", "report", "1", "2", "3", "4", "5", "6", "7", "8", "9", NULL)) == 0);
    SAID("z 1 2 3 4 5 6 7 8 9 -");
    CHECK(RUN(execl("bin/prog", "z", "report", NULL)) == 0);
    SAID("z -");
    CHECK(RUN(execle("bin/prog", "z", "report", "a", "b", "c", "d", NULL, marked)) == 0);
    SAID("z a b c d m");
    snprintf(path, sizeof path, "/none:%s/bin:/usr/bin:/bin", root);
    setenv("PATH", path, 1);
    CHECK(RUN(execlp("prog", "z", "report", "p", NULL)) == 0);
    SAID("z p -");
    CHECK(RUN(execvp("prog", args)) == 0);
    SAID("zero one -");
    CHECK(RUN(execvpe("prog", args, marked)) == 0);
    SAID("zero one m");
    CHECK(RUN(execlp("true", "true", NULL)) == 0);
    CHECK(RUN(execlp("plain", "x", "arg", NULL)) == 0 && strcmp(answer, "plain arg -") == 0);
    CHECK(RUN(execlp("nothing-of-this-name", "x", NULL)) == ENOENT);
    CHECK(RUN(execlp("text", "x", NULL)) == EACCES);
    int dir = open("bin", O_RDONLY | O_DIRECTORY), prog = open("bin/prog", O_RDONLY | O_CLOEXEC);
    CHECK(RUN(execveat(dir, "prog", args, environ, 0)) == 0);
    SAID("zero one -");
    CHECK(RUN(fexecve(prog, args, environ)) == 0);
    SAID("zero one -");
    CHECK(RUN(execv("bin/shell", args)) == 0 && strcmp(answer, "bin/shell report 2 -") == 0);
    snprintf(expected, sizeof expected, "%s report 2 -", under("bin/shell"));
    CHECK(RUN(execvp("shell", args)) == 0 && strcmp(answer, expected) == 0);
    snprintf(expected, sizeof expected, "%s bin/own report one -", under("bin/prog"));
    CHECK(RUN(execv("bin/own", args)) == 0);
    SAID(expected);
    CHECK(RUN(execv("bin/none", args)) == ENOENT);
    CHECK(RUN(execv("bin/plain", args)) == ENOEXEC);
    CHECK(RUN(execv("bin/text", args)) == EACCES);
    CHECK(RUN(execv("bin/turns", args)) == ELOOP);
    CHECK(RUN(execv("bin", args)) == EACCES);
    CHECK(RUN(execv("bin/prog/x", args)) == ENOTDIR);

    pid_t pid;
    posix_spawn_file_actions_t actions;
    CHECK(posix_spawn_file_actions_init(&actions) == 0);
    CHECK(posix_spawn_file_actions_addclose(&actions, prog) == 0);
    CHECK(posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0) == 0);
    CHECK(posix_spawn(&pid, under("bin/prog"), &actions, NULL, args, environ) == 0 && exit_status(pid) == 0);
    CHECK(posix_spawnp(&pid, "prog", &actions, NULL, args, environ) == 0 && exit_status(pid) == 0);
    CHECK(posix_spawnp(&pid, "own", &actions, NULL, args, environ) == 0 && exit_status(pid) == 0);
    CHECK(posix_spawnp(&pid, "true", &actions, NULL, args, environ) == 0 && exit_status(pid) == 0);
    CHECK(posix_spawn(&pid, under("bin/nothing"), &actions, NULL, args, environ) == ENOENT);
    CHECK(posix_spawn(&pid, under("bin/text"), &actions, NULL, args, environ) == EACCES);
    posix_spawn_file_actions_destroy(&actions);

    /* A script of the kernel's tree whose interpreter is in the root. */
    char outside[] = "/tmp/forebay-calls-XXXXXX";
    int fd = mkstemp(outside);
    CHECK(write(fd, script, strlen(script)) > 0 && fchmod(fd, 0755) == 0 && close(fd) == 0);
    snprintf(expected, sizeof expected, "%s %s report one -", under("bin/prog"), outside);
    CHECK(RUN(execv(outside, args)) == 0);
    SAID(expected);
    CHECK(unlink(outside) == 0);

    CHECK(close(dir) == 0 && close(prog) == 0);
    pid = vfork(); /* all descriptors closed, as programs do that start others */
    if (pid == 0) {
        close_range(3, ~0U, 0);
        execl("bin/shell", "x", "y", NULL);
        _exit(99);
    }
    CHECK(exit_status(pid) == 0 && holds("bin/text", "text"));
}

static void test_fifos(void)
{
    char text[16];
    struct stat st;
    CHECK(mkfifo("p", 0600) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        int fd = open("p", O_WRONLY);
        _exit(fd >= 0 && write(fd, "through", 7) == 7 ? 0 : 1);
    }
    int fd = open("p", O_RDONLY);
    CHECK(fd >= 0 && read(fd, text, sizeof text) == 7 && fstat(fd, &st) == 0 && S_ISFIFO(st.st_mode));
    struct stat by_name;
    CHECK(stat("p", &by_name) == 0 && by_name.st_ino == st.st_ino && close(fd) == 0);
    CHECK(exit_status(pid) == 0 && unlink("p") == 0);
    FAILS(open("p", O_RDONLY), ENOENT);
}

static volatile sig_atomic_t handled;
static void handler(int number)
{
    (void)number;
    int before = errno;
    char name[32] = "sig.", *at = name + 4;
    for (unsigned n = handled; n; n /= 10)
        *at++ = '0' + n % 10;
    struct stat st;
    int fd = open(name, O_CREAT | O_RDWR | O_EXCL, 0600);
    if (fd < 0 || write(fd, "x", 1) != 1 || fstat(fd, &st) != 0 || st.st_size != 1 || close(fd) != 0
        || stat(name, &st) != 0 || mkdir("sigdir", 0700) != 0 || rmdir("sigdir") != 0 || unlink(name) != 0)
        failures++;
    handled++;
    errno = before;
}

static void test_signals(void)
{
    struct sigaction act = {.sa_handler = handler, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGALRM, &act, NULL) == 0);
    put("first", "");
    struct itimerval often = {{0, 1000}, {0, 1000}}, off = {{0, 0}, {0, 0}};
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
    struct stat st;
    char name[32];
    for (int i = 0; i < 200000 && handled < 100; i++) {
        snprintf(name, sizeof name, "n%d", i % 50);
        int fd = open(name, O_CREAT | O_RDWR, 0600);
        if (fd < 0 || fstat(fd, &st) != 0 || close(fd) != 0 || stat(name, &st) != 0 || rename(name, "m") != 0
            || unlink("m") != 0) {
            CHECK(!"worked under signals");
            break;
        }
    }
    CHECK(setitimer(ITIMER_REAL, &off, NULL) == 0);
    CHECK(handled >= 100);
}

static void *waits(void *path)
{
    open(path, O_RDONLY);
    return NULL;
}

static void *works(void *number)
{
    char name[32];
    struct stat st;
    for (int i = 0; i < 300; i++) {
        snprintf(name, sizeof name, "t%ld.%d", (long)number, i);
        int fd = open(name, O_CREAT | O_RDWR | O_EXCL, 0600);
        if (fd < 0 || fstat(fd, &st) != 0 || close(fd) != 0 || unlink(name) != 0)
            return "failed";
    }
    return NULL;
}

static void test_threads(void)
{
    pthread_t threads[8];
    void *said_by_thread;
    for (long i = 0; i < 8; i++)
        CHECK(pthread_create(&threads[i], NULL, works, (void *)i) == 0);
    for (int i = 0; i < 8; i++)
        CHECK(pthread_join(threads[i], &said_by_thread) == 0 && said_by_thread == NULL);
    /* A thread is cancelled at an open that waits, of a FIFO of the kernel's tree. */
    char dir[] = "/tmp/forebay-calls-XXXXXX", fifo[64];
    CHECK(mkdtemp(dir) != NULL);
    snprintf(fifo, sizeof fifo, "%s/fifo", dir);
    CHECK(mkfifo(fifo, 0600) == 0 && pthread_create(&threads[0], NULL, waits, fifo) == 0);
    usleep(50000);
    CHECK(pthread_cancel(threads[0]) == 0 && pthread_join(threads[0], &said_by_thread) == 0);
    CHECK(said_by_thread == PTHREAD_CANCELED);
    CHECK(unlink(fifo) == 0 && rmdir(dir) == 0);
}

static void test_descriptors(void)
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
    /* Closed and opened again under the same number, as something else. */
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

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } sections[] = {
        {"stdio", test_stdio},           {"directories", test_directories}, {"walks", test_walks},
        {"paths", test_paths},           {"crossings", test_crossings},     {"attributes", test_attributes},
        {"xattrs", test_xattrs},         {"names", test_names},             {"exec", test_exec},
        {"signals", test_signals},       {"threads", test_threads},         {"descriptors", test_descriptors},
        {"fifos", test_fifos},
    };
    if (argc >= 2 && strcmp(argv[1], "report") == 0)
        return report(argc, argv);
    if (argc != 3)
        return 2;
    root = argv[1];
    if (chdir(root) != 0) {
        perror(root);
        return 2;
    }
    setenv("PWD", root, 1);
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++) {
        if (strcmp(sections[i].name, argv[2]) == 0) {
            sections[i].run();
            return failures ? 1 : 0;
        }
    }
    return 2;
}
