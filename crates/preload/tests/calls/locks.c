/* Locks that exclude: flock, fcntl's record locks of processes and of open files, and lockf, as in the kernel. */
#include "calls.h"
#include <sys/file.h>
#include <sys/syscall.h>

/* Evaluates a condition in a child, which inherits all descriptors. True when it holds there. */
#define IN_CHILD(condition)           \
    (__extension__({                  \
        pid_t pid_ = child();         \
        if (pid_ == 0)                \
            _exit((condition) ? 0 : 1); \
        exit_status(pid_) == 0;       \
    }))
/* The call fails because another lock conflicts. */
#define REFUSED(call) ((call) == -1 && (errno == EAGAIN || errno == EACCES))

static int opened(const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT, 0644);
    CHECK(fd >= 0);
    return fd;
}

/* Locks through a separate open, which is another open file, even within one process. */
static int flock_anew(const char *path, int how)
{
    int fd = open(path, O_RDWR);
    int result = flock(fd, how | LOCK_NB), why = errno;
    close(fd);
    errno = why;
    return result;
}

static int record(int fd, int command, short type, off_t start, off_t length)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = length};
    return fcntl(fd, command, &lock);
}

static int record_anew(const char *path, short type, off_t start, off_t length)
{
    int fd = open(path, O_RDWR);
    int result = record(fd, F_SETLK, type, start, length), why = errno;
    close(fd);
    errno = why;
    return result;
}

/* Waits for a byte. */
static int told(int pipe)
{
    char byte;
    return read(pipe, &byte, 1) == 1;
}

static int tell(int pipe)
{
    return write(pipe, "x", 1) == 1;
}

static void whole_files(void)
{
    int first = opened("f"), second = opened("f");
    CHECK(flock(first, LOCK_EX) == 0);
    CHECK(REFUSED(flock(second, LOCK_EX | LOCK_NB)));
    CHECK(REFUSED(flock(second, LOCK_SH | LOCK_NB)));
    CHECK(IN_CHILD(REFUSED(flock_anew("f", LOCK_EX))));
    CHECK(IN_CHILD(REFUSED(flock_anew("f", LOCK_SH))));
    CHECK(IN_CHILD(REFUSED(flock_anew(under("f"), LOCK_SH))));
    /* By another name of the file, and by its name after a rename. */
    CHECK(link("f", "g") == 0 && IN_CHILD(REFUSED(flock_anew("g", LOCK_SH))));
    CHECK(rename("g", "h") == 0 && IN_CHILD(REFUSED(flock_anew("h", LOCK_SH))));
    /* An inherited descriptor refers to the same open file: it holds the lock, and its changes are common to all. */
    CHECK(IN_CHILD(flock(first, LOCK_EX | LOCK_NB) == 0));
    CHECK(REFUSED(flock(second, LOCK_SH | LOCK_NB)));
    CHECK(IN_CHILD(flock(first, LOCK_UN) == 0));
    CHECK(flock(second, LOCK_EX | LOCK_NB) == 0 && flock(second, LOCK_UN) == 0);
    /* Shared, and from shared to exclusive and back. */
    CHECK(flock(first, LOCK_SH) == 0 && flock(second, LOCK_SH | LOCK_NB) == 0);
    CHECK(IN_CHILD(flock_anew("f", LOCK_SH) == 0) && IN_CHILD(REFUSED(flock_anew("f", LOCK_EX))));
    CHECK(REFUSED(flock(first, LOCK_EX | LOCK_NB)));
    CHECK(flock(second, LOCK_UN) == 0 && flock(first, LOCK_EX | LOCK_NB) == 0);
    CHECK(IN_CHILD(REFUSED(flock_anew("f", LOCK_SH))));
    CHECK(flock(first, LOCK_SH | LOCK_NB) == 0 && IN_CHILD(flock_anew("f", LOCK_SH) == 0));
    CHECK(flock(first, LOCK_EX) == 0);
    /* The last close of the open file releases the lock. */
    int same = dup(first);
    CHECK(close(first) == 0 && REFUSED(flock(second, LOCK_SH | LOCK_NB)));
    CHECK(close(same) == 0 && flock(second, LOCK_SH | LOCK_NB) == 0);
    CHECK(close(second) == 0 && IN_CHILD(flock_anew("f", LOCK_EX) == 0));
    /* A child that has the lock keeps it when its parent closes. */
    int go[2];
    CHECK(pipe(go) == 0);
    first = opened("f");
    CHECK(flock(first, LOCK_EX) == 0);
    pid_t pid = child();
    if (pid == 0) {
        close(go[1]);
        told(go[0]);
        _exit(0);
    }
    CHECK(close(first) == 0 && close(go[0]) == 0 && REFUSED(flock_anew("f", LOCK_SH)));
    CHECK(close(go[1]) == 0 && exit_status(pid) == 0 && flock_anew("f", LOCK_EX) == 0);
    /* A name that was created again refers to another file. */
    first = opened("f");
    CHECK(flock(first, LOCK_EX) == 0 && unlink("f") == 0);
    put("f", "");
    CHECK(flock_anew("f", LOCK_EX) == 0);
    CHECK(REFUSED(flock_anew("h", LOCK_EX)) && close(first) == 0 && flock_anew("h", LOCK_EX) == 0);
    /* A file that is open only for reading can be locked. */
    first = open("f", O_RDONLY);
    CHECK(flock(first, LOCK_EX) == 0 && REFUSED(flock_anew("f", LOCK_SH)) && close(first) == 0);
    /* Invalid operations. */
    first = opened("f");
    FAILS(flock(first, 0), EINVAL);
    CHECK(close(first) == 0);
    FAILS(flock(first, LOCK_EX), EBADF);
}

static int is_held(int fd, off_t start, off_t length, pid_t owner, short type, off_t from, off_t bytes)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = start, .l_len = length};
    return fcntl(fd, F_GETLK, &lock) == 0 && lock.l_type == type && lock.l_pid == owner && lock.l_start == from
        && lock.l_len == bytes;
}

static int is_free(int fd, off_t start, off_t length)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = start, .l_len = length};
    return fcntl(fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

static void records(void)
{
    pid_t me = getpid();
    int fd = opened("r");
    CHECK(ftruncate(fd, 100) == 0 && record(fd, F_SETLK, F_WRLCK, 0, 10) == 0);
    /* The holders of locks, as another process sees them. */
    CHECK(IN_CHILD(is_held(fd, 5, 1, me, F_WRLCK, 0, 10)));
    CHECK(IN_CHILD(is_held(opened("r"), 0, 0, me, F_WRLCK, 0, 10)));
    CHECK(IN_CHILD(is_free(fd, 10, 0)) && is_free(fd, 0, 0));
    CHECK(IN_CHILD(REFUSED(record_anew("r", F_WRLCK, 9, 1))));
    CHECK(IN_CHILD(REFUSED(record_anew("r", F_RDLCK, 9, 1))));
    CHECK(IN_CHILD(record_anew("r", F_WRLCK, 10, 10) == 0));
    /* A child does not inherit them, and has none to release. */
    CHECK(IN_CHILD(REFUSED(record(fd, F_SETLK, F_WRLCK, 0, 1))));
    CHECK(IN_CHILD(record(fd, F_SETLK, F_UNLCK, 0, 0) == 0));
    CHECK(IN_CHILD(is_held(fd, 0, 1, me, F_WRLCK, 0, 10)));
    /* The same process may change its locks: the range grows, splits, and changes its kind. */
    CHECK(record(fd, F_SETLK, F_WRLCK, 10, 20) == 0 && IN_CHILD(is_held(fd, 0, 0, me, F_WRLCK, 0, 30)));
    CHECK(record(fd, F_SETLK, F_UNLCK, 10, 5) == 0);
    CHECK(IN_CHILD(is_held(fd, 0, 0, me, F_WRLCK, 0, 10)) && IN_CHILD(is_held(fd, 10, 0, me, F_WRLCK, 15, 15)));
    CHECK(record(fd, F_SETLK, F_RDLCK, 0, 30) == 0 && IN_CHILD(is_held(fd, 0, 0, me, F_RDLCK, 0, 30)));
    CHECK(IN_CHILD(record_anew("r", F_RDLCK, 0, 30) == 0) && IN_CHILD(REFUSED(record_anew("r", F_WRLCK, 0, 1))));
    /* A range from the end, and one up to the end however far the file grows. */
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_END, .l_start = -10, .l_len = 0};
    CHECK(record(fd, F_SETLK, F_UNLCK, 0, 0) == 0 && fcntl(fd, F_SETLK, &lock) == 0);
    CHECK(IN_CHILD(is_held(fd, 0, 0, me, F_WRLCK, 90, 0)) && IN_CHILD(REFUSED(record_anew("r", F_RDLCK, 1000, 1))));
    /* When the process closes any descriptor of the file, its locks are released. */
    CHECK(close(opened("r")) == 0 && IN_CHILD(is_free(fd, 0, 0)));
    /* Locks that the descriptor's mode forbids. */
    int reading = open("r", O_RDONLY), writing = open("r", O_WRONLY);
    FAILS(record(reading, F_SETLK, F_WRLCK, 0, 1), EBADF);
    FAILS(record(writing, F_SETLK, F_RDLCK, 0, 1), EBADF);
    CHECK(record(reading, F_SETLK, F_RDLCK, 0, 1) == 0 && record(writing, F_SETLK, F_WRLCK, 1, 1) == 0);
    CHECK(close(reading) == 0 && close(writing) == 0);
    /* The end of the process releases them, however it ends. */
    int holds_it[2];
    CHECK(pipe(holds_it) == 0);
    pid_t pid = child();
    if (pid == 0) {
        record(fd, F_SETLK, F_WRLCK, 0, 0);
        tell(holds_it[1]);
        pause();
    }
    CHECK(told(holds_it[0]) && REFUSED(record(fd, F_SETLK, F_WRLCK, 0, 0)) && is_held(fd, 7, 1, pid, F_WRLCK, 0, 0));
    CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid && record(fd, F_SETLK, F_WRLCK, 0, 0) == 0);
    CHECK(close(fd) == 0 && close(holds_it[0]) == 0 && close(holds_it[1]) == 0);
}

static void nothing(int number)
{
    (void)number;
}

/* Waiting for locks. */
static void waits(void)
{
    int fd = opened("w"), ready[2];
    CHECK(pipe(ready) == 0);
    /*
     * Each of two processes waits for the other's lock. One of them gets an error, and when it releases its lock the
     * other continues.
     */
    CHECK(record(fd, F_SETLK, F_WRLCK, 0, 1) == 0);
    pid_t pid = child();
    if (pid == 0) {
        record(fd, F_SETLK, F_WRLCK, 1, 1);
        tell(ready[1]);
        int result = record(fd, F_SETLKW, F_WRLCK, 0, 1);
        _exit(result == 0 ? 0 : errno == EDEADLK ? 1 : 2);
    }
    CHECK(told(ready[0]));
    int here = record(fd, F_SETLKW, F_WRLCK, 1, 1) == 0 ? 0 : errno == EDEADLK ? 1 : 2;
    CHECK(record(fd, F_SETLK, F_UNLCK, 0, 0) == 0);
    CHECK(here + exit_status(pid) == 1);
    /* A signal ends the wait. */
    int other = opened("w");
    struct sigaction act = {.sa_handler = nothing};
    struct itimerval soon = {{0, 5000}, {0, 5000}}, off = {{0, 0}, {0, 0}};
    CHECK(sigaction(SIGALRM, &act, NULL) == 0 && flock(fd, LOCK_EX) == 0 && setitimer(ITIMER_REAL, &soon, NULL) == 0);
    FAILS(flock(other, LOCK_EX), EINTR);
    CHECK(setitimer(ITIMER_REAL, &off, NULL) == 0 && flock(fd, LOCK_UN) == 0);
    CHECK(close(other) == 0);
    pid = child();
    if (pid == 0) {
        record(fd, F_SETLK, F_WRLCK, 0, 0);
        tell(ready[1]);
        pause();
    }
    CHECK(told(ready[0]) && setitimer(ITIMER_REAL, &soon, NULL) == 0);
    FAILS(record(fd, F_SETLKW, F_WRLCK, 0, 0), EINTR);
    CHECK(setitimer(ITIMER_REAL, &off, NULL) == 0);
    CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid && close(fd) == 0);
    CHECK(close(ready[0]) == 0 && close(ready[1]) == 0 && signal(SIGALRM, SIG_DFL) == nothing);
}

/* Record locks that belong to the open file. */
static void open_files(void)
{
    int first = opened("o"), second = opened("o");
    CHECK(record(first, F_OFD_SETLK, F_WRLCK, 0, 10) == 0);
    CHECK(REFUSED(record(second, F_OFD_SETLK, F_WRLCK, 5, 1)));
    CHECK(record(second, F_OFD_SETLK, F_WRLCK, 10, 10) == 0);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 0};
    CHECK(fcntl(second, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_WRLCK && lock.l_pid == -1 && lock.l_len == 10);
    /* They conflict with locks of processes, also of the same process. */
    CHECK(REFUSED(record(first, F_SETLK, F_WRLCK, 0, 1)));
    CHECK(IN_CHILD(REFUSED(record_anew("o", F_RDLCK, 0, 1))));
    /* They are inherited, unlike locks of processes, and closing another descriptor does not release them. */
    CHECK(IN_CHILD(record(first, F_OFD_SETLK, F_WRLCK, 0, 10) == 0));
    CHECK(close(opened("o")) == 0 && IN_CHILD(REFUSED(record_anew("o", F_WRLCK, 0, 1))));
    int same = dup(first);
    CHECK(close(first) == 0 && IN_CHILD(REFUSED(record_anew("o", F_WRLCK, 0, 1))));
    CHECK(close(same) == 0 && IN_CHILD(record_anew("o", F_WRLCK, 0, 10) == 0));
    CHECK(IN_CHILD(REFUSED(record_anew("o", F_WRLCK, 10, 1))) && close(second) == 0);
}

static void sections_of_lockf(void)
{
    int fd = opened("l");
    CHECK(ftruncate(fd, 100) == 0 && lseek(fd, 10, SEEK_SET) == 10 && lockf(fd, F_TLOCK, 10) == 0);
    CHECK(IN_CHILD(lseek(fd, 15, SEEK_SET) == 15 && REFUSED(lockf(fd, F_TLOCK, 1)) && REFUSED(lockf(fd, F_TEST, 1))));
    CHECK(IN_CHILD(lseek(fd, 20, SEEK_SET) == 20 && lockf(fd, F_TEST, 0) == 0 && lockf(fd, F_LOCK, 0) == 0));
    CHECK(lseek(fd, 10, SEEK_SET) == 10 && lockf(fd, F_TEST, 10) == 0 && lockf(fd, F_ULOCK, 10) == 0);
    CHECK(IN_CHILD(lseek(fd, 15, SEEK_SET) == 15 && lockf(fd, F_TEST, 1) == 0));
    CHECK(close(fd) == 0);
}

/* Across exec: a descriptor that stays open keeps its locks, one that is closed releases them. */
static void over_exec(void)
{
    for (int kind = 0; kind < 2; kind++)
        for (int keeps = 0; keeps < 2; keeps++) {
            int input[2], running[2];
            CHECK(pipe(input) == 0 && pipe2(running, O_CLOEXEC) == 0);
            put("x", "");
            pid_t pid = child();
            if (pid == 0) {
                dup2(input[0], 0);
                close(input[0]);
                close(input[1]);
                int fd = open("x", O_RDWR | (keeps ? 0 : O_CLOEXEC));
                int got = kind ? record(fd, F_SETLK, F_WRLCK, 0, 0) : flock(fd, LOCK_EX);
                if (got == 0 && (kind || REFUSED(flock_anew("x", LOCK_EX))))
                    execlp("cat", "cat", NULL);
                _exit(1);
            }
            char byte;
            CHECK(close(running[1]) == 0 && read(running[0], &byte, 1) == 0); /* exec has replaced the program */
            if (keeps) {
                CHECK(REFUSED(kind ? record_anew("x", F_WRLCK, 0, 0) : flock_anew("x", LOCK_EX)));
            } else {
                int fd = opened("x"); /* the close at exec takes the kernel a moment */
                CHECK((kind ? record(fd, F_SETLKW, F_WRLCK, 0, 0) : flock(fd, LOCK_EX)) == 0 && close(fd) == 0);
            }
            CHECK(close(running[0]) == 0 && close(input[0]) == 0 && close(input[1]) == 0 && exit_status(pid) == 0);
        }
}

enum { COUNTERS = 4, COUNTS = 150 };

/*
 * Four processes that each increment a number in a file under a lock. Without the lock some increments would be lost.
 */
static void counters(int kind)
{
    put("number", "0");
    pid_t pids[COUNTERS];
    for (int i = 0; i < COUNTERS; i++)
        if ((pids[i] = child()) == 0) {
            for (int n = 0; n < COUNTS; n++) {
                char text[32] = "";
                int fd = open("number", O_RDWR);
                int got = kind == 0 ? flock(fd, LOCK_EX)
                    : kind == 1     ? record(fd, F_SETLKW, F_WRLCK, 0, 0)
                    : kind == 2     ? record(fd, F_OFD_SETLKW, F_WRLCK, 0, 0)
                                    : lockf(fd, F_LOCK, 0);
                if (got != 0 || pread(fd, text, sizeof text - 1, 0) < 1)
                    _exit(1);
                sched_yield();
                int length = snprintf(text, sizeof text, "%d", atoi(text) + 1);
                if (pwrite(fd, text, length, 0) != length || close(fd) != 0)
                    _exit(1);
            }
            _exit(0);
        }
    for (int i = 0; i < COUNTERS; i++)
        CHECK(exit_status(pids[i]) == 0);
    char expected[32];
    snprintf(expected, sizeof expected, "%d", COUNTERS * COUNTS);
    CHECK(holds("number", expected));
}

void test_locks(void)
{
    whole_files();
    records();
    waits();
    open_files();
    sections_of_lockf();
    alarm(120); /* ends the test if a lock is not released */
    over_exec();
    for (int kind = 0; kind < 4; kind++)
        counters(kind);
    alarm(0);
}

/*
 * flock of a directory through two opens: the lock excludes, or the call is refused. It never succeeds without
 * excluding.
 */
void test_directory_locks(void)
{
    CHECK(mkdir("d", 0755) == 0);
    int first = open("d", O_RDONLY | O_DIRECTORY), second = open(under("d"), O_RDONLY | O_DIRECTORY);
    CHECK(first >= 0 && second >= 0);
    if (flock(first, LOCK_EX) == 0) {
        CHECK(REFUSED(flock(second, LOCK_EX | LOCK_NB)));
        CHECK(IN_CHILD(flock(first, LOCK_EX | LOCK_NB) == 0));
        CHECK(close(first) == 0 && flock(second, LOCK_EX | LOCK_NB) == 0);
    } else {
        FAILS(flock(second, LOCK_SH | LOCK_NB), EOPNOTSUPP);
        FAILS((int)syscall(SYS_flock, second, LOCK_EX), EOPNOTSUPP);
        int same = dup(second);
        FAILS(flock(same, LOCK_EX), EOPNOTSUPP);
        CHECK(IN_CHILD(flock(second, LOCK_EX) == -1 && errno == EOPNOTSUPP));
        CHECK(flock(second, LOCK_UN) == 0 && close(first) == 0 && close(same) == 0);
        /* A file under the same descriptor number can be locked. */
        CHECK(dup2(opened("f"), first) == first && flock(first, LOCK_EX) == 0);
        CHECK(REFUSED(flock_anew("f", LOCK_EX)));
    }
    CHECK(close(second) == 0);
}
