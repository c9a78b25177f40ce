//! (e) How evenly 10^6 names are distributed over 2 to 1024 nodes, computed with the hash of entries: the fullest
//! node's number of names over the mean.
//!
//! - *cut*: one wide directory, by the code that divides it; also for more nodes than a wide directory may have.
//! - *in turn*: directories of 1000 names, each on its creator's node; ranks that are evenly distributed over the nodes
//!   create them in turn.
//! - *random*: the same, created by random nodes.
//! - *chance*: each name on a random node: no hash does better without counting.

use forebay_types::{name_hash, part_of_hash};

use crate::report::Table;

const NAMES: usize = 1_000_000;
const NAMES_OF_A_DIRECTORY: usize = 1000;
const NODES: [usize; 12] = [2, 3, 4, 8, 16, 32, 64, 100, 128, 256, 512, 1024];

pub(super) fn placement() -> Table {
    let mut table = Table {
        title: format!("(e) {NAMES} names on many nodes"),
        unit: "fullest node / mean",
        more_is_better: false,
        columns: ["cut", "in turn", "random", "chance"].map(str::to_owned).to_vec(),
        rows: Vec::new(),
    };
    let hashes: Vec<u64> = (0..NAMES).map(|i| name_hash(format!("file.mdtest.{i}").as_bytes())).collect();
    for nodes in NODES {
        let label = format!("nodes: {nodes}");
        let directories = NAMES / NAMES_OF_A_DIRECTORY;
        let cut = |i: usize| part_of_hash(hashes[i], nodes);
        let maker = |i: usize| i / NAMES_OF_A_DIRECTORY * nodes / directories % nodes;
        let any = |i: usize| scattered((i / NAMES_OF_A_DIRECTORY) as u64, nodes);
        let chance = |i: usize| scattered((i + NAMES) as u64, nodes);
        let ways: [&dyn Fn(usize) -> usize; 4] = [&cut, &maker, &any, &chance];
        for (column, way) in ways.into_iter().enumerate() {
            table.add(&label, column, unevenness(nodes, way), Vec::new);
        }
    }
    table
}

/// The fullest node's share, relative to the mean.
fn unevenness(nodes: usize, node_of: impl Fn(usize) -> usize) -> f64 {
    let mut counts = vec![0usize; nodes];
    (0..NAMES).for_each(|i| counts[node_of(i)] += 1);
    counts.into_iter().max().unwrap_or(0) as f64 * nodes as f64 / NAMES as f64
}

/// A pseudorandom node, the same in each run (SplitMix64).
fn scattered(i: u64, nodes: usize) -> usize {
    let mut z = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) % nodes as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unevenness_of_equal_parts_is_one_and_of_one_node_with_all_their_number() {
        assert_eq!(unevenness(4, |i| i % 4), 1.0);
        assert_eq!(unevenness(4, |_| 2), 4.0);
    }

    #[test]
    fn names_that_differ_in_a_number_lie_as_evenly_as_by_chance() {
        let table = placement();
        for row in &table.rows {
            let (cut, chance) = (row.samples[0][0], row.samples[3][0]);
            // A number of parts that the number of nodes does not divide adds at most one in four.
            assert!(cut <= chance * 1.27, "{}: {cut} {chance}", row.label);
        }
    }
}
