//! Backing stores: what a pool in front of one gains, what it costs, and a day in its life.

mod attached;
mod copying;
mod day;
mod names;
mod plot;
mod programs;
mod slow;
mod staging;

use crate::report::Table;
use crate::sizes::Sizes;
use std::path::Path;

pub(crate) use self::day::measure as day;
pub(crate) use self::programs::{drive_day_read, drive_day_write, drive_files, drive_list, Files};
pub(crate) use self::slow::{SlowStore, Slowness};

/// The parts of the section, each of which can be measured alone.
pub(crate) const PARTS: [&str; 5] = ["staging", "listings", "copies", "resident", "names"];

/// The tables of (h), or of one part of it, each as soon as it is complete.
pub(crate) fn measure(
    binaries: &Path,
    disk: &Path,
    sizes: &Sizes,
    part: Option<&str>,
    show: &mut dyn FnMut(Table),
) -> Result<(), String> {
    for one in PARTS.into_iter().filter(|one| part.is_none_or(|part| part == *one)) {
        if matches!(one, "staging" | "listings") {
            if let Err(why) = slow::SlowStore::new(disk) {
                println!("\n(h) {one} of a slow store is not measured: {why}");
                continue;
            }
        }
        match one {
            "staging" => staging::measure(binaries, disk, sizes)?.into_iter().for_each(&mut *show),
            "listings" => show(names::listings(binaries, disk, sizes)?),
            "copies" => copying::measure(binaries, disk, sizes, show)?,
            "resident" => names::resident(binaries, disk, sizes)?.into_iter().for_each(&mut *show),
            _ => {
                let (times, memory) = names::many_names(binaries, disk, sizes)?;
                show(times);
                show(memory);
            }
        }
    }
    Ok(())
}
