/*
 * The MPI-IO driver of one MPI. These sources are built once against the mpi.h of each MPI.
 *
 * The driver links no MPI. It finds functions and, for Open MPI, the objects behind predefined handles in the library
 * that the process has loaded (native.c). The handle of a Forebay file is an address within a reserved range
 * (handle.c), so no call of the MPI library gets one. Ranks communicate only on a duplicate of the file's communicator,
 * whose errors return.
 *
 * Locks: a file's `lock` guards its position, view, hints and split call. It is never held during a transfer or a call
 * that waits for other ranks. The lock of atomic mode is taken last, one for each access.
 */
#ifndef FOREBAY_MPI_DRIVER_H
#define FOREBAY_MPI_DRIVER_H

#define _GNU_SOURCE
#include <mpi.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "forebay.h"

/* ---- native.c: functions and objects of the MPI library that the driver uses ---- */

#define NATIVE_FUNCTIONS(X)                                                                                            \
    X(Abort) X(Allreduce) X(Alltoall) X(Alltoallv) X(Barrier) X(Bcast) X(Comm_create) X(Comm_create_keyval) X(Comm_free) \
    X(Comm_get_attr) X(Comm_group) X(Comm_set_attr) X(Comm_rank) X(Comm_set_errhandler) X(Comm_size) X(Comm_test_inter) X(Errhandler_free) X(Error_class)              \
    X(Error_string) X(Exscan) X(File_call_errhandler) X(File_get_errhandler) X(File_set_errhandler)                    \
    X(Grequest_complete) X(Grequest_start) X(Group_free) X(Iallreduce) X(Ibarrier) X(Info_create) X(Info_free) X(Info_get)            \
    X(Info_set) X(Pack) X(Recv) X(Send)                                                                                           \
    X(Status_set_cancelled) X(Status_set_elements_x)                  \
    X(Test) X(Type_create_keyval) X(Type_dup) X(Type_free) X(Type_get_attr) X(Type_get_extent_x) X(Type_get_name)      \
    X(Type_set_attr)                                                                                                  \
    X(Type_size_x)

struct native {
#define X(name) __typeof__(&PMPI_##name) name;
    NATIVE_FUNCTIONS(X)
#undef X
#if MPI_VERSION >= 4
    __typeof__(&PMPI_Type_get_envelope_c) Type_get_envelope;
    __typeof__(&PMPI_Type_get_contents_c) Type_get_contents;
#else
    __typeof__(&PMPI_Type_get_envelope) Type_get_envelope;
    __typeof__(&PMPI_Type_get_contents) Type_get_contents;
#endif
#ifdef OPEN_MPI
    __typeof__(&PMPI_Errhandler_f2c) Errhandler_f2c;
    __typeof__(&PMPI_Type_c2f) Type_c2f;
#endif
};
extern struct native mpi;

#ifdef OPEN_MPI
#define NATIVE_OBJECTS(X)                                                                                              \
    X(ompi_mpi_byte) X(ompi_mpi_int) X(ompi_mpi_int64_t) X(ompi_mpi_datatype_null) X(ompi_mpi_op_max)                  \
    X(ompi_mpi_op_sum) X(ompi_mpi_comm_null) X(ompi_mpi_comm_self) X(ompi_mpi_comm_world) X(ompi_mpi_info_null) X(ompi_mpi_file_null)        \
    X(ompi_mpi_errors_return) X(ompi_mpi_errors_are_fatal) X(ompi_mpi_short_int) X(ompi_mpi_double_int)                \
    X(ompi_mpi_long_int) X(ompi_mpi_longdbl_int) X(ompi_request_null)
struct native_objects {
#define X(name) void *name;
    NATIVE_OBJECTS(X)
#undef X
};
extern struct native_objects native_objects;
/*
 * mpi.h defines MPI_BYTE and so on as addresses of objects of the library. Here they refer to the objects found at run
 * time.
 */
#undef OMPI_PREDEFINED_GLOBAL
#define OMPI_PREDEFINED_GLOBAL(type, global) ((type)native_objects.global)
#endif

/* libforebay.so's functions. */
#define FOREBAY_FUNCTIONS(X)                                                                                           \
    X(attach) X(attach_error) X(unlink) X(volume_file_open) X(volume_file_unlink)                                      \
    X(file_open) X(file_close) X(file_fd) X(file_layout) X(file_number) X(file_elsewhere) X(file_preadv)               \
    X(model_calibration) X(model_learn) X(model_predict) X(model_quick)                                                  \
    X(file_group_end) X(file_group_lock) X(file_group_make) X(file_group_move) X(file_group_seek) X(file_group_unlock) \
    X(file_pwritev) X(file_read_runs) X(file_write_runs) X(file_size) X(file_truncate) X(file_allocate) X(file_sync)
struct forebay {
#define X(name) __typeof__(&forebay_##name) name;
    FOREBAY_FUNCTIONS(X)
#undef X
};
extern struct forebay forebay;

bool native_find(void *library);
/* The pool, attached at the first call. NULL, and a line on standard error, when the attach fails. */
forebay_pool *forebay_attached(void);
void forebay_found_at(const char *directory);
/* What a name of MPI-IO means. */
enum place { OUTSIDE, IN_POOL, IN_VOLUME };
/*
 * For a file of the pool `*where` is its path, for the file of a volume the volume's specifier. Both are in `room` of 4096
 * bytes, or within `name`.
 */
enum place place_of(const char *name, char *room, const char **where);
bool debug(void);

/* ---- pnetcdf.c: ncmpi_inq_file_format; `native` is PnetCDF's own ---- */
int pnetcdf_look(const char *path, int *format, int (*native)(const char *, int *));

/* ---- type.c: the bytes of a datatype ---- */

struct block {
    int64_t offset, bytes;
};
struct flat {
    _Atomic int types;        /* how many datatypes use it: the original and its copies */
    int64_t size, lb, extent; /* as from MPI_Type_size and MPI_Type_get_extent */
    int64_t count;
    struct block *blocks; /* in the order of the type map; adjacent blocks are joined */
    int64_t *before;      /* bytes of all blocks before each */
    bool dense;           /* copies of it follow each other without a gap */
    bool rising;          /* offsets are 0 or more and never go back */
    bool overlaps;        /* the type is rising, and two of its blocks have a byte in common */
    bool scaled;          /* for a type in a file: some extent in it differs from that in memory */
    uint8_t *kinds;       /* the kind of each block, where numbers are converted; otherwise NULL */
    bool apart;           /* rising; neither blocks nor copies overlap or interleave, so data are in the file's order */
};
/* The flat form of a committed datatype, cached with it; MPI_ERR_TYPE, MPI_ERR_NO_MEM. `comm` is for errors. */
int flat_of(MPI_Datatype type, MPI_Comm comm, const struct flat **out);
/* True for a named datatype, or a Fortran datatype by precision and range, which programs cannot free. */
bool type_is_predefined(MPI_Datatype type);
/*
 * The arguments of a Fortran type by precision and range, MPI_UNDEFINED for a missing one. For a named type only size
 * and combiner are set.
 */
struct by_range {
    int combiner;
    int64_t precision, range, size;
};
int by_range_of(MPI_Datatype type, struct by_range *out);
/*
 * The flat form of a datatype in a file. `own` is NULL when that form equals the one in memory; otherwise flat_free
 * frees it.
 */
struct datarep;
int flat_in_file(MPI_Datatype type, const struct datarep *rep, MPI_Comm comm, const struct flat **out, struct flat **own);
/* The flat form in memory with the kinds of its numbers; flat_free frees it. */
int flat_leaves(MPI_Datatype type, struct flat **out);
void flat_free(struct flat *flat);

/* ---- walk.c ---- */

/* A walk over the bytes of `flat`, repeated without end from `base`. */
struct walk {
    const struct flat *flat;
    int64_t base, tile, index, within;
};
void walk_start(struct walk *walk, const struct flat *flat, int64_t base, int64_t position);
/* The address of the next bytes, and how many follow contiguously, at most `most`. Advances past them. */
int64_t walk_next(struct walk *walk, int64_t most, int64_t *bytes);

/* ---- handle.c, file.c ---- */

#define HINTS(X)                                                                                                       \
    X(cb_nodes) X(cb_buffer_size) X(romio_cb_read) X(romio_cb_write) X(romio_ds_read) X(striping_factor)               \
    X(striping_unit)
enum hint {
#define X(name) HINT_##name,
    HINTS(X)
#undef X
    HINT_COUNT
};
enum { HINT_BYTES = 64 };

/* State that the ranks of one open share if they are on one node; stored in a memfd of rank 0. */
struct shared {
    uint64_t nonce;              /* the memfd's identity, in its first slot */
    _Atomic int users;           /* ranks that have the file open; 0 in a slot that is free */
    _Atomic int64_t position[2]; /* the shared file pointer, in etypes: of this view, and of the next or last */
    pthread_mutex_t atomic;      /* robust; held during an access in atomic mode */
};

/* The address of that state; `slot` is negative when there is none. */
struct shared_place {
    int64_t pid, memfd, nonce, slot;
};

struct view {
    int64_t disp;
    MPI_Datatype etype, filetype;
    const struct flat *file; /* the flat form of filetype */
    struct flat *own; /* the same pointer, when only this view uses it */
    int64_t etype_size;
    const struct datarep *rep; /* NULL: native */
};

struct handler {
    MPI_Errhandler handle;
    void (*function)(void); /* NULL for a predefined handler, or one whose function is not known */
    bool fortran;
};

enum split { SPLIT_NONE, SPLIT_AT, SPLIT_INDIVIDUAL, SPLIT_ORDERED };

/*
 * How a file's collective calls are chosen. Everything but `measured_ns` is the same on all ranks, as it follows from the
 * exchange of an open and of earlier calls.
 */
struct choice {
    struct forebay_calibration calibration; /* rank 0's; zeros: none */
    struct forebay_corrections corrections, begun_with;
    int64_t one_place;      /* all ranks are on one node */
    int64_t nodes;          /* that the ranks are on, as far as rank 0 knows */
    int64_t gate_run, gate_window; /* the mean length of runs, and the hints, for which `gate` is */
    int gate_aggregators;
    bool gate[2];           /* whether an exchange can pay, for reads and writes */
    bool is_known;          /* the last call had a prediction */
    bool writes, together;  /* of the last call */
    int64_t predicted_ns;   /* of the last call, and without corrections */
    int64_t plain_ns;
    int64_t end;            /* in the file, of the last call of all ranks */
    int64_t measured_ns;    /* on this rank, of the last call */
    int64_t file_ns;        /* in which this rank's windows were moved, in two-phase calls; parts may be beside the exchange */
    struct {
        int64_t calls, predicted_ns, measured_ns, file_ns;
    } tally[2][2]; /* by `writes` and `together`; the greatest times of any rank */
};

struct file {
    MPI_File handle;
    pthread_mutex_t lock;
    MPI_Comm comm;             /* the file's own, or its resident's */
    struct resident *resident; /* the resident that owns `comm`, or NULL */
    int rank, size, amode;
    int64_t processors; /* the number on rank 0's node */
    bool one_node;      /* all ranks are on that node */
    bool far;           /* some rank and some of the data are on different nodes */
    bool near;          /* some rank and some of the data are on one node */
    forebay_file *data;
    int fd; /* descriptor of a file with one backing file, or -1 */
    enum place place;
    char *path; /* in the pool; or the specifier of a volume */
    struct view view;
    int64_t position;   /* the individual file pointer, in etypes */
    bool apart;         /* the views of all ranks are apart: data before an offset are the first of each rank */
    int64_t shortest_run; /* the smallest mean length of runs in the view of any rank */
    bool atomic;
    struct shared *shared; /* NULL where this rank has none */
    int turn;              /* index of the position that this view uses: the same on all ranks */
    bool shared_known;     /* whether it is known if all ranks have `shared` */
    uint64_t group;        /* the group at a daemon that replaces `shared`; 0 for none */
    _Atomic bool group_lost; /* its loss was reported */
    int64_t close_codes[2];      /* error classes of a close: this rank's, and the greatest of all ranks */
    bool has_left;           /* this rank did not wait for the others, so the MPI library still uses `close_codes` */
    struct choice choice;
    char hints[HINT_COUNT][HINT_BYTES];
    struct handler handler;
    enum split split;
    bool split_writes;
    int64_t split_bytes;
};

/* The file of a handle, or NULL when it is closed. */
struct file *file_of(MPI_File handle);
bool is_ours(MPI_File handle);
extern char handle_range[];
enum { HANDLES_MAX = 65536, HANDLE_BYTES = 16 };
MPI_File handle_make(struct file *file);
void handle_free(MPI_File handle);
MPI_Fint handle_c2f(MPI_File handle);
bool handle_f2c(MPI_Fint number, MPI_File *handle);

int class_of(int64_t negative_errno);
void view_free(struct view *view);
int view_default(struct view *view, MPI_Comm comm);
int64_t view_offset(const struct view *view, int64_t position_bytes);
/*
 * Where the given bytes of the view's data, one or more, begin and end; approximately if the view is not apart.
 * MPI_ERR_ARG when the end exceeds the largest offset.
 */
int view_span(const struct view *view, int64_t position, int64_t bytes, int64_t *first, int64_t *end);
/* The mean length of its runs in bytes; INT64_MAX when it is one run, or none. */
int64_t view_run(const struct view *view);
/* Bytes of the view's data before byte `end` of the file. */
int64_t view_bytes_before(const struct view *view, int64_t end);
/*
 * The common result of all ranks: an error if any has one, otherwise MPI_ERR_NOT_SAME if `value` differs, otherwise
 * MPI_SUCCESS. Collective.
 */
int agree(const struct file *file, int code, int64_t value);
void hints_read(struct file *file, MPI_Info info, bool opening);
MPI_Info hints_give(const struct file *file);

int file_set_view(struct file *file, MPI_Offset disp, MPI_Datatype etype, MPI_Datatype filetype, const char *datarep,
                  MPI_Info info);

/* ---- datarep.c ---- */

/* A representation that the program registered, with its functions. Either of the first two may be NULL. */
struct conversions {
    enum { CONVERSIONS_C, CONVERSIONS_LARGE, CONVERSIONS_FORTRAN } kind;
    void (*read)(void), (*write)(void), (*extent)(void);
    void *state;
};
int datarep_register(const char *name, const struct conversions *functions, const MPI_Aint *fortran_state);
/* `*out` is NULL for native; MPI_ERR_UNSUPPORTED_DATAREP for an unknown name. */
int datarep_find(const char *name, const struct datarep **out);
const char *datarep_name(const struct datarep *rep);
/* Whether data that are read or written need conversion. */
bool datarep_converts(const struct datarep *rep, bool writes);
/* Bytes of a predefined type in the file. */
int datarep_extent(const struct datarep *rep, MPI_Datatype type, int64_t *extent);
/* The numbers of a predefined type, for external32. */
typedef void leaf_function(void *list, int64_t offset, int64_t bytes, uint8_t kind);
int datarep_leaves(MPI_Datatype type, leaf_function *add, void *list);
/*
 * Converts between memory and a copy of `bytes` bytes of the file, in which an item takes `item` bytes. Returns the
 * number of bytes in memory.
 */
int datarep_convert(const struct datarep *rep, bool to_file, void *memory, int64_t count, MPI_Datatype type, int64_t item,
                    void *file, int64_t bytes, int64_t *done);
MPI_Fint datatype_c2f(MPI_Datatype type);

/* ---- comm.c ---- */

/* What ranks exchange about the communicator that a file will use. The result is the maximum of each number. */
struct comm_offer {
    int64_t resident, not_resident; /* the free resident, or 0; and its complement */
    int64_t next;                   /* a number for a new resident */
    int64_t full;                   /* nonzero if no more residents may be made */
};

void comm_offer(MPI_Comm comm, struct comm_offer *mine);
/* Gives the file a communicator with the ranks of `comm`; an error class. Collective. */
int comm_take(struct file *file, MPI_Comm comm, const struct comm_offer *all);
void comm_give_back(struct file *file);
/*
 * In a close: waits until all ranks have entered it, so that their earlier calls are complete. A rank of a group leaves
 * with MPI_ERR_IO when rank 0 is known to have ended. The file's communicator cannot be used again then. Collective.
 */
int comm_wait_for_all(struct file *file);
/*
 * Called next by the ranks of a group: waits until no rank is in the first wait. Returns the greatest error class of
 * all ranks, including those that left; `unknown` if this rank cannot receive it. Collective.
 */
int comm_end(struct file *file, int code, int unknown);

/* ---- shared.c ---- */

/* On rank 0: takes a slot for a file with this number of ranks. */
void shared_make(struct file *file, struct shared_place *place);
void shared_join(struct file *file, const struct shared_place *place);
void shared_leave(struct file *file);
/* On rank 0: frees the slot, when the others know that they must not join. */
void shared_drop(struct file *file);
/* True if this process cannot open the memory of others. It reports this in an open, so that its file gets none. */
bool shared_is_hidden(void);
/*
 * Determines whether all ranks have the shared memory, and gives them a group if not. The first call exchanges
 * messages. Collective.
 */
void shared_by_all(struct file *file);
/* The same after a collective call has determined whether any rank lacks the memory. */
void shared_settle(struct file *file, bool is_missed);
/* True if this rank has a shared file pointer and atomic mode. */
bool shared_there(const struct file *file);
/* Ends the group at the daemon, when no rank uses it any more. */
void shared_end(struct file *file);
/*
 * A daemon's answer to a query for the group: negative on failure, -ESTALE when the group has ended, which it does with
 * rank 0.
 */
int64_t shared_ask(const struct file *file);
/*
 * The error class of a daemon's answer. The first answer that shows the loss of the group is explained on standard
 * error.
 */
int shared_class(struct file *file, int64_t answer);
/* Sets the pointer of the next view to 0, on rank 0. The ranks use it after shared_turn. */
void shared_prepare(struct file *file);
/*
 * Switches to that pointer. All ranks have been in one collective call since, which determined whether any lacks
 * memory. Collective.
 */
int shared_turn(struct file *file, bool is_missed);
/* Moves the shared file pointer forward by `etypes`, and returns its old value. An error class. */
int shared_move(struct file *file, int64_t by, int64_t *before);
/* Sets the pointer. No rank returns before it is set. An error class, the same on all ranks. Collective. */
int shared_seek(struct file *file, int64_t position);
/* Excludes other ranks from these bytes while they are accessed in atomic mode, and readmits them. An error class. */
int shared_lock(struct file *file, bool writes, int64_t first, int64_t last, uint64_t *lock);
int shared_unlock(struct file *file, uint64_t lock);
/* The same number for processes that can find each other's memfds. */
int64_t shared_node(void);

/* ---- error.c ---- */

/*
 * Calls the error handler of `file`, or of MPI_FILE_NULL when `file` is NULL. Returns the code that the handler leaves.
 */
int fail(struct file *file, int code);
void handler_remember(MPI_Errhandler handle, void (*function)(void), bool fortran);
void handler_default(struct handler *out);
void handler_set(struct handler *out, MPI_Errhandler handle);
MPI_Errhandler handler_again(const struct handler *handler);
void handler_drop(struct handler *handler);

/* ---- access.c ---- */

enum pointer { AT_OFFSET, INDIVIDUAL, SHARED, ORDERED };
enum { COLLECTIVE = 1 };

/* One complete access: checks, moves the pointer, transfers. `bytes` is the number of bytes transferred. */
int access_file(struct file *file, bool writes, enum pointer pointer, int flags, int64_t offset, void *buffer,
                int64_t count, MPI_Datatype type, int64_t *bytes);
/* Transfers `bytes` bytes between memory and the view's data from byte `position` on. */
int transfer(struct file *file, const struct view *view, bool writes, int64_t position, void *buffer, int64_t count,
             const struct flat *memory, int64_t *done);
int64_t transfer_run(struct file *file, bool writes, struct iovec *parts, int count, int64_t offset);

/* ---- twophase.c ---- */

/* A rank's part in a collective call; also the combined parts of all ranks, the same on all. */
struct together {
    int code;            /* error class of a rank's arguments */
    int64_t bytes;       /* the greatest number of bytes of any rank */
    int64_t first, last; /* the range of the file that ranks with bytes touch */
    int64_t run;         /* the greatest mean length of a run */
    int64_t aggregators; /* of the call, as the model chooses; 0: as hints or defaults say */
};
/* True if a collective call may use aggregators. All ranks get the same answer, and a negative one needs no message. */
bool may_two_phase(struct file *file, bool writes);
/* True if the call does use aggregators, decided from the parts of all ranks. Collective. */
bool wants_two_phase(struct file *file, bool writes, const struct together *mine, struct together *all);
/* The number of aggregators, and the bytes of the file that each handles in a round, as hints or defaults say. */
void aggregators_of(const struct file *file, int *aggregators, int64_t *window);
/* ---- exchange.c, exchange_memory.c ---- */

/* Memory of two-phase calls, for one call; NULL when there is none. */
struct exchange;
struct exchange *exchange_take(void);
void exchange_give_back(struct exchange *memory);
/* Room in it for so many bytes of this rank's data in one piece; NULL. */
char *exchange_packed(struct exchange *memory, int64_t bytes);
/*
 * `transfer` for memory in one piece, by all ranks together; `packed` is NULL if there was no memory for it, and `memory`
 * likewise.
 */
int two_phase(struct file *file, const struct view *view, bool writes, int64_t position, char *packed, int64_t bytes,
              const struct together *all, struct exchange *memory, int64_t *done);

/* ---- choice.c: the model's part in that decision ---- */

/* What the job's files have taught rank 0 so far, of files whose data are where `reach` says. Zeros: nothing. */
struct choice_learnt {
    int64_t one_place; /* all ranks were on one node */
    struct forebay_corrections corrections;
};
enum { REACHES = 3 };
/* What rank 0 sends to the others in an open. */
struct choice_offer {
    struct forebay_calibration calibration; /* zeros: none; the first number -1: switched off */
    struct choice_learnt learnt[REACHES];
    int64_t place, nodes;                   /* rank 0's place, and the number of nodes */
    int64_t is_measured;                    /* messages and requests were, in this job */
};
/* The same number for ranks on one node of the pool. */
int64_t choice_place(void);
/* On rank 0, with the pool attached. */
void choice_offer(const struct file *file, struct choice_offer *mine);
/*
 * Keeps rank 0's calibration. `one_place`: all ranks are on one node. When ranks on several nodes first open a file with
 * data on other nodes, two ranks measure messages, and one a request. Collective then.
 */
void choice_start(struct file *file, const struct choice_offer *first, bool one_place);
/* At the close: rank 0 keeps what the file has taught, for files that it opens later. */
void choice_keep(const struct file *file);
/* True if there is a calibration. */
bool choice_is_known(const struct file *file);
/* True if an exchange can pay for views with the file's runs. */
bool choice_may(struct file *file, bool writes);
/* Learns from the last call, whose greatest time of any rank was exchanged. The same on all ranks. */
void choice_learn(struct file *file, int64_t measured_ns, int64_t file_ns);
/* Decides a call, and stores its predicted times. The same on all ranks. */
bool choice_together(struct file *file, bool writes, const struct together *all, struct forebay_times *times);
/* Notes what a call does, for `choice_learn` at the next. */
void choice_note(struct file *file, bool writes, bool together, const struct forebay_times *times);
int64_t choice_clock(void);
/* On rank 0, at close and on request: how many calls went each way, with predicted and measured times. */
void choice_report(struct file *file);

#endif
