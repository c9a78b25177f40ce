//! Asynchronous puts to and gets from volumes. Those that wait for one piece on another node are executed together, as one
//! transfer with many requests in progress: an I/O thread sleeps and wakes once for all, and the daemons of both nodes have
//! requests that travel in one message. Any other put or get is a job for itself.
//!
//! Calls that are executed together end together. If one is refused, each is repeated by itself, and ends with its own result.
//! If one of several puts fails with EIO, all of them fail. They cannot be repeated: the first attempt may still write later,
//! over what the program has put there since. If one of several gets fails with EIO, each is repeated, unless the node did
//! not answer: then each would wait as long again. Puts to thin pieces, which are refused when there
//! is no space, are not executed together: nothing that has succeeded is executed again for that.
//!
//! Locks: that of the waiting transfers, and under it that of the I/O threads' queue. None is held while calls are executed.

use std::collections::VecDeque;
use std::os::raw::c_void;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ::forebay_volume::{Access, Striped};
use forebay_client::InUse;
use forebay_types::limits::{ASYNC_QUEUE_MAX, ASYNC_THREADS, BACKING_AHEAD, MOVE_BYTES_MAX};
use forebay_types::BackingId;

use crate::answer::{call, Failed};
use crate::completion_queue::{Ended, Queue};
use crate::io_threads::{self, lock};
use crate::per_process::PerProcess;

/// Calls that are executed together: as many as a transfer has in progress.
const TOGETHER_MAX: usize = BACKING_AHEAD;
/// Waiting calls among which those that go with the first are looked for.
const LOOKED_AT_MAX: usize = 64;
/// Bytes of such calls: a longer call keeps the network busy by itself.
const TOGETHER_BYTES_MAX: usize = BACKING_AHEAD * MOVE_BYTES_MAX;

/// Gets that failed with EIO after this time have waited for a node that does not answer. An answer takes milliseconds; a
/// node that is silent is waited for until it is declared unreachable.
const WAITED: Duration = Duration::from_secs(1);

/// A put or get that was started.
pub(crate) struct Transfer {
    pub(crate) volume: Arc<Striped>,
    pub(crate) access: Access,
    pub(crate) puts: bool,
    /// Its memory, if the library knows it.
    pub(crate) in_use: Option<InUse>,
    pub(crate) queue: Arc<Queue>,
    /// The caller's pointer.
    pub(crate) state: *mut c_void,
}

// SAFETY: the caller promises that the memory stays valid and unused until the completion; the pointer is only passed on.
unsafe impl Send for Transfer {}

/// A transfer that waits, and the piece that has all of its bytes.
struct ForPiece {
    transfer: Transfer,
    piece: BackingId,
}

#[derive(Default)]
struct Waiting {
    transfers: VecDeque<ForPiece>,
    /// So many at the front were refused together, and are executed one by one.
    alone: usize,
    /// Jobs of the I/O threads that will take transfers, and those that execute some.
    takers: usize,
    busy: usize,
}

static WAITING: PerProcess<Mutex<Waiting>> = PerProcess::new();

impl ForPiece {
    /// True if one transfer can have both.
    fn goes_with(&self, other: &ForPiece) -> bool {
        let (one, two) = (&self.transfer, &other.transfer);
        let is_same_memory = match (&one.in_use, &two.in_use) {
            (None, None) => true,
            (Some(one), Some(two)) => one.is_of_same(two),
            _ => false,
        };
        let is_same_kind = self.piece == other.piece && one.puts == two.puts;
        is_same_kind && is_same_memory && Arc::ptr_eq(&one.volume, &two.volume)
    }
}

impl Waiting {
    /// Takes the next transfers: one, or those that are executed together.
    fn take(&mut self) -> Vec<ForPiece> {
        let Some(first) = self.transfers.pop_front() else { return Vec::new() };
        let (mut bytes, mut taken) = (first.transfer.access.bytes, vec![first]);
        if self.alone > 0 {
            self.alone -= 1;
            return taken;
        }
        let mut index = 0;
        while index < self.transfers.len().min(LOOKED_AT_MAX) && taken.len() < TOGETHER_MAX {
            let next = &self.transfers[index];
            let sum = bytes + next.transfer.access.bytes;
            if sum <= TOGETHER_BYTES_MAX && next.goes_with(&taken[0]) {
                bytes = sum;
                taken.extend(self.transfers.remove(index));
            } else {
                index += 1;
            }
        }
        taken
    }

    /// Has another I/O thread take transfers, if those that will do not take all that wait.
    fn call_taker(&mut self) -> Result<(), Failed> {
        let ready = self.takers - self.busy;
        let takes = if self.alone > 0 { ready } else { ready * TOGETHER_MAX };
        if self.takers == ASYNC_THREADS || takes >= self.transfers.len() {
            return Ok(());
        }
        let called = io_threads::start(Box::new(serve));
        self.takers += usize::from(called.is_ok());
        match called {
            Err(failed) if self.takers == 0 => Err(failed),
            _ => Ok(()),
        }
    }
}

/// Has an I/O thread execute a put or get.
///
/// # Errors
/// EAGAIN when too many wait, or no thread can be started: it is not executed.
pub(crate) fn start(transfer: Transfer) -> Result<(), Failed> {
    let Access { offset, bytes, .. } = transfer.access;
    let Some(piece) = transfer.volume.far_piece(offset, bytes, transfer.puts) else {
        return io_threads::start(Box::new(move || {
            let result = execute(std::slice::from_ref(&transfer));
            end(vec![transfer], result);
        }));
    };
    let mut waiting = lock(WAITING.get());
    if waiting.transfers.len() >= ASYNC_QUEUE_MAX {
        return Err(Failed::errno(libc::EAGAIN));
    }
    waiting.transfers.push_back(ForPiece { transfer, piece });
    waiting.call_taker().inspect_err(|_| drop(waiting.transfers.pop_back()))
}

/// Executes waiting transfers, until none is left or other jobs of the I/O threads wait.
fn serve() {
    let mut waiting = lock(WAITING.get());
    loop {
        let taken = waiting.take();
        if taken.is_empty() {
            waiting.takers -= 1;
            return;
        }
        waiting.busy += 1;
        // If none can be called, this one goes on with the others.
        let _ = waiting.call_taker();
        drop(waiting);
        let (pieces, transfers): (Vec<_>, Vec<_>) =
            taken.into_iter().map(|ForPiece { transfer, piece }| (piece, transfer)).unzip();
        let since = Instant::now();
        let result = execute(&transfers);
        if transfers.len() == 1 || !are_repeated(transfers[0].puts, result, since.elapsed()) {
            end(transfers, result);
            waiting = lock(WAITING.get());
        } else {
            waiting = lock(WAITING.get());
            waiting.alone += transfers.len();
            for (transfer, piece) in transfers.into_iter().zip(pieces).rev() {
                waiting.transfers.push_front(ForPiece { transfer, piece });
            }
        }
        waiting.busy -= 1;
        // Other jobs have their turn, and this one another after them.
        let is_left = !waiting.transfers.is_empty();
        if is_left && io_threads::are_jobs_waiting() && io_threads::start(Box::new(serve)).is_ok() {
            return;
        }
    }
}

/// True if puts or gets that were executed together, and had this result after some time, are repeated one by one.
fn are_repeated(puts: bool, result: i64, took: Duration) -> bool {
    match result {
        0 => false,
        failed if failed == -i64::from(libc::EIO) => !puts && took < WAITED,
        _ => true,
    }
}

/// Executes transfers that go together, or one. Returns the result: 0, or a negative errno.
fn execute(transfers: &[Transfer]) -> i64 {
    let accesses: Vec<Access> = transfers.iter().map(|transfer| transfer.access).collect();
    call(|| {
        let Some(first) = transfers.first() else { return Ok(0) };
        // SAFETY: see `Transfer`.
        unsafe {
            match first.puts {
                true => first.volume.put_all(&accesses)?,
                false => first.volume.get_all(&accesses)?,
            }
        }
        Ok(0usize)
    })
}

/// Ends transfers, those of one queue together.
fn end(transfers: Vec<Transfer>, result: i64) {
    let mut all: Vec<(Arc<Queue>, Vec<Ended>)> = Vec::new();
    for Transfer { volume, in_use, queue, state, .. } in transfers {
        // The volume may be closed, and the memory freed, from here on.
        drop((volume, in_use));
        let ended = Ended { state, result, was: 0 };
        match all.iter_mut().find(|(of, _)| Arc::ptr_eq(of, &queue)) {
            Some((_, some)) => some.push(ended),
            None => all.push((queue, vec![ended])),
        }
    }
    all.into_iter().for_each(|(queue, ended)| queue.end(ended.into_iter()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::OwnedFd;
    use std::sync::Condvar;

    use ::forebay_volume::{memory_at, Far, FarRange, Mapped};
    use forebay_types::{
        target_of, AtomicOp, BackingId, Code, Ino, NodeId, PieceWord, Segment, Targets, Volume,
    };

    use crate::completion_queue::{forebay_queue, queue_close, queue_create, queue_wait};
    use crate::header::forebay_completion;

    const BYTES: u64 = 1 << 20;
    /// Bytes of each call.
    const EACH: usize = 5000;
    /// The call that fails, and that its list.
    const BAD: usize = 3;

    #[derive(Default)]
    struct Gate {
        is_open: bool,
        waiting: usize,
        /// The number of ranges of each access.
        accesses: Vec<usize>,
    }

    /// Another node, whose accesses begin when its gate is open.
    #[derive(Default)]
    struct Node {
        gate: Mutex<Gate>,
        changed: Condvar,
        bytes: Mutex<Vec<u8>>,
        /// With what accesses to the place of [`BAD`] fail.
        failure: Mutex<Option<Code>>,
    }

    impl std::fmt::Debug for Node {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Node")
        }
    }

    impl Node {
        fn access(&self, ranges: &[FarRange], mut copy: impl FnMut(&mut [u8], usize)) -> Result<(), Code> {
            let mut gate = lock(&self.gate);
            gate.waiting += 1;
            self.changed.notify_all();
            gate = self.changed.wait_while(gate, |gate| !gate.is_open).unwrap();
            gate.waiting -= 1;
            gate.accesses.push(ranges.len());
            drop(gate);
            let is_bad = |range: &FarRange| range.offset == (BAD * EACH) as u64;
            if let Some(code) = lock(&self.failure).filter(|_| ranges.iter().any(is_bad)) {
                return Err(code);
            }
            let mut bytes = lock(&self.bytes);
            bytes.resize(BYTES as usize, 0);
            ranges
                .iter()
                .for_each(|range| copy(&mut bytes[range.offset as usize..][..range.bytes], range.at));
            Ok(())
        }

        fn set_open(&self, is_open: bool) {
            lock(&self.gate).is_open = is_open;
            self.changed.notify_all();
        }

        fn waits_for(&self, count: usize) {
            drop(self.changed.wait_while(lock(&self.gate), |gate| gate.waiting < count).unwrap());
        }
    }

    impl Far for Node {
        unsafe fn get(&self, ranges: &[FarRange], to: *mut u8) -> Result<(), Code> {
            // SAFETY: the caller's promise.
            self.access(ranges, |bytes, at| unsafe {
                memory_at(to, at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            })
        }

        unsafe fn put(&self, ranges: &[FarRange], from: *const u8) -> Result<(), Code> {
            // SAFETY: the caller's promise.
            self.access(ranges, |bytes, at| unsafe {
                bytes.as_mut_ptr().copy_from_nonoverlapping(memory_at(from, at), bytes.len());
            })
        }

        fn discard(&self, _: BackingId, _: u64, _: u64) -> Result<(), Code> {
            unreachable!("nothing is discarded")
        }

        fn allocated(&self, _: BackingId) -> Result<u64, Code> {
            unreachable!("no piece is thin")
        }

        fn atomic(&self, _: BackingId, _: PieceWord, _: AtomicOp) -> Result<u64, Code> {
            unreachable!("no word is changed")
        }

        fn check(&self) -> Result<(), Code> {
            Ok(())
        }

        fn reason(&self) -> Option<String> {
            None
        }
    }

    /// A volume of one piece, which is there.
    fn volume(node: &Arc<Node>, is_thin: bool) -> Arc<Striped> {
        let targets = Targets::new(&[target_of(NodeId(2), 0)]).unwrap();
        let volume = Volume {
            ino: Ino(9),
            uid: 0,
            gid: 0,
            mode: 0o600,
            created_seconds: 0,
            maker: 0,
            complete: 1,
            numbers: vec![0],
            next_number: 1,
            segments: vec![Segment::new(BYTES, 4096, targets).unwrap().thin(is_thin)],
        };
        let far: Arc<dyn Far> = node.clone();
        let mapped = Mapped::new(&volume, true, (None, Some(far)), |_, _| Ok(None::<OwnedFd>)).unwrap();
        Arc::new(Striped::new(vec![mapped]).unwrap())
    }

    struct Calls {
        node: Arc<Node>,
        volume: Arc<Striped>,
        queue: *mut forebay_queue,
        /// The memory of each call, which is its own. The last are those that take the threads.
        memories: Vec<Vec<u8>>,
    }

    impl Calls {
        fn start(&mut self, index: usize, puts: bool) {
            let memory = self.memories[index].as_mut_ptr();
            let access = Access { offset: (index * EACH) as u64, memory, bytes: EACH };
            // SAFETY: open.
            let queue = unsafe { &*self.queue }.shared();
            queue.begin();
            let (volume, state) = (Arc::clone(&self.volume), index as *mut c_void);
            start(Transfer { volume, access, puts, in_use: None, queue, state }).unwrap();
        }

        /// Starts calls while others have all threads. Returns their results.
        fn start_together(&mut self, puts: bool) -> Vec<i64> {
            let all = self.memories.len();
            self.node.set_open(false);
            lock(&self.node.gate).accesses.clear();
            for (n, index) in (TOGETHER_MAX..all).enumerate() {
                self.start(index, puts);
                self.node.waits_for(n + 1);
            }
            (0..TOGETHER_MAX).for_each(|index| self.start(index, puts));
            self.node.set_open(true);
            let mut results = vec![None; all];
            while results.contains(&None) {
                let mut done =
                    [0; 3].map(|was| forebay_completion { state: std::ptr::null_mut(), result: 0, was });
                // SAFETY: open.
                let n = queue_wait(unsafe { &*self.queue }, &mut done, 60_000).unwrap();
                assert!(n > 0, "{results:?}");
                for one in &done[..n as usize] {
                    assert_eq!(results[one.state as usize].replace(one.result), None, "it ends once");
                }
            }
            results.into_iter().flatten().collect()
        }
    }

    #[test]
    fn transfers_that_wait_are_executed_together_and_each_ends_once_with_its_own_result() {
        let node = Arc::new(Node::default());
        let mut queue = std::ptr::null_mut();
        queue_create(0, Some(&mut queue)).unwrap();
        let all = TOGETHER_MAX + ASYNC_THREADS;
        let memories = (0..all).map(|index| vec![index as u8 + 1; EACH]).collect();
        let mut calls = Calls { volume: volume(&node, false), node: Arc::clone(&node), queue, memories };
        for (puts, is_thin, failure) in [
            (true, false, None),
            (false, false, None),
            (true, false, Some(Code::AccessDenied)),
            (false, false, Some(Code::Range)),
            (false, false, Some(Code::Io)),
            (true, false, Some(Code::Io)),
            (true, true, Some(Code::NoSpace)),
            (false, true, None),
        ] {
            *lock(&node.failure) = failure;
            calls.volume = volume(&node, is_thin);
            let results = calls.start_together(puts);
            let all_fail = puts && failure == Some(Code::Io);
            let fails = |index| index == BAD || all_fail && index < TOGETHER_MAX;
            let errno = failure.map_or(0, |code| -i64::from(code.errno()));
            assert!(
                (0..all).map(|index| if fails(index) { errno } else { 0 }).eq(results.iter().copied()),
                "{results:?}"
            );
            let mut accesses = std::mem::take(&mut lock(&node.gate).accesses);
            accesses.sort_unstable();
            // What is refused is repeated, one by one. A put that may still write is not.
            let alone = if failure.is_some() && !all_fail { all } else { ASYNC_THREADS };
            let together = if puts && is_thin { &[][..] } else { &[TOGETHER_MAX] };
            assert_eq!(accesses, [&vec![1; alone][..], together].concat(), "{puts} {is_thin} {failure:?}");
            for (index, memory) in calls.memories.iter_mut().enumerate() {
                assert!(memory.iter().all(|byte| *byte == index as u8 + 1), "{index}");
                // What is got next is what was put.
                if puts && failure.is_none() {
                    memory.fill(0);
                }
            }
        }
        // SAFETY: not used again.
        unsafe { queue_close(queue) }.unwrap();
    }

    #[test]
    fn gets_that_waited_for_a_silent_node_are_not_repeated() {
        let eio = -i64::from(libc::EIO);
        assert!(are_repeated(false, eio, Duration::ZERO) && !are_repeated(false, eio, WAITED));
        assert!(!are_repeated(true, eio, Duration::ZERO) && !are_repeated(false, 0, Duration::ZERO));
        assert!(are_repeated(true, -i64::from(libc::EACCES), WAITED));
    }
}
