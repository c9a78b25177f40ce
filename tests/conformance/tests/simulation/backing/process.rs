//! The movers of a simulated pool: the mover's engine, whole, with threads that the scheduler runs and kills.

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use forebay_client::{Pool, Role};
use forebay_mover::host::{self, Host};
use forebay_mover::program::Engine;
use forebay_mover::store::{simulate_movers, simulate_stores, MoverId};
use forebay_mover::tasks::Progress;
use forebay_tasks::Verb;
use forebay_types::Ino;

use super::store::{sleep, Disturbed, Weather};
use crate::baton::{self, Process, NOW_NS};

/// The engine of a mover, once it has started.
type Running = Arc<Mutex<Option<Arc<dyn Engine>>>>;

/// A mover's process.
#[derive(Clone)]
pub(crate) struct Mover {
    pub(crate) process: Process,
    pub(crate) session: u64,
    id: MoverId,
    engine: Running,
}

thread_local! {
    static MOVER: RefCell<Option<MoverId>> = const { RefCell::new(None) };
}

/// IDs of the movers that run.
static RUNNING: Mutex<Vec<(String, Process)>> = Mutex::new(Vec::new());

fn is_running(id: &str) -> bool {
    let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    running.iter().any(|(other, process)| other == id && !process.is_killed())
}

fn mine() -> MoverId {
    MOVER.with(|mine| mine.borrow().clone()).expect("a thread of a mover")
}

fn start_as(process: &Process, id: MoverId, name: &str, run: impl FnOnce() + Send + 'static) {
    process.start(name, move || {
        MOVER.with(|mine| *mine.borrow_mut() = Some(id));
        run();
    });
}

impl Mover {
    /// Starts a mover that attaches at the socket in `dir`: the `start`th of its node.
    pub(crate) fn start(node: u16, start: u64, session: u64, dir: PathBuf) -> Mover {
        let (process, engine) = (Process::default(), Running::default());
        let id = MoverId::simulated(node, start);
        RUNNING
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((id.as_str().to_owned(), process.clone()));
        let mine = Arc::clone(&engine);
        start_as(&process, id.clone(), "mover", move || {
            // Its daemon may be down: then its supervisor starts another one.
            let Ok(pool) = Pool::attach_as(&dir, Role::Tool) else { return };
            let started = forebay_mover::start(pool).unwrap_or_else(|e| panic!("{e}"));
            *mine.lock().unwrap_or_else(PoisonError::into_inner) = Some(started);
        });
        Mover { process, session, id, engine }
    }

    /// Starts a task, if the mover runs.
    pub(crate) fn task(&self, verb: Verb, ino: Ino) {
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(engine) = engine else { return };
        start_as(&self.process, self.id.clone(), "task", move || {
            let _ = engine.run(verb, ino, true, &Progress::default());
        });
    }

    /// True while it has threads.
    pub(crate) fn is_alive(&self) -> bool {
        self.process.is_alive()
    }
}

/// What the movers of this process get in the machine's place.
struct Simulated;

impl Host for Simulated {
    fn now(&self) -> Duration {
        Duration::from_nanos(NOW_NS.load(Ordering::Relaxed))
    }

    fn since_1970(&self) -> Duration {
        let now = baton::timestamp();
        Duration::new(now.sec as u64, now.nsec)
    }

    fn sleep(&self, time: Duration) {
        sleep(time);
    }

    fn start(&self, name: &str, run: Box<dyn FnOnce() + Send>) {
        start_as(&Process::mine(), mine(), name, run);
    }
}

/// Makes the movers of this process run by the scheduler, with stores in this weather.
pub(super) fn take_over(weather: Weather) {
    host::simulate(Box::new(Simulated));
    simulate_movers(mine, is_running);
    simulate_stores(move |store| Arc::new(Disturbed::new(store, weather.clone())));
}
