//! Progress of staging: a bar on a terminal, a line now and then elsewhere; and the signals that stop staging.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay_stage::Progress;
use forebay_sys::signals::Signals;
use indicatif::{ProgressBar, ProgressStyle};

use super::Direction;
use crate::table;
use crate::tally::Tally;

/// Period of the lines where there is no terminal.
const LINE_PERIOD: Duration = Duration::from_secs(5);
/// Signals are polled this often.
const SIGNAL_PERIOD: Duration = Duration::from_millis(20);

/// How progress is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Style {
    /// A bar.
    Bar,
    /// A line now and then.
    Lines,
    /// Only messages.
    Messages,
}

impl Style {
    /// The style that suits stderr; [`Style::Messages`] when no progress is wanted.
    pub(crate) fn of_stderr(wanted: bool) -> Style {
        match (wanted, std::io::stderr().is_terminal()) {
            (false, _) => Style::Messages,
            (true, true) => Style::Bar,
            (true, false) => Style::Lines,
        }
    }
}

/// Signals that stop staging: the first, or, with a warning, the second.
#[derive(Debug)]
pub(crate) struct Interrupt<'a> {
    signals: &'a Signals,
    /// Printed at the first signal, which then does not stop staging.
    warning: Option<&'static str>,
    looked_ms: AtomicU64,
    /// The signal that stopped staging; 0 for none.
    stopped_by: AtomicU32,
    warned: AtomicBool,
    born: Instant,
}

impl<'a> Interrupt<'a> {
    /// Stops at the first of these signals; with a warning, at the second.
    pub(crate) fn new(signals: &'a Signals, warning: Option<&'static str>) -> Interrupt<'a> {
        Interrupt {
            signals,
            warning,
            looked_ms: AtomicU64::new(0),
            stopped_by: AtomicU32::new(0),
            warned: AtomicBool::new(false),
            born: Instant::now(),
        }
    }

    /// The signal that stopped staging.
    pub(crate) fn stopped_by(&self) -> Option<i32> {
        match self.stopped_by.load(Ordering::Relaxed) {
            0 => None,
            signal => Some(signal as i32),
        }
    }

    fn stops(&self) -> bool {
        if self.stopped_by().is_some() {
            return true;
        }
        let now = self.born.elapsed().as_millis() as u64;
        let looked = self.looked_ms.load(Ordering::Relaxed);
        let due = now >= looked + SIGNAL_PERIOD.as_millis() as u64;
        if !due || self.looked_ms.compare_exchange(looked, now, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            return false;
        }
        while let Some(received) = self.signals.next() {
            if !matches!(received.signal, libc::SIGINT | libc::SIGTERM | libc::SIGHUP | libc::SIGQUIT) {
                continue;
            }
            match self.warning {
                Some(warning) if !self.warned.swap(true, Ordering::Relaxed) => {
                    note!("forebay: {warning}")
                }
                _ => {
                    self.stopped_by.store(received.signal as u32, Ordering::Relaxed);
                    return true;
                }
            }
        }
        false
    }
}

/// Progress as shown to the user.
#[derive(Debug)]
pub(crate) struct Shown<'a> {
    direction: Direction,
    style: Style,
    interrupt: &'a Interrupt<'a>,
    bar: ProgressBar,
    found_files: AtomicU64,
    found_bytes: AtomicU64,
    done_files: AtomicU64,
    done_bytes: AtomicU64,
    scanned: AtomicBool,
    next_line_ms: AtomicU64,
    started: Instant,
    tally: Option<Tally>,
}

impl<'a> Shown<'a> {
    /// No progress yet.
    pub(crate) fn new(direction: Direction, style: Style, interrupt: &'a Interrupt<'a>) -> Shown<'a> {
        let bar = match style {
            Style::Bar => ProgressBar::new(0),
            _ => ProgressBar::hidden(),
        };
        bar.set_prefix(direction.doing());
        bar.set_message(table::count(0, "file"));
        // Until the sources are scanned the total is not known, so a spinner is shown.
        bar.set_style(style_of("{spinner} {prefix}  {binary_bytes}, {msg}, {binary_bytes_per_sec}"));
        if style == Style::Bar {
            bar.enable_steady_tick(Duration::from_millis(100));
        }
        Shown {
            direction,
            style,
            interrupt,
            bar,
            found_files: AtomicU64::new(0),
            found_bytes: AtomicU64::new(0),
            done_files: AtomicU64::new(0),
            done_bytes: AtomicU64::new(0),
            scanned: AtomicBool::new(false),
            next_line_ms: AtomicU64::new(LINE_PERIOD.as_millis() as u64),
            started: Instant::now(),
            tally: None,
        }
    }

    /// Writes a tally too, and pauses when that is emptied.
    pub(crate) fn with_tally(self, tally: Option<Tally>) -> Shown<'a> {
        Shown { tally, ..self }
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }

    fn files_text(&self) -> String {
        let done = self.done_files.load(Ordering::Relaxed);
        match self.scanned.load(Ordering::Relaxed) {
            true => format!("{done} of {}", table::count(self.found_files.load(Ordering::Relaxed), "file")),
            false => table::count(done, "file"),
        }
    }

    fn line(&self) -> String {
        let seconds = self.started.elapsed().as_secs_f64();
        let done = self.done_bytes.load(Ordering::Relaxed);
        let total = self.found_bytes.load(Ordering::Relaxed);
        let rate = done as f64 / seconds.max(1e-9);
        let mut text = format!("forebay: {}: {}", self.direction.doing(), table::bytes(done));
        if self.scanned.load(Ordering::Relaxed) {
            text.push_str(&format!(" of {}", table::bytes(total)));
        }
        text.push_str(&format!(", {}, {}/s", self.files_text(), table::bytes(rate as u64)));
        if self.scanned.load(Ordering::Relaxed) && rate > 0.0 && total >= done {
            text.push_str(&format!(", {} left", table::duration((total - done) as f64 / rate)));
        }
        text
    }

    fn maybe_line(&self) {
        let now = self.started.elapsed().as_millis() as u64;
        let due = self.next_line_ms.load(Ordering::Relaxed);
        if now >= due {
            let next = now + LINE_PERIOD.as_millis() as u64;
            if self.next_line_ms.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                note!("{}", self.line());
            }
        }
    }
}

fn style_of(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

impl Progress for Shown<'_> {
    fn found(&self, files: u64, bytes: u64) {
        self.found_files.fetch_add(files, Ordering::Relaxed);
        self.found_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn done(&self, files: u64, bytes: u64) {
        let all_files = self.done_files.fetch_add(files, Ordering::Relaxed) + files;
        let all_bytes = self.done_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if let Some(tally) = &self.tally {
            tally.say(all_files, all_bytes);
            tally.pause(|| self.cancelled());
        }
        match self.style {
            Style::Bar => {
                self.bar.inc(bytes);
                if files > 0 {
                    self.bar.set_message(self.files_text());
                }
            }
            Style::Lines => self.maybe_line(),
            Style::Messages => {}
        }
    }

    fn scanning_finished(&self) {
        self.scanned.store(true, Ordering::Relaxed);
        self.bar.set_length(self.found_bytes.load(Ordering::Relaxed));
        self.bar.set_style(style_of(
            "{prefix} [{wide_bar}] {binary_bytes}/{binary_total_bytes}, {msg}, {binary_bytes_per_sec}, {eta} left",
        ));
    }

    fn message(&self, text: &str) {
        self.bar.suspend(|| note!("forebay: {text}"));
    }

    fn cancelled(&self) -> bool {
        self.interrupt.stops()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_tells_the_total_once_it_is_known() {
        let signals = Signals::block(&[]).unwrap();
        let interrupt = Interrupt::new(&signals, None);
        let shown = Shown::new(Direction::In, Style::Lines, &interrupt);
        shown.done(2, 1 << 20);
        let early = shown.line();
        assert!(early.contains("staging in: 1 MiB, 2 files") && !early.contains("left"), "{early}");
        shown.found(4, 2 << 20);
        shown.scanning_finished();
        let late = shown.line();
        assert!(late.contains("1 MiB of 2 MiB, 2 of 4 files") && late.contains("left"), "{late}");
        assert!(!shown.cancelled());
    }
}
