//! (a) Reads and writes of another node's file by `forebay.h`, one at a time, compared with the network provider's rate
//! between the same two nodes in the same run: transfers of the same length, one at a time, between two processes that
//! wait by events as daemons do.

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::hosts::Hosts;
use super::library::Library;
use super::raw;
use crate::orders::Orders;
use crate::report::{Table, Target};
use crate::sizes::Sizes;
use crate::systems::said;

const CAPACITY_BYTES: u64 = 512 << 20;
/// Length of the file: several times the largest block.
const FILE_BYTES: usize = 64 << 20;
const BLOCKS: [usize; 3] = [64 << 10, 1 << 20, 16 << 20];
/// The measured operations, each with the provider's transfer that it is compared with.
const DIRECTIONS: [(&str, &str); 3] = [("read", "read"), ("read in order", "read"), ("write", "write")];
const PROVIDER: &str = "provider";
/// Target for transfers of whole files between nodes, relative to the provider.
const AT_LEAST: f64 = 0.8;
/// One byte in this many contains its position.
const MARKED: usize = 64 << 10;
/// Duration of the measurement for one direction and length.
const SECONDS: f64 = 0.5;
/// The variables that name libforebay.so and the pool's directory.
pub(super) const LIBRARY_VARIABLE: &str = "FOREBAY_BENCH_LIBRARY";
pub(super) const POOL_VARIABLE: &str = "FOREBAY_BENCH_POOL";

pub(super) fn measure(binaries: &Path, sizes: &Sizes) -> Result<Table, String> {
    let (hosts, place) = Hosts::apart(binaries)?;
    hosts.up(2, CAPACITY_BYTES)?;
    let this = std::env::current_exe().map_err(|e| format!("this program's path: {e}"))?;
    let drive = |node: usize, what: &str, block: usize| {
        let orders = Orders { root: "/far".into(), bytes: FILE_BYTES, block, ..Orders::default() };
        let mut command = hosts.on(node, &this);
        command.args(orders.arguments(what)).env(POOL_VARIABLE, hosts.pool(node));
        said(command.env(LIBRARY_VARIABLE, binaries.join("libforebay.so")))
    };
    drive(2, "far-make", BLOCKS[1])?;
    let mut table = Table {
        title: format!("(a) a file of another node, over {place}"),
        unit: "GB/s",
        more_is_better: true,
        columns: vec!["Forebay".into(), PROVIDER.into()],
        rows: Vec::new(),
    };
    for _ in 0..sizes.repetitions {
        for block in BLOCKS {
            let (ours, theirs) = (drive(1, "far", block)?, raw::measure(&hosts, raw::Kind::Memory, block)?);
            for (direction, provider) in DIRECTIONS {
                let label = format!("{direction}, {:>5} KiB", block >> 10);
                let target = || vec![Target::Ratio { against: PROVIDER.into(), at_least: AT_LEAST }];
                table.add(&label, 0, rate(&ours, direction)?, target);
                table.add(&label, 1, rate(&theirs, provider)?, Vec::new);
            }
        }
    }
    let of = |label: &str| label.split(',').next().map(str::to_owned);
    table.rows.sort_by_key(|row| DIRECTIONS.iter().position(|(d, _)| of(&row.label).as_deref() == Some(*d)));
    hosts.down(2)?;
    Ok(table)
}

pub(super) fn rate(said: &str, of: &str) -> Result<f64, String> {
    let told: serde_json::Value =
        serde_json::from_str(said.trim()).map_err(|e| format!("a client said {said:?}: {e}"))?;
    told[of].as_f64().ok_or(format!("a client said {said:?}"))
}

fn library() -> Result<Library, String> {
    let path = |name: &str| std::env::var_os(name).map(PathBuf::from).ok_or(format!("{name} is not set"));
    Library::attach(&path(LIBRARY_VARIABLE)?, &path(POOL_VARIABLE)?)
}

fn file_of(orders: &Orders) -> CString {
    CString::new(format!("{}/file", orders.root)).unwrap_or_default()
}

/// Marks a block with the content of the file at its offset: the number of each 64 KiB in its first byte; the rest is
/// constant.
fn mark(block: &mut [u8], offset: usize) {
    for (i, part) in block.chunks_mut(MARKED).enumerate() {
        part[0] = (offset / MARKED + i) as u8;
    }
}

fn is_marked(block: &[u8], offset: usize) -> bool {
    block.chunks(MARKED).enumerate().all(|(i, part)| part[0] == (offset / MARKED + i) as u8)
}

/// Creates the file, on the node that has its data.
pub(crate) fn make(orders: &Orders) -> Result<Vec<(&'static str, f64)>, String> {
    let library = library()?;
    library.mkdir(&CString::new(orders.root.as_str()).unwrap_or_default())?;
    let file = library.open(&file_of(orders), libc::O_CREAT | libc::O_EXCL | libc::O_RDWR)?;
    let mut block = vec![0; orders.block];
    for at in (0..orders.bytes).step_by(orders.block) {
        mark(&mut block, at);
        file.write(&block, at)?;
    }
    Ok(Vec::new())
}

/// A client on the other node: GB/s in each direction, block after block.
pub(crate) fn drive(orders: &Orders) -> Result<Vec<(&'static str, f64)>, String> {
    let library = library()?;
    let file = library.open(&file_of(orders), libc::O_RDWR)?;
    let mut block = vec![0; orders.block];
    let mut rates = Vec::new();
    let timed = |work: &mut dyn FnMut(usize) -> Result<(), String>| -> Result<f64, String> {
        let offsets = || (0..orders.bytes).step_by(orders.block);
        work(0)?;
        let (started, mut bytes) = (Instant::now(), 0);
        while started.elapsed().as_secs_f64() < SECONDS {
            for at in offsets() {
                work(at)?;
                bytes += orders.block;
                if started.elapsed().as_secs_f64() > 4.0 * SECONDS {
                    break;
                }
            }
        }
        Ok(bytes as f64 / started.elapsed().as_secs_f64() / 1e9)
    };
    for (direction, _) in &DIRECTIONS[..2] {
        if *direction == DIRECTIONS[1].0 {
            file.read_in_order()?;
        }
        let read = timed(&mut |at| {
            file.read(&mut block, at)?;
            // A rate with wrong data is worthless.
            match is_marked(&block, at) {
                true => Ok(()),
                false => Err(format!("other bytes than were written, at {at}")),
            }
        })?;
        rates.push((*direction, read));
    }
    let write = timed(&mut |at| {
        mark(&mut block, at);
        file.write(&block, at)
    })?;
    rates.push((DIRECTIONS[2].0, write));
    Ok(rates)
}
