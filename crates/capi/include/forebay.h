/*
 * forebay.h - a Forebay pool, without a mount and without LD_PRELOAD.
 *
 * Link with -lforebay. A path starts at the pool's root ("/a/b" and "a/b" are the same), never with the prefix under
 * which `forebay run` shows the pool. Every function returns 0 or more, or a negative errno (-ENOENT, ...), for which
 * forebay_strerror has words; none of them moves errno, and an output argument is set on success alone.
 *
 * A descriptor that forebay_open returns is the kernel's own, of the file's backing file: read, write, lseek, mmap,
 * fsync, dup, close(2) and the rest are the kernel's. Only fstat(2) would answer for the backing file: use
 * forebay_fstat.
 *
 * All functions may be called from any thread at any time; all but forebay_attach, forebay_opendir, forebay_closedir and
 * those of forebay_file, forebay_request, forebay_memory and forebay_stage also from a signal handler. One directory
 * (forebay_dir) belongs to one thread at a time.
 *
 * A symbolic link or ".." that leads out of the pool is -EXDEV: such a path is the kernel's.
 *
 * SPDX-License-Identifier: Apache-2.0 OR MIT
 */
#ifndef FOREBAY_H
#define FOREBAY_H

#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An attached pool. It lives as long as the process. */
typedef struct forebay_pool forebay_pool;

/* A directory being read. */
typedef struct forebay_dir forebay_dir;

/* An entry of a directory. "." and ".." are not among them. */
struct forebay_dirent {
    uint64_t ino;       /* inode number */
    uint64_t cookie;    /* position behind this entry, for forebay_seekdir */
    unsigned char kind; /* DT_REG, DT_DIR, ... of <dirent.h> */
    char name[256];     /* with a NUL at its end */
};

/*
 * Attaches to the pool whose directory is `dir` (what `forebay up --path` was given), or, when that is NULL, whose
 * directory the environment variable FOREBAY_POOL names. On failure forebay_attach_error has the whole story.
 */
int forebay_attach(const char *dir, forebay_pool **pool);

/* Why this thread's last forebay_attach failed, cut to `room` bytes with the NUL. Returns the length of the whole. */
int forebay_attach_error(char *words, size_t room);

/* What an errno, negative or positive, means for a pool, and what helps. Never NULL; not to be freed. */
const char *forebay_strerror(int error);

/*
 * As open(2); `mode` counts when O_CREAT or O_TMPFILE is in `flags`, and no umask is applied to it. Returns a descriptor
 * to be closed with close(2); that of a directory is good for fchdir(2) and for nothing else of the kernel's.
 */
int forebay_open(forebay_pool *pool, const char *path, int flags, mode_t mode);

/* As stat(2), lstat(2), fstat(2) (of any descriptor), access(2). */
int forebay_stat(forebay_pool *pool, const char *path, struct stat *out);
int forebay_lstat(forebay_pool *pool, const char *path, struct stat *out);
int forebay_fstat(forebay_pool *pool, int fd, struct stat *out);
int forebay_access(forebay_pool *pool, const char *path, int mode);

/* As mkdir(2) (no umask applied), rmdir(2), unlink(2), renameat2(2) with its flags, link(2), symlink(2). */
int forebay_mkdir(forebay_pool *pool, const char *path, mode_t mode);
int forebay_rmdir(forebay_pool *pool, const char *path);
int forebay_unlink(forebay_pool *pool, const char *path);
int forebay_rename(forebay_pool *pool, const char *from, const char *to, unsigned int flags);
int forebay_link(forebay_pool *pool, const char *from, const char *to);
int forebay_symlink(forebay_pool *pool, const char *target, const char *path);

/* As readlink(2): the bytes stored, without a NUL. */
int64_t forebay_readlink(forebay_pool *pool, const char *path, char *buffer, size_t room);

/*
 * As chmod(2), fchownat(2) and utimensat(2); `flags` is 0 or AT_SYMLINK_NOFOLLOW. A uid or gid of (uid_t)-1 stays;
 * `times` of NULL is the present, UTIME_NOW and UTIME_OMIT are known.
 */
int forebay_chmod(forebay_pool *pool, const char *path, mode_t mode);
int forebay_chown(forebay_pool *pool, const char *path, uid_t uid, gid_t gid, int flags);
int forebay_utimens(forebay_pool *pool, const char *path, const struct timespec times[2], int flags);

/* As truncate(2). */
int forebay_truncate(forebay_pool *pool, const char *path, int64_t size);

/*
 * As getxattr(2), setxattr(2), listxattr(2), removexattr(2), or, with `flags` AT_SYMLINK_NOFOLLOW, as lgetxattr(2) and
 * its like. Room for 0 bytes asks for the size. `xattr_flags` is 0, XATTR_CREATE or XATTR_REPLACE.
 */
int64_t forebay_getxattr(forebay_pool *pool, const char *path, const char *name, void *value, size_t room, int flags);
int forebay_setxattr(forebay_pool *pool, const char *path, const char *name, const void *value, size_t bytes,
                     int xattr_flags, int flags);
int64_t forebay_listxattr(forebay_pool *pool, const char *path, char *names, size_t room, int flags);
int forebay_removexattr(forebay_pool *pool, const char *path, const char *name, int flags);

/*
 * A file of any layout, also of several backing files, whose reads and writes go to the right ones. `flags` are O_RDONLY,
 * O_WRONLY or O_RDWR with O_CREAT, O_EXCL and O_TRUNC. A file that is made gets `stripe_count` backing files (1 to 256)
 * of stripes of `stripe_bytes` (a power of two, 4 KiB to 1 GiB; ignored for one). With FOREBAY_STRIPES_DEFAULT added to the
 * count, and with 0, what `forebay layout set` gave the directory goes first, and of more than two that are all on one target a
 * prime near the count is taken. A file that is there keeps its own.
 * Threads may share a forebay_file; closing it is the last thing that is done with it.
 */
#define FOREBAY_STRIPES_DEFAULT 0x80000000u
typedef struct forebay_file forebay_file;
int forebay_file_open(forebay_pool *pool, const char *path, int flags, mode_t mode, uint32_t stripe_count,
                      uint32_t stripe_bytes, forebay_file **file);

/*
 * The same on targets that are named: the stripes of a file that is made go round them in their order. Up to 8 targets;
 * without any, the daemon chooses. A target is a node's number in the upper 16 bits and its place among the node's targets,
 * from 0, in the lower ones; `forebay status` shows both.
 */
#define FOREBAY_TARGET(node, index) ((uint32_t)(node) << 16 | (uint32_t)(index))
int forebay_file_open_on(forebay_pool *pool, const char *path, int flags, mode_t mode, uint32_t stripe_count,
                         uint32_t stripe_bytes, const uint32_t *targets, int target_count, forebay_file **file);
int forebay_file_close(forebay_file *file);

/* The descriptor of a file with one backing file, good as long as the file is open, or -EOPNOTSUPP. */
int forebay_file_fd(const forebay_file *file);

/* The file's backing files and bytes of a stripe. */
int forebay_file_layout(const forebay_file *file, uint32_t *stripe_count, uint32_t *stripe_bytes);

/* How many of the file's backing files are on other nodes, whose data come and go as requests; a negative errno. */
int forebay_file_elsewhere(const forebay_file *file);

/*
 * As pread(2) and pwrite(2), but a read is short only at the end of the file, and a write only when what follows failed.
 * The size is the greatest that any backing file gives.
 */
int64_t forebay_file_pread(const forebay_file *file, void *buffer, size_t bytes, int64_t offset);
int64_t forebay_file_pwrite(const forebay_file *file, const void *buffer, size_t bytes, int64_t offset);
int64_t forebay_file_size(const forebay_file *file);

/* As forebay_file_pread and forebay_file_pwrite, from and to several pieces of memory. */
int64_t forebay_file_preadv(const forebay_file *file, const struct iovec *parts, int part_count, int64_t offset);
int64_t forebay_file_pwritev(const forebay_file *file, const struct iovec *parts, int part_count, int64_t offset);

/*
 * From and to many ranges of the file, in as few system calls as there are backing files: `runs` and `parts`, each in its
 * order, are the same bytes, and -EINVAL if they are not equally many. A read returns the bytes before the first that lies
 * behind the file's end; a write all, or what went wrong, when any of it may have been written. What lies between the ranges is
 * never written. Small ranges that are near each other may be read by a buffer of the library's: `parts` of a read must be
 * memory that can be written, or the process ends as by a store of its own.
 */
struct forebay_run {
    int64_t offset, bytes;
};
int64_t forebay_file_read_runs(const forebay_file *file, const struct iovec *parts, int part_count,
                               const struct forebay_run *runs, int run_count);
int64_t forebay_file_write_runs(const forebay_file *file, const struct iovec *parts, int part_count,
                                const struct forebay_run *runs, int run_count);

/*
 * As lseek(2) with SEEK_DATA and SEEK_HOLE, from any offset and moving none: -ENXIO where lseek says so. What lies on other
 * nodes counts as data. forebay_file_punch makes a range a hole, which reads as zeros and takes no space.
 */
int64_t forebay_file_seek_data(const forebay_file *file, int64_t offset);
int64_t forebay_file_seek_hole(const forebay_file *file, int64_t offset);
int forebay_file_punch(const forebay_file *file, int64_t offset, int64_t bytes);

/*
 * What the program will do. FOREBAY_NORMAL, as it is at first: each read sees what was acknowledged before it began.
 * FOREBAY_SEQUENTIAL: this forebay_file is read in order, and what it reads of other nodes' data may be up to a second old; they
 * are read ahead then, so that small reads come fast. Writes, truncation and forebay_file_sync by this forebay_file are seen
 * at once all the same. -EINVAL for anything else.
 */
#define FOREBAY_NORMAL 0
#define FOREBAY_SEQUENTIAL 2
int forebay_file_advise(const forebay_file *file, int advice);

/* As ftruncate(2), posix_fallocate(3) from the start, and fsync(2). */
int forebay_file_truncate(const forebay_file *file, int64_t size);
int forebay_file_allocate(const forebay_file *file, int64_t size);
int forebay_file_sync(const forebay_file *file);

/*
 * What processes that opened a file together have in common, in a pool of several nodes: a pointer that each of them moves, and
 * locks that no program's own meet. It is kept by the node that has the file's first backing file. One process makes a group
 * and tells the others its number, never 0; it ends with forebay_file_group_end, which that process alone may call, or with that
 * process. -EOPNOTSUPP in a pool of one node, where memory can be shared.
 *
 * forebay_file_group_move moves the pointer on by 0 or more and returns where it was; forebay_file_group_seek sets it. Both are
 * done once, whichever daemon dies meanwhile. forebay_file_group_lock keeps others of the group from `bytes` bytes at `offset`, those
 * that lock to read only if `writes` is not 0, and waits while others have it; `lock` is for forebay_file_group_unlock. A lock goes
 * with its process. -ESTALE: there is no such group any more.
 */
int forebay_file_group_make(const forebay_file *file, int64_t position, uint64_t *group);
int64_t forebay_file_group_move(const forebay_file *file, uint64_t group, int64_t by);
int forebay_file_group_seek(const forebay_file *file, uint64_t group, int64_t position);
int forebay_file_group_lock(const forebay_file *file, uint64_t group, int writes, int64_t offset, int64_t bytes,
                            uint64_t *lock);
int forebay_file_group_unlock(const forebay_file *file, uint64_t group, uint64_t lock);
int forebay_file_group_end(const forebay_file *file, uint64_t group);

/*
 * A read or write that goes on while the caller does: 0 when it was started, -EAGAIN when too many wait already. The
 * buffer is not touched by anybody else until it is done; the file may be closed at once. `done`, unless NULL, is called
 * with `state` and the result, of forebay_file_pread or forebay_file_pwrite, on a thread of the library's own: it may
 * start others, and should not wait for any. `request`, unless NULL, is set, and ends with forebay_request_wait or with a
 * forebay_request_test that returned 1; one of the two must be given.
 *
 * The first call starts the threads; they block all signals and stay. A child made by fork(2) may start requests of its
 * own, and has none of its parent's. Not to be called from signal handlers.
 */
typedef struct forebay_request forebay_request;
typedef void forebay_done(void *state, int64_t result);
int forebay_file_read_start(const forebay_file *file, void *buffer, size_t bytes, int64_t offset, forebay_done *done,
                            void *state, forebay_request **request);
int forebay_file_write_start(const forebay_file *file, const void *buffer, size_t bytes, int64_t offset,
                             forebay_done *done, void *state, forebay_request **request);

/* Waits until it is done, and after its callback returned: its result. */
int64_t forebay_request_wait(forebay_request *request);

/* 1 and the result when it is done, 0 while it is not. */
int forebay_request_test(forebay_request *request, int64_t *result);

/*
 * Memory that transfers will use again and again. Its pages are made present, so that no transfer waits for them: of
 * data on this node that is all, and any other memory is as good. -EFAULT for what is not mapped. It stays the caller's
 * to free, after forebay_memory_unregister.
 */
typedef struct forebay_memory forebay_memory;
int forebay_memory_register(forebay_pool *pool, void *first, size_t bytes, forebay_memory **memory);
int forebay_memory_unregister(forebay_memory *memory);

/*
 * How a file lies, or how files that are made with several backing files in a directory are to; the latter can be set, the
 * former made one backing file (-EBUSY while anybody has it open, -ENOSPC without room for a copy). forebay_open and
 * programs under `forebay run` do that by themselves.
 */
int forebay_layout_get(forebay_pool *pool, const char *path, uint32_t *stripe_count, uint32_t *stripe_bytes);
int forebay_layout_set(forebay_pool *pool, const char *path, uint32_t stripe_count, uint32_t stripe_bytes);
int forebay_layout_migrate(forebay_pool *pool, const char *path);

/*
 * On which targets (FOREBAY_TARGET): forebay_layout_set_on names those of a directory's new files, forebay_layout_targets
 * gives a file's, or those that a directory names, into room for `room` of them, and returns how many there are: none
 * where they are chosen for each file.
 */
int forebay_layout_set_on(forebay_pool *pool, const char *path, uint32_t stripe_count, uint32_t stripe_bytes,
                          const uint32_t *targets, int target_count);
int forebay_layout_targets(forebay_pool *pool, const char *path, uint32_t *targets, int room);

/*
 * A directory's width: the number of nodes over which its entries lie. It can be set, once, of an empty directory of the
 * caller's: 2 to 16, 0 being all nodes up to that. -ENOTEMPTY with entries, -EEXIST when it is wide already, -ENXIO when the
 * pool has not so many nodes.
 */
int forebay_layout_width(forebay_pool *pool, const char *path);
int forebay_layout_set_width(forebay_pool *pool, const char *path, uint32_t width);

/*
 * Copies a file or a directory with all below it into the pool, or out of it, by the `forebay` command in a process of its
 * own: `forebay stage-in SOURCE:PATH` and `stage-out PATH:DESTINATION`, whose rules for names hold; the paths outside are
 * absolute. The start returns at once: -ENOENT when the command is not beside the library. forebay_stage_test returns 1
 * when all was copied and 0 while it goes on; forebay_stage_wait waits and returns 1. Both return a negative errno when
 * not all was copied, with words in the status on the first file that failed and on what to do, and both end `stage`
 * unless 0 was returned. A status of NULL is not filled. forebay_stage_stop has it stop soon, after which it ends with -EINTR; it
 * goes on when it is started again. One thread at a time uses a stage, of the process that started it.
 */
#define FOREBAY_STAGE_VERIFY 1         /* read each copy again and compare */
#define FOREBAY_STAGE_ALL_OR_NOTHING 2 /* if anything fails, remove all that was copied */
typedef struct forebay_stage forebay_stage;
struct forebay_stage_status {
    uint64_t files, bytes;  /* that were copied */
    uint64_t skipped_files; /* that were there already, complete */
    uint64_t failed_files;
    char words[512];
};
int forebay_stage_in_start(forebay_pool *pool, const char *source, const char *path, int flags, forebay_stage **stage);
int forebay_stage_out_start(forebay_pool *pool, const char *path, const char *destination, int flags,
                            forebay_stage **stage);
int forebay_stage_test(forebay_stage *stage, struct forebay_stage_status *status);
int forebay_stage_wait(forebay_stage *stage, struct forebay_stage_status *status);
int forebay_stage_stop(const forebay_stage *stage);

/* As statvfs(3), of the whole pool. */
int forebay_statvfs(forebay_pool *pool, struct statvfs *out);

/*
 * Reads a directory: each entry that is there all the time comes once, whatever comes and goes meanwhile.
 * forebay_readdir returns 1 and an entry, or 0 at the end. forebay_seekdir goes on behind a cookie, also in another
 * process and at another time; cookie 0 is the start.
 */
int forebay_opendir(forebay_pool *pool, const char *path, forebay_dir **dir);
int forebay_readdir(forebay_dir *dir, struct forebay_dirent *out);
int forebay_seekdir(forebay_dir *dir, uint64_t cookie);
int forebay_closedir(forebay_dir *dir);

#ifdef __cplusplus
}
#endif

#endif
