/* Another MPI library in the process, loaded before this one is initialized: two LIBRARY FILE. */
#include "check.h"

#include <dlfcn.h>

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    void *other = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (other == NULL) {
        printf("%s\n", dlerror());
        return 3;
    }
    begin(&argc, &argv);
    CHECK(dlsym(other, "MPI_File_open") != NULL);
    MPI_File file;
    int mine = rank + 7, back = 0;
    OK(MPI_File_open(MPI_COMM_WORLD, argv[2], MPI_MODE_RDWR | MPI_MODE_CREATE, MPI_INFO_NULL, &file));
    OK(MPI_File_write_at_all(file, (MPI_Offset)sizeof mine * rank, &mine, 1, MPI_INT, MPI_STATUS_IGNORE));
    MPI_Barrier(MPI_COMM_WORLD);
    OK(MPI_File_read_at_all(file, (MPI_Offset)sizeof mine * ((rank + 1) % size), &back, 1, MPI_INT, MPI_STATUS_IGNORE));
    CHECK(back == (rank + 1) % size + 7);
    OK(MPI_File_close(&file));
    return end();
}
