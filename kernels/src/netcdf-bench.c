/*
 * NetCDF-Bench: one four-dimensional variable t:x:y:z in a NetCDF-4 file, split over x and y. Each iteration writes,
 * or reads, one t. See README.md.
 */
#include "kernel.h"

#include <inttypes.h>
#include <netcdf.h>
#include <netcdf_par.h>

enum { T, X, Y, Z, DIMENSIONS };
static const char *const dimension_names[DIMENSIONS] = {"t", "x", "y", "z"};

static const char *geometry_text = "100:16:64:4", *chunk_text;
static int type, layout, way, part;
static bool fill, unlimited;
static uint64_t shift;

static const struct option options[] = {
    {"geometry", TEXT, &geometry_text, "T:X:Y:Z",
     "lengths of the dimensions; also usual: 100:16:64:25, 100:16:64:256, 100:16:64:2560", 0, 0},
    {"type", CHOICE, &type, "double|float|int", "type of the elements: 8, 4 or 4 bytes", 0, 0},
    {"layout", CHOICE, &layout, "contiguous|chunked", "how the file stores the variable", 0, 0},
    {"chunk", TEXT, &chunk_text, "T:X:Y:Z", "lengths of a chunk; without it, one t of a rank", 0, 0},
    {"api", CHOICE, &way, "independent|collective", "how the ranks access the variable", 0, 0},
    {"fill", FLAG, &fill, NULL, "NetCDF fills the variable before it is written", 0, 0},
    {"unlimited", FLAG, &unlimited, NULL, "t grows with each iteration; needs --layout chunked --api collective", 0,
     0},
    {"part", CHOICE, &part, "both|write|read", "write leaves its file; read needs one that is there", 0, 0},
    {"shift", COUNT, &shift, "N", "rank r reads what rank r + N wrote", 0, 0},
    {NULL, FLAG, NULL, NULL, NULL, 0, 0},
};

static const struct kernel kernel = {
    "netcdf-bench",
    "a four-dimensional variable in a parallel NetCDF-4 file",
    "The ranks form a grid over x and y. Each iteration writes one t of the variable; then the file is opened again\n"
    "and read in the same way. It is removed at the end, unless --keep is given.",
    "  mpirun -n 4 netcdf-bench --verify /forebay/data.nc\n"
    "  mpirun -n 8 netcdf-bench --geometry 100:16:64:256 --layout chunked --api collective --json /forebay/data.nc\n"
    "  mpirun -n 4 netcdf-bench --layout chunked --chunk 1:8:8:4 --api collective --unlimited --fill /scratch/data.nc\n"
    "  mpirun -n 4 netcdf-bench --part write --sync /scratch/data.nc",
    options,
};

static size_t lengths[DIMENSIONS], chunk[DIMENSIONS];
static int grid[2];
static const size_t type_bytes[] = {8, 4, 4};
static const nc_type types[] = {NC_DOUBLE, NC_FLOAT, NC_INT};

static void read_lengths(const char *option, const char *text, size_t out[DIMENSIONS]) {
    const char *at = text;
    bool valid = true;
    for (int i = 0; i < DIMENSIONS && valid; i++) {
        char *end;
        valid = *at >= '1' && *at <= '9';
        out[i] = strtoull(at, &end, 10);
        valid = valid && out[i] <= INT_MAX && *end == (i + 1 < DIMENSIONS ? ':' : 0);
        at = end + 1;
    }
    if (!valid)
        refuse("--%s: '%s' is no T:X:Y:Z; write four whole numbers from 1, such as 100:16:64:4", option, text);
}

/* A rank's part of one t. */
static void part_of(int owner, size_t start[DIMENSIONS], size_t count[DIMENSIONS]) {
    uint64_t first, all;
    split(lengths[X], grid[0], owner / grid[1], &first, &all);
    start[X] = first;
    count[X] = all;
    split(lengths[Y], grid[1], owner % grid[1], &first, &all);
    start[Y] = first;
    count[Y] = all;
    start[T] = start[Z] = 0;
    count[T] = 1;
    count[Z] = lengths[Z];
}

/* The offset in the variable of a row along z. */
static uint64_t place(size_t t, size_t x, size_t y) {
    return ((t * lengths[X] + x) * lengths[Y] + y) * lengths[Z] * type_bytes[type];
}

static void contents(char *data, size_t t, const size_t start[DIMENSIONS], const size_t count[DIMENSIONS]) {
    uint64_t row = count[Z] * type_bytes[type];
    for (size_t x = start[X]; x < start[X] + count[X]; x++)
        for (size_t y = start[Y]; y < start[Y] + count[Y]; y++, data += row)
            pattern(data, row, settings.seed, place(t, x, y));
}

/* NetCDF has no call for an element's place in the file, so the report gives its place in the variable. */
static void compare(const char *expected, const char *found, size_t t, const size_t start[DIMENSIONS],
                    const size_t count[DIMENSIONS]) {
    static int reports;
    uint64_t row = count[Z] * type_bytes[type], all = count[X] * count[Y] * row, at = 0;
    bool differs = memcmp(expected, found, all) != 0;
    verified(all, differs);
    if (!differs || ++reports > 10)
        return;
    while (expected[at] == found[at])
        at++;
    size_t x = start[X] + at / row / count[Y], y = start[Y] + at / row % count[Y], z = at % row / type_bytes[type];
    fprintf(stderr, "%s: rank %d: %s: variable data, element %zu:%zu:%zu:%zu, offset %" PRIu64 " of the variable: "
            "expected 0x%02x, found 0x%02x\n", kernel.name, rank, settings.path, t, x, y, z, place(t, x, y) + at % row,
            (unsigned char)expected[at], (unsigned char)found[at]);
}

static void call(int code, const char *what) {
    if (code != NC_NOERR)
        fail("%s: %s: %s", settings.path, what, nc_strerror(code));
}

static void check_open(int code, const char *remedy) {
    char text[PATH_MAX + 512];
    snprintf(text, sizeof text, "%s cannot be opened: %s; %s", settings.path, nc_strerror(code), remedy);
    agree(code != NC_NOERR ? text : NULL);
}

enum { CREATE_FILE, WRITE, WRITE_CLOSE, OPEN_FILE, READ_DATA, READ_CLOSE, PHASES };
static struct phase phases[PHASES] = {{.name = "create"}, {.name = "write"}, {.name = "write-close"},
                                      {.name = "open"},   {.name = "read"},  {.name = "read-close"}};

static void start_together(int phase) {
    MPI_Barrier(MPI_COMM_WORLD);
    phase_start(&phases[phase]);
}

static int create(MPI_Info info, int *file) {
    int code = nc_create_par(settings.path, NC_NETCDF4 | NC_CLOBBER, MPI_COMM_WORLD, info, file);
    check_open(code, "its directory must exist and be writable on every node");
    int dimensions[DIMENSIONS], variable;
    for (int i = 0; i < DIMENSIONS; i++)
        call(nc_def_dim(*file, dimension_names[i], i == T && unlimited ? NC_UNLIMITED : lengths[i], &dimensions[i]),
             "nc_def_dim");
    call(nc_def_var(*file, "data", types[type], DIMENSIONS, dimensions, &variable), "nc_def_var");
    call(nc_def_var_chunking(*file, variable, layout ? NC_CHUNKED : NC_CONTIGUOUS, layout ? chunk : NULL),
         "nc_def_var_chunking");
    call(nc_def_var_fill(*file, variable, fill ? NC_FILL : NC_NOFILL, NULL), "nc_def_var_fill");
    call(nc_enddef(*file), "nc_enddef");
    return variable;
}

/* The variable of a file that is there, which must be of this geometry and type. */
static int find(int file) {
    int variable, dimensions[DIMENSIONS], count;
    nc_type found_type;
    size_t found;
    char text[PATH_MAX + 200] = "";
    if (nc_inq_varid(file, "data", &variable) != NC_NOERR || nc_inq_varndims(file, variable, &count) != NC_NOERR ||
        count != DIMENSIONS)
        snprintf(text, sizeof text, "%s has no variable 'data' of four dimensions; was it written by netcdf-bench?",
                 settings.path);
    else {
        call(nc_inq_var(file, variable, NULL, &found_type, NULL, dimensions, NULL), "nc_inq_var");
        for (int i = 0; i < DIMENSIONS; i++) {
            call(nc_inq_dimlen(file, dimensions[i], &found), "nc_inq_dimlen");
            if (found != lengths[i] && text[0] == 0)
                snprintf(text, sizeof text, "%s has %zu for %s, not %zu; write the --geometry that it was written with",
                         settings.path, found, dimension_names[i], lengths[i]);
        }
        if (found_type != types[type] && text[0] == 0)
            snprintf(text, sizeof text, "%s has elements of another type; write the --type that it was written with",
                     settings.path);
    }
    agree(text[0] != 0 ? text : NULL);
    return variable;
}

int main(int argc, char **argv) {
    kernel_begin(argc, argv, &kernel);
    read_lengths("geometry", geometry_text, lengths);
    if (unlimited && !(layout == 1 && way == 1))
        refuse("--unlimited needs --layout chunked --api collective, since a dimension grows by calls of all ranks");
    if (chunk_text != NULL && layout == 0)
        refuse("--chunk needs --layout chunked");
    if (settings.verify && part == 1)
        refuse("--verify needs to read; write --part both or --part read");
    MPI_Dims_create(ranks, 2, grid);
    /* The longer side of the grid for the longer dimension. */
    if (lengths[Y] > lengths[X]) {
        int longer = grid[0];
        grid[0] = grid[1];
        grid[1] = longer;
    }
    if ((size_t)grid[0] > lengths[X] || (size_t)grid[1] > lengths[Y])
        refuse("--geometry: %d x %d ranks over x and y need at least so many elements, and there are %zu x %zu",
               grid[0], grid[1], lengths[X], lengths[Y]);
    size_t start[DIMENSIONS], count[DIMENSIONS];
    part_of(0, start, count);
    memcpy(chunk, count, sizeof chunk);
    if (chunk_text != NULL)
        read_lengths("chunk", chunk_text, chunk);
    for (int i = 0; i < DIMENSIONS; i++)
        if (chunk[i] > lengths[i])
            refuse("--chunk: %zu is more than the %zu of %s; write less", chunk[i], lengths[i], dimension_names[i]);

    MPI_Info info = file_hints();
    uint64_t bytes = count[X] * count[Y] * count[Z] * type_bytes[type];
    char *data = allocate(bytes), *found = allocate(bytes);
    int file, variable;
    if (part != 2) {
        part_of(rank, start, count);
        bytes = count[X] * count[Y] * count[Z] * type_bytes[type];
        start_together(CREATE_FILE);
        variable = create(info, &file);
        call(nc_var_par_access(file, variable, way ? NC_COLLECTIVE : NC_INDEPENDENT), "nc_var_par_access");
        phase_stop(&phases[CREATE_FILE], 0, 1);
        MPI_Barrier(MPI_COMM_WORLD);
        for (size_t t = 0; t < lengths[T]; t++) {
            start[T] = t;
            contents(data, t, start, count);
            phase_start(&phases[WRITE]);
            call(nc_put_vara(file, variable, start, count, data), "nc_put_vara");
            phase_stop(&phases[WRITE], bytes, 1);
        }
        if (settings.sync) {
            phase_start(&phases[WRITE]);
            call(nc_sync(file), "nc_sync");
            phase_stop(&phases[WRITE], 0, 0);
        }
        start_together(WRITE_CLOSE);
        call(nc_close(file), "nc_close");
        phase_stop(&phases[WRITE_CLOSE], 0, 1);
        MPI_Barrier(MPI_COMM_WORLD);
    }
    if (part != 1) {
        part_of((int)(((uint64_t)rank + shift % (uint64_t)ranks) % (uint64_t)ranks), start, count);
        bytes = count[X] * count[Y] * count[Z] * type_bytes[type];
        start_together(OPEN_FILE);
        check_open(nc_open_par(settings.path, NC_NOWRITE, MPI_COMM_WORLD, info, &file),
                   "a run that only reads needs a file that an earlier run left");
        variable = find(file);
        call(nc_var_par_access(file, variable, way ? NC_COLLECTIVE : NC_INDEPENDENT), "nc_var_par_access");
        phase_stop(&phases[OPEN_FILE], 0, 1);
        MPI_Barrier(MPI_COMM_WORLD);
        for (size_t t = 0; t < lengths[T]; t++) {
            start[T] = t;
            if (settings.verify)
                memset(found, 0xee, bytes);
            phase_start(&phases[READ_DATA]);
            call(nc_get_vara(file, variable, start, count, found), "nc_get_vara");
            phase_stop(&phases[READ_DATA], bytes, 1);
            if (settings.verify) {
                contents(data, t, start, count);
                compare(data, found, t, start, count);
            }
        }
        start_together(READ_CLOSE);
        call(nc_close(file), "nc_close");
        phase_stop(&phases[READ_CLOSE], 0, 1);
        MPI_Barrier(MPI_COMM_WORLD);
        if (!settings.keep && rank == 0)
            file_remove(settings.path, INDEPENDENT);
    }
    if (info != MPI_INFO_NULL)
        MPI_Info_free(&info);
    free(data);
    free(found);
    return part == 0   ? kernel_end(phases, PHASES)
           : part == 1 ? kernel_end(phases, OPEN_FILE)
                       : kernel_end(phases + OPEN_FILE, PHASES - OPEN_FILE);
}
