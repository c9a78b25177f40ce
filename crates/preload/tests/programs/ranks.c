/* A rank: writes its parts of one file and a file of its own, and checks the data of the others. `ranks DIRECTORY` */
#include <fcntl.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { COUNT = 4096, BLOCKS = 8 };

static void must(int holds, const char *what)
{
    if (!holds) {
        perror(what);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

static void opened(MPI_Comm who, const char *path, int mode, MPI_File *file)
{
    must(MPI_File_open(who, path, mode, MPI_INFO_NULL, file) == MPI_SUCCESS, path);
}

int main(int argc, char **argv)
{
    int rank, size, block[COUNT], seen[COUNT];
    char path[4096];
    MPI_File file;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);

    /*
     * Blocks of all ranks in turn: each rank writes its own blocks, independently and collectively, and reads its
     * neighbour's.
     */
    snprintf(path, sizeof path, "%s/shared", argv[1]);
    opened(MPI_COMM_WORLD, path, MPI_MODE_CREATE | MPI_MODE_RDWR, &file);
    for (int b = 0; b < BLOCKS; b++) {
        MPI_Offset at = (MPI_Offset)(b * size + rank) * sizeof block;
        for (int i = 0; i < COUNT; i++)
            block[i] = (b * size + rank) * COUNT + i;
        must((b % 2 ? MPI_File_write_at(file, at, block, COUNT, MPI_INT, MPI_STATUS_IGNORE)
                    : MPI_File_write_at_all(file, at, block, COUNT, MPI_INT, MPI_STATUS_IGNORE)) == MPI_SUCCESS, "write");
    }
    MPI_File_sync(file);
    MPI_Barrier(MPI_COMM_WORLD);
    for (int b = 0; b < BLOCKS; b++) {
        int other = b * size + (rank + 1) % size;
        must(MPI_File_read_at(file, (MPI_Offset)other * sizeof seen, seen, COUNT, MPI_INT, MPI_STATUS_IGNORE) == MPI_SUCCESS, "read");
        for (int i = 0; i < COUNT; i++)
            must(seen[i] == other * COUNT + i, "what a neighbour wrote");
    }
    MPI_Offset length;
    MPI_File_get_size(file, &length);
    must(length == (MPI_Offset)size * BLOCKS * sizeof block, "length");
    MPI_File_close(&file);

    /* A view in which each rank sees every fourth number. */
    MPI_Datatype every;
    MPI_Type_vector(COUNT / 4, 1, size, MPI_INT, &every);
    MPI_Type_commit(&every);
    opened(MPI_COMM_WORLD, path, MPI_MODE_RDWR, &file);
    MPI_File_set_view(file, (MPI_Offset)rank * sizeof(int), MPI_INT, every, "native", MPI_INFO_NULL);
    for (int i = 0; i < COUNT / 4; i++)
        block[i] = -rank - 1;
    must(MPI_File_write_all(file, block, COUNT / 4, MPI_INT, MPI_STATUS_IGNORE) == MPI_SUCCESS, "write through a view");
    MPI_File_close(&file);
    MPI_Type_free(&every);

    snprintf(path, sizeof path, "%s/own%d", argv[1], rank);
    opened(MPI_COMM_SELF, path, MPI_MODE_CREATE | MPI_MODE_WRONLY, &file);
    must(MPI_File_write(file, block, COUNT / 4, MPI_INT, MPI_STATUS_IGNORE) == MPI_SUCCESS, "write of its own");
    MPI_File_close(&file);

    /* One file that all ranks have mapped. */
    snprintf(path, sizeof path, "%s/posix", argv[1]);
    int fd = open(path, O_RDWR | O_CREAT, 0644);
    must(fd >= 0 && ftruncate(fd, size * sizeof block) == 0, "a file for all");
    int *mapped = mmap(NULL, size * sizeof block, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    must(mapped != MAP_FAILED, "mmap");
    for (int i = 0; i < COUNT; i++)
        mapped[i * size + rank] = i * size + rank;
    MPI_Barrier(MPI_COMM_WORLD);
    for (int i = 0; i < COUNT * size; i++)
        must(mapped[i] == i, "what others stored");
    must(pread(fd, seen, sizeof seen, 0) == sizeof seen && seen[COUNT - 1] == COUNT - 1, "read of what was stored");
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0)
        printf("%d ranks wrote and saw all\n", size);
    MPI_Finalize();
    return 0;
}
