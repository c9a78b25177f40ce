//! The last change of each slot of remote processes, in a durable table (`durable_table.rs`): a request whose reply was
//! lost is answered, by this worker or a later one, and not done again.
//!
//! An entry belongs to a slot, and only the slot's next change replaces it. A process reuses a slot once it has the
//! reply, so it never retries an earlier request. So the entry exists however late the retry is, and however many
//! requests of other slots come first. Entries are removed with their process. If there are more slots than entries,
//! the slot with the oldest change loses its entry.
//!
//! This is the duplicate request cache of NFSv4.1's sessions (RFC 8881, section 2.10.6), in memory that outlives the
//! worker. Tests: below, and those of `appended.rs` and `groups.rs`.

use std::collections::BTreeMap;

use forebay_types::BackingId;
use forebay_wire::Stamp;

use crate::worker::durable_table::{DurableMemory, DurableTable};

/// Words of an entry: the state, the number, the session, slot and sequence, and three for the owner of the cache.
pub(super) const WORDS: usize = 8;
/// A number that no change reaches.
pub(super) const NUMBERS_END: u64 = 1 << 63;

/// A session and its slot.
type Slot = (u64, u16);

/// A stored change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Kept {
    /// Changes are numbered in the order in which they began.
    pub(super) number: u64,
    pub(super) sequence: u64,
    /// Defined by the owner of the cache; not 0.
    pub(super) state: u64,
    /// Defined by the owner of the cache.
    pub(super) words: [u64; 3],
}

/// A backing file's name, without the inode, as a word of an entry.
pub(super) fn packed(id: &BackingId) -> u64 {
    u64::from(id.target) << 32 | u64::from(id.number) << 16 | u64::from(id.stripe)
}

/// The last change of each slot.
#[derive(Debug)]
pub(super) struct ReplyCache {
    table: DurableTable<WORDS>,
    by_slot: BTreeMap<Slot, (usize, Kept)>,
    /// The slots by the numbers of their changes, so the oldest comes first.
    by_age: BTreeMap<u64, Slot>,
    next: u64,
}

impl ReplyCache {
    /// Opens the cache in a table of a memory. Entries whose state and words `is_sound` rejects are removed.
    pub(super) fn open(
        memory: &DurableMemory,
        table: usize,
        is_sound: impl Fn(u64, &[u64; 3]) -> bool,
    ) -> ReplyCache {
        let (table, left) = memory.table(table);
        let mut cache = ReplyCache { table, by_slot: BTreeMap::new(), by_age: BTreeMap::new(), next: 0 };
        for (entry, [state, number, session, slot, sequence, words @ ..]) in left {
            let slot = u16::try_from(slot).map(|slot| (session, slot));
            let is_new = |slot| !cache.by_slot.contains_key(slot) && !cache.by_age.contains_key(&number);
            match slot {
                Ok(slot) if number < NUMBERS_END && is_new(&slot) && is_sound(state, &words) => {
                    cache.by_slot.insert(slot, (entry, Kept { number, sequence, state, words }));
                    cache.by_age.insert(number, slot);
                    cache.next = cache.next.max(number + 1);
                }
                _ => cache.table.remove(entry),
            }
        }
        cache
    }

    /// The number of the next change.
    pub(super) fn next_number(&self) -> u64 {
        self.next
    }

    /// Makes the numbers of further changes start here, or higher if they already do.
    pub(super) fn number_from(&mut self, number: u64) {
        self.next = self.next.max(number);
    }

    /// All stored changes, in the order in which they began.
    pub(super) fn in_order(&self) -> impl Iterator<Item = &Kept> {
        self.by_age.values().filter_map(|slot| self.by_slot.get(slot)).map(|(_, kept)| kept)
    }

    /// The stored change with this stamp; none if it never began, or if its slot has begun a later one.
    pub(super) fn get(&self, stamp: &Stamp) -> Option<&Kept> {
        let (_, kept) = self.by_slot.get(&(stamp.session, stamp.slot))?;
        (kept.sequence == stamp.sequence).then_some(kept)
    }

    /// True when the slot has begun a later change.
    pub(super) fn is_overtaken(&self, stamp: &Stamp) -> bool {
        let kept = self.by_slot.get(&(stamp.session, stamp.slot));
        kept.is_some_and(|(_, kept)| kept.sequence > stamp.sequence)
    }

    /// Stores a slot's change in place of the earlier one; returns its number. The store is atomic: a worker that is
    /// killed earlier leaves no entry.
    pub(super) fn put(&mut self, stamp: &Stamp, state: u64, words: [u64; 3]) -> u64 {
        let (slot, number) = ((stamp.session, stamp.slot), self.next);
        let before = self.by_slot.get(&slot).map(|(entry, before)| {
            self.by_age.remove(&before.number);
            *entry
        });
        let entry = before.or_else(|| self.table.take_free()).or_else(|| self.evict());
        self.next += 1;
        let Some(entry) = entry else { return number };
        let [first, second, third] = words;
        let owner = [state, number, stamp.session, stamp.slot.into(), stamp.sequence, first, second, third];
        self.table.write(entry, owner);
        let kept = Kept { number, sequence: stamp.sequence, state, words };
        self.by_slot.insert(slot, (entry, kept));
        self.by_age.insert(number, slot);
        number
    }

    /// Sets the state and the third word of the change of this number. Does nothing if its slot has begun another.
    pub(super) fn advance(&mut self, number: u64, state: u64, third: u64) {
        let Some((entry, kept)) = self.by_age.get(&number).and_then(|slot| self.by_slot.get_mut(slot)) else {
            return;
        };
        (kept.state, kept.words[2]) = (state, third);
        self.table.set(*entry, WORDS - 1, third);
        self.table.set(*entry, 0, state);
    }

    /// Takes the entry of the slot with the oldest change.
    fn evict(&mut self) -> Option<usize> {
        let (_, slot) = self.by_age.pop_first()?;
        self.by_slot.remove(&slot).map(|(entry, _)| entry)
    }

    /// The processes with stored changes.
    pub(super) fn sessions(&self) -> Vec<u64> {
        let mut sessions: Vec<u64> = self.by_slot.keys().map(|(session, _)| *session).collect();
        sessions.dedup();
        sessions
    }

    /// A process has ended, and retries nothing: removes its changes.
    pub(super) fn end(&mut self, session: u64) {
        let theirs: Vec<Slot> =
            self.by_slot.range((session, 0)..=(session, u16::MAX)).map(|(slot, _)| *slot).collect();
        for slot in theirs {
            let Some((entry, kept)) = self.by_slot.remove(&slot) else { continue };
            self.by_age.remove(&kept.number);
            self.table.remove(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::durable_table::Format;

    const ENTRIES: usize = 4;
    const FORMAT: Format =
        Format { tag: "test", what: "a test", version: 1, tables: &[(1, 1), (ENTRIES, WORDS)] };

    /// The cache as this worker or the next one opens it. Its states are 1 and 2.
    fn opened(memory: &DurableMemory) -> ReplyCache {
        ReplyCache::open(memory, 1, |state, _| state <= 2)
    }

    fn stamp(session: u64, slot: u16, sequence: u64) -> Stamp {
        Stamp { session, slot, sequence }
    }

    fn words(cache: &ReplyCache, of: &Stamp) -> Option<[u64; 3]> {
        cache.get(of).map(|kept| kept.words)
    }

    #[test]
    fn slot_s_last_change_is_kept_however_many_others_come() {
        let memory = DurableMemory::new(&FORMAT);
        let mut cache = opened(&memory);
        let lost = stamp(u64::MAX - 1, 63, 7);
        cache.put(&lost, 1, [1, 2, 3]);
        for sequence in 1..=100 {
            cache.put(&stamp(5, 0, sequence), 2, [sequence; 3]);
            cache.put(&stamp(5, 1, sequence), 2, [sequence; 3]);
        }
        for cache in [&cache, &opened(&memory)] {
            assert_eq!(words(cache, &lost), Some([1, 2, 3]));
            assert_eq!(words(cache, &stamp(5, 1, 100)), Some([100; 3]));
            assert_eq!(words(cache, &stamp(5, 1, 99)), None, "its slot went on");
            assert!(cache.is_overtaken(&stamp(5, 1, 99)));
            assert!([stamp(5, 1, 100), stamp(5, 1, 101), stamp(5, 2, 1)]
                .iter()
                .all(|of| !cache.is_overtaken(of)));
            assert_eq!(
                (cache.next_number(), cache.in_order().map(|kept| kept.number).collect()),
                (201, vec![0, 199, 200])
            );
        }
    }

    #[test]
    fn change_goes_on_unless_its_slot_has_begun_another() {
        let memory = DurableMemory::new(&FORMAT);
        let mut cache = opened(&memory);
        let first = cache.put(&stamp(5, 0, 1), 1, [1, 2, 3]);
        cache.advance(first, 2, 9);
        let restored = opened(&memory);
        assert_eq!(restored.get(&stamp(5, 0, 1)), cache.get(&stamp(5, 0, 1)));
        assert_eq!(restored.get(&stamp(5, 0, 1)).map(|kept| (kept.state, kept.words)), Some((2, [1, 2, 9])));
        cache.put(&stamp(5, 0, 2), 1, [4, 5, 6]);
        cache.advance(first, 2, 100);
        for cache in [&cache, &opened(&memory)] {
            assert_eq!(cache.get(&stamp(5, 0, 2)).map(|kept| (kept.state, kept.words)), Some((1, [4, 5, 6])));
        }
    }

    #[test]
    fn entry_whose_writer_was_killed_is_none() {
        let memory = DurableMemory::new(&FORMAT);
        let mut cache = opened(&memory);
        cache.put(&stamp(5, 0, 1), 1, [1, 2, 3]);
        cache.table.set(0, 0, 0);
        let mut cache = opened(&memory);
        assert!(cache.get(&stamp(5, 0, 1)).is_none() && cache.table.free_count() == ENTRIES);
        cache.put(&stamp(5, 0, 2), 1, [1, 2, 3]);
        assert!(cache.get(&stamp(5, 0, 2)).is_some());
    }

    #[test]
    fn entries_go_with_their_process_and_the_oldest_where_there_is_no_room() {
        let memory = DurableMemory::new(&FORMAT);
        let mut cache = opened(&memory);
        for slot in 0..3 {
            cache.put(&stamp(5, slot, 1), 1, [0; 3]);
        }
        cache.put(&stamp(6, 0, 1), 1, [0; 3]);
        cache.put(&stamp(5, 0, 2), 1, [0; 3]);
        cache.put(&stamp(7, 0, 1), 1, [0; 3]);
        let is_there = |cache: &ReplyCache, stamps: &[Stamp]| {
            stamps.iter().map(|of| cache.get(of).is_some()).collect::<Vec<_>>()
        };
        let stamps = [stamp(5, 0, 2), stamp(5, 1, 1), stamp(5, 2, 1), stamp(6, 0, 1), stamp(7, 0, 1)];
        assert_eq!(is_there(&cache, &stamps), [true, false, true, true, true]);
        assert_eq!(cache.sessions(), [5, 6, 7]);
        cache.end(5);
        for cache in [&cache, &opened(&memory)] {
            assert_eq!(is_there(cache, &stamps), [false, false, false, true, true]);
            assert_eq!(cache.table.free_count(), 2);
        }
    }

    #[test]
    fn entry_that_makes_no_sense_is_dropped() {
        let memory = DurableMemory::new(&FORMAT);
        opened(&memory).put(&stamp(5, 0, 1), 1, [0; 3]);
        let (mut table, _) = memory.table::<WORDS>(1);
        // An invalid slot, number or state.
        for (state, number, slot) in [(1, 1, 1 << 16), (1, u64::MAX, 1), (3, 1, 1)] {
            table.insert([state, number, 5, slot, 1, 0, 0, 0]).unwrap();
        }
        let cache = opened(&memory);
        assert_eq!((cache.next_number(), cache.table.free_count(), cache.sessions()), (1, 3, vec![5]));
        // Two entries with the same slot or the same number: one is kept.
        for (number, slot) in [(1, 0), (0, 1)] {
            table.write(0, [1, 0, 5, 0, 1, 0, 0, 0]);
            table.write(1, [1, number, 5, slot, 1, 0, 0, 0]);
            let cache = opened(&memory);
            assert_eq!((cache.by_slot.len(), cache.by_age.len(), cache.table.free_count()), (1, 1, 3));
        }
    }
}
