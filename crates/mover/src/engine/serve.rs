//! What this node's mover does for those of other nodes (`peers`): a thread takes their messages, a thread each does
//! their jobs. Messages of programs are taken here too: they read files for which there is no room (`through.rs`).

use std::sync::Arc;
use std::time::Duration;

use forebay_client::{Kept, LeaseKind};
use forebay_tasks::Failure;
use forebay_types::{Error, Ino, Result, StoreRead};

use super::drain::upload_here;
use super::evict;
use super::marks;
use super::parts;
use super::pass::{Pass, Reason};
use super::peers::{from_hex, Answer, Job, Letter, Outcome, Work};
use super::shared::{needs_room, range_asked, restore_with_room, Shared};
use super::through;
use super::trees;
use super::wanted::{Uploads, WantedUpload};
use crate::host;
use crate::store::{Store, StorePath};

/// Takes messages.
pub(super) fn serve(shared: &Arc<Shared>) {
    while !shared.stores.is_stopping() {
        match shared.link.mover_work() {
            Ok(Some((number, message))) => {
                if let Some(wanted) = StoreRead::decode(&message) {
                    through::serve(shared, number, wanted);
                    continue;
                }
                let answer = match serde_json::from_slice::<Letter>(&message) {
                    Ok(letter) => answer(shared, letter),
                    Err(e) => {
                        let what = "cannot read a message of another node's mover";
                        let e = Error::new(forebay_types::Code::Malformed, what).why(e);
                        Answer::Failed(Failure::from(&e.cure("all nodes must have one version")))
                    }
                };
                let text = serde_json::to_vec(&answer).unwrap_or_default();
                if let Err(code) = shared.link.mover_answer(number, &text) {
                    tracing::debug!("cannot answer another node's mover: {}", code.name());
                }
            }
            Ok(None) => {}
            Err(code) => {
                tracing::debug!("cannot get messages of other nodes' movers: {}", code.name());
                host::sleep(Duration::from_millis(500));
            }
        }
        shared.jobs.forget_old();
        shared.holds.forget_old();
        shared.through.forget_old();
    }
}

fn answer(shared: &Arc<Shared>, letter: Letter) -> Answer {
    match letter {
        Letter::Fence { from, owner } => shared.jobs.fence(from, owner),
        Letter::Begin { from, owner, job, work } => match shared.jobs.begin(from, owner, job) {
            Ok(begun) => start(shared, &begun, work),
            Err(answer) => answer,
        },
        Letter::Look { job } => shared.jobs.look(job),
        Letter::Drop { job } => {
            shared.jobs.drop_job(job);
            Answer::Done
        }
        Letter::Hold { hold, ino, epoch, write } => {
            let kind = if write { LeaseKind::Write } else { LeaseKind::Read };
            shared.holds.take(&shared.link, hold, Ino(ino), epoch, kind)
        }
        Letter::Check { hold } => shared.holds.check(hold),
        Letter::Unhold { hold, unlink } => shared.holds.end(&shared.link, hold, unlink),
        Letter::Mark { ino } => match marks::mark_now(&shared.link, &shared.marks, Ino(ino)) {
            Ok(()) => Answer::Done,
            Err(e) => Answer::Failed(Failure::from(&e)),
        },
        Letter::Range { ino, range } => match shared.restoring.has(Ino(ino)) {
            true => {
                range_asked(shared, Ino(ino), range);
                Answer::Done
            }
            false => Answer::Unknown,
        },
        Letter::IsFull => match needs_room(shared) {
            true => Answer::Done,
            false => Answer::Unknown,
        },
    }
}

fn start(shared: &Arc<Shared>, job: &Arc<Job>, work: Work) -> Answer {
    let (for_thread, mine) = (Arc::clone(shared), Arc::clone(job));
    let run = move || {
        let done = run(&for_thread, &mine, work);
        mine.end(done.map(|outcome| Outcome { counted: mine.counted(), ..outcome.bounded() }));
    };
    match host::start("job", run) {
        Ok(_) => Answer::Done,
        Err(e) => {
            let e = Error::io("cannot start a thread of the mover", &e);
            let failure = Failure::from(&e);
            job.end(Err(e));
            Answer::Failed(failure)
        }
    }
}

fn run(shared: &Arc<Shared>, job: &Arc<Job>, work: Work) -> Result<Outcome> {
    match work {
        Work::Upload { root, sweep, files } => upload(shared, job, Ino(root), sweep, &files),
        Work::Part { root, hold, temporary, bytes } => {
            let malformed = |code| Error::new(code, "cannot read a message of another node's mover");
            let temporary = StorePath::new(from_hex(&temporary)?).map_err(malformed)?;
            parts::write(shared, job, Ino(root), hold, temporary, bytes).map(|()| Outcome::default())
        }
        Work::Restore { ino, whole } => {
            let ino = Ino(ino);
            if shared.restoring.begin(ino) {
                if whole {
                    shared.whole.begin(ino);
                }
                let done = restore_with_room(shared, ino);
                shared.whole.end(ino);
                shared.restoring.end(ino);
                done?;
            }
            Ok(Outcome::default())
        }
        Work::Release { ino } => {
            let entry = shared.link.inode(Ino(ino));
            let entry = entry.map_err(|code| Error::new(code, format!("cannot find inode {ino}")))?;
            match evict::release(&shared.link, &shared.peers, &entry)? {
                Ok(bytes) => {
                    job.progress.done(1, bytes);
                    Ok(Outcome::default())
                }
                Err(Kept::Released) => Ok(Outcome::default()),
                Err(Kept::Because(why)) => Ok(Outcome { kept: Some(why), ..Outcome::default() }),
            }
        }
        Work::Task { verb, ino, recursive } => {
            trees::run(shared, verb, Ino(ino), recursive, &job.progress)?;
            let errors = job.progress.errors();
            Ok(Outcome { errors, error_count: job.progress.counts().errors, ..Outcome::default() })
        }
        Work::Resolve { parent, name, keep } => {
            trees::resolve(shared, Ino(parent), &name, keep).map(|()| Outcome::default())
        }
    }
}

fn upload(shared: &Shared, job: &Job, root: Ino, sweep: bool, files: &[String]) -> Result<Outcome> {
    let at = shared.stores.of(root)?;
    let wanted: Uploads =
        files.iter().map(|file| WantedUpload::decode(file).map(Box::new)).collect::<Result<_>>()?;
    if sweep {
        let mut directories: Vec<_> = wanted.iter().map(|wanted| &wanted.directory).collect();
        directories.sort();
        directories.dedup();
        for directory in directories {
            if let Err(e) = at.store.remove_leftovers(directory, &super::reconcile::is_alive) {
                tracing::debug!("cannot look for temporaries in {directory}: {e}");
            }
        }
    }
    let places: Vec<_> =
        wanted.iter().map(|wanted| (wanted.place.parent, wanted.place.name.clone())).collect();
    let go_on = || job.may_go_on() && !shared.stores.is_stopping();
    let reason = Reason {
        forced: true,
        is_full: false,
        progress: Some(&job.progress),
        go_on: &go_on,
        gives_way: false,
    };
    let mut pass = Pass::default();
    upload_here(shared, &at, wanted, reason, &mut pass);
    let index = |place: &(Ino, Vec<u8>)| places.iter().position(|other| other == place);
    let later = pass.later.iter().filter_map(index).collect();
    let failed =
        pass.failed.iter().filter_map(|(place, e)| Some((index(place)?, Failure::from(e)))).collect();
    let snapshots = pass.snapshots.iter().filter_map(index).collect();
    Ok(Outcome { later, failed, snapshots, ..Outcome::default() })
}
