//! The registry: files by which the controller and the nodes of jobs know of each other.
//!
//! ```text
//! jobs/JOB.json           a job's record                        SlurmUser writes, all read
//! pools/NAME.json         a persistent pool's record            SlurmUser
//! orders/NAME/KEY.json    what a persistent pool has to stage   SlurmUser
//! results/KEY/            what a job's nodes have done          the job's user
//! turns/                  who transfers from and to stores      users
//! hooks/JOB               locked while a hook works on a job,   SlurmUser
//!                         and since when it stages out
//! ```
//! KEY is `JOB.RUN`, or `p.NAME.SERIAL` for a persistent pool. Each file is written under another name, synced and
//! renamed, so a reader finds the old content or the new one. `results` and `turns` are like /tmp: everybody may
//! create names there, so a result counts only if the user of the job owns its directory.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forebay_types::{Code, Error, Result};
use serde::{Deserialize, Serialize};

use super::config::Config;
use super::directives::Request;

/// The file that says that node 0 of a persistent pool is alive.
pub(crate) const LEADER_FILE: &str = "leader";
/// Made by the first node whose prolog fails.
pub(crate) const FAILED_DIR: &str = "failed";
/// A result is a few lines; more is not read.
const FILE_MAX: u64 = 1 << 20;

/// How far a run has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum State {
    Setup,
    StagingIn,
    StagedIn,
    Running,
    StagingOut,
    /// Its data are out.
    Done,
    TornDown,
}

impl State {
    pub(crate) fn name(self) -> &'static str {
        match self {
            State::Setup => "set up",
            State::StagingIn => "staging in",
            State::StagedIn => "staged in",
            State::Running => "running",
            State::StagingOut => "staging out",
            State::Done => "staged out",
            State::TornDown => "torn down",
        }
    }
}

/// What came of the stage-out.
pub(crate) const OUT_FILE: &str = "out.json";

/// A job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) job: u32,
    /// From 0, one more each time it is requeued.
    pub(crate) run: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) request: Request,
    pub(crate) state: State,
    /// Torn down with `hurry`: what is not staged out is given up.
    pub(crate) hurry: bool,
    /// Why the run before could not start; the next stage-in reports it, so that Slurm holds the job.
    pub(crate) failed: Option<String>,
    pub(crate) changed_s: u64,
    /// When the last run ended that had its nodes.
    #[serde(default)]
    pub(crate) ended_s: Option<u64>,
    /// The key of the persistent pool that it uses.
    pub(crate) pool_key: Option<String>,
    /// Slurm's controller has lost a hook of this run, and `reconcile` has ended it.
    #[serde(default)]
    pub(crate) reconciled: bool,
    /// Why data of the run could not be staged out, if `reconcile` has ended it: Slurm has no place for it any more.
    #[serde(default)]
    pub(crate) unsaved: Option<String>,
    /// Why data_out failed, as Slurm was told.
    #[serde(default)]
    pub(crate) data_out_failed: Option<String>,
    /// The run before was not over when this one began: slurmctld had lost that it had started.
    #[serde(default)]
    pub(crate) is_second_start: bool,
}

impl Job {
    pub(crate) fn key(&self) -> String {
        format!("{}.{}", self.job, self.run)
    }

    /// Whether the job has ended in a run, or is in a later one.
    pub(crate) fn has_ended(&self, run: u32) -> bool {
        self.run != run || matches!(self.state, State::StagingOut | State::Done | State::TornDown)
    }

    /// Whether the job has started again without an end of this run, which may still be under way.
    pub(crate) fn follows(&self, run: u32) -> bool {
        self.run > run && self.is_second_start
    }

    /// Whether nobody wants any more what a run that is over has left in pools of its own.
    pub(crate) fn has_given_up(&self, run: u32) -> bool {
        self.hurry && self.run == run || !self.request.has_own_pool()
    }

    /// The name of its pool's directory on each node.
    pub(crate) fn pool_dir(&self, config: &Config) -> PathBuf {
        config.user_dir(self.uid).join(self.pool_key.clone().unwrap_or_else(|| self.key()))
    }
}

/// A persistent pool.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Pool {
    pub(crate) name: String,
    /// Tells it from earlier pools of the name.
    pub(crate) serial: u64,
    pub(crate) uid: u32,
    pub(crate) capacity_bytes: u64,
    /// The job that created it.
    pub(crate) creator: u32,
    /// The creator has ended, so Slurm does not count the space any more.
    pub(crate) outlives: bool,
    /// Jobs that use it.
    pub(crate) users: Vec<u32>,
    /// It ends as soon as no job uses it.
    pub(crate) ends: bool,
}

impl Pool {
    pub(crate) fn key(&self) -> String {
        format!("p.{}.{}", self.name, self.serial)
    }
}

/// What a persistent pool has to stage.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) key: String,
    pub(crate) job: u32,
    pub(crate) into_pool: bool,
    pub(crate) pairs: Vec<String>,
}

/// What came of something.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) ok: bool,
    #[serde(default)]
    pub(crate) why: String,
    /// Where data are that could not be staged out.
    #[serde(default)]
    pub(crate) kept: Vec<String>,
    /// All nodes of the job.
    #[serde(default)]
    pub(crate) nodes: Vec<String>,
}

/// The registry of a site.
#[derive(Clone, Debug)]
pub(crate) struct Registry {
    root: PathBuf,
}

pub(crate) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs())
}

impl Registry {
    pub(crate) fn of(config: &Config) -> Registry {
        Registry { root: config.registry.clone() }
    }

    /// Creates the directories. The controller calls it.
    pub(crate) fn prepare(&self) -> Result<()> {
        for (name, mode) in [
            ("", 0o755),
            ("jobs", 0o755),
            ("pools", 0o755),
            ("orders", 0o755),
            ("results", 0o1777),
            ("turns", 0o1777),
            ("hooks", 0o700),
        ] {
            let path = self.root.join(name);
            let what = || format!("cannot make {}", path.display());
            match DirBuilder::new().mode(mode).create(&path) {
                Ok(()) => {
                    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))
                        .map_err(|e| Error::io(what(), &e))?;
                    self.give(&path);
                }
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(e) => {
                    return Err(Error::io(what(), &e)
                        .cure("create it and give it to SlurmUser, as docs/slurm.md says"))
                }
            }
        }
        Ok(())
    }

    /// Excludes other hooks while records are read and written.
    pub(crate) fn lock(&self) -> Result<File> {
        let path = self.root.join("lock");
        let what = || format!("cannot lock {}", path.display());
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&path)
            .map_err(|e| Error::io(what(), &e))?;
        self.give(&path);
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)
            .map_err(|e| Error::io(what(), &e.into()))?;
        Ok(file)
    }

    /// The file that says who works on a job. It is made if there is none.
    fn hook_file(&self, job: u32) -> Result<File> {
        let path = self.root.join(format!("hooks/{job}"));
        // NFS locks a file shared only if it can be read, and alone only if it can be written.
        let opened =
            OpenOptions::new().create(true).truncate(false).read(true).write(true).mode(0o600).open(&path);
        let file = opened.map_err(|e| Error::io(format!("cannot lock {}", path.display()), &e))?;
        self.give(&path);
        Ok(file)
    }

    /// What root makes here belongs to SlurmUser, as the registry does: its hooks have to open it.
    fn give(&self, path: &Path) {
        if rustix::process::geteuid().is_root() {
            if let Ok(owner) = std::fs::metadata(&self.root) {
                let _ = std::os::unix::fs::chown(path, Some(owner.uid()), Some(owner.gid()));
            }
        }
    }

    /// Says that a hook works on a job, until the result is dropped or its process ends in any way.
    pub(crate) fn works_on(&self, job: u32) -> Result<File> {
        let file = self.hook_file(job)?;
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockShared)
            .map_err(|e| Error::io(format!("cannot lock the record of job {job}"), &e.into()))?;
        Ok(file)
    }

    /// The same, if nothing else works on it.
    pub(crate) fn works_alone_on(&self, job: u32) -> Result<Option<File>> {
        let file = self.hook_file(job)?;
        let locked = rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        Ok(locked.is_ok().then_some(file))
    }

    /// When Slurm was last asked for a job; `None` if it was not.
    pub(crate) fn asked_s_ago(&self, job: u32) -> Option<u64> {
        let at = std::fs::metadata(self.root.join(format!("hooks/{job}"))).and_then(|m| m.modified()).ok()?;
        Some(SystemTime::now().duration_since(at).unwrap_or_default().as_secs())
    }

    /// Slurm is asked for a job now.
    pub(crate) fn asks_for(&self, job: u32) -> Result<()> {
        let set = self.hook_file(job)?.set_modified(SystemTime::now());
        set.map_err(|e| Error::io(format!("cannot note that Slurm was asked for job {job}"), &e))
    }

    /// Slurm shows a job as staging out now. For how long it is known to have done so while its record has not changed,
    /// in seconds.
    pub(crate) fn stages_out_for(&self, job: &Job) -> Result<u64> {
        let failed = |e| Error::io(format!("cannot note that job {} stages out", job.job), &e);
        let mut file = self.hook_file(job.job)?;
        if let Some(since) = seen_to_stage_out_since(&file, job) {
            return Ok(now_s().saturating_sub(since));
        }
        file.set_len(0).and_then(|()| file.rewind()).map_err(failed)?;
        file.write_all(format!("{} {} {}\n", job.run, job.changed_s, now_s()).as_bytes()).map_err(failed)?;
        Ok(0)
    }

    /// Whether Slurm has shown a job as staging out since its record last changed.
    pub(crate) fn is_seen_to_stage_out(&self, job: &Job) -> bool {
        let path = self.root.join(format!("hooks/{}", job.job));
        let is_noted = std::fs::metadata(&path).is_ok_and(|meta| meta.len() > 0);
        is_noted && File::open(path).is_ok_and(|file| seen_to_stage_out_since(&file, job).is_some())
    }

    /// Slurm does not show a job as staging out any more.
    pub(crate) fn stages_out_no_more(&self, job: u32) {
        let _ = self.hook_file(job).and_then(|file| {
            file.set_len(0).map_err(|e| Error::io(format!("cannot write about the hooks of job {job}"), &e))
        });
    }

    fn job_path(&self, job: u32) -> PathBuf {
        self.root.join(format!("jobs/{job}.json"))
    }

    pub(crate) fn job(&self, job: u32) -> Result<Option<Job>> {
        read(&self.job_path(job), None)
    }

    pub(crate) fn put_job(&self, job: &Job) -> Result<()> {
        write(&self.job_path(job.job), job)
    }

    pub(crate) fn forget_job(&self, job: u32) {
        let _ = std::fs::remove_file(self.job_path(job));
        let _ = std::fs::remove_file(self.root.join(format!("hooks/{job}")));
    }

    pub(crate) fn jobs(&self) -> Vec<Job> {
        let mut jobs: Vec<Job> = all(&self.root.join("jobs"));
        jobs.sort_by_key(|job| job.job);
        jobs
    }

    fn pool_path(&self, name: &str) -> PathBuf {
        self.root.join(format!("pools/{name}.json"))
    }

    pub(crate) fn pool(&self, name: &str) -> Result<Option<Pool>> {
        read(&self.pool_path(name), None)
    }

    pub(crate) fn put_pool(&self, pool: &Pool) -> Result<()> {
        write(&self.pool_path(&pool.name), pool)
    }

    pub(crate) fn forget_pool(&self, name: &str) {
        let _ = std::fs::remove_file(self.pool_path(name));
        let _ = std::fs::remove_dir_all(self.root.join("orders").join(name));
    }

    pub(crate) fn pools(&self) -> Vec<Pool> {
        let mut pools: Vec<Pool> = all(&self.root.join("pools"));
        pools.sort_by(|a, b| a.name.cmp(&b.name));
        pools
    }

    /// Whether a job uses a pool, by its own record. It is `true` if that cannot be read.
    pub(crate) fn uses(&self, pool: &Pool, job: u32) -> bool {
        let uses = |job: Job| job.state != State::TornDown && job.pool_key == Some(pool.key());
        self.job(job).map_or(true, |record| record.is_some_and(uses))
    }

    fn order_path(&self, pool: &str, key: &str) -> PathBuf {
        self.root.join(format!("orders/{pool}/{key}.json"))
    }

    pub(crate) fn put_order(&self, pool: &str, order: &Order) -> Result<()> {
        let dir = self.root.join("orders").join(pool);
        match DirBuilder::new().mode(0o755).create(&dir) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(Error::io(format!("cannot make {}", dir.display()), &e))
            }
            _ => {}
        }
        write(&self.order_path(pool, &order.key), order)
    }

    pub(crate) fn forget_order(&self, pool: &str, key: &str) {
        let _ = std::fs::remove_file(self.order_path(pool, key));
    }

    pub(crate) fn has_order(&self, pool: &str, key: &str) -> bool {
        self.order_path(pool, key).exists()
    }

    pub(crate) fn orders(&self, pool: &str) -> Vec<Order> {
        all(&self.root.join("orders").join(pool))
    }

    pub(crate) fn results(&self, key: &str) -> PathBuf {
        self.root.join("results").join(key)
    }

    pub(crate) fn turns(&self) -> PathBuf {
        self.root.join("turns")
    }

    /// A result that the user `uid` wrote.
    ///
    /// # Errors
    /// A directory or file that another user owns.
    pub(crate) fn result(&self, key: &str, uid: u32, name: &str) -> Result<Option<Outcome>> {
        let dir = self.results(key);
        if !owned(&dir, uid)? {
            return Ok(None);
        }
        read(&dir.join(name), Some(uid))
    }

    /// How long ago the user's processes last changed anything there. `None`: there is nothing.
    pub(crate) fn silent_for(&self, key: &str, uid: u32, name: &str) -> Result<Option<Duration>> {
        let dir = self.results(key);
        if !owned(&dir, uid)? {
            return Ok(None);
        }
        let path = if name.is_empty() { dir } else { dir.join(name) };
        let changed = std::fs::symlink_metadata(path).and_then(|m| m.modified()).ok();
        Ok(changed.map(|at| SystemTime::now().duration_since(at).unwrap_or_default()))
    }

    /// Whether a file among a pool's results was written after the pool's record, which each claim of a job rewrites.
    pub(crate) fn is_newer_than_record(&self, pool: &Pool, name: &str) -> bool {
        let changed = |path: PathBuf| std::fs::symlink_metadata(path).and_then(|m| m.modified()).ok();
        let file = changed(self.results(&pool.key()).join(name));
        file.zip(changed(self.pool_path(&pool.name))).is_some_and(|(file, record)| file > record)
    }

    /// Whether a node has begun a run whose end was not told.
    pub(crate) fn is_running(&self, key: &str) -> bool {
        let results = self.results(key);
        has_begun_in(&results) && !results.join(OUT_FILE).exists()
    }

    /// Makes this user's directory of results.
    pub(crate) fn make_results(&self, key: &str) -> Result<PathBuf> {
        let dir = self.results(key);
        let what = || format!("cannot make {}", dir.display());
        match DirBuilder::new().mode(0o755).create(&dir) {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                owned(&dir, rustix::process::geteuid().as_raw())?;
            }
            Err(e) => {
                return Err(Error::io(what(), &e).cure("has slurmctld made the registry? docs/slurm.md"))
            }
        }
        Ok(dir)
    }

    /// The nodes of a persistent pool whose stewards have left a sign.
    pub(crate) fn stewards(&self, key: &str) -> Vec<String> {
        let names = std::fs::read_dir(self.results(key)).into_iter().flatten().flatten();
        let mut nodes: Vec<String> =
            names.filter_map(|e| Some(e.file_name().to_str()?.strip_suffix(".alive")?.to_owned())).collect();
        nodes.sort();
        nodes
    }

    /// Removes the results of runs that were torn down, except of those whose data are still in a pool: one that stays up,
    /// or that of a node that was lost before its epilog. What that node has is saved by its results.
    pub(crate) fn forget_old_results(&self, except: Option<&str>) {
        for entry in std::fs::read_dir(self.results("")).into_iter().flatten().flatten() {
            let Ok(key) = entry.file_name().into_string() else { continue };
            let run = key
                .split_once('.')
                .and_then(|(job, run)| Some((job.parse().ok()?, run.parse::<u32>().ok()?)));
            let (Some((job, run)), Ok(stat)) = (run, entry.metadata()) else { continue };
            let Ok(record) = self.job(job) else { continue };
            let is_live = record.as_ref().is_some_and(|r| r.run == run && r.state != State::TornDown);
            let is_kept = match self.result(&key, stat.uid(), "out.json") {
                Ok(Some(outcome)) => outcome.kept.iter().any(|place| !place.starts_with('/')),
                Ok(None) => record.is_some_and(|r| !r.has_given_up(run)) && self.has_begun(&key),
                Err(_) => true,
            };
            if !is_live && !is_kept && except != Some(&*key) {
                self.forget_results(&key);
            }
        }
    }

    /// Whether the nodes of a run have said that its pool is up.
    fn has_begun(&self, key: &str) -> bool {
        let dir = self.results(key);
        let mut names = std::fs::read_dir(&dir).into_iter().flatten().flatten();
        names.any(|entry| entry.file_name().to_str().is_some_and(|name| name.ends_with(".up.json")))
            && !dir.join(FAILED_DIR).exists()
    }

    /// What is still in pools that stayed up, as their data could be copied nowhere: the run, the user, and the places,
    /// each a node and its directory.
    pub(crate) fn kept_in_pools(&self) -> Vec<(String, u32, Vec<String>)> {
        let names = std::fs::read_dir(self.results("")).into_iter().flatten().flatten();
        let mut kept: Vec<(String, u32, Vec<String>)> = names
            .filter_map(|entry| {
                let (key, uid) = (entry.file_name().into_string().ok()?, entry.metadata().ok()?.uid());
                let outcome = self.result(&key, uid, "out.json").ok()??;
                let places: Vec<String> =
                    outcome.kept.into_iter().filter(|place| !place.starts_with('/')).collect();
                (!places.is_empty()).then_some((key, uid, places))
            })
            .collect();
        kept.sort();
        kept
    }

    /// Removes results, where this user may.
    pub(crate) fn forget_results(&self, key: &str) {
        let _ = std::fs::remove_dir_all(self.results(key));
    }
}

/// Whether the directory is there. Refuses that of another user than `uid`.
fn owned(dir: &Path, uid: u32) -> Result<bool> {
    match std::fs::symlink_metadata(dir) {
        Ok(stat) if stat.is_dir() && stat.uid() == uid => Ok(true),
        Ok(stat) => Err(Error::new(Code::AccessDenied, format!("cannot use {}", dir.display()))
            .why(format!("user {} made it, but it is for user {uid}", stat.uid()))
            .cure("an administrator has to remove it")),
        Err(_) => Ok(false),
    }
}

fn all<T: for<'a> Deserialize<'a>>(dir: &Path) -> Vec<T> {
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten();
    names
        .filter(|entry| entry.path().extension().is_some_and(|e| e == "json"))
        .filter_map(|entry| read(&entry.path(), None).ok().flatten())
        .collect()
}

/// Reads a file, of the user `uid` if given; `None` if there is none.
pub(crate) fn read<T: for<'a> Deserialize<'a>>(path: &Path, uid: Option<u32>) -> Result<Option<T>> {
    let what = || format!("cannot read {}", path.display());
    // A link or a FIFO of a user must not lead this process elsewhere, or keep it.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
    let file = match opened {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(what(), &e)),
    };
    let stat = file.metadata().map_err(|e| Error::io(what(), &e))?;
    if !stat.is_file() || uid.is_some_and(|uid| uid != stat.uid()) {
        return Err(Error::new(Code::AccessDenied, what()).why("it is not a file of the job's user"));
    }
    let mut text = Vec::new();
    file.take(FILE_MAX).read_to_end(&mut text).map_err(|e| Error::io(what(), &e))?;
    let value = serde_json::from_slice(&text)
        .map_err(|e| Error::new(Code::Corrupt, what()).why(e).cure("an administrator has to remove it"))?;
    Ok(Some(value))
}

/// Writes a file atomically.
pub(crate) fn write(path: &Path, value: &impl Serialize) -> Result<()> {
    let what = || format!("cannot write {}", path.display());
    let text = serde_json::to_vec(value).map_err(|e| Error::new(Code::Invalid, what()).why(e))?;
    let new = path.with_extension(format!("{}.new", std::process::id()));
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o644)
        .open(&new)
        .map_err(|e| Error::io(what(), &e))?;
    file.write_all(&text).and_then(|()| file.sync_all()).map_err(|e| Error::io(what(), &e))?;
    std::fs::rename(&new, path).map_err(|e| Error::io(what(), &e))
}

/// Whether a node's prolog has ended in the run of these results.
pub(crate) fn has_begun_in(results: &Path) -> bool {
    let names = std::fs::read_dir(results).into_iter().flatten().flatten();
    names.into_iter().any(|entry| entry.file_name().to_str().is_some_and(|name| name.ends_with(".up.json")))
}

/// Since when a job with this record was seen to stage out, as the file of its hooks says.
fn seen_to_stage_out_since(file: &File, job: &Job) -> Option<u64> {
    let mut text = String::new();
    // What is not of this program counts as nothing.
    Read::take(file, FILE_MAX).read_to_string(&mut text).ok()?;
    text.strip_prefix(&format!("{} {} ", job.run, job.changed_s))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registry(name: &str) -> Registry {
        let root = std::env::temp_dir().join(format!("forebay-registry-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        Registry { root }
    }

    #[test]
    fn records_survive_and_are_listed_in_order() {
        let registry = registry("records");
        registry.prepare().unwrap();
        registry.prepare().unwrap();
        let job = |id| Job {
            job: id,
            run: 1,
            uid: 7,
            gid: 7,
            request: Request::default(),
            state: State::Setup,
            hurry: false,
            failed: None,
            changed_s: 0,
            ended_s: None,
            pool_key: None,
            reconciled: false,
            unsaved: None,
            data_out_failed: None,
            is_second_start: false,
        };
        registry.put_job(&job(12)).unwrap();
        registry.put_job(&job(3)).unwrap();
        assert_eq!(registry.jobs().iter().map(Job::key).collect::<Vec<_>>(), ["3.1", "12.1"]);
        registry.forget_job(3);
        assert!(registry.job(3).unwrap().is_none());
        assert_eq!(registry.job(12).unwrap().unwrap().state, State::Setup);
        std::fs::write(registry.job_path(12), "half").unwrap();
        assert_eq!(registry.job(12).unwrap_err().code, Code::Corrupt);
        std::fs::remove_dir_all(&registry.root).unwrap();
    }

    #[test]
    fn result_of_another_user_a_link_and_a_fifo_are_refused() {
        let registry = registry("results");
        registry.prepare().unwrap();
        let me = rustix::process::geteuid().as_raw();
        assert!(registry.result("1.0", me, "out.json").unwrap().is_none(), "there is none yet");
        let dir = registry.make_results("1.0").unwrap();
        write(&dir.join("out.json"), &Outcome { ok: true, ..Outcome::default() }).unwrap();
        assert!(registry.result("1.0", me, "out.json").unwrap().unwrap().ok);
        assert_eq!(registry.result("1.0", me + 1, "out.json").unwrap_err().code, Code::AccessDenied);
        std::os::unix::fs::symlink(dir.join("out.json"), dir.join("link.json")).unwrap();
        assert!(registry.result("1.0", me, "link.json").is_err());
        rustix::fs::mknodat(
            rustix::fs::CWD,
            dir.join("fifo.json"),
            rustix::fs::FileType::Fifo,
            0o600.into(),
            0,
        )
        .unwrap();
        assert_eq!(registry.result("1.0", me, "fifo.json").unwrap_err().code, Code::AccessDenied);
        std::fs::remove_dir_all(&registry.root).unwrap();
    }
}
