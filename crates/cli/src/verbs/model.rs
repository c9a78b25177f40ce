//! `forebay model`: calibrate, predict, advise (docs/decisions/0049). The formulas are in `crates/model`; below: the
//! measurements of media ([`medium`]) and messages ([`messages`]), and their statistics ([`fit`]).

mod calibrating;
mod fit;
mod medium;
mod messages;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use forebay_model::{
    advise, parse_ior, predict_best, predict_calls, Access, Choice, Corrections, Document, Estimate,
    Extensions, Pattern, Prediction,
};
use forebay_types::{Code, Error, Result, MODEL_FILE};
use serde_json::{json, Value};

use crate::arguments::{AccessKind, ModelAdvise, ModelPredict, ModelVerb, PatternOptions};
use crate::table::{self, Facts};
use crate::{failure, pool};

pub(super) fn model(named: Option<PathBuf>, verb: &ModelVerb) -> Result<ExitCode> {
    match verb {
        ModelVerb::Calibrate(a) => calibrating::calibrate(named, a),
        ModelVerb::Predict(a) => predict(named, a),
        ModelVerb::Advise(a) => advice(named, a),
    }
}

/// Reads the calibration in `file`. Without one, reads the calibration that is stored with the pool.
fn calibration(named: Option<PathBuf>, file: Option<&Path>) -> Result<Document> {
    let path = match file {
        Some(file) => file.to_owned(),
        None => pool::directory(named)?.join(MODEL_FILE),
    };
    let text = std::fs::read_to_string(&path).map_err(|e| {
        let error = Error::io(format!("cannot read the calibration {}", path.display()), &e);
        error.cure("make one: forebay model calibrate; or name one: --calibration FILE")
    })?;
    Document::parse(&text).map_err(|e| Error { what: format!("{}: {}", path.display(), e.what), ..e })
}

/// A pattern, and how many calls with it follow each other.
fn pattern(options: &PatternOptions, processors: i64) -> Result<(Pattern, u64)> {
    if options.ranks == 0 {
        Pattern { ranks: 0, ..Pattern::default() }.check()?;
    }
    let (mut found, calls) = match &options.ior {
        Some(text) => {
            let run = parse_ior(text, options.ranks)?;
            (run.pattern, run.calls)
        }
        None => (of_options(options)?, options.calls),
    };
    found.nodes = options.nodes;
    found.aggregators = options.aggregators.unwrap_or((processors.max(1) as u64).min(options.ranks));
    found.writes = !options.read;
    found.buffer_bytes = options.buffer;
    found.targets = options.targets;
    found.is_far = options.far || options.apart;
    found.is_apart = options.apart;
    found.check()?;
    Ok((found, calls))
}

fn of_options(options: &PatternOptions) -> Result<Pattern> {
    let run_bytes = options.run.unwrap_or(options.bytes);
    let gap_bytes = match options.interleaved {
        true => run_bytes.checked_mul(options.ranks - 1).ok_or_else(|| {
            failure::invalid(
                "the pattern makes no sense",
                "its range is too large",
                "use fewer or smaller runs",
            )
        })?,
        false => options.gap.unwrap_or(0),
    };
    let access = match options.access {
        Some(AccessKind::Random) => Access::Random,
        Some(AccessKind::Sequential) => Access::Sequential,
        Some(AccessKind::Strided) => Access::Strided,
        None if gap_bytes > 0 => Access::Strided,
        None => Access::Sequential,
    };
    Ok(Pattern {
        ranks: options.ranks,
        bytes: options.bytes,
        run_bytes,
        gap_bytes,
        access,
        ..Pattern::default()
    })
}

fn predict(named: Option<PathBuf>, arguments: &ModelPredict) -> Result<ExitCode> {
    let used = if arguments.without.iter().any(|name| name == "all") {
        Extensions::NONE
    } else {
        Extensions::without(arguments.without.iter().map(String::as_str)).ok_or_else(|| {
            failure::invalid(
                "cannot leave out this extension",
                "it has another name",
                format!("known are {}, and all", Extensions::NAMES.join(", ")),
            )
        })?
    };
    let document = calibration(named, arguments.pattern.calibration.as_deref())?;
    let (mut pattern, calls) = pattern(&arguments.pattern, document.calibration.processors)?;
    let none = Corrections::default();
    if arguments.pattern.aggregators.is_none() {
        let usual = Pattern { is_continued: calls > 1, ..pattern };
        (pattern.aggregators, _) = predict_best(&usual, &document.calibration, used, &none);
    }
    let found = predict_calls(&pattern, calls, &document.calibration, used, &none);
    if arguments.pattern.json {
        failure::print_json(&json!({
            "pattern": shown_pattern(&pattern, calls),
            "collective": shown(&found.collective, 1),
            "independent": shown(&found.independent, 1),
            "choice": way(found.is_collective()),
            "calibration": about(&document),
        }));
        return Ok(ExitCode::SUCCESS);
    }
    let mut facts = Facts::default();
    facts.add("pattern", words(&pattern, calls));
    let aggregators = table::count(pattern.aggregators, "aggregator");
    facts.add("collective", format!("{}, with {aggregators}", line(&found.collective, 1)));
    facts.add("independent", line(&found.independent, 1));
    facts.add("choice", choice_words(&found));
    facts.add("calibrated", origin(&document));
    failure::put(facts.text());
    Ok(ExitCode::SUCCESS)
}

fn advice(named: Option<PathBuf>, arguments: &ModelAdvise) -> Result<ExitCode> {
    let document = calibration(named, arguments.pattern.calibration.as_deref())?;
    let (mut pattern, calls) = pattern(&arguments.pattern, document.calibration.processors)?;
    // The first one of many calls counts as the others.
    pattern.is_continued = calls > 1;
    if !(1..=256).contains(&arguments.stripes) {
        return Err(Error::new(Code::Invalid, "cannot try this many stripes")
            .why("a file has 1 to 256 backing files")
            .cure("give --stripes a number of these"));
    }
    let found = advise(&pattern, &document.calibration, arguments.stripes);
    let best = found.best();
    if arguments.pattern.json {
        let choice = |choice: &Choice| {
            json!({
                "time": shown(&choice.time, calls),
                "aggregators": choice.pattern.aggregators,
                "buffer_bytes": choice.pattern.buffer_bytes,
                "stripe_count": choice.pattern.targets,
            })
        };
        let hints: serde_json::Map<String, Value> =
            best.hints().into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
        failure::print_json(&json!({
            "pattern": shown_pattern(&pattern, calls),
            "choice": way(best.is_collective),
            "certain": found.is_certain(),
            "collective": choice(&found.collective),
            "independent": choice(&found.independent),
            "hints": hints,
            "calibration": about(&document),
        }));
        return Ok(ExitCode::SUCCESS);
    }
    let mut facts = Facts::default();
    facts.add("pattern", words(&pattern, calls));
    let certain = if found.is_certain() { "" } else { "; the intervals overlap, so measure both" };
    facts.add("advice", format!("{}{certain}", way(best.is_collective)));
    let Choice { pattern: p, .. } = &found.collective;
    let stripes = |count| table::count(count, "stripe");
    facts.add(
        "collective",
        format!(
            "{}, with {} of {}, {}",
            line(&found.collective.time, calls),
            table::count(p.aggregators, "aggregator"),
            table::bytes(p.buffer_bytes),
            stripes(p.targets)
        ),
    );
    let i = &found.independent;
    facts.add("independent", format!("{}, with {}", line(&i.time, calls), stripes(i.pattern.targets)));
    let hints: Vec<_> = best.hints().into_iter().map(|(name, value)| format!("{name}={value}")).collect();
    facts.add("hints", hints.join(";"));
    facts.add("calibrated", origin(&document));
    failure::put(facts.text());
    Ok(ExitCode::SUCCESS)
}

fn way(is_collective: bool) -> &'static str {
    if is_collective {
        "collective"
    } else {
        "independent"
    }
}

fn choice_words(found: &Prediction) -> String {
    let by = found.collective.value / found.independent.value;
    let by = if found.is_collective() { 1.0 / by } else { by };
    let certain =
        found.collective.high < found.independent.low || found.independent.high < found.collective.low;
    let doubt = if certain { "" } else { "; the intervals overlap" };
    match found.is_collective() {
        true => format!("collective, {by:.2} times as fast{doubt}"),
        false if by < 1.0 => format!("independent: collective gains less than 5 %{doubt}"),
        false => format!("independent, {by:.2} times as fast{doubt}"),
    }
}

/// A time with a unit that suits it.
fn time(ns: f64) -> String {
    match ns {
        ns if ns < 1e3 => format!("{ns:.0} ns"),
        ns if ns < 1e6 => format!("{:.1} us", ns / 1e3),
        ns if ns < 1e9 => format!("{:.1} ms", ns / 1e6),
        ns => format!("{:.2} s", ns / 1e9),
    }
}

fn line(estimate: &Estimate, calls: u64) -> String {
    let calls = calls as f64;
    let of = |ns: f64| time(ns * calls);
    let parts = estimate.parts;
    format!(
        "{} ({} to {}; messages {}, file {}, lists and copies {})",
        of(estimate.value),
        of(estimate.low),
        of(estimate.high),
        of(parts.communication),
        of(parts.io),
        of(parts.other)
    )
}

fn shown(estimate: &Estimate, calls: u64) -> Value {
    let ns = |ns: f64| (ns * calls as f64) as u64;
    json!({
        "ns": ns(estimate.value), "low_ns": ns(estimate.low), "high_ns": ns(estimate.high),
        "communication_ns": ns(estimate.parts.communication), "io_ns": ns(estimate.parts.io),
        "other_ns": ns(estimate.parts.other),
    })
}

fn words(p: &Pattern, calls: u64) -> String {
    let far = match (p.is_apart, p.is_far) {
        (true, _) => ", data on nodes without ranks",
        (false, true) => ", data on other nodes",
        (false, false) => "",
    };
    let calls = if calls == 1 { String::new() } else { format!(", {calls} calls") };
    format!(
        "{} on {}, {} each in runs of {}, {} {}{calls}{far}",
        table::count(p.ranks, "rank"),
        table::count(p.nodes, "node"),
        table::bytes(p.bytes),
        table::bytes(p.run_bytes.min(p.bytes)),
        p.access.name(),
        if p.writes { "writes" } else { "reads" }
    )
}

fn shown_pattern(p: &Pattern, calls: u64) -> Value {
    json!({
        "ranks": p.ranks, "nodes": p.nodes, "aggregators": p.aggregators, "bytes": p.bytes,
        "run_bytes": p.run_bytes, "gap_bytes": p.gap_bytes, "writes": p.writes, "access": p.access.name(),
        "buffer_bytes": p.buffer_bytes, "targets": p.targets, "far": p.is_far, "apart": p.is_apart, "calls": calls,
    })
}

fn origin(d: &Document) -> String {
    let busy = if d.busy_percent >= calibrating::BUSY_PERCENT {
        format!(", {} % busy", d.busy_percent)
    } else {
        String::new()
    };
    format!("{} on {}, {}{busy}; messages: {}", table::local_time(d.made_s), d.host, d.medium, d.messages)
}

fn about(d: &Document) -> Value {
    json!({
        "made_s": d.made_s, "host": d.host, "medium": d.medium, "messages": d.messages,
        "busy_percent": d.busy_percent,
    })
}
