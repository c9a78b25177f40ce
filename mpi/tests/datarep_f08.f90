! As datarep.f90, with the module mpi_f08; and an error handler of that module, which gets the file's number.
! datarep_f08 POOL_FILE
module representation
    use mpi_f08
    use, intrinsic :: iso_c_binding
    implicit none
    integer :: wrong = 0, heard = 0
    type(MPI_File) :: heard_of
contains
    subroutine extent(datatype, bytes, state, ierror)
        type(MPI_Datatype) :: datatype
        integer(kind=MPI_ADDRESS_KIND) :: bytes, state
        integer :: ierror
        if (datatype /= MPI_INTEGER .or. state /= 77) wrong = wrong + 1
        bytes = 4
        ierror = MPI_SUCCESS
    end subroutine

    subroutine from_file(userbuf, datatype, count, filebuf, position, state, ierror)
        type(c_ptr), value :: userbuf, filebuf
        type(MPI_Datatype) :: datatype
        integer :: count, ierror
        integer(kind=MPI_OFFSET_KIND) :: position
        integer(kind=MPI_ADDRESS_KIND) :: state
        integer, pointer :: user(:), file(:)
        call c_f_pointer(userbuf, user, [int(position) + count])
        call c_f_pointer(filebuf, file, [count])
        if (datatype /= MPI_INTEGER .or. state /= 77) wrong = wrong + 1
        user(position + 1:position + count) = file(1:count) - 1
        ierror = MPI_SUCCESS
    end subroutine

    subroutine to_file(userbuf, datatype, count, filebuf, position, state, ierror)
        type(c_ptr), value :: userbuf, filebuf
        type(MPI_Datatype) :: datatype
        integer :: count, ierror
        integer(kind=MPI_OFFSET_KIND) :: position
        integer(kind=MPI_ADDRESS_KIND) :: state
        integer, pointer :: user(:), file(:)
        call c_f_pointer(userbuf, user, [int(position) + count])
        call c_f_pointer(filebuf, file, [count])
        if (datatype /= MPI_INTEGER .or. state /= 77) wrong = wrong + 1
        file(1:count) = user(position + 1:position + count) + 1
        ierror = MPI_SUCCESS
    end subroutine

    subroutine handler(file, code)
        type(MPI_File) :: file
        integer :: code
        if (code /= MPI_SUCCESS) heard = heard + 1
        heard_of = file
    end subroutine
end module

program datarep_f08
    use representation
    implicit none
    type(MPI_File) :: file
    type(MPI_Errhandler) :: errhandler
    type(MPI_Request) :: request
    type(MPI_Status) :: status
    integer :: ierror, rank, failures, total, written(3), class, count
    integer, asynchronous :: back(3)
    integer(kind=MPI_OFFSET_KIND) :: offset
    integer(kind=MPI_ADDRESS_KIND) :: state
    character(len=1024) :: name
    failures = 0
    call MPI_Init()
    call MPI_Comm_rank(MPI_COMM_WORLD, rank)
    call get_command_argument(1, name)
    state = 77
    call MPI_Register_datarep('one more', from_file, to_file, extent, state) ! without ierror
    call MPI_Register_datarep('one more', from_file, to_file, extent, state, ierror)
    call MPI_Error_class(ierror, class)
    if (class /= MPI_ERR_DUP_DATAREP) failures = failures + 1
    call MPI_Register_datarep('as it is', MPI_CONVERSION_FN_NULL, MPI_CONVERSION_FN_NULL, extent, state, ierror)
    if (ierror /= MPI_SUCCESS) failures = failures + 1
    call MPI_File_open(MPI_COMM_WORLD, trim(name), MPI_MODE_RDWR + MPI_MODE_CREATE, MPI_INFO_NULL, file, ierror)
    if (ierror /= MPI_SUCCESS) failures = failures + 1
    offset = rank * 12
    call MPI_File_set_view(file, offset, MPI_INTEGER, MPI_INTEGER, 'one more', MPI_INFO_NULL, ierror)
    if (ierror /= MPI_SUCCESS) failures = failures + 1
    written = [rank, 7, -8]
    offset = 0
    call MPI_File_write_at_all(file, offset, written, 3, MPI_INTEGER, MPI_STATUS_IGNORE, ierror)
    if (ierror /= MPI_SUCCESS) failures = failures + 1
    back = 0
    call MPI_File_iread_at_all(file, offset, back, 3, MPI_INTEGER, request, ierror)
    call MPI_Wait(request, status)
    call MPI_Get_count(status, MPI_INTEGER, count)
    if (any(back /= written) .or. count /= 3) failures = failures + 1
    offset = rank * 12
    call MPI_File_set_view(file, offset, MPI_INTEGER, MPI_INTEGER, 'as it is', MPI_INFO_NULL, ierror)
    if (ierror /= MPI_SUCCESS) failures = failures + 1
    offset = 0
    call MPI_File_read_at(file, offset, back, 3, MPI_INTEGER, MPI_STATUS_IGNORE, ierror)
    if (any(back /= written + 1)) failures = failures + 1
    call MPI_File_create_errhandler(handler, errhandler)
    call MPI_File_set_errhandler(file, errhandler)
    offset = -1
    call MPI_File_seek(file, offset, MPI_SEEK_SET, ierror)
    if (ierror == MPI_SUCCESS .or. heard /= 1 .or. heard_of /= file) failures = failures + 1
    call MPI_File_call_errhandler(file, MPI_ERR_IO, ierror)
    if (ierror /= MPI_SUCCESS .or. heard /= 2 .or. heard_of /= file) failures = failures + 1
    call MPI_Errhandler_free(errhandler)
    call MPI_File_close(file, ierror)
    failures = failures + wrong
    call MPI_Allreduce(failures, total, 1, MPI_INTEGER, MPI_SUM, MPI_COMM_WORLD)
    if (rank == 0 .and. total == 0) print *, 'passed'
    if (rank == 0 .and. total /= 0) print *, 'FAILED', total, wrong, heard
    call MPI_Finalize()
end program
