/*
 * Forebay's file handles: addresses within a range in which nothing is stored, and a table from them to files.
 *
 * A slot is reused only after all others, so that the use of a closed handle is detected. Fortran's numbers are the
 * slot plus a base that is greater than the numbers of MPI libraries.
 */
#include "driver.h"

#include <string.h>

char handle_range[(size_t)HANDLES_MAX * HANDLE_BYTES];
static struct file *_Atomic files[HANDLES_MAX];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int next;

enum { FORTRAN_BASE = 0x0fb00000 };

static size_t slot_of(MPI_File handle) { return ((uintptr_t)handle - (uintptr_t)handle_range) / HANDLE_BYTES; }

bool is_ours(MPI_File handle) { return (uintptr_t)handle - (uintptr_t)handle_range < sizeof handle_range; }

struct file *file_of(MPI_File handle) {
    bool whole = ((uintptr_t)handle - (uintptr_t)handle_range) % HANDLE_BYTES == 0;
    return is_ours(handle) && whole ? atomic_load_explicit(&files[slot_of(handle)], memory_order_acquire) : NULL;
}

MPI_File handle_make(struct file *file) {
    MPI_File made = MPI_FILE_NULL;
    pthread_mutex_lock(&lock);
    for (int tries = 0; tries < HANDLES_MAX; tries++) {
        int slot = next;
        next = (next + 1) % HANDLES_MAX;
        if (atomic_load(&files[slot]) == NULL) {
            made = (MPI_File)(void *)(handle_range + (size_t)slot * HANDLE_BYTES);
            file->handle = made;
            atomic_store(&files[slot], file);
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return made;
}

void handle_free(MPI_File handle) { atomic_store(&files[slot_of(handle)], NULL); }

MPI_Fint handle_c2f(MPI_File handle) { return FORTRAN_BASE + (MPI_Fint)slot_of(handle); }

bool handle_f2c(MPI_Fint number, MPI_File *handle) {
    if (number < FORTRAN_BASE || number >= FORTRAN_BASE + HANDLES_MAX)
        return false;
    *handle = (MPI_File)(void *)(handle_range + (size_t)(number - FORTRAN_BASE) * HANDLE_BYTES);
    return true;
}
