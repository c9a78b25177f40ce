//! MPI-IO through `forebay run`: the programs of mpi/tests on both MPIs, with 1, 2 and 4 ranks.
//!
//! An MPI that is not installed is skipped with a line. The driver is built by mpi/Makefile into the directory of the
//! command under test; reference files lie in a directory of /dev/shm that goes with the test.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use common::{forebay, Place, Ran};

/// An MPI: its name, compiler, and launcher with the words that let it run here.
struct Mpi {
    name: &'static str,
    compiler: &'static str,
    launcher: &'static [&'static str],
}

const MPIS: [Mpi; 2] = [
    Mpi {
        name: "Open MPI",
        compiler: "mpicc.openmpi",
        launcher: &["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n"],
    },
    Mpi { name: "MPICH", compiler: "mpicc.mpich", launcher: &["mpiexec.hydra", "-n"] },
];

/// Ranks of several programs at once would fight for the cores.
static ALONE: Mutex<()> = Mutex::new(());

/// Reference files on tmpfs; removed with the test.
struct Native(PathBuf);

impl Native {
    fn new(name: &str) -> Native {
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

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../mpi").join(name)
}

/// Builds the driver beside the command; false, and a line, where there is nothing to build it with.
fn driver(mpi: &Mpi) -> bool {
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

fn compile(place: &Place, mpi: &Mpi, name: &str) -> PathBuf {
    let program = place.join(name);
    let mut compiler = Command::new(mpi.compiler);
    compiler.args(["-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program);
    let output = compiler.arg(source(&format!("tests/{name}.c"))).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// Runs a program under the launcher under `forebay run`.
fn launch(place: &Place, mpi: &Mpi, ranks: u32, words: &[&str], debug: bool) -> Ran {
    let mut command = place.command(["run", "--own", "--quiet", "--"]);
    command.args(mpi.launcher).arg(ranks.to_string()).args(words);
    if debug {
        command.env("FOREBAY_MPI_DEBUG", "1");
    }
    Ran::of(command.output().unwrap())
}

fn passes(place: &Place, mpi: &Mpi, ranks: u32, words: &[&str]) {
    let ran = launch(place, mpi, ranks, words, false);
    assert!(ran.code == Some(0) && ran.out.contains("passed"), "{}, {ranks} ranks: {ran:?}", mpi.name);
}

#[test]
fn every_call_does_what_the_standard_says_and_misuse_has_its_class() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let place = Place::new();
        let program = compile(&place, mpi, "calls");
        for ranks in [1, 2, 4] {
            passes(&place, mpi, ranks, &[program.to_str().unwrap(), "/forebay/file"]);
            passes(&place, mpi, ranks, &[program.to_str().unwrap(), "forebay:file"]);
        }
        place.assert_nothing_left();
    }
}

#[test]
fn full_pool_is_no_space_and_no_signal() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let place = Place::new();
        let program = compile(&place, mpi, "calls");
        let mut command = place.command(["run", "--own", "--quiet", "--capacity", "64MiB", "--"]);
        command.args(mpi.launcher).arg("2").arg(&program).args(["/forebay/file", "full"]);
        let ran = Ran::of(command.output().unwrap());
        assert!(ran.code == Some(0) && ran.out.contains("passed"), "{}: {ran:?}", mpi.name);
        place.assert_nothing_left();
    }
}

#[test]
fn fortran_programs_and_their_error_handlers_are_served() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let place = Place::new();
        for name in ["fortran", "f08"] {
            let program = place.join(name);
            let mut compiler = Command::new(mpi.compiler.replace("mpicc", "mpifort"));
            compiler.arg("-J").arg(&place.path).arg("-o").arg(&program);
            if !compiler.arg(source(&format!("tests/{name}.f90"))).output().is_ok_and(|o| o.status.success())
            {
                println!("skipped: no Fortran for {}", mpi.name);
                continue;
            }
            for ranks in [1, 2] {
                passes(&place, mpi, ranks, &[program.to_str().unwrap(), "/forebay/file"]);
            }
        }
        place.assert_nothing_left();
    }
}

#[test]
fn random_views_give_the_bytes_that_mpi_pack_says() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let place = Place::new();
        let program = compile(&place, mpi, "views");
        let program = program.to_str().unwrap();
        for (ranks, seeds) in [(1, "60"), (2, "40"), (4, "10")] {
            passes(&place, mpi, ranks, &[program, "/forebay/view", "-", "1", seeds]);
        }
        // Several backing files a file; aggregators with windows that cut records, and one aggregator.
        for hints in [
            "striping_factor=4 romio_cb_write=disable",
            "romio_cb_write=automatic",
            "romio_cb_write=enable romio_cb_read=enable cb_buffer_size=4096",
            "romio_cb_write=enable romio_cb_read=enable cb_nodes=1 striping_factor=3 striping_unit=4096",
        ] {
            let mut command = place.command(["run", "--own", "--quiet", "--"]);
            command.args(mpi.launcher).args(["3", program, "/forebay/view", "-", "100", "15"]);
            command.env("VIEWS_HINTS", hints).env("FOREBAY_MPI_DEBUG", "1");
            let ran = Ran::of(command.output().unwrap());
            assert!(ran.code == Some(0) && ran.out.contains("passed"), "{}, {hints}: {ran:?}", mpi.name);
            assert_eq!(ran.err.contains("two-phase"), !hints.contains("disable"), "{ran:?}");
        }
        place.assert_nothing_left();
    }
}

/// Open MPI alone: ROMIO of MPICH 4.0.2 aborts at some of these views, and gives other bytes at others.
#[test]
fn random_views_give_the_bytes_of_the_mpi_librarys_own() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let mpi = &MPIS[0];
    if !driver(mpi) {
        return;
    }
    let (place, native) = (Place::new(), Native::new("views"));
    let program = compile(&place, mpi, "views");
    let reference = native.0.join("view");
    let words = [program.to_str().unwrap(), "/forebay/view", reference.to_str().unwrap(), "1"];
    for (ranks, seeds) in [(1, "40"), (2, "20")] {
        let ran = launch(&place, mpi, ranks, &[&words[..], &[seeds]].concat(), false);
        assert!(ran.code == Some(0) && !ran.out.contains("differs"), "{ranks} ranks: {ran:?}");
    }
    place.assert_nothing_left();
}

#[test]
fn files_outside_the_pool_are_the_mpi_librarys() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let (place, native) = (Place::new(), Native::new("outside"));
        let program = compile(&place, mpi, "outside");
        let file = native.0.join("file");
        let words = [program.to_str().unwrap(), file.to_str().unwrap(), "/forebay/file"];
        let ran = launch(&place, mpi, 2, &words, true);
        assert!(ran.code == Some(0) && ran.out.contains("passed"), "{}: {ran:?}", mpi.name);
        // The driver speaks of the pool's file alone.
        assert!(ran.err.contains("forebay: /file: open by 2 ranks"), "{ran:?}");
        assert!(!ran.err.contains("/dev/shm"), "{ran:?}");
        place.assert_nothing_left();
    }
}

#[test]
fn parallel_hdf5_writes_the_file_that_it_writes_on_tmpfs() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let mpi = &MPIS[0];
    if !driver(mpi) {
        return;
    }
    let (place, native) = (Place::new(), Native::new("hdf5"));
    let program = place.join("hdf5");
    let mut compiler = Command::new("h5pcc.openmpi");
    compiler.args(["-shlib", "-o"]).arg(&program).arg(source("tests/hdf5.c")).current_dir(&place.path);
    if !compiler.output().is_ok_and(|o| o.status.success()) {
        println!("skipped: no parallel HDF5 (h5pcc.openmpi)");
        return;
    }
    for ranks in [1, 2, 3] {
        let (launcher, reference) = (mpi.launcher.join(" "), native.0.join("h5"));
        let run = format!("{launcher} {ranks} {}", program.display());
        let reference = reference.display();
        let script =
            format!("{run} /forebay/h5 && {run} {reference} && cmp /forebay/h5 {reference} && echo same");
        let ran =
            Ran::of(place.command(["run", "--own", "--quiet", "--", "sh", "-c", &script]).output().unwrap());
        assert!(ran.code == Some(0) && ran.out.contains("same"), "{ranks} ranks: {ran:?}");
    }
    place.assert_nothing_left();
}

/// mpi4py loads its MPI where only the library itself can find it (RTLD_LOCAL).
#[test]
fn mpi4py_reads_what_it_wrote() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let there = Command::new("/usr/bin/python3").args(["-c", "import mpi4py"]).output();
    if !there.is_ok_and(|o| o.status.success()) || !driver(&MPIS[0]) {
        println!("skipped: no mpi4py");
        return;
    }
    let place = Place::new();
    let script = "\
from mpi4py import MPI
c = MPI.COMM_WORLD
f = MPI.File.Open(c, '/forebay/p', MPI.MODE_RDWR | MPI.MODE_CREATE)
f.Set_view(c.rank * 4, MPI.BYTE, MPI.BYTE.Create_vector(1, 4, 4).Create_resized(0, 4 * c.size).Commit())
f.Write_all(bytes([65 + c.rank]) * 8)
f.Sync(); c.Barrier(); f.Sync()
f.Set_view(0)
b = bytearray(8 * c.size)
f.Read_at_all(0, b)
assert bytes(b) == (b'AAAA' + b'BBBB') * 2, b
f.Close()
try:
    MPI.File.Open(c, '/forebay/none', MPI.MODE_RDONLY)
    assert False
except MPI.Exception as e:
    assert e.Get_error_class() == MPI.ERR_NO_SUCH_FILE
if c.rank == 0: print('passed')
";
    let ran = launch(&place, &MPIS[0], 2, &["/usr/bin/python3", "-c", script], true);
    assert!(ran.code == Some(0) && ran.out.contains("passed"), "{ran:?}");
    assert!(ran.err.contains("forebay: /p: open by 2 ranks"), "{ran:?}");
    place.assert_nothing_left();
}
