/* Where paths lead: links, the working directory, and paths between the root and the rest of the tree. */
#include "calls.h"
#include <sys/ipc.h>

void test_paths(void)
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

/* Between the kernel's tree and the root, in both directions. OUTSIDE is a directory of the kernel's tree. */
void test_crossings(void)
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
