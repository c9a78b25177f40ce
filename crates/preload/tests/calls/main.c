/* The program: its sections, and the functions that they share. */
#include "calls.h"
#include <sys/prctl.h>

const char *root;
int failures;

void put(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    CHECK(fd >= 0);
    CHECK(write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    CHECK(close(fd) == 0);
}

int holds(const char *path, const char *text)
{
    char buffer[4096];
    int fd = open(path, O_RDONLY);
    if (fd < 0)
        return 0;
    ssize_t n = read(fd, buffer, sizeof buffer);
    close(fd);
    return n == (ssize_t)strlen(text) && memcmp(buffer, text, n) == 0;
}

int exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

const char *under(const char *name)
{
    static char path[8][PATH_MAX];
    static int next;
    next = (next + 1) % 8;
    snprintf(path[next], PATH_MAX, "%s/%s", root, name);
    return path[next];
}

int exit_status(pid_t pid)
{
    int status = -1;
    if (pid <= 0 || waitpid(pid, &status, 0) != pid || !WIFEXITED(status))
        return -1;
    return WEXITSTATUS(status);
}

pid_t child(void)
{
    fflush(NULL);
    pid_t parent = getpid(), pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
    }
    return pid;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } sections[] = {
        {"stdio", test_stdio},           {"directories", test_directories}, {"walks", test_walks},
        {"paths", test_paths},           {"crossings", test_crossings},     {"attributes", test_attributes},
        {"xattrs", test_xattrs},         {"names", test_names},             {"exec", test_exec},
        {"signals", test_signals},       {"threads", test_threads},         {"descriptors", test_descriptors},
        {"fifos", test_fifos},           {"numbers", test_numbers},         {"objects", test_objects},
        {"lists", test_lists},           {"questions", test_questions},     {"trees", test_trees},
        {"magic", test_magic},           {"sockets", test_sockets},
        {"locks", test_locks},           {"directory locks", test_directory_locks},
        {"closing", test_closing},       {"handlers", test_handlers},       {"stopped", test_stopped},
        {"cancelled", test_cancelled},   {"children", test_children},       {"nameless", test_nameless},
        {"pointers", test_pointers},     {"path descriptors", test_path_descriptors},
        {"open flags", test_open_flags}, {"slashes", test_slashes},
    };
    if (argc >= 2 && strcmp(argv[1], "report") == 0)
        return report(argc, argv);
    if (argc != 3)
        return 2;
    root = argv[1];
    if (chdir(root) != 0) {
        perror(root);
        return 2;
    }
    setenv("PWD", root, 1);
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++) {
        if (strcmp(sections[i].name, argv[2]) == 0) {
            sections[i].run();
            return failures ? 1 : 0;
        }
    }
    return 2;
}
