//! A thread of the worker that panics ends the worker.

/// Ends the worker when its thread panics: clients and other nodes would wait for the missing thread, while the
/// supervisor starts a complete worker.
pub(super) struct EndOfWorker;

impl Drop for EndOfWorker {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}
