//! Completion queues: `forebay_queue` of include/forebay.h. Each asynchronous call that was started on a volume ends with one
//! completion in one. The queue's eventfd is readable while completions wait in it.
//!
//! Calls that an I/O thread executes are ended by it. Those that are posted are ended by who waits for completions: one
//! thread at a time looks which are answered, takes their replies, and sleeps until the oldest is answered. Another thread
//! that has something for the queue wakes it. A program that waits for the eventfd does not wait in the queue, so an I/O
//! thread ends what is posted when the program asks for the eventfd, and nothing is posted after that.
//!
//! Locks: one of each queue. None is held while replies are taken.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::raw::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_client::call_clock;
use forebay_sys::wait::Sleeper;
use forebay_types::limits::LIVENESS_PERIOD_MS;

use crate::answer::{Failed, FAULT, INVALID};
use crate::header::{forebay_completion, FOREBAY_QUEUE_SPIN};
use crate::io_threads::{self, lock};

type Done = Result<(), Failed>;

/// Who sleeps until the oldest posted call is answered looks at the others after this time: they may be of other nodes. The
/// time is doubled up to the longest as long as none is answered.
const SLEEP_FIRST: Duration = Duration::from_millis(1);
const SLEEP_LONGEST: Duration = Duration::from_millis(16);
/// Looks of a queue that spins between two in which it sees what else has come.
const SPINS: usize = 256;

/// Longer than anything is waited for without a look.
const WAIT_LONGEST: Duration = Duration::from_secs(3600);

/// A completion queue.
#[allow(non_camel_case_types)]
pub struct forebay_queue(Arc<Queue>);

impl forebay_queue {
    /// It, for a call that ends after this.
    pub(crate) fn shared(&self) -> Arc<Queue> {
        Arc::clone(&self.0)
    }
}

/// A call that was posted, and is ended by who waits in its queue.
pub(crate) trait Posted: Send {
    /// True if [`Posted::end`] will not wait.
    fn is_answered(&self) -> bool;
    /// What to sleep on until it is answered.
    fn sleeper(&self) -> Sleeper<'static>;
    /// True if it will not be answered any more, if none was since a time.
    fn is_lost(&self, since_ns: u64) -> bool;
    /// Ends it. `None` if it was given to an I/O thread, which will.
    fn end(self: Box<Self>) -> Option<Ended>;
}

/// See [`forebay_queue`].
pub(crate) struct Queue {
    state: Mutex<State>,
    arrived: Condvar,
    /// What [`State::ends_wait`] says: for those who spin.
    ends_wait: AtomicBool,
    event: OwnedFd,
    spins: bool,
}

#[derive(Default)]
struct State {
    done: VecDeque<Ended>,
    /// Calls that have not ended.
    pending: usize,
    /// Those of them that are posted, and that no thread looks at just now, the oldest first.
    posted: Vec<Box<dyn Posted>>,
    /// A thread looks at posted calls, or sleeps until one is answered.
    has_looker: bool,
    /// What it sleeps on.
    asleep: Option<Sleeper<'static>>,
    /// Threads that wait for another one to have ended something.
    waiting: usize,
    looked: Looked,
    /// The program has the eventfd.
    is_watched: bool,
}

/// A completion.
pub(crate) struct Ended {
    /// The caller's pointer.
    pub(crate) state: *mut c_void,
    /// 0, or a negative errno.
    pub(crate) result: i64,
    /// What the word of an atomic operation was.
    pub(crate) was: u64,
}

// SAFETY: the library only passes the caller's pointer on.
unsafe impl Send for Ended {}

impl State {
    /// True if completions wait, or there is nothing to wait for.
    fn ends_wait(&self) -> bool {
        !self.done.is_empty() || self.pending == 0
    }
}

/// When posted calls of a queue were looked at, by the clock of calls.
#[derive(Clone, Copy, Default)]
struct Looked {
    /// When one was answered last, as far as was seen.
    answered_ns: u64,
    /// When it was checked last that there will be answers.
    checked_ns: u64,
}

impl Looked {
    /// Ends those calls that are answered, or will not be. Returns those completions that are there, and how many calls it
    /// has ended or handed over.
    fn end_some(&mut self, posted: &mut Vec<Box<dyn Posted>>) -> (Vec<Ended>, usize) {
        let now = call_clock();
        let is_check = now - self.checked_ns >= LIVENESS_PERIOD_MS * 1_000_000;
        let (mut ended, all) = (Vec::new(), posted.len());
        let (over, kept): (Vec<_>, Vec<_>) = std::mem::take(posted)
            .into_iter()
            .partition(|one| one.is_answered() || (is_check && one.is_lost(self.answered_ns)));
        *posted = kept;
        over.into_iter().for_each(|one| ended.extend(one.end()));
        let left = all - posted.len();
        if left > 0 {
            self.answered_ns = now;
        }
        if left > 0 || is_check {
            self.checked_ns = now;
        }
        (ended, left)
    }
}

impl Queue {
    /// Begins a call.
    pub(crate) fn begin(&self) {
        let mut state = lock(&self.state);
        state.pending += 1;
        self.tell_spinning(&state);
    }

    /// A call that was begun was not started.
    pub(crate) fn cancel(&self) {
        let mut state = lock(&self.state);
        state.pending -= 1;
        self.tell_spinning(&state);
        self.wake(&state);
        drop(state);
        self.arrived.notify_all();
    }

    /// True if a call that was begun may be posted: somebody will wait in the queue for it.
    pub(crate) fn takes_posted(&self) -> bool {
        !lock(&self.state).is_watched
    }

    /// Takes over a call that was posted.
    pub(crate) fn post(self: &Arc<Self>, posted: Box<dyn Posted>) {
        let mut state = lock(&self.state);
        if state.posted.is_empty() && !state.has_looker {
            state.looked.checked_ns = call_clock();
        }
        state.posted.push(posted);
        let has_nobody = state.waiting > 0 && !state.has_looker;
        let is_watched = state.is_watched;
        drop(state);
        if has_nobody {
            self.arrived.notify_one();
        }
        // The program has got the eventfd since it was asked.
        if is_watched && self.have_ended().is_err() {
            self.end_posted();
        }
    }

    /// Has an I/O thread end what is posted.
    fn have_ended(self: &Arc<Self>) -> Done {
        let shared = Arc::clone(self);
        io_threads::start(Box::new(move || shared.end_posted()))
    }

    /// Ends calls. They are counted as pending until here, so that a wait does not end before.
    pub(crate) fn end(&self, ended: impl ExactSizeIterator<Item = Ended>) {
        let mut state = lock(&self.state);
        self.has_ended(&mut state, ended);
        self.wake(&state);
        drop(state);
        self.arrived.notify_all();
    }

    fn has_ended(&self, state: &mut State, ended: impl ExactSizeIterator<Item = Ended>) {
        if ended.len() == 0 {
            return;
        }
        state.pending -= ended.len();
        state.done.extend(ended);
        self.tell_spinning(state);
        if state.is_watched {
            self.tell_watching();
        }
    }

    /// Makes the eventfd readable.
    fn tell_watching(&self) {
        let one = 1u64;
        // SAFETY: the word lives over the call. It fails only when the counter is full, and then the eventfd is readable.
        unsafe { libc::write(self.event.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Wakes the thread that sleeps until a posted call is answered.
    fn wake(&self, state: &State) {
        state.asleep.iter().for_each(Sleeper::wake);
    }

    /// Tells those who spin what the state is.
    fn tell_spinning(&self, state: &State) {
        self.ends_wait.store(state.ends_wait(), Ordering::Release);
    }

    /// Takes completions, as many as there is room for.
    fn take(&self, state: &mut State, out: &mut [forebay_completion]) -> usize {
        let count = out.len().min(state.done.len());
        for (out, ended) in out.iter_mut().zip(state.done.drain(..count)) {
            *out = forebay_completion { state: ended.state, result: ended.result, was: ended.was };
        }
        self.tell_spinning(state);
        if state.done.is_empty() && state.is_watched {
            let mut word = 0u64;
            // SAFETY: the word is writable for the call, which does not wait.
            unsafe { libc::read(self.event.as_raw_fd(), (&raw mut word).cast(), 8) };
        }
        // What is left is another's, who may wait for this thread.
        if state.waiting > 0 && state.pending == 0 {
            self.arrived.notify_all();
        } else if state.waiting > 0 && !(state.done.is_empty() && state.posted.is_empty()) {
            self.arrived.notify_one();
        }
        count
    }

    /// Ends posted calls that are answered, if no other thread does. Returns whether any has ended.
    fn look<'q>(&'q self, mut state: MutexGuard<'q, State>) -> (MutexGuard<'q, State>, bool) {
        if state.has_looker || state.posted.is_empty() {
            return (state, false);
        }
        state.has_looker = true;
        let (mut mine, mut looked) = (std::mem::take(&mut state.posted), state.looked);
        drop(state);
        let (mut ended, mut left) = looked.end_some(&mut mine);
        for _ in 0..if self.spins { SPINS } else { 0 } {
            if left > 0 || self.ends_wait.load(Ordering::Acquire) {
                break;
            }
            std::hint::spin_loop();
            if mine.iter().any(|one| one.is_answered()) {
                (ended, left) = looked.end_some(&mut mine);
            }
        }
        let mut state = lock(&self.state);
        // Those that were posted meanwhile are younger.
        mine.append(&mut state.posted);
        (state.posted, state.looked, state.has_looker) = (mine, looked, false);
        self.has_ended(&mut state, ended.into_iter());
        (state, left > 0)
    }

    /// Sleeps until the oldest posted call is answered, another thread has something, or this time has passed.
    fn sleep<'q>(&'q self, mut state: MutexGuard<'q, State>, time: Duration) -> MutexGuard<'q, State> {
        let Some(sleeper) = state.posted.first().map(|first| first.sleeper()) else { return state };
        if !sleeper.prepare() {
            return state;
        }
        (state.has_looker, state.asleep) = (true, Some(sleeper));
        drop(state);
        sleeper.sleep(time);
        let mut state = lock(&self.state);
        (state.has_looker, state.asleep) = (false, None);
        state
    }

    /// Waits until something may have changed, or for this long. `sleep` is how long it sleeps if calls are posted.
    fn wait<'q>(
        &'q self,
        state: MutexGuard<'q, State>,
        sleep: &mut Duration,
        left: Duration,
    ) -> MutexGuard<'q, State> {
        let (state, has_ended) = self.look(state);
        if has_ended {
            *sleep = SLEEP_FIRST;
        }
        if has_ended || state.ends_wait() {
            return state;
        }
        if !state.posted.is_empty() && !state.has_looker {
            if self.spins {
                return state;
            }
            let time = left.min(*sleep);
            *sleep = (*sleep * 2).min(SLEEP_LONGEST);
            return self.sleep(state, time);
        }
        if self.spins {
            drop(state);
            for _ in 0..SPINS {
                if self.ends_wait.load(Ordering::Acquire) {
                    break;
                }
                std::hint::spin_loop();
            }
            return lock(&self.state);
        }
        self.wait_for_others(state, left)
    }

    /// Sleeps until another thread has ended something, or looks no longer at what is posted.
    fn wait_for_others<'q>(
        &'q self,
        mut state: MutexGuard<'q, State>,
        time: Duration,
    ) -> MutexGuard<'q, State> {
        state.waiting += 1;
        let waited = self.arrived.wait_timeout(state, time);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.waiting -= 1;
        state
    }

    /// Ends all posted calls.
    fn end_posted(&self) {
        let mut state = lock(&self.state);
        while !state.posted.is_empty() || state.has_looker {
            state = match state.has_looker {
                true => self.wait_for_others(state, SLEEP_LONGEST),
                false => self.look(state).0,
            };
            if !state.has_looker {
                state = self.sleep(state, SLEEP_LONGEST);
            }
        }
    }
}

pub(crate) fn queue_create(flags: c_int, out: Option<&mut *mut forebay_queue>) -> Done {
    let out = out.ok_or(FAULT)?;
    if flags & !FOREBAY_QUEUE_SPIN != 0 {
        return Err(INVALID);
    }
    // SAFETY: a system call without pointers; the descriptor is new and ours.
    let event = unsafe {
        let event = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
        if event < 0 {
            return Err(Failed::last());
        }
        OwnedFd::from_raw_fd(event)
    };
    let (state, arrived, ends_wait) = (Mutex::default(), Condvar::new(), AtomicBool::new(true));
    let queue = Queue { state, arrived, ends_wait, event, spins: flags & FOREBAY_QUEUE_SPIN != 0 };
    *out = Box::into_raw(Box::new(forebay_queue(Arc::new(queue))));
    Ok(())
}

/// # Safety
/// `queue` is null or open, and not used again.
pub(crate) unsafe fn queue_close(queue: *mut forebay_queue) -> Done {
    if queue.is_null() {
        return Err(FAULT);
    }
    // SAFETY: the caller's promise.
    let queue = unsafe { Box::from_raw(queue) };
    let (mut state, mut sleep) = (lock(&queue.0.state), SLEEP_FIRST);
    // The calls use the caller's memory.
    while state.pending > 0 {
        state.done.clear();
        state = queue.0.wait(state, &mut sleep, WAIT_LONGEST);
    }
    Ok(())
}

pub(crate) fn queue_descriptor(queue: &forebay_queue) -> Result<i32, Failed> {
    let queue = &queue.0;
    let mut state = lock(&queue.state);
    if !state.is_watched {
        if !state.posted.is_empty() || state.has_looker {
            queue.have_ended()?;
        }
        state.is_watched = true;
        if !state.done.is_empty() {
            queue.tell_watching();
        }
    }
    Ok(queue.event.as_raw_fd())
}

pub(crate) fn queue_wait(
    queue: &forebay_queue,
    out: &mut [forebay_completion],
    timeout_ms: c_int,
) -> Result<i32, Failed> {
    let queue = &*queue.0;
    if out.is_empty() {
        return Err(INVALID);
    }
    let mut sleep = SLEEP_FIRST;
    let until = u64::try_from(timeout_ms).ok().map(|ms| Instant::now() + Duration::from_millis(ms));
    let mut state = lock(&queue.state);
    if !state.ends_wait() {
        // Also if it may not wait.
        state = queue.look(state).0;
    }
    loop {
        let left = until.map_or(WAIT_LONGEST, |until| until.saturating_duration_since(Instant::now()));
        // With nothing to wait for, it does not wait.
        if state.ends_wait() || left.is_zero() {
            return Ok(queue.take(&mut state, out) as i32);
        }
        state = queue.wait(state, &mut sleep, left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;
    use std::sync::mpsc;

    /// The sorted results of two threads that wait in a queue that spins, with so many calls begun, when `done` was done.
    fn waits_of_two(calls: usize, done: impl FnOnce(&Queue)) -> Vec<i32> {
        let mut queue = std::ptr::null_mut();
        queue_create(FOREBAY_QUEUE_SPIN, Some(&mut queue)).unwrap();
        // SAFETY: open.
        let shared = unsafe { &*queue }.shared();
        (0..calls).for_each(|_| shared.begin());
        let (send, results) = mpsc::channel();
        for _ in 0..2 {
            let (queue, send) = (forebay_queue(Arc::clone(&shared)), send.clone());
            std::thread::spawn(move || {
                let mut out =
                    [0; 8].map(|was| forebay_completion { state: std::ptr::null_mut(), result: 0, was });
                send.send(queue_wait(&queue, &mut out, -1).unwrap()).unwrap();
            });
        }
        // Likely both spin then. The result is the same if not.
        std::thread::sleep(Duration::from_millis(50));
        done(&shared);
        let next = || results.recv_timeout(Duration::from_secs(60)).expect("it spins for ever");
        let mut all = vec![next(), next()];
        all.sort_unstable();
        // SAFETY: not used again.
        unsafe { queue_close(queue) }.unwrap();
        all
    }

    /// A call that is answered when its word is 3.
    struct Call {
        word: &'static AtomicU32,
        number: usize,
        is_lost: bool,
    }

    impl Posted for Call {
        fn is_answered(&self) -> bool {
            self.word.load(Ordering::Acquire) == 3
        }

        fn sleeper(&self) -> Sleeper<'static> {
            Sleeper::new(self.word, 1, 2)
        }

        fn is_lost(&self, _: u64) -> bool {
            self.is_lost
        }

        fn end(self: Box<Self>) -> Option<Ended> {
            Some(Ended { state: self.number as *mut c_void, result: -i64::from(!self.is_answered()), was: 0 })
        }
    }

    struct Calls(forebay_queue, Vec<&'static AtomicU32>);

    impl Calls {
        /// So many calls that are posted.
        fn new(flags: c_int, calls: usize, is_lost: bool) -> Calls {
            let mut queue = std::ptr::null_mut();
            queue_create(flags, Some(&mut queue)).unwrap();
            // SAFETY: not used again.
            let queue = *unsafe { Box::from_raw(queue) };
            let all = Calls(queue, (0..calls).map(|_| &*Box::leak(Box::new(AtomicU32::new(1)))).collect());
            for (number, word) in all.1.iter().enumerate() {
                all.queue().0.begin();
                all.queue().0.post(Box::new(Call { word, number, is_lost }));
            }
            all
        }

        fn queue(&self) -> &forebay_queue {
            &self.0
        }

        fn answer(&self, call: usize) {
            if self.1[call].swap(3, Ordering::AcqRel) == 2 {
                forebay_sys::wait::wake(self.1[call], 1);
            }
        }

        /// The calls that have ended, with their results.
        fn wait(&self, timeout_ms: c_int) -> Vec<(usize, i64)> {
            wait(self.queue(), timeout_ms)
        }

        fn close(self) {
            // SAFETY: not used again.
            unsafe { queue_close(Box::into_raw(Box::new(self.0))) }.unwrap();
        }
    }

    fn wait(queue: &forebay_queue, timeout_ms: c_int) -> Vec<(usize, i64)> {
        let mut out = [0; 8].map(|was| forebay_completion { state: std::ptr::null_mut(), result: 0, was });
        let count = queue_wait(queue, &mut out, timeout_ms).unwrap() as usize;
        out[..count].iter().map(|one| (one.state as usize, one.result)).collect()
    }

    #[test]
    fn posted_calls_end_as_they_are_answered_in_any_order() {
        for flags in [0, FOREBAY_QUEUE_SPIN] {
            let calls = Calls::new(flags, 3, false);
            assert_eq!(calls.wait(0), []);
            assert_eq!(calls.wait(20), []);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(30));
                    calls.answer(1);
                });
                // The oldest is silent.
                assert_eq!(calls.wait(60_000), [(1, 0)]);
            });
            calls.answer(0);
            assert_eq!(calls.wait(0), [(0, 0)]);
            calls.answer(2);
            calls.close();
        }
    }

    #[test]
    fn posted_call_without_an_answer_ends_and_says_so() {
        let calls = Calls::new(0, 2, true);
        let mut ended = calls.wait(60_000);
        ended.extend(calls.wait(0));
        assert_eq!(ended, [(0, -1), (1, -1)]);
        calls.close();
    }

    #[test]
    fn who_waits_while_another_looks_takes_its_place_or_gets_what_it_has_ended() {
        for flags in [0, FOREBAY_QUEUE_SPIN] {
            let calls = Calls::new(flags, 2, false);
            let queue = forebay_queue(Arc::clone(&calls.queue().0));
            let (send, results) = mpsc::channel();
            for _ in 0..3 {
                let (queue, send) = (forebay_queue(queue.shared()), send.clone());
                std::thread::spawn(move || send.send(wait(&queue, 60_000)).unwrap());
            }
            for call in [1, 0] {
                std::thread::sleep(Duration::from_millis(20));
                calls.answer(call);
                assert_eq!(results.recv_timeout(Duration::from_secs(30)).unwrap(), [(call, 0)]);
            }
            // The third learns that no call is left.
            assert_eq!(results.recv_timeout(Duration::from_secs(30)).unwrap(), []);
            calls.close();
        }
    }

    #[test]
    fn what_an_io_thread_has_ended_wakes_who_sleeps_until_a_posted_call_is_answered() {
        let calls = Calls::new(0, 1, false);
        calls.queue().0.begin();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Likely it sleeps then.
                std::thread::sleep(Duration::from_millis(30));
                let ended = Ended { state: 9 as *mut c_void, result: 0, was: 0 };
                calls.queue().0.end(std::iter::once(ended));
            });
            assert_eq!(calls.wait(60_000), [(9, 0)]);
        });
        calls.answer(0);
        calls.close();
    }

    #[test]
    fn posted_calls_end_by_themselves_from_when_the_program_has_the_eventfd() {
        let calls = Calls::new(0, 2, false);
        let mut event =
            libc::pollfd { fd: queue_descriptor(calls.queue()).unwrap(), events: libc::POLLIN, revents: 0 };
        assert!(!calls.queue().0.takes_posted());
        // SAFETY: one entry, which is writable.
        let mut poll = |timeout_ms| unsafe { libc::poll(&mut event, 1, timeout_ms) };
        assert_eq!(poll(10), 0);
        calls.answer(1);
        assert_eq!(poll(60_000), 1);
        assert_eq!(calls.wait(0), [(1, 0)]);
        assert_eq!(poll(0), 0);
        calls.answer(0);
        assert_eq!(poll(60_000), 1);
        // What had ended before is told, too.
        let early = Calls::new(0, 1, false);
        early.answer(0);
        drop(early.queue().0.look(lock(&early.queue().0.state)));
        event.fd = queue_descriptor(early.queue()).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { libc::poll(&mut event, 1, 0) }, 1);
        calls.close();
        early.close();
    }

    #[test]
    fn who_spins_ends_when_another_has_taken_all_or_no_call_is_left() {
        let ended = || Ended { state: std::ptr::null_mut(), result: 0, was: 0 };
        assert_eq!(waits_of_two(8, |queue| queue.end((0..8).map(|_| ended()))), [0, 8]);
        assert_eq!(waits_of_two(1, Queue::cancel), [0, 0]);
    }
}
