//! `forebay completions`.

use std::process::ExitCode;

use clap::CommandFactory;
use forebay_types::Result;

use crate::arguments::{Arguments, Completions};

pub(super) fn completions(arguments: &Completions) -> Result<ExitCode> {
    clap_complete::generate(arguments.shell, &mut Arguments::command(), "forebay", &mut std::io::stdout());
    Ok(ExitCode::SUCCESS)
}
