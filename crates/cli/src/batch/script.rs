//! `forebay job`: a pool for a batch script of any scheduler.
//!
//! ```text
//! begin  starts a pool over the job's nodes, stages in, and prints shell code: variables, traps, and the watcher
//! end    stages out and stops the pool; the trap calls it
//! watch  waits for the end of the shell, however it ends, and then does what `end` has not done
//! ```
//! They exclude each other by a lock on the job's file, which exists as long as there is something to do.

use std::ffi::OsString;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_server::launch::{self, DownOptions, Presence};
use forebay_types::{Error, Result};
use rustix::fs::FlockOperation;
use rustix::process::{pidfd_open, Pid, PidfdFlags};
use serde::{Deserialize, Serialize};

use super::command::{self, forebay};
use crate::{failure, hosts, staging};

/// Names the directory of the job for `end` and `watch`.
pub(crate) const VARIABLE: &str = "FOREBAY_JOB_DIR";
const FILE: &str = "job.json";
/// How long it is waited for a pool that is starting or stopping.
const CHANGING_GRACE: Duration = Duration::from_secs(30);

/// What a script asks for.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Asked {
    pub(crate) capacity: Option<String>,
    pub(crate) media: Option<String>,
    pub(crate) backing: Option<String>,
    pub(crate) policy: Option<String>,
    pub(crate) stage_in: Vec<String>,
    pub(crate) stage_out: Vec<String>,
    /// A list of hosts; empty: found in the environment.
    pub(crate) hosts: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    pool: PathBuf,
    hosts: Vec<String>,
    stage_out: Vec<String>,
    /// The store that the pool is in front of.
    #[serde(default)]
    backing: Option<String>,
    /// Another one at each begin: a job may begin again under the same number, and what the shell of the first one still
    /// does concerns the first one alone.
    #[serde(default)]
    nonce: String,
}

fn new_nonce() -> Result<String> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::io("cannot begin a job", &e.into()))?;
    Ok(format!("{:032x}", u128::from_le_bytes(bytes)))
}

/// The job's name and hosts, as its scheduler gives them. `read`: the text of a file.
fn found(
    get: impl Fn(&str) -> Option<String>,
    read: impl Fn(&str) -> Option<String>,
) -> (String, Vec<String>) {
    let get = |name: &str| get(name).filter(|v| !v.is_empty());
    let names =
        ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID", "OAR_JOB_ID", "JOB_ID"];
    let id = names.iter().find_map(|name| get(name)).unwrap_or_else(|| std::process::id().to_string());
    let id: String =
        id.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' }).collect();
    let list = |name: &str| get(name).and_then(|list| hosts::expand(&list).ok());
    // Files name a host once for each of its slots, with more words behind it.
    let file = |name: &str| {
        let text = read(&get(name)?)?;
        let first = text.lines().filter_map(|line| line.split('#').next()?.split_whitespace().next());
        Some(first.map(|host| host.split(':').next().unwrap_or(host).to_owned()).collect::<Vec<_>>())
    };
    // LSF: host and number of slots in turn.
    let pairs =
        |name: &str| Some(get(name)?.split_whitespace().step_by(2).map(str::to_owned).collect::<Vec<_>>());
    let hosts = list("SLURM_JOB_NODELIST")
        .or_else(|| file("PBS_NODEFILE"))
        .or_else(|| file("LSB_DJOB_HOSTFILE"))
        .or_else(|| pairs("LSB_MCPU_HOSTS"))
        .or_else(|| list("FOREBAY_HOSTS"))
        .or_else(|| file("FOREBAY_HOSTFILE"))
        .or_else(|| file("OAR_NODEFILE"))
        .or_else(|| file("PE_HOSTFILE"))
        .or_else(|| file("COBALT_NODEFILE"));
    let mut unique: Vec<String> = Vec::new();
    for host in hosts.unwrap_or_default() {
        if !unique.contains(&host) {
            unique.push(host);
        }
    }
    (id, unique)
}

/// Flux has the hosts of a job in its resource set, which its command prints.
fn of_flux() -> Vec<String> {
    if std::env::var_os("FLUX_JOB_ID").is_none() {
        return Vec::new();
    }
    let output =
        std::process::Command::new("flux").args(["resource", "list", "-n", "-o", "{nodelist}"]).output();
    let text =
        output.ok().filter(|o| o.status.success()).map(|o| String::from_utf8_lossy(&o.stdout).into_owned());
    let line =
        text.as_deref().and_then(|t| t.lines().find(|line| !line.trim().is_empty())).unwrap_or("").to_owned();
    hosts::expand(line.trim()).unwrap_or_default()
}

fn failed(what: &str, why: String) -> Error {
    Error::new(forebay_types::Code::Io, what).why(why)
}

/// Starts the pool and stages in. Returns the shell code.
pub(crate) fn begin(asked: &Asked) -> Result<String> {
    // What is wrong is said now, and not when the results are there. The script may change its working directory.
    let stage_in: Vec<OsString> = asked.stage_in.iter().map(OsString::from).collect();
    staging::pairs_in(&stage_in, None)?;
    let stage_out =
        asked.stage_out.iter().map(|pair| Ok(staging::anchored_out(pair)?.1)).collect::<Result<_>>()?;
    let (id, mut all) = found(|name| std::env::var(name).ok(), |path| std::fs::read_to_string(path).ok());
    if !asked.hosts.is_empty() {
        all = hosts::expand(&asked.hosts)?;
    } else if all.is_empty() {
        all = of_flux();
    }
    let base = forebay_server::directory::default_pool()?;
    let dir = base.parent().unwrap_or(&base).join(format!("job-{id}"));
    // On other hosts nothing removes a directory around it.
    let pool = dir.with_file_name(format!("job-{id}.pool"));
    let this = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let alone = all.len() <= 1
        && all
            .iter()
            .all(|host| *host == this || host == "localhost" || this.starts_with(&format!("{host}.")));
    let record = Record {
        pool: pool.clone(),
        hosts: if alone { Vec::new() } else { all },
        stage_out,
        backing: asked.backing.clone(),
        nonce: new_nonce()?,
    };
    let file = dir.join(FILE);
    let _lock = claim(&id, &file, &record)?;
    // A pool that cannot start leaves no node up, so there is nothing to stop.
    if let Err(e) = start(asked, &record) {
        let _ = std::fs::remove_dir_all(&dir);
        return Err(e);
    }
    if let Err(e) = fill(asked, &record) {
        let _ = finish(&file, &record, false);
        return Err(e);
    }
    let program = std::env::current_exe().map_err(|e| Error::io("cannot find this program", &e))?;
    let program = quoted(&program.display().to_string());
    let nonce = &record.nonce;
    Ok(format!(
        "export {VARIABLE}={}\nexport FOREBAY_POOL={}\nexport FOREBAY_PREFIX={}\n\
         trap '{}' EXIT\ntrap 'exit 129' HUP\ntrap 'exit 130' INT\ntrap 'exit 143' TERM\n\
         {program} job watch --nonce {nonce} $$ </dev/null >/dev/null 2>&1 &\n",
        quoted(&dir.display().to_string()),
        quoted(&pool.display().to_string()),
        crate::pool::DEFAULT_PREFIX,
        format!("{program} job end --nonce {nonce}").replace('\'', "'\\''"),
    ))
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

fn start(asked: &Asked, record: &Record) -> Result<()> {
    let list = record.hosts.join(",");
    let path = record.pool.display().to_string();
    let mut words = vec!["up", "--path", &path];
    for (option, value) in [("--capacity", &asked.capacity), ("--media", &asked.media)] {
        if let Some(value) = value {
            words.extend([option, value]);
        }
    }
    if !list.is_empty() {
        words.extend(["--hosts", &list]);
    } else {
        words.push("--background");
    }
    let whole = "cannot start the job's pool";
    let mut command = command::own(&words).map_err(|why| failed(whole, why))?;
    command.env_remove("FOREBAY_POOL");
    command::finish(command, || false).map_err(|why| failed(whole, why))
}

/// Attaches the store and stages in.
fn fill(asked: &Asked, record: &Record) -> Result<()> {
    if let Some(url) = &asked.backing {
        let drain = asked.policy.iter().flat_map(|policy| ["--drain", policy]);
        let words: Vec<&str> = ["attach", url, "/"].into_iter().chain(drain).collect();
        forebay(&record.pool, &words, || false)
            .map_err(|why| failed("cannot attach the job's store", why))?;
    }
    for pair in &asked.stage_in {
        forebay(&record.pool, &["stage-in", "--no-progress", pair], || false)
            .map_err(|why| failed("cannot stage in", why))?;
    }
    Ok(())
}

/// Makes the file of a job, and locks it. A file that is there is taken over if the pool of its job is gone: the node or
/// the scheduler has ended the job before it could end its pool, and has started it again.
fn claim(id: &str, file: &Path, record: &Record) -> Result<File> {
    let what = || format!("cannot begin job {id}");
    let io = |e: std::io::Error| Error::io(what(), &e);
    let dir = file.parent().unwrap_or(file);
    let begun = || {
        Error::new(forebay_types::Code::Exists, what())
            .why("it has begun already")
            .cure(format!("`{VARIABLE}={} forebay job end` stages out and ends it", dir.display()))
    };
    loop {
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600);
        let (mut open, is_new) = match options.clone().create_new(true).open(file) {
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => match options.open(file) {
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
                opened => (opened.map_err(io)?, false),
            },
            opened => (opened.map_err(io)?, true),
        };
        match lock(&open, file, FlockOperation::NonBlockingLockExclusive) {
            Ok(true) => {}
            Ok(false) => continue, // the job has ended meanwhile
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return Err(begun()),
            Err(e) => return Err(io(e)),
        }
        let mut text = Vec::new();
        open.read_to_end(&mut text).map_err(io)?;
        let before = serde_json::from_slice::<Record>(&text).ok();
        let is_alone = before.is_none_or(|before| before.hosts.is_empty());
        if !(is_new || is_alone && is_gone(&record.pool)?) {
            return Err(begun());
        }
        let text = serde_json::to_vec(record).map_err(|e| failed(&what(), e.to_string()))?;
        open.set_len(0).map_err(io)?;
        std::io::Seek::rewind(&mut open).and_then(|()| open.write_all(&text)).map_err(io)?;
        return Ok(open);
    }
}

/// Locks an open file of a job. False if it is not the file of that name any more: the job has ended meanwhile.
fn lock(open: &File, file: &Path, operation: FlockOperation) -> std::io::Result<bool> {
    rustix::fs::flock(open, operation)?;
    let locked = open.metadata()?;
    Ok(std::fs::metadata(file).is_ok_and(|there| (there.dev(), there.ino()) == (locked.dev(), locked.ino())))
}

/// True if nothing is left of a pool of this node.
fn is_gone(pool: &Path) -> Result<bool> {
    launch::settled_presence(pool, CHANGING_GRACE).map(is_gone_as)
}

fn is_gone_as(presence: Presence) -> bool {
    matches!(presence, Presence::None | Presence::Down { has_data: false, .. })
}

/// True if the pool of a job was killed, and its data are there.
fn has_died_with_data(record: &Record) -> bool {
    let presence = launch::settled_presence(&record.pool, CHANGING_GRACE);
    record.hosts.is_empty() && matches!(presence, Ok(Presence::Down { has_data: true, .. }))
}

/// Locks a job and reads its file. None if the job has ended, or is not the one that began with this nonce.
fn locked(file: &Path, nonce: Option<&str>) -> Result<Option<(File, Record)>> {
    let what = || format!("cannot use {}", file.display());
    let mut open = match OpenOptions::new().read(true).write(true).open(file) {
        Ok(open) => open,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(what(), &e)),
    };
    if !lock(&open, file, FlockOperation::LockExclusive).map_err(|e| Error::io(what(), &e))? {
        return Ok(None); // ended while this process waited
    }
    let mut text = Vec::new();
    open.read_to_end(&mut text).map_err(|e| Error::io(what(), &e))?;
    let record: Record = serde_json::from_slice(&text).map_err(|e| failed(&what(), e.to_string()))?;
    let is_meant = nonce.is_none_or(|nonce| nonce == record.nonce);
    Ok(is_meant.then_some((open, record)))
}

/// Starts the pool of a job again that was killed and has its data. False if the data are gone with it: the job is over
/// then, its remains are removed, and an error says so if there was something to stage out or to drain.
fn revive(file: &Path, record: &Record) -> Result<bool> {
    if !record.hosts.is_empty() {
        return Ok(true);
    }
    let dir = file.parent().unwrap_or(file);
    let presence = launch::settled_presence(&record.pool, CHANGING_GRACE)?;
    if is_gone_as(presence) {
        let was_killed = matches!(presence, Presence::Down { .. });
        if was_killed {
            launch::down(&record.pool, DownOptions { force: true, ..DownOptions::default() })?;
        }
        std::fs::remove_dir_all(dir)
            .map_err(|e| Error::io(format!("cannot remove {}", dir.display()), &e))?;
        let gone = format!("pool {} is gone with its data", record.pool.display());
        return match &record.backing {
            _ if !record.stage_out.is_empty() => Err(failed("cannot stage out", gone)),
            // One that was stopped had its store get everything first, or was told not to.
            Some(url) if was_killed => {
                Err(failed("cannot drain", format!("{gone}: what was not yet copied to {url} is lost")))
            }
            _ => Ok(false),
        };
    }
    if let Presence::Down { .. } = presence {
        let path = record.pool.display().to_string();
        let what = "cannot start the job's pool again";
        let mut command =
            command::own(&["up", "--path", &path, "--background"]).map_err(|why| failed(what, why))?;
        command.env_remove("FOREBAY_POOL");
        command::finish(command, || false).map_err(|why| failed(what, why))?;
    }
    Ok(true)
}

fn finish(file: &Path, record: &Record, stages: bool) -> Result<()> {
    let mut first = None;
    for pair in record.stage_out.iter().filter(|_| stages) {
        let source = staging::anchored_out(pair)?.0;
        let source = source.to_string_lossy();
        let source = match source.trim_end_matches('/') {
            "" => "/",
            source => source,
        };
        match forebay(&record.pool, &["stat", "--json", "--", source], || false) {
            Err(why) if why.contains("there is no such name") => continue, // the script has not made it
            _ => {}
        }
        if let Err(why) = forebay(&record.pool, &["stage-out", "--no-progress", pair], || false) {
            first = first.or(Some(why));
        }
    }
    let dir = file.parent().unwrap_or(file);
    if let Some(why) = first {
        return Err(failed("cannot stage out", why).cure(format!(
            "the pool stays up with the data: mend it, then `{VARIABLE}={} forebay job end`",
            dir.display()
        )));
    }
    let list = record.hosts.join(",");
    let mut words = vec!["down", "--force"];
    if !stages {
        words.push("--discard");
    }
    if !list.is_empty() {
        words.extend(["--hosts", &list]);
    }
    if record.pool.exists() || !list.is_empty() {
        forebay(&record.pool, &words, || false).map_err(|why| {
            failed("cannot stop the job's pool", why)
                .cure(format!("`{VARIABLE}={} forebay job end` tries it again", dir.display()))
        })?;
    }
    std::fs::remove_dir_all(dir).map_err(|e| Error::io(format!("cannot remove {}", dir.display()), &e))
}

fn file() -> Result<PathBuf> {
    match std::env::var_os(VARIABLE).filter(|v| !v.is_empty()) {
        Some(dir) => Ok(PathBuf::from(dir).join(FILE)),
        None => Err(failure::invalid(
            "cannot end the job",
            format!("{VARIABLE} is not set"),
            "`eval \"$(forebay job begin ...)\"` sets it",
        )),
    }
}

/// Stages out and stops the pool, unless that is done.
///
/// With a `nonce` only the job that began with it: another one of the same number may have begun since.
pub(crate) fn end(nonce: Option<&str>) -> Result<()> {
    let file = file()?;
    match locked(&file, nonce)? {
        Some((_lock, record)) => {
            let once = || match revive(&file, &record)? {
                true => finish(&file, &record, true),
                false => Ok(()),
            };
            match once() {
                // Its daemon was being killed when it was looked at.
                Err(_) if has_died_with_data(&record) => once(),
                ended => ended,
            }
        }
        None => Ok(()),
    }
}

/// Waits for the end of a process, then ends the job.
pub(crate) fn watch(pid: u32, nonce: Option<&str>) -> Result<()> {
    // The signals that end the script must not end this process.
    let _blocked = forebay_sys::signals::Signals::block(&[libc::SIGTERM, libc::SIGHUP, libc::SIGINT])
        .map_err(|e| Error::io("cannot block signals", &e))?;
    let watched = i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    if let Some(watched) = watched {
        let mut ready = [rustix::event::PollFd::new(&watched, rustix::event::PollFlags::IN)];
        while let Err(rustix::io::Errno::INTR) = rustix::event::poll(&mut ready, None) {}
    }
    end(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)], text: &str) -> (String, Vec<String>) {
        let get = |name: &str| pairs.iter().find(|(k, _)| *k == name).map(|(_, v)| (*v).to_owned());
        found(get, |_| Some(text.to_owned()))
    }

    #[test]
    fn hosts_are_found_as_each_scheduler_names_them() {
        let (id, hosts) = of(&[("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "n[1-2]")], "");
        assert_eq!((id.as_str(), hosts.join(" ").as_str()), ("7", "n1 n2"));
        let (id, hosts) = of(&[("PBS_JOBID", "7[1].pbs"), ("PBS_NODEFILE", "/f")], "a\na\nb\n");
        assert_eq!((id.as_str(), hosts.join(" ").as_str()), ("7_1_.pbs", "a b"));
        assert_eq!(of(&[("LSB_JOBID", "8"), ("LSB_DJOB_HOSTFILE", "/f")], "x\nx\ny\n").1, ["x", "y"]);
        assert_eq!(of(&[("LSB_JOBID", "8"), ("LSB_MCPU_HOSTS", "x 4 y 4")], "").1, ["x", "y"]);
        assert_eq!(of(&[("FOREBAY_HOSTFILE", "/f")], "# all\nu slots=4\nv:2\n").1, ["u", "v"]);
        assert!(of(&[], "").1.is_empty());
    }

    fn record(dir: &Path, nonce: &str) -> Record {
        let (hosts, stage_out) = (Vec::new(), Vec::new());
        Record { pool: dir.join("pool"), hosts, stage_out, backing: None, nonce: nonce.to_owned() }
    }

    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Place {
            let dir = std::env::temp_dir().join(format!("forebay-script-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&dir).unwrap();
            Place(dir)
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn job_that_began_again_is_not_ended_by_the_first_ones_shell() {
        let place = Place::new("again");
        let file = place.0.join("job").join(FILE);
        drop(claim("1", &file, &record(&place.0, "first")).unwrap());
        assert!(locked(&file, Some("first")).unwrap().is_some());
        // Its pool is gone: the second takes the file over.
        let held = claim("1", &file, &record(&place.0, "second")).unwrap();
        assert!(claim("1", &file, &record(&place.0, "third")).is_err());
        drop(held);
        assert!(locked(&file, Some("first")).unwrap().is_none());
        assert_eq!(locked(&file, Some("second")).unwrap().unwrap().1.nonce, "second");
        assert_eq!(locked(&file, None).unwrap().unwrap().1.nonce, "second", "by hand");
        assert_ne!(new_nonce().unwrap(), new_nonce().unwrap());
    }

    #[test]
    fn lock_of_a_file_that_was_replaced_is_not_taken_for_the_jobs() {
        let place = Place::new("replaced");
        let file = place.0.join("job").join(FILE);
        let held = claim("1", &file, &record(&place.0, "first")).unwrap();
        let open = File::open(&file).unwrap();
        drop(held);
        // The job ends and another one begins between opening and locking.
        std::fs::remove_file(&file).unwrap();
        drop(claim("1", &file, &record(&place.0, "second")).unwrap());
        assert!(!lock(&open, &file, FlockOperation::LockExclusive).unwrap());
        let open = File::open(&file).unwrap();
        assert!(lock(&open, &file, FlockOperation::LockExclusive).unwrap());
    }
}
