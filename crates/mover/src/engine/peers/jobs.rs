//! The receiver's side: the jobs that other nodes' movers have begun here.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_tasks::Failure;
use forebay_types::Result;

use super::letters::{Answer, Counted, Outcome};
use super::FENCE;
use crate::host::Instant;
use crate::tasks::Progress;

/// How long the outcome of a job is kept for its mover.
const KEPT: Duration = Duration::from_secs(120);

/// A job.
#[derive(Debug)]
pub(in crate::engine) struct Job {
    from: u16,
    owner: u64,
    pub(in crate::engine) progress: Progress,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    looked: Instant,
    outcome: Option<std::result::Result<Outcome, Failure>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Job {
    /// False when nothing more may be changed for it: its mover has dropped it, or does not look at it.
    pub(in crate::engine) fn may_go_on(&self) -> bool {
        !self.progress.is_cancelled() && locked(&self.state).looked.elapsed() < FENCE
    }

    pub(in crate::engine) fn counted(&self) -> Counted {
        let counts = self.progress.counts();
        Counted { counts: [counts.files_total, counts.files_done, counts.bytes_total, counts.bytes_done] }
    }

    /// It is over.
    pub(in crate::engine) fn end(&self, outcome: Result<Outcome>) {
        locked(&self.state).outcome = Some(outcome.map_err(|e| Failure::from(&e)));
    }

    fn is_over(&self) -> bool {
        locked(&self.state).outcome.is_some()
    }

    fn look(&self) -> Answer {
        let mut state = locked(&self.state);
        state.looked = Instant::now();
        match &state.outcome {
            None => Answer::Running(self.counted()),
            Some(Ok(outcome)) => Answer::Over(Box::new(outcome.clone())),
            Some(Err(failure)) => Answer::Failed(failure.clone()),
        }
    }
}

/// All jobs that other nodes have begun here.
#[derive(Debug, Default)]
pub(in crate::engine) struct Jobs {
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    jobs: HashMap<u64, Arc<Job>>,
    /// The mover of each node.
    owners: HashMap<u16, u64>,
}

impl Table {
    /// Ends the jobs of a node's earlier movers. True when all have ended.
    fn fence(&mut self, from: u16, owner: u64) -> bool {
        self.owners.insert(from, owner);
        let mut all_ended = true;
        self.jobs.retain(|_, job| {
            if job.from != from || job.owner == owner {
                return true;
            }
            job.progress.cancel();
            all_ended &= job.is_over();
            !job.is_over()
        });
        all_ended
    }
}

impl Jobs {
    pub(in crate::engine) fn fence(&self, from: u16, owner: u64) -> Answer {
        match locked(&self.table).fence(from, owner) {
            true => Answer::Done,
            false => Answer::Running(Counted::default()),
        }
    }

    /// A new job that the caller starts; none if it was begun, or may not begin yet, with the answer.
    pub(in crate::engine) fn begin(
        &self,
        from: u16,
        owner: u64,
        number: u64,
    ) -> std::result::Result<Arc<Job>, Answer> {
        let mut table = locked(&self.table);
        if table.jobs.contains_key(&number) {
            return Err(Answer::Done);
        }
        if !table.fence(from, owner) {
            return Err(Answer::Running(Counted::default()));
        }
        let state = Mutex::new(State { looked: Instant::now(), outcome: None });
        let job = Arc::new(Job { from, owner, progress: Progress::default(), state });
        table.jobs.insert(number, Arc::clone(&job));
        Ok(job)
    }

    pub(in crate::engine) fn look(&self, number: u64) -> Answer {
        let job = locked(&self.table).jobs.get(&number).cloned();
        job.map_or(Answer::Unknown, |job| job.look())
    }

    /// Ends a job, and forgets it if it is over.
    pub(in crate::engine) fn drop_job(&self, number: u64) {
        let mut table = locked(&self.table);
        if let Some(job) = table.jobs.get(&number) {
            job.progress.cancel();
            if job.is_over() {
                table.jobs.remove(&number);
            }
        }
    }

    /// Forgets jobs that are over and that nobody looked at for long.
    pub(in crate::engine) fn forget_old(&self) {
        locked(&self.table).jobs.retain(|_, job| {
            let state = locked(&job.state);
            state.outcome.is_none() || state.looked.elapsed() < KEPT && !job.progress.is_cancelled()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::{Code, Error};

    #[test]
    fn a_job_is_begun_once_and_its_outcome_is_kept() {
        let jobs = Jobs::default();
        let job = jobs.begin(1, 7, 100).unwrap();
        assert!(matches!(jobs.begin(1, 7, 100), Err(Answer::Done)));
        job.progress.done(2, 30);
        assert_eq!(jobs.look(100), Answer::Running(Counted { counts: [0, 2, 0, 30] }));
        job.end(Ok(Outcome { later: vec![3], ..Outcome::default() }));
        jobs.forget_old();
        assert!(matches!(jobs.look(100), Answer::Over(outcome) if outcome.later == [3]));
        jobs.drop_job(100);
        assert_eq!(jobs.look(100), Answer::Unknown);
    }

    #[test]
    fn a_new_mover_waits_until_the_jobs_of_the_old_one_have_ended() {
        let jobs = Jobs::default();
        let (old, other) = (jobs.begin(1, 7, 100).unwrap(), jobs.begin(2, 5, 200).unwrap());
        assert!(matches!(jobs.begin(1, 8, 101), Err(Answer::Running(_))));
        assert!(matches!(jobs.fence(1, 8), Answer::Running(_)));
        assert!(!old.may_go_on() && other.may_go_on());
        old.end(Err(Error::new(Code::Interrupted, "it was fenced")));
        assert_eq!(jobs.fence(1, 8), Answer::Done);
        jobs.begin(1, 8, 101).unwrap();
        assert_eq!(jobs.look(100), Answer::Unknown);
    }
}
