//! Passes operations to the provider and takes them back at their completion.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::time::Duration;

use forebay_fabric_sys::*;
use forebay_types::Code;

use super::health::PROBE;
use super::operation::{Moving, Mr, Operation, Work};
use super::state::{LibfabricEndpoint, Report, PAUSE};
use crate::endpoint::{Direction, Endpoint, Event, Local, Peer};

/// Completions read at once.
const READ_AT_ONCE: usize = 32;
/// Operations of one peer that the provider holds at most. Further ones wait here, so that a peer that accepts none
/// does not use up the provider's resources.
const UNDER_WAY_PER_PEER: usize = 128;
/// How long operations are retried when the provider reports that there is no connection. The provider has noticed that
/// a connection broke, and makes another one soon (ofi_rxm checks every 10 ms). A refused operation has not left, so it
/// can be tried again.
const RECONNECT: Duration = Duration::from_millis(300);
/// The interval at which deadlines are checked.
const DEADLINE_STEP: Duration = Duration::from_millis(1);

fn code_of(error: i32) -> Code {
    match u32::try_from(error.abs()).unwrap_or(0) {
        e if e == FI_EACCES || e == FI_EPERM || e == FI_ENOKEY => Code::AccessDenied,
        e if e == FI_ENOMEM => Code::NoMemory,
        _ => Code::Io,
    }
}

/// Why an operation failed whose deadline has passed.
pub(super) fn late() -> Option<(Code, String)> {
    Some((Code::TimedOut, "its deadline passed".to_owned()))
}

impl LibfabricEndpoint {
    pub(super) fn desc(mr: Option<&Mr>) -> *mut c_void {
        // SAFETY: a registration is open while it is held.
        mr.map_or(std::ptr::null_mut(), |mr| unsafe { fi_mr_desc(mr.0) })
    }

    /// Passes an operation to the provider. Returns the provider's result, 0 if it accepted the operation.
    pub(super) fn give(&self, operation: *mut Operation) -> isize {
        if self.objects.ep.is_null() {
            return -(FI_ENOTCONN as isize);
        }
        // SAFETY: the operation is in `operations`, so it lives until its completion, and so does the memory that it
        // refers to. The iovecs are read within the call.
        unsafe {
            let o = &*operation;
            let (ep, context) = (self.objects.ep, operation.cast::<c_void>());
            match &o.work {
                Work::Receive(place) => {
                    let bytes = self.settings.message_bytes;
                    let start = self.receive_region.start().add(place * bytes).cast();
                    let desc = Self::desc(self.receive_mr.as_ref());
                    fi_trecv(ep, start, bytes, desc, FI_ADDR_UNSPEC, 0, u64::MAX, context)
                }
                Work::Send(send) => {
                    let Some(to) = self.peers[o.peer.0 as usize].av_index else {
                        return -(FI_ENOTCONN as isize);
                    };
                    let desc = Self::desc(send.buffer.mr.as_ref());
                    fi_tsend(ep, send.buffer.region.start().cast(), send.bytes, desc, to, send.tag, context)
                }
                Work::Piece(piece) => {
                    let Some(to) = self.peers[o.peer.0 as usize].av_index else {
                        return -(FI_ENOTCONN as isize);
                    };
                    let iov = iovec {
                        iov_base: piece.region.region.start().add(piece.offset).cast(),
                        iov_len: piece.bytes as _,
                    };
                    let mut desc = fi_mr_desc(piece.region.mr.0);
                    let remote = fi_rma_iov { addr: piece.address, len: piece.bytes, key: piece.key };
                    let message = fi_msg_rma {
                        msg_iov: &iov,
                        desc: &mut desc,
                        iov_count: 1,
                        addr: to,
                        rma_iov: &remote,
                        rma_iov_count: 1,
                        context,
                        data: 0,
                    };
                    match piece.direction {
                        Direction::Read | Direction::ReadInTime => {
                            fi_readmsg(ep, &message, u64::from(FI_COMPLETION))
                        }
                        Direction::Write if self.objects.delivery_complete => {
                            fi_writemsg(ep, &message, u64::from(FI_COMPLETION | FI_DELIVERY_COMPLETE))
                        }
                        Direction::Write | Direction::Ahead => {
                            fi_writemsg(ep, &message, u64::from(FI_COMPLETION))
                        }
                    }
                }
            }
        }
    }

    /// Posts a receive buffer, now or at the next progress.
    pub(super) fn post(&mut self, operation: Box<Operation>) {
        let Work::Receive(place) = operation.work else { unreachable!("only receive buffers are posted") };
        let operation = Box::into_raw(operation);
        self.operations.insert(operation);
        if self.give(operation) != 0 {
            self.take_back(operation);
            self.unposted.push(place);
        }
    }

    /// Takes an operation back that the provider no longer holds.
    pub(super) fn take_back(&mut self, operation: *mut Operation) -> Option<Box<Operation>> {
        // SAFETY: it was in the set, so it came from Box::into_raw and was not taken back before.
        self.operations.remove(&operation).then(|| unsafe { Box::from_raw(operation) })
    }

    /// Queues a new operation for a peer behind those that wait, and passes it to the provider if it is the first.
    pub(super) fn start(&mut self, peer: Peer, work: Work) {
        let operation = Box::into_raw(Operation::new(peer, work));
        self.operations.insert(operation);
        self.peers[peer.0 as usize].waiting.push_back(operation);
        if self.peers[peer.0 as usize].waiting.len() == 1 {
            let now = self.now();
            self.give_waiting(peer, now);
        }
    }

    /// Passes waiting operations of a peer to the provider, as many as it accepts.
    pub(super) fn give_waiting(&mut self, peer: Peer, now: Duration) {
        let index = peer.0 as usize;
        while let Some(&operation) = self.peers[index].waiting.front() {
            let full = self.peers[index].under_way >= UNDER_WAY_PER_PEER;
            let returned = if full { -(FI_EAGAIN as isize) } else { self.give(operation) };
            let state = &mut self.peers[index];
            let unconnected = [FI_ENOTCONN, FI_ECONNABORTED, FI_ECONNRESET, FI_ESHUTDOWN]
                .iter()
                .any(|e| returned == -(*e as isize));
            let patient = unconnected && now < *state.unconnected.get_or_insert(now) + RECONNECT;
            if !unconnected {
                state.unconnected = None;
            }
            if returned == -(FI_EAGAIN as isize) || patient {
                state.again_at = now + state.pause;
                state.pause = (state.pause * 2).min(PAUSE.1);
                return;
            }
            state.waiting.pop_front();
            state.pause = PAUSE.0;
            if returned == 0 {
                state.under_way += 1;
                self.under_way += 1;
            } else if let Some(operation) = self.take_back(operation) {
                let why = self.objects.library.strerror(returned as i64);
                self.settle(*operation, Some((code_of(returned as i32), why)));
            }
        }
    }

    pub(super) fn remove_address(&mut self, index: usize) {
        let state = &mut self.peers[index];
        if self.objects.av.is_null() {
            state.av_index = None;
        } else if let Some(mut av_index) = state.av_index.take() {
            // SAFETY: inserted before, removed once. The provider holds no operation for this peer.
            let removed = unsafe { fi_av_remove(self.objects.av, &mut av_index, 1, 0) };
            if removed != 0 {
                tracing::debug!("address {:02x?} stays in the vector: {removed}", state.address);
                state.av_index = Some(av_index);
            }
        }
    }

    pub(super) fn insert_address(&self, address: &[u8]) -> Result<fi_addr_t, Code> {
        if self.objects.av.is_null() {
            return Err(Code::NoResources);
        }
        let mut av_index = FI_ADDR_UNSPEC;
        // SAFETY: the bytes are an address of the domain's format.
        let inserted = unsafe {
            let start = address.as_ptr().cast();
            fi_av_insert(self.objects.av, start, 1, &mut av_index, 0, std::ptr::null_mut())
        };
        match inserted {
            1 => Ok(av_index),
            e if e < 0 => Err(Code::from_errno(-e)),
            _ => Err(Code::Invalid),
        }
    }

    /// Ends an operation. Reports it to the user, unless that was done before.
    pub(super) fn settle(&mut self, operation: Operation, failed: Option<(Code, String)>) {
        let (peer, told) = (operation.peer, operation.told);
        match operation.work {
            Work::Receive(_) => {}
            Work::Send(send) => {
                if !told {
                    self.reports.push_back(Report { token: send.token, peer, failed });
                }
                self.give_back(send.buffer);
            }
            Work::Piece(piece) => {
                let Some(moving) = self.moving.get_mut(&piece.transfer) else { return };
                moving.pieces_left -= 1;
                if moving.failed.is_none() {
                    moving.failed = failed;
                }
                if moving.pieces_left == 0 {
                    if let Some(moving) = self.moving.remove(&piece.transfer).filter(|m| !m.told) {
                        self.reports.push_back(Report { token: moving.token, peer, failed: moving.failed });
                    }
                }
            }
        }
    }

    /// Handles an operation that the provider has completed.
    pub(super) fn completed(
        &mut self,
        context: *mut c_void,
        failed: Option<(Code, String)>,
    ) -> Option<Box<Operation>> {
        let operation = self.take_back(context.cast())?;
        if !matches!(operation.work, Work::Receive(_)) {
            self.under_way -= 1;
            let state = &mut self.peers[operation.peer.0 as usize];
            state.under_way -= 1;
            state.again_at = Duration::ZERO;
            self.settle(*operation, failed);
            return None;
        }
        Some(operation)
    }

    /// Reads completions. Returns the number of messages received.
    pub(super) fn read_completions(&mut self, sink: &mut dyn FnMut(Event<'_>)) -> usize {
        let mut received = 0;
        if self.objects.cq.is_null() {
            return 0;
        }
        loop {
            // SAFETY: plain numbers and pointers, for which zeros are sound.
            let mut entries: [fi_cq_tagged_entry; READ_AT_ONCE] = unsafe { std::mem::zeroed() };
            // SAFETY: the queue is open and of the tagged format, and has room for so many entries.
            let count = unsafe { fi_cq_read(self.objects.cq, entries.as_mut_ptr().cast(), READ_AT_ONCE) };
            if count == -(FI_EAVAIL as isize) {
                if !self.read_error() || self.is_one_late() {
                    return received;
                }
                continue;
            }
            let Ok(count) = usize::try_from(count) else { return received };
            for entry in entries.iter().take(count) {
                let Some(operation) = self.completed(entry.op_context, None) else { continue };
                let Work::Receive(place) = operation.work else { continue };
                let bytes = entry.len.min(self.settings.message_bytes);
                // SAFETY: the provider does not use the buffer until it is posted again, which is after the sink has
                // returned.
                let message = unsafe {
                    let start = self.receive_region.start().add(place * self.settings.message_bytes);
                    std::slice::from_raw_parts(start, bytes)
                };
                received += 1;
                if entry.tag == PROBE {
                    self.health.probe_came(message);
                } else {
                    sink(Event::Received { tag: entry.tag, bytes: message });
                }
                self.post(operation);
            }
            if count < READ_AT_ONCE || self.is_one_late() {
                return received;
            }
        }
    }

    /// Reads one error. False if there is none.
    pub(super) fn read_error(&mut self) -> bool {
        /// With space behind it for fields that libraries after 1.15 may fill.
        #[repr(C)]
        struct Entry {
            entry: fi_cq_err_entry,
            room: [u64; 8],
        }
        // SAFETY: zeros are sound, and request no further data about the error.
        let mut error: Entry = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is open.
        if unsafe { fi_cq_readerr(self.objects.cq, &mut error.entry, 0) } <= 0 {
            return false;
        }
        let why = self.objects.library.strerror(i64::from(error.entry.err));
        let code = code_of(error.entry.err);
        if let Some(operation) = self.completed(error.entry.op_context, Some((code, why))) {
            // A message failed: it was too long, or cut off, possibly with its connection. Its buffer is posted again.
            self.post(operation);
        }
        true
    }

    /// Reports operations whose deadline has passed. Waiting ones are dropped. Those that the provider holds are kept
    /// until it returns them.
    pub(super) fn look_at_deadlines(&mut self, now: Duration) {
        if now < self.deadlines_at && now < self.none_late_before {
            return;
        }
        self.deadlines_at = now + DEADLINE_STEP;
        for moving in self.moving.values_mut().filter(|m| !m.told && m.deadline <= now) {
            moving.told = true;
            self.reports.push_back(Report { token: moving.token, peer: moving.peer, failed: late() });
        }
        for &operation in &self.operations {
            // SAFETY: the operation lives while it is in the set. Providers write only to its context.
            let (work, told) = unsafe { (&(*operation).work, &mut (*operation).told) };
            if let Work::Send(send) = work {
                if !*told && send.deadline <= now {
                    *told = true;
                    // SAFETY: as above.
                    let peer = unsafe { (*operation).peer };
                    self.reports.push_back(Report { token: send.token, peer, failed: late() });
                }
            }
        }
        self.drop_reported();
        if now >= self.none_late_before {
            self.give_memory_up();
        }
    }

    /// Drops waiting operations that were reported.
    fn drop_reported(&mut self) {
        for index in 0..self.peers.len() {
            let over = |operation: &*mut Operation, moving: &BTreeMap<u64, Moving>| {
                // SAFETY: waiting operations are in the set.
                let operation = unsafe { &**operation };
                match &operation.work {
                    Work::Piece(piece) => moving.get(&piece.transfer).is_none_or(|m| m.told),
                    _ => operation.told,
                }
            };
            if self.peers[index].waiting.iter().any(|o| over(o, &self.moving)) {
                let waiting = std::mem::take(&mut self.peers[index].waiting);
                let (gone, kept): (VecDeque<_>, VecDeque<_>) =
                    waiting.into_iter().partition(|o| over(o, &self.moving));
                self.peers[index].waiting = kept;
                for operation in gone {
                    if let Some(operation) = self.take_back(operation) {
                        self.settle(*operation, late());
                    }
                }
            }
        }
    }

    /// True if a transfer may store no byte any more, because its deadline has passed.
    fn is_one_late(&self) -> bool {
        self.none_late_before != Duration::MAX && self.now() >= self.none_late_before
    }

    /// Stops transfers that may store no byte any more, because their deadline has passed. The provider reads what has
    /// arrived, also while this process was stopped, within any call: so this comes before each.
    pub(super) fn stop_late(&mut self) {
        if self.is_one_late() {
            self.look_at_deadlines(self.now());
        }
    }

    /// Replaces the memory of reported transfers that the provider still has: it cannot stop one, and stores what arrives
    /// for it, even while it closes the endpoint.
    #[cold]
    fn give_memory_up(&mut self) {
        let reported = self.moving.values_mut().filter(|moving| moving.told);
        let late: BTreeMap<Local, _> = reported.filter_map(|moving| moving.in_time.take()).collect();
        for (local, registration) in late {
            tracing::info!("a transfer did not end in time: its memory is replaced");
            self.memory.remove(&local);
            if let Err(code) = registration.region.detach(&[]) {
                // The next worker has no transfer in flight.
                tracing::error!(
                    "a late transfer could change memory that others use: {code}; the process ends"
                );
                std::process::abort();
            }
            for moving in self.moving.values_mut() {
                if moving.in_time.take_if(|(of, _)| *of == local).is_none() {
                    continue;
                }
                moving.told = true;
                let why = "its memory was replaced, because another transfer was late".to_owned();
                let (token, peer) = (moving.token, moving.peer);
                self.reports.push_back(Report { token, peer, failed: Some((Code::Io, why)) });
            }
        }
        self.drop_reported();
        let left = self.moving.values().filter(|moving| moving.in_time.is_some());
        self.none_late_before = left.map(|moving| moving.deadline).min().unwrap_or(Duration::MAX);
    }
}
