//! The driver: runs on each system, the same program with the same calls. Prints one line of JSON.

use crate::calls::{c_path, check, close, create, write_all};
use crate::gate::Gate;
use crate::orders::Orders;

pub(crate) fn main(arguments: &[String]) -> Result<(), String> {
    let (what, rest) = arguments
        .split_first()
        .ok_or("drive meta, data, calls, names, mapped, transfers, tree, far, raw, times or age?")?;
    if let ("times", [count, command @ ..]) = (what.as_str(), rest) {
        println!("{}", crate::cost::drive_times(count, command)?);
        return Ok(());
    }
    match (what.as_str(), rest) {
        ("raw", [kind, verb, host]) if verb == "serve" => return crate::nodes::drive_raw_serve(kind, host),
        ("raw", [kind, verb, words @ ..]) if verb == "ask" => {
            println!("{}", crate::nodes::drive_raw_ask(kind, words)?);
            return Ok(());
        }
        _ => {}
    }
    let value = match what.as_str() {
        "files" => Some(crate::backing::drive_files(rest)?),
        "volume-single" => Some(crate::nodes::drive_single(rest)?),
        "list" => Some(crate::backing::drive_list(rest)?),
        "day-write" => Some(crate::backing::drive_day_write(rest)?),
        "day-read" => Some(crate::backing::drive_day_read(rest)?),
        _ => None,
    };
    if let Some(value) = value {
        println!("{value}");
        return Ok(());
    }
    let orders = Orders::parse(rest)?;
    let named =
        |rates: Vec<(&str, f64)>| rates.into_iter().map(|(name, rate)| (name.to_owned(), rate)).collect();
    let rates: Vec<(String, f64)> = match what.as_str() {
        "meta" => named(crate::meta::drive(&orders)?),
        "data" => named(crate::data::drive(&orders)?),
        "age" => named(age(&orders)?),
        "calls" => crate::cost::drive(&orders)?,
        "names" => named(crate::mount::drive_names(&orders)?),
        "transfers" => named(crate::mount::drive_transfers(&orders)?),
        "tree" => crate::nodes::drive(&orders)?,
        "far-make" => named(crate::nodes::drive_far_make(&orders)?),
        "far" => named(crate::nodes::drive_far(&orders)?),
        "volume" => crate::nodes::drive_volume(&orders)?,
        "volume-far" => crate::nodes::drive_volume_far(&orders)?,
        "volume-shared" => crate::nodes::drive_volume_shared(&orders)?,
        "volume-clients" => crate::nodes::drive_clients(&orders)?,
        "volume-clients-far" => crate::nodes::drive_clients_far(&orders)?,
        "mapped" => named(crate::mount::drive_mapped(&orders)?),
        other => return Err(format!("there is no drive {other}")),
    };
    let object: serde_json::Map<String, serde_json::Value> =
        rates.into_iter().map(|(name, rate)| (name, rate.into())).collect();
    println!("{}", serde_json::Value::Object(object));
    Ok(())
}

/// Fills a file system and frees it again, so that memory has been touched, and trees have split and merged.
fn age(orders: &Orders) -> Result<Vec<(&'static str, f64)>, String> {
    let path = |i: usize| c_path(&orders.root, &format!("age{i}"));
    let seconds = Gate::run(1, |gate| {
        gate.timed(|| {
            let block = vec![0x5a_u8; 1 << 20];
            let fd = create(&path(0))?;
            for _ in 0..orders.bytes >> 20 {
                write_all(fd, &block)?;
            }
            close(fd);
            for i in 1..orders.files {
                close(create(&path(i))?);
            }
            (0..orders.files).try_for_each(|i| {
                // SAFETY: the string ends in NUL.
                check(unsafe { libc::unlink(path(i).as_ptr()) }, "unlink", &path(i))
            })
        })
    })?;
    Ok(vec![("seconds", seconds[0])])
}
