//! The program `forebayd`; its code is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    forebay_server::daemon::main(std::env::args_os().skip(1))
}
