//! `forebay-mover`: the process that copies between a pool and its backing stores. The supervisor starts it. Started by
//! hand, it runs until it receives SIGTERM.

use std::process::ExitCode;

fn main() -> ExitCode {
    forebay_mover::program::main(std::env::args_os().skip(1), forebay_mover::start)
}
