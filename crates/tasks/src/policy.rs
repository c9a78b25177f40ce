//! What happens to the files of an attached directory: when they are copied to the store, what is done with files that
//! stay open, and how long they are kept in the pool; by patterns of their paths.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::drain_policy::{seconds, DrainPolicy};

/// The policy of a file. In words: `close`, `age:30s,open=snapshot:10m`, `reusable`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Policy {
    /// When written data are copied to the store.
    pub drain: DrainPolicy,
    /// How often a file that stays open for writing is copied as it is at that moment; none: never.
    pub snapshot: Option<Duration>,
    /// Its data are wanted again: they leave the pool after those of all other files.
    pub reusable: bool,
}

impl Policy {
    /// The policy with a time for copies, and no more.
    pub const fn of(drain: DrainPolicy) -> Policy {
        Policy { drain, snapshot: None, reusable: false }
    }

    /// True if nothing is ever copied to the store.
    pub fn is_temporary(&self) -> bool {
        self.drain == DrainPolicy::Never
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.drain)?;
        if self.reusable {
            f.write_str(",reusable")?;
        }
        match self.snapshot {
            Some(period) => write!(f, ",open=snapshot:{}s", period.as_secs()),
            None => Ok(()),
        }
    }
}

/// The words of a policy, for messages.
const WORDS: &str =
    "close, age:30s, watermark, request, never; persistent, temporary, reusable; open=snapshot:10m";

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Policy, String> {
        let mut policy = Policy::default();
        let mut drain: Option<(&str, DrainPolicy)> = None;
        for word in text.split(',').map(str::trim) {
            let wanted = match word {
                "persistent" => continue,
                "reusable" => {
                    policy.reusable = true;
                    continue;
                }
                "temporary" => DrainPolicy::Never,
                _ if word.starts_with("open=") => {
                    let period = word.strip_prefix("open=snapshot:").and_then(seconds).filter(|s| *s > 0);
                    let wrong = || format!("{word:?} is not open=snapshot:TIME, such as open=snapshot:10m");
                    policy.snapshot = Some(Duration::from_secs(period.ok_or_else(wrong)?));
                    continue;
                }
                "" => return Err(format!("a word is missing; the words are {WORDS}")),
                _ if word.starts_with("age:") => word.parse()?,
                _ => word.parse().map_err(|_| format!("{word:?} is none of {WORDS}"))?,
            };
            if let Some((before, _)) = drain.filter(|(_, before)| *before != wanted) {
                return Err(format!("{before:?} and {word:?} contradict each other"));
            }
            drain = Some((word, wanted));
        }
        policy.drain = drain.map_or(DrainPolicy::Close, |(_, drain)| drain);
        if policy.is_temporary() && (policy.snapshot.is_some() || policy.reusable) {
            return Err(
                "what is never copied to the store has no snapshots there and cannot be reusable".into()
            );
        }
        Ok(policy)
    }
}

impl TryFrom<String> for Policy {
    type Error = String;

    fn try_from(text: String) -> Result<Policy, String> {
        text.parse()
    }
}

impl From<Policy> for String {
    fn from(policy: Policy) -> String {
        policy.to_string()
    }
}

/// A policy for files whose path in the attached directory matches a pattern.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Rule {
    /// `*.tmp`: a name anywhere. `run/*.h5`: a path from the attached directory. `scratch/**`: everything below.
    pub pattern: String,
    /// What happens to such files.
    pub policy: Policy,
}

impl FromStr for Rule {
    type Err = String;

    fn from_str(text: &str) -> Result<Rule, String> {
        let (pattern, policy) =
            text.split_once('=').ok_or("write PATTERN=POLICY, such as '*.tmp=temporary'")?;
        Rule { pattern: pattern.to_owned(), policy: policy.parse()? }.checked()
    }
}

impl Rule {
    /// The rule, if its pattern is one.
    pub fn checked(self) -> Result<Rule, String> {
        let wrong = |why: &str| Err(format!("the pattern {:?} {why}", self.pattern));
        match &*self.pattern {
            "" => wrong("is empty"),
            pattern if pattern.starts_with('/') => {
                wrong("begins with /: paths are meant from the attached directory")
            }
            pattern if pattern.split('/').any(|part| matches!(part, "" | "." | "..")) => {
                wrong("has an empty component, . or ..; write DIR/** for everything below DIR")
            }
            _ => Ok(self),
        }
    }

    /// True for a path from the attached directory, without `/` at its ends.
    pub fn matches(&self, path: &[u8]) -> bool {
        let pattern = self.pattern.as_bytes();
        match pattern.contains(&b'/') {
            true => {
                let pattern: Vec<_> = pattern.split(|b| *b == b'/').collect();
                let path: Vec<_> = path.split(|b| *b == b'/').collect();
                matches_path(&pattern, &path)
            }
            // A name anywhere.
            false => matches_name(pattern, path.rsplit(|b| *b == b'/').next().unwrap_or_default()),
        }
    }
}

/// Compares component by component; `**` stands for any number of them.
fn matches_path(pattern: &[&[u8]], path: &[&[u8]]) -> bool {
    // Each row says which beginnings of the path the pattern so far matches: no backtracking, whatever the pattern.
    let mut row: Vec<bool> = (0..=path.len()).map(|n| n == 0).collect();
    for part in pattern {
        let mut next = vec![false; path.len() + 1];
        for n in 0..=path.len() {
            next[n] = match *part {
                b"**" => row[n] || n > 0 && next[n - 1],
                part => n > 0 && row[n - 1] && matches_name(part, path[n - 1]),
            };
        }
        row = next;
    }
    row[path.len()]
}

/// Compares a name: `*` stands for any bytes, `?` for one.
pub(crate) fn matches_name(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(byte) if *byte == b'?' || *byte == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match star {
                // The last star stands for one byte more.
                Some((at, covered)) => {
                    star = Some((at, covered + 1));
                    p = at + 1;
                    n = covered + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_read_as_people_write_them() {
        for (text, shown) in [
            ("close", "close"),
            ("persistent", "close"),
            ("temporary", "never"),
            ("never,temporary", "never"),
            ("reusable", "close,reusable"),
            ("age:10m, reusable", "age:600s,reusable"),
            ("close,open=snapshot:10m", "close,open=snapshot:600s"),
            ("open=snapshot:5s,persistent,watermark", "watermark,open=snapshot:5s"),
        ] {
            let policy: Policy = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(policy.to_string(), shown);
            assert_eq!(shown.parse(), Ok(policy));
        }
        for (bad, why) in [
            ("", "missing"),
            ("close,", "missing"),
            ("closed", "none of"),
            ("age:5", "age:30s"),
            ("close,request", "contradict"),
            ("temporary,persistent,close", "contradict"),
            ("open=copy", "open=snapshot:10m"),
            ("open=snapshot:0s", "open=snapshot:10m"),
            ("temporary,open=snapshot:5s", "no snapshots"),
            ("temporary,reusable", "cannot be reusable"),
        ] {
            let e = bad.parse::<Policy>().unwrap_err();
            assert!(e.contains(why), "{bad}: {e}");
        }
    }

    #[test]
    fn patterns_match_names_anywhere_and_paths_from_the_directory() {
        let matches = |pattern: &str, path: &str| {
            let rule: Rule = format!("{pattern}=never").parse().unwrap();
            rule.matches(path.as_bytes())
        };
        for (pattern, yes, no) in [
            ("*.tmp", "a.tmp b/c/.tmp x/a.tmp.tmp", "a.tmpx tmp b.tmp/x"),
            ("core.?", "core.1 d/core.x", "core. core.10"),
            ("run/*.h5", "run/a.h5 run/.h5", "a.h5 run/b/a.h5 x/run/a.h5"),
            ("scratch/**", "scratch/a scratch/a/b scratch", "scratches/a a/scratch/b"),
            ("**/out/*", "out/a a/out/b a/b/out/c", "out a/out/b/c"),
            ("a/**/z", "a/z a/b/z a/b/c/z", "a/zz b/a/z a"),
            ("*a*b*", "ab xaxbx aab", "ba a b"),
        ] {
            yes.split(' ').for_each(|path| assert!(matches(pattern, path), "{pattern} {path}"));
            no.split(' ').for_each(|path| assert!(!matches(pattern, path), "{pattern} {path}"));
        }
        // Many stars take no time.
        assert!(!matches(&"*a".repeat(60), &format!("{}b", "a".repeat(200))));
        for bad in ["x", "=close", "/a=close", "a//b=close", "../a=close", "a/=close", "a=soon"] {
            assert!(bad.parse::<Rule>().is_err(), "{bad}");
        }
    }
}
