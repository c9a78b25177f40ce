//! The queue of the I/O workers' jobs. A job wakes one worker. A channel behind a lock would wake two: the one that
//! takes the job, and the one that then waits for the next job in its place.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use forebay_fabric::Ticket;
use forebay_types::{BackingId, MoveKind};
use forebay_wire::{Memory, Stamp};

use super::bounce::DataBuffer;

/// A job of the I/O workers.
#[derive(Debug)]
pub(in crate::worker) enum Job {
    /// Serve a request for a backing file.
    Serve {
        /// The recipient of the reply.
        asker: Asker,
        /// The encoded request.
        message: Vec<u8>,
    },
    /// Fill a piece of memory from a backing file, or write it to one.
    Move(Box<Moving>),
}

/// Data in transit between a backing file and another node.
#[derive(Debug)]
pub(in crate::worker) struct Moving {
    pub(super) ticket: Ticket,
    pub(super) id: BackingId,
    pub(super) kind: MoveKind,
    pub(super) offset: u64,
    pub(super) bytes: usize,
    /// Their memory on the other node.
    pub(super) memory: Memory,
    /// Their memory on this node.
    pub(super) room: DataBuffer,
    /// When the requester gives up.
    pub(super) until: std::time::Duration,
}

/// The requester.
#[derive(Debug)]
pub(in crate::worker) enum Asker {
    /// A process of another node.
    There(Ticket),
    /// A process of this node.
    Here(Stamp),
}

impl Asker {
    pub(super) fn stamp(&self) -> Stamp {
        match self {
            Asker::There(ticket) => ticket.stamp,
            Asker::Here(stamp) => *stamp,
        }
    }
}

#[derive(Debug, Default)]
struct State {
    jobs: VecDeque<Job>,
    takers: usize,
    /// The sender is gone.
    over: bool,
}

#[derive(Debug, Default)]
struct Queue {
    state: Mutex<State>,
    given: Condvar,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The sending end. The workers end when it is dropped and all jobs are taken.
#[derive(Debug)]
pub(in crate::worker) struct Jobs(Arc<Queue>);

/// A receiving end.
#[derive(Debug)]
pub(in crate::worker) struct Taker(Arc<Queue>);

/// A queue, and its first receiving end.
pub(in crate::worker) fn queue() -> (Jobs, Taker) {
    let queue = Arc::new(Queue::default());
    queue.state().takers = 1;
    (Jobs(Arc::clone(&queue)), Taker(queue))
}

impl Jobs {
    /// Sends a job. Returns it when there is no worker.
    pub(super) fn give(&self, job: Job) -> Result<(), Job> {
        let mut state = self.0.state();
        if state.takers == 0 {
            return Err(job);
        }
        state.jobs.push_back(job);
        drop(state);
        self.0.given.notify_one();
        Ok(())
    }
}

impl Drop for Jobs {
    fn drop(&mut self) {
        self.0.state().over = true;
        self.0.given.notify_all();
    }
}

impl Taker {
    /// Waits for a job. None when there will be no more.
    pub(super) fn take(&self) -> Option<Job> {
        let mut state = self.0.state();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.over {
                return None;
            }
            state = self.0.given.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    #[cfg(any(test, feature = "simulation"))]
    /// Takes a job, if there is one.
    pub(in crate::worker) fn try_take(&self) -> Option<Job> {
        self.0.state().jobs.pop_front()
    }
}

impl Clone for Taker {
    fn clone(&self) -> Taker {
        self.0.state().takers += 1;
        Taker(Arc::clone(&self.0))
    }
}

impl Drop for Taker {
    fn drop(&mut self) {
        self.0.state().takers -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(byte: u8) -> Job {
        Job::Serve { asker: Asker::Here(Stamp::default()), message: vec![byte] }
    }

    fn byte(job: &Job) -> u8 {
        match job {
            Job::Serve { message, .. } => message[0],
            Job::Move(_) => 0,
        }
    }

    #[test]
    fn each_job_is_taken_once_and_takers_end_when_all_are_and_no_more_come() {
        let (jobs, taker) = queue();
        let takers: Vec<_> = (0..4)
            .map(|_| {
                let taker = taker.clone();
                std::thread::spawn(move || {
                    std::iter::from_fn(|| taker.take()).map(|job| byte(&job)).collect::<Vec<_>>()
                })
            })
            .collect();
        drop(taker);
        (0..200).for_each(|byte| jobs.give(job(byte)).unwrap());
        drop(jobs);
        let mut taken: Vec<u8> = takers.into_iter().flat_map(|taker| taker.join().unwrap()).collect();
        taken.sort_unstable();
        assert!(taken.into_iter().eq(0..200));
    }

    #[test]
    fn job_that_nobody_can_take_comes_back() {
        let (jobs, taker) = queue();
        jobs.give(job(1)).unwrap();
        assert!(taker.try_take().is_some_and(|job| byte(&job) == 1) && taker.try_take().is_none());
        drop(taker.clone());
        jobs.give(job(2)).unwrap();
        drop(taker);
        assert!(jobs.give(job(3)).is_err_and(|job| byte(&job) == 3));
    }
}
