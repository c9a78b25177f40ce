/*
 * Calls that shells and common programs seldom make, one section each: `calls ROOT SECTION`. ROOT is an empty directory,
 * in the pool or, to prove the test itself, in a plain file system. Exit status 0 when every check holds.
 */
#ifndef CALLS_H
#define CALLS_H

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

extern const char *root;
extern int failures;

#define CHECK(holds)                                                                            \
    do {                                                                                        \
        errno = 0;                                                                              \
        if (!(holds)) {                                                                         \
            fprintf(stderr, "%s:%d: %s (errno: %s)\n", __FILE__, __LINE__, #holds, strerror(errno)); \
            failures++;                                                                         \
        }                                                                                       \
    } while (0)
/* The call fails with this errno. */
#define FAILS(call, why) CHECK((call) == -1 && errno == (why))

/* Creates a file with this text. */
void put(const char *path, const char *text);
/* Whether a file has this text. */
int holds(const char *path, const char *text);
int exists(const char *path);
/* A path in the root, valid until eight others were made. */
const char *under(const char *name);
/* Waits for a child: its exit status, or -1. */
int exit_status(pid_t pid);

/* fork: a child that does not outlive the program. */
pid_t child(void);

/* What programs.c does when the program starts itself. */
int report(int argc, char **argv);

void test_stdio(void);
void test_directories(void);
void test_walks(void);
void test_paths(void);
void test_crossings(void);
void test_attributes(void);
void test_xattrs(void);
void test_names(void);
void test_exec(void);
void test_fifos(void);
void test_numbers(void);
void test_objects(void);
void test_lists(void);
void test_questions(void);
void test_trees(void);
void test_magic(void);
void test_sockets(void);
void test_signals(void);
void test_threads(void);
void test_descriptors(void);
void test_locks(void);
void test_directory_locks(void);
void test_closing(void);
void test_handlers(void);
void test_stopped(void);
void test_cancelled(void);
void test_children(void);
void test_nameless(void);
void test_pointers(void);
void test_path_descriptors(void);
void test_open_flags(void);
void test_slashes(void);

#endif
