/*
 * Calls that return on no rank before all ranks have entered them, as programs written for ROMIO and OMPIO expect:
 * meeting FILE. The last rank enters late, after a write: when the call has returned on another rank, that rank reads
 * the written data. For a close also: all ranks have released the file, and an error on one rank does not block the
 * others. And the shared pointer, which starts at 0 with each view whatever other ranks did before.
 */
#include "check.h"

#include <errno.h>
#include <fcntl.h>

enum { LATE_US = 150000, WORDS = 1000, VIEWS = 60 };
static const char *name;
static int step; /* makes the written data differ each time */

static void come(MPI_File file) {
    if (rank == size - 1) {
        usleep(LATE_US);
        OK(MPI_File_write_at(file, 0, &step, 1, MPI_INT, MPI_STATUS_IGNORE));
    }
}

static void is_there(MPI_File file) {
    int got = -1;
    OK(MPI_File_read_at(file, 0, &got, 1, MPI_INT, MPI_STATUS_IGNORE));
    CHECK(got == step);
    MPI_Barrier(MPI_COMM_WORLD);
    step++;
}

static MPI_File open_by(MPI_Comm comm, const char *path, int amode) {
    MPI_File file = MPI_FILE_NULL;
    OK(MPI_File_open(comm, path, amode, MPI_INFO_NULL, &file));
    return file;
}

/* Calls on an open file. The opens, which may create, are of another file. */
static void calls(void) {
    MPI_File file = open_by(MPI_COMM_WORLD, name, MPI_MODE_RDWR | MPI_MODE_CREATE);
#define MEET(call)                                                                                                     \
    do {                                                                                                               \
        come(file);                                                                                                    \
        call;                                                                                                          \
        is_there(file);                                                                                                \
    } while (0)
    MEET(OK(MPI_File_sync(file)));
    MEET(OK(MPI_File_set_size(file, 100)));
    MEET(OK(MPI_File_preallocate(file, 200)));
    MEET(OK(MPI_File_set_view(file, 0, MPI_INT, MPI_INT, "native", MPI_INFO_NULL)));
    MEET(OK(MPI_File_set_atomicity(file, 1)));
    MEET(OK(MPI_File_set_atomicity(file, 0)));
    MEET(OK(MPI_File_seek_shared(file, 0, MPI_SEEK_SET)));
    char other[4200];
    snprintf(other, sizeof other, "%s.other", name);
    MPI_File second;
    MEET(second = open_by(MPI_COMM_WORLD, other, MPI_MODE_RDWR | MPI_MODE_CREATE));
    OK(MPI_File_close(&second));
    MEET(second = open_by(MPI_COMM_WORLD, other, MPI_MODE_RDWR | MPI_MODE_DELETE_ON_CLOSE));
    MEET(OK(MPI_File_close(&second)));
    /* The name no longer exists once any rank's close has returned. */
    FAILS(MPI_ERR_NO_SUCH_FILE, MPI_File_open(MPI_COMM_SELF, other, MPI_MODE_RDONLY, MPI_INFO_NULL, &second));
    OK(MPI_File_close(&file));
}

static void closes(void) {
    /* As in programs that write collectively, close, and check the result on one rank. */
    MPI_File file = open_by(MPI_COMM_WORLD, name, MPI_MODE_RDWR | MPI_MODE_CREATE);
    static int words[WORDS], back[WORDS];
    for (int i = 0; i < WORDS; i++)
        words[i] = rank * WORDS + i;
    if (rank == size - 1)
        usleep(LATE_US);
    OK(MPI_File_write_at_all(file, (MPI_Offset)rank * sizeof words, words, WORDS, MPI_INT, MPI_STATUS_IGNORE));
    OK(MPI_File_close(&file));
    if (rank == 0) {
        file = open_by(MPI_COMM_SELF, name, MPI_MODE_RDONLY);
        for (int of = 0; of < size; of++) {
            OK(MPI_File_read(file, back, WORDS, MPI_INT, MPI_STATUS_IGNORE));
            for (int i = 0; i < WORDS; i++)
                if (back[i] != of * WORDS + i) {
                    CHECK(!"rank 0 reads what all wrote");
                    break;
                }
        }
        OK(MPI_File_close(&file));
    }
    MPI_Barrier(MPI_COMM_WORLD);
    /* open(2) can open a file of several backing files that no rank has open any more. */
    file = open_by(MPI_COMM_WORLD, name, MPI_MODE_RDWR);
    if (rank == size - 1)
        usleep(LATE_US);
    OK(MPI_File_close(&file));
    if (rank == 0) {
        int fd = open(name, O_RDWR);
        CHECK(fd >= 0 || errno == ENOENT); /* ENOENT: forebay:..., which only MPI-IO understands */
        CHECK(fd < 0 || (read(fd, back, sizeof back) == sizeof back && back[WORDS - 1] == WORDS - 1));
        if (fd >= 0)
            close(fd);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    /* An error on one rank is returned on that rank only. It waits for the others, and they wait for it. */
    file = open_by(MPI_COMM_WORLD, name, MPI_MODE_RDWR);
    if (rank == size - 1)
        OK(MPI_File_write_at_all_begin(file, 0, words, 1, MPI_INT));
    int code = MPI_File_close(&file);
    CHECK(class_of(code) == (rank == size - 1 ? MPI_ERR_OTHER : MPI_SUCCESS));
    CHECK(file == MPI_FILE_NULL);
}

static void pointers(void) {
    MPI_File file = open_by(MPI_COMM_WORLD, name, MPI_MODE_RDWR | MPI_MODE_CREATE);
    MPI_Offset at = -1;
    int word = rank;
    for (int i = 0; i < VIEWS; i++) {
        /* Some ranks enter after moving the pointer, some at once, some late. */
        for (int j = 0; j < (i + rank) % 4; j++)
            OK(MPI_File_write_shared(file, &word, 1, MPI_INT, MPI_STATUS_IGNORE));
        if ((i + rank) % 7 == 0)
            usleep(1000);
        OK(MPI_File_set_view(file, i % 3 * 4, MPI_INT, MPI_INT, "native", MPI_INFO_NULL));
        OK(MPI_File_write_shared(file, &word, 1, MPI_INT, MPI_STATUS_IGNORE));
        MPI_Barrier(MPI_COMM_WORLD);
        OK(MPI_File_get_position_shared(file, &at));
        CHECK(at == size);
        MPI_Barrier(MPI_COMM_WORLD);
        /* A refused view leaves the pointer unchanged. */
        MPI_Offset disp = rank == size - 1 ? -1 : 0;
        FAILS(MPI_ERR_ARG, MPI_File_set_view(file, disp, MPI_INT, MPI_INT, "native", MPI_INFO_NULL));
        OK(MPI_File_get_position_shared(file, &at));
        CHECK(at == size);
        MPI_Barrier(MPI_COMM_WORLD);
    }
    OK(MPI_File_close(&file));
}

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 2)
        return 2;
    name = argv[1];
    calls();
    closes();
    pointers();
    if (rank == 0)
        OK(MPI_File_delete(name, MPI_INFO_NULL));
    return end();
}
