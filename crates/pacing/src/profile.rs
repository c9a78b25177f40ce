//! Profiles of media: the built-in ones, and the text form in which a profile is passed to processes.
//!
//! The values of `hdd`, `slc`, `pcram`, `reram` and `dram` follow the media table of the study that the emulator was built
//! to repeat. Where that table gives a range, the profile has its geometric mean: the ranges span up to eight orders of
//! magnitude. Where the table gives no value, [`PROFILES`] names the source. docs/emulation.md shows all as a table;
//! a test compares the two.

use std::fmt;

/// Longest latency or seek: 10 s.
pub const LATENCY_MAX_NS: u64 = 10_000_000_000;
/// Least bandwidth: 1 kB/s. A request of 1 MiB then takes 17 minutes.
pub const BANDWIDTH_MIN: u64 = 1_000;
/// Greatest bandwidth: 1 TB/s, more than any node's memory has.
pub const BANDWIDTH_MAX: u64 = 1_000_000_000_000;
/// Most requests that are in service at the same time.
pub const QUEUE_DEPTH_MAX: u32 = 64;
/// Longest name of a profile, in bytes.
const NAME_BYTES_MAX: usize = 32;

/// What a request does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// It reads.
    Read,
    /// It writes.
    Write,
}

/// How fast a medium is in one direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Speed {
    /// Time before a request's first byte, in nanoseconds.
    pub latency_ns: u64,
    /// Bytes per second, of all requests together.
    pub bytes_per_s: u64,
}

/// The properties of a medium.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Medium {
    /// Reads.
    pub read: Speed,
    /// Writes.
    pub write: Speed,
    /// Added to the latency of a request that does not begin where the one before it ended, in nanoseconds.
    pub seek_ns: u64,
    /// Requests that are in service at the same time; others wait.
    pub queue_depth: u32,
}

/// A medium with a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Profile {
    /// Its name.
    pub name: String,
    /// Its properties.
    pub medium: Medium,
}

const fn medium(read: (u64, u64), write: (u64, u64), seek_ns: u64, queue_depth: u32) -> Medium {
    Medium {
        read: Speed { latency_ns: read.0, bytes_per_s: read.1 * 1_000_000 },
        write: Speed { latency_ns: write.0, bytes_per_s: write.1 * 1_000_000 },
        seek_ns,
        queue_depth,
    }
}

/// The profiles that Forebay comes with, from slow to fast: name, medium (latencies in nanoseconds, bandwidths in MB/s),
/// and where the values are from.
pub const PROFILES: [(&str, Medium, &str); 7] = [
    (
        "hdd",
        medium((1_000_000, 77), (1_000_000, 77), 7_000_000, 1),
        "table: 10^6 ns, 50-120 MB/s; seek: average of a 7200 rpm drive; one arm",
    ),
    (
        "ssd",
        medium((90_000, 520), (40_000, 460), 0, 32),
        "a SATA SSD's data sheet (latency 90/40 us, 520/460 MB/s, NCQ with 32 tags)",
    ),
    (
        "slc",
        medium((32_000, 250), (316_000, 170), 0, 10),
        "table: read 10^4-10^5 ns, write 10^4-10^7 ns; bandwidth, channels: Intel X25-E",
    ),
    (
        "pcram",
        medium((63, 400), (91, 283), 0, 8),
        "table: read 20-200 ns, write 80-104 ns, 200-800 and 100-800 MB/s",
    ),
    (
        "reram",
        medium((707, 32), (22_361, 10), 0, 8),
        "table: read 5-10^5 ns, write 5-10^8 ns, 1-1000 and 0.1-1000 MB/s",
    ),
    (
        "optane",
        medium((305, 6600), (94, 2300), 0, 8),
        "Izraelevitz et al. 2019, one module: random read 305 ns, write 94 ns, 6.6 and 2.3 GB/s",
    ),
    ("dram", medium((10, 21_300), (10, 21_300), 0, 16), "table: 10 ns; bandwidth: a channel of DDR4-2666"),
];

impl Medium {
    /// The speed in a direction.
    pub fn speed(&self, direction: Direction) -> Speed {
        match direction {
            Direction::Read => self.read,
            Direction::Write => self.write,
        }
    }

    /// What is wrong with the values, as the key of the profile's file and a sentence.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let latency = |key, ns| match ns {
            0..=LATENCY_MAX_NS => Ok(()),
            _ => Err((
                key,
                format!("is {ns} ns, and at most {} s are possible", LATENCY_MAX_NS / 1_000_000_000),
            )),
        };
        let bandwidth = |key, bytes| match bytes {
            BANDWIDTH_MIN..=BANDWIDTH_MAX => Ok(()),
            _ => Err((key, format!("is {bytes} bytes/s, and 1 kB/s to 1 TB/s are possible"))),
        };
        latency("read_latency", self.read.latency_ns)?;
        latency("write_latency", self.write.latency_ns)?;
        latency("seek", self.seek_ns)?;
        bandwidth("read_bandwidth", self.read.bytes_per_s)?;
        bandwidth("write_bandwidth", self.write.bytes_per_s)?;
        match self.queue_depth {
            1..=QUEUE_DEPTH_MAX => Ok(()),
            depth => Err(("queue_depth", format!("is {depth}, and 1 to {QUEUE_DEPTH_MAX} are possible"))),
        }
    }
}

impl Profile {
    /// The built-in profile with a name.
    pub fn named(name: &str) -> Option<Profile> {
        PROFILES
            .iter()
            .find(|(known, ..)| *known == name)
            .map(|(name, medium, _)| Profile { name: (*name).to_owned(), medium: *medium })
    }

    /// True if this can be a profile's name: 1 to 32 letters, digits, `-`, `_` and `.`.
    pub fn is_name(name: &str) -> bool {
        let valid = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
        (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(valid)
    }

    /// Reads what [`fmt::Display`] wrote. None if it is not such a text, or its values are out of range.
    pub fn parse(text: &str) -> Option<Profile> {
        let (name, values) = text.split_once('=')?;
        let mut numbers = values.split(',').map(str::parse::<u64>);
        let mut next = || numbers.next()?.ok();
        let medium = Medium {
            read: Speed { latency_ns: next()?, bytes_per_s: next()? },
            write: Speed { latency_ns: next()?, bytes_per_s: next()? },
            seek_ns: next()?,
            queue_depth: u32::try_from(next()?).ok()?,
        };
        (next().is_none()
            && values.split(',').count() == 6
            && Profile::is_name(name)
            && medium.check().is_ok())
        .then(|| Profile { name: name.to_owned(), medium })
    }
}

/// The text in which a profile is passed to other processes: `name=` and six numbers.
impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Medium { read, write, seek_ns, queue_depth } = self.medium;
        write!(
            f,
            "{}={},{},{},{},{seek_ns},{queue_depth}",
            self.name, read.latency_ns, read.bytes_per_s, write.latency_ns, write.bytes_per_s
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_profiles_are_valid_and_survive_their_text() {
        for (name, medium, source) in PROFILES {
            assert_eq!(medium.check(), Ok(()), "{name}");
            assert!(Profile::is_name(name) && !source.is_empty());
            let profile = Profile::named(name).unwrap();
            assert_eq!(Profile::parse(&profile.to_string()), Some(profile));
        }
        assert_eq!(Profile::named("tape"), None);
    }

    #[test]
    fn parse_refuses_texts_that_are_no_profile() {
        let good = "a=1,1000,1,1000,0,1";
        assert!(Profile::parse(good).is_some());
        for bad in [
            "",
            "a",
            "a=",
            "a=1,1000,1,1000,0",
            "a=1,1000,1,1000,0,1,2",
            "a=1,1000,1,1000,0,x",
            "=1,1000,1,1000,0,1",
            "a b=1,1000,1,1000,0,1",
            "a=1,999,1,1000,0,1",
            "a=1,1000,1,1000,0,0",
            "a=1,1000,1,1000,0,65",
            "a=10000000001,1000,1,1000,0,1",
            "a=1,1000,1,1000,0,1,",
        ] {
            assert_eq!(Profile::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn check_names_the_key_that_is_wrong() {
        let good = PROFILES[0].1;
        let of = |change: fn(&mut Medium)| {
            let mut medium = good;
            change(&mut medium);
            medium.check().unwrap_err().0
        };
        assert_eq!(of(|m| m.read.latency_ns = u64::MAX), "read_latency");
        assert_eq!(of(|m| m.write.latency_ns = u64::MAX), "write_latency");
        assert_eq!(of(|m| m.seek_ns = u64::MAX), "seek");
        assert_eq!(of(|m| m.read.bytes_per_s = 0), "read_bandwidth");
        assert_eq!(of(|m| m.write.bytes_per_s = u64::MAX), "write_bandwidth");
        assert_eq!(of(|m| m.queue_depth = 0), "queue_depth");
    }
}
