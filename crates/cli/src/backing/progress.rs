//! Progress of the mover's tasks: a bar on a terminal, a line now and then elsewhere.

use std::path::Path;
use std::time::{Duration, Instant};

use forebay_server::control;
use forebay_sys::signals::Signals;
use forebay_tasks::{MoverClient, Task};
use forebay_types::{Code, Result};
use indicatif::{ProgressBar, ProgressStyle};

use crate::staging::Style;
use crate::table;
use crate::tally::Tally;

/// Period of the lines where there is no terminal.
const LINE_PERIOD: Duration = Duration::from_secs(5);
/// How often a mover that was replaced is looked for, and for how long.
const AGAIN_PERIOD: Duration = Duration::from_millis(200);
const AGAIN_MAX: Duration = Duration::from_secs(30);

/// How waiting for a task ended.
#[derive(Debug)]
pub(crate) enum Waited {
    /// The task is over.
    Over(Task),
    /// A signal came first; the task goes on.
    Interrupted(i32),
    /// The time was over first; the task goes on.
    TimedOut(Task),
}

/// Waits until a task is over, also over the death of the mover, which takes its tasks up again.
pub(crate) fn wait(
    pool: &Path,
    id: u64,
    style: Style,
    signals: &Signals,
    until: Option<Instant>,
    tally: Option<&Tally>,
) -> Result<Waited> {
    let mut shown = Shown::new(style);
    let mut lost: Option<Instant> = None;
    loop {
        let mut stopped = None;
        let mut timed_out = false;
        let waited = MoverClient::connect(pool).and_then(|client| {
            client.wait(id, |task| {
                lost = None;
                shown.show(task);
                if let Some(tally) = tally {
                    tally.say(task.files_done, task.bytes_done);
                }
                stopped = stopped.or_else(|| stop_signal(signals));
                timed_out = until.is_some_and(|until| Instant::now() >= until);
                stopped.is_none() && !timed_out
            })
        });
        match waited {
            Ok(task) if task.state.is_over() => {
                shown.end();
                return Ok(Waited::Over(task));
            }
            Ok(task) => {
                shown.end();
                return Ok(stopped.map_or(Waited::TimedOut(task), Waited::Interrupted));
            }
            Err(e) if matches!(e.code, Code::PoolGone | Code::NotFound) && !is_forgotten(pool, id) => {
                if let Some(signal) = stopped.or_else(|| stop_signal(signals)) {
                    shown.end();
                    return Ok(Waited::Interrupted(signal));
                }
                // Without its daemon, a pool gets no other mover.
                let is_down = control::ensure_up(pool).is_err_and(|e| e.code == Code::NotFound);
                if is_down || lost.get_or_insert_with(Instant::now).elapsed() >= AGAIN_MAX {
                    return Err(e);
                }
                std::thread::sleep(AGAIN_PERIOD);
            }
            Err(e) => return Err(e),
        }
    }
}

/// True if the mover answers, and has no such task.
fn is_forgotten(pool: &Path, id: u64) -> bool {
    MoverClient::connect(pool)
        .is_ok_and(|mut client| client.show(id).is_err_and(|e| e.code == Code::NotFound))
}

fn stop_signal(signals: &Signals) -> Option<i32> {
    let stops = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];
    std::iter::from_fn(|| signals.next())
        .map(|received| received.signal)
        .find(|signal| stops.contains(signal))
}

struct Shown {
    style: Style,
    bar: ProgressBar,
    started: Instant,
    next_line: Duration,
}

impl Shown {
    fn new(style: Style) -> Shown {
        let bar = match style {
            Style::Bar => ProgressBar::new(0),
            _ => ProgressBar::hidden(),
        };
        let template =
            "{prefix} [{wide_bar}] {binary_bytes}/{binary_total_bytes}, {msg}, {binary_bytes_per_sec}";
        bar.set_style(
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
        );
        Shown { style, bar, started: Instant::now(), next_line: LINE_PERIOD }
    }

    fn show(&mut self, task: &Task) {
        match self.style {
            Style::Bar => {
                self.bar.set_prefix(task.verb.name());
                self.bar.set_length(task.bytes_total);
                self.bar.set_position(task.bytes_done);
                self.bar.set_message(files(task));
            }
            Style::Lines if self.started.elapsed() >= self.next_line => {
                self.next_line = self.started.elapsed() + LINE_PERIOD;
                note!("forebay: {}", line(task));
            }
            _ => {}
        }
    }

    fn end(&self) {
        self.bar.finish_and_clear();
    }
}

fn files(task: &Task) -> String {
    format!("{} of {}", task.files_done, table::count(task.files_total, "file"))
}

/// A task's progress in one line.
fn line(task: &Task) -> String {
    let (done, total) = (table::bytes(task.bytes_done), table::bytes(task.bytes_total));
    format!("{} of {}: {done} of {total}, {}", task.verb, task.path, files(task))
}
