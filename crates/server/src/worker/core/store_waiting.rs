//! Connects the calls that wait for a backing store (`store_waits.rs`).

use std::collections::HashSet;

use forebay_data::{NodeTargets, Target};
use forebay_ring::call_clock;
use forebay_tasks::StoreSettings;
use forebay_types::limits::{HIGH_WATER_PERCENT, RANGE_BYTES};
use forebay_types::{
    Answer, Code, Ino, Reader, Refusal, Reply, Request, RestoredRange, Result, StoreObject, StoreTask, Writer,
};

use super::state::ShardThread;
use crate::worker::batch::Taken;
use crate::worker::call::Call;
use crate::worker::recall_limits::{Recaller, Verdict};
use crate::worker::session_id::node_of_session;
use crate::worker::store_waits::Released;

/// Calls that may write between two looks at the free space, and the time between two looks: what programs write
/// meanwhile is not seen.
const CALLS_A_LOOK: u32 = 15;
const LOOK_NS: u64 = 1_000_000;

/// True when all targets of this node are filled up to the high watermark. Volumes do not count: the mover can make no
/// room for files in their memory.
fn is_filled(targets: &NodeTargets) -> bool {
    let is_filled = |target: &Target| {
        let space = target.space_for_files().unwrap_or_default();
        let used = space.total_bytes.saturating_sub(space.free_bytes);
        used.saturating_mul(100) >= space.total_bytes.saturating_mul(HIGH_WATER_PERCENT)
    };
    !targets.for_files().is_empty() && targets.for_files().iter().all(is_filled)
}

impl ShardThread<'_> {
    /// Serves requests of movers and for files that are to be restored. True when the call waits, or was answered.
    pub(in crate::worker) fn serve_for_store(&mut self, session: usize, call: &Call) -> Result<bool> {
        match *call.request() {
            Request::StoreWork { restart } => {
                let tasks = self.store.tasks(restart, call_clock());
                if tasks.is_empty() && !self.store.has_waited(&call.client) {
                    self.store.rest(call.clone(), call_clock());
                    return Ok(true);
                }
                let mut bytes = vec![0; StoreTask::BYTES_MAX * tasks.len()];
                let mut w = Writer::new(&mut bytes);
                let encoded = tasks.iter().try_for_each(|task| task.encode(&mut w));
                let n = w.len();
                let answer = encoded.map(|()| Reply::Bytes(&bytes[..n])).map_err(Refusal::Code);
                self.conclude(session, call.clone(), &answer, None);
                Ok(true)
            }
            Request::StoreFailed { ino, code } => {
                self.store.done(ino, Some(Code::from_u16(code)));
                self.conclude(session, call.clone(), &Ok(Reply::Done), None);
                Ok(true)
            }
            Request::LookedUp { parent, name, code } => {
                let failed = match code {
                    0 => None,
                    code if code == Code::NotFound as u16 => {
                        // An error means that the directory is gone: the calls that wait find that out themselves.
                        let _ = self.batch()?.note_absent(parent, name);
                        None
                    }
                    code => Some(Code::from_u16(code)),
                };
                self.store.looked_up(parent, name, failed);
                self.conclude(session, call.clone(), &Ok(Reply::Done), None);
                Ok(true)
            }
            Request::Persisted { ino, code } => {
                self.store.persisted(ino, (code != 0).then(|| Code::from_u16(code)));
                self.conclude(session, call.clone(), &Ok(Reply::Done), None);
                Ok(true)
            }
            Request::Persist { ino, since } => {
                let now = call_clock();
                let since = if since == 0 { now } else { since };
                match self.store.persist_answer(&call.client) {
                    Some(None) => return Ok(false),
                    Some(Some(since)) => {
                        self.conclude(session, call.clone(), &Ok(Reply::Count(since)), None);
                        return Ok(true);
                    }
                    None => {}
                }
                if self.store.is_persisted(ino, since) || !self.batch()?.is_attached_inode(ino) {
                    return Ok(false);
                }
                self.store.wait_to_persist(call.clone(), ino, since, now);
                Ok(true)
            }
            Request::Recall { ino, process } => {
                let answer = match self.may_recall(call, ino, process)? {
                    true => Ok(Reply::Done),
                    false => Err(Refusal::Code(Code::NoAttribute)),
                };
                self.conclude(session, call.clone(), &answer, None);
                Ok(true)
            }
            Request::AskMover { .. } => {
                let Some(answer) = self.mover_mail.answer_for(call, call_clock()) else {
                    if !self.mover_mail.has_mover() {
                        self.start_mover();
                    }
                    return Ok(true);
                };
                let answer = answer.as_ref().map(|bytes| Reply::Bytes(bytes));
                self.conclude(session, call.clone(), &answer.map_err(|code| (*code).into()), None);
                Ok(true)
            }
            Request::MoverWork => {
                let Some(work) = self.mover_mail.work_for(call, call_clock()) else { return Ok(true) };
                let mut bytes = Vec::new();
                if let Some((number, letter)) = work {
                    bytes.extend(number.to_le_bytes());
                    if let Request::AskMover { message, .. } = *letter.request() {
                        bytes.extend(message);
                    }
                }
                self.conclude(session, call.clone(), &Ok(Reply::Bytes(&bytes)), None);
                Ok(true)
            }
            Request::MoverAnswer { number, answer } => {
                self.mover_mail.answered(number, answer);
                self.conclude(session, call.clone(), &Ok(Reply::Done), None);
                Ok(true)
            }
            Request::Restore { ino } => {
                let is_over = self.store.has_waited(&call.client);
                if is_over || !self.batch()?.is_to_be_restored(ino) {
                    return Ok(false);
                }
                self.store.wait(call.clone(), StoreTask::Restore(ino), call_clock());
                Ok(true)
            }
            Request::RestoreRange { ino, offset } => {
                if let Some(range) = self.store.range_answer(&call.client) {
                    let mut bytes = [0; RestoredRange::BYTES];
                    let encoded = range.encode(&mut Writer::new(&mut bytes));
                    let answer = encoded.map(|()| Reply::Bytes(&bytes)).map_err(Refusal::Code);
                    self.conclude(session, call.clone(), &answer, None);
                    return Ok(true);
                }
                let is_over = self.store.has_waited(&call.client);
                if is_over || !self.batch()?.is_to_be_restored(ino) {
                    return Ok(false);
                }
                let task = StoreTask::Range(ino, offset / RANGE_BYTES);
                self.store.wait(call.clone(), task, call_clock());
                Ok(true)
            }
            Request::RangeRestored { ino, backing, from, to } => {
                self.store.range_restored(ino, RestoredRange { backing, from, to });
                self.conclude(session, call.clone(), &Ok(Reply::Done), None);
                Ok(true)
            }
            // A restore that is under way goes on where it began.
            Request::Relocate { ino, .. } if self.store.is_restoring(ino) => {
                self.conclude(session, call.clone(), &Err(Refusal::Code(Code::Busy)), None);
                Ok(true)
            }
            // Data of other nodes' programs are on their nodes, as a rule.
            Request::Create { parent: ino, dirty: true, .. } | Request::MarkDirty { ino }
                if self.sessions[session].is_here() =>
            {
                self.wait_for_space(call, ino)
            }
            _ => Ok(false),
        }
    }

    /// True if a process may have the data of a file copied in order to read them.
    #[cold]
    fn may_recall(&mut self, call: &Call, ino: Ino, process: u64) -> Result<bool> {
        let batch = self.batch()?;
        let Some(bytes) = batch.bytes_to_restore(ino) else { return Ok(true) };
        // An inode of which the store cannot be told is not copied anyway.
        let Ok(Some((store, text))) = batch.store_settings(ino) else { return Ok(true) };
        let Ok(settings) = serde_json::from_slice::<StoreSettings>(&text) else { return Ok(true) };
        let recaller = Recaller { store, node: node_of_session(call.client.session), process };
        match self.recalls.admit(recaller, ino, bytes, settings.recall, call_clock()) {
            Verdict::Allowed => Ok(true),
            Verdict::Refused { bytes, is_first } => {
                if is_first {
                    tracing::warn!(
                        "process {process} had {} copied from {} lately: it cannot open more released files for reading (--recall {})",
                        forebay_data::format_size(bytes),
                        settings.url,
                        settings.recall
                    );
                }
                Ok(false)
            }
        }
    }

    /// From the high watermark on, programs that are about to write to a store's tree wait until the mover has released
    /// files, for a limited time. True when the call waits.
    #[inline]
    fn wait_for_space(&mut self, call: &Call, ino: Ino) -> Result<bool> {
        // Asked first, also if there is space by now: it is told once.
        if !self.batch()?.waits_for_space(ino) || self.store.has_waited(&call.client) || !self.is_full() {
            return Ok(false);
        }
        self.store.wait_for_space(call.clone(), call_clock());
        Ok(true)
    }

    /// True when the targets are filled up to the high watermark. Unless they were at the last look, every
    /// [`CALLS_A_LOOK`]th call looks, and a call that comes [`LOOK_NS`] after the last look.
    fn is_full(&mut self) -> bool {
        let now = call_clock();
        if !self.store.was_full && self.store.calls_to_look > 0 && now < self.store.look_at_ns {
            self.store.calls_to_look -= 1;
            return false;
        }
        self.store.look_at_ns = now + LOOK_NS;
        self.store.calls_to_look = CALLS_A_LOOK;
        self.store.was_full = is_filled(&self.targets);
        self.store.was_full
    }

    /// A call was refused because a directory is not listed: it waits for the directory, or for the one name that it
    /// needs.
    pub(in crate::worker) fn wait_for_listing(&mut self, call: &Call) -> bool {
        let Some(unlisted) = self.batch.as_mut().and_then(|batch| batch.take_unlisted()) else {
            return false;
        };
        let task = match unlisted {
            (ino, None) => StoreTask::List(ino),
            (ino, Some(name)) => StoreTask::Look(ino, name),
        };
        self.store.wait(call.clone(), task, call_clock());
        true
    }

    /// Makes the supervisor keep a mover.
    #[cold]
    fn start_mover(&self) {
        if let Some(supervisor) = &self.notifiers {
            supervisor.start_mover();
        }
    }

    /// A change that was made may be what calls wait for.
    #[inline]
    pub(in crate::worker) fn note_for_store(&mut self, request: &Request<'_>, answer: &Answer<'_>) {
        if matches!(request, Request::Attach { .. }) {
            self.start_mover();
        }
        match (request, answer) {
            (
                Request::Import { ino, objects } | Request::Listed { ino, objects, .. },
                Ok(Reply::Count(count)),
            ) => {
                self.note_names(*ino, objects, *count);
            }
            (Request::Listed { ino, .. } | Request::Restored { ino, .. }, _) => self.store.done(*ino, None),
            _ => {}
        }
        if let Request::StoreReports { reports, .. } = *request {
            // One that was refused has calls try again, and wait again.
            for report in Request::decode_reports(reports).unwrap_or_default() {
                if let Request::Restored { ino, .. } = report {
                    self.store.done(ino, None);
                }
            }
        }
    }

    /// Names of an unlisted directory are there: the first `count` of these objects.
    #[cold]
    fn note_names(&mut self, directory: Ino, objects: &[u8], count: u64) {
        if !self.store.waits_for_names_of(directory) {
            return;
        }
        let (mut r, mut names) = (Reader::new(objects), HashSet::new());
        for _ in 0..count {
            // They were decoded before.
            let Ok(object) = StoreObject::decode(&mut r) else { break };
            names.insert(object.name);
        }
        self.store.names_arrived(directory, &names);
    }

    /// Takes calls that have waited into the batch, until it has `most` calls, and answers those that failed.
    pub(in crate::worker) fn take_calls_of_store(&mut self, most: usize) {
        if !self.store.is_empty() {
            let now = call_clock();
            self.store.expire(now);
            if self.store.is_to_look_for_space(now) && !is_filled(&self.targets) {
                self.store.was_full = false;
                self.store.has_space();
            }
        }
        if !self.mover_mail.is_empty() {
            self.mover_mail.expire(call_clock());
        }
        while self.pipeline.taken.len() < most {
            let Some(call) = self.mover_mail.released.pop_front() else { break };
            let client = call.client;
            let Some(session) = self.sessions.index_of(client.session) else { continue };
            if self.sessions[session].is_waiting(client.slot, client.seq) {
                self.pipeline.taken.push_back(Taken { session, client, call: Ok(call) });
            }
        }
        while self.pipeline.taken.len() < most {
            let Some(released) = self.store.released.pop_front() else { break };
            let (call, failed) = match released {
                Released::Again(call) => (call, None),
                Released::Failed(call, code) => (call, Some(code)),
            };
            let client = call.client;
            let Some(session) = self.sessions.index_of(client.session) else { continue };
            if !self.sessions[session].is_waiting(client.slot, client.seq) {
                continue;
            }
            let call = failed.map_or(Ok(call), Err);
            self.pipeline.taken.push_back(Taken { session, client, call });
        }
    }

    /// Milliseconds until a call has waited long enough for a store.
    pub(in crate::worker) fn next_store_ms(&self) -> Option<u64> {
        let next = self.store.next_ns().into_iter().chain(self.mover_mail.next_ns()).min()?;
        Some(next.saturating_sub(call_clock()) / 1_000_000 + 1)
    }
}
