//! A recovery from its plan to its end.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use forebay_tasks::recovery::{Fate, RecoveredFile, RecoveryEvent, RecoveryPlan};
use forebay_tasks::Failure;
use forebay_types::{Code, Result};

use super::find::{find, Destination, Item};
use super::write::{Writer, Written};

/// Files that are written at a time.
const FILES_AT_ONCE: usize = 8;

/// Recovers what the plan names. `event` gets what is found and done, from several threads.
///
/// # Errors
/// Failures that concern everything: a target that cannot be read. Those of single files are events.
pub fn recover(plan: &RecoveryPlan, event: &(dyn Fn(RecoveryEvent) + Sync)) -> Result<()> {
    let mut found = find(plan, &mut |note| event(RecoveryEvent::Note(note)))?;
    for item in &mut found.items {
        settle(plan, item);
    }
    let is_written = |item: &&Item| is_written(item);
    let (files, bytes) =
        found.items.iter().filter(is_written).fold((0, 0), |sum, item| (sum.0 + 1, sum.1 + item.bytes));
    event(RecoveryEvent::Found { files, bytes });
    let writer = Writer::new(plan, &found);
    // Directories first, so that they get their own attributes.
    let order = |item: &Item| !item.entry.is_some_and(|entry| entry.attr.is_directory());
    let mut items: Vec<&Item> = found.items.iter().collect();
    items.sort_by(|a, b| (order(a), &a.path).cmp(&(order(b), &b.path)));
    let (directories, others) = items.split_at(items.partition_point(|item| !order(item)));
    directories.iter().for_each(|item| event(RecoveryEvent::File(deal_with(plan, &writer, item))));
    let next = AtomicUsize::new(0);
    let lacking_space = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..FILES_AT_ONCE.min(others.len()) {
            scope.spawn(|| {
                while let Some(item) = others.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let file = deal_with(plan, &writer, item);
                    match is_for_space(&file) {
                        true => lacking_space.lock().unwrap_or_else(PoisonError::into_inner).push(*item),
                        false => event(RecoveryEvent::File(file)),
                    }
                }
            });
        }
    });
    // The temporary files of those that did not fit took space from others meanwhile.
    let mut again = lacking_space.into_inner().unwrap_or_else(PoisonError::into_inner);
    again.sort_by_key(|item| item.bytes);
    again.iter().for_each(|item| event(RecoveryEvent::File(deal_with(plan, &writer, item))));
    event(RecoveryEvent::Over);
    Ok(())
}

/// True if a store had no space for a file.
fn is_for_space(file: &RecoveredFile) -> bool {
    file.error.as_ref().is_some_and(|error| error.code == Code::NoSpace as u16)
}

/// Gives data without a name the one that they are recovered under, if that is wanted.
fn settle(plan: &RecoveryPlan, item: &mut Item) {
    if let (Fate::Unnamed, true, Some(to)) = (item.fate, plan.unnamed, &plan.to) {
        let key = format!("forebay-unnamed-{}/{:016x}", plan.stamp, item.ino.0).into_bytes();
        item.destinations = vec![Destination { url: to.clone().into_bytes(), key }];
    }
}

fn is_written(item: &Item) -> bool {
    match item.fate {
        Fate::Dirty => true,
        // What was not wanted has no destination.
        Fate::Unnamed => !item.destinations.is_empty() && item.path.is_empty(),
        _ => false,
    }
}

fn deal_with(plan: &RecoveryPlan, writer: &Writer<'_>, item: &Item) -> RecoveredFile {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let destination = item.destinations.first();
    let mut file = RecoveredFile {
        path: match item.path.is_empty() {
            true => format!("inode {:016x}", item.ino.0),
            false => format!("/{}", text(&item.path)),
        },
        store: destination.map_or(String::new(), |destination| text(&destination.url)),
        name: destination.map_or(String::new(), |destination| text(&destination.key)),
        bytes: item.bytes,
        fate: item.fate,
        source: item.source.to_owned(),
        note: item.note.clone(),
        error: None,
    };
    let is_partial = item.fate == Fate::Incomplete && plan.partial && destination.is_some();
    if plan.list || !(is_written(item) || is_partial) {
        if !is_written(item) && item.destinations.is_empty() {
            file.name.clear();
        }
        return file;
    }
    match writer.write(item) {
        Ok(Written { fate, name, note }) => {
            file.fate = fate;
            file.name = name.to_string();
            if !note.is_empty() {
                let separator = if file.note.is_empty() { "" } else { "; " };
                file.note.push_str(&format!("{separator}{note}"));
            }
        }
        Err(e) => {
            file.fate = Fate::Failed;
            file.error = Some(Failure::from(&e));
        }
    }
    file
}
