//! Pools of several nodes, all on this machine: what data and names of another node cost beside what the network gives,
//! how fast pools start, what clients on different nodes get done together, and how evenly names would lie on many.
//! Nodes are addresses of the loopback network, or two network namespaces (`apart`), started by `forebay up --hosts`
//! with a script in ssh's place; clients of all nodes share this machine's processors, so rates do not grow with nodes
//! here.

mod apart;
mod collective;
mod evenness;
mod far;
mod hosts;
mod library;
mod raw;
mod starting;
mod trees;

use std::path::Path;

use crate::report::Table;
use crate::sizes::Sizes;

pub(crate) use far::{drive as drive_far, make as drive_far_make};
pub(crate) use raw::{ask as drive_raw_ask, serve as drive_raw_serve};
pub(crate) use trees::drive;

/// All tables.
pub(crate) fn measure(binaries: &Path, sizes: &Sizes) -> Result<Vec<Table>, String> {
    let mut tables = measure_far(binaries, sizes)?;
    tables.extend([
        starting::measure(binaries, sizes)?,
        trees::measure(binaries, sizes)?,
        evenness::placement(),
    ]);
    tables.extend(measure_ranks(binaries, sizes)?);
    Ok(tables)
}

/// Those of what one node asks of another.
pub(crate) fn measure_far(binaries: &Path, sizes: &Sizes) -> Result<Vec<Table>, String> {
    Ok(vec![far::measure(binaries, sizes)?, trees::measure_far(binaries, sizes)?])
}

/// Those of MPI ranks on several nodes.
pub(crate) fn measure_ranks(binaries: &Path, sizes: &Sizes) -> Result<Vec<Table>, String> {
    collective::measure(binaries, sizes)
}
