//! The mover's socket: connections of commands, and the threads that run tasks.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;

use forebay_tasks::{Answer, Ask, Failure};
use forebay_types::{Code, Error, Ino, Result, MOVER_SOCKET};
use rustix::fs::Mode;

use super::table::Table;
use super::{Operations, RUNNERS};

/// Connections at a time; further ones are closed.
const CONNECTIONS_MAX: usize = 64;
/// Maximum bytes of a request.
const ASK_BYTES_MAX: u64 = 64 * 1024;
/// How often a command that waits gets the task.
const WAIT_PERIOD: Duration = Duration::from_millis(200);
/// How long a connection may be silent.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// How long a cancelled task may take to end before the command is told so.
const CANCEL_PATIENCE: Duration = Duration::from_secs(30);
/// How long running tasks may take to end with the mover.
const STOP_PATIENCE: Duration = Duration::from_secs(2);
/// Pause after an accept failed.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// The mover's socket and its tasks.
pub struct TaskServer {
    table: Arc<Table>,
}

struct Shared {
    table: Arc<Table>,
    operations: Arc<dyn Operations>,
    connections: AtomicUsize,
}

impl TaskServer {
    /// Takes up the tasks of the pool in `pool`, and listens there.
    pub fn start(pool: &Path, operations: Arc<dyn Operations>) -> Result<TaskServer> {
        let table = Arc::new(Table::load(pool)?);
        let listener = listen(&pool.join(MOVER_SOCKET))?;
        let shared = Arc::new(Shared { table: table.clone(), operations, connections: AtomicUsize::new(0) });
        for _ in 0..RUNNERS {
            let shared = shared.clone();
            spawn("mover-task", move || shared.run_tasks())?;
        }
        spawn("mover-accept", move || shared.accept(&listener))?;
        Ok(TaskServer { table })
    }

    /// Ends the tasks with the mover: the next one runs them again. Connections end with the process.
    pub fn stop(&self) {
        self.table.stop(STOP_PATIENCE);
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    spawned.map(drop).map_err(|e| Error::io("cannot start a thread of the mover", &e))
}

/// The pool's directory is closed to other users, so that nobody connects before the mode is set.
fn listen(path: &Path) -> Result<UnixListener> {
    let what = |e: std::io::Error| Error::io(format!("cannot make socket {}", path.display()), &e);
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(what(e)),
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(what)?;
    rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR).map_err(|e| what(e.into()))?;
    Ok(listener)
}

impl Shared {
    fn run_tasks(&self) {
        while let Some(job) = self.table.next() {
            tracing::info!(task = job.id, "{} of {} begins", job.verb, job.ino);
            let run = || self.operations.run(job.verb, job.ino, job.recursive, &job.progress);
            let result = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
                Err(Error::new(Code::Io, "the task has met an error of Forebay").why("see the pool's log"))
            });
            self.table.ended(job.id, result);
        }
    }

    fn accept(self: Arc<Shared>, listener: &UnixListener) {
        loop {
            let Ok((stream, _)) = listener.accept() else {
                std::thread::sleep(ACCEPT_AGAIN);
                continue;
            };
            let Ok(peer) = rustix::net::sockopt::socket_peercred(&stream) else { continue };
            let is_known = peer.uid == rustix::process::geteuid() || peer.uid.is_root();
            if !is_known || self.connections.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS_MAX {
                tracing::warn!(uid = peer.uid.as_raw(), "connection refused");
                if is_known {
                    self.connections.fetch_sub(1, Ordering::Relaxed);
                }
                continue;
            }
            let shared = self.clone();
            let served = spawn("mover-conn", move || {
                shared.serve(stream);
                shared.connections.fetch_sub(1, Ordering::Relaxed);
            });
            if let Err(e) = served {
                self.connections.fetch_sub(1, Ordering::Relaxed);
                tracing::error!("{e}");
            }
        }
    }

    /// Answers requests until the connection is closed or silent for too long.
    fn serve(&self, stream: UnixStream) {
        if stream.set_read_timeout(Some(SILENCE_MAX)).is_err()
            || stream.set_write_timeout(Some(SILENCE_MAX)).is_err()
        {
            return;
        }
        let mut stream = BufReader::new(stream);
        loop {
            let mut line = Vec::new();
            let read = stream.by_ref().take(ASK_BYTES_MAX).read_until(b'\n', &mut line);
            if read.is_err() || line.is_empty() {
                return;
            }
            let asked = match line.last() {
                Some(b'\n') => serde_json::from_slice(&line).map_err(|e| malformed().why(e)),
                _ => Err(malformed().why("it is too long, or was cut off")),
            };
            let answered = match asked {
                Ok(ask) => self.answer(ask, stream.get_mut()),
                // Where the next request begins is not known.
                Err(e) => {
                    let _ = send(stream.get_mut(), &Answer::Failed(Failure::from(&e)));
                    return;
                }
            };
            if answered.is_err() {
                return;
            }
        }
    }

    fn answer(&self, ask: Ask, stream: &mut UnixStream) -> std::io::Result<()> {
        let answer = match ask {
            Ask::Wait { id } => return self.wait(id, stream),
            Ask::Start { verb, ino, path, recursive } => {
                self.table.create(verb, Ino(ino), path, recursive).map(Answer::Task)
            }
            Ask::List => Ok(Answer::Tasks(self.table.list())),
            Ask::Show { id } => self.table.show(id).map(Answer::Task),
            Ask::Cancel { id } => self.table.cancel(id, CANCEL_PATIENCE).map(Answer::Task),
            Ask::Probe { url } => self.operations.probe(&url).map(|()| Answer::Done),
            Ask::Resolve { parent, name, keep } => {
                self.operations.resolve(Ino(parent), &name, keep).map(|()| Answer::Done)
            }
        };
        send(stream, &answer.unwrap_or_else(|e| Answer::Failed(Failure::from(&e))))
    }

    /// Sends a task as it proceeds.
    fn wait(&self, id: u64, stream: &mut UnixStream) -> std::io::Result<()> {
        let mut task = self.table.show(id);
        loop {
            let is_last = task.as_ref().map_or(true, |task| task.state.is_over());
            send(stream, &task.map_or_else(|e| Answer::Failed(Failure::from(&e)), Answer::Task))?;
            if is_last {
                return Ok(());
            }
            task = self.table.show_next(id, WAIT_PERIOD);
        }
    }
}

fn malformed() -> Error {
    Error::new(Code::Malformed, "the mover cannot read the request")
        .cure("command and mover must be of one version: stop the pool with the Forebay that started it")
}

fn send(stream: &mut UnixStream, answer: &Answer) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(answer)?;
    line.push(b'\n');
    stream.write_all(&line)
}
