/*
 * Random views and memory datatypes: data written and read through Forebay equal, byte for byte, the data that MPI_Pack
 * gives for the datatypes, and the data of the MPI library's own MPI-IO on a file of tmpfs ("-" omits that). If only
 * the latter differs, as MPICH 4.0.2 does for some, the program counts and reports it. views POOL_FILE NATIVE_FILE
 * FIRST_SEED SEEDS
 */
#include "check.h"

#include <fcntl.h>
#include <stdint.h>
#include <unistd.h>

static uint64_t state;
static int below(int n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int)((state >> 33) % (uint64_t)n);
}

static MPI_File files[2];
static int file_count; /* 1 without the MPI library's own file */
static MPI_Datatype base;
static MPI_Aint base_extent;

/* A datatype with rising bytes that do not overlap, of at most a few hundred blocks. */
static MPI_Datatype random_type(int depth) {
    MPI_Datatype old = base, made;
    if (depth > 0 && below(4) != 0)
        old = random_type(depth - 1);
    MPI_Aint lb, extent;
    MPI_Type_get_extent(old, &lb, &extent);
    int count = 1 + below(4), lengths[4], displs[4];
    MPI_Aint addresses[4];
    MPI_Datatype types[4];
    int at = below(3);
    int uniform = 1 + below(3);
    int kind = below(11);
    for (int i = 0; i < count; i++) {
        lengths[i] = kind == 5 || kind == 6 ? uniform : 1 + below(3);
        displs[i] = at;
        addresses[i] = at * extent;
        types[i] = old;
        at += lengths[i] + below(3);
    }
    switch (kind) {
    case 0:
        MPI_Type_contiguous(count, old, &made);
        break;
    case 1:
        MPI_Type_vector(count, uniform, uniform + below(3), old, &made);
        break;
    case 2:
        MPI_Type_create_hvector(count, uniform, (uniform + below(3)) * extent, old, &made);
        break;
    case 3:
        MPI_Type_indexed(count, lengths, displs, old, &made);
        break;
    case 4:
        MPI_Type_create_hindexed(count, lengths, addresses, old, &made);
        break;
    case 5:
        MPI_Type_create_indexed_block(count, uniform, displs, old, &made);
        break;
    case 6:
        MPI_Type_create_hindexed_block(count, uniform, addresses, old, &made);
        break;
    case 7:
        MPI_Type_create_struct(count, lengths, addresses, types, &made);
        break;
    case 8: {
        int n = 1 + below(3), sizes[3], subsizes[3], starts[3];
        for (int i = 0; i < n; i++) {
            sizes[i] = 1 + below(4);
            subsizes[i] = 1 + below(sizes[i]);
            starts[i] = below(sizes[i] - subsizes[i] + 1);
        }
        MPI_Type_create_subarray(n, sizes, subsizes, starts, below(2) ? MPI_ORDER_C : MPI_ORDER_FORTRAN, old, &made);
        break;
    }
    case 9: {
        int n = 1 + below(2), grid[2], sizes[2], distribs[2], dargs[2], processes = 1;
        for (int i = 0; i < n; i++) {
            grid[i] = 1 + below(2);
            sizes[i] = 2 + below(5);
            distribs[i] = below(2) ? MPI_DISTRIBUTE_CYCLIC : MPI_DISTRIBUTE_BLOCK;
            dargs[i] = MPI_DISTRIBUTE_DFLT_DARG;
            if (distribs[i] == MPI_DISTRIBUTE_CYCLIC && below(2))
                dargs[i] = 1 + below(2);
            processes *= grid[i];
        }
        /* Process 0 has a share in every distribution. */
        MPI_Type_create_darray(processes, 0, n, sizes, distribs, dargs, grid, below(2) ? MPI_ORDER_C : MPI_ORDER_FORTRAN,
                               old, &made);
        break;
    }
    default: {
        MPI_Datatype between;
        MPI_Type_contiguous(1 + below(2), old, &between);
        MPI_Type_get_extent(between, &lb, &extent);
        MPI_Type_create_resized(between, 0, extent + below(3) * base_extent, &made);
        MPI_Type_free(&between);
    }
    }
    if (old != base)
        MPI_Type_free(&old);
    return made;
}


/* This rank's bytes of the file, computed with MPI_Pack and the map that `check_map` verifies. */
enum { FILE_BYTES = 1 << 20 };
static unsigned char image[FILE_BYTES];
static int native_differs;

static void check_access(int writes, MPI_Datatype memory, int count, MPI_Offset offset, unsigned char *buffer) {
    int bytes, width, at = 0;
    MPI_Type_size(memory, &bytes);
    MPI_Type_size(base, &width);
    bytes *= count;
    unsigned char *packed = malloc(bytes);
    MPI_Pack(buffer, count, memory, packed, bytes, &at, MPI_COMM_SELF);
    int wrong = 0;
    for (int i = 0; i < bytes / width; i++) {
        MPI_Offset byte = 0;
        OK(MPI_File_get_byte_offset(files[0], offset + i, &byte));
        if (writes)
            memcpy(image + byte, packed + i * width, width);
        else
            wrong += memcmp(image + byte, packed + i * width, width) != 0;
    }
    CHECK(wrong == 0);
    free(packed);
}

/* One random access on both files; the same on all ranks except for the data. */
static void one_access(int writes, MPI_Datatype memory, int count, MPI_Offset offset, int which, size_t room) {
    unsigned char *buffers[2] = {calloc(1, room + 1), calloc(1, room + 1)};
    for (size_t i = 0; i < room; i++)
        buffers[0][i] = buffers[1][i] = (unsigned char)(i * 31 + rank * 101 + state % 251);
    int got[2] = {0, 0};
    MPI_Offset positions[2] = {0, 0};
    for (int f = 0; f < file_count; f++) {
        MPI_Status status;
        MPI_Request request;
        void *buffer = buffers[f];
        MPI_File file = files[f];
        switch (which) {
        case 0:
            OK(writes ? MPI_File_write_at(file, offset, buffer, count, memory, &status)
                      : MPI_File_read_at(file, offset, buffer, count, memory, &status));
            break;
        case 1:
            OK(writes ? MPI_File_write_at_all(file, offset, buffer, count, memory, &status)
                      : MPI_File_read_at_all(file, offset, buffer, count, memory, &status));
            break;
        case 2:
            OK(MPI_File_seek(file, offset, MPI_SEEK_SET));
            OK(writes ? MPI_File_write(file, buffer, count, memory, &status)
                      : MPI_File_read(file, buffer, count, memory, &status));
            break;
        case 3:
            OK(MPI_File_seek(file, offset, MPI_SEEK_SET));
            OK(writes ? MPI_File_write_all(file, buffer, count, memory, &status)
                      : MPI_File_read_all(file, buffer, count, memory, &status));
            break;
        case 4:
            OK(writes ? MPI_File_iwrite_at(file, offset, buffer, count, memory, &request)
                      : MPI_File_iread_at(file, offset, buffer, count, memory, &request));
            OK(MPI_Wait(&request, &status));
            break;
        default:
            OK(writes ? MPI_File_write_at_all_begin(file, offset, buffer, count, memory)
                      : MPI_File_read_at_all_begin(file, offset, buffer, count, memory));
            OK(writes ? MPI_File_write_at_all_end(file, buffer, &status)
                      : MPI_File_read_at_all_end(file, buffer, &status));
        }
        MPI_Get_elements(&status, base, &got[f]);
        MPI_File_get_position(file, &positions[f]);
    }
    check_access(writes, memory, count, offset, buffers[0]);
    if (file_count > 1 && memcmp(buffers[0], buffers[1], room) != 0)
        native_differs++;
    CHECK(file_count == 1 || got[0] == got[1]);
    CHECK(file_count == 1 || (which != 2 && which != 3) || positions[0] == positions[1]);
    free(buffers[0]);
    free(buffers[1]);
}

static unsigned char whole[FILE_BYTES];

static void compare(const char *const *names) {
    MPI_Offset sizes[2] = {0, 0};
    OK(MPI_File_get_size(files[0], &sizes[0]));
    if (file_count > 1)
        OK(MPI_File_get_size(files[1], &sizes[1]));
    CHECK(sizes[0] == FILE_BYTES && (file_count == 1 || sizes[1] == FILE_BYTES));
    /* No byte belongs to two ranks. */
    MPI_Reduce(image, whole, FILE_BYTES, MPI_BYTE, MPI_BOR, 0, MPI_COMM_WORLD);
    if (rank != 0)
        return;
    unsigned char *data[2] = {NULL, NULL};
    for (int f = 0; f < file_count; f++) {
        data[f] = calloc(1, sizes[f] + 1);
        int fd = open(names[f], O_RDONLY);
        /* A file of several backing files cannot be opened for a descriptor. */
        if (fd < 0) {
            MPI_File again;
            OK(MPI_File_open(MPI_COMM_SELF, (char *)names[f], MPI_MODE_RDONLY, MPI_INFO_NULL, &again));
            OK(MPI_File_read_at(again, 0, data[f], (int)sizes[f], MPI_BYTE, MPI_STATUS_IGNORE));
            OK(MPI_File_close(&again));
            continue;
        }
        CHECK(read(fd, data[f], sizes[f]) == sizes[f]);
        close(fd);
    }
    CHECK(memcmp(data[0], whole, FILE_BYTES) == 0);
    if (file_count > 1 && memcmp(data[0], data[1], FILE_BYTES) != 0)
        native_differs++;
    free(data[0]);
    free(data[1]);
}

/* Determines where each element of a view is: MPI_Pack copies from a buffer in which each byte holds its own offset. */
static void check_map(MPI_Datatype filetype, MPI_Offset disp, MPI_Aint tile) {
    int bytes, width, native = 0;
    MPI_Type_size(filetype, &bytes);
    MPI_Type_size(base, &width);
    unsigned char *places[2], *packed[2];
    for (int half = 0; half < 2; half++) {
        int at = 0;
        places[half] = malloc(tile);
        packed[half] = malloc(bytes);
        for (MPI_Aint i = 0; i < tile; i++)
            places[half][i] = (unsigned char)(half ? i >> 8 : i);
        MPI_Pack(places[half], 1, filetype, packed[half], bytes, &at, MPI_COMM_SELF);
        CHECK(at == bytes);
    }
    for (int i = 0; i < 3 * bytes / width; i++) {
        MPI_Offset byte[2], in_tile = packed[1][i * width % bytes] << 8 | packed[0][i * width % bytes];
        MPI_Offset expected = disp + i * width / bytes * tile * size + in_tile;
        OK(MPI_File_get_byte_offset(files[0], i, &byte[0]));
        CHECK(byte[0] == expected);
        if (file_count > 1) {
            OK(MPI_File_get_byte_offset(files[1], i, &byte[1]));
            native += byte[1] != expected;
        }
    }
    if (native)
        printf("rank %d: the MPI library's own map differs from MPI_Pack's\n", rank);
    for (int half = 0; half < 2; half++) {
        free(places[half]);
        free(packed[half]);
    }
}

/* Checks that a memory datatype selects the bytes that MPI_Pack copies. The view here is of bytes. */
static void check_memory(MPI_Datatype memory, size_t room, int count) {
    int bytes, at = 0;
    MPI_Type_size(memory, &bytes);
    bytes *= count;
    unsigned char *data = malloc(room), *packed = malloc(bytes), *back = malloc(bytes);
    for (size_t i = 0; i < room; i++)
        data[i] = (unsigned char)(i * 11 + i / 256);
    MPI_Pack(data, count, memory, packed, bytes, &at, MPI_COMM_SELF);
    MPI_Offset mine = (MPI_Offset)rank << 16;
    OK(MPI_File_write_at(files[0], mine, data, count, memory, MPI_STATUS_IGNORE));
    OK(MPI_File_read_at(files[0], mine, back, bytes, MPI_BYTE, MPI_STATUS_IGNORE));
    CHECK(at == bytes && memcmp(packed, back, bytes) == 0);
    memset(back, 0, bytes);
    OK(MPI_File_write_at(files[0], mine, back, bytes, MPI_BYTE, MPI_STATUS_IGNORE));
    free(data);
    free(packed);
    free(back);
}

static void one_seed(const char *const *names, long seed) {
    memset(image, 0, sizeof image);
    state = (uint64_t)seed * 977 + 13;
    for (int i = 0; i < 8; i++)
        below(2);
    MPI_Datatype bases[] = {MPI_BYTE, MPI_INT, MPI_DOUBLE, MPI_SHORT};
    base = bases[below(4)];
    MPI_Aint lb;
    MPI_Type_get_extent(base, &lb, &base_extent);
    MPI_Datatype tree = random_type(2), filetype, memory = random_type(1);
    MPI_Aint extent, true_lb, true_extent;
    MPI_Type_get_extent(tree, &lb, &extent);
    MPI_Type_get_true_extent(tree, &true_lb, &true_extent);
    /* Each rank has its own bytes: tiles of all ranks in turn. */
    MPI_Aint tile = true_lb + true_extent > extent ? true_lb + true_extent : extent;
    MPI_Type_create_resized(tree, 0, tile * size, &filetype);
    MPI_Type_commit(&filetype);
    MPI_Type_commit(&memory);
    MPI_Offset disp = below(100) + (MPI_Offset)tile * rank;
    MPI_Aint memory_true;
    MPI_Type_get_extent(memory, &lb, &extent);
    MPI_Type_get_true_extent(memory, &true_lb, &memory_true);
    MPI_Info info;
    MPI_Info_create(&info);
    /* Hints for Forebay's file: key=value, separated by blanks. */
    const char *hints = getenv("VIEWS_HINTS");
    char key[64], value[64];
    for (int used = 0; hints != NULL && sscanf(hints, " %63[^=]=%63s%n", key, value, &used) == 2; hints += used)
        MPI_Info_set(info, key, value);
    for (int f = 0; f < file_count; f++) {
        OK(MPI_File_open(MPI_COMM_WORLD, (char *)names[f], MPI_MODE_RDWR | MPI_MODE_CREATE, f == 0 ? info : MPI_INFO_NULL,
                         &files[f]));
        /* No read reaches the end of the file, where ROMIO reports more bytes than it read. */
        OK(MPI_File_set_size(files[f], FILE_BYTES));
        if (f == 0)
            check_memory(memory, (size_t)(extent * 9 + true_lb + memory_true), 10);
        OK(MPI_File_set_view(files[f], disp, base, filetype, "native", MPI_INFO_NULL));
    }
    for (int round = 0; round < 4; round++) {
        int count = 1 + below(20), which = below(6);
        MPI_Offset offset = below(40);
        size_t room = (size_t)(extent * (count - 1) + true_lb + memory_true);
        one_access(1, memory, count, offset, which, room);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    check_map(filetype, disp, tile);
    for (int round = 0; round < 4; round++) {
        int count = 1 + below(20), which = below(6);
        MPI_Offset offset = below(60);
        size_t room = (size_t)(extent * (count - 1) + true_lb + memory_true);
        one_access(0, memory, count, offset, which, room);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    compare(names);
    for (int f = 0; f < file_count; f++) {
        OK(MPI_File_close(&files[f]));
        CHECK(files[f] == MPI_FILE_NULL);
        MPI_Barrier(MPI_COMM_WORLD);
        if (rank == 0)
            OK(MPI_File_delete((char *)names[f], MPI_INFO_NULL));
        MPI_Barrier(MPI_COMM_WORLD);
    }
    MPI_Info_free(&info);
    MPI_Type_free(&tree);
    MPI_Type_free(&filetype);
    MPI_Type_free(&memory);
}

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 5)
        return 2;
    const char *names[2] = {argv[1], argv[2]};
    file_count = strcmp(argv[2], "-") == 0 ? 1 : 2;
    long first = atol(argv[3]), count = atol(argv[4]);
    for (long seed = first; seed < first + count; seed++) {
        int before = failures;
        one_seed(names, seed);
        if (failures != before)
            printf("rank %d: the first is of seed %ld\n", rank, seed);
        if (failures > 20)
            break;
    }
    if (native_differs)
        printf("rank %d: the MPI library's own MPI-IO differs from MPI_Pack %d times\n", rank, native_differs);
    return end();
}
