//! The daemon's program; all of it is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    forebay_server::daemon::main(std::env::args_os().skip(1))
}
