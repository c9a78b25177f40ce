//! The settings of an attached store: the value of `trusted.forebay.store` of the directory where it is attached.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::policy::{Policy, Rule};
use crate::yield_to::YieldTo;

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
    /// What programs may have copied into the pool by opening files for reading.
    #[serde(default)]
    pub recall: Recall,
    /// What goes before what the policies drain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub yield_to: Option<YieldTo>,
    /// The inode number of the store's directory when it was attached: another one in its place, such as the mount point
    /// of a file system that is not mounted, is not taken for the store. None for an object store, and where numbers do not
    /// last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory_ino: Option<u64>,
    /// The kind of its file system, as the magic number of statfs(2), where its inode number does not last: a directory on
    /// a file system of another kind is not taken for the store. None where it does: a node may have the directory itself,
    /// and others by NFS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_system: Option<u32>,
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
            recall: Recall::Yes,
            yield_to: None,
            directory_ino: None,
            file_system: None,
        }
    }

    /// True if these are the same but for what tells the store's directory from others.
    pub fn differ_in_directory_alone(&self, other: &StoreSettings) -> bool {
        let (directory_ino, file_system) = (other.directory_ino, other.file_system);
        StoreSettings { directory_ino, file_system, ..self.clone() } == *other
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

    /// True if every file is copied to the store at some time.
    pub fn is_all_written(&self) -> bool {
        let is_temporary =
            self.drain.is_temporary() || self.rules.iter().any(|rule| rule.policy.is_temporary());
        !self.read_only && !is_temporary
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

/// What a process may have copied from a store by opening files for reading alone. As text `yes`, `no`, or a number of
/// bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Recall {
    /// All.
    #[default]
    Yes,
    /// Nothing.
    No,
    /// Files of so many bytes together, within [`RECALL_WINDOW_NS`](forebay_types::limits::RECALL_WINDOW_NS).
    UpTo(u64),
}

impl fmt::Display for Recall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Recall::Yes => f.write_str("yes"),
            Recall::No => f.write_str("no"),
            Recall::UpTo(bytes) => write!(f, "{bytes}"),
        }
    }
}

impl From<Recall> for String {
    fn from(recall: Recall) -> String {
        recall.to_string()
    }
}

impl TryFrom<String> for Recall {
    type Error = String;

    fn try_from(text: String) -> Result<Recall, String> {
        match text.as_str() {
            "yes" => Ok(Recall::Yes),
            "no" => Ok(Recall::No),
            bytes => {
                let bytes =
                    bytes.parse().map_err(|_| "it is none of yes, no, a number of bytes".to_owned())?;
                Ok(Recall::UpTo(bytes))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::drain_policy::DrainPolicy;

    #[test]
    fn settings_are_read_as_they_were_written_and_have_defaults() {
        let settings = StoreSettings {
            url: "s3://bucket/prefix".into(),
            read_only: true,
            drain: Policy::of(DrainPolicy::Age(Duration::from_secs(30))),
            rules: vec!["*.tmp=temporary".parse().unwrap()],
            durable: Durable::Close,
            explicit: true,
            recall: Recall::UpTo(5 << 30),
            yield_to: Some("/turns/*@a@*".parse().unwrap()),
            directory_ino: Some(u64::MAX),
            file_system: Some(u32::MAX),
        };
        let text = serde_json::to_string(&settings).unwrap();
        assert!(text.contains(r#""drain":"age:30s""#), "{text}");
        assert!(text.contains(r#""recall":"5368709120""#), "{text}");
        assert!(text.contains(r#""yield_to":"/turns/*@a@*""#), "{text}");
        assert!(serde_json::from_str::<Recall>("\"some\"").is_err());
        assert!(text.contains(r#"[{"pattern":"*.tmp","policy":"never"}]"#), "{text}");
        assert!(settings.policy_of(b"a/b.tmp").is_temporary() && !settings.policy_of(b"a/b").is_temporary());
        assert_eq!(settings.policy_of_directories(), settings.drain);
        assert_eq!(serde_json::from_str::<StoreSettings>(&text).unwrap(), settings);
        let least: StoreSettings = serde_json::from_str(r#"{"url":"/lustre"}"#).unwrap();
        assert_eq!(
            (least.read_only, least.drain, least.explicit, least.recall, &least.yield_to),
            (false, Policy::of(DrainPolicy::Close), false, Recall::Yes, &None)
        );
        assert_eq!((least.directory_ino, least.file_system), (None, None));
        let other = StoreSettings { directory_ino: Some(1), ..settings.clone() };
        assert!(other.differ_in_directory_alone(&settings) && !least.differ_in_directory_alone(&settings));
    }
}
