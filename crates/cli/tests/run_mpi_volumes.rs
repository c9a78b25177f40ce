//! MPI-IO on volumes: the programs of mpi/tests and unchanged file libraries on `forebay:` names, with both MPIs.
//!
//! Volumes need a pool whose daemon may resize its tmpfs; without one, and without an MPI or a library, a test is skipped
//! with a line.

mod common;

use std::process::Command;

use common::mpi::{alone, compile, compile_with, driver, source, Mpi, Native, MPIS};
use common::{eventually, forebay, is_root, kill, Place, Ran};

const SIZE: &str = "32MiB";

/// True where a pool can have volumes.
fn can_have_volumes() -> bool {
    if !is_root() {
        println!("skipped: this test makes volumes as root");
    }
    is_root()
}

fn path() -> String {
    let others = std::env::var("PATH").unwrap_or_default();
    format!("{}:/usr/bin:/bin:{others}", forebay().parent().unwrap().display())
}

/// Runs a script in a pool of its own with volumes.
fn run(place: &Place, volumes: &[&str], script: &str) -> Ran {
    let made: String = volumes
        .iter()
        .map(|name| format!("forebay volume create {name} --size {SIZE} --json > /dev/null; "))
        .collect();
    let script = format!("set -e; {made}{script}");
    let mut command =
        place.command(["run", "--own", "--quiet", "--capacity", "192MiB", "--", "sh", "-c", &script]);
    Ran::of(command.env("PATH", path()).env("FOREBAY_MPI_PREFIX", "none,xpd:").output().unwrap())
}

/// The ranks of a program pass on volumes.
fn passes(place: &Place, mpi: &Mpi, ranks: u32, volumes: &[&str], words: &str) {
    let ran = run(place, volumes, &format!("{} {ranks} {words}", mpi.launcher.join(" ")));
    assert!(ran.code == Some(0) && ran.out.contains("passed"), "{}, {ranks} ranks: {ran:?}", mpi.name);
}

#[test]
fn volume_is_a_file_with_an_end_that_all_ranks_share() {
    let _alone = alone();
    for mpi in MPIS.iter().filter(|mpi| can_have_volumes() && driver(mpi)) {
        let place = Place::new();
        let program = compile(&place, mpi, "volumes").display().to_string();
        for ranks in [1, 2, 4] {
            let bytes = 32 << 20;
            let mpirun = format!("{} {ranks} {program}", mpi.launcher.join(" "));
            let script = format!("{mpirun} v w {bytes}; {mpirun} v left");
            let ran = run(&place, &["v", "w"], &script);
            let passed = ran.out.matches("passed").count();
            assert!(ran.code == Some(0) && passed == 2, "{}, {ranks} ranks: {ran:?}", mpi.name);
            // Creating a file by the name of a volume that does not exist says what to do.
            assert!(
                ran.err.contains("there is no volume") && ran.err.contains("forebay volume create"),
                "{ran:?}"
            );
        }
        place.assert_nothing_left();
    }
}

#[test]
fn every_call_does_on_a_volume_what_it_does_on_a_file() {
    let _alone = alone();
    for mpi in MPIS.iter().filter(|mpi| can_have_volumes() && driver(mpi)) {
        let place = Place::new();
        let program = |name| compile(&place, mpi, name).display().to_string();
        let (calls, misuse) = (program("calls"), program("misuse"));
        let (views, meeting, datarep) = (program("views"), program("meeting"), program("datarep"));
        for ranks in [1, 2, 4] {
            let volumes = ["v", "v0", "v1", "v.striped"];
            passes(&place, mpi, ranks, &volumes, &format!("{calls} forebay:v"));
            passes(&place, mpi, ranks, &["v"], &format!("{misuse} forebay:v"));
            passes(&place, mpi, ranks, &["v"], &format!("{views} forebay:v - 1 10"));
            passes(&place, mpi, ranks, &["v", "v.other"], &format!("timeout 120 {meeting} forebay:v"));
            let volumes = ["v", "v.0", "v.1", "v.2", "v.3"];
            passes(&place, mpi, ranks, &volumes, &format!("{datarep} forebay:v"));
        }
        // A full volume is as a full pool.
        for program in [&calls, &misuse] {
            passes(&place, mpi, 2, &["v"], &format!("{program} forebay:v full"));
        }
        place.assert_nothing_left();
    }
}

/// Ranks call the functions of forebay.h on one volume.
#[test]
fn ranks_put_get_and_change_words_of_one_volume_by_the_calls_of_forebay_h() {
    let _alone = alone();
    for mpi in MPIS.iter().filter(|mpi| can_have_volumes() && driver(mpi)) {
        let place = Place::new();
        let libraries = forebay().parent().unwrap().display();
        let words = ["-Wall", "-Wextra", "-Werror"].map(String::from).into_iter().chain([
            format!("-I{}", source("../crates/capi/include").display()),
            format!("-L{libraries}"),
            "-lforebay".into(),
            format!("-Wl,-rpath,{libraries}"),
        ]);
        let words: Vec<String> = words.collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let program = compile_with(&place, mpi.compiler, "puts", &words).expect("puts.c builds");
        for ranks in [1, 2, 4] {
            passes(&place, mpi, ranks, &["v"], &format!("env PUTS_MAPPED=all {} v", program.display()));
            passes(&place, mpi, ranks, &["v", "w"], &format!("{} v+w", program.display()));
        }
        place.assert_nothing_left();
    }
}

/// IOR writes a volume, reads it and compares, by independent and collective calls, by the launcher of its MPI.
#[test]
fn ior_finds_in_a_volume_what_it_wrote() {
    let _alone = alone();
    let libraries = Command::new("sh").args(["-c", "ldd \"$(command -v ior)\""]).output().unwrap();
    if !libraries.status.success() {
        println!("skipped: ior is not on PATH");
        return;
    }
    let is_mpich = String::from_utf8_lossy(&libraries.stdout).contains("libmpich");
    let mpi = &MPIS[usize::from(is_mpich)];
    if !can_have_volumes() || !driver(mpi) {
        return;
    }
    let place = Place::new();
    for ranks in [1, 2, 4] {
        let mpirun = format!("timeout 120 {} {ranks} ior -a MPIIO -w -r -W -R -o", mpi.launcher.join(" "));
        let mut script = String::new();
        for name in ["v", "v+w"] {
            for words in
                ["-t 1m -b 4m", "-t 1m -b 4m -c", "-t 47008 -b 47008 -s 40", "-t 47008 -b 47008 -s 40 -c"]
            {
                // Each rank reads what another one has written (-C).
                script += &format!("{mpirun} forebay:{name} {words} -C; ");
            }
        }
        // It keeps the file (-k), with a signature (-G), and another run finds that there.
        let kept = "forebay:v -t 64k -b 1m -k -G 7";
        let reader = mpirun.replace(" -w -r -W ", " -r ");
        script += &format!("{mpirun} {kept}; {reader} {kept}; forebay volume show v");
        let ran = run(&place, &["v", "w"], &script);
        assert_eq!(ran.code, Some(0), "{ranks} ranks: {ran:?}");
        let (finished, all) = (ran.out.matches("Finished").count(), ran.out.clone() + &ran.err);
        assert!(
            finished == 10 && !all.contains("WARNING") && !all.contains("rror"),
            "{ranks} ranks: {ran:?}"
        );
        assert!(ran.out.contains(&format!("{ranks} MiB")), "the end of the file that it kept: {ran:?}");
    }
    place.assert_nothing_left();
}

/// The end of the file lives as long as the volume: over the death of the worker, and until `format`.
#[test]
fn end_outlasts_programs_and_the_worker_and_format_takes_it_back() {
    let _alone = alone();
    let Some(mpi) = MPIS.iter().find(|mpi| can_have_volumes() && driver(mpi)) else { return };
    let place = Place::new();
    let program = compile(&place, mpi, "volumes").display().to_string();
    place.ok(["up", "--capacity", "128MiB", "--json"]);
    for name in ["v", "w"] {
        place.ok(["volume", "create", name, "--size", SIZE]);
    }
    let file_bytes = || place.json(["volume", "show", "v", "--json"])[0]["file_bytes"].as_u64();
    assert_eq!(file_bytes(), Some(0), "a new volume is an empty file");
    let ranks = |words: &str| {
        let mut command = place.command(["run", "--quiet", "--"]);
        command.args(mpi.launcher).arg("2").arg(&program).args(words.split(' '));
        let ran = Ran::of(command.env("FOREBAY_MPI_PREFIX", "xpd").output().unwrap());
        assert!(ran.code == Some(0) && ran.out.contains("passed"), "{words}: {ran:?}");
    };
    ranks(&format!("v w {}", 32 << 20));
    assert_eq!(file_bytes(), Some(20));
    let worker = || place.json(["status", "--json"])["pids"]["worker"].as_i64().unwrap_or(0) as i32;
    let before = worker();
    kill(before, libc::SIGKILL);
    eventually("there is another worker", || ![0, before].contains(&worker()));
    ranks("v left");
    assert_eq!(file_bytes(), Some(20));
    assert!(place.ok(["volume", "show", "v"]).out.contains("20 B"));
    place.ok(["volume", "format", "v"]);
    assert_eq!(file_bytes(), Some(0));
    place.ok(["volume", "delete", "v"]);
    place.ok(["volume", "create", "v", "--size", SIZE]);
    assert_eq!(file_bytes(), Some(0), "another volume");
    place.ok(["down", "--discard"]);
    place.assert_nothing_left();
}

/// A library's program writes into a volume what it writes on tmpfs.
fn same_as_on_tmpfs(mpi: &Mpi, compiler: &str, name: &str, words: &[&str], volumes: &[&str]) {
    let place = Place::new();
    let Some(program) = compile_with(&place, compiler, name, words) else {
        println!("skipped: {compiler} does not build {name}.c");
        return;
    };
    let copy = compile(&place, mpi, "copy");
    for ranks in [1, 2, 4] {
        let native = Native::new("volumes");
        let reference = native.0.join("file").display().to_string();
        let (launcher, program, copy) = (mpi.launcher.join(" "), program.display(), copy.display());
        let mut script =
            format!("{launcher} {ranks} {program} forebay:v; {launcher} {ranks} {program} {reference}; ");
        for volume in volumes {
            let ending = volume.trim_start_matches('v');
            script += &format!(
                "{launcher} 1 {copy} forebay:{volume} {reference}{ending}.copy; \
                 cmp {reference}{ending} {reference}{ending}.copy; "
            );
        }
        let ran = run(&place, volumes, &(script + "echo same"));
        let passed = ran.out.matches("passed").count();
        assert!(
            ran.code == Some(0) && ran.out.ends_with("same\n") && passed == 2 + volumes.len(),
            "{}, {name}, {ranks} ranks: {ran:?}",
            mpi.name
        );
    }
    place.assert_nothing_left();
}

#[test]
fn parallel_hdf5_writes_into_a_volume_what_it_writes_on_tmpfs() {
    let _alone = alone();
    for (mpi, compiler) in MPIS.iter().zip(["h5pcc.openmpi", "h5pcc.mpich"]) {
        if can_have_volumes() && driver(mpi) {
            same_as_on_tmpfs(mpi, compiler, "hdf5", &["-shlib"], &["v"]);
        }
    }
}

#[test]
fn parallel_netcdf4_and_pnetcdf_write_into_volumes_what_they_write_on_tmpfs() {
    let _alone = alone();
    let mpi = &MPIS[0];
    if can_have_volumes() && driver(mpi) {
        let netcdf = ["-I/usr/lib/x86_64-linux-gnu/netcdf/mpi/include", "-lnetcdf_mpi"];
        same_as_on_tmpfs(mpi, mpi.compiler, "netcdf", &netcdf, &["v"]);
        same_as_on_tmpfs(mpi, mpi.compiler, "pnetcdf", &["-lpnetcdf"], &["v.1", "v.2", "v.5"]);
    }
}
