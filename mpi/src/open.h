/*
 * open.c: opening and closing files. `elsewhere` is set if the path leads out of the pool, so the MPI library opens the
 * file.
 */
#ifndef FOREBAY_MPI_OPEN_H
#define FOREBAY_MPI_OPEN_H

#include "driver.h"

int file_open(MPI_Comm comm, enum place place, const char *path, int amode, MPI_Info info, MPI_File *out,
              bool *elsewhere);
int file_close(struct file *file);
int file_delete(enum place place, const char *path, bool *elsewhere);

#endif
