//! `forebay-mover`: the process that copies between a pool and its backing stores. The supervisor starts it. Started by
//! hand, it runs until it receives SIGTERM. `forebay recover` starts it to recover a dead pool.

use std::process::ExitCode;

fn main() -> ExitCode {
    if forebay_mover::recovery::is_meant(std::env::args_os().nth(1)) {
        return forebay_mover::recovery::main(std::env::args_os().skip(1));
    }
    forebay_mover::program::main(std::env::args_os().skip(1), forebay_mover::start)
}
