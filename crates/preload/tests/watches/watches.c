/*
 * Watches of directories: `watches DIRECTORY WHAT`. Prints a line for each event of inotify, so that runs in the pool
 * and on a plain file system can be compared.
 *
 * names     changes of names and attributes in DIRECTORY/a, DIRECTORY/b and DIRECTORY/a/sub
 * contents  changes of files' contents
 * until N   prints "ready", then events until one for the name N
 * child     a child holds the watch and ends at the name "end"; the parent ends at once
 * many N    watches N directories, prints how many succeeded and why the next failed; exits at end of standard input
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATIENCE_MS = 60000 };

static void must(int holds, const char *what)
{
    if (!holds) {
        printf("%s: %s\n", what, strerror(errno));
        fflush(stdout);
        exit(1);
    }
}
#define MUST(call) must((call) != -1, #call)

static int instance;
static char events[65536];
static size_t at, end;

/* The next event. A minute without one ends the program. */
static const struct inotify_event *next(void)
{
    if (at == end) {
        struct pollfd ready = {.fd = instance, .events = POLLIN};
        if (poll(&ready, 1, PATIENCE_MS) != 1) {
            puts("no event comes");
            exit(1);
        }
        ssize_t n = read(instance, events, sizeof events);
        must(n > 0, "read");
        at = 0;
        end = n;
    }
    const struct inotify_event *event = (const struct inotify_event *)(events + at);
    at += sizeof *event + event->len;
    return event;
}

static void print(const struct inotify_event *event)
{
    static const char *const names[] = {
        "ACCESS", "MODIFY", "ATTRIB", "CLOSE_WRITE", "CLOSE_NOWRITE", "OPEN", "MOVED_FROM", "MOVED_TO", "CREATE", "DELETE",
        "DELETE_SELF", "MOVE_SELF",
    };
    static unsigned last_cookie;
    printf("%d:", event->wd);
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
        if (event->mask & 1u << i)
            printf(" %s", names[i]);
    if (event->mask & IN_ISDIR)
        printf(" ISDIR");
    if (event->mask & IN_IGNORED)
        printf(" IGNORED");
    if (event->mask & IN_Q_OVERFLOW)
        printf(" Q_OVERFLOW");
    if (event->cookie)
        printf(event->cookie == last_cookie ? " (same cookie)" : " (cookie)");
    last_cookie = event->cookie;
    printf(" %s\n", event->len ? event->name : "");
    fflush(stdout);
}

/* Prints events up to that of a directory that this function creates in `marks`. That last event is not printed. */
static void show(const char *after)
{
    static int number;
    char mark[64];
    printf("%s\n", after);
    snprintf(mark, sizeof mark, "marks/%d", number++);
    MUST(mkdir(mark, 0700));
    for (;;) {
        const struct inotify_event *event = next();
        if (event->len && strcmp(event->name, mark + strlen("marks/")) == 0)
            return;
        print(event);
    }
}
#define DO(call) (must((call) != -1, #call), show(#call))

static int watch(const char *path, unsigned mask)
{
    int watch = inotify_add_watch(instance, path, mask);
    must(watch != -1, path);
    return watch;
}

static void put(const char *path, int flags, const char *text)
{
    int fd = open(path, flags, 0600);
    must(fd != -1, path);
    MUST(write(fd, text, strlen(text)));
    MUST(close(fd));
}

static void fails(int result, int why, const char *what)
{
    if (result != -1 || errno != why)
        printf("%s: gave %d, %s\n", what, result, strerror(errno));
}
#define FAILS(call, why) fails(call, why, #call)

static void names(void)
{
    const unsigned mask =
        IN_CREATE | IN_DELETE | IN_MOVE | IN_ATTRIB | IN_DELETE_SELF | IN_MOVE_SELF | IN_EXCL_UNLINK | IN_ONLYDIR;
    MUST(mkdir("marks", 0700));
    MUST(mkdir("a", 0700));
    MUST(mkdir("a/sub", 0700));
    MUST(mkdir("b", 0700));
    put("a/old", O_CREAT | O_WRONLY, "");
    put("b/old", O_CREAT | O_WRONLY, "");
    watch("marks", IN_CREATE);
    int a = watch("a", mask);
    must(a == watch("a/../a/", mask | IN_MASK_ADD), "the same directory has the same watch");
    FAILS(inotify_add_watch(instance, "a", mask | IN_MASK_CREATE), EEXIST);
    FAILS(inotify_add_watch(instance, "a/none", mask), ENOENT);
    FAILS(inotify_add_watch(instance, "a/old", mask), ENOTDIR);
    FAILS(inotify_add_watch(1000, "a", mask), EBADF);
    int other = open("a", O_RDONLY | O_DIRECTORY);
    FAILS(inotify_add_watch(other, "a", mask), EINVAL);
    MUST(close(other));
    watch("a/sub", mask);
    int b = watch("b", mask);
    int made = -1;
    DO(made = creat("a/file", 0600));
    MUST(close(made));
    DO(open("a/file", O_CREAT | O_RDWR, 0600));
    DO(mkdir("a/directory", 0700));
    DO(symlink("nowhere", "a/symlink"));
    DO(mkfifo("a/fifo", 0600));
    DO(link("a/file", "a/hard"));
    DO(rename("a/file", "a/renamed"));
    DO(rename("a/renamed", "b/moved"));
    DO(rename("b/moved", "outside"));
    DO(rename("outside", "a/old"));
    DO(rename("a/old", "b/old"));
    DO(rename("a/directory", "b/directory"));
    DO(renameat2(AT_FDCWD, "b/directory", AT_FDCWD, "a/hard", RENAME_EXCHANGE));
    DO(renameat2(AT_FDCWD, "b/old", AT_FDCWD, "b/directory", RENAME_EXCHANGE));
    MUST(mkdir("elsewhere", 0700));
    DO(renameat2(AT_FDCWD, "elsewhere", AT_FDCWD, "b/old", RENAME_EXCHANGE));
    DO(chmod("a/sub", 0750));
    DO(chmod("b/old", 0750));
    DO(rename("a/sub", "b/sub"));
    DO(rename("b/sub", "outer"));
    DO(mkdir("outer/within", 0700));
    DO(rmdir("outer/within"));
    DO(rmdir("outer"));
    DO(unlink("a/symlink"));
    DO(unlink("a/fifo"));
    DO(rmdir("a/hard"));
    MUST(inotify_rm_watch(instance, b));
    DO(rename("b", "c"));
    DO(unlink("c/directory"));
    DO(rename("a", "d"));
    DO(rmdir("d"));
}

/*
 * Prints the events of this kind for one name, until `last` has come. Events for other names are errors. Equal
 * consecutive events are printed once.
 */
static void expect(const char *name, unsigned sort, unsigned last)
{
    unsigned seen = 0, before = 0;
    do {
        const struct inotify_event *event = next();
        must(event->len && strcmp(event->name, name) == 0, "an event of another name");
        if (event->mask & sort && event->mask != before)
            print(event);
        before = event->mask & sort ? event->mask : before;
        seen = event->mask;
    } while (!(seen & last));
}

static void contents(void)
{
    const unsigned sort = IN_MODIFY | IN_CLOSE_WRITE | IN_ATTRIB | IN_CREATE | IN_MOVED_TO;
    MUST(mkdir("a", 0700));
    put("a/old", O_CREAT | O_WRONLY, "old");
    watch("a", sort);
    for (int i = 0; i < 20; i++) {
        char name[32];
        snprintf(name, sizeof name, "a/new%d", i);
        put(name, O_CREAT | O_WRONLY, "text");
        expect(name + 2, sort, IN_CLOSE_WRITE);
    }
    put("a/old", O_APPEND | O_WRONLY, "text");
    expect("old", sort, IN_CLOSE_WRITE);
    int fd = open("a/old", O_RDWR);
    MUST(pwrite(fd, "x", 1, 0));
    expect("old", sort, IN_MODIFY);
    MUST(ftruncate(fd, 1));
    expect("old", sort, IN_MODIFY);
    MUST(futimens(fd, NULL));
    expect("old", sort, IN_ATTRIB);
    MUST(close(fd));
    expect("old", sort, IN_CLOSE_WRITE);
    put("outside", O_CREAT | O_WRONLY, "text");
    MUST(rename("outside", "a/inside"));
    expect("inside", sort, IN_MOVED_TO);
    put("a/inside", O_TRUNC | O_WRONLY, "text");
    expect("inside", sort, IN_CLOSE_WRITE);
}

static void until(const char *name)
{
    watch(".", IN_CREATE | IN_DELETE | IN_MOVE | IN_CLOSE_WRITE | IN_DELETE_SELF);
    puts("ready");
    fflush(stdout);
    for (;;) {
        const struct inotify_event *event = next();
        print(event);
        if (event->len && strcmp(event->name, name) == 0)
            return;
        if (event->mask & IN_IGNORED)
            return;
    }
}

static void many(int count)
{
    char name[32];
    int watched = 0;
    for (; watched < count; watched++) {
        snprintf(name, sizeof name, "%d", watched);
        must(mkdir(name, 0700) == 0 || errno == EEXIST, name);
        if (inotify_add_watch(instance, name, IN_CREATE) == -1)
            break;
    }
    printf("%d %s\n", watched, watched < count ? strerror(errno) : "all");
    fflush(stdout);
    while (read(0, events, sizeof events) > 0)
        ;
}

int main(int argc, char **argv)
{
    must(argc >= 3 && chdir(argv[1]) == 0, "usage: watches DIRECTORY WHAT");
    instance = inotify_init1(IN_CLOEXEC);
    MUST(instance);
    if (strcmp(argv[2], "names") == 0)
        names();
    else if (strcmp(argv[2], "contents") == 0)
        contents();
    else if (strcmp(argv[2], "until") == 0)
        until(argv[3]);
    else if (strcmp(argv[2], "many") == 0)
        many(atoi(argv[3]));
    else if (strcmp(argv[2], "child") == 0) {
        watch(".", IN_CREATE);
        if (fork() == 0)
            until("end");
        else
            _exit(0);
    }
    return 0;
}
