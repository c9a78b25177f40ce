/* Starting programs, loading shared objects, signals, threads, FIFOs. */
#include "calls.h"
#include <dlfcn.h>

/* Started by test_exec: prints its arguments, a variable, and its working directory. */
int report(int argc, char **argv)
{
    char here[PATH_MAX];
    printf("%s", argv[0]);
    for (int i = 2; i < argc; i++)
        printf(" %s", argv[i]);
    printf(" %s %s\n", getenv("MARK") ? getenv("MARK") : "-", getcwd(here, sizeof here) ? here : "?");
    return 0;
}

static char answer[4096];

#define RUN(call)                                           \
    (__extension__({                                        \
        int ends[2];                                        \
        CHECK(pipe(ends) == 0);                             \
        fflush(NULL);                                       \
        pid_t pid_ = fork();                                \
        if (pid_ == 0) {                                    \
            dup2(ends[1], 1);                               \
            call;                                           \
            _exit(errno);                                   \
        }                                                   \
        close(ends[1]);                                     \
        ssize_t n_, at_ = 0;                                \
        while ((n_ = read(ends[0], answer + at_, sizeof answer - 1 - at_)) > 0) \
            at_ += n_;                                      \
        answer[at_] = 0;                                    \
        close(ends[0]);                                     \
        exit_status(pid_);                                  \
    }))

static void said(int line, const char *text)
{
    char wanted[PATH_MAX * 2];
    snprintf(wanted, sizeof wanted, "%s %s\n", text, root);
    if (strcmp(answer, wanted) != 0) {
        fprintf(stderr, "programs.c:%d: said \"%s\", expected \"%s\"\n", line, answer, wanted);
        failures++;
    }
}
#define SAID(text) said(__LINE__, text)

static void copy_self(const char *to)
{
    char buffer[65536];
    int in = open("/proc/self/exe", O_RDONLY), out = open(to, O_WRONLY | O_CREAT, 0755);
    ssize_t n;
    while ((n = read(in, buffer, sizeof buffer)) > 0)
        CHECK(write(out, buffer, n) == n);
    CHECK(n == 0 && close(in) == 0 && close(out) == 0);
}

/* Starts bin/prog and others by posix_spawn; `prog` is a descriptor that the children must not have. */
static void spawn_programs(char **args, int prog)
{
    pid_t pid;
    posix_spawn_file_actions_t actions;
    CHECK(posix_spawn_file_actions_init(&actions) == 0);
    CHECK(posix_spawn_file_actions_addclose(&actions, prog) == 0);
    CHECK(posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0) == 0);
    CHECK(posix_spawn(&pid, under("bin/prog"), &actions, NULL, args, environ) == 0 && exit_status(pid) == 0);
    CHECK(posix_spawnp(&pid, "prog", &actions, NULL, args, environ) == 0 && exit_status(pid) == 0);
    CHECK(posix_spawnp(&pid, "own", &actions, NULL, args, environ) == 0 && exit_status(pid) == 0);
    CHECK(posix_spawnp(&pid, "true", &actions, NULL, args, environ) == 0 && exit_status(pid) == 0);
    CHECK(posix_spawn(&pid, under("bin/nothing"), &actions, NULL, args, environ) == ENOENT);
    CHECK(posix_spawn(&pid, under("bin/text"), &actions, NULL, args, environ) == EACCES);
    posix_spawn_file_actions_destroy(&actions);
}

/* A script in the kernel's tree whose interpreter is in the root. `script` is its text. */
static void exec_script_outside(char **args, const char *script)
{
    char expected[PATH_MAX + 64], outside[] = "/tmp/forebay-calls-XXXXXX";
    int fd = mkstemp(outside);
    CHECK(write(fd, script, strlen(script)) > 0 && fchmod(fd, 0755) == 0 && close(fd) == 0);
    snprintf(expected, sizeof expected, "%s %s report one -", under("bin/prog"), outside);
    CHECK(RUN(execv(outside, args)) == 0);
    SAID(expected);
    CHECK(unlink(outside) == 0);
}

/* Creates programs and scripts in bin. `script` gets the text of one whose interpreter is bin/prog. */
static void make_programs(char script[PATH_MAX + 64])
{
    char path[PATH_MAX * 2];
    CHECK(mkdir("bin", 0755) == 0);
    copy_self("bin/prog");
    snprintf(script, PATH_MAX + 64, "#!%s/bin/prog report\n", root);
    put("bin/own", script);
    put("bin/shell", "#! /bin/sh -u \nexec printf '%s %s %s -' \"$0\" \"$1\" \"$#\" && exit 9\n");
    put("bin/plain", "printf 'plain %s -' \"$1\"\n");
    put("bin/none", "#!/none/at/all\n");
    put("bin/text", "text");
    put("bin/circle", "#!bin/circle\n");
    for (const char *const *name = (const char *const[]){"own", "shell", "plain", "none", "circle", NULL}; *name; name++) {
        snprintf(path, sizeof path, "bin/%s", *name);
        CHECK(chmod(path, 0755) == 0);
    }
}

void test_exec(void)
{
    char script[PATH_MAX + 64], path[PATH_MAX * 2], expected[PATH_MAX + 64];
    make_programs(script);
    char *args[] = {"zero", "report", "one", NULL};
    char *marked[] = {"MARK=m", "LD_PRELOAD", "FOREBAY_POOL", "FOREBAY_PREFIX", NULL};
    for (int i = 1; i < 4; i++) { /* the preload library's settings, for a program with another environment */
        const char *value = getenv(marked[i]);
        snprintf(path, sizeof path, "%s=%s", marked[i], value ? value : "");
        marked[i] = value ? strdup(path) : "NONE=";
    }
    unsetenv("MARK");
    CHECK(RUN(execv(under("bin/prog"), args)) == 0);
    SAID("zero one -");
    CHECK(RUN(execve("bin/prog", args, marked)) == 0);
    SAID("zero one m");
    CHECK(RUN(execl("./bin/prog", "z", "report", "1", "2", "3", "4", "5", "6", "7", "8", "9", NULL)) == 0);
    SAID("z 1 2 3 4 5 6 7 8 9 -");
    CHECK(RUN(execl("bin/prog", "z", "report", NULL)) == 0);
    SAID("z -");
    CHECK(RUN(execle("bin/prog", "z", "report", "a", "b", "c", "d", NULL, marked)) == 0);
    SAID("z a b c d m");
    snprintf(path, sizeof path, "/none:%s/bin:/usr/bin:/bin", root);
    setenv("PATH", path, 1);
    CHECK(RUN(execlp("prog", "z", "report", "p", NULL)) == 0);
    SAID("z p -");
    CHECK(RUN(execvp("prog", args)) == 0);
    SAID("zero one -");
    CHECK(RUN(execvpe("prog", args, marked)) == 0);
    SAID("zero one m");
    CHECK(RUN(execlp("true", "true", NULL)) == 0);
    CHECK(RUN(execlp("plain", "x", "arg", NULL)) == 0 && strcmp(answer, "plain arg -") == 0);
    CHECK(RUN(execlp("nothing-of-this-name", "x", NULL)) == ENOENT);
    CHECK(RUN(execlp("text", "x", NULL)) == EACCES);
    int dir = open("bin", O_RDONLY | O_DIRECTORY), prog = open("bin/prog", O_RDONLY | O_CLOEXEC);
    CHECK(RUN(execveat(dir, "prog", args, environ, 0)) == 0);
    SAID("zero one -");
    CHECK(RUN(fexecve(prog, args, environ)) == 0);
    SAID("zero one -");
    CHECK(RUN(execv("bin/shell", args)) == 0 && strcmp(answer, "bin/shell report 2 -") == 0);
    snprintf(expected, sizeof expected, "%s report 2 -", under("bin/shell"));
    CHECK(RUN(execvp("shell", args)) == 0 && strcmp(answer, expected) == 0);
    snprintf(expected, sizeof expected, "%s bin/own report one -", under("bin/prog"));
    CHECK(RUN(execv("bin/own", args)) == 0);
    SAID(expected);
    CHECK(RUN(execv("bin/none", args)) == ENOENT);
    CHECK(RUN(execv("bin/plain", args)) == ENOEXEC);
    CHECK(RUN(execv("bin/text", args)) == EACCES);
    CHECK(RUN(execv("bin/circle", args)) == ELOOP);
    CHECK(RUN(execv("bin", args)) == EACCES);
    CHECK(RUN(execv("bin/prog/x", args)) == ENOTDIR);

    spawn_programs(args, prog);
    exec_script_outside(args, script);

    CHECK(close(dir) == 0 && close(prog) == 0);
    pid_t pid = vfork(); /* closes all descriptors, as many programs do before an exec */
    if (pid == 0) {
        close_range(3, ~0U, 0);
        execl("bin/shell", "x", "y", NULL);
        _exit(99);
    }
    CHECK(exit_status(pid) == 0 && holds("bin/text", "text"));
}

void test_fifos(void)
{
    char text[16];
    struct stat st;
    CHECK(mkfifo("p", 0600) == 0);
    FAILS(open("p", O_WRONLY | O_NONBLOCK), ENXIO);
    pid_t pid = fork();
    if (pid == 0) {
        int fd = open("p", O_WRONLY);
        _exit(fd >= 0 && write(fd, "through", 7) == 7 ? 0 : 1);
    }
    int fd = open("p", O_RDONLY);
    CHECK(fd >= 0 && read(fd, text, sizeof text) == 7 && fstat(fd, &st) == 0 && S_ISFIFO(st.st_mode));
    struct stat by_name;
    CHECK(stat("p", &by_name) == 0 && by_name.st_ino == st.st_ino && close(fd) == 0);
    CHECK(exit_status(pid) == 0 && unlink("p") == 0);
    FAILS(open("p", O_RDONLY), ENOENT);
    /*
     * A FIFO that is created and removed while it is opened for writing: the open finds it by name, or creates a file.
     */
    pid = fork();
    if (pid == 0) {
        while (!exists("stop"))
            if (mkfifo("p", 0600) == 0 || errno == EEXIST)
                unlink("p");
        _exit(0);
    }
    int failed = 0;
    for (int i = 0; i < 300; i++) {
        fd = open("p", O_RDWR | O_CREAT, 0600);
        failed += fd < 0;
        if (fd >= 0)
            close(fd);
    }
    CHECK(failed == 0);
    put("stop", "");
    CHECK(exit_status(pid) == 0 && unlink("stop") == 0);
    unlink("p");
}

static volatile sig_atomic_t handled;
static void handler(int number)
{
    (void)number;
    int before = errno;
    char name[32] = "sig.", *at = name + 4;
    for (unsigned n = handled; n; n /= 10)
        *at++ = '0' + n % 10;
    struct stat st;
    int fd = open(name, O_CREAT | O_RDWR | O_EXCL, 0600);
    if (fd < 0 || write(fd, "x", 1) != 1 || fstat(fd, &st) != 0 || st.st_size != 1 || close(fd) != 0
        || stat(name, &st) != 0 || mkdir("sigdir", 0700) != 0 || rmdir("sigdir") != 0 || unlink(name) != 0)
        failures++;
    handled++;
    errno = before;
}

void test_signals(void)
{
    struct sigaction act = {.sa_handler = handler, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGALRM, &act, NULL) == 0);
    put("first", "");
    struct itimerval often = {{0, 1000}, {0, 1000}}, off = {{0, 0}, {0, 0}};
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
    struct stat st;
    char name[32];
    for (int i = 0; i < 200000 && handled < 100; i++) {
        snprintf(name, sizeof name, "n%d", i % 50);
        int fd = open(name, O_CREAT | O_RDWR, 0600);
        if (fd < 0 || fstat(fd, &st) != 0 || close(fd) != 0 || stat(name, &st) != 0 || rename(name, "m") != 0
            || unlink("m") != 0) {
            CHECK(!"worked under signals");
            break;
        }
    }
    CHECK(setitimer(ITIMER_REAL, &off, NULL) == 0);
    CHECK(handled >= 100);
}

static void *waits(void *path)
{
    open(path, O_RDONLY);
    return NULL;
}

static void *works(void *number)
{
    char name[32];
    struct stat st;
    for (int i = 0; i < 300; i++) {
        snprintf(name, sizeof name, "t%ld.%d", (long)number, i);
        int fd = open(name, O_CREAT | O_RDWR | O_EXCL, 0600);
        if (fd < 0 || fstat(fd, &st) != 0 || close(fd) != 0 || unlink(name) != 0)
            return "failed";
    }
    return NULL;
}

void test_threads(void)
{
    pthread_t threads[8];
    void *said_by_thread;
    for (long i = 0; i < 8; i++)
        CHECK(pthread_create(&threads[i], NULL, works, (void *)i) == 0);
    for (int i = 0; i < 8; i++)
        CHECK(pthread_join(threads[i], &said_by_thread) == 0 && said_by_thread == NULL);
    /* A thread is cancelled in an open that waits, of a FIFO in the kernel's tree. */
    char dir[] = "/tmp/forebay-calls-XXXXXX", fifo[64];
    CHECK(mkdtemp(dir) != NULL);
    snprintf(fifo, sizeof fifo, "%s/fifo", dir);
    CHECK(mkfifo(fifo, 0600) == 0 && pthread_create(&threads[0], NULL, waits, fifo) == 0);
    usleep(50000);
    CHECK(pthread_cancel(threads[0]) == 0 && pthread_join(threads[0], &said_by_thread) == 0);
    CHECK(said_by_thread == PTHREAD_CANCELED);
    CHECK(unlink(fifo) == 0 && rmdir(dir) == 0);
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
    /* No descriptor stays open. */
    for (int i = 0; i < 300; i++) {
        CHECK(posix_spawn_file_actions_init(&actions) == 0);
        CHECK(posix_spawn_file_actions_addopen(&actions, 0, "in", O_RDONLY, 0) == 0);
        CHECK(posix_spawn_file_actions_destroy(&actions) == 0);
    }
}
