/* The links of /proc and /dev/fd to open files, and files that are open before they have a name. */
#include "calls.h"

static const char *link_of(int fd)
{
    static char text[64];
    snprintf(text, sizeof text, "/proc/self/fd/%d", fd);
    return text;
}

/* Whether reading the link returns this path. */
static int reads(const char *link, const char *expected)
{
    char text[PATH_MAX];
    ssize_t n = readlink(link, text, sizeof text);
    if (n < 0 || (size_t)n != strlen(expected) || memcmp(text, expected, n) != 0) {
        fprintf(stderr, "%s leads to %.*s, not to %s\n", link, n < 0 ? 0 : (int)n, text, expected);
        return 0;
    }
    return 1;
}

static int same(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_mode == b->st_mode && a->st_nlink == b->st_nlink &&
           a->st_uid == b->st_uid && a->st_size == b->st_size && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static void links_of_files(void)
{
    struct stat by_name, by_link;
    struct statx extended;
    char path[PATH_MAX], resolved[PATH_MAX];
    put("file", "hello");
    CHECK(chmod("file", 0640) == 0);
    int fd = open("file", O_RDONLY);
    CHECK(fd >= 0);
    snprintf(path, sizeof path, "%s/file", root);
    CHECK(reads(link_of(fd), path));
    snprintf(resolved, sizeof resolved, "/proc/%d/fd/%d", getpid(), fd);
    CHECK(reads(resolved, path));
    snprintf(resolved, sizeof resolved, "/dev/fd/%d", fd);
    CHECK(stat("file", &by_name) == 0 && stat(resolved, &by_link) == 0 && same(&by_name, &by_link));
    CHECK(stat(link_of(fd), &by_link) == 0 && same(&by_name, &by_link));
    CHECK(statx(AT_FDCWD, link_of(fd), 0, STATX_BASIC_STATS, &extended) == 0 && extended.stx_ino == by_name.st_ino);
    CHECK(lstat(link_of(fd), &by_link) == 0 && S_ISLNK(by_link.st_mode));
    CHECK(realpath(link_of(fd), resolved) != NULL && strcmp(resolved, path) == 0);
    CHECK(readlink(link_of(fd), resolved, 5) == 5 && memcmp(resolved, path, 5) == 0);
    CHECK(access(link_of(fd), R_OK | W_OK) == 0);
    CHECK(chmod(link_of(fd), 0600) == 0 && stat("file", &by_name) == 0 && (by_name.st_mode & 07777) == 0600);
    CHECK(truncate(link_of(fd), 2) == 0 && holds("file", "he"));
    CHECK(setxattr(link_of(fd), "user.a", "b", 1, 0) == 0 && getxattr("file", "user.a", resolved, 10) == 1);
    struct timespec times[2] = {{.tv_sec = 1}, {.tv_sec = 2}};
    CHECK(utimensat(AT_FDCWD, link_of(fd), times, 0) == 0 && stat("file", &by_name) == 0 && by_name.st_mtime == 2);
    int again = open(link_of(fd), O_WRONLY | O_TRUNC);
    CHECK(again >= 0 && write(again, "anew", 4) == 4 && close(again) == 0 && holds("file", "anew"));
    CHECK(symlink(link_of(fd), "way") == 0);
    again = open("way", O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(again >= 0 && write(again, "by a link", 9) == 9 && close(again) == 0 && holds("file", "by a link"));
    CHECK(unlink("way") == 0);
    put("file", "anew");
    FAILS(open(link_of(fd), O_RDONLY | O_NOFOLLOW), ELOOP);
    snprintf(resolved, sizeof resolved, "%s/none", link_of(fd));
    FAILS(open(resolved, O_RDONLY), ENOTDIR);
    CHECK(linkat(AT_FDCWD, link_of(fd), AT_FDCWD, "second", AT_SYMLINK_FOLLOW) == 0);
    CHECK(stat("second", &by_link) == 0 && by_link.st_nlink == 2);
    CHECK(rename("file", "moved") == 0 && unlink("second") == 0);
    snprintf(path, sizeof path, "%s/moved", root);
    CHECK(reads(link_of(fd), path));
    int directory = open("/proc/self/fd", O_RDONLY | O_DIRECTORY);
    snprintf(resolved, sizeof resolved, "%d", fd);
    char text[PATH_MAX];
    ssize_t n = readlinkat(directory, resolved, text, sizeof text);
    CHECK(n == (ssize_t)strlen(path) && memcmp(text, path, n) == 0);
    CHECK(close(directory) == 0);
    CHECK(unlink("moved") == 0);
    n = readlink(link_of(fd), text, sizeof text);
    CHECK(n > 10 && memcmp(text + n - 10, " (deleted)", 10) == 0);
    again = open(link_of(fd), O_RDONLY);
    CHECK(again >= 0 && read(again, text, 4) == 4 && memcmp(text, "anew", 4) == 0 && close(again) == 0);
    CHECK(close(fd) == 0);
    FAILS(stat(link_of(fd), &by_link), ENOENT);
}

static void links_of_directories(void)
{
    struct stat by_name, by_link;
    char path[PATH_MAX], through[PATH_MAX + 64];
    CHECK(mkdir("d", 0755) == 0);
    put("d/inside", "in");
    int fd = open("d", O_RDONLY | O_DIRECTORY);
    snprintf(path, sizeof path, "%s/d", root);
    CHECK(reads(link_of(fd), path));
    CHECK(stat("d", &by_name) == 0 && stat(link_of(fd), &by_link) == 0 && same(&by_name, &by_link));
    snprintf(through, sizeof through, "%s/inside", link_of(fd));
    CHECK(holds(through, "in"));
    snprintf(through, sizeof through, "/dev/fd/%d/../d/new", fd);
    put(through, "new");
    CHECK(holds("d/new", "new"));
    snprintf(through, sizeof through, "/proc/thread-self/fd/%d/new", fd);
    CHECK(unlink(through) == 0 && !exists("d/new"));
    DIR *stream = opendir(link_of(fd));
    int entries = 0;
    while (stream != NULL && readdir(stream) != NULL)
        entries++;
    CHECK(entries == 3 && closedir(stream) == 0);
    CHECK(chdir(link_of(fd)) == 0 && getcwd(through, sizeof through) != NULL && strcmp(through, path) == 0);
    CHECK(reads("/proc/self/cwd", path));
    CHECK(holds("/proc/self/cwd/inside", "in"));
    CHECK(mkdir("/proc/self/cwd/sub", 0700) == 0 && rmdir("sub") == 0);
    CHECK(chdir("..") == 0 && reads("/proc/self/cwd", root));
    pid_t child = fork();
    if (child == 0) {
        snprintf(through, sizeof through, "/proc/%d/cwd/d/inside", getppid());
        _exit(chdir("/") == 0 && holds(through, "in") ? 0 : 1);
    }
    CHECK(exit_status(child) == 0);
    CHECK(close(fd) == 0);
}

static void names_for_unnamed_files(void)
{
    struct stat by_name, by_descriptor;
    mode_t before = umask(0);
    int fd = open(".", O_TMPFILE | O_RDWR, 0641);
    umask(before);
    CHECK(fd >= 0 && write(fd, "text", 4) == 4);
    CHECK(fstat(fd, &by_descriptor) == 0 && by_descriptor.st_nlink == 0 && by_descriptor.st_mode == (S_IFREG | 0641));
    put("there", "x");
    FAILS(linkat(AT_FDCWD, link_of(fd), AT_FDCWD, "there", AT_SYMLINK_FOLLOW), EEXIST);
    FAILS(linkat(AT_FDCWD, link_of(fd), AT_FDCWD, "none/name", AT_SYMLINK_FOLLOW), ENOENT);
    CHECK(linkat(AT_FDCWD, link_of(fd), AT_FDCWD, "named", AT_SYMLINK_FOLLOW) == 0);
    CHECK(holds("named", "text"));
    CHECK(write(fd, " more", 5) == 5 && holds("named", "text more"));
    CHECK(stat("named", &by_name) == 0 && by_name.st_nlink == 1 && by_name.st_mode == (S_IFREG | 0641));
    CHECK(by_name.st_size == 9 && by_name.st_uid == geteuid());
    CHECK(fstat(fd, &by_descriptor) == 0 && same(&by_name, &by_descriptor));
    CHECK(fchmod(fd, 0600) == 0 && stat("named", &by_name) == 0 && by_name.st_mode == (S_IFREG | 0600));
    CHECK(linkat(fd, "", AT_FDCWD, "twice", AT_EMPTY_PATH) == 0 && stat("twice", &by_name) == 0 && by_name.st_nlink == 2);
    CHECK(close(fd) == 0 && unlink("named") == 0 && holds("twice", "text more") && unlink("twice") == 0);

    fd = open(root, O_TMPFILE | O_WRONLY, 0600);
    CHECK(fd >= 0 && fchmod(fd, 0444) == 0 && linkat(fd, "", AT_FDCWD, "by-descriptor", AT_EMPTY_PATH) == 0);
    CHECK(stat("by-descriptor", &by_name) == 0 && by_name.st_mode == (S_IFREG | 0444) && close(fd) == 0);

    fd = open(".", O_TMPFILE | O_EXCL | O_RDWR, 0600);
    FAILS(linkat(AT_FDCWD, link_of(fd), AT_FDCWD, "never", AT_SYMLINK_FOLLOW), ENOENT);
    CHECK(!exists("never") && close(fd) == 0);
}

/* A file that is created without a name appears complete under its name to every reader. */
static void names_appear_whole(void)
{
    int rounds = 300;
    pid_t reader = fork();
    if (reader == 0) {
        char text[16];
        for (int bad = 0;;) {
            int fd = open("published", O_RDONLY);
            if (fd >= 0) {
                bad |= read(fd, text, sizeof text) != 7;
                close(fd);
            }
            if (exists("stop"))
                _exit(bad);
        }
    }
    int failed = 0;
    for (int i = 0; i < rounds; i++) {
        int fd = open(".", O_TMPFILE | O_WRONLY, 0600);
        failed += fd < 0 || write(fd, "content", 7) != 7;
        failed += linkat(AT_FDCWD, link_of(fd), AT_FDCWD, "published", AT_SYMLINK_FOLLOW) != 0;
        failed += close(fd) != 0 || unlink("published") != 0;
    }
    CHECK(failed == 0);
    put("stop", "");
    CHECK(exit_status(reader) == 0 && unlink("stop") == 0);
}

static void *links(void *names)
{
    const char **name = names;
    int fd = atoi(name[0]);
    return linkat(AT_FDCWD, link_of(fd), AT_FDCWD, name[1], AT_SYMLINK_FOLLOW) == 0 ? NULL : (void *)name;
}

/* Two threads that name one file give it two names. */
static void two_names_of_one_file(void)
{
    int wrong = 0;
    for (int i = 0; i < 50; i++) {
        char number[16];
        struct stat first, second;
        int fd = open(".", O_TMPFILE | O_RDWR, 0600);
        snprintf(number, sizeof number, "%d", fd);
        const char *a[] = {number, "first"}, *b[] = {number, "second"};
        pthread_t thread;
        void *other = NULL;
        wrong += pthread_create(&thread, NULL, links, a) != 0;
        wrong += links(b) != NULL;
        wrong += pthread_join(thread, &other) != 0 || other != NULL;
        wrong += stat("first", &first) != 0 || stat("second", &second) != 0;
        wrong += first.st_ino != second.st_ino || first.st_nlink != 2;
        wrong += close(fd) != 0 || unlink("first") != 0 || unlink("second") != 0;
    }
    CHECK(wrong == 0);
}

static void owners_of_unnamed_files(void)
{
    struct stat st;
    int fd = open(".", O_TMPFILE | O_RDWR, 0600);
    if (geteuid() == 0)
        CHECK(fchown(fd, 1000, 1001) == 0);
    CHECK(linkat(AT_FDCWD, link_of(fd), AT_FDCWD, "owned", AT_SYMLINK_FOLLOW) == 0 && stat("owned", &st) == 0);
    CHECK(geteuid() != 0 || (st.st_uid == 1000 && st.st_gid == 1001));
    CHECK(close(fd) == 0 && unlink("owned") == 0);
    int elsewhere = open("/tmp", O_TMPFILE | O_RDWR, 0600);
    struct stat here;
    if (elsewhere >= 0 && fstat(elsewhere, &st) == 0 && stat(".", &here) == 0 && st.st_dev != here.st_dev)
        FAILS(linkat(AT_FDCWD, link_of(elsewhere), AT_FDCWD, "never", AT_SYMLINK_FOLLOW), EXDEV);
    if (elsewhere >= 0)
        close(elsewhere);
}

void test_magic(void)
{
    names_appear_whole();
    two_names_of_one_file();
    owners_of_unnamed_files();
    links_of_files();
    links_of_directories();
    names_for_unnamed_files();
    /* The program runs from the pool and finds its own path. */
    if (getenv("CALLS_AGAIN") == NULL) {
        char command[128];
        snprintf(command, sizeof command, "cp /proc/%d/exe program && CALLS_AGAIN=1 $PWD/program $PWD magic", getpid());
        CHECK(system("rm -rf *") == 0 && system(command) == 0);
        return;
    }
    char path[PATH_MAX], resolved[PATH_MAX];
    snprintf(path, sizeof path, "%s/program", root);
    CHECK(reads("/proc/self/exe", path));
    CHECK(realpath("/proc/self/exe", resolved) != NULL && strcmp(resolved, path) == 0);
}
