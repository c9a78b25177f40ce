//! Shared by tests with ranks: the two MPIs, building their driver and test programs, launching programs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{forebay, Place, Ran};

/// Ranks of several programs at once would compete for the cores, so one test runs at a time.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An MPI: its name, its compiler, and its launcher with the options needed here.
pub struct Mpi {
    pub name: &'static str,
    pub compiler: &'static str,
    pub launcher: &'static [&'static str],
}

pub const MPIS: [Mpi; 2] = [
    Mpi {
        name: "Open MPI",
        compiler: "mpicc.openmpi",
        launcher: &["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n"],
    },
    Mpi { name: "MPICH", compiler: "mpicc.mpich", launcher: &["mpiexec.hydra", "-n"] },
];

/// Reference files on tmpfs, removed with the test.
pub struct Native(pub PathBuf);

impl Native {
    pub fn new(name: &str) -> Native {
        let path = PathBuf::from(format!("/dev/shm/fbt-mpi-{}-{name}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Native(path)
    }
}

impl Drop for Native {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../mpi").join(name)
}

/// Builds the driver beside the command. Where the MPI is missing, prints a line and returns false.
pub fn driver(mpi: &Mpi) -> bool {
    let here =
        |program: &str| Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
    if std::env::consts::ARCH != "x86_64" || !here(mpi.compiler) || !here(mpi.launcher[0]) {
        println!("skipped: no {} ({} and {})", mpi.name, mpi.compiler, mpi.launcher[0]);
        return false;
    }
    let mut make = Command::new("make");
    make.arg("-s").arg("-C").arg(source("")).arg(format!("OUT={}", forebay().parent().unwrap().display()));
    let output = make.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    true
}

/// Builds a program of mpi/tests; `words` are further arguments of the compiler.
pub fn compile_with(place: &Place, compiler: &str, name: &str, words: &[&str]) -> Option<PathBuf> {
    let program = place.join(name);
    let mut command = Command::new(compiler);
    command.args(["-O1", "-o"]).arg(&program).arg(source(&format!("tests/{name}.c"))).args(words);
    command.current_dir(&place.path).output().is_ok_and(|o| o.status.success()).then_some(program)
}

/// Builds it with warnings as errors.
pub fn compile(place: &Place, mpi: &Mpi, name: &str) -> PathBuf {
    let built = compile_with(place, mpi.compiler, name, &["-Wall", "-Wextra", "-Werror"]);
    built.unwrap_or_else(|| panic!("{} does not build {name}.c", mpi.compiler))
}

/// Runs a program with the launcher under `forebay run`.
pub fn launch(place: &Place, mpi: &Mpi, ranks: u32, words: &[&str], debug: bool) -> Ran {
    let mut command = place.command(["run", "--own", "--quiet", "--"]);
    command.args(mpi.launcher).arg(ranks.to_string()).args(words);
    if debug {
        command.env("FOREBAY_MPI_DEBUG", "1");
    }
    Ran::of(command.output().unwrap())
}

pub fn passes(place: &Place, mpi: &Mpi, ranks: u32, words: &[&str]) {
    let ran = launch(place, mpi, ranks, words, false);
    assert!(ran.code == Some(0) && ran.out.contains("passed"), "{}, {ranks} ranks: {ran:?}", mpi.name);
}
