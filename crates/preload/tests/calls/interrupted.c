/* Interrupted calls: by handlers that make calls themselves, by stops, by cancellation, by forks in other threads. */
#include "calls.h"

static unsigned dice(unsigned *state, unsigned below)
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state % below;
}

/* `front` and a number, without stdio, which handlers must not use. */
static char *named(char *name, const char *front, unsigned long number)
{
    char digits[20], *at = name;
    int n = 0;
    while (*front)
        *at++ = *front++;
    do
        digits[n++] = '0' + number % 10;
    while (number /= 10);
    while (n)
        *at++ = digits[--n];
    *at = 0;
    return name;
}

/*
 * Creates, writes, reads by descriptor and by name, renames and removes a file under two names that no other thread
 * uses. Returns 0, or the line of the step that failed. A signal handler may make every call in it.
 */
static int life(const char *name, const char *other)
{
    char text[64];
    struct stat by_name, st;
    size_t length = strlen(name);
    int fd = open(name, O_CREAT | O_EXCL | O_RDWR, 0600);
    if (fd < 0)
        return __LINE__;
    if (write(fd, name, length) != (ssize_t)length)
        return __LINE__;
    if (fstat(fd, &st) != 0 || st.st_size != (off_t)length || st.st_nlink != 1)
        return __LINE__;
    if (stat(name, &by_name) != 0 || by_name.st_ino != st.st_ino || by_name.st_size != st.st_size)
        return __LINE__;
    if (open(name, O_CREAT | O_EXCL | O_RDWR, 0600) != -1 || errno != EEXIST)
        return __LINE__;
    if (rename(name, other) != 0)
        return __LINE__;
    if (stat(name, &by_name) != -1 || errno != ENOENT)
        return __LINE__;
    int again = open(other, O_RDONLY);
    if (again < 0 || read(again, text, sizeof text) != (ssize_t)length || memcmp(text, name, length) != 0)
        return __LINE__;
    if (close(again) != 0 || unlink(other) != 0)
        return __LINE__;
    if (fstat(fd, &st) != 0 || st.st_nlink != 0 || close(fd) != 0)
        return __LINE__;
    return 0;
}

static int entries(const char *path)
{
    DIR *dir = opendir(path);
    int count = -2;
    while (dir && readdir(dir))
        count++;
    return dir && closedir(dir) == 0 ? count : -1;
}

static int descriptors(void)
{
    int count = 0;
    for (int fd = 0; fd < 1024; fd++)
        count += fcntl(fd, F_GETFD) != -1;
    return count;
}

static void nothing(int number)
{
    (void)number;
}

static volatile sig_atomic_t handled, nested, went_wrong;

static void lives(int number)
{
    int before = errno;
    static volatile sig_atomic_t depth;
    char name[32], other[32];
    unsigned long own = handled++ * 4UL + (number == SIGALRM);
    nested += depth++ > 0;
    int line = life(named(name, "h", own), named(other, "i", own));
    if (line && !went_wrong)
        went_wrong = line;
    depth--;
    errno = before;
}

/* Handlers of two timers, which interrupt each other and the program. All work in one directory. */
void test_handlers(void)
{
    char name[32], other[32];
    struct itimerval often = {{0, 300}, {0, 300}}, off = {{0, 0}, {0, 0}};
    for (int round = 0; round < 2; round++) {
        struct sigaction act = {.sa_handler = lives, .sa_flags = round ? 0 : SA_RESTART};
        handled = 0;
        CHECK(sigaction(SIGALRM, &act, NULL) == 0 && sigaction(SIGPROF, &act, NULL) == 0);
        CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0 && setitimer(ITIMER_PROF, &often, NULL) == 0);
        int line = 0, count = 0;
        for (unsigned long i = 0; line == 0 && (i < 300 || handled < 1000) && !went_wrong; i++) {
            line = life(named(name, "m", i), named(other, "n", i));
            DIR *dir = opendir(".");
            for (count = 0; dir && readdir(dir); count++)
                ;
            if (!dir || closedir(dir) != 0)
                line = __LINE__;
            if (i % 10 == 0 && (mkdir("d", 0700) != 0 || rmdir("d") != 0))
                line = __LINE__;
        }
        CHECK(setitimer(ITIMER_REAL, &off, NULL) == 0 && setitimer(ITIMER_PROF, &off, NULL) == 0);
        if (line || went_wrong)
            fprintf(stderr, "interrupted.c:%d in the program, :%d in a handler\n", line, went_wrong);
        CHECK(line == 0 && went_wrong == 0 && handled >= 1000 && count >= 2);
    }
    /* An open waits for a FIFO's other end: a handler interrupts it, or it continues after the handler. */
    struct sigaction ends = {.sa_handler = nothing}, goes_on = {.sa_handler = nothing, .sa_flags = SA_RESTART};
    struct stat st;
    CHECK(mkfifo("fifo", 0600) == 0 && sigaction(SIGALRM, &ends, NULL) == 0 && setitimer(ITIMER_REAL, &often, NULL) == 0);
    FAILS(open("fifo", O_WRONLY), EINTR);
    FAILS(open(under("fifo"), O_RDONLY), EINTR);
    FAILS(open("fifo", O_WRONLY | O_NONBLOCK), ENXIO);
    CHECK(sigaction(SIGALRM, &goes_on, NULL) == 0);
    pid_t pid = child();
    if (pid == 0) {
        usleep(20000);
        int fd = open("fifo", O_WRONLY | O_CREAT, 0600);
        _exit(fd >= 0 && write(fd, "x", 1) == 1 ? 0 : 1);
    }
    int fd = open("fifo", O_RDONLY);
    CHECK(fd >= 0 && fstat(fd, &st) == 0 && S_ISFIFO(st.st_mode) && (st.st_mode & 0777) == 0600);
    CHECK(setitimer(ITIMER_REAL, &off, NULL) == 0 && read(fd, name, 1) == 1 && close(fd) == 0);
    CHECK(exit_status(pid) == 0 && unlink("fifo") == 0);
    CHECK(entries(".") == 0);
}

/* Programs that are stopped at random points while others work, and continue. */
void test_stopped(void)
{
    enum { WORKERS = 3, STOPS = 250 };
    pid_t pids[WORKERS];
    char name[32], other[32];
    unsigned state = 12345;
    unsigned long *done = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(done != MAP_FAILED);
    for (int i = 0; i < WORKERS; i++)
        if ((pids[i] = child()) == 0) {
            for (unsigned long n = 0; !done[WORKERS]; n++) {
                int line = life(named(name, "s", i * 1000000000UL + n), named(other, "t", i * 1000000000UL + n));
                if (line) {
                    fprintf(stderr, "interrupted.c:%d in a program that was stopped\n", line);
                    _exit(1);
                }
                done[i] = n + 1;
            }
            _exit(0);
        }
    for (int stop = 0; stop < STOPS; stop++) {
        pid_t pid = pids[dice(&state, WORKERS)];
        int status;
        CHECK(kill(pid, SIGSTOP) == 0 && waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
        /* No other program waits for a stopped one. */
        for (int n = 0; n < 5; n++) {
            int line = life(named(name, "p", stop * 5 + n), named(other, "q", stop * 5 + n));
            if (line)
                fprintf(stderr, "interrupted.c:%d beside one that is stopped\n", line);
            CHECK(line == 0);
        }
        CHECK(entries(".") >= 0 && kill(pid, SIGCONT) == 0);
        usleep(dice(&state, 2000));
    }
    done[WORKERS] = 1;
    for (int i = 0; i < WORKERS; i++)
        CHECK(exit_status(pids[i]) == 0 && done[i] > 10);
    CHECK(entries(".") == 0 && munmap(done, 4096) == 0);
}

static volatile int sound_threads;

static void give_back(void *fd)
{
    int state;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    if (*(int *)fd >= 0)
        close(*(int *)fd);
    pthread_setcancelstate(state, NULL);
}

static void give_back_listing(void *dir)
{
    int state;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    if (*(DIR **)dir)
        closedir(*(DIR **)dir);
    pthread_setcancelstate(state, NULL);
}

/* Opens, lists and renames until it is cancelled in one of these calls. */
static void *until_cancelled(void *number)
{
    char name[32], other[32];
    for (unsigned long n = 0;; n++) {
        int fd = -1;
        DIR *dir = NULL;
        pthread_cleanup_push(give_back, &fd);
        fd = open(named(name, "new", (unsigned long)number * 1000000UL + n), O_CREAT | O_EXCL | O_RDWR, 0600);
        if (fd < 0 || write(fd, "x", 1) != 1)
            return "new";
        give_back(&fd);
        fd = -1;
        pthread_testcancel();
        fd = open("there", O_CREAT | O_RDWR, 0600);
        if (fd < 0)
            return "there";
        fsync(fd);
        give_back(&fd);
        fd = -1;
        pthread_cleanup_push(give_back_listing, &dir);
        if (!(dir = opendir("listed")))
            return "opendir";
        while (readdir(dir))
            pthread_testcancel();
        give_back_listing(&dir);
        dir = NULL;
        pthread_cleanup_pop(0);
        if (rename(name, named(other, "old", (unsigned long)number * 1000000UL + n)) != 0)
            return "rename";
        pthread_testcancel();
        if (unlink(other) != 0)
            return "unlink";
        sound_threads = 1;
        pthread_cleanup_pop(0);
    }
}

/* Waits until a process writes to a FIFO. */
static void *at_fifo(void *name)
{
    open(name, O_RDONLY);
    return "opened";
}

/* This thread is already cancelled when it makes its first call on the pool, which attaches the process. */
static void *is_doomed(void *name)
{
    struct stat st;
    DIR *dir;
    pthread_cancel(pthread_self());
    if (stat(name, &st) != 0 || mkdir("doomed", 0700) != 0 || rmdir("doomed") != 0)
        return "stat";
    if ((dir = opendir("listed")))
        closedir(dir);
    pthread_testcancel();
    return "it goes on";
}

void test_cancelled(void)
{
    enum { THREADS = 3, ROUNDS = 150 };
    pthread_t threads[THREADS];
    unsigned state = 999;
    void *ended;
    /* A lost lock or slot shows as a call that does not end. */
    alarm(120);
    put("there", "");
    CHECK(mkdir("listed", 0755) == 0);
    char name[32];
    for (int i = 0; i < 20; i++)
        put(named(name, "listed/entry", i), "");
    for (int i = 0; i < 5; i++) {
        pid_t pid = child();
        if (pid == 0) {
            int wrong = pthread_create(&threads[0], NULL, is_doomed, "there") || pthread_join(threads[0], &ended);
            _exit(wrong || ended != PTHREAD_CANCELED || life("a", "b") != 0);
        }
        CHECK(exit_status(pid) == 0);
    }
    int before = descriptors();
    for (int round = 0; round < ROUNDS; round++) {
        for (long i = 0; i < THREADS; i++)
            CHECK(pthread_create(&threads[i], NULL, until_cancelled, (void *)(round * THREADS + i)) == 0);
        usleep(dice(&state, 3000));
        for (int i = 0; i < THREADS; i++)
            CHECK(pthread_cancel(threads[i]) == 0);
        for (int i = 0; i < THREADS; i++) {
            CHECK(pthread_join(threads[i], &ended) == 0);
            if (ended != PTHREAD_CANCELED)
                fprintf(stderr, "interrupted.c: a thread failed at %s\n", (char *)ended);
            CHECK(ended == PTHREAD_CANCELED);
        }
    }
    /*
     * libc's own open may lose a descriptor whose thread is cancelled when the kernel returns it. The library's does
     * not.
     */
    int lost = descriptors() - before;
    CHECK(sound_threads == 1 && (lost == 0 || getenv("FOREBAY_POOL") == NULL));
    /* As many calls at once as a process can make. */
    pthread_t many[80];
    for (long i = 0; i < 80; i++)
        CHECK(pthread_create(&many[i], NULL, until_cancelled, (void *)(1000000 + i)) == 0);
    usleep(100000);
    for (int i = 0; i < 80; i++)
        CHECK(pthread_cancel(many[i]) == 0);
    for (int i = 0; i < 80; i++)
        CHECK(pthread_join(many[i], &ended) == 0 && ended == PTHREAD_CANCELED);
    CHECK(mkfifo("fifo", 0600) == 0);
    for (int i = 0; i < 10; i++) {
        CHECK(pthread_create(&threads[0], NULL, at_fifo, i % 2 ? "fifo" : (void *)under("fifo")) == 0);
        usleep(i * 2000);
        CHECK(pthread_cancel(threads[0]) == 0 && pthread_join(threads[0], &ended) == 0 && ended == PTHREAD_CANCELED);
    }
    CHECK(unlink("fifo") == 0);
    char other[32];
    for (int i = 0; i < 100; i++)
        CHECK(life(named(name, "after", i), named(other, "later", i)) == 0);
    CHECK(entries("listed") == 20 && holds("there", ""));
    alarm(0);
}

static volatile int enough;

static void *busy(void *number)
{
    char name[32], other[32];
    for (unsigned long n = 0; !enough; n++) {
        unsigned long own = (unsigned long)number * 1000000UL + n;
        int line = life(named(name, "b", own), named(other, "c", own));
        if (line)
            return (void *)(long)line;
    }
    return NULL;
}

/* Children of every kind, from a program whose threads are in the middle of calls. */
void test_children(void)
{
    enum { THREADS = 3, ROUNDS = 40 };
    pthread_t threads[THREADS];
    void *line;
    char name[32], other[32];
    alarm(120);
    put("in", "text of the file\n");
    put("script", "#!/bin/sh\nread -r line < in && test \"$line\" = 'text of the file' && echo x > $1 && rm $1 && exit 5\n");
    CHECK(chmod("script", 0755) == 0);
    for (long i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, busy, (void *)i) == 0);
    int before = descriptors();
    for (int i = 0; i < ROUNDS; i++) {
        char *argv[] = {"script", named(name, "of-script", i), NULL};
        pid_t forked = child();
        if (forked == 0) {
            int wrong = 0;
            for (int n = 0; n < 5 && !wrong; n++)
                wrong = life(named(name, "f", i * 5 + n), named(other, "g", i * 5 + n));
            if (wrong)
                fprintf(stderr, "interrupted.c:%d in a forked child\n", wrong);
            _exit(wrong ? 1 : entries(".") > 0 ? 0 : 2);
        }
        /* A child in the memory of its parent, with its own descriptors. */
        pid_t borrowed = vfork();
        if (borrowed == 0) {
            int fd = open("in", O_RDONLY), out = open(under("borrowed"), O_WRONLY | O_CREAT | O_TRUNC, 0600);
            if (fd < 0 || out < 0 || dup2(fd, 0) < 0 || dup2(out, 1) < 0 || chdir("/") != 0 || chdir(root) != 0)
                _exit(98);
            execlp("cat", "cat", NULL);
            _exit(99);
        }
        CHECK(exit_status(borrowed) == 0 && holds("borrowed", "text of the file\n"));
        borrowed = vfork();
        if (borrowed == 0) {
            int fd = open("made-by-vfork", O_RDWR | O_CREAT | O_EXCL, 0600);
            _exit(fd >= 0 && write(fd, "y", 1) == 1 ? 0 : 1);
        }
        CHECK(exit_status(borrowed) == 0 && holds("made-by-vfork", "y") && unlink("made-by-vfork") == 0);
        pid_t spawned;
        CHECK(posix_spawn(&spawned, i % 2 ? "./script" : under("script"), NULL, NULL, argv, environ) == 0);
        CHECK(exit_status(spawned) == 5 && exit_status(forked) == 0);
    }
    CHECK(unlink("borrowed") == 0);
    enough = 1;
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], &line) == 0);
        if (line)
            fprintf(stderr, "interrupted.c:%ld in a thread\n", (long)line);
        CHECK(line == NULL);
    }
    int open_files = 0;
    for (int fd = 0; fd < 1024; fd++) {
        struct stat st;
        open_files += fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_nlink == 0;
    }
    CHECK(open_files == 0 && descriptors() <= before + THREADS && entries(".") == 2);
    alarm(0);
}
