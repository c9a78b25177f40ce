//! What the programs of a simulated pool in front of a store were told, and what may be read therefore.
//!
//! Each file has one program that writes it, and each name one program that changes it, so that what is acknowledged has
//! one order. A value is written once; all words of a file have it. A program that never learns the outcome of a write
//! does not write the file again: it may have either value.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_types::Ino;

/// Values from here on are written into the store by other programs.
pub(crate) const FOREIGN: u32 = 1 << 30;

/// What the error for a broken promise begins with.
pub(crate) const BROKEN: &str = "a promise is broken: ";

/// A directory and a name.
pub(crate) type Place = (Ino, Vec<u8>);

/// A file.
#[derive(Clone, Debug, Default)]
pub(crate) struct File {
    /// The program that writes it.
    pub(crate) writer: usize,
    /// Values in the order of their writes.
    values: Vec<u32>,
    /// How many of them were acknowledged.
    acknowledged: usize,
    /// The outcome of a write is not known.
    pub(crate) in_doubt: bool,
    /// It was removed, perhaps.
    pub(crate) is_gone: bool,
}

/// What a name leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Expected {
    Nothing,
    Inode(Ino),
    Unknown,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// The directory with the store, once it is attached.
    pub(crate) root: Option<Ino>,
    pub(crate) files: BTreeMap<Ino, File>,
    pub(crate) directories: Vec<Ino>,
    /// The names of each program.
    pub(crate) names: BTreeMap<Place, (usize, Expected)>,
    /// For each value of another program: the value that it replaced in the store.
    pub(crate) foreign: BTreeMap<u32, u32>,
    next: u32,
    /// Operations, those that failed, and a hash of all outcomes.
    pub(crate) operations: u64,
    pub(crate) failed: u64,
    pub(crate) hash: u64,
}

/// Clones are the same ledger.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shared(Arc<Mutex<Ledger>>);

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ledger {
    pub(crate) fn note(&mut self, word: u64) {
        self.hash = (self.hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
    }

    pub(crate) fn new_value(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    pub(crate) fn made(&mut self, ino: Ino, writer: usize) {
        self.files.insert(ino, File { writer, ..File::default() });
    }

    /// A file of the store, which a program takes over.
    pub(crate) fn imported(&mut self, ino: Ino, writer: usize, value: u32) {
        let file = File { writer, values: vec![value], acknowledged: 1, ..File::default() };
        self.files.entry(ino).or_insert(file);
    }

    pub(crate) fn begins(&mut self, ino: Ino, value: u32) {
        if let Some(file) = self.files.get_mut(&ino) {
            file.values.push(value);
            file.in_doubt = true;
        }
    }

    /// The last write was acknowledged.
    pub(crate) fn acknowledged(&mut self, ino: Ino) {
        if let Some(file) = self.files.get_mut(&ino) {
            file.acknowledged = file.values.len();
            file.in_doubt = false;
        }
    }

    /// The number of acknowledged writes of a file.
    pub(crate) fn count(&self, ino: Ino) -> usize {
        self.files.get(&ino).map_or(0, |file| file.acknowledged)
    }

    /// After how many writes of a file it has this value; none if it never has it.
    fn position(&self, ino: Ino, value: u32) -> Option<usize> {
        let file = self.files.get(&ino)?;
        match file.values.iter().position(|other| *other == value) {
            Some(i) => Some(i + 1),
            // Another program replaced it in the store.
            None => self.foreign.get(&value).and_then(|replaced| self.position(ino, *replaced)),
        }
    }

    /// Judges a value that was read, when so many writes had been acknowledged before. None: the file was empty.
    pub(crate) fn judge(&self, ino: Ino, read: Option<u32>, before: usize) -> Result<(), String> {
        let position = match read {
            None => Some(0),
            Some(value) => self.position(ino, value),
        };
        match position {
            Some(position) if position >= before => Ok(()),
            Some(position) => Err(format!(
                "{BROKEN}{ino} has {read:?}, its write {position}, but write {before} was acknowledged before"
            )),
            None => Err(format!("{BROKEN}{ino} has {read:?}, which nobody wrote to it")),
        }
    }

    pub(crate) fn expect(&mut self, place: Place, program: usize, expected: Expected) {
        self.names.insert(place, (program, expected));
    }

    /// Judges what a name leads to.
    pub(crate) fn judge_name(&self, place: &Place, found: Option<Ino>) -> Result<(), String> {
        let expected = self.names.get(place).map_or(Expected::Nothing, |(_, expected)| *expected);
        let fits = match expected {
            Expected::Unknown => true,
            Expected::Nothing => found.is_none(),
            Expected::Inode(ino) => found == Some(ino),
        };
        match fits {
            true => Ok(()),
            false => Err(format!(
                "{BROKEN}{} in {} leads to {found:?}, not {expected:?}",
                place.1.escape_ascii(),
                place.0
            )),
        }
    }
}

/// Bytes of a file.
pub(crate) fn bytes_of(ino: Ino) -> usize {
    [4, 4096, 40_000][(ino.0 % 3) as usize]
}

/// The content of a file that has a value.
pub(crate) fn content(value: u32, bytes: usize) -> Vec<u8> {
    value.to_le_bytes().repeat(bytes / 4)
}

/// The value that bytes have; none for no bytes.
pub(crate) fn value_of(bytes: &[u8]) -> Result<Option<u32>, String> {
    let Some(first) = bytes.first_chunk::<4>() else {
        return if bytes.is_empty() { Ok(None) } else { Err(format!("{BROKEN}{} bytes", bytes.len())) };
    };
    match bytes.len().is_multiple_of(4) && bytes.chunks(4).all(|word| word == first) {
        true => Ok(Some(u32::from_le_bytes(*first))),
        false => Err(format!("{BROKEN}a file of {} bytes is torn", bytes.len())),
    }
}
