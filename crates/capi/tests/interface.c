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
#define CHECK(holds)                                                     \
    do {                                                                 \
        errno = 123;                                                     \
        if (!(holds)) {                                                  \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #holds);  \
            failures++;                                                  \
        } else if (errno != 123) {                                       \
            fprintf(stderr, "%s:%d: errno moved\n", __FILE__, __LINE__); \
            failures++;                                                  \
        }                                                                \
    } while (0)

enum { PIECES = 64, PIECE = 5000 };

#include "model.h"
#include "volumes.h"

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
