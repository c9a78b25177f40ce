//! `forebay-emulate`: the processes of one emulated block device. `forebay emulate up` starts it.

use std::process::ExitCode;

fn main() -> ExitCode {
    forebay_emulate::program::main(std::env::args_os().skip(1))
}
