//! The verbs, one a file.

mod completions;
mod down;
mod fsck;
mod layout;
mod ls;
mod mount;
mod stage;
mod stat;
mod status;
mod up;

use std::process::ExitCode;

use forebay_types::Result;

use crate::arguments::{Arguments, Verb};

/// Runs the verb of the command line.
pub(crate) fn dispatch(arguments: Arguments) -> Result<ExitCode> {
    let Arguments { pool, verb } = arguments;
    match verb {
        Verb::Up(a) => up::up(pool, &a),
        Verb::Down(a) => down::down(pool, &a),
        Verb::Status(a) => status::status(pool, &a),
        Verb::Ls(a) => ls::ls(pool, &a),
        Verb::Stat(a) => stat::stat(pool, &a),
        Verb::Mount(a) => mount::mount(pool, &a),
        Verb::Umount(a) => mount::umount(pool, &a),
        Verb::Run(a) => crate::run::run(pool, a),
        Verb::StageIn(a) => stage::stage_in(pool, a),
        Verb::StageOut(a) => stage::stage_out(pool, a),
        Verb::Layout(a) => layout::layout(pool, &a.verb),
        Verb::Fsck(a) => fsck::fsck(pool, &a),
        Verb::Completions(a) => completions::completions(&a),
    }
}
