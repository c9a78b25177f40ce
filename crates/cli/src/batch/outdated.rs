//! What a run of a job has left that is not the job's last one: slurmctld was killed and has started the job again, or
//! a lost node is back. It is kept, as it must neither replace what the later run has written nor be lost.

use std::ffi::OsStr;
use std::fs::{DirBuilder, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use forebay_types::{STORES_MARK, TASKS_FILE};
use rustix::fs::{flock, FlockOperation};
use serde::Deserialize;

use super::command::{self, forebay};
use super::registry::Outcome;
use super::staging::{stays, was_made, Turns};

/// Why it is kept.
const WHY: &str = "a later run of the job has begun";
/// The manifest of what is kept of a pool in front of a store, while it is copied.
pub(super) const MANIFEST_FILE: &str = "manifest";

/// An entry of `state --list --json`. What is not UTF-8 is in the other field of its name, in hexadecimal.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
struct Place {
    path: String,
    path_hex: Option<String>,
    kind: Option<String>,
    /// Where a symbolic link leads.
    target: Option<String>,
    target_hex: Option<String>,
    state: String,
    temporary: bool,
}

fn bytes_of(text: &str, hex: Option<&String>) -> Vec<u8> {
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let of_hex = |hex: &String| hex.as_bytes().chunks(2).map(byte).collect::<Option<Vec<u8>>>();
    hex.and_then(of_hex).unwrap_or_else(|| text.as_bytes().to_vec())
}

impl Place {
    /// Whether the pool has something here that the store has not. A directory that the store has is not copied with all
    /// that is in it because its attributes are others.
    fn is_lacking(&self) -> bool {
        let is_of_a_kind = match self.kind.as_deref() {
            Some("file" | "symlink") => true,
            Some("directory") => self.state == "new",
            _ => false,
        };
        is_of_a_kind && !self.temporary && self.state != "removed"
    }

    fn path(&self) -> Vec<u8> {
        bytes_of(&self.path, self.path_hex.as_ref())
    }

    /// Where it leads, if it is a symbolic link.
    fn target(&self) -> Option<Vec<u8>> {
        self.target.as_ref().map(|target| bytes_of(target, self.target_hex.as_ref()))
    }
}

/// What a pool has and its store lacks: paths, none within another one, and where links lead.
fn lacking(pool: &Path) -> Result<Vec<Place>, String> {
    let text = command::printed(pool, &["state", "-r", "--list", "--json", "/"])?;
    let places: Vec<Place> = serde_json::from_str(&text).map_err(|e| format!("what the store lacks: {e}"))?;
    Ok(outermost(places.into_iter().filter(Place::is_lacking).collect()))
}

fn outermost(mut places: Vec<Place>) -> Vec<Place> {
    // With a slash behind, a directory sorts right before what is in it.
    let key = |place: &Place| [place.path().as_slice(), b"/"].concat();
    places.sort_by_cached_key(key);
    places.dedup_by(|place, before| key(place).starts_with(&key(before)));
    places
}

/// A field of a manifest.
fn quoted(path: &[u8]) -> Vec<u8> {
    let mut field = vec![b'"'];
    for &byte in path {
        match byte {
            b'"' | b'\\' | ..=b' ' | 127.. => field.extend(format!("\\x{byte:02x}").bytes()),
            byte => field.push(byte),
        }
    }
    field.push(b'"');
    field
}

/// Before a pool starts again, has it start without a mover: that would go on with its tasks, and copy what its policy says.
/// One is started when a file is to be read that only the store has.
pub(crate) fn take_mover_away(pool: &Path) {
    let mark = pool.join(STORES_MARK);
    let Ok(file) = File::open(&mark) else { return };
    // The last mover may not have ended yet.
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
        for name in [TASKS_FILE, STORES_MARK] {
            let _ = std::fs::remove_file(pool.join(name));
        }
    }
}

impl Turns<'_> {
    /// Has the pool copy nothing more to its store: its mover does so by policy, and goes on with a task when the command
    /// ends that waits for it.
    pub(crate) fn hold_back(&self, pool: &Path) {
        let held = command::own(&["bb", "hold-back"]).and_then(|mut command| {
            command.arg(pool);
            command::finish(command, || false)
        });
        if let Err(why) = held {
            self.tell(&format!("the pool may go on copying to its store: {why}"));
        }
    }

    /// Keeps what would be staged out if no later run of the job had begun.
    pub(crate) fn keep_all(&self, pool: &Path, pairs: &[String], job: u32) -> Outcome {
        let mut outcome = Outcome { ok: true, ..Outcome::default() };
        for pair in pairs {
            let (source, destination) = pair.split_once(':').unwrap_or((pair, ""));
            if !was_made(pool, source, &|| false) {
                continue;
            }
            outcome.ok = false;
            outcome.why = match self.keep(pool, source, destination, job) {
                Ok(place) => {
                    outcome.kept.push(place.display().to_string());
                    format!(
                        "{WHY}; the data are kept in {}: `forebay recover {job}` copies them",
                        place.display()
                    )
                }
                Err(keeping) => format!("{WHY}; {}", stays(pool, &keeping, &mut outcome.kept)),
            };
        }
        outcome
    }

    /// Keeps what a pool's store would get if no later run of the job had begun.
    pub(crate) fn keep_lacking(&self, pool: &Path, url: &str, job: u32, outcome: &mut Outcome) {
        self.hold_back(pool);
        let places = match lacking(pool) {
            Ok(places) if places.is_empty() => return,
            places => places,
        };
        outcome.ok = false;
        outcome.why = match places.and_then(|places| self.keep_places(pool, &places, url, job)) {
            Ok(place) => {
                outcome.kept.push(place.clone());
                format!("{WHY}; what {url} lacks is kept in {place}: `forebay recover {job}` copies it")
            }
            Err(keeping) => format!("{WHY}; {}", stays(pool, &keeping, &mut outcome.kept)),
        };
    }

    fn keep_places(&self, pool: &Path, places: &[Place], url: &str, job: u32) -> Result<String, String> {
        let at = self.place()?;
        let manifest = at.with_file_name(MANIFEST_FILE);
        let copied = copy_places(pool, places, &at, &manifest).and_then(|()| self.list("/", url, job, &at));
        let _ = std::fs::remove_file(&manifest);
        if let Err(why) = copied {
            self.forsake(&at);
            return Err(why);
        }
        Ok(at.display().to_string())
    }
}

/// Copies places of a pool below a directory.
fn copy_places(pool: &Path, places: &[Place], at: &Path, manifest: &Path) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("cannot keep the data in {}: {e}", at.display());
    let mut private = DirBuilder::new();
    private.recursive(true).mode(0o700);
    let mut text = Vec::new();
    for place in places {
        let path = place.path();
        let kept = at.join(OsStr::from_bytes(path.strip_prefix(b"/").unwrap_or(&path)));
        // They stand for directories of which this copy knows no modes.
        kept.parent().map_or(Ok(()), |above| private.create(above)).map_err(failed)?;
        match place.target() {
            // Stage-out would copy what the link leads to.
            Some(target) => {
                std::os::unix::fs::symlink(OsStr::from_bytes(&target), &kept).map_err(failed)?;
            }
            None => {
                text.extend([quoted(&path), quoted(kept.as_os_str().as_bytes())].join(&b' '));
                text.push(b'\n');
            }
        }
    }
    if text.is_empty() {
        return Ok(());
    }
    std::fs::write(manifest, &text).map_err(failed)?;
    let option = format!("--manifest={}", manifest.display());
    forebay(pool, &["stage-out", "--no-progress", &option], || false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(path: &str, kind: &str, state: &str) -> Place {
        let kind = (!kind.is_empty()).then(|| kind.to_owned());
        Place { path: path.to_owned(), kind, state: state.to_owned(), ..Place::default() }
    }

    #[test]
    fn paths_within_another_one_are_left_out_and_every_byte_is_quoted() {
        let paths =
            ["/r/f", "/r", "/r.old", "/r/deep/g", "/a b", "/r.old2"].map(|path| place(path, "file", "new"));
        let left: Vec<_> = outermost(paths.to_vec()).into_iter().map(|place| place.path).collect();
        assert_eq!(left, ["/a b", "/r.old", "/r.old2", "/r"]);
        assert_eq!(quoted(b"/a \"\\\xff\n"), b"\"/a\\x20\\x22\\x5c\\xff\\x0a\"");
    }

    #[test]
    fn removed_and_temporary_places_and_changed_directories_are_not_kept() {
        for (kind, state, kept) in [
            ("file", "dirty", true),
            ("file", "changed", true),
            ("directory", "new", true),
            ("symlink", "new", true),
            ("directory", "changed", false),
            ("", "removed", false),
        ] {
            assert_eq!(place("/a", kind, state).is_lacking(), kept, "{kind} {state}");
        }
        assert!(!Place { temporary: true, ..place("/a", "file", "new") }.is_lacking());
        let hex = Place { path_hex: Some("2fff".into()), ..place("/?", "file", "new") };
        assert_eq!(hex.path(), b"/\xff");
    }
}
