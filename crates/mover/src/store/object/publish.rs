//! Final names for uploads: copies inside the store, conditional where it supports that.
//!
//! A copy with `If-None-Match: *` or `If-Match: <etag>` is one step. Where the store ignores or lacks conditions, the
//! object is compared just before the copy, and a change of another program within these milliseconds is overwritten:
//! [`Abilities::conditional_publish`](super::super::Abilities) is false then.

use forebay_types::{Code, Kind, StoreVersion};
use opendal::options::CopyOptions;
use opendal::{ErrorKind, Metadata};

use super::super::attributes::{Attributes, Outcome};
use super::super::error::{StoreError, StoreResult};
use super::super::path::StorePath;
use super::super::Store;
use super::metadata::{attributes_of, kind_of, mark_of, user_metadata, Marked};
use super::{ObjectStore, PARTS_AT_A_TIME, REWRITE_BYTES};

/// S3's limit for a copy in one request. Larger objects are copied in parts, without their metadata.
const COPY_BYTES: u64 = 5 << 30;
/// Bytes of a part of such a copy.
const COPY_PART_BYTES: usize = 512 << 20;

/// The outcome of a conditional copy.
enum Copied {
    Yes(Box<Metadata>),
    /// The target is not as expected.
    Refused,
    /// The source is gone.
    NoSource,
}

impl ObjectStore {
    pub(super) fn publish_copy(
        &self,
        temporary: &StorePath,
        to: &StorePath,
        expected: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        let mark = temporary.name().unwrap_or_default();
        let is_own = |found: &Metadata| mark_of(found).is_some_and(|found| found.as_bytes() == mark);
        let found = self.stat("publish", to)?;
        match &found {
            // An earlier call took effect, and its answer was lost.
            Some(found) if is_own(found) && expected != Some(&self.version(found)) => {
                self.discard_quietly(temporary);
                return Ok(Outcome::Done(self.version(found)));
            }
            Some(found) if expected == Some(&self.version(found)) => {}
            None if expected.is_none() => {
                // A directory of this name would hide the file, or be hidden.
                if self.has_directory("publish", to)? {
                    return self.conflict("publish", to);
                }
            }
            _ => return self.conflict("publish", to),
        }
        let etag = found.as_ref().and_then(Metadata::etag);
        let copied = self.copy_if(temporary, to, etag, expected.is_none());
        if copied.as_ref().is_err_and(|e| e.code() == Code::TimedOut) {
            // The copy may land later. Without its source it does not, unless it has begun.
            self.discard_quietly(temporary);
        }
        let copied = match copied? {
            Copied::Yes(copied) => copied,
            Copied::NoSource => {
                return Err(StoreError::lasting(Code::NotFound, self.what("find", temporary))
                    .why("the upload is not in the store"));
            }
            Copied::Refused => {
                // Refused, or done by an earlier try whose answer was lost.
                return match self.stat("publish", to)? {
                    Some(found) if is_own(&found) => {
                        self.discard_quietly(temporary);
                        Ok(Outcome::Done(self.version(&found)))
                    }
                    _ => self.conflict("publish", to),
                };
            }
        };
        let published = self.stat("publish", to)?;
        self.discard_quietly(temporary);
        match published {
            Some(found) if is_own(&found) || same_tag(&found, &copied) => {
                Ok(Outcome::Done(self.version(&found)))
            }
            // Another program replaced it since.
            _ => self.conflict("publish", to),
        }
    }

    /// Copies an object, in place of the one with `etag`, or where there must be none.
    fn copy_if(
        &self,
        from: &StorePath,
        to: &StorePath,
        etag: Option<&str>,
        is_new: bool,
    ) -> StoreResult<Copied> {
        let (source, target) = (self.key("copy", from)?, self.key("copy", to)?);
        let Some(found) = self.stat("copy", from)? else { return Ok(Copied::NoSource) };
        let bytes = found.content_length();
        let mut options = CopyOptions { source_content_length_hint: Some(bytes), ..CopyOptions::default() };
        if bytes > COPY_BYTES {
            options.chunk = Some(COPY_PART_BYTES);
            options.concurrent = PARTS_AT_A_TIME;
        }
        if self.is_conditional && is_new {
            options.if_not_exists = true;
        } else if self.is_conditional && self.has_tags {
            options.if_match = etag.map(str::to_owned);
        }
        match self.wait(self.limits.copy, self.operator.copy_options(&source, &target, options)) {
            Ok(copied) => Ok(Copied::Yes(Box::new(copied))),
            Err(e) if e.kind() == ErrorKind::ConditionNotMatch => Ok(Copied::Refused),
            Err(e) if e.kind() == ErrorKind::NotFound => {
                // The target is gone, where it had to match, or the source is.
                Ok(if self.stat("copy", from)?.is_some() { Copied::Refused } else { Copied::NoSource })
            }
            Err(e) => Err(self.failed("publish", to, e)),
        }
    }

    /// Removes a temporary that is published. If that fails it stays, until its mover is dead and it is swept.
    fn discard_quietly(&self, temporary: &StorePath) {
        if let Ok(key) = self.key("discard", temporary) {
            let _ = self.wait(self.limits.request, self.operator.delete(&key));
        }
    }

    /// Copies an object of version `version` to another name. A copy that an earlier call has made is recognized.
    pub(super) fn copy_object(
        &self,
        from: &StorePath,
        version: &StoreVersion,
        to: &StorePath,
        replaced: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        let changed = || {
            StoreError::lasting(Code::Stale, self.what("copy", from))
                .why("the object in the store is no longer the version that Forebay knows")
        };
        let found = self.stat("copy", from)?.filter(|found| self.version(found) == *version);
        let source = found.ok_or_else(changed)?;
        let is_copy = |there: &Metadata| {
            let same_mark = mark_of(&source).is_some_and(|mark| mark_of(there) == Some(mark));
            there.content_length() == source.content_length() && (same_mark || same_tag(there, &source))
        };
        let target = self.stat("copy", to)?;
        match &target {
            Some(there) if replaced == Some(&self.version(there)) => {}
            Some(there) if is_copy(there) => return Ok(Outcome::Done(self.version(there))),
            None if replaced.is_none() && !self.has_directory("copy", to)? => {}
            _ => return self.conflict("copy", to),
        }
        let etag = target.as_ref().and_then(Metadata::etag);
        let copied = match self.copy_if(from, to, etag, target.is_none())? {
            Copied::NoSource => return Err(changed()),
            Copied::Yes(copied) => Some(copied),
            Copied::Refused => None,
        };
        let is_this = |there: &Metadata| copied.as_ref().is_some_and(|copied| same_tag(there, copied));
        match self.stat("copy", to)? {
            Some(there) if is_this(&there) || is_copy(&there) => Ok(Outcome::Done(self.version(&there))),
            _ => self.conflict("copy", to),
        }
    }

    /// Copies an object to another name, and removes the first.
    pub(super) fn rename_by_copy(
        &self,
        from: &StorePath,
        version: &StoreVersion,
        to: &StorePath,
        replaced: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        let Some(found) = self.stat("rename", from)? else {
            if self.has_directory("rename", from)? {
                return self.not_supported("rename", from, "an object store has no directories to rename");
            }
            return Ok(Outcome::Conflict(None));
        };
        if self.version(&found) != *version {
            return self.conflict("rename", from);
        }
        let target = self.stat("rename", to)?;
        if target.as_ref().map(|target| self.version(target)) != replaced.copied() {
            return self.conflict("rename", to);
        }
        let etag = target.as_ref().and_then(Metadata::etag);
        match self.copy_if(from, to, etag, target.is_none())? {
            Copied::Yes(_) => {}
            Copied::NoSource => return Ok(Outcome::Conflict(None)),
            Copied::Refused => return self.conflict("rename", to),
        }
        let Some(renamed) = self.stat("rename", to)? else { return self.conflict("rename", to) };
        // Not removed if it has changed since: then both are there.
        self.remove(from, version)?;
        Ok(Outcome::Done(self.version(&renamed)))
    }

    /// Reads an object and writes it again with other attributes.
    pub(super) fn rewrite(
        &self,
        path: &StorePath,
        expected: &StoreVersion,
        attributes: &Attributes,
    ) -> StoreResult<Outcome<StoreVersion>> {
        let verb = "set attributes of";
        let Some(found) = self.stat(verb, path)? else {
            if path.is_root() || self.has_directory(verb, path)? {
                // Prefixes have no attributes.
                return Ok(Outcome::Done(*expected));
            }
            return Ok(Outcome::Conflict(None));
        };
        if self.version(&found) != *expected {
            return self.conflict(verb, path);
        }
        if found.content_length() > REWRITE_BYTES {
            return self.not_supported(
                verb,
                path,
                "attributes of large objects cannot be changed without their data",
            );
        }
        let key = self.key(verb, path)?;
        let before = attributes_of(&found);
        let merged = Attributes {
            mode: attributes.mode.or(before.mode),
            uid: attributes.uid.or(before.uid),
            gid: attributes.gid.or(before.gid),
            mtime: attributes.mtime.or(before.mtime),
            atime: attributes.atime.or(before.atime),
            xattrs: None,
        };
        let etag = found.etag().filter(|_| self.has_tags).map(str::to_owned);
        let mut read = self.operator.read_with(&key);
        if let Some(etag) = &etag {
            read = read.if_match(etag);
        }
        let data = match self.wait(self.limits.piece, async { read.await }) {
            Err(e) if matches!(e.kind(), ErrorKind::ConditionNotMatch | ErrorKind::NotFound) => {
                return self.conflict(verb, path);
            }
            other => other.map_err(|e| self.failed(verb, path, e))?,
        };
        let kind = kind_of(&found);
        if kind == Kind::Directory {
            return Ok(Outcome::Done(*expected));
        }
        let mark = mark_of(&found).unwrap_or_default().as_bytes();
        let marked = Marked { attributes: &merged, kind, mark };
        let mut write = self.operator.write_with(&key, data).user_metadata(user_metadata(marked));
        if let (true, Some(etag)) = (self.is_conditional, &etag) {
            write = write.if_match(etag);
        }
        match self.wait(self.limits.piece, async { write.await }) {
            Err(e) if e.kind() == ErrorKind::ConditionNotMatch => return self.conflict(verb, path),
            other => other.map_err(|e| self.failed(verb, path, e))?,
        };
        match self.stat(verb, path)? {
            Some(found) => Ok(Outcome::Done(self.version(&found))),
            None => Ok(Outcome::Conflict(None)),
        }
    }
}

/// Both are known to have the same tag.
fn same_tag(a: &Metadata, b: &Metadata) -> bool {
    let tag = |metadata: &Metadata| metadata.etag().map(|tag| tag.trim_matches('"').to_owned());
    tag(a).is_some() && tag(a) == tag(b)
}
