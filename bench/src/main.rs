//! The benchmark: Forebay compared with tmpfs and the disk, in one run.
//!
//! `forebay-bench run` sets up the systems, ages each by filling and freeing it once, and repeats every measurement
//! five times. Within each repetition the systems alternate, so that noise affects all alike. It prints medians, ratios
//! to tmpfs and targets, and writes all samples as JSON. `forebay-bench drive` is the same driver for every system: it
//! makes plain calls of the C library on a path, in processes that start together (`drive`).

mod backing;
mod calls;
mod choice;
mod cost;
mod data;
mod drive;
mod gate;
mod jobs;
mod machine;
mod media;
mod meta;
mod model;
mod mount;
mod mpi;
mod nodes;
mod orders;
mod picture;
mod report;
mod run;
mod sizes;
mod slowfs;
mod stage;
mod star;
mod study;
mod systems;
mod tools;

use std::process::ExitCode;

const HELP: &str = "\
usage: forebay-bench run --binaries DIR --results DIR [--quick] [--disk DIR] [SECTION]...
       forebay-bench slow BEHIND AT BYTES_PER_SECOND LATENCY_MS
       forebay-bench drive meta|data|calls|names|mapped|times|tree|far|raw|age|files|list|day-write|day-read ...

Run compares Forebay (DIR/forebay) with tmpfs (/dev/shm) and with the disk that holds --disk (else the temporary
directory), section by section:

  meta     operations per second
  data     bytes per second
  stage    staging against cp, tar, rsync and dd
  cost     what the library costs programs that do not use the pool
  mount    beside its medium and bindfs
  mpi      MPI-IO beside the same MPI's own
  choice   MPI-IO on a pool of this node with the model beside without it
  nodes    pools of several nodes on this machine: data and names of another node, start, names, evenness, collective
           MPI-IO; far: the first two alone; ranks: the last alone
  volumes  puts, gets and atomic operations beside copies of the processor, and beside the provider from another node;
           block devices beside a loop device
  sweeps   volumes by 1 to 64 processes, open and close, single calls as densities, how much runs differ
  backing  a pool in front of slow storage, beside the storage itself and copy tools
  jobs     staging for jobs of a Slurm that the section starts
  media    block devices that emulate media, measured beside configured values
  model    the cost model beside measured collective and independent I/O, on emulated media
  study    the study of collective I/O on emulated media, repeated
  day      a program that writes more than the pool holds, as a plot
  tools    ior and mdtest, when they are on PATH

Slow shows the directory BEHIND at AT, until it is unmounted, so that all programs together read and write at most so
many bytes per second (0: no limit), each call with this latency. It needs root.
";

/// Lets an interrupted run clean up: the signal ends the programs that it waits for, and then the run ends with an
/// error.
fn outlive_interrupts() {
    extern "C" fn ignore(_: libc::c_int) {}
    let handler: extern "C" fn(libc::c_int) = ignore;
    // SAFETY: the handler does nothing; programs that are started do not inherit it.
    unsafe { libc::signal(libc::SIGINT, handler as libc::sighandler_t) };
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.first().map(String::as_str) {
        _ if arguments.iter().any(|argument| argument == "--help" || argument == "-h") => {
            print!("{HELP}");
            Ok(())
        }
        Some("run") => {
            outlive_interrupts();
            run::main(&arguments[1..])
        }
        Some("drive") => drive::main(&arguments[1..]),
        Some("slow") => slowfs::main(&arguments[1..]),
        _ => Err(format!("what is to be done?\n\n{HELP}")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("forebay-bench: {message}");
            ExitCode::FAILURE
        }
    }
}
