/* The calls of forebay.h for files in front of a backing store. Arguments: the pool, the store's directory. */

#include <errno.h>
#include <fcntl.h>
#include <forebay.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition)                                                                                              \
    do {                                                                                                              \
        if (!(condition)) {                                                                                           \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                                                  \
            exit(1);                                                                                                  \
        }                                                                                                             \
    } while (0)

static forebay_pool *pool;
static const char *store;

static int state_of(const char *path) {
    struct forebay_path_state state;
    CHECK(forebay_state(pool, path, &state) == 0);
    return state.state;
}

static void check_stored(const char *name, const char *content) {
    char path[4096], found[256] = "";
    snprintf(path, sizeof path, "%s/%s", store, name);
    FILE *file = fopen(path, "r");
    CHECK(file != NULL);
    size_t n = fread(found, 1, sizeof found - 1, file);
    fclose(file);
    CHECK(n == strlen(content) && memcmp(found, content, n) == 0);
}

int main(int argc, char **argv) {
    struct forebay_path_state state;
    struct stat st;
    CHECK(argc == 3 && forebay_attach(argv[1], &pool) == 0);
    store = argv[2];

    CHECK(state_of("/") == FOREBAY_UNATTACHED);
    CHECK(forebay_wait_durable(pool, "/", 0) == -ENODATA && forebay_state(pool, "/none", &state) == -ENOENT);
    CHECK(forebay_state(pool, "/s", NULL) == -EFAULT && forebay_sync(pool, "/s") == -EISDIR);

    /* Open for writing: dirty, also after it was copied. */
    int fd = forebay_open(pool, "/s/f", O_CREAT | O_RDWR, 0644);
    CHECK(fd >= 0 && write(fd, "hello", 5) == 5);
    CHECK(forebay_state(pool, "/s/f", &state) == 0);
    CHECK(state.state == FOREBAY_DIRTY && !state.durable && !state.conflict && !state.pinned && state.stored_bytes == -1);
    CHECK(forebay_wait_durable(pool, "/s/f", 10) == -ETIMEDOUT);
    CHECK(forebay_sync(pool, "/s/f") == 0);
    check_stored("f", "hello");
    CHECK(forebay_state(pool, "/s/f", &state) == 0 && state.stored_bytes == 5 && state.stored_mtime_s > 0);
    CHECK(state.state == FOREBAY_DIRTY && !state.durable && forebay_release(pool, "/s/f") == -EBUSY);

    /* Closed: clean. */
    CHECK(close(fd) == 0 && forebay_sync(pool, "/s/f") == 0 && forebay_wait_durable(pool, "/s/f", 60000) == 0);
    CHECK(forebay_state(pool, "/s/f", &state) == 0 && state.state == FOREBAY_CLEAN && state.durable == 1);
    uint64_t epoch = state.epoch;

    /* Pinned, released, prestaged. */
    CHECK(forebay_pin(pool, "/s/f", 1) == 0 && forebay_release(pool, "/s/f") == -EBUSY);
    CHECK(forebay_state(pool, "/s/f", &state) == 0 && state.pinned == 1 && forebay_pin(pool, "/s/f", 0) == 0);
    CHECK(forebay_release(pool, "/s/f") == 0 && state_of("/s/f") == FOREBAY_RELEASED);
    CHECK(forebay_release(pool, "/s/f") == 0 && forebay_stat(pool, "/s/f", &st) == 0 && st.st_size == 5);
    CHECK(state_of("/s/f") == FOREBAY_RELEASED && forebay_wait_durable(pool, "/s/f", 0) == 0);
    CHECK(forebay_prestage(pool, "/s/f") == 0 && state_of("/s/f") == FOREBAY_CLEAN);
    CHECK(forebay_state(pool, "/s/f", &state) == 0 && state.epoch > epoch);

    /* A name that the store does not have yet. */
    CHECK(forebay_rename(pool, "/s/f", "/s/g", 0) == 0 && forebay_state(pool, "/s/g", &state) == 0 && !state.durable);
    CHECK(forebay_sync(pool, "/s/g") == 0 && forebay_wait_durable(pool, "/s/g", 60000) == 0);
    check_stored("g", "hello");

    /* forebay_file_sync waits, as the directory is attached so. */
    forebay_file *file;
    CHECK(forebay_file_open(pool, "/s/h", O_CREAT | O_RDWR, 0644, 0, 0, &file) == 0);
    CHECK(forebay_file_pwrite(file, "part", 4, 0) == 4 && forebay_file_sync(file) == 0);
    check_stored("h", "part");
    CHECK(forebay_file_close(file) == 0);
    return 0;
}
