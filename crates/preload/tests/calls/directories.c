/* Reading directories, and walks over trees. */
#include "calls.h"
#include <fts.h>

static int only_x(const struct dirent *e) { return e->d_name[0] == 'x'; }

/* The working directory was removed: it is empty, and nothing can be created in it. */
static void removed_working_directory(void)
{
    struct stat st;
    CHECK(mkdir("gone", 0755) == 0 && chdir("gone") == 0 && rmdir("../gone") == 0);
    DIR *d = opendir(".");
    CHECK(d != NULL && readdir(d) == NULL && closedir(d) == 0);
    int fd = open(".", O_RDONLY | O_DIRECTORY);
    CHECK(fd >= 0 && fstat(fd, &st) == 0 && S_ISDIR(st.st_mode) && st.st_nlink == 0 && close(fd) == 0);
    FAILS(open("new", O_CREAT | O_WRONLY, 0600), ENOENT);
    FAILS(mkdir("new", 0700), ENOENT);
    FAILS(open("none", O_RDONLY), ENOENT);
    CHECK(getcwd(NULL, 0) == NULL && errno == ENOENT);
    CHECK(chdir(root) == 0);
}

void test_directories(void)
{
    removed_working_directory();
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
    if (levels) /* with FTW_CHDIR: seen from the parent directory or, for FTW_DP, from within */
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

void test_walks(void)
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

static int by_name(const FTSENT **a, const FTSENT **b)
{
    return strcmp((*a)->fts_name, (*b)->fts_name);
}

static char walked[4096];

/* Walks a tree and records each node's info, level and name. `act` may give instructions. */
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
    /* Also by an absolute path, which leads into the pool from every working directory. */
    char *absolute[] = {(char *)under("t"), NULL};
    walk(absolute, FTS_PHYSICAL | FTS_NOCHDIR, NULL);
    WALKED("1.0t 8.1a 1.1b 1.2c 8.3x 6.2c 12.2up 6.1b 12.1link 12.1lost 3.1pipe 6.0t ");
    walk(one, FTS_PHYSICAL | FTS_NOCHDIR | FTS_NOSTAT, NULL);
    WALKED("1.0t 11.1a 1.1b 1.2c 11.3x 6.2c 11.2up 6.1b 11.1link 11.1lost 11.1pipe 6.0t ");
    walk(one, FTS_LOGICAL | FTS_NOCHDIR, NULL);
    WALKED("1.0t 8.1a 1.1b 1.2c 8.3x 6.2c 2.2up 6.1b 1.1link 1.2c 8.3x 6.2c 2.2up 6.1link 13.1lost 3.1pipe 6.0t ");
    walk(two, FTS_PHYSICAL | FTS_NOCHDIR, NULL);
    /* Roots are compared as they were passed. */
    WALKED("1.0b 1.1c 8.2x 6.1c 12.1up 6.0b 10.0none 8.0a ");
    walk(one, FTS_PHYSICAL | FTS_NOCHDIR, skips_and_follows);
    WALKED("1.0t 8.1a 1.1b 6.1b 12.1link 1.1link 1.2c 8.3x 6.2c 12.2up 6.1link 12.1lost 3.1pipe 6.0t ");
    walk(one, FTS_PHYSICAL | FTS_NOCHDIR, looks_ahead);
    /* An instruction to skip has no effect on the first node of a list. */
    WALKED("1.0t 8.1a 1.1b 1.2c 8.3x 6.2c 12.2up 6.1b 12.1lost 3.1pipe 6.0t ");
    /* A walk that is closed before its end. */
    FTS *fts = fts_open(absolute, FTS_PHYSICAL, NULL);
    for (int i = 0; i < 4; i++)
        CHECK(fts_read(fts) != NULL);
    CHECK(fts_close(fts) == 0);
    CHECK(fts_open(absolute, 0x1000, NULL) == NULL && errno == EINVAL);
}
