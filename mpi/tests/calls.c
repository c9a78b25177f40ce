/* Every call on a Forebay file: its effect, and the error class of each misuse. calls POOL_FILE [full] */
#include "check.h"

#include <stdint.h>

static char name[4096];
static int is_volume; /* the files are in volumes, which are made before, and named without a slash */

static MPI_File open_new(MPI_Comm comm, int amode) {
    MPI_File file = MPI_FILE_NULL;
    OK(MPI_File_open(comm, name, amode, MPI_INFO_NULL, &file));
    return file;
}

static void barrier(void) { MPI_Barrier(MPI_COMM_WORLD); }

static void opening(void) {
    MPI_File file = MPI_FILE_NULL;
    FAILS(MPI_ERR_NO_SUCH_FILE, MPI_File_open(MPI_COMM_WORLD, name, MPI_MODE_RDONLY, MPI_INFO_NULL, &file));
    CHECK(file == MPI_FILE_NULL);
    FAILS(MPI_ERR_AMODE, MPI_File_open(MPI_COMM_WORLD, name, MPI_MODE_RDONLY | MPI_MODE_CREATE, MPI_INFO_NULL, &file));
    FAILS(MPI_ERR_AMODE, MPI_File_open(MPI_COMM_WORLD, name, MPI_MODE_CREATE, MPI_INFO_NULL, &file));
    FAILS(MPI_ERR_AMODE, MPI_File_open(MPI_COMM_WORLD, name, MPI_MODE_RDWR | MPI_MODE_WRONLY, MPI_INFO_NULL, &file));
    FAILS(MPI_ERR_AMODE, MPI_File_open(MPI_COMM_WORLD, name, MPI_MODE_RDWR | MPI_MODE_SEQUENTIAL, MPI_INFO_NULL, &file));
    if (size > 1)
        FAILS(MPI_ERR_NOT_SAME, MPI_File_open(MPI_COMM_WORLD, name, rank ? MPI_MODE_RDWR : MPI_MODE_RDWR | MPI_MODE_CREATE,
                                              MPI_INFO_NULL, &file));
    FAILS(MPI_ERR_NO_SUCH_FILE, MPI_File_delete(name, MPI_INFO_NULL));
    char below[4200];
    if (size > 1) {
        /* Ranks that name different files. */
        snprintf(below, sizeof below, "%s%d", name, rank > 0);
        OK(MPI_File_open(MPI_COMM_SELF, below, MPI_MODE_RDWR | MPI_MODE_CREATE, MPI_INFO_NULL, &file));
        OK(MPI_File_close(&file));
        barrier();
        FAILS(MPI_ERR_NOT_SAME, MPI_File_open(MPI_COMM_WORLD, below, MPI_MODE_RDWR, MPI_INFO_NULL, &file));
        FAILS(MPI_ERR_NOT_SAME,
              MPI_File_open(MPI_COMM_WORLD, below, MPI_MODE_RDWR | MPI_MODE_CREATE, MPI_INFO_NULL, &file));
        CHECK(file == MPI_FILE_NULL);
        barrier();
        if (rank < 2)
            OK(MPI_File_delete(below, MPI_INFO_NULL));
    }
    snprintf(below, sizeof below, is_volume ? "%s.none" : "%s.none/x", name);
    FAILS(MPI_ERR_NO_SUCH_FILE,
          MPI_File_open(MPI_COMM_WORLD, below, MPI_MODE_RDWR | MPI_MODE_CREATE, MPI_INFO_NULL, &file));
    file = open_new(MPI_COMM_WORLD, MPI_MODE_RDWR | MPI_MODE_CREATE | MPI_MODE_EXCL);
    OK(MPI_File_close(&file));
    FAILS(MPI_ERR_FILE_EXISTS, MPI_File_open(MPI_COMM_WORLD, name, MPI_MODE_RDWR | MPI_MODE_CREATE | MPI_MODE_EXCL,
                                             MPI_INFO_NULL, &file));
    snprintf(below, sizeof below, "%s/x", name);
    FAILS(MPI_ERR_BAD_FILE, MPI_File_open(MPI_COMM_WORLD, below, MPI_MODE_RDONLY, MPI_INFO_NULL, &file));
    file = open_new(MPI_COMM_SELF, MPI_MODE_RDONLY);
    MPI_File stale = file;
    OK(MPI_File_close(&file));
    int amode;
    FAILS(MPI_ERR_FILE, MPI_File_get_amode(stale, &amode));
    FAILS(MPI_ERR_FILE, MPI_File_close(&stale));
    barrier();
    file = open_new(MPI_COMM_WORLD, MPI_MODE_RDWR | MPI_MODE_DELETE_ON_CLOSE);
    OK(MPI_File_close(&file));
    FAILS(MPI_ERR_NO_SUCH_FILE, MPI_File_open(MPI_COMM_WORLD, name, MPI_MODE_RDONLY, MPI_INFO_NULL, &file));
    barrier();
}

static void attributes(void) {
    MPI_File file = open_new(MPI_COMM_WORLD, MPI_MODE_RDWR | MPI_MODE_CREATE);
    MPI_Offset bytes = -1;
    int amode = 0, same = 0, count = 0;
    OK(MPI_File_get_amode(file, &amode));
    CHECK(amode == (MPI_MODE_RDWR | MPI_MODE_CREATE));
    MPI_Group group, world;
    OK(MPI_File_get_group(file, &group));
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    MPI_Group_compare(group, world, &same);
    MPI_Group_size(group, &count);
    CHECK(same == MPI_IDENT && count == size);
    MPI_Group_free(&group);
    MPI_Group_free(&world);
    OK(MPI_File_set_size(file, 1000));
    OK(MPI_File_get_size(file, &bytes));
    CHECK(bytes == 1000);
    barrier();
    OK(MPI_File_preallocate(file, 500));
    OK(MPI_File_get_size(file, &bytes));
    CHECK(bytes == 1000);
    OK(MPI_File_preallocate(file, 70000));
    OK(MPI_File_get_size(file, &bytes));
    CHECK(bytes == 70000);
    barrier();
    FAILS(MPI_ERR_ARG, MPI_File_set_size(file, -1));
    if (size > 1)
        FAILS(MPI_ERR_NOT_SAME, MPI_File_set_size(file, rank));
    FAILS(MPI_ERR_ARG, MPI_File_preallocate(file, -1));
    int flag = 7;
    OK(MPI_File_get_atomicity(file, &flag));
    CHECK(flag == 0);
    OK(MPI_File_set_atomicity(file, 1));
    OK(MPI_File_get_atomicity(file, &flag));
    CHECK(flag == 1);
    OK(MPI_File_sync(file));
    MPI_Info info;
    char value[64] = "";
    OK(MPI_File_get_info(file, &info));
    MPI_Info_get(info, "striping_factor", 63, value, &flag);
    CHECK(flag && atoi(value) >= 1);
    /* Values of the greatest length, and meaningless values. */
    char longest[MPI_MAX_INFO_VAL];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    MPI_Info_set(info, "cb_nodes", longest);
    MPI_Info_set(info, "romio_cb_read", longest);
    MPI_Info_set(info, "romio_cb_write", "perhaps");
    MPI_Info_set(info, "cb_buffer_size", "-7");
    MPI_Info_set(info, "romio_ds_read", "disable");
    OK(MPI_File_set_info(file, info));
    MPI_Info_free(&info);
    OK(MPI_File_get_info(file, &info));
    MPI_Info_get(info, "romio_ds_read", 63, value, &flag);
    CHECK(flag && strcmp(value, "disable") == 0);
    MPI_Info_free(&info);
    MPI_Aint extent = 0;
    OK(MPI_File_get_type_extent(file, MPI_DOUBLE, &extent));
    CHECK(extent == 8);
    MPI_File again = MPI_File_f2c(MPI_File_c2f(file));
    CHECK(again == file);
    CHECK(MPI_File_f2c(MPI_File_c2f(MPI_FILE_NULL)) == MPI_FILE_NULL);
    OK(MPI_File_close(&file));
    barrier();
    file = open_new(MPI_COMM_WORLD, MPI_MODE_RDONLY);
    FAILS(MPI_ERR_READ_ONLY, MPI_File_set_size(file, 0));
    FAILS(MPI_ERR_READ_ONLY, MPI_File_write_at(file, 0, value, 1, MPI_BYTE, MPI_STATUS_IGNORE));
    OK(MPI_File_close(&file));
    file = open_new(MPI_COMM_WORLD, MPI_MODE_WRONLY);
    FAILS(MPI_ERR_ACCESS, MPI_File_read_at(file, 0, value, 1, MPI_BYTE, MPI_STATUS_IGNORE));
    OK(MPI_File_close(&file));
    barrier();
}

/* Overlapping bytes of a type may be read but not written: in the etype, in the file type, on one rank alone. */
static void overlaps(void) {
    const char content[] = "0123456789abcdefghijklmnopqrstuvwxyz";
    char got[16];
    int lengths[3] = {3, 2, 1}, offsets[3] = {0, 2, 5}, same[2] = {4, 4};
    MPI_Datatype over, twice, within, around, no = MPI_BYTE;
    MPI_Type_indexed(3, lengths, offsets, MPI_BYTE, &over); /* 0 1 2 2 3 5 */
    MPI_Type_indexed(2, (int[]){1, 1}, same, MPI_BYTE, &twice);
    MPI_Type_contiguous(2, over, &within);
    MPI_Type_create_resized(MPI_SHORT, 0, 5, &around);
    MPI_Datatype *types[] = {&over, &twice, &within, &around};
    for (int i = 0; i < 4; i++)
        MPI_Type_commit(types[i]);
    MPI_File file = open_new(MPI_COMM_WORLD, MPI_MODE_RDWR | MPI_MODE_CREATE);
    if (rank == 0)
        OK(MPI_File_write_at(file, 0, content, sizeof content - 1, MPI_BYTE, MPI_STATUS_IGNORE));
    for (int i = 0; i < 3; i++) {
        FAILS(MPI_ERR_IO, MPI_File_set_view(file, 0, *types[i], *types[i], "native", MPI_INFO_NULL));
        FAILS(MPI_ERR_IO, MPI_File_set_view(file, 0, no, *types[i], "native", MPI_INFO_NULL));
        FAILS(MPI_ERR_IO, MPI_File_set_view(file, 0, no, rank == size - 1 ? *types[i] : no, "native", MPI_INFO_NULL));
        FAILS(MPI_ERR_IO, MPI_File_set_view(file, 0, no, *types[i], "internal", MPI_INFO_NULL));
    }
    OK(MPI_File_set_view(file, 0, MPI_SHORT, around, "native", MPI_INFO_NULL));
    OK(MPI_File_close(&file));
    OK(MPI_File_open(MPI_COMM_WORLD, name, MPI_MODE_WRONLY, MPI_INFO_NULL, &file));
    FAILS(MPI_ERR_IO, MPI_File_set_view(file, 0, no, over, "native", MPI_INFO_NULL));
    OK(MPI_File_close(&file));
    OK(MPI_File_open(MPI_COMM_WORLD, name, MPI_MODE_RDONLY, MPI_INFO_NULL, &file));
    OK(MPI_File_set_view(file, 0, over, over, "native", MPI_INFO_NULL));
    OK(MPI_File_read_at(file, 1, got, 6, MPI_BYTE, MPI_STATUS_IGNORE));
    CHECK(memcmp(got, "67889b", 6) == 0);
    OK(MPI_File_set_view(file, 0, no, twice, "native", MPI_INFO_NULL));
    OK(MPI_File_read_at(file, 0, got, 4, MPI_BYTE, MPI_STATUS_IGNORE));
    CHECK(memcmp(got, "4455", 4) == 0);
    OK(MPI_File_close(&file));
    for (int i = 0; i < 4; i++)
        MPI_Type_free(types[i]);
}

static void views(void) {
    MPI_File file = open_new(MPI_COMM_WORLD, MPI_MODE_RDWR | MPI_MODE_CREATE);
    MPI_Offset disp = -1;
    MPI_Datatype etype, filetype, vector, bad, uncommitted;
    char datarep[MPI_MAX_DATAREP_STRING] = "";
    OK(MPI_File_get_view(file, &disp, &etype, &filetype, datarep));
    CHECK(disp == 0 && etype == MPI_BYTE && filetype == MPI_BYTE && strcmp(datarep, "native") == 0);
    MPI_Type_vector(3, 2, 4, MPI_INT, &vector);
    FAILS(MPI_ERR_TYPE, MPI_File_set_view(file, 0, MPI_INT, vector, "native", MPI_INFO_NULL));
    MPI_Type_commit(&vector);
    OK(MPI_File_set_view(file, 12, MPI_INT, vector, "native", MPI_INFO_NULL));
    MPI_Type_free(&vector);
    OK(MPI_File_get_view(file, &disp, &etype, &filetype, datarep));
    int bytes = 0;
    MPI_Type_size(filetype, &bytes);
    CHECK(disp == 12 && etype == MPI_INT && bytes == 24);
    MPI_Type_free(&filetype);
    MPI_Offset at = 0;
    OK(MPI_File_get_byte_offset(file, 2, &at));
    CHECK(at == 12 + 16);
    OK(MPI_File_get_byte_offset(file, 6, &at));
    CHECK(at == 12 + 40);
    FAILS(MPI_ERR_ARG, MPI_File_set_view(file, -1, MPI_BYTE, MPI_BYTE, "native", MPI_INFO_NULL));
    FAILS(MPI_ERR_ARG, MPI_File_set_view(file, MPI_DISPLACEMENT_CURRENT, MPI_BYTE, MPI_BYTE, "native", MPI_INFO_NULL));
    FAILS(MPI_ERR_UNSUPPORTED_DATAREP, MPI_File_set_view(file, 0, MPI_BYTE, MPI_BYTE, "martian", MPI_INFO_NULL));
    FAILS(MPI_ERR_ARG, MPI_File_set_view(file, 0, MPI_DOUBLE, MPI_INT, "native", MPI_INFO_NULL));
    int lengths[2] = {1, 1}, falling[2] = {3, 0};
    MPI_Type_indexed(2, lengths, falling, MPI_INT, &bad);
    MPI_Type_commit(&bad);
    FAILS(MPI_ERR_IO, MPI_File_set_view(file, 0, MPI_INT, bad, "native", MPI_INFO_NULL));
    FAILS(MPI_ERR_IO, MPI_File_set_view(file, 0, bad, bad, "native", MPI_INFO_NULL));
    MPI_Type_free(&bad);
    if (size > 1)
        FAILS(MPI_ERR_NOT_SAME, MPI_File_set_view(file, 0, rank ? MPI_INT : MPI_BYTE, rank ? MPI_INT : MPI_BYTE, "native",
                                                  MPI_INFO_NULL));
    /* The failed calls changed nothing. */
    OK(MPI_File_get_byte_offset(file, 2, &at));
    CHECK(at == 12 + 16);
    int word = 0x01020304;
    double number = 1.0;
    unsigned char raw[8] = {0};
    OK(MPI_File_set_view(file, 0, MPI_INT, MPI_INT, "external32", MPI_INFO_NULL));
    FAILS(MPI_ERR_IO, MPI_File_write_at(file, 0, &word, 1, MPI_SHORT, MPI_STATUS_IGNORE));
    OK(MPI_File_write_at(file, rank, &word, 1, MPI_INT, MPI_STATUS_IGNORE));
    word = 0;
    OK(MPI_File_read_at(file, rank, &word, 1, MPI_INT, MPI_STATUS_IGNORE));
    CHECK(word == 0x01020304);
    OK(MPI_File_set_view(file, 0, MPI_BYTE, MPI_BYTE, "native", MPI_INFO_NULL));
    OK(MPI_File_read_at(file, 4 * rank, raw, 4, MPI_BYTE, MPI_STATUS_IGNORE));
    CHECK(raw[0] == 1 && raw[1] == 2 && raw[2] == 3 && raw[3] == 4);
    barrier();
    OK(MPI_File_set_view(file, 0, MPI_DOUBLE, MPI_DOUBLE, "external32", MPI_INFO_NULL));
    OK(MPI_File_write_at(file, rank, &number, 1, MPI_DOUBLE, MPI_STATUS_IGNORE));
    OK(MPI_File_set_view(file, 0, MPI_BYTE, MPI_BYTE, "native", MPI_INFO_NULL));
    OK(MPI_File_read_at(file, 8 * rank, raw, 8, MPI_BYTE, MPI_STATUS_IGNORE));
    CHECK(raw[0] == 0x3f && raw[1] == 0xf0 && raw[7] == 0);
    MPI_Type_contiguous(2, MPI_INT, &uncommitted);
    FAILS(MPI_ERR_TYPE, MPI_File_write_at(file, 0, raw, 1, uncommitted, MPI_STATUS_IGNORE));
    MPI_Type_free(&uncommitted);
    FAILS(MPI_ERR_TYPE, MPI_File_write_at(file, 0, raw, 1, MPI_DATATYPE_NULL, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_COUNT, MPI_File_write_at(file, 0, raw, -1, MPI_BYTE, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_ARG, MPI_File_write_at(file, -1, raw, 1, MPI_BYTE, MPI_STATUS_IGNORE));
    OK(MPI_File_close(&file));
    barrier();
}

static int got(MPI_Status *status) {
    int count = -1;
    MPI_Get_count(status, MPI_INT, &count);
    return count;
}

static void data(void) {
    MPI_File file = open_new(MPI_COMM_WORLD, MPI_MODE_RDWR | MPI_MODE_CREATE);
    MPI_Status status;
    MPI_Request requests[4];
    MPI_Offset at = -1;
    int mine[4], back[8];
    OK(MPI_File_set_size(file, 0));
    for (int i = 0; i < 4; i++)
        mine[i] = rank * 100 + i;
    OK(MPI_File_set_view(file, rank * 16, MPI_INT, MPI_INT, "native", MPI_INFO_NULL));
    OK(MPI_File_write(file, mine, 4, MPI_INT, &status));
    CHECK(got(&status) == 4);
    OK(MPI_File_get_position(file, &at));
    CHECK(at == 4);
    OK(MPI_File_seek(file, -3, MPI_SEEK_CUR));
    OK(MPI_File_read(file, back, 1, MPI_INT, &status));
    CHECK(back[0] == mine[1] && got(&status) == 1);
    FAILS(MPI_ERR_ARG, MPI_File_seek(file, -3, MPI_SEEK_CUR));
    FAILS(MPI_ERR_ARG, MPI_File_seek(file, 0, 12345));
    barrier();
    OK(MPI_File_seek(file, -1, MPI_SEEK_END));
    OK(MPI_File_read(file, back, 3, MPI_INT, &status));
    CHECK(got(&status) == 1 && back[0] == (size - 1) * 100 + 3);
    OK(MPI_File_get_position(file, &at));
    CHECK(at == (size - rank) * 4);
    OK(MPI_File_read(file, back, 3, MPI_INT, &status));
    CHECK(got(&status) == 0);

    /* Nonblocking accesses complete together with messages. */
    int token = -1;
    OK(MPI_File_iread_at(file, 0, back, 2, MPI_INT, &requests[0]));
    OK(MPI_File_iread_at_all(file, 2, back + 2, 2, MPI_INT, &requests[1]));
    MPI_Irecv(&token, 1, MPI_INT, rank, 5, MPI_COMM_WORLD, &requests[2]);
    MPI_Isend(&rank, 1, MPI_INT, rank, 5, MPI_COMM_WORLD, &requests[3]);
    MPI_Status all[4];
    MPI_Waitall(4, requests, all);
    CHECK(memcmp(back, mine, sizeof mine) == 0 && token == rank && got(&all[0]) == 2 && got(&all[1]) == 2);
    int flag = 0;
    OK(MPI_File_seek(file, 0, MPI_SEEK_SET));
    OK(MPI_File_iwrite(file, mine, 2, MPI_INT, &requests[0]));
    while (!flag)
        MPI_Test(&requests[0], &flag, &status);
    CHECK(got(&status) == 2);
    OK(MPI_File_iwrite_all(file, mine + 2, 2, MPI_INT, &requests[0]));
    MPI_Wait(&requests[0], &status);
    OK(MPI_File_seek(file, 0, MPI_SEEK_SET));
    OK(MPI_File_iread(file, back, 1, MPI_INT, &requests[0]));
    OK(MPI_File_iread_all(file, back + 1, 3, MPI_INT, &requests[1]));
    MPI_Waitall(2, requests, all);
    CHECK(memcmp(back, mine, sizeof mine) == 0);
    OK(MPI_File_iwrite_at(file, 0, mine, 4, MPI_INT, &requests[0]));
    OK(MPI_File_iwrite_at_all(file, 0, mine, 4, MPI_INT, &requests[1]));
    MPI_Waitall(2, requests, all);

    /* Split calls: one at a time, ended by the matching end. */
    OK(MPI_File_seek(file, 0, MPI_SEEK_SET));
    OK(MPI_File_write_all_begin(file, mine, 4, MPI_INT));
    FAILS(MPI_ERR_OTHER, MPI_File_write_all_begin(file, mine, 4, MPI_INT));
    FAILS(MPI_ERR_OTHER, MPI_File_read_all_end(file, mine, &status));
    OK(MPI_File_write_all_end(file, mine, &status));
    CHECK(got(&status) == 4);
    OK(MPI_File_seek(file, 0, MPI_SEEK_SET));
    OK(MPI_File_read_all_begin(file, back, 4, MPI_INT));
    OK(MPI_File_read_all_end(file, back, &status));
    CHECK(memcmp(back, mine, sizeof mine) == 0);
    FAILS(MPI_ERR_OTHER, MPI_File_read_all_end(file, back, &status));
    OK(MPI_File_write_at_all_begin(file, 0, mine, 4, MPI_INT));
    OK(MPI_File_write_at_all_end(file, mine, &status));
    OK(MPI_File_read_at_all_begin(file, 1, back, 2, MPI_INT));
    OK(MPI_File_read_at_all_end(file, back, &status));
    CHECK(back[0] == mine[1] && back[1] == mine[2]);
    OK(MPI_File_set_atomicity(file, 1));
    OK(MPI_File_write_at_all(file, 0, mine, 4, MPI_INT, MPI_STATUS_IGNORE));
    OK(MPI_File_read_at_all(file, 0, back, 4, MPI_INT, &status));
    CHECK(got(&status) == 4 && memcmp(back, mine, sizeof mine) == 0);
    OK(MPI_File_close(&file));
    barrier();
}

static void shared(void) {
    MPI_File file = open_new(MPI_COMM_WORLD, MPI_MODE_RDWR | MPI_MODE_CREATE);
    MPI_Status status;
    MPI_Request request;
    MPI_Offset at = -1;
    int mine[2] = {rank, -rank}, back[64];
    OK(MPI_File_set_size(file, 0));
    OK(MPI_File_set_view(file, 0, MPI_INT, MPI_INT, "native", MPI_INFO_NULL));
    OK(MPI_File_write_shared(file, mine, 2, MPI_INT, &status));
    CHECK(got(&status) == 2);
    OK(MPI_File_iwrite_shared(file, mine, 2, MPI_INT, &request));
    MPI_Wait(&request, &status);
    barrier();
    OK(MPI_File_get_position_shared(file, &at));
    CHECK(at == 4 * size);
    barrier();
    OK(MPI_File_seek_shared(file, 0, MPI_SEEK_SET));
    /* Each pair is complete, and each rank's is there twice. */
    OK(MPI_File_read_at(file, 0, back, 4 * size, MPI_INT, &status));
    int seen[16] = {0};
    for (int i = 0; i < 2 * size; i++) {
        CHECK(back[2 * i] >= 0 && back[2 * i] < size && back[2 * i + 1] == -back[2 * i]);
        seen[back[2 * i] & 15]++;
    }
    for (int i = 0; i < size; i++)
        CHECK(seen[i] == 2);
    OK(MPI_File_read_shared(file, back, 2, MPI_INT, &status));
    CHECK(back[1] == -back[0]);
    OK(MPI_File_iread_shared(file, back, 2, MPI_INT, &request));
    MPI_Wait(&request, &status);
    CHECK(back[1] == -back[0]);
    barrier();
    if (size > 1)
        FAILS(MPI_ERR_NOT_SAME, MPI_File_seek_shared(file, rank, MPI_SEEK_SET));
    FAILS(MPI_ERR_ARG, MPI_File_seek_shared(file, -1, MPI_SEEK_SET));
    OK(MPI_File_seek_shared(file, 0, MPI_SEEK_SET));
    /* Ordered: in rank order, with the amount that each rank passes. */
    OK(MPI_File_write_ordered(file, mine, 1 + rank % 2, MPI_INT, &status));
    OK(MPI_File_write_ordered_begin(file, mine, 1, MPI_INT));
    OK(MPI_File_write_ordered_end(file, mine, &status));
    barrier();
    int place = 0;
    OK(MPI_File_read_at(file, 0, back, 4 * size, MPI_INT, &status));
    for (int r = 0; r < size; r++) {
        CHECK(back[place] == r);
        place += 1 + r % 2;
    }
    for (int r = 0; r < size; r++)
        CHECK(back[place + r] == r);
    OK(MPI_File_get_position_shared(file, &at));
    CHECK(at == place + size);
    barrier();
    OK(MPI_File_seek_shared(file, 0, MPI_SEEK_SET));
    OK(MPI_File_read_ordered(file, back, 1 + rank % 2, MPI_INT, &status));
    CHECK(back[0] == rank);
    OK(MPI_File_read_ordered_begin(file, back, 1, MPI_INT));
    OK(MPI_File_read_ordered_end(file, back, &status));
    CHECK(back[0] == rank);
    OK(MPI_File_close(&file));
    barrier();
    /* Sequential and append: only the shared pointer, which starts at the end. */
    file = open_new(MPI_COMM_WORLD, MPI_MODE_WRONLY | MPI_MODE_SEQUENTIAL | MPI_MODE_APPEND);
    FAILS(MPI_ERR_UNSUPPORTED_OPERATION, MPI_File_write_at(file, 0, mine, 1, MPI_INT, &status));
    FAILS(MPI_ERR_UNSUPPORTED_OPERATION, MPI_File_seek(file, 0, MPI_SEEK_SET));
    OK(MPI_File_get_position_shared(file, &at));
    CHECK(at == 16 * size);
    barrier();
    OK(MPI_File_write_shared(file, mine, 1, MPI_INT, &status));
    OK(MPI_File_close(&file));
    barrier();
    file = open_new(MPI_COMM_WORLD, MPI_MODE_RDWR | MPI_MODE_APPEND);
    OK(MPI_File_get_position(file, &at));
    CHECK(at == 20 * size);
    OK(MPI_File_close(&file));
    barrier();
}

/*
 * In atomic mode a read sees all of a strided write or nothing of it, whichever ranks write the same bytes meanwhile.
 */
static void atomicity(void) {
    enum { PIECES = 64 };
    MPI_File file = open_new(MPI_COMM_WORLD, MPI_MODE_RDWR | MPI_MODE_CREATE);
    MPI_Datatype strided;
    int mine[PIECES], back[PIECES];
    MPI_Type_vector(PIECES, 1, 3, MPI_INT, &strided);
    MPI_Type_commit(&strided);
    OK(MPI_File_set_view(file, 0, MPI_INT, strided, "native", MPI_INFO_NULL));
    OK(MPI_File_set_atomicity(file, 1));
    for (int i = 0; i < PIECES; i++)
        mine[i] = rank;
    OK(MPI_File_write_at_all(file, 0, mine, PIECES, MPI_INT, MPI_STATUS_IGNORE));
    barrier();
    for (int round = 0; round < 200; round++) {
        int torn = 0;
        if ((round + rank) % 2 == 0)
            OK(MPI_File_write_at(file, 0, mine, PIECES, MPI_INT, MPI_STATUS_IGNORE));
        OK(MPI_File_read_at(file, 0, back, PIECES, MPI_INT, MPI_STATUS_IGNORE));
        for (int i = 1; i < PIECES; i++)
            torn += back[i] != back[0];
        CHECK(torn == 0);
    }
    MPI_Type_free(&strided);
    OK(MPI_File_close(&file));
    barrier();
}

static int heard_code, heard;
static MPI_File heard_file;
static void handler(MPI_File *file, int *code, ...) {
    heard++;
    heard_code = class_of(*code);
    heard_file = *file;
}

/* Replaces the code that the call is to return. */
static int given;
static void giver(MPI_File *file, int *code, ...) {
    handler(file, code);
    *code = given;
}

static void codes_of_handlers(void) {
    MPI_Errhandler mine;
    MPI_File file = MPI_FILE_NULL, open;
    char none[4200];
    snprintf(none, sizeof none, "%s.none", name);
    OK(MPI_File_create_errhandler(giver, &mine));
    OK(MPI_File_set_errhandler(MPI_FILE_NULL, mine));
    open = open_new(MPI_COMM_WORLD, MPI_MODE_RDWR | MPI_MODE_CREATE);
    heard = 0;
    const int codes[] = {MPI_SUCCESS, MPI_ERR_OTHER};
    for (int i = 0; i < 2; i++) {
        given = codes[i];
        FAILS(given, MPI_File_open(MPI_COMM_WORLD, none, MPI_MODE_RDONLY, MPI_INFO_NULL, &file));
        CHECK(file == MPI_FILE_NULL && heard_file == MPI_FILE_NULL && heard_code == MPI_ERR_NO_SUCH_FILE);
        FAILS(given, MPI_File_delete(none, MPI_INFO_NULL));
        FAILS(given, MPI_File_seek(open, -1, MPI_SEEK_SET));
        CHECK(heard_file == open && heard_code == MPI_ERR_ARG);
        FAILS(given, MPI_File_set_size(open, -1));
        OK(MPI_File_call_errhandler(open, MPI_ERR_IO));
    }
    CHECK(heard == 10);
    /* An error of close calls the file's handler. */
    int word = 0;
    OK(MPI_File_write_at_all_begin(open, 0, &word, 1, MPI_INT));
    file = open;
    given = MPI_ERR_IO;
    FAILS(MPI_ERR_IO, MPI_File_close(&open));
    CHECK(open == MPI_FILE_NULL && heard == 11 && heard_file == file && heard_code == MPI_ERR_OTHER);
    OK(MPI_File_set_errhandler(MPI_FILE_NULL, MPI_ERRORS_RETURN));
    MPI_Errhandler_free(&mine);
    heard = 0;
    barrier();
}

static void handlers(void) {
    MPI_File file = open_new(MPI_COMM_WORLD, MPI_MODE_RDWR | MPI_MODE_CREATE);
    MPI_Errhandler mine, again;
    OK(MPI_File_get_errhandler(file, &again));
    CHECK(again == MPI_ERRORS_RETURN);
    OK(MPI_File_create_errhandler(handler, &mine));
    OK(MPI_File_set_errhandler(file, mine));
    FAILS(MPI_ERR_ARG, MPI_File_seek(file, -1, MPI_SEEK_SET));
    CHECK(heard == 1 && heard_code == MPI_ERR_ARG && heard_file == file);
    OK(MPI_File_get_errhandler(file, &again));
    CHECK(again == mine);
    MPI_Errhandler_free(&again);
    MPI_Errhandler_free(&mine);
    OK(MPI_File_call_errhandler(file, MPI_ERR_IO));
    CHECK(heard == 2 && heard_code == MPI_ERR_IO);
    OK(MPI_File_set_errhandler(file, MPI_ERRORS_RETURN));
    FAILS(MPI_ERR_ARG, MPI_File_seek(file, -1, MPI_SEEK_SET));
    CHECK(heard == 2);
    OK(MPI_File_close(&file));
    barrier();
    /* The handler of MPI_FILE_NULL is inherited by later files, and called for opens that fail. */
    OK(MPI_File_create_errhandler(handler, &mine));
    OK(MPI_File_set_errhandler(MPI_FILE_NULL, mine));
    file = open_new(MPI_COMM_WORLD, MPI_MODE_RDWR | MPI_MODE_CREATE);
    FAILS(MPI_ERR_ARG, MPI_File_seek(file, -1, MPI_SEEK_SET));
    CHECK(heard == 3);
    OK(MPI_File_close(&file));
    char none[4200];
    snprintf(none, sizeof none, "%s.none", name);
    FAILS(MPI_ERR_NO_SUCH_FILE, MPI_File_delete(none, MPI_INFO_NULL));
    CHECK(heard == 4 && heard_file == MPI_FILE_NULL);
    OK(MPI_File_set_errhandler(MPI_FILE_NULL, MPI_ERRORS_RETURN));
    MPI_Errhandler_free(&mine);
    barrier();
}

static void striped(void) {
    char other[4200], value[64] = "";
    snprintf(other, sizeof other, "%s.striped", name);
    MPI_Info info;
    MPI_Info_create(&info);
    MPI_Info_set(info, "striping_factor", "4");
    MPI_Info_set(info, "striping_unit", "4096");
    MPI_File file;
    OK(MPI_File_open(MPI_COMM_WORLD, other, MPI_MODE_RDWR | MPI_MODE_CREATE, info, &file));
    MPI_Info_free(&info);
    int flag = 0, bytes = 50000;
    OK(MPI_File_get_info(file, &info));
    MPI_Info_get(info, "striping_factor", 63, value, &flag);
    CHECK(flag && (is_volume ? atoi(value) >= 1 : strcmp(value, "4") == 0));
    MPI_Info_free(&info);
    unsigned char *data = malloc(bytes), *back = malloc(bytes);
    for (int i = 0; i < bytes; i++)
        data[i] = (unsigned char)(i * 7 + rank + i / 256);
    MPI_Status status;
    OK(MPI_File_write_at_all(file, (MPI_Offset)rank * bytes, data, bytes, MPI_BYTE, &status));
    barrier();
    OK(MPI_File_read_at_all(file, (MPI_Offset)rank * bytes, back, bytes, MPI_BYTE, &status));
    int count = 0;
    MPI_Get_count(&status, MPI_BYTE, &count);
    CHECK(count == bytes && memcmp(data, back, bytes) == 0);
    MPI_Offset all = 0;
    OK(MPI_File_get_size(file, &all));
    CHECK(all == (MPI_Offset)size * bytes);
    OK(MPI_File_close(&file));
    barrier();
    if (rank == 0)
        OK(MPI_File_delete(other, MPI_INFO_NULL));
    free(data);
    free(back);
}

#if MPI_VERSION >= 4
/* The forms for large counts: the same, with an MPI_Count. */
static void large(void) {
    MPI_File file = open_new(MPI_COMM_WORLD, MPI_MODE_RDWR | MPI_MODE_CREATE);
    MPI_Status status;
    MPI_Request request;
    MPI_Count count = 4, extent = 0;
    MPI_Datatype vector;
    int mine[4] = {rank, 2, 3, 4}, back[4] = {0};
    OK(MPI_File_get_type_extent_c(file, MPI_INT, &extent));
    CHECK(extent == 4);
    OK(MPI_File_write_at_all_c(file, rank * 16, mine, count, MPI_INT, &status));
    OK(MPI_File_read_at_c(file, rank * 16, back, count, MPI_INT, &status));
    CHECK(memcmp(mine, back, 16) == 0 && got(&status) == 4);
    OK(MPI_File_iread_at_c(file, rank * 16, back, count, MPI_INT, &request));
    MPI_Wait(&request, &status);
    CHECK(got(&status) == 4);
    OK(MPI_File_seek(file, rank * 16, MPI_SEEK_SET));
    OK(MPI_File_read_all_begin_c(file, back, count, MPI_INT));
    OK(MPI_File_read_all_end(file, back, &status));
    CHECK(got(&status) == 4);
    /* A datatype with large counts, in memory and as a view. */
    OK(MPI_Type_vector_c(2, 1, 2, MPI_INT, &vector));
    OK(MPI_Type_commit(&vector));
    OK(MPI_File_set_view(file, rank * 16, MPI_INT, vector, "native", MPI_INFO_NULL));
    back[0] = back[1] = back[2] = back[3] = 0;
    OK(MPI_File_read_at_c(file, 0, back, 1, vector, &status));
    CHECK(back[0] == rank && back[1] == 0 && back[2] == 3 && back[3] == 0);
    MPI_Type_free(&vector);
    OK(MPI_File_close(&file));
    barrier();
}
#endif

/* Columns of a matrix: copies of the file type interleave with each other's blocks. */
static void columns(void) {
    enum { ROWS = 3000 };
    MPI_Datatype column, narrow;
    int mine = 4, width = 4 * size, *data = malloc(sizeof *data * ROWS * mine), *back = calloc(ROWS * mine, sizeof *back);
    for (int c = 0; c < mine; c++)
        for (int r = 0; r < ROWS; r++)
            data[c * ROWS + r] = r * width + rank * mine + c;
    MPI_Type_vector(ROWS, 1, width, MPI_INT, &column);
    MPI_Type_create_resized(column, 0, sizeof(int), &narrow);
    MPI_Type_commit(&narrow);
    MPI_File file = open_new(MPI_COMM_WORLD, MPI_MODE_RDWR | MPI_MODE_CREATE);
    OK(MPI_File_set_view(file, (MPI_Offset)sizeof(int) * rank * mine, MPI_INT, narrow, "native", MPI_INFO_NULL));
    OK(MPI_File_write_all(file, data, ROWS * mine, MPI_INT, MPI_STATUS_IGNORE));
    barrier();
    OK(MPI_File_read_at(file, 0, back, ROWS * mine, MPI_INT, MPI_STATUS_IGNORE));
    CHECK(memcmp(data, back, sizeof *data * ROWS * mine) == 0);
    OK(MPI_File_read_at(file, ROWS / 2, back, ROWS * 2, MPI_INT, MPI_STATUS_IGNORE));
    CHECK(memcmp(data + ROWS / 2, back, sizeof *data * ROWS * 2) == 0);
    OK(MPI_File_set_view(file, 0, MPI_INT, MPI_INT, "native", MPI_INFO_NULL));
    OK(MPI_File_read_at_all(file, (MPI_Offset)width * 7, back, width, MPI_INT, MPI_STATUS_IGNORE));
    for (int i = 0; i < width; i++)
        CHECK(back[i] == width * 7 + i);
    OK(MPI_File_close(&file));
    MPI_Type_free(&column);
    MPI_Type_free(&narrow);
    free(data);
    free(back);
    barrier();
}

/*
 * Files that one communicator has open at once, closed in any order, and one that outlives its communicator. Each file
 * communicates among its own ranks only.
 */
static void communicators(void) {
    MPI_Comm half, copy;
    MPI_Group group, of_file;
    MPI_File files[3], alone;
    MPI_Offset end;
    int same, tag_ub, *value = &tag_ub, found;
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
    for (int turn = 0; turn < 4; turn++) {
        int amode = MPI_MODE_RDWR | (turn == 0 ? MPI_MODE_CREATE : 0);
        for (int i = 0; i < 3; i++)
            OK(MPI_File_open(half, name, amode, MPI_INFO_NULL, &files[i]));
        OK(MPI_File_open(MPI_COMM_SELF, name, MPI_MODE_RDONLY, MPI_INFO_NULL, &alone));
        MPI_Comm_group(half, &group);
        for (int i = 0; i < 3; i++) {
            /* Each half makes as many calls as it has ranks, on files in an order that depends on the turn. */
            OK(MPI_File_seek(files[(i + turn) % 3], 0, MPI_SEEK_END));
            OK(MPI_File_set_size(files[(i + turn) % 3], 1000));
            OK(MPI_File_get_size(files[i], &end));
            CHECK(end == 1000);
            OK(MPI_File_get_group(files[i], &of_file));
            MPI_Group_compare(group, of_file, &same);
            CHECK(same == MPI_IDENT);
            MPI_Group_free(&of_file);
        }
        MPI_Group_free(&group);
        OK(MPI_File_close(&files[turn % 3]));
        OK(MPI_File_close(&alone));
        OK(MPI_File_close(&files[(turn + 2) % 3]));
        OK(MPI_File_close(&files[(turn + 1) % 3]));
    }
    barrier(); /* the other half relies on the size too */
    /*
     * A duplicated communicator does not inherit its files' communicators, and the program's attributes are not
     * affected.
     */
    MPI_Comm_dup(half, &copy);
    OK(MPI_File_open(copy, name, MPI_MODE_RDWR, MPI_INFO_NULL, &files[0]));
    OK(MPI_File_open(half, name, MPI_MODE_RDWR, MPI_INFO_NULL, &files[1]));
    MPI_Comm_free(&half);
    OK(MPI_File_set_size(files[1], 2000));
    MPI_Comm_free(&copy);
    OK(MPI_File_sync(files[0]));
    OK(MPI_File_close(&files[1]));
    OK(MPI_File_close(&files[0]));
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &value, &found);
    CHECK(found && *value > 0);
    barrier();
}

/* A pool of about 64 MiB: no signal is raised, and data written before are intact. */
static void full(void) {
    MPI_File file = open_new(MPI_COMM_WORLD, MPI_MODE_RDWR | MPI_MODE_CREATE);
    static char block[1 << 20];
    int code = MPI_SUCCESS;
    memset(block, rank + 1, sizeof block);
    for (int i = 0; i < 512 && code == MPI_SUCCESS; i++) {
        code = MPI_File_write_at(file, ((MPI_Offset)i * size + rank) << 20, block, sizeof block, MPI_BYTE,
                                 MPI_STATUS_IGNORE);
        if (i == 0)
            barrier(); /* each rank has written its first block before any rank fills the pool */
    }
    CHECK(class_of(code) == MPI_ERR_NO_SPACE);
    barrier();
    FAILS(MPI_ERR_NO_SPACE, MPI_File_preallocate(file, (MPI_Offset)1 << 40));
    memset(block, 0, sizeof block);
    OK(MPI_File_read_at(file, (MPI_Offset)rank << 20, block, sizeof block, MPI_BYTE, MPI_STATUS_IGNORE));
    CHECK(block[0] == rank + 1 && block[sizeof block - 1] == rank + 1);
    OK(MPI_File_close(&file));
    barrier();
}

/* An error that ends the program, through the named handler. */
static void ended_by(const char *which) {
    MPI_Errhandler wanted = MPI_ERRORS_ARE_FATAL, got;
#if defined(MPI_ERRORS_ABORT) && !defined(OPEN_MPI)
    if (strcmp(which, "abort") == 0)
        wanted = MPI_ERRORS_ABORT;
#endif
    (void)which;
    MPI_File file = open_new(MPI_COMM_WORLD, MPI_MODE_RDWR | MPI_MODE_CREATE);
    OK(MPI_File_set_errhandler(file, wanted));
    OK(MPI_File_get_errhandler(file, &got));
    CHECK(got == wanted);
    barrier();
    printf("all is well\n");
    fflush(stdout);
    barrier();
    MPI_File_seek(file, -1, MPI_SEEK_SET);
    printf("it went on\n");
}

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 2 && argc != 3)
        return 2;
    snprintf(name, sizeof name, "%s", argv[1]);
    is_volume = strncmp(name, "forebay:", 8) == 0 && name[8] != '/';
    if (argc == 3) {
        if (strcmp(argv[2], "full") == 0)
            full();
        else
            ended_by(argv[2]);
        return end();
    }
#if MPI_VERSION >= 4
    large();
    barrier();
    if (rank == 0)
        OK(MPI_File_delete(name, MPI_INFO_NULL));
    barrier();
#endif
    /* A new volume is an empty file. */
    if (is_volume && rank == 0) {
        MPI_File file = open_new(MPI_COMM_SELF, MPI_MODE_RDWR | MPI_MODE_CREATE | MPI_MODE_DELETE_ON_CLOSE);
        OK(MPI_File_close(&file));
    }
    barrier();
    opening();
    attributes();
    views();
    overlaps();
    data();
    shared();
    atomicity();
    handlers();
    codes_of_handlers();
    striped();
    columns();
    communicators();
    barrier();
    if (rank == 0)
        OK(MPI_File_delete(name, MPI_INFO_NULL));
    return end();
}
