//! The command's side of a connection to the mover.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_types::{Code, Error, Result, MOVER_SOCKET, STORES_MARK};

use crate::{Answer, Ask, Keep, Task, Verb};

/// How long the mover may take for what it answers from memory.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the mover of a pool in front of a store may take until it serves: `up` does not wait for it, and the supervisor
/// starts one that was killed again.
const START_TIMEOUT: Duration = Duration::from_secs(3);
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// How long a call to a store may take. The mover has limits of its own.
const STORE_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum bytes of an answer.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// A connection to the mover of a pool.
#[derive(Debug)]
pub struct MoverClient {
    stream: BufReader<UnixStream>,
}

impl MoverClient {
    /// Connects to the mover of the pool in `pool`. [`Code::NotFound`] when there is none.
    pub fn connect(pool: &Path) -> Result<MoverClient> {
        let what = || format!("cannot reach the mover of pool {}", pool.display());
        let end = Instant::now() + START_TIMEOUT;
        let connected = loop {
            match UnixStream::connect(pool.join(MOVER_SOCKET)) {
                Err(_) if pool.join(STORES_MARK).exists() && Instant::now() < end => {
                    std::thread::sleep(LOOK_AGAIN);
                }
                connected => break connected,
            }
        };
        let stream = connected.map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused => {
                Error::new(Code::NotFound, what())
                    .why("it does not run")
                    .cure("`forebay status` tells why; `forebay attach` starts it")
            }
            _ => Error::io(what(), &e),
        })?;
        Ok(MoverClient { stream: BufReader::new(stream) })
    }

    /// Creates a task.
    pub fn start(&mut self, verb: Verb, ino: u64, path: &str, recursive: bool) -> Result<Task> {
        self.ask(&Ask::Start { verb, ino, path: path.to_owned(), recursive }, ANSWER_TIMEOUT).and_then(task)
    }

    /// All tasks, the oldest first.
    pub fn list(&mut self) -> Result<Vec<Task>> {
        match self.ask(&Ask::List, ANSWER_TIMEOUT)? {
            Answer::Tasks(tasks) => Ok(tasks),
            _ => Err(unexpected()),
        }
    }

    /// One task. [`Code::NotFound`] if there is no such task.
    pub fn show(&mut self, id: u64) -> Result<Task> {
        self.ask(&Ask::Show { id }, ANSWER_TIMEOUT).and_then(task)
    }

    /// Cancels a task. Returns it as it is when it is over.
    pub fn cancel(&mut self, id: u64) -> Result<Task> {
        self.ask(&Ask::Cancel { id }, STORE_TIMEOUT).and_then(task)
    }

    /// Waits until a task is over. `each` gets it as it proceeds, at least once a second; when `each` returns false,
    /// the waiting ends and the task goes on.
    pub fn wait(mut self, id: u64, mut each: impl FnMut(&Task) -> bool) -> Result<Task> {
        self.send(&Ask::Wait { id })?;
        self.limit(ANSWER_TIMEOUT)?;
        loop {
            let task = self.receive().and_then(task)?;
            if !each(&task) || task.state.is_over() {
                return Ok(task);
            }
        }
    }

    /// Opens a store and looks at its root.
    pub fn probe(&mut self, url: &str) -> Result<()> {
        self.done(&Ask::Probe { url: url.to_owned() })
    }

    /// Settles a conflict.
    pub fn resolve(&mut self, parent: u64, name: &[u8], keep: Keep) -> Result<()> {
        self.done(&Ask::Resolve { parent, name: name.to_owned(), keep })
    }

    fn done(&mut self, ask: &Ask) -> Result<()> {
        match self.ask(ask, STORE_TIMEOUT)? {
            Answer::Done => Ok(()),
            _ => Err(unexpected()),
        }
    }

    fn ask(&mut self, ask: &Ask, timeout: Duration) -> Result<Answer> {
        self.limit(timeout)?;
        self.send(ask)?;
        self.receive()
    }

    fn limit(&self, timeout: Duration) -> Result<()> {
        let stream = self.stream.get_ref();
        let set =
            stream.set_read_timeout(Some(timeout)).and_then(|()| stream.set_write_timeout(Some(timeout)));
        set.map_err(|e| broken(&e))
    }

    fn send(&mut self, ask: &Ask) -> Result<()> {
        let mut line = serde_json::to_string(ask).map_err(|e| unexpected().why(e))?;
        line.push('\n');
        self.stream.get_mut().write_all(line.as_bytes()).map_err(|e| broken(&e))
    }

    fn receive(&mut self) -> Result<Answer> {
        let mut line = Vec::new();
        let read = self.stream.by_ref().take(ANSWER_BYTES_MAX).read_until(b'\n', &mut line);
        read.map_err(|e| broken(&e))?;
        if line.last() != Some(&b'\n') {
            return Err(Error::new(Code::PoolGone, "the mover has ended")
                .why("it closed the connection before it answered")
                .cure("it is started again by itself, and its tasks go on: see `forebay tasks`"));
        }
        match serde_json::from_slice(&line) {
            Ok(Answer::Failed(failure)) => Err(failure.into()),
            Ok(answer) => Ok(answer),
            Err(e) => Err(unexpected().why(e)),
        }
    }
}

fn task(answer: Answer) -> Result<Task> {
    match answer {
        Answer::Task(task) => Ok(task),
        _ => Err(unexpected()),
    }
}

fn broken(e: &std::io::Error) -> Error {
    match e.kind() {
        std::io::ErrorKind::WouldBlock => Error::new(Code::TimedOut, "the mover does not answer")
            .cure("`forebay status` tells what it does; tasks go on without this command"),
        _ => Error::io("cannot talk to the mover", e),
    }
}

fn unexpected() -> Error {
    Error::new(Code::Malformed, "the mover sent an unexpected answer")
        .cure("command and mover must be of one version: stop the pool with the Forebay that started it")
}
