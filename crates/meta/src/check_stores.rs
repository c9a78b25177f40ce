//! Checking what a shard knows of its backing stores (`places.rs`, `copies.rs`).

use std::collections::{HashMap, HashSet};

use forebay_types::{Attr, Ino, Kind, FLAG_ATTACHED, FLAG_DIRTY, FLAG_DRAINING};

use crate::check_report::CheckReport;
use crate::copies::{decode_copy, decode_further};
use crate::keys::{self, Key};
use crate::places::{decode_place, PendingRecord};
use crate::store_links::LinkedFile;

/// Directory and name.
type PlaceOf = (u64, Vec<u8>);

/// What is at a place, and whether a copy or further place leads to it.
struct Seen {
    ino: Ino,
    is_directory: bool,
    is_led_to: bool,
}

/// The records that concern backing stores. They come before entries and inodes.
#[derive(Default)]
pub(crate) struct InStores {
    places: HashMap<PlaceOf, Seen>,
    pending: HashSet<PlaceOf>,
    /// The epochs of the copies.
    copies: HashMap<u64, u64>,
    /// Inodes at the places that nothing leads to: they must not exist.
    gone: HashMap<u64, PlaceOf>,
    is_gone_known: bool,
}

pub(crate) fn shown(name: &[u8]) -> String {
    String::from_utf8_lossy(name).escape_debug().to_string()
}

impl InStores {
    pub(crate) fn record(&mut self, report: &mut CheckReport, key: &[u8], bytes: &[u8]) {
        match keys::decode(key) {
            Some(Key::Place(parent, name)) => match decode_place(bytes) {
                Ok(placed) => {
                    let is_directory = placed.kind == Kind::Directory;
                    let seen = Seen { ino: placed.ino, is_directory, is_led_to: false };
                    self.places.insert((parent.0, name.to_vec()), seen);
                }
                Err(_) => report.problem(|| format!("the place \"{}\" of {parent} is damaged", shown(name))),
            },
            Some(Key::Copy(ino)) => match decode_copy(bytes) {
                Ok(copy) if copy.is_mark() => {}
                Ok(copy) => {
                    let epoch = copy.epoch;
                    // A directory's copy may outlive it.
                    if !self.lead(report, ino, (copy.parent.0, copy.name)) {
                        self.copies.insert(ino.0, epoch);
                    }
                }
                Err(_) => report.problem(|| format!("inode {ino}: the record of its copy is damaged")),
            },
            Some(Key::Further(ino, parent, name)) => match decode_further(bytes) {
                Ok(_) => drop(self.lead(report, ino, (parent.0, name.to_vec()))),
                Err(_) => report.problem(|| format!("inode {ino}: the record of a place is damaged")),
            },
            Some(Key::LinkedFile(root, number)) if LinkedFile::decode(bytes).is_err() => {
                report.problem(|| format!("the record of file {number} of the store at {root} is damaged"));
            }
            Some(Key::Pending(parent, name)) => {
                report.pending += 1;
                self.pending.insert((parent.0, name.to_vec()));
                if PendingRecord::decode(bytes).is_err() {
                    report
                        .problem(|| format!("the pending place \"{}\" of {parent} is damaged", shown(name)));
                }
            }
            _ => {}
        }
    }

    /// A record leads from an inode to a place. Returns whether it is a directory's.
    fn lead(&mut self, report: &mut CheckReport, ino: Ino, place: PlaceOf) -> bool {
        match self.places.get_mut(&place) {
            Some(seen) if seen.ino == ino && !seen.is_led_to => {
                seen.is_led_to = true;
                return seen.is_directory;
            }
            Some(seen) if seen.ino == ino => {
                report.problem(|| {
                    format!("inode {ino}: two records lead to its place \"{}\"", shown(&place.1))
                });
            }
            _ => report.problem(|| {
                format!("inode {ino}: its copy in the backing store has no place \"{}\"", shown(&place.1))
            }),
        }
        false
    }

    pub(crate) fn entry(&mut self, report: &mut CheckReport, parent: Ino, name: &[u8], ino: Ino) {
        if self.places.is_empty() {
            return;
        }
        let place = (parent.0, name.to_vec());
        let Some(seen) = self.places.remove(&place) else { return };
        if seen.ino != ino && !self.pending.contains(&place) {
            report.problem(|| {
                format!("directory {parent}: a backing store has another inode at \"{}\"", shown(name))
            });
        }
        self.note_gone(seen, place);
    }

    fn note_gone(&mut self, seen: Seen, place: PlaceOf) {
        if !seen.is_led_to {
            self.gone.insert(seen.ino.0, place);
        }
    }

    /// Places that no entry has.
    fn conclude_entries(&mut self, report: &mut CheckReport) {
        self.is_gone_known = true;
        for (place, seen) in std::mem::take(&mut self.places) {
            if !self.pending.contains(&place) {
                report.problem(|| {
                    let (parent, name) = (Ino(place.0), shown(&place.1));
                    format!("directory {parent}: a backing store has \"{name}\", which is not to be removed")
                });
            }
            self.note_gone(seen, place);
        }
    }

    pub(crate) fn inode(&mut self, report: &mut CheckReport, attr: &Attr) {
        if !self.is_gone_known {
            self.conclude_entries(report);
        }
        let ino = attr.ino;
        let copy = self.copies.remove(&ino.0);
        if let Some((parent, name)) = self.gone.get(&ino.0) {
            report.problem(|| {
                format!("inode {ino}: does not know of its place \"{}\" of {}", shown(name), Ino(*parent))
            });
        }
        if !attr.is_file() {
            return;
        }
        if !attr.is_resident() && copy.is_none() {
            report.problem(|| format!("file {ino}: its data are neither in the pool nor in a backing store"));
        }
        let (dirty, draining) = (attr.flags & FLAG_DIRTY != 0, attr.flags & FLAG_DRAINING != 0);
        let is_possible = !draining && !dirty || dirty && attr.is_resident();
        if !is_possible {
            report.problem(|| format!("file {ino}: its flags {:x} contradict each other", attr.flags));
        }
        let is_clean = attr.is_resident() && !dirty && attr.flags & FLAG_ATTACHED != 0;
        if is_clean && copy != Some(attr.epoch()) {
            report.problem(|| format!("file {ino}: is clean, but the backing store does not have its data"));
        }
    }

    pub(crate) fn conclude(&mut self, report: &mut CheckReport) {
        if !self.is_gone_known {
            self.conclude_entries(report);
        }
        for ino in self.copies.keys() {
            report.problem(|| format!("there is a copy of inode {ino:016x}, which does not exist"));
        }
    }
}
