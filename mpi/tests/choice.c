/*
 * Collective calls that the model chooses: choice FILE. Ranks have different calibrations, one may be slow, and one may
 * report false times. All calls return and the data are right. If two ranks chose differently, the program would hang.
 *
 * CHOICE_FIRST and CHOICE_OTHERS are FOREBAY_MODEL on rank 0 and on the others. The rank CHOICE_SLOW sleeps within calls,
 * in place of a slow medium. On the rank CHOICE_LIAR the driver's clock gives any time. For that, link with -rdynamic.
 */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>

static bool lies, is_slow;
static int lies_told;

/* True for a caller in the MPI driver. */
static bool is_driver(void *address) {
    Dl_info found;
    return dladdr(address, &found) != 0 && found.dli_fname != NULL && strstr(found.dli_fname, "libforebay_mpi_") != NULL;
}

/* The driver's clock too, as the program exports it. */
int clock_gettime(clockid_t id, struct timespec *out) {
    static const int64_t wrong_s[] = {0, 9000000000, -9000000000, 1, -1, 5};
    int code = (int)syscall(SYS_clock_gettime, id, out);
    if ((lies || is_slow) && is_driver(__builtin_return_address(0))) {
        if (is_slow)
            usleep(500);
        if (lies)
            out->tv_sec += wrong_s[lies_told++ % 6];
    }
    return code;
}

static bool is_rank(const char *variable) {
    const char *set = getenv(variable);
    return set != NULL && *set != 0 && atoi(set) == rank;
}

static unsigned char byte_of(int of, long at, int round) { return (unsigned char)(at * 13 + at / 257 + of * 37 + round); }

/* Interleaved records, written and read collectively, several times. */
static void records(MPI_File file, int record, int count) {
    MPI_Datatype own;
    int bytes = record * count;
    unsigned char *data = malloc(bytes), *back = malloc(bytes);
    MPI_Type_vector(count, record, record * size, MPI_BYTE, &own);
    MPI_Type_commit(&own);
    OK(MPI_File_set_view(file, (MPI_Offset)rank * record, MPI_BYTE, own, "native", MPI_INFO_NULL));
    MPI_Type_free(&own);
    for (int round = 0; round < 8; round++) {
        for (long i = 0; i < bytes; i++)
            data[i] = byte_of(rank, i, round);
        OK(MPI_File_write_at_all(file, 0, data, bytes, MPI_BYTE, MPI_STATUS_IGNORE));
        MPI_Barrier(MPI_COMM_WORLD);
        memset(back, 0, bytes);
        OK(MPI_File_read_at_all(file, 0, back, bytes, MPI_BYTE, MPI_STATUS_IGNORE));
        CHECK(memcmp(data, back, bytes) == 0);
        MPI_Barrier(MPI_COMM_WORLD);
    }
    free(data);
    free(back);
}

int main(int argc, char **argv) {
    begin(&argc, &argv);
    const char *model = getenv(rank == 0 ? "CHOICE_FIRST" : "CHOICE_OTHERS");
    if (model != NULL)
        setenv("FOREBAY_MODEL", model, 1);
    is_slow = is_rank("CHOICE_SLOW");
    lies = is_rank("CHOICE_LIAR");
    MPI_File file;
    OK(MPI_File_open(MPI_COMM_WORLD, argv[1], MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &file));
    static const struct {
        int record, count;
    } cases[] = {{64, 500}, {4096, 50}, {100000, 4}, {64, 2}};
    for (int i = 0; i < 4; i++)
        records(file, cases[i].record, cases[i].count);
    OK(MPI_File_close(&file));
    /* Another file, which begins with what the first one has taught. */
    char second[4096];
    snprintf(second, sizeof second, "%s.2", argv[1]);
    OK(MPI_File_open(MPI_COMM_WORLD, second, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &file));
    records(file, cases[0].record, cases[0].count);
    OK(MPI_File_close(&file));
    /* The driver has called the clock function of this program, not the one of libc. */
    if (lies && getenv("CHOICE_CLOCK") != NULL)
        CHECK(lies_told > 0);
    return end();
}
