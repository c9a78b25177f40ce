/*
 * The forms for large counts (MPI 4): each once, then counts of more than 2^31 bytes. counts POOL_FILE [huge]
 *
 * The huge data take 64 MiB of memory, mapped at many addresses, and are in the file once.
 */
#define _GNU_SOURCE
#include "check.h"

#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

static char name[4096];

static MPI_File open_with(const char *cb) {
    MPI_File file = MPI_FILE_NULL;
    MPI_Info info;
    MPI_Info_create(&info);
    MPI_Info_set(info, "romio_cb_write", cb);
    MPI_Info_set(info, "romio_cb_read", cb);
    OK(MPI_File_open(MPI_COMM_WORLD, name, MPI_MODE_RDWR | MPI_MODE_CREATE | MPI_MODE_DELETE_ON_CLOSE, info, &file));
    MPI_Info_free(&info);
    return file;
}

enum { WORDS = 6 };

static int64_t got(const MPI_Status *status) {
    MPI_Count count = -1;
    MPI_Get_count_c(status, MPI_INT, &count);
    return count;
}

/* Checks the data that a call has read, or that another call reads after a write. */
static void expect(MPI_File file, MPI_Offset at, const int *expected, const char *what) {
    int back[WORDS] = {0};
    OK(MPI_File_read_at(file, at, back, WORDS, MPI_INT, MPI_STATUS_IGNORE));
    if (memcmp(back, expected, sizeof back) != 0) {
        failures++;
        printf("rank %d: %s moved other data\n", rank, what);
    }
}

static void fill(int *words) {
    static int turn;
    turn++;
    for (int i = 0; i < WORDS; i++)
        words[i] = turn * 1000 + rank * 100 + i;
}

#define WROTE(at, what)                                                                                                \
    do {                                                                                                               \
        CHECK(got(&status) == WORDS);                                                                                  \
        expect(file, at, mine, what);                                                                                  \
        fill(mine);                                                                                                    \
    } while (0)
#define READ(what)                                                                                                     \
    do {                                                                                                               \
        CHECK(got(&status) == WORDS);                                                                                  \
        if (memcmp(back, last, sizeof back) != 0) {                                                                    \
            failures++;                                                                                                \
            printf("rank %d: %s read other data\n", rank, what);                                                       \
        }                                                                                                              \
        memset(back, 0, sizeof back);                                                                                  \
    } while (0)

/* By offset and by the individual pointer: each rank uses a range of its own. */
static void own_places(const char *cb) {
    MPI_File file = open_with(cb);
    MPI_Status status;
    MPI_Request request;
    MPI_Offset at = (MPI_Offset)rank * WORDS;
    const MPI_Count n = WORDS;
    int mine[WORDS], last[WORDS], back[WORDS] = {0};
    fill(mine);
    OK(MPI_File_set_view(file, 0, MPI_INT, MPI_INT, "native", MPI_INFO_NULL));
    MPI_Count extent = 0;
    OK(MPI_File_get_type_extent_c(file, MPI_DOUBLE, &extent));
    CHECK(extent == 8);
    OK(MPI_File_write_at_c(file, at, mine, n, MPI_INT, &status));
    WROTE(at, "write_at_c");
    OK(MPI_File_write_at_all_c(file, at, mine, n, MPI_INT, &status));
    WROTE(at, "write_at_all_c");
    OK(MPI_File_iwrite_at_c(file, at, mine, n, MPI_INT, &request));
    MPI_Wait(&request, &status);
    WROTE(at, "iwrite_at_c");
    OK(MPI_File_iwrite_at_all_c(file, at, mine, n, MPI_INT, &request));
    MPI_Wait(&request, &status);
    WROTE(at, "iwrite_at_all_c");
    OK(MPI_File_write_at_all_begin_c(file, at, mine, n, MPI_INT));
    OK(MPI_File_write_at_all_end(file, mine, &status));
    WROTE(at, "write_at_all_begin_c");
    OK(MPI_File_seek(file, at, MPI_SEEK_SET));
    OK(MPI_File_write_c(file, mine, n, MPI_INT, &status));
    WROTE(at, "write_c");
    OK(MPI_File_seek(file, at, MPI_SEEK_SET));
    OK(MPI_File_write_all_c(file, mine, n, MPI_INT, &status));
    WROTE(at, "write_all_c");
    OK(MPI_File_seek(file, at, MPI_SEEK_SET));
    OK(MPI_File_iwrite_c(file, mine, n, MPI_INT, &request));
    MPI_Wait(&request, &status);
    WROTE(at, "iwrite_c");
    OK(MPI_File_seek(file, at, MPI_SEEK_SET));
    OK(MPI_File_iwrite_all_c(file, mine, n, MPI_INT, &request));
    MPI_Wait(&request, &status);
    WROTE(at, "iwrite_all_c");
    OK(MPI_File_seek(file, at, MPI_SEEK_SET));
    OK(MPI_File_write_all_begin_c(file, mine, n, MPI_INT));
    OK(MPI_File_write_all_end(file, mine, &status));
    memcpy(last, mine, sizeof last);
    WROTE(at, "write_all_begin_c");

    OK(MPI_File_read_at_c(file, at, back, n, MPI_INT, &status));
    READ("read_at_c");
    OK(MPI_File_read_at_all_c(file, at, back, n, MPI_INT, &status));
    READ("read_at_all_c");
    OK(MPI_File_iread_at_c(file, at, back, n, MPI_INT, &request));
    MPI_Wait(&request, &status);
    READ("iread_at_c");
    OK(MPI_File_iread_at_all_c(file, at, back, n, MPI_INT, &request));
    MPI_Wait(&request, &status);
    READ("iread_at_all_c");
    OK(MPI_File_read_at_all_begin_c(file, at, back, n, MPI_INT));
    OK(MPI_File_read_at_all_end(file, back, &status));
    READ("read_at_all_begin_c");
    OK(MPI_File_seek(file, at, MPI_SEEK_SET));
    OK(MPI_File_read_c(file, back, n, MPI_INT, &status));
    READ("read_c");
    OK(MPI_File_seek(file, at, MPI_SEEK_SET));
    OK(MPI_File_read_all_c(file, back, n, MPI_INT, &status));
    READ("read_all_c");
    OK(MPI_File_seek(file, at, MPI_SEEK_SET));
    OK(MPI_File_iread_c(file, back, n, MPI_INT, &request));
    MPI_Wait(&request, &status);
    READ("iread_c");
    OK(MPI_File_seek(file, at, MPI_SEEK_SET));
    OK(MPI_File_iread_all_c(file, back, n, MPI_INT, &request));
    MPI_Wait(&request, &status);
    READ("iread_all_c");
    OK(MPI_File_seek(file, at, MPI_SEEK_SET));
    OK(MPI_File_read_all_begin_c(file, back, n, MPI_INT));
    OK(MPI_File_read_all_end(file, back, &status));
    READ("read_all_begin_c");
    FAILS(MPI_ERR_COUNT, MPI_File_write_at_c(file, at, mine, -1, MPI_INT, &status));
    FAILS(MPI_ERR_COUNT, MPI_File_read_at_c(file, at, back, INT64_MAX / 2, MPI_INT, &status));
    OK(MPI_File_close(&file));
}

/* By the shared pointer: a rank's words stay together, in any order of ranks; then in rank order. */
static void shared_places(void) {
    MPI_File file = open_with("automatic");
    MPI_Status status;
    MPI_Request request;
    const MPI_Count n = WORDS;
    int mine[WORDS], back[WORDS] = {0};
    OK(MPI_File_set_view(file, 0, MPI_INT, MPI_INT, "native", MPI_INFO_NULL));
    for (int i = 0; i < WORDS; i++)
        mine[i] = rank * 100 + i;
    OK(MPI_File_write_shared_c(file, mine, n, MPI_INT, &status));
    CHECK(got(&status) == WORDS);
    OK(MPI_File_iwrite_shared_c(file, mine, n, MPI_INT, &request));
    MPI_Wait(&request, &status);
    CHECK(got(&status) == WORDS);
    MPI_Barrier(MPI_COMM_WORLD);
    OK(MPI_File_seek_shared(file, 0, MPI_SEEK_SET));
    int own[2], all[2];
    OK(MPI_File_read_shared_c(file, back, n, MPI_INT, &status));
    CHECK(got(&status) == WORDS && back[0] % 100 == 0 && back[WORDS - 1] == back[0] + WORDS - 1);
    own[0] = back[0];
    OK(MPI_File_iread_shared_c(file, back, n, MPI_INT, &request));
    MPI_Wait(&request, &status);
    CHECK(got(&status) == WORDS && back[0] % 100 == 0 && back[WORDS - 1] == back[0] + WORDS - 1);
    own[1] = back[0];
    MPI_Allreduce(own, all, 2, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    CHECK(all[0] + all[1] == 100 * size * (size - 1)); /* each rank's words are there twice */
    MPI_Barrier(MPI_COMM_WORLD);
    OK(MPI_File_seek_shared(file, 0, MPI_SEEK_SET));
    OK(MPI_File_write_ordered_c(file, mine, n, MPI_INT, &status));
    CHECK(got(&status) == WORDS);
    OK(MPI_File_write_ordered_begin_c(file, mine, n, MPI_INT));
    OK(MPI_File_write_ordered_end(file, mine, &status));
    CHECK(got(&status) == WORDS);
    MPI_Barrier(MPI_COMM_WORLD);
    for (int half = 0; half < 2; half++)
        expect(file, (MPI_Offset)(half * size + rank) * WORDS, mine, "write_ordered_c");
    MPI_Barrier(MPI_COMM_WORLD);
    OK(MPI_File_seek_shared(file, 0, MPI_SEEK_SET));
    OK(MPI_File_read_ordered_c(file, back, n, MPI_INT, &status));
    CHECK(got(&status) == WORDS && memcmp(back, mine, sizeof back) == 0);
    memset(back, 0, sizeof back);
    OK(MPI_File_read_ordered_begin_c(file, back, n, MPI_INT));
    OK(MPI_File_read_ordered_end(file, back, &status));
    CHECK(got(&status) == WORDS && memcmp(back, mine, sizeof back) == 0);
    OK(MPI_File_close(&file));
}

enum { PERIOD = 64 << 20, COPIES = 33 };
static const MPI_Count HUGE_BYTES = (MPI_Count)PERIOD * 32 + 12345; /* more than 2^31 */

static unsigned char byte_at(int64_t at) {
    at %= PERIOD;
    return (unsigned char)(at * 13 + at / 4096 + at / (1 << 20) * 7);
}

/* COPIES * PERIOD bytes of address space that map the same PERIOD bytes repeatedly. */
static unsigned char *pages(void) {
    int fd = memfd_create("counts", MFD_CLOEXEC);
    unsigned char *base = mmap(NULL, (size_t)PERIOD * COPIES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int good = fd >= 0 && ftruncate(fd, PERIOD) == 0 && base != MAP_FAILED;
    for (int i = 0; i < COPIES && good; i++)
        good = mmap(base + (size_t)i * PERIOD, PERIOD, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED;
    if (fd >= 0)
        close(fd);
    CHECK(good);
    return good ? base : NULL;
}

static int64_t got_bytes(const MPI_Status *status) {
    MPI_Count count = -1;
    MPI_Get_count_c(status, MPI_BYTE, &count);
    return count;
}

static void check_file(MPI_File file) {
    static const int64_t places[] = {0, PERIOD - 3, 0x7ffffff0, (int64_t)PERIOD * 32 - 5, (int64_t)PERIOD * 32 + 12345 - 40};
    unsigned char back[40];
    MPI_Offset bytes = 0;
    OK(MPI_File_get_size(file, &bytes));
    CHECK(bytes == HUGE_BYTES);
    for (size_t p = 0; p < sizeof places / sizeof *places; p++) {
        OK(MPI_File_read_at(file, places[p], back, sizeof back, MPI_BYTE, MPI_STATUS_IGNORE));
        int wrong = 0;
        for (size_t i = 0; i < sizeof back; i++)
            wrong += back[i] != byte_at(places[p] + (int64_t)i);
        CHECK(wrong == 0);
    }
}

/* Rank 0 has all the data: by count, and by a datatype of a large count; alone, or through aggregators. */
static void huge(const char *cb) {
    unsigned char *data = rank == 0 ? pages() : NULL;
    MPI_Count count = rank == 0 ? HUGE_BYTES : 0;
    MPI_Datatype all;
    MPI_Status status;
    if (rank == 0 && data == NULL)
        MPI_Abort(MPI_COMM_WORLD, 1);
    for (int64_t i = 0; data != NULL && i < PERIOD; i++)
        data[i] = byte_at(i);
    MPI_File file = open_with(cb);
    OK(MPI_File_write_at_all_c(file, 0, data, count, MPI_BYTE, &status));
    CHECK(got_bytes(&status) == count);
    MPI_Barrier(MPI_COMM_WORLD);
    check_file(file);
    if (data != NULL)
        memset(data, 0, PERIOD);
    OK(MPI_File_read_at_all_c(file, 0, data, count, MPI_BYTE, &status));
    CHECK(got_bytes(&status) == count);
    /*
     * The pages hold the last data read: the last bytes of the file at their beginning, then those of the round before.
     */
    long wrong = 0;
    for (int64_t i = 0; data != NULL && i < PERIOD; i++)
        wrong += data[i] != byte_at(i);
    CHECK(wrong == 0);
    /* The same as one element of a datatype. */
    MPI_Type_contiguous_c(HUGE_BYTES, MPI_BYTE, &all);
    MPI_Type_commit(&all);
    OK(MPI_File_write_at_all(file, 0, data, rank == 0, all, &status));
    CHECK(got_bytes(&status) == count);
    MPI_Barrier(MPI_COMM_WORLD);
    check_file(file);
    MPI_Count extent = 0;
    OK(MPI_File_get_type_extent_c(file, all, &extent));
    CHECK(extent == HUGE_BYTES);
    MPI_Type_free(&all);
    OK(MPI_File_close(&file));
    if (data != NULL)
        munmap(data, (size_t)PERIOD * COPIES);
}

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 2 && argc != 3)
        return 2;
    snprintf(name, sizeof name, "%s", argv[1]);
    if (argc == 3) {
        huge(size > 1 ? "enable" : "disable");
        return end();
    }
    own_places("disable");
    own_places("enable");
    shared_places();
    return end();
}
