//! `forebay run`: runs a program over a pool, with its input staged in before and its results staged out after.
//!
//! The order: make all checks that need no pool; enter a pool (one that is up, or the job's own, which its first rank
//! starts); stage in, once a job; run the program and forward signals; release the stage-outs, and do those that this
//! run was the last to hold; leave, which ends an embedded pool with its last member. The membership is a connection:
//! if this process is killed, the kernel closes it, and the supervisor ends the program's descendants and the pool.
//!
//! Tests: `tests/run.rs`, `tests/run_signals.rs`, `tests/run_mpi.rs`, `tests/left_behind.rs`.

mod agent;
mod behind;
mod child;
mod enter;
mod job;
mod paced;
mod params;
pub(crate) mod preload;
mod program;
mod stages;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use forebay_server::JoinRequest;
use forebay_sys::signals::Signals;
use forebay_types::{Error, Result};
use serde_json::{json, Value};

use crate::arguments::Run;
use crate::failure::{self, invalid};
use crate::{staging, table};

use child::Ended;
use enter::Entered;
use job::Job;
use stages::Stages;

/// Signals that are forwarded to the program. Those of job control also take effect here.
const SIGNALS: [i32; 10] = [
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGWINCH,
    libc::SIGTSTP,
    libc::SIGCONT,
    libc::SIGCHLD,
];

/// Runs `forebay run`.
pub(crate) fn run(named: Option<PathBuf>, mut arguments: Run) -> Result<ExitCode> {
    // A pool that others use would show the store to them too.
    arguments.own |= arguments.backing.is_some();
    let default = || forebay_server::directory::default_pool().ok();
    let pool = named.clone().or_else(default).filter(|_| !arguments.own);
    let prefix = check_prefix(&arguments.prefix, pool.as_deref())?;
    let stages = Stages::read(&arguments)?;
    let library = preload::library()?;
    let name = &arguments.command[0];
    let within = program::is_within(name, &prefix);
    let mut found = None;
    if !within {
        match program::find(name) {
            Ok(path) => found = Some(path),
            Err((code, e)) => return Ok(failure::report(&e, false, code)),
        }
    }

    let job = Job::of_this_process(preload::level());
    let request = JoinRequest {
        label: label(&arguments.command),
        group: job.group.clone(),
        expected: job.expected,
        holds: stages.holds(),
    };
    let mut entered = enter::enter(named, &arguments, &job, request)?;
    if !arguments.quiet {
        entered.announce();
    }
    if let Err(e) = paced::ensure_mounted(&entered.dir) {
        let _ = entered.membership.leave_plan(false);
        return Err(e);
    }
    stages.attach(&mut entered)?;
    let staged_in = stages.stage_in(&mut entered, &arguments)?;

    let target = match found {
        Some(path) => Ok(program::Target::outside(path)),
        None => program::within(&entered.dir, name, &prefix),
    };
    let target = match target {
        Ok(target) => target,
        Err((code, e)) => {
            let _ = entered.membership.leave_plan(false);
            return Ok(failure::report(&e, false, code));
        }
    };
    for warning in target.warnings() {
        note!("forebay: warning: {warning}");
    }
    if let Some(warning) = preload::without_mpi(&library, Path::new(name)) {
        note!("forebay: warning: {warning}");
    }
    let environment = preload::environment(&library, &entered, &prefix, &target.path);
    let signals = Signals::block(&SIGNALS).map_err(|e| Error::io("cannot wait for signals", &e))?;
    let started = Instant::now();
    let ended = match child::run(&target, &arguments.command, &environment, &signals) {
        Ok(ended) => ended,
        Err((code, e)) => {
            let _ = entered.membership.leave_plan(false);
            return Ok(failure::report(&e, false, code));
        }
    };
    let seconds = started.elapsed().as_secs_f64();

    let mut finish = stages.finish(&mut entered, &arguments, ended == Ended::Status(0), &signals);
    let restarts = entered.restarts();
    if let Some(path) = &arguments.report {
        let report = report(&arguments.command, ended, seconds, &entered, &staged_in, &finish);
        if let Err(e) = write_report(path, &report) {
            failure::say(&e);
            finish.failed = true;
        }
    }
    // With many ranks, only those print a summary that staged, or whose program failed.
    let alone = job.expected == 1 || staged_in.is_some() || finish.report.is_some();
    if !arguments.quiet && (alone || ended != Ended::Status(0)) {
        summary(&arguments.command, ended, seconds, staged_in.as_ref(), &finish);
    }
    if restarts > 0 {
        note!("forebay: note: the pool's daemon was restarted {restarts} times{}", entered.last_words());
    }
    entered.leave();
    Ok(conclude(ended, finish.failed))
}

/// Ends this process as the program ended.
fn conclude(ended: Ended, failed: bool) -> ExitCode {
    match ended {
        Ended::Signal(signal) => crate::death::die_of(signal),
        Ended::Status(0) if failed => ExitCode::from(failure::FOREBAY_FAILED),
        Ended::Status(code) => ExitCode::from(code as u8),
    }
}

/// Normalizes the prefix. Refuses it if something other than the pool's mount exists there, since the prefix would hide
/// it.
fn check_prefix(prefix: &Path, pool: Option<&Path>) -> Result<PathBuf> {
    use std::path::Component;
    let text = prefix.display();
    let what = || format!("cannot show the pool at {text}");
    let mut normal = PathBuf::from("/");
    for component in prefix.components() {
        match component {
            Component::RootDir => {}
            Component::Normal(name) => normal.push(name),
            _ => return Err(invalid(what(), "it holds `..`, or does not start with /", "--prefix /forebay")),
        }
    }
    if !prefix.is_absolute() || normal == Path::new("/") {
        return Err(invalid(what(), "it is not an absolute path below /", "--prefix /forebay"));
    }
    match std::fs::symlink_metadata(&normal) {
        Ok(m) if pool.is_some_and(|pool| is_mount_of(pool, &normal, &m)) => Ok(normal),
        Ok(m) => {
            let kind = if m.is_dir() { "a real directory" } else { "a real file" };
            Err(Error::new(forebay_types::Code::Exists, what())
                .why(format!("{kind} is there, which the program could not reach any more"))
                .cure("choose a path that does not exist: --prefix /forebay-pool"))
        }
        Err(e) if e.raw_os_error() == Some(libc::ENOTCONN) => {
            Err(Error::new(forebay_types::Code::Exists, what())
                .why("a mount is there that nobody serves")
                .cure(format!("take it away (`umount -l {text}`), or choose another path")))
        }
        Err(_) => Ok(normal),
    }
}

/// True when `pool` is mounted on `directory`, whose metadata are `there`.
fn is_mount_of(pool: &Path, directory: &Path, there: &std::fs::Metadata) -> bool {
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::MetadataExt;
    let Ok(link) = std::fs::read_link(pool.join(forebay_types::MOUNT_LINK)) else { return false };
    let mount = forebay_types::mount_of_link(link.as_os_str().as_bytes());
    mount.is_some_and(|(device, at)| at == directory.as_os_str().as_bytes() && there.dev() == device)
}

/// The shortened command line, for display.
fn label(command: &[OsString]) -> String {
    const CHARS_MAX: usize = 60;
    let words: Vec<String> = command.iter().map(|w| w.to_string_lossy().into_owned()).collect();
    let line = table::printable(words.join(" ").as_bytes());
    if line.chars().count() <= CHARS_MAX {
        return line;
    }
    let cut: String = line.chars().take(CHARS_MAX).collect();
    format!("{cut}...")
}

fn summary(
    command: &[OsString],
    ended: Ended,
    seconds: f64,
    staged_in: Option<&forebay_stage::StageReport>,
    finish: &stages::Finish,
) {
    let name = Path::new(&command[0]).file_name().unwrap_or(&command[0]).to_string_lossy().into_owned();
    let how = match ended {
        Ended::Status(code) => format!("ended with status {code}"),
        Ended::Signal(signal) => format!("was killed by signal {signal}"),
    };
    let mut parts = Vec::new();
    parts.extend(staged_in.map(|r| staging::line(staging::Direction::In, r)));
    parts.push(format!("{name} {how} after {}", table::duration(seconds)));
    parts.extend(finish.report.as_ref().map(|r| staging::line(staging::Direction::Out, r)));
    note!("forebay: {}", parts.join("; "));
}

fn report(
    command: &[OsString],
    ended: Ended,
    seconds: f64,
    entered: &Entered,
    staged_in: &Option<forebay_stage::StageReport>,
    finish: &stages::Finish,
) -> Value {
    let words: Vec<String> = command.iter().map(|w| w.to_string_lossy().into_owned()).collect();
    let (status, signal) = match ended {
        Ended::Status(code) => (Some(code), None),
        Ended::Signal(signal) => (None, Some(signal)),
    };
    json!({
        "command": words,
        "status": status,
        "signal": signal,
        "seconds": seconds,
        "pool": pool_facts(entered),
        "stage_in": staged_in,
        "stage_out": finish.report,
        "stage_out_skipped": finish.skipped,
    })
}

fn pool_facts(entered: &Entered) -> Value {
    json!({ "path": entered.dir, "embedded": entered.embedded, "started": entered.started.is_some() })
}

fn write_report(path: &Path, report: &Value) -> Result<()> {
    let mut text = serde_json::to_string_pretty(report).unwrap_or_default();
    text.push('\n');
    std::fs::write(path, text)
        .map_err(|e| Error::io(format!("cannot write the report {}", path.display()), &e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_prefix_refuses_what_is_real_or_not_absolute() {
        for bad in ["/", "forebay", "", "/a/../b", "//"] {
            assert_eq!(
                check_prefix(Path::new(bad), None).unwrap_err().code,
                forebay_types::Code::Invalid,
                "{bad}"
            );
        }
        let e = check_prefix(Path::new("/usr"), None).unwrap_err();
        assert!(e.why.contains("real directory") && e.cure.contains("--prefix"), "{e}");
        assert_eq!(check_prefix(Path::new("/no-such//dir/./x/"), None).unwrap(), Path::new("/no-such/dir/x"));
    }

    #[test]
    fn label_is_cut_and_printable() {
        let long: Vec<OsString> = vec!["a\nb".into(), "x".repeat(100).into()];
        let text = label(&long);
        assert!(text.starts_with("a\\x0ab xxx") && text.ends_with("...") && text.len() < 70, "{text}");
    }
}
