//! Runs one verb on many hosts: on this host directly, on others by ssh. The number of remote shells at a time is
//! bounded. Shows progress, and explains each failure.

use std::io::Write;
use std::process::{Command, ExitCode, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;

use forebay_server::pool_file::NodeEntry;
use forebay_types::limits::REMOTE_SHELLS_MAX;
use forebay_types::{Code, Error, Result};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

use crate::failure;
use crate::staging::Style;

/// Names the remote shell and its options; it is run as `COMMAND HOST WORDS`.
const REMOTE_VARIABLE: &str = "FOREBAY_RSH";
/// `BatchMode` prevents a password prompt, which could wait for ever.
const REMOTE_DEFAULT: &str = "ssh -o BatchMode=yes -o ConnectTimeout=10";
/// ssh's exit status when it could not reach the host.
const SSH_FAILED: i32 = 255;

/// A command to run on a host.
#[derive(Clone, Debug)]
pub(crate) struct RemoteCommand {
    /// The node's name, for messages.
    pub(crate) name: String,
    /// The host's address.
    pub(crate) host: String,
    /// The arguments of `forebay` there.
    pub(crate) words: Vec<String>,
    /// Its standard input.
    pub(crate) input: Vec<u8>,
}

impl RemoteCommand {
    /// Without standard input.
    pub(crate) fn new(node: &NodeEntry, words: Vec<String>) -> RemoteCommand {
        RemoteCommand { name: node.name.clone(), host: node.host.clone(), words, input: Vec::new() }
    }

    /// The same with one more argument.
    pub(crate) fn with(&self, word: &str) -> RemoteCommand {
        let mut one = self.clone();
        one.words.push(word.to_owned());
        one
    }
}

/// The result of a remote command.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The `name` of the remote command.
    pub(crate) name: String,
    /// Its standard output.
    pub(crate) output: String,
    /// Its standard error.
    pub(crate) errors: String,
    /// Why it failed, if it did.
    pub(crate) failure: Option<String>,
    /// Its exit status, if it was started and ended by itself.
    pub(crate) status: Option<i32>,
}

impl Outcome {
    /// Its standard output, parsed as JSON.
    pub(crate) fn json(&self) -> Option<Value> {
        serde_json::from_str(&self.output).ok()
    }
}

/// Quotes a word so that a shell reads it literally.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// True when `host` is this host and no remote shell is set.
fn is_here(host: &str) -> bool {
    let uname = rustix::system::uname();
    let name = uname.nodename().to_string_lossy();
    let short = name.split('.').next().unwrap_or_default();
    std::env::var_os(REMOTE_VARIABLE).is_none() && [name.as_ref(), short].contains(&host)
}

fn command(remote_command: &RemoteCommand) -> Result<Command> {
    let what = || format!("cannot reach {}", remote_command.name);
    let me = std::env::current_exe().map_err(|e| Error::io(what(), &e))?;
    if is_here(&remote_command.host) {
        let mut command = Command::new(me);
        command.args(&remote_command.words);
        return Ok(command);
    }
    let remote = std::env::var(REMOTE_VARIABLE).unwrap_or_else(|_| REMOTE_DEFAULT.to_owned());
    let mut parts = remote.split_whitespace();
    let program = parts.next().ok_or_else(|| {
        failure::invalid(what(), format!("{REMOTE_VARIABLE} is empty"), format!("unset {REMOTE_VARIABLE}"))
    })?;
    let me = me.to_string_lossy().into_owned();
    let line: Vec<String> =
        std::iter::once(&me).chain(&remote_command.words).map(|word| quoted(word)).collect();
    let mut command = Command::new(program);
    command.args(parts).arg(&remote_command.host).arg(line.join(" "));
    Ok(command)
}

fn done(remote_command: &RemoteCommand) -> Outcome {
    let mut outcome = Outcome {
        name: remote_command.name.clone(),
        output: String::new(),
        errors: String::new(),
        failure: None,
        status: None,
    };
    let mut command = match command(remote_command) {
        Ok(command) => command,
        Err(e) => {
            outcome.failure = Some(e.to_string());
            return outcome;
        }
    };
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.spawn().and_then(|mut child| {
        if let Some(mut pipe) = child.stdin.take() {
            // A command that does not read its input ends early, and its exit status gives the reason.
            let _ = pipe.write_all(&remote_command.input);
        }
        child.wait_with_output()
    });
    match output {
        Ok(output) => {
            outcome.output = String::from_utf8_lossy(&output.stdout).into_owned();
            outcome.errors = String::from_utf8_lossy(&output.stderr).into_owned();
            outcome.status = output.status.code();
            outcome.failure = explain(remote_command, &output, &outcome);
        }
        Err(e) => outcome.failure = Some(format!("cannot start {program}: {e}")),
    }
    outcome
}

/// Why a remote command failed, in words: the command's own error, or the meaning of its exit status.
fn explain(remote_command: &RemoteCommand, output: &Output, outcome: &Outcome) -> Option<String> {
    if output.status.success() {
        return None;
    }
    if let Some(error) = outcome.json().as_ref().and_then(|v| v.get("error")) {
        let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
        let why = Error::new(Code::Io, text("what")).why(text("why")).cure(text("cure"));
        return Some(why.to_string());
    }
    let last =
        |text: &str| text.lines().map(str::trim).rfind(|l| !l.is_empty()).unwrap_or_default().to_owned();
    let said = last(&outcome.errors);
    let program = std::env::current_exe().unwrap_or_default();
    Some(match output.status.code() {
        Some(SSH_FAILED) if said.is_empty() => format!("host {} cannot be reached", remote_command.host),
        Some(SSH_FAILED) => format!("host {} cannot be reached: {said}", remote_command.host),
        Some(126 | 127) => format!(
            "host {} has no {} that it can run ({said}): install Forebay there, at the same path",
            remote_command.host,
            program.display()
        ),
        Some(2) if outcome.errors.contains("unexpected argument") => format!(
            "host {} has another version of Forebay at {}: install the same one on all hosts",
            remote_command.host,
            program.display()
        ),
        _ if said.is_empty() => format!("it ended without a word ({})", output.status),
        _ => outcome.errors.trim().trim_start_matches("forebay: ").to_owned(),
    })
}

/// Runs all remote commands, at most [`REMOTE_SHELLS_MAX`] at a time, and returns the outcomes in the order of the
/// commands. `doing` is the label of the progress bar.
pub(crate) fn run(doing: &str, remote_commands: &[RemoteCommand]) -> Vec<Outcome> {
    let bar = match Style::of_stderr(true) {
        Style::Bar => ProgressBar::new(remote_commands.len() as u64),
        _ => ProgressBar::hidden(),
    };
    if let Ok(style) = ProgressStyle::with_template("{prefix} [{wide_bar}] {pos}/{len} nodes, {elapsed}") {
        bar.set_style(style);
    }
    bar.set_prefix(doing.to_owned());
    let next = AtomicUsize::new(0);
    let outcomes: Mutex<Vec<(usize, Outcome)>> = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..remote_commands.len().min(REMOTE_SHELLS_MAX) {
            scope.spawn(|| loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let Some(remote_command) = remote_commands.get(i) else { return };
                let outcome = done(remote_command);
                bar.inc(1);
                if let Ok(mut outcomes) = outcomes.lock() {
                    outcomes.push((i, outcome));
                }
            });
        }
    });
    bar.finish_and_clear();
    let mut outcomes = outcomes.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    outcomes.sort_by_key(|(i, _)| *i);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}

/// Prints the output of each command, and fails when any failed.
pub(crate) fn report(verb: &str, outcomes: &[Outcome]) -> Result<ExitCode> {
    for outcome in outcomes {
        let said = match &outcome.failure {
            Some(why) => why,
            None => &outcome.output,
        };
        let lines: String = said.lines().map(|line| format!("{}: {line}\n", outcome.name)).collect();
        failure::put(lines);
        if outcome.failure.is_none() {
            outcome.errors.lines().for_each(|line| note!("{}: {line}", outcome.name));
        }
    }
    let failed: Vec<&str> =
        outcomes.iter().filter(|o| o.failure.is_some()).map(|o| o.name.as_str()).collect();
    if failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    Err(Error::new(Code::Io, format!("cannot {verb} all of {} nodes", outcomes.len()))
        .why(format!("failed on {}", failed.join(", ")))
        .cure("see above; those that did it stay as they are"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_words_are_what_a_shell_reads() {
        for word in ["plain-1.0/x", "two words", "it's", "", "$HOME;`x`", "a\\b\"c"] {
            let line = format!("printf %s {}", quoted(word));
            let output = Command::new("sh").args(["-c", &line]).output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), word);
        }
    }

    #[test]
    fn explain_names_the_host_and_what_can_be_done() {
        let remote_command =
            RemoteCommand { name: "n1".into(), host: "h1".into(), words: Vec::new(), input: Vec::new() };
        let explained = |script: &str| {
            let output = Command::new("sh").args(["-c", script]).output().unwrap();
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let outcome = Outcome {
                name: "n1".into(),
                output: text(&output.stdout),
                errors: text(&output.stderr),
                failure: None,
                status: None,
            };
            explain(&remote_command, &output, &outcome)
        };
        assert_eq!(explained("exit 0"), None);
        for (script, words) in [
            (
                "echo 'ssh: connect to host h1 port 22: No route' >&2; exit 255",
                &["h1", "reached", "No route"][..],
            ),
            ("no-such-program-of-forebay", &["h1", "install Forebay there"]),
            ("echo \"error: unexpected argument '--handed' found\" >&2; exit 2", &["h1", "another version"]),
            ("echo 'forebay: cannot x: y' >&2; exit 1", &["cannot x: y"]),
            (
                r#"echo '{"error": {"what": "cannot a", "why": "b", "cure": "do c"}}'; exit 1"#,
                &["cannot a", "b", "do c"],
            ),
            ("exit 3", &["without a word"]),
        ] {
            let why = explained(script).unwrap();
            assert!(words.iter().all(|word| why.contains(word)), "{script}: {why}");
        }
    }
}
