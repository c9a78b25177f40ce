//! (c) The time from the start of `forebay up --hosts` until a file is written on its last node.

use std::path::Path;
use std::time::Instant;

use super::hosts::Hosts;
use crate::report::{Table, Target};
use crate::sizes::Sizes;
use crate::systems::said;

const BOUND: &str = "bound";
/// Target for eight nodes.
const BOUND_S: f64 = 2.0;
const NODES: [usize; 4] = [1, 2, 4, 8];
/// Capacity of each node: just enough for its shard.
const CAPACITY_BYTES: u64 = 64 << 20;

pub(super) fn measure(binaries: &Path, sizes: &Sizes) -> Result<Table, String> {
    let hosts = Hosts::new(binaries)?;
    let mut table = Table {
        title: "(c) up to the first write".into(),
        unit: "s",
        more_is_better: false,
        columns: vec!["Forebay".into(), BOUND.into()],
        rows: Vec::new(),
    };
    for _ in 0..sizes.repetitions {
        for count in NODES {
            let label = format!("nodes: {count}");
            let started = Instant::now();
            hosts.up(count, CAPACITY_BYTES)?;
            let mut write = hosts.run(count, Path::new("sh"));
            said(write.args(["-c", "mkdir /forebay/d && echo written > /forebay/d/f"]))?;
            let seconds = started.elapsed().as_secs_f64();
            let read = said(hosts.run(1, Path::new("ls")).arg("/forebay/d"))?;
            hosts.down(count)?;
            if read != "f\n" {
                return Err(format!("node 1 sees {read:?} of what node {count} wrote"));
            }
            table.add(&label, 0, seconds, || match count {
                8 => vec![Target::Ratio { against: BOUND.into(), at_least: 1.0 }],
                _ => Vec::new(),
            });
            table.add(&label, 1, BOUND_S, Vec::new);
        }
    }
    Ok(table)
}
