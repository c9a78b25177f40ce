//! One verb on every node of a pool file: here directly, on other hosts by ssh, all at the same time.

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use forebay_server::pool_file::{NodeEntry, PoolFile};
use forebay_types::{Code, Error, Result};

use crate::failure;

/// Names the command, with its options, that runs another on a host: `COMMAND HOST WORDS`.
const REMOTE_VARIABLE: &str = "FOREBAY_RSH";
/// Asks for no password: nobody may be there to give one.
const REMOTE_DEFAULT: &str = "ssh -o BatchMode=yes -o ConnectTimeout=10";

/// A word as a shell takes it literally.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// True for the host that this runs on.
fn is_here(node: &NodeEntry) -> bool {
    let uname = rustix::system::uname();
    let host = uname.nodename().to_string_lossy();
    let short = host.split('.').next().unwrap_or_default();
    std::env::var_os(REMOTE_VARIABLE).is_none() && [host.as_ref(), short].contains(&node.host.as_str())
}

fn command(node: &NodeEntry, words: &[String]) -> Result<Command> {
    let what = || format!("cannot reach node {}", node.name);
    let me = std::env::current_exe().map_err(|e| Error::io(what(), &e))?;
    if is_here(node) {
        let mut command = Command::new(me);
        command.args(words);
        return Ok(command);
    }
    let remote = std::env::var(REMOTE_VARIABLE).unwrap_or_else(|_| REMOTE_DEFAULT.to_owned());
    let mut parts = remote.split_whitespace();
    let program = parts.next().ok_or_else(|| {
        failure::invalid(what(), format!("{REMOTE_VARIABLE} is empty"), format!("unset {REMOTE_VARIABLE}"))
    })?;
    let me = me.to_string_lossy().into_owned();
    let line: Vec<String> = std::iter::once(&me).chain(words).map(|word| quoted(word)).collect();
    let mut command = Command::new(program);
    command.args(parts).arg(&node.host).arg(line.join(" "));
    Ok(command)
}

/// Runs this command with other words on every node, prints what each says behind its name, and fails when one did; `verb`
/// is what was tried.
pub(crate) fn on_every_node(
    file: &PoolFile,
    verb: &str,
    words: impl Fn(&NodeEntry) -> Vec<String>,
) -> Result<ExitCode> {
    let mut running = Vec::new();
    let mut failed: Vec<String> = Vec::new();
    for node in &file.nodes {
        let mut command = command(node, &words(node))?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        match command.spawn() {
            Ok(child) => running.push((node, child)),
            Err(e) => {
                let program = PathBuf::from(command.get_program());
                failure::put(format!("{}: cannot start {}: {e}\n", node.name, program.display()));
                failed.push(node.name.clone());
            }
        }
    }
    for (node, child) in running {
        let output = child
            .wait_with_output()
            .map_err(|e| Error::io(format!("cannot learn how node {} did", node.name), &e))?;
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        let lines: String = said.lines().map(|line| format!("{}: {line}\n", node.name)).collect();
        failure::put(lines);
        if !output.status.success() {
            failed.push(node.name.clone());
        }
    }
    if failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    Err(Error::new(Code::Io, format!("cannot {verb} all of {} nodes", file.nodes.len()))
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
}
