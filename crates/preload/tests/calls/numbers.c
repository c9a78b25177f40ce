/* Calls by number, through syscall(2). */
#include "calls.h"
#include <sys/syscall.h>

struct entry {
    unsigned long long d_ino;
    long long d_off;
    unsigned short d_reclen;
    unsigned char d_type;
    char d_name[];
};

void test_numbers(void)
{
    struct stat by_name, st;
    struct statx stx;
    char text[PATH_MAX], entries[4096];
    int fd = syscall(SYS_openat, AT_FDCWD, "made", O_CREAT | O_EXCL | O_WRONLY, 0640);
    CHECK(fd >= 0);
    CHECK(syscall(SYS_write, fd, "text", 4L) == 4);
    CHECK(syscall(SYS_fchmod, fd, 0600) == 0);
    CHECK(syscall(SYS_close, fd) == 0);
    CHECK(holds(under("made"), "text"));
    FAILS(syscall(SYS_openat, AT_FDCWD, under("made"), O_CREAT | O_EXCL | O_WRONLY, 0600), EEXIST);
    CHECK(stat("made", &by_name) == 0 && (by_name.st_mode & 07777) == 0600);
    CHECK(syscall(SYS_newfstatat, AT_FDCWD, under("made"), &st, 0) == 0);
    CHECK(st.st_ino == by_name.st_ino && st.st_dev == by_name.st_dev && st.st_size == 4);
    CHECK(syscall(SYS_statx, AT_FDCWD, "made", 0, STATX_BASIC_STATS, &stx) == 0 && stx.stx_ino == st.st_ino);
    CHECK(syscall(SYS_mkdirat, AT_FDCWD, under("dir"), 0755) == 0);
    CHECK(syscall(SYS_symlinkat, "made", AT_FDCWD, "dir/link") == 0);
    memset(text, 0, sizeof text);
    CHECK(syscall(SYS_readlinkat, AT_FDCWD, "dir/link", text, sizeof text) == 4 && strcmp(text, "made") == 0);
    CHECK(syscall(SYS_linkat, AT_FDCWD, "made", AT_FDCWD, "dir/other", 0) == 0);
    CHECK(syscall(SYS_renameat2, AT_FDCWD, "dir/other", AT_FDCWD, "other", 0) == 0 && exists("other"));
    CHECK(syscall(SYS_truncate, "other", 2L) == 0 && holds("made", "te"));
    CHECK(syscall(SYS_fchmodat, AT_FDCWD, "made", 0644) == 0);
    CHECK(syscall(SYS_faccessat, AT_FDCWD, "made", R_OK) == 0);
    FAILS(syscall(SYS_faccessat, AT_FDCWD, "nothing", F_OK), ENOENT);
    int dir = syscall(SYS_openat, AT_FDCWD, ".", O_RDONLY | O_DIRECTORY);
    CHECK(dir >= 0);
    int seen = 0;
    for (long n; (n = syscall(SYS_getdents64, dir, entries, sizeof entries)) > 0;)
        for (long at = 0; at < n;) {
            struct entry *e = (struct entry *)(entries + at);
            seen += strcmp(e->d_name, "made") == 0 || strcmp(e->d_name, "dir") == 0 || strcmp(e->d_name, "other") == 0;
            at += e->d_reclen;
        }
    CHECK(seen == 3);
    CHECK(syscall(SYS_unlinkat, dir, "other", 0) == 0 && !exists("other"));
    CHECK(syscall(SYS_chdir, under("dir")) == 0);
    CHECK(syscall(SYS_getcwd, text, sizeof text) == (long)strlen(under("dir")) + 1);
    CHECK(strcmp(text, under("dir")) == 0);
    CHECK(syscall(SYS_fchdir, dir) == 0 && exists("made"));
    CHECK(syscall(SYS_close, dir) == 0);
    struct {
        unsigned long long flags, mode, resolve;
    } how = {O_CREAT | O_EXCL | O_RDWR, 0604, 0};
    fd = syscall(SYS_openat2, AT_FDCWD, "made2", &how, sizeof how);
    CHECK(fd >= 0 && write(fd, "two", 3) == 3 && close(fd) == 0 && holds(under("made2"), "two"));
    CHECK(stat("made2", &st) == 0 && (st.st_mode & 07777) == 0604);
    FAILS(syscall(SYS_openat2, AT_FDCWD, under("made2"), &how, sizeof how), EEXIST);
    how.flags = O_RDONLY;
    FAILS(syscall(SYS_openat2, AT_FDCWD, "made2", &how, sizeof how), EINVAL);
    how.mode = 0;
    fd = syscall(SYS_openat2, AT_FDCWD, under("made2"), &how, sizeof how);
    CHECK(fd >= 0 && read(fd, text, 8) == 3 && close(fd) == 0);
    how.flags = O_PATH | O_RDWR;
    FAILS(syscall(SYS_openat2, AT_FDCWD, "made2", &how, sizeof how), EINVAL);
    FAILS(syscall(SYS_openat2, AT_FDCWD, "made2", &how, 8L), EINVAL);
    /* Calls that do not concern the pool, with all their arguments. */
    CHECK(syscall(SYS_getpid) == getpid());
    char *memory = (char *)syscall(SYS_mmap, NULL, 8192L, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0L);
    CHECK(memory != MAP_FAILED && (memory[8191] = 1) == 1);
    CHECK(syscall(SYS_munmap, memory, 8192L) == 0);
    FAILS(syscall(SYS_close, -1), EBADF);
    pid_t pid = fork();
    if (pid == 0) {
        put("script", "#!/bin/sh\nexit 7\n");
        chmod("script", 0755);
        char *argv[] = {"script", NULL};
        syscall(SYS_execve, under("script"), argv, environ);
        _exit(1);
    }
    CHECK(exit_status(pid) == 7);
}
