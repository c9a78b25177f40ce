//! (b) Creates, stats and unlinks by clients on one node in a directory of another node, compared with the rate of bare
//! requests.
//!
//! (d) Creates, stats and unlinks by a client on each of 1 to 4 nodes, as in mdtest: all in one directory on node 1,
//! all in one wide directory over all four nodes of the pool, and each in a directory of its own on its own node. Each
//! client stats the next client's files. Names are relative to the directory, so that no path is walked: each call is
//! one request, to the node that has the name.

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use super::hosts::Hosts;
use super::raw;
use crate::calls::{check, close, create};
use crate::gate::now_ns;
use crate::meta::stat;
use crate::orders::Orders;
use crate::report::{Table, Target};
use crate::sizes::Sizes;
use crate::systems::said;

const PHASES: [&str; 3] = ["create", "stat", "unlink"];
const NODES: [usize; 3] = [1, 2, 4];
/// Numbers of clients on one node, in (b).
const CLIENTS: [usize; 2] = [1, 4];
/// The directories of the clients.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Each client has a directory of its own.
    Own,
    /// All share one directory.
    One,
    /// All share one wide directory over all nodes.
    Wide,
}

const PLACES: [(Place, &str); 3] =
    [(Place::Own, "own directories"), (Place::One, "one directory"), (Place::Wide, "one wide directory")];
const CALLS: &str = "calls";
/// Target for requests, relative to the call layer's own rate.
const AT_LEAST: f64 = 0.6;
/// Files of each client.
const FILES: usize = 1000;
const CAPACITY_BYTES: u64 = 256 << 20;
/// The variable for the directory in which clients on different nodes wait for each other; the next one is the client's
/// number.
const GATE_VARIABLE: &str = "FOREBAY_BENCH_GATE";
const CLIENT_VARIABLE: &str = "FOREBAY_BENCH_CLIENT";

pub(super) fn measure(binaries: &Path, sizes: &Sizes) -> Result<Table, String> {
    let hosts = Hosts::new(binaries)?;
    hosts.up(*NODES.last().unwrap_or(&1), CAPACITY_BYTES)?;
    let mut table = Table {
        title: format!(
            "(d) names by a client on each of several nodes of a pool of four, {FILES} files each"
        ),
        unit: "operations/s",
        more_is_better: true,
        columns: PLACES.map(|(_, words)| words.into()).to_vec(),
        rows: Vec::new(),
    };
    for _ in 0..sizes.repetitions {
        for clients in NODES {
            for (column, (place, _)) in PLACES.into_iter().enumerate() {
                let rates = together(&hosts, clients, place, (1, |client| client + 1))?;
                for (phase, rate) in PHASES.iter().zip(rates) {
                    table.add(&format!("{phase}: {clients}"), column, rate, Vec::new);
                }
            }
        }
    }
    table.rows.sort_by_key(|row| PHASES.iter().position(|p| row.label.starts_with(p)));
    Ok(table)
}

pub(super) fn measure_far(binaries: &Path, sizes: &Sizes) -> Result<Table, String> {
    let (hosts, place) = Hosts::apart(binaries)?;
    hosts.up(2, CAPACITY_BYTES)?;
    let mut table = Table {
        title: format!("(b) names in a directory of another node, over {place}, {FILES} files a client"),
        unit: "operations/s",
        more_is_better: true,
        columns: vec!["Forebay".into(), CALLS.into()],
        rows: Vec::new(),
    };
    for _ in 0..sizes.repetitions {
        for clients in CLIENTS {
            let said = raw::measure(&hosts, raw::Kind::Calls, clients)?;
            let told: serde_json::Value = serde_json::from_str(said.trim()).map_err(|e| e.to_string())?;
            let calls = told["calls"].as_f64().ok_or(format!("a client said {said:?}"))?;
            for (phase, rate) in PHASES.iter().zip(together(&hosts, clients, Place::One, (2, |_| 1))?) {
                let label = format!("{phase}: {clients}");
                let target = || vec![Target::Ratio { against: CALLS.into(), at_least: AT_LEAST }];
                table.add(&label, 0, rate, target);
                table.add(&label, 1, calls, Vec::new);
            }
        }
    }
    table.rows.sort_by_key(|row| PHASES.iter().position(|p| row.label.starts_with(p)));
    hosts.down(2)?;
    Ok(table)
}

/// Operations per second of each phase, for all clients together. `maker` is the node that makes the root; `node_of`
/// gives each client's node.
fn together(
    hosts: &Hosts,
    clients: usize,
    place: Place,
    (maker, node_of): (usize, fn(usize) -> usize),
) -> Result<Vec<f64>, String> {
    let gate = hosts.directory.join("gate");
    std::fs::create_dir(&gate).map_err(|e| format!("{}: {e}", gate.display()))?;
    let root = "/forebay/trees";
    said(hosts.run(maker, Path::new("mkdir")).args(["-m", "777", root]))?;
    if place == Place::Wide {
        let mut wide = hosts.forebay();
        wide.args(["layout", "set", "--width", "0", "--pool"]).arg(hosts.pool(maker)).arg("/trees");
        said(&mut wide)?;
    }
    let shared = place != Place::Own;
    let this = std::env::current_exe().map_err(|e| format!("this program's path: {e}"))?;
    let orders = Orders { root: root.into(), processes: clients, shared, files: FILES, ..Orders::default() };
    let mut running: Vec<Child> = Vec::new();
    for client in 0..clients {
        let mut command = hosts.run(node_of(client), &this);
        command.args(orders.arguments("tree")).env(GATE_VARIABLE, &gate);
        command.env(CLIENT_VARIABLE, client.to_string()).stdout(Stdio::piped());
        running.push(command.spawn().map_err(|e| format!("{command:?} cannot be run: {e}"))?);
    }
    let mut spans: Vec<(f64, f64)> = vec![(f64::MAX, 0.0); PHASES.len()];
    for child in running {
        let output = child.wait_with_output().map_err(|e| format!("a client: {e}"))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let times: serde_json::Value =
            serde_json::from_str(text.trim()).map_err(|e| format!("a client said {text:?}: {e}"))?;
        for (i, span) in spans.iter_mut().enumerate() {
            let time =
                |key: &str| times[format!("{key}{i}")].as_f64().ok_or(format!("a client said {text:?}"));
            *span = (span.0.min(time("start")?), span.1.max(time("end")?));
        }
    }
    said(hosts.run(maker, Path::new("rm")).args(["-r", root]))?;
    std::fs::remove_dir_all(&gate).map_err(|e| format!("{}: {e}", gate.display()))?;
    Ok(spans.into_iter().map(|(start, end)| (FILES * clients) as f64 * 1e9 / (end - start)).collect())
}

/// One client: start and end of its phases, in nanoseconds of the machine's clock.
pub(crate) fn drive(orders: &Orders) -> Result<Vec<(String, f64)>, String> {
    let set = |name: &str| std::env::var(name).map_err(|_| format!("{name} is not set"));
    let gate = PathBuf::from(set(GATE_VARIABLE)?);
    let client: usize =
        set(CLIENT_VARIABLE)?.parse().map_err(|_| format!("{CLIENT_VARIABLE}: not a number"))?;
    let home = |client: usize| match orders.shared {
        true => orders.root.clone(),
        false => format!("{}/c{client}", orders.root),
    };
    if !orders.shared {
        std::fs::create_dir(home(client)).map_err(|e| format!("{}: {e}", home(client)))?;
    }
    let names = |client: usize| -> Vec<CString> {
        (0..orders.files).map(|i| CString::new(format!("f.{client}.{i}")).unwrap_or_default()).collect()
    };
    let next = (client + 1) % orders.processes;
    let (own, theirs) = (names(client), names(next));
    let mut times = Vec::new();
    for phase in 0..PHASES.len() {
        // All clients have arrived before any changes to a directory that another client made.
        wait_for_all(&gate, 2 * phase, client, orders.processes)?;
        let place = home(if phase == 1 { next } else { client });
        std::env::set_current_dir(&place).map_err(|e| format!("{place}: {e}"))?;
        wait_for_all(&gate, 2 * phase + 1, client, orders.processes)?;
        times.push((format!("start{phase}"), now_ns() as f64));
        match phase {
            0 => own.iter().try_for_each(|path| create(path).map(close))?,
            1 => theirs.iter().try_for_each(stat)?,
            _ => own.iter().try_for_each(|path| {
                // SAFETY: the string ends in NUL.
                check(unsafe { libc::unlink(path.as_ptr()) }, "unlink", path)
            })?,
        }
        times.push((format!("end{phase}"), now_ns() as f64));
    }
    Ok(times)
}

/// Waits until all clients have reached a meeting: each creates a file, outside the pool.
fn wait_for_all(gate: &Path, meeting: usize, client: usize, clients: usize) -> Result<(), String> {
    let mark = |client: usize| gate.join(format!("{meeting}.{client}"));
    std::fs::write(mark(client), "").map_err(|e| format!("{}: {e}", mark(client).display()))?;
    for other in 0..clients {
        let mut looks = 0;
        while !mark(other).exists() {
            looks += 1;
            if looks > 300_000 {
                return Err(format!("client {other} does not come"));
            }
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
    }
    Ok(())
}
