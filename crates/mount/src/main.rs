//! `forebay-mount`: the process that serves a pool's mount. The supervisor starts it. Started by hand, it serves until
//! it receives SIGTERM or the directory is unmounted.

use std::process::ExitCode;

fn main() -> ExitCode {
    forebay_mount::program::main(std::env::args_os().skip(1))
}
