! mpif.h: its calls reach Forebay too, including its error handlers. mpif FILE
module seen
    implicit none
    integer :: heard = 0, class = 0
contains
    subroutine handler(file, code)
        include 'mpif.h'
        integer :: file, code, ierror
        heard = heard + 1
        call MPI_Error_class(code, class, ierror)
    end subroutine
end module

program mpif
    use seen
    implicit none
    include 'mpif.h'
    integer :: rank, ranks, file, ierror, errhandler, i, failures = 0, total
    integer :: status(MPI_STATUS_SIZE), mine(8), back(8)
    integer(kind=MPI_OFFSET_KIND) :: at
    character(len=1000) :: name
    call MPI_Init(ierror)
    call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierror)
    call MPI_Comm_size(MPI_COMM_WORLD, ranks, ierror)
    call get_command_argument(1, name)
    call MPI_File_open(MPI_COMM_WORLD, name, MPI_MODE_RDWR + MPI_MODE_CREATE, MPI_INFO_NULL, file, ierror)
    if (ierror /= MPI_SUCCESS) failures = failures + 1
    mine = [(rank * 100 + i, i = 1, 8)]
    at = rank * 32
    call MPI_File_write_at_all(file, at, mine, 8, MPI_INTEGER, status, ierror)
    if (ierror /= MPI_SUCCESS) failures = failures + 1
    call MPI_Barrier(MPI_COMM_WORLD, ierror)
    at = mod(rank + 1, ranks) * 32
    call MPI_File_read_at(file, at, back, 8, MPI_INTEGER, status, ierror)
    if (any(back /= [(mod(rank + 1, ranks) * 100 + i, i = 1, 8)])) failures = failures + 1
    call MPI_File_create_errhandler(handler, errhandler, ierror)
    call MPI_File_set_errhandler(file, errhandler, ierror)
    at = -1
    call MPI_File_read_at(file, at, back, 8, MPI_INTEGER, status, ierror)
    if (ierror == MPI_SUCCESS .or. heard /= 1 .or. class /= MPI_ERR_ARG) failures = failures + 1
    call MPI_File_close(file, ierror)
    call MPI_Allreduce(failures, total, 1, MPI_INTEGER, MPI_SUM, MPI_COMM_WORLD, ierror)
    if (rank == 0 .and. total == 0) print '(a)', 'passed'
    call MPI_Finalize(ierror)
end program
