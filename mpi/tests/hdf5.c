/*
 * Parallel HDF5: contiguous, chunked and compressed, collective and independent, with fill values and a dimension that
 * grows. hdf5 FILE [compressed]: the file is the same wherever it is written. With compression only its datasets are
 * the same, as HDF5 itself writes different bytes each time for compressed chunks of several ranks.
 */
#include "check.h"

#include <hdf5.h>

enum { ROWS = 60, COLUMNS = 48, DATASETS = 5 };

static void dataset(hid_t file, const char *name, int chunked, int collective, int compressed) {
    hsize_t all[2] = {ROWS, COLUMNS}, most[2] = {H5S_UNLIMITED, COLUMNS}, chunk[2] = {7, 16};
    hid_t properties = H5Pcreate(H5P_DATASET_CREATE), transfer = H5Pcreate(H5P_DATASET_XFER);
    int fill = -7;
    H5Pset_obj_track_times(properties, 0);
    H5Pset_fill_value(properties, H5T_NATIVE_INT, &fill);
    if (chunked)
        H5Pset_chunk(properties, 2, chunk);
    if (compressed) {
        H5Pset_shuffle(properties);
        H5Pset_deflate(properties, 4);
    }
    H5Pset_dxpl_mpio(transfer, collective ? H5FD_MPIO_COLLECTIVE : H5FD_MPIO_INDEPENDENT);
    hid_t space = H5Screate_simple(2, all, chunked ? most : NULL);
    hid_t set = H5Dcreate2(file, name, H5T_NATIVE_INT, space, H5P_DEFAULT, properties, H5P_DEFAULT);
    CHECK(set >= 0);
    H5Sclose(space);
    if (chunked) {
        all[0] = 2 * ROWS;
        CHECK(H5Dset_extent(set, all) >= 0);
    }
    /* Every size-th column of the first ROWS rows. */
    space = H5Dget_space(set);
    hsize_t start[2] = {0, rank}, stride[2] = {1, size}, count[2] = {ROWS, (COLUMNS - rank + size - 1) / size};
    CHECK(H5Sselect_hyperslab(space, H5S_SELECT_SET, start, stride, count, NULL) >= 0);
    hid_t memory = H5Screate_simple(2, count, NULL);
    int bytes = (int)(count[0] * count[1] * sizeof(int)), *data = malloc(bytes), *back = malloc(bytes);
    for (int i = 0; i < bytes / (int)sizeof(int); i++)
        data[i] = (i / (int)count[1]) * 1000 + (i % (int)count[1]) * size + rank;
    CHECK(H5Dwrite(set, H5T_NATIVE_INT, memory, space, transfer, data) >= 0);
    CHECK(H5Dread(set, H5T_NATIVE_INT, memory, space, transfer, back) >= 0);
    CHECK(memcmp(data, back, bytes) == 0);
    H5Sclose(memory);
    H5Sclose(space);
    H5Dclose(set);
    H5Pclose(properties);
    H5Pclose(transfer);
    free(data);
    free(back);
}

static void read_whole(hid_t file, const char *name, int rows) {
    static int whole[2 * ROWS][COLUMNS];
    hid_t set = H5Dopen2(file, name, H5P_DEFAULT);
    CHECK(H5Dread(set, H5T_NATIVE_INT, H5S_ALL, H5S_ALL, H5P_DEFAULT, whole) >= 0);
    int wrong = 0;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++)
            wrong += whole[r][c] != (r < ROWS ? r * 1000 + c : -7);
    CHECK(wrong == 0);
    H5Dclose(set);
}

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 2 && argc != 3)
        return 2;
    int datasets = argc == 3 ? DATASETS : DATASETS - 1;
    hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    H5Pset_fapl_mpio(access, MPI_COMM_WORLD, MPI_INFO_NULL);
    hid_t file = H5Fcreate(argv[1], H5F_ACC_TRUNC, H5P_DEFAULT, access);
    CHECK(file >= 0);
    static const char *const names[DATASETS] = {"independent", "collective", "chunked-independent", "chunked-collective",
                                                "compressed"};
    for (int i = 0; i < datasets; i++)
        dataset(file, names[i], i > 1, i == 4 || i % 2, i == 4); /* compressed datasets are written collectively */
    CHECK(H5Fclose(file) >= 0);
    file = H5Fopen(argv[1], H5F_ACC_RDONLY, access);
    CHECK(file >= 0);
    for (int i = 0; i < datasets; i++)
        read_whole(file, names[i], i < 2 ? ROWS : 2 * ROWS);
    CHECK(H5Fclose(file) >= 0);
    H5Pclose(access);
    return end();
}
