//! A calibration as a document: TOML of one value a line, `name = [value, low, high]`.
//!
//! The reader accepts the part of TOML that the writer uses: comments, strings, integers, and arrays of integers, each on
//! its line. libforebay.so reads these documents and is in every host program, so it has no TOML library.

use std::fmt::Write;

use forebay_types::{Code, Error, Result};

use crate::calibration::{nonsense, Calibration, Value};

/// The version of the documents that this build writes and reads.
pub const VERSION: i64 = 3;

/// A calibration with where it is from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Document {
    /// When it was measured: seconds since 1970.
    pub made_s: i64,
    /// The node on which it was measured.
    pub host: String,
    /// The medium: a directory, or the pool.
    pub medium: String,
    /// How messages were measured.
    pub messages: String,
    /// How busy the processors were before, in percent.
    pub busy_percent: i64,
    /// The values.
    pub calibration: Calibration,
}

/// A value of a line.
enum Item {
    Text(String),
    Numbers(Vec<i64>),
}

impl Document {
    /// The document's text.
    pub fn text(&self) -> String {
        let mut out = format!(
            "# A calibration of forebay model: times in nanoseconds (_ns), rates in picoseconds a byte (_ps).\n\
             # Each value has its interval: [value, low, high].\n\
             version = {VERSION}\nmade_s = {}\nhost = {}\nmedium = {}\nmessages = {}\nbusy_percent = {}\n",
            self.made_s,
            quoted(&self.host),
            quoted(&self.medium),
            quoted(&self.messages),
            self.busy_percent,
        );
        for (name, v) in Calibration::NAMES.iter().zip(self.calibration.values()) {
            let _ = writeln!(out, "{name} = [{}, {}, {}]", v.value, v.low, v.high);
        }
        let Calibration { gap_bytes, parallel, processors, queue, .. } = self.calibration;
        let _ = write!(
            out,
            "gap_bytes = {gap_bytes}\nparallel = {parallel}\nprocessors = {processors}\nqueue = {queue}\n"
        );
        out
    }

    /// Reads a document.
    pub fn parse(text: &str) -> Result<Document> {
        let mut found: Vec<(&str, Item)> = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let item = line.split_once('=').and_then(|(name, rest)| Some((name.trim(), item(rest.trim())?)));
            let (name, item) =
                item.ok_or_else(|| nonsense(format!("line {}: `{line}` is not `name = value`", at + 1)))?;
            if found.iter().any(|(other, _)| *other == name) {
                return Err(nonsense(format!("line {}: {name} is there twice", at + 1)));
            }
            found.push((name, item));
        }
        // The version is first: a newer document may have anything else.
        let version = number(&mut found, "version")?;
        if version != VERSION {
            return Err(Error::new(Code::NewerFormat, "the calibration is not usable")
                .why(format!("it has version {version}; this Forebay reads version {VERSION}"))
                .cure("make a new one: forebay model calibrate"));
        }
        let mut calibration = Calibration::default();
        for name in Calibration::NAMES {
            let Item::Numbers(numbers) = take(&mut found, name)? else {
                return Err(nonsense(format!("{name} is a text")));
            };
            let [value, low, high] = numbers[..] else {
                return Err(nonsense(format!(
                    "{name} has {} numbers, not value, low and high",
                    numbers.len()
                )));
            };
            *calibration.value_mut(name).expect("a name of the list") = Value { value, low, high };
        }
        calibration.gap_bytes = number(&mut found, "gap_bytes")?;
        calibration.parallel = number(&mut found, "parallel")?;
        calibration.processors = number(&mut found, "processors")?;
        calibration.queue = number(&mut found, "queue")?;
        let document = Document {
            made_s: number(&mut found, "made_s")?,
            host: words(&mut found, "host")?,
            medium: words(&mut found, "medium")?,
            messages: words(&mut found, "messages")?,
            busy_percent: number(&mut found, "busy_percent")?,
            calibration,
        };
        if let Some((name, _)) = found.first() {
            return Err(nonsense(format!("there is no value {name}")));
        }
        if !(0..=100).contains(&document.busy_percent) {
            return Err(nonsense(format!("busy_percent is {}", document.busy_percent)));
        }
        calibration.check()?;
        Ok(document)
    }
}

/// A TOML string.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => {
                let _ = write!(out, "\\u{:04X}", c as u32);
            }
            c => out.push(c),
        }
    }
    out + "\""
}

/// The text of a TOML string without its first quote. None if it is not one, or text follows that is no comment.
fn unquoted(text: &str) -> Option<String> {
    let (mut out, mut rest) = (String::new(), text.chars());
    loop {
        match rest.next()? {
            '"' => break,
            '\\' => match rest.next()? {
                c @ ('"' | '\\') => out.push(c),
                'u' => {
                    let digits: String = rest.by_ref().take(4).collect();
                    out.push(char::from_u32(u32::from_str_radix(&digits, 16).ok()?)?);
                }
                _ => return None,
            },
            c => out.push(c),
        }
    }
    let after = rest.as_str().trim();
    (after.is_empty() || after.starts_with('#')).then_some(out)
}

fn item(text: &str) -> Option<Item> {
    if let Some(text) = text.strip_prefix('"') {
        return unquoted(text).map(Item::Text);
    }
    let text = text.split('#').next()?.trim();
    let list = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let numbers = list.unwrap_or(text).split(',').map(|n| n.trim().replace('_', "").parse());
    Some(Item::Numbers(numbers.collect::<std::result::Result<_, _>>().ok()?))
}

fn take(found: &mut Vec<(&str, Item)>, name: &str) -> Result<Item> {
    let at = found.iter().position(|(other, _)| *other == name);
    at.map(|at| found.swap_remove(at).1).ok_or_else(|| nonsense(format!("{name} is missing")))
}

fn number(found: &mut Vec<(&str, Item)>, name: &str) -> Result<i64> {
    match take(found, name)? {
        Item::Numbers(numbers) if numbers.len() == 1 => Ok(numbers[0]),
        _ => Err(nonsense(format!("{name} is not a number"))),
    }
}

fn words(found: &mut Vec<(&str, Item)>, name: &str) -> Result<String> {
    match take(found, name)? {
        Item::Text(text) => Ok(text),
        Item::Numbers(_) => Err(nonsense(format!("{name} is not a text"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Document {
        Document {
            made_s: 1_800_000_000,
            host: "node \"1\"\\".into(),
            medium: "/mnt/ssd\n#x".into(),
            messages: "shared memory".into(),
            busy_percent: 7,
            calibration: Calibration::default(),
        }
    }

    #[test]
    fn document_comes_back_from_its_text() {
        assert_eq!(Document::parse(&sample().text()).unwrap(), sample());
    }

    #[test]
    fn other_version_is_a_newer_format_and_says_which_is_read() {
        let text = sample().text().replace("version = 3", "version = 4");
        let error = Document::parse(&text).unwrap_err();
        assert_eq!(error.code, Code::NewerFormat);
        assert!(error.to_string().contains("version 4"), "{error}");
    }

    #[test]
    fn faults_are_refused_with_the_name_or_the_line() {
        let text = sample().text();
        let line = |name: &str| text.lines().find(|l| l.starts_with(name)).unwrap().to_owned();
        for (name, instead, said) in [
            ("request_ns", "request_ns = [-5, 0, 1]", "request_ns"),
            ("request_ns", "request_ns = 5", "request_ns"),
            ("request_ns", "request_ns = [5, 6, 7]", "request_ns"),
            ("request_ns", "request_ns = \"fast\"", "request_ns"),
            ("request_ns", "", "request_ns is missing"),
            ("request_ns", "what is this", "line 21"),
            ("request_ns", "host = \"twice\"", "twice"),
            ("parallel", "parallel = 0", "parallel"),
            ("queue", "queue = 0", "queue"),
            ("busy_percent", "busy_percent = 101", "busy_percent"),
            ("host", "host = 5", "host"),
            ("host", "host = \"a", "line"),
            ("gap_bytes", "gap_bytes = 8192\nspeed = 5", "no value speed"),
            ("version", "", "version is missing"),
        ] {
            let changed = text.replace(&line(&format!("{name} =")), instead);
            let error = Document::parse(&changed).unwrap_err().to_string();
            assert!(error.contains(said), "{instead}: {error}");
        }
    }
}
