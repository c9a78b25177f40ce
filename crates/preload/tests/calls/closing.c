/* Programs that close all descriptors, those of the library included, and continue. */
#include "calls.h"

/* The highest descriptor that a program here may have. */
enum { LIMIT = 1024 };

static void by_closefrom(void)
{
    closefrom(3);
}

static void by_range(void)
{
    CHECK(close_range(3, ~0U, 0) == 0);
}

static void by_unshared_range(void)
{
    CHECK(close_range(3, ~0U, CLOSE_RANGE_UNSHARE) == 0);
}

static void by_number(void)
{
    for (int fd = 3; fd < LIMIT; fd++)
        close(fd);
}

/* Closes as programs do that list their own descriptors. */
static void by_listing(void)
{
    DIR *listing = opendir("/proc/self/fd");
    CHECK(listing != NULL);
    int own = dirfd(listing);
    struct dirent *entry;
    while ((entry = readdir(listing))) {
        int fd = atoi(entry->d_name);
        if (fd > 2 && fd != own)
            close(fd);
    }
    CHECK(closedir(listing) == 0);
}

/* A directory beside this program, on a plain file system. */
static char elsewhere[PATH_MAX];

/* Makes all high numbers descriptors of a directory. A call relative to one of them would create files there. */
static void by_taking_them(void)
{
    int fd = open(elsewhere, O_RDONLY | O_DIRECTORY);
    CHECK(fd >= 0);
    for (int to = LIMIT / 2; to < LIMIT; to++)
        dup2(fd, to);
    CHECK(close(fd) == 0);
}

static void by_marking(void)
{
    CHECK(close_range(3, ~0U, CLOSE_RANGE_CLOEXEC) == 0);
}

static void (*const WAYS[])(void) = {by_closefrom, by_range, by_unshared_range, by_number, by_listing, by_taking_them, by_marking};
enum { WAY_COUNT = sizeof WAYS / sizeof *WAYS };

static int open_descriptors(void)
{
    int count = 0;
    for (int fd = 0; fd < LIMIT; fd++)
        count += fcntl(fd, F_GETFD) != -1;
    return count;
}

/* Creates, reads, lists, renames and removes, and checks the results. */
static int works(const char *name)
{
    char text[64], other[64];
    struct stat st;
    snprintf(text, sizeof text, "text of %s", name);
    snprintf(other, sizeof other, "%s.other", name);
    int fd = open(name, O_RDWR | O_CREAT | O_EXCL, 0644);
    if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text) || fstat(fd, &st) != 0
        || st.st_size != (off_t)strlen(text) || close(fd) != 0)
        return 0;
    if (!holds(name, text) || rename(name, other) != 0 || exists(name) || !holds(under(other), text))
        return 0;
    if (mkdir(name, 0755) != 0 || (fd = open(name, O_RDONLY | O_DIRECTORY)) < 0 || mkdirat(fd, "in", 0700) != 0
        || unlinkat(fd, "in", AT_REMOVEDIR) != 0 || close(fd) != 0 || rmdir(name) != 0)
        return 0;
    int seen = 0;
    DIR *here = opendir(".");
    struct dirent *entry;
    while (here && (entry = readdir(here)))
        seen += strcmp(entry->d_name, other) == 0;
    return here && closedir(here) == 0 && seen == 1 && unlink(other) == 0 && !exists(other);
}

static int starts(const char *program)
{
    pid_t pid = fork();
    if (pid == 0) {
        execl(program, program, NULL);
        _exit(99);
    }
    return exit_status(pid) == 7;
}

void test_closing(void)
{
    put("script", "#!/bin/sh\nmkdir by-script && rmdir by-script && exit 7\n");
    CHECK(chmod("script", 0755) == 0 && works("at-first"));
    CHECK(readlink("/proc/self/exe", elsewhere, sizeof elsewhere - 20) > 0);
    strcpy(strrchr(elsewhere, '/') + 1, "elsewhere");
    CHECK(mkdir(elsewhere, 0755) == 0);
    for (int way = 0; way < WAY_COUNT; way++) {
        pid_t pid = child();
        if (pid == 0) {
            char name[32];
            snprintf(name, sizeof name, "way%d", way);
            int kept = open("/dev/null", O_RDONLY);
            CHECK(kept >= 0 && works(name));
            WAYS[way]();
            CHECK(works(name));
            /*
             * A child of the program that closed its descriptors, a child that closes all again, and programs that
             * either starts.
             */
            pid_t again = child();
            if (again == 0) {
                int sound = works(name);
                WAYS[way]();
                _exit(sound && works(name) && starts("script") && starts(under("script")) ? 0 : 1);
            }
            CHECK(exit_status(again) == 0);
            again = vfork();
            if (again == 0) {
                close_range(3, ~0U, 0);
                execl("script", "script", NULL);
                _exit(99);
            }
            CHECK(exit_status(again) == 7);
            /* Programs that this one starts work too. */
            CHECK(starts("script") && works(name));
            int before = open_descriptors();
            for (int i = 0; i < 50; i++)
                CHECK(works(name));
            CHECK(open_descriptors() == before);
            WAYS[way]();
            WAYS[way]();
            CHECK(works(name));
            _exit(failures ? 1 : 0);
        }
        int status = exit_status(pid);
        if (status != 0)
            fprintf(stderr, "closing.c: way %d\n", way);
        CHECK(status == 0);
    }
    CHECK(works("at-last"));
    /* No file was created where a descriptor was taken. */
    CHECK(rmdir(elsewhere) == 0);
}
