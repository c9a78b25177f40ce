//! Every number that bounds something, with its reason. Compile-time checks cover those that depend on one another.

/// Bytes of a file name: POSIX NAME_MAX on every Linux file system.
pub const NAME_MAX: usize = 255;
/// Bytes of a path or a symlink's target, without the final NUL: Linux PATH_MAX less one.
pub const PATH_MAX: usize = 4095;
/// Symbolic links followed in one look-up, as Linux does (fs/namei.c, MAXSYMLINKS).
pub const SYMLINKS_MAX: usize = 40;
/// Links of one inode: fits every program's `nlink_t` arithmetic, and what XFS allows.
pub const LINKS_MAX: u32 = 0x7fff_ffff;
/// An import into an unlisted directory shows its names on the board while the directory had fewer names than these before
/// the request. With its inode a name takes 384 bytes there. A program that uses another name sends a request.
pub const FOUND_SHOWN_MAX: u64 = 32_768;
/// Bytes of an extended attribute's name (Linux XATTR_NAME_MAX).
pub const XATTR_NAME_MAX: usize = 255;
/// Bytes of an extended attribute's value (Linux XATTR_SIZE_MAX).
pub const XATTR_VALUE_MAX: usize = 65_536;
/// Bytes of all names of an inode's extended attributes (Linux XATTR_LIST_MAX).
pub const XATTR_LIST_MAX: usize = 65_536;
/// Bytes of all extended attributes of an inode: names, values, and [`XATTR_OVERHEAD`] each. Twice the largest value,
/// as in kernfs, and small enough that one transaction can remove all when the shard is full.
pub const XATTR_TOTAL_MAX: usize = 128 * 1024;
/// Bytes that each extended attribute counts besides its name and value.
pub const XATTR_OVERHEAD: usize = 64;
/// The greatest discriminator of a cookie, which has 7 bits: 128 names of one directory may share a 56-bit hash.
pub const COLLISIONS_MAX: u8 = 127;
/// Components of a layout: one for small files, one for the rest, as progressive file layouts use them.
pub const COMPONENTS_MAX: usize = 2;
/// Targets named by one layout component.
pub const TARGETS_MAX: usize = 8;
/// Targets of one node: when a program attaches, one message carries a descriptor of each.
pub const NODE_TARGETS_MAX: usize = 8;
/// Stripes (backing files) of one component: 8 targets, each overstriped 32 times.
pub const STRIPES_MAX: u16 = 256;
/// Smallest and largest stripe_size: a page, and 1 GiB. Both powers of two.
pub const STRIPE_BYTES_MIN: u32 = 4096;
/// See [`STRIPE_BYTES_MIN`].
pub const STRIPE_BYTES_MAX: u32 = 1 << 30;
/// Largest file: offsets are `off_t`.
pub const FILE_BYTES_MAX: u64 = i64::MAX as u64;

/// Slots of a ring: one bit each in the 64-bit masks, so 64 calls of one process may be in flight.
pub const RING_SLOTS: usize = 64;
/// Bytes of one request or reply: the largest extended attribute with its name and headers.
pub const MESSAGE_BYTES_MAX: usize = 68 * 1024;
/// Bytes of a backing file that one request reads or writes: with its fields it fits a message.
pub const BACKING_BYTES_MAX: usize = 64 * 1024;
/// Bytes of data that the network transfers for one request, at most: large enough that the request costs little beside
/// the transfer.
pub const MOVE_BYTES_MAX: usize = 1024 * 1024;
/// A call shorter than [`BACKING_AHEAD`] pieces of [`MOVE_BYTES_MAX`] is cut into [`BACKING_AHEAD`] smaller pieces, but
/// none smaller than this, so that some are copied while others are transferred.
pub const MOVE_BYTES_MIN: usize = 128 * 1024;
/// Data longer than this are transferred by the network itself, shorter data go within the request: the transport needs
/// several steps for longer messages.
pub const MOVE_ABOVE_BYTES: usize = 32 * 1024;
/// Bytes of a process's buffer for transfers by the network itself: the pieces that one call has in flight
/// ([`BACKING_AHEAD`]), for several threads.
pub const BUFFER_BYTES: usize = 16 << 20;
/// Processes of a node that have a buffer of [`BUFFER_BYTES`]. Only the used part of a buffer takes memory. Other
/// processes' data go within requests.
pub const BUFFERS_MAX: usize = 128;
/// Bytes of one range of memory that a program allocates for transfers: a request names a place in it by 32 bits.
pub const PROGRAM_MEMORY_BYTES_MAX: usize = 1 << 32;
/// Ranges of memory that a process has allocated or registered for transfers at the same time. A call searches all of them.
pub const PROGRAM_MEMORIES_MAX: usize = 256;
/// Ranges of memory of programs that a daemon has registered with the network: a mapping each, of 65,530 that the kernel
/// allows a process. Further ones are copied.
pub const PROGRAM_MEMORIES_REGISTERED_MAX: usize = 4096;
/// Bytes of processes' memory that the network thread registers in a round, between other work, and as many that it
/// unregisters: some milliseconds where the pages are pinned. It is also the length of one range, which a round may
/// register in addition to small memory.
pub const REGISTRATION_BYTES: usize = 64 << 20;
/// Bytes of memory of programs that is not used any longer, but is not unregistered yet. With more, no further memory is
/// registered: data are copied.
pub const PROGRAM_MEMORY_ENDED_BYTES_MAX: usize = 4 * PROGRAM_MEMORY_BYTES_MAX;
/// How long memory may take to be registered, in seconds, and as many more as it has GiB. After that the process copies, and
/// its daemon registers no more of it.
pub const PROGRAM_MEMORY_REGISTRATION_S: u64 = 1;
/// How long a process waits until it has memory registered again that its daemon refused, or has withdrawn.
pub const PROGRAM_MEMORY_PAUSE_MS: u64 = 1_000;
/// How long a buffer's memory stays in quarantine after a request on it ended with an unknown outcome. A transfer may
/// still be in flight: the file's node starts it within [`NODE_TIMEOUT_MS`] of the request and ends it within the same
/// time, and clients' requests end within [`CALL_TIMEOUT_MS`].
pub const QUARANTINE_MS: u64 = CALL_TIMEOUT_MS + 2 * NODE_TIMEOUT_MS;
/// Buffers in quarantine. With so many, no process gets another buffer, so that a network that loses much costs bounded
/// address space. Their memory is freed when their process ends, or when it has taken its data out of them, but not what a
/// late transfer may still read for a write whose outcome is unknown: that keeps its bytes until the quarantine is over.
pub const BUFFERS_QUARANTINED_MAX: usize = 64;
/// Ranges of memory of programs in quarantine. With so many, no further one is registered: data are copied. Buffers have a
/// limit of their own.
pub const PROGRAM_MEMORIES_QUARANTINED_MAX: usize = 64;
/// Bytes of those ranges whose pages the daemon keeps: two of the largest size. With more, those of the oldest are left to
/// the program.
pub const PROGRAM_MEMORY_QUARANTINED_BYTES_MAX: usize = 2 * PROGRAM_MEMORY_BYTES_MAX;
/// Ranges of a process that has ended which the network thread retires in a round. They are then unregistered by
/// [`REGISTRATION_BYTES`] a round.
pub const PROGRAM_MEMORIES_RETIRED_A_ROUND: usize = 4;
/// Bytes that are read ahead for a reader that declared that it reads another node's file in order: at first, and at
/// most. Larger windows made no reader faster.
pub const READ_AHEAD_BYTES_MIN: usize = 256 * 1024;
/// See [`READ_AHEAD_BYTES_MIN`].
pub const READ_AHEAD_BYTES_MAX: usize = 2 * 1024 * 1024;
/// A read of this length is faster without reading ahead: its own parts keep the network busy.
pub const READ_AHEAD_OF_MAX: usize = READ_AHEAD_BYTES_MAX / 2;
/// How long a window that was read ahead is used: a reader sees no older data.
pub const READ_AHEAD_MS: u64 = 1_000;
/// Bytes of memory through which data pass between a node's backing files and other nodes' buffers.
pub const BOUNCE_BYTES: usize = 32 << 20;
/// Bytes of the huge pages of volumes' pieces that transfers of a node's network have used when it gives their mappings up:
/// until then they count as memory of the daemon.
pub const DIRECT_PIECE_BYTES: usize = 256 << 20;
/// Eager buffers that a node grants another node, which writes data into them before it sends the request: more than a
/// call has in flight.
pub const EAGER_BUFFERS: usize = 16;
/// Bytes of an eager buffer: more than fits into a request. It is less than the parts of a call that has several parts:
/// such a call fetches one part while another is in transit.
pub const EAGER_BUFFER_BYTES: usize = MOVE_BYTES_MIN / 2;
/// Nodes that have eager buffers of a daemon at the same time. Only the used part takes memory. The daemon fetches the
/// data of further nodes.
pub const EAGER_GRANTS_MAX: usize = 16;
/// Retired grants whose memory is in quarantine because data may still arrive. With so many, no node gets a new grant.
pub const EAGER_GRANTS_QUARANTINED_MAX: usize = 16;
/// Data requests that one call of a client has in flight, in slots of its own: enough to keep a link busy, few enough
/// to leave slots to other threads.
pub const BACKING_AHEAD: usize = 8;
/// Appends in pieces that a daemon collects at the same time for processes of other nodes, each of [`MOVE_BYTES_MAX`]
/// at most. Further ones wait.
pub const GATHERED_MAX: usize = 32;
/// A collected append that got no new piece for this long is dropped when another one needs its place. Longer than any
/// request waits.
pub const GATHERED_MS: u64 = 60_000;
/// Slots of processes for which a daemon keeps, for its next worker, whether their last append to another node's file
/// was done, and the last step of a group's pointer: 64 bytes each. When the table is full, the slot whose last request
/// is the oldest is dropped.
pub const REPLIES_KEPT: usize = 16_384;
/// Backing files that a daemon keeps open for processes of other nodes, a descriptor each. Further ones are opened anew
/// for each request, and their data do not survive the unlink.
pub const BACKING_OPEN_MAX: usize = 4096;
/// Locks of processes of other nodes on a daemon's backing files, by owner: a descriptor each. Further ones fail with
/// ENOLCK.
pub const REMOTE_LOCK_OWNERS_MAX: usize = 4096;
/// Owners that a daemon remembers after they released all their locks, so that a request that arrives late is not
/// granted. More than release their locks within the time that a message may take; 2 MiB.
pub const LOCK_OWNERS_OVER_KEPT: usize = 16_384;
/// How long a process may keep others from writing at the end of a file of several backing files, if it does not report
/// that it has written. Longer than an append may take: [`APPEND_MS`] to find the end, and a request's time to write.
pub const APPEND_HOLD_MS: u64 = 60_000;
/// A process gives up an append if it has not found the end, or has waited for another process's append, for this long.
pub const APPEND_MS: u64 = 20_000;
/// Groups of processes that opened a file together over several nodes, per daemon that has the first backing file: 56
/// bytes each. Further groups open the file too, but without a shared file pointer and atomic mode.
pub const GROUPS_MAX: usize = 4096;
/// Locks of groups that are held at a daemon at the same time, 56 bytes each. Further ones wait.
pub const GROUP_LOCKS_MAX: usize = 4096;
/// A process that waits for a group's lock and has not repeated its request for this long loses its place in the queue.
/// Many times the pause between two requests.
pub const GROUP_PLACE_MS: u64 = 100;
/// A process's locks on other nodes' files are released when those nodes cannot reach its node ([`SESSIONS_PERIOD_MS`])
/// for this long: the process is assumed dead.
pub const LOCKS_OF_UNREACHED_MS: u64 = 60_000;
/// Nodes of a pool: a bound against a mistaken pool file. Node numbers may be larger.
pub const NODES_MAX: usize = 1024;
/// The largest number of a node. The upper 16 bits of an inode number are a node's number: with this bound no inode
/// number is negative as an `i64`, and the mount can use those of node 32767 for files without a name.
pub const NODE_NUMBER_MAX: u16 = 32_766;
/// Remote shells that `forebay up` and `down` run at the same time: 512 nodes take eight rounds of a second, and one
/// host's process table and name service can handle so many.
pub const REMOTE_SHELLS_MAX: usize = 64;
/// A request to another node fails with EIO when it has no reply after this time: longer than it takes to declare a
/// node unreachable (5 s), shorter than [`CALL_TIMEOUT_MS`].
pub const NODE_TIMEOUT_MS: u64 = 25_000;
/// A request that meets a cross-node transaction in progress is tried again for this long, then it fails with EBUSY.
/// Such a transaction takes a few messages, unless a node is down.
pub const TRANSACTION_TIMEOUT_MS: u64 = 8_000;
/// A participant with a prepared part asks the coordinator for the outcome after this time without a message from it,
/// and again each time: several times what a busy node takes.
pub const DOUBT_AFTER_MS: u64 = 1_000;
/// A delivery that a node did not receive is sent again after this time, or as soon as the node is reached again.
pub const DELIVERY_AGAIN_MS: u64 = 2_000;
/// Deliveries that a daemon has in flight: some of its 64 slots stay free for what its clients wait for.
pub const DELIVERIES_AHEAD: usize = 48;
/// Deliveries in flight to one node: a node that falls silent takes no more slots with it until the daemon notices.
pub const DELIVERIES_AHEAD_NODE: usize = 16;
/// Deliveries in flight to nodes that did not answer last time, one each: most slots are for nodes that answer.
pub const DELIVERIES_AHEAD_SILENT: usize = 8;
/// A request that meets names held by a cross-node transaction waits for this long, then it fails with EIO: the nodes
/// that could end the transaction are down. Less than [`NODE_TIMEOUT_MS`].
pub const HELD_TIMEOUT_MS: u64 = 10_000;
/// A listing of a directory waits this long for held names, then lists the directory as it is: an error would make the
/// part already listed useless.
pub const HELD_LIST_TIMEOUT_MS: u64 = 1_000;
/// A step of a cross-node transaction on another node is given up after this time.
pub const STEP_TIMEOUT_MS: u64 = 10_000;
/// How long a node may use what it cached of another node's directories. A node that dies delays a rename, removal or
/// chmod of a directory by this much at most. Renewing takes a request every third of this for each pair of nodes.
pub const LEASE_MS: u64 = 3_000;
/// Names and directories of one other node that a node caches by lease. At one more it drops all of them and starts
/// again.
pub const LEASED_MAX: usize = 65_536;
/// Processes that one request checks for whether they live: 4 KiB of a message.
pub const SESSIONS_ASKED_MAX: usize = 512;
/// Backing files that one request removes: 8 KiB of a message, and at most a few milliseconds of an I/O worker.
pub const REMOVED_AT_ONCE_MAX: usize = 512;
/// How often a node checks which processes of other nodes live, if it keeps state for them. State of a process whose
/// end was not reported, as a node or a link was down, is kept no longer than this after the node has returned.
pub const SESSIONS_PERIOD_MS: u64 = 60_000;
/// Ended processes of other nodes that a daemon remembers, so that requests of theirs that arrive late are not
/// executed. More than end within the time that a message may take; 100 KiB.
pub const SESSIONS_ENDED_KEPT: usize = 4096;
/// Requests that one ring may put into one batch, so that a process with 64 threads does not starve the others.
pub const BATCH_PER_RING: usize = 8;
/// Requests of one batch: bounds the time to the first acknowledgement.
pub const BATCH_MAX: usize = 64;
/// Rings of one daemon: processes of one node that use the pool at the same time. Each maps its slots on both sides.
pub const RINGS_MAX: usize = 4096;

/// A target that is used to this percentage gets no new files while another target has space: files that are open on it
/// can still grow.
pub const HIGH_WATER_PERCENT: u64 = 90;

/// The unit in which a file that is being restored is given to its readers: the largest read that the kernel sends to the
/// mount. A store with 100 MB/s delivers it in 10 ms.
pub const RANGE_BYTES: u64 = 1 << 20;
/// A released file of this size or more is read while it is restored. A store with 100 MB/s delivers a smaller one in
/// less than 170 ms, and a file that was opened whole is read without requests.
pub const RANGES_FILE_BYTES_MIN: u64 = 16 << 20;
/// Bytes that restores leave free, so that operations that free space have some.
pub const RESTORE_RESERVE_BYTES: u64 = 4 << 20;
/// Bytes that one message reads from a store for a file for which the pool has no room: whole pages, and with the header
/// they fit a message between a program and a mover ([`XATTR_VALUE_MAX`]).
pub const STORE_READ_BYTES_MAX: usize = 60 << 10;

/// How long what a process had copied from a backing store counts against its limit. A scan of a tree takes longer than a
/// look at some files, and a program that works for hours is not stopped by what it read in the morning.
pub const RECALL_WINDOW_NS: u64 = 600_000_000_000;
/// Processes of which is known what they had copied. More within one window start from nothing again.
pub const RECALLING_PROCESSES_MAX: usize = 4096;

/// Names of unlisted directories that their stores are known to lack: about 300 KiB of memory. Programs search few names
/// in vain before a directory is listed whole.
pub const ABSENT_NAMES_MAX: usize = 4096;

/// From this percentage on, files in front of a backing store are opened for writing so that their writes can wait for
/// space. Their writers may fill what is left up to [`HIGH_WATER_PERCENT`], at which writes begin to wait.
pub const SCARCE_PERCENT: u64 = 75;
/// How long a process takes a look at the free space as good for that.
pub const SCARCE_LOOK_MS: u64 = 2;

/// A client may leave a removed file's backing file for a moment while half of its target is free, and at least this
/// much. That is more than programs write in [`ROOM_LOOK_MS`] and the few milliseconds after which the daemon unlinks
/// it.
pub const ROOM_TO_SPARE_BYTES: u64 = 1 << 30;
/// The same in inodes, on file systems that limit them.
pub const ROOM_TO_SPARE_INODES: u64 = 1 << 16;
/// How often a client that leaves backing files checks that their target still has [`ROOM_TO_SPARE_BYTES`].
pub const ROOM_LOOK_MS: u64 = 1;

/// Longest name that the board holds; for longer ones clients send a request. With the fields in front of it, such a
/// name fills two cache lines.
pub const BOARD_NAME_MAX: usize = 88;
/// Smallest and largest board: a few thousand entries, and some two million.
pub const BOARD_BYTES_MIN: u64 = 1 << 20;
/// See [`BOARD_BYTES_MIN`].
pub const BOARD_BYTES_MAX: u64 = 512 << 20;
/// The board gets this fraction of a pool's capacity, within the bounds above.
pub const BOARD_FRACTION: u64 = 32;
/// Bytes of the reply to one readdir request.
pub const READDIR_REPLY_BYTES: usize = 32 * 1024;

/// Pages (4 KiB) of the shard that are fallocated beyond the last used one, so that requests seldom wait for fallocate.
/// They are allocated again before a transaction when fewer than half are left. They do not bound a batch: a transaction
/// that may take more pages is committed first (`Batch::is_spent`).
pub const SHARD_PAGES_AHEAD: u64 = 4096;
/// Pages that only removals may use, so that a full pool can always be emptied.
pub const SHARD_PAGES_FOR_REMOVALS: u64 = 1024;

/// Threads that execute a process's asynchronous reads and writes: enough to keep a node's memory busy from one
/// process.
pub const ASYNC_THREADS: usize = 4;
/// Asynchronous reads and writes that wait to begin; a further one fails with EAGAIN.
pub const ASYNC_QUEUE_MAX: usize = 4096;
/// How many times a client tries to get a file without other openers, a millisecond apart, to change its layout to one
/// backing file, before it reports that the file is open elsewhere. A program that has just closed the file may have a
/// child between fork and exec, which has it open that long.
pub const LEASE_TRIES: u32 = 20;
/// A call without a reply fails with EIO after this time, whatever it waits for: a free slot, its own node's worker,
/// which may be stopped, or another node. Longer than a worker's restart on a loaded node.
pub const CALL_TIMEOUT_MS: u64 = 30_000;
/// How often a waiting client checks whether the daemon's socket still answers.
pub const LIVENESS_PERIOD_MS: u64 = 500;
/// How often the daemon checks every ring even when its doorbell is silent, as a client may have overwritten it.
pub const DOORBELL_POLL_MS: u64 = 50;

/// Smallest pool: the shard's reserve, the board and some data.
pub const CAPACITY_BYTES_MIN: u64 = 64 << 20;
/// Default capacity, in percent of the free space. Memory: half, as the job itself needs the rest. An SSD: most of it.
pub const CAPACITY_DRAM_PERCENT: u64 = 50;
/// See [`CAPACITY_DRAM_PERCENT`].
pub const CAPACITY_SSD_PERCENT: u64 = 80;
/// Memory that a capacity leaves free, in percent of the node's or the cgroup's: what the daemon, its clients' buffers
/// and the kernel's own tables need before writers would meet the OOM killer.
pub const MEMORY_RESERVE_PERCENT: u64 = 6;
/// Lower bound of the memory in [`MEMORY_RESERVE_PERCENT`]: the daemon's resident set with its board and rings.
pub const MEMORY_RESERVE_BYTES_MIN: u64 = 64 << 20;

/// A backing file in memory that grows by small writes is preallocated in windows of at most this: a huge page of
/// x86-64.
pub const AHEAD_BYTES_MAX: u64 = 2 << 20;
/// Smallest window: what a small file may waste.
pub const AHEAD_BYTES_MIN: u64 = 64 << 10;
/// Writes of this length and more get large pages by themselves, and would pay for the zeros that fill a window first.
pub const AHEAD_WRITE_BYTES_MAX: usize = 256 << 10;

/// One call that reads two ranges of a file also reads the gap between them if it is no longer than this: reading so
/// much takes as long as a system call where calls are expensive (`client/gaps.rs`).
pub const GAP_BYTES_MAX: usize = 8 << 10;
/// The same on another node, where a gap passes the network: a gap that is not longer than the ranges is read too
/// (docs/decisions/0052), from this length ...
pub const GAP_BYTES_MAX_NETWORK: usize = 1 << 10;
/// ... to this one. Also the longest gap that the node of the data reads for others from a medium that is not memory.
pub const GAP_BYTES_MAX_ELSEWHERE: usize = 64 << 10;
/// The same from memory: a small pread takes as long as this copy.
pub const GAP_BYTES_MAX_MEMORY: usize = 4 << 10;
/// Ranges of up to this length travel together in one request: longer ones gain little, and go through the buffers.
pub const TOGETHER_BYTES_MAX: usize = 16 << 10;
/// Small ranges that are near each other are read together in blocks of this length, into a buffer of the process: it
/// stays in the cache.
pub const SIEVE_BUFFER_BYTES: usize = 1 << 20;
/// Number of ranges from which on a buffer of [`SIEVE_BUFFER_BYTES`] is used.
pub const SIEVE_PIECES_MIN: usize = 4;
/// Average length of ranges up to which a buffer of [`SIEVE_BUFFER_BYTES`] is used: the kernel copies a longer range in
/// less time than two copies take.
pub const SIEVE_BYTES_MAX: usize = 16 << 10;
/// Number of pieces for one backing file from which on two system calls and a pipe for all cost less than one call for
/// each.
pub const SCATTER_PIECES_MIN: usize = 24;
/// Pieces that are longer on average are written by a call each: a call costs little beside the copy.
pub const SCATTER_BYTES_MAX: usize = 16 << 10;
/// How many times as long as the pieces the range around them may be. A page of a mapping is a huge one where the file
/// has space for it, so pieces far apart would fill a medium with unwritten space. 16 interleaved ranks of a node are
/// allowed.
pub const SCATTER_SPREAD_MAX: u64 = 16;
/// Bytes of a backing file that are mapped at one time: some milliseconds of writing, and a small part of an address
/// space.
pub const SCATTER_WINDOW_BYTES: u64 = 64 << 20;
/// Pieces of ranges that are sorted by backing file at one time: 200 KiB of lists.
pub const RUN_PIECES_MAX: usize = 4096;

/// Locks that wait through a mount at one time; further ones fail with ENOLCK. Each is a thread of a program, so a node
/// of any size fits. All are tried again every 20 ms at a microsecond each.
pub const LOCK_WAITS_MAX: usize = 1024;
/// Owners of locks through a mount: each has a descriptor in the mount's process. Further ones fail with ENOLCK.
pub const LOCK_OWNERS_MAX: usize = 16 * 1024;
/// A second bound on these owners: the process's descriptor limit divided by this, as open files need descriptors too.
pub const LOCK_OWNERS_PART: usize = 4;
/// Interrupts through a mount that are remembered until the request that they name arrives. That request is already in
/// transit, so only interrupts of those microseconds are in between.
pub const INTERRUPTS_KEPT: usize = 256;
/// Bytes that one request to a mount copies (copy_file_range): some milliseconds of one of its threads. The caller gets
/// a short count and continues.
pub const COPY_BYTES_MAX: usize = 16 << 20;

/// Nodes that have a directory's entries, at most. Beyond this, a listing of a small directory sends requests to more
/// nodes than it has entries, and its removal takes more messages than filling it.
pub const WIDTH_MAX: usize = 16;
/// Wide directories whose parts a daemon remembers: 160 bytes each. When there are more, it drops all and learns them
/// again.
pub const WIDE_KNOWN_MAX: usize = 16 * 1024;

/// Directories of a pool that preloaded programs watch with inotify at the same time. Each has a mirror in the pool's
/// directory, and takes a descriptor below the daemon's limit while a watch is added.
pub const WATCHED_DIRECTORIES_MAX: usize = 1024;
/// Names in all mirrors together: an empty file of about 1 KiB of kernel memory, and 300 bytes of the daemon's, for
/// each.
pub const WATCHED_NAMES_MAX: usize = 128 * 1024;
/// Changes that wait to be made in mirrors, at about 100 bytes each. Beyond this, changes arrive faster than mirrors
/// can follow, and all watches end.
pub const WATCH_CHANGES_MAX: usize = 128 * 1024;
/// How often the daemon checks whether watches of a mirror remain. The kernel sends no event when the last one is
/// removed.
pub const WATCH_REVIEW_MS: u64 = 2_000;
/// Pause between two checks for changed contents of watched files: a writer wakes the daemon 100 times a second at
/// most.
pub const WATCH_CONTENTS_MS: u64 = 10;

/// Sizes of volumes and their stripes are multiples of this: a page of memory.
pub const VOLUME_GRAIN_BYTES: u64 = 4096;
/// Bytes of a segment of a volume: more than a node's memory, and sums of them do not overflow.
pub const VOLUME_BYTES_MAX: u64 = 1 << 50;
/// Bytes of a volume's stripe.
pub const VOLUME_STRIPE_BYTES_MAX: u64 = 1 << 30;
/// Segments of a volume: the number of times that it can grow. With them a record stays well below a page of the shard.
pub const VOLUME_SEGMENTS_MAX: usize = 16;
/// Segments that are begun for one volume in its life, the first among them. Their numbers are never used again, and a
/// piece's number in requests for data has this much room.
pub const VOLUME_SEGMENTS_BEGUN_MAX: u16 = 8192;
/// Volumes of a pool. A removal of one searches all records.
pub const VOLUMES_MAX: usize = 4096;
/// Bytes of a volume that one request reserves: some 10 ms of a processor, after which progress is shown.
pub const VOLUME_STEP_BYTES: u64 = 64 << 20;
/// Bytes of a target in memory that volumes leave to files: the shard's next pages, and a few names.
pub const VOLUME_SPACE_LEFT_BYTES: u64 = 1 << 20;
/// A node asks the home of a volume, of which it has a piece, this often whether the volume still exists, while it is
/// being made or its pieces are to be dropped.
pub const VOLUME_REVIEW_MS: u64 = 1000;

const _: () = assert!(MESSAGE_BYTES_MAX >= XATTR_VALUE_MAX + XATTR_NAME_MAX + 1024);
const _: () = assert!(XATTR_TOTAL_MAX >= XATTR_VALUE_MAX + XATTR_NAME_MAX + XATTR_OVERHEAD);
const _: () = assert!(MESSAGE_BYTES_MAX >= 2 * NAME_MAX + PATH_MAX + 1024);
const _: () = assert!(MESSAGE_BYTES_MAX >= BACKING_BYTES_MAX + 64);
const _: () = assert!(NODE_TIMEOUT_MS < CALL_TIMEOUT_MS && BACKING_AHEAD < RING_SLOTS);
const _: () = assert!(HELD_TIMEOUT_MS < NODE_TIMEOUT_MS && DELIVERIES_AHEAD < RING_SLOTS);
const _: () = assert!(TRANSACTION_TIMEOUT_MS + STEP_TIMEOUT_MS < NODE_TIMEOUT_MS);
const _: () = assert!(APPEND_MS + NODE_TIMEOUT_MS < APPEND_HOLD_MS);
const _: () = assert!(READDIR_REPLY_BYTES <= MESSAGE_BYTES_MAX);
const _: () = assert!(STRIPE_BYTES_MIN.is_power_of_two() && STRIPE_BYTES_MAX.is_power_of_two());
const _: () = assert!(SHARD_PAGES_FOR_REMOVALS < SHARD_PAGES_AHEAD);
const _: () = assert!(COPY_BYTES_MAX <= u32::MAX as usize, "the narrow form of a copy's reply has 32 bits");
const _: () = assert!(RING_SLOTS == u64::BITS as usize);
const _: () = assert!(BATCH_PER_RING <= RING_SLOTS && BATCH_PER_RING <= BATCH_MAX);

/// This bit of a lock owner's number says that the number is unique among all processes of a node, so the owner is
/// recognized in any session of its node. Process numbers have 22 bits, so the bit is free.
pub const LOCK_OWNER_OF_NODE: u64 = 1 << 63;
