/*
 * HACC-IO: the checkpoint and the restart of a cosmology code. Each rank has particles of 38 bytes, kept as nine
 * arrays: seven floats, a 64-bit number and a 16-bit mask. A checkpoint writes them with one call an array, a restart
 * reads them. See README.md.
 */
#include "kernel.h"

#include <inttypes.h>

enum { FIELDS = 9, PARTICLE_BYTES = 38 };

static const struct {
    const char *name;
    uint64_t bytes;
} fields[FIELDS] = {{"xx", 4}, {"yy", 4},  {"zz", 4},  {"vx", 4}, {"vy", 4},
                    {"vz", 4}, {"phi", 4}, {"pid", 8}, {"mask", 2}};

enum files { SHARED, PER_RANK };
enum layout { BY_RANK, BY_VARIABLE };

static uint64_t particles = 1 << 20, shift;
static int access_way = POSIX, files = SHARED, layout = BY_RANK, part;

static const struct option options[] = {
    {"particles", COUNT, &particles, "N", "particles of each rank; 38 bytes each", 1, UINT64_C(1) << 40},
    {"api", CHOICE, &access_way, ACCESS_WORDS, "POSIX calls, or MPI-IO with independent or collective calls", 0, 0},
    {"files", CHOICE, &files, "shared|rank", "one file, or one for each rank: FILE.00000, FILE.00001, ...", 0, 0},
    {"layout", CHOICE, &layout, "rank|variable",
     "rank: the nine arrays of a rank follow each other, then come those of the next\n"
     "variable: each array is one piece of the file over all ranks (shared file only)", 0, 0},
    {"part", CHOICE, &part, "both|checkpoint|restart",
     "checkpoint leaves its files; restart reads files that are there", 0, 0},
    {"shift", COUNT, &shift, "N", "rank r restarts from the particles of rank r + N, as if it had moved", 0, 0},
    {NULL, FLAG, NULL, NULL, NULL, 0, 0},
};

static const struct kernel kernel = {
    "hacc-io",
    "checkpoint and restart of a particle code",
    "Each rank writes nine arrays of its particles (xx yy zz vx vy vz phi: float, pid: int64, mask: uint16), then\n"
    "reads them. FILE and what follows from it are removed at the end, unless --keep is given.",
    "  mpirun -n 4 hacc-io --particles 1000000 --verify /forebay/checkpoint\n"
    "  mpirun -n 4 hacc-io --api collective --layout variable --hints cb_nodes=2 --json /forebay/checkpoint\n"
    "  mpirun -n 4 hacc-io --files rank --sync --part checkpoint /scratch/checkpoint\n"
    "  mpirun -n 4 hacc-io --files rank --part restart --shift 1 --verify /scratch/checkpoint",
    options,
};

/* Writes the values of one array: a place in the box, a velocity, a potential, the particle's number, a mask. */
static void fill(void *array, int field, uint64_t first, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        uint64_t bits = mix(settings.seed * FIELDS + (uint64_t)field, first + i);
        float real = (float)(bits >> 40) / (1 << 24) * 256;
        int64_t pid = (int64_t)(first + i);
        uint16_t mask = (uint16_t)bits;
        const void *value = field < 7 ? (void *)&real : field == 7 ? (void *)&pid : (void *)&mask;
        memcpy((char *)array + i * fields[field].bytes, value, fields[field].bytes);
    }
}

/* Where a rank's array lies in the file. */
static uint64_t place(int field, uint64_t first, uint64_t count, uint64_t all) {
    uint64_t before = 0;
    for (int i = 0; i < field; i++)
        before += fields[i].bytes;
    if (layout == BY_VARIABLE)
        return before * all + first * fields[field].bytes;
    return (files == PER_RANK ? 0 : first * PARTICLE_BYTES) + before * count;
}

int main(int argc, char **argv) {
    kernel_begin(argc, argv, &kernel);
    if (layout == BY_VARIABLE && files == PER_RANK)
        refuse("--layout variable needs one file for all ranks; leave out --files rank");
    if (settings.verify && part == 1)
        refuse("--verify needs a restart to read; write --part both or --part restart");
    if (particles > UINT64_MAX / 2 / PARTICLE_BYTES / (uint64_t)ranks)
        refuse("--particles: %" PRIu64 " for each of %d ranks is more than a file can hold; write less", particles,
               ranks);

    uint64_t all = particles * (uint64_t)ranks, from = (uint64_t)rank;
    void *arrays[FIELDS];
    for (int i = 0; i < FIELDS; i++)
        arrays[i] = allocate(particles * fields[i].bytes);

    enum { WRITE_OPEN, WRITE, WRITE_CLOSE, READ_OPEN, READ_DATA, READ_CLOSE, PHASES };
    struct phase phases[PHASES] = {{.name = "checkpoint-open"}, {.name = "checkpoint"}, {.name = "checkpoint-close"},
                                   {.name = "restart-open"},    {.name = "restart"},    {.name = "restart-close"}};
    MPI_Comm comm = files == PER_RANK ? MPI_COMM_SELF : MPI_COMM_WORLD;
    char path[PATH_MAX];
    struct file file;
    snprintf(path, sizeof path, "%s", settings.path);
    if (part != 2) {
        if (files == PER_RANK)
            file_own_path(path, rank);
        for (int i = 0; i < FIELDS; i++)
            fill(arrays[i], i, from * particles, particles);
        MPI_Barrier(MPI_COMM_WORLD);
        phase_start(&phases[WRITE_OPEN]);
        file_open(&file, comm, path, (enum access)access_way, CREATE, 0);
        phase_stop(&phases[WRITE_OPEN], 0, 1);
        MPI_Barrier(MPI_COMM_WORLD);
        phase_start(&phases[WRITE]);
        for (int i = 0; i < FIELDS; i++)
            file_write(&file, place(i, from * particles, particles, all), arrays[i], particles * fields[i].bytes);
        if (settings.sync)
            file_sync(&file);
        phase_stop(&phases[WRITE], particles * PARTICLE_BYTES, FIELDS);
        MPI_Barrier(MPI_COMM_WORLD);
        phase_start(&phases[WRITE_CLOSE]);
        file_close(&file);
        phase_stop(&phases[WRITE_CLOSE], 0, 1);
        MPI_Barrier(MPI_COMM_WORLD);
    }
    if (part != 1) {
        from = ((uint64_t)rank + shift % (uint64_t)ranks) % (uint64_t)ranks;
        if (files == PER_RANK)
            file_own_path(path, (int)from);
        for (int i = 0; i < FIELDS; i++)
            memset(arrays[i], 0xee, particles * fields[i].bytes);
        MPI_Barrier(MPI_COMM_WORLD);
        phase_start(&phases[READ_OPEN]);
        file_open(&file, comm, path, (enum access)access_way, READ, 0);
        phase_stop(&phases[READ_OPEN], 0, 1);
        MPI_Barrier(MPI_COMM_WORLD);
        phase_start(&phases[READ_DATA]);
        for (int i = 0; i < FIELDS; i++)
            file_read(&file, place(i, from * particles, particles, all), arrays[i], particles * fields[i].bytes);
        phase_stop(&phases[READ_DATA], particles * PARTICLE_BYTES, FIELDS);
        MPI_Barrier(MPI_COMM_WORLD);
        phase_start(&phases[READ_CLOSE]);
        file_close(&file);
        phase_stop(&phases[READ_CLOSE], 0, 1);
        for (int i = 0; settings.verify && i < FIELDS; i++) {
            void *expected = allocate(particles * fields[i].bytes);
            fill(expected, i, from * particles, particles);
            verify(path, place(i, from * particles, particles, all), expected, arrays[i], particles * fields[i].bytes);
            free(expected);
        }
        MPI_Barrier(MPI_COMM_WORLD);
    }
    if (part != 1 && !settings.keep && (files == PER_RANK || rank == 0))
        file_remove(path, (enum access)access_way);
    for (int i = 0; i < FIELDS; i++)
        free(arrays[i]);
    return part == 0   ? kernel_end(phases, PHASES)
           : part == 1 ? kernel_end(phases, READ_OPEN)
                       : kernel_end(phases + READ_OPEN, PHASES - READ_OPEN);
}
