//! Connects the mount's notifiers (`notifier.rs`): acknowledgements that wait for invalidations of the kernel's cache.

use super::state::ShardThread;
use crate::worker::notifier::Held;
use crate::worker::notifier::HeldReply;
use crate::worker::notifier::MountedKernel;
use crate::worker::notifier::STUCK;
use crate::worker::statistics::Statistics;
use forebay_types::{Code, Error, Result};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;

impl ShardThread<'_> {
    /// Sends the acknowledgements whose invalidations are written.
    pub(in crate::worker) fn acknowledge_written(&mut self) {
        let Some(mount) = self.mount.as_mut().filter(|mount| mount.has_written()) else { return };
        mount.collect_written();
        self.acknowledge_held(|held| !held.by_inodes && !held.by_names);
    }

    fn acknowledge_held(&mut self, which: impl Fn(&Held) -> bool) {
        let Some(mount) = &mut self.mount else { return };
        let (through, held) = mount.held.drain(..).partition::<VecDeque<_>, _>(which);
        mount.held = held;
        for held in through {
            self.release_held(held.held_reply);
        }
    }

    /// Sends an acknowledgement that waits for nothing any more.
    pub(in crate::worker) fn release_held(&mut self, held_reply: HeldReply) {
        match held_reply {
            HeldReply::Client { client, reply } => self.answer_client(client, &reply),
            HeldReply::Step { flight, reply } => self.step_told(flight, Ok(*reply)),
        }
    }

    /// Sends acknowledgements that have waited too long.
    pub(in crate::worker) fn acknowledge_overdue(&mut self) {
        let Some(mount) = &mut self.mount else { return };
        if mount.held.is_empty() && mount.inodes.is_behind() {
            mount.inodes.revive();
        }
        if mount.next_timeout().is_none_or(|left| !left.is_zero()) {
            return;
        }
        let overdue = mount.handle_overdue();
        Statistics::add(&self.statistics.told_late, overdue);
        self.acknowledge_held(|held| !held.by_names && !held.by_inodes || held.since.elapsed() >= STUCK);
    }

    /// Continues to notify the kernel that the last worker notified.
    pub(in crate::worker) fn resume_mount(&mut self, session: u64, device: OwnedFd) -> Result<()> {
        let what = "cannot notify a mount of changes";
        let starter = self.notifiers.as_ref().ok_or_else(|| Error::new(Code::NotSupported, what))?;
        self.mount = Some(MountedKernel::new(session, device, starter)?);
        Ok(())
    }

    /// A session announces that it serves the pool's mount. A repeated announcement changes nothing.
    pub(in crate::worker) fn take_mount(&mut self, session: u64, device: OwnedFd) -> Result<()> {
        if self.mount.as_ref().is_some_and(|mount| mount.session == session) {
            return Ok(());
        }
        self.forget_mount();
        self.resume_mount(session, device)
    }

    /// The pool is not mounted any more, or another worker continues.
    pub(in crate::worker) fn forget_mount(&mut self) {
        if let Some(mount) = self.mount.as_mut().filter(|mount| !mount.held.is_empty()) {
            mount.give_up_names();
        }
        self.acknowledge_held(|_| true);
        self.mount = None;
    }
}
