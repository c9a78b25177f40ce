//! The state of the network: steps in flight, hosts, the clock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_types::Code;

use crate::endpoint::{Direction, Transfer};
use crate::memory::{Access, Region};
use crate::numbers::Numbers;

/// Random faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Faults {
    /// Shortest and longest delay of a step.
    pub delay: (Duration, Duration),
    /// Of 1000 messages and transfers, this number is lost.
    pub drop_permille: u32,
    /// Of 1000 messages, this number arrives twice.
    pub duplicate_permille: u32,
    /// Messages between two hosts may overtake each other.
    pub reorder: bool,
    /// The time after which a sender is notified of a loss, if it is notified at all.
    pub give_up: Duration,
}

impl Faults {
    /// No faults.
    pub const NONE: Faults = Faults {
        delay: (Duration::from_micros(5), Duration::from_micros(50)),
        drop_permille: 0,
        duplicate_permille: 0,
        reorder: false,
        give_up: Duration::from_millis(100),
    };
}

pub(super) type HostId = u32;

/// An event that the endpoint's next `progress` reports.
#[derive(Debug)]
pub(super) enum Told {
    Received { tag: u64, bytes: Vec<u8> },
    Done { operation: u64 },
    Failed { operation: u64, code: Code, why: &'static str },
}

/// Data that were read.
#[derive(Debug)]
struct Arrived {
    region: Arc<Region>,
    offset: usize,
    bytes: Vec<u8>,
    /// They are stored only if the operation was not reported yet.
    in_time: bool,
}

#[derive(Debug)]
enum Step {
    Message {
        to: HostId,
        incarnation: u64,
        tag: u64,
        bytes: Vec<u8>,
    },
    /// A transfer reaches the peer.
    Arrive {
        from: HostId,
        started: u64,
        to: HostId,
        incarnation: u64,
        operation: u64,
        transfer: Transfer,
        local: Arc<Region>,
    },
    /// Data that were read reach the reader, and the operation is reported as done.
    Return {
        to: HostId,
        incarnation: u64,
        operation: u64,
        data: Option<Arrived>,
    },
    Fail {
        to: HostId,
        incarnation: u64,
        operation: u64,
        code: Code,
        why: &'static str,
    },
}

#[derive(Debug, Default)]
pub(super) struct Host {
    pub(super) incarnation: u64,
    pub(super) alive: bool,
    pub(super) stopped: bool,
    pub(super) told: VecDeque<Told>,
    /// By key: the region, its first address, the peers' access.
    pub(super) memory: BTreeMap<u64, (Arc<Region>, u64, Access)>,
    /// Operations that were not reported yet.
    pub(super) under_way: BTreeSet<u64>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) now: Duration,
    pub(super) numbers: Numbers,
    faults: Faults,
    steps: BTreeMap<(Duration, u64), Step>,
    order: u64,
    pub(super) hosts: BTreeMap<HostId, Host>,
    cuts: BTreeSet<(HostId, HostId)>,
    /// When the last message or transfer from one host to another arrives. Later ones must not arrive earlier.
    last: BTreeMap<(HostId, HostId), Duration>,
    trace: u64,
    events: u64,
}

/// A simulated network. Clones share it.
#[derive(Clone, Debug)]
pub struct Network {
    state: Arc<Mutex<State>>,
}

impl State {
    /// Adds an event to the trace (FNV-1a over the words).
    pub(super) fn note(&mut self, words: &[u64]) {
        self.events += 1;
        let now = self.now.as_nanos() as u64;
        for word in std::iter::once(&now).chain(words) {
            for byte in word.to_le_bytes() {
                self.trace = (self.trace ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        }
    }

    fn at(&mut self, at: Duration, step: Step) {
        self.order += 1;
        self.steps.insert((at, self.order), step);
    }

    fn delay(&mut self) -> Duration {
        let (low, high) = self.faults.delay;
        low + Duration::from_nanos(self.numbers.below((high.saturating_sub(low)).as_nanos() as u64 + 1))
    }

    fn cut(&self, a: HostId, b: HostId) -> bool {
        self.cuts.contains(&(a.min(b), a.max(b)))
    }

    /// When a message or transfer sent now arrives: after all that were sent before, unless reordering is on.
    fn arrival(&mut self, from: HostId, to: HostId) -> Duration {
        let mut at = self.now + self.delay();
        if !self.faults.reorder {
            let last = self.last.entry((from, to)).or_default();
            at = at.max(*last + Duration::from_nanos(1));
            *last = at;
        }
        at
    }

    /// True if this message or transfer is lost. The operation is then reported as failed, or, if `told` is false,
    /// possibly as done.
    fn loses(&mut self, from: HostId, to: HostId, operation: u64, told: bool) -> bool {
        let gone = !self.hosts.get(&to).is_some_and(|h| h.alive);
        let unlucky = self.numbers.chance(self.faults.drop_permille);
        if !gone && !unlucky && !self.cut(from, to) {
            return false;
        }
        let silent = !told && self.numbers.chance(500);
        let incarnation = self.hosts[&from].incarnation;
        let why = if gone { "no such host" } else { "lost" };
        let at = self.now + if gone { self.delay() } else { self.faults.give_up };
        let step = if silent && !gone {
            Step::Return { to: from, incarnation, operation, data: None }
        } else {
            Step::Fail { to: from, incarnation, operation, code: Code::Io, why }
        };
        self.at(at, step);
        true
    }

    pub(super) fn send(&mut self, from: HostId, to: HostId, operation: u64, tag: u64, bytes: &[u8]) {
        if self.loses(from, to, operation, false) {
            return;
        }
        let incarnation = self.hosts[&to].incarnation;
        let at = self.arrival(from, to);
        let twice = self.numbers.chance(self.faults.duplicate_permille);
        if twice {
            let later = at + self.delay();
            self.at(later, Step::Message { to, incarnation, tag, bytes: bytes.to_vec() });
        }
        self.at(at, Step::Message { to, incarnation, tag, bytes: bytes.to_vec() });
        let sender = self.hosts[&from].incarnation;
        self.at(at, Step::Return { to: from, incarnation: sender, operation, data: None });
    }

    pub(super) fn transfer(
        &mut self,
        from: HostId,
        to: HostId,
        operation: u64,
        transfer: Transfer,
        local: Arc<Region>,
    ) {
        if self.loses(from, to, operation, true) {
            return;
        }
        let (started, incarnation) = (self.hosts[&from].incarnation, self.hosts[&to].incarnation);
        let at = self.arrival(from, to);
        self.at(at, Step::Arrive { from, started, to, incarnation, operation, transfer, local });
    }

    /// Ensures that an operation is reported at its deadline.
    pub(super) fn watch(&mut self, host: HostId, operation: u64, deadline: Duration) {
        let incarnation = self.hosts[&host].incarnation;
        let at = deadline.max(self.now);
        self.at(
            at,
            Step::Fail { to: host, incarnation, operation, code: Code::TimedOut, why: "its deadline passed" },
        );
    }

    fn tell(&mut self, to: HostId, incarnation: u64, told: Told) {
        let Some(host) = self.hosts.get_mut(&to).filter(|h| h.alive && h.incarnation == incarnation) else {
            return;
        };
        let words = match &told {
            Told::Received { tag, bytes } => {
                let sum = bytes.iter().fold(7u64, |sum, b| sum.wrapping_mul(31).wrapping_add(u64::from(*b)));
                Some([u64::from(to), 1, *tag ^ (bytes.len() as u64) << 32, sum])
            }
            Told::Done { operation } => {
                host.under_way.remove(operation).then_some([u64::from(to), 2, *operation, 0])
            }
            Told::Failed { operation, code, .. } => {
                host.under_way.remove(operation).then_some([u64::from(to), 3, *operation, *code as u64])
            }
        };
        if let Some(words) = words {
            host.told.push_back(told);
            self.note(&words);
        }
    }

    /// The peer's part of a transfer. Returns the data read, or the reason of the refusal.
    fn serve(&self, to: HostId, transfer: &Transfer, local: &Region) -> Result<Vec<u8>, &'static str> {
        let Some((region, first, access)) = self.hosts[&to].memory.get(&transfer.remote.key) else {
            return Err("the peer has no memory of that key");
        };
        let allowed = match transfer.direction {
            Direction::Read | Direction::ReadInTime => access.read,
            Direction::Write | Direction::Ahead => access.write,
        };
        if !allowed {
            return Err("the peer does not allow it");
        }
        let offset = transfer.remote.address.checked_sub(*first).ok_or("before the peer's memory")?;
        let offset = usize::try_from(offset).map_err(|_| "beyond the peer's memory")?;
        let mut data = vec![0; transfer.bytes];
        let moved = match transfer.direction {
            Direction::Read | Direction::ReadInTime => region.read_at(offset, &mut data),
            Direction::Write | Direction::Ahead => {
                local.read_at(transfer.local_offset, &mut data).and_then(|()| region.write_at(offset, &data))
            }
        };
        moved.map_err(|_| "beyond the peer's memory")?;
        if matches!(transfer.direction, Direction::Write | Direction::Ahead) {
            data.clear();
        }
        Ok(data)
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Message { to, incarnation, tag, bytes } => {
                self.tell(to, incarnation, Told::Received { tag, bytes });
            }
            Step::Return { to, incarnation, operation, data } => {
                let host = self.hosts.get(&to).filter(|h| h.alive && h.incarnation == incarnation);
                if let (Some(host), Some(Arrived { region, offset, bytes, in_time })) = (host, data) {
                    let is_open = host.under_way.contains(&operation);
                    // As providers do: what comes late is stored, in whatever the memory is used for by then.
                    if is_open || !in_time {
                        let written = region.write_at(offset, &bytes);
                        debug_assert!(written.is_ok() || !is_open, "checked when the transfer began");
                    }
                }
                self.tell(to, incarnation, Told::Done { operation });
            }
            Step::Fail { to, incarnation, operation, code, why } => {
                self.tell(to, incarnation, Told::Failed { operation, code, why });
            }
            Step::Arrive { from, started, to, incarnation, operation, transfer, local } => {
                let there = self.hosts.get(&to).is_some_and(|h| h.alive && h.incarnation == incarnation);
                let back = self.now + self.delay();
                if !there || self.cut(from, to) {
                    let (code, why) = (Code::Io, "the peer is gone");
                    return self
                        .at(back, Step::Fail { to: from, incarnation: started, operation, code, why });
                }
                match self.serve(to, &transfer, &local) {
                    Ok(data) => {
                        let in_time = transfer.direction == Direction::ReadInTime;
                        let arrived =
                            Arrived { region: local, offset: transfer.local_offset, bytes: data, in_time };
                        let data = (!arrived.bytes.is_empty()).then_some(arrived);
                        self.at(back, Step::Return { to: from, incarnation: started, operation, data });
                    }
                    Err(why) => {
                        let code = Code::AccessDenied;
                        self.at(back, Step::Fail { to: from, incarnation: started, operation, code, why });
                    }
                }
            }
        }
    }

    /// True for a step at a stopped host. It is applied after the host continues.
    fn held(&self, step: &Step) -> bool {
        let to = match step {
            Step::Message { to, .. } | Step::Arrive { to, .. } => to,
            Step::Return { .. } | Step::Fail { .. } => return false,
        };
        self.hosts.get(to).is_some_and(|h| h.stopped && h.alive)
    }
}

impl Network {
    /// A network whose history follows from `seed` and from the calls of its methods.
    pub fn new(seed: u64, faults: Faults) -> Network {
        let state = State {
            now: Duration::ZERO,
            numbers: Numbers::new(seed),
            faults,
            steps: BTreeMap::new(),
            order: 0,
            hosts: BTreeMap::new(),
            cuts: BTreeSet::new(),
            last: BTreeMap::new(),
            trace: 0xcbf2_9ce4_8422_2325,
            events: 0,
        };
        Network { state: Arc::new(Mutex::new(state)) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Kills a host. Its memory and its unreported events are lost. Its peers notice by operations that fail.
    pub fn kill(&self, host: u32) {
        let mut state = self.lock();
        state.note(&[u64::from(host), 11]);
        if let Some(h) = state.hosts.get_mut(&host) {
            *h = Host { incarnation: h.incarnation, ..Host::default() };
        }
    }

    /// Stops a host, as SIGSTOP does: messages and transfers to it wait. The test must not call its `progress`
    /// meanwhile.
    pub fn stop(&self, host: u32, stopped: bool) {
        let mut state = self.lock();
        state.note(&[u64::from(host), 12, stopped.into()]);
        if let Some(h) = state.hosts.get_mut(&host) {
            h.stopped = stopped;
        }
    }

    /// Cuts two hosts off from each other, or joins them again. Messages in flight still arrive.
    pub fn cut(&self, a: u32, b: u32, cut: bool) {
        let mut state = self.lock();
        state.note(&[u64::from(a.min(b)), 13, u64::from(a.max(b)), cut.into()]);
        if cut {
            state.cuts.insert((a.min(b), a.max(b)));
        } else {
            state.cuts.remove(&(a.min(b), a.max(b)));
        }
    }

    /// Changes the faults from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.lock().faults = faults;
    }

    /// The clock.
    pub fn now(&self) -> Duration {
        self.lock().now
    }

    /// Applies the next step if it is due within a millisecond. Otherwise advances the clock by a millisecond.
    pub fn turn(&self) {
        let mut state = self.lock();
        let until = state.now + Duration::from_millis(1);
        let next = state.steps.iter().find(|(_, step)| !state.held(step)).map(|(key, _)| *key);
        match next {
            Some(key) if key.0 <= until => {
                state.now = state.now.max(key.0);
                if let Some(step) = state.steps.remove(&key) {
                    state.apply(step);
                }
            }
            _ => state.now = until,
        }
    }

    /// A number that is the same for equal histories.
    pub fn trace(&self) -> u64 {
        self.lock().trace
    }

    /// The number of events so far.
    pub fn events(&self) -> u64 {
        self.lock().events
    }
}
