//! Directives in a job script: `#BB_LUA forebay WORD…` and `#STAGE IN|OUT SRC DST`.
//!
//! As in Slurm, they end at the first line that is no comment, and a line that ends with a backslash goes on in the
//! next one.

use forebay_types::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::failure;

/// The pool that Slurm counts for `capacity=`: it demands a name beside it.
pub(crate) const SPACE: &str = "forebay";
/// The least that a node can give to a pool. A smaller share goes to fewer nodes.
pub(crate) const SMALLEST: u64 = 64 << 20;
const DIRECTIVE: &str = "#BB_LUA";
const STAGE: &str = "#STAGE";
const WORDS: [&str; 11] = [
    "capacity",
    "pool",
    "nodes",
    "stage_in",
    "stage_out",
    "backing",
    "mode",
    "policy",
    "persistent",
    "use",
    "destroy",
];

/// What a job asks for.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Request {
    /// Space over all nodes, in bytes.
    pub(crate) capacity_bytes: Option<u64>,
    /// How many of the job's nodes give space.
    pub(crate) nodes: Option<usize>,
    /// `SRC:DST`, DST in the pool.
    pub(crate) stage_in: Vec<String>,
    /// `SRC:DST`, SRC in the pool.
    pub(crate) stage_out: Vec<String>,
    /// A backing store for the pool's root.
    pub(crate) backing: Option<String>,
    /// `dram` or `ssd`.
    pub(crate) mode: Option<String>,
    /// The policy by which written data are copied to the store.
    pub(crate) policy: Option<String>,
    /// The persistent pool that it is about.
    pub(crate) persistent: Option<Persistent>,
}

/// What is done with a persistent pool.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Persistent {
    Create(String),
    Use(String),
    Destroy(String),
}

impl Persistent {
    pub(crate) fn name(&self) -> &str {
        match self {
            Persistent::Create(name) | Persistent::Use(name) | Persistent::Destroy(name) => name,
        }
    }
}

impl Request {
    /// True if the job has a pool of its own, which ends with it.
    pub(crate) fn has_own_pool(&self) -> bool {
        self.persistent.is_none()
    }

    /// True if the job's nodes stage in before its script starts.
    pub(crate) fn stages_in_prolog(&self) -> bool {
        !self.stage_in.is_empty() && !matches!(self.persistent, Some(Persistent::Use(_)))
    }
}

fn refused(line: &str, why: impl std::fmt::Display, cure: impl Into<String>) -> Error {
    let shown: String = line.chars().take(100).collect();
    failure::invalid(format!("cannot use the directive \"{shown}\""), why, cure)
}

/// What a job script asks of Forebay; `None` when it has no directive for it.
///
/// # Errors
/// A directive that is wrong, with the word and the remedy.
pub(crate) fn parse(script: &str) -> Result<Option<Request>> {
    let mut request = Request::default();
    let mut found = false;
    let mut staged: Option<String> = None;
    for line in header(script) {
        let words = split(&line)?;
        let is_ours = words.first().is_some_and(|word| [DIRECTIVE, STAGE].contains(&word.as_str()));
        if is_ours && line.contains(char::REPLACEMENT_CHARACTER) {
            return Err(refused(&line, "it has a character that is not UTF-8", "rename the path"));
        }
        match words.first().map(String::as_str) {
            Some(DIRECTIVE) if words.get(1).is_some_and(|w| w == "forebay") => {
                found = true;
                read(&mut request, &line, &words[2..])?;
            }
            Some(DIRECTIVE) => {
                let word = words.get(1).map_or("", String::as_str);
                return Err(refused(
                    &line,
                    format!("it is for {word:?}, which this cluster does not have"),
                    "write `#BB_LUA forebay ...`",
                ));
            }
            Some(STAGE) => {
                let [_, way, source, destination] = words.as_slice() else {
                    return Err(refused(&line, "it has not three words", "write `#STAGE IN SRC DST`"));
                };
                let pair = format!("{}:{}", plain(&line, source)?, plain(&line, destination)?);
                match way.to_ascii_uppercase().as_str() {
                    "IN" => add_in(&mut request, &line, pair)?,
                    "OUT" => add_out(&mut request, &line, pair)?,
                    _ => {
                        let why = format!("{way:?} is no direction");
                        return Err(refused(&line, why, "write `#STAGE IN SRC DST` or `#STAGE OUT SRC DST`"));
                    }
                }
                staged = Some(line);
            }
            _ => {}
        }
    }
    if let (false, Some(line)) = (found, staged) {
        return Err(refused(
            &line,
            "there is no pool for it",
            "add a line `#BB_LUA forebay capacity=SIZE pool=forebay`",
        ));
    }
    if found {
        complete(&request)?;
    }
    Ok(found.then_some(request))
}

/// The comment lines at the beginning, joined where a line goes on.
fn header(script: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut goes_on = false;
    for line in script.lines() {
        if !line.starts_with('#') {
            if line.is_empty() {
                continue;
            }
            break;
        }
        let (text, more) = match line.strip_suffix('\\') {
            Some(text) => (text, true),
            None => (line, false),
        };
        match (goes_on, lines.last_mut()) {
            (true, Some(last)) if line.starts_with(DIRECTIVE) => last.push_str(&text[DIRECTIVE.len()..]),
            _ => lines.push(text.to_owned()),
        }
        goes_on = more && line.starts_with(DIRECTIVE);
    }
    lines
}

/// The words of a line. Quotes keep blanks together.
fn split(line: &str) -> Result<Vec<String>> {
    let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
    for c in line.chars() {
        match (c, quote) {
            (c, Some(q)) if c == q => quote = None,
            (c, Some(_)) => word.push(c),
            ('"' | '\'', None) if line.starts_with(DIRECTIVE) || line.starts_with(STAGE) => quote = Some(c),
            (c, None) if c.is_whitespace() => {
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
            }
            (c, None) => word.push(c),
        }
    }
    if quote.is_some() {
        return Err(refused(line, "a quote is not closed", "close it"));
    }
    if !word.is_empty() {
        words.push(word);
    }
    Ok(words)
}

fn plain<'a>(line: &str, path: &'a str) -> Result<&'a str> {
    if path.contains(':') {
        return Err(refused(
            line,
            format!("{path:?} has a colon"),
            "rename it: a colon separates the two paths",
        ));
    }
    Ok(path)
}

fn read(request: &mut Request, line: &str, words: &[String]) -> Result<()> {
    let mut kind: Option<&str> = None;
    for word in words {
        let (key, value) = match word.split_once('=') {
            Some((key, value)) if !value.is_empty() => (key, value),
            Some((key, _)) => {
                return Err(refused(line, format!("{key}= has no value"), format!("write {key}=VALUE")))
            }
            None if ["persistent", "use", "destroy"].contains(&word.as_str()) => {
                if let Some(before) = kind {
                    let why = format!("it says both {before} and {word}");
                    return Err(refused(line, why, format!("write `{word} name=NAME` alone")));
                }
                kind = Some(word);
                continue;
            }
            None => return Err(refused(line, format!("{word:?} is no word of it"), near(word))),
        };
        match key {
            "capacity" => {
                let bytes = forebay_server::parse_size(value)
                    .map_err(|_| refused(line, format!("{value:?} is no size"), "write capacity=64GiB"))?;
                if !(SMALLEST..=1 << 50).contains(&bytes) {
                    return Err(refused(
                        line,
                        format!("{value} is no size of a pool"),
                        "write 64MiB to 1PiB",
                    ));
                }
                once(line, key, &mut request.capacity_bytes, bytes)?;
            }
            "pool" if value == SPACE => {}
            "pool" => {
                return Err(refused(
                    line,
                    format!("there is no pool={value}"),
                    format!("write pool={SPACE}"),
                ));
            }
            "nodes" => {
                let nodes = value.parse().ok().filter(|n| (1..=32766).contains(n));
                let nodes = nodes.ok_or_else(|| {
                    refused(line, format!("{value:?} is no number of nodes"), "write nodes=4")
                })?;
                once(line, key, &mut request.nodes, nodes)?;
            }
            "stage_in" => add_in(request, line, value.to_owned())?,
            "stage_out" => add_out(request, line, value.to_owned())?,
            "backing" => {
                crate::backing::Url::parse(std::ffi::OsStr::new(value))
                    .map_err(|e| refused(line, e.why, e.cure))?;
                if !value.starts_with('/') && !value.contains("://") {
                    let why = format!("{value:?} is no absolute path");
                    return Err(refused(line, why, "write backing=/lustre/project, or a URL"));
                }
                once(line, key, &mut request.backing, value.to_owned())?;
            }
            "mode" => {
                if !["dram", "ssd"].contains(&value) {
                    return Err(refused(
                        line,
                        format!("there is no mode={value}"),
                        "write mode=dram or mode=ssd",
                    ));
                }
                once(line, key, &mut request.mode, value.to_owned())?;
            }
            "policy" => {
                value.parse::<forebay_tasks::Policy>().map_err(|e| {
                    refused(
                        line,
                        format!("policy={value}: {e}"),
                        "write policy=close, age:30s, watermark, request or never",
                    )
                })?;
                once(line, key, &mut request.policy, value.to_owned())?;
            }
            "name" => {
                let name = value.to_owned();
                if name.len() > 64 || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b)) {
                    return Err(refused(
                        line,
                        format!("{name:?} is no name"),
                        "write up to 64 letters, digits, - and _",
                    ));
                }
                let persistent = match kind {
                    Some("persistent") => Persistent::Create(name),
                    Some("use") => Persistent::Use(name),
                    Some(_) => Persistent::Destroy(name),
                    None => {
                        let cure = format!("write `persistent name={name}` or `use name={name}`");
                        return Err(refused(line, "name= does not say what to do with the pool", cure));
                    }
                };
                once(line, "name", &mut request.persistent, persistent)?;
                kind = None;
            }
            key => return Err(refused(line, format!("{key:?} is no word of it"), near(key))),
        }
    }
    match kind {
        Some(kind) => {
            Err(refused(line, format!("{kind} names no pool"), format!("write `{kind} name=NAME`")))
        }
        None => Ok(()),
    }
}

fn once<T>(line: &str, key: &str, slot: &mut Option<T>, value: T) -> Result<()> {
    if slot.is_some() {
        return Err(refused(line, format!("{key}= comes twice"), "leave out one of them"));
    }
    *slot = Some(value);
    Ok(())
}

fn add_in(request: &mut Request, line: &str, pair: String) -> Result<()> {
    one_colon(line, &pair)?;
    match pair.split_once(':') {
        Some((source, destination)) if source.starts_with('/') && destination.starts_with('/') => {
            request.stage_in.push(pair);
            Ok(())
        }
        _ => Err(refused(
            line,
            format!("{pair:?} does not name two absolute paths"),
            "write stage_in=SRC:DST, as in stage_in=/lustre/case:/case; DST is in the pool",
        )),
    }
}

/// With several colons it is not clear which one separates the two paths.
fn one_colon(line: &str, pair: &str) -> Result<()> {
    match pair.matches(':').count() {
        0 | 1 => Ok(()),
        _ => {
            let why = format!("{pair:?} has several colons");
            Err(refused(line, why, "rename the path that has one: a colon separates the two paths"))
        }
    }
}

fn add_out(request: &mut Request, line: &str, pair: String) -> Result<()> {
    one_colon(line, &pair)?;
    match pair.split_once(':') {
        Some((source, destination)) if source.starts_with('/') && destination.starts_with('/') => {
            request.stage_out.push(pair);
            Ok(())
        }
        _ => Err(refused(
            line,
            format!("{pair:?} does not name two absolute paths"),
            "write stage_out=SRC:DST, as in stage_out=/out:/lustre/out; SRC is in the pool",
        )),
    }
}

/// Checks what the directives say together.
fn complete(request: &Request) -> Result<()> {
    let line = "#BB_LUA forebay";
    let needs_space = !matches!(request.persistent, Some(Persistent::Use(_) | Persistent::Destroy(_)));
    if needs_space && request.capacity_bytes.is_none() {
        return Err(refused(
            line,
            "no capacity= says how large the pool is",
            "add capacity=SIZE pool=forebay",
        ));
    }
    let has_more = request.capacity_bytes.is_some()
        || request.backing.is_some()
        || request.mode.is_some()
        || request.policy.is_some()
        || request.nodes.is_some();
    if !needs_space && has_more {
        let why = "capacity, nodes, backing, mode and policy belong to the job that creates the pool";
        return Err(refused(line, why, "leave them out here"));
    }
    if matches!(request.persistent, Some(Persistent::Destroy(_)))
        && !(request.stage_in.is_empty() && request.stage_out.is_empty())
    {
        let why = "a job that destroys a pool cannot stage with it";
        return Err(refused(line, why, "stage out in a job before, with `use name=NAME`"));
    }
    if request.policy.is_some() && request.backing.is_none() {
        return Err(refused(line, "policy= is for a backing store", "add backing=URL, or leave it out"));
    }
    Ok(())
}

/// The remedy for an unknown word: the nearest known one.
fn near(word: &str) -> String {
    let nearest = WORDS.iter().min_by_key(|known| distance(word, known));
    match nearest {
        Some(known) if distance(word, known) <= 3 => format!("did you mean {known}?"),
        _ => format!("write one of {}", WORDS.join(", ")),
    }
}

/// The number of characters that have to be changed, added or removed.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut corner = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let cost = (corner + usize::from(x != *y)).min(row[j] + 1).min(row[j + 1] + 1);
            corner = std::mem::replace(&mut row[j + 1], cost);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(line: &str) -> String {
        parse(&format!("#!/bin/sh\n{line}\n")).unwrap_err().to_string()
    }

    #[test]
    fn script_without_a_directive_asks_for_nothing() {
        assert_eq!(parse("#!/bin/sh\n#SBATCH -N2\necho \"it's\"\n").unwrap(), None);
        assert_eq!(parse("#!/bin/sh\n# it's a comment\nx\n#BB_LUA forebay nonsense\n").unwrap(), None);
    }

    #[test]
    fn directives_of_both_kinds_add_up_and_go_on_over_lines() {
        let script =
            "#!/bin/bash\n#SBATCH -N2\n#BB_LUA forebay capacity=1GiB pool=forebay \\\n#BB_LUA nodes=2 \
                      stage_in=/l/a:/a\n#STAGE OUT /out '/l/my out'\n#STAGE in /l/b /b\n\
                      #BB_LUA forebay mode=ssd backing=/l/p policy=age:30s\nsrun x\n";
        let request = parse(script).unwrap().unwrap();
        assert_eq!(request.capacity_bytes, Some(1 << 30));
        assert_eq!((request.nodes, request.mode.as_deref()), (Some(2), Some("ssd")));
        assert_eq!(request.stage_in, ["/l/a:/a", "/l/b:/b"]);
        assert_eq!(request.stage_out, ["/out:/l/my out"]);
        assert_eq!((request.backing.as_deref(), request.policy.as_deref()), (Some("/l/p"), Some("age:30s")));
        assert!(request.has_own_pool());
    }

    #[test]
    fn persistent_pools_are_created_used_and_destroyed_by_name() {
        let kind = |line: &str| {
            parse(&format!("#!x\n#BB_LUA forebay {line}\n")).unwrap().unwrap().persistent.unwrap()
        };
        assert_eq!(kind("persistent name=a-1 capacity=1GiB"), Persistent::Create("a-1".into()));
        assert_eq!(kind("use name=a"), Persistent::Use("a".into()));
        assert_eq!(kind("destroy name=a"), Persistent::Destroy("a".into()));
    }

    #[test]
    fn wrong_directive_is_refused_with_the_word_and_the_remedy() {
        for (line, word, remedy) in [
            ("#BB_LUA forebay capasity=1GiB", "capasity", "did you mean capacity?"),
            ("#BB_LUA forebay capacity=lots", "lots", "capacity=64GiB"),
            ("#BB_LUA forebay capacity=", "capacity= has no value", "capacity=VALUE"),
            ("#BB_LUA forebay capacity=1GiB pool=other", "pool=other", "pool=forebay"),
            ("#BB_LUA forebay capacity=1GiB capacity=2GiB", "twice", "leave out one"),
            ("#BB_LUA forebay capacity=1GiB stage_in=/a", "\"/a\"", "stage_in=SRC:DST"),
            ("#BB_LUA forebay capacity=1GiB stage_out=a:/b", "\"a:/b\"", "stage_out=SRC:DST"),
            ("#BB_LUA forebay capacity=1GiB mode=tape", "mode=tape", "mode=dram"),
            ("#BB_LUA forebay capacity=1GiB policy=never", "policy=", "backing=URL"),
            ("#BB_LUA forebay capacity=1GiB backing=/a policy=soon", "soon", "age:30s"),
            ("#BB_LUA forebay capacity=1GiB persistent", "persistent names no pool", "persistent name=NAME"),
            ("#BB_LUA forebay use name=a capacity=1GiB", "capacity", "leave them out"),
            ("#BB_LUA forebay use name=../a", "../a", "letters"),
            ("#BB_LUA forebay capacity=1GiB backing=lustre", "lustre", "backing=/lustre"),
            ("#BB_LUA forebay capacity=1GiB stage_in=/a\u{fffd}:/a", "UTF-8", "rename"),
            ("#BB_LUA forebay persistent use name=a", "both persistent and use", "use name=NAME"),
            ("#BB_LUA forebay capacity=1GiB stage_out=/a:/l/b:2", "several colons", "rename"),
            ("#BB_LUA forebay capacity=1GiB stage_in=/l/a:/b:/c", "several colons", "rename"),
            ("#BB_LUA forebay capacity=1GiB name=a", "name=", "persistent name=a"),
            ("#BB_LUA forebay stage_in=/a:/b", "capacity=", "capacity=SIZE"),
            ("#BB_LUA forebay capacity=1GiB nodes=none", "none", "nodes=4"),
            ("#BB_LUA other capacity=1GiB", "other", "#BB_LUA forebay"),
            ("#STAGE IN /a /b", "no pool", "#BB_LUA forebay"),
            ("#STAGE UP /a /b", "UP", "#STAGE IN SRC DST"),
            ("#BB_LUA forebay capacity='1GiB", "quote", "close it"),
        ] {
            let text = error(line);
            assert!(text.contains(word) && text.contains(remedy), "{line}: {text}");
        }
    }
}
