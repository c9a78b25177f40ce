//! The sender's side: messages to other nodes' movers, and jobs that they do.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_types::{Code, Error, NodeId, Reply, Request, Result};
use xxhash_rust::xxh3::xxh3_64;

use super::letters::{Answer, Counted, Letter, Outcome, Work};
use super::PATIENCE;
use crate::engine::link::Link;
use crate::host::{self, Instant};
use crate::store::MoverId;

/// Pauses between two looks at a job.
const LOOK_FIRST: Duration = Duration::from_millis(2);
const LOOK_MAX: Duration = Duration::from_millis(100);
/// Messages to a node that may not exist.
const STRANGER_FAILURES: u32 = 3;
/// Pause after a message that was not answered.
const ASK_AGAIN: Duration = Duration::from_millis(300);

/// Other nodes' movers.
#[derive(Debug)]
pub(in crate::engine) struct Peers {
    link: Link,
    /// This mover's number.
    owner: u64,
    last: AtomicU64,
    /// Nodes that were given up, until they answer again.
    silent: Mutex<HashSet<NodeId>>,
    /// Directories of the store, by hash, in which a node has looked for temporaries of dead movers.
    swept: Mutex<HashSet<(NodeId, u64)>>,
    known: Mutex<HashMap<NodeId, Known>>,
}

/// A node that has answered, or was given up.
#[derive(Clone, Copy, Debug)]
struct Known {
    is_full: bool,
    /// When it answered last.
    answered: Instant,
}

impl Default for Known {
    fn default() -> Known {
        Known { is_full: false, answered: Instant::now() }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Peers {
    pub(in crate::engine) fn new(link: Link) -> Peers {
        Peers {
            link,
            owner: xxh3_64(MoverId::own().as_str().as_bytes()),
            last: AtomicU64::new(0),
            silent: Mutex::default(),
            swept: Mutex::default(),
            known: Mutex::default(),
        }
    }

    /// This node.
    pub(in crate::engine) fn me(&self) -> NodeId {
        self.link.pool.node().unwrap_or(NodeId::FIRST)
    }

    /// A number that no other mover uses for a job or a hold.
    pub(in crate::engine) fn number(&self) -> u64 {
        let last = self.last.fetch_add(1, Ordering::Relaxed);
        xxh3_64(&[self.owner.to_le_bytes(), last.to_le_bytes()].concat())
    }

    /// Sends a message, once.
    pub(in crate::engine) fn ask(&self, node: NodeId, letter: &Letter) -> Result<Answer> {
        let what = || format!("cannot reach the mover of node {node}");
        let text = serde_json::to_vec(letter).map_err(|e| Error::new(Code::Invalid, what()).why(e))?;
        let request = Request::AskMover { node, message: &text };
        let answer = self.link.pool.request(&request, |reply| match reply {
            Reply::Bytes(bytes) => Ok(bytes.to_vec()),
            _ => Err(Code::Malformed),
        });
        let answer = answer.map_err(|code| {
            let cure = "see `forebay status` and the log of that node";
            Error::new(Code::Io, what()).why(format!("it does not answer ({})", code.name())).cure(cure)
        })?;
        locked(&self.known).entry(node).or_default().answered = Instant::now();
        serde_json::from_slice(&answer)
            .map_err(|e| Error::new(Code::Malformed, what()).why(e).cure("all nodes must have one version"))
    }

    /// True for a node that was given up.
    pub(in crate::engine) fn is_silent(&self, node: NodeId) -> bool {
        locked(&self.silent).contains(&node)
    }

    /// True for a node that was given up, or has not answered for as long as a job waits.
    pub(in crate::engine) fn is_lost(&self, node: NodeId) -> bool {
        let known = locked(&self.known).get(&node).copied();
        self.is_silent(node) || known.is_some_and(|known| known.answered.elapsed() > PATIENCE)
    }

    /// The nodes that have not answered for so long.
    pub(in crate::engine) fn silent_for(&self, time: Duration) -> HashSet<NodeId> {
        let known = locked(&self.known);
        known.iter().filter(|(_, known)| known.answered.elapsed() > time).map(|(node, _)| *node).collect()
    }

    /// A node does not answer: nothing is asked of it until it answers.
    pub(in crate::engine) fn gave_up(&self, node: NodeId, e: &Error) {
        locked(&self.known).entry(node).or_default();
        if locked(&self.silent).insert(node) {
            tracing::warn!("{e}: what that node has is copied when it answers again");
        }
        locked(&self.swept).retain(|(of, _)| *of != node);
    }

    /// Starts the movers of the other nodes, which their daemons do at the first message.
    pub(in crate::engine) fn greet(&self) {
        for node in self.others(&[]) {
            let _ = self.ask(node, &Letter::IsFull);
        }
    }

    /// The other nodes: those with the first numbers, as many as there are, and these. Some may not exist.
    fn others(&self, more: &[NodeId]) -> Vec<NodeId> {
        let count = u16::try_from(self.link.pool.node_count()).unwrap_or(u16::MAX);
        let mut nodes: Vec<NodeId> = (1..=count).map(NodeId).chain(more.iter().copied()).collect();
        nodes.sort();
        nodes.dedup();
        nodes.retain(|node| *node != self.me());
        nodes
    }

    /// Asks the nodes that were given up whether they answer again, and those that answer whether they are full.
    pub(in crate::engine) fn look_around(&self) {
        let mut known: Vec<NodeId> = locked(&self.known).keys().copied().collect();
        known.sort();
        for node in known {
            let answer = self.ask(node, &Letter::IsFull);
            if answer.is_ok() {
                locked(&self.silent).remove(&node);
            }
            if let Some(known) = locked(&self.known).get_mut(&node) {
                known.is_full = matches!(answer, Ok(Answer::Done));
            }
        }
    }

    /// True if any other node was full when it was asked last.
    pub(in crate::engine) fn is_any_full(&self) -> bool {
        locked(&self.known).values().any(|known| known.is_full)
    }

    /// Whether a node has not looked for temporaries in one of these directories of a store yet.
    pub(in crate::engine) fn is_to_sweep(&self, node: NodeId, directories: &[u64]) -> bool {
        let swept = locked(&self.swept);
        directories.iter().any(|directory| !swept.contains(&(node, *directory)))
    }

    pub(in crate::engine) fn note_swept(&self, node: NodeId, directories: &[u64]) {
        locked(&self.swept).extend(directories.iter().map(|directory| (node, *directory)));
    }

    /// Ends what an earlier mover of this node has begun on others. Waits for the nodes that are `involved` as long as
    /// their jobs may go on; others may not exist.
    pub(in crate::engine) fn fence(&self, involved: &[NodeId], is_over: &(dyn Fn() -> bool + Sync)) {
        let letter = Letter::Fence { from: self.me().0, owner: self.owner };
        let nodes = self.others(involved);
        let one = |node: NodeId| {
            let (until, mut failures) = (Instant::now() + PATIENCE, 0);
            while Instant::now() < until && !is_over() {
                match self.ask(node, &letter) {
                    Ok(Answer::Done) => return,
                    Ok(_) => host::sleep(LOOK_MAX),
                    Err(_) if failures >= STRANGER_FAILURES && !involved.contains(&node) => return,
                    Err(_) => {
                        failures += 1;
                        host::sleep(ASK_AGAIN);
                    }
                }
            }
        };
        host::for_each(nodes, one);
    }

    /// Has another node's mover do a job, and waits for its end. `each` gets how far it is. `is_over`: give it up.
    ///
    /// # Errors
    /// [`Code::Io`] if the node does not answer, or its mover has died; [`Code::Interrupted`] after `is_over`; why the
    /// job failed as a whole.
    pub(in crate::engine) fn run(
        &self,
        node: NodeId,
        work: Work,
        each: &dyn Fn(Counted),
        is_over: &dyn Fn() -> bool,
    ) -> Result<Outcome> {
        let job = self.number();
        let begin = Letter::Begin { from: self.me().0, owner: self.owner, job, work };
        let (mut is_begun, mut heard, mut pause) = (false, Instant::now(), LOOK_FIRST);
        loop {
            let letter = if is_begun { &Letter::Look { job } } else { &begin };
            match self.ask(node, letter) {
                Ok(Answer::Over(outcome)) => {
                    let _ = self.ask(node, &Letter::Drop { job }); // it is forgotten after a while all the same
                    each(outcome.counted);
                    return Ok(*outcome);
                }
                Ok(Answer::Failed(failure)) => return Err(failure.into()),
                Ok(Answer::Done) => (is_begun, heard) = (true, Instant::now()),
                Ok(Answer::Running(counted)) => {
                    heard = Instant::now();
                    each(counted);
                }
                Ok(Answer::Unknown) => {
                    locked(&self.swept).retain(|(of, _)| *of != node);
                    return Err(Error::new(Code::Io, format!("the mover of node {node} has ended"))
                        .why("it was started again: what it was doing is done again"));
                }
                Err(e) if heard.elapsed() > PATIENCE => {
                    self.gave_up(node, &e);
                    return Err(e);
                }
                Err(_) => host::sleep(ASK_AGAIN),
            }
            if is_over() {
                let _ = self.ask(node, &Letter::Drop { job });
                return Err(Error::new(Code::Interrupted, format!("a job of node {node} was given up")));
            }
            host::sleep(pause);
            pause = (pause * 3 / 2).min(LOOK_MAX);
        }
    }
}
