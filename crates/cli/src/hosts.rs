//! Lists of hosts as users and batch systems write them: `a,b`, `n[01-16,20]-ib`, `@FILE` with a list on each line.

use std::collections::BTreeSet;
use std::path::Path;

use forebay_types::limits::NODES_MAX;
use forebay_types::{Error, Result};

use crate::failure;

/// The hosts of a list, in its order.
///
/// # Errors
/// A list that is malformed, empty or too long, or that names a host twice.
pub(crate) fn expand(list: &str) -> Result<Vec<String>> {
    let shown: String = list.chars().take(80).collect();
    let wrong = |why: String| {
        failure::invalid(
            format!("cannot read the list of hosts {shown:?}"),
            why,
            "write it as a,b or n[01-16,20], or name a file with @FILE",
        )
    };
    let mut hosts = Vec::new();
    match list.strip_prefix('@') {
        Some(file) => {
            let text = std::fs::read_to_string(Path::new(file))
                .map_err(|e| Error::io(format!("cannot read the list of hosts {file}"), &e))?;
            for line in text.lines() {
                // An MPI machine file has more after the host: further words, or a comment.
                let line = line.split('#').next().unwrap_or_default().trim();
                let host = line.split_whitespace().next().unwrap_or_default();
                if !host.is_empty() {
                    expand_into(host, &mut hosts).map_err(wrong)?;
                }
            }
        }
        None => expand_into(list, &mut hosts).map_err(wrong)?,
    }
    if hosts.is_empty() {
        return Err(wrong("it names no host".to_owned()));
    }
    let mut seen = BTreeSet::new();
    if let Some(twice) = hosts.iter().find(|host| !seen.insert(host.as_str())) {
        return Err(wrong(format!("{twice} is listed twice, and a host is one node")));
    }
    Ok(hosts)
}

fn expand_into(list: &str, hosts: &mut Vec<String>) -> std::result::Result<(), String> {
    for item in items(list)? {
        let item = item.trim();
        if item.is_empty() {
            return Err("a host between two commas is missing".to_owned());
        }
        let mut found = vec![String::new()];
        let mut rest = item;
        while let Some((before, behind)) = rest.split_once('[') {
            let (numbers, after) =
                behind.split_once(']').ok_or_else(|| format!("{item}: a bracket is not closed"))?;
            let numbers = numbers_of(numbers).map_err(|why| format!("{item}: {why}"))?;
            if found.len() * numbers.len() > NODES_MAX {
                return Err(format!("{item}: it is more than {NODES_MAX} hosts"));
            }
            found = found
                .iter()
                .flat_map(|start| numbers.iter().map(move |n| format!("{start}{before}{n}")))
                .collect();
            rest = after;
        }
        // An IPv6 address in brackets would be parsed as a range.
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
        if let Some(strange) = item.chars().find(|c| !is_name(*c) && !"[],@".contains(*c)) {
            return Err(format!("{item}: {strange:?} is in no host's name"));
        }
        if rest.contains(']') || item.contains('@') || item.starts_with('-') {
            return Err(format!("{item}: that is no host's name"));
        }
        hosts.extend(found.into_iter().map(|start| start + rest));
        if hosts.len() > NODES_MAX {
            return Err(format!("it is more than {NODES_MAX} hosts"));
        }
    }
    Ok(())
}

/// Splits at the commas outside brackets.
fn items(list: &str) -> std::result::Result<Vec<&str>, String> {
    let mut depth = 0usize;
    let mut parts = Vec::new();
    let mut start = 0;
    for (i, c) in list.char_indices() {
        match c {
            '[' => depth += 1,
            ']' => depth = depth.checked_sub(1).ok_or("a bracket closes that was not opened")?,
            ',' if depth == 0 => {
                parts.push(&list[start..i]);
                start = i + 1;
            }
            _ => {}
        }
        if depth > 1 {
            return Err("brackets within brackets".to_owned());
        }
    }
    parts.push(&list[start..]);
    Ok(parts)
}

/// Expands `01-03,7` to 01, 02, 03, 7: numbers of a range are padded to the width of its first.
fn numbers_of(list: &str) -> std::result::Result<Vec<String>, String> {
    let mut found = Vec::new();
    for part in list.split(',') {
        let part = part.trim();
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| match text.bytes().all(|b| b.is_ascii_digit()) {
            true => text.parse::<u64>().map_err(|_| format!("{text:?} is no number")),
            false => Err(format!("{text:?} is no number")),
        };
        let (from, to) = (number(first)?, number(last)?);
        if from > to {
            return Err(format!("{part} goes down"));
        }
        if to - from >= NODES_MAX as u64 {
            return Err(format!("{part} is more than {NODES_MAX} hosts"));
        }
        found.extend((from..=to).map(|n| format!("{n:0width$}", width = first.len())));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &str) -> Vec<String> {
        expand(list).unwrap()
    }

    #[test]
    fn expand_reads_what_slurm_writes() {
        assert_eq!(names("a,b.c.d"), ["a", "b.c.d"]);
        assert_eq!(names("n[08-11,3]"), ["n08", "n09", "n10", "n11", "n3"]);
        assert_eq!(names("r[1-2]n[0,7]-ib,login"), ["r1n0-ib", "r1n7-ib", "r2n0-ib", "r2n7-ib", "login"]);
        assert_eq!(names("10.0.0.[1-2],fd00::7"), ["10.0.0.1", "10.0.0.2", "fd00::7"]);
        assert_eq!(names("n[98-101]").last().unwrap(), "n101");
        assert_eq!(names("n[0001]"), ["n0001"]);
    }

    #[test]
    fn expand_reads_a_file_of_hosts() {
        let path = std::env::temp_dir().join(format!("forebay-hosts-{}", std::process::id()));
        std::fs::write(&path, "# mine\nn1 slots=4\n\nn[2-3]   # two more\n").unwrap();
        let read = expand(&format!("@{}", path.display()));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(read.unwrap(), ["n1", "n2", "n3"]);
        assert!(expand("@/nowhere/hosts").unwrap_err().to_string().contains("/nowhere/hosts"));
    }

    #[test]
    fn expand_of_what_makes_no_sense_says_why() {
        for (list, word) in [
            ("", "missing"),
            ("a,,b", "missing"),
            ("a,a", "a is listed twice"),
            ("n[1-3],n2", "n2 is listed twice"),
            ("n[1-", "not closed"),
            ("n1]", "not opened"),
            ("n[[1]]", "within"),
            ("n[a-b]", "no number"),
            ("n[]", "no number"),
            ("n[3-1]", "goes down"),
            ("n[1-99999]", "more than"),
            ("n[1-999],m[1-999]", "more than"),
            ("a b", "' '"),
            ("a;rm", "';'"),
            ("-oProxyCommand=x", "'='"),
            ("-x", "no host's name"),
            ("me@a", "no host's name"),
        ] {
            let error = expand(list).expect_err(list).to_string();
            assert!(error.contains(word), "{list}: {error}");
        }
    }
}
