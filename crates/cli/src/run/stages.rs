//! Staging of a run, done once in its job: in by the first run, out by the last. Likewise its backing store: attached by
//! the first run, drained by the last.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use forebay_client::{Pool, Role};
use forebay_server::control::{self, LeavePlan, Turn};
use forebay_server::launch::{self, Presence};
use forebay_stage::{Pair, StageOptions, StageReport};
use forebay_sys::signals::Signals;
use forebay_types::{Code, Error, Result};

use super::behind::Behind;
use super::enter::{Entered, CHANGING_GRACE};
use crate::arguments::{Run, StageOutOn};
use crate::failure;
use crate::staging::{self, Direction, Interrupt, Shown, Style};

/// The pairs of a run.
#[derive(Debug)]
pub(super) struct Stages {
    into: Vec<Pair>,
    out: Vec<Pair>,
    backing: Option<Behind>,
}

/// The result of a run's end.
#[derive(Debug, Default)]
pub(super) struct Finish {
    /// What this run staged out.
    pub(super) report: Option<StageReport>,
    /// Why this run skipped stage-outs that it could have done.
    pub(super) skipped: Option<String>,
    /// Forebay failed to do what the user requested.
    pub(super) failed: bool,
}

impl Stages {
    /// Parses the command line, and makes the checks that need no pool.
    pub(super) fn read(arguments: &Run) -> Result<Stages> {
        let into = staging::pairs_in(&arguments.stage_in, arguments.manifest.as_deref())?;
        let out = staging::pairs_out(&arguments.stage_out, None)?;
        for pair in &into {
            std::fs::metadata(&pair.source).map_err(|e| {
                Error::io(format!("cannot stage in {}", pair.source.display()), &e)
                    .cure("check the path, and that you may read it")
            })?;
        }
        for pair in &out {
            check_destination(&pair.destination)?;
        }
        Ok(Stages { into, out, backing: arguments.backing.as_deref().map(Behind::read).transpose()? })
    }

    /// Keys of the stage-outs and of the drain: runs of a job that name the same ones share them.
    pub(super) fn holds(&self) -> Vec<String> {
        self.out.iter().map(key).chain(self.backing.as_ref().map(Behind::key)).collect()
    }

    /// Puts the pool in front of its store, unless another run of the job has.
    pub(super) fn attach(&self, entered: &mut Entered) -> Result<()> {
        self.backing.as_ref().map_or(Ok(()), |behind| behind.attach(entered))
    }

    /// Stages in unless another run of the job has; waits while another does. Returns the report if this run staged.
    pub(super) fn stage_in(&self, entered: &mut Entered, arguments: &Run) -> Result<Option<StageReport>> {
        if self.into.is_empty() {
            return Ok(None);
        }
        let all: Vec<String> = self.into.iter().map(key).collect();
        let claim = format!("in {}", all.join("\n"));
        match entered.membership.claim(&claim)? {
            Turn::Done => return Ok(None),
            Turn::Failed(why) => {
                return Err(Error::new(Code::Io, "cannot stage in").why(format!("another rank tried: {why}")));
            }
            Turn::Mine => {}
        }
        let result = self.stage_in_now(entered, arguments);
        let told = result.as_ref().map(drop).map_err(|e| format!("{}: {}", e.what, e.why));
        entered.membership.finish_claim(&claim, told)?;
        result.map(Some)
    }

    fn stage_in_now(&self, entered: &Entered, arguments: &Run) -> Result<StageReport> {
        staging::refuse_own(&entered.dir, Direction::In, &self.into)?;
        let pool = Pool::attach_as(&entered.dir, Role::Tool)?;
        // Until the program runs, signals end this process as usual; the supervisor notices the closed connection.
        let signals = Signals::block(&[]).map_err(|e| Error::io("cannot wait for signals", &e))?;
        let interrupt = Interrupt::new(&signals, None);
        let shown = Shown::new(Direction::In, style(arguments), &interrupt);
        let report = forebay_stage::stage_in(pool, &self.into, &options(arguments), &shown);
        shown.finish();
        let report = report?;
        staging::print_problems(&report);
        report.outcome()?;
        Ok(report)
    }

    /// Releases the stage-outs and the drain, and does what falls to this run.
    pub(super) fn finish(
        &self,
        entered: &mut Entered,
        arguments: &Run,
        success: bool,
        signals: &Signals,
    ) -> Finish {
        let plan = match entered.membership.leave_plan(success) {
            Ok(plan) => plan,
            Err(e) => {
                failure::say(&gone(entered, e));
                // Without stage-outs, a pool of the run's own held nothing that was meant to last.
                let meant_to_last = !self.out.is_empty() || self.backing.is_some();
                return Finish { failed: meant_to_last || !entered.embedded, ..Finish::default() };
            }
        };
        let mut finish = self.stage_out(entered, arguments, success, signals, &plan);
        if let Some(behind) = self.backing.as_ref().filter(|behind| plan.keys.contains(&behind.key())) {
            finish.failed |= !behind.drain(entered, style(arguments), signals);
        }
        finish
    }

    fn stage_out(
        &self,
        entered: &mut Entered,
        arguments: &Run,
        success: bool,
        signals: &Signals,
        plan: &LeavePlan,
    ) -> Finish {
        let pairs: Vec<Pair> = self.out.iter().filter(|p| plan.keys.contains(&key(p))).cloned().collect();
        if pairs.is_empty() {
            return Finish::default();
        }
        if arguments.stage_out_on == StageOutOn::Success && (!success || plan.any_failed) {
            let who = if success { "another rank" } else { "the program" };
            let why =
                format!("nothing was staged out, for {who} failed (--stage-out-on always does it anyway)");
            note!("forebay: {why}");
            return Finish { skipped: Some(why), ..Finish::default() };
        }
        match stage_out_now(entered, arguments, &pairs, signals) {
            Ok((report, None)) => {
                let failed = report.outcome().is_err();
                if failed {
                    let causes: Vec<Code> = report.errors.iter().map(|e| e.code).collect();
                    rescue(entered, &pairs, &causes);
                }
                Finish { report: Some(report), failed, ..Finish::default() }
            }
            Ok((report, Some(signal))) => {
                note!("forebay: staging out was given up at signal {signal}: what was not staged is lost");
                Finish { report: Some(report), failed: true, ..Finish::default() }
            }
            Err(e) => {
                failure::say(&e);
                rescue(entered, &pairs, &[e.code]);
                Finish { failed: true, ..Finish::default() }
            }
        }
    }
}

fn stage_out_now(
    entered: &Entered,
    arguments: &Run,
    pairs: &[Pair],
    signals: &Signals,
) -> Result<(StageReport, Option<i32>)> {
    staging::refuse_own(&entered.dir, Direction::Out, pairs)?;
    let pool = Pool::attach_as(&entered.dir, Role::Tool)?;
    let warning = "results are being staged out; once more to give up and lose them";
    let interrupt = Interrupt::new(signals, Some(warning));
    let shown = Shown::new(Direction::Out, style(arguments), &interrupt);
    // A store through a mapping may leave the modification time as it was, so everything is copied.
    let options = StageOptions { resume: false, ..options(arguments) };
    let report = forebay_stage::stage_out(pool, pairs, &options, &shown);
    shown.finish();
    let report = report?;
    staging::print_problems(&report);
    Ok((report, interrupt.stopped_by()))
}

/// The error when the pool ended during the run: how it ended, and whether its data still exist.
fn gone(entered: &Entered, e: Error) -> Error {
    let dir = entered.dir.display();
    let what = format!("the pool is gone: {}", e.what);
    if entered.embedded {
        return Error { what, ..e };
    }
    let cure = match launch::settled_presence(&entered.dir, CHANGING_GRACE) {
        Ok(Presence::None) => "it was stopped under the program, and what was in it is gone".to_owned(),
        Ok(Presence::Up) => "it was stopped under the program and started again".to_owned(),
        Ok(Presence::Down { has_data: true, .. }) => {
            format!("its data are still there: `forebay up --path {dir}` starts it again")
        }
        Ok(Presence::Down { has_data: false, .. }) => "what was in it is gone".to_owned(),
        _ => format!("`forebay status --pool {dir}` shows whether it is up again"),
    };
    Error { what, cure, ..e }
}

/// Keeps the pool up when results could not be staged out, and prints how to stage them out later. An empty pool of the
/// run's own ends.
fn rescue(entered: &mut Entered, pairs: &[Pair], causes: &[Code]) {
    let dir = entered.dir.display();
    let remedy = match causes.contains(&Code::NoSpace) {
        true => "When there is room for them",
        false => "When that is put right",
    };
    let own = entered.embedded;
    if own {
        // The root is an inode too.
        if control::status(&entered.dir).is_ok_and(|status| status.inodes == Some(1)) {
            note!("forebay: nothing is in the pool, so it ends with the program");
            return;
        }
        if let Err(e) = entered.membership.keep_pool() {
            failure::say(&e);
            return;
        }
        entered.embedded = false;
        note!("forebay: the results are not lost: their pool stays up. {remedy}:");
    } else {
        note!("forebay: the results are still in the pool. {remedy}:");
    }
    if causes.contains(&Code::NotFound) {
        note!("  forebay ls --pool {dir} /");
    }
    for pair in pairs {
        note!("  forebay stage-out --pool {dir} {}:{}", pair.source.display(), pair.destination.display());
    }
    if own {
        note!("  forebay down --pool {dir}");
    }
}

fn options(arguments: &Run) -> StageOptions {
    StageOptions { verify: arguments.verify, ..StageOptions::default() }
}

fn style(arguments: &Run) -> Style {
    Style::of_stderr(!arguments.no_progress && !arguments.quiet)
}

fn key(pair: &Pair) -> String {
    // Two pairs that differ in bytes that are not UTF-8 must have different keys.
    let text = |path: &std::path::Path| -> String {
        path.as_os_str()
            .as_bytes()
            .iter()
            .flat_map(|&b| std::ascii::escape_default(b))
            .map(char::from)
            .collect()
    };
    format!("{}\n{}", text(&pair.source), text(&pair.destination))
}

/// Checks a destination of results before hours of computing: its nearest existing directory must be writable.
fn check_destination(path: &Path) -> Result<()> {
    let mut above = path;
    loop {
        if above.exists() {
            break;
        }
        match above.parent() {
            Some(parent) => above = parent,
            None => return Ok(()),
        }
    }
    if above.is_file() && above == path {
        return Ok(()); // it will be replaced
    }
    if std::fs::File::open(above).is_ok_and(|directory| !forebay_stage::takes_files(&directory)) {
        return Err(Error::new(Code::NotSupported, format!("cannot stage out to {}", path.display()))
            .why(format!(
                "{} is a directory of the kernel's own, in which no files can be made",
                above.display()
            ))
            .cure("name a destination on another file system"));
    }
    rustix::fs::access(above, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK).map_err(|e| {
        Error::io(format!("cannot stage out to {}", path.display()), &e.into())
            .cure(format!("make {} writable, or name another destination", above.display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_of_different_pairs_differs() {
        let pair =
            |a: &[u8], b: &str| Pair { source: std::ffi::OsStr::from_bytes(a).into(), destination: b.into() };
        assert_eq!(key(&pair(b"/a", "/b")), key(&pair(b"/a", "/b")));
        assert_ne!(key(&pair(b"/a b", "/c")), key(&pair(b"/a", "b /c")), "a blank separates nothing");
        assert_ne!(key(&pair(b"/\xff", "/c")), key(&pair(b"/\xfe", "/c")));
    }

    #[test]
    fn check_destination_looks_at_what_exists_above() {
        check_destination(Path::new("/tmp/not/there/yet")).unwrap();
        let e = check_destination(Path::new("/proc/results/of/this")).unwrap_err();
        assert!(e.to_string().contains("the kernel's own"), "{e}");
        if !rustix::process::geteuid().is_root() {
            assert!(check_destination(Path::new("/usr/not-mine")).is_err());
        }
        assert!(check_destination(Path::new("/proc/version/below")).is_err());
    }
}
