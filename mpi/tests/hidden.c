/*
 * Ranks that may not see rank 0 in /proc open a file often: hidden FILE. That must not use up resources of rank 0, and
 * the ranks must have a shared pointer and atomic mode as others have. Prints a line if every rank can see rank 0.
 * hidden FILE WORD instead opens the file once, while no rank knows yet that another lacks the memory; WORD selects the
 * first call that needs the memory.
 */
#include "check.h"

#include <dirent.h>
#include <linux/capability.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { OPENS = 600 };

/* Memfds of the driver that this process has created. */
static int memfds(void) {
    char path[300], target[300];
    int count = 0;
    DIR *dir = opendir("/proc/self/fd");
    for (struct dirent *entry; dir != NULL && (entry = readdir(dir)) != NULL;) {
        snprintf(path, sizeof path, "/proc/self/fd/%s", entry->d_name);
        ssize_t n = readlink(path, target, sizeof target - 1);
        if (n > 0) {
            target[n] = 0;
            count += strstr(target, "forebay-mpi") != NULL;
        }
    }
    if (dir != NULL)
        closedir(dir);
    return count;
}

/* The first file that these ranks open together. */
static void first_open(const char *path, const char *word) {
    MPI_File file;
    char bytes[3] = "abc";
    if (rank == 0) {
        OK(MPI_File_open(MPI_COMM_SELF, path, MPI_MODE_RDWR | MPI_MODE_CREATE, MPI_INFO_NULL, &file));
        OK(MPI_File_write_at(file, 0, bytes, 3, MPI_BYTE, MPI_STATUS_IGNORE));
        OK(MPI_File_close(&file));
    }
    MPI_Barrier(MPI_COMM_WORLD);
    bool appends = strcmp(word, "append") == 0;
    OK(MPI_File_open(MPI_COMM_WORLD, path, MPI_MODE_RDWR | (appends ? MPI_MODE_APPEND : 0), MPI_INFO_NULL, &file));
    MPI_Offset at = -1, before = appends ? 3 : 0;
    if (strcmp(word, "atomicity") == 0) {
        OK(MPI_File_set_atomicity(file, 1));
    } else if (strcmp(word, "seek") == 0) {
        before = 2;
        OK(MPI_File_seek_shared(file, before, MPI_SEEK_SET));
    }
    OK(MPI_File_write_shared(file, bytes, 1, MPI_BYTE, MPI_STATUS_IGNORE));
    MPI_Barrier(MPI_COMM_WORLD);
    OK(MPI_File_get_position_shared(file, &at));
    CHECK(at == before + size);
    OK(MPI_File_close(&file));
}

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 2 && argc != 3)
        return 2;
    /* Rank 0 may have capabilities when it runs as root. A rank without any capability then cannot look into it. */
    if (rank != 0) {
        struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
        struct __user_cap_data_struct none[2] = {{0}};
        CHECK(syscall(SYS_capset, &header, none) == 0);
    }
    long rank0 = getpid();
    MPI_Bcast(&rank0, 1, MPI_LONG, 0, MPI_COMM_WORLD);
    char path[64];
    /* The directory may be readable although its entries are not. */
    snprintf(path, sizeof path, "/proc/%ld/fd/0", rank0);
    char target[256];
    int sees = rank != 0 && readlink(path, target, sizeof target) >= 0;
    if (sees)
        printf("rank %d sees rank 0\n", rank);
    if (argc == 3) {
        first_open(argv[1], argv[2]);
        return end();
    }
    MPI_File file;
    OK(MPI_File_open(MPI_COMM_WORLD, argv[1], MPI_MODE_RDWR | MPI_MODE_CREATE, MPI_INFO_NULL, &file));
    OK(MPI_File_close(&file));
    for (int i = 0; i < OPENS; i++) {
        OK(MPI_File_open(MPI_COMM_WORLD, argv[1], MPI_MODE_RDWR, MPI_INFO_NULL, &file));
        OK(MPI_File_close(&file));
    }
    /* One memfd that some ranks could not open, and one that had a name. */
    CHECK(memfds() <= 2);
    OK(MPI_File_open(MPI_COMM_WORLD, argv[1], MPI_MODE_RDWR, MPI_INFO_NULL, &file));
    char byte = (char)rank;
    OK(MPI_File_write_at(file, rank, &byte, 1, MPI_BYTE, MPI_STATUS_IGNORE));
    MPI_Offset at = -1;
    OK(MPI_File_set_size(file, 0));
    OK(MPI_File_write_shared(file, &byte, 1, MPI_BYTE, MPI_STATUS_IGNORE));
    OK(MPI_File_write_ordered(file, &byte, 1, MPI_BYTE, MPI_STATUS_IGNORE));
    OK(MPI_File_get_position_shared(file, &at));
    CHECK(at == 2 * size);
    byte = 99;
    OK(MPI_File_read_at(file, size + rank, &byte, 1, MPI_BYTE, MPI_STATUS_IGNORE));
    CHECK(byte == rank);
    OK(MPI_File_set_atomicity(file, 1));
    OK(MPI_File_write_at(file, rank, &byte, 1, MPI_BYTE, MPI_STATUS_IGNORE));
    MPI_Barrier(MPI_COMM_WORLD);
    OK(MPI_File_close(&file));
    return end();
}
