/*
 * forebay.h - access to a Forebay pool without a mount and without LD_PRELOAD.
 *
 * Link with -lforebay. A path starts at the pool's root ("/a/b" and "a/b" are the same). It does not contain the prefix
 * under which `forebay run` shows the pool. Every function returns 0 or more, or a negative errno (-ENOENT, ...), for
 * which forebay_strerror has a text. A required pointer that is NULL gives -EFAULT. No function changes errno. An
 * output argument is set on success only. Sizes, offsets and lengths are in bytes.
 *
 * forebay_open returns a kernel descriptor of the file's backing file: read, write, lseek, mmap, fsync, dup, close(2)
 * and the rest are the kernel's own calls. The exception is fstat(2), which returns the attributes of the backing file:
 * use forebay_fstat for those of the file.
 *
 * All functions may be called from any thread at any time. All may be called from a signal handler, except
 * forebay_attach, forebay_opendir, forebay_closedir, the functions of forebay_file, forebay_request, forebay_memory,
 * forebay_stage and forebay_volume, forebay_alloc to forebay_unregister, forebay_model_calibration, and those for
 * backing stores (from forebay_state on). One thread at a time uses a directory (forebay_dir).
 *
 * If a symbolic link or ".." leads out of the pool, the call returns -EXDEV: use the kernel's own call for such a path.
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
 * Attaches to the pool with the directory `dir` (the argument of `forebay up --path`). If `dir` is NULL, the
 * environment variable FOREBAY_POOL names the directory. After a failure forebay_attach_error has the full explanation.
 */
int forebay_attach(const char *dir, forebay_pool **pool);

/*
 * Stores the reason why this thread's last forebay_attach, or call on a volume or its file, failed, truncated to `room`
 * bytes including the NUL. Returns the length of the full text without a NUL, which is at most 1023.
 */
int forebay_attach_error(char *words, size_t room);

/* What an errno, negative or positive, means for a pool, and what helps. Never NULL. The caller does not free it. */
const char *forebay_strerror(int error);

/*
 * As open(2). `mode` is used if O_CREAT or O_TMPFILE is in `flags`, without a umask. Returns a descriptor, which the
 * caller closes by close(2). The descriptor of a directory can be used for fchdir(2), and for no other call of the
 * kernel but close(2).
 */
int forebay_open(forebay_pool *pool, const char *path, int flags, mode_t mode);

/* As stat(2), lstat(2), fstat(2) (of any descriptor), access(2). */
int forebay_stat(forebay_pool *pool, const char *path, struct stat *out);
int forebay_lstat(forebay_pool *pool, const char *path, struct stat *out);
int forebay_fstat(forebay_pool *pool, int fd, struct stat *out);
int forebay_access(forebay_pool *pool, const char *path, int mode);

/* As mkdir(2) (without a umask), rmdir(2), unlink(2), renameat2(2) with its flags, link(2), symlink(2). */
int forebay_mkdir(forebay_pool *pool, const char *path, mode_t mode);
int forebay_rmdir(forebay_pool *pool, const char *path);
int forebay_unlink(forebay_pool *pool, const char *path);
int forebay_rename(forebay_pool *pool, const char *from, const char *to, unsigned int flags);
int forebay_link(forebay_pool *pool, const char *from, const char *to);
int forebay_symlink(forebay_pool *pool, const char *target, const char *path);

/* As readlink(2): the number of bytes stored, without a NUL. */
int64_t forebay_readlink(forebay_pool *pool, const char *path, char *buffer, size_t room);

/*
 * As chmod(2), fchownat(2) and utimensat(2). `flags` is 0 or AT_SYMLINK_NOFOLLOW. A uid or gid of (uid_t)-1 leaves the
 * owner or group unchanged. `times` has the access time and then the modification time. NULL sets both to the present
 * time. UTIME_NOW and UTIME_OMIT may be used.
 */
int forebay_chmod(forebay_pool *pool, const char *path, mode_t mode);
int forebay_chown(forebay_pool *pool, const char *path, uid_t uid, gid_t gid, int flags);
int forebay_utimens(forebay_pool *pool, const char *path, const struct timespec times[2], int flags);

/* As truncate(2). */
int forebay_truncate(forebay_pool *pool, const char *path, int64_t size);

/*
 * As getxattr(2), setxattr(2), listxattr(2), removexattr(2), or, with `flags` AT_SYMLINK_NOFOLLOW, as lgetxattr(2) and
 * so on. `room` is the size of the buffer; with 0 a call returns the size that is needed. `xattr_flags` is 0,
 * XATTR_CREATE or XATTR_REPLACE.
 */
int64_t forebay_getxattr(forebay_pool *pool, const char *path, const char *name, void *value, size_t room, int flags);
int forebay_setxattr(forebay_pool *pool, const char *path, const char *name, const void *value, size_t bytes,
                     int xattr_flags, int flags);
int64_t forebay_listxattr(forebay_pool *pool, const char *path, char *names, size_t room, int flags);
int forebay_removexattr(forebay_pool *pool, const char *path, const char *name, int flags);

/*
 * Opens a file of any layout. It may have several backing files, to which reads and writes are distributed. `flags` are
 * O_RDONLY, O_WRONLY or O_RDWR with O_CREAT, O_EXCL and O_TRUNC. A new file gets `stripe_count` backing files (1 to
 * 256) with stripes of `stripe_bytes` (a power of two, 4 KiB to 1 GiB; ignored for one backing file). With
 * FOREBAY_STRIPES_DEFAULT added to the count, or with a count of 0, the layout that `forebay layout set` gave the
 * directory takes precedence. If the directory has none, the count is above two and all backing files are on one
 * target, the file gets a prime near the count. An existing file keeps its layout. Threads may share a forebay_file.
 * After forebay_file_close no call may use it.
 */
#define FOREBAY_STRIPES_DEFAULT 0x80000000u
typedef struct forebay_file forebay_file;
int forebay_file_open(forebay_pool *pool, const char *path, int flags, mode_t mode, uint32_t stripe_count,
                      uint32_t stripe_bytes, forebay_file **file);

/*
 * As forebay_file_open, with named targets. The stripes of a new file are distributed over them in the given order. Up
 * to 8 targets (-EINVAL for more, -ENXIO for one that does not exist). Without any, the daemon chooses. A target is a
 * node's number in the upper 16 bits and the index of the target on that node, from 0, in the lower 16 bits. `forebay
 * status` shows both.
 */
#define FOREBAY_TARGET(node, index) ((uint32_t)(node) << 16 | (uint32_t)(index))
int forebay_file_open_on(forebay_pool *pool, const char *path, int flags, mode_t mode, uint32_t stripe_count,
                         uint32_t stripe_bytes, const uint32_t *targets, int target_count, forebay_file **file);
int forebay_file_close(forebay_file *file);

/*
 * Returns the descriptor of a file with one backing file that is on this node, valid until the file is closed.
 * -EOPNOTSUPP for any other file, and in a pool that emulates a medium.
 */
int forebay_file_fd(const forebay_file *file);

/* Stores the number of the file's backing files, and the bytes of a stripe. */
int forebay_file_layout(const forebay_file *file, uint32_t *stripe_count, uint32_t *stripe_bytes);

/* Stores a number that all opens of one file have in common, until it is removed, and no others of the pool. */
int forebay_file_number(const forebay_file *file, uint64_t *number);

/* Returns the number of the file's backing files on other nodes, whose data are transferred by requests. */
int forebay_file_elsewhere(const forebay_file *file);

/*
 * As pread(2) and pwrite(2), except that a read is short only at the end of the file, and a write only if its rest
 * failed. forebay_file_size returns the greatest size that any backing file implies.
 */
int64_t forebay_file_pread(const forebay_file *file, void *buffer, size_t bytes, int64_t offset);
int64_t forebay_file_pwrite(const forebay_file *file, const void *buffer, size_t bytes, int64_t offset);
int64_t forebay_file_size(const forebay_file *file);

/* As forebay_file_pread and forebay_file_pwrite, with several pieces of memory. */
int64_t forebay_file_preadv(const forebay_file *file, const struct iovec *parts, int part_count, int64_t offset);
int64_t forebay_file_pwritev(const forebay_file *file, const struct iovec *parts, int part_count, int64_t offset);

/*
 * Reads and writes many ranges of the file, in as few system calls as there are backing files. The bytes of `runs`, in
 * their order, are the bytes of `parts`, in their order; -EINVAL if the sums of their lengths differ. A read returns
 * the number of bytes before the first byte that is behind the end of the file. A write returns the number of all
 * bytes; after an error, any of them may have been written. Bytes between the ranges are never written. A read may
 * fetch small ranges that are near each other through a buffer of the library. The `parts` of a read must be writable
 * memory; otherwise the process gets the signal of an invalid store.
 */
struct forebay_run {
    int64_t offset, bytes;
};
int64_t forebay_file_read_runs(const forebay_file *file, const struct iovec *parts, int part_count,
                               const struct forebay_run *runs, int run_count);
int64_t forebay_file_write_runs(const forebay_file *file, const struct iovec *parts, int part_count,
                                const struct forebay_run *runs, int run_count);

/*
 * As lseek(2) with SEEK_DATA and SEEK_HOLE, from any offset, without a file position. -ENXIO as for lseek. Data on
 * other nodes count as data without holes. forebay_file_punch makes a range a hole, which reads as zeros and takes no
 * space.
 */
int64_t forebay_file_seek_data(const forebay_file *file, int64_t offset);
int64_t forebay_file_seek_hole(const forebay_file *file, int64_t offset);
int forebay_file_punch(const forebay_file *file, int64_t offset, int64_t bytes);

/*
 * Announces how the program will read. FOREBAY_NORMAL is the default: each read returns all data that were written
 * before it began. FOREBAY_SEQUENTIAL: the program reads this forebay_file in order, and accepts data of other nodes
 * that are up to a second old. They are read ahead, so that small reads are fast. Writes, truncation and
 * forebay_file_sync by this forebay_file are nevertheless visible at once. -EINVAL for any other advice.
 */
#define FOREBAY_NORMAL 0
#define FOREBAY_SEQUENTIAL 2
int forebay_file_advise(const forebay_file *file, int advice);

/*
 * As ftruncate(2), posix_fallocate(3) from the start, and fsync(2). In a directory that is attached with
 * `--durable fsync` or `close`, forebay_file_sync returns when the backing store has the data.
 */
int forebay_file_truncate(const forebay_file *file, int64_t size);
int forebay_file_allocate(const forebay_file *file, int64_t size);
int forebay_file_sync(const forebay_file *file);

/*
 * A group is state that processes share which opened a file together, in a pool of several nodes: a file pointer that
 * each of them can move, and locks that do not conflict with locks that programs take by other calls. The node of the
 * file's first backing file keeps it. One process makes a group and passes its number, which is never 0, to the others.
 * The group ends with forebay_file_group_end, which only that process may call, or when that process ends. -EOPNOTSUPP
 * in a pool of one node, where processes can share memory.
 *
 * forebay_file_group_move moves the pointer forward by `by` bytes, 0 or more, and returns its old value.
 * forebay_file_group_seek sets it. Each is executed once, even if a daemon dies meanwhile. forebay_file_group_lock
 * locks `bytes` bytes at `offset` against others of the group: exclusively if `writes` is not 0, and otherwise against
 * writers. It waits while others hold a conflicting lock. `lock` is for forebay_file_group_unlock. The end of a process
 * releases its locks. -ESTALE: the group has ended.
 */
int forebay_file_group_make(const forebay_file *file, int64_t position, uint64_t *group);
int64_t forebay_file_group_move(const forebay_file *file, uint64_t group, int64_t by);
int forebay_file_group_seek(const forebay_file *file, uint64_t group, int64_t position);
int forebay_file_group_lock(const forebay_file *file, uint64_t group, int writes, int64_t offset, int64_t bytes,
                            uint64_t *lock);
int forebay_file_group_unlock(const forebay_file *file, uint64_t group, uint64_t lock);
int forebay_file_group_end(const forebay_file *file, uint64_t group);

/*
 * Starts a read or write and returns while it is in progress: 0, or -EAGAIN if too many wait already or no thread can
 * be started. No other code may use the buffer until the transfer is done. The file may be closed at once. `done`,
 * unless NULL, is called with `state` and the result, as of forebay_file_pread or forebay_file_pwrite, on a thread of
 * the library. It may start other transfers, and should not wait for any. `request`, unless NULL, is set to a handle,
 * which is valid until forebay_request_wait returns, or until forebay_request_test returns 1. One of `done` and
 * `request` is required (-EINVAL).
 *
 * The first call starts the threads. They block all signals and run until the process ends. A child made by fork(2) may
 * start requests of its own, but must not use those of its parent. Not to be called from signal handlers.
 */
typedef struct forebay_request forebay_request;
typedef void forebay_done(void *state, int64_t result);
int forebay_file_read_start(const forebay_file *file, void *buffer, size_t bytes, int64_t offset, forebay_done *done,
                            void *state, forebay_request **request);
int forebay_file_write_start(const forebay_file *file, const void *buffer, size_t bytes, int64_t offset,
                             forebay_done *done, void *state, forebay_request **request);

/* Waits until the request is done and its callback has returned. Returns its result. */
int64_t forebay_request_wait(forebay_request *request);

/* Returns 1 and stores the result if the request is done, otherwise returns 0. */
int forebay_request_test(forebay_request *request, int64_t *result);

/*
 * Registers memory that transfers will use repeatedly. Its pages are made present, so that no transfer waits for them.
 * There is no other effect at present. -EFAULT for memory that is not mapped, -EINVAL for 0 bytes. The caller frees the
 * memory after forebay_memory_unregister.
 */
typedef struct forebay_memory forebay_memory;
int forebay_memory_register(forebay_pool *pool, void *first, size_t bytes, forebay_memory **memory);
int forebay_memory_unregister(forebay_memory *memory);

/*
 * The layout of a file, or the default layout of a directory, which applies to files that are created in it with
 * several backing files. The layout of a directory can be set. forebay_layout_migrate converts a file to one backing
 * file (-EBUSY while it is open, -ENOSPC without space for a copy). forebay_open and programs under `forebay run` do
 * this without the call.
 */
int forebay_layout_get(forebay_pool *pool, const char *path, uint32_t *stripe_count, uint32_t *stripe_bytes);
int forebay_layout_set(forebay_pool *pool, const char *path, uint32_t stripe_count, uint32_t stripe_bytes);
int forebay_layout_migrate(forebay_pool *pool, const char *path);

/*
 * The targets (FOREBAY_TARGET) of a layout. forebay_layout_set_on sets the targets of a directory's new files.
 * forebay_layout_targets stores the targets of a file, or those set for a directory, but at most `room` of them. It
 * returns their full number, which is 0 if targets are chosen for each file.
 */
int forebay_layout_set_on(forebay_pool *pool, const char *path, uint32_t stripe_count, uint32_t stripe_bytes,
                          const uint32_t *targets, int target_count);
int forebay_layout_targets(forebay_pool *pool, const char *path, uint32_t *targets, int room);

/*
 * A directory's width: the number of nodes over which its entries are distributed. The owner of an empty directory can
 * set it once: 2 to 16, or 0 for all nodes, at most 16. -ENOTEMPTY if it has entries, -EEXIST if it is wide already,
 * -ENXIO if the pool has fewer nodes.
 */
int forebay_layout_width(forebay_pool *pool, const char *path);
int forebay_layout_set_width(forebay_pool *pool, const char *path, uint32_t width);

/*
 * Copies a file, or a directory with everything below it, into the pool or out of it. The `forebay` command does this
 * in a process of its own: `forebay stage-in SOURCE:PATH` and `stage-out PATH:DESTINATION`. Its rules for names apply,
 * except that paths outside the pool must be absolute. The start functions return at once; -ENOENT if the command is
 * not beside the library. forebay_stage_test returns 1 when everything was copied and 0 while the copy is in progress.
 * forebay_stage_wait waits and returns 1. Both return a negative errno if something was not copied; then the status has
 * a text about the first file that failed and what to do. Unless they return 0, both free `stage`. They fill the status
 * unless it is NULL. forebay_stage_stop stops the copy soon. The copy then ends with -EINTR, and continues if it is
 * started again. One thread at a time uses a stage, in the process that started it.
 */
#define FOREBAY_STAGE_VERIFY 1         /* read each copy again and compare */
#define FOREBAY_STAGE_ALL_OR_NOTHING 2 /* if anything fails, remove all that was copied */
typedef struct forebay_stage forebay_stage;
struct forebay_stage_status {
    uint64_t files, bytes;  /* copied files and their bytes */
    uint64_t skipped_files; /* files that were complete at the destination already */
    uint64_t failed_files;
    char words[512];        /* after a failure: the reason, with a NUL at its end */
};
int forebay_stage_in_start(forebay_pool *pool, const char *source, const char *path, int flags, forebay_stage **stage);
int forebay_stage_out_start(forebay_pool *pool, const char *path, const char *destination, int flags,
                            forebay_stage **stage);
int forebay_stage_test(forebay_stage *stage, struct forebay_stage_status *status);
int forebay_stage_wait(forebay_stage *stage, struct forebay_stage_status *status);
int forebay_stage_stop(const forebay_stage *stage);

/*
 * Files in front of a backing store (`forebay attach`). forebay_state stores what the store has of a path; for a path
 * that belongs to no store the state is FOREBAY_UNATTACHED. `durable` is 1 if the store has the data, the name and the
 * attributes. forebay_wait_durable waits until then, as the directory's policy copies them: -ETIMEDOUT after
 * `timeout_ms`, which if negative has no limit; -EEXIST for a conflict with a version that others wrote; -ENODATA for a
 * path that belongs to no store. forebay_sync has a file copied now, also while programs have it open for writing, and
 * returns when the store has what it contained; -EIO, -EACCES or -ENOSPC if the store fails. forebay_prestage copies a
 * released file into the pool. forebay_release drops the pool's copy: -EBUSY if the store does not have the data, or if
 * the file is open or pinned; -EOPNOTSUPP if another node has data of the file (use `forebay release`). forebay_pin
 * keeps a file, or what is in a directory, from being released; 0 ends that. forebay_sync, forebay_prestage and
 * forebay_release are for regular files: -EISDIR for a directory, for which there are `forebay sync -r`,
 * `prestage -r` and `release -r`.
 */
#define FOREBAY_UNATTACHED 0 /* it belongs to no store */
#define FOREBAY_RELEASED 1   /* the data are in the store alone */
#define FOREBAY_CLEAN 2      /* pool and store are equal */
#define FOREBAY_DIRTY 3      /* the pool's data are newer */
#define FOREBAY_DRAINING 4   /* the same, and they are being copied */
struct forebay_path_state {
    int state, durable, conflict, pinned;
    uint64_t epoch;         /* of a file's data: grows with each new content and release */
    int64_t stored_bytes;   /* bytes of the version in the store, -1 if it has none */
    int64_t stored_mtime_s; /* when that was modified, in seconds since 1970; data until then are durable */
};
int forebay_state(forebay_pool *pool, const char *path, struct forebay_path_state *out);
int forebay_wait_durable(forebay_pool *pool, const char *path, int timeout_ms);
int forebay_sync(forebay_pool *pool, const char *path);
int forebay_prestage(forebay_pool *pool, const char *path);
int forebay_release(forebay_pool *pool, const char *path);
int forebay_pin(forebay_pool *pool, const char *path, int pinned);

/* As statvfs(3), of the whole pool. */
int forebay_statvfs(forebay_pool *pool, struct statvfs *out);

/*
 * A volume is a range of the pool's memory that `forebay volume create` made. Programs put to it and get from it. On the
 * node of a piece of it that is a copy without a system call. To and from pieces on other nodes the daemons of the two
 * nodes transfer the bytes.
 *
 * forebay_volume_open opens a volume by its name, or by a specifier: [local[.link]/]node[.link]:volume. `local` is this
 * node, `node` the one node that has the volume; a node is a number or this host's name. A node has one link, 0. Several
 * specifiers joined by '+' are one volume that is striped over theirs, in stripes of 1 MiB, and as large as whole
 * stripes of the smallest allow. `flags` is O_RDONLY or O_RDWR. -EINVAL: the specifier has an error; -ENOENT: there is
 * no such volume; -EACCES: its mode does not allow it; -ENXIO: it is not on that node; -EIO: some of its memory is lost,
 * or on a node that is down. forebay_attach_error then has the full explanation, with the part that is wrong.
 * While a process has a volume open or mapped, no other can shrink or delete it; growing does not concern those who have
 * it open. Several threads may use it, and a child made by fork(2). forebay_volume_close must be the last use.
 *
 * forebay_volume_put and forebay_volume_get copy `bytes` bytes; forebay_volume_putv and forebay_volume_getv copy
 * consecutive bytes to and from several ranges, in their order (-EINVAL if the sums of their lengths differ). -ERANGE
 * beyond the end, -EBADF for a put to a volume that is open for reading, -EIO when the pool is gone: nothing is copied
 * then. -EIO also when another node cannot be reached or has lost its piece: some bytes may be copied, and may still be
 * within 30 seconds; forebay_attach_error then names the node. A put promises its bytes and no order among puts of
 * several threads. A get that overlaps a put may return bytes of before and after it.
 *
 * forebay_volume_cas replaces the 64-bit word at `offset` by `value` if it is `expected`, forebay_volume_fetch_add adds
 * to it, forebay_volume_swap replaces it. `was` is what the word was. They are atomic, and in one order, against those of
 * all processes of all nodes. -EINVAL unless the offset is a multiple of 8. -EIO as above: the word may be changed or not,
 * and never is changed twice. A put or get of another node's piece that overlaps such a call may tear the word.
 *
 * A put, an atomic operation, and every other call has taken effect for the processes of all nodes when it returns 0.
 * forebay_volume_fence orders this thread's calls before it before those after it, as all processes see them.
 * forebay_volume_flush returns 0 when every process gets what this thread has put: it is -EIO if the pool, or the memory
 * of a piece on another node, was gone by then.
 *
 * A thin volume takes space as it is written: a put for which there is none is -ENOSPC, and some of its bytes may be
 * copied. forebay_volume_discard gives back the space of a range, which reads as zeros then, in whole pages of 4 KiB;
 * -EOPNOTSUPP for volumes that are not thin, also where `bytes` is 0. A put or get of a thin volume on this node is a
 * system call. Atomic operations and forebay_volume_map are for volumes that are not thin (-EOPNOTSUPP).
 *
 * forebay_volume_map stores the address of the byte at `offset`, and how many bytes follow it there; -EOPNOTSUPP for a
 * byte on another node. The address is valid until the volume is closed. Accesses by it do not notice that the pool is
 * gone.
 */
typedef struct forebay_volume forebay_volume;
int forebay_volume_open(forebay_pool *pool, const char *specifier, int flags, forebay_volume **volume);
int forebay_volume_close(forebay_volume *volume);
int64_t forebay_volume_size(const forebay_volume *volume);
int forebay_volume_put(const forebay_volume *volume, const void *from, size_t bytes, int64_t offset);
int forebay_volume_get(const forebay_volume *volume, void *to, size_t bytes, int64_t offset);
int forebay_volume_putv(const forebay_volume *volume, const void *from, size_t bytes, const struct forebay_run *runs,
                        int run_count);
int forebay_volume_getv(const forebay_volume *volume, void *to, size_t bytes, const struct forebay_run *runs,
                        int run_count);
int forebay_volume_discard(const forebay_volume *volume, int64_t offset, size_t bytes);
int forebay_volume_cas(const forebay_volume *volume, int64_t offset, uint64_t expected, uint64_t value, uint64_t *was);
int forebay_volume_fetch_add(const forebay_volume *volume, int64_t offset, uint64_t by, uint64_t *was);
int forebay_volume_swap(const forebay_volume *volume, int64_t offset, uint64_t value, uint64_t *was);
int forebay_volume_flush(const forebay_volume *volume);
int forebay_volume_fence(const forebay_volume *volume);
int forebay_volume_map(const forebay_volume *volume, int64_t offset, void **address, size_t *bytes);

/*
 * Memory for puts, gets and their lists, also asynchronous ones. It is correct to use any memory. Bytes to and from
 * this node are copied once in any case. Those to and from other nodes are copied between the program's memory and
 * memory that the network reads and writes, except from and to memory that forebay_alloc returns.
 *
 * forebay_alloc stores the address of `size` bytes: zeros, aligned to pages of 4 KiB, all of them present, and shared
 * with children made by fork(2). Ranges of it that are whole pages, of more than 32 KiB, are transferred without a
 * copy by the process that allocated them. Shorter ones travel in requests; others are copied. A volume is cut at its
 * stripes and then into parts of 128 KiB to 1 MiB, so the offset in the volume must be a multiple of 4 KiB as well.
 * After a get that fails, the bytes of its range are undefined. A range whose transfer was disturbed, also if the call
 * succeeds, is copied from then on, and its pages may have been replaced by others at the same addresses: children made
 * before, and whatever else has the pages (an MPI window, an RDMA or CUDA registration, mlock(2), mbind(2)), do not share
 * those that the process has then. If there is no memory for other pages, the call is -EIO, and a transfer may still
 * read or write the range, while forebay_free is -EBUSY, for up to 80 s. -EINVAL: `size` is 0; -ENOMEM: it is
 * more than 4 GiB, than the node has left, or than RLIMIT_FSIZE; -EMFILE: the process has 256 ranges that it allocated or
 * registered, or no descriptor left; -EIO: the pool is gone. -EFAULT from a put or get: its range begins in allocated
 * memory and ends behind it.
 *
 * forebay_register is for the program's own memory, which is copied: it makes the pages of the range present, and has
 * the process's buffer for transfers made, so that the first call does not take the time for that. The range stays the
 * program's, which must unregister it before it frees it. A range that is left registered ends when forebay_alloc gets
 * its addresses. -EINVAL: `bytes` is 0; -EFAULT: some of it is not mapped; -EEXIST: some of it is registered or
 * allocated; -EMFILE and -EIO as above.
 *
 * forebay_free frees allocated memory, and forebay_unregister ends a registration; they take the address that
 * forebay_alloc stored, or that was registered. -EINVAL: any other address, also one that was freed or unregistered
 * before; -EBUSY: a call on a volume that uses the memory is in progress, or started and its completion is not there:
 * nothing is changed, and the program calls again when it has ended. The memory can be freed after its pool is gone. A
 * child made by fork(2) has the ranges of its parent, and frees or unregisters them for itself; only its own calls use
 * them there.
 */
int forebay_alloc(forebay_pool *pool, size_t size, void **memory);
int forebay_free(void *memory);
int forebay_register(forebay_pool *pool, void *memory, size_t bytes);
int forebay_unregister(void *memory);

/*
 * Asynchronous calls on volumes, executed by threads of the library, in any order. A call that was started (0) ends with
 * one completion in the queue that it names, also if it fails; -EAGAIN: too many wait, and it was not started. The memory
 * must stay valid, and unused, until then; the volume may be closed before. `state` is passed on to the completion.
 * forebay_volume_fence and forebay_volume_flush cover a call once its completion was taken.
 *
 * forebay_queue_create makes a queue. With FOREBAY_QUEUE_SPIN, forebay_queue_wait spins until a completion is there:
 * that takes a processor, and less time. forebay_queue_wait takes completions, in the order in which the calls ended,
 * and returns how many. It waits for the first one, `timeout_ms` milliseconds at most, without end if that is negative;
 * it returns 0 when the time has passed, or when no call is left. forebay_queue_descriptor returns an eventfd that is
 * readable while completions wait, for poll(2) alone. forebay_queue_close waits until all calls have ended, and must be
 * the last use. Several threads may use a queue; a child made by fork(2) makes its own.
 */
#define FOREBAY_QUEUE_SPIN 1
struct forebay_completion {
    void *state;    /* as it was passed */
    int64_t result; /* 0, or a negative errno */
    uint64_t was;   /* of an atomic operation: what the word was */
};
typedef struct forebay_queue forebay_queue;
int forebay_queue_create(int flags, forebay_queue **queue);
int forebay_queue_close(forebay_queue *queue);
int forebay_queue_descriptor(const forebay_queue *queue);
int forebay_queue_wait(const forebay_queue *queue, struct forebay_completion *completions, int completion_count,
                       int timeout_ms);
int forebay_volume_put_start(const forebay_volume *volume, const void *from, size_t bytes, int64_t offset,
                             forebay_queue *queue, void *state);
int forebay_volume_get_start(const forebay_volume *volume, void *to, size_t bytes, int64_t offset, forebay_queue *queue,
                             void *state);
int forebay_volume_cas_start(const forebay_volume *volume, int64_t offset, uint64_t expected, uint64_t value,
                             forebay_queue *queue, void *state);
int forebay_volume_fetch_add_start(const forebay_volume *volume, int64_t offset, uint64_t by, forebay_queue *queue,
                                   void *state);
int forebay_volume_swap_start(const forebay_volume *volume, int64_t offset, uint64_t value, forebay_queue *queue,
                              void *state);

/*
 * A volume holds a file: its bytes up to an end of file, which all processes share, and which lives as long as the volume.
 * MPI-IO uses volumes so. forebay_volume_file_open opens the file of the volume that a specifier names. The functions of
 * forebay_file do with it what they do with other files, without a system call where all pieces are on this node. From
 * other nodes than that of the first piece each read and write asks for the end. `flags` are as for forebay_file_open. A
 * new or formatted volume is an empty file that nobody has created: O_EXCL succeeds. -ENOENT, without O_CREAT: the file
 * was removed; otherwise the errors are those of forebay_volume_open. forebay_volume_file_unlink removes the file. The
 * volume stays, and its bytes up to the end become zero; no process should have the file open.
 *
 * Writes, forebay_file_truncate and forebay_file_allocate move the end; forebay_volume_put and the others do not. What a
 * write skips reads as zeros, unless a program has put there. -ENOSPC beyond the end of the volume: nothing is written
 * then. forebay_file_truncate must not meet writes of other processes. There is no descriptor (-EOPNOTSUPP), and all
 * bytes count as data for forebay_file_seek_data. The end of joined volumes is kept with the first.
 */
int forebay_volume_file_open(forebay_pool *pool, const char *specifier, int flags, forebay_file **file);
int forebay_volume_file_unlink(forebay_pool *pool, const char *specifier);

/*
 * The model of collective and independent I/O (docs/decisions/0049), as the MPI driver uses it. The functions do no I/O,
 * but for forebay_model_calibration. Processes that pass equal numbers get equal results.
 *
 * A calibration is an array of numbers without pointers, so that a process can send it to others: what the machine, its
 * network and a medium need, or zeros for none. forebay_model_calibration reads the one that `forebay model calibrate` has
 * stored with the pool, or the document that the environment variable FOREBAY_MODEL names; `off` there is none. Returns 1,
 * or 0 if there is none. After an error, such as -EINVAL, or -EIO for a document of a newer version,
 * forebay_attach_error has the full explanation. forebay_model_quick puts three measured values into a calibration; in one
 * of zeros it sets the others too, to guesses for a pool in memory on a node with so many processors.
 */
struct forebay_calibration {
    int64_t numbers[21];
};
int forebay_model_calibration(forebay_pool *pool, struct forebay_calibration *out);
int forebay_model_quick(int64_t message_ns, int64_t message_byte_ps, int64_t request_ns, int64_t processors,
                        struct forebay_calibration *calibration);

/*
 * What all ranks do in one call. A rank has `bytes` bytes, in runs of `run_bytes` with `gap_bytes` between them; with no
 * gap each rank has one range. `aggregators` ranks access the file for the others in a collective call, `buffer_bytes` at a
 * time; with `fewer_aggregators`, a half of them, a quarter and so on where that is faster. `targets` targets can be accessed at the same time, each as fast as the calibrated medium. `far` is 1 if data are on
 * other nodes, and 2 if all data are on nodes without ranks. `continued` is 1 if the ranges of all ranks begin where those
 * of the call before have ended.
 */
struct forebay_pattern {
    int64_t ranks, nodes, aggregators, bytes, run_bytes, gap_bytes, buffer_bytes, targets, writes, far, fewer_aggregators,
        continued;
};

/* How predictions differed from measured times so far, for short and for long calls. Zeros are no corrections. */
struct forebay_corrections {
    int64_t factors[16];
};

/* Predicted times, in nanoseconds; the same without corrections; and the number of aggregators in the collective one. */
struct forebay_times {
    int64_t collective_ns, collective_low_ns, collective_high_ns;
    int64_t independent_ns, independent_low_ns, independent_high_ns;
    int64_t collective_plain_ns, independent_plain_ns;
    int64_t aggregators;
};

/*
 * Stores the times of a pattern. Returns 1 if the collective way is faster by more than 5 %, otherwise 0. -EINVAL if there
 * is no calibration, or a number of the pattern is negative. forebay_model_learn corrects later predictions by a measured
 * time, given that without corrections. Times that are not above 0 change nothing, and one measurement changes a factor by
 * a quarter of the difference.
 */
int forebay_model_predict(const struct forebay_calibration *calibration, const struct forebay_corrections *corrections,
                          const struct forebay_pattern *pattern, struct forebay_times *out);
int forebay_model_learn(struct forebay_corrections *corrections, int writes, int collective, int64_t plain_ns,
                        int64_t measured_ns);

/*
 * Reads a directory. Each entry that exists during the whole time is returned once. Entries that are created or removed
 * meanwhile may be returned or not. forebay_readdir returns 1 and an entry, or 0 at the end. forebay_seekdir continues
 * behind a cookie, which is also valid in another process and at another time. Cookie 0 is the start.
 */
int forebay_opendir(forebay_pool *pool, const char *path, forebay_dir **dir);
int forebay_readdir(forebay_dir *dir, struct forebay_dirent *out);
int forebay_seekdir(forebay_dir *dir, uint64_t cookie);
int forebay_closedir(forebay_dir *dir);

#ifdef __cplusplus
}
#endif

#endif
