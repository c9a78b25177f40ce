//! The settings of an attached store: the value of `trusted.forebay.store` of the directory where it is attached.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::policy::{Policy, Rule};

/// How a store is attached.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StoreSettings {
    /// Where the store is: an absolute path, or a URL without credentials.
    pub url: String,
    /// Whether nothing is ever written to the store.
    #[serde(default)]
    pub read_only: bool,
    /// What happens to files that no rule names.
    #[serde(default)]
    pub drain: Policy,
    /// What happens to others: the first rule that matches.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<Rule>,
    /// Which calls of programs wait until the store has their data.
    #[serde(default)]
    pub durable: Durable,
    /// Whether the directory shows only what was created or staged in the pool, not the store's names.
    #[serde(default)]
    pub explicit: bool,
}

impl StoreSettings {
    /// A store with the settings that there are by default.
    pub fn of(url: &str) -> StoreSettings {
        StoreSettings {
            url: url.to_owned(),
            read_only: false,
            drain: Policy::default(),
            rules: Vec::new(),
            durable: Durable::No,
            explicit: false,
        }
    }

    /// The policy of a file, by its path from the attached directory.
    pub fn policy_of(&self, path: &[u8]) -> Policy {
        self.rules.iter().find(|rule| rule.matches(path)).map_or(self.drain, |rule| rule.policy)
    }

    /// The policy of directories: that of the files that are copied first, since they need their directories.
    pub fn policy_of_directories(&self) -> Policy {
        let all = std::iter::once(self.drain).chain(self.rules.iter().map(|rule| rule.policy));
        Policy::of(all.map(|policy| policy.drain).min().unwrap_or_default())
    }

    /// True if anything may be copied to the store.
    pub fn is_written(&self) -> bool {
        !self.read_only && !self.policy_of_directories().is_temporary()
    }
}

/// Which calls of programs wait until the store has their data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Durable {
    /// None.
    #[default]
    No,
    /// fsync, fdatasync and MPI_File_sync.
    Fsync,
    /// These, and close of a file that was open for writing.
    Close,
}

impl Durable {
    /// The word on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Durable::No => "no",
            Durable::Fsync => "fsync",
            Durable::Close => "close",
        }
    }
}

impl FromStr for Durable {
    type Err = String;

    fn from_str(text: &str) -> Result<Durable, String> {
        let all = [Durable::No, Durable::Fsync, Durable::Close];
        let found = all.into_iter().find(|durable| durable.name() == text);
        found.ok_or_else(|| "it is none of no, fsync, close".to_owned())
    }
}

/// When written data are copied to the store by themselves. In the order of time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DrainPolicy {
    /// When no program has the file open for writing any more.
    #[default]
    Close,
    /// When they are so old.
    Age(Duration),
    /// When the pool fills up.
    Watermark,
    /// When a user or a program requests it, and when the pool is stopped.
    Request,
    /// Never. They are gone with the pool.
    Never,
}

/// The longest age: more is a mistake.
const AGE_S_MAX: u64 = 366 * 24 * 3600;

impl fmt::Display for DrainPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DrainPolicy::Close => f.write_str("close"),
            DrainPolicy::Age(age) => write!(f, "age:{}s", age.as_secs()),
            DrainPolicy::Watermark => f.write_str("watermark"),
            DrainPolicy::Request => f.write_str("request"),
            DrainPolicy::Never => f.write_str("never"),
        }
    }
}

impl FromStr for DrainPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<DrainPolicy, String> {
        match text {
            "close" => Ok(DrainPolicy::Close),
            "watermark" => Ok(DrainPolicy::Watermark),
            "request" => Ok(DrainPolicy::Request),
            "never" => Ok(DrainPolicy::Never),
            _ => match text.strip_prefix("age:").map(seconds) {
                Some(Some(s)) => Ok(DrainPolicy::Age(Duration::from_secs(s))),
                Some(None) => {
                    Err(format!("{text:?} has no age: write age:30s, age:10m or age:2h, a year at most"))
                }
                None => Err("it is none of close, age:30s, watermark, request, never".to_owned()),
            },
        }
    }
}

/// `30s`, `10m`, `2h`, `1d`.
pub(crate) fn seconds(text: &str) -> Option<u64> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let factor = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 24 * 3600,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor).filter(|seconds| *seconds <= AGE_S_MAX)
}

impl TryFrom<String> for DrainPolicy {
    type Error = String;

    fn try_from(text: String) -> Result<DrainPolicy, String> {
        text.parse()
    }
}

impl From<DrainPolicy> for String {
    fn from(policy: DrainPolicy) -> String {
        policy.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_as_they_were_written_and_have_defaults() {
        let settings = StoreSettings {
            url: "s3://bucket/prefix".into(),
            read_only: true,
            drain: Policy::of(DrainPolicy::Age(Duration::from_secs(30))),
            rules: vec!["*.tmp=temporary".parse().unwrap()],
            durable: Durable::Close,
            explicit: true,
        };
        let text = serde_json::to_string(&settings).unwrap();
        assert!(text.contains(r#""drain":"age:30s""#), "{text}");
        assert!(text.contains(r#"[{"pattern":"*.tmp","policy":"never"}]"#), "{text}");
        assert!(settings.policy_of(b"a/b.tmp").is_temporary() && !settings.policy_of(b"a/b").is_temporary());
        assert_eq!(settings.policy_of_directories(), settings.drain);
        assert_eq!(serde_json::from_str::<StoreSettings>(&text).unwrap(), settings);
        let least: StoreSettings = serde_json::from_str(r#"{"url":"/lustre"}"#).unwrap();
        assert_eq!(
            (least.read_only, least.drain, least.explicit),
            (false, Policy::of(DrainPolicy::Close), false)
        );
    }

    #[test]
    fn policies_are_read_as_people_write_them() {
        for (text, seconds) in [("age:30s", 30), ("age:10m", 600), ("age:2h", 7200), ("age:1d", 86_400)] {
            assert_eq!(text.parse(), Ok(DrainPolicy::Age(Duration::from_secs(seconds))));
        }
        for policy in ["close", "watermark", "request", "never"] {
            assert_eq!(policy.parse::<DrainPolicy>().unwrap().to_string(), policy);
        }
        for bad in ["", "age", "age:", "age:x", "age:1", "age:400d", "age:-1s", "age:1\u{e9}", "Close"] {
            assert!(bad.parse::<DrainPolicy>().is_err(), "{bad}");
        }
    }
}
