//! Data rates: bytes per second.

use crate::calls::{c_path, check, close};
use crate::gate::Gate;
use crate::orders::Orders;

/// The phases, in the order in which the driver times them.
pub(crate) const PHASES: [&str; 3] = ["first write", "rewrite", "read"];

/// GB/s (10^9) of each phase, for all processes together. Opening and closing are not timed, and nothing is synced.
pub(crate) fn drive(orders: &Orders) -> Result<Vec<(&'static str, f64)>, String> {
    let seconds = Gate::run(orders.processes, |gate| work(gate, orders))?;
    Ok(PHASES.into_iter().zip(seconds.iter().map(|s| orders.bytes as f64 / s / 1e9)).collect())
}

fn work(gate: &mut Gate, orders: &Orders) -> Result<(), String> {
    let blocks = orders.bytes / orders.processes / orders.block;
    let (name, first) = if orders.shared {
        ("shared".to_owned(), gate.process * blocks)
    } else {
        (format!("own.{}", gate.process), 0)
    };
    let path = c_path(&orders.root, &name);
    // SAFETY: the string ends in NUL.
    let fd = unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CREAT, 0o644) };
    check(fd, "open", &path)?;
    let order: Vec<i64> = positions(blocks, orders.random, gate.process as u64)
        .into_iter()
        .map(|i| ((first + i) * orders.block) as i64)
        .collect();
    let mut buffer = vec![gate.process as u8 + 1; orders.block];
    for _ in 0..2 {
        let bytes = &buffer;
        gate.timed(|| {
            order.iter().try_for_each(|offset| {
                // SAFETY: the bytes are ours and of the length given.
                let n = unsafe { libc::pwrite(fd, bytes.as_ptr().cast(), bytes.len(), *offset) };
                whole(n, bytes.len(), "pwrite")
            })
        })?;
    }
    gate.timed(|| {
        order.iter().try_for_each(|offset| {
            // SAFETY: the buffer is ours and of the length given.
            let n = unsafe { libc::pread(fd, buffer.as_mut_ptr().cast(), buffer.len(), *offset) };
            whole(n, buffer.len(), "pread")
        })
    })?;
    if buffer.first() != Some(&(gate.process as u8 + 1)) {
        return Err("read other bytes than it wrote".into());
    }
    close(fd);
    if !orders.shared || gate.process == 0 {
        // SAFETY: the string ends in NUL.
        check(unsafe { libc::unlink(path.as_ptr()) }, "unlink", &path)?;
    }
    Ok(())
}

/// Checks that a transfer was complete.
pub(crate) fn whole(n: isize, expected: usize, call: &str) -> Result<(), String> {
    if n == expected as isize {
        return Ok(());
    }
    Err(format!("{call} gave {n} of {expected}: {}", std::io::Error::last_os_error()))
}

/// The numbers below `count`, in order or shuffled (Fisher and Yates, with xorshift64 from a fixed seed).
fn positions(count: usize, random: bool, seed: u64) -> Vec<usize> {
    let mut all: Vec<usize> = (0..count).collect();
    let mut state = 0x9e37_79b9_7f4a_7c15 ^ (seed + 1);
    if random {
        for i in (1..count).rev() {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            all.swap(i, (state % (i as u64 + 1)) as usize);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_in_random_order_are_all_positions() {
        let mut shuffled = positions(1000, true, 3);
        assert_ne!(shuffled, positions(1000, false, 3));
        shuffled.sort();
        assert_eq!(shuffled, positions(1000, false, 3));
    }
}
