/*
 * Shared by the kernels: options, files by three interfaces, verified contents, times over the ranks, results.
 *
 * All ranks get the same arguments, so they agree on what is refused. A call on a file that fails is kept until all
 * ranks close the file: then all end with the same status after MPI_Finalize, since launchers may lose what a rank
 * prints before MPI_Abort. Each rank runs one thread.
 */
#ifndef KERNEL_H
#define KERNEL_H

#include <limits.h>
#include <mpi.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Exit statuses, the same on all ranks. */
enum { STATUS_OK = 0, STATUS_FAILED = 1, STATUS_USAGE = 2, STATUS_MISMATCH = 3 };

extern int rank, ranks;

/* ---- options ---- */

/* The type behind `value`: bool, uint64_t, uint64_t, double, int (the number of the choice), const char *. */
enum kind { FLAG, COUNT, SIZE, REAL, CHOICE, TEXT };

struct option {
    const char *name; /* without the dashes */
    enum kind kind;
    void *value;         /* holds the default */
    const char *word;    /* the value's name in the help; of CHOICE the choices, separated by | */
    const char *help;    /* may have several lines */
    uint64_t least, most; /* of COUNT and SIZE; most 0 is no limit */
};

struct kernel {
    const char *name, *summary, *text, *examples;
    const struct option *options; /* ended by a name of NULL */
};

enum access { POSIX, INDEPENDENT, COLLECTIVE };
#define ACCESS_WORDS "posix|independent|collective"

/* The options that all kernels have. */
struct settings {
    const char *path; /* FILE */
    bool verify, keep, json, sync;
    uint64_t seed;
    const char *hints;
};
extern struct settings settings;

/* Starts MPI and reads the arguments. Returns only if the kernel is to run. */
void kernel_begin(int argc, char **argv, const struct kernel *kernel);
/* Ends all ranks with STATUS_USAGE; all must call it. The message names the word and what to write instead. */
_Noreturn void refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Ends the program from one rank, by MPI_Abort: for what the others cannot wait to learn. */
_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Ends all ranks with STATUS_FAILED if any has a message; the lowest of them prints its own. Collective. */
void agree(const char *message);

/* ---- files ---- */

enum mode { CREATE, READ, UPDATE };

struct file {
    char path[PATH_MAX];
    enum access access;
    int fd;
    MPI_File mpi;
};

/* The path of a rank's own file: PATH.00003. */
void file_own_path(char path[PATH_MAX], int of_rank);
/*
 * Opens a file for the ranks of `comm`; all ranks of the world call it. CREATE makes an empty file. `flags` are further
 * flags of open(2), for POSIX only.
 */
void file_open(struct file *file, MPI_Comm comm, const char *path, enum access access, enum mode mode, int flags);
/*
 * Moves all bytes, or keeps the failure for file_close; after one, the rank moves nothing more. With COLLECTIVE all
 * ranks of the file's communicator call it, with 0 bytes if need be.
 */
void file_write(struct file *file, uint64_t offset, const void *data, uint64_t bytes);
void file_read(struct file *file, uint64_t offset, void *data, uint64_t bytes);
/* fsync or MPI_File_sync; with MPI-IO all ranks of the communicator call it. */
void file_sync(struct file *file);
/* All ranks of the world call it. Ends all with STATUS_FAILED if a call on a file has failed on any. */
void file_close(struct file *file);
/* A call has failed on this rank, so that buffers have not what was to be read. */
bool file_failed(void);
/* Removes a file by the interface that made it. Without effect if there is none. */
void file_remove(const char *path, enum access access);
/* The hints of --hints, MPI_INFO_NULL without. The caller frees it. */
MPI_Info file_hints(void);
/* The text of an MPI error, in a static buffer. */
const char *file_error(int code);

/* ---- contents ---- */

/* A number that depends on all bits of both. */
uint64_t mix(uint64_t stream, uint64_t index);
/* The bytes of a stream from `offset` on: the same, however a file is cut into writes. */
void pattern(void *data, uint64_t bytes, uint64_t stream, uint64_t offset);
/* Compares what was read at `offset`; reports the first byte of a block that differs, on standard error. */
void verify(const char *path, uint64_t offset, const void *expected, const void *found, uint64_t bytes);
/* Counts bytes that the kernel itself compared, and a difference that it has reported. */
void verified(uint64_t bytes, bool differs);

/* Memory at a multiple of 4096. The caller frees it. */
void *allocate(uint64_t bytes);
/* The part of `total` of one of several owners: differs by one at most. */
void split(uint64_t total, int owners, int owner, uint64_t *first, uint64_t *count);

/* ---- times and results ---- */

/* What a rank has done and how long it took; sums over its starts and stops. */
struct phase {
    const char *name;
    uint64_t bytes, operations;
    double seconds;
    double started;
    char *json; /* on rank 0: further members of the JSON object ("name": value, ...), or NULL */
    char *text; /* on rank 0: a further line for the table, or NULL */
};

void phase_start(struct phase *phase);
void phase_stop(struct phase *phase, uint64_t bytes, uint64_t operations);
/* Prints the results, ends MPI, and returns the exit status. Collective. */
int kernel_end(struct phase *phases, int count);

#endif
