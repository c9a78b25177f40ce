//! Rings: calls from many threads and from signal handlers; a daemon that is slow, dies or is gone; and a client that
//! overwrites its ring.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use forebay_ring::{call_clock, CallFailure, Claim, Doorbell, Mapping, Removal, Ring, ServedRing};
use forebay_types::limits::{BATCH_PER_RING, LIVENESS_PERIOD_MS, MESSAGE_BYTES_MAX, RING_SLOTS};
use forebay_types::{Ino, REQUESTS};

/// A request of no kind: it changes nothing.
const NO_REQUEST: &[u8] = &[0xf0];

struct Node {
    ring_fd: OwnedFd,
    served: ServedRing,
    doorbell_fd: OwnedFd,
    doorbell: Doorbell,
}

fn node() -> Node {
    let (ring_fd, served) = ServedRing::create().unwrap();
    let (doorbell_fd, doorbell) = Doorbell::create().unwrap();
    Node { ring_fd, served, doorbell_fd, doorbell }
}

impl Node {
    fn client(&self) -> Ring {
        Ring::open(self.ring_fd.as_fd(), self.doorbell_fd.as_fd()).unwrap()
    }

    /// Echoes requests with each byte raised by one, until `stop` is set. Counts the requests that it served.
    fn serve(&self, stop: &AtomicBool, served: &AtomicU64) {
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        while !stop.load(Ordering::Relaxed) {
            let mut bits = self.served.take_pending(BATCH_PER_RING);
            if bits == 0 {
                self.doorbell.sleep(10, || !self.served.has_pending());
                continue;
            }
            while bits != 0 {
                let slot = bits.trailing_zeros() as usize;
                bits &= bits - 1;
                match self.served.take(slot, &mut buffer) {
                    Some((_, Ok(request))) => {
                        buffer[..request.len].iter_mut().for_each(|b| *b = b.wrapping_add(1));
                        self.served.answer(slot, &buffer[..request.len]);
                        served.fetch_add(1, Ordering::Relaxed);
                    }
                    Some((_, Err(_))) => self.served.answer(slot, b"refused"),
                    None => {}
                }
            }
        }
    }
}

fn with_server<T>(node: &Node, body: impl FnOnce() -> T) -> (T, u64) {
    let (stop, served) = (AtomicBool::new(false), AtomicU64::new(0));
    let result = std::thread::scope(|scope| {
        scope.spawn(|| node.serve(&stop, &served));
        let result = body();
        stop.store(true, Ordering::Relaxed);
        result
    });
    (result, served.into_inner())
}

fn call(ring: &Ring, request: &[u8]) -> Vec<u8> {
    let mut reply = vec![0; MESSAGE_BYTES_MAX];
    ring.call(request, &mut reply, &|| true, |bytes| bytes.to_vec()).unwrap()
}

#[test]
fn call_from_many_threads_each_gets_its_own_reply() {
    let node = node();
    let ring = node.client();
    const THREADS: usize = 8;
    const CALLS: usize = 500;
    let ((), served) = with_server(&node, || {
        std::thread::scope(|scope| {
            for t in 0..THREADS {
                let ring = &ring;
                scope.spawn(move || {
                    for i in 0..CALLS {
                        let request: Vec<u8> = (0..1 + i % 300).map(|k| (t * 31 + i + k) as u8).collect();
                        let expected: Vec<u8> = request.iter().map(|b| b.wrapping_add(1)).collect();
                        assert_eq!(call(ring, &request), expected);
                    }
                });
            }
        });
    });
    assert_eq!(served, (THREADS * CALLS) as u64);
}

#[test]
fn call_of_the_longest_message_arrives_whole() {
    let node = node();
    let ring = node.client();
    let request: Vec<u8> = (0..MESSAGE_BYTES_MAX).map(|i| i as u8).collect();
    let (reply, _) = with_server(&node, || call(&ring, &request));
    assert!(reply.iter().zip(&request).all(|(a, b)| *a == b.wrapping_add(1)));
    assert_eq!(reply.len(), request.len());
}

#[test]
fn call_when_nobody_serves_fails_once_the_pool_is_known_to_be_gone() {
    let node = node();
    let ring = node.client();
    let asked = AtomicU64::new(0);
    let alive = || asked.fetch_add(1, Ordering::Relaxed) < 1;
    let result = ring.call(NO_REQUEST, &mut [0; 8], &alive, |_| ());
    assert_eq!(result, Err(CallFailure::Gone));
    assert_eq!(asked.into_inner(), 2, "the first answer said to wait on");
}

#[test]
fn slots_of_calls_that_were_given_up_are_used_again_once_they_are_answered() {
    let node = node();
    let ring = node.client();
    let claims: Vec<_> = (0..RING_SLOTS).map(|_| ring.claim(&|| true).unwrap()).collect();
    claims.iter().for_each(|claim| {
        claim.keep(7);
        assert_eq!(claim.post(NO_REQUEST), None);
    });
    for claim in claims {
        assert_eq!(claim.finish_by(1, &mut [0; 8], &|| true, |_, _| ()), Err(CallFailure::Gone));
    }
    assert!(ring.try_claim().is_none(), "the daemon may write into all of them yet");
    with_server(&node, || {
        let asked = AtomicU64::new(0);
        let alive = || asked.fetch_add(1, Ordering::Relaxed) < 60;
        let claim = ring.claim(&alive).expect("a slot of one that is answered");
        assert_eq!(claim.kept(), 0, "what it kept was used by the call that was given up");
        drop(claim);
        for _ in 0..2 * RING_SLOTS {
            assert_eq!(ring.call(b"ab", &mut [0; 2], &alive, |bytes| bytes.len()), Ok(2));
        }
    });
}

#[test]
fn slot_of_a_change_that_was_given_up_is_not_used_again() {
    let node = node();
    let ring = node.client();
    // The slot's next request would confirm that the client has done what the reply calls for.
    let unlink = REQUESTS.iter().find(|r| r.name == "Unlink").unwrap().number;
    let claims: Vec<_> = (0..RING_SLOTS).map(|_| ring.claim(&|| true).unwrap()).collect();
    for (i, claim) in claims.into_iter().enumerate() {
        assert_eq!(claim.post(if i == 9 { NO_REQUEST } else { std::slice::from_ref(&unlink) }), None);
        assert_eq!(claim.finish_by(1, &mut [0; 8], &|| true, |_, _| ()), Err(CallFailure::Gone));
    }
    with_server(&node, || {
        let claim = ring.claim(&|| true).expect("the slot of what changes nothing");
        assert!(ring.try_claim().is_none(), "a slot of a change was used again");
        drop(claim);
    });
}

#[test]
fn calls_that_wait_until_a_time_share_it() {
    let node = node();
    let ring = node.client();
    let waited_ms = || {
        let claims: Vec<_> = (0..8).map(|_| ring.claim(&|| true).unwrap()).collect();
        claims.iter().for_each(|claim| assert_eq!(claim.post(NO_REQUEST), None));
        let start = std::time::Instant::now();
        let until = call_clock() + 50_000_000;
        for claim in claims {
            assert_eq!(claim.finish_by(until, &mut [0; 8], &|| true, |_, _| ()), Err(CallFailure::Gone));
        }
        start.elapsed().as_millis()
    };
    // On a very busy machine one try may take long.
    let waited: Vec<u128> = (0..4).map(|_| waited_ms()).collect();
    assert!(waited.iter().all(|ms| *ms >= 50), "{waited:?} ms for all of them");
    assert!(waited.iter().any(|ms| *ms < u128::from(LIVENESS_PERIOD_MS)), "{waited:?} ms for all of them");
    // After that time a reply that has arrived is still accepted.
    let claim = ring.claim(&|| true).unwrap();
    assert_eq!(claim.post(b"abc"), None);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let served = AtomicU64::new(0);
        let (stop, node) = (&stop, &node);
        let thread = scope.spawn(move || {
            node.serve(stop, &served);
            served.into_inner()
        });
        while ring.call(NO_REQUEST, &mut [0; 8], &|| true, |_| ()).is_err() {}
        let mut reply = [0; 3];
        assert_eq!(claim.finish_by(0, &mut reply, &|| true, |reply, _| reply.to_vec()), Ok(b"bcd".to_vec()));
        stop.store(true, Ordering::Relaxed);
        thread.join().unwrap();
    });
}

#[test]
fn request_left_by_a_dead_daemon_is_found_by_the_next() {
    let node = node();
    let ring = node.client();
    let (stop, served) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let caller = scope.spawn(|| call(&ring, b"abc"));
        // The first daemon takes the request, and dies.
        while node.served.take_pending(64) == 0 {
            std::thread::yield_now();
        }
        let next = ServedRing::reopen(node.ring_fd.as_fd()).unwrap();
        assert!(!next.has_pending(), "the bit is lost with the daemon");
        next.repend(0);
        assert!(next.has_pending());
        scope.spawn(|| node.serve(&stop, &served));
        assert_eq!(caller.join().unwrap(), b"bcd");
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(served.into_inner(), 1);
}

#[test]
fn then_runs_before_the_slot_is_used_again() {
    let node = node();
    let ring = node.client();
    with_server(&node, || {
        let inner = ring.call(b"outer", &mut [0; 64], &|| true, |_| call(&ring, b"inner")).unwrap();
        assert_eq!(inner, b"joofs", "a call inside `then` uses another slot");
    });
}

static NESTED: OnceLock<(Arc<Ring>, AtomicU64)> = OnceLock::new();

extern "C" fn on_signal(_: libc::c_int) {
    if let Some((ring, done)) = NESTED.get() {
        let mut reply = [0; 16];
        if ring.call(b"signal", &mut reply, &|| true, |bytes| bytes == b"tjhobm") == Ok(true) {
            done.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[test]
fn call_in_a_signal_handler_that_interrupts_a_call_is_served() {
    let node = node();
    let ring = Arc::new(node.client());
    NESTED.get_or_init(|| (Arc::clone(&ring), AtomicU64::new(0)));
    // SAFETY: the handler only makes calls that are async-signal-safe.
    unsafe { libc::signal(libc::SIGUSR1, on_signal as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    // SAFETY: no arguments.
    let me = unsafe { libc::pthread_self() } as usize;
    let stop = AtomicBool::new(false);
    with_server(&node, || {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    // SAFETY: the thread lives until the scope ends.
                    unsafe { libc::pthread_kill(me as libc::pthread_t, libc::SIGUSR1) };
                    std::thread::sleep(std::time::Duration::from_micros(50));
                }
            });
            let handled = &NESTED.get().unwrap().1;
            let mut calls = 0;
            while handled.load(Ordering::Relaxed) < 50 || calls < 500 {
                assert_eq!(call(&ring, b"main"), b"nbjo");
                calls += 1;
            }
            stop.store(true, Ordering::Relaxed);
        });
    });
}

#[test]
fn scribbled_ring_harms_no_other() {
    let (bad, good) = (node(), node());
    let ring = good.client();
    let bytes = length(&bad.ring_fd);
    let memory = Mapping::new(bad.ring_fd.as_fd(), bytes, true).unwrap();
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut buffer = vec![0; MESSAGE_BYTES_MAX];
    with_server(&good, || {
        for round in 0..2000 {
            for _ in 0..64 {
                // Headers of slots, where it matters most, and any other place.
                let slot = 4096 + (random() % 64) as usize * 144 * 1024;
                let at = if random() % 2 == 0 {
                    slot + (random() % 3) as usize * 8
                } else {
                    (random() as usize % bytes) & !7
                };
                let value = if random() % 2 == 0 { random() % 8 } else { random() };
                memory.word64(at).store(value, Ordering::Relaxed);
            }
            memory.word64(0).store(random(), Ordering::Relaxed);
            // Whatever was written, the daemon's copies are bounded, and each answer is written to the slot of its
            // request.
            let mut bits = bad.served.take_pending(64);
            while bits != 0 {
                let slot = bits.trailing_zeros() as usize;
                bits &= bits - 1;
                if let Some((_, Ok(request))) = bad.served.take(slot, &mut buffer) {
                    assert!(request.len <= MESSAGE_BYTES_MAX);
                }
                bad.served.answer(slot, b"whatever");
            }
            if round % 50 == 0 {
                assert_eq!(call(&ring, b"good"), b"hppe");
            }
        }
    });
}

fn length(fd: &OwnedFd) -> usize {
    use std::os::fd::AsRawFd;
    // SAFETY: an all-zero stat is valid, and filled by the call.
    unsafe {
        let mut st: libc::stat = std::mem::zeroed();
        assert_eq!(libc::fstat(fd.as_raw_fd(), &mut st), 0);
        st.st_size as usize
    }
}

#[test]
fn ring_cannot_be_resized_and_board_cannot_be_written_by_clients() {
    use std::os::fd::AsRawFd;
    let node = node();
    // SAFETY: plain system call on an open descriptor.
    assert_eq!(unsafe { libc::ftruncate(node.ring_fd.as_raw_fd(), 0) }, -1);
    let (board_fd, _writer) = forebay_ring::BoardWriter::create(1 << 20).unwrap();
    assert!(Mapping::new(board_fd.as_fd(), 4096, true).is_err(), "a writable mapping of the board");
    // SAFETY: one byte of live memory.
    assert_eq!(unsafe { libc::pwrite(board_fd.as_raw_fd(), b"x".as_ptr().cast(), 1, 0) }, -1);
    // SAFETY: plain system call on an open descriptor.
    assert_eq!(unsafe { libc::ftruncate(board_fd.as_raw_fd(), 0) }, -1);
}

#[test]
fn removal_that_is_owed_comes_back_once_behind_the_slots_next_request_and_no_other() {
    let node = node();
    let ring = node.client();
    let removal = Removal { ino: Ino(1 << 48 | 7), target: 3 };
    let finish = |claim: Claim<'_>, owes: bool| {
        let then = |_: &[u8], claim: &Claim<'_>| owes.then(|| claim.owe(removal));
        claim.finish(&mut [0; 64], &|| true, then).unwrap();
    };
    let claim = || ring.claim(&|| true).unwrap();
    with_server(&node, || {
        let first = claim();
        assert_eq!(first.post(b"first"), None);
        finish(first, true);
        // A claim that is dropped without a request leaves the removal for the next one.
        drop(claim());
        let (second, other) = (claim(), claim());
        assert_eq!(other.post(b"other slot"), None);
        assert_eq!(second.post(b"second"), Some(removal));
        finish(other, false);
        finish(second, false);
        let third = claim();
        assert_eq!(third.post(b"third"), None);
        finish(third, false);
    });
}
