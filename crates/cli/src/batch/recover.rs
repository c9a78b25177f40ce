//! Data that could not be staged out: where they are, and their way back.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use forebay_types::{Code, Error, Result};

use super::config::Config;
use super::outdated::MANIFEST_FILE;
use super::partial::LOST_FILE;
use super::registry;
use super::staging::{Kept, LIST_FILE};
use crate::backing::Url;

/// Paths of one cp(1).
const COPIED_AT_ONCE: usize = 200;

/// What was copied where, and what was not.
#[derive(Debug, Default)]
pub(crate) struct Recovered {
    pub(crate) done: Vec<(PathBuf, PathBuf)>,
    /// Copies that failed, whose data stay.
    pub(crate) failed: Vec<Error>,
}

/// Copies what is kept of a job to where it was to be staged out, or below `to`; then removes it. What fails does not keep
/// the rest from it.
///
/// # Errors
/// A job of which nothing is kept.
pub(crate) fn recover(job: u32, to: Option<&Path>) -> Result<Recovered> {
    let config = Config::read()?;
    let mut recovered = Recovered::default();
    let prefix = format!("{job}.");
    let names = std::fs::read_dir(&config.keep_dir).into_iter().flatten().flatten();
    let mut found = false;
    for entry in names.filter(|e| e.file_name().to_string_lossy().starts_with(&prefix)) {
        if let Err(e) = from(&entry.path(), to, &mut recovered) {
            recovered.failed.push(e);
        }
        found = true;
    }
    if !found {
        return Err(Error::new(Code::NotFound, format!("cannot recover data of job {job}"))
            .why(format!("nothing of it is kept in {}", config.keep_dir.display()))
            .cure("`scontrol show job` names the reason and the place where a stage-out failed"));
    }
    Ok(recovered)
}

/// What is kept of all jobs: the run, the user, and the place.
pub(crate) fn all_kept(config: &Config) -> Vec<(String, u32, PathBuf)> {
    let names = std::fs::read_dir(&config.keep_dir).into_iter().flatten().flatten();
    let mut kept: Vec<(String, u32, PathBuf)> = names
        .filter_map(|entry| {
            let key = entry.file_name().into_string().ok()?;
            // Everybody may make names there.
            let is_run = key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'.');
            let is_run = is_run && key.split('.').next()?.parse::<u32>().is_ok();
            is_run.then_some(())?;
            Some((key, entry.metadata().ok()?.uid(), entry.path()))
        })
        .collect();
    kept.sort();
    kept
}

/// Recovers what is kept of a run. What cannot be copied stays listed.
fn from(dir: &Path, to: Option<&Path>, recovered: &mut Recovered) -> Result<()> {
    let list = dir.join(LIST_FILE);
    let mut kept: Vec<Kept> = registry::read(&list, None)?.unwrap_or_default();
    let mut failed = 0;
    while let Some(one) = kept.get(failed).cloned() {
        let copied = destination_of(&one, to).and_then(|at| copy(&one, &at).map(|()| at));
        match copied {
            Ok(at) => recovered.done.push((one.place.clone(), PathBuf::from(at))),
            Err(e) => {
                recovered.failed.push(e);
                failed += 1;
                continue;
            }
        }
        kept.remove(failed);
        registry::write(&list, &kept)?;
        std::fs::remove_dir_all(&one.place)
            .map_err(|e| Error::io(format!("cannot remove {}", one.place.display()), &e))?;
    }
    if failed > 0 {
        return Ok(());
    }
    let lost = dir.join(LOST_FILE);
    if let Ok(names) = std::fs::read_to_string(&lost) {
        note!("forebay: lost, and not among it:\n{}", names.trim_end());
    }
    // A stage-out that was killed has left its manifest.
    for file in [list, lost, dir.join(MANIFEST_FILE)] {
        match std::fs::remove_file(&file) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io(format!("cannot remove {}", file.display()), &e))
            }
            _ => {}
        }
    }
    std::fs::remove_dir(dir).map_err(|e| Error::io(format!("cannot remove {}", dir.display()), &e))
}

/// Where a kept place is to be copied.
fn destination_of(kept: &Kept, to: Option<&Path>) -> Result<String> {
    if let Some(to) = to {
        return Ok(format!("{}/", to.display()));
    }
    if !kept.destination.contains("://") {
        return Ok(kept.destination.clone());
    }
    let what = || format!("cannot copy {} to a store", kept.place.display());
    let cure = "copy it to a directory with --to DIR";
    let url = Url::parse(kept.destination.as_ref())
        .map_err(|e| Error::new(e.code, what()).why(e.why).cure(cure))?;
    let directory = url.directory().and_then(Path::to_str).map(str::to_owned);
    directory.ok_or_else(|| {
        Error::new(Code::NotSupported, what())
            .why(format!("it belongs to {}, which is no directory", kept.destination))
            .cure(cure)
    })
}

/// Copies by cp(1), which keeps modes, times, links and holes. The place has one entry, or the contents of a directory
/// if the job's source ended with a slash, as stage-out had put it there. The place itself is no copy: the destination
/// keeps its own attributes.
fn copy(kept: &Kept, destination: &str) -> Result<()> {
    let what = || format!("cannot copy {} to {destination}", kept.place.display());
    let failed = |e: &std::io::Error| Error::io(what(), e);
    let into = destination.ends_with('/') || Path::new(destination).is_dir() || kept.source.ends_with('/');
    if into {
        std::fs::create_dir_all(destination).map_err(|e| failed(&e))?;
        return merge(&kept.place, Path::new(destination), kept.source == "/", &what);
    }
    let mut entries = std::fs::read_dir(&kept.place).map_err(|e| failed(&e))?;
    let first = entries.next().transpose().map_err(|e| failed(&e))?;
    let first = first.ok_or_else(|| Error::new(Code::NotFound, what()).why("it is empty"))?;
    if let Some(above) = Path::new(destination).parent() {
        std::fs::create_dir_all(above).map_err(|e| failed(&e))?;
    }
    run(Command::new("cp").arg("-aT").arg(first.path()).arg(destination), &what)
}

/// Copies the entries of a directory into one that exists. With `deep`, directories in it that exist keep their attributes,
/// too: of what a pool's store lacked, those above are only the way to it.
fn merge(from: &Path, to: &Path, deep: bool, what: &dyn Fn() -> String) -> Result<()> {
    let failed = |e: &std::io::Error| Error::io(what(), e);
    let mut copied = Vec::new();
    for entry in std::fs::read_dir(from).map_err(|e| failed(&e))? {
        let entry = entry.map_err(|e| failed(&e))?;
        let at = to.join(entry.file_name());
        let is_there = || std::fs::symlink_metadata(&at).is_ok_and(|there| there.is_dir());
        match deep && entry.file_type().is_ok_and(|kind| kind.is_dir()) && is_there() {
            true => merge(&entry.path(), &at, deep, what)?,
            false => copied.push(entry.path()),
        }
    }
    for some in copied.chunks(COPIED_AT_ONCE) {
        run(Command::new("cp").arg("-a").args(some).arg(to.join(".")), what)?;
    }
    Ok(())
}

fn run(copy: &mut Command, what: &dyn Fn() -> String) -> Result<()> {
    let output = copy.output().map_err(|e| Error::io(what(), &e))?;
    if !output.status.success() {
        let why = super::command::reason(&String::from_utf8_lossy(&output.stderr));
        return Err(Error::new(Code::Io, what()).why(why).cure("the data stay where they are: try it again"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_directory_and_file_return_to_their_destinations_and_a_failed_copy_keeps_them() {
        let base = std::env::temp_dir().join(format!("forebay-kept-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&base);
        let dir = base.join("7.0");
        for (place, name) in [("0/out/deep", "a"), ("1", "b")] {
            std::fs::create_dir_all(dir.join(place)).unwrap();
            std::fs::write(dir.join(place).join(name), name).unwrap();
        }
        let kept = |place: &str, source: &str, destination: PathBuf| Kept {
            job: 7,
            source: source.to_owned(),
            destination: destination.display().to_string(),
            place: dir.join(place),
        };
        let all = [
            kept("1", "/b", "/proc/nowhere/b".into()),
            kept("1", "/b", "s3://bucket/b".into()),
            kept("0", "/out", base.join("store/out")),
        ];
        registry::write(&dir.join(LIST_FILE), &all).unwrap();
        let mut first = Recovered::default();
        from(&dir, None, &mut first).unwrap();
        assert_eq!(first.failed.len(), 2, "/proc takes no directory, and a bucket is none: {first:?}");
        assert_eq!(first.done, [(dir.join("0"), base.join("store/out"))]);
        assert_eq!(std::fs::read(base.join("store/out/deep/a")).unwrap(), b"a");
        assert_eq!(std::fs::read(dir.join("1/b")).unwrap(), b"b", "what could not be copied stays");
        registry::write(&dir.join(LIST_FILE), &all[..1].to_vec()).unwrap();
        std::fs::write(dir.join(MANIFEST_FILE), "/r /s\n").unwrap();
        let mut second = Recovered::default();
        from(&dir, Some(&base.join("mine")), &mut second).unwrap();
        assert_eq!((second.done.len(), second.failed.len()), (1, 0));
        assert_eq!(std::fs::read(base.join("mine/b")).unwrap(), b"b");
        assert!(!dir.exists());
        std::fs::remove_dir_all(&base).unwrap();
    }

    #[test]
    fn directories_that_exist_keep_their_modes() {
        use std::fs::Permissions;
        use std::os::unix::fs::PermissionsExt;
        let base = std::env::temp_dir().join(format!("forebay-modes-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&base);
        let dir = base.join("7.0");
        for path in ["7.0/0/secret/new", "7.0/1", "store/secret", "other"] {
            std::fs::create_dir_all(base.join(path)).unwrap();
        }
        for path in ["7.0/0/secret/a", "7.0/0/secret/new/b", "7.0/1/c"] {
            std::fs::write(base.join(path), path).unwrap();
        }
        let set = |path: &str, mode| {
            std::fs::set_permissions(base.join(path), Permissions::from_mode(mode)).unwrap();
        };
        let private = ["store", "store/secret", "other"];
        private.iter().for_each(|path| set(path, 0o700));
        ["7.0/0", "7.0/0/secret", "7.0/1"].iter().for_each(|path| set(path, 0o755));
        set("7.0/0/secret/new", 0o750);
        let kept = |place: &str, source: &str, destination: &str| Kept {
            job: 7,
            source: source.to_owned(),
            destination: base.join(destination).display().to_string(),
            place: dir.join(place),
        };
        // What a store lacked, and a file that was to be staged out into a directory.
        let all = [kept("0", "/", "store"), kept("1", "/c", "other")];
        registry::write(&dir.join(LIST_FILE), &all).unwrap();
        let mut recovered = Recovered::default();
        from(&dir, None, &mut recovered).unwrap();
        assert_eq!(recovered.done.len(), 2, "{recovered:?}");
        let mode = |path: &str| std::fs::metadata(base.join(path)).unwrap().mode() & 0o777;
        assert_eq!(private.map(mode), [0o700; 3]);
        assert_eq!(mode("store/secret/new"), 0o750);
        for path in ["store/secret/a", "store/secret/new/b", "other/c"] {
            assert!(base.join(path).exists(), "{path}");
        }
        std::fs::remove_dir_all(&base).unwrap();
    }

    #[test]
    fn url_of_a_directory_is_a_destination() {
        let at = |destination: &str| {
            let kept = Kept {
                job: 7,
                source: "/".to_owned(),
                destination: destination.to_owned(),
                place: "/kept/7.0/0".into(),
            };
            destination_of(&kept, None)
        };
        assert_eq!(at("/store/a").unwrap(), "/store/a");
        assert_eq!(at("file:///store/a%20b?rate=1MB/s").unwrap(), "/store/a b");
        let e = at("s3://bucket/a").unwrap_err().to_string();
        assert!(e.contains("s3://bucket/a, which is no directory") && e.contains("--to DIR"), "{e}");
    }
}
