//! `forebay-register`: see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    forebay_register::main(std::env::args_os().skip(1))
}
