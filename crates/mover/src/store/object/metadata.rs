//! Attributes and versions in the metadata of objects.
//!
//! | key | value |
//! |---|---|
//! | `forebay-mode` | octal |
//! | `forebay-uid`, `forebay-gid` | decimal |
//! | `forebay-mtime`, `forebay-atime` | seconds, a dot, nine digits |
//! | `forebay-kind` | `symlink`; absent for a file |
//! | `forebay-mark` | the temporary name of the upload |

use std::collections::HashMap;

use forebay_types::{Kind, StoreVersion, Timestamp};
use opendal::Metadata;
use xxhash_rust::xxh3::xxh3_64;

use super::super::attributes::{mark_hash, Attributes, Object};

const MODE: &str = "forebay-mode";
const UID: &str = "forebay-uid";
const GID: &str = "forebay-gid";
const MTIME: &str = "forebay-mtime";
const ATIME: &str = "forebay-atime";
const KIND: &str = "forebay-kind";
const MARK: &str = "forebay-mark";
const SYMLINK: &str = "symlink";

/// What objects have that Forebay did not write.
const FILE_MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o755;

/// What goes into the metadata of an upload.
#[derive(Clone, Copy)]
pub(super) struct Marked<'a> {
    pub(super) attributes: &'a Attributes,
    pub(super) kind: Kind,
    pub(super) mark: &'a [u8],
}

fn show_time(time: Timestamp) -> String {
    format!("{}.{:09}", time.sec, time.nsec)
}

fn parse_time(text: &str) -> Option<Timestamp> {
    let (sec, nsec) = text.split_once('.')?;
    let nsec = (nsec.len() == 9).then_some(nsec)?.parse().ok()?;
    Some(Timestamp { sec: sec.parse().ok()?, nsec })
}

/// The metadata of an upload.
pub(super) fn user_metadata(marked: Marked<'_>) -> HashMap<String, String> {
    let attributes = marked.attributes;
    let mut metadata = HashMap::new();
    let mut set = |key: &str, value: Option<String>| {
        if let Some(value) = value {
            metadata.insert(key.to_owned(), value);
        }
    };
    set(MODE, attributes.mode.map(|mode| format!("{mode:o}")));
    set(UID, attributes.uid.map(|uid| uid.to_string()));
    set(GID, attributes.gid.map(|gid| gid.to_string()));
    set(MTIME, attributes.mtime.map(show_time));
    set(ATIME, attributes.atime.map(show_time));
    set(KIND, (marked.kind == Kind::Symlink).then(|| SYMLINK.to_owned()));
    // Headers are ASCII; temporary names are, others are not needed.
    set(MARK, std::str::from_utf8(marked.mark).ok().filter(|mark| mark.is_ascii()).map(str::to_owned));
    metadata
}

fn value<'a>(metadata: &'a Metadata, key: &str) -> Option<&'a str> {
    metadata.user_metadata()?.get(key).map(String::as_str)
}

/// The mark of the upload that an object is, or is a copy of.
pub(super) fn mark_of(metadata: &Metadata) -> Option<&str> {
    value(metadata, MARK)
}

/// The attributes that an object has in its metadata.
pub(super) fn attributes_of(metadata: &Metadata) -> Attributes {
    let number = |key, radix| value(metadata, key).and_then(|text| u32::from_str_radix(text, radix).ok());
    let time = |key| value(metadata, key).and_then(parse_time);
    Attributes {
        mode: number(MODE, 8).map(|mode| mode & 0o7777),
        uid: number(UID, 10),
        gid: number(GID, 10),
        mtime: time(MTIME),
        atime: time(ATIME),
        xattrs: None,
    }
}

pub(super) fn kind_of(metadata: &Metadata) -> Kind {
    if value(metadata, KIND) == Some(SYMLINK) {
        Kind::Symlink
    } else {
        Kind::File
    }
}

/// The version of an object. Its time is in whole seconds, because that is all that each answer has.
pub(super) fn version_of(metadata: &Metadata, has_tags: bool) -> StoreVersion {
    let tag = metadata.etag().filter(|_| has_tags).map_or(0, |etag| {
        // Listings and headers differ in quotes. 0 stands for no tag.
        xxh3_64(etag.trim_start_matches("W/").trim_matches('"').as_bytes()).max(1)
    });
    StoreVersion { bytes: metadata.content_length(), mtime: last_modified(metadata), ino: 0, tag }
}

fn last_modified(metadata: &Metadata) -> Timestamp {
    let sec = metadata.last_modified().map_or(0, |time| time.into_inner().as_second());
    Timestamp { sec, nsec: 0 }
}

/// The object of a file's metadata.
pub(super) fn object_of(name: &[u8], metadata: &Metadata, version: StoreVersion) -> Object {
    let attributes = attributes_of(metadata);
    let mtime = attributes.mtime.unwrap_or_else(|| last_modified(metadata));
    let kind = kind_of(metadata);
    Object {
        name: name.to_vec(),
        kind,
        mode: attributes.mode.unwrap_or(if kind == Kind::Symlink { 0o777 } else { FILE_MODE }),
        uid: attributes.uid.unwrap_or_else(own_uid),
        gid: attributes.gid.unwrap_or_else(own_gid),
        atime: attributes.atime.unwrap_or(mtime),
        mtime,
        rdev: 0,
        nlink: 1,
        file_system: 0,
        link_target: Vec::new(),
        version,
        mark: mark_of(metadata).map_or(0, |mark| mark_hash(mark.as_bytes())),
        is_complete: true,
    }
}

/// A directory: prefixes have no attributes.
pub(super) fn directory(name: &[u8]) -> Object {
    Object {
        name: name.to_vec(),
        kind: Kind::Directory,
        mode: DIRECTORY_MODE,
        uid: own_uid(),
        gid: own_gid(),
        atime: Timestamp::default(),
        mtime: Timestamp::default(),
        rdev: 0,
        nlink: 2,
        file_system: 0,
        link_target: Vec::new(),
        version: StoreVersion::default(),
        mark: 0,
        is_complete: true,
    }
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn own_gid() -> u32 {
    rustix::process::getegid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;
    use opendal::EntryMode;

    #[test]
    fn attributes_survive_the_metadata() {
        let attributes = Attributes {
            mode: Some(0o4751),
            uid: Some(0),
            gid: Some(u32::MAX - 1),
            mtime: Some(Timestamp { sec: -3, nsec: 7 }),
            atime: Some(Timestamp { sec: 1 << 33, nsec: 999_999_999 }),
            xattrs: None,
        };
        let marked = Marked { attributes: &attributes, kind: Kind::Symlink, mark: b".forebay-x-1.tmp" };
        let metadata = Metadata::new(EntryMode::FILE).with_user_metadata(user_metadata(marked));
        assert_eq!(attributes_of(&metadata), attributes);
        assert_eq!((kind_of(&metadata), mark_of(&metadata)), (Kind::Symlink, Some(".forebay-x-1.tmp")));
    }

    #[test]
    fn metadata_of_others_that_makes_no_sense_is_ignored() {
        let pairs = [(MODE, "rwx"), (UID, "-1"), (MTIME, "yesterday"), (ATIME, "1.5"), (KIND, "door")];
        let pairs = pairs.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let metadata = Metadata::new(EntryMode::FILE).with_user_metadata(pairs.into());
        assert_eq!(attributes_of(&metadata), Attributes::default());
        assert_eq!(kind_of(&metadata), Kind::File);
    }

    #[test]
    fn version_does_not_depend_on_quotes() {
        let with = |etag: &str| version_of(&Metadata::new(EntryMode::FILE).with_etag(etag.to_owned()), true);
        assert_eq!(with("\"abc\""), with("abc"));
        assert_eq!(with("W/\"abc\""), with("abc"));
        assert_ne!(with("abd"), with("abc"));
        assert_eq!(version_of(&Metadata::new(EntryMode::FILE).with_etag("x".into()), false).tag, 0);
    }
}
