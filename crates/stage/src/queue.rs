//! The jobs that threads share. They are a stack, so that a directory's files are copied before its siblings are
//! listed, and the tree's depth rather than its size bounds the number of waiting jobs.

use std::sync::{Condvar, Mutex, MutexGuard};

#[derive(Debug)]
struct State<J> {
    jobs: Vec<J>,
    /// Threads that execute a job, and may push more.
    busy: usize,
}

/// A stack of jobs that ends when it is empty and no thread executes a job.
#[derive(Debug)]
pub(crate) struct Queue<J> {
    state: Mutex<State<J>>,
    changed: Condvar,
}

/// Marks a thread as executing a job, until dropped.
pub(crate) struct Busy<'a, J>(&'a Queue<J>);

impl<J> Queue<J> {
    pub(crate) fn new() -> Queue<J> {
        Queue { state: Mutex::new(State { jobs: Vec::new(), busy: 0 }), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State<J>> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Adds a job, which is taken next.
    pub(crate) fn push(&self, job: J) {
        self.lock().jobs.push(job);
        self.changed.notify_one();
    }

    /// The next job, without waiting.
    pub(crate) fn take_now(&self) -> Option<(J, Busy<'_, J>)> {
        let mut state = self.lock();
        let job = state.jobs.pop()?;
        state.busy += 1;
        Some((job, Busy(self)))
    }

    /// The next job. Waits while other threads may push one; `None` when all are done.
    pub(crate) fn take(&self) -> Option<(J, Busy<'_, J>)> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop() {
                state.busy += 1;
                return Some((job, Busy(self)));
            }
            if state.busy == 0 {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        }
    }
}

impl<J> Drop for Busy<'_, J> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.busy -= 1;
        if state.busy == 0 && state.jobs.is_empty() {
            self.0.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn take_of_jobs_that_push_more_ends_after_all() {
        let queue = Queue::new();
        queue.push(12u64);
        let done = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while let Some((job, busy)) = queue.take() {
                        done.fetch_add(1, Ordering::Relaxed);
                        for _ in 0..if job > 0 { 2 } else { 0 } {
                            queue.push(job - 1);
                        }
                        drop(busy);
                    }
                });
            }
        });
        assert_eq!(done.into_inner(), (1 << 13) - 1);
        assert!(queue.take_now().is_none());
    }
}
