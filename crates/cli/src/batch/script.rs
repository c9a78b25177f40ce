//! `forebay job`: a pool for a batch script of any scheduler.
//!
//! ```text
//! begin  starts a pool over the job's nodes, stages in, and prints shell code: variables, traps, and the watcher
//! end    stages out and stops the pool; the trap calls it
//! watch  waits for the end of the shell, however it ends, and then does what `end` has not done
//! ```
//! `end` and `watch` exclude each other by a lock on the job's file, which exists as long as there is something to do.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use forebay_types::{Error, Result};
use rustix::process::{pidfd_open, Pid, PidfdFlags};
use serde::{Deserialize, Serialize};

use super::command::{self, forebay};
use crate::{failure, hosts};

/// Names the directory of the job for `end` and `watch`.
pub(crate) const VARIABLE: &str = "FOREBAY_JOB_DIR";
const FILE: &str = "job.json";

/// What a script asks for.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Asked {
    pub(crate) capacity: Option<String>,
    pub(crate) media: Option<String>,
    pub(crate) backing: Option<String>,
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
    let (id, mut all) = found(|name| std::env::var(name).ok(), |path| std::fs::read_to_string(path).ok());
    if !asked.hosts.is_empty() {
        all = hosts::expand(&asked.hosts)?;
    } else if all.is_empty() {
        all = of_flux();
    }
    let base = forebay_server::directory::default_pool()?;
    let dir = base.parent().unwrap_or(&base).join(format!("job-{id}"));
    let what = format!("cannot make {}", dir.display());
    DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(|e| Error::io(&*what, &e))?;
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
        stage_out: asked.stage_out.clone(),
    };
    let file = dir.join(FILE);
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&file) {
        Ok(_) => super::registry::write(&file, &record)?,
        Err(e) => {
            return Err(Error::io(format!("cannot begin job {id}"), &e).cure(format!(
                "it has begun already; `{VARIABLE}={} forebay job end` ends it",
                dir.display()
            )))
        }
    }
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
    Ok(format!(
        "export {VARIABLE}={}\nexport FOREBAY_POOL={}\nexport FOREBAY_PREFIX={}\n\
         trap '{}' EXIT\ntrap 'exit 129' HUP\ntrap 'exit 130' INT\ntrap 'exit 143' TERM\n\
         {program} job watch $$ </dev/null >/dev/null 2>&1 &\n",
        quoted(&dir.display().to_string()),
        quoted(&pool.display().to_string()),
        crate::pool::DEFAULT_PREFIX,
        format!("{program} job end").replace('\'', "'\\''"),
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
        forebay(&record.pool, &["attach", url, "/"], || false)
            .map_err(|why| failed("cannot attach the job's store", why))?;
    }
    for pair in &asked.stage_in {
        forebay(&record.pool, &["stage-in", "--no-progress", pair], || false)
            .map_err(|why| failed("cannot stage in", why))?;
    }
    Ok(())
}

fn locked(file: &Path) -> Result<Option<(File, Record)>> {
    let what = || format!("cannot use {}", file.display());
    let mut open = match OpenOptions::new().read(true).write(true).open(file) {
        Ok(open) => open,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(what(), &e)),
    };
    rustix::fs::flock(&open, rustix::fs::FlockOperation::LockExclusive)
        .map_err(|e| Error::io(what(), &e.into()))?;
    if !file.exists() {
        return Ok(None); // ended while this process waited
    }
    let mut text = Vec::new();
    open.read_to_end(&mut text).map_err(|e| Error::io(what(), &e))?;
    let record = serde_json::from_slice(&text).map_err(|e| failed(&what(), e.to_string()))?;
    Ok(Some((open, record)))
}

fn finish(file: &Path, record: &Record, stages: bool) -> Result<()> {
    let mut first = None;
    for pair in record.stage_out.iter().filter(|_| stages) {
        let source = pair.rsplit_once(':').map_or("", |(source, _)| source).trim_end_matches('/');
        match forebay(&record.pool, &["stat", "--json", if source.is_empty() { "/" } else { source }], || {
            false
        }) {
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
pub(crate) fn end() -> Result<()> {
    let file = file()?;
    match locked(&file)? {
        Some((_lock, record)) => finish(&file, &record, true),
        None => Ok(()),
    }
}

/// Waits for the end of a process, then ends the job.
pub(crate) fn watch(pid: u32) -> Result<()> {
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
    end()
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
}
