//! The log of Forebay's daemons: lines on standard error, which is the pool's file `log` unless the daemon runs in the
//! foreground.
//!
//! A lasting condition must not fill the disk or hide other lines. Within [`PERIOD`] at most [`EQUAL_MAX`] equal lines
//! are written, and at most [`PLACE_MAX`] lines of one place in the code. The next line that is written states how
//! many lines of its kind were left out. Lines of the levels debug and trace are written only on request, and are
//! never limited.

use std::collections::hash_map::{DefaultHasher, Entry, HashMap};
use std::fmt::{self, Debug, Write};
use std::hash::{Hash, Hasher};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{Format, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// The period after which lines are counted anew.
const PERIOD: Duration = Duration::from_secs(10);
/// Most equal lines that are written in a period.
const EQUAL_MAX: u64 = 3;
/// Most lines of one place in the code that are written in a period. A healthy daemon writes fewer.
const PLACE_MAX: u64 = 100;
/// Most kinds of lines that are remembered.
const KINDS_MAX: usize = 1024;

/// Writes the log to standard error. `FOREBAY_LOG` selects the levels; without it errors, warnings and info are
/// written.
pub fn to_stderr() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("FOREBAY_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let format = Format::default().with_ansi(false).with_target(false);
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .event_format(Limited { format, seen: Mutex::default() })
        .try_init();
}

/// The count of lines of one kind.
#[derive(Debug)]
struct Seen {
    since: Instant,
    lines: u64,
    left_out: u64,
}

/// Whether a line is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    /// The line is written. Before it, this many lines of its kind were left out, and this many of kinds that are no
    /// longer remembered.
    Written(u64, u64),
    LeftOut,
}

/// Recent lines, by kind.
#[derive(Debug, Default)]
struct Kinds {
    recent: HashMap<u64, Seen>,
    /// Lines that were left out, of kinds that are no longer remembered. The next line that is written reports them.
    forgotten: u64,
}

impl Kinds {
    /// Counts a line of this kind. Returns whether it may be written.
    fn admits(&mut self, kind: u64, most: u64, now: Instant) -> bool {
        if self.recent.len() >= KINDS_MAX {
            let forgotten = &mut self.forgotten;
            let mut forget = |seen: &Seen| *forgotten += seen.left_out;
            self.recent.retain(|_, seen| {
                let is_recent = now.duration_since(seen.since) < PERIOD;
                if !is_recent {
                    forget(seen);
                }
                is_recent
            });
            if self.recent.len() >= KINDS_MAX {
                self.recent.drain().for_each(|(_, seen)| forget(&seen));
            }
        }
        let seen = match self.recent.entry(kind) {
            Entry::Vacant(none) => none.insert(Seen { since: now, lines: 0, left_out: 0 }),
            Entry::Occupied(seen) => seen.into_mut(),
        };
        if now.duration_since(seen.since) >= PERIOD {
            (seen.since, seen.lines) = (now, 0);
        }
        seen.lines += 1;
        let is_admitted = seen.lines <= most;
        seen.left_out += u64::from(!is_admitted);
        is_admitted
    }

    /// The lines of this kind that were left out since the last call.
    fn take_left_out(&mut self, kind: u64) -> u64 {
        self.recent.get_mut(&kind).map_or(0, |seen| std::mem::take(&mut seen.left_out))
    }

    /// Decides whether to write a line with this text, of this place in the code.
    fn decide(&mut self, text: u64, place: u64, now: Instant) -> Fate {
        if !self.admits(text, EQUAL_MAX, now) || !self.admits(place, PLACE_MAX, now) {
            return Fate::LeftOut;
        }
        let similar = self.take_left_out(text) + self.take_left_out(place);
        Fate::Written(similar, std::mem::take(&mut self.forgotten))
    }
}

/// The hash of an event's text.
struct Text(DefaultHasher);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        struct Into<'a>(&'a mut DefaultHasher);
        impl Write for Into<'_> {
            fn write_str(&mut self, text: &str) -> fmt::Result {
                self.0.write(text.as_bytes());
                Ok(())
            }
        }
        field.name().hash(&mut self.0);
        let _ = write!(Into(&mut self.0), "{value:?}");
    }
}

/// A format that leaves out repeated lines.
struct Limited<F> {
    format: F,
    seen: Mutex<Kinds>,
}

impl<F> Limited<F> {
    fn decide(&self, event: &Event<'_>, now: Instant) -> Fate {
        if *event.metadata().level() > Level::INFO {
            return Fate::Written(0, 0);
        }
        let mut place = DefaultHasher::new();
        event.metadata().callsite().hash(&mut place);
        let mut text = Text(place.clone());
        event.record(&mut text);
        let mut kinds = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        kinds.decide(text.0.finish(), place.finish(), now)
    }
}

impl<S, N, F> FormatEvent<S, N> for Limited<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, ctx: &FmtContext<'_, S, N>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        match self.decide(event, Instant::now()) {
            Fate::LeftOut => Ok(()),
            Fate::Written(similar, others) => {
                self.format.format_event(ctx, to.by_ref(), event)?;
                for (count, kind) in [(similar, "similar"), (others, "other")] {
                    if count > 0 {
                        writeln!(to, "  (left out {count} {kind} lines before this one)")?;
                    }
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::Arc;
    use tracing_subscriber::fmt::MakeWriter;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl<'a> MakeWriter<'a> for Lines {
        type Writer = Lines;

        fn make_writer(&'a self) -> Lines {
            self.clone()
        }
    }

    fn logged(events: impl FnOnce()) -> String {
        let lines = Lines::default();
        let format = Format::default().with_ansi(false).with_target(false).without_time();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(Level::DEBUG)
            .with_writer(lines.clone())
            .event_format(Limited { format, seen: Mutex::default() })
            .finish();
        tracing::subscriber::with_default(subscriber, events);
        let bytes = lines.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn equal_lines_are_limited_and_others_of_their_place_are_written() {
        let text = logged(|| {
            for i in 0..50 {
                tracing::warn!("cannot do {}", if i == 40 { "that" } else { "this" });
                tracing::debug!("details");
            }
            tracing::warn!(pid = 1, "ends");
            tracing::warn!(pid = 2, "ends");
        });
        let count = |of: &str| text.lines().filter(|line| line.contains(of)).count();
        assert_eq!(count("cannot do this"), EQUAL_MAX as usize, "{text}");
        assert_eq!((count("cannot do that"), count("details"), count("ends")), (1, 50, 2), "{text}");
    }

    #[test]
    fn lines_of_one_place_are_limited_whatever_they_say() {
        let text = logged(|| (0..1000).for_each(|i| tracing::error!("client {i} is refused")));
        assert_eq!(text.lines().count(), PLACE_MAX as usize);
    }

    #[test]
    fn line_after_a_period_says_how_many_were_left_out() {
        let (mut kinds, begin) = (Kinds::default(), Instant::now());
        let fates: Vec<Fate> = (0..5).map(|_| kinds.decide(7, 1, begin)).collect();
        assert_eq!(fates[2..], [Fate::Written(0, 0), Fate::LeftOut, Fate::LeftOut]);
        assert_eq!(kinds.decide(8, 1, begin), Fate::Written(0, 0));
        let later = begin + PERIOD;
        assert_eq!(kinds.decide(7, 1, later), Fate::Written(2, 0));
        assert_eq!(kinds.decide(7, 1, later), Fate::Written(0, 0));
    }

    #[test]
    fn line_left_out_for_its_place_keeps_the_count_of_equal_lines() {
        let (mut kinds, begin) = (Kinds::default(), Instant::now());
        for _ in 0..EQUAL_MAX + 2 {
            kinds.decide(7, 1, begin);
        }
        let later = begin + PERIOD;
        for text in 0..PLACE_MAX {
            kinds.decide(1000 + text, 1, later);
        }
        assert_eq!(kinds.decide(7, 1, later), Fate::LeftOut);
        assert_eq!(kinds.decide(7, 1, later + PERIOD), Fate::Written(2 + 1, 0));
    }

    #[test]
    fn kinds_that_are_forgotten_are_few_and_their_lines_are_reported() {
        let (mut kinds, begin) = (Kinds::default(), Instant::now());
        for (now, lines) in [(begin, EQUAL_MAX + 2), (begin + PERIOD, EQUAL_MAX + 1)] {
            for _ in 0..lines {
                kinds.decide(7, 1, now);
            }
            let (mut similar, mut others) = (0, 0);
            for kind in 100..100 + KINDS_MAX as u64 {
                if let Fate::Written(of_kind, forgotten) = kinds.decide(kind << 32, kind, now) {
                    (similar, others) = (similar + of_kind, others + forgotten);
                }
                assert!(kinds.recent.len() <= KINDS_MAX);
            }
            assert_eq!((similar, others), (0, lines - EQUAL_MAX));
        }
    }
}
