//! The functions of include/forebay.h on the model of collective and independent I/O. They check and convert; the model
//! is `crates/model`.

use std::ffi::OsStr;
use std::os::raw::c_int;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use forebay_client::Pool;
use forebay_model::{
    predict_best, predict_with, Access, Calibration, Corrections, Document, Extensions, Pattern,
};
use forebay_types::MODEL_FILE;

use crate::answer::{Failed, FAULT, INVALID};
use crate::header::{forebay_calibration, forebay_corrections, forebay_pattern, forebay_times};

/// The environment variable with the path of the calibration to read; `off` for none. Without it the pool's is read.
const VARIABLE: &str = "FOREBAY_MODEL";

// `numbers` has the size that the model gives it.
const _: () = assert!(size_of::<forebay_calibration>() == size_of::<[i64; forebay_model::NUMBERS]>());
const _: () = assert!(size_of::<forebay_corrections>() == size_of::<[i64; forebay_model::FACTORS]>());

/// The document to read, and whether the environment names it. None if the model is switched off.
fn document(pool: &Pool) -> Option<(PathBuf, bool)> {
    match std::env::var_os(VARIABLE) {
        Some(named) if named == "off" => None,
        Some(named) if !named.is_empty() => Some((named.into(), true)),
        _ => Some((Path::new(OsStr::from_bytes(pool.directory())).join(MODEL_FILE), false)),
    }
}

pub(crate) fn model_calibration(pool: &Pool, out: Option<&mut forebay_calibration>) -> Result<bool, Failed> {
    let out = out.ok_or(FAULT)?;
    let Some((path, is_named)) = document(pool) else { return Ok(false) };
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && !is_named => return Ok(false),
        Err(e) => {
            crate::text::remember(&format!("cannot read the calibration {}: {e}", path.display()));
            return Err(Failed::errno(e.raw_os_error().unwrap_or(libc::EINVAL)));
        }
    };
    let found = Document::parse(&text).map_err(|error| {
        crate::text::remember(&format!("{}: {error}", path.display()));
        error.code
    })?;
    out.numbers = found.calibration.numbers();
    Ok(true)
}

pub(crate) fn model_quick(
    message_ns: i64,
    message_byte_ps: i64,
    request_ns: i64,
    processors: i64,
    out: Option<&mut forebay_calibration>,
) -> Result<(), Failed> {
    let out = out.ok_or(FAULT)?;
    // A medium that was not measured is memory, which serves all processors at a time.
    let parallel = processors.max(1);
    let guessed = Calibration { processors, parallel, queue: parallel, ..Calibration::default() };
    let mut made = match out.numbers[0] {
        0 => guessed,
        _ => Calibration::from_numbers(&out.numbers).ok_or(INVALID)?,
    };
    let [message, byte, request] =
        [message_ns, message_byte_ps, request_ns].map(forebay_model::Value::exactly);
    made.set_network(message, byte, request);
    made.check().map_err(|_| INVALID)?;
    out.numbers = made.numbers();
    Ok(())
}

fn pattern_of(given: &forebay_pattern) -> Result<Pattern, Failed> {
    let number = |n: i64| u64::try_from(n).map_err(|_| INVALID);
    Ok(Pattern {
        ranks: number(given.ranks)?,
        nodes: number(given.nodes)?,
        aggregators: number(given.aggregators)?,
        bytes: number(given.bytes)?,
        run_bytes: number(given.run_bytes)?,
        gap_bytes: number(given.gap_bytes)?,
        buffer_bytes: number(given.buffer_bytes)?,
        targets: number(given.targets)?,
        writes: given.writes != 0,
        access: if given.gap_bytes > 0 { Access::Strided } else { Access::Sequential },
        is_far: given.far != 0,
        is_apart: given.far > 1,
        is_continued: given.continued != 0,
    })
}

pub(crate) fn model_predict(
    calibration: &forebay_calibration,
    corrections: &forebay_corrections,
    pattern: &forebay_pattern,
    out: Option<&mut forebay_times>,
) -> Result<bool, Failed> {
    let calibration = Calibration::from_numbers(&calibration.numbers).ok_or(INVALID)?;
    let corrections = Corrections::from_numbers(corrections.factors);
    let given = pattern_of(pattern)?;
    let (aggregators, found) = match pattern.fewer_aggregators {
        0 => (given.aggregators, predict_with(&given, &calibration, Extensions::ALL, &corrections)),
        _ => predict_best(&given, &calibration, Extensions::ALL, &corrections),
    };
    let (c, i) = (&found.collective, &found.independent);
    // Times are at most i64::MAX; the conversion saturates.
    *out.ok_or(FAULT)? = forebay_times {
        collective_ns: c.value as i64,
        collective_low_ns: c.low as i64,
        collective_high_ns: c.high as i64,
        independent_ns: i.value as i64,
        independent_low_ns: i.low as i64,
        independent_high_ns: i.high as i64,
        collective_plain_ns: c.parts.total() as i64,
        independent_plain_ns: i.parts.total() as i64,
        aggregators: i64::try_from(aggregators).unwrap_or(i64::MAX),
    };
    Ok(found.is_collective())
}

pub(crate) fn model_learn(
    corrections: Option<&mut forebay_corrections>,
    writes: c_int,
    collective: c_int,
    plain_ns: i64,
    measured_ns: i64,
) -> Result<(), Failed> {
    let given = corrections.ok_or(FAULT)?;
    let mut learnt = Corrections::from_numbers(given.factors);
    learnt.learn(writes != 0, collective != 0, plain_ns, measured_ns);
    given.factors = learnt.numbers();
    Ok(())
}
