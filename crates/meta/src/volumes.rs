//! Records of volumes (docs/decisions/0048): names, owners and segments. The shard of the root's home has those of all
//! volumes of the pool; the memory of their pieces is on the nodes that the segments name.
//!
//! | record | what it means |
//! |---|---|
//! | no complete segment | its maker is reserving the first: no other request sees the volume |
//! | a last segment that is not complete | its maker is reserving it; the volume is used without it |
//! | all complete | no maker |
//!
//! Invariants: a record names each of its pieces before the piece exists, and until it is dropped. So a piece that no
//! record names can be dropped at any time, and the death of a maker, a worker or the daemon at any step leaves nothing
//! else behind. What a maker left is abandoned when its session ends ([`Batch::abandon_volumes`]).

use forebay_types::limits::VOLUMES_MAX;
use forebay_types::{check_volume_name, Code, Ino, NodeId, Reader, Reply, Result, Segment, Volume, Writer};

use crate::batch::{Answer, Batch, Context};
use crate::keys::{self, Key};
use crate::page_budget::{Class, Work};

/// Bytes that the list of volumes takes for one, at most: the name with its length, and the record.
const LISTED_BYTES_MAX: usize = 2 + forebay_types::limits::NAME_MAX + Volume::RECORD_BYTES_MAX;

pub(crate) fn decode_volume(bytes: &[u8]) -> Answer<Volume> {
    let mut r = Reader::new(bytes);
    let volume = Volume::decode(&mut r).map_err(|_| Code::Corrupt)?;
    match r.rest() {
        [] => Ok(volume),
        _ => Err(Code::Corrupt),
    }
}

fn told<'o>(volume: &Volume, payload: &'o mut [u8]) -> Answer<Reply<'o>> {
    let mut w = Writer::new(payload);
    volume.encode(&mut w)?;
    let n = w.len();
    Ok(Reply::Bytes(&payload[..n]))
}

impl Batch<'_> {
    fn stored_volume(&self, name: &[u8]) -> Answer<Option<Volume>> {
        self.tx.get(keys::volume(name).bytes())?.map(decode_volume).transpose()
    }

    /// The volume of this name and number, if the caller may change it.
    fn own_volume(&self, c: &Context<'_>, name: &[u8], ino: Ino) -> Answer<Volume> {
        let volume = self.stored_volume(name)?.ok_or(Code::NotFound)?;
        if volume.ino != ino {
            return Err(Code::Stale);
        }
        match c.caller.uid {
            0 => Ok(volume),
            uid if uid == volume.uid => Ok(volume),
            _ => Err(Code::NotPermitted),
        }
    }

    fn put_volume(&mut self, name: &[u8], volume: &Volume) -> Answer<()> {
        let mut bytes = [0; Volume::RECORD_BYTES_MAX];
        let mut w = Writer::new(&mut bytes);
        volume.encode(&mut w)?;
        let n = w.len();
        self.tx.put(keys::volume(name).bytes(), &bytes[..n])
    }

    fn each_volume(&self, mut visit: impl FnMut(&[u8], &[u8]) -> Answer<bool>) -> Answer<()> {
        let (first, last) = keys::all_volumes();
        for item in self.tx.range(&first, &last)? {
            let (key, bytes) = item?;
            let Some(Key::Volume(name)) = keys::decode(key) else { return Err(Code::Corrupt) };
            if !visit(name, bytes)? {
                break;
            }
        }
        Ok(())
    }

    pub(crate) fn create_volume<'o>(
        &mut self,
        c: &mut Context<'_>,
        name: &[u8],
        mode: u32,
        maker: u64,
        segment: Segment,
        payload: &'o mut [u8],
    ) -> Answer<Reply<'o>> {
        check_volume_name(name)?;
        if maker == 0 || mode & !0o777 != 0 {
            return Err(Code::Invalid);
        }
        if self.stored_volume(name)?.is_some() {
            return Err(Code::Exists);
        }
        let mut count = 0;
        self.each_volume(|_, _| {
            count += 1;
            Ok(true)
        })?;
        let next = self.state.ledger.next_counter;
        if count >= VOLUMES_MAX || next >= Ino::MAX_COUNTER {
            return Err(Code::NoSpace);
        }
        // The record, the ledger, the kept reply.
        self.admit(Class::Growth, Work::writes(3))?;
        self.state.ledger.next_counter += 1;
        let mut volume = Volume {
            ino: Ino::new(self.shard.node(), next),
            uid: c.caller.uid,
            gid: c.caller.gid,
            mode,
            created_seconds: c.now.sec.max(0) as u64,
            maker,
            complete: 0,
            segments: Vec::new(),
            numbers: Vec::new(),
            next_number: 0,
        };
        volume.begin(segment)?;
        self.put_volume(name, &volume)?;
        self.write_ledger()?;
        told(&volume, payload)
    }

    pub(crate) fn grow_volume<'o>(
        &mut self,
        c: &mut Context<'_>,
        (name, ino): (&[u8], Ino),
        maker: u64,
        segment: Segment,
        payload: &'o mut [u8],
    ) -> Answer<Reply<'o>> {
        let mut volume = self.own_volume(c, name, ino)?;
        // Whether the memory of a piece is reserved decides how it is accessed: all pieces of a volume are alike.
        if maker == 0 || segment.is_thin != volume.is_thin() {
            return Err(Code::Invalid);
        }
        if volume.maker != 0 {
            return Err(Code::Busy);
        }
        volume.begin(segment)?;
        self.admit(Class::Growth, Work::writes(2))?;
        volume.maker = maker;
        self.put_volume(name, &volume)?;
        told(&volume, payload)
    }

    pub(crate) fn commit_volume<'o>(
        &mut self,
        c: &mut Context<'_>,
        (name, ino): (&[u8], Ino),
        payload: &'o mut [u8],
    ) -> Answer<Reply<'o>> {
        let mut volume = self.own_volume(c, name, ino)?;
        if volume.maker == 0 {
            return Err(Code::Stale);
        }
        self.admit(Class::Change, Work::writes(2))?;
        volume.maker = 0;
        volume.complete = volume.segments.len() as u16;
        self.put_volume(name, &volume)?;
        told(&volume, payload)
    }

    /// Drops the segment that is being reserved.
    fn abandon(&mut self, name: &[u8], mut volume: Volume) -> Answer<()> {
        self.admit(Class::Removal, Work::writes(2))?;
        if !volume.is_visible() {
            return self.tx.delete(keys::volume(name).bytes()).map(drop);
        }
        volume.maker = 0;
        volume.keep(volume.complete);
        self.put_volume(name, &volume)
    }

    pub(crate) fn abandon_volume(
        &mut self,
        c: &mut Context<'_>,
        name: &[u8],
        ino: Ino,
    ) -> Answer<Reply<'static>> {
        let volume = self.own_volume(c, name, ino)?;
        if volume.maker == 0 {
            return Err(Code::Stale);
        }
        self.abandon(name, volume).map(|()| Reply::Done)
    }

    pub(crate) fn shrink_volume<'o>(
        &mut self,
        c: &mut Context<'_>,
        (name, ino): (&[u8], Ino),
        bytes: u64,
        payload: &'o mut [u8],
    ) -> Answer<Reply<'o>> {
        let mut volume = self.own_volume(c, name, ino)?;
        if volume.maker != 0 {
            return Err(Code::Busy);
        }
        let ends = volume.segments.iter().scan(0, |end, segment| {
            *end += segment.bytes;
            Some(*end)
        });
        let kept = ends.into_iter().position(|end| end == bytes).ok_or(Code::Invalid)? + 1;
        self.admit(Class::Change, Work::writes(2))?;
        volume.complete = kept as u16;
        volume.keep(volume.complete);
        self.put_volume(name, &volume)?;
        told(&volume, payload)
    }

    pub(crate) fn delete_volume(
        &mut self,
        c: &mut Context<'_>,
        name: &[u8],
        ino: Ino,
    ) -> Answer<Reply<'static>> {
        let volume = self.own_volume(c, name, ino)?;
        if volume.maker != 0 {
            return Err(Code::Busy);
        }
        self.admit(Class::Removal, Work::writes(2))?;
        self.tx.delete(keys::volume(name).bytes())?;
        Ok(Reply::Done)
    }

    pub(crate) fn get_volume<'o>(&self, name: &[u8], payload: &'o mut [u8]) -> Answer<Reply<'o>> {
        let volume = self.stored_volume(name)?.filter(Volume::is_visible).ok_or(Code::NotFound)?;
        told(&volume, payload)
    }

    pub(crate) fn list_volumes<'o>(&self, after: &[u8], payload: &'o mut [u8]) -> Answer<Reply<'o>> {
        let mut w = Writer::new(payload);
        self.each_volume(|name, bytes| {
            if name <= after {
                return Ok(true);
            }
            if w.room() < LISTED_BYTES_MAX {
                return Ok(false);
            }
            let volume = decode_volume(bytes)?;
            if volume.is_visible() {
                w.short_bytes(name)?;
                volume.encode(&mut w)?;
            }
            Ok(true)
        })?;
        let n = w.len();
        Ok(Reply::Bytes(&payload[..n]))
    }

    /// All volumes with their names, those that are being made too.
    pub fn volumes(&self) -> Result<Vec<(Vec<u8>, Volume)>> {
        let mut all = Vec::new();
        let listed = self.each_volume(|name, bytes| {
            all.push((name.to_vec(), decode_volume(bytes)?));
            Ok(true)
        });
        listed.map(|()| all).map_err(|code| self.failed("list the volumes of", code))
    }

    /// Abandons what makers left whose sessions have ended. Returns the number of segments that were dropped. The change
    /// is in no journal: the caller commits it before the next request is applied.
    pub fn abandon_volumes(&mut self, has_ended: impl Fn(u64) -> bool) -> Result<usize> {
        let open = |volume: &Volume| volume.maker != 0 && has_ended(volume.maker);
        let left: Vec<_> = self.volumes()?.into_iter().filter(|(_, volume)| open(volume)).collect();
        let count = left.len();
        left.into_iter()
            .try_for_each(|(name, volume)| self.abandon(&name, volume))
            .and_then(|()| self.count_writes())
            .map_err(|code| self.failed("abandon volumes of", code))?;
        Ok(count)
    }
}

/// What a check finds about the records of volumes.
#[derive(Default)]
pub(crate) struct CheckedVolumes {
    numbers: std::collections::BTreeSet<u64>,
}

impl CheckedVolumes {
    /// Checks a record. Returns the volume if it is sound.
    pub(crate) fn record(
        &mut self,
        report: &mut crate::check_report::CheckReport,
        node: NodeId,
        name: &[u8],
        bytes: &[u8],
    ) -> Option<Volume> {
        let shown = || String::from_utf8_lossy(name).escape_debug().to_string();
        report.volumes += 1;
        if check_volume_name(name).is_err() {
            report.problem(|| format!("volume \"{}\" has an impossible name", shown()));
        }
        let Ok(volume) = decode_volume(bytes) else {
            report.problem(|| format!("the record of volume \"{}\" is damaged", shown()));
            return None;
        };
        if volume.ino.birth_node() != node || !self.numbers.insert(volume.ino.0) {
            report.problem(|| format!("volume \"{}\" has a wrong number, {}", shown(), volume.ino));
        }
        Some(volume)
    }

    /// True if a volume has this number.
    pub(crate) fn has(&self, ino: Ino) -> bool {
        self.numbers.contains(&ino.0)
    }
}
