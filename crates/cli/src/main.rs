//! The command; its code is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    forebay_cli::main()
}
