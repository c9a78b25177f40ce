/*
 * A module that contains PnetCDF, loaded with RTLD_LOCAL: module LIBRARY FILE, where LIBRARY is this file built with
 * -DMODULE. Its stand-in for PnetCDF returns as the format how many KiB of the file it can see.
 */
#ifdef MODULE

#include <sys/stat.h>

int ncmpi_inq_file_format(const char *path, int *format) {
    struct stat st;
    if (stat(path, &st) != 0)
        return -1;
    *format = (int)(st.st_size / 1024);
    return 0;
}

/* Calls through the symbol that is first in the process's search order. */
int module_open(const char *path) {
    int format = -1, code = ncmpi_inq_file_format(path, &format);
    return code == 0 ? format : code;
}

#else

#include "check.h"

#include <dlfcn.h>
#include <sys/resource.h>

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 3)
        return 2;
    MPI_Info info;
    MPI_Info_create(&info);
    MPI_Info_set(info, "striping_factor", "3");
    MPI_File file;
    OK(MPI_File_open(MPI_COMM_WORLD, argv[2], MPI_MODE_RDWR | MPI_MODE_CREATE, info, &file));
    OK(MPI_File_set_size(file, 1 << 20));
    OK(MPI_File_close(&file));
    MPI_Info_free(&info);
    int format = 0;
    int (*look)(const char *, int *) = (int (*)(const char *, int *))dlsym(RTLD_DEFAULT, "ncmpi_inq_file_format");
    CHECK(look != NULL && look(argv[2], &format) == -204); /* NC_EFILE: no PnetCDF is loaded */
    /* The file exceeds this process's limit of file sizes: only its beginning is copied. */
    struct rlimit limit = {128 << 10, 128 << 10};
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    for (int i = 0; i < 2; i++) {
        void *module = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
        int (*open)(const char *) = module != NULL ? (int (*)(const char *))dlsym(module, "module_open") : NULL;
        CHECK(open != NULL && open(argv[2]) == 64);
        if (module != NULL)
            dlclose(module);
        CHECK(look != NULL && look(argv[2], &format) == -204); /* PnetCDF is unloaded again */
    }
    return end();
}

#endif
