//! `forebay-mount`: the process that serves a pool's mount. Supervisors start it; by hand it serves until it is told to
//! stop by SIGTERM, or the directory is unmounted.

use std::process::ExitCode;

fn main() -> ExitCode {
    forebay_mount::program::main(std::env::args_os().skip(1))
}
