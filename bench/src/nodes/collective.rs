//! (g) Collective MPI-IO on data of other nodes: records of the ranks in turn. The driver's choice is compared with
//! each rank alone and with two-phase, by bench/records.c. The rule is in docs/decisions/0021.

use std::path::Path;

use super::hosts::Hosts;
use crate::mpi::{Mpi, MPIS};
use crate::report::Table;
use crate::sizes::Sizes;
use crate::systems::said;

const NODES: usize = 4;
const CAPACITY_BYTES: u64 = 256 << 20;
const BYTES_OF_A_RANK: u32 = 1 << 20;
const WAYS: [&str; 3] = ["automatic", "independent", "two-phase"];

/// The nodes of the ranks, the file, and a description of where it is.
const PLACES: [(&[usize], &str, &str); 2] = [
    (&[1, 1], "/forebay/far/file", "2 ranks on one node, the file on another"),
    (&[1, 2, 3, 4], "/forebay/striped/file", "4 ranks on 4 nodes, the file striped over them"),
];

/// A table for each installed MPI and each entry of the list above.
pub(super) fn measure(binaries: &Path, sizes: &Sizes) -> Result<Vec<Table>, String> {
    let hosts = Hosts::new(binaries)?;
    hosts.up(NODES, CAPACITY_BYTES)?;
    let mut make = hosts.run(2, "sh".as_ref());
    said(make.args(["-c", "mkdir /forebay/far /forebay/striped && touch /forebay/far/file"]))?;
    let mut layout = hosts.forebay();
    layout.arg("--pool").arg(hosts.pool(2)).args(["layout", "set", "-c", &NODES.to_string(), "/striped"]);
    said(&mut layout)?;
    let mut tables = Vec::new();
    for mpi in &MPIS {
        if !mpi.is_here() {
            println!("\n(g) {} is left out: no {} or {}", mpi.name, mpi.compiler, mpi.launcher[0]);
            continue;
        }
        let program = hosts.directory.join(mpi.compiler);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("records.c");
        said(std::process::Command::new(mpi.compiler).args(["-O2", "-o"]).arg(&program).arg(source))?;
        for (at, file, words) in PLACES {
            let mut table = Table {
                title: format!(
                    "(g) collective MPI-IO, {}, {words}, {BYTES_OF_A_RANK} bytes a rank",
                    mpi.name
                ),
                unit: "MB/s",
                more_is_better: true,
                columns: WAYS.map(String::from).to_vec(),
                rows: Vec::new(),
            };
            for _ in 0..sizes.repetitions {
                for (label, way, rate) in ranks(&hosts, mpi, at, &program, file)? {
                    let column =
                        WAYS.iter().position(|known| *known == way).ok_or("records.c has another way")?;
                    table.add(&label, column, rate, Vec::new);
                }
            }
            let place = |label: &str| {
                let bytes = label.split_whitespace().nth(1).and_then(|word| word.parse::<u32>().ok());
                (label.starts_with("read"), bytes)
            };
            table.rows.sort_by_key(|row| place(&row.label));
            tables.push(table);
        }
    }
    Ok(tables)
}

/// One run: labels, ways and rates.
fn ranks(
    hosts: &Hosts,
    mpi: &Mpi,
    at: &[usize],
    program: &Path,
    file: &str,
) -> Result<Vec<(String, String, f64)>, String> {
    // The launcher sees all ranks on this host, so each rank's number of local ranks is set here.
    let script = "shift ${OMPI_COMM_WORLD_RANK:-$PMI_RANK}; export OMPI_COMM_WORLD_LOCAL_SIZE=${1%% *}; \
                  exec \"$FOREBAY\" run --quiet --pool \"${1#* }\" -- \"$PROGRAM\" \"$FILE\" \"$BYTES\"";
    let mut command = std::process::Command::new(mpi.launcher[0]);
    command.args(&mpi.launcher[1..]).arg(at.len().to_string()).args(["sh", "-c", script, "sh"]);
    command.args(at.iter().map(|node| {
        let here = at.iter().filter(|other| *other == node).count();
        format!("{here} {}", hosts.pool(*node).display())
    }));
    command.env("FOREBAY", hosts.binaries.join("forebay")).env("PROGRAM", program).env("FILE", file);
    command.env("BYTES", BYTES_OF_A_RANK.to_string()).env_remove("FOREBAY_POOL");
    let text = said(&mut command)?;
    let map: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(text.trim()).map_err(|e| format!("bench/records.c said {text:?}: {e}"))?;
    let rate = |(name, value): (String, serde_json::Value)| {
        let (label, way) = name.split_once(": ")?;
        Some((label.to_owned(), way.to_owned(), value.as_f64()?))
    };
    Ok(map.into_iter().filter_map(rate).collect())
}
