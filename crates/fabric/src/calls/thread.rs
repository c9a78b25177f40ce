//! A thread for calls.

use std::sync::mpsc::{channel, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use forebay_types::{Code, Error, Result};

use super::{CallEvent, Calls};
use crate::endpoint::Waker;

type Work = Box<dyn FnOnce(&mut Calls) + Send>;

/// Calls with a thread of their own, which sleeps while it has no work. Other threads pass it closures to run. The
/// thread passes events to the handler. Dropping this ends the thread and waits for it.
#[derive(Debug)]
pub struct CallsThread {
    work: Option<Sender<Work>>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

impl CallsThread {
    /// Starts the thread, named `name` (`ps` shows 15 bytes).
    ///
    /// # Errors
    /// [`Code::NoResources`] when the kernel cannot create a thread.
    pub fn start(
        name: &str,
        mut calls: Calls,
        mut handler: impl FnMut(&mut Calls, CallEvent) + Send + 'static,
    ) -> Result<CallsThread> {
        let waker = calls.endpoint().waker().clone();
        let (sender, work) = channel::<Work>();
        let body = move || loop {
            loop {
                match work.try_recv() {
                    Ok(work) => work(&mut calls),
                    Err(std::sync::mpsc::TryRecvError::Empty) => break,
                    Err(std::sync::mpsc::TryRecvError::Disconnected) => return calls.leave("it ends"),
                }
            }
            let mut busy = calls.progress() > 0;
            while let Some(event) = calls.next_event() {
                busy = true;
                handler(&mut calls, event);
            }
            if !busy {
                calls.wait(Duration::from_secs(1));
            }
        };
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(body);
        let thread = thread
            .map_err(|e| Error::new(Code::NoResources, format!("cannot start thread {name}")).why(e))?;
        Ok(CallsThread { work: Some(sender), waker, thread: Some(thread) })
    }

    /// Has the thread run a closure with the calls, soon.
    ///
    /// # Errors
    /// [`Code::PoolGone`] when the thread has ended, because its handler panicked.
    pub fn hand(&self, work: impl FnOnce(&mut Calls) + Send + 'static) -> std::result::Result<(), Code> {
        let sender = self.work.as_ref().ok_or(Code::PoolGone)?;
        sender.send(Box::new(work)).map_err(|_| Code::PoolGone)?;
        self.waker.wake();
        Ok(())
    }
}

impl Drop for CallsThread {
    fn drop(&mut self) {
        self.work = None;
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            // If the handler panicked, the panic hook has printed the reason.
            let _ = thread.join();
        }
    }
}
