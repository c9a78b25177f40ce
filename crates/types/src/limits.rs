//! Every number that bounds something, with the reason beside it. Checks at compile time hold those that depend on
//! one another.

/// Bytes of a file name: POSIX NAME_MAX on every Linux file system.
pub const NAME_MAX: usize = 255;
/// Bytes of a path or a symlink's target, without the final NUL: Linux PATH_MAX less one.
pub const PATH_MAX: usize = 4095;
/// Symbolic links followed in one look-up, as Linux does (fs/namei.c, MAXSYMLINKS).
pub const SYMLINKS_MAX: usize = 40;
/// Links of one inode: fits every program's `nlink_t` arithmetic, and what XFS allows.
pub const LINKS_MAX: u32 = 0x7fff_ffff;
/// Bytes of an extended attribute's name (Linux XATTR_NAME_MAX).
pub const XATTR_NAME_MAX: usize = 255;
/// Bytes of an extended attribute's value (Linux XATTR_SIZE_MAX).
pub const XATTR_VALUE_MAX: usize = 65_536;
/// Bytes of all names of an inode's extended attributes (Linux XATTR_LIST_MAX).
pub const XATTR_LIST_MAX: usize = 65_536;
/// Bytes of all extended attributes of an inode, names and values, and [`XATTR_OVERHEAD`] each: twice the largest
/// value, as kernfs allows, and small enough that all can be removed in one transaction when the shard is full.
pub const XATTR_TOTAL_MAX: usize = 128 * 1024;
/// What each extended attribute counts beside its bytes.
pub const XATTR_OVERHEAD: usize = 64;
/// Names of one directory that may share a 56-bit hash: the discriminator has 7 bits.
pub const COLLISIONS_MAX: u8 = 127;
/// Components of a layout: one for small files, one for the rest, as progressive file layouts use them.
pub const COMPONENTS_MAX: usize = 2;
/// Targets named by one layout component; the default stripe_count is at most this.
pub const TARGETS_MAX: usize = 8;
/// Targets of one node: a program gets a descriptor of each in one message when it attaches.
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
/// Bytes of data that the network moves by itself for one request, at most: large enough that asking costs little
/// beside moving.
pub const MOVE_BYTES_MAX: usize = 1024 * 1024;
/// A call that is shorter than [`BACKING_AHEAD`] such pieces is cut into as many smaller ones, but not below this, so
/// that some are copied while others are moved.
pub const MOVE_BYTES_MIN: usize = 128 * 1024;
/// Data that are longer are moved so, others go within a request: longer messages take the transport as many steps.
pub const MOVE_ABOVE_BYTES: usize = 32 * 1024;
/// Bytes of a process's buffer for them: the pieces that one call has under way ([`BACKING_AHEAD`]), for several
/// threads.
pub const BUFFER_BYTES: usize = 16 << 20;
/// Processes of a node that have such buffers, which take memory as far as they are used; those of others go by
/// requests.
pub const BUFFERS_MAX: usize = 128;
/// How long a buffer's memory stays in quarantine after a request on it ended with an unknown outcome. A transfer may
/// still be in flight: the file's node starts it within [`NODE_TIMEOUT_MS`] of the request and ends it within the same
/// time, and clients' requests end within [`CALL_TIMEOUT_MS`].
pub const QUARANTINE_MS: u64 = CALL_TIMEOUT_MS + 2 * NODE_TIMEOUT_MS;
/// Buffers in quarantine. With so many, no process gets another buffer, so that a network that loses much costs bounded
/// address space. Their memory is freed when their process ends, or when it has taken its data out of them.
pub const BUFFERS_QUARANTINED_MAX: usize = 64;
/// Bytes that are read ahead of who reads another node's file in order and says so: at first, and at most: by more no
/// reader gains.
pub const READ_AHEAD_BYTES_MIN: usize = 256 * 1024;
/// See [`READ_AHEAD_BYTES_MIN`].
pub const READ_AHEAD_BYTES_MAX: usize = 2 * 1024 * 1024;
/// A read of so much is quicker without: its own parts keep the network busy.
pub const READ_AHEAD_OF_MAX: usize = READ_AHEAD_BYTES_MAX / 2;
/// What was read ahead is used for so long: what that reader sees is no older.
pub const READ_AHEAD_MS: u64 = 1_000;
/// Bytes of the memory through which a node's backing files pass to and from other nodes' buffers.
pub const BOUNCE_BYTES: usize = 32 << 20;
/// Eager buffers that a node grants another node, which writes data into them before it sends the request: more than a
/// call has in flight.
pub const EAGER_BUFFERS: usize = 16;
/// Bytes of an eager buffer: more than fits into a request, and less than the parts of a call that has several, of
/// which one is fetched while another is on its way.
pub const EAGER_BUFFER_BYTES: usize = MOVE_BYTES_MIN / 2;
/// Nodes that have eager buffers of a daemon at the same time. Only the used part takes memory. Data of other nodes are
/// fetched.
pub const EAGER_GRANTS_MAX: usize = 16;
/// Retired grants whose memory is in quarantine because data may still arrive. With so many, no node gets a new grant.
pub const EAGER_GRANTS_QUARANTINED_MAX: usize = 16;
/// Data requests that one call of a client has in flight, in slots of its own: enough to keep a link busy, few enough to
/// leave slots to other threads.
pub const BACKING_AHEAD: usize = 8;
/// Appends in pieces that a daemon gathers at the same time for processes of other nodes, each of [`MOVE_BYTES_MAX`] at
/// most; more wait.
pub const GATHERED_MAX: usize = 32;
/// What was not gone on with for so long is forgotten when there is no room for another: longer than any request waits.
pub const GATHERED_MS: u64 = 60_000;
/// Slots of processes of which a daemon's next worker knows whether their last append to another node's file was done,
/// and their last step of a group's pointer: 64 bytes each. Where more ask, the slot that asked longest ago is forgotten.
pub const REPLIES_KEPT: usize = 16_384;
/// Backing files that a daemon keeps open for processes of other nodes, a descriptor each; more are opened anew for
/// each request, and do not outlive their names.
pub const BACKING_OPEN_MAX: usize = 4096;
/// Locks of processes of other nodes on a daemon's backing files, by owner: a descriptor each. More fail with ENOLCK.
pub const REMOTE_LOCK_OWNERS_MAX: usize = 4096;
/// Owners of which a daemon knows that they have let go of all their locks: what they asked for and what comes late is
/// not granted. More than let go within the time that a message may take; 2 MiB.
pub const LOCK_OWNERS_OVER_KEPT: usize = 16_384;
/// So long a process keeps others from writing at the end of a file of several backing files, if it does not say that
/// it has written: longer than it may take, which is [`APPEND_MS`] to find the end, and a request's time to write.
pub const APPEND_HOLD_MS: u64 = 60_000;
/// A process that has not found the end after so long gives up, and one that waits for another to write.
pub const APPEND_MS: u64 = 20_000;
/// Groups of processes that opened a file together over several nodes, of those whose first backing file a daemon has,
/// 64 bytes each. More open as well, without a shared file pointer and atomic mode.
pub const GROUPS_MAX: usize = 4096;
/// Locks of groups that are held at a daemon at the same time, 64 bytes each; more wait.
pub const GROUP_LOCKS_MAX: usize = 4096;
/// Who waits for a group's lock and has not asked again for so long loses its place: many times the pause between two
/// asks.
pub const GROUP_PLACE_MS: u64 = 100;
/// A process's locks on other nodes' files go when its node could not be asked for it ([`SESSIONS_PERIOD_MS`]) for so
/// long: it is taken for dead.
pub const LOCKS_OF_UNREACHED_MS: u64 = 60_000;
/// Nodes of a pool: a bound for a mistaken pool file; node numbers go further.
pub const NODES_MAX: usize = 1024;
/// Remote shells that `forebay up` and `down` have under way: 512 nodes take eight rounds of a second, and one host's
/// process table and its name service bear so many.
pub const REMOTE_SHELLS_MAX: usize = 64;
/// A request to another node that is not answered in so long fails with EIO: longer than a node is taken for
/// unreachable (5 s), shorter than [`CALL_TIMEOUT_MS`].
pub const NODE_TIMEOUT_MS: u64 = 25_000;
/// A request that meets a change over several nodes which is under way is tried again for so long, then it fails with
/// EBUSY: such a change takes some messages, unless a node is down.
pub const TRANSACTION_TIMEOUT_MS: u64 = 8_000;
/// Who has prepared a part asks its coordinator after so long without a word, and again: several times what a busy node
/// takes.
pub const DOUBT_AFTER_MS: u64 = 1_000;
/// What a node could not be told is told again after so long, or as soon as it is reached again.
pub const DELIVERY_AGAIN_MS: u64 = 2_000;
/// Deliveries that a daemon has under way: some slots of its 64 stay free for what its clients wait for.
pub const DELIVERIES_AHEAD: usize = 48;
/// And so many of them to one node: one that falls silent takes no more with it until that is known.
pub const DELIVERIES_AHEAD_NODE: usize = 16;
/// And so many to nodes that did not answer last time, one each: most slots are for those that answer.
pub const DELIVERIES_AHEAD_SILENT: usize = 8;
/// A request that meets names which a change over several nodes holds waits so long, then it fails with EIO: whoever
/// could end that change is down. Less than [`NODE_TIMEOUT_MS`].
pub const HELD_TIMEOUT_MS: u64 = 10_000;
/// A directory is listed as it is after so long, whatever is held in it: half a listing is no use to anybody.
pub const HELD_LIST_TIMEOUT_MS: u64 = 1_000;
/// What one node asks of another for a change over several is given up after so long.
pub const STEP_TIMEOUT_MS: u64 = 10_000;
/// How long a node may believe what another told it of directories. A node that dies holds up a rename, removal or
/// chmod of a directory by this much at most; it takes a request a third of this for each pair of nodes.
pub const LEASE_MS: u64 = 3_000;
/// Names and directories that a node keeps of one other node by lease; at one more it forgets all of them and begins
/// anew.
pub const LEASED_MAX: usize = 65_536;
/// Processes that a node asks another about at once: 4 KiB of a message.
pub const SESSIONS_ASKED_MAX: usize = 512;
/// Backing files that one request has removed: 8 KiB of a message, and no longer than a few milliseconds of a data
/// thread.
pub const REMOVED_AT_ONCE_MAX: usize = 512;
/// A node asks the others so often whether processes of theirs are there that it keeps something for: what nobody told
/// it, as a node or a link was down, is kept no longer than this beyond the node's return.
pub const SESSIONS_PERIOD_MS: u64 = 60_000;
/// Processes of other nodes of which a daemon knows that they are over: what they asked and what comes late is not
/// done. More than end within the time that a message may take; 100 KiB.
pub const SESSIONS_ENDED_KEPT: usize = 4096;
/// Requests that one ring may put into one batch, so that a process with 64 threads does not starve the others.
pub const BATCH_PER_RING: usize = 8;
/// Requests of one batch (one LMDB transaction): bounds the time to the first acknowledgement.
pub const BATCH_MAX: usize = 64;
/// Rings of one daemon: processes of one node that use the pool at the same time. Each maps its slots on both sides.
pub const RINGS_MAX: usize = 4096;

/// A target of which so many percent are used gets no new files while another has room: what is open on it can still
/// grow.
pub const HIGH_WATER_PERCENT: u64 = 90;

/// A client may leave a removed file's backing file for a moment while half of its target is free, and so much. That is
/// more than programs write in [`ROOM_LOOK_MS`] and the few milliseconds after which the daemon unlinks it.
pub const ROOM_TO_SPARE_BYTES: u64 = 1 << 30;
/// The same in inodes, on file systems that limit them.
pub const ROOM_TO_SPARE_INODES: u64 = 1 << 16;
/// A client that leaves backing files looks this often whether their target still has that room.
pub const ROOM_LOOK_MS: u64 = 1;

/// Longest name that the board holds; longer ones are asked for. With the fields in front it fills two cache lines.
pub const BOARD_NAME_MAX: usize = 88;
/// Smallest and largest board: a few thousand entries, and some two million.
pub const BOARD_BYTES_MIN: u64 = 1 << 20;
/// See [`BOARD_BYTES_MIN`].
pub const BOARD_BYTES_MAX: u64 = 512 << 20;
/// The board gets this fraction of a pool's capacity, within the bounds above.
pub const BOARD_FRACTION: u64 = 32;
/// Directory entries a reader collects in one readdir request.
pub const READDIR_REPLY_BYTES: usize = 32 * 1024;

/// Pages (4 KiB) of the shard that are fallocated before a transaction that creates begins: a batch of
/// [`BATCH_MAX`] operations touches fewer.
pub const SHARD_PAGES_AHEAD: u64 = 4096;
/// Pages that only removals may use, so that a full pool can always be emptied.
pub const SHARD_PAGES_FOR_REMOVALS: u64 = 1024;

/// Threads that do a process's asynchronous reads and writes: enough to keep a node's memory busy from one process.
pub const ASYNC_THREADS: usize = 4;
/// Asynchronous reads and writes that wait to begin; one more is EAGAIN.
pub const ASYNC_QUEUE_MAX: usize = 4096;
/// A file that is to get one backing file is tried so often, a millisecond apart, before it is said to be open
/// elsewhere: a program that has just closed it may have a child between fork and exec, which has it open that long.
pub const LEASE_TRIES: u32 = 20;
/// A call that gets no answer for so long fails with EIO, whatever it waits for: a free slot, its own node's worker,
/// which may be stopped, or another node. Longer than a worker's restart on a loaded node.
pub const CALL_TIMEOUT_MS: u64 = 30_000;
/// A waiting client looks this often whether the daemon's socket still answers.
pub const LIVENESS_PERIOD_MS: u64 = 500;
/// The daemon looks at every ring this often even when its doorbell is silent, as a client may have scribbled on it.
pub const DOORBELL_POLL_MS: u64 = 50;

/// Smallest pool: the shard's reserve, the board and some data.
pub const CAPACITY_BYTES_MIN: u64 = 64 << 20;
/// Default capacity, in percent of what is free: of memory half, for the job itself needs the rest; of an SSD most.
pub const CAPACITY_DRAM_PERCENT: u64 = 50;
/// See [`CAPACITY_DRAM_PERCENT`].
pub const CAPACITY_SSD_PERCENT: u64 = 80;
/// Memory that a capacity leaves free, in percent of the node's or the cgroup's: what the daemon, its clients' buffers
/// and the kernel's own tables take before writers would meet the OOM killer.
pub const MEMORY_RESERVE_PERCENT: u64 = 6;
/// The least of it: the daemon's resident set with its board and rings.
pub const MEMORY_RESERVE_BYTES_MIN: u64 = 64 << 20;

/// A backing file in memory that grows by small writes gets its space in windows of at most this: a huge page of
/// x86-64.
pub const AHEAD_BYTES_MAX: u64 = 2 << 20;
/// No window is smaller: what a small file may waste.
pub const AHEAD_BYTES_MIN: u64 = 64 << 10;
/// Writes of this and more get large pages by themselves, and would pay for the zeros that fill a window first.
pub const AHEAD_WRITE_BYTES_MAX: usize = 256 << 10;

/// A gap between two ranges of a file that are read in one call is read too if it is no longer: as long as a call for
/// itself takes where calls are dear (`client/gaps.rs`).
pub const GAP_BYTES_MAX: usize = 8 << 10;
/// The same on another node, where a call is a request.
pub const GAP_BYTES_MAX_ELSEWHERE: usize = 64 << 10;
/// What is read at once of small ranges that are near each other, into a buffer of the process: it stays in the cache.
pub const SIEVE_BUFFER_BYTES: usize = 1 << 20;
/// So many ranges are read by the buffer.
pub const SIEVE_PIECES_MIN: usize = 4;
/// And ranges that are no longer, on average: a longer one is copied once by the kernel in less time than twice.
pub const SIEVE_BYTES_MAX: usize = 16 << 10;
/// Pieces for one backing file from which on two system calls and a pipe for all cost less than one for each.
pub const SCATTER_PIECES_MIN: usize = 24;
/// Pieces that are longer on average are written each by itself: a call costs little beside the copy.
pub const SCATTER_BYTES_MAX: usize = 16 << 10;
/// How many times as long as the pieces their range may be. A page that a mapping takes is a huge one where the file
/// has room for it, so that pieces far apart would fill a medium with space that nobody writes; 16 ranks of a node that
/// take turns may.
pub const SCATTER_SPREAD_MAX: u64 = 16;
/// What is mapped of a backing file at one time: some milliseconds of writing, and a small part of an address space.
pub const SCATTER_WINDOW_BYTES: u64 = 64 << 20;
/// Pieces of ranges that are sorted by their backing files at one time: 200 KiB of lists.
pub const RUN_PIECES_MAX: usize = 4096;

/// Locks that wait through a mount at one time; more fail with ENOLCK. Each is a thread of a program, so that a node of
/// any size has room, and all are tried again every 20 ms at a microsecond each.
pub const LOCK_WAITS_MAX: usize = 1024;
/// Owners of locks through a mount: each has a descriptor in the mount's process. More fail with ENOLCK.
pub const LOCK_OWNERS_MAX: usize = 16 * 1024;
/// The same as a share of the descriptors that the process may have: one part in so many, as open files need them too.
pub const LOCK_OWNERS_PART: usize = 4;
/// Interrupts through a mount that are remembered until the request comes which they name. It is on its way then, so
/// that only interrupts which came in those microseconds lie between.
pub const INTERRUPTS_KEPT: usize = 256;
/// Bytes that one request to a mount copies (copy_file_range): some milliseconds of one of its threads. The caller gets
/// less than it asked for and goes on.
pub const COPY_BYTES_MAX: usize = 16 << 20;

/// Nodes that a directory's entries lie on at most: beyond, a listing of a small directory asks more nodes than it has
/// entries, and its removal takes more messages than filling it.
pub const WIDTH_MAX: usize = 16;
/// Wide directories whose parts a daemon remembers: 160 bytes each. When there are more it begins to learn them anew.
pub const WIDE_KNOWN_MAX: usize = 16 * 1024;

/// Directories of a pool that preloaded programs watch with inotify at the same time. Each has a mirror in the pool's
/// directory, and a number below the daemon's limit of descriptors while a watch is added.
pub const WATCHED_DIRECTORIES_MAX: usize = 1024;
/// Names in all mirrors together: an empty file of about 1 KiB of kernel memory, and 300 bytes of the daemon's, for
/// each.
pub const WATCHED_NAMES_MAX: usize = 128 * 1024;
/// Changes that wait to be made in mirrors, at about 100 bytes each. Beyond, the changes come faster than mirrors can
/// follow, and all watches end.
pub const WATCH_CHANGES_MAX: usize = 128 * 1024;
/// How often the daemon checks whether watches of a mirror remain. The kernel raises nothing when the last one goes.
pub const WATCH_REVIEW_MS: u64 = 2_000;
/// Pause between two looks for changed contents of watched files: a writer wakes the daemon 100 times a second at most.
pub const WATCH_CONTENTS_MS: u64 = 10;

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

/// The bit of a lock owner's number that says that no two processes of a node have the same one: such an owner is known
/// under any session of its node. Process numbers have 22 bits, so that it is free.
pub const LOCK_OWNER_OF_NODE: u64 = 1 << 63;
