//! When the pending places are looked at, and when files are looked for that can be released: an idle pool costs next to
//! nothing, whatever it contains and whatever fails.

use std::time::Duration;

use crate::host::Instant;

/// Pause between two looks at the pending places.
pub(super) const WATCH_PERIOD: Duration = Duration::from_millis(100);
/// The same when nothing could be done at the last ones.
const WATCH_PERIOD_IDLE: Duration = Duration::from_millis(500);
/// The pause after a look is at least this many times as long as the look, up to a bound, and up to a lower one while
/// programs may wait for space.
const LOOK_SHARE: u32 = 20;
/// The same for a look at which nothing was due, as long as the places do not change and none becomes due by time: many
/// that wait for a task or a retry cost less than 0.5 % of a processor.
const LOOK_SHARE_IDLE: u32 = 200;
const WATCH_PERIOD_MAX: Duration = Duration::from_secs(20);
const WATCH_PERIOD_FULL: Duration = Duration::from_secs(1);
/// How often the share of looks for files to release is halved that find none.
const HALVINGS_MAX: u32 = 4;
/// The longest pause between two of them while programs may wait for space, or as long as the last one took. A file that
/// cannot be released now can be when the program that has it open closes it, which nothing reports.
const EVICT_PERIOD_WAITED: Duration = Duration::from_secs(2);

/// What a look at the pending places found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Found {
    /// Something was due.
    Due,
    /// Nothing was. How long it takes until one of the places is, if time alone makes it so.
    Nothing(Option<Duration>),
}

/// See the module.
#[derive(Debug)]
pub(super) struct Pace {
    looked: Instant,
    /// The pause after the last look, and the longer one if the pending places stay as they are.
    period: Duration,
    unchanged_period: Duration,
    /// The last look for files that can be released, if it found none.
    evicted: Option<InVain>,
    in_vain: u32,
}

#[derive(Debug)]
struct InVain {
    ended: Instant,
    took: Duration,
    /// How long no other look is made.
    pause: Duration,
}

impl Pace {
    pub(super) fn new() -> Pace {
        Pace {
            looked: Instant::now(),
            period: WATCH_PERIOD,
            unchanged_period: WATCH_PERIOD,
            evicted: None,
            in_vain: 0,
        }
    }

    /// How long to pause before it is asked whether a look is due.
    pub(super) fn left(&self) -> Duration {
        let past = self.looked.elapsed();
        let left = if past < self.period { self.period } else { self.unchanged_period }.saturating_sub(past);
        left.min(WATCH_PERIOD_IDLE)
    }

    /// True when the pending places are to be looked at. `needs_room`: programs may wait for space. `have_changed` finds
    /// out whether the places have.
    pub(super) fn is_due(&self, needs_room: bool, have_changed: impl FnOnce() -> bool) -> bool {
        let longest = if needs_room { WATCH_PERIOD_FULL } else { WATCH_PERIOD_MAX };
        let past = self.looked.elapsed();
        past >= self.unchanged_period.min(longest) || past >= self.period.min(longest) && have_changed()
    }

    /// A look took so long.
    pub(super) fn looked(&mut self, took: Duration, found: Found) {
        // A look at very many places takes the shard's time, too: programs get nearly all of it.
        let least = (LOOK_SHARE * took).min(WATCH_PERIOD_MAX);
        (self.period, self.unchanged_period) = match found {
            Found::Due => (least.max(WATCH_PERIOD), least.max(WATCH_PERIOD)),
            Found::Nothing(until_due) => {
                // What becomes due soon was changed just now: somebody uses the pool.
                let soon = until_due.filter(|time| !time.is_zero()).unwrap_or(WATCH_PERIOD_IDLE);
                let least = least.max(soon.clamp(WATCH_PERIOD, WATCH_PERIOD_IDLE));
                let longest = (LOOK_SHARE_IDLE * took).min(WATCH_PERIOD_MAX);
                (least, until_due.map_or(longest, |time| time.min(longest)).max(least))
            }
        };
        self.looked = Instant::now();
    }

    /// A look failed. Whatever the cause is, the next one is no earlier than after one that found nothing.
    pub(super) fn failed(&mut self, took: Duration) {
        self.looked(took, Found::Nothing(None));
    }

    /// True when files are to be released that can be. `is_waited_for`: programs wait for space.
    pub(super) fn is_to_evict(&self, is_waited_for: bool) -> bool {
        self.evicted.as_ref().is_none_or(|last| last.ended.elapsed() >= last.pause(is_waited_for))
    }

    /// A look for files to release took so long, and freed so many bytes.
    pub(super) fn evicted(&mut self, took: Duration, freed: u64) {
        if freed > 0 {
            (self.evicted, self.in_vain) = (None, 0);
            return;
        }
        let pause = (LOOK_SHARE * took * (1 << self.in_vain.min(HALVINGS_MAX))).min(WATCH_PERIOD_MAX);
        self.evicted = Some(InVain { ended: Instant::now(), took, pause });
        self.in_vain += 1;
    }
}

impl InVain {
    fn pause(&self, is_waited_for: bool) -> Duration {
        match is_waited_for {
            true => self.pause.min(EVICT_PERIOD_WAITED.max(self.took)),
            false => self.pause,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(300);

    #[test]
    fn look_that_fails_is_not_repeated_at_once() {
        let mut pace = Pace { period: Duration::ZERO, unchanged_period: Duration::ZERO, ..Pace::new() };
        assert!(pace.is_due(false, || false));
        pace.failed(Duration::ZERO);
        assert!(!pace.is_due(false, || true) && !pace.is_due(true, || true) && pace.left() > SOON);
    }

    #[test]
    fn long_look_is_followed_by_a_longer_pause() {
        let mut pace = Pace::new();
        pace.looked(Duration::from_millis(200), Found::Due);
        assert_eq!(pace.period, Duration::from_secs(4));
        pace.looked(Duration::from_secs(10), Found::Due);
        assert_eq!(pace.period, WATCH_PERIOD_MAX);
        pace.looked(Duration::ZERO, Found::Due);
        assert_eq!(pace.period, WATCH_PERIOD);
    }

    #[test]
    fn look_at_which_nothing_was_due_is_followed_by_a_pause_until_something_is() {
        let mut pace = Pace::new();
        let mut period = |took_ms, due_ms: Option<u64>| {
            pace.looked(Duration::from_millis(took_ms), Found::Nothing(due_ms.map(Duration::from_millis)));
            let soon = due_ms.filter(|time| *time > 0).map_or(500, |time| time.clamp(100, 500));
            assert_eq!(pace.period.as_millis(), soon.max(20 * took_ms).min(20_000).into());
            pace.unchanged_period.as_millis()
        };
        assert_eq!(period(0, None), 500);
        assert_eq!(period(10, None), 2000);
        assert_eq!(period(10, Some(700)), 700, "something is due by then");
        assert_eq!(period(10, Some(50_000)), 2000);
        assert_eq!(period(10, Some(0)), 500, "no more often than before");
        assert_eq!([period(1, Some(200)), period(10, Some(150)), period(1, Some(10))], [200, 200, 100]);
        assert_eq!(period(60, Some(700)), 1200);
        assert_eq!([period(1000, None), period(10_000, Some(0))], [20_000; 2]);
    }

    #[test]
    fn places_that_have_changed_are_looked_at_earlier() {
        let pace = Pace { period: Duration::ZERO, unchanged_period: SOON, ..Pace::new() };
        assert!(pace.is_due(false, || true) && !pace.is_due(false, || false));
        assert!(pace.left() > Duration::ZERO);
    }

    #[test]
    fn files_are_looked_for_ever_more_rarely_while_none_can_be_released() {
        let mut pace = Pace::new();
        assert!(pace.is_to_evict(false));
        let mut pauses = Vec::new();
        for _ in 0..7 {
            pace.evicted(Duration::from_millis(50), 0);
            assert!(!pace.is_to_evict(false) && !pace.is_to_evict(true));
            let pause = |is_waited_for| pace.evicted.as_ref().unwrap().pause(is_waited_for).as_secs();
            pauses.push((pause(false), pause(true)));
        }
        assert_eq!(pauses, [(1, 1), (2, 2), (4, 2), (8, 2), (16, 2), (16, 2), (16, 2)]);
        // No more than half of the time.
        pace.evicted(Duration::from_secs(9), 0);
        assert_eq!(pace.evicted.as_ref().unwrap().pause(true), Duration::from_secs(9));
        pace.evicted(Duration::from_secs(9), 1);
        assert!(pace.is_to_evict(false));
    }
}
