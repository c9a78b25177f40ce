//! Pools of several nodes, all on this machine: the cost of another node's data and names compared with the bare
//! network, the time to start pools, the combined rates of clients on different nodes, and how evenly names are
//! distributed over many nodes. Nodes are addresses of the loopback network, or two network namespaces (`apart`);
//! `forebay up --hosts` starts them with a script that replaces ssh. Clients of all nodes share this machine's
//! processors, so rates do not grow with nodes here.

mod apart;
mod collective;
mod devices;
mod evenness;
mod far;
mod hosts;
mod library;
mod raw;
mod starting;
mod sweeps;
mod trees;
mod volumes;

use std::path::Path;

use crate::report::Table;
use crate::sizes::Sizes;

pub(crate) use far::{drive as drive_far, make as drive_far_make};
pub(crate) use raw::{ask as drive_raw_ask, serve as drive_raw_serve};
pub(crate) use sweeps::{drive_clients, drive_clients_far, drive_single};
pub(crate) use trees::drive;
pub(crate) use volumes::{
    drive as drive_volume, drive_far as drive_volume_far, drive_shared as drive_volume_shared,
};

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

/// The tables of requests from one node to another.
pub(crate) fn measure_far(binaries: &Path, sizes: &Sizes) -> Result<Vec<Table>, String> {
    Ok(vec![far::measure(binaries, sizes)?, trees::measure_far(binaries, sizes)?])
}

/// The tables of volumes and their block devices.
pub(crate) fn measure_volumes(binaries: &Path, sizes: &Sizes) -> Result<Vec<Table>, String> {
    let mut tables = volumes::measure(binaries, sizes)?;
    tables.extend(devices::measure(binaries, sizes)?);
    Ok(tables)
}

/// The tables and pictures of sweeps over volumes.
pub(crate) fn measure_sweeps(
    binaries: &Path,
    results: &Path,
    sizes: &Sizes,
    show: &mut dyn FnMut(Table),
) -> Result<(), String> {
    sweeps::measure(binaries, results, sizes, show)
}

/// The tables of MPI ranks on several nodes.
pub(crate) fn measure_ranks(binaries: &Path, sizes: &Sizes) -> Result<Vec<Table>, String> {
    collective::measure(binaries, sizes)
}
