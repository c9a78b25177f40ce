//! `forebay-device`: the processes of one volume's block device. `forebay volume attach` starts it.

use std::process::ExitCode;

fn main() -> ExitCode {
    forebay_device::program::main(std::env::args_os().skip(1))
}
