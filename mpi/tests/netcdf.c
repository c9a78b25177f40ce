/*
 * Parallel NetCDF-4: variables {t:x:y:z} of int, double and byte, chunked and contiguous, written and read collectively
 * and independently, split over x and y, one t an iteration. In chunked variables that are written collectively t is
 * unlimited, as a dimension can only grow collectively. netcdf FILE; the file is the same wherever it is written. Each
 * rank reads the data of another.
 */
#include "check.h"

#include <netcdf.h>
#include <netcdf_par.h>

enum { T = 3, X = 8, Y = 8, Z = 5, VARIABLES = 12 };

#define NC(call)                                                                                                       \
    do {                                                                                                               \
        int code = (call);                                                                                             \
        if (code != NC_NOERR) {                                                                                        \
            failures++;                                                                                                \
            printf("%s:%d: rank %d: %s: %s\n", __FILE__, __LINE__, rank, #call, nc_strerror(code));                    \
            fflush(stdout);                                                                                            \
        }                                                                                                              \
    } while (0)

static const nc_type types[3] = {NC_INT, NC_DOUBLE, NC_BYTE};
static const char *const type_names[3] = {"int", "double", "byte"};

static double value(int t, int x, int y, int z, int type) {
    int all = ((t * X + x) * Y + y) * Z + z;
    return type == 0 ? all * 3 - 1000 : type == 1 ? all / 7.0 : all % 251 - 125;
}

/* A rank's part of x and y, for one, two or four ranks. */
static void part(int who, size_t start[4], size_t count[4]) {
    int across = size == 4 ? 2 : 1, along = size / across;
    start[1] = (size_t)(X / along * (who / across));
    start[2] = (size_t)(Y / across * (who % across));
    count[1] = (size_t)(X / along);
    count[2] = (size_t)(Y / across);
    start[3] = 0;
    count[3] = Z;
    count[0] = 1;
}

static void fill(void *data, int t, const size_t start[4], const size_t count[4], int type) {
    int at = 0;
    for (size_t x = start[1]; x < start[1] + count[1]; x++)
        for (size_t y = start[2]; y < start[2] + count[2]; y++)
            for (size_t z = 0; z < Z; z++, at++) {
                double v = value(t, (int)x, (int)y, (int)z, type);
                if (type == 0)
                    ((int *)data)[at] = (int)v;
                else if (type == 1)
                    ((double *)data)[at] = v;
                else
                    ((signed char *)data)[at] = (signed char)v;
            }
}

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 2 || (size != 1 && size != 2 && size != 4))
        return 2;
    int file, dims[5], variable[VARIABLES], mode[VARIABLES];
    NC(nc_create_par(argv[1], NC_NETCDF4 | NC_CLOBBER, MPI_COMM_WORLD, MPI_INFO_NULL, &file));
    NC(nc_def_dim(file, "t_unlimited", NC_UNLIMITED, &dims[0]));
    NC(nc_def_dim(file, "t", T, &dims[4]));
    NC(nc_def_dim(file, "x", X, &dims[1]));
    NC(nc_def_dim(file, "y", Y, &dims[2]));
    NC(nc_def_dim(file, "z", Z, &dims[3]));
    for (int i = 0; i < VARIABLES; i++) {
        int type = i % 3, chunked = i / 3 % 2, collective = i / 6;
        char name[64];
        size_t chunk[4] = {1, 3, 4, Z};
        int own[4] = {chunked && collective ? dims[0] : dims[4], dims[1], dims[2], dims[3]};
        snprintf(name, sizeof name, "%s_%s_%s", chunked ? "chunked" : "contiguous",
                 collective ? "collective" : "independent", type_names[type]);
        NC(nc_def_var(file, name, types[type], 4, own, &variable[i]));
        NC(nc_def_var_chunking(file, variable[i], chunked ? NC_CHUNKED : NC_CONTIGUOUS, chunked ? chunk : NULL));
        mode[i] = collective ? NC_COLLECTIVE : NC_INDEPENDENT;
    }
    NC(nc_enddef(file));
    double data[X * Y * Z], back[X * Y * Z];
    size_t start[4], count[4];
    for (int t = 0; t < T; t++)
        for (int i = 0; i < VARIABLES; i++) {
            part(rank, start, count);
            start[0] = (size_t)t;
            fill(data, t, start, count, i % 3);
            NC(nc_var_par_access(file, variable[i], mode[i]));
            NC(nc_put_vara(file, variable[i], start, count, data));
        }
    NC(nc_close(file));
    MPI_Barrier(MPI_COMM_WORLD);
    NC(nc_open_par(argv[1], NC_NOWRITE, MPI_COMM_WORLD, MPI_INFO_NULL, &file));
    for (int t = 0; t < T; t++)
        for (int i = 0; i < VARIABLES; i++) {
            part((rank + 1) % size, start, count);
            start[0] = (size_t)t;
            int width = i % 3 == 0 ? 4 : i % 3 == 1 ? 8 : 1;
            fill(data, t, start, count, i % 3);
            memset(back, 0xee, sizeof back);
            NC(nc_var_par_access(file, variable[i], i / 6 ? NC_COLLECTIVE : NC_INDEPENDENT));
            NC(nc_get_vara(file, variable[i], start, count, back));
            CHECK(memcmp(data, back, count[1] * count[2] * Z * (size_t)width) == 0);
        }
    NC(nc_close(file));
    return end();
}
