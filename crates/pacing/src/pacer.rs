//! The pacer of one medium: when a request may complete.
//!
//! A medium has one *bus*, whose time the transfers of all requests share, and a *channel* for each request that it
//! serves at the same time. A request takes
//!
//! 1. the bus for bytes / bandwidth, from its arrival or from when the bus is free;
//! 2. the channel that is free first, for its latency (and a seek, if it does not begin where the request before it
//!    ended) and its transfer, but at least until its turn on the bus is over.
//!
//! It completes when its channel is free again. So what completes between two times, of what arrived between them, is
//! never more than the bandwidth allows, and never more requests than there are channels are in service. A time that
//! the bus is free before a slow request's transfer can be used by others.
//!
//! Both steps are one compare-and-swap each of a word with a time. A process that dies between them leaves the bus taken
//! for one transfer.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock::{now_ns, wait_until, WAIT_MAX_NS};
use crate::profile::{Direction, Medium, QUEUE_DEPTH_MAX};
use crate::statistics::{Counters, Statistics};

/// Where a request is on its medium: a file, by any number that differs from those of other files, and a byte of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The file.
    pub file: u64,
    /// The offset of the first byte.
    pub offset: u64,
}

impl Place {
    /// The place of a byte of a backing file: of an inode's stripe, with the number of its component in names.
    pub fn of(ino: u64, number: usize, stripe: u16, offset: u64) -> Place {
        Place { file: ino ^ (((number as u64) << 16) | u64::from(stripe)) << 32, offset }
    }

    /// The place as one word. Files are spread over all words, so that two of them hardly ever touch.
    fn word(self) -> u64 {
        self.file.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32).wrapping_add(self.offset)
    }
}

/// A pacer's state, in shared memory. All times are those of [`now_ns`]. All zeros is an idle medium.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct State {
    /// When the bus is free.
    bus: AtomicU64,
    /// The place after the last request.
    end: AtomicU64,
    /// When each channel is free.
    channels: [AtomicU64; QUEUE_DEPTH_MAX as usize],
    reads: Counters,
    writes: Counters,
}

/// When a request may complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reservation {
    /// Its arrival.
    pub arrived_ns: u64,
    /// The earliest time at which it is complete.
    pub due_ns: u64,
    /// It began where the one before had ended.
    pub sequential: bool,
}

/// The pacer of one medium of the node.
#[derive(Clone, Copy, Debug)]
pub struct Pacer<'a> {
    pub(crate) state: &'a State,
    pub(crate) medium: Medium,
}

/// A request that has arrived at a medium.
#[must_use = "a request is not paced unless it is completed"]
#[derive(Clone, Copy, Debug)]
pub struct Ticket<'a> {
    pacer: Pacer<'a>,
    arrived_ns: u64,
}

/// A request that has its time on the medium.
#[must_use = "a request is not paced unless it waits"]
#[derive(Clone, Copy, Debug)]
pub struct Reserved<'a> {
    pacer: Pacer<'a>,
    direction: Direction,
    reservation: Reservation,
}

/// Time that a transfer takes, rounded up.
fn transfer_ns(bytes: u64, bytes_per_s: u64) -> u64 {
    let ns = (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(bytes_per_s));
    u64::try_from(ns).unwrap_or(u64::MAX).min(WAIT_MAX_NS)
}

impl<'a> Pacer<'a> {
    /// The medium that is emulated.
    pub fn medium(&self) -> Medium {
        self.medium
    }

    fn counters(&self, direction: Direction) -> &'a Counters {
        match direction {
            Direction::Read => &self.state.reads,
            Direction::Write => &self.state.writes,
        }
    }

    /// Notes the arrival of a request, before the real medium serves it.
    #[inline]
    pub fn begin(self) -> Ticket<'a> {
        Ticket { pacer: self, arrived_ns: now_ns() }
    }

    /// Reserves the time of a request that arrived at `arrived_ns`, without waiting.
    pub fn reserve(&self, arrived_ns: u64, direction: Direction, place: Place, bytes: u64) -> Reservation {
        // Another process may have stored anything.
        let latest = arrived_ns.saturating_add(WAIT_MAX_NS);
        let at = |word: u64| word.clamp(arrived_ns, latest);
        let begin = place.word();
        let sequential = self.state.end.swap(begin.wrapping_add(bytes), Ordering::Relaxed) == begin;
        let speed = self.medium.speed(direction);
        let transfer = transfer_ns(bytes, speed.bytes_per_s);
        let latency = speed.latency_ns + if sequential { 0 } else { self.medium.seek_ns };

        let take = |word: &AtomicU64, end: &dyn Fn(u64) -> u64| {
            let free = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |free| Some(end(at(free))));
            at(free.unwrap_or_else(|free| free))
        };
        let bus = take(&self.state.bus, &|free| free.saturating_add(transfer));

        let channels = &self.state.channels[..self.medium.queue_depth as usize];
        let due = |free: u64| free.saturating_add(latency).max(bus).saturating_add(transfer);
        loop {
            let Some((channel, free)) =
                channels.iter().map(|c| (c, c.load(Ordering::Acquire))).min_by_key(|(_, free)| *free)
            else {
                unreachable!("a medium has at least one channel");
            };
            let due_ns = due(at(free));
            if channel.compare_exchange(free, due_ns, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                self.counters(direction).began(bytes, sequential);
                return Reservation { arrived_ns, due_ns: due_ns.min(latest), sequential };
            }
        }
    }

    /// Records that a request is complete.
    pub fn completed(&self, direction: Direction, reservation: &Reservation, now_ns: u64) {
        let since = |ns: u64| ns.saturating_sub(reservation.arrived_ns);
        self.counters(direction).completed(since(reservation.due_ns), since(now_ns));
    }

    /// Begins to count again.
    pub fn reset_statistics(&self) {
        self.state.reads.reset();
        self.state.writes.reset();
    }

    /// What was counted, for reads or for writes.
    pub fn statistics(&self, direction: Direction) -> Statistics {
        self.counters(direction).read()
    }
}

impl<'a> Ticket<'a> {
    /// The same request, which arrived so much earlier than this process noticed it.
    pub fn arrived_before(self, ns: u64) -> Self {
        Ticket { arrived_ns: self.arrived_ns.saturating_sub(ns), ..self }
    }

    /// Reserves the request's time and waits until it is over. The real medium has moved `bytes`.
    pub fn complete(self, direction: Direction, place: Place, bytes: u64) {
        self.reserve(direction, place, bytes).wait(0);
    }

    /// Reserves the request's time. The real medium moves `bytes` during it.
    pub fn reserve(self, direction: Direction, place: Place, bytes: u64) -> Reserved<'a> {
        let reservation = self.pacer.reserve(self.arrived_ns, direction, place, bytes);
        Reserved { pacer: self.pacer, direction, reservation }
    }
}

impl Reserved<'_> {
    /// Waits until the time is over, but for the last `ahead_ns`: so long the answer takes on its way to its program.
    pub fn wait(self, ahead_ns: u64) {
        let now = wait_until(self.reservation.due_ns.saturating_sub(ahead_ns));
        self.pacer.completed(self.direction, &self.reservation, now.saturating_add(ahead_ns));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BinaryHeap;

    use proptest::prelude::*;

    use super::*;
    use crate::profile::Speed;

    fn medium(latency_ns: u64, bytes_per_s: u64, seek_ns: u64, queue_depth: u32) -> Medium {
        let speed = Speed { latency_ns, bytes_per_s };
        Medium { read: speed, write: speed, seek_ns, queue_depth }
    }

    fn idle() -> Box<State> {
        // SAFETY: atomics of integers, for which zero is a value.
        Box::new(unsafe { std::mem::zeroed() })
    }

    const HERE: Place = Place { file: 7, offset: 0 };
    const START: u64 = 1_000_000;

    fn at(offset: u64) -> Place {
        Place { offset, ..HERE }
    }

    fn time(pacer: &Pacer<'_>, arrived: u64, place: Place, bytes: u64) -> u64 {
        pacer.reserve(arrived, Direction::Read, place, bytes).due_ns - arrived
    }

    #[test]
    fn request_on_an_idle_medium_takes_latency_seek_and_transfer() {
        let state = idle();
        let pacer = Pacer { state: &state, medium: medium(100, 1_000_000_000, 5_000, 4) };
        assert_eq!(time(&pacer, START, HERE, 4096), 100 + 5_000 + 4096);
        // Adjacent: no seek.
        assert_eq!(time(&pacer, 2 * START, at(4096), 10), 100 + 10);
        // Back, and another file at the same offset: a seek each.
        assert_eq!(time(&pacer, 3 * START, at(0), 10), 5_000 + 100 + 10);
        assert_eq!(time(&pacer, 4 * START, Place { file: 8, offset: 10 }, 10), 5_000 + 100 + 10);
    }

    #[test]
    fn directions_have_their_own_speeds_and_share_the_bus() {
        let state = idle();
        let slow = Speed { latency_ns: 1_000, bytes_per_s: 100_000_000 };
        let pacer =
            Pacer { state: &state, medium: Medium { write: slow, ..medium(100, 1_000_000_000, 0, 4) } };
        let due = |direction| pacer.reserve(START, direction, HERE, 1_000).due_ns - START;
        assert_eq!(due(Direction::Write), 1_000 + 10_000);
        assert_eq!(due(Direction::Read), 10_000 + 1_000, "after the write's transfer of 10 us");
        let count = |direction| (pacer.statistics(direction).requests, pacer.statistics(direction).bytes);
        assert_eq!((count(Direction::Read), count(Direction::Write)), ((1, 1_000), (1, 1_000)));
    }

    #[test]
    fn latencies_overlap_up_to_the_queue_depth() {
        let state = idle();
        let pacer = Pacer { state: &state, medium: medium(1_000, BANDWIDTH, 0, 3) };
        let times: Vec<u64> = (0..7).map(|_| time(&pacer, START, HERE, 0)).collect();
        assert_eq!(times, [1_000, 1_000, 1_000, 2_000, 2_000, 2_000, 3_000]);
    }

    const BANDWIDTH: u64 = 1_000_000_000;

    #[test]
    fn words_that_another_process_spoiled_delay_a_request_by_a_bounded_time() {
        let medium = medium(0, BANDWIDTH, 0, 1);
        let words: [fn(&State) -> &AtomicU64; 2] = [|s| &s.bus, |s| &s.channels[0]];
        for word in words {
            let state = idle();
            word(&state).store(u64::MAX, Ordering::Relaxed);
            assert_eq!(time(&Pacer { state: &state, medium }, START, HERE, 1), WAIT_MAX_NS);
        }
        let state = idle();
        let pacer = Pacer { state: &state, medium };
        assert!(time(&pacer, u64::MAX - 10, HERE, 1) <= 10, "no overflow at the end of time");
    }

    /// Clients that each send a request, wait for it, think, and send the next.
    #[derive(Clone, Debug)]
    struct Client {
        bytes: u64,
        think_ns: u64,
        writes: bool,
        random: bool,
    }

    fn clients() -> impl Strategy<Value = Vec<Client>> {
        let one = (0..300_000u64, 0..50_000u64, any::<bool>(), any::<bool>())
            .prop_map(|(bytes, think_ns, writes, random)| Client { bytes, think_ns, writes, random });
        proptest::collection::vec(one, 1..12)
    }

    fn media() -> impl Strategy<Value = Medium> {
        let speed = || {
            (0..1_000_000u64, 1_000_000..2_000_000_000u64)
                .prop_map(|(latency_ns, bytes_per_s)| Speed { latency_ns, bytes_per_s })
        };
        (speed(), speed(), 0..5_000_000u64, 1..=QUEUE_DEPTH_MAX)
            .prop_map(|(read, write, seek_ns, queue_depth)| Medium { read, write, seek_ns, queue_depth })
    }

    /// A request that was served: arrival, completion, and how long the bus had it at least.
    type Served = (u64, u64, u64, u64);

    /// Runs the clients for some requests, on the clock of the simulation.
    fn simulate(medium: Medium, clients: &[Client], requests: usize) -> Vec<Served> {
        let state = idle();
        let pacer = Pacer { state: &state, medium };
        let mut next: BinaryHeap<std::cmp::Reverse<(u64, usize, u64)>> =
            (0..clients.len()).map(|i| std::cmp::Reverse((START + i as u64, i, 0))).collect();
        let mut served = Vec::new();
        while let Some(std::cmp::Reverse((now, i, count))) = next.pop() {
            let client = &clients[i];
            let direction = if client.writes { Direction::Write } else { Direction::Read };
            let step = if client.random { 3 } else { 1 };
            let place = Place { file: i as u64, offset: count * step * client.bytes };
            let due = pacer.reserve(now, direction, place, client.bytes).due_ns;
            let speed = medium.speed(direction);
            served.push((now, due, transfer_ns(client.bytes, speed.bytes_per_s), speed.latency_ns));
            if served.len() < requests {
                next.push(std::cmp::Reverse((due + client.think_ns, i, count + 1)));
            }
        }
        served
    }

    proptest! {
        #[test]
        fn no_interval_sees_more_than_the_bandwidth(medium in media(), clients in clients()) {
            let served = simulate(medium, &clients, 120);
            let mut begins: Vec<u64> = served.iter().map(|s| s.0).collect();
            begins.sort_unstable();
            for &from in begins.iter().step_by(7) {
                let mut ends: Vec<(u64, u64)> =
                    served.iter().filter(|s| s.0 >= from).map(|s| (s.1, s.2)).collect();
                ends.sort_unstable();
                let mut busy = 0;
                for (end, transfer) in ends {
                    busy += transfer;
                    prop_assert!(busy <= end - from, "{busy} ns of transfers in {} ns", end - from);
                }
            }
        }

        #[test]
        fn no_more_requests_are_in_service_than_the_queue_depth(medium in media(), clients in clients()) {
            // A request is in service at least during the latency and the transfer before its completion.
            let served = simulate(medium, &clients, 120);
            let mut events: Vec<(u64, i32)> = served
                .iter()
                .flat_map(|&(_, due, transfer, latency)| [(due - transfer - latency, 1), (due, -1)])
                .collect();
            events.sort_unstable();
            let mut in_service = 0;
            for (_, change) in events {
                in_service += change;
                prop_assert!(in_service <= medium.queue_depth as i32);
            }
        }

        #[test]
        fn no_request_is_faster_than_latency_and_transfer(medium in media(), clients in clients()) {
            for (arrived, due, transfer, latency) in simulate(medium, &clients, 60) {
                prop_assert!(due >= arrived + latency + transfer);
            }
        }

        #[test]
        fn medium_is_never_idle_while_requests_of_deep_queues_wait(bytes in 1_000..100_000u64, count in 2..8usize) {
            // As many clients as channels, latencies shorter than a transfer: the bandwidth is reached.
            let medium = medium(bytes / 2, BANDWIDTH, 0, 8);
            let client = Client { bytes, think_ns: 0, writes: false, random: false };
            let served = simulate(medium, &vec![client; count], 200);
            let end = served.iter().map(|s| s.1).max().unwrap();
            let busy: u64 = served.iter().map(|s| s.2).sum();
            prop_assert!(end - START <= busy + bytes + medium.read.latency_ns);
        }
    }

    #[test]
    fn threads_that_reserve_at_the_same_time_share_the_bandwidth() {
        let state = idle();
        let pacer = Pacer { state: &state, medium: medium(10, BANDWIDTH, 0, 16) };
        const EACH: u64 = 2_000;
        let last = std::thread::scope(|scope| {
            let run = |file: u64| {
                move || {
                    let place = |i: u64| Place { file, offset: i * 100 };
                    (0..EACH).map(|i| pacer.reserve(START, Direction::Write, place(i), 100).due_ns).max()
                }
            };
            let all: Vec<_> = (0..4).map(|file| scope.spawn(run(file))).collect();
            all.into_iter().filter_map(|thread| thread.join().unwrap()).max().unwrap()
        });
        let busy = 4 * EACH * 100;
        assert!(last >= START + busy, "no reservation was lost");
        assert!(last <= START + busy + 10 + 100, "and none was counted twice");
        assert_eq!(pacer.statistics(Direction::Write).requests, 4 * EACH);
    }
}
