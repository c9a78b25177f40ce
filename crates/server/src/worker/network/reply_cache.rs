//! What became of the last change that each slot of a process asked for, in memory that the supervisor keeps over the
//! worker: a request whose reply was lost is answered and not done again, whichever worker it meets.
//!
//! An entry belongs to a slot, and is replaced by the slot's next change alone: a process uses a slot again when it has
//! the reply, so that no earlier request of it is ever asked again. However long a reply is lost, and however many
//! others ask meanwhile, the entry is there. Entries go with their process. Where there are more slots than entries, the
//! slot that asked longest ago loses its own.
//!
//! This is the duplicate request cache of NFSv4.1's sessions (RFC 8881, section 2.10.6), kept in memory that outlives the
//! worker. Tests: below, and those of `appended.rs` and `groups.rs`.

use std::collections::BTreeMap;
use std::sync::atomic::{compiler_fence, AtomicU64, Ordering};

use forebay_ring::Mapping;
use forebay_wire::Stamp;

/// Words of an entry: the state, its number, the session, slot and sequence, and three for the owner of the cache.
const WORDS: usize = 8;
/// Bytes of an entry.
pub(super) const ENTRY_BYTES: usize = 8 * WORDS;
/// The state of an entry that is free or being written.
const FREE: u64 = 0;

/// A session and its slot.
type Slot = (u64, u16);

/// What became of a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Kept {
    /// Changes are numbered in the order in which they began.
    pub(super) number: u64,
    pub(super) sequence: u64,
    /// The owner's, not 0.
    pub(super) state: u64,
    /// The owner's.
    pub(super) words: [u64; 3],
}

/// The last change of each slot.
#[derive(Debug)]
pub(super) struct ReplyCache {
    /// Where its entries begin in the memory, in bytes.
    begin: usize,
    by_slot: BTreeMap<Slot, (usize, Kept)>,
    /// The slots, from the one that asked longest ago.
    by_age: BTreeMap<u64, Slot>,
    free: Vec<usize>,
    next: u64,
}

impl ReplyCache {
    /// An empty cache whose entries begin at byte `begin` of the memory.
    pub(super) fn new(begin: usize, entries: usize) -> ReplyCache {
        let free = (0..entries).rev().collect();
        ReplyCache { begin, by_slot: BTreeMap::new(), by_age: BTreeMap::new(), free, next: 0 }
    }

    /// The cache that an earlier worker left in the memory, or an empty one where the memory is zero.
    pub(super) fn restored(memory: &Mapping, begin: usize, entries: usize) -> ReplyCache {
        let mut cache = ReplyCache::new(begin, entries);
        let free = std::mem::take(&mut cache.free);
        for entry in free {
            let load = |index| cache.word(memory, entry, index).load(Ordering::Acquire);
            let (state, number, slot) = (load(0), load(1), (load(2), load(3) as u16));
            if state == FREE {
                cache.free.push(entry);
                continue;
            }
            let kept = Kept { number, sequence: load(4), state, words: [load(5), load(6), load(7)] };
            cache.by_slot.insert(slot, (entry, kept));
            cache.by_age.insert(number, slot);
            cache.next = cache.next.max(number + 1);
        }
        cache
    }

    fn word<'m>(&self, memory: &'m Mapping, entry: usize, index: usize) -> &'m AtomicU64 {
        memory.word64(self.begin + entry * ENTRY_BYTES + 8 * index)
    }

    /// The number of the change that begins next.
    pub(super) fn next_number(&self) -> u64 {
        self.next
    }

    /// All that is kept, in the order in which it began.
    pub(super) fn in_order(&self) -> impl Iterator<Item = &Kept> {
        self.by_age.values().filter_map(|slot| self.by_slot.get(slot)).map(|(_, kept)| kept)
    }

    /// What became of a change; none of one that never began, or whose slot has begun a later one.
    pub(super) fn get(&self, stamp: &Stamp) -> Option<&Kept> {
        let (_, kept) = self.by_slot.get(&(stamp.session, stamp.slot))?;
        (kept.sequence == stamp.sequence).then_some(kept)
    }

    /// True when the slot of a change has begun a later one.
    pub(super) fn is_overtaken(&self, stamp: &Stamp) -> bool {
        let kept = self.by_slot.get(&(stamp.session, stamp.slot));
        kept.is_some_and(|(_, kept)| kept.sequence > stamp.sequence)
    }

    /// Keeps a slot's change in place of the one before; its number. It is kept when this returns, and not at all when
    /// the worker is killed earlier.
    pub(super) fn put(
        &mut self,
        memory: Option<&Mapping>,
        stamp: &Stamp,
        state: u64,
        words: [u64; 3],
    ) -> u64 {
        let (slot, number) = ((stamp.session, stamp.slot), self.next);
        let entry = match self.by_slot.get(&slot) {
            Some((entry, before)) => {
                self.by_age.remove(&before.number);
                Some(*entry)
            }
            None => self.free.pop().or_else(|| self.evict()),
        };
        self.next += 1;
        let Some(entry) = entry else { return number };
        if let Some(memory) = memory {
            let store =
                |index: usize, value: u64| self.word(memory, entry, index).store(value, Ordering::Relaxed);
            // No state while the rest is not all of one change.
            self.word(memory, entry, 0).store(FREE, Ordering::SeqCst);
            compiler_fence(Ordering::SeqCst);
            let owner = [number, stamp.session, stamp.slot.into(), stamp.sequence];
            owner.into_iter().chain(words).enumerate().for_each(|(i, value)| store(1 + i, value));
            self.word(memory, entry, 0).store(state, Ordering::SeqCst);
        }
        let kept = Kept { number, sequence: stamp.sequence, state, words };
        self.by_slot.insert(slot, (entry, kept));
        self.by_age.insert(number, slot);
        number
    }

    /// A change of this number goes on: its new state and third word. Nothing happens when its slot has begun another.
    pub(super) fn advance(&mut self, memory: Option<&Mapping>, number: u64, state: u64, third: u64) {
        let Some((entry, kept)) = self.by_age.get(&number).and_then(|slot| self.by_slot.get_mut(slot)) else {
            return;
        };
        (kept.state, kept.words[2]) = (state, third);
        let entry = *entry;
        if let Some(memory) = memory {
            self.word(memory, entry, 7).store(third, Ordering::Relaxed);
            self.word(memory, entry, 0).store(state, Ordering::SeqCst);
        }
    }

    /// Takes the entry of the slot that asked longest ago.
    fn evict(&mut self) -> Option<usize> {
        let (_, slot) = self.by_age.pop_first()?;
        self.by_slot.remove(&slot).map(|(entry, _)| entry)
    }

    /// The processes of which something is kept.
    pub(super) fn sessions(&self) -> Vec<u64> {
        let mut sessions: Vec<u64> = self.by_slot.keys().map(|(session, _)| *session).collect();
        sessions.dedup();
        sessions
    }

    /// A process is over: it asks for nothing again.
    pub(super) fn end(&mut self, memory: Option<&Mapping>, session: u64) {
        let theirs: Vec<Slot> =
            self.by_slot.range((session, 0)..=(session, u16::MAX)).map(|(slot, _)| *slot).collect();
        for slot in theirs {
            let Some((entry, kept)) = self.by_slot.remove(&slot) else { continue };
            self.by_age.remove(&kept.number);
            if let Some(memory) = memory {
                self.word(memory, entry, 0).store(FREE, Ordering::SeqCst);
            }
            self.free.push(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_ring::{memfd_sealed, Seal};

    const ENTRIES: usize = 4;
    const BEGIN: usize = 64;

    fn memory() -> Mapping {
        memfd_sealed(c"replies", BEGIN + ENTRIES * ENTRY_BYTES, Seal::Size).unwrap().1
    }

    fn stamp(session: u64, slot: u16, sequence: u64) -> Stamp {
        Stamp { session, slot, sequence }
    }

    fn words(cache: &ReplyCache, of: &Stamp) -> Option<[u64; 3]> {
        cache.get(of).map(|kept| kept.words)
    }

    #[test]
    fn slot_s_last_change_is_kept_however_many_others_come() {
        let memory = memory();
        let mut cache = ReplyCache::new(BEGIN, ENTRIES);
        let lost = stamp(u64::MAX - 1, 63, 7);
        cache.put(Some(&memory), &lost, 1, [1, 2, 3]);
        for sequence in 1..=100 {
            cache.put(Some(&memory), &stamp(5, 0, sequence), 2, [sequence; 3]);
            cache.put(Some(&memory), &stamp(5, 1, sequence), 2, [sequence; 3]);
        }
        for cache in [&cache, &ReplyCache::restored(&memory, BEGIN, ENTRIES)] {
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
        let memory = memory();
        let mut cache = ReplyCache::new(BEGIN, ENTRIES);
        let first = cache.put(Some(&memory), &stamp(5, 0, 1), 1, [1, 2, 3]);
        cache.advance(Some(&memory), first, 2, 9);
        let restored = ReplyCache::restored(&memory, BEGIN, ENTRIES);
        assert_eq!(restored.get(&stamp(5, 0, 1)), cache.get(&stamp(5, 0, 1)));
        assert_eq!(restored.get(&stamp(5, 0, 1)).map(|kept| (kept.state, kept.words)), Some((2, [1, 2, 9])));
        cache.put(Some(&memory), &stamp(5, 0, 2), 1, [4, 5, 6]);
        cache.advance(Some(&memory), first, 2, 100);
        for cache in [&cache, &ReplyCache::restored(&memory, BEGIN, ENTRIES)] {
            assert_eq!(cache.get(&stamp(5, 0, 2)).map(|kept| (kept.state, kept.words)), Some((1, [4, 5, 6])));
        }
    }

    #[test]
    fn entry_whose_writer_was_killed_is_none() {
        let memory = memory();
        let mut cache = ReplyCache::new(BEGIN, ENTRIES);
        cache.put(Some(&memory), &stamp(5, 0, 1), 1, [1, 2, 3]);
        memory.word64(BEGIN + (ENTRIES - 1) * ENTRY_BYTES).store(FREE, Ordering::Relaxed);
        memory.word64(BEGIN).store(FREE, Ordering::Relaxed);
        let mut cache = ReplyCache::restored(&memory, BEGIN, ENTRIES);
        assert!(cache.get(&stamp(5, 0, 1)).is_none() && cache.free.len() == ENTRIES);
        cache.put(Some(&memory), &stamp(5, 0, 2), 1, [1, 2, 3]);
        assert!(cache.get(&stamp(5, 0, 2)).is_some());
    }

    #[test]
    fn entries_go_with_their_process_and_the_oldest_where_there_is_no_room() {
        let memory = memory();
        let mut cache = ReplyCache::new(BEGIN, ENTRIES);
        for slot in 0..3 {
            cache.put(Some(&memory), &stamp(5, slot, 1), 1, [0; 3]);
        }
        cache.put(Some(&memory), &stamp(6, 0, 1), 1, [0; 3]);
        cache.put(Some(&memory), &stamp(5, 0, 2), 1, [0; 3]);
        cache.put(Some(&memory), &stamp(7, 0, 1), 1, [0; 3]);
        let is_there = |cache: &ReplyCache, stamps: &[Stamp]| {
            stamps.iter().map(|of| cache.get(of).is_some()).collect::<Vec<_>>()
        };
        let stamps = [stamp(5, 0, 2), stamp(5, 1, 1), stamp(5, 2, 1), stamp(6, 0, 1), stamp(7, 0, 1)];
        assert_eq!(is_there(&cache, &stamps), [true, false, true, true, true]);
        assert_eq!(cache.sessions(), [5, 6, 7]);
        cache.end(Some(&memory), 5);
        for cache in [&cache, &ReplyCache::restored(&memory, BEGIN, ENTRIES)] {
            assert_eq!(is_there(cache, &stamps), [false, false, false, true, true]);
            assert_eq!(cache.free.len(), 2);
        }
    }
}
