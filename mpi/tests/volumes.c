/*
 * Files in volumes: volumes VOLUME OTHER BYTES, for volumes of BYTES bytes, a multiple of 1 MiB, in which no file was
 * created before. volumes VOLUME left: what the first left.
 */
#include "check.h"

#include <stdbool.h>

static char name[256], other[256], xpd[256], joined[600];
static MPI_Offset all;

static MPI_File opened(const char *path, int amode) {
    MPI_File file = MPI_FILE_NULL;
    OK(MPI_File_open(MPI_COMM_WORLD, path, amode, MPI_INFO_NULL, &file));
    return file;
}

static void refused(int class, const char *path, int amode) {
    MPI_File file = MPI_FILE_NULL;
    int got = class_of(MPI_File_open(MPI_COMM_WORLD, path, amode, MPI_INFO_NULL, &file));
    if (got != class || file != MPI_FILE_NULL) {
        failures++;
        printf("rank %d: open of %s: class %d, not %d\n", rank, path, got, class);
    }
}

static MPI_Offset size_of(MPI_File file) {
    MPI_Offset bytes = -1;
    OK(MPI_File_get_size(file, &bytes));
    return bytes;
}

static bool is_zero(MPI_File file, MPI_Offset from, int bytes) {
    unsigned char *data = malloc(bytes);
    memset(data, 7, bytes);
    MPI_Status status;
    int count = 0, nonzero = 0;
    OK(MPI_File_read_at(file, from, data, bytes, MPI_BYTE, &status));
    MPI_Get_count(&status, MPI_BYTE, &count);
    for (int i = 0; i < count; i++)
        nonzero += data[i] != 0;
    free(data);
    return count == bytes && nonzero == 0;
}

static void barrier(void) { MPI_Barrier(MPI_COMM_WORLD); }

/* A new volume is an empty file that nobody has created. */
static void first_open(void) {
    MPI_File file = opened(name, MPI_MODE_RDWR);
    CHECK(size_of(file) == 0);
    OK(MPI_File_close(&file));
    file = opened(name, MPI_MODE_RDWR | MPI_MODE_CREATE | MPI_MODE_EXCL);
    OK(MPI_File_close(&file));
    refused(MPI_ERR_FILE_EXISTS, name, MPI_MODE_RDWR | MPI_MODE_CREATE | MPI_MODE_EXCL);
}

static void names(void) {
    refused(MPI_ERR_NO_SUCH_FILE, "forebay:there is none", MPI_MODE_RDWR);
    refused(MPI_ERR_NO_SUCH_FILE, "forebay:there is none", MPI_MODE_RDWR | MPI_MODE_CREATE);
    refused(MPI_ERR_BAD_FILE, "forebay:", MPI_MODE_RDWR);
    refused(MPI_ERR_BAD_FILE, "forebay:no/specifier", MPI_MODE_RDWR);
    refused(MPI_ERR_BAD_FILE, "forebay:60000:v", MPI_MODE_RDWR | MPI_MODE_CREATE);
    FAILS(MPI_ERR_NO_SUCH_FILE, MPI_File_delete("forebay:there is none", MPI_INFO_NULL));
    FAILS(MPI_ERR_BAD_FILE, MPI_File_delete("forebay:a:b:c", MPI_INFO_NULL));
    if (size > 1)
        refused(MPI_ERR_NOT_SAME, rank == 0 ? name : other, MPI_MODE_RDWR);
    /* Different names of one volume, and another prefix. */
    MPI_File file = opened(rank == 0 ? name : xpd, MPI_MODE_RDWR);
    int word = 17, back = 0;
    if (rank == size - 1)
        OK(MPI_File_write_at(file, 3, &word, 1, MPI_INT, MPI_STATUS_IGNORE));
    OK(MPI_File_close(&file));
    file = opened(xpd, MPI_MODE_RDONLY);
    OK(MPI_File_read_at(file, 3, &back, 1, MPI_INT, MPI_STATUS_IGNORE));
    CHECK(back == 17 && size_of(file) == 3 + (MPI_Offset)sizeof word && is_zero(file, 0, 3));
    OK(MPI_File_close(&file));
}

/* The end is common to all, outlasts a close, and what is skipped reads as zeros also where there were data. */
static void ends(void) {
    MPI_File file = opened(name, MPI_MODE_RDWR);
    enum { BLOCK = 10000 };
    unsigned char *block = malloc(BLOCK);
    memset(block, 'x', BLOCK);
    MPI_Offset at = (MPI_Offset)(size - 1 - rank) * BLOCK, position = -1;
    OK(MPI_File_write_at(file, at, block, BLOCK, MPI_BYTE, MPI_STATUS_IGNORE));
    barrier();
    CHECK(size_of(file) == (MPI_Offset)size * BLOCK);
    OK(MPI_File_seek(file, -100, MPI_SEEK_END));
    OK(MPI_File_get_position(file, &position));
    CHECK(position == (MPI_Offset)size * BLOCK - 100);
    MPI_Status status;
    int count = -1;
    OK(MPI_File_read(file, block, BLOCK, MPI_BYTE, &status));
    MPI_Get_count(&status, MPI_BYTE, &count);
    CHECK(count == 100 && block[99] == 'x');
    OK(MPI_File_close(&file));
    file = opened(name, MPI_MODE_WRONLY | MPI_MODE_APPEND);
    OK(MPI_File_get_position(file, &position));
    CHECK(position == (MPI_Offset)size * BLOCK);
    /* Each rank appends a record by the shared pointer. */
    OK(MPI_File_write_shared(file, block, 10, MPI_BYTE, MPI_STATUS_IGNORE));
    barrier();
    CHECK(size_of(file) == (MPI_Offset)size * (BLOCK + 10));
    OK(MPI_File_close(&file));
    file = opened(name, MPI_MODE_RDWR);
    OK(MPI_File_set_size(file, 50));
    CHECK(size_of(file) == 50);
    OK(MPI_File_set_size(file, 5000));
    CHECK(size_of(file) == 5000 && is_zero(file, 50, 4950));
    OK(MPI_File_preallocate(file, 9000));
    CHECK(size_of(file) == 9000 && is_zero(file, 5000, 4000));
    OK(MPI_File_close(&file));
    if (rank == 0)
        OK(MPI_File_delete(name, MPI_INFO_NULL));
    barrier();
    refused(MPI_ERR_NO_SUCH_FILE, name, MPI_MODE_RDWR);
    FAILS(MPI_ERR_NO_SUCH_FILE, MPI_File_delete(name, MPI_INFO_NULL));
    file = opened(name, MPI_MODE_RDWR | MPI_MODE_CREATE | MPI_MODE_EXCL);
    CHECK(size_of(file) == 0);
    barrier();
    if (rank == 0)
        OK(MPI_File_write_at(file, 20000, "end", 3, MPI_BYTE, MPI_STATUS_IGNORE));
    barrier();
    CHECK(size_of(file) == 20003 && is_zero(file, 0, 20000));
    OK(MPI_File_close(&file));
    free(block);
}

static void too_small(void) {
    MPI_File file = opened(name, MPI_MODE_RDWR);
    MPI_Offset before = size_of(file);
    barrier();
    char bytes[100] = "too much", back[100];
    FAILS(MPI_ERR_NO_SPACE, MPI_File_write_at(file, all - 99, bytes, 100, MPI_BYTE, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_NO_SPACE, MPI_File_write_at_all(file, all, bytes, 1, MPI_BYTE, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_NO_SPACE, MPI_File_set_size(file, all + 1));
    FAILS(MPI_ERR_NO_SPACE, MPI_File_preallocate(file, all + 1));
    barrier();
    CHECK(size_of(file) == before);
    barrier();
    if (rank == 0)
        OK(MPI_File_write_at(file, all - 100, bytes, 100, MPI_BYTE, MPI_STATUS_IGNORE));
    barrier();
    OK(MPI_File_read_at(file, all - 100, back, 100, MPI_BYTE, MPI_STATUS_IGNORE));
    CHECK(size_of(file) == all && memcmp(bytes, back, 100) == 0);
    OK(MPI_File_close(&file));
}

/* Joined volumes have the end of the first. Their ranks write records in turn, also through aggregators. */
static void joins(void) {
    for (int together = 0; together < 2; together++) {
        if (rank == 0 && together == 0)
            OK(MPI_File_delete(name, MPI_INFO_NULL));
        barrier();
        MPI_Info info;
        MPI_Info_create(&info);
        MPI_Info_set(info, "romio_cb_write", together ? "enable" : "disable");
        MPI_Info_set(info, "romio_cb_read", together ? "enable" : "disable");
        MPI_File file = MPI_FILE_NULL;
        OK(MPI_File_open(MPI_COMM_WORLD, joined, MPI_MODE_RDWR | MPI_MODE_CREATE | MPI_MODE_DELETE_ON_CLOSE, info, &file));
        MPI_Info_free(&info);
        CHECK(size_of(file) == 0);
        enum { RECORD = 1000 };
        int count = (int)(all / RECORD / size), bytes = RECORD * count;
        MPI_Datatype record, turn;
        MPI_Type_contiguous(RECORD, MPI_BYTE, &record);
        MPI_Type_create_resized(record, 0, RECORD * size, &turn);
        MPI_Type_commit(&turn);
        OK(MPI_File_set_view(file, RECORD * rank, MPI_BYTE, turn, "native", MPI_INFO_NULL));
        unsigned char *data = malloc(bytes), *back = calloc(bytes, 1);
        for (int i = 0; i < bytes; i++)
            data[i] = (unsigned char)(i / 7 + i + rank * 31);
        OK(MPI_File_write_at_all(file, 0, data, bytes, MPI_BYTE, MPI_STATUS_IGNORE));
        barrier();
        CHECK(size_of(file) == (MPI_Offset)bytes * size);
        OK(MPI_File_read_at_all(file, 0, back, bytes, MPI_BYTE, MPI_STATUS_IGNORE));
        CHECK(memcmp(data, back, bytes) == 0);
        MPI_Type_free(&record);
        MPI_Type_free(&turn);
        free(data);
        free(back);
        OK(MPI_File_close(&file));
        refused(MPI_ERR_NO_SUCH_FILE, joined, MPI_MODE_RDWR);
        barrier();
    }
}

static void leave(void) {
    MPI_File file = opened(name, MPI_MODE_RDWR | MPI_MODE_CREATE);
    OK(MPI_File_write_ordered(file, "0123456789", 10, MPI_BYTE, MPI_STATUS_IGNORE));
    OK(MPI_File_sync(file));
    OK(MPI_File_close(&file));
}

static void find_left(void) {
    MPI_File file = opened(name, MPI_MODE_RDONLY);
    char back[11] = "";
    CHECK(size_of(file) == (MPI_Offset)size * 10);
    OK(MPI_File_read_at(file, rank * 10, back, 10, MPI_BYTE, MPI_STATUS_IGNORE));
    CHECK(strcmp(back, "0123456789") == 0);
    FAILS(MPI_ERR_READ_ONLY, MPI_File_set_size(file, 1));
    OK(MPI_File_close(&file));
}

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 3 && argc != 4)
        return 2;
    snprintf(name, sizeof name, "forebay:%s", argv[1]);
    if (argc == 3) {
        find_left();
        return end();
    }
    snprintf(other, sizeof other, "forebay:%s", argv[2]);
    snprintf(xpd, sizeof xpd, "xpd:%s", argv[1]);
    snprintf(joined, sizeof joined, "forebay:%s+%s", argv[1], argv[2]);
    all = atoll(argv[3]);
    first_open();
    names();
    ends();
    too_small();
    joins();
    leave();
    return end();
}
