//! Staging for a job in turn with others; what cannot be staged out is kept.

use std::fs::DirBuilder;
use std::io::Write as _;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::command::{self, forebay, ENDED, LOOK_AGAIN};
use super::config::Config;
use super::registry::{self, Outcome, Registry};
use super::{partial, tickets, turns};
use crate::table;

/// Failed tries of stage-outs, a line each.
pub(crate) const SAID_FILE: &str = "said";
/// The names of the kept data's list.
pub(crate) const LIST_FILE: &str = "kept.json";

const STAGE_IN: turns::Way = turns::Way { into_pool: true, can_pause: true };
const STAGE_OUT: turns::Way = turns::Way { into_pool: false, can_pause: true };
/// The pool's mover copies, which knows of no tickets of its own transfers.
const DRAIN: turns::Way = turns::Way { into_pool: false, can_pause: false };

/// A kept stage-out.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Kept {
    pub(crate) job: u32,
    /// The path in the pool.
    pub(crate) source: String,
    pub(crate) destination: String,
    /// Where its data are.
    pub(crate) place: PathBuf,
}

/// Stages for a job, in turn with others.
pub(crate) struct Turns<'a> {
    pub(crate) config: &'a Config,
    pub(crate) registry: &'a Registry,
    pub(crate) key: &'a str,
}

/// Runs a verb that transfers data. It writes its tally into its turn's ticket.
fn transfer(
    pool: &Path,
    words: &[&str],
    turn: Option<&turns::Turn>,
    is_over: &dyn Fn() -> bool,
) -> std::result::Result<(), String> {
    let tally = turn.map(tally);
    let words: Vec<&str> = words.iter().copied().chain(tally.as_deref()).collect();
    forebay(pool, &words, is_over)
}

/// The option for a turn's tally.
fn tally(turn: &turns::Turn) -> String {
    format!("--tally={}", turn.tally().display())
}

/// Whether data can be written in a directory.
fn takes_data(dir: &Path) -> bool {
    let probe = dir.join(".forebay-probe");
    let Ok(mut file) = std::fs::File::create_new(&probe) else { return false };
    let written = file.write_all(b"data").and_then(|()| file.sync_all());
    std::fs::remove_file(&probe).is_ok() && written.is_ok()
}

/// False for a source that the job has not made.
pub(super) fn was_made(pool: &Path, source: &str, is_over: &dyn Fn() -> bool) -> bool {
    let bare = source.trim_end_matches('/');
    let asked = forebay(pool, &["stat", "--json", if bare.is_empty() { "/" } else { bare }], is_over);
    !asked.is_err_and(|why| why.contains("there is no such name"))
}

/// Fails if a pool has data that no store has.
pub(crate) fn nothing_is_here_alone(pool: &Path) -> std::result::Result<(), String> {
    let text = command::printed(pool, &["state", "-r", "--json", "/"])?;
    let sums: serde_json::Value = serde_json::from_str(&text).map_err(|e| e.to_string())?;
    let count = |state: &str| sums[0][state]["files"].as_u64().unwrap_or(0);
    match ["unattached", "dirty", "draining"].map(count).iter().sum() {
        0 => Ok(()),
        files => Err(format!("{} of it may be nowhere else", table::count(files, "file"))),
    }
}

/// Has a pool stay up on this node, as its data can be copied nowhere. For messages.
pub(super) fn stays(pool: &Path, why: &str, kept: &mut Vec<String>) -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let dir = pool.parent().unwrap_or(pool).display().to_string();
    kept.push(format!("{host}:{dir}"));
    format!("{why}; the pool stays on {host} in {dir}")
}

impl Turns<'_> {
    /// A turn at the store of a path or URL, if it has turns.
    fn turn(
        &self,
        path: &str,
        way: turns::Way,
        is_over: &dyn Fn() -> bool,
    ) -> std::result::Result<Option<turns::Turn>, String> {
        let Some(store) = tickets::store_of(self.config, Path::new(path)) else { return Ok(None) };
        match turns::wait(&self.registry.turns(), store, self.key, way, is_over) {
            Ok(Some(turn)) => Ok(Some(turn)),
            Ok(None) => Err(ENDED.to_owned()),
            Err(_) if !way.into_pool => Ok(None), // the data are worth more than the order
            Err(e) => Err(e.to_string()),
        }
    }

    pub(crate) fn stage_in(
        &self,
        pool: &Path,
        pairs: &[String],
        is_over: &dyn Fn() -> bool,
    ) -> std::result::Result<(), String> {
        for pair in pairs {
            let source = pair.split(':').next().unwrap_or_default();
            let turn = self.turn(source, STAGE_IN, is_over)?;
            transfer(pool, &["stage-in", "--no-progress", pair], turn.as_ref(), is_over)?;
        }
        Ok(())
    }

    /// Copies to a pool's backing store what that lacks.
    pub(crate) fn drain(
        &self,
        pool: &Path,
        url: &str,
        is_over: &dyn Fn() -> bool,
    ) -> std::result::Result<(), String> {
        let turn = self.turn(url, DRAIN, is_over)?;
        transfer(pool, &["sync", "--no-progress", "-r", "/"], turn.as_ref(), is_over)
    }

    /// The last try of a drain, of a pool that may have lost nodes. Fails with the reason, and where the names are if all
    /// that was not drained is lost with them.
    pub(crate) fn drain_without(
        &self,
        pool: &Path,
        url: &str,
        why: String,
        is_over: &dyn Fn() -> bool,
    ) -> std::result::Result<(), (String, Option<PathBuf>)> {
        let gone = partial::nodes_gone(pool).unwrap_or_default();
        if gone.is_empty() {
            return Err((why, None));
        }
        let missed = {
            let turn = self.turn(url, DRAIN, is_over).ok().flatten();
            let tally = turn.as_ref().map(tally);
            partial::drained(pool, tally.as_deref(), is_over)
        };
        match missed {
            Some(missed) if missed.is_complete() => Ok(()), // the node is back
            Some(missed) if missed.is_lost() => {
                let listed = self.keep_dir().and_then(|dir| {
                    partial::write_lost(&dir, &gone, &missed)?;
                    Ok(dir)
                });
                let lost = missed.text(&gone);
                match listed {
                    Ok(dir) => {
                        let names = dir.join(partial::LOST_FILE);
                        let why =
                            format!("{lost}; the others are in {url}; names are in {}", names.display());
                        Err((why, Some(dir)))
                    }
                    Err(why) => Err((format!("{lost}; {why}"), None)),
                }
            }
            _ => Err((why, None)),
        }
    }

    /// Stages out; what fails often is kept elsewhere.
    pub(crate) fn stage_out(
        &self,
        pool: &Path,
        pairs: &[String],
        job: u32,
        is_over: &dyn Fn() -> bool,
    ) -> Outcome {
        let mut outcome = Outcome { ok: true, ..Outcome::default() };
        for pair in pairs {
            if let Err(why) = self.out_or_keep(pool, pair, job, is_over, &mut outcome.kept) {
                outcome.ok = false;
                if outcome.why.is_empty() {
                    outcome.why = why;
                }
            }
        }
        outcome
    }

    fn out_or_keep(
        &self,
        pool: &Path,
        pair: &str,
        job: u32,
        is_over: &dyn Fn() -> bool,
        kept: &mut Vec<String>,
    ) -> std::result::Result<(), String> {
        let (source, destination) = pair.split_once(':').unwrap_or((pair, ""));
        if !was_made(pool, source, is_over) {
            return Ok(());
        }
        let mut why = String::new();
        let mut pause = Duration::from_secs(self.config.stage_out_pause_s);
        for attempt in 1..=self.config.stage_out_tries.max(1) {
            if is_over() {
                return Err(ENDED.to_owned());
            }
            let turn = self.turn(destination, STAGE_OUT, is_over)?;
            match transfer(pool, &["stage-out", "--no-progress", pair], turn.as_ref(), is_over) {
                Ok(()) => return Ok(()),
                Err(text) => why = text,
            }
            drop(turn); // others have theirs in the pause
            self.tell(&format!("{pair}: try {attempt} failed: {why}"));
            if attempt < self.config.stage_out_tries {
                let until = Instant::now() + pause;
                while Instant::now() < until && !is_over() {
                    std::thread::sleep(LOOK_AGAIN.min(pause));
                }
                pause *= 2;
            }
        }
        if is_over() {
            return Err(ENDED.to_owned());
        }
        let gone = partial::nodes_gone(pool).unwrap_or_default();
        if !gone.is_empty() {
            return self.without(pool, pair, job, &gone, is_over, kept);
        }
        match self.keep(pool, source, destination, job) {
            Ok(place) => {
                kept.push(place.display().to_string());
                Err(format!(
                    "{why}; the data are kept in {}: `forebay recover {job}` copies them",
                    place.display()
                ))
            }
            Err(keeping) => Err(format!("{why}; {}", stays(pool, &keeping, kept))),
        }
    }

    /// Stages out what a pool has without nodes that are gone, and names the rest. What the destination does not take
    /// is kept.
    fn without(
        &self,
        pool: &Path,
        pair: &str,
        job: u32,
        gone: &[String],
        is_over: &dyn Fn() -> bool,
        kept: &mut Vec<String>,
    ) -> std::result::Result<(), String> {
        let (source, destination) = pair.split_once(':').unwrap_or((pair, ""));
        let (missed, others) = match self.part_out(pool, source, destination, is_over) {
            Ok(missed) if missed.is_complete() => return Ok(()), // the node is back
            Ok(missed) if missed.is_lost() => (missed, format!("the others are in {destination}")),
            _ if is_over() => return Err(ENDED.to_owned()),
            tried => {
                let why = tried.map_or_else(|refused| refused.why, |missed| missed.first());
                match self.keep_others(pool, source, destination, job, is_over) {
                    Err(_) if is_over() => return Err(ENDED.to_owned()),
                    Err(keeping) => return Err(format!("{why}; {}", stays(pool, &keeping, kept))),
                    Ok((missed, _)) if missed.is_complete() => {
                        kept.push(self.config.keep_dir.join(self.key).display().to_string());
                        return Err(format!("{why}; the data are kept: `forebay recover {job}` copies them"));
                    }
                    Ok((missed, true)) => {
                        (missed, format!("the others are kept: `forebay recover {job}` copies them"))
                    }
                    Ok((missed, false)) => (missed, "nothing of it is left".to_owned()),
                }
            }
        };
        let names = self.keep_dir().and_then(|dir| {
            partial::write_lost(&dir, gone, &missed)?;
            kept.push(dir.display().to_string());
            Ok(format!("the names are in {}", dir.join(partial::LOST_FILE).display()))
        });
        Err(format!("{}; {others}; {}", missed.text(gone), names.unwrap_or_else(|why| why)))
    }

    /// One try of a stage-out, which skips what cannot be read, in turn with other jobs.
    fn part_out(
        &self,
        pool: &Path,
        source: &str,
        destination: &str,
        is_over: &dyn Fn() -> bool,
    ) -> std::result::Result<partial::Missed, partial::Refused> {
        let turn = self.turn(destination, STAGE_OUT, is_over).ok().flatten();
        let tally = turn.as_ref().map(tally);
        partial::staged_out(pool, &format!("{source}:{destination}"), tally.as_deref(), is_over)
    }

    /// Keeps what nodes have that are there, and tells whether that is something. Fails if it cannot be kept.
    fn keep_others(
        &self,
        pool: &Path,
        source: &str,
        destination: &str,
        job: u32,
        is_over: &dyn Fn() -> bool,
    ) -> std::result::Result<(partial::Missed, bool), String> {
        let place = self.place()?;
        let missed = match self.part_out(pool, source, &format!("{}/", place.display()), is_over) {
            Ok(missed) if missed.is_lost() => missed,
            Ok(missed) => {
                self.forsake(&place);
                return Err(missed.first());
            }
            // The place takes data and the pool answers, so it is the source that cannot be reached.
            Err(refused)
                if refused.is_unreachable() && takes_data(&place) && partial::answers(pool, source) =>
            {
                partial::Missed::whole(source, refused.why)
            }
            Err(refused) => {
                self.forsake(&place);
                return Err(refused.why);
            }
        };
        // It is empty if all is lost.
        let is_kept = std::fs::remove_dir(&place).is_err();
        if is_kept {
            self.list(source, destination, job, &place)?;
        }
        Ok((missed, is_kept))
    }

    /// Adds a line to what the job's nodes have said.
    pub(super) fn tell(&self, line: &str) {
        let path = self.registry.results(self.key).join(SAID_FILE);
        if let Ok(mut file) = std::fs::OpenOptions::new().create(true).append(true).open(path) {
            let _ = writeln!(file, "{line}");
        }
    }

    pub(super) fn keep(
        &self,
        pool: &Path,
        source: &str,
        destination: &str,
        job: u32,
    ) -> std::result::Result<PathBuf, String> {
        let place = self.place()?;
        // Its contents, or it itself, as the job has said.
        let pair = format!("{source}:{}/", place.display());
        let copied = forebay(pool, &["stage-out", "--no-progress", &pair], || false)
            .and_then(|()| self.list(source, destination, job, &place));
        match copied {
            Ok(()) => Ok(place),
            Err(why) => {
                self.forsake(&place);
                Err(why)
            }
        }
    }

    /// Removes a place that holds only a part of what was to be kept, and the run's directory if nothing else is in it.
    pub(super) fn forsake(&self, place: &Path) {
        let _ = std::fs::remove_dir_all(place);
        let _ = std::fs::remove_dir(self.config.keep_dir.join(self.key));
    }

    /// The directory for what is kept of this run. It is made if it is not there.
    fn keep_dir(&self) -> std::result::Result<PathBuf, String> {
        let dir = self.config.keep_dir.join(self.key);
        match DirBuilder::new().recursive(true).mode(0o700).create(&dir) {
            Ok(()) => Ok(dir),
            Err(e) => Err(format!("cannot keep the data in {}: {e}", dir.display())),
        }
    }

    fn kept(dir: &Path) -> std::result::Result<Vec<Kept>, String> {
        Ok(registry::read(&dir.join(LIST_FILE), None).map_err(|e| e.to_string())?.unwrap_or_default())
    }

    /// A new directory for one stage-out that is kept.
    pub(super) fn place(&self) -> std::result::Result<PathBuf, String> {
        let dir = self.keep_dir()?;
        let all = Self::kept(&dir)?;
        // Some of these before may have been recovered.
        let is_listed = |place: &Path| all.iter().any(|kept| kept.place == place);
        let mut places = (all.len()..).map(|number| dir.join(number.to_string()));
        let place = places.find(|place| !is_listed(place)).unwrap_or_default();
        let failed = |e: std::io::Error| format!("cannot keep the data in {}: {e}", place.display());
        // A part that a try has left that was killed. It is not listed, so the data are in the pool still.
        match std::fs::remove_dir_all(&place) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(failed(e)),
            _ => {}
        }
        DirBuilder::new().mode(0o700).create(&place).map_err(failed)?;
        Ok(place)
    }

    /// Lists a kept stage-out, so that `forebay recover` finds it.
    pub(super) fn list(
        &self,
        source: &str,
        destination: &str,
        job: u32,
        place: &Path,
    ) -> std::result::Result<(), String> {
        let dir = self.keep_dir()?;
        let mut all = Self::kept(&dir)?;
        all.push(Kept {
            job,
            source: source.to_owned(),
            destination: destination.to_owned(),
            place: place.to_owned(),
        });
        registry::write(&dir.join(LIST_FILE), &all).map_err(|e| e.to_string())
    }
}
