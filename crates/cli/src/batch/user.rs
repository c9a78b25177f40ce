//! What prolog and epilog do as the user: start the pool on this node, stage, drain, stop it.
//!
//! The nodes of a job are numbered in the order of its list. Node 0 stages in. At the end the nodes choose one that
//! stages out: node 0, or, when its signs of life have stopped, the first that claims the work. The others keep their
//! part of the pool up until it is done.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use forebay_types::{Code, Error, Result};

use super::command::{self, forebay, LOOK_AGAIN};
use super::config::Config;
use super::directives::{Persistent, SMALLEST};
use super::outdated;
use super::partial;
use super::registry::{self, Job, Outcome, Registry, State, FAILED_DIR};
use super::staging::{self, Turns};
use super::tickets;
use crate::hosts;

/// How long the nodes of a job wait for each other's prolog.
const MEETING_S: &str = "120";
/// How often a node that works says that it is alive.
const BEAT: Duration = Duration::from_secs(2);
/// The file that the node touches that stages out.
pub(crate) const BEAT_FILE: &str = "beat";

/// A job on this node.
pub(crate) struct Here {
    pub(crate) config: Config,
    pub(crate) registry: Registry,
    pub(crate) job: Job,
    nodes: Vec<String>,
    node: String,
    rank: usize,
    /// The controller does not know that the run ends now: its data are saved whatever the job's record says.
    saves: bool,
    /// A later run of the job has begun. Its results must not be replaced by those of this one.
    is_outdated: bool,
}

/// This node's name, as slurmd has it unless slurm.conf says otherwise.
fn host() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    host.split('.').next().unwrap_or_default().to_owned()
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
        // An administrator who sweeps has no such variable.
        let node = std::env::var("SLURMD_NODENAME").unwrap_or_else(|_| host());
        let list = std::env::var("SLURM_NODELIST").or_else(|_| std::env::var("SLURM_JOB_NODELIST"));
        let nodes = hosts::expand(&list.unwrap_or_else(|_| node.clone()))?;
        let rank = nodes.iter().position(|name| *name == node).unwrap_or(0);
        Ok(Here { config, registry, job, nodes, node, rank, saves: false, is_outdated: false })
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

    /// A run of the job that may be another than that of its record.
    fn in_run(mut self, run: u32) -> Here {
        self.is_outdated = run < self.job.run;
        self.saves = self.is_outdated;
        self.job.run = run;
        self
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

    /// Whether the job has started again since this began, without an end of this run.
    fn has_become_outdated(&self) -> bool {
        !self.saves
            && self
                .registry
                .job(self.job.job)
                .is_ok_and(|now| now.is_some_and(|now| now.follows(self.job.run)))
    }

    /// Whether the run is over, and nobody wants what it has left.
    fn is_unwanted(&self) -> bool {
        self.is_over() && !self.has_become_outdated()
    }

    /// Whether the run has ended before it began: its job was cancelled. Its epilog waits for what starts it.
    fn is_given_up(&self) -> bool {
        match self.registry.job(self.job.job) {
            Ok(Some(now)) => now.has_ended(self.job.run),
            Ok(None) => true,
            Err(_) => false,
        }
    }

    /// Starts the pool on this node, or finds the persistent one, and stages in.
    pub(crate) fn up(&self) -> Result<()> {
        let results = self.registry.make_results(&self.results_key())?;
        let said = results.join(format!("{}.up.json", self.node));
        // Called again, it must not take the pool of a job that runs for one that has not started.
        if registry::read::<Outcome>(&said, None)?.is_some_and(|up| up.ok) {
            return Ok(());
        }
        let done = self.try_up();
        let outcome = Outcome {
            ok: done.is_ok(),
            why: done.as_ref().err().cloned().unwrap_or_default(),
            nodes: self.nodes.clone(),
            ..Outcome::default()
        };
        registry::write(&said, &outcome)?;
        // Of several nodes that fail, one has the job requeued.
        if done.is_err() && std::fs::create_dir(results.join(FAILED_DIR)).is_err() {
            return Ok(());
        }
        done.map_err(|why| Error::new(Code::Io, format!("cannot start job {}", self.job.job)).why(why))
    }

    fn try_up(&self) -> std::result::Result<(), String> {
        match &self.job.request.persistent {
            None => {
                self.start(&|| self.is_given_up())?;
                if self.rank == 0 {
                    self.fill()?;
                }
            }
            Some(Persistent::Create(_)) => {
                self.start(&|| self.is_given_up())?;
                if self.rank == 0 {
                    self.fill()?;
                }
                self.leave_a_steward()?;
            }
            Some(Persistent::Use(name) | Persistent::Destroy(name)) => {
                let asked = partial::nodes_gone(&self.pool());
                if asked.is_err() && matches!(self.job.request.persistent, Some(Persistent::Use(_))) {
                    let key = self.job.pool_key.clone().unwrap_or_default();
                    return Err(format!(
                        "pool {name} is not on node {}: submit the job with --nodelist={}",
                        self.node,
                        self.registry.stewards(&key).join(",")
                    ));
                }
            }
        }
        Ok(())
    }

    fn start(&self, is_over: &dyn Fn() -> bool) -> std::result::Result<(), String> {
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
            match std::fs::create_dir(&mount) {
                // Also a mount that nobody serves any more: `up` takes it away.
                Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
                    return Err(format!("{mount}: {e}"))
                }
                _ => {}
            }
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
        let mut command = command::own(&words)?;
        for variable in ["FOREBAY_POOL", "SLURM_STEP_ID", "FOREBAY_SHARED"] {
            command.env_remove(variable);
        }
        command
            .env("SLURM_PROCID", self.rank.to_string())
            .env("SLURM_NTASKS", self.nodes.len().to_string())
            .env("FOREBAY_NODE", &self.node);
        command::finish(command, is_over)
    }

    /// Attaches the store and stages in, in turn with other jobs.
    fn fill(&self) -> std::result::Result<(), String> {
        let pool = self.pool();
        if self.nodes.len() > 1 {
            forebay(&pool, &["status", "--wait", MEETING_S, "--json"], || self.is_given_up())?;
        }
        let request = &self.job.request;
        if let Some(url) = &request.backing {
            let mut words = vec!["attach", url, "/"];
            if let Some(policy) = &request.policy {
                words.extend(["--drain", policy]);
            }
            // Others wait for their transfers, nobody for what a policy drains.
            let files = tickets::store_of(&self.config, Path::new(url))
                .map(|(store, _)| tickets::files_of(&self.registry.turns(), &store));
            if let Some(files) = &files {
                words.extend(["--yield-to", files]);
            }
            forebay(&pool, &words, || self.is_given_up())?;
        }
        let turns = Turns { config: &self.config, registry: &self.registry, key: &self.job.key() };
        turns.stage_in(&pool, &request.stage_in, &|| self.is_given_up())
    }

    /// Starts the process that serves a persistent pool's orders and ends it.
    fn leave_a_steward(&self) -> std::result::Result<(), String> {
        let (job, rank) = (self.job.job.to_string(), self.rank.to_string());
        let mut command = command::own(&["bb", "steward", &job, &rank])?;
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
    pub(crate) fn down(self, run: u32) -> Result<()> {
        self.in_run(run).end()
    }

    fn end(&self) -> Result<()> {
        if !self.job.request.has_own_pool() {
            return Ok(());
        }
        let results = self.registry.results(&self.results_key());
        let here = results.join(format!("{}.up.json", self.node));
        // A run that other nodes have begun, and this one has not, is not this node's to end.
        if !self.dir().exists() && !here.exists() && registry::has_begun_in(&results) {
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
    pub(crate) fn save(self, run: u32) -> Result<()> {
        let mut this = self.in_run(run);
        this.saves = true;
        this.save_run()
    }

    fn save_run(&mut self) -> Result<()> {
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
            registry::write(&self.registry.make_results(&key)?.join(registry::OUT_FILE), &outcome)?;
            if outcome.kept.iter().any(|place| !place.starts_with('/')) {
                return Err(Error::new(Code::Io, what).why(outcome.why));
            }
        }
        clear(&self.dir()).map_err(|why| Error::new(Code::Io, format!("cannot clear {key}")).why(why))
    }

    /// Returns true if the pool has to stay, with data that are nowhere else.
    fn stage_out_or_wait(&self, results: &Path) -> Result<bool> {
        let out = results.join(registry::OUT_FILE);
        let waits_since = Instant::now();
        loop {
            if let Some(outcome) = registry::read::<Outcome>(&out, None)? {
                let pool = self.dir().display().to_string();
                return Ok(outcome.kept.iter().any(|place| place.ends_with(&format!(":{pool}"))));
            }
            if self.is_unwanted() {
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

    /// The places of a pool that has to stay up on all its nodes.
    fn everywhere(&self) -> Vec<String> {
        self.nodes.iter().map(|node| format!("{node}:{}", self.dir().display())).collect()
    }

    /// Whether the job's script can have begun. slurmd starts it on the first node, after the prolog there.
    fn may_have_begun(&self) -> bool {
        let first = self.nodes.first().unwrap_or(&self.node);
        let said = self.registry.results(&self.results_key()).join(format!("{first}.up.json"));
        registry::read::<Outcome>(&said, None).map_or(true, |up| up.is_some_and(|up| up.ok))
    }

    fn stage_out(&self) -> Outcome {
        let pool = self.pool();
        if !self.may_have_begun() {
            // There is nothing in it but what was staged in. The prolog has said why it failed.
            return Outcome { ok: true, ..Outcome::default() };
        }
        if !pool.exists() {
            let results = self.registry.results(&self.results_key());
            let was_here = results.join(format!("{}.up.json", self.node)).exists();
            return Outcome { ok: !was_here, why: "the pool is not there".to_owned(), ..Outcome::default() };
        }
        if let Err(dead) = partial::nodes_gone(&pool) {
            // Its supervisor was killed. A disk still has the data; a user's memory went with the process.
            if self.job.request.mode.as_deref() != Some("ssd") {
                let why = format!("{dead}; its data were in memory: mode=ssd keeps them");
                return Outcome { why, ..Outcome::default() };
            }
            if self.nodes.len() > 1 {
                let why = format!(
                    "{dead}; its data are on the nodes in {}: `forebay up --pool` on all of them, then `forebay stage-out`",
                    self.dir().display()
                );
                return Outcome { why, kept: self.everywhere(), ..Outcome::default() };
            }
            if self.is_outdated {
                outdated::take_mover_away(&pool);
            }
            if let Err(why) = self.start(&|| self.is_unwanted()) {
                let mut outcome = Outcome::default();
                if self.is_unwanted() {
                    outcome.why = why;
                    return outcome;
                }
                outcome.why = staging::stays(&pool, &why, &mut outcome.kept);
                return outcome;
            }
        }
        let turns = Turns { config: &self.config, registry: &self.registry, key: &self.job.key() };
        let (pairs, job) = (&self.job.request.stage_out, self.job.job);
        let keep_all = || {
            if self.job.request.backing.is_some() {
                turns.hold_back(&pool);
            }
            turns.keep_all(&pool, pairs, job)
        };
        let mut outcome = match self.is_outdated {
            true => keep_all(),
            false => turns.stage_out(&pool, pairs, job, &|| self.is_over()),
        };
        if self.has_become_outdated() {
            outcome = keep_all();
        }
        if let Some(url) = &self.job.request.backing {
            self.drain(&turns, url, &mut outcome);
        }
        outcome
    }

    /// Copies to the backing store what it lacks. What an outdated run has left is kept beside: it must not replace what the
    /// later run has read or written.
    fn drain(&self, turns: &Turns<'_>, url: &str, outcome: &mut Outcome) {
        let pool = self.pool();
        let is_outdated = || self.is_outdated || self.has_become_outdated();
        let is_over = || is_outdated() || self.is_unwanted();
        let mut done = Ok(());
        let mut pause = Duration::from_secs(self.config.stage_out_pause_s);
        for attempt in 1..=self.config.stage_out_tries.max(1) {
            if is_over() {
                break;
            }
            done = turns.drain(&pool, url, &is_over);
            if done.is_ok() || is_over() {
                break;
            }
            if attempt < self.config.stage_out_tries {
                std::thread::sleep(pause);
                pause *= 2;
            }
        }
        if is_outdated() {
            return turns.keep_lacking(&pool, url, self.job.job, outcome);
        }
        if self.is_unwanted() {
            return;
        }
        if let Err((why, lost)) =
            done.or_else(|why| turns.drain_without(&pool, url, why, &|| self.is_unwanted()))
        {
            outcome.ok = false;
            outcome.why = why;
            match lost {
                Some(names) => outcome.kept.push(names.display().to_string()),
                None => outcome.kept.extend(self.everywhere()),
            }
        }
    }
}

/// How often a pool is stopped before it is left to the next sweep.
const DOWN_TRIES: u32 = 5;
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
