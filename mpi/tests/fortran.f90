! The Fortran bindings, which are the MPI library's own and call the C functions, and an error handler in Fortran.
! fortran POOL_FILE
module heard
    implicit none
    integer :: count = 0, file_heard = 0
contains
    subroutine handler(file, code)
        integer :: file, code
        if (code /= 0) count = count + 1
        file_heard = file
    end subroutine
end module

program fortran
    use mpi
    use heard
    implicit none
    integer :: file, ierror, rank, ranks, errhandler, failures, total, i
    integer :: data(4), back(4), status(MPI_STATUS_SIZE), request
    integer(kind=MPI_OFFSET_KIND) :: offset, bytes
    character(len=1024) :: name
    failures = 0
    call MPI_Init(ierror)
    call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierror)
    call MPI_Comm_size(MPI_COMM_WORLD, ranks, ierror)
    call get_command_argument(1, name)
    call MPI_File_open(MPI_COMM_WORLD, trim(name), MPI_MODE_RDWR + MPI_MODE_CREATE, MPI_INFO_NULL, file, ierror)
    if (ierror /= MPI_SUCCESS) failures = failures + 1
    offset = 0
    call MPI_File_set_view(file, offset, MPI_INTEGER, MPI_INTEGER, 'native', MPI_INFO_NULL, ierror)
    if (ierror /= MPI_SUCCESS) failures = failures + 1
    data = [(rank * 10 + i, i = 1, 4)]
    offset = rank * 4
    call MPI_File_write_at_all(file, offset, data, 4, MPI_INTEGER, status, ierror)
    if (ierror /= MPI_SUCCESS) failures = failures + 1
    call MPI_File_iread_at(file, offset, back, 4, MPI_INTEGER, request, ierror)
    call MPI_Wait(request, status, ierror)
    if (any(back /= data)) failures = failures + 1
    call MPI_Barrier(MPI_COMM_WORLD, ierror)
    call MPI_File_get_size(file, bytes, ierror)
    if (bytes /= 16 * ranks) failures = failures + 1
    call MPI_File_create_errhandler(handler, errhandler, ierror)
    call MPI_File_set_errhandler(file, errhandler, ierror)
    offset = -1
    call MPI_File_seek(file, offset, MPI_SEEK_SET, ierror)
    if (ierror == MPI_SUCCESS .or. count /= 1 .or. file_heard /= file) failures = failures + 1
    call MPI_Errhandler_free(errhandler, ierror)
    call MPI_File_close(file, ierror)
    if (ierror /= MPI_SUCCESS .or. file /= MPI_FILE_NULL) failures = failures + 1
    call MPI_Allreduce(failures, total, 1, MPI_INTEGER, MPI_SUM, MPI_COMM_WORLD, ierror)
    if (rank == 0 .and. total == 0) print *, 'passed'
    if (rank == 0 .and. total /= 0) print *, 'FAILED', total, count, file_heard, file
    call MPI_Finalize(ierror)
end program
