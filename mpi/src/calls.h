/*
 * The calls that libforebay_mpi.so interposes, each also as PMPI_.
 *
 * ON_FILE(name): the first argument is the file, by value. A file that is not Forebay's goes to the MPI library by a
 * jump. ALWAYS(name): the driver examines the arguments itself. ON_FILE_C and the like are the forms of MPI 4 for large
 * counts. The order has no meaning.
 */
#define FOREBAY_ALWAYS(X)                                                                                              \
    X(File_open) X(File_close) X(File_delete) X(File_f2c) X(File_create_errhandler) X(Register_datarep)

#define FOREBAY_ON_FILE(X)                                                                                             \
    X(File_set_size) X(File_preallocate) X(File_get_size) X(File_get_group) X(File_get_amode) X(File_set_info)         \
    X(File_get_info) X(File_set_view) X(File_get_view) X(File_get_type_extent) X(File_set_atomicity)                   \
    X(File_get_atomicity) X(File_sync) X(File_set_errhandler) X(File_get_errhandler) X(File_call_errhandler)           \
    X(File_c2f) X(File_seek) X(File_get_position) X(File_get_byte_offset) X(File_seek_shared)                          \
    X(File_get_position_shared) X(File_read_all_end) X(File_write_all_end) X(File_read_at_all_end)                     \
    X(File_write_at_all_end) X(File_read_ordered_end) X(File_write_ordered_end) FOREBAY_COUNTED(X)

/* Calls with a form for large counts, except File_get_type_extent and Register_datarep. */
#define FOREBAY_COUNTED(X)                                                                                             \
    X(File_read_at) X(File_read_at_all) X(File_write_at) X(File_write_at_all) X(File_iread_at) X(File_iwrite_at)       \
    X(File_iread_at_all) X(File_iwrite_at_all) X(File_read) X(File_read_all) X(File_write) X(File_write_all)           \
    X(File_iread) X(File_iwrite) X(File_iread_all) X(File_iwrite_all) X(File_read_shared) X(File_write_shared)         \
    X(File_iread_shared) X(File_iwrite_shared) X(File_read_ordered) X(File_write_ordered) X(File_read_at_all_begin)    \
    X(File_write_at_all_begin) X(File_read_all_begin) X(File_write_all_begin) X(File_read_ordered_begin)               \
    X(File_write_ordered_begin)

/* Fortran's calls that register a representation: in mpif.h and the module mpi, and in mpi_f08. */
#define FOREBAY_FORTRAN_DATAREP(X)                                                                                     \
    X(mpi_register_datarep_) X(mpi_register_datarep__) X(pmpi_register_datarep_) X(pmpi_register_datarep__)            \
    X(mpi_register_datarep_f08_) X(pmpi_register_datarep_f08_) X(pmpir_register_datarep_f08_)

/*
 * Fortran's calls that create an error handler. In Open MPI they do not call a C function. In mpi_f08 of MPICH they
 * call one as C does.
 */
#define FOREBAY_FORTRAN(X)                                                                                             \
    X(mpi_file_create_errhandler_) X(mpi_file_create_errhandler__) X(pmpi_file_create_errhandler_)                     \
    X(pmpi_file_create_errhandler__) X(ompi_file_create_errhandler_f) X(mpi_file_create_errhandler_f08_)               \
    X(pmpir_file_create_errhandler_f08_)
