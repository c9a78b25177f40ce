//! A calibration: what a machine, its network and a medium were measured to need.
//!
//! Values are integers, times in nanoseconds and rates in picoseconds a byte (1000 ps a byte are 1 GB/s), since a rank
//! sends them to the others as integers.

use forebay_types::{Code, Error, Result};

/// A measured value with the interval in which it lies.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Value {
    /// The estimate.
    pub value: i64,
    /// The least that it may be.
    pub low: i64,
    /// The most that it may be.
    pub high: i64,
}

impl Value {
    /// A value without an interval.
    pub const fn exactly(value: i64) -> Value {
        Value { value, low: value, high: value }
    }

    /// A value and the part of it by which it may be wrong, in percent. The lower end is never below zero.
    pub fn about(value: i64, percent: u32) -> Value {
        let by = (value as f64 * f64::from(percent) / 100.0) as i64;
        Value { value, low: value.saturating_sub(by).max(0), high: value.saturating_add(by) }
    }
}

/// The greatest value, in nanoseconds or picoseconds: beyond it, a number is not a measurement.
const VALUE_MAX: i64 = 1_000_000_000_000;

macro_rules! calibration {
    ($($(#[doc = $doc:literal])+ $name:ident,)*) => {
        /// What was measured. Times are in nanoseconds, rates in picoseconds a byte.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub struct Calibration {
            $($(#[doc = $doc])+ pub $name: Value,)*
            /// Gaps up to this many bytes between the runs of a read are read too (data sieving).
            pub gap_bytes: i64,
            /// Processes that get the bandwidth of one at the same time; more share it.
            pub parallel: i64,
            /// Processors of a node, which its ranks share.
            pub processors: i64,
            /// Processes whose short runs the medium serves at the same time, each as fast as one alone.
            pub queue: i64,
        }

        impl Calibration {
            /// The names of the values, in their order.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name)),*];

            /// The values, in the order of their names.
            pub fn values(&self) -> [Value; Calibration::NAMES.len()] {
                [$(self.$name),*]
            }

            /// The value of a name.
            pub(crate) fn value_mut(&mut self, name: &str) -> Option<&mut Value> {
                match name {
                    $(stringify!($name) => Some(&mut self.$name),)*
                    _ => None,
                }
            }

            /// A calibration with these values, in the order of their names.
            fn of(values: [Value; Calibration::NAMES.len()], [gap_bytes, parallel, processors, queue]: [i64; 4]) -> Calibration {
                let [$($name),*] = values;
                Calibration { $($name,)* gap_bytes, parallel, processors, queue }
            }
        }
    };
}

calibration! {
    /// T_s between nodes: a message without data.
    message_ns,
    /// T_w between nodes: a further byte of a message.
    message_byte_ps,
    /// T_s on one node.
    local_message_ns,
    /// T_w on one node.
    local_message_byte_ps,
    /// 1 / bw_seq of reads.
    read_sequential_byte_ps,
    /// 1 / bw_ran of reads, at runs of 64 KiB.
    read_random_byte_ps,
    /// 1 / bw_seq of writes.
    write_sequential_byte_ps,
    /// 1 / bw_ran of writes, at runs of 64 KiB.
    write_random_byte_ps,
    /// What a run that is read costs besides its bytes.
    read_run_ns,
    /// What a run that is written costs besides its bytes.
    write_run_ns,
    /// What a read costs besides its bytes that begins where the one before has ended.
    read_next_ns,
    /// The same of a write.
    write_next_ns,
    /// A request to another node, without its data.
    request_ns,
    /// A byte of data that are on another node.
    request_byte_ps,
    /// A byte that the processor copies.
    copy_byte_ps,
    /// A run in the lists that ranks exchange.
    piece_ns,
}

/// The numbers that rank 0 sends: a version, the values without their intervals, the sieve, the contention, the processors,
/// the queue.
pub const NUMBERS: usize = Calibration::NAMES.len() + 5;

/// The version of that array.
const NUMBERS_VERSION: i64 = 3;

impl Default for Calibration {
    /// A medium in memory, and a network of about 10 Gbit/s. Only for what was not measured.
    fn default() -> Calibration {
        let mut values = [Value::default(); Calibration::NAMES.len()];
        let guesses =
            [20_000, 900, 1_000, 150, 150, 300, 200, 400, 100, 150, 100, 150, 25_000, 1400, 150, 50];
        for (value, guess) in values.iter_mut().zip(guesses) {
            *value = Value::about(guess, 75);
        }
        Calibration::of(values, [8192, 2, 2, 2])
    }
}

impl Calibration {
    /// Refuses values that no measurement gives.
    pub fn check(&self) -> Result<()> {
        for (name, v) in Calibration::NAMES.iter().zip(self.values()) {
            if v.value <= 0
                || v.value > VALUE_MAX
                || v.low < 0
                || v.low > v.value
                || v.high < v.value
                || v.high > VALUE_MAX
            {
                return Err(nonsense(format!(
                    "{name} is {}, between {} and {}: it must be above 0, at most {VALUE_MAX}, and within its interval",
                    v.value, v.low, v.high
                )));
            }
        }
        if !(0..=1 << 40).contains(&self.gap_bytes) {
            return Err(nonsense(format!("gap_bytes is {}", self.gap_bytes)));
        }
        if !(1..=1 << 20).contains(&self.parallel) {
            return Err(nonsense(format!("parallel is {}", self.parallel)));
        }
        if !(1..=1 << 20).contains(&self.processors) {
            return Err(nonsense(format!("processors is {}", self.processors)));
        }
        if !(1..=1 << 20).contains(&self.queue) {
            return Err(nonsense(format!("queue is {}", self.queue)));
        }
        Ok(())
    }

    /// What has no interval.
    fn counts(&self) -> [i64; 4] {
        [self.gap_bytes, self.parallel, self.processors, self.queue]
    }

    /// The numbers that rank 0 sends to the others.
    pub fn numbers(&self) -> [i64; NUMBERS] {
        let mut numbers = [0; NUMBERS];
        numbers[0] = NUMBERS_VERSION;
        for (number, v) in numbers[1..].iter_mut().zip(self.values()) {
            *number = v.value;
        }
        numbers[NUMBERS - 4..].copy_from_slice(&self.counts());
        numbers
    }

    /// The calibration in received numbers. None if there is none in them, or nonsense.
    pub fn from_numbers(numbers: &[i64; NUMBERS]) -> Option<Calibration> {
        let mut values = [Value::default(); Calibration::NAMES.len()];
        for (value, number) in values.iter_mut().zip(&numbers[1..]) {
            *value = Value::exactly(*number);
        }
        let [.., gap_bytes, parallel, processors, queue] = *numbers;
        let found = Calibration::of(values, [gap_bytes, parallel, processors, queue]);
        (numbers[0] == NUMBERS_VERSION && found.check().is_ok()).then_some(found)
    }

    /// Takes what messages between nodes were measured to need. `request` is what a request for data on another node takes
    /// besides its data: at least a message and its answer. A byte of such data takes at least as long as one of a
    /// message.
    pub fn set_network(&mut self, message: Value, message_byte: Value, request: Value) {
        let at_least = |a: Value, b: Value| if a.value < b.value { b } else { a };
        let answered = |ns: i64| ns.saturating_mul(2).clamp(1, VALUE_MAX);
        let there_and_back = Value {
            value: answered(message.value),
            low: answered(message.low),
            high: answered(message.high),
        };
        (self.message_ns, self.message_byte_ps) = (message, message_byte);
        self.request_ns = at_least(request, there_and_back);
        self.request_byte_ps = at_least(self.request_byte_ps, message_byte);
    }

    /// This calibration with intervals whose lower ends are divided, and upper ends multiplied, by `factor`, within what a
    /// measurement can give.
    pub fn widened(&self, factor: f64) -> Calibration {
        let values = self.values().map(|v| Value {
            value: v.value,
            low: (v.low as f64 / factor) as i64,
            high: ((v.high as f64 * factor) as i64).clamp(v.value, VALUE_MAX.max(v.value)),
        });
        Calibration::of(values, self.counts())
    }

    /// This calibration with every value at the lower, or the upper, end of its interval.
    pub(crate) fn at_end(&self, is_upper: bool) -> Calibration {
        let values = self.values().map(|v| Value::exactly(if is_upper { v.high } else { v.low }));
        Calibration::of(values, self.counts())
    }
}

/// An error of a calibration's contents.
pub(crate) fn nonsense(why: impl std::fmt::Display) -> Error {
    Error::new(Code::Invalid, "the calibration is not usable")
        .why(why)
        .cure("make a new one: forebay model calibrate")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_a_calibration_come_back_and_nonsense_is_none() {
        let one = Calibration::default();
        let back = Calibration::from_numbers(&one.numbers()).unwrap();
        assert_eq!(back.numbers(), one.numbers());
        assert_eq!(Calibration::from_numbers(&[0; NUMBERS]), None, "no calibration");
        for (at, bad) in [
            (0, 1),
            (1, 0),
            (3, -1),
            (5, i64::MAX),
            (NUMBERS - 4, -1),
            (NUMBERS - 3, 0),
            (NUMBERS - 2, 0),
            (NUMBERS - 1, 0),
        ] {
            let mut numbers = one.numbers();
            numbers[at] = bad;
            assert_eq!(Calibration::from_numbers(&numbers), None, "number {at} is {bad}");
        }
    }

    #[test]
    fn request_takes_at_least_a_message_and_its_answer() {
        let mut one = Calibration::default();
        let value = Value { value: 50_000, low: 40_000, high: 60_000 };
        one.set_network(value, Value::exactly(8000), Value::exactly(70_000));
        assert_eq!(one.request_ns, Value { value: 100_000, low: 80_000, high: 120_000 });
        assert_eq!((one.message_ns, one.request_byte_ps.value), (value, 8000));
        one.set_network(value, Value::exactly(100), Value::exactly(200_000));
        assert_eq!((one.request_ns.value, one.request_byte_ps.value), (200_000, 8000));
        assert!(one.check().is_ok());
    }

    #[test]
    fn interval_outside_its_value_is_refused_by_name() {
        let one =
            Calibration { request_ns: Value { value: 10, low: 11, high: 12 }, ..Calibration::default() };
        let error = one.check().unwrap_err().to_string();
        assert!(error.contains("request_ns") && error.contains("forebay model calibrate"), "{error}");
    }

    #[test]
    fn widened_interval_contains_the_first_one_and_stays_positive() {
        let narrow =
            Calibration { request_ns: Value { value: 100, low: 40, high: 130 }, ..Calibration::default() };
        assert_eq!(narrow.widened(2.0).request_ns, Value { value: 100, low: 20, high: 260 });
        let most = Calibration { request_ns: Value::exactly(VALUE_MAX), ..narrow };
        assert!(most.widened(5.0).check().is_ok());
    }
}
