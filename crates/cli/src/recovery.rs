//! Recovery of dead pools: has the mover's program (`forebay-mover --recover`) copy into the stores what the targets
//! have, and shows how far it is. The verb `recover` and the scheduler's hooks use it.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use forebay_server::DeadPool;
use forebay_tasks::recovery::{Fate, RecoveredFile, RecoveryEvent, RecoveryPlan};
use forebay_types::{Code, Error, Result};
use indicatif::{ProgressBar, ProgressStyle};

use crate::staging::Style;
use crate::table;

/// Period of the lines where there is no terminal.
const LINE_PERIOD: Duration = Duration::from_secs(5);

/// What is to be recovered.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wanted {
    /// The directories of the dead pool's targets.
    pub(crate) directories: Vec<PathBuf>,
    /// A store that gets everything, instead of those that were attached.
    pub(crate) to: Option<String>,
    pub(crate) list: bool,
    pub(crate) dry_run: bool,
    pub(crate) partial: bool,
    pub(crate) unnamed: bool,
    /// The stores' directories were made anew.
    pub(crate) replaced: bool,
}

/// What came of it.
#[derive(Debug, Default)]
pub(crate) struct Recovered {
    /// Files and bytes of each fate, in the order of [`Fate`].
    pub(crate) sums: std::collections::BTreeMap<Fate, (u64, u64)>,
    pub(crate) notes: Vec<String>,
}

impl Recovered {
    /// True if the targets have data that the stores lack.
    pub(crate) fn is_open(&self) -> bool {
        self.sums.keys().any(|fate| fate.is_open())
    }
}

/// The end of the names of versions beside others: the time.
fn stamp() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let text = table::local_time(now.map_or(0, |since| since.as_secs() as i64));
    let plain = |c: char| match c {
        ' ' => 'T',
        c if c.is_ascii_alphanumeric() => c,
        _ => '-',
    };
    text.chars().take(19).map(plain).collect()
}

/// Recovers; `each` gets every file. Returns the targets too, still locked.
///
/// # Errors
/// Failures that concern everything. Those of single files are counted.
pub(crate) fn recover(
    wanted: &Wanted,
    style: Style,
    each: &mut dyn FnMut(RecoveredFile),
) -> Result<(Recovered, DeadPool)> {
    let dead = DeadPool::find(&wanted.directories)?;
    let plan = RecoveryPlan {
        targets: dead.targets.clone(),
        to: wanted.to.clone(),
        stamp: stamp(),
        list: wanted.list,
        dry_run: wanted.dry_run,
        partial: wanted.partial,
        unnamed: wanted.unnamed,
        replaced: wanted.replaced,
    };
    let mut recovered = Recovered { notes: dead.notes.clone(), ..Recovered::default() };
    run(&plan, style, &mut |event| match event {
        RecoveryEvent::Note(note) => recovered.notes.push(note),
        RecoveryEvent::File(file) => {
            let sum = recovered.sums.entry(file.fate).or_default();
            *sum = (sum.0 + 1, sum.1 + file.bytes);
            each(file);
        }
        _ => {}
    })?;
    Ok((recovered, dead))
}

fn run(plan: &RecoveryPlan, style: Style, each: &mut dyn FnMut(RecoveryEvent)) -> Result<()> {
    let what = "cannot run the recovery";
    let text = serde_json::to_vec(plan)
        .map_err(|e| Error::new(Code::Invalid, what).why(e).cure("name directories whose paths are UTF-8"))?;
    let mut child = Command::new(forebay_server::mover_program()?)
        .arg("--recover")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| Error::io(what, &e))?;
    // The child reads all of it before it writes. If it died, its end says so.
    if let Some(mut input) = child.stdin.take() {
        let _ = input.write_all(&text);
    }
    let mut shown = Shown::new(style);
    let (mut is_over, mut failure) = (false, None);
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).split(b'\n') {
            let line = line.map_err(|e| Error::io(what, &e))?;
            let event = serde_json::from_slice(&line).map_err(|e| {
                Error::new(Code::Malformed, what).why(e).cure("install one version of Forebay")
            })?;
            shown.note(&event);
            match event {
                RecoveryEvent::Over => is_over = true,
                RecoveryEvent::Failed(e) => failure = Some(Error::from(e)),
                event => each(event),
            }
        }
    }
    shown.end();
    let status = child.wait().map_err(|e| Error::io(what, &e))?;
    match failure {
        Some(e) => Err(e),
        None if is_over && status.success() => Ok(()),
        None => Err(Error::new(Code::Io, what)
            .why(format!("forebay-mover ended before it was done ({status})"))
            .cure("what was recovered so far stays: run this again")),
    }
}

/// Progress on stderr.
struct Shown {
    style: Style,
    bar: ProgressBar,
    files: (u64, u64),
    bytes: (u64, u64),
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
            "recovering [{wide_bar}] {binary_bytes}/{binary_total_bytes}, {msg}, {binary_bytes_per_sec}";
        bar.set_style(
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
        );
        Shown { style, bar, files: (0, 0), bytes: (0, 0), started: Instant::now(), next_line: LINE_PERIOD }
    }

    fn note(&mut self, event: &RecoveryEvent) {
        match event {
            RecoveryEvent::Found { files, bytes } => {
                (self.files.1, self.bytes.1) = (*files, *bytes);
                self.bar.set_length(*bytes);
            }
            RecoveryEvent::File(file)
                if matches!(file.fate, Fate::Recovered | Fate::Beside | Fate::Already | Fate::Failed) =>
            {
                self.files.0 += 1;
                self.bytes.0 += file.bytes;
                self.bar.set_position(self.bytes.0);
            }
            _ => {}
        }
        let files = format!("{} of {}", self.files.0, table::count(self.files.1, "file"));
        if self.style == Style::Lines && self.started.elapsed() >= self.next_line {
            self.next_line = self.started.elapsed() + LINE_PERIOD;
            let (done, total) = (table::bytes(self.bytes.0), table::bytes(self.bytes.1));
            note!("forebay: recovering: {done} of {total}, {files}");
        }
        self.bar.set_message(files);
    }

    fn end(&self) {
        self.bar.finish_and_clear();
    }
}
