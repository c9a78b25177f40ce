/*
 * A rank that is killed during atomic writes, while the others continue: survivors FILE RANK [together]. Its lock is
 * released when its node detects its death. With shared memory (`together`) nothing else is lost. If a daemon keeps the
 * shared pointer, the pointer works as long as rank 0 lives, and fails afterwards. No rank hangs. Each survivor prints
 * its own result, as calls among all ranks no longer complete.
 */
#include "check.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BYTES = 1 << 20, WRITES = 30 };

static void *die(void *nothing) {
    usleep(100000);
    kill(getpid(), SIGKILL);
    return nothing;
}

/* Each rank makes a directory when it has written; rank 0 waits for those of all that live, and removes them. */
static void ends_after_others(const char *file, int dead) {
    char name[4200];
    for (int other = rank == 0 ? 1 : rank; other < (rank == 0 ? size : rank + 1); other++) {
        snprintf(name, sizeof name, "%s.written.%d", file, other);
        if (rank > 0)
            CHECK(mkdir(name, 0700) == 0);
        else if (other != dead) {
            int code = ENOENT;
            for (; code == ENOENT; usleep(10000))
                code = rmdir(name) == 0 ? 0 : errno;
            CHECK(code == 0);
        }
    }
}

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 3 && argc != 4)
        return 2;
    MPI_File file;
    static char block[BYTES];
    int dead = atoi(argv[2]), lost = dead == 0 && argc == 3;
    pthread_t thread;
    memset(block, rank + 1, sizeof block);
    OK(MPI_File_open(MPI_COMM_WORLD, argv[1], MPI_MODE_RDWR | MPI_MODE_CREATE, MPI_INFO_NULL, &file));
    OK(MPI_File_set_atomicity(file, 1));
    OK(MPI_File_write_shared(file, block, 1, MPI_BYTE, MPI_STATUS_IGNORE));
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == dead)
        pthread_create(&thread, NULL, die, NULL);
    for (int i = 0; i < WRITES || rank == dead; i++) {
        int code = MPI_File_write_at(file, 0, block, sizeof block, MPI_BYTE, MPI_STATUS_IGNORE);
        /* The group that rank 0 made ends with it. */
        CHECK(code == MPI_SUCCESS || (lost && class_of(code) == MPI_ERR_IO));
    }
    int code = MPI_SUCCESS;
    for (int tries = 0; lost && code == MPI_SUCCESS && tries < 2000; tries++) {
        usleep(10000);
        code = MPI_File_write_shared(file, block, 1, MPI_BYTE, MPI_STATUS_IGNORE);
    }
    if (lost)
        CHECK(class_of(code) == MPI_ERR_IO);
    else
        OK(MPI_File_write_shared(file, block, 1, MPI_BYTE, MPI_STATUS_IGNORE));
    /* All ranks have moved the pointer twice, the dead one once. */
    for (MPI_Offset at = 0; (rank == 0 || argc == 4) && at < 2 * size - 1; usleep(10000))
        OK(MPI_File_get_position_shared(file, &at));
    /* Rank 0 ends last: a rank that has moved the pointer may still be writing. */
    if (!lost && argc == 3)
        ends_after_others(argv[1], dead);
    /* No rank waits for a rank 0 that is known to be gone. */
    if (lost)
        FAILS(MPI_ERR_IO, MPI_File_close(&file));
    if (argc == 4) {
        /* Files opened by one rank alone need no other rank. */
        MPI_File own;
        char name[4200];
        snprintf(name, sizeof name, "%s.%d", argv[1], rank);
        OK(MPI_File_open(MPI_COMM_SELF, name, MPI_MODE_RDWR | MPI_MODE_CREATE | MPI_MODE_DELETE_ON_CLOSE, MPI_INFO_NULL, &own));
        OK(MPI_File_write_shared(own, block, 1, MPI_BYTE, MPI_STATUS_IGNORE));
        OK(MPI_File_close(&own));
    }
    printf("rank %d of %d %s\n", rank, size, failures == 0 ? "went on" : "FAILED");
    fflush(stdout);
    _exit(failures != 0);
}
