/*
 * A close in which all ranks wait for the last one: late FILE GO [dies]. The last rank enters it when GO, a file
 * outside the pool, exists. Temporary failures of daemons meanwhile must cause no error on any rank. This is done
 * twice: for a file that is deleted on close, and for one that stays. With `dies`, rank 0 is killed in its close before
 * the last rank enters; the others' closes return, and each rank prints its own result.
 */
#include "check.h"

#include <pthread.h>
#include <signal.h>

enum { WAIT_US = 10000, WAITS = 8000 };
static const char *go;

static void wait_for_go(void) {
    for (int i = 0; i < WAITS && access(go, F_OK) != 0; i++)
        usleep(WAIT_US);
}

static void *die(void *nothing) {
    wait_for_go();
    kill(getpid(), SIGKILL);
    return nothing;
}

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 3 && argc != 4)
        return 2;
    go = argv[2];
    pthread_t thread;
    MPI_File files[2];
    char names[2][4200];
    for (int i = 0; i < 2; i++) {
        int amode = MPI_MODE_RDWR | MPI_MODE_CREATE | (i == 1 ? MPI_MODE_DELETE_ON_CLOSE : 0);
        snprintf(names[i], sizeof names[i], "%s.%d", argv[1], i);
        OK(MPI_File_open(MPI_COMM_WORLD, names[i], amode, MPI_INFO_NULL, &files[i]));
        OK(MPI_File_write_shared(files[i], &rank, 1, MPI_INT, MPI_STATUS_IGNORE));
    }
    int first = (int)getpid();
    MPI_Bcast(&first, 1, MPI_INT, 0, MPI_COMM_WORLD);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) {
        printf("in the close\n");
        fflush(stdout);
    }
    /* The MPI library may itself detect that a rank is gone. */
    if (argc == 4)
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (rank == 0 && argc == 4)
        pthread_create(&thread, NULL, die, NULL);
    if (rank == size - 1)
        wait_for_go();
    for (int i = 0; rank == size - 1 && argc == 4 && i < WAITS && kill(first, 0) == 0; i++)
        usleep(WAIT_US);
    if (argc == 4) {
        /* Some ranks may have met rank 0 in this close, which rank 0 then did not finish. */
        MPI_File_close(&files[1]);
        CHECK(MPI_File_close(&files[0]) != MPI_SUCCESS);
        printf("rank %d of %d %s\n", rank, size, failures == 0 ? "went on" : "FAILED");
        fflush(stdout);
        _exit(failures != 0);
    }
    for (int i = 1; i >= 0; i--)
        OK(MPI_File_close(&files[i]));
    FAILS(MPI_ERR_NO_SUCH_FILE, MPI_File_open(MPI_COMM_SELF, names[1], MPI_MODE_RDONLY, MPI_INFO_NULL, &files[1]));
    OK(MPI_File_open(MPI_COMM_WORLD, names[0], MPI_MODE_RDONLY | MPI_MODE_DELETE_ON_CLOSE, MPI_INFO_NULL, &files[0]));
    MPI_Offset bytes = 0;
    OK(MPI_File_get_size(files[0], &bytes));
    CHECK(bytes == (MPI_Offset)(size * sizeof rank));
    OK(MPI_File_close(&files[0]));
    return end();
}
