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
pub(crate) use self::programs::{drive_day_read, drive_day_write, drive_files, drive_list};

/// All tables of (h), each as soon as it is complete.
pub(crate) fn measure(
    binaries: &Path,
    disk: &Path,
    sizes: &Sizes,
    show: &mut dyn FnMut(Table),
) -> Result<(), String> {
    match slow::SlowStore::new(disk) {
        Ok(_) => {
            staging::measure(binaries, disk, sizes)?.into_iter().for_each(&mut *show);
            show(names::listings(binaries, disk, sizes)?);
        }
        Err(why) => println!("\n(h) jobs, bursts and listings on a slow store are not measured: {why}"),
    }
    copying::measure(binaries, disk, sizes, show)?;
    names::resident(binaries, disk, sizes)?.into_iter().for_each(&mut *show);
    let (times, memory) = names::many_names(binaries, disk, sizes)?;
    show(times);
    show(memory);
    Ok(())
}
