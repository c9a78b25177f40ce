//! The medium that a pool's targets or a block device emulate, configured beside measured, in words.

use serde_json::Value;

use crate::table;

/// A time in the unit in which it is shortest.
pub(crate) fn time(ns: u64) -> String {
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} us", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.1} s", ns as f64 / 1e9),
    }
}

fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or(0)
}

/// One direction's configured values.
fn speed(word: &str, speed: &Value) -> String {
    format!(
        "{word} {} and {} MB/s",
        time(number(speed, "latency_ns")),
        number(speed, "bytes_per_s") / 1_000_000
    )
}

/// What was counted in one direction.
fn counted(word: &str, counted: &Value) -> String {
    let Some(measured) = counted["measured_mean_ns"].as_u64() else { return format!("no {word}") };
    format!(
        "{} {word} of {}: {} each, {} configured",
        number(counted, "requests"),
        table::bytes(number(counted, "bytes")),
        time(measured),
        time(number(counted, "configured_mean_ns")),
    )
}

/// The lines of a medium.
pub(crate) fn lines(medium: &Value) -> Vec<String> {
    let seek = match number(medium, "seek_ns") {
        0 => String::new(),
        ns => format!(", seek {}", time(ns)),
    };
    let mut lines = vec![format!(
        "{}: {}, {}{seek}, queue depth {}; waits end {} late",
        medium["profile"].as_str().unwrap_or("-"),
        speed("read", &medium["read"]),
        speed("write", &medium["write"]),
        number(medium, "queue_depth"),
        time(number(&medium["floor_ns"], "long")),
    )];
    let targets = medium["targets"].as_array().map_or(&[][..], Vec::as_slice);
    for (i, target) in targets.iter().enumerate() {
        let name = if targets.len() > 1 { format!("target {i}: ") } else { String::new() };
        lines.push(format!(
            "{name}{}, {}",
            counted("reads", &target["reads"]),
            counted("writes", &target["writes"])
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lines_show_configured_and_measured_values() {
        let one = json!({ "requests": 3, "bytes": 4096, "measured_mean_ns": 1_200_000, "configured_mean_ns": 1_000_000 });
        let none = json!({ "requests": 0, "bytes": 0, "measured_mean_ns": null, "configured_mean_ns": null });
        let medium = json!({
            "profile": "mine", "seek_ns": 7_000_000, "queue_depth": 2, "floor_ns": { "long": 950 },
            "read": { "latency_ns": 90, "bytes_per_s": 5_000_000 },
            "write": { "latency_ns": 1_500, "bytes_per_s": 4_000_000 },
            "targets": [{ "reads": one, "writes": none }],
        });
        assert_eq!(
            lines(&medium),
            [
                "mine: read 90 ns and 5 MB/s, write 1.5 us and 4 MB/s, seek 7.0 ms, queue depth 2; waits end 950 ns late",
                "3 reads of 4 KiB: 1.2 ms each, 1.0 ms configured, no writes",
            ]
        );
    }
}
