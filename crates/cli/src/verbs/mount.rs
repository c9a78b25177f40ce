//! `forebay mount` and `forebay umount`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use forebay_server::control::{self, MountFacts, MountOptions};
use forebay_types::{Error, Result};
use serde_json::json;

use crate::arguments::{Mount, Umount};
use crate::{failure, pool};

pub(super) fn mount(named: Option<PathBuf>, arguments: &Mount) -> Result<ExitCode> {
    let (dir, at) = (pool::directory(named)?, place(&arguments.dir)?);
    let facts = control::mount(
        &dir,
        &at,
        MountOptions { allow_other: arguments.allow_other, no_passthrough: arguments.no_passthrough },
    )?;
    if arguments.json {
        failure::print_json(&json!({ "pool": dir, "at": at, "data": facts.data, "why": facts.why }));
    } else {
        failure::put(text(&at, &facts));
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn umount(named: Option<PathBuf>, arguments: &Umount) -> Result<ExitCode> {
    let dir = pool::directory(named)?;
    let at = arguments.dir.as_deref().map(place).transpose()?;
    control::unmount(&dir, at.as_deref(), arguments.lazy)?;
    if arguments.json {
        failure::print_json(&json!({ "pool": dir }));
    } else {
        failure::put(format!("pool {} is unmounted\n", dir.display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// The absolute path of a mount point. The directory itself is not accessed, because a dead mount there would fail or
/// block.
pub(super) fn place(at: &Path) -> Result<PathBuf> {
    let what = |e: std::io::Error| Error::io(format!("cannot find {}", at.display()), &e);
    let absolute = std::path::absolute(at).map_err(what)?;
    match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => Ok(parent.canonicalize().map_err(what)?.join(name)),
        _ => Ok(absolute),
    }
}

/// The result of mounting, in words.
pub(super) fn text(at: &Path, facts: &MountFacts) -> String {
    let mut text = format!("mounted on {}\n", at.display());
    let Some(why) = &facts.why else { return text };
    text.push_str(&match facts.data.as_str() {
        "passthrough" => format!("  note: files are read and written by the kernel itself; {why}\n"),
        _ => format!("  note: files are read and written by requests, not by the kernel itself: {why}\n"),
    });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_says_of_data_what_status_says() {
        let said = |data: &str, why: Option<&str>| {
            text(Path::new("/m"), &MountFacts { data: data.into(), why: why.map(str::to_owned) })
        };
        assert_eq!(said("passthrough", None), "mounted on /m\n");
        let helped = said("passthrough", Some("files are registered by forebay-register"));
        assert!(helped.contains("by the kernel itself; files are registered by"), "{helped}");
        assert!(!helped.contains("by requests"), "{helped}");
        assert!(
            said("requests", Some("no reason")).contains("by requests, not by the kernel itself: no reason")
        );
    }
}
