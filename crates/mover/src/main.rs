//! `forebay-mover`: the process that copies between a pool and its backing stores. The supervisor starts it. Started by
//! hand, it runs until it receives SIGTERM. `forebay recover` starts it to recover a dead pool, `forebay volume`
//! to copy between a volume and a store.

use std::process::ExitCode;

fn main() -> ExitCode {
    if forebay_mover::recovery::is_meant(std::env::args_os().nth(1)) {
        return forebay_mover::recovery::main(std::env::args_os().skip(1));
    }
    if forebay_mover::volume_copy::is_meant(std::env::args_os().nth(1)) {
        return forebay_mover::volume_copy::main();
    }
    forebay_mover::program::main(std::env::args_os().skip(1), forebay_mover::start)
}
