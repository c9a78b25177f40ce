//! The supervisor's part of the mount: starts the mount's process, watches it, restarts it, and ends it with the pool.
//!
//! `forebay-mount` does everything that may block: it accesses the mount point, removes what a dead mount left there,
//! mounts and serves. This module has only the connections that wait for it, its last messages, and the time of its
//! next start. The supervisor never waits for the mount's process.
//!
//! A request to unmount is answered when the kernel's mount table no longer has the mount. If the process ends and
//! leaves the mount, another process is started to remove it.

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use forebay_types::{Code, Error, Result};
use rustix::process::Signal;
use serde_json::{json, Value};

use crate::child_process::{describe, program, Backoff, Helper};
use crate::directory::MOUNT_LINK_NEW;
use crate::members::MemberId;
use crate::protocol::{MountOptions, Reply};
use forebay_tasks::Failure;

/// The program's name; it is beside this program.
const PROGRAM: &str = "forebay-mount";
/// The type of file system in the kernel's mount table.
const FILE_SYSTEM_TYPE: &str = "fuse.forebay";
/// How long unmounting may take when the pool stops.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// The mount point and the options of a requested mount.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) at: PathBuf,
    pub(crate) options: MountOptions,
}

#[derive(Debug)]
struct Process {
    helper: Helper,
    /// The message that it sent when it was ready.
    ready: Option<Value>,
    /// True when it was started to remove a dead mount.
    clears: bool,
}

#[derive(Debug)]
struct Mount {
    wanted: Wanted,
    process: Option<Process>,
    backoff: Backoff,
    start_at: Instant,
    restarts: u64,
    last_end: Option<String>,
    /// The error that the process reported when it could not mount.
    failure: Option<Reply>,
    /// The connection that waits for the first start.
    asker: Option<MemberId>,
    /// Connections whose requests to unmount are not answered yet.
    enders: Vec<MemberId>,
    ends: bool,
    killed_at: Option<Instant>,
}

/// The pool's mount, if it has one, and answers to be sent.
#[derive(Debug, Default)]
pub(crate) struct MountKeeper {
    mount: Option<Mount>,
    answers: Vec<(MemberId, Reply)>,
}

impl Process {
    fn start(pool: &Path, wanted: &Wanted) -> Result<Process> {
        let mut command = Command::new(program(PROGRAM)?);
        command.arg("--pool").arg(pool).arg("--at").arg(&wanted.at);
        if wanted.options.allow_other {
            command.arg("--allow-other");
        }
        if wanted.options.no_passthrough {
            command.arg("--no-passthrough");
        }
        let what = format!("cannot mount pool {} on {}", pool.display(), wanted.at.display());
        Ok(Process { helper: Helper::start(command, &what)?, ready: None, clears: false })
    }

    /// Starts a process that removes a dead mount.
    fn start_clearing(pool: &Path) -> Result<Process> {
        let mut command = Command::new(program(PROGRAM)?);
        command.arg("--pool").arg(pool).arg("--clear");
        let helper = Helper::start_silent(command, "cannot clear away a dead mount")?;
        Ok(Process { helper, ready: None, clears: true })
    }

    /// A refusal contains `asker`, so that only the right connection gets it.
    fn ask_to_unmount(&self, lazy: bool, asker: MemberId) {
        self.helper.send(&json!({ "unmount": { "lazy": lazy, "asker": asker } }));
    }
}

impl MountKeeper {
    /// Mounts; `asker` gets the answer when it is done.
    pub(crate) fn mount(&mut self, wanted: Wanted, asker: MemberId) {
        if let Some(mount) = &self.mount {
            let e = Error::new(Code::Busy, format!("cannot mount on {}", wanted.at.display()))
                .why(format!("the pool is mounted on {}", mount.wanted.at.display()))
                .cure("a pool has one mount: `forebay umount` that first");
            return self.answers.push((asker, Reply::failed(&e)));
        }
        self.mount = Some(Mount {
            wanted,
            process: None,
            backoff: Backoff::default(),
            start_at: Instant::now(),
            restarts: 0,
            last_end: None,
            failure: None,
            asker: Some(asker),
            enders: Vec::new(),
            ends: false,
            killed_at: None,
        });
    }

    /// Unmounts; `asker` gets the answer when it is done or refused.
    pub(crate) fn unmount(&mut self, at: Option<&Path>, lazy: bool, asker: MemberId) {
        let named = self.mount.as_mut().filter(|m| at.is_none_or(|at| at == m.wanted.at));
        let Some(mount) = named else {
            let what = match at {
                Some(at) => format!("cannot unmount {}", at.display()),
                None => "cannot unmount the pool".to_owned(),
            };
            let e = Error::new(Code::NotFound, what).why("this pool is not mounted there");
            return self.answers.push((asker, Reply::failed(&e)));
        };
        mount.enders.push(asker);
        if let Some(process) = &mount.process {
            process.ask_to_unmount(lazy, asker);
        } else {
            // The process died and would be restarted: the next `tend` ends the mount instead.
            mount.ends = true;
        }
    }

    /// True when the kernel's mount table still has the mount.
    fn is_left(pool: &Path, mount: &Mount) -> bool {
        forebay_data::is_in_table(&mount.wanted.at, FILE_SYSTEM_TYPE, pool)
    }

    /// Ends a mount whose process has ended on request. A mount that is left is removed first.
    fn end(&mut self, pool: &Path) {
        let Some(mount) = &mut self.mount else { return };
        forget_where(pool);
        let at = mount.wanted.at.display().to_string();
        let cleared = mount.process.take().is_some_and(|process| process.clears);
        let left = MountKeeper::is_left(pool, mount);
        if left && !cleared {
            tracing::warn!("{at} was left mounted");
            (mount.ends, mount.killed_at) = (true, Some(Instant::now() + STOP_GRACE));
            match Process::start_clearing(pool) {
                Ok(process) => return mount.process = Some(process),
                Err(e) => tracing::error!("{e}"),
            }
        }
        let Some(mount) = self.mount.take() else { return };
        let answer = || match left {
            false => Reply::Unmounted,
            true => Reply::failed(
                &Error::new(Code::Busy, format!("cannot unmount {at}"))
                    .why("its process has ended, and the mount cannot be removed")
                    .cure(format!("`umount -l {at}`, or unmount what is mounted over it first")),
            ),
        };
        self.answers.extend(mount.asker.into_iter().chain(mount.enders).map(|id| (id, answer())));
    }

    /// Unmounts because the pool stops; programs that use the mount get errors.
    pub(crate) fn stop(&mut self) {
        let Some(mount) = &mut self.mount else { return };
        mount.ends = true;
        if let Some(process) = &mount.process {
            mount.killed_at = Some(Instant::now() + STOP_GRACE);
            process.helper.signal(Signal::TERM);
        }
    }

    /// True when no process of a mount is left.
    pub(crate) fn is_idle(&self) -> bool {
        self.mount.is_none()
    }

    /// Removes and returns the answers to be sent.
    pub(crate) fn take_answers(&mut self) -> Vec<(MemberId, Reply)> {
        std::mem::take(&mut self.answers)
    }

    /// Its socket, to be polled for reading.
    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        let mount = self.mount.as_ref()?;
        mount.process.as_ref().map(|process| process.helper.socket())
    }

    /// When [`MountKeeper::tend`] must next be called although no event occurs.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        let mount = self.mount.as_ref()?;
        match &mount.process {
            None if mount.ends => Some(Instant::now()),
            None => Some(mount.start_at),
            Some(_) => mount.killed_at,
        }
    }

    /// Reads the process's messages, reaps it and restarts it, as is due.
    pub(crate) fn tend(&mut self, pool: &Path, pool_serves: bool) {
        self.hear();
        let Some(mount) = &mut self.mount else { return };
        if let Some(process) = &mut mount.process {
            if mount.killed_at.is_some_and(|at| Instant::now() >= at) {
                tracing::error!(pid = process.helper.pid(), "the mount does not stop: killed");
                process.helper.signal(Signal::KILL);
                mount.killed_at = None;
            }
            let Some(status) = process.helper.ended() else { return };
            let words = describe(status);
            let (life, was_ready) = (process.helper.started.elapsed(), process.ready.is_some());
            self.hear();
            let Some(mount) = &mut self.mount else { return };
            if mount.ends || was_ready && status.success() || !mount.enders.is_empty() {
                tracing::info!("the mount {words}");
                return self.end(pool);
            }
            mount.process = None;
            tracing::error!("the mount {words}");
            if !was_ready && mount.restarts == 0 {
                // The pool was never mounted.
                if let Some(asker) = mount.asker {
                    let e = Error::new(Code::Io, format!("cannot mount on {}", mount.wanted.at.display()))
                        .why(format!("its process {words}"));
                    let failure = mount.failure.take().unwrap_or_else(|| Reply::failed(&e));
                    self.answers.push((asker, failure));
                }
                self.mount = None;
                return;
            }
            mount.restarts += 1;
            mount.last_end = Some(words);
            mount.start_at = Instant::now() + mount.backoff.after(life);
        }
        let Some(mount) = &mut self.mount else { return };
        if mount.process.is_none() && mount.ends {
            return self.end(pool);
        }
        if mount.process.is_none() && pool_serves && Instant::now() >= mount.start_at {
            match Process::start(pool, &mount.wanted) {
                Ok(process) => mount.process = Some(process),
                Err(e) => {
                    tracing::error!("{e}");
                    if let Some(asker) = mount.asker.take() {
                        self.answers.push((asker, Reply::failed(&e)));
                        self.mount = None;
                        return;
                    }
                    mount.start_at = Instant::now() + mount.backoff.after(Duration::ZERO);
                }
            }
        }
    }

    fn hear(&mut self) {
        let Some(mount) = &mut self.mount else { return };
        let Some(process) = &mut mount.process else { return };
        let failure = |value: &Value| {
            let failure: Failure = serde_json::from_value(value.clone()).unwrap_or_else(|_| {
                Failure::from(&Error::new(Code::Malformed, "the mount's process sent a malformed message"))
            });
            Reply::Failed(failure)
        };
        for message in process.helper.messages() {
            if let Some(ready) = message.get("ready") {
                process.ready = Some(ready.clone());
                if let Some(asker) = mount.asker.take() {
                    self.answers.push((asker, Reply::Mounted(ready.clone())));
                }
            } else if let Some(why) = message.get("failed") {
                // Sent when the process has ended, so that the requester can retry.
                mount.failure = Some(failure(why));
            } else if let Some(why) = message.get("busy") {
                let asker = message["asker"].as_u64();
                let refused = mount.enders.extract_if(.., |id| Some(*id) == asker);
                self.answers.extend(refused.map(|id| (id, failure(why))));
            } else if message.get("unmounted").is_some() {
                mount.ends = true;
            }
        }
    }

    /// The mount's part of `status`.
    pub(crate) fn status(&self) -> Value {
        let Some(mount) = &self.mount else { return json!([]) };
        let ready = mount.process.as_ref().and_then(|p| p.ready.clone());
        let state = match (&mount.process, &ready) {
            _ if mount.ends => "unmounting",
            (Some(_), Some(_)) => "mounted",
            _ => "mounting",
        };
        json!([{
            "at": mount.wanted.at,
            "state": state,
            "allow_other": mount.wanted.options.allow_other,
            "no_passthrough": mount.wanted.options.no_passthrough,
            "pid": mount.process.as_ref().map(|p| p.helper.pid()),
            "data": ready.as_ref().map(|r| r["data"].clone()),
            "why": ready.as_ref().map(|r| r["why"].clone()),
            "restarts": mount.restarts,
            "last_crash": mount.last_end,
        }])
    }
}

/// Removes the link by which programs find the mount. The mount's process does this itself, unless it was killed.
fn forget_where(pool: &Path) {
    for name in [forebay_types::MOUNT_LINK, MOUNT_LINK_NEW] {
        let _ = std::fs::remove_file(pool.join(name));
    }
}

/// Removes the mounts of a pool whose processes were killed. Must be called while no supervisor serves the pool.
pub(crate) fn clear_dead_mounts(pool: &Path) {
    forget_where(pool);
    // Reads the kernel's mount table, because access to a dead file system could block.
    let mounts = forebay_sys::mounts::own().unwrap_or_default();
    if !mounts.iter().any(|mount| mount.fs_type == FILE_SYSTEM_TYPE) {
        return;
    }
    let cleared = program(PROGRAM).and_then(|program| {
        Command::new(program)
            .arg("--pool")
            .arg(pool)
            .arg("--clear")
            .stdin(std::process::Stdio::null())
            .status()
            .map_err(|e| Error::io("cannot clear away dead mounts", &e))
    });
    if let Err(e) = cleared {
        tracing::warn!("{e}");
    }
}
