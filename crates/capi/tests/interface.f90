! Files, volumes and queues of forebay.f90, against a pool: `interface [volumes]`, with FOREBAY_POOL set. With volumes,
! the pool has one of 4 MiB, v. Ends with status 0 if all checks hold.
program interface
    use, intrinsic :: iso_c_binding
    use, intrinsic :: iso_fortran_env, only: error_unit
    use forebay
    implicit none

    interface equals
        procedure equals_int, equals_int64
    end interface
    type(c_ptr) :: pool
    integer :: failures = 0
    character(len=16) :: word

    call zero(forebay_attach(pool=pool), 'attach by FOREBAY_POOL')
    if (failures > 0) error stop 1
    call names()
    call files()
    call get_command_argument(1, word)
    if (word == 'volumes') then
        call volumes()
        call memory_for_transfers()
        call queues()
        call volume_files()
    end if
    if (failures > 0) error stop 1

contains

    subroutine equals_int64(found, expected, what)
        integer(c_int64_t), intent(in) :: found
        integer, intent(in) :: expected
        character(len=*), intent(in) :: what
        if (found == expected) return
        write (error_unit, '(3a,i0,a,i0)') 'interface.f90: ', what, ' is ', found, ' and not ', expected
        failures = failures + 1
    end subroutine

    subroutine equals_int(found, expected, what)
        integer, intent(in) :: found, expected
        character(len=*), intent(in) :: what
        call equals_int64(int(found, c_int64_t), expected, what)
    end subroutine

    subroutine zero(found, what)
        integer, intent(in) :: found
        character(len=*), intent(in) :: what
        call equals(found, 0, what)
    end subroutine

    subroutine check(holds, what)
        logical, intent(in) :: holds
        character(len=*), intent(in) :: what
        if (holds) return
        write (error_unit, '(2a)') 'interface.f90: does not hold: ', what
        failures = failures + 1
    end subroutine

    subroutine names()
        type(forebay_dirent) :: entry
        type(forebay_timespec) :: times(2)
        type(c_ptr) :: directory
        character(kind=c_char) :: target(16)
        integer :: n

        call zero(forebay_mkdir(pool, 'd'//c_null_char, int(o'755', c_int32_t)), 'mkdir')
        call equals(forebay_mkdir(pool, 'd'//c_null_char, int(o'755', c_int32_t)), -17, 'mkdir of a name that exists')
        call zero(forebay_symlink(pool, 'where'//c_null_char, 'd/link'//c_null_char), 'symlink')
        n = int(forebay_readlink(pool, 'd/link'//c_null_char, target, 16_c_size_t))
        call check(n == 5 .and. all(target(:5) == ['w', 'h', 'e', 'r', 'e']), 'readlink')
        times = forebay_timespec(1000_c_long, 5_c_long)
        call zero(forebay_utimens(pool, 'd'//c_null_char, times, 0_c_int), 'utimens')
        call zero(forebay_utimens(pool, 'd'//c_null_char, flags=0_c_int), 'utimens to now')
        call zero(forebay_opendir(pool, 'd'//c_null_char, directory), 'opendir')
        n = 0
        do while (forebay_readdir(directory, entry) == 1)
            n = n + 1
            call check(all(entry%name(:5) == ['l', 'i', 'n', 'k', c_null_char]), 'readdir: the name')
        end do
        call check(n == 1, 'readdir: one entry')
        call zero(forebay_closedir(directory), 'closedir')
        call check(c_associated(forebay_strerror(-2_c_int)), 'strerror')
    end subroutine

    subroutine files()
        type(c_ptr) :: file
        type(forebay_run) :: runs(2)
        type(forebay_iovec) :: parts(1)
        real(c_double), target :: out(100, 2), in(100, 2)
        integer(c_int32_t) :: count, bytes
        integer(c_size_t), parameter :: size = 1600

        call random_number(out)
        call zero(forebay_file_open(pool, 'd/f'//c_null_char, ior(forebay_o_rdwr, forebay_o_creat), &
                                    int(o'600', c_int32_t), 2_c_int32_t, 4096_c_int32_t, file), 'file_open')
        call zero(forebay_file_layout(file, count, bytes), 'file_layout')
        call check(count == 2 .and. bytes == 4096, 'file_layout: the numbers')
        call equals(forebay_file_pwrite(file, out, size, 4000_c_int64_t), 1600, 'file_pwrite')
        call equals(forebay_file_pread(file, in, size, 4000_c_int64_t), 1600, 'file_pread')
        call check(all(in == out), 'file_pread: the bytes')
        runs = [forebay_run(8000, 800), forebay_run(4000, 800)]
        parts(1) = forebay_iovec(c_loc(out), size)
        call equals(forebay_file_write_runs(file, parts, 1_c_int, runs, 2_c_int), 1600, 'file_write_runs')
        call equals(forebay_file_pread(file, in, 800_c_size_t, 4000_c_int64_t), 800, 'file_pread of a run')
        call check(all(in(:, 1) == out(:, 2)), 'file_write_runs: the second run')
        call equals(forebay_file_size(file), 8800, 'file_size')
        call zero(forebay_file_close(file), 'file_close')
        call check(forebay_target(3, 1) == 196609, 'target')
    end subroutine

    subroutine volumes()
        type(c_ptr) :: volume, address
        integer(c_size_t) :: bytes
        integer(c_int64_t) :: was
        integer(c_int64_t), pointer :: at_address
        real(c_float) :: out(1000), in(1000)
        type(forebay_run) :: runs(2)
        character(kind=c_char) :: words(200)
        integer(c_int64_t), parameter :: at = 65536

        call equals(forebay_volume_open(pool, 'nosuch'//c_null_char, forebay_o_rdwr, volume), -2, 'open of no volume')
        call check(forebay_attach_error(words, 200_c_size_t) > 10, 'attach_error after it')
        call zero(forebay_volume_open(pool, 'v'//c_null_char, forebay_o_rdwr, volume), 'volume_open')
        call equals(forebay_volume_size(volume), 4194304, 'volume_size')
        call random_number(out)
        call zero(forebay_volume_put(volume, out, 4000_c_size_t, 8192_c_int64_t), 'put')
        call zero(forebay_volume_get(volume, in, 4000_c_size_t, 8192_c_int64_t), 'get')
        call check(all(in == out), 'get: the bytes')
        runs = [forebay_run(2000, 1000), forebay_run(0, 1000)]
        call zero(forebay_volume_putv(volume, out, 2000_c_size_t, runs, 2_c_int), 'putv')
        in = 0
        call zero(forebay_volume_getv(volume, in, 1000_c_size_t, runs(2:), 1_c_int), 'getv')
        call check(all(in(:250) == out(251:500)), 'getv: the second run of putv')
        call equals(forebay_volume_put(volume, out, 8_c_size_t, 4194300_c_int64_t), -34, 'put beyond the end')
        call zero(forebay_volume_swap(volume, at, 5_c_int64_t, was), 'swap')
        call check(was == 0, 'swap: the old word')
        call zero(forebay_volume_fetch_add(volume, at, -7_c_int64_t, was), 'fetch_add')
        call check(was == 5, 'fetch_add: the old word')
        call zero(forebay_volume_cas(volume, at, -2_c_int64_t, 9_c_int64_t, was), 'cas')
        call check(was == -2, 'cas: the old word')
        call equals(forebay_volume_cas(volume, at + 1, 0_c_int64_t, 9_c_int64_t, was), -22, 'cas, misaligned')
        call zero(forebay_volume_map(volume, at, address, bytes), 'map')
        call c_f_pointer(address, at_address)
        call check(at_address == 9 .and. bytes == 4194304 - at, 'map: the word')
        call zero(forebay_volume_fence(volume), 'fence')
        call zero(forebay_volume_flush(volume), 'flush')
        call zero(forebay_volume_close(volume), 'volume_close')
    end subroutine

    subroutine memory_for_transfers()
        type(c_ptr) :: volume, from, to, none
        real(c_double), pointer :: out(:), in(:)
        real(c_double), target, save :: own(20000)
        integer(c_size_t), parameter :: bytes = 160000

        call zero(forebay_volume_open(pool, 'v'//c_null_char, forebay_o_rdwr, volume), 'volume_open for memory')
        call zero(forebay_alloc(pool, bytes, from), 'alloc')
        call zero(forebay_alloc(pool, bytes, to), 'alloc')
        call equals(forebay_alloc(pool, 0_c_size_t, none), -22, 'alloc of nothing')
        call c_f_pointer(from, out, [20000])
        call c_f_pointer(to, in, [20000])
        call random_number(out)
        call zero(forebay_volume_put(volume, out, bytes, 8_c_int64_t), 'put from allocated memory')
        call zero(forebay_volume_get(volume, in, bytes, 8_c_int64_t), 'get to allocated memory')
        call check(all(in == out), 'what was put and got with allocated memory')
        call zero(forebay_register(pool, c_loc(own), bytes), 'register')
        call equals(forebay_register(pool, c_loc(own), bytes), -17, 'register twice')
        call zero(forebay_volume_get(volume, own, bytes, 8_c_int64_t), 'get to registered memory')
        call check(all(own == out), 'what was got with registered memory')
        call equals(forebay_free(c_loc(own)), -22, 'free of the own memory')
        call zero(forebay_unregister(c_loc(own)), 'unregister')
        call zero(forebay_free(from), 'free')
        call equals(forebay_free(from), -22, 'free twice')
        call zero(forebay_free(to), 'free')
        call zero(forebay_volume_close(volume), 'volume_close after memory')
    end subroutine

    subroutine queues()
        integer, parameter :: pieces = 32
        type(c_ptr) :: volume, queue
        type(forebay_completion) :: done(pieces)
        integer(c_int64_t), target, asynchronous, save :: out(1000, pieces), in(1000, pieces)
        integer, target :: numbers(pieces)
        integer, pointer :: number
        integer :: i, k, n
        integer(c_int64_t) :: at
        logical :: seen(pieces)

        out = reshape([(int(i, c_int64_t), i=1, 1000*pieces)], shape(out))
        numbers = [(i, i=1, pieces)]
        call zero(forebay_volume_open(pool, 'v'//c_null_char, forebay_o_rdwr, volume), 'volume_open for a queue')
        call zero(forebay_queue_create(0_c_int, queue), 'queue_create')
        do k = 1, 2
            do i = 1, pieces
                at = 8000_c_int64_t*i
                if (k == 1) then
                    n = forebay_volume_put_start(volume, out(:, i), 8000_c_size_t, at, queue, c_loc(numbers(i)))
                else
                    n = forebay_volume_get_start(volume, in(:, i), 8000_c_size_t, at, queue, c_loc(numbers(i)))
                end if
                call zero(n, 'put_start or get_start')
            end do
            seen = .false.
            do while (.not. all(seen))
                n = forebay_queue_wait(queue, done, pieces, 10000_c_int)
                call check(n > 0, 'queue_wait')
                if (n <= 0) exit
                do i = 1, n
                    call c_f_pointer(done(i)%state, number)
                    call check(done(i)%result == 0 .and. .not. seen(number), 'a completion')
                    seen(number) = .true.
                end do
            end do
        end do
        call check(all(in == out), 'what was put and got by a queue')
        call zero(forebay_volume_fetch_add_start(volume, 0_c_int64_t, 1_c_int64_t, queue, c_null_ptr), 'add_start')
        n = forebay_queue_wait(queue, done, 1_c_int, 10000_c_int)
        call check(n == 1 .and. done(1)%result == 0 .and. .not. c_associated(done(1)%state), 'its completion')
        call zero(forebay_queue_close(queue), 'queue_close')
        call zero(forebay_volume_close(volume), 'volume_close after a queue')
    end subroutine

    subroutine volume_files()
        type(c_ptr) :: file
        integer(c_int) :: flags
        real(c_double) :: out(10), in(10)

        flags = ior(forebay_o_rdwr, ior(forebay_o_creat, forebay_o_excl))
        call random_number(out)
        call zero(forebay_volume_file_open(pool, 'v'//c_null_char, flags, file), 'volume_file_open')
        call equals(forebay_file_pwrite(file, out, 80_c_size_t, 20_c_int64_t), 80, 'file_pwrite to a volume')
        call equals(forebay_file_size(file), 100, 'file_size of a volume')
        call equals(forebay_file_pread(file, in, 80_c_size_t, 20_c_int64_t), 80, 'file_pread of a volume')
        call check(all(in == out), 'file_pread of a volume: the bytes')
        call zero(forebay_file_close(file), 'file_close of a volume')
        call zero(forebay_volume_file_unlink(pool, 'v'//c_null_char), 'volume_file_unlink')
    end subroutine

end program
