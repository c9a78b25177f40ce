/* Every function of forebay.h, against a pool: `interface`, with FOREBAY_POOL set. Exit status 0 if all checks hold. */
#include <errno.h>
#include <fcntl.h>
#include <forebay.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

static int failures;
#define CHECK(holds)                                              \
    do {                                                          \
        errno = 123;                                              \
        if (!(holds)) {                                           \
            fprintf(stderr, "interface.c:%d: %s\n", __LINE__, #holds); \
            failures++;                                           \
        } else if (errno != 123) {                                \
            fprintf(stderr, "interface.c:%d: errno moved\n", __LINE__); \
            failures++;                                           \
        }                                                         \
    } while (0)

enum { PIECES = 64, PIECE = 5000 };

#include "model.h"

static _Atomic int64_t results, results_bytes;
static void record_result(void *state, int64_t result)
{
    if (result > 0)
        results_bytes += result;
    *(_Atomic int *)state += 1;
    results++;
}

/* Asynchronous transfers: many at once; tested, waited for, and with a callback; also in a forked child. */
static void later(forebay_pool *pool)
{
    static char out[PIECES][PIECE], in[PIECES][PIECE];
    forebay_request *requests[PIECES] = {NULL};
    forebay_file *file = NULL;
    static _Atomic int callbacks;
    int64_t result = 0;

    CHECK(forebay_file_open(pool, "later", O_RDWR | O_CREAT, 0600, 3, 4096, &file) == 0);
    for (int i = 0; i < PIECES; i++) {
        memset(out[i], i + 1, PIECE);
        CHECK(forebay_file_write_start(file, out[i], PIECE, (int64_t)i * PIECE, NULL, NULL, &requests[i]) == 0);
    }
    for (int i = 0; i < PIECES; i++)
        CHECK(requests[i] && forebay_request_wait(requests[i]) == PIECE);
    for (int i = 0; i < PIECES; i++)
        CHECK(forebay_file_read_start(file, in[i], PIECE, (int64_t)i * PIECE, record_result, &callbacks, &requests[i]) == 0);
    for (int i = 0; i < PIECES; i++) {
        while (forebay_request_test(requests[i], &result) == 0)
            usleep(100);
        CHECK(result == PIECE);
    }
    CHECK(callbacks == PIECES && results == PIECES && results_bytes == PIECES * PIECE && memcmp(in, out, sizeof in) == 0);
    /* At the end of the file, behind it, and transfers that cannot be started. */
    CHECK(forebay_file_read_start(file, in, PIECE, (int64_t)PIECES * PIECE - 10, NULL, NULL, &requests[0]) == 0);
    CHECK(forebay_request_wait(requests[0]) == 10);
    CHECK(forebay_file_read_start(file, NULL, 0, 0, NULL, NULL, &requests[0]) == 0);
    CHECK(forebay_request_wait(requests[0]) == 0 && forebay_request_wait(NULL) == -EFAULT);
    CHECK(forebay_file_read_start(file, in, 1, 0, NULL, NULL, NULL) == -EINVAL);
    CHECK(forebay_file_read_start(file, in, 1, -1, NULL, NULL, &requests[0]) == -EINVAL);
    CHECK(forebay_file_read_start(file, NULL, 1, 0, NULL, NULL, &requests[0]) == -EFAULT);
    CHECK(forebay_file_read_start(NULL, in, 1, 0, NULL, NULL, &requests[0]) == -EFAULT);
    CHECK(forebay_request_test(NULL, &result) == -EFAULT);
#ifdef __SANITIZE_ADDRESS__
    /*
     * A thread may hold a lock of the sanitizer's allocator during the fork. The child would then wait for it without
     * end.
     */
    CHECK(forebay_file_write_start(file, "child", 5, 0, NULL, NULL, &requests[0]) == 0);
    CHECK(forebay_request_wait(requests[0]) == 5);
#else
    pid_t child = fork();
    if (child == 0) {
        int good = forebay_file_write_start(file, "child", 5, 0, NULL, NULL, &requests[0]) == 0 &&
                   forebay_request_wait(requests[0]) == 5;
        _exit(!good);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
#endif
    /* The file may be closed before the transfer is done. Without a handle only the callback gets the result. */
    CHECK(forebay_file_read_start(file, in, 5, 0, record_result, &callbacks, NULL) == 0 && forebay_file_close(file) == 0);
    while (results == PIECES)
        usleep(100);
    CHECK(memcmp(in, "child", 5) == 0);
}

enum { RUNS = 600, RUN = 4096, EVERY = 3 };

/* Many ranges of a file in one call, and the bytes between them, in several backing files and in one. */
static void runs(forebay_pool *pool, uint32_t stripe_count)
{
    static char out[RUNS * RUN], in[RUNS * RUN], whole[RUNS * RUN * EVERY];
    static struct forebay_run list[RUNS];
    forebay_file *file = NULL;
    struct iovec parts[3] = {{out, 100}, {out + 100, 5 * RUN}, {out + 100 + 5 * RUN, sizeof out - 100 - 5 * RUN}};
    struct iovec back = {in, sizeof in};

    for (size_t i = 0; i < sizeof out; i++)
        out[i] = (char)(i * 7 + i / RUN + 1);
    CHECK(forebay_file_open(pool, "runs", O_RDWR | O_CREAT, 0600, stripe_count, 65536, &file) == 0);
    memset(whole, 'g', sizeof whole);
    CHECK(forebay_file_pwrite(file, whole, sizeof whole, 0) == (int64_t)sizeof whole);
    for (int i = 0; i < RUNS; i++)
        list[i] = (struct forebay_run){(int64_t)i * RUN * EVERY + 17, RUN};
    /* Twice: into an existing file, and after truncation into holes. */
    for (int pass = 0; pass < 2; pass++) {
        char gap = pass == 0 ? 'g' : 0;
        CHECK(forebay_file_write_runs(file, parts, 3, list, RUNS) == (int64_t)sizeof out);
        CHECK(forebay_file_size(file) == (pass == 0 ? (int64_t)sizeof whole : list[RUNS - 1].offset + RUN));
        int64_t got = forebay_file_pread(file, whole, sizeof whole, 0);
        CHECK(got == forebay_file_size(file));
        int wrong = 0;
        for (int64_t i = 0; i < got; i++) {
            int64_t run = (i - 17) / (RUN * EVERY), within = (i - 17) % (RUN * EVERY);
            wrong += whole[i] != (i >= 17 && within < RUN ? out[run * RUN + within] : gap);
        }
        CHECK(wrong == 0);
        memset(in, 0, sizeof in);
        CHECK(forebay_file_read_runs(file, &back, 1, list, RUNS) == (int64_t)sizeof in && memcmp(in, out, sizeof in) == 0);
        if (pass == 0)
            CHECK(forebay_file_truncate(file, 0) == 0);
    }
    /* The file's end: within a range, and before all ranges. */
    CHECK(forebay_file_truncate(file, list[9].offset + 5) == 0);
    memset(in, 'k', sizeof in);
    CHECK(forebay_file_read_runs(file, &back, 1, list, RUNS) == 9 * RUN + 5);
    CHECK(memcmp(in, out, 9 * RUN + 5) == 0 && in[9 * RUN + 5] == 'k');
    CHECK(forebay_file_read_runs(file, &back, 1, list + 100, RUNS - 100) == -EINVAL);
    back.iov_len = RUN;
    CHECK(forebay_file_read_runs(file, &back, 1, list + 100, 1) == 0);
    /* Ranges with falling offsets, and adjacent ones. */
    struct forebay_run falling[3] = {{200000, 1000}, {100000, RUN - 2000}, {101000 + RUN - 3000, 1000}};
    CHECK(forebay_file_write_runs(file, parts + 1, 0, falling, 0) == 0);
    parts[0].iov_len = RUN;
    CHECK(forebay_file_write_runs(file, parts, 1, falling, 3) == RUN && forebay_file_read_runs(file, &back, 1, falling, 3) == RUN);
    CHECK(memcmp(in, out, RUN) == 0);
    CHECK(forebay_file_preadv(file, &back, 1, 200000) == 1000 && memcmp(in, out, 1000) == 0);
    CHECK(forebay_file_pwritev(file, parts, 2, 70000) == (int64_t)(RUN + parts[1].iov_len));
    CHECK(forebay_file_pread(file, in, RUN, 70000) == RUN && memcmp(in, out, RUN) == 0);
    /* Invalid arguments. */
    falling[0].bytes = -1;
    CHECK(forebay_file_write_runs(file, parts, 1, falling, 3) == -EINVAL);
    CHECK(forebay_file_write_runs(file, parts, -1, list, 1) == -EINVAL && forebay_file_write_runs(file, NULL, 1, list, 1) == -EFAULT);
    CHECK(forebay_file_preadv(file, &back, 1, -1) == -EINVAL && forebay_file_preadv(NULL, &back, 1, 0) == -EFAULT);
    back.iov_base = NULL;
    CHECK(forebay_file_preadv(file, &back, 1, 0) == -EFAULT);
    CHECK(forebay_file_close(file) == 0 && forebay_unlink(pool, "runs") == 0);
}

enum { FAR = 64 << 20 };

/* Holes that were never written, and holes made by a punch. */
static void holes(forebay_pool *pool, uint32_t stripe_count)
{
    forebay_file *file = NULL;
    static char data[3 << 16];
    char byte = 'x';

    memset(data, 'd', sizeof data);
    CHECK(forebay_file_open(pool, "holes", O_RDWR | O_CREAT, 0600, stripe_count, 65536, &file) == 0);
    CHECK(forebay_file_seek_data(file, 0) == -ENXIO && forebay_file_seek_hole(file, 0) == -ENXIO);
    CHECK(forebay_file_pwrite(file, data, sizeof data, FAR) == (int64_t)sizeof data);
    CHECK(forebay_file_truncate(file, 2 * FAR) == 0);
    int64_t first = forebay_file_seek_data(file, 5), behind = forebay_file_seek_hole(file, FAR);
    /* The medium's pages may be larger than the written range. */
    CHECK(first > FAR / 2 && first <= FAR && behind >= FAR + (int64_t)sizeof data && behind < FAR + FAR / 2);
    CHECK(forebay_file_seek_hole(file, 5) == 5);
    /* One backing file of several may have got such a page, and another one not. */
    int64_t next = forebay_file_seek_data(file, behind);
    CHECK(next == -ENXIO || (stripe_count > 1 && next > behind && next < FAR + FAR / 2));
    CHECK(forebay_file_seek_hole(file, 2 * FAR) == -ENXIO && forebay_file_seek_data(file, -1) == -EINVAL);
    CHECK(forebay_file_punch(file, FAR + 65536, 65536) == 0 && forebay_file_size(file) == 2 * FAR);
    CHECK(forebay_file_pread(file, &byte, 1, FAR + 65536 + 9) == 1 && byte == 0);
    CHECK(forebay_file_pread(file, &byte, 1, FAR + 65535) == 1 && byte == 'd');
    CHECK(forebay_file_pread(file, &byte, 1, FAR + 2 * 65536) == 1 && byte == 'd');
    CHECK(forebay_file_seek_hole(file, FAR) == FAR + 65536);
    CHECK(forebay_file_seek_data(file, FAR + 65536) == FAR + 2 * 65536);
    CHECK(forebay_file_punch(file, 0, 0) == -EINVAL && forebay_file_punch(file, -1, 9) == -EINVAL);
    CHECK(forebay_file_close(file) == 0 && forebay_unlink(pool, "holes") == 0);
}

static void put(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text) || close(fd) != 0)
        failures++;
}

/* Staging in and out, and paths that cannot be staged. The program gets no signal of a child. */
static void staging(forebay_pool *pool)
{
    char dir[] = "/tmp/forebay-interface-XXXXXX", from[64], to[64], text[16] = "";
    struct forebay_stage_status status;
    forebay_stage *stage = NULL;
    struct stat st;

    CHECK(mkdtemp(dir) != NULL);
    snprintf(from, sizeof from, "%s/a \"b\":c", dir);
    snprintf(to, sizeof to, "%s/back", dir);
    put(from, "staged");
    CHECK(forebay_stage_in_start(pool, from, "/staged", FOREBAY_STAGE_VERIFY, &stage) == 0);
    CHECK(forebay_stage_wait(stage, &status) == 1 && status.files == 1 && status.bytes == 6 && status.failed_files == 0);
    CHECK(forebay_stat(pool, "staged", &st) == 0 && st.st_size == 6);
    CHECK(forebay_stage_out_start(pool, "/staged", to, 0, &stage) == 0);
    int ended = 0;
    while ((ended = forebay_stage_test(stage, &status)) == 0)
        usleep(1000);
    CHECK(ended == 1 && status.files == 1);
    int fd = open(to, O_RDONLY);
    CHECK(fd >= 0 && read(fd, text, sizeof text) == 6 && memcmp(text, "staged", 6) == 0 && close(fd) == 0);
    if (waitpid(-1, NULL, WNOHANG) != -1)
        failures++;
    snprintf(from, sizeof from, "%s/none", dir);
    CHECK(forebay_stage_in_start(pool, from, "/none", 0, &stage) == 0);
    CHECK(forebay_stage_wait(stage, &status) == -ENOENT && strstr(status.words, "none") && strstr(status.words, "store"));
    CHECK(forebay_stage_in_start(pool, from, "/none", 0, &stage) == 0 && forebay_stage_stop(stage) == 0);
    CHECK(forebay_stage_wait(stage, NULL) < 0);
    CHECK(forebay_stage_in_start(pool, from, "/none", 77, &stage) == -EINVAL);
    CHECK(forebay_stage_in_start(pool, "", "/none", 0, &stage) == -EINVAL);
    CHECK(forebay_stage_in_start(pool, NULL, "/none", 0, &stage) == -EFAULT && forebay_stage_stop(NULL) == -EFAULT);
    CHECK(forebay_stage_wait(NULL, &status) == -EFAULT && forebay_stage_test(NULL, &status) == -EFAULT);
    CHECK(forebay_unlink(pool, "staged") == 0);
    snprintf(from, sizeof from, "%s/a \"b\":c", dir);
    CHECK(unlink(from) == 0 && unlink(to) == 0 && rmdir(dir) == 0);
}

static void memory(forebay_pool *pool)
{
    static char room[100000];
    forebay_memory *held = NULL;

    CHECK(forebay_memory_register(pool, room + 3, sizeof room - 3, &held) == 0 && held != NULL);
    CHECK(forebay_memory_unregister(held) == 0 && forebay_memory_unregister(NULL) == -EFAULT);
    CHECK(forebay_memory_register(pool, (void *)"only read", 9, &held) == 0 && forebay_memory_unregister(held) == 0);
    held = NULL;
    CHECK(forebay_memory_register(pool, (void *)4096, 9, &held) == -EFAULT && held == NULL);
    CHECK(forebay_memory_register(pool, room, 0, &held) == -EINVAL && forebay_memory_register(NULL, room, 1, &held) == -EFAULT);
    CHECK(forebay_memory_register(pool, NULL, 1, &held) == -EFAULT && forebay_memory_register(pool, room, 1, NULL) == -EFAULT);
}

/* The layout of a file. An open for a descriptor converts it to one backing file. */
static void layouts(forebay_pool *pool)
{
    uint32_t count = 0, bytes = 0;
    forebay_file *file = NULL;
    struct stat st;

    CHECK(forebay_layout_get(pool, "later", &count, &bytes) == 0 && count == 3 && bytes == 4096);
    CHECK(forebay_layout_migrate(pool, "later") == 0);
    CHECK(forebay_layout_get(pool, "later", &count, &bytes) == 0 && count == 1);
    CHECK(forebay_stat(pool, "later", &st) == 0 && st.st_size == PIECES * PIECE);
    CHECK(forebay_layout_get(pool, "none", &count, &bytes) == -ENOENT);
    CHECK(forebay_layout_get(pool, "later", NULL, &bytes) == -EFAULT);
    CHECK(forebay_layout_set(pool, "later", 2, 4096) == -ENOTDIR && forebay_layout_migrate(pool, "/") == -EISDIR);
    CHECK(forebay_layout_set(pool, "/", 5, 8192) == 0 && forebay_layout_set(pool, "/", 5, 8191) == -EINVAL);
    CHECK(forebay_file_open(pool, "callbacks", O_RDWR | O_CREAT, 0600, 0, 0, &file) == 0);
    CHECK(forebay_file_layout(file, &count, &bytes) == 0 && count == 5 && bytes == 8192);
    CHECK(forebay_file_fd(file) == -EOPNOTSUPP && forebay_open(pool, "callbacks", O_RDONLY, 0) == -EBUSY);
    CHECK(forebay_file_pwrite(file, "x", 1, 100000) == 1 && forebay_file_close(file) == 0);
    int fd = forebay_open(pool, "callbacks", O_RDWR, 0);
    char byte = 0;
    CHECK(fd >= 0 && pread(fd, &byte, 1, 100000) == 1 && byte == 'x');
    close(fd);
    CHECK(forebay_layout_set(pool, "/", 1, 4096) == 0);

    /* Targets: the node of a pool of one node has number 1, and one target unless it was given more. */
    uint32_t here[] = {FOREBAY_TARGET(1, 0)}, none[] = {FOREBAY_TARGET(1, 77)}, found[4] = {0};
    uint32_t many[9] = {0};
    CHECK(forebay_mkdir(pool, "placed", 0700) == 0 && forebay_layout_targets(pool, "placed", found, 4) == 0);
    CHECK(forebay_layout_set_on(pool, "placed", 3, 4096, here, 1) == 0);
    CHECK(forebay_layout_targets(pool, "placed", found, 4) == 1 && found[0] == here[0]);
    CHECK(forebay_layout_targets(pool, "placed", NULL, 0) == 1);
    CHECK(forebay_layout_targets(pool, "placed", NULL, 1) == -EFAULT);
    CHECK(forebay_layout_targets(pool, "placed", found, -1) == -EINVAL);
    CHECK(forebay_layout_set_on(pool, "placed", 3, 4096, many, 9) == -EINVAL);
    CHECK(forebay_layout_set_on(pool, "placed", 3, 4096, NULL, 1) == -EFAULT);
    CHECK(forebay_layout_set_on(pool, "placed", 3, 4096, none, 1) == -ENXIO);
    CHECK(forebay_layout_set_on(pool, "placed", 3, 4096, here, -1) == -EINVAL);
    CHECK(forebay_file_open_on(pool, "placed/a", O_RDWR | O_CREAT, 0600, 2, 8192, here, 1, &file) == 0);
    CHECK(forebay_file_layout(file, &count, &bytes) == 0 && count == 2 && bytes == 8192);
    CHECK(forebay_file_pwrite(file, "x", 1, 8192) == 1 && forebay_file_close(file) == 0);
    CHECK(forebay_layout_targets(pool, "placed/a", found, 4) == 1 && found[0] == here[0]);
    CHECK(forebay_file_open_on(pool, "placed/b", O_RDWR | O_CREAT, 0600, 2, 8192, none, 1, &file) == -ENXIO);
    CHECK(forebay_stat(pool, "placed/b", &st) == -ENOENT);
    CHECK(forebay_unlink(pool, "placed/a") == 0);

    /* Width: a directory in a pool of one node cannot be wide. */
    CHECK(forebay_layout_width(pool, "placed") == 1 && forebay_layout_width(pool, "later") == -ENOTDIR);
    CHECK(forebay_layout_width(pool, "none") == -ENOENT && forebay_layout_set_width(pool, "none", 2) == -ENOENT);
    CHECK(forebay_layout_set_width(pool, "placed", 1) == 0 && forebay_layout_set_width(pool, "placed", 2) == -ENXIO);
    CHECK(forebay_layout_set_width(pool, "placed", 1 << 20) == -EINVAL);
    CHECK(forebay_layout_set_width(pool, "later", 2) == -ENOTDIR && forebay_rmdir(pool, "placed") == 0);
    CHECK(forebay_unlink(pool, "callbacks") == 0 && forebay_unlink(pool, "later") == 0);
}

/* The texts about a failed attach. */
static void attach_failures(void)
{
    forebay_pool *none = NULL;
    char words[512];

    CHECK(forebay_attach("/nonexistent/pool", &none) == -EIO && none == NULL);
    CHECK(forebay_attach_error(words, sizeof words) > 10 && strstr(words, "/nonexistent/pool"));
    CHECK(forebay_attach_error(words, 5) > 10 && strlen(words) == 4);
    CHECK(forebay_attach("/x", NULL) == -EFAULT);
}

/* Names and links. Returns a descriptor of d/f. */
static int names(forebay_pool *pool)
{
    struct stat st, by_name;
    char text[64];

    CHECK(forebay_mkdir(pool, "/d", 0755) == 0 && forebay_mkdir(pool, "d", 0755) == -EEXIST);
    int fd = forebay_open(pool, "d/f", O_CREAT | O_EXCL | O_RDWR, 0640);
    CHECK(fd >= 0 && write(fd, "hello", 5) == 5);
    CHECK(forebay_stat(pool, "//d/f", &st) == 0 && st.st_size == 5 && (st.st_mode & 07777) == 0640);
    by_name = st;
    CHECK(forebay_fstat(pool, fd, &st) == 0 && st.st_ino == by_name.st_ino && st.st_dev == by_name.st_dev);
    int other = open("/dev/null", O_RDONLY);
    CHECK(forebay_fstat(pool, other, &st) == 0 && S_ISCHR(st.st_mode) && forebay_fstat(pool, -1, &st) == -EBADF);
    close(other);
    CHECK(forebay_open(pool, "none", O_RDONLY, 0) == -ENOENT && forebay_open(pool, "", O_RDONLY, 0) == -ENOENT);
    CHECK(forebay_open(pool, NULL, O_RDONLY, 0) == -EFAULT && forebay_open(NULL, "/d", O_RDONLY, 0) == -EFAULT);
    CHECK(forebay_stat(pool, "/d", NULL) == -EFAULT && forebay_stat(pool, "d/f/", &st) == -ENOTDIR);
    CHECK(forebay_access(pool, "/d", R_OK | W_OK | X_OK) == 0 && forebay_access(pool, "d/f", X_OK) == -EACCES);

    CHECK(forebay_symlink(pool, "f", "d/l") == 0 && forebay_link(pool, "d/f", "d/h") == 0);
    CHECK(forebay_lstat(pool, "d/l", &st) == 0 && S_ISLNK(st.st_mode));
    CHECK(forebay_stat(pool, "d/l", &st) == 0 && st.st_nlink == 2);
    CHECK(forebay_readlink(pool, "d/l", text, sizeof text) == 1 && text[0] == 'f');
    CHECK(forebay_readlink(pool, "d/f", text, sizeof text) == -EINVAL);
    CHECK(forebay_symlink(pool, "/usr", "out") == 0 && forebay_stat(pool, "out/bin", &st) == -EXDEV);
    CHECK(forebay_stat(pool, "..", &st) == -EXDEV);
    CHECK(forebay_rename(pool, "d/h", "d/g", 0) == 0 && forebay_rename(pool, "d/g", "d/f", 1) == -EEXIST);
    CHECK(forebay_rename(pool, "d/g", NULL, 0) == -EFAULT);

    return fd;
}

/* Attributes of d/f, which `fd` is open for. */
static void attributes(forebay_pool *pool, int fd)
{
    struct stat st;
    char text[64];
    struct timespec times[2] = {{11, 1}, {22, 2}}, bad[2] = {{0, -7}, {0, 0}};
    CHECK(forebay_utimens(pool, "d/f", times, 0) == 0 && forebay_stat(pool, "d/f", &st) == 0);
    CHECK(st.st_atim.tv_sec == 11 && st.st_mtim.tv_nsec == 2 && forebay_utimens(pool, "d/f", bad, 0) == -EINVAL);
    CHECK(forebay_utimens(pool, "d/l", NULL, AT_SYMLINK_NOFOLLOW) == 0 && forebay_utimens(pool, "d/l", NULL, 7) == -EINVAL);
    CHECK(forebay_chmod(pool, "d/f", 0600) == 0 && forebay_chown(pool, "d/f", (uid_t)-1, (gid_t)-1, 0) == 0);
    CHECK(forebay_truncate(pool, "d/f", 2) == 0 && forebay_truncate(pool, "d/f", -1) == -EINVAL);
    CHECK(pread(fd, text, 8, 0) == 2 && close(fd) == 0);
}

static void extended_attributes(forebay_pool *pool)
{
    char text[64];

    CHECK(forebay_setxattr(pool, "d/f", "user.a", "12", 2, XATTR_CREATE, 0) == 0);
    CHECK(forebay_setxattr(pool, "d/f", "user.a", "12", 2, XATTR_CREATE, 0) == -EEXIST);
    CHECK(forebay_getxattr(pool, "d/f", "user.a", NULL, 0, 0) == 2);
    CHECK(forebay_setxattr(pool, "d/f", "user.a", NULL, 2, 0, 0) == -EFAULT && forebay_listxattr(pool, "d/f", NULL, 9, 0) == -EFAULT);
    CHECK(forebay_getxattr(pool, "d/f", "user.a", NULL, 9, 0) == -EFAULT && forebay_readlink(pool, "d/l", NULL, 9) == -EFAULT);
    CHECK(forebay_getxattr(pool, "d/l", "user.a", text, sizeof text, 0) == 2 && memcmp(text, "12", 2) == 0);
    CHECK(forebay_getxattr(pool, "d/l", "user.a", text, sizeof text, AT_SYMLINK_NOFOLLOW) == -ENODATA);
    CHECK(forebay_listxattr(pool, "d/f", text, sizeof text, 0) == 7 && strcmp(text, "user.a") == 0);
    CHECK(forebay_removexattr(pool, "d/f", "user.a", 0) == 0 && forebay_removexattr(pool, "d/f", "user.a", 0) == -ENODATA);
}

static void files(forebay_pool *pool)
{
    forebay_file *file = NULL;
    uint32_t stripes = 0, stripe_bytes = 0;
    char large[40000], back[40000];
    for (size_t i = 0; i < sizeof large; i++)
        large[i] = (char)(i * 7 + i / 4096);
    CHECK(forebay_file_open(pool, "d/s", O_RDWR | O_CREAT | O_EXCL, 0640, 4, 4096, &file) == 0);
    CHECK(forebay_file_layout(file, &stripes, &stripe_bytes) == 0 && stripes == 4 && stripe_bytes == 4096);
    CHECK(forebay_file_elsewhere(file) == 0 && forebay_file_elsewhere(NULL) == -EFAULT);
    CHECK(forebay_file_fd(file) == -EOPNOTSUPP && forebay_file_pwrite(file, large, sizeof large, 123) == sizeof large);
    CHECK(forebay_file_size(file) == 123 + sizeof large && forebay_file_pread(file, back, sizeof back, 123) == sizeof back);
    CHECK(memcmp(large, back, sizeof back) == 0 && forebay_file_pread(file, back, 9, 60000) == 0);
    CHECK(forebay_file_advise(file, FOREBAY_SEQUENTIAL) == 0 && forebay_file_advise(file, 77) == -EINVAL);
    CHECK(forebay_file_pread(file, back, 9, 123) == 9 && forebay_file_pread(file, back, 9, 132) == 9);
    CHECK(memcmp(large + 9, back, 9) == 0 && forebay_file_advise(file, FOREBAY_NORMAL) == 0);
    CHECK(forebay_file_truncate(file, 5000) == 0 && forebay_file_size(file) == 5000 && forebay_file_sync(file) == 0);
    CHECK(forebay_file_allocate(file, 70000) == 0 && forebay_file_size(file) == 70000);
    CHECK(forebay_file_pread(file, back, 9, 6000) == 9 && back[0] == 0 && back[8] == 0);
    CHECK(forebay_file_pread(file, back, 9, -1) == -EINVAL && forebay_file_truncate(file, -1) == -EINVAL);
    CHECK(forebay_file_pread(file, NULL, 9, 0) == -EFAULT && forebay_file_pwrite(file, NULL, 9, 0) == -EFAULT);
    CHECK(forebay_file_pread(file, NULL, 0, 0) == 0 && forebay_file_pwrite(file, NULL, 0, 0) == 0);
    CHECK(forebay_file_pwrite(file, back, 9, INT64_MAX - 8) == -EFBIG && forebay_file_pwrite(file, back, 9, INT64_MAX) == -EFBIG);
    CHECK(forebay_file_size(file) == 70000);
    CHECK(forebay_file_close(file) == 0 && forebay_file_close(NULL) == -EFAULT && forebay_file_size(NULL) == -EFAULT);
    CHECK(forebay_file_open(pool, "d/s", O_RDWR | O_CREAT | O_EXCL, 0640, 4, 4096, &file) == -EEXIST);
    CHECK(forebay_file_open(pool, "d/s", O_RDWR | O_CREAT, 0640, 1, 0, &file) == 0);
    CHECK(forebay_file_layout(file, &stripes, &stripe_bytes) == 0 && stripes == 4);
    CHECK(forebay_file_size(file) == 70000 && forebay_file_close(file) == 0 && forebay_unlink(pool, "d/s") == 0);
    CHECK(forebay_file_open(pool, "d/s", O_RDONLY, 0, 1, 0, &file) == -ENOENT);
    CHECK(forebay_file_open(pool, "d", O_RDONLY, 0, 1, 0, &file) == -EISDIR);
    CHECK(forebay_file_open(pool, "d/s", O_RDWR | O_CREAT, 0640, 4, 5, &file) == -EINVAL);
    CHECK(forebay_file_open(pool, "d/p", O_RDWR | O_CREAT, 0640, 1, 0, &file) == 0 && forebay_file_fd(file) >= 0);
    CHECK(forebay_file_close(file) == 0 && forebay_unlink(pool, "d/p") == 0);
}

static void directories(forebay_pool *pool)
{
    forebay_dir *dir = NULL;
    struct forebay_dirent entry;
    CHECK(forebay_opendir(pool, "d/f", &dir) == -ENOTDIR && dir == NULL);
    CHECK(forebay_opendir(pool, "d", &dir) == 0);
    int count = 0, files = 0;
    uint64_t first = 0, seen = 0;
    while (dir && forebay_readdir(dir, &entry) == 1) {
        if (count++ == 0)
            first = entry.cookie;
        files += entry.kind == 8;
        seen = entry.ino;
    }
    CHECK(count == 3 && files == 2 && seen != 0);
    CHECK(forebay_seekdir(dir, first) == 0 && forebay_readdir(dir, &entry) == 1 && forebay_readdir(dir, &entry) == 1);
    CHECK(forebay_readdir(dir, &entry) == 0 && forebay_closedir(dir) == 0 && forebay_closedir(NULL) == -EFAULT);
}

/* Volumes: `v` of 4 MiB and `w` of 2 MiB, which the harness has made. */
static void volumes(forebay_pool *pool)
{
    enum { V = 4 << 20, W = 2 << 20 };
    forebay_volume *v = NULL, *both = NULL, *none = NULL, *reader = NULL, *thin = NULL;
    char out[100], in[100], words[256];
    struct forebay_run runs[] = {{4090, 30}, {0, 10}, {(1 << 20) - 5, 10}}, beyond = {V - 4, 10};
    uint64_t was = 9, *word;
    void *place = NULL;
    size_t follow = 0;

    for (size_t i = 0; i < sizeof out; i++)
        out[i] = (char)(i + 1);
    CHECK(forebay_volume_open(pool, "v", O_RDWR, &v) == 0 && forebay_volume_size(v) == V);
    CHECK(forebay_volume_open(pool, "none", O_RDWR, &none) == -ENOENT && none == NULL);
    CHECK(forebay_volume_open(pool, "v+1.7:w", O_RDWR, &none) == -EINVAL);
    CHECK(forebay_attach_error(words, sizeof words) > 0 && strstr(words, "specifier 2, `1.7`"));
    CHECK(forebay_volume_open(pool, "v", O_WRONLY, &none) == -EINVAL);
    CHECK(forebay_volume_open(pool, NULL, O_RDWR, &none) == -EFAULT && forebay_volume_open(pool, "v", O_RDWR, NULL) == -EFAULT);

    CHECK(forebay_volume_put(v, out, sizeof out, 5000) == 0 && forebay_volume_get(v, in, sizeof in, 5000) == 0);
    CHECK(memcmp(in, out, sizeof in) == 0);
    CHECK(forebay_volume_putv(v, out, 50, runs, 3) == 0 && forebay_volume_getv(v, in, 50, runs, 3) == 0);
    CHECK(memcmp(in, out, 50) == 0 && forebay_volume_get(v, in, 10, 0) == 0 && memcmp(in, out + 30, 10) == 0);
    CHECK(forebay_volume_put(v, out, 2, V - 1) == -ERANGE && forebay_volume_get(v, in, 1, V) == -ERANGE);
    CHECK(forebay_attach_error(words, sizeof words) == 0); /* not the reason of a call before */
    CHECK(forebay_volume_put(v, out, 1, -1) == -EINVAL && forebay_volume_put(v, NULL, 1, 0) == -EFAULT);
    CHECK(forebay_volume_putv(v, out, 10, &beyond, 1) == -ERANGE && forebay_volume_putv(v, out, 49, runs, 3) == -EINVAL);
    CHECK(forebay_volume_getv(v, in, 9, runs + 1, 1) == -EINVAL && forebay_volume_put(NULL, out, 1, 0) == -EFAULT);

    CHECK(forebay_volume_swap(v, 64, 40, &was) == 0 && was == 0);
    CHECK(forebay_volume_fetch_add(v, 64, 2, &was) == 0 && was == 40);
    CHECK(forebay_volume_cas(v, 64, 7, 8, &was) == 0 && was == 42);
    CHECK(forebay_volume_cas(v, 64, 42, 8, &was) == 0 && was == 42);
    CHECK(forebay_volume_cas(v, 65, 0, 0, &was) == -EINVAL && forebay_volume_swap(v, V, 0, &was) == -ERANGE && was == 42);
    CHECK(forebay_volume_fetch_add(v, 64, 1, NULL) == -EFAULT);
    CHECK(forebay_volume_fence(v) == 0 && forebay_volume_flush(v) == 0);
    CHECK(forebay_volume_discard(v, 0, 0) == -EOPNOTSUPP && forebay_volume_discard(v, 0, 4096) == -EOPNOTSUPP);
    CHECK(forebay_volume_open(pool, "thin", O_RDWR, &thin) == 0 && forebay_volume_size(thin) == (int64_t)1 << 40);
    CHECK(forebay_volume_put(thin, out, 10, (int64_t)1 << 39) == 0);
    CHECK(forebay_volume_get(thin, in, 12, ((int64_t)1 << 39) - 1) == 0 && in[0] == 0 && memcmp(in + 1, out, 10) == 0);
    CHECK(forebay_volume_discard(thin, 0, 0) == 0 && forebay_volume_discard(thin, (int64_t)1 << 39, 4096) == 0);
    CHECK(forebay_volume_get(thin, in, 12, (int64_t)1 << 39) == 0 && in[0] == 0 && in[9] == 0);
    CHECK(forebay_volume_discard(thin, ((int64_t)1 << 40) - 1, 2) == -ERANGE);
    CHECK(forebay_volume_swap(thin, 0, 1, &was) == -EOPNOTSUPP);
    CHECK(forebay_volume_map(thin, 0, &place, &follow) == -EOPNOTSUPP && forebay_volume_close(thin) == 0);
    CHECK(forebay_volume_map(v, 64, &place, &follow) == 0 && follow == V - 64);
    word = place;
    CHECK(word && *word == 8);
    CHECK(forebay_volume_map(v, V, &place, &follow) == -ERANGE);

    CHECK(forebay_volume_open(pool, "v", O_RDONLY, &reader) == 0);
    CHECK(forebay_volume_put(reader, out, 1, 0) == -EBADF && forebay_volume_swap(reader, 0, 1, &was) == -EBADF);
    CHECK(forebay_volume_get(reader, in, 10, 0) == 0 && memcmp(in, out + 30, 10) == 0);
    CHECK(forebay_volume_open(pool, "w+1:v", O_RDWR, &both) == 0 && forebay_volume_size(both) == 2 * W);
    CHECK(forebay_volume_put(both, out, 10, (1 << 20) - 5) == 0 && forebay_volume_get(v, in, 5, 0) == 0);
    CHECK(memcmp(in, out + 5, 5) == 0);

    /* A child has the volumes of its parent. */
    pid_t child = fork();
    if (child == 0)
        _exit(forebay_volume_fetch_add(v, 128, 5, &was) != 0 || forebay_volume_close(v) != 0);
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(status == 0 && forebay_volume_fetch_add(v, 128, 0, &was) == 0 && was == 5);
    CHECK(forebay_volume_close(v) == 0 && forebay_volume_close(both) == 0 && forebay_volume_close(reader) == 0);
    CHECK(forebay_volume_close(NULL) == -EFAULT);
}

/* Memory of the pool and of the program for puts and gets. */
static void memory_for_transfers(forebay_pool *pool)
{
    enum { SIZE = 100000, PAGES = 102400, RANGES = 256, STARTED = 16 };
    forebay_volume *v = NULL;
    forebay_queue *queue = NULL;
    struct forebay_completion done[STARTED];
    static char own[SIZE];
    void *memory = NULL, *other = NULL, *all[RANGES];
    struct forebay_run runs[] = {{4096, 40000}, {200000, SIZE - 40000}};
    int error, started = 0;

    CHECK(forebay_alloc(NULL, SIZE, &memory) == -EFAULT && forebay_alloc(pool, SIZE, NULL) == -EFAULT);
    CHECK(forebay_alloc(pool, 0, &memory) == -EINVAL && memory == NULL);
    CHECK(forebay_alloc(pool, ((size_t)1 << 32) + 1, &memory) == -ENOMEM);
    CHECK(forebay_alloc(pool, SIZE_MAX, &memory) == -ENOMEM && memory == NULL);
    CHECK(forebay_alloc(pool, SIZE, &memory) == 0 && memory && (uintptr_t)memory % 4096 == 0);
    CHECK(forebay_alloc(pool, SIZE, &other) == 0 && other != memory && *(char *)other == 0);
    if (!memory || !other)
        return;

    CHECK(forebay_volume_open(pool, "v", O_RDWR, &v) == 0);
    for (int i = 0; i < SIZE; i++)
        ((char *)memory)[i] = (char)(i * 7);
    CHECK(forebay_volume_put(v, memory, SIZE, 3) == 0 && forebay_volume_get(v, other, SIZE, 3) == 0);
    CHECK(memcmp(memory, other, SIZE) == 0);
    CHECK(forebay_volume_putv(v, memory, SIZE, runs, 2) == 0 && forebay_volume_getv(v, own, SIZE, runs, 2) == 0);
    CHECK(memcmp(memory, own, SIZE) == 0);
    /* The last byte of its last page, and the one behind it. */
    CHECK(forebay_volume_get(v, (char *)memory + 400, PAGES - 400, 0) == 0);
    CHECK(forebay_volume_get(v, (char *)memory + 400, PAGES - 399, 0) == -EFAULT);
    CHECK(forebay_volume_put(v, (char *)memory + PAGES - 1, 2, 0) == -EFAULT);
    CHECK(forebay_volume_getv(v, memory, 2 * SIZE, runs, 2) == -EFAULT);

    CHECK(forebay_register(NULL, own, SIZE) == -EFAULT && forebay_register(pool, NULL, SIZE) == -EFAULT);
    CHECK(forebay_register(pool, own, 0) == -EINVAL && forebay_register(pool, own, SIZE_MAX) == -EINVAL);
    CHECK(forebay_register(pool, (char *)memory + 5, 10) == -EEXIST);
    void *gone = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(gone, 65536);
    CHECK(forebay_register(pool, gone, 65536) == -EFAULT);
    CHECK(forebay_register(pool, own, SIZE) == 0 && forebay_register(pool, own + SIZE - 1, 2) == -EEXIST);
    CHECK(forebay_volume_put(v, own, SIZE, 9) == 0 && forebay_volume_get(v, other, SIZE, 9) == 0);
    CHECK(memcmp(own, other, SIZE) == 0);
    CHECK(forebay_free(own) == -EINVAL && forebay_unregister(memory) == -EINVAL);
    CHECK(forebay_unregister(own + 1) == -EINVAL && forebay_unregister(NULL) == -EFAULT);
    CHECK(forebay_unregister(own) == 0 && forebay_unregister(own) == -EINVAL);

    /* Memory of calls in progress is freed when they have ended, or is not freed. */
    CHECK(forebay_queue_create(0, &queue) == 0);
    for (; started < STARTED; started++)
        CHECK(forebay_volume_put_start(v, memory, SIZE, 4096, queue, NULL) == 0);
    CHECK(forebay_volume_put_start(v, memory, PAGES + 1, 0, queue, NULL) == -EFAULT);
    error = forebay_free(memory);
    CHECK(error == 0 || error == -EBUSY);
    for (int n = 1; started > 0 && n > 0; started -= n) {
        n = forebay_queue_wait(queue, done, STARTED, -1);
        for (int i = 0; i < n; i++)
            CHECK(done[i].result == 0);
    }
    CHECK(error == 0 || forebay_free(memory) == 0);
    CHECK(forebay_free(memory) == -EINVAL && forebay_free(NULL) == -EFAULT && forebay_free(&error) == -EINVAL);
    CHECK(forebay_free((char *)other + 4096) == -EINVAL && forebay_free(other) == 0);

    for (int i = 0; i < RANGES; i++)
        CHECK(forebay_alloc(pool, 1, &all[i]) == 0);
    CHECK(forebay_alloc(pool, 1, &other) == -EMFILE && forebay_register(pool, own, 1) == -EMFILE);
    for (int i = 0; i < RANGES; i++)
        CHECK(forebay_free(all[i]) == 0);
    CHECK(forebay_alloc(pool, 1, &other) == 0 && forebay_free(other) == 0);
    CHECK(forebay_queue_close(queue) == 0 && forebay_volume_close(v) == 0);
}

/* A page that no thread may access until the test has released it: one that does waits. */
static struct {
    char *page;
    _Atomic int reached, released;
} held;

static void wait_at_page(int number, siginfo_t *info, void *context)
{
    (void)context;
    if ((char *)info->si_addr < held.page || (char *)info->si_addr >= held.page + 4096) {
        signal(number, SIG_DFL); /* another fault */
        return;
    }
    held.reached = 1;
    while (!held.released)
        usleep(100);
}

static void hold(char *page)
{
    held.page = page;
    held.reached = held.released = 0;
    if (mprotect(page, 4096, PROT_NONE) != 0)
        abort();
}

static void release(void)
{
    if (mprotect(held.page, 4096, PROT_READ | PROT_WRITE) != 0)
        abort();
    held.released = 1;
}

enum { PUT, GET, PUTV, GETV, KINDS, HELD_BYTES = 65536 };

struct held_call {
    int kind, result;
    forebay_volume *volume;
    char *memory;
};

static void *execute(void *argument)
{
    struct held_call *call = argument;
    struct forebay_run runs[] = {{4096, 40000}, {200000, HELD_BYTES - 40000}};

    switch (call->kind) {
    case PUT:
        call->result = forebay_volume_put(call->volume, call->memory, HELD_BYTES, 0);
        break;
    case GET:
        call->result = forebay_volume_get(call->volume, call->memory, HELD_BYTES, 0);
        break;
    case PUTV:
        call->result = forebay_volume_putv(call->volume, call->memory, HELD_BYTES, runs, 2);
        break;
    default:
        call->result = forebay_volume_getv(call->volume, call->memory, HELD_BYTES, runs, 2);
    }
    return NULL;
}

/* As a callback, takes an I/O thread of the library until the test has released the page. */
static void wait_for_release(void *state, int64_t result)
{
    (void)result;
    *(_Atomic int *)state += 1;
    while (!held.released)
        usleep(100);
}

/* Memory counts as used for as long as a call on it runs, or waits for an I/O thread. */
static void memory_of_calls(forebay_pool *pool)
{
    enum { IO_THREADS = 4 };
    struct sigaction action = {.sa_sigaction = wait_at_page, .sa_flags = SA_SIGINFO}, before;
    struct forebay_completion done;
    forebay_volume *v = NULL;
    forebay_queue *queue = NULL;
    forebay_file *file = NULL;
    void *memory = NULL;
    char *own = mmap(NULL, HELD_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    static _Atomic int waiting;

    waiting = 0;
    sigemptyset(&action.sa_mask);
    sigaction(SIGSEGV, &action, &before);
    CHECK(forebay_volume_open(pool, "v", O_RDWR, &v) == 0 && forebay_queue_create(0, &queue) == 0);
    CHECK(forebay_alloc(pool, HELD_BYTES, &memory) == 0 && forebay_register(pool, own, HELD_BYTES) == 0);
    CHECK(forebay_file_open(pool, "held", O_RDWR | O_CREAT, 0600, 1, 4096, &file) == 0);
    for (int i = 0; i < 2 * KINDS; i++) {
        struct held_call call = {i % KINDS, 1, v, i < KINDS ? memory : own};
        pthread_t thread;

        hold(call.memory + 2 * 4096);
        if (pthread_create(&thread, NULL, execute, &call) != 0)
            abort();
        while (!held.reached)
            usleep(100);
        CHECK((i < KINDS ? forebay_free(memory) : forebay_unregister(own)) == -EBUSY);
        release();
        pthread_join(thread, NULL);
        CHECK(call.result == 0);
    }
    sigaction(SIGSEGV, &before, NULL);

    held.released = 0;
    for (int i = 0; i < IO_THREADS; i++)
        CHECK(forebay_file_write_start(file, own, 1, i, wait_for_release, &waiting, NULL) == 0);
    while (waiting < IO_THREADS)
        usleep(100);
    CHECK(forebay_volume_put_start(v, memory, HELD_BYTES, 0, queue, NULL) == 0);
    CHECK(forebay_volume_get_start(v, own, HELD_BYTES, 0, queue, NULL) == 0);
    CHECK(forebay_free(memory) == -EBUSY && forebay_unregister(own) == -EBUSY);
    held.released = 1;
    for (int i = 0; i < 2; i++)
        CHECK(forebay_queue_wait(queue, &done, 1, -1) == 1 && done.result == 0);
    CHECK(forebay_free(memory) == 0 && forebay_unregister(own) == 0);
    CHECK(forebay_queue_close(queue) == 0 && forebay_volume_close(v) == 0 && forebay_file_close(file) == 0);
    munmap(own, HELD_BYTES);
}

/* Asynchronous calls end once each, with the result of the call, in a queue that waits or spins. */
static void asynchronous(forebay_pool *pool, int flags)
{
    enum { V = 4 << 20, CALLS = 64, BYTES = 50000 };
    static char out[CALLS * BYTES], in[CALLS * BYTES];
    struct forebay_completion done[CALLS];
    forebay_volume *v = NULL, *reader = NULL;
    forebay_queue *queue = NULL, *none = NULL;
    int ended[CALLS] = {0}, count = 0, n;
    uint64_t sum = 0, was = 0;

    for (size_t i = 0; i < sizeof out; i++)
        out[i] = (char)(i * 7 + (size_t)flags);
    CHECK(forebay_queue_create(8, &none) == -EINVAL && none == NULL && forebay_queue_create(flags, NULL) == -EFAULT);
    CHECK(forebay_queue_create(flags, &queue) == 0);
    struct pollfd event = {.fd = forebay_queue_descriptor(queue), .events = POLLIN};
    CHECK(poll(&event, 1, 0) == 0 && forebay_queue_wait(queue, done, CALLS, -1) == 0);
    CHECK(forebay_volume_open(pool, "v", O_RDWR, &v) == 0 && forebay_volume_open(pool, "v", O_RDONLY, &reader) == 0);
    for (int i = 0; i < CALLS; i++)
        CHECK(forebay_volume_put_start(v, out + i * BYTES, BYTES, 4096 + i * BYTES, queue, &ended[i]) == 0);
    while (count < CALLS) {
        CHECK(poll(&event, 1, 60000) == 1);
        CHECK((n = forebay_queue_wait(queue, done, 3, -1)) >= 1 && n <= 3);
        for (int i = 0; i < n; i++) {
            CHECK(done[i].result == 0);
            ++*(int *)done[i].state;
        }
        if (n <= 0)
            break;
        count += n;
    }
    for (int i = 0; i < CALLS; i++)
        CHECK(ended[i] == 1);
    CHECK(poll(&event, 1, 0) == 0 && forebay_queue_wait(queue, done, CALLS, 0) == 0);
    CHECK(forebay_volume_get(v, in, sizeof in, 4096) == 0 && memcmp(in, out, sizeof in) == 0);
    memset(in, 0, sizeof in);
    for (int i = 0; i < CALLS; i++)
        CHECK(forebay_volume_get_start(reader, in + i * BYTES, BYTES, 4096 + i * BYTES, queue, NULL) == 0);
    for (count = 0; count < CALLS && (n = forebay_queue_wait(queue, done, CALLS, 60000)) > 0; count += n)
        ;
    CHECK(count == CALLS && memcmp(in, out, sizeof in) == 0);

    CHECK(forebay_volume_swap(v, 0, 0, &was) == 0);
    for (int i = 0; i < 32; i++)
        CHECK(forebay_volume_fetch_add_start(v, 0, 1, queue, NULL) == 0);
    for (count = 0; count < 32 && (n = forebay_queue_wait(queue, done, CALLS, -1)) > 0; count += n)
        for (int i = 0; i < n; i++)
            sum += done[i].was;
    CHECK(count == 32 && sum == 31 * 32 / 2);
    CHECK(forebay_volume_cas_start(v, 0, 32, 5, queue, NULL) == 0 && forebay_queue_wait(queue, done, 1, -1) == 1);
    CHECK(done[0].result == 0 && done[0].was == 32);
    CHECK(forebay_volume_swap_start(v, 0, 6, queue, NULL) == 0 && forebay_queue_wait(queue, done, 1, -1) == 1);
    CHECK(done[0].was == 5 && forebay_volume_fetch_add(v, 0, 0, &was) == 0 && was == 6);

    /* A call that fails completes, with the error. */
    CHECK(forebay_volume_put_start(v, out, 2, V - 1, queue, out) == 0 && forebay_queue_wait(queue, done, 1, -1) == 1);
    CHECK(done[0].result == -ERANGE && done[0].state == out);
    CHECK(forebay_volume_put_start(reader, out, 1, 0, queue, in) == 0 && forebay_queue_wait(queue, done, 1, -1) == 1);
    CHECK(done[0].result == -EBADF && done[0].state == in);
    CHECK(forebay_volume_swap_start(v, 4, 0, queue, NULL) == 0 && forebay_queue_wait(queue, done, 1, -1) == 1);
    CHECK(done[0].result == -EINVAL);
    CHECK(forebay_volume_put_start(v, NULL, 1, 0, queue, NULL) == -EFAULT);
    CHECK(forebay_volume_put_start(v, out, 1, -1, queue, NULL) == -EINVAL);
    CHECK(forebay_volume_put_start(v, out, 1, 0, NULL, NULL) == -EFAULT);
    CHECK(forebay_queue_wait(queue, NULL, 1, 0) == -EFAULT && forebay_queue_wait(queue, done, 0, 0) == -EINVAL);

    /* To close the volume and the queue does not take the memory from a call. */
    CHECK(forebay_volume_put_start(v, out + 5, sizeof out - 5, 0, queue, NULL) == 0);
    CHECK(forebay_volume_close(v) == 0 && forebay_queue_close(queue) == 0 && forebay_queue_close(NULL) == -EFAULT);
    CHECK(forebay_volume_get(reader, in, sizeof in - 5, 0) == 0 && memcmp(in, out + 5, sizeof in - 5) == 0);
    CHECK(forebay_volume_close(reader) == 0);
}

/* The file in a volume, by the functions on files. */
static void volume_files(forebay_pool *pool)
{
    enum { V = 4 << 20, W = 2 << 20 };
    forebay_file *file = NULL, *same = NULL, *none = NULL, *joined = NULL;
    forebay_volume *v = NULL;
    char out[100], in[100] = "", words[256];
    struct iovec parts[] = {{out, 30}, {out + 30, 70}}, into[] = {{in, 99}, {in + 99, 1}};
    struct forebay_run runs[] = {{5000, 60}, {100, 40}}, beyond = {V - 99, 100};
    uint64_t number = 0, again = 0, group = 0;
    uint32_t count = 0, unit = 0;

    for (size_t i = 0; i < sizeof out; i++)
        out[i] = (char)(i + 1);
    CHECK(forebay_volume_open(pool, "v", O_RDWR, &v) == 0 && forebay_volume_get(v, in, 10, 0) == 0);
    CHECK(forebay_volume_file_open(pool, "v", O_RDWR, &file) == 0 && forebay_file_size(file) == 0);
    CHECK(forebay_file_pread(file, in, 10, 0) == 0); /* puts move no end */
    CHECK(forebay_file_truncate(file, V) == 0 && forebay_file_truncate(file, 0) == 0);
    CHECK(forebay_volume_file_open(pool, "v", O_RDWR | O_CREAT | O_EXCL, &none) == -EEXIST && none == NULL);
    CHECK(forebay_volume_file_open(pool, "none", O_RDWR | O_CREAT, &none) == -ENOENT);
    CHECK(forebay_attach_error(words, sizeof words) > 0 && strstr(words, "no volume `none`"));
    CHECK(forebay_volume_file_open(pool, "1.7:v", O_RDWR, &none) == -EINVAL);
    CHECK(forebay_volume_file_open(pool, "v", O_RDONLY | O_CREAT, &none) == -EINVAL);
    CHECK(forebay_volume_file_open(pool, "v", O_RDWR | O_APPEND, &none) == -EINVAL);
    CHECK(forebay_volume_file_open(pool, NULL, O_RDWR, &none) == -EFAULT);
    CHECK(forebay_volume_file_open(pool, "v", O_RDWR, NULL) == -EFAULT && none == NULL);

    CHECK(forebay_file_write_runs(file, parts, 2, runs, 2) == 100 && forebay_file_size(file) == 5060);
    CHECK(forebay_file_read_runs(file, into, 2, runs, 2) == 100 && memcmp(in, out, 100) == 0);
    CHECK(forebay_volume_get(v, in, 60, 5000) == 0 && memcmp(in, out, 60) == 0);
    CHECK(forebay_file_write_runs(file, parts, 2, &beyond, 1) == -ENOSPC && forebay_file_size(file) == 5060);
    CHECK(forebay_file_truncate(file, V + 1) == -ENOSPC && forebay_file_allocate(file, V + 1) == -ENOSPC);
    CHECK(forebay_file_write_runs(file, parts, 2, runs, 1) == -EINVAL);
    CHECK(forebay_file_pwrite(file, out, 10, 5055) == 10 && forebay_file_size(file) == 5065);
    CHECK(forebay_file_pread(file, in, 100, 5060) == 5 && memcmp(in, out + 5, 5) == 0);
    CHECK(forebay_file_pwritev(file, parts, 2, 6000) == 100 && forebay_file_preadv(file, into, 2, 5950) == 100);
    CHECK(in[0] == 0 && in[49] == 0 && memcmp(in + 50, out, 50) == 0);
    CHECK(forebay_file_allocate(file, 7000) == 0 && forebay_file_size(file) == 7000 && forebay_file_sync(file) == 0);
    CHECK(forebay_file_seek_data(file, 100) == 100 && forebay_file_seek_hole(file, 100) == 7000);
    CHECK(forebay_file_seek_data(file, 7000) == -ENXIO && forebay_file_seek_hole(file, 7000) == -ENXIO);
    CHECK(forebay_file_punch(file, 6010, 1 << 20) == 0 && forebay_file_size(file) == 7000);
    CHECK(forebay_file_pread(file, in, 100, 6000) == 100 && memcmp(in, out, 10) == 0 && in[10] == 0 && in[99] == 0);
    CHECK(forebay_file_advise(file, FOREBAY_SEQUENTIAL) == 0 && forebay_file_advise(file, 77) == -EINVAL);
    CHECK(forebay_file_fd(file) == -EOPNOTSUPP && forebay_file_elsewhere(file) == 0);
    CHECK(forebay_file_group_make(file, 0, &group) == -EOPNOTSUPP && group == 0);
    CHECK(forebay_file_layout(file, &count, &unit) == 0 && count == 1 && unit == 1 << 20);

    forebay_request *request = NULL;
    CHECK(forebay_file_write_start(file, out, 100, 8000, NULL, NULL, &request) == 0);
    CHECK(forebay_request_wait(request) == 100 && forebay_file_size(file) == 8100);
    CHECK(forebay_file_read_start(file, in, 100, 8050, NULL, NULL, &request) == 0);
    CHECK(forebay_request_wait(request) == 50 && memcmp(in, out + 50, 50) == 0);

    CHECK(forebay_volume_file_open(pool, "v", O_RDONLY, &same) == 0 && forebay_file_size(same) == 8100);
    CHECK(forebay_file_number(file, &number) == 0 && forebay_file_number(same, &again) == 0 && number == again);
    CHECK(forebay_file_number(file, NULL) == -EFAULT);
    CHECK(forebay_file_pwrite(same, out, 1, 0) == -EBADF && forebay_file_truncate(same, 0) == -EBADF);
    CHECK(forebay_volume_file_open(pool, "w+v", O_WRONLY | O_CREAT | O_EXCL, &joined) == 0);
    CHECK(forebay_file_number(joined, &again) == 0 && number != again);
    CHECK(forebay_file_pread(joined, in, 1, 0) == -EBADF && forebay_file_pwrite(joined, out, 2, 2 * W - 2) == 2);
    CHECK(forebay_file_close(joined) == 0 && forebay_volume_file_open(pool, "w", O_RDONLY, &joined) == 0);
    CHECK(forebay_file_size(joined) == W); /* the end is behind this volume alone */
    CHECK(forebay_file_close(joined) == 0 && forebay_file_close(same) == 0);

    CHECK(forebay_volume_file_open(pool, "v", O_RDWR | O_TRUNC, &same) == 0 && forebay_file_size(file) == 0);
    CHECK(forebay_volume_get(v, in, 100, 8000) == 0 && in[0] == 0 && in[99] == 0);
    CHECK(forebay_file_close(same) == 0 && forebay_file_close(file) == 0 && forebay_volume_close(v) == 0);
    CHECK(forebay_volume_file_unlink(pool, "v") == 0 && forebay_volume_file_unlink(pool, "v") == -ENOENT);
    CHECK(forebay_volume_file_unlink(pool, NULL) == -EFAULT && forebay_volume_file_unlink(pool, "") == -EINVAL);
    CHECK(forebay_volume_file_open(pool, "v", O_RDWR, &none) == -ENOENT && none == NULL);
}

int main(void)
{
    forebay_pool *pool = NULL;
    struct statvfs space;

    attach_failures();
    CHECK(forebay_attach(NULL, &pool) == 0 && pool != NULL);
    if (!pool)
        return 1;
    attributes(pool, names(pool));
    extended_attributes(pool);
    files(pool);
    CHECK(forebay_statvfs(pool, &space) == 0 && space.f_blocks > 0 && space.f_namemax == 255);
    directories(pool);
    for (uint32_t stripes = 1; stripes <= 3; stripes += 2) {
        runs(pool, stripes);
        holes(pool, stripes);
    }
    memory(pool);
    staging(pool);
    later(pool);
    layouts(pool);
    model(pool);
    const char *has_volumes = getenv("FOREBAY_TEST_VOLUMES");
    if (has_volumes && *has_volumes) {
        volumes(pool);
        memory_for_transfers(pool);
        memory_of_calls(pool);
        asynchronous(pool, 0);
        asynchronous(pool, FOREBAY_QUEUE_SPIN);
        volume_files(pool);
    }

    CHECK(forebay_rmdir(pool, "d") == -ENOTEMPTY && forebay_unlink(pool, "d") == -EISDIR);
    CHECK(forebay_unlink(pool, "d/f") == 0 && forebay_unlink(pool, "d/g") == 0 && forebay_unlink(pool, "d/l") == 0);
    CHECK(forebay_rmdir(pool, "d") == 0 && forebay_unlink(pool, "out") == 0 && forebay_rmdir(pool, "d") == -ENOENT);
    CHECK(strcmp(forebay_strerror(-ENOENT), forebay_strerror(ENOENT)) == 0 && strlen(forebay_strerror(99999)) > 0);
    return failures != 0;
}
