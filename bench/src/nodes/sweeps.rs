//! The sweeps of the first paper over volumes, with the pool's files on the same axes: numbers of client processes and of
//! volumes, sequential and random, on the node of the volumes and from another one; the share of open and close; single
//! calls one by one, as densities; and how much runs differ. Pictures: `clients.svg`, `single.svg`.

mod clients;
mod single;

use std::path::Path;

use crate::picture;
use crate::report::Table;
use crate::sizes::Sizes;

pub(crate) use clients::{drive as drive_clients, drive_far as drive_clients_far};
pub(crate) use single::drive as drive_single;

/// All tables. Pictures go into the directory `results`.
pub(super) fn measure(
    binaries: &Path,
    results: &Path,
    sizes: &Sizes,
    show: &mut dyn FnMut(Table),
) -> Result<(), String> {
    std::fs::create_dir_all(results).map_err(|e| format!("{}: {e}", results.display()))?;
    let draw = |name: &str, title: &str, panels: Vec<picture::Panel>| {
        let path = results.join(name);
        std::fs::write(&path, picture::svg(title, &panels))
            .map_err(|e| format!("{}: {e}", path.display()))?;
        println!("a picture: {}", path.display());
        Ok::<(), String>(())
    };
    let (tables, panels) = clients::measure(binaries, sizes)?;
    tables.into_iter().for_each(&mut *show);
    draw("clients.svg", "Rate as a part of memcpy's by as many processes", panels)?;
    show(clients::measure_far(binaries, sizes)?);
    let (table, panels) = single::measure(binaries)?;
    show(table);
    draw("single.svg", "10,000 single calls of 4 KiB, one by one", panels)
}
