//! Staging for a job in turn with others; what cannot be staged out is kept.

use std::fs::DirBuilder;
use std::io::Write as _;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::command::{forebay, ENDED, LOOK_AGAIN};
use super::config::Config;
use super::registry::{self, Outcome, Registry};
use super::turns;

/// Failed tries of stage-outs, a line each.
pub(crate) const SAID_FILE: &str = "said";
/// The names of the kept data's list.
pub(crate) const LIST_FILE: &str = "kept.json";

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

impl Turns<'_> {
    fn turn(
        &self,
        path: &str,
        into_pool: bool,
        is_over: &dyn Fn() -> bool,
    ) -> std::result::Result<Option<turns::Turn>, String> {
        let Some(store) = turns::store_of(self.config, Path::new(path)) else { return Ok(None) };
        match turns::wait(&self.registry.turns(), store, self.key, into_pool, is_over) {
            Ok(Some(turn)) => Ok(Some(turn)),
            Ok(None) => Err(ENDED.to_owned()),
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
            let _turn = self.turn(source, true, is_over)?;
            forebay(pool, &["stage-in", "--no-progress", pair], is_over)?;
        }
        Ok(())
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
        let bare = source.trim_end_matches('/');
        match forebay(pool, &["stat", "--json", if bare.is_empty() { "/" } else { bare }], is_over) {
            Err(why) if why.contains("there is no such name") => return Ok(()), // the job has not made it
            _ => {}
        }
        let mut why = String::new();
        let mut pause = Duration::from_secs(self.config.stage_out_pause_s);
        for attempt in 1..=self.config.stage_out_tries.max(1) {
            if is_over() {
                return Err(ENDED.to_owned());
            }
            let turn = self.turn(destination, false, is_over)?;
            match forebay(pool, &["stage-out", "--no-progress", pair], is_over) {
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
        match self.keep(pool, source, destination, job) {
            Ok(place) => {
                kept.push(place.display().to_string());
                Err(format!(
                    "{why}; the data are kept in {}: `forebay recover {job}` copies them",
                    place.display()
                ))
            }
            Err(keeping) => {
                let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
                let dir = pool.parent().unwrap_or(pool).display().to_string();
                kept.push(format!("{host}:{dir}"));
                Err(format!("{why}; {keeping}; the pool stays on {host} in {dir}"))
            }
        }
    }

    /// Adds a line to what the job's nodes have said.
    fn tell(&self, line: &str) {
        let path = self.registry.results(self.key).join(SAID_FILE);
        if let Ok(mut file) = std::fs::OpenOptions::new().create(true).append(true).open(path) {
            let _ = writeln!(file, "{line}");
        }
    }

    fn keep(
        &self,
        pool: &Path,
        source: &str,
        destination: &str,
        job: u32,
    ) -> std::result::Result<PathBuf, String> {
        let dir = self.config.keep_dir.join(self.key);
        let shown = |e: std::io::Error| format!("cannot keep the data in {}: {e}", dir.display());
        DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(shown)?;
        let list = dir.join(LIST_FILE);
        let mut all: Vec<Kept> = registry::read(&list, None).map_err(|e| e.to_string())?.unwrap_or_default();
        let place = dir.join(all.len().to_string());
        std::fs::create_dir_all(&place).map_err(shown)?;
        // Its contents, or it itself, as the job has said.
        let pair = format!("{source}:{}/", place.display());
        forebay(pool, &["stage-out", "--no-progress", &pair], || false)?;
        all.push(Kept {
            job,
            source: source.to_owned(),
            destination: destination.to_owned(),
            place: place.clone(),
        });
        registry::write(&list, &all).map_err(|e| e.to_string())?;
        Ok(place)
    }
}
