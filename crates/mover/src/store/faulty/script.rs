//! Which call meets which fault: a queue that tests fill, and a random generator with a seed.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use forebay_types::Code;

/// How long a late call of the random script takes to land.
pub(super) const RANDOM_LATE: Duration = Duration::from_millis(5);

/// A kind of call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the names are those of the trait's calls")]
pub enum Call {
    List,
    Look,
    Read,
    Upload,
    MakeDurable,
    Publish,
    Rename,
    Remove,
    Discard,
    MakeDirectory,
    RemoveDirectory,
    Link,
    MakeOther,
    SetAttributes,
    SyncDirectory,
    RemoveLeftovers,
}

/// What happens to a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// It fails with a lasting error and has no effect.
    Fail(Code),
    /// It waits for [`Faults::release`], then runs.
    Stall,
    /// It runs after a time.
    Slow(Duration),
    /// An upload stores only the first bytes and reports success. (The version has the true size.)
    Truncate(u64),
    /// An upload stores only the first bytes under the temporary name and fails with a transient error.
    Torn(u64),
    /// It reports a time-out at once, and takes effect after this time. Only for uploads, publications, renames,
    /// removals, directories made, attributes; others just time out.
    Late(Duration),
    /// It takes effect and reports a time-out.
    AnswerLost,
    /// 503, transient.
    Unavailable,
    /// The credentials are refused.
    NoCredentials,
    /// The store is full.
    Full,
}

struct Entry {
    call: Option<Call>,
    fault: Fault,
    times: u64,
}

#[derive(Default)]
struct State {
    entries: VecDeque<Entry>,
    random: Option<(u64, u32)>,
    releases: u64,
    stalled: usize,
    calls: u64,
    late: Vec<JoinHandle<()>>,
}

/// The script, shared by a store and its test.
#[derive(Clone, Default)]
pub struct Faults(Arc<(Mutex<State>, Condvar)>);

impl Faults {
    /// No faults yet.
    pub fn new() -> Faults {
        Faults::default()
    }

    /// Random transient faults in `per_mille` of 1000 calls: 503, lost answers, late effects, torn uploads. The same
    /// seed and order of calls give the same faults.
    pub fn random(seed: u64, per_mille: u32) -> Faults {
        let faults = Faults::default();
        faults.lock().random = Some((seed | 1, per_mille));
        faults
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0 .0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The next `times` calls of this kind, or of any kind, meet a fault. Earlier entries come first.
    pub fn inject(&self, call: impl Into<Option<Call>>, fault: Fault, times: u64) {
        self.lock().entries.push_back(Entry { call: call.into(), fault, times });
    }

    /// No more faults. Calls that stall go on.
    pub fn clear(&self) {
        let mut state = self.lock();
        state.entries.clear();
        state.random = None;
        drop(state);
        self.release();
    }

    /// Lets all calls that stall now go on.
    pub fn release(&self) {
        self.lock().releases += 1;
        self.0 .1.notify_all();
    }

    /// The number of calls that stall now.
    pub fn stalled(&self) -> usize {
        self.lock().stalled
    }

    /// The number of calls so far.
    pub fn calls(&self) -> u64 {
        self.lock().calls
    }

    /// Waits until all late calls have taken effect.
    pub fn wait_late(&self) {
        loop {
            let late = std::mem::take(&mut self.lock().late);
            if late.is_empty() {
                return;
            }
            for thread in late {
                // A late call that panicked has reported that by itself.
                let _ = thread.join();
            }
        }
    }

    pub(super) fn later(&self, after: Duration, run: impl FnOnce() + Send + 'static) {
        let thread = std::thread::spawn(move || {
            std::thread::sleep(after);
            run();
        });
        self.lock().late.push(thread);
    }

    /// The fault of the next call. A call that stalls does so here, and then has no fault.
    pub(super) fn next(&self, call: Call) -> Option<Fault> {
        let mut state = self.lock();
        state.calls += 1;
        let fits = |entry: &Entry| entry.times > 0 && entry.call.is_none_or(|wanted| wanted == call);
        if let Some(entry) = state.entries.iter_mut().find(|entry| fits(entry)) {
            entry.times -= 1;
            let fault = entry.fault;
            if fault != Fault::Stall {
                return Some(fault);
            }
            let before = state.releases;
            state.stalled += 1;
            let released = self.0 .1.wait_while(state, |state| state.releases == before);
            released.unwrap_or_else(|e| e.into_inner()).stalled -= 1;
            return None;
        }
        let (random, per_mille) = state.random.as_mut()?;
        // xorshift64: all that a script needs.
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        let draw = *random >> 16;
        if draw % 1000 >= u64::from(*per_mille) {
            return None;
        }
        Some(match (draw >> 12) % 4 {
            0 => Fault::Late(RANDOM_LATE),
            1 => Fault::AnswerLost,
            2 => Fault::Torn(draw % 4096),
            _ => Fault::Unavailable,
        })
    }
}
