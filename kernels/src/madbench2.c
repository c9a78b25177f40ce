/*
 * MADBench2: the out-of-core linear algebra of an analysis of the cosmic microwave background. Dense matrices, one for
 * each bin of the power spectrum, are written (S), read, multiplied and written again (W), and read (C). See README.md.
 *
 * Every element is computed by the same operations in the same order for any number of ranks and gangs, so --verify
 * computes it again and compares all bits.
 */
#include "kernel.h"

#include <inttypes.h>
#include <math.h>

enum files { SHARED, PER_RANK };

static uint64_t pixels = 512, bins = 8, gangs = 1;
static double work = -1;
static int access_way = POSIX, files;
static const char *parts = "SWC", *work_text;

static const struct option options[] = {
    {"pixels", COUNT, &pixels, "N", "a matrix has N x N elements of 8 bytes", 1, 32768},
    {"bins", COUNT, &bins, "N", "matrices", 1, 100000},
    {"gangs", COUNT, &gangs, "N", "in W and C, N groups of ranks each take every N-th matrix", 1, 100000},
    {"phases", TEXT, &parts, "SWC", "a part of it, such as S or WC; W reads the file of S, C that of W", 0, 0},
    {"busy-work", TEXT, &work_text, "EXPONENT",
     "in place of the real computation, (elements of the rank) ^ EXPONENT floating-point operations a\n"
     "matrix; a number from 0 to 3; the matrices then have a pattern as contents", 0, 0},
    {"api", CHOICE, &access_way, ACCESS_WORDS, "POSIX calls, or MPI-IO with independent or collective calls", 0, 0},
    {"files", CHOICE, &files, "shared|rank", "one file for all ranks, or one for each", 0, 0},
    {NULL, FLAG, NULL, NULL, NULL, 0, 0},
};

static const struct kernel kernel = {
    "madbench2",
    "out-of-core matrices of a microwave background analysis",
    "S computes the derivatives of the pixel correlation matrix and writes them to FILE.S. W reads them, multiplies\n"
    "each by the inverse of the correlation matrix and writes the products to FILE.W. C reads those and computes\n"
    "traces. A rank has a block of rows of each matrix, and a call moves it whole. The files are removed after C,\n"
    "unless --keep is given.",
    "  mpirun -n 4 madbench2 --pixels 1024 --bins 16 --verify /forebay/matrices\n"
    "  mpirun -n 8 madbench2 --pixels 4096 --gangs 4 --busy-work 1 --api collective --json /forebay/matrices\n"
    "  mpirun -n 4 madbench2 --phases S --sync /scratch/matrices",
    options,
};

enum { S_WRITE, S_WORK, W_READ, W_WORK, W_WRITE, C_READ, C_WORK, PHASES };
static struct phase phases[PHASES] = {
    {.name = "S-write"}, {.name = "S-work"}, {.name = "W-read"}, {.name = "W-work"},
    {.name = "W-write"}, {.name = "C-read"}, {.name = "C-work"}};

/* ---- work ---- */

/* The rows of a matrix that a rank of `owners` has. */
static uint64_t first_row, rows;
static MPI_Comm gang;
static int in_gang, gang_size, gang_number;
static double sink;

/* Floating-point operations that depend on each other, so that the compiler keeps them. */
static void be_busy(uint64_t elements) {
    double x = 0.5;
    for (double left = pow((double)elements, work); left > 0; left -= 2)
        x = x * 0.999999 + 0.000001;
    sink += x;
}

/* The derivative by bin's power: a sum of Legendre polynomials of the cosine between two pixels of a band. */
static double element(uint64_t bin, uint64_t i, uint64_t j) {
    double apart = fabs((double)i - (double)j) / (double)pixels, x = cos(apart * 3.14159265358979323846);
    enum { MULTIPOLES = 4 };
    uint64_t low = 2 + bin * MULTIPOLES;
    double before = 1, now = x, sum = 0;
    for (uint64_t l = 2; l < low + MULTIPOLES; l++) {
        double next = ((double)(2 * l - 1) * x * now - (double)(l - 1) * before) / (double)l;
        before = now;
        now = next;
        if (l >= low)
            sum += (double)(2 * l + 1) / (4 * 3.14159265358979323846) * now;
    }
    return sum;
}

static uint64_t stream_of(uint64_t bin, int part) { return (settings.seed * 2 + (uint64_t)part) * 100000 + bin; }

/* This rank's rows of a matrix of S. */
static void derive(double *block, uint64_t bin) {
    if (work >= 0) {
        pattern(block, rows * pixels * 8, stream_of(bin, 0), first_row * pixels * 8);
        return;
    }
    for (uint64_t i = 0; i < rows; i++)
        for (uint64_t j = 0; j < pixels; j++)
            block[i * pixels + j] = element(bin, first_row + i, j);
}

/*
 * This rank's rows of the inverse of the correlation matrix, the sum of all bins with falling power plus noise. It is
 * positive definite, so Gauss and Jordan need no pivots.
 */
static double *invert(void) {
    double *inverse = allocate(rows * pixels * 8), *one = allocate(rows * pixels * 8), *pivot = allocate(pixels * 8);
    memset(inverse, 0, rows * pixels * 8);
    for (uint64_t bin = 0; bin < bins; bin++) {
        derive(one, bin);
        for (uint64_t e = 0; e < rows * pixels; e++)
            inverse[e] += one[e] / (double)(bin + 1);
    }
    for (uint64_t i = 0; i < rows; i++)
        inverse[i * pixels + first_row + i] += (double)pixels;
    for (int owner = 0; owner < gang_size; owner++) {
        uint64_t first, count;
        split(pixels, gang_size, owner, &first, &count);
        for (uint64_t k = first; k < first + count; k++) {
            if (owner == in_gang) {
                double *row = inverse + (k - first) * pixels, scale = 1 / row[k];
                row[k] = 1;
                for (uint64_t j = 0; j < pixels; j++)
                    row[j] *= scale;
                memcpy(pivot, row, pixels * 8);
            }
            MPI_Bcast(pivot, (int)pixels, MPI_DOUBLE, owner, gang);
            for (uint64_t i = 0; i < rows; i++) {
                double *row = inverse + i * pixels, factor = row[k];
                if (first_row + i == k)
                    continue;
                row[k] = 0;
                for (uint64_t j = 0; j < pixels; j++)
                    row[j] -= factor * pivot[j];
            }
        }
    }
    free(one);
    free(pivot);
    return inverse;
}

/* product = inverse x matrix; the gang's blocks of the matrix come round by broadcasts. */
static void multiply(double *product, const double *inverse, const double *matrix) {
    uint64_t first, count;
    split(pixels, gang_size, 0, &first, &count);
    double *visitor = allocate(count * pixels * 8);
    memset(product, 0, rows * pixels * 8);
    for (int owner = 0; owner < gang_size; owner++) {
        split(pixels, gang_size, owner, &first, &count);
        if (owner == in_gang)
            memcpy(visitor, matrix, count * pixels * 8);
        MPI_Bcast(visitor, (int)(count * pixels), MPI_DOUBLE, owner, gang);
        for (uint64_t i = 0; i < rows; i++)
            for (uint64_t k = 0; k < count; k++) {
                double factor = inverse[i * pixels + first + k];
                for (uint64_t j = 0; j < pixels; j++)
                    product[i * pixels + j] += factor * visitor[k * pixels + j];
            }
    }
    free(visitor);
}

/* The traces of a matrix and of its square: what C needs of it. */
static void trace(const double *matrix, double traces[2]) {
    uint64_t first, count;
    split(pixels, gang_size, 0, &first, &count);
    double *visitor = allocate(count * pixels * 8), mine[2] = {0, 0};
    for (uint64_t i = 0; i < rows; i++)
        mine[0] += matrix[i * pixels + first_row + i];
    for (int owner = 0; owner < gang_size; owner++) {
        split(pixels, gang_size, owner, &first, &count);
        if (owner == in_gang)
            memcpy(visitor, matrix, count * pixels * 8);
        MPI_Bcast(visitor, (int)(count * pixels), MPI_DOUBLE, owner, gang);
        for (uint64_t i = 0; i < rows; i++)
            for (uint64_t k = 0; k < count; k++)
                mine[1] += matrix[i * pixels + first + k] * visitor[k * pixels + first_row + i];
    }
    MPI_Allreduce(mine, traces, 2, MPI_DOUBLE, MPI_SUM, gang);
    free(visitor);
}

/* ---- files ---- */

static void name_of(char path[PATH_MAX], char part) {
    if (files == PER_RANK)
        snprintf(path, PATH_MAX, "%s.%c.%05d", settings.path, part, rank);
    else
        snprintf(path, PATH_MAX, "%s.%c", settings.path, part);
}

/* Opened by each gang for itself, so that its collective calls are its own. */
static void open_part(struct file *file, char part, enum mode mode) {
    char path[PATH_MAX];
    name_of(path, part);
    MPI_Comm comm = files == PER_RANK ? MPI_COMM_SELF : gang;
    if (mode == CREATE && files == SHARED && gangs > 1) {
        file_open(file, MPI_COMM_WORLD, path, (enum access)access_way, CREATE, 0);
        file_close(file);
        MPI_Barrier(MPI_COMM_WORLD);
        mode = UPDATE;
    }
    file_open(file, comm, path, (enum access)access_way, mode, 0);
}

static uint64_t place(uint64_t bin) {
    return files == PER_RANK ? bin * rows * pixels * 8 : (bin * pixels + first_row) * pixels * 8;
}

static void join_gang(uint64_t number) {
    gang_number = (int)((uint64_t)rank * number / (uint64_t)ranks);
    MPI_Comm_split(MPI_COMM_WORLD, gang_number, rank, &gang);
    MPI_Comm_rank(gang, &in_gang);
    MPI_Comm_size(gang, &gang_size);
    split(pixels, gang_size, in_gang, &first_row, &rows);
}

static void begin(int phase) { phase_start(&phases[phase]); }

static void end(int phase, bool io) { phase_stop(&phases[phase], io ? rows * pixels * 8 : 0, 1); }

/* Ends a writing phase with a sync inside its time, where that is asked for. */
static void sync_in(int phase, struct file *file) {
    if (!settings.sync)
        return;
    begin(phase);
    file_sync(file);
    phase_stop(&phases[phase], 0, 0);
}

static void part_s(void) {
    struct file file;
    join_gang(1);
    double *block = allocate(rows * pixels * 8);
    open_part(&file, 'S', CREATE);
    MPI_Barrier(MPI_COMM_WORLD);
    for (uint64_t bin = 0; bin < bins; bin++) {
        begin(S_WORK);
        derive(block, bin);
        if (work >= 0)
            be_busy(rows * pixels);
        end(S_WORK, false);
        begin(S_WRITE);
        file_write(&file, place(bin), block, rows * pixels * 8);
        end(S_WRITE, true);
    }
    sync_in(S_WRITE, &file);
    file_close(&file);
    free(block);
    MPI_Comm_free(&gang);
    MPI_Barrier(MPI_COMM_WORLD);
}

static void part_w(void) {
    struct file in, out;
    join_gang(gangs);
    double *block = allocate(rows * pixels * 8), *product = allocate(rows * pixels * 8), *inverse = NULL;
    open_part(&in, 'S', READ);
    open_part(&out, 'W', CREATE);
    MPI_Barrier(MPI_COMM_WORLD);
    begin(W_WORK);
    if (work < 0)
        inverse = invert();
    end(W_WORK, false);
    for (uint64_t bin = (uint64_t)gang_number; bin < bins; bin += gangs) {
        if (settings.verify)
            memset(block, 0xee, rows * pixels * 8);
        begin(W_READ);
        file_read(&in, place(bin), block, rows * pixels * 8);
        end(W_READ, true);
        if (settings.verify) {
            derive(product, bin);
            verify(in.path, place(bin), product, block, rows * pixels * 8);
        }
        begin(W_WORK);
        if (work >= 0) {
            be_busy(rows * pixels);
            pattern(product, rows * pixels * 8, stream_of(bin, 1), first_row * pixels * 8);
        } else
            multiply(product, inverse, block);
        end(W_WORK, false);
        begin(W_WRITE);
        file_write(&out, place(bin), product, rows * pixels * 8);
        end(W_WRITE, true);
    }
    sync_in(W_WRITE, &out);
    file_close(&in);
    file_close(&out);
    free(block);
    free(product);
    free(inverse);
    MPI_Comm_free(&gang);
    MPI_Barrier(MPI_COMM_WORLD);
}

/* Sums over bins of the traces, for the results. */
static double part_c(void) {
    struct file file;
    join_gang(gangs);
    double *block = allocate(rows * pixels * 8), *expected = NULL, *inverse = NULL, *derived = NULL, sum = 0;
    open_part(&file, 'W', READ);
    if (settings.verify) {
        expected = allocate(rows * pixels * 8);
        derived = allocate(rows * pixels * 8);
        if (work < 0)
            inverse = invert();
    }
    MPI_Barrier(MPI_COMM_WORLD);
    for (uint64_t bin = (uint64_t)gang_number; bin < bins; bin += gangs) {
        if (settings.verify)
            memset(block, 0xee, rows * pixels * 8);
        begin(C_READ);
        file_read(&file, place(bin), block, rows * pixels * 8);
        end(C_READ, true);
        if (settings.verify) {
            derive(derived, bin);
            if (work >= 0)
                pattern(expected, rows * pixels * 8, stream_of(bin, 1), first_row * pixels * 8);
            else
                multiply(expected, inverse, derived);
            verify(file.path, place(bin), expected, block, rows * pixels * 8);
        }
        double traces[2] = {0, 0};
        begin(C_WORK);
        if (work >= 0)
            be_busy(rows * pixels);
        else
            trace(block, traces);
        end(C_WORK, false);
        sum += in_gang == 0 ? traces[0] - traces[1] : 0;
    }
    file_close(&file);
    free(block);
    free(expected);
    free(derived);
    free(inverse);
    MPI_Comm_free(&gang);
    double all;
    MPI_Allreduce(&sum, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    return all;
}

int main(int argc, char **argv) {
    kernel_begin(argc, argv, &kernel);
    static const char *const choices[] = {"S", "W", "C", "SW", "WC", "SWC"};
    bool known = false;
    for (int i = 0; i < 6; i++)
        known = known || strcmp(parts, choices[i]) == 0;
    if (!known)
        refuse("--phases: there is no '%s'; write S, W, C, SW, WC or SWC", parts);
    if (work_text != NULL) {
        char *rest;
        work = strtod(work_text, &rest);
        if (rest == work_text || *rest != 0 || !(work >= 0 && work <= 3))
            refuse("--busy-work: '%s' is no exponent; write a number from 0 to 3, such as 1 or 1.5", work_text);
    }
    if (gangs > (uint64_t)ranks)
        refuse("--gangs: %" PRIu64 " gangs need as many ranks, and there are %d; write less", gangs, ranks);
    if (gangs > 1 && files == PER_RANK)
        refuse("--gangs reads rows that other ranks wrote; leave out --files rank");
    if (settings.verify && strcmp(parts, "S") == 0)
        refuse("--verify needs a phase that reads; write --phases with W or C");
    if (pixels < (uint64_t)ranks)
        refuse("--pixels: %" PRIu64 " rows for %d ranks leave some without; write at least %d", pixels, ranks, ranks);

    double result = 0;
    if (strchr(parts, 'S'))
        part_s();
    if (strchr(parts, 'W'))
        part_w();
    if (strchr(parts, 'C')) {
        result = part_c();
        if (rank == 0 && work < 0) {
            char json[64];
            snprintf(json, sizeof json, "\"sum_of_traces\": %.17g", result);
            phases[C_WORK].json = strdup(json);
        }
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (strchr(parts, 'C') && !settings.keep && (files == PER_RANK || rank == 0)) {
        char path[PATH_MAX];
        name_of(path, 'S');
        file_remove(path, (enum access)access_way);
        name_of(path, 'W');
        file_remove(path, (enum access)access_way);
    }
    if (rank == 0 && !isfinite(sink))
        fail("the busy work has gone astray");
    int first = parts[0] == 'S' ? S_WRITE : parts[0] == 'W' ? W_READ : C_READ;
    int last = strchr(parts, 'C') ? PHASES : strchr(parts, 'W') ? C_READ : W_READ;
    return kernel_end(phases + first, last - first);
}
