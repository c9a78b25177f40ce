//! What prolog and epilog do as the user: start the pool on this node, stage, drain, stop it.
//!
//! The nodes of a job are numbered in the order of its list. Node 0 stages in. At the end the nodes choose one that
//! stages out: node 0, or, when its signs of life have stopped, the first that claims the work. The others keep their
//! part of the pool up until it is done.

use std::fs::DirBuilder;
use std::io::Write as _;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use forebay_types::{Code, Error, Result};

use super::config::Config;
use super::directives::{Persistent, SMALLEST};
use super::registry::{self, Job, Outcome, Registry, State};
use super::turns;
use crate::{failure, hosts};

const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// How long the nodes of a job wait for each other's prolog.
const MEETING_S: &str = "120";
/// How often a node that works says that it is alive.
const BEAT: Duration = Duration::from_secs(2);
/// The file that the node touches that stages out.
pub(crate) const BEAT_FILE: &str = "beat";
/// What came of the stage-out.
pub(crate) const OUT_FILE: &str = "out.json";
/// Failed tries of stage-outs, a line each.
pub(crate) const SAID_FILE: &str = "said";
/// The names of the kept data's list.
pub(crate) const LIST_FILE: &str = "kept.json";
/// Longer reasons are cut: they are shown in one column of squeue.
const REASON_MAX: usize = 300;

/// A job on this node.
pub(crate) struct Here {
    pub(crate) config: Config,
    pub(crate) registry: Registry,
    pub(crate) job: Job,
    nodes: Vec<String>,
    node: String,
    rank: usize,
    /// The run is over, and its data are saved from a node that had been lost.
    saves: bool,
}

/// Names this node among a job's nodes, as slurmd does.
fn variable(name: &str) -> Result<String> {
    std::env::var(name).map_err(|_| {
        failure::invalid(
            "cannot tell what to do on this node",
            format!("{name} is not set"),
            "slurmd's prolog and epilog call this",
        )
    })
}

impl Here {
    pub(crate) fn of_this_process(job: u32) -> Result<Here> {
        let config = Config::read()?;
        let registry = Registry::of(&config);
        let what = format!("cannot use the burst buffer of job {job}");
        let job = registry.job(job)?.ok_or_else(|| Error::new(Code::NotFound, &*what).why("it has none"))?;
        if job.uid != rustix::process::geteuid().as_raw() {
            return Err(Error::new(Code::AccessDenied, what).why("this is not the job's user"));
        }
        let node = variable("SLURMD_NODENAME")?;
        let list = std::env::var("SLURM_NODELIST").or_else(|_| variable("SLURM_JOB_NODELIST"));
        let nodes = hosts::expand(&list.unwrap_or_else(|_| node.clone()))?;
        let rank = nodes.iter().position(|name| *name == node).unwrap_or(0);
        Ok(Here { config, registry, job, nodes, node, rank, saves: false })
    }

    fn dir(&self) -> PathBuf {
        self.job.pool_dir(&self.config)
    }

    fn pool(&self) -> PathBuf {
        self.dir().join("pool")
    }

    fn results_key(&self) -> String {
        self.job.key()
    }

    /// Whether the controller has torn the run down: the work is given up.
    fn is_over(&self) -> bool {
        if self.saves {
            return false;
        }
        match self.registry.job(self.job.job) {
            Ok(Some(now)) => now.run != self.job.run || now.state == State::TornDown,
            Ok(None) => true,
            Err(_) => false,
        }
    }

    /// Starts the pool on this node, or finds the persistent one, and stages in.
    pub(crate) fn up(&self) -> Result<()> {
        let results = self.registry.make_results(&self.results_key())?;
        let done = self.try_up();
        let outcome = Outcome {
            ok: done.is_ok(),
            why: done.as_ref().err().cloned().unwrap_or_default(),
            nodes: self.nodes.clone(),
            ..Outcome::default()
        };
        registry::write(&results.join(format!("{}.up.json", self.node)), &outcome)?;
        // Of several nodes that fail, one has the job requeued.
        if done.is_err() && std::fs::create_dir(results.join("failed")).is_err() {
            return Ok(());
        }
        done.map_err(|why| Error::new(Code::Io, format!("cannot start job {}", self.job.job)).why(why))
    }

    fn try_up(&self) -> std::result::Result<(), String> {
        match &self.job.request.persistent {
            None => {
                self.start()?;
                if self.rank == 0 {
                    self.fill()?;
                }
            }
            Some(Persistent::Create(_)) => {
                self.start()?;
                if self.rank == 0 {
                    self.fill()?;
                }
                self.leave_a_steward()?;
            }
            Some(Persistent::Use(name) | Persistent::Destroy(name)) => {
                let asked = forebay(&self.pool(), &["status", "--json"], || false);
                if asked.is_err() && matches!(self.job.request.persistent, Some(Persistent::Use(_))) {
                    let key = self.job.pool_key.clone().unwrap_or_default();
                    return Err(format!(
                        "pool {name} is not on node {}: submit the job with --nodelist={}",
                        self.node,
                        super::steward::nodes(&self.registry.results(&key)).join(",")
                    ));
                }
            }
        }
        Ok(())
    }

    fn start(&self) -> std::result::Result<(), String> {
        let dir = self.dir();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .map_err(|e| format!("{}: {e}", dir.display()))?;
        let request = &self.job.request;
        let most = usize::try_from(request.capacity_bytes.unwrap_or(0) / SMALLEST).unwrap_or(usize::MAX);
        let targets = request.nodes.unwrap_or(self.nodes.len()).min(self.nodes.len()).min(most).max(1);
        let share = request.capacity_bytes.unwrap_or(0).div_ceil(targets as u64).next_multiple_of(1 << 20);
        let capacity = if self.rank < targets { share } else { 0 }.to_string();
        let pool = dir.join("pool").display().to_string();
        let mount = dir.join("mnt").display().to_string();
        let port = (u64::from(self.config.first_port)
            + u64::from(self.job.job) % u64::from(self.config.ports))
        .to_string();
        let name = format!("--job={}", self.results_key());
        let meeting = self.registry.results("").display().to_string();
        let mut words = vec!["up", "--path", &pool, "--capacity", &capacity];
        if let Some(mode) = &request.mode {
            words.extend(["--media", mode]);
        }
        if self.config.mount {
            std::fs::create_dir_all(&mount).map_err(|e| format!("{mount}: {e}"))?;
            words.extend(["--mount", &mount]);
        }
        if self.nodes.len() > 1 {
            words.extend([
                &*name,
                "--shared",
                &meeting,
                "--wait",
                MEETING_S,
                "--port",
                &port,
                "--background",
            ]);
        }
        let mut command = own(&words)?;
        for variable in ["FOREBAY_POOL", "SLURM_STEP_ID", "FOREBAY_SHARED"] {
            command.env_remove(variable);
        }
        command
            .env("SLURM_PROCID", self.rank.to_string())
            .env("SLURM_NTASKS", self.nodes.len().to_string())
            .env("FOREBAY_NODE", &self.node);
        finish(command, || self.is_over())
    }

    /// Attaches the store and stages in, in turn with other jobs.
    fn fill(&self) -> std::result::Result<(), String> {
        let pool = self.pool();
        if self.nodes.len() > 1 {
            forebay(&pool, &["status", "--wait", MEETING_S, "--json"], || self.is_over())?;
        }
        let request = &self.job.request;
        if let Some(url) = &request.backing {
            let mut words = vec!["attach", url, "/"];
            if let Some(policy) = &request.policy {
                words.extend(["--drain", policy]);
            }
            forebay(&pool, &words, || self.is_over())?;
        }
        let turns = Turns { config: &self.config, registry: &self.registry, key: &self.job.key() };
        turns.stage_in(&pool, &request.stage_in, &|| self.is_over())
    }

    /// Starts the process that serves a persistent pool's orders and ends it.
    fn leave_a_steward(&self) -> std::result::Result<(), String> {
        let (job, rank) = (self.job.job.to_string(), self.rank.to_string());
        let mut command = own(&["bb", "steward", &job, &rank])?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).current_dir("/");
        // SAFETY: setsid is a plain system call, which may be called between fork and exec.
        unsafe {
            command.pre_exec(|| {
                libc::setsid();
                Ok(())
            });
        }
        command.spawn().map(drop).map_err(|e| format!("cannot start its steward: {e}"))
    }

    /// Ends the job on this node: stages out, and stops the pool.
    pub(crate) fn down(&self) -> Result<()> {
        if !self.job.request.has_own_pool() {
            return Ok(());
        }
        let results = self.registry.make_results(&self.results_key())?;
        let kept_here = self.stage_out_or_wait(&results)?;
        let dir = self.dir();
        if kept_here {
            return Ok(());
        }
        clear(&dir).map_err(|why| {
            Error::new(Code::Io, format!("cannot clear {}", dir.display()))
                .why(why)
                .cure("the next prolog on this node tries it again")
        })
    }

    /// Stages out what a run of one node has left here that was lost with its node, and removes it.
    pub(crate) fn save(mut self, run: u32) -> Result<()> {
        self.job.run = run;
        self.saves = true;
        let key = self.job.key();
        let up = self.registry.result(&key, self.job.uid, &format!("{}.up.json", self.node))?;
        if let Some(up) = up.filter(|up| up.ok) {
            let what = format!("cannot save what job {} has left in {}", self.job.job, self.dir().display());
            if up.nodes.len() > 1 {
                return Err(Error::new(Code::NotSupported, what)
                    .why("it is a part of a pool of several nodes")
                    .cure("`forebay up --pool` on all of them, then `forebay stage-out`"));
            }
            self.nodes = up.nodes;
            self.rank = 0;
            let outcome = self.stage_out();
            registry::write(&self.registry.make_results(&key)?.join(OUT_FILE), &outcome)?;
            if outcome.kept.iter().any(|place| !place.starts_with('/')) {
                return Err(Error::new(Code::Io, what).why(outcome.why));
            }
        }
        clear(&self.dir()).map_err(|why| Error::new(Code::Io, format!("cannot clear {key}")).why(why))
    }

    /// Returns true if the pool has to stay, with data that are nowhere else.
    fn stage_out_or_wait(&self, results: &Path) -> Result<bool> {
        let out = results.join(OUT_FILE);
        let waits_since = Instant::now();
        loop {
            if let Some(outcome) = registry::read::<Outcome>(&out, None)? {
                let pool = self.dir().display().to_string();
                return Ok(outcome.kept.iter().any(|place| place.ends_with(&format!(":{pool}"))));
            }
            if self.is_over() {
                return Ok(false);
            }
            let silent = std::fs::metadata(results.join(BEAT_FILE)).and_then(|m| m.modified());
            let silent = silent
                .map_or(waits_since.elapsed(), |at| SystemTime::now().duration_since(at).unwrap_or_default());
            let round = if self.rank == 0 {
                0
            } else {
                1 + waits_since.elapsed().as_secs() / self.config.silence_s.max(1)
            };
            let is_my_turn = self.rank == 0 || silent.as_secs() >= self.config.silence_s;
            if is_my_turn && std::fs::create_dir(results.join(format!("claim.{round}"))).is_ok() {
                let outcome = {
                    let _beat = Beat::start(results.join(BEAT_FILE));
                    self.stage_out()
                };
                registry::write(&out, &outcome)?;
                continue;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    fn stage_out(&self) -> Outcome {
        let pool = self.pool();
        if !pool.exists() {
            // A job has not run if no prolog was called, or if one failed: there are no data then.
            let results = self.registry.results(&self.results_key());
            let has_run =
                !results.join("failed").exists() && results.join(format!("{}.up.json", self.node)).exists();
            return Outcome { ok: !has_run, why: "the pool is not there".to_owned(), ..Outcome::default() };
        }
        if let Err(dead) = forebay(&pool, &["status", "--json"], || false) {
            // Its supervisor was killed. A disk still has the data; a user's memory went with the process.
            let has_disk = self.job.request.mode.as_deref() == Some("ssd") && self.nodes.len() == 1;
            let again = if has_disk {
                self.start()
            } else {
                Err(format!("{dead}; its data were in memory: mode=ssd keeps them"))
            };
            if let Err(why) = again {
                return Outcome { why, ..Outcome::default() };
            }
        }
        let turns = Turns { config: &self.config, registry: &self.registry, key: &self.job.key() };
        let mut outcome =
            turns.stage_out(&pool, &self.job.request.stage_out, self.job.job, &|| self.is_over());
        if self.job.request.backing.is_some() && !self.is_over() {
            let mut done = Ok(());
            let mut pause = Duration::from_secs(self.config.stage_out_pause_s);
            for attempt in 1..=self.config.stage_out_tries.max(1) {
                done = forebay(&pool, &["sync", "-r", "/", "--no-progress"], || self.is_over());
                if done.is_ok() || self.is_over() {
                    break;
                }
                if attempt < self.config.stage_out_tries {
                    std::thread::sleep(pause);
                    pause *= 2;
                }
            }
            if let Err(why) = done {
                outcome.ok = false;
                outcome.why = why;
                let place = self.dir();
                outcome.kept.extend(self.nodes.iter().map(|node| format!("{node}:{}", place.display())));
            }
        }
        outcome
    }
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
        let mut all: Vec<super::recover::Kept> =
            registry::read(&list, None).map_err(|e| e.to_string())?.unwrap_or_default();
        let place = dir.join(all.len().to_string());
        std::fs::create_dir_all(&place).map_err(shown)?;
        // Its contents, or it itself, as the job has said.
        let pair = format!("{source}:{}/", place.display());
        forebay(pool, &["stage-out", "--no-progress", &pair], || false)?;
        all.push(super::recover::Kept {
            job,
            source: source.to_owned(),
            destination: destination.to_owned(),
            place: place.clone(),
        });
        registry::write(&list, &all).map_err(|e| e.to_string())?;
        Ok(place)
    }
}

/// How often a pool is stopped before it is left to the next sweep.
const DOWN_TRIES: u32 = 5;
const ENDED: &str = "the job was torn down";

/// Touches a file until it is dropped.
pub(crate) struct Beat {
    ended: std::sync::Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Beat {
    pub(crate) fn start(path: PathBuf) -> Beat {
        let ended = std::sync::Arc::new(AtomicBool::new(false));
        let over = std::sync::Arc::clone(&ended);
        let thread = std::thread::spawn(move || {
            while !over.load(Ordering::Acquire) {
                let _ = std::fs::write(&path, "");
                std::thread::park_timeout(BEAT);
            }
        });
        Beat { ended, thread: Some(thread) }
    }
}

impl Drop for Beat {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// Stops what is up in a pool's directory, and removes it.
pub(crate) fn clear(dir: &Path) -> std::result::Result<(), String> {
    let pool = dir.join("pool");
    let mut tries = 1;
    while pool.exists() {
        match forebay(&pool, &["down", "--force", "--discard", "--no-progress"], || false) {
            Ok(()) => break,
            // Its daemon may just be starting.
            Err(_) if tries < DOWN_TRIES => std::thread::sleep(Duration::from_secs(1)),
            Err(why) => return Err(why),
        }
        tries += 1;
    }
    match std::fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e.to_string()),
        _ => Ok(()),
    }
}

/// This program with other words.
pub(crate) fn own(words: &[&str]) -> std::result::Result<Command, String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::null());
    Ok(command)
}

/// Runs a verb on a pool. The error is its reason, in one line.
pub(crate) fn forebay(
    pool: &Path,
    words: &[&str],
    is_over: impl Fn() -> bool,
) -> std::result::Result<(), String> {
    let mut command = own(words)?;
    command.env("FOREBAY_POOL", pool);
    finish(command, is_over)
}

/// Waits for a command, or kills it when `is_over` says so.
pub(crate) fn finish(mut command: Command, is_over: impl Fn() -> bool) -> std::result::Result<(), String> {
    let out = tempfile().map_err(|e| format!("cannot keep its messages: {e}"))?;
    let said = out.try_clone().map_err(|e| e.to_string())?;
    let mut child = command.stdout(Stdio::null()).stderr(said).spawn().map_err(|e| e.to_string())?;
    let mut looked = Instant::now();
    let mut pause = Duration::from_millis(2);
    let status = loop {
        if let Some(status) = child.try_wait().map_err(|e| e.to_string())? {
            break status;
        }
        if looked.elapsed() >= Duration::from_millis(500) {
            looked = Instant::now();
            if is_over() {
                let _ = child.kill();
                let _ = child.wait();
                return Err(ENDED.to_owned());
            }
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LOOK_AGAIN);
    };
    if status.success() {
        return Ok(());
    }
    let text = text_of(out);
    match reason(&text) {
        why if why.is_empty() => Err(format!("it ended with {status}")),
        why => Err(why),
    }
}

/// A file without a name. The daemons that a command starts may keep it open, so it is no pipe.
fn tempfile() -> std::io::Result<std::fs::File> {
    let memory = rustix::fs::memfd_create("forebay-said", rustix::fs::MemfdFlags::CLOEXEC)?;
    Ok(memory.into())
}

fn text_of(mut file: std::fs::File) -> String {
    use std::io::{Read, Seek};
    let mut bytes = Vec::new();
    let _ = file.rewind().and_then(|()| file.take(1 << 16).read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The message of a command in one line.
pub(crate) fn reason(text: &str) -> String {
    let lines =
        text.lines().map(|line| line.trim().trim_start_matches("forebay: ")).filter(|line| !line.is_empty());
    let joined = lines.collect::<Vec<_>>().join("; ");
    joined.chars().filter(|c| !c.is_control()).take(REASON_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_is_one_line_without_control_characters_and_not_too_long() {
        assert_eq!(reason("forebay: cannot do it: why\n  cure\n\x1b[1m"), "cannot do it: why; cure; [1m");
        assert_eq!(reason(&"x".repeat(1000)).len(), REASON_MAX);
        assert_eq!(reason("\n"), "");
    }

    #[test]
    fn finish_gives_the_message_of_a_failure_and_kills_what_is_given_up() {
        let sh = |line: &str| {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", line]);
            command
        };
        assert_eq!(finish(sh("true"), || false), Ok(()));
        assert_eq!(finish(sh("echo forebay: no >&2; exit 3"), || false), Err("no".to_owned()));
        assert!(finish(sh("exit 3"), || false).unwrap_err().contains('3'));
        assert_eq!(finish(sh("exec sleep 600"), || true), Err(ENDED.to_owned()));
    }
}
