! As fortran.f90, with the module mpi_f08. f08 POOL_FILE
program f08
    use mpi_f08
    implicit none
    type(MPI_File) :: file
    type(MPI_Status) :: status
    type(MPI_Request) :: request
    integer :: rank, ierror, written(2), back(2), count, failures, total
    integer(MPI_OFFSET_KIND) :: offset
    character(len=1024) :: name
    call MPI_Init()
    call MPI_Comm_rank(MPI_COMM_WORLD, rank)
    call get_command_argument(1, name)
    failures = 0
    call MPI_File_open(MPI_COMM_WORLD, trim(name), MPI_MODE_RDWR + MPI_MODE_CREATE, MPI_INFO_NULL, file, ierror)
    if (ierror /= MPI_SUCCESS) failures = failures + 1
    written = [rank, rank + 1]
    offset = rank * 8
    call MPI_File_write_at_all(file, offset, written, 2, MPI_INTEGER, status, ierror)
    if (ierror /= MPI_SUCCESS) failures = failures + 1
    call MPI_File_iread_at(file, offset, back, 2, MPI_INTEGER, request, ierror)
    call MPI_Wait(request, status)
    call MPI_Get_count(status, MPI_INTEGER, count)
    if (any(back /= written) .or. count /= 2) failures = failures + 1
    call MPI_File_close(file, ierror)
    if (ierror /= MPI_SUCCESS) failures = failures + 1
    call MPI_Allreduce(failures, total, 1, MPI_INTEGER, MPI_SUM, MPI_COMM_WORLD)
    if (rank == 0 .and. total == 0) print *, 'passed'
    if (rank == 0 .and. total /= 0) print *, 'FAILED', total
    call MPI_Finalize()
end program
