//! Single calls, timed one by one, in four orders of their places.

use std::ffi::CString;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use serde_json::{json, Map, Value};

use super::super::volumes::{client, library, this, SharedMemory};
use super::clients::Random;
use crate::orders::Orders;
use crate::picture::{Curve, Panel};
use crate::report::Table;
use crate::systems::{said, Pool};

const CALLS: usize = 10_000;
const BLOCK: usize = 4096;
const VOLUME_BYTES: usize = CALLS * BLOCK;
const CAPACITY_BYTES: u64 = 512 << 20;
const ORDERS: [&str; 4] = ["sequential", "random", "strided", "reverse"];
/// Places between two calls of the strided order. It has no divisor in common with the number of places.
const STRIDE: usize = 137;
/// Kinds of calls, with what each is on a volume, in shared memory, and on a file of the pool.
const KINDS: [(&str, [&str; 3]); 2] =
    [("put", ["put", "copy to", "write"]), ("get", ["get", "copy from", "read"])];
/// Classes of a density for each power of ten of time.
const CLASSES: f64 = 20.0;

/// The table of quantiles, and the densities.
pub(super) fn measure(binaries: &Path) -> Result<(Table, Vec<Panel>), String> {
    let pool = Pool::up(binaries, CAPACITY_BYTES)?;
    said(pool.command().args(["volume", "create", "v", "--size", &VOLUME_BYTES.to_string(), "--json"]))?;
    let orders = Orders { root: "v".into(), block: BLOCK, ..Orders::default() };
    let told = client(binaries, &orders, "volume-single", pool.directory(), Command::new(this()?))?;
    let told: Value =
        serde_json::from_str(told.trim()).map_err(|e| format!("a client said {told:?}: {e}"))?;
    let times = |order: &str, call: &str| -> Result<Vec<f64>, String> {
        let all = told[order][call].as_array().ok_or(format!("a client said nothing of {call}, {order}"))?;
        Ok(all.iter().filter_map(Value::as_f64).collect())
    };
    let mut table = Table {
        title: format!("(e) {CALLS} single calls of {} KiB, one by one", BLOCK >> 10),
        unit: "ns",
        more_is_better: false,
        columns: ["Forebay", "memcpy", "pool file"].map(str::to_owned).into(),
        rows: Vec::new(),
    };
    let mut panels = Vec::new();
    for order in ORDERS {
        let mut curves = Vec::new();
        for (kind, calls) in KINDS {
            for (column, call) in calls.into_iter().enumerate() {
                let mut times = times(order, call)?;
                times.sort_by(f64::total_cmp);
                for (part, name) in [(0.5, "median"), (0.99, "99 of 100"), (0.999, "999 of 1000")] {
                    let at = ((times.len() as f64 * part) as usize).min(times.len().saturating_sub(1));
                    let value = times.get(at).copied().ok_or(format!("no times of {call}"))?;
                    table.add(&format!("{kind}, {order}, {name}"), column, value, Vec::new);
                }
                let where_to = ["a volume", "memory", "a file"][column];
                curves.push(Curve { name: format!("{call}, {where_to}"), points: density(&times) });
            }
        }
        panels.push(Panel::Densities { title: order.into(), x_name: "ns a call", curves });
    }
    Ok((table, panels))
}

/// The share of calls in each class of times, at the class's middle.
fn density(times: &[f64]) -> Vec<(f64, f64)> {
    let class = |ns: f64| (ns.max(1.0).log10() * CLASSES).floor() as usize;
    let mut counts = vec![0usize; times.iter().map(|&ns| class(ns)).max().unwrap_or(0) + 2];
    times.iter().for_each(|&ns| counts[class(ns)] += 1);
    let first = counts.iter().position(|&count| count > 0).unwrap_or(0).saturating_sub(1);
    let points = counts.iter().enumerate().skip(first);
    points
        .map(|(i, &count)| (10f64.powf((i as f64 + 0.5) / CLASSES), count as f64 / times.len() as f64))
        .collect()
}

fn places(order: &str) -> Vec<usize> {
    match order {
        "random" => Random(1).order(CALLS),
        "strided" => (0..CALLS).map(|i| i * STRIDE % CALLS).collect(),
        "reverse" => (0..CALLS).rev().collect(),
        _ => (0..CALLS).collect(),
    }
}

/// `drive volume-single`: nanoseconds of each call, by order and kind, as JSON.
pub(crate) fn drive(arguments: &[String]) -> Result<Value, String> {
    let orders = Orders::parse(arguments)?;
    let library = library()?;
    let volume = library.volume(&CString::new(orders.root.as_str()).unwrap_or_default())?;
    let file = library.open(c"/single", libc::O_CREAT | libc::O_RDWR)?;
    let memory = SharedMemory::new(VOLUME_BYTES)?;
    let source = vec![1u8; BLOCK];
    let mut sink = vec![0u8; BLOCK];
    // All pages are there before the time begins.
    (0..CALLS).try_for_each(|place| {
        volume.put(&source, place * BLOCK)?;
        volume.get(&mut sink, place * BLOCK)?;
        file.write(&source, place * BLOCK)
    })?;
    let mut all = Map::new();
    for order in ORDERS {
        let places = places(order);
        let timed = |call: &mut dyn FnMut(usize) -> Result<(), String>| -> Result<Value, String> {
            let mut times = Vec::with_capacity(CALLS);
            for place in &places {
                let started = Instant::now();
                call(place * BLOCK)?;
                times.push(started.elapsed().as_nanos() as u64);
            }
            Ok(json!(times))
        };
        let mut kinds = Map::new();
        kinds.insert("put".into(), timed(&mut |at| volume.put(&source, at))?);
        kinds.insert("get".into(), timed(&mut |at| volume.get(&mut sink, at))?);
        kinds.insert("write".into(), timed(&mut |at| file.write(&source, at))?);
        kinds.insert("read".into(), timed(&mut |at| file.read(&mut sink, at))?);
        let copied = &mut |at| {
            memory.copy_to(at, &source);
            Ok(())
        };
        kinds.insert("copy to".into(), timed(copied)?);
        let copied = &mut |at| {
            memory.copy_from(at, &mut sink);
            std::hint::black_box(&sink);
            Ok(())
        };
        kinds.insert("copy from".into(), timed(copied)?);
        all.insert(order.into(), Value::Object(kinds));
    }
    Ok(Value::Object(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_has_each_place_once() {
        for order in ORDERS {
            let mut places = places(order);
            assert!(order == "sequential" || places != (0..CALLS).collect::<Vec<_>>());
            places.sort_unstable();
            assert_eq!(places, (0..CALLS).collect::<Vec<_>>(), "{order}");
        }
    }

    #[test]
    fn density_counts_every_call_once() {
        let points = density(&[100.0, 101.0, 5000.0, 0.0]);
        assert!((points.iter().map(|point| point.1).sum::<f64>() - 1.0).abs() < 1e-9, "{points:?}");
        let most = points.iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
        assert!((90.0..125.0).contains(&most.0) && most.1 == 0.5, "{points:?}");
    }
}
