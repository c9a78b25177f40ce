//! `forebay completions`.

use std::process::ExitCode;

use clap::CommandFactory;
use forebay_types::Result;

use crate::arguments::{Arguments, Completions};

pub(super) fn completions(arguments: &Completions) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Arguments::command(), "forebay", &mut script);
    crate::failure::put(script);
    Ok(ExitCode::SUCCESS)
}
