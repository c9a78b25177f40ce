//! Slurmd's prolog and epilog: root makes the user's directory and runs everything else as the user.
//!
//! A job without a record costs one look for a file. The prolog never fails because of a user's mistake, as Slurm would
//! drain the node: it requeues the job, and the next stage-in on the controller reports the reason and holds it.

use std::ffi::CString;
use std::fs::{DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use forebay_types::{Code, Error, Result};
use rustix::fs::{flock, FlockOperation};

use super::command;
use super::config::{self, Config};
use super::registry::{Job, Registry, State};

/// How long the controller takes at most to have a node end a job.
const ORDER_ARRIVES: Duration = Duration::from_secs(3);

/// The user of a job.
struct User {
    uid: u32,
    gid: u32,
    name: String,
    home: String,
    groups: Vec<libc::gid_t>,
}

impl User {
    fn of(job: &Job) -> Result<User> {
        let what = || format!("cannot become user {} of job {}", job.uid, job.job);
        let mut entry = std::mem::MaybeUninit::<libc::passwd>::uninit();
        let mut buffer = vec![0; 1 << 14];
        let mut found = std::ptr::null_mut();
        // SAFETY: all pointers are to this function's own memory, with its true length.
        let failed = unsafe {
            libc::getpwuid_r(job.uid, entry.as_mut_ptr(), buffer.as_mut_ptr(), buffer.len(), &mut found)
        };
        if failed != 0 || found.is_null() {
            return Err(Error::new(Code::NotFound, what()).why("this node does not know the user"));
        }
        // SAFETY: getpwuid_r has filled the entry, whose strings are in `buffer`.
        let (name, home) = unsafe {
            let entry = entry.assume_init();
            let text = |p| std::ffi::CStr::from_ptr(p).to_string_lossy().into_owned();
            (text(entry.pw_name), text(entry.pw_dir))
        };
        let c_name = CString::new(name.clone()).map_err(|e| Error::new(Code::Invalid, what()).why(e))?;
        let mut groups = vec![0; 1 << 12];
        let mut count = groups.len() as libc::c_int;
        // SAFETY: the array has `count` elements.
        if unsafe { libc::getgrouplist(c_name.as_ptr(), job.gid, groups.as_mut_ptr(), &mut count) } < 0 {
            return Err(Error::new(Code::TooBig, what()).why("the user is in too many groups"));
        }
        groups.truncate(count as usize);
        Ok(User { uid: job.uid, gid: job.gid, name, home, groups })
    }

    /// Runs this program as the user.
    fn run(&self, words: &[&str]) -> std::result::Result<(), String> {
        let mut command = command::own(words)?;
        command.env_clear();
        for name in [
            config::VARIABLE,
            "SLURMD_NODENAME",
            "SLURM_NODELIST",
            "SLURM_JOB_NODELIST",
            "SLURM_JOB_ID",
            "SLURM_CONF",
            "SLURM_JOB_NUM_NODES",
        ] {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        command.env("PATH", "/usr/local/bin:/usr/bin:/bin").env("HOME", &self.home).env("USER", &self.name);
        command.current_dir("/").stdout(Stdio::null()).stderr(Stdio::inherit());
        let (uid, gid, groups) = (self.uid, self.gid, self.groups.clone());
        // SAFETY: between fork and exec only plain system calls are made, on memory of before the fork.
        unsafe {
            command.pre_exec(move || {
                if libc::setgroups(groups.len(), groups.as_ptr()) != 0
                    || libc::setresgid(gid, gid, gid) != 0
                    || libc::setresuid(uid, uid, uid) != 0
                {
                    return Err(std::io::Error::last_os_error());
                }
                libc::umask(0o022);
                Ok(())
            });
        }
        let status = command.status().map_err(|e| e.to_string())?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("{words:?} ended with {status}"))
        }
    }
}

/// The job of this prolog or epilog; `None` if it has no burst buffer.
fn job_here(registry: &Registry) -> Result<Option<Job>> {
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u32>().ok());
    let Some(id) = number("SLURM_JOB_ID") else {
        return Err(crate::failure::invalid(
            "cannot tell which job it is",
            "SLURM_JOB_ID is not set",
            "slurmd's prolog and epilog call this",
        ));
    };
    let job = registry.job(id)?;
    match job {
        Some(job) if number("SLURM_JOB_UID").is_some_and(|uid| uid != job.uid) => {
            Err(Error::new(Code::AccessDenied, format!("cannot use the record of job {id}"))
                .why("it is another user's"))
        }
        job => Ok(job),
    }
}

/// Makes the directory in which a user's pools on this node are. While the result lives, it is not removed.
fn make_user_dir(config: &Config, user: &User) -> Result<File> {
    let dir = config.user_dir(user.uid);
    let what = || format!("cannot make {}", dir.display());
    let failed = |e: &std::io::Error| Error::io(what(), e);
    DirBuilder::new().recursive(true).mode(0o755).create(&config.node_dir).map_err(|e| failed(&e))?;
    let above = std::fs::symlink_metadata(&config.node_dir).map_err(|e| failed(&e))?;
    if !above.is_dir() || above.uid() != rustix::process::geteuid().as_raw() || above.mode() & 0o022 != 0 {
        return Err(Error::new(Code::AccessDenied, what())
            .why(format!("others may write in {}", config.node_dir.display()))
            .cure("remove it; the next prolog makes it"));
    }
    let held = File::open(&config.node_dir).map_err(|e| failed(&e))?;
    flock(&held, FlockOperation::LockShared).map_err(|e| failed(&e.into()))?;
    match DirBuilder::new().mode(0o700).create(&dir) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(failed(&e)),
        _ => {}
    }
    // Also one that is there: the prolog of another job of this user may just have made it.
    std::os::unix::fs::chown(&dir, Some(user.uid), Some(user.gid)).map_err(|e| failed(&e))?;
    Ok(held)
}

/// Removes a user's directory if it is empty and no prolog is about to use one. What stays is removed by the next sweep.
fn remove_user_dir(config: &Config, dir: &Path) {
    let Ok(above) = File::open(&config.node_dir) else { return };
    if flock(&above, FlockOperation::NonBlockingLockExclusive).is_ok() {
        let _ = std::fs::remove_dir(dir);
    }
}

/// `forebay bb prolog`.
pub(crate) fn prolog() -> Result<ExitCode> {
    let config = Config::read()?;
    let registry = Registry::of(&config);
    let Some(job) = job_here(&registry)? else { return Ok(ExitCode::SUCCESS) };
    sweep(&config, &registry, Some(&job));
    let user = User::of(&job)?;
    let _held = make_user_dir(&config, &user)?;
    let id = job.job.to_string();
    if let Err(why) = user.run(&["bb", "node-up", &id]) {
        note!("forebay: job {id}: {why}");
        // A job that was cancelled meanwhile would come back.
        let has_ended = |now: Option<Job>| now.is_none_or(|now| now.has_ended(job.run));
        if !registry.job(job.job).is_ok_and(has_ended) {
            requeue(&id);
        }
        // The controller's order to end the job has to be here before slurmd starts its script.
        std::thread::sleep(ORDER_ARRIVES);
    }
    Ok(ExitCode::SUCCESS)
}

/// Has Slurm take the job back. One with --no-requeue may be, once, as its script has not begun.
fn requeue(job: &str) {
    let scontrol = |program: &str, words: &[&str]| {
        let done = Command::new("timeout").args(["20", program]).args(words).stdin(Stdio::null()).output();
        done.is_ok_and(|output| output.status.success())
    };
    let (record, requeue) = (format!("JobId={job}"), ["requeue", job]);
    if scontrol("scontrol", &requeue) {
        return;
    }
    let may = scontrol("scontrol", &["update", &record, "Requeue=1"]) && scontrol("scontrol", &requeue);
    scontrol("scontrol", &["update", &record, "Requeue=0"]);
    if !may {
        scontrol("scancel", &[job]);
    }
}

/// The run that ends on this node. It is one before that of the record if slurmctld was killed just after it had started
/// the job, has started it again, and now learns that it runs here.
fn run_here(config: &Config, job: &Job) -> u32 {
    let dir = config.user_dir(job.uid);
    let has = |run: &u32| dir.join(format!("{}.{run}", job.job)).exists();
    (0..=job.run).rev().find(has).unwrap_or(job.run)
}

/// `forebay bb epilog`.
pub(crate) fn epilog() -> Result<ExitCode> {
    let config = Config::read()?;
    let registry = Registry::of(&config);
    let Some(job) = job_here(&registry)? else { return Ok(ExitCode::SUCCESS) };
    let user = User::of(&job)?;
    let (id, run) = (job.job.to_string(), run_here(&config, &job).to_string());
    if let Err(why) = user.run(&["bb", "node-down", &id, &run]) {
        note!("forebay: job {id}: {why}");
    }
    sweep(&config, &registry, Some(&job));
    remove_user_dir(&config, &config.user_dir(job.uid));
    Ok(ExitCode::SUCCESS)
}

/// `forebay bb sweep`: removes what jobs have left here that ended without an epilog.
pub(crate) fn sweep_all() -> Result<ExitCode> {
    let config = Config::read()?;
    sweep(&config, &Registry::of(&config), None);
    Ok(ExitCode::SUCCESS)
}

fn sweep(config: &Config, registry: &Registry, current: Option<&Job>) {
    for entry in std::fs::read_dir(&config.node_dir).into_iter().flatten().flatten() {
        let Some(uid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        for pool in std::fs::read_dir(entry.path()).into_iter().flatten().flatten() {
            let Some(key) = pool.file_name().to_str().map(str::to_owned) else { continue };
            if current.is_some_and(|job| key.starts_with(&format!("{}.", job.job))) {
                continue;
            }
            let Some((job, run)) =
                key.split_once('.').and_then(|(j, r)| Some((j.parse().ok()?, r.parse::<u32>().ok()?)))
            else {
                continue;
            };
            let record = match registry.job(job) {
                Ok(record) => record,
                Err(_) => continue,
            };
            let is_live = record.as_ref().is_some_and(|r| {
                r.state != State::TornDown && (r.run == run || r.follows(run) && registry.is_running(&key))
            });
            if is_live || is_kept(registry, &key, uid, &pool.path()) {
                continue;
            }
            let owner = Job {
                job,
                run,
                uid,
                gid: std::fs::metadata(entry.path()).map_or(uid, |m| m.gid()),
                request: Default::default(),
                state: State::TornDown,
                hurry: true,
                failed: None,
                changed_s: 0,
                ended_s: None,
                pool_key: None,
                reconciled: false,
                unsaved: None,
                data_out_failed: None,
                is_second_start: false,
            };
            // The node was lost before the job's epilog ran here, and nobody has given the data up.
            let has_result = !matches!(registry.result(&key, uid, super::registry::OUT_FILE), Ok(None));
            let was_given_up = record.as_ref().is_none_or(|r| r.has_given_up(run));
            let (job, run) = (job.to_string(), run.to_string());
            let words = match has_result || was_given_up {
                true => vec!["bb", "clear", &*key],
                false => vec!["bb", "save", &*job, &*run],
            };
            if let Ok(user) = User::of(&owner) {
                if let Err(why) = user.run(&words) {
                    note!("forebay: {}: {why}", pool.path().display());
                }
            }
        }
        remove_user_dir(config, &entry.path());
    }
    registry.forget_old_results(current.map(Job::key).as_deref());
}

/// Whether the pool has data that could not be staged out and are nowhere else.
fn is_kept(registry: &Registry, key: &str, uid: u32, pool: &Path) -> bool {
    let outcome = registry.result(key, uid, super::registry::OUT_FILE).ok().flatten();
    outcome.is_some_and(|o| o.kept.iter().any(|place| place.ends_with(&format!(":{}", pool.display()))))
}
