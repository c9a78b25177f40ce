//! `forebay bb`, `forebay job`, `forebay queue` and `forebay recover`.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use forebay_types::{Error, Result};
use serde_json::json;

use crate::arguments::{Bb, BbVerb, JobCommand, JobVerb, Queue, Recover};
use crate::batch::config::Config;
use crate::batch::hooks::{self, Hooks};
use crate::batch::registry::Registry;
use crate::batch::user::Here;
use crate::batch::{
    command, destroying, directives, node, queue as turns, reconcile, recover as kept, script, steward, user,
};
use crate::{backing, failure};

pub(super) fn bb(arguments: Bb) -> Result<ExitCode> {
    match arguments.verb {
        BbVerb::Check { script } => check(&script),
        BbVerb::Hook { name, words } => {
            let (code, text) = match hook(&name, &words) {
                Ok(text) => (0, text),
                Err(e) => (1, command::reason(&e.to_string())),
            };
            failure::put(format!("{code}\n{text}"));
            Ok(ExitCode::SUCCESS)
        }
        BbVerb::Prolog => node::prolog(),
        BbVerb::Epilog => node::epilog(),
        BbVerb::Sweep => node::sweep_all(),
        BbVerb::Reconcile => reconcile::run(),
        BbVerb::Destroy { name, discard } => {
            let uid = rustix::process::geteuid().as_raw();
            let registry = Config::read()?.registry;
            let administers = uid == 0 || std::fs::metadata(&registry).is_ok_and(|stat| stat.uid() == uid);
            failure::put(match administers {
                true => Hooks::new()?.destroy(&name)?,
                false => destroying::ask(&name, discard, hooks::STEWARD_SILENCE)?,
            });
            Ok(ExitCode::SUCCESS)
        }
        BbVerb::NodeUp { job } => Here::of_this_process(job)?.up().map(|()| ExitCode::SUCCESS),
        BbVerb::NodeDown { job, run } => Here::of_this_process(job)?.down(run).map(|()| ExitCode::SUCCESS),
        BbVerb::Save { job, run } => Here::of_this_process(job)?.save(run).map(|()| ExitCode::SUCCESS),
        BbVerb::HoldBack { dir } => backing::hold_back(&dir).map(|()| ExitCode::SUCCESS),
        BbVerb::Clear { key } => clear(&key),
        BbVerb::Steward { job, rank } => steward::serve(job, rank).map(|()| ExitCode::SUCCESS),
    }
}

fn clear(key: &str) -> Result<ExitCode> {
    if key.contains('/') || key.starts_with('.') {
        return Err(failure::invalid(
            format!("cannot clear {key}"),
            "it is no name of a pool",
            "leave it to `bb sweep`",
        ));
    }
    let dir = Config::read()?.user_dir(rustix::process::geteuid().as_raw()).join(key);
    user::clear(&dir).map_err(|why| {
        Error::new(forebay_types::Code::Io, format!("cannot clear {}", dir.display())).why(why)
    })?;
    Ok(ExitCode::SUCCESS)
}

fn check(script: &Path) -> Result<ExitCode> {
    let text =
        std::fs::read(script).map_err(|e| Error::io(format!("cannot read {}", script.display()), &e))?;
    match directives::parse(&String::from_utf8_lossy(&text))? {
        None => failure::put("no directive is for forebay\n"),
        Some(request) => {
            if request.stages_in_prolog() {
                note_limit();
            }
            failure::print_json(&json!(request));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Says how long a stage-in in the prolog may take. Says nothing where there is no Slurm that answers.
fn note_limit() {
    let asked =
        Command::new("timeout").args(["10", "scontrol", "show", "config"]).stdin(Stdio::null()).output();
    let Ok(output) = asked else { return };
    let text = String::from_utf8_lossy(&output.stdout);
    if let Some(seconds) = batch_start_timeout(&text) {
        note!(
            "forebay: its data are staged in while it starts: Slurm may take the job for missing after {} s (BatchStartTimeout \
             and 10 s)\n  hint: larger data belong into a persistent pool: `use name=` stages in before the job has nodes",
            seconds + 10
        );
    }
}

fn batch_start_timeout(config: &str) -> Option<u64> {
    let line = config.lines().find(|line| line.starts_with("BatchStartTimeout"))?;
    line.split('=').nth(1)?.split_whitespace().next()?.parse().ok()
}

/// Calls the hook with Slurm's arguments, which are all text.
fn hook(name: &str, words: &[String]) -> Result<String> {
    let hooks = match name {
        "job_process" => Hooks::without_registry()?,
        _ => Hooks::new()?,
    };
    let word = |i: usize| words.get(i).map_or("", String::as_str);
    let number = |i: usize| {
        word(i).parse::<u32>().map_err(|_| {
            failure::invalid(
                format!("cannot call {name}"),
                format!("its argument {} is {:?} and not a number", i + 1, word(i)),
                "use the burst_buffer.lua of this version",
            )
        })
    };
    match name {
        "job_process" => hooks.job_process(Path::new(word(0))),
        "pools" => hooks.pools(),
        "setup" => hooks.setup(number(0)?, number(1)?, number(2)?, Path::new(word(5))),
        "data_in" => hooks.data_in(number(0)?),
        "real_size" => hooks.real_size(number(0)?),
        "paths" => hooks.paths(number(0)?, Path::new(word(2))),
        "pre_run" => hooks.pre_run(number(0)?),
        "post_run" => hooks.post_run(number(0)?),
        "data_out" => hooks.data_out(number(0)?),
        "job_teardown" => hooks.teardown(number(0)?, word(2) == "true"),
        // Later versions of Slurm poll by these; data_in and data_out have waited already.
        "test_data_in" | "test_data_out" => Ok(String::new()),
        "get_status" => hooks.status(words),
        name => Err(failure::invalid(
            format!("cannot call {name}"),
            "Slurm has no such function",
            "use the burst_buffer.lua of this version",
        )),
    }
}

pub(super) fn job(arguments: JobCommand) -> Result<ExitCode> {
    match arguments.verb {
        JobVerb::Begin { capacity, media, backing, policy, stage_in, stage_out, hosts } => {
            let asked = script::Asked { capacity, media, backing, policy, stage_in, stage_out, hosts };
            match script::begin(&asked) {
                Ok(code) => failure::put(code),
                Err(e) => {
                    // The script ends here, as its shell evaluates this.
                    failure::say(&e);
                    failure::put(format!("exit {}\n", failure::FOREBAY_FAILED));
                    return Ok(ExitCode::from(failure::FOREBAY_FAILED));
                }
            }
        }
        JobVerb::End { nonce } => script::end(nonce.as_deref())?,
        JobVerb::Watch { nonce, pid } => script::watch(pid, nonce.as_deref())?,
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn queue(arguments: &Queue) -> Result<ExitCode> {
    let config = Config::read()?;
    let registry = Registry::of(&config);
    match arguments.json {
        true => failure::print_json(&turns::turns_json(&config, &registry)),
        false => failure::put(turns::turns_text(&config, &registry)),
    }
    Ok(ExitCode::SUCCESS)
}

/// Copies back what is kept of a job.
pub(super) fn recover(job: u32, arguments: &Recover) -> Result<ExitCode> {
    let others = [arguments.list, arguments.dry_run, arguments.partial, arguments.unnamed, arguments.discard];
    if others.contains(&true) {
        return Err(failure::invalid(
            format!("cannot recover data of job {job}"),
            "of the options only --to and --json are for a job",
            "leave out the others, or name the directories of a pool",
        ));
    }
    let kept::Recovered { done, mut failed } = kept::recover(job, arguments.to.as_deref().map(Path::new))?;
    if done.is_empty() && failed.len() == 1 {
        return Err(failed.remove(0));
    }
    failed.iter().for_each(failure::say);
    if arguments.json {
        let done = done.iter().map(|(from, to)| json!({ "from": from, "to": to }));
        let failed_ones = failed.iter().map(|e| json!({ "error": failure::value(e) }));
        failure::print_json(&json!(done.chain(failed_ones).collect::<Vec<_>>()));
    } else {
        for (from, to) in done {
            failure::put(format!("{} is copied to {}\n", from.display(), to.display()));
        }
    }
    Ok(match failed.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(failure::FAILED),
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn limit_of_a_start_is_read_from_the_configuration_that_slurm_shows() {
        let shown = "BatchStartTimeout       = 43200 sec\nBOOT_TIME               = 2026-11-27T15:00:00\n";
        assert_eq!(super::batch_start_timeout(shown), Some(43200));
        assert_eq!(super::batch_start_timeout("MinJobAge = 300 sec\n"), None);
    }
}
