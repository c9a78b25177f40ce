/*
 * Errors have their class on every rank that must get it, and leave the file unchanged: arguments that differ between
 * ranks but must not, datatypes, amodes, offsets, closed files. misuse POOL_FILE [full]
 */
#include "check.h"

#include <stdbool.h>
#include <stdint.h>

static char name[4096];

/* `cb`: the hint for collective buffering, if not NULL. */
static MPI_File open_with(int amode, const char *cb) {
    MPI_File file = MPI_FILE_NULL;
    MPI_Info info;
    MPI_Info_create(&info);
    if (cb != NULL) {
        MPI_Info_set(info, "romio_cb_write", cb);
        MPI_Info_set(info, "romio_cb_read", cb);
    }
    OK(MPI_File_open(MPI_COMM_WORLD, name, amode, info, &file));
    MPI_Info_free(&info);
    return file;
}

/* Every call with an argument that must be the same on all ranks. */
static void different_arguments(void) {
    MPI_File file = open_with(MPI_MODE_RDWR | MPI_MODE_CREATE, NULL);
    MPI_Offset bytes = -1, at = -1;
    char datarep[MPI_MAX_DATAREP_STRING] = "";
    MPI_Datatype etype, filetype;
    int flag = -1;
    OK(MPI_File_set_size(file, 4000));
    OK(MPI_File_set_view(file, 8, MPI_INT, MPI_INT, "native", MPI_INFO_NULL));
    MPI_Barrier(MPI_COMM_WORLD);
    FAILS(MPI_ERR_NOT_SAME, MPI_File_set_size(file, 1000 + rank));
    FAILS(MPI_ERR_NOT_SAME, MPI_File_preallocate(file, 10000 + rank));
    FAILS(MPI_ERR_NOT_SAME, MPI_File_set_view(file, 0, rank ? MPI_SHORT : MPI_INT, MPI_INT, "native", MPI_INFO_NULL));
    FAILS(MPI_ERR_NOT_SAME, MPI_File_set_view(file, 0, MPI_INT, MPI_INT, rank ? "native" : "external32", MPI_INFO_NULL));
    FAILS(MPI_ERR_NOT_SAME, MPI_File_set_atomicity(file, rank != 0));
    FAILS(MPI_ERR_NOT_SAME, MPI_File_seek_shared(file, rank, MPI_SEEK_SET));
    FAILS(MPI_ERR_NOT_SAME, MPI_File_seek_shared(file, 0, rank ? MPI_SEEK_SET : MPI_SEEK_CUR));
    /* If one rank's argument is wrong, all ranks get the error. */
    FAILS(MPI_ERR_ARG, MPI_File_set_size(file, rank ? 1000 : -1));
    FAILS(MPI_ERR_ARG, MPI_File_preallocate(file, rank ? 10000 : -1));
    FAILS(MPI_ERR_ARG, MPI_File_set_view(file, rank ? 0 : -1, MPI_INT, MPI_INT, "native", MPI_INFO_NULL));
    FAILS(MPI_ERR_TYPE, MPI_File_set_view(file, 0, MPI_INT, rank ? MPI_INT : MPI_DATATYPE_NULL, "native", MPI_INFO_NULL));
    FAILS(MPI_ERR_UNSUPPORTED_DATAREP,
          MPI_File_set_view(file, 0, MPI_INT, MPI_INT, rank ? "native" : "martian", MPI_INFO_NULL));
    FAILS(MPI_ERR_ARG, MPI_File_seek_shared(file, rank ? 0 : -1, MPI_SEEK_SET));
    FAILS(MPI_ERR_ARG, MPI_File_seek_shared(file, 0, rank ? MPI_SEEK_SET : 4711));
    OK(MPI_File_get_size(file, &bytes));
    CHECK(bytes == 4000);
    OK(MPI_File_get_view(file, &at, &etype, &filetype, datarep));
    CHECK(at == 8 && etype == MPI_INT && filetype == MPI_INT && strcmp(datarep, "native") == 0);
    OK(MPI_File_get_atomicity(file, &flag));
    CHECK(flag == 0);
    OK(MPI_File_get_position_shared(file, &at));
    CHECK(at == 0);
    MPI_Barrier(MPI_COMM_WORLD);
    OK(MPI_File_close(&file));
}

/* One rank has another amode or another file name. */
static void different_opens(void) {
    MPI_File file = MPI_FILE_NULL;
    char other[4200];
    snprintf(other, sizeof other, "%s.other", name);
    FAILS(MPI_ERR_NOT_SAME, MPI_File_open(MPI_COMM_WORLD, name, rank ? MPI_MODE_RDONLY : MPI_MODE_RDWR, MPI_INFO_NULL, &file));
    FAILS(MPI_ERR_NOT_SAME, MPI_File_open(MPI_COMM_WORLD, name, MPI_MODE_RDWR | MPI_MODE_CREATE | (rank ? MPI_MODE_EXCL : 0),
                                          MPI_INFO_NULL, &file));
    FAILS(MPI_ERR_AMODE, MPI_File_open(MPI_COMM_WORLD, name, rank ? MPI_MODE_RDWR : 0, MPI_INFO_NULL, &file));
    /* A name that does not exist, on one rank. */
    int code = MPI_File_open(MPI_COMM_WORLD, rank ? name : other, MPI_MODE_RDWR, MPI_INFO_NULL, &file);
    CHECK(class_of(code) == MPI_ERR_NO_SUCH_FILE || class_of(code) == MPI_ERR_NOT_SAME);
    CHECK(file == MPI_FILE_NULL);
    FAILS(MPI_ERR_COMM, MPI_File_open(MPI_COMM_NULL, name, MPI_MODE_RDWR, MPI_INFO_NULL, &file));
    MPI_Barrier(MPI_COMM_WORLD);
}

/* Each kind of access with invalid arguments; collective ones on all ranks. */
static void accesses(const char *cb) {
    MPI_File file = open_with(MPI_MODE_RDWR, cb);
    MPI_Datatype loose;
    MPI_Request request;
    int words[8] = {0};
    MPI_Type_contiguous(2, MPI_INT, &loose);
    OK(MPI_File_set_view(file, 0, MPI_INT, MPI_INT, "native", MPI_INFO_NULL));
    FAILS(MPI_ERR_TYPE, MPI_File_write_at_all(file, 0, words, 1, loose, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_TYPE, MPI_File_write_all(file, words, 1, MPI_DATATYPE_NULL, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_TYPE, MPI_File_read_all(file, words, 1, loose, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_TYPE, MPI_File_iwrite_at(file, 0, words, 1, loose, &request));
    FAILS(MPI_ERR_TYPE, MPI_File_iread_all(file, words, 1, loose, &request));
    FAILS(MPI_ERR_TYPE, MPI_File_write_all_begin(file, words, 1, loose));
    FAILS(MPI_ERR_TYPE, MPI_File_write_shared(file, words, 1, loose, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_ARG, MPI_File_write_at_all(file, -1, words, 1, MPI_INT, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_ARG, MPI_File_read_at(file, -1, words, 1, MPI_INT, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_ARG, MPI_File_iread_at(file, -1, words, 1, MPI_INT, &request));
    CHECK(request == MPI_REQUEST_NULL);
    FAILS(MPI_ERR_ARG, MPI_File_read_at_all_begin(file, -1, words, 1, MPI_INT));
    FAILS(MPI_ERR_COUNT, MPI_File_read_at_all(file, 0, words, -1, MPI_INT, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_COUNT, MPI_File_iwrite(file, words, -1, MPI_INT, &request));
    FAILS(MPI_ERR_IO, MPI_File_write_all(file, words, 1, MPI_SHORT, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_IO, MPI_File_read_all(file, words, 3, MPI_BYTE, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_ARG, MPI_File_seek(file, -1, MPI_SEEK_SET));
    MPI_Offset at = -1;
    FAILS(MPI_ERR_ARG, MPI_File_get_byte_offset(file, -1, &at));
    OK(MPI_File_get_position(file, &at));
    CHECK(at == 0);
    MPI_Barrier(MPI_COMM_WORLD);
    OK(MPI_File_get_position_shared(file, &at));
    CHECK(at == 0);
    OK(MPI_File_close(&file));
    MPI_Type_free(&loose);
}

static void amodes(const char *cb) {
    char byte = 'x';
    MPI_Request request;
    MPI_File file = open_with(MPI_MODE_RDONLY, cb);
    FAILS(MPI_ERR_READ_ONLY, MPI_File_write_all(file, &byte, 1, MPI_BYTE, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_READ_ONLY, MPI_File_iwrite_at(file, 0, &byte, 1, MPI_BYTE, &request));
    FAILS(MPI_ERR_READ_ONLY, MPI_File_write_ordered(file, &byte, 1, MPI_BYTE, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_READ_ONLY, MPI_File_write_all_begin(file, &byte, 1, MPI_BYTE));
    FAILS(MPI_ERR_READ_ONLY, MPI_File_preallocate(file, 1 << 20));
    OK(MPI_File_close(&file));
    file = open_with(MPI_MODE_WRONLY, cb);
    FAILS(MPI_ERR_ACCESS, MPI_File_read_all(file, &byte, 1, MPI_BYTE, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_ACCESS, MPI_File_read_at(file, 0, &byte, 1, MPI_BYTE, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_ACCESS, MPI_File_iread_shared(file, &byte, 1, MPI_BYTE, &request));
    FAILS(MPI_ERR_ACCESS, MPI_File_read_ordered(file, &byte, 1, MPI_BYTE, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_ACCESS, MPI_File_read_at_all_begin(file, 0, &byte, 1, MPI_BYTE));
    OK(MPI_File_close(&file));
    CHECK(file == MPI_FILE_NULL);
    /* MPI_MODE_UNIQUE_OPEN is a hint, which is kept and has no effect. */
    int amode = 0;
    file = open_with(MPI_MODE_RDWR | MPI_MODE_UNIQUE_OPEN, NULL);
    OK(MPI_File_get_amode(file, &amode));
    CHECK(amode == (MPI_MODE_RDWR | MPI_MODE_UNIQUE_OPEN));
    OK(MPI_File_write_at_all(file, rank, &byte, 1, MPI_BYTE, MPI_STATUS_IGNORE));
    OK(MPI_File_close(&file));
    MPI_Barrier(MPI_COMM_WORLD);
}

enum { RECORD = 64, RECORDS = 32, RECORDS_BYTES = RECORD * RECORDS };

/* Records of the ranks in turn, with a gap of two turns after each turn. */
static void set_records(MPI_File file) {
    MPI_Datatype whole, own;
    MPI_Type_contiguous(RECORD, MPI_BYTE, &whole);
    MPI_Type_create_resized(whole, 0, 3 * (MPI_Aint)RECORD * size, &own);
    MPI_Type_commit(&own);
    OK(MPI_File_set_view(file, (MPI_Offset)RECORD * rank, MPI_BYTE, own, "native", MPI_INFO_NULL));
    MPI_Type_free(&whole);
    MPI_Type_free(&own);
}

/* True if this rank's records consist of one byte value; read independently. */
static int records_are(MPI_File file, int byte) {
    unsigned char data[RECORDS_BYTES];
    int wrong = 0;
    MPI_Barrier(MPI_COMM_WORLD);
    OK(MPI_File_read_at(file, 0, data, sizeof data, MPI_BYTE, MPI_STATUS_IGNORE));
    for (int i = 0; i < RECORDS_BYTES; i++)
        wrong += data[i] != byte;
    MPI_Barrier(MPI_COMM_WORLD);
    return wrong == 0;
}

/*
 * Collective data calls with wrong arguments on one rank. Without aggregators the other ranks' calls succeed. Through
 * aggregators all ranks get the error, nothing is moved, and pointers stay.
 */
static void one_wrong(const char *cb, int who) {
    int together = size > 1 && strcmp(cb, "enable") == 0, me = rank == who, byte = 1 + rank;
    MPI_File file = open_with(MPI_MODE_RDWR, cb);
    unsigned char data[RECORDS_BYTES], other[RECORDS_BYTES];
    memset(data, byte, sizeof data);
    OK(MPI_File_set_size(file, 0));
    set_records(file);
    OK(MPI_File_write_all(file, data, sizeof data, MPI_BYTE, MPI_STATUS_IGNORE));
    CHECK(records_are(file, byte));
    MPI_Offset bytes = 0, now = 0;
    OK(MPI_File_get_size(file, &bytes));
/* Checks the call's result, and the records of the ranks with valid arguments. */
#define WRONG(class, call)                                                                                             \
    do {                                                                                                               \
        memset(other, ++byte, sizeof other);                                                                           \
        OK(MPI_File_seek(file, 0, MPI_SEEK_SET));                                                                      \
        if (me || together)                                                                                            \
            FAILS(class, call);                                                                                        \
        else                                                                                                           \
            OK(call);                                                                                                  \
        byte = me || together ? byte - 1 : byte;                                                                       \
        CHECK(records_are(file, byte));                                                                                \
        OK(MPI_File_get_position(file, &now));                                                                         \
        CHECK(now == (me || together || !moves ? 0 : RECORDS_BYTES));                                                  \
    } while (0)
    int moves = 1;
    WRONG(MPI_ERR_COUNT, MPI_File_write_all(file, other, me ? -1 : RECORDS_BYTES, MPI_BYTE, MPI_STATUS_IGNORE));
    WRONG(MPI_ERR_TYPE, MPI_File_write_all(file, other, RECORDS_BYTES, me ? MPI_DATATYPE_NULL : MPI_BYTE, MPI_STATUS_IGNORE));
    moves = 0;
    WRONG(MPI_ERR_ARG, MPI_File_write_at_all(file, me ? -1 : 0, other, RECORDS_BYTES, MPI_BYTE, MPI_STATUS_IGNORE));
    /* Offsets beyond the largest that a file can have in this view, or that wrap around to valid ones. */
    static const MPI_Offset far[] = {(MPI_Offset)1 << 62, ((MPI_Offset)1 << 62) + ((MPI_Offset)1 << 61), INT64_MAX,
                                     INT64_MAX - RECORDS_BYTES, INT64_MAX / 6 * 5};
    for (int i = 0; i < (int)(sizeof far / sizeof far[0]); i++)
        WRONG(MPI_ERR_ARG, MPI_File_write_at_all(file, me ? far[i] : 0, other, RECORDS_BYTES, MPI_BYTE, MPI_STATUS_IGNORE));
#undef WRONG
    for (int i = 0; i < (int)(sizeof far / sizeof far[0]); i++) {
        memset(other, 0, sizeof other);
        int code = MPI_File_read_at_all(file, me ? far[i] : 0, other, RECORDS_BYTES, MPI_BYTE, MPI_STATUS_IGNORE);
        CHECK(class_of(code) == (me || together ? MPI_ERR_ARG : MPI_SUCCESS));
        CHECK(other[0] == (me || together ? 0 : byte) && other[RECORDS_BYTES - 1] == other[0]);
        MPI_Offset at = -1;
        FAILS(MPI_ERR_ARG, MPI_File_get_byte_offset(file, far[i], &at));
        CHECK(at == -1);
    }
    /* With the individual pointer at such an offset no data are written, and the pointer stays. */
    OK(MPI_File_seek(file, me ? far[0] : 0, MPI_SEEK_SET));
    int code = MPI_File_write_all(file, data, RECORDS_BYTES, MPI_BYTE, MPI_STATUS_IGNORE);
    CHECK(class_of(code) == (me || together ? MPI_ERR_ARG : MPI_SUCCESS));
    OK(MPI_File_get_position(file, &now));
    CHECK(now == (me ? far[0] : together ? 0 : RECORDS_BYTES));
    CHECK(records_are(file, me || together ? byte : data[0]));
    MPI_Offset size_now = 0;
    OK(MPI_File_get_size(file, &size_now));
    CHECK(size_now == bytes);
    OK(MPI_File_close(&file));
}

/*
 * One rank's data are far behind the others', as is normal in a sparse file. A call must not step through the whole
 * gap.
 */
static void far_apart(const char *cb) {
    bool is_volume = strncmp(name, "forebay:", 8) == 0 && name[8] != '/';
    const MPI_Offset far = (MPI_Offset)1 << (is_volume ? 20 : 40);
    MPI_File file = open_with(MPI_MODE_RDWR, cb);
    unsigned char data[RECORDS_BYTES], back[RECORDS_BYTES] = {0};
    memset(data, 101 + rank, sizeof data);
    OK(MPI_File_set_size(file, 0));
    set_records(file);
    OK(MPI_File_write_at_all(file, rank == 0 ? far : 0, data, sizeof data, MPI_BYTE, MPI_STATUS_IGNORE));
    MPI_Barrier(MPI_COMM_WORLD);
    OK(MPI_File_read_at(file, rank == 0 ? far : 0, back, sizeof back, MPI_BYTE, MPI_STATUS_IGNORE));
    CHECK(memcmp(data, back, sizeof data) == 0);
    memset(back, 0, sizeof back);
    MPI_Status status;
    int got = 0;
    OK(MPI_File_read_at_all(file, rank == 0 ? far : 0, back, sizeof back, MPI_BYTE, &status));
    MPI_Get_count(&status, MPI_BYTE, &got);
    CHECK(got == sizeof back && memcmp(data, back, sizeof data) == 0);
    MPI_Barrier(MPI_COMM_WORLD);
    OK(MPI_File_set_size(file, 0));
    OK(MPI_File_close(&file));
}

/* Calls on a file that was closed. */
static void closed(void) {
    MPI_File file = open_with(MPI_MODE_RDWR, NULL), stale = file;
    MPI_Offset at;
    MPI_Info info;
    int word = 0, flag;
    OK(MPI_File_close(&file));
    FAILS(MPI_ERR_FILE, MPI_File_write_at(stale, 0, &word, 1, MPI_INT, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_FILE, MPI_File_read_all(stale, &word, 1, MPI_INT, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_FILE, MPI_File_set_view(stale, 0, MPI_INT, MPI_INT, "native", MPI_INFO_NULL));
    FAILS(MPI_ERR_FILE, MPI_File_get_size(stale, &at));
    FAILS(MPI_ERR_FILE, MPI_File_seek(stale, 0, MPI_SEEK_SET));
    FAILS(MPI_ERR_FILE, MPI_File_sync(stale));
    FAILS(MPI_ERR_FILE, MPI_File_get_info(stale, &info));
    FAILS(MPI_ERR_FILE, MPI_File_set_atomicity(stale, 1));
    FAILS(MPI_ERR_FILE, MPI_File_get_atomicity(stale, &flag));
    MPI_Barrier(MPI_COMM_WORLD);
}

/*
 * A pool of about 64 MiB that collective calls fill, with both kinds of buffering: with two-phase an error on all
 * ranks.
 */
static void full(const char *cb) {
    enum { RUN = 4096, RUNS = 256 };
    MPI_File file = open_with(MPI_MODE_RDWR | MPI_MODE_CREATE | MPI_MODE_DELETE_ON_CLOSE, cb);
    MPI_Datatype run, turn;
    static char block[RUN * RUNS], back[RUN];
    memset(block, rank + 1, sizeof block);
    MPI_Type_contiguous(RUN, MPI_BYTE, &run);
    MPI_Type_create_resized(run, 0, (MPI_Aint)RUN * size, &turn);
    MPI_Type_commit(&turn);
    OK(MPI_File_set_view(file, (MPI_Offset)RUN * rank, MPI_BYTE, turn, "native", MPI_INFO_NULL));
    int mine = MPI_SUCCESS, any = 0;
    for (int i = 0; i < 512 && !any; i++) {
        mine = class_of(MPI_File_write_all(file, block, sizeof block, MPI_BYTE, MPI_STATUS_IGNORE));
        CHECK(mine == MPI_SUCCESS || mine == MPI_ERR_NO_SPACE);
        int fails = mine != MPI_SUCCESS;
        MPI_Allreduce(&fails, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    }
    CHECK(any);
    CHECK(strcmp(cb, "enable") != 0 || size == 1 || mine == MPI_ERR_NO_SPACE);
    OK(MPI_File_read_at(file, 0, back, RUN, MPI_BYTE, MPI_STATUS_IGNORE));
    CHECK(back[0] == rank + 1 && back[RUN - 1] == rank + 1);
    OK(MPI_File_close(&file));
    MPI_Type_free(&run);
    MPI_Type_free(&turn);
}

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 2 && argc != 3)
        return 2;
    snprintf(name, sizeof name, "%s", argv[1]);
    if (argc == 3) {
        full("disable");
        full("enable");
        return end();
    }
    MPI_File file = open_with(MPI_MODE_RDWR | MPI_MODE_CREATE, NULL);
    OK(MPI_File_close(&file));
    if (size > 1) {
        different_arguments();
        different_opens();
    }
    for (int together = 0; together < 2; together++) {
        const char *cb = together ? "enable" : "disable";
        accesses(cb);
        amodes(cb);
        one_wrong(cb, 0);
        one_wrong(cb, size - 1);
        far_apart(cb);
    }
    closed();
    if (rank == 0)
        OK(MPI_File_delete(name, MPI_INFO_NULL));
    return end();
}
