//! Plain pending places in memory, and the log of them in the shard.
//!
//! Most names of an attached tree become pending when they are created, and many are renamed or removed before a mover
//! looks at them. With a record for each, a change of a name would write one or two records anywhere in the tree. So the
//! *plain* pending places, in which no mover has begun anything and which are in no conflict, are in a table in memory,
//! and what a transaction changes of the table is appended to a log: to records that are filled one after the other. All
//! others are records of their own (`places.rs`), and so are those that find the table full. No place is both.
//!
//! The items of the log, in their order, make the table as of the last commit. A record of the log is removed when it is
//! the oldest one and no item in it is valid: then what its other items took back is gone too. If the log is more than
//! twice as long as the table needs, the valid items of the oldest record are appended anew. Tests: here, and
//! `tests/backing_store/pending.rs`.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

use forebay_types::limits::{NAME_MAX, PENDING_IN_MEMORY_MAX};
use forebay_types::{name_hash, Code, Ino, Reader, Timestamp};

use crate::batch::{Answer, Batch};
use crate::keys::{self, Key};
use crate::lmdb_txn::Transaction;
use crate::places::PendingRecord;
use crate::record::RECORD_VERSION;

/// Bytes of a full record of the log, at most: less than LMDB's largest in-page record.
const RECORD_BYTES_MAX: usize = 1900;
/// Bytes of an item besides the place: kind, length, changes, time.
const ITEM_BYTES: usize = 1 + 2 + 8 + 12;
/// Records that the log may have beyond twice what the table needs. With more, valid items are appended anew.
const RECORDS_MORE: usize = 8;
/// With so many records, about four times what a full table needs, no place comes into the table.
const RECORDS_MAX: usize = 4096;
/// Records that cleaning may write or remove, when one was filled and at a commit.
const CLEANED_BY_CHANGE: usize = 2;
const CLEANED_BY_COMMIT: usize = 6;
/// Records that the commit may write or remove.
pub(crate) const WRITES_AT_COMMIT: u64 = 2 + CLEANED_BY_COMMIT as u64;

/// Kinds of items: the place is pending from now on, or is not.
const PENDING: u8 = 1;
const NOT_PENDING: u8 = 0;

/// A hash for places.
#[derive(Default)]
struct PlaceHasher(u64);

impl Hasher for PlaceHasher {
    fn finish(&self) -> u64 {
        // The upper bits of a name's hash are 0.
        self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 ^= name_hash(bytes);
    }

    /// The length tells nothing more.
    fn write_usize(&mut self, _: usize) {}
}

/// A plain pending place.
#[derive(Debug)]
struct Plain {
    changes: u64,
    since: Timestamp,
    /// The number of the log's record that has it.
    logged: u64,
}

/// The table and the log. A place is given as in the keys of records: the bytes of directory and name.
#[derive(Debug, Default)]
pub(crate) struct PendingLog {
    places: HashMap<Box<[u8]>, Plain, BuildHasherDefault<PlaceHasher>>,
    /// Bytes of all valid items.
    valid_bytes: usize,
    /// The number of the oldest record.
    first: u64,
    /// How many items of each record are valid, the oldest first.
    valid: VecDeque<u32>,
    /// The last record, which is not full.
    last: Vec<u8>,
    /// Something was appended since the last commit.
    is_changed: bool,
}

/// Directory and name of a place.
pub(crate) fn split_place(place: &[u8]) -> Answer<(Ino, &[u8])> {
    let (directory, name) = place.split_first_chunk().ok_or(Code::Corrupt)?;
    match name.len() {
        1..=NAME_MAX => Ok((Ino(u64::from_be_bytes(*directory)), name)),
        _ => Err(Code::Corrupt),
    }
}

/// Passes the items of a record to `each`: a place, and how it is pending from then on; none if it is not.
fn decode_items(bytes: &[u8], mut each: impl FnMut(&[u8], Option<PendingRecord>)) -> Answer<()> {
    let mut r = Reader::new(bytes);
    let mut read = || {
        if r.u8()? != RECORD_VERSION {
            return Err(Code::Corrupt);
        }
        while !r.rest().is_empty() {
            let (kind, place) = (r.u8()?, r.short_bytes()?);
            split_place(place)?;
            let record = match kind {
                NOT_PENDING => None,
                PENDING => {
                    let changes = r.u64()?;
                    let since = Timestamp { sec: r.u64()? as i64, nsec: r.u32()? };
                    Some(PendingRecord::plain(changes, since))
                }
                _ => return Err(Code::Corrupt),
            };
            each(place, record);
        }
        Ok(())
    };
    read().map_err(|_| Code::Corrupt)
}

/// Repeats what a record of the log has: `places`, as directories and names, become those that are pending after it.
pub(crate) fn replay_items(bytes: &[u8], places: &mut HashSet<(u64, Vec<u8>)>) -> Answer<()> {
    decode_items(bytes, |place, record| {
        let Ok((directory, name)) = split_place(place) else { return };
        let place = (directory.0, name.to_vec());
        match record {
            Some(_) => places.insert(place),
            None => places.remove(&place),
        };
    })
}

impl PendingLog {
    /// How a place is pending, if it is in the table.
    #[inline]
    pub(crate) fn find(&self, place: &[u8]) -> Option<PendingRecord> {
        self.places.get(place).map(|plain| PendingRecord::plain(plain.changes, plain.since))
    }

    /// True if one more place may come into the table.
    pub(crate) fn has_room(&self) -> bool {
        self.places.len() < PENDING_IN_MEMORY_MAX && self.valid.len() < RECORDS_MAX
    }

    /// True if valid items are to be appended anew.
    fn is_long(&self) -> bool {
        self.valid.len() > RECORDS_MORE + 2 * self.valid_bytes.div_ceil(RECORD_BYTES_MAX)
    }

    /// True if something was appended since the last commit.
    pub(crate) fn is_changed(&self) -> bool {
        self.is_changed
    }

    fn number_of_last(&self) -> u64 {
        self.first + self.valid.len() as u64 - 1
    }

    /// Puts a place into the table, or changes how it is pending.
    fn put(&mut self, tx: &mut Transaction<'_>, place: &[u8], record: &PendingRecord) -> Answer<()> {
        let is_full = self.append(tx, place, Some((record.changes, record.since)))?;
        let plain = Plain { changes: record.changes, since: record.since, logged: self.number_of_last() };
        self.note(place, Some(plain));
        match is_full {
            true => self.clean(tx, CLEANED_BY_CHANGE),
            false => Ok(()),
        }
    }

    /// Removes a place from the table. False if it was not there.
    fn remove(&mut self, tx: &mut Transaction<'_>, place: &[u8]) -> Answer<bool> {
        if !self.note(place, None) {
            return Ok(false);
        }
        if self.append(tx, place, None)? {
            self.clean(tx, CLEANED_BY_CHANGE)?;
        }
        Ok(true)
    }

    /// Changes the table alone. Returns whether the place was in it.
    fn note(&mut self, place: &[u8], plain: Option<Plain>) -> bool {
        let bytes = ITEM_BYTES + place.len();
        let before = match plain {
            None => {
                let before = self.places.remove(place);
                self.valid_bytes -= if before.is_some() { bytes } else { 0 };
                before
            }
            Some(plain) => {
                self.valid[(plain.logged - self.first) as usize] += 1;
                match self.places.get_mut(place) {
                    Some(known) => Some(std::mem::replace(known, plain)),
                    None => {
                        self.valid_bytes += bytes;
                        self.places.insert(place.into(), plain)
                    }
                }
            }
        };
        if let Some(before) = &before {
            self.valid[(before.logged - self.first) as usize] -= 1;
        }
        before.is_some()
    }

    /// Appends an item to the last record. True if that was full, and another one was begun.
    fn append(
        &mut self,
        tx: &mut Transaction<'_>,
        place: &[u8],
        pending: Option<(u64, Timestamp)>,
    ) -> Answer<bool> {
        let is_full = !self.valid.is_empty() && self.last.len() + ITEM_BYTES + place.len() > RECORD_BYTES_MAX;
        if is_full {
            tx.put(&keys::pending_log(self.number_of_last()), &self.last)?;
        }
        if is_full || self.valid.is_empty() {
            self.valid.push_back(0);
            self.last.clear();
            self.last.push(RECORD_VERSION);
        }
        self.is_changed = true;
        self.last.push(if pending.is_some() { PENDING } else { NOT_PENDING });
        self.last.extend_from_slice(&(place.len() as u16).to_le_bytes());
        self.last.extend_from_slice(place);
        if let Some((changes, since)) = pending {
            self.last.extend_from_slice(&changes.to_le_bytes());
            self.last.extend_from_slice(&since.sec.to_le_bytes());
            self.last.extend_from_slice(&since.nsec.to_le_bytes());
        }
        Ok(is_full)
    }

    /// Removes the oldest records, if what they have is not valid, or if the log is long. Writes and removes at most
    /// `writes` records.
    fn clean(&mut self, tx: &mut Transaction<'_>, mut writes: usize) -> Answer<()> {
        while self.valid.len() > 1 {
            let is_valid = self.valid.front().is_some_and(|valid| *valid > 0);
            let needed = if is_valid { 2 } else { 1 };
            if writes < needed || is_valid && !self.is_long() {
                break;
            }
            writes -= needed;
            if is_valid {
                // It may fill another one.
                self.move_oldest(tx)?;
            }
            tx.delete(&keys::pending_log(self.first))?;
            self.valid.pop_front();
            self.first += 1;
        }
        Ok(())
    }

    /// Appends the valid items of the oldest record anew.
    fn move_oldest(&mut self, tx: &mut Transaction<'_>) -> Answer<()> {
        let bytes = tx.get(&keys::pending_log(self.first))?.ok_or(Code::Corrupt)?.to_vec();
        let mut places = Vec::new();
        decode_items(&bytes, |place, _| places.push(place.to_vec()))?;
        for place in places {
            let Some(plain) = self.places.get(&*place).filter(|plain| plain.logged == self.first) else {
                continue;
            };
            let (changes, since) = (plain.changes, plain.since);
            self.append(tx, &place, Some((changes, since)))?;
            self.note(&place, Some(Plain { changes, since, logged: self.number_of_last() }));
        }
        Ok(())
    }

    /// Writes what was appended since the last commit.
    pub(crate) fn write(&mut self, tx: &mut Transaction<'_>) -> Answer<()> {
        if !self.is_changed {
            return Ok(());
        }
        self.clean(tx, CLEANED_BY_COMMIT)?;
        self.is_changed = false;
        let key = keys::pending_log(self.number_of_last());
        if self.places.is_empty() && self.valid.len() == 1 {
            self.valid.clear();
            self.first += 1;
            return tx.delete(&key).map(|_| ());
        }
        tx.put(&key, &self.last)
    }

    /// Reads the log.
    pub(crate) fn read(tx: &Transaction<'_>) -> Answer<PendingLog> {
        let mut log = PendingLog::default();
        let (first, last) = keys::all_pending_logs();
        for record in tx.range(&first, &last)? {
            let (key, bytes) = record?;
            let Some(Key::PendingLog(number)) = keys::decode(key) else { return Err(Code::Corrupt) };
            if log.valid.is_empty() {
                log.first = number;
            }
            log.valid.push_back(0);
            if number != log.number_of_last() {
                return Err(Code::Corrupt);
            }
            decode_items(bytes, |place, record| {
                let plain = record.map(|record| Plain {
                    changes: record.changes,
                    since: record.since,
                    logged: number,
                });
                log.note(place, plain);
            })?;
            log.last.clear();
            log.last.extend_from_slice(bytes);
        }
        Ok(log)
    }

    /// The first `count` places behind one, in the order of their bytes.
    pub(crate) fn behind(&self, place: &[u8], count: usize) -> Vec<(&[u8], PendingRecord)> {
        let mut found: Vec<(&[u8], &Plain)> =
            self.places.iter().map(|(key, plain)| (&**key, plain)).filter(|(key, _)| *key > place).collect();
        if found.len() > count {
            found.select_nth_unstable_by_key(count, |(key, _)| *key);
            found.truncate(count);
        }
        found.sort_unstable_by_key(|(key, _)| *key);
        let told = |plain: &Plain| PendingRecord::plain(plain.changes, plain.since);
        found.into_iter().map(|(key, plain)| (key, told(plain))).collect()
    }

    /// The directories with places in the table.
    pub(crate) fn directories(&self) -> Answer<HashSet<Ino>> {
        self.places.keys().map(|place| split_place(place).map(|(directory, _)| directory)).collect()
    }
}

impl Batch<'_> {
    /// Puts a plain pending place into the table in memory.
    pub(crate) fn put_plain(&mut self, place: &[u8], record: &PendingRecord) -> Answer<()> {
        let is_first = !self.state.pending.is_changed();
        self.state.pending.put(&mut self.tx, place, record)?;
        self.expect_log(is_first);
        Ok(())
    }

    /// Removes a place from the table in memory. False if it was not there.
    pub(crate) fn remove_plain(&mut self, place: &[u8]) -> Answer<bool> {
        let is_first = !self.state.pending.is_changed();
        let was_there = self.state.pending.remove(&mut self.tx, place)?;
        self.expect_log(is_first && was_there);
        Ok(was_there)
    }

    /// If `is_first`, the commit will write the log.
    fn expect_log(&mut self, is_first: bool) {
        if is_first {
            self.expect_writes(WRITES_AT_COMMIT);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::PathBuf;

    use super::*;
    use crate::{Shard, ShardOptions};
    use forebay_types::NodeId;

    /// A directory for a shard, which is removed in the end.
    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Directory {
            let path = std::env::temp_dir().join(format!("forebay-log-{}-{name}", std::process::id()));
            std::fs::create_dir(&path).unwrap();
            let options = ShardOptions {
                node: NodeId::FIRST,
                map_bytes: 64 << 20,
                root_mode: 0o755,
                root_uid: 1,
                root_gid: 2,
            };
            drop(Shard::create(&path, &options, Timestamp::default()).unwrap());
            Directory(path)
        }

        fn open(&self) -> Shard {
            Shard::open(&self.0).unwrap()
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// Places with the number of changes.
    type Model = BTreeMap<Vec<u8>, u64>;

    fn place(i: u64) -> Vec<u8> {
        let name = "n".repeat(1 + (i % 90) as usize);
        [&(i % 7).to_be_bytes()[..], name.as_bytes(), i.to_string().as_bytes()].concat()
    }

    fn told(batch: &Batch<'_>) -> Model {
        let found = batch.state.pending.behind(b"", usize::MAX);
        found.into_iter().map(|(place, record)| (place.to_vec(), record.changes)).collect()
    }

    /// A number below `end`.
    fn below(seed: &mut u64, end: u64) -> u64 {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 33) % end
    }

    /// Changes one place, in the table and in the model.
    fn change(batch: &mut Batch<'_>, model: &mut Model, seed: &mut u64, places: u64) {
        let place = place(below(seed, places));
        if below(seed, 2) == 0 {
            let was_there = batch.remove_plain(&place).unwrap();
            assert_eq!(was_there, model.remove(&place).is_some());
        } else {
            let changes = model.get(&place).map_or(1, |changes| changes + 1);
            let record = PendingRecord::plain(changes, Timestamp { sec: changes as i64, nsec: 5 });
            batch.put_plain(&place, &record).unwrap();
            assert_eq!(batch.state.pending.find(&place), Some(record));
            model.insert(place, changes);
        }
    }

    #[test]
    fn log_gives_the_table_as_of_the_last_commit_and_stays_short() {
        let directory = Directory::new("random");
        let (mut shard, mut model, mut seed) = (directory.open(), Model::new(), 1);
        for round in 0..600 {
            // Few places, then many, then few again.
            let places = if round / 100 % 2 == 0 { 20 } else { 600 };
            let mut batch = shard.begin().unwrap();
            for _ in 0..below(&mut seed, 60) {
                change(&mut batch, &mut model, &mut seed, places);
            }
            assert_eq!(told(&batch), model);
            let log = &batch.state.pending;
            let bytes: usize = log.places.keys().map(|place| ITEM_BYTES + place.len()).sum();
            assert_eq!((log.valid_bytes, log.valid.iter().sum::<u32>()), (bytes, model.len() as u32));
            batch.commit().unwrap();
            match round % 10 {
                // A batch that is given up.
                3 => {
                    let (mut batch, mut model) = (shard.begin().unwrap(), model.clone());
                    for _ in 0..50 {
                        change(&mut batch, &mut model, &mut seed, places);
                    }
                }
                7 => {
                    drop(shard);
                    shard = directory.open();
                }
                _ => {}
            }
            if round % 50 == 49 {
                let report = shard.check(&mut |_| {}).unwrap();
                assert_eq!((report.problems, report.pending), (Vec::new(), model.len() as u64));
            }
        }
        // What is removed record by record has caught up by now.
        let mut batch = shard.begin().unwrap();
        for i in 0..600 {
            batch.remove_plain(&place(i)).unwrap();
        }
        batch.commit().unwrap();
        for i in 0..100 {
            let mut batch = shard.begin().unwrap();
            batch.put_plain(&place(i), &PendingRecord::plain(1, Timestamp::default())).unwrap();
            batch.commit().unwrap();
            let mut batch = shard.begin().unwrap();
            assert!(batch.remove_plain(&place(i)).unwrap());
            batch.commit().unwrap();
        }
        let batch = shard.begin().unwrap();
        let (first, last) = keys::all_pending_logs();
        assert_eq!(batch.tx.range(&first, &last).unwrap().count(), 0, "nothing is pending");
    }

    #[test]
    fn log_of_names_that_come_and_go_is_no_longer_than_some_records() {
        let directory = Directory::new("short");
        let shard = directory.open();
        let kept = PendingRecord::plain(7, Timestamp { sec: 1, nsec: 2 });
        let mut batch = shard.begin().unwrap();
        for i in 0..50 {
            batch.put_plain(&place(i), &kept).unwrap();
        }
        for i in 1000..9000 {
            batch.put_plain(&place(i), &kept).unwrap();
            assert!(batch.remove_plain(&place(i)).unwrap());
            let log = &batch.state.pending;
            let most = RECORDS_MORE + 2 * log.valid_bytes.div_ceil(RECORD_BYTES_MAX) + 2;
            assert!(log.valid.len() <= most, "{} records", log.valid.len());
        }
        batch.commit().unwrap();
        drop(shard);
        let shard = directory.open();
        let batch = shard.begin().unwrap();
        let told: Vec<_> =
            batch.state.pending.behind(b"", 100).into_iter().map(|(_, record)| record).collect();
        assert_eq!(told, [kept; 50]);
        let found = batch.state.pending.behind(&place(3), 5);
        let all: Vec<_> = batch.state.pending.behind(b"", 100).into_iter().map(|(place, _)| place).collect();
        let at = all.iter().position(|other| **other == *place(3)).unwrap();
        assert_eq!(found.iter().map(|(place, _)| *place).collect::<Vec<_>>(), all[at + 1..at + 6]);
    }

    #[test]
    fn record_of_any_bytes_is_refused_or_read() {
        let mut seed = 3;
        for _ in 0..2000 {
            let length = below(&mut seed, 60) as usize;
            let mut bytes: Vec<u8> = (0..length).map(|_| below(&mut seed, 256) as u8).collect();
            if let Some(first) = bytes.first_mut() {
                *first = RECORD_VERSION;
            }
            let _ = decode_items(&bytes, |place, _| assert!(split_place(place).is_ok()));
        }
        assert_eq!(
            decode_items(&[RECORD_VERSION, 2, 9, 0, 0, 0, 0, 0, 0, 0, 0, 1, 97], |_, _| ()),
            Err(Code::Corrupt)
        );
    }
}
