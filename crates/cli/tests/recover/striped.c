/* Writes a file of three backing files: BYTES bytes, of which those in the middle are a hole. Arguments: the pool, the
 * path, and `sync` to have it synced. */

#include <fcntl.h>
#include <forebay.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BYTES 1000003
#define HOLE_START 300000
#define HOLE_END 600000

#define CHECK(condition)                                                                                              \
    do {                                                                                                              \
        if (!(condition)) {                                                                                           \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                                                  \
            exit(1);                                                                                                  \
        }                                                                                                             \
    } while (0)

int main(int argc, char **argv) {
    static unsigned char bytes[BYTES];
    forebay_pool *pool;
    forebay_file *file;
    uint32_t stripes = 0, stripe_bytes = 0;
    CHECK(argc == 4 && forebay_attach(argv[1], &pool) == 0);
    CHECK(forebay_file_open(pool, argv[2], O_CREAT | O_EXCL | O_RDWR, 0640, 3, 65536, &file) == 0);
    CHECK(forebay_file_layout(file, &stripes, &stripe_bytes) == 0 && stripes == 3 && stripe_bytes == 65536);
    for (int i = 0; i < BYTES; i++)
        bytes[i] = (unsigned char)(i % 251 + 1);
    CHECK(forebay_file_pwrite(file, bytes, HOLE_START, 0) == HOLE_START);
    CHECK(forebay_file_pwrite(file, bytes + HOLE_END, BYTES - HOLE_END, HOLE_END) == BYTES - HOLE_END);
    CHECK(strcmp(argv[3], "sync") != 0 || forebay_file_sync(file) == 0);
    CHECK(forebay_file_close(file) == 0);
    return 0;
}
