/*
 * PnetCDF in its three file formats: collective, independent, nonblocking and buffered writes, and a dimension that
 * grows; another rank reads everything back. pnetcdf FILE; makes FILE.1, FILE.2 and FILE.5, which are the same wherever
 * they are written.
 */
#include "check.h"

#include <pnetcdf.h>

enum { ROWS = 24, COLUMNS = 17, RECORDS = 5 };

#define NC(call)                                                                                                       \
    do {                                                                                                               \
        int code = (call);                                                                                             \
        if (code != NC_NOERR) {                                                                                        \
            failures++;                                                                                                \
            printf("%s:%d: rank %d: %s: %s\n", __FILE__, __LINE__, rank, #call, ncmpi_strerror(code));                 \
            fflush(stdout);                                                                                            \
        }                                                                                                              \
    } while (0)

static int number(int variable, int row, int column) { return variable * 100000 + row * 100 + column; }

static void fill(int *data, int variable, MPI_Offset first, MPI_Offset rows) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++)
            *data++ = number(variable, (int)first + r, c);
}

static void one_format(const char *path, int format) {
    int file, rows, columns, time, variable[4], growing, dims[2], requests[2], states[2];
    NC(ncmpi_create(MPI_COMM_WORLD, path, NC_CLOBBER | format, MPI_INFO_NULL, &file));
    NC(ncmpi_def_dim(file, "row", ROWS, &rows));
    NC(ncmpi_def_dim(file, "column", COLUMNS, &columns));
    NC(ncmpi_def_dim(file, "time", NC_UNLIMITED, &time));
    dims[0] = rows;
    dims[1] = columns;
    static const char *const names[4] = {"collective", "independent", "nonblocking", "buffered"};
    for (int i = 0; i < 4; i++)
        NC(ncmpi_def_var(file, names[i], NC_INT, 2, dims, &variable[i]));
    dims[0] = time;
    NC(ncmpi_def_var(file, "growing", NC_DOUBLE, 2, dims, &growing));
    NC(ncmpi_put_att_text(file, NC_GLOBAL, "title", 6, "tested"));
    NC(ncmpi_enddef(file));
    MPI_Offset start[2] = {rank * ROWS / size, 0}, count[2] = {(rank + 1) * ROWS / size - rank * ROWS / size, COLUMNS};
    int data[4][ROWS * COLUMNS], back[ROWS * COLUMNS];
    for (int i = 0; i < 4; i++)
        fill(data[i], i, start[0], count[0]);
    NC(ncmpi_put_vara_int_all(file, variable[0], start, count, data[0]));
    NC(ncmpi_begin_indep_data(file));
    NC(ncmpi_put_vara_int(file, variable[1], start, count, data[1]));
    NC(ncmpi_end_indep_data(file));
    NC(ncmpi_buffer_attach(file, sizeof data));
    NC(ncmpi_iput_vara_int(file, variable[2], start, count, data[2], &requests[0]));
    NC(ncmpi_bput_vara_int(file, variable[3], start, count, data[3], &requests[1]));
    memset(data[3], 0, sizeof data[3]); /* its data were copied */
    NC(ncmpi_wait_all(file, 2, requests, states));
    CHECK(states[0] == NC_NOERR && states[1] == NC_NOERR);
    NC(ncmpi_buffer_detach(file));
    for (int t = 0; t < RECORDS; t++) {
        /* Columns of the ranks in turn: strided in the file. */
        MPI_Offset from[2] = {t, rank}, many[2] = {1, (COLUMNS - rank + size - 1) / size}, stride[2] = {1, size};
        double record[COLUMNS];
        for (int c = 0; c < many[1]; c++)
            record[c] = t * 10 + (rank + c * size) / 8.0;
        NC(ncmpi_put_vars_double_all(file, growing, from, many, stride, record));
    }
    NC(ncmpi_close(file));
    MPI_Barrier(MPI_COMM_WORLD);
    NC(ncmpi_open(MPI_COMM_WORLD, path, NC_NOWRITE, MPI_INFO_NULL, &file));
    int other = (rank + 1) % size;
    start[0] = other * ROWS / size;
    count[0] = (other + 1) * ROWS / size - start[0];
    for (int i = 0; i < 4; i++) {
        fill(data[0], i, start[0], count[0]);
        memset(back, 0xee, sizeof back);
        if (i % 2 == 0) {
            NC(ncmpi_get_vara_int_all(file, variable[i], start, count, back));
        } else {
            NC(ncmpi_iget_vara_int(file, variable[i], start, count, back, &requests[0]));
            NC(ncmpi_wait_all(file, 1, requests, states));
        }
        CHECK(memcmp(data[0], back, (size_t)count[0] * COLUMNS * sizeof(int)) == 0);
    }
    double records[RECORDS][COLUMNS];
    MPI_Offset from[2] = {0, 0}, many[2] = {RECORDS, COLUMNS};
    NC(ncmpi_get_vara_double_all(file, growing, from, many, &records[0][0]));
    for (int t = 0; t < RECORDS; t++)
        for (int c = 0; c < COLUMNS; c++)
            CHECK(records[t][c] == t * 10 + c / 8.0);
    NC(ncmpi_close(file));
}

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 2)
        return 2;
    static const int formats[3] = {0, NC_64BIT_OFFSET, NC_64BIT_DATA};
    static const char *const endings[3] = {"1", "2", "5"};
    for (int i = 0; i < 3; i++) {
        char path[4200];
        snprintf(path, sizeof path, "%s.%s", argv[1], endings[i]);
        one_format(path, formats[i]);
    }
    return end();
}
