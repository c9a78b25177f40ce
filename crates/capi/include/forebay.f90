! forebay.f90 - the functions of forebay.h for Fortran 2018 programs. Compile it, and link with -lforebay.
!
! It is made from forebay.h, which says what each function does. Arguments have the same names and order. In Fortran:
!
! - Pools, files, volumes and queues are type(c_ptr). An argument that C declares with two stars is intent(out).
! - Data are any contiguous array (type(*), dimension(*)). Those of a function whose name ends in _start must have the
!   asynchronous attribute, and target or the like, so that the compiler keeps no copy until the call has ended.
! - Paths, names and specifiers end with c_null_char: 'results'//c_null_char.
! - Numbers without a sign in C have the same bits in Fortran: 2**63 and more are negative.
! - Arguments that may be NULL in C are optional; those that are passed by value take c_null_ptr or c_null_funptr.
! - Functions with a struct stat or statvfs are not here.
!
! SPDX-License-Identifier: Apache-2.0 OR MIT
module forebay
    use, intrinsic :: iso_c_binding
    implicit none
    private

    integer(c_int), parameter, public :: forebay_stripes_default = int(z'80000000', c_int32_t)
    integer(c_int), parameter, public :: forebay_normal = 0
    integer(c_int), parameter, public :: forebay_sequential = 2
    integer(c_int), parameter, public :: forebay_stage_verify = 1
    integer(c_int), parameter, public :: forebay_stage_all_or_nothing = 2
    integer(c_int), parameter, public :: forebay_unattached = 0
    integer(c_int), parameter, public :: forebay_released = 1
    integer(c_int), parameter, public :: forebay_clean = 2
    integer(c_int), parameter, public :: forebay_dirty = 3
    integer(c_int), parameter, public :: forebay_draining = 4
    integer(c_int), parameter, public :: forebay_queue_spin = 1
    integer(c_int), parameter, public :: forebay_o_rdonly = 0
    integer(c_int), parameter, public :: forebay_o_wronly = 1
    integer(c_int), parameter, public :: forebay_o_rdwr = 2
    integer(c_int), parameter, public :: forebay_o_creat = 64
    integer(c_int), parameter, public :: forebay_o_excl = 128
    integer(c_int), parameter, public :: forebay_o_trunc = 512
    integer(c_int), parameter, public :: forebay_o_append = 1024
    integer(c_int), parameter, public :: forebay_at_symlink_nofollow = 256
    integer(c_int), parameter, public :: forebay_rename_noreplace = 1

    type, bind(c), public :: forebay_iovec
        type(c_ptr) :: iov_base
        integer(c_size_t) :: iov_len
    end type

    type, bind(c), public :: forebay_timespec
        integer(c_long) :: tv_sec
        integer(c_long) :: tv_nsec
    end type

    type, bind(c), public :: forebay_dirent
        integer(c_int64_t) :: ino
        integer(c_int64_t) :: cookie
        integer(c_signed_char) :: kind
        character(kind=c_char) :: name(256)
    end type

    type, bind(c), public :: forebay_run
        integer(c_int64_t) :: offset
        integer(c_int64_t) :: bytes
    end type

    type, bind(c), public :: forebay_stage_status
        integer(c_int64_t) :: files
        integer(c_int64_t) :: bytes
        integer(c_int64_t) :: skipped_files
        integer(c_int64_t) :: failed_files
        character(kind=c_char) :: words(512)
    end type

    type, bind(c), public :: forebay_path_state
        integer(c_int) :: state
        integer(c_int) :: durable
        integer(c_int) :: conflict
        integer(c_int) :: pinned
        integer(c_int64_t) :: epoch
        integer(c_int64_t) :: stored_bytes
        integer(c_int64_t) :: stored_mtime_s
    end type

    type, bind(c), public :: forebay_completion
        type(c_ptr) :: state
        integer(c_int64_t) :: result
        integer(c_int64_t) :: was
    end type

    type, bind(c), public :: forebay_calibration
        integer(c_int64_t) :: numbers(21)
    end type

    type, bind(c), public :: forebay_pattern
        integer(c_int64_t) :: ranks
        integer(c_int64_t) :: nodes
        integer(c_int64_t) :: aggregators
        integer(c_int64_t) :: bytes
        integer(c_int64_t) :: run_bytes
        integer(c_int64_t) :: gap_bytes
        integer(c_int64_t) :: buffer_bytes
        integer(c_int64_t) :: targets
        integer(c_int64_t) :: writes
        integer(c_int64_t) :: far
        integer(c_int64_t) :: fewer_aggregators
        integer(c_int64_t) :: continued
    end type

    type, bind(c), public :: forebay_corrections
        integer(c_int64_t) :: factors(16)
    end type

    type, bind(c), public :: forebay_times
        integer(c_int64_t) :: collective_ns
        integer(c_int64_t) :: collective_low_ns
        integer(c_int64_t) :: collective_high_ns
        integer(c_int64_t) :: independent_ns
        integer(c_int64_t) :: independent_low_ns
        integer(c_int64_t) :: independent_high_ns
        integer(c_int64_t) :: collective_plain_ns
        integer(c_int64_t) :: independent_plain_ns
        integer(c_int64_t) :: aggregators
    end type

    public :: forebay_attach, forebay_attach_error, forebay_strerror, forebay_open
    public :: forebay_access, forebay_mkdir, forebay_rmdir, forebay_unlink
    public :: forebay_rename, forebay_link, forebay_symlink, forebay_readlink
    public :: forebay_chmod, forebay_chown, forebay_utimens, forebay_truncate
    public :: forebay_getxattr, forebay_setxattr, forebay_listxattr, forebay_removexattr
    public :: forebay_file_open, forebay_file_open_on, forebay_file_close, forebay_file_fd
    public :: forebay_file_layout, forebay_file_number, forebay_file_elsewhere, forebay_file_pread
    public :: forebay_file_pwrite, forebay_file_size, forebay_file_preadv, forebay_file_pwritev
    public :: forebay_file_read_runs, forebay_file_write_runs, forebay_file_seek_data, forebay_file_seek_hole
    public :: forebay_file_punch, forebay_file_advise, forebay_file_truncate, forebay_file_allocate
    public :: forebay_file_sync, forebay_file_group_make, forebay_file_group_move, forebay_file_group_seek
    public :: forebay_file_group_lock, forebay_file_group_unlock, forebay_file_group_end, forebay_file_read_start
    public :: forebay_file_write_start, forebay_request_wait, forebay_request_test, forebay_memory_register
    public :: forebay_memory_unregister, forebay_layout_get, forebay_layout_set, forebay_layout_migrate
    public :: forebay_layout_set_on, forebay_layout_targets, forebay_layout_width, forebay_layout_set_width
    public :: forebay_stage_in_start, forebay_stage_out_start, forebay_stage_test, forebay_stage_wait
    public :: forebay_stage_stop, forebay_state, forebay_wait_durable, forebay_sync
    public :: forebay_prestage, forebay_release, forebay_pin, forebay_volume_open
    public :: forebay_volume_close, forebay_volume_size, forebay_volume_put, forebay_volume_get
    public :: forebay_volume_putv, forebay_volume_getv, forebay_volume_discard, forebay_volume_cas
    public :: forebay_volume_fetch_add, forebay_volume_swap, forebay_volume_flush, forebay_volume_fence
    public :: forebay_volume_map, forebay_alloc, forebay_free, forebay_register
    public :: forebay_unregister, forebay_queue_create, forebay_queue_close, forebay_queue_descriptor
    public :: forebay_queue_wait, forebay_volume_put_start, forebay_volume_get_start, forebay_volume_cas_start
    public :: forebay_volume_fetch_add_start, forebay_volume_swap_start, forebay_volume_file_open, &
        forebay_volume_file_unlink
    public :: forebay_model_calibration, forebay_model_quick, forebay_model_predict, forebay_model_learn
    public :: forebay_opendir, forebay_readdir, forebay_seekdir, forebay_closedir
    public :: forebay_target

    interface
        function forebay_attach(dir, pool) bind(c)
            import :: c_char, c_int, c_ptr
            character(kind=c_char), dimension(*), intent(in), optional :: dir
            type(c_ptr), intent(out) :: pool
            integer(c_int) :: forebay_attach
        end function
        function forebay_attach_error(words, room) bind(c)
            import :: c_char, c_int, c_size_t
            character(kind=c_char), dimension(*), intent(out) :: words
            integer(c_size_t), value :: room
            integer(c_int) :: forebay_attach_error
        end function
        function forebay_strerror(error) bind(c)
            import :: c_int, c_ptr
            integer(c_int), value :: error
            type(c_ptr) :: forebay_strerror
        end function
        function forebay_open(pool, path, flags, mode) bind(c)
            import :: c_char, c_int, c_int32_t, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int), value :: flags
            integer(c_int32_t), value :: mode
            integer(c_int) :: forebay_open
        end function
        function forebay_access(pool, path, mode) bind(c)
            import :: c_char, c_int, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int), value :: mode
            integer(c_int) :: forebay_access
        end function
        function forebay_mkdir(pool, path, mode) bind(c)
            import :: c_char, c_int, c_int32_t, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int32_t), value :: mode
            integer(c_int) :: forebay_mkdir
        end function
        function forebay_rmdir(pool, path) bind(c)
            import :: c_char, c_int, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int) :: forebay_rmdir
        end function
        function forebay_unlink(pool, path) bind(c)
            import :: c_char, c_int, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int) :: forebay_unlink
        end function
        function forebay_rename(pool, from, to, flags) bind(c)
            import :: c_char, c_int, c_int32_t, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: from
            character(kind=c_char), dimension(*), intent(in) :: to
            integer(c_int32_t), value :: flags
            integer(c_int) :: forebay_rename
        end function
        function forebay_link(pool, from, to) bind(c)
            import :: c_char, c_int, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: from
            character(kind=c_char), dimension(*), intent(in) :: to
            integer(c_int) :: forebay_link
        end function
        function forebay_symlink(pool, target, path) bind(c)
            import :: c_char, c_int, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: target
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int) :: forebay_symlink
        end function
        function forebay_readlink(pool, path, buffer, room) bind(c)
            import :: c_char, c_int64_t, c_ptr, c_size_t
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            character(kind=c_char), dimension(*), intent(out) :: buffer
            integer(c_size_t), value :: room
            integer(c_int64_t) :: forebay_readlink
        end function
        function forebay_chmod(pool, path, mode) bind(c)
            import :: c_char, c_int, c_int32_t, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int32_t), value :: mode
            integer(c_int) :: forebay_chmod
        end function
        function forebay_chown(pool, path, uid, gid, flags) bind(c)
            import :: c_char, c_int, c_int32_t, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int32_t), value :: uid
            integer(c_int32_t), value :: gid
            integer(c_int), value :: flags
            integer(c_int) :: forebay_chown
        end function
        function forebay_utimens(pool, path, times, flags) bind(c)
            import :: c_char, c_int, c_ptr, forebay_timespec
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            type(forebay_timespec), dimension(*), intent(in), optional :: times
            integer(c_int), value :: flags
            integer(c_int) :: forebay_utimens
        end function
        function forebay_truncate(pool, path, size) bind(c)
            import :: c_char, c_int, c_int64_t, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int64_t), value :: size
            integer(c_int) :: forebay_truncate
        end function
        function forebay_getxattr(pool, path, name, value, room, flags) bind(c)
            import :: c_char, c_int, c_int64_t, c_ptr, c_size_t
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            character(kind=c_char), dimension(*), intent(in) :: name
            type(*), dimension(*), intent(inout) :: value
            integer(c_size_t), value :: room
            integer(c_int), value :: flags
            integer(c_int64_t) :: forebay_getxattr
        end function
        function forebay_setxattr(pool, path, name, value, bytes, xattr_flags, flags) bind(c)
            import :: c_char, c_int, c_ptr, c_size_t
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            character(kind=c_char), dimension(*), intent(in) :: name
            type(*), dimension(*), intent(in) :: value
            integer(c_size_t), value :: bytes
            integer(c_int), value :: xattr_flags
            integer(c_int), value :: flags
            integer(c_int) :: forebay_setxattr
        end function
        function forebay_listxattr(pool, path, names, room, flags) bind(c)
            import :: c_char, c_int, c_int64_t, c_ptr, c_size_t
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            character(kind=c_char), dimension(*), intent(out) :: names
            integer(c_size_t), value :: room
            integer(c_int), value :: flags
            integer(c_int64_t) :: forebay_listxattr
        end function
        function forebay_removexattr(pool, path, name, flags) bind(c)
            import :: c_char, c_int, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            character(kind=c_char), dimension(*), intent(in) :: name
            integer(c_int), value :: flags
            integer(c_int) :: forebay_removexattr
        end function
        function forebay_file_open(pool, path, flags, mode, stripe_count, stripe_bytes, file) bind(c)
            import :: c_char, c_int, c_int32_t, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int), value :: flags
            integer(c_int32_t), value :: mode
            integer(c_int32_t), value :: stripe_count
            integer(c_int32_t), value :: stripe_bytes
            type(c_ptr), intent(out) :: file
            integer(c_int) :: forebay_file_open
        end function
        function forebay_file_open_on(pool, path, flags, mode, stripe_count, stripe_bytes, targets, target_count, &
            file) bind(c)
            import :: c_char, c_int, c_int32_t, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int), value :: flags
            integer(c_int32_t), value :: mode
            integer(c_int32_t), value :: stripe_count
            integer(c_int32_t), value :: stripe_bytes
            integer(c_int32_t), dimension(*), intent(in) :: targets
            integer(c_int), value :: target_count
            type(c_ptr), intent(out) :: file
            integer(c_int) :: forebay_file_open_on
        end function
        function forebay_file_close(file) bind(c)
            import :: c_int, c_ptr
            type(c_ptr), value :: file
            integer(c_int) :: forebay_file_close
        end function
        function forebay_file_fd(file) bind(c)
            import :: c_int, c_ptr
            type(c_ptr), value :: file
            integer(c_int) :: forebay_file_fd
        end function
        function forebay_file_layout(file, stripe_count, stripe_bytes) bind(c)
            import :: c_int, c_int32_t, c_ptr
            type(c_ptr), value :: file
            integer(c_int32_t), intent(out) :: stripe_count
            integer(c_int32_t), intent(out) :: stripe_bytes
            integer(c_int) :: forebay_file_layout
        end function
        function forebay_file_number(file, number) bind(c)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: file
            integer(c_int64_t), intent(out) :: number
            integer(c_int) :: forebay_file_number
        end function
        function forebay_file_elsewhere(file) bind(c)
            import :: c_int, c_ptr
            type(c_ptr), value :: file
            integer(c_int) :: forebay_file_elsewhere
        end function
        function forebay_file_pread(file, buffer, bytes, offset) bind(c)
            import :: c_int64_t, c_ptr, c_size_t
            type(c_ptr), value :: file
            type(*), dimension(*), intent(inout) :: buffer
            integer(c_size_t), value :: bytes
            integer(c_int64_t), value :: offset
            integer(c_int64_t) :: forebay_file_pread
        end function
        function forebay_file_pwrite(file, buffer, bytes, offset) bind(c)
            import :: c_int64_t, c_ptr, c_size_t
            type(c_ptr), value :: file
            type(*), dimension(*), intent(in) :: buffer
            integer(c_size_t), value :: bytes
            integer(c_int64_t), value :: offset
            integer(c_int64_t) :: forebay_file_pwrite
        end function
        function forebay_file_size(file) bind(c)
            import :: c_int64_t, c_ptr
            type(c_ptr), value :: file
            integer(c_int64_t) :: forebay_file_size
        end function
        function forebay_file_preadv(file, parts, part_count, offset) bind(c)
            import :: c_int, c_int64_t, c_ptr, forebay_iovec
            type(c_ptr), value :: file
            type(forebay_iovec), dimension(*), intent(in) :: parts
            integer(c_int), value :: part_count
            integer(c_int64_t), value :: offset
            integer(c_int64_t) :: forebay_file_preadv
        end function
        function forebay_file_pwritev(file, parts, part_count, offset) bind(c)
            import :: c_int, c_int64_t, c_ptr, forebay_iovec
            type(c_ptr), value :: file
            type(forebay_iovec), dimension(*), intent(in) :: parts
            integer(c_int), value :: part_count
            integer(c_int64_t), value :: offset
            integer(c_int64_t) :: forebay_file_pwritev
        end function
        function forebay_file_read_runs(file, parts, part_count, runs, run_count) bind(c)
            import :: c_int, c_int64_t, c_ptr, forebay_iovec, forebay_run
            type(c_ptr), value :: file
            type(forebay_iovec), dimension(*), intent(in) :: parts
            integer(c_int), value :: part_count
            type(forebay_run), dimension(*), intent(in) :: runs
            integer(c_int), value :: run_count
            integer(c_int64_t) :: forebay_file_read_runs
        end function
        function forebay_file_write_runs(file, parts, part_count, runs, run_count) bind(c)
            import :: c_int, c_int64_t, c_ptr, forebay_iovec, forebay_run
            type(c_ptr), value :: file
            type(forebay_iovec), dimension(*), intent(in) :: parts
            integer(c_int), value :: part_count
            type(forebay_run), dimension(*), intent(in) :: runs
            integer(c_int), value :: run_count
            integer(c_int64_t) :: forebay_file_write_runs
        end function
        function forebay_file_seek_data(file, offset) bind(c)
            import :: c_int64_t, c_ptr
            type(c_ptr), value :: file
            integer(c_int64_t), value :: offset
            integer(c_int64_t) :: forebay_file_seek_data
        end function
        function forebay_file_seek_hole(file, offset) bind(c)
            import :: c_int64_t, c_ptr
            type(c_ptr), value :: file
            integer(c_int64_t), value :: offset
            integer(c_int64_t) :: forebay_file_seek_hole
        end function
        function forebay_file_punch(file, offset, bytes) bind(c)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: file
            integer(c_int64_t), value :: offset
            integer(c_int64_t), value :: bytes
            integer(c_int) :: forebay_file_punch
        end function
        function forebay_file_advise(file, advice) bind(c)
            import :: c_int, c_ptr
            type(c_ptr), value :: file
            integer(c_int), value :: advice
            integer(c_int) :: forebay_file_advise
        end function
        function forebay_file_truncate(file, size) bind(c)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: file
            integer(c_int64_t), value :: size
            integer(c_int) :: forebay_file_truncate
        end function
        function forebay_file_allocate(file, size) bind(c)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: file
            integer(c_int64_t), value :: size
            integer(c_int) :: forebay_file_allocate
        end function
        function forebay_file_sync(file) bind(c)
            import :: c_int, c_ptr
            type(c_ptr), value :: file
            integer(c_int) :: forebay_file_sync
        end function
        function forebay_file_group_make(file, position, group) bind(c)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: file
            integer(c_int64_t), value :: position
            integer(c_int64_t), intent(out) :: group
            integer(c_int) :: forebay_file_group_make
        end function
        function forebay_file_group_move(file, group, by) bind(c)
            import :: c_int64_t, c_ptr
            type(c_ptr), value :: file
            integer(c_int64_t), value :: group
            integer(c_int64_t), value :: by
            integer(c_int64_t) :: forebay_file_group_move
        end function
        function forebay_file_group_seek(file, group, position) bind(c)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: file
            integer(c_int64_t), value :: group
            integer(c_int64_t), value :: position
            integer(c_int) :: forebay_file_group_seek
        end function
        function forebay_file_group_lock(file, group, writes, offset, bytes, lock) bind(c)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: file
            integer(c_int64_t), value :: group
            integer(c_int), value :: writes
            integer(c_int64_t), value :: offset
            integer(c_int64_t), value :: bytes
            integer(c_int64_t), intent(out) :: lock
            integer(c_int) :: forebay_file_group_lock
        end function
        function forebay_file_group_unlock(file, group, lock) bind(c)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: file
            integer(c_int64_t), value :: group
            integer(c_int64_t), value :: lock
            integer(c_int) :: forebay_file_group_unlock
        end function
        function forebay_file_group_end(file, group) bind(c)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: file
            integer(c_int64_t), value :: group
            integer(c_int) :: forebay_file_group_end
        end function
        function forebay_file_read_start(file, buffer, bytes, offset, done, state, request) bind(c)
            import :: c_funptr, c_int, c_int64_t, c_ptr, c_size_t
            type(c_ptr), value :: file
            type(*), dimension(*), intent(inout), asynchronous :: buffer
            integer(c_size_t), value :: bytes
            integer(c_int64_t), value :: offset
            type(c_funptr), value :: done
            type(c_ptr), value :: state
            type(c_ptr), intent(out), optional :: request
            integer(c_int) :: forebay_file_read_start
        end function
        function forebay_file_write_start(file, buffer, bytes, offset, done, state, request) bind(c)
            import :: c_funptr, c_int, c_int64_t, c_ptr, c_size_t
            type(c_ptr), value :: file
            type(*), dimension(*), intent(in), asynchronous :: buffer
            integer(c_size_t), value :: bytes
            integer(c_int64_t), value :: offset
            type(c_funptr), value :: done
            type(c_ptr), value :: state
            type(c_ptr), intent(out), optional :: request
            integer(c_int) :: forebay_file_write_start
        end function
        function forebay_request_wait(request) bind(c)
            import :: c_int64_t, c_ptr
            type(c_ptr), value :: request
            integer(c_int64_t) :: forebay_request_wait
        end function
        function forebay_request_test(request, result) bind(c)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: request
            integer(c_int64_t), intent(out) :: result
            integer(c_int) :: forebay_request_test
        end function
        function forebay_memory_register(pool, first, bytes, memory) bind(c)
            import :: c_int, c_ptr, c_size_t
            type(c_ptr), value :: pool
            type(*), dimension(*), intent(inout), asynchronous :: first
            integer(c_size_t), value :: bytes
            type(c_ptr), intent(out) :: memory
            integer(c_int) :: forebay_memory_register
        end function
        function forebay_memory_unregister(memory) bind(c)
            import :: c_int, c_ptr
            type(c_ptr), value :: memory
            integer(c_int) :: forebay_memory_unregister
        end function
        function forebay_layout_get(pool, path, stripe_count, stripe_bytes) bind(c)
            import :: c_char, c_int, c_int32_t, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int32_t), intent(out) :: stripe_count
            integer(c_int32_t), intent(out) :: stripe_bytes
            integer(c_int) :: forebay_layout_get
        end function
        function forebay_layout_set(pool, path, stripe_count, stripe_bytes) bind(c)
            import :: c_char, c_int, c_int32_t, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int32_t), value :: stripe_count
            integer(c_int32_t), value :: stripe_bytes
            integer(c_int) :: forebay_layout_set
        end function
        function forebay_layout_migrate(pool, path) bind(c)
            import :: c_char, c_int, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int) :: forebay_layout_migrate
        end function
        function forebay_layout_set_on(pool, path, stripe_count, stripe_bytes, targets, target_count) bind(c)
            import :: c_char, c_int, c_int32_t, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int32_t), value :: stripe_count
            integer(c_int32_t), value :: stripe_bytes
            integer(c_int32_t), dimension(*), intent(in) :: targets
            integer(c_int), value :: target_count
            integer(c_int) :: forebay_layout_set_on
        end function
        function forebay_layout_targets(pool, path, targets, room) bind(c)
            import :: c_char, c_int, c_int32_t, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int32_t), dimension(*), intent(out) :: targets
            integer(c_int), value :: room
            integer(c_int) :: forebay_layout_targets
        end function
        function forebay_layout_width(pool, path) bind(c)
            import :: c_char, c_int, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int) :: forebay_layout_width
        end function
        function forebay_layout_set_width(pool, path, width) bind(c)
            import :: c_char, c_int, c_int32_t, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int32_t), value :: width
            integer(c_int) :: forebay_layout_set_width
        end function
        function forebay_stage_in_start(pool, source, path, flags, stage) bind(c)
            import :: c_char, c_int, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: source
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int), value :: flags
            type(c_ptr), intent(out) :: stage
            integer(c_int) :: forebay_stage_in_start
        end function
        function forebay_stage_out_start(pool, path, destination, flags, stage) bind(c)
            import :: c_char, c_int, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            character(kind=c_char), dimension(*), intent(in) :: destination
            integer(c_int), value :: flags
            type(c_ptr), intent(out) :: stage
            integer(c_int) :: forebay_stage_out_start
        end function
        function forebay_stage_test(stage, status) bind(c)
            import :: c_int, c_ptr, forebay_stage_status
            type(c_ptr), value :: stage
            type(forebay_stage_status), intent(out), optional :: status
            integer(c_int) :: forebay_stage_test
        end function
        function forebay_stage_wait(stage, status) bind(c)
            import :: c_int, c_ptr, forebay_stage_status
            type(c_ptr), value :: stage
            type(forebay_stage_status), intent(out), optional :: status
            integer(c_int) :: forebay_stage_wait
        end function
        function forebay_stage_stop(stage) bind(c)
            import :: c_int, c_ptr
            type(c_ptr), value :: stage
            integer(c_int) :: forebay_stage_stop
        end function
        function forebay_state(pool, path, out) bind(c)
            import :: c_char, c_int, c_ptr, forebay_path_state
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            type(forebay_path_state), intent(out) :: out
            integer(c_int) :: forebay_state
        end function
        function forebay_wait_durable(pool, path, timeout_ms) bind(c)
            import :: c_char, c_int, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int), value :: timeout_ms
            integer(c_int) :: forebay_wait_durable
        end function
        function forebay_sync(pool, path) bind(c)
            import :: c_char, c_int, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int) :: forebay_sync
        end function
        function forebay_prestage(pool, path) bind(c)
            import :: c_char, c_int, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int) :: forebay_prestage
        end function
        function forebay_release(pool, path) bind(c)
            import :: c_char, c_int, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int) :: forebay_release
        end function
        function forebay_pin(pool, path, pinned) bind(c)
            import :: c_char, c_int, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            integer(c_int), value :: pinned
            integer(c_int) :: forebay_pin
        end function
        function forebay_volume_open(pool, specifier, flags, volume) bind(c)
            import :: c_char, c_int, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: specifier
            integer(c_int), value :: flags
            type(c_ptr), intent(out) :: volume
            integer(c_int) :: forebay_volume_open
        end function
        function forebay_volume_close(volume) bind(c)
            import :: c_int, c_ptr
            type(c_ptr), value :: volume
            integer(c_int) :: forebay_volume_close
        end function
        function forebay_volume_size(volume) bind(c)
            import :: c_int64_t, c_ptr
            type(c_ptr), value :: volume
            integer(c_int64_t) :: forebay_volume_size
        end function
        function forebay_volume_put(volume, from, bytes, offset) bind(c)
            import :: c_int, c_int64_t, c_ptr, c_size_t
            type(c_ptr), value :: volume
            type(*), dimension(*), intent(in) :: from
            integer(c_size_t), value :: bytes
            integer(c_int64_t), value :: offset
            integer(c_int) :: forebay_volume_put
        end function
        function forebay_volume_get(volume, to, bytes, offset) bind(c)
            import :: c_int, c_int64_t, c_ptr, c_size_t
            type(c_ptr), value :: volume
            type(*), dimension(*), intent(inout) :: to
            integer(c_size_t), value :: bytes
            integer(c_int64_t), value :: offset
            integer(c_int) :: forebay_volume_get
        end function
        function forebay_volume_putv(volume, from, bytes, runs, run_count) bind(c)
            import :: c_int, c_ptr, c_size_t, forebay_run
            type(c_ptr), value :: volume
            type(*), dimension(*), intent(in) :: from
            integer(c_size_t), value :: bytes
            type(forebay_run), dimension(*), intent(in) :: runs
            integer(c_int), value :: run_count
            integer(c_int) :: forebay_volume_putv
        end function
        function forebay_volume_getv(volume, to, bytes, runs, run_count) bind(c)
            import :: c_int, c_ptr, c_size_t, forebay_run
            type(c_ptr), value :: volume
            type(*), dimension(*), intent(inout) :: to
            integer(c_size_t), value :: bytes
            type(forebay_run), dimension(*), intent(in) :: runs
            integer(c_int), value :: run_count
            integer(c_int) :: forebay_volume_getv
        end function
        function forebay_volume_discard(volume, offset, bytes) bind(c)
            import :: c_int, c_int64_t, c_ptr, c_size_t
            type(c_ptr), value :: volume
            integer(c_int64_t), value :: offset
            integer(c_size_t), value :: bytes
            integer(c_int) :: forebay_volume_discard
        end function
        function forebay_volume_cas(volume, offset, expected, value, was) bind(c)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: volume
            integer(c_int64_t), value :: offset
            integer(c_int64_t), value :: expected
            integer(c_int64_t), value :: value
            integer(c_int64_t), intent(out) :: was
            integer(c_int) :: forebay_volume_cas
        end function
        function forebay_volume_fetch_add(volume, offset, by, was) bind(c)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: volume
            integer(c_int64_t), value :: offset
            integer(c_int64_t), value :: by
            integer(c_int64_t), intent(out) :: was
            integer(c_int) :: forebay_volume_fetch_add
        end function
        function forebay_volume_swap(volume, offset, value, was) bind(c)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: volume
            integer(c_int64_t), value :: offset
            integer(c_int64_t), value :: value
            integer(c_int64_t), intent(out) :: was
            integer(c_int) :: forebay_volume_swap
        end function
        function forebay_volume_flush(volume) bind(c)
            import :: c_int, c_ptr
            type(c_ptr), value :: volume
            integer(c_int) :: forebay_volume_flush
        end function
        function forebay_volume_fence(volume) bind(c)
            import :: c_int, c_ptr
            type(c_ptr), value :: volume
            integer(c_int) :: forebay_volume_fence
        end function
        function forebay_volume_map(volume, offset, address, bytes) bind(c)
            import :: c_int, c_int64_t, c_ptr, c_size_t
            type(c_ptr), value :: volume
            integer(c_int64_t), value :: offset
            type(c_ptr), intent(out) :: address
            integer(c_size_t), intent(out) :: bytes
            integer(c_int) :: forebay_volume_map
        end function
        function forebay_alloc(pool, size, memory) bind(c)
            import :: c_int, c_ptr, c_size_t
            type(c_ptr), value :: pool
            integer(c_size_t), value :: size
            type(c_ptr), intent(out) :: memory
            integer(c_int) :: forebay_alloc
        end function
        function forebay_free(memory) bind(c)
            import :: c_int, c_ptr
            type(c_ptr), value :: memory
            integer(c_int) :: forebay_free
        end function
        function forebay_register(pool, memory, bytes) bind(c)
            import :: c_int, c_ptr, c_size_t
            type(c_ptr), value :: pool
            type(c_ptr), value :: memory
            integer(c_size_t), value :: bytes
            integer(c_int) :: forebay_register
        end function
        function forebay_unregister(memory) bind(c)
            import :: c_int, c_ptr
            type(c_ptr), value :: memory
            integer(c_int) :: forebay_unregister
        end function
        function forebay_queue_create(flags, queue) bind(c)
            import :: c_int, c_ptr
            integer(c_int), value :: flags
            type(c_ptr), intent(out) :: queue
            integer(c_int) :: forebay_queue_create
        end function
        function forebay_queue_close(queue) bind(c)
            import :: c_int, c_ptr
            type(c_ptr), value :: queue
            integer(c_int) :: forebay_queue_close
        end function
        function forebay_queue_descriptor(queue) bind(c)
            import :: c_int, c_ptr
            type(c_ptr), value :: queue
            integer(c_int) :: forebay_queue_descriptor
        end function
        function forebay_queue_wait(queue, completions, completion_count, timeout_ms) bind(c)
            import :: c_int, c_ptr, forebay_completion
            type(c_ptr), value :: queue
            type(forebay_completion), dimension(*), intent(out) :: completions
            integer(c_int), value :: completion_count
            integer(c_int), value :: timeout_ms
            integer(c_int) :: forebay_queue_wait
        end function
        function forebay_volume_put_start(volume, from, bytes, offset, queue, state) bind(c)
            import :: c_int, c_int64_t, c_ptr, c_size_t
            type(c_ptr), value :: volume
            type(*), dimension(*), intent(in), asynchronous :: from
            integer(c_size_t), value :: bytes
            integer(c_int64_t), value :: offset
            type(c_ptr), value :: queue
            type(c_ptr), value :: state
            integer(c_int) :: forebay_volume_put_start
        end function
        function forebay_volume_get_start(volume, to, bytes, offset, queue, state) bind(c)
            import :: c_int, c_int64_t, c_ptr, c_size_t
            type(c_ptr), value :: volume
            type(*), dimension(*), intent(inout), asynchronous :: to
            integer(c_size_t), value :: bytes
            integer(c_int64_t), value :: offset
            type(c_ptr), value :: queue
            type(c_ptr), value :: state
            integer(c_int) :: forebay_volume_get_start
        end function
        function forebay_volume_cas_start(volume, offset, expected, value, queue, state) bind(c)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: volume
            integer(c_int64_t), value :: offset
            integer(c_int64_t), value :: expected
            integer(c_int64_t), value :: value
            type(c_ptr), value :: queue
            type(c_ptr), value :: state
            integer(c_int) :: forebay_volume_cas_start
        end function
        function forebay_volume_fetch_add_start(volume, offset, by, queue, state) bind(c)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: volume
            integer(c_int64_t), value :: offset
            integer(c_int64_t), value :: by
            type(c_ptr), value :: queue
            type(c_ptr), value :: state
            integer(c_int) :: forebay_volume_fetch_add_start
        end function
        function forebay_volume_swap_start(volume, offset, value, queue, state) bind(c)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: volume
            integer(c_int64_t), value :: offset
            integer(c_int64_t), value :: value
            type(c_ptr), value :: queue
            type(c_ptr), value :: state
            integer(c_int) :: forebay_volume_swap_start
        end function
        function forebay_volume_file_open(pool, specifier, flags, file) bind(c)
            import :: c_char, c_int, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: specifier
            integer(c_int), value :: flags
            type(c_ptr), intent(out) :: file
            integer(c_int) :: forebay_volume_file_open
        end function
        function forebay_volume_file_unlink(pool, specifier) bind(c)
            import :: c_char, c_int, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: specifier
            integer(c_int) :: forebay_volume_file_unlink
        end function
        function forebay_model_calibration(pool, out) bind(c)
            import :: c_int, c_ptr, forebay_calibration
            type(c_ptr), value :: pool
            type(forebay_calibration), intent(out) :: out
            integer(c_int) :: forebay_model_calibration
        end function
        function forebay_model_quick(message_ns, message_byte_ps, request_ns, processors, calibration) bind(c)
            import :: c_int, c_int64_t, forebay_calibration
            integer(c_int64_t), value :: message_ns
            integer(c_int64_t), value :: message_byte_ps
            integer(c_int64_t), value :: request_ns
            integer(c_int64_t), value :: processors
            type(forebay_calibration), intent(inout) :: calibration
            integer(c_int) :: forebay_model_quick
        end function
        function forebay_model_predict(calibration, corrections, pattern, out) bind(c)
            import :: c_int, forebay_calibration, forebay_corrections, forebay_pattern, forebay_times
            type(forebay_calibration), intent(in) :: calibration
            type(forebay_corrections), intent(in) :: corrections
            type(forebay_pattern), intent(in) :: pattern
            type(forebay_times), intent(out) :: out
            integer(c_int) :: forebay_model_predict
        end function
        function forebay_model_learn(corrections, writes, collective, plain_ns, measured_ns) bind(c)
            import :: c_int, c_int64_t, forebay_corrections
            type(forebay_corrections), intent(inout) :: corrections
            integer(c_int), value :: writes
            integer(c_int), value :: collective
            integer(c_int64_t), value :: plain_ns
            integer(c_int64_t), value :: measured_ns
            integer(c_int) :: forebay_model_learn
        end function
        function forebay_opendir(pool, path, dir) bind(c)
            import :: c_char, c_int, c_ptr
            type(c_ptr), value :: pool
            character(kind=c_char), dimension(*), intent(in) :: path
            type(c_ptr), intent(out) :: dir
            integer(c_int) :: forebay_opendir
        end function
        function forebay_readdir(dir, out) bind(c)
            import :: c_int, c_ptr, forebay_dirent
            type(c_ptr), value :: dir
            type(forebay_dirent), intent(out) :: out
            integer(c_int) :: forebay_readdir
        end function
        function forebay_seekdir(dir, cookie) bind(c)
            import :: c_int, c_int64_t, c_ptr
            type(c_ptr), value :: dir
            integer(c_int64_t), value :: cookie
            integer(c_int) :: forebay_seekdir
        end function
        function forebay_closedir(dir) bind(c)
            import :: c_int, c_ptr
            type(c_ptr), value :: dir
            integer(c_int) :: forebay_closedir
        end function
    end interface

contains

    ! A target's number: as the macro FOREBAY_TARGET.
    pure integer(c_int32_t) function forebay_target(node, index)
        integer, intent(in) :: node, index
        forebay_target = ior(shiftl(int(node, c_int32_t), 16), int(index, c_int32_t))
    end function

end module
