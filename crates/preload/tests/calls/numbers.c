/* Calls by number, shared objects, lists of file actions, and small questions about a path. */
#include "calls.h"
#include <dlfcn.h>
#include <fts.h>
#include <sys/ipc.h>
#include <sys/syscall.h>

struct entry {
    unsigned long long d_ino;
    long long d_off;
    unsigned short d_reclen;
    unsigned char d_type;
    char d_name[];
};

void test_numbers(void)
{
    struct stat by_name, st;
    struct statx stx;
    char text[PATH_MAX], entries[4096];
    int fd = syscall(SYS_openat, AT_FDCWD, "made", O_CREAT | O_EXCL | O_WRONLY, 0640);
    CHECK(fd >= 0);
    CHECK(syscall(SYS_write, fd, "text", 4L) == 4);
    CHECK(syscall(SYS_fchmod, fd, 0600) == 0);
    CHECK(syscall(SYS_close, fd) == 0);
    CHECK(holds(under("made"), "text"));
    FAILS(syscall(SYS_openat, AT_FDCWD, under("made"), O_CREAT | O_EXCL | O_WRONLY, 0600), EEXIST);
    CHECK(stat("made", &by_name) == 0 && (by_name.st_mode & 07777) == 0600);
    CHECK(syscall(SYS_newfstatat, AT_FDCWD, under("made"), &st, 0) == 0);
    CHECK(st.st_ino == by_name.st_ino && st.st_dev == by_name.st_dev && st.st_size == 4);
    CHECK(syscall(SYS_statx, AT_FDCWD, "made", 0, STATX_BASIC_STATS, &stx) == 0 && stx.stx_ino == st.st_ino);
    CHECK(syscall(SYS_mkdirat, AT_FDCWD, under("dir"), 0755) == 0);
    CHECK(syscall(SYS_symlinkat, "made", AT_FDCWD, "dir/link") == 0);
    memset(text, 0, sizeof text);
    CHECK(syscall(SYS_readlinkat, AT_FDCWD, "dir/link", text, sizeof text) == 4 && strcmp(text, "made") == 0);
    CHECK(syscall(SYS_linkat, AT_FDCWD, "made", AT_FDCWD, "dir/other", 0) == 0);
    CHECK(syscall(SYS_renameat2, AT_FDCWD, "dir/other", AT_FDCWD, "other", 0) == 0 && exists("other"));
    CHECK(syscall(SYS_truncate, "other", 2L) == 0 && holds("made", "te"));
    CHECK(syscall(SYS_fchmodat, AT_FDCWD, "made", 0644) == 0);
    CHECK(syscall(SYS_faccessat, AT_FDCWD, "made", R_OK) == 0);
    FAILS(syscall(SYS_faccessat, AT_FDCWD, "nothing", F_OK), ENOENT);
    int dir = syscall(SYS_openat, AT_FDCWD, ".", O_RDONLY | O_DIRECTORY);
    CHECK(dir >= 0);
    int seen = 0;
    for (long n; (n = syscall(SYS_getdents64, dir, entries, sizeof entries)) > 0;)
        for (long at = 0; at < n;) {
            struct entry *e = (struct entry *)(entries + at);
            seen += strcmp(e->d_name, "made") == 0 || strcmp(e->d_name, "dir") == 0 || strcmp(e->d_name, "other") == 0;
            at += e->d_reclen;
        }
    CHECK(seen == 3);
    CHECK(syscall(SYS_unlinkat, dir, "other", 0) == 0 && !exists("other"));
    CHECK(syscall(SYS_chdir, under("dir")) == 0);
    CHECK(syscall(SYS_getcwd, text, sizeof text) == (long)strlen(under("dir")) + 1);
    CHECK(strcmp(text, under("dir")) == 0);
    CHECK(syscall(SYS_fchdir, dir) == 0 && exists("made"));
    CHECK(syscall(SYS_close, dir) == 0);
    /* Others, with all their arguments. */
    CHECK(syscall(SYS_getpid) == getpid());
    char *memory = (char *)syscall(SYS_mmap, NULL, 8192L, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0L);
    CHECK(memory != MAP_FAILED && (memory[8191] = 1) == 1);
    CHECK(syscall(SYS_munmap, memory, 8192L) == 0);
    FAILS(syscall(SYS_close, -1), EBADF);
    pid_t pid = fork();
    if (pid == 0) {
        put("script", "#!/bin/sh\nexit 7\n");
        chmod("script", 0755);
        char *argv[] = {"script", NULL};
        syscall(SYS_execve, under("script"), argv, environ);
        _exit(1);
    }
    CHECK(exit_status(pid) == 7);
}

static int called(const char *path)
{
    void *object = dlopen(path, RTLD_NOW);
    if (!object)
        return -1;
    int (*answer)(void) = (int (*)(void))dlsym(object, "answer");
    return answer ? answer() : -2;
}

void test_objects(void)
{
    put("one.c", "int base(void); int answer(void) { return base() + 1; }\n");
    put("two.c", "int answer(void) { return 2; }\n");
    put("base.c", "int base(void) { return 40; }\n");
    CHECK(mkdir("lib", 0755) == 0 && mkdir("lib/deps", 0755) == 0);
    CHECK(system("cc -shared -fPIC -o lib/deps/libbase.so -Wl,-soname,libbase.so base.c") == 0);
    CHECK(system("cc -shared -fPIC -o lib/one.so one.c -Llib/deps -lbase -Wl,-rpath,'$ORIGIN/deps'") == 0);
    CHECK(system("cc -shared -fPIC -o lib/two.so two.c") == 0);
    CHECK(called(under("lib/one.so")) == 41);
    CHECK(called("lib/two.so") == 2);
    CHECK(dlopen("lib/two.so", RTLD_NOW) == dlopen(under("lib/two.so"), RTLD_NOW));
    CHECK(dlopen("lib/two.so", RTLD_NOW) != dlopen("lib/one.so", RTLD_NOW));
    CHECK(dlopen("lib/nothing.so", RTLD_NOW) == NULL && strstr(dlerror(), "No such file") != NULL);
    CHECK(dlopen("base.c", RTLD_NOW) == NULL && dlerror() != NULL);
    CHECK(dlopen(NULL, RTLD_NOW) != NULL);
    void *libm = dlopen("libm.so.6", RTLD_NOW);
    CHECK(libm != NULL && dlsym(libm, "cos") != NULL);
}

void test_lists(void)
{
    posix_spawn_file_actions_t actions;
    pid_t pid;
    char *argv[] = {"sh", "-c", "cat; echo \"$PWD\" >/dev/null; pwd; echo wrong >&2", NULL};
    put("in", "from the file\n");
    CHECK(mkdir("here", 0755) == 0);
    CHECK(posix_spawn_file_actions_init(&actions) == 0);
    CHECK(posix_spawn_file_actions_addopen(&actions, 0, under("in"), O_RDONLY, 0) == 0);
    CHECK(posix_spawn_file_actions_addopen(&actions, 1, "out", O_WRONLY | O_CREAT | O_TRUNC, 0644) == 0);
    CHECK(posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0) == 0);
    CHECK(posix_spawn_file_actions_addchdir_np(&actions, "here") == 0);
    CHECK(posix_spawnp(&pid, "sh", &actions, NULL, argv, environ) == 0);
    CHECK(exit_status(pid) == 0);
    CHECK(posix_spawn_file_actions_destroy(&actions) == 0);
    char expected[PATH_MAX + 32];
    snprintf(expected, sizeof expected, "from the file\n%s\n", under("here"));
    CHECK(holds("out", expected));
    /* Nothing is left open. */
    for (int i = 0; i < 300; i++) {
        CHECK(posix_spawn_file_actions_init(&actions) == 0);
        CHECK(posix_spawn_file_actions_addopen(&actions, 0, "in", O_RDONLY, 0) == 0);
        CHECK(posix_spawn_file_actions_destroy(&actions) == 0);
    }
}

void test_questions(void)
{
    struct stat st;
    put("file", "");
    CHECK(pathconf("file", _PC_NAME_MAX) == 255 && pathconf(under("file"), _PC_PATH_MAX) == PATH_MAX);
    FAILS(pathconf("nothing", _PC_NAME_MAX), ENOENT);
    CHECK(stat("file", &st) == 0);
    CHECK(ftok("file", 'x') == (key_t)((st.st_ino & 0xffff) | (st.st_dev & 0xff) << 16 | (unsigned)'x' << 24));
    FAILS(ftok("nothing", 'x'), ENOENT);
    char template[] = "nameXXXXXX", bad[] = "nothing/nameXXXXXX";
    CHECK(mktemp(template) == template && template[0] == 'n' && strcmp(template, "nameXXXXXX") != 0 && !exists(template));
    CHECK(*mktemp(bad) == 'n');
    unsetenv("TMPDIR");
    char *name = tempnam(root, "pre");
    CHECK(name && strncmp(name, under("pre"), strlen(under("pre"))) == 0 && !exists(name));
    free(name);
}

static int by_name(const FTSENT **a, const FTSENT **b)
{
    return strcmp((*a)->fts_name, (*b)->fts_name);
}

static char walked[4096];

/* Walks, and notes each node's info, level and name; `act` may give instructions. */
static void walk(char *const *paths, int options, void (*act)(FTS *, FTSENT *))
{
    walked[0] = 0;
    FTS *fts = fts_open(paths, options, by_name);
    CHECK(fts != NULL);
    FTSENT *node;
    while (fts && (node = fts_read(fts)) != NULL) {
        char *end = walked + strlen(walked);
        snprintf(end, 64, "%d.%d%s ", node->fts_info, node->fts_level, node->fts_name);
        CHECK(node->fts_pathlen == strlen(node->fts_path) && node->fts_namelen == strlen(node->fts_name));
        if (node->fts_info == FTS_F)
            CHECK(node->fts_statp->st_size == 1 && access(node->fts_accpath, R_OK) == 0);
        if (act)
            act(fts, node);
    }
    CHECK(errno == 0 && fts_close(fts) == 0);
}

static void skips_and_follows(FTS *fts, FTSENT *node)
{
    if (strcmp(node->fts_name, "b") == 0 && node->fts_info == FTS_D)
        CHECK(fts_set(fts, node, FTS_SKIP) == 0);
    if (strcmp(node->fts_name, "link") == 0 && node->fts_info == FTS_SL)
        CHECK(fts_set(fts, node, FTS_FOLLOW) == 0);
}

static void looks_ahead(FTS *fts, FTSENT *node)
{
    int count = 0;
    if (strcmp(node->fts_name, "t") != 0 || node->fts_info != FTS_D)
        return;
    for (FTSENT *child = fts_children(fts, 0); child; child = child->fts_link) {
        count++;
        if (strcmp(child->fts_name, "a") == 0 || strcmp(child->fts_name, "link") == 0)
            CHECK(fts_set(fts, child, FTS_SKIP) == 0);
    }
    CHECK(count == 5);
}

#define WALKED(text)                                                              \
    do {                                                                          \
        if (strcmp(walked, text) != 0) {                                          \
            fprintf(stderr, "%s:%d: walked %s\n", __FILE__, __LINE__, walked);    \
            failures++;                                                           \
        }                                                                         \
    } while (0)

void test_trees(void)
{
    CHECK(mkdir("t", 0755) == 0 && mkdir("t/b", 0755) == 0 && mkdir("t/b/c", 0755) == 0);
    put("t/a", "1");
    put("t/b/c/x", "1");
    CHECK(symlink("b", "t/link") == 0 && symlink("nothing", "t/lost") == 0 && symlink("..", "t/b/up") == 0);
    CHECK(mkfifo("t/pipe", 0600) == 0);
    char *one[] = {"t", NULL}, *two[] = {(char *)under("t/b"), "t/a", "none", NULL};
    /* Once by its absolute path, which is in the pool whatever the working directory. */
    char *absolute[] = {(char *)under("t"), NULL};
    walk(absolute, FTS_PHYSICAL | FTS_NOCHDIR, NULL);
    WALKED("1.0t 8.1a 1.1b 1.2c 8.3x 6.2c 12.2up 6.1b 12.1link 12.1lost 3.1pipe 6.0t ");
    walk(one, FTS_PHYSICAL | FTS_NOCHDIR | FTS_NOSTAT, NULL);
    WALKED("1.0t 11.1a 1.1b 1.2c 11.3x 6.2c 11.2up 6.1b 11.1link 11.1lost 11.1pipe 6.0t ");
    walk(one, FTS_LOGICAL | FTS_NOCHDIR, NULL);
    WALKED("1.0t 8.1a 1.1b 1.2c 8.3x 6.2c 2.2up 6.1b 1.1link 1.2c 8.3x 6.2c 2.2up 6.1link 13.1lost 3.1pipe 6.0t ");
    walk(two, FTS_PHYSICAL | FTS_NOCHDIR, NULL);
    /* Compared as they were given. */
    WALKED("1.0b 1.1c 8.2x 6.1c 12.1up 6.0b 10.0none 8.0a ");
    walk(one, FTS_PHYSICAL | FTS_NOCHDIR, skips_and_follows);
    WALKED("1.0t 8.1a 1.1b 6.1b 12.1link 1.1link 1.2c 8.3x 6.2c 12.2up 6.1link 12.1lost 3.1pipe 6.0t ");
    walk(one, FTS_PHYSICAL | FTS_NOCHDIR, looks_ahead);
    /* The first cannot be skipped from above. */
    WALKED("1.0t 8.1a 1.1b 1.2c 8.3x 6.2c 12.2up 6.1b 12.1lost 3.1pipe 6.0t ");
    /* Left in the middle. */
    FTS *fts = fts_open(absolute, FTS_PHYSICAL, NULL);
    for (int i = 0; i < 4; i++)
        CHECK(fts_read(fts) != NULL);
    CHECK(fts_close(fts) == 0);
    CHECK(fts_open(absolute, 0x1000, NULL) == NULL && errno == EINVAL);
}
