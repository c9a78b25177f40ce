! A data representation with functions in Fortran, which stores each integer plus one; and one without conversion
! functions.
! datarep POOL_FILE. Uses mpif.h, or with BY_MODULE the module mpi.
module representation
#ifdef BY_MODULE
    use mpi
    implicit none
#else
    implicit none
    include 'mpif.h'
#endif
    integer :: wrong = 0
contains
    subroutine extent(datatype, bytes, state, ierror)
        integer :: datatype, ierror
        integer(kind=MPI_ADDRESS_KIND) :: bytes, state
        if (datatype /= MPI_INTEGER .or. state /= 77) wrong = wrong + 1
        bytes = 4
        ierror = MPI_SUCCESS
    end subroutine

    subroutine from_file(user, datatype, count, file, position, state, ierror)
        integer :: user(*), file(*), datatype, count, ierror
        integer(kind=MPI_OFFSET_KIND) :: position
        integer(kind=MPI_ADDRESS_KIND) :: state
        if (datatype /= MPI_INTEGER .or. state /= 77) wrong = wrong + 1
        user(position + 1:position + count) = file(1:count) - 1
        ierror = MPI_SUCCESS
    end subroutine

    subroutine to_file(user, datatype, count, file, position, state, ierror)
        integer :: user(*), file(*), datatype, count, ierror
        integer(kind=MPI_OFFSET_KIND) :: position
        integer(kind=MPI_ADDRESS_KIND) :: state
        if (datatype /= MPI_INTEGER .or. state /= 77) wrong = wrong + 1
        file(1:count) = user(position + 1:position + count) + 1
        ierror = MPI_SUCCESS
    end subroutine
end module

program datarep
    use representation
    implicit none
    integer :: file, ierror, rank, failures, total, written(3), back(3), class
    integer(kind=MPI_OFFSET_KIND) :: offset
    integer(kind=MPI_ADDRESS_KIND) :: state
    character(len=1024) :: name
    character(len=MPI_MAX_DATAREP_STRING) :: given
    integer :: etype, filetype
    failures = 0
    call MPI_Init(ierror)
    call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierror)
    call get_command_argument(1, name)
    state = 77
    call MPI_Register_datarep('one more', from_file, to_file, extent, state, ierror)
    if (ierror /= MPI_SUCCESS) failures = failures + 1
    state = 78 ! the value was copied
    call MPI_Register_datarep('one more', from_file, to_file, extent, state, ierror)
    call MPI_Error_class(ierror, class, ierror)
    if (class /= MPI_ERR_DUP_DATAREP) failures = failures + 1
#ifndef BY_MODULE
    ! MPICH's module lacks this function.
    state = 77
    call MPI_Register_datarep('as it is', MPI_CONVERSION_FN_NULL, MPI_CONVERSION_FN_NULL, extent, state, ierror)
    if (ierror /= MPI_SUCCESS) failures = failures + 1
#endif
    call MPI_File_open(MPI_COMM_WORLD, trim(name), MPI_MODE_RDWR + MPI_MODE_CREATE, MPI_INFO_NULL, file, ierror)
    if (ierror /= MPI_SUCCESS) failures = failures + 1
    offset = rank * 12
    call MPI_File_set_view(file, offset, MPI_INTEGER, MPI_INTEGER, 'one more', MPI_INFO_NULL, ierror)
    if (ierror /= MPI_SUCCESS) failures = failures + 1
    call MPI_File_get_view(file, offset, etype, filetype, given, ierror)
    if (given /= 'one more') failures = failures + 1
    written = [rank, 7, -8]
    offset = 0
    call MPI_File_write_at_all(file, offset, written, 3, MPI_INTEGER, MPI_STATUS_IGNORE, ierror)
    if (ierror /= MPI_SUCCESS) failures = failures + 1
    back = 0
    call MPI_File_read_at(file, offset, back, 3, MPI_INTEGER, MPI_STATUS_IGNORE, ierror)
    if (any(back /= written)) failures = failures + 1
    offset = rank * 12
#ifndef BY_MODULE
    call MPI_File_set_view(file, offset, MPI_INTEGER, MPI_INTEGER, 'as it is', MPI_INFO_NULL, ierror)
#else
    call MPI_File_set_view(file, offset, MPI_INTEGER, MPI_INTEGER, 'native', MPI_INFO_NULL, ierror)
#endif
    if (ierror /= MPI_SUCCESS) failures = failures + 1
    offset = 0
    call MPI_File_read_at(file, offset, back, 3, MPI_INTEGER, MPI_STATUS_IGNORE, ierror)
    if (any(back /= written + 1)) failures = failures + 1
    call MPI_File_close(file, ierror)
    failures = failures + wrong
    call MPI_Allreduce(failures, total, 1, MPI_INTEGER, MPI_SUM, MPI_COMM_WORLD, ierror)
    if (rank == 0 .and. total == 0) print *, 'passed'
    if (rank == 0 .and. total /= 0) print *, 'FAILED', total
    call MPI_Finalize(ierror)
end program
