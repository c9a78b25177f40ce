//! Data that could not be staged out: where they are, and their way back.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use forebay_types::{Code, Error, Result};

use super::config::Config;
use super::partial::LOST_FILE;
use super::registry;
use super::staging::{Kept, LIST_FILE};

/// Copies what is kept of a job to where it was to be staged out, or below `to`; then removes it. Returns what was
/// copied where.
///
/// # Errors
/// A job of which nothing is kept; a copy that fails, whose data stay.
pub(crate) fn recover(job: u32, to: Option<&Path>) -> Result<Vec<(PathBuf, PathBuf)>> {
    let config = Config::read()?;
    let mut done = Vec::new();
    let prefix = format!("{job}.");
    let names = std::fs::read_dir(&config.keep_dir).into_iter().flatten().flatten();
    let mut found = false;
    for entry in names.filter(|e| e.file_name().to_string_lossy().starts_with(&prefix)) {
        done.extend(from(&entry.path(), to)?);
        found = true;
    }
    if !found {
        return Err(Error::new(Code::NotFound, format!("cannot recover data of job {job}"))
            .why(format!("nothing of it is kept in {}", config.keep_dir.display()))
            .cure("`scontrol show job` names the reason and the place where a stage-out failed"));
    }
    Ok(done)
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

fn from(dir: &Path, to: Option<&Path>) -> Result<Vec<(PathBuf, PathBuf)>> {
    let list = dir.join(LIST_FILE);
    let mut kept: Vec<Kept> = registry::read(&list, None)?.unwrap_or_default();
    let mut done = Vec::new();
    while let Some(one) = kept.first().cloned() {
        let destination = match to {
            Some(to) => format!("{}/", to.display()),
            None if one.destination.contains("://") => {
                return Err(Error::new(
                    Code::NotSupported,
                    format!("cannot copy {} to a store", one.place.display()),
                )
                .why(format!("it belongs to {}, which is no directory", one.destination))
                .cure("copy it to a directory with --to DIR"))
            }
            None => one.destination.clone(),
        };
        copy(&one, &destination)?;
        done.push((one.place.clone(), PathBuf::from(&destination)));
        kept.remove(0);
        registry::write(&list, &kept)?;
        std::fs::remove_dir_all(&one.place)
            .map_err(|e| Error::io(format!("cannot remove {}", one.place.display()), &e))?;
    }
    let lost = dir.join(LOST_FILE);
    if let Ok(names) = std::fs::read_to_string(&lost) {
        note!("forebay: lost, and not among it:\n{}", names.trim_end());
    }
    for file in [list, lost] {
        match std::fs::remove_file(&file) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io(format!("cannot remove {}", file.display()), &e))
            }
            _ => {}
        }
    }
    std::fs::remove_dir(dir).map_err(|e| Error::io(format!("cannot remove {}", dir.display()), &e))?;
    Ok(done)
}

/// Copies by cp(1), which keeps modes, times, links and holes. The place has one entry, or the contents of a directory
/// if the job's source ended with a slash, as stage-out had put it there.
fn copy(kept: &Kept, destination: &str) -> Result<()> {
    let what = || format!("cannot copy {} to {destination}", kept.place.display());
    let failed = |e: &std::io::Error| Error::io(what(), e);
    let into = destination.ends_with('/') || Path::new(destination).is_dir() || kept.source.ends_with('/');
    let (from, at) = if into {
        std::fs::create_dir_all(destination).map_err(|e| failed(&e))?;
        (kept.place.join("."), PathBuf::from(destination))
    } else {
        let mut entries = std::fs::read_dir(&kept.place).map_err(|e| failed(&e))?;
        let first = entries.next().transpose().map_err(|e| failed(&e))?;
        let first = first.ok_or_else(|| Error::new(Code::NotFound, what()).why("it is empty"))?;
        if let Some(above) = Path::new(destination).parent() {
            std::fs::create_dir_all(above).map_err(|e| failed(&e))?;
        }
        (first.path(), PathBuf::from(destination))
    };
    let output = Command::new("cp").arg("-aT").arg(&from).arg(&at).output().map_err(|e| failed(&e))?;
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
        let all = [kept("0", "/out", base.join("store/out")), kept("1", "/b", "/proc/nowhere/b".into())];
        registry::write(&dir.join(LIST_FILE), &all).unwrap();
        assert!(from(&dir, None).is_err(), "/proc takes no directory");
        assert_eq!(std::fs::read(base.join("store/out/deep/a")).unwrap(), b"a");
        assert_eq!(std::fs::read(dir.join("1/b")).unwrap(), b"b", "what could not be copied stays");
        let done = from(&dir, Some(&base.join("mine"))).unwrap();
        assert_eq!(done.len(), 1);
        assert_eq!(std::fs::read(base.join("mine/b")).unwrap(), b"b");
        assert!(!dir.exists());
        std::fs::remove_dir_all(&base).unwrap();
    }
}
