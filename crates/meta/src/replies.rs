//! Records of requests rather than of the namespace: sessions, the last reply of each slot, and the list of orphans.

use forebay_types::{Code, Ino, Layout, Result};

use crate::batch::{Answer, Batch};
use crate::keys::{self, Key};
use crate::page_budget::{Class, Work};
use crate::record::{decode_orphan, encode_orphan, ORPHAN_BYTES_MAX};

/// Bytes of the largest kept reply. Replies to changes are much smaller.
pub const KEPT_REPLY_BYTES_MAX: usize = 1024;
/// Orphans that are removed before the space is checked again.
const ORPHANS_AT_ONCE: usize = 16;

impl Batch<'_> {
    /// The reply kept for a session's slot, with the sequence number of its request.
    pub fn kept_reply(&self, session: u64, slot: u8) -> Result<Option<(u64, &[u8])>> {
        let read = || -> Answer<Option<(u64, &[u8])>> {
            let Some(bytes) = self.tx.get(&keys::reply(session, slot))? else { return Ok(None) };
            let (seq, reply) = bytes.split_first_chunk().ok_or(Code::Corrupt)?;
            Ok(Some((u64::from_le_bytes(*seq), reply)))
        };
        read().map_err(|code| self.failed("read a kept reply of", code))
    }

    /// Keeps the reply to request `seq` of a session's slot. It replaces the slot's last reply.
    pub fn keep_reply(&mut self, session: u64, slot: u8, seq: u64, reply: &[u8]) -> Result<()> {
        let mut keep = || -> Answer<()> {
            let mut buffer = [0; 8 + KEPT_REPLY_BYTES_MAX];
            buffer[..8].copy_from_slice(&seq.to_le_bytes());
            buffer.get_mut(8..8 + reply.len()).ok_or(Code::TooBig)?.copy_from_slice(reply);
            self.admit(Class::Removal, Work::writes(1))?;
            self.tx.put(&keys::reply(session, slot), &buffer[..8 + reply.len()])?;
            self.count_writes()
        };
        keep().map_err(|code| self.failed("keep a reply on", code))
    }

    /// Records a session, before the first reply is kept for it.
    pub fn add_session(&mut self, session: u64) -> Result<()> {
        let mut add = || -> Answer<()> {
            self.admit(Class::Removal, Work::writes(1))?;
            self.tx.put(&keys::session(session), &[])?;
            self.count_writes()
        };
        add().map_err(|code| self.failed("note a session on", code))
    }

    /// All recorded sessions.
    pub fn sessions(&self) -> Result<Vec<u64>> {
        let list = || -> Answer<Vec<u64>> {
            let (first, last) = keys::all_sessions();
            let mut sessions = Vec::new();
            for item in self.tx.range(&first, &last)? {
                let Some(Key::Session(session)) = keys::decode(item?.0) else { return Err(Code::Corrupt) };
                sessions.push(session);
            }
            Ok(sessions)
        };
        list().map_err(|code| self.failed("list the sessions of", code))
    }

    /// Removes a session and all replies kept for it.
    pub fn forget_session(&mut self, session: u64) -> Result<()> {
        let mut forget = || -> Answer<()> {
            self.admit(Class::Removal, Work { writes: 1, run: 256 })?;
            let (first, last) = keys::replies_of(session);
            while let Some((key, _)) = self.tx.first_in(&first, &last)? {
                let Some(Key::Reply(_, slot)) = keys::decode(key) else { return Err(Code::Corrupt) };
                self.tx.delete(&keys::reply(session, slot))?;
            }
            self.tx.delete(&keys::session(session))?;
            self.count_writes()
        };
        forget().map_err(|code| self.failed("forget a session of", code))
    }

    /// Removes files from the list of orphans, after their backing files were unlinked. Inodes that are not listed are
    /// skipped, so that the call can be repeated.
    pub fn remove_orphans(&mut self, inos: &[Ino]) -> Result<()> {
        let mut remove = || -> Answer<()> {
            for some in inos.chunks(ORPHANS_AT_ONCE) {
                self.admit(Class::Removal, Work::writes(some.len() as u64))?;
                for ino in some {
                    if self.state.new_orphans.remove(&ino.0).is_some()
                        || self.tx.delete(&keys::orphan(*ino))?
                    {
                        self.state.ledger.orphans = self.state.ledger.orphans.saturating_sub(1);
                    }
                }
                self.count_writes()?;
            }
            Ok(())
        };
        remove().map_err(|code| self.failed("remove orphans of", code))
    }

    /// Lists an inode number without an inode as an orphan: a backing file may exist under it. An orphan that is
    /// already listed keeps its layout: an inode may have been created under a reserved number, and removed.
    pub fn list_orphan(&mut self, ino: Ino, layout: &Layout) -> Result<()> {
        let mut list = || -> Answer<()> {
            self.admit(Class::Removal, Work::writes(1))?;
            let listed = self.state.new_orphans.contains_key(&ino.0);
            if !listed && self.tx.get(&keys::orphan(ino))?.is_none() {
                self.add_orphan(ino, layout);
            }
            Ok(())
        };
        list().map_err(|code| self.failed("list an orphan on", code))
    }

    pub(crate) fn add_orphan(&mut self, ino: Ino, layout: &Layout) {
        self.state.new_orphans.insert(ino.0, *layout);
        self.state.ledger.orphans += 1;
        self.expect_orphan();
    }

    /// Writes the orphans of the batch that still exist.
    pub(crate) fn write_orphans(&mut self) -> Answer<()> {
        for (ino, layout) in &self.state.new_orphans {
            let mut buffer = [0; ORPHAN_BYTES_MAX];
            let n = encode_orphan(layout, &mut buffer)?;
            self.tx.put(&keys::orphan(Ino(*ino)), &buffer[..n])?;
        }
        self.state.new_orphans.clear();
        Ok(())
    }

    pub(crate) fn list_orphans(&self) -> Answer<Vec<(Ino, Layout)>> {
        let (first, last) = keys::all_orphans();
        let mut orphans = Vec::new();
        for item in self.tx.range(&first, &last)? {
            let (key, bytes) = item?;
            let Some(Key::Orphan(ino)) = keys::decode(key) else { return Err(Code::Corrupt) };
            orphans.push((ino, decode_orphan(bytes)?));
        }
        orphans.extend(self.state.new_orphans.iter().map(|(ino, layout)| (Ino(*ino), *layout)));
        Ok(orphans)
    }
}
