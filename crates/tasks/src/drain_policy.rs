//! When written data are copied to a store.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

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
