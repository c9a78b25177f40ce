//! A study of collective I/O on emulated media, repeated: a hard disk, an SSD and NVM on a storage node behind links of 1
//! Gbit/s to four compute nodes, all on this machine, with sizes that fit it. Each table is beside the paper's numbers, and
//! for each finding it is said whether its direction was reproduced. The paper's parts with NFS are left out: a pool is the
//! file system over the network.
//!
//! Needs root (namespaces, block devices, cgroups), an MPI, and FUSE.

mod device;
mod finding;
mod kernels;
mod local;
mod media;
mod network;

use std::path::Path;

use crate::mpi::MPIS;
use crate::report::Table;
use crate::sizes::Sizes;
use crate::star::Star;
use crate::systems::said;

/// Shows all tables.
pub(crate) fn measure(binaries: &Path, sizes: &Sizes, show: &mut dyn FnMut(Table)) -> Result<(), String> {
    let mpi = MPIS.iter().find(|mpi| mpi.is_here()).ok_or_else(|| "no MPI is installed".to_owned());
    let ready = mpi.and_then(|mpi| Star::new().map(|star| (mpi, star)));
    let (mpi, star) = match ready {
        Ok(ready) => ready,
        Err(why) => {
            println!("\nstudy is left out: {why}");
            return Ok(());
        }
    };
    println!("\nstudy: NFS is left out; a pool is the file system over the network");
    let kernels = kernels::build(mpi, &star.directory)?;
    let points = star.directory.join("points-program");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("points.c");
    said(std::process::Command::new(mpi.compiler).args(["-O2", "-o"]).arg(&points).arg(source))?;
    let repetitions = if sizes.is_quick { 1 } else { 3 };
    let mut findings = Vec::new();
    let forebay = binaries.join("forebay");
    let tables = local::measure(&star, &forebay, mpi, &kernels, repetitions, &mut findings);
    match tables {
        Ok(tables) => tables.into_iter().for_each(&mut *show),
        Err(why) => println!("\nstudy: the part on one node is left out: {why}"),
    }
    let place = network::Place {
        star: &star,
        binaries,
        mpi,
        kernels: &kernels,
        points: &points,
        repetitions,
        is_quick: sizes.is_quick,
    };
    network::measure(&place, &mut findings)?.into_iter().for_each(&mut *show);
    show(finding::table(&findings));
    Ok(())
}
