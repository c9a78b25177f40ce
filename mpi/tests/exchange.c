/*
 * Two-phase calls with pieces of all lengths. The bytes of a range are dealt to the ranks in random pieces, some to none;
 * all write theirs together, with random buffers and aggregators, and read them together from a file that ends anywhere.
 * exchange POOL_FILE FIRST_SEED SEEDS
 */
#include "check.h"

#include <stdint.h>

enum { RANGE_BYTES = 1 << 20, PIECES_MAX = 4096 };

static uint64_t state;
static int below(int n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int)((state >> 33) % (uint64_t)n);
}

static const char *name;
/* For each byte of the range the rank that has it, or -1; and what is to be there. */
static signed char owner[RANGE_BYTES];
static unsigned char expected[RANGE_BYTES], found[RANGE_BYTES];

static unsigned char byte_of(int seed, int of_rank, int at) {
    return (unsigned char)(1 + (seed * 7 + of_rank * 83 + at / 251 * 5 + at % 251) % 255);
}

static MPI_File open_with(int aggregators, int buffer) {
    char words[2][16];
    snprintf(words[0], sizeof words[0], "%d", aggregators);
    snprintf(words[1], sizeof words[1], "%d", buffer);
    MPI_Info info;
    MPI_Info_create(&info);
    MPI_Info_set(info, "romio_cb_write", "enable");
    MPI_Info_set(info, "romio_cb_read", "enable");
    MPI_Info_set(info, "cb_nodes", words[0]);
    MPI_Info_set(info, "cb_buffer_size", words[1]);
    MPI_File file = MPI_FILE_NULL;
    OK(MPI_File_open(MPI_COMM_WORLD, (char *)name, MPI_MODE_RDWR | MPI_MODE_CREATE, info, &file));
    MPI_Info_free(&info);
    return file;
}

/* This rank's pieces as a datatype, and their bytes. The same random numbers on all ranks. */
static int deal(MPI_Datatype *type) {
    static int lengths[PIECES_MAX];
    static MPI_Aint displacements[PIECES_MAX];
    static const int longest[] = {64, 1500, 9000, 70000};
    int most = longest[below(4)], pieces = 0, bytes = 0, with_gaps = below(2);
    memset(owner, -1, sizeof owner);
    for (int at = 0, count = 0; at < RANGE_BYTES && count < PIECES_MAX; count++) {
        int length = 1 + below(most), whose = below(with_gaps ? size + 1 : size);
        length = length < RANGE_BYTES - at ? length : RANGE_BYTES - at;
        if (whose < size)
            memset(owner + at, whose, length);
        if (whose == rank) {
            lengths[pieces] = length;
            displacements[pieces++] = at;
            bytes += length;
        }
        at += length;
    }
    MPI_Type_create_hindexed(pieces, lengths, displacements, MPI_BYTE, type);
    MPI_Type_commit(type);
    return bytes;
}

/* Compares the file with what is to be there, up to its end. */
static void compare(MPI_File file, int end, const char *what) {
    MPI_Status status;
    int count = 0, wrong = 0, first = -1;
    memset(found, 0, sizeof found);
    OK(MPI_File_set_view(file, 0, MPI_BYTE, MPI_BYTE, "native", MPI_INFO_NULL));
    OK(MPI_File_read_at(file, 0, found, end, MPI_BYTE, &status));
    MPI_Get_count(&status, MPI_BYTE, &count);
    CHECK(count == end);
    for (int at = 0; at < end; at++)
        if (found[at] != expected[at]) {
            first = wrong == 0 ? at : first;
            wrong++;
        }
    if (wrong > 0)
        printf("rank %d: %s: %d bytes are wrong, the first at %d of %d\n", rank, what, wrong, first, end);
    CHECK(wrong == 0);
}

static void pieces_of_all_lengths(int seed) {
    MPI_Datatype type;
    int aggregators = 1 + below(size), buffer = 4096 << below(9), bytes = deal(&type);
    MPI_File file = open_with(aggregators, buffer);
    OK(MPI_File_set_size(file, 0));
    unsigned char *own = malloc(bytes + 1), *back = malloc(bytes + 1);
    int filled = 0, end = 0;
    for (int at = 0; at < RANGE_BYTES; at++) {
        expected[at] = owner[at] < 0 ? 0 : byte_of(seed, owner[at], at);
        end = owner[at] < 0 ? end : at + 1;
        if (owner[at] == rank)
            own[filled++] = expected[at];
    }
    CHECK(filled == bytes);
    /* In two calls, of which the second begins anywhere in the pieces of each rank. */
    int first = bytes > 0 ? bytes / (1 + seed % 5) : 0;
    OK(MPI_File_set_view(file, 0, MPI_BYTE, type, "native", MPI_INFO_NULL));
    OK(MPI_File_write_at_all(file, 0, own, first, MPI_BYTE, MPI_STATUS_IGNORE));
    OK(MPI_File_write_at_all(file, first, own + first, bytes - first, MPI_BYTE, MPI_STATUS_IGNORE));
    compare(file, end, "written together");
    int cut = seed % 3 == 0 ? end : below(end + 1), behind = 0;
    OK(MPI_File_set_size(file, cut));
    OK(MPI_File_set_view(file, 0, MPI_BYTE, type, "native", MPI_INFO_NULL));
    memset(back, 0xee, bytes);
    MPI_Status status;
    OK(MPI_File_read_at_all(file, 0, back, bytes, MPI_BYTE, &status));
    for (int at = cut; at < RANGE_BYTES; at++)
        behind += owner[at] == rank;
    int count = -1;
    MPI_Get_count(&status, MPI_BYTE, &count);
    CHECK(count == bytes - behind);
    CHECK(memcmp(back, own, bytes - behind) == 0);
    /* What is behind the end of the file is left alone. */
    for (int i = bytes - behind; i < bytes; i++)
        CHECK(back[i] == 0xee);
    free(own);
    free(back);
    MPI_Type_free(&type);
    OK(MPI_File_close(&file));
}

/* Ranks write ranges that overlap: each byte is that of the highest rank that wrote it. All read the same bytes. */
static void ranges_that_overlap(int seed) {
    int buffer = 4096 << below(7), length = 1 + below(200000), step = below(length + 1000), backwards = below(2);
    MPI_File file = open_with(1 + below(size), buffer);
    OK(MPI_File_set_size(file, 0));
    unsigned char *own = malloc(length);
    int end = step * (size - 1) + length;
    memset(expected, 0, sizeof expected);
    int mine = (backwards ? size - 1 - rank : rank) * step;
    for (int r = 0; r < size; r++)
        for (int i = 0; i < length; i++) {
            unsigned char byte = byte_of(seed, r, i);
            expected[(backwards ? size - 1 - r : r) * step + i] = byte;
            if (r == rank)
                own[i] = byte;
        }
    OK(MPI_File_write_at_all(file, mine, own, length, MPI_BYTE, MPI_STATUS_IGNORE));
    compare(file, end, "written over each other");
    OK(MPI_File_read_at_all(file, mine, own, length, MPI_BYTE, MPI_STATUS_IGNORE));
    CHECK(memcmp(own, expected + mine, length) == 0);
    free(own);
    OK(MPI_File_close(&file));
}

/* Ranks that name different buffers all have rank 0's: otherwise they would wait for each other. */
static void buffers_that_differ(void) {
    enum { BYTES = 20000 };
    static char data[BYTES], back[BYTES];
    char words[16];
    MPI_File file = open_with(size, 4096);
    MPI_Info info;
    MPI_Info_create(&info);
    snprintf(words, sizeof words, "%d", 4096 << rank);
    MPI_Info_set(info, "cb_buffer_size", words);
    memset(data, 1 + rank, sizeof data);
    for (int by_view = 0; by_view < 2; by_view++) {
        MPI_Offset at = (MPI_Offset)(by_view * size + rank) * BYTES;
        if (by_view)
            OK(MPI_File_set_view(file, 0, MPI_BYTE, MPI_BYTE, "native", info));
        else
            OK(MPI_File_set_info(file, info));
        OK(MPI_File_write_at_all(file, at, data, BYTES, MPI_BYTE, MPI_STATUS_IGNORE));
        OK(MPI_File_read_at_all(file, at, back, BYTES, MPI_BYTE, MPI_STATUS_IGNORE));
        CHECK(memcmp(data, back, BYTES) == 0);
    }
    MPI_Info_free(&info);
    OK(MPI_File_close(&file));
}

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 4 || size > 4)
        return 2;
    name = argv[1];
    int first = atoi(argv[2]), seeds = atoi(argv[3]);
    for (int seed = first; seed < first + seeds && failures == 0; seed++) {
        state = (uint64_t)seed * 977 + 13;
        for (int i = 0; i < 8; i++)
            below(2);
        pieces_of_all_lengths(seed);
        ranges_that_overlap(seed);
        if (failures > 0)
            printf("rank %d: the first is of seed %d\n", rank, seed);
    }
    buffers_that_differ();
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0)
        MPI_File_delete((char *)name, MPI_INFO_NULL);
    return end();
}
