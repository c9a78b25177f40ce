/* Sockets with names, and watches of files. */
#include "calls.h"
#include <stddef.h>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <sys/un.h>

static socklen_t address_of(struct sockaddr_un *address, const char *path)
{
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    strncpy(address->sun_path, path, sizeof address->sun_path - 1);
    return offsetof(struct sockaddr_un, sun_path) + strlen(path) + 1;
}

static int at(int (*call)(int, const struct sockaddr *, socklen_t), int fd, const char *path)
{
    struct sockaddr_un address;
    socklen_t bytes = address_of(&address, path);
    return call(fd, (struct sockaddr *)&address, bytes);
}

static int is_at(int (*call)(int, struct sockaddr *, socklen_t *), int fd, const char *path)
{
    struct sockaddr_un address;
    socklen_t bytes = sizeof address;
    return call(fd, (struct sockaddr *)&address, &bytes) == 0 && address.sun_family == AF_UNIX &&
           bytes == offsetof(struct sockaddr_un, sun_path) + strlen(path) + 1 && strcmp(address.sun_path, path) == 0;
}

static void streams(void)
{
    char path[PATH_MAX], text[8];
    struct stat st;
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    snprintf(path, sizeof path, "%s/socket", root);
    CHECK(at(bind, listener, path) == 0 && listen(listener, 5) == 0);
    CHECK(lstat("socket", &st) == 0 && S_ISSOCK(st.st_mode));
    CHECK(is_at(getsockname, listener, path));
    int second = socket(AF_UNIX, SOCK_STREAM, 0);
    FAILS(at(bind, second, path), EADDRINUSE);
    put("file", "x");
    FAILS(at(bind, second, "file"), EADDRINUSE);
    FAILS(at(bind, second, "none/socket"), ENOENT);
    FAILS(at(connect, second, "none"), ENOENT);
    FAILS(at(connect, second, "file"), ECONNREFUSED);
    FAILS(open("socket", O_RDWR), ENXIO);
    CHECK(symlink("socket", "link") == 0);
    pid_t child = fork();
    if (child == 0) {
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        int fine = at(connect, fd, "link") == 0 && is_at(getpeername, fd, path) && write(fd, "hello", 5) == 5;
        _exit(fine ? 0 : 1);
    }
    int fd = accept(listener, NULL, NULL);
    CHECK(fd >= 0 && read(fd, text, sizeof text) == 5 && memcmp(text, "hello", 5) == 0 && close(fd) == 0);
    CHECK(exit_status(child) == 0);
    CHECK(rename("socket", "moved") == 0 && at(connect, second, "moved") == 0 && close(second) == 0);
    CHECK(close(listener) == 0);
    second = socket(AF_UNIX, SOCK_STREAM, 0);
    FAILS(at(connect, second, "moved"), ECONNREFUSED);
    CHECK(unlink("moved") == 0);
    FAILS(at(connect, second, "moved"), ENOENT);
    CHECK(at(bind, second, "moved") == 0 && close(second) == 0 && unlink("moved") == 0);
    CHECK(unlink("link") == 0 && unlink("file") == 0);
}

/* A name that one process binds and another removes. */
static void races(void)
{
    pid_t remover = fork();
    if (remover == 0) {
        while (!exists("stop"))
            unlink("raced");
        _exit(0);
    }
    int failed = 0;
    for (int i = 0; i < 500; i++) {
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        if (at(bind, fd, "raced") != 0 && errno != EADDRINUSE)
            failed++;
        close(fd);
    }
    CHECK(failed == 0);
    put("stop", "");
    CHECK(exit_status(remover) == 0 && unlink("stop") == 0);
    unlink("raced");
}

static void *connects(void *fd)
{
    at(connect, *(int *)fd, "full");
    return NULL;
}

/* A waiting connection can be cancelled. */
static void cancelled(void)
{
    int listener = socket(AF_UNIX, SOCK_STREAM, 0), fd[3];
    CHECK(at(bind, listener, "full") == 0 && listen(listener, 0) == 0);
    for (int i = 0; i < 3; i++)
        fd[i] = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(at(connect, fd[0], "full") == 0);
    pthread_t thread;
    void *result = NULL;
    CHECK(pthread_create(&thread, NULL, connects, &fd[1]) == 0);
    usleep(20000);
    CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
    for (int i = 0; i < 3; i++)
        close(fd[i]);
    CHECK(close(listener) == 0 && unlink("full") == 0);
}

/* Addresses that name no file are passed on unchanged. */
static void others(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int listener = socket(AF_UNIX, SOCK_STREAM, 0), fd = socket(AF_UNIX, SOCK_STREAM, 0);
    int n = snprintf(address.sun_path + 1, 40, "calls-%d", getpid());
    socklen_t bytes = offsetof(struct sockaddr_un, sun_path) + 1 + n;
    CHECK(bind(listener, (struct sockaddr *)&address, bytes) == 0 && listen(listener, 1) == 0);
    CHECK(connect(fd, (struct sockaddr *)&address, bytes) == 0);
    struct sockaddr_un seen;
    socklen_t room = sizeof seen;
    CHECK(getpeername(fd, (struct sockaddr *)&seen, &room) == 0 && room == bytes && memcmp(&seen, &address, bytes) == 0);
    CHECK(close(fd) == 0 && close(listener) == 0);
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    room = sizeof seen;
    CHECK(getsockname(pair[0], (struct sockaddr *)&seen, &room) == 0 && room == sizeof seen.sun_family);
    CHECK(close(pair[0]) == 0 && close(pair[1]) == 0);
    FAILS(getsockname(-1, (struct sockaddr *)&seen, &room), EBADF);
}

static void watches(void)
{
    char events[4096];
    int watcher = inotify_init1(IN_NONBLOCK);
    put("watched", "");
    int watch = inotify_add_watch(watcher, "watched", IN_MODIFY);
    CHECK(watch > 0 && inotify_add_watch(watcher, under("watched"), IN_MODIFY | IN_CLOSE_WRITE | IN_OPEN) == watch);
    CHECK(inotify_add_watch(watcher, under("watched"), IN_MODIFY | IN_CLOSE_WRITE) == watch);
    FAILS(read(watcher, events, sizeof events), EAGAIN);
    int fd = open("watched", O_WRONLY | O_APPEND);
    CHECK(write(fd, "new", 3) == 3 && close(fd) == 0);
    ssize_t n = read(watcher, events, sizeof events);
    CHECK(n == 2 * (ssize_t)sizeof(struct inotify_event) && ((struct inotify_event *)events)->mask == IN_MODIFY);
    FAILS(inotify_add_watch(watcher, "none", IN_MODIFY), ENOENT);
    FAILS(inotify_add_watch(watcher, "watched", IN_MODIFY | IN_ONLYDIR), ENOTDIR);
    CHECK(inotify_rm_watch(watcher, watch) == 0 && close(watcher) == 0 && unlink("watched") == 0);
}

void test_sockets(void)
{
    streams();
    races();
    cancelled();
    others();
    watches();
}
