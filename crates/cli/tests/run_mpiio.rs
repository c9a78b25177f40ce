//! MPI-IO through `forebay run`: the programs of mpi/tests on both MPIs, with 1, 2 and 4 ranks.
//!
//! An MPI that is not installed is skipped with a line. mpi/Makefile builds the driver into the directory of the
//! command under test. Reference files are in a directory of /dev/shm that is removed with the test.

mod common;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::mpi::{alone, compile, driver, launch, passes, source, Native, MPIS};
use common::{forebay, Place, Ran};

#[test]
fn every_call_does_what_the_standard_says_and_misuse_has_its_class() {
    let _alone = alone();
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let place = Place::new();
        let program = compile(&place, mpi, "calls");
        for ranks in [1, 2, 4] {
            passes(&place, mpi, ranks, &[program.to_str().unwrap(), "/forebay/file"]);
            passes(&place, mpi, ranks, &[program.to_str().unwrap(), "forebay:/file"]);
        }
        place.assert_nothing_left();
    }
}

/// Arguments that differ between ranks, datatypes, amodes, offsets, closed files: with both kinds of collective calls.
#[test]
fn misuse_of_collective_calls_has_its_class_on_every_rank() {
    let _alone = alone();
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let place = Place::new();
        let program = compile(&place, mpi, "misuse");
        for ranks in [1, 2, 4] {
            passes(&place, mpi, ranks, &[program.to_str().unwrap(), "/forebay/file"]);
        }
        place.assert_nothing_left();
    }
}

/// No rank returns from a close, a sync or another of these calls before all ranks have entered it, nor from a close
/// before all ranks have released the file.
#[test]
fn collective_calls_on_a_file_return_when_all_ranks_are_in_them() {
    let _alone = alone();
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let place = Place::new();
        let program = compile(&place, mpi, "meeting");
        for (ranks, name) in [(1, "/forebay/file"), (2, "forebay:/file"), (4, "/forebay/file")] {
            passes(&place, mpi, ranks, &["timeout", "120", program.to_str().unwrap(), name]);
        }
        place.assert_nothing_left();
    }
}

#[test]
fn external32_is_the_standards_and_representations_of_programs_are_used() {
    let _alone = alone();
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let place = Place::new();
        let program = compile(&place, mpi, "datarep");
        for ranks in [1, 2, 4] {
            passes(&place, mpi, ranks, &[program.to_str().unwrap(), "/forebay/file"]);
        }
        place.assert_nothing_left();
    }
}

#[test]
fn full_pool_is_no_space_and_no_signal() {
    let _alone = alone();
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let place = Place::new();
        for name in ["calls", "misuse"] {
            let program = compile(&place, mpi, name);
            let mut command = place.command(["run", "--own", "--quiet", "--capacity", "64MiB", "--"]);
            command.args(mpi.launcher).arg("2").arg(&program).args(["/forebay/file", "full"]);
            let ran = Ran::of(command.output().unwrap());
            assert!(ran.code == Some(0) && ran.out.contains("passed"), "{}, {name}: {ran:?}", mpi.name);
        }
        place.assert_nothing_left();
    }
}

#[test]
fn error_of_a_file_ends_the_program_where_its_handler_says_so() {
    let _alone = alone();
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let place = Place::new();
        let program = compile(&place, mpi, "calls");
        for which in ["fatal", "abort"] {
            let ran = launch(&place, mpi, 2, &[program.to_str().unwrap(), "/forebay/file", which], false);
            let ended = ran.code != Some(0) && !ran.out.contains("it went on");
            assert!(ended && ran.out.contains("all is well"), "{}, {which}: {ran:?}", mpi.name);
            assert!(!ran.out.contains("calls.c:"), "{}, {which}: {ran:?}", mpi.name);
            assert!(ran.err.contains("errors of this file are fatal"), "{}, {which}: {ran:?}", mpi.name);
        }
        place.assert_nothing_left();
    }
}

/// Records far apart take space only for the pages that they touch: 4 MiB, in a range of 1 GiB.
#[test]
fn records_far_apart_fit_a_pool_that_their_range_would_not() {
    let _alone = alone();
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let place = Place::new();
        let program = compile(&place, mpi, "records");
        for ranks in [1, 2] {
            // Each mapping covers one backing file's part of the range.
            for files in [1, 4, 16] {
                let mut command = place.command(["run", "--own", "--quiet", "--capacity", "96MiB", "--"]);
                command.args(mpi.launcher).arg(ranks.to_string()).arg(&program);
                command.args(["/forebay/file", "1024", "1024"]);
                command.env("RECORDS_SPREAD", (1024 / ranks).to_string());
                command.env("RECORDS_HINTS", format!("striping_factor={files} striping_unit=1048576"));
                let ran = Ran::of(command.output().unwrap());
                let passed = ran.code == Some(0) && ran.out.contains("passed");
                assert!(passed, "{}, {ranks} ranks, {files} backing files: {ran:?}", mpi.name);
            }
        }
        place.assert_nothing_left();
    }
}

/// MPICH alone, as the other MPI implements MPI 3.1.
#[test]
fn forms_for_large_counts_move_what_they_say_also_more_than_two_gib() {
    let _alone = alone();
    let mpi = &MPIS[1];
    if !driver(mpi) {
        return;
    }
    let place = Place::new();
    let program = compile(&place, mpi, "counts");
    let program = program.to_str().unwrap();
    for ranks in [1, 2, 4] {
        passes(&place, mpi, ranks, &[program, "/forebay/file"]);
    }
    // The file takes 2.1 GiB of memory, and the test little more.
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap();
    let available = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
    let available_kib: u64 = available.trim().trim_end_matches(" kB").parse().unwrap();
    if available_kib < 5 << 20 {
        println!(
            "skipped counts of more than two GiB: {available_kib} KiB of memory are available, not 5 GiB"
        );
        return;
    }
    // With one rank alone, and through aggregators.
    for ranks in ["1", "2"] {
        let mut command = place.command(["run", "--own", "--quiet", "--capacity", "3GiB", "--"]);
        command.args(mpi.launcher).args([ranks, program, "/forebay/file", "huge"]);
        let ran = Ran::of(command.output().unwrap());
        assert!(ran.code == Some(0) && ran.out.contains("passed"), "{ranks} ranks: {ran:?}");
    }
    place.assert_nothing_left();
}

#[test]
fn fortran_programs_and_their_error_handlers_are_served() {
    let _alone = alone();
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let place = Place::new();
        let by_module = ("datarep", &["-DBY_MODULE"][..]);
        let others = ["fortran", "f08", "mpif", "datarep", "datarep_f08"].map(|name| (name, &[][..]));
        for (name, words) in [&others[..], &[by_module]].concat() {
            let program = place.join(name);
            let mut compiler = Command::new(mpi.compiler.replace("mpicc", "mpifort"));
            compiler.arg("-cpp").args(words).arg("-J").arg(&place.path).arg("-o").arg(&program);
            if !compiler.arg(source(&format!("tests/{name}.f90"))).output().is_ok_and(|o| o.status.success())
            {
                println!("skipped: no Fortran for {}", mpi.name);
                continue;
            }
            for ranks in [1, 2, 4] {
                passes(&place, mpi, ranks, &[program.to_str().unwrap(), "/forebay/file"]);
            }
        }
        place.assert_nothing_left();
    }
}

#[test]
fn random_views_give_the_bytes_that_mpi_pack_says() {
    let _alone = alone();
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
            assert_eq!(ran.err.contains("two-phase"), hints.contains("enable"), "{ran:?}");
        }
        place.assert_nothing_left();
    }
}

#[test]
fn two_phase_calls_move_pieces_of_all_lengths() {
    let _alone = alone();
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let place = Place::new();
        let program = compile(&place, mpi, "exchange");
        let program = program.to_str().unwrap();
        for (ranks, seeds) in [(1, "5"), (2, "12"), (4, "8")] {
            passes(&place, mpi, ranks, &[program, "/forebay/pieces", "1", seeds]);
        }
        place.assert_nothing_left();
    }
}

/// Open MPI alone: ROMIO of MPICH 4.0.2 aborts at some of these views, and gives different bytes at others. So does
/// Open MPI 4.1.4 with four ranks.
#[test]
fn random_views_give_the_bytes_of_the_mpi_librarys_own() {
    let _alone = alone();
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
    let _alone = alone();
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let (place, native) = (Place::new(), Native::new("outside"));
        let program = compile(&place, mpi, "outside");
        let file = native.0.join("file");
        let words = [program.to_str().unwrap(), file.to_str().unwrap(), "/forebay/file"];
        let ran = launch(&place, mpi, 2, &words, true);
        assert!(ran.code == Some(0) && ran.out.contains("passed"), "{}: {ran:?}", mpi.name);
        // The driver reports the pool's file only.
        assert!(ran.err.contains("forebay: /file: open by 2 ranks"), "{ran:?}");
        assert!(!ran.err.contains("/dev/shm"), "{ran:?}");
        place.assert_nothing_left();
    }
}

/// srun starts no rank itself: it sends its environment to daemons, which start the ranks with it (`--export=ALL`, the
/// default). This script does the same with a process that gets nothing of its caller but that list.
#[test]
fn launcher_that_sends_its_environment_to_a_daemon_brings_the_doors_to_the_ranks() {
    use std::os::unix::fs::PermissionsExt;
    const SRUN: &str = "#!/bin/sh\n\
        list=$(mktemp) || exit 1\n\
        (env -0; printf '%s\\0' \"$@\") > \"$list\"\n\
        env -i PATH=\"$PATH\" xargs -0 -a \"$list\" env -i\n\
        code=$?\n\
        rm -f \"$list\"\n\
        exit $code\n";
    let _alone = alone();
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let place = Place::new();
        let program = compile(&place, mpi, "calls");
        let srun = place.join("srun");
        std::fs::write(&srun, SRUN).unwrap();
        std::fs::set_permissions(&srun, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = place.command(["run", "--own", "--quiet", "--", srun.to_str().unwrap()]);
        command.args(mpi.launcher).arg("2").arg(&program).arg("/forebay/file").env("FOREBAY_MPI_DEBUG", "1");
        let ran = Ran::of(command.output().unwrap());
        assert!(ran.code == Some(0) && ran.out.contains("passed"), "{}: {ran:?}", mpi.name);
        assert!(ran.err.contains("forebay: /file: open by 2 ranks"), "{}: {ran:?}", mpi.name);
        place.assert_nothing_left();
    }
}

/// mpi4py loads its MPI so that only the library itself can find it (RTLD_LOCAL).
#[test]
fn mpi4py_reads_what_it_wrote() {
    let _alone = alone();
    let there = Command::new("/usr/bin/python3").args(["-c", "import mpi4py"]).output();
    if !there.is_ok_and(|o| o.status.success()) || !driver(&MPIS[0]) {
        println!("skipped: no mpi4py");
        return;
    }
    let place = Place::new();
    let script = source("tests/mpi4py_views.py");
    let ran = launch(
        &place,
        &MPIS[0],
        2,
        &["/usr/bin/python3", "-m", "mpi4py", script.to_str().unwrap(), "/forebay/p"],
        true,
    );
    assert!(ran.code == Some(0) && ran.out.contains("passed"), "{ran:?}");
    assert!(ran.err.contains("forebay: /p: open by 2 ranks"), "{ran:?}");
    place.assert_nothing_left();
}

#[test]
fn rank_that_is_killed_takes_nothing_along_that_was_written() {
    let _alone = alone();
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let place = Place::new();
        let program = compile(&place, mpi, "dies");
        let pool = place.up("p");
        let pool = pool.to_str().unwrap();
        let mut command = place.command(["--pool", pool, "run", "--quiet", "--"]);
        command.args(mpi.launcher).arg("3").arg(&program).arg("/forebay/file");
        let ran = Ran::of(command.output().unwrap());
        assert!(ran.code != Some(0) && !ran.out.contains("dies.c"), "{}: {ran:?}", mpi.name);
        let out = place.join("file");
        place.ok(["--pool", pool, "stage-out", &format!("/file:{}", out.display())]);
        let data = std::fs::read(&out).unwrap();
        let expected: Vec<u8> = (1..=3u8).flat_map(|i| vec![i; 100_000]).collect();
        assert!(data == expected, "{}: {} bytes", mpi.name, data.len());
        place.ok(["--pool", pool, "fsck"]);
        place.ok(["--pool", pool, "down"]);
    }
}

/// The ranks of one node share all state in memory, so the death of rank 0 destroys none of it.
#[test]
fn ranks_of_one_node_go_on_when_another_is_killed() {
    let _alone = alone();
    const GO_ON: [&[&str]; 2] = [
        &["--mca", "orte_enable_recovery", "1", "--mca", "orte_abort_on_non_zero_status", "0"],
        &["-disable-auto-cleanup"],
    ];
    for (mpi, words) in MPIS.iter().zip(GO_ON).filter(|(mpi, _)| driver(mpi)) {
        let place = Place::new();
        let program = compile(&place, mpi, "survivors");
        for dead in ["0", "2"] {
            let mut command = place.command(["run", "--own", "--quiet", "--", "timeout", "60"]);
            command.arg(mpi.launcher[0]).args(words).args(&mpi.launcher[1..]).arg("3");
            let ran =
                Ran::of(command.arg(&program).args(["/forebay/file", dead, "together"]).output().unwrap());
            let went_on = ran.out.matches("went on").count();
            assert!(went_on == 2 && !ran.out.contains("survivors.c:"), "{}, rank {dead}: {ran:?}", mpi.name);
        }
        place.assert_nothing_left();
    }
}

#[test]
fn ranks_that_may_not_look_at_each_other_share_memory_all_the_same() {
    let _alone = alone();
    const RUNS: [(u32, &[&str]); 5] =
        [(2, &[]), (3, &[]), (3, &["append"]), (3, &["atomicity"]), (3, &["seek"])];
    /// Named shared memory through which ranks have met, including that of programs killed earlier.
    fn met_in() -> BTreeSet<OsString> {
        let names = std::fs::read_dir("/dev/shm").unwrap().flatten().map(|entry| entry.file_name());
        names.filter(|name| name.to_string_lossy().starts_with("forebay-mpi-")).collect()
    }
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let (place, before) = (Place::new(), met_in());
        let program = compile(&place, mpi, "hidden");
        let program = ["timeout", "60", program.to_str().unwrap(), "/forebay/file"];
        for (ranks, first) in RUNS {
            let ran = launch(&place, mpi, ranks, &[&program, first].concat(), true);
            assert!(ran.code == Some(0) && ran.out.contains("passed"), "{} {first:?}: {ran:?}", mpi.name);
            let hidden = !ran.out.contains("sees rank 0");
            assert_eq!(hidden, ran.err.contains("they met in /dev/shm"), "{}: {ran:?}", mpi.name);
        }
        let after = met_in();
        assert!(after.is_subset(&before), "{}: {before:?}, then {after:?}", mpi.name);
        place.assert_nothing_left();
    }
}

#[test]
fn mpi_that_runs_is_the_one_that_is_served_when_a_process_has_two() {
    let _alone = alone();
    for (mpi, other) in MPIS.iter().zip(["libmpich.so.12", "libmpi.so.40"]) {
        let place = Place::new();
        if !driver(mpi) {
            continue;
        }
        let program = compile(&place, mpi, "two");
        let ran = launch(&place, mpi, 2, &[program.to_str().unwrap(), other, "/forebay/file"], true);
        if ran.out.contains(other) {
            println!("skipped: {}", ran.out);
            continue;
        }
        assert!(ran.code == Some(0) && ran.out.contains("passed"), "{}: {ran:?}", mpi.name);
        assert!(ran.err.contains("forebay: /file: open by 2 ranks"), "{ran:?}");
        place.assert_nothing_left();
    }
}

/// The binaries in a directory of their own, except those in `absent`.
fn installed_without(place: &Place, absent: &[&str]) -> PathBuf {
    let (built, own) = (forebay().parent().unwrap(), place.join("bin"));
    std::fs::create_dir_all(&own).unwrap();
    for name in ["forebay", "forebayd", "libforebay.so", "libforebay_preload.so", "libforebay_mpi.so"] {
        if absent.contains(&name) {
            std::fs::remove_file(own.join(name)).unwrap();
        } else {
            // The file of a process that runs yet cannot be written, and one that is written for a child of another
            // test cannot be executed.
            let (from, to) = (built.join(name), own.join(name));
            let _ = std::fs::remove_file(&to);
            let linked = std::fs::hard_link(&from, &to).or_else(|_| std::fs::copy(&from, &to).map(|_| ()));
            linked.unwrap();
        }
    }
    own
}

/// The state after an MPI was installed later than Forebay. The ranks write by open(2) alone, which needs no driver,
/// and still one of them prints the warning.
#[test]
fn program_whose_mpi_has_no_driver_is_told_so_once() {
    let _alone = alone();
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let place = Place::new();
        let program = compile(&place, mpi, "plain");
        for (absent, told) in [
            (&[][..], "there is no driver for this program's MPI"),
            (&["libforebay_mpi.so"], "there is no libforebay_mpi.so in "),
        ] {
            let mut command = Command::new(installed_without(&place, absent).join("forebay"));
            place.dress(&mut command);
            command.args(["run", "--own", "--quiet", "--"]).args(mpi.launcher).arg("3").arg(&program);
            let ran = Ran::of(command.arg("/forebay").output().unwrap());
            assert!(ran.code == Some(0) && ran.out.contains("passed"), "{}: {ran:?}", mpi.name);
            assert_eq!(ran.err.matches(told).count(), 1, "{}: {ran:?}", mpi.name);
            assert_eq!(ran.err.matches("forebay: ").count(), 1, "{}: {ran:?}", mpi.name);
        }
        // With its driver there is no warning.
        let ran = launch(&place, mpi, 3, &[program.to_str().unwrap(), "/forebay"], false);
        assert!(ran.code == Some(0) && !ran.err.contains("forebay: "), "{}: {ran:?}", mpi.name);
        place.assert_nothing_left();
    }
}

/// A driver is built for each MPI that is present when Forebay is built, so an MPI that a job runs must be installed
/// before.
#[test]
fn jobs_that_run_mpi_programs_install_mpi_before_they_build() {
    for job in ["demo", "bench", "test"] {
        let mut make = Command::new("make");
        make.args(["-n", "-C"]).arg(source("..")).arg(job);
        let plan = String::from_utf8(make.output().unwrap().stdout).unwrap();
        let at = |words: &str| plan.find(words).unwrap_or_else(|| panic!("{job} without {words}: {plan}"));
        assert!(at(&format!("tools/install-deps {job}")) < at("make -C mpi OUT="), "{plan}");
    }
}

/// The driver built with the C compiler's sanitizers, on both MPIs: every call, pieces of all lengths, and random views
/// with both kinds of collective buffering. Leak checks are off, as an MPI library has many leaks.
#[test]
fn driver_is_clean_under_address_and_undefined_behaviour_sanitizers() {
    let _alone = alone();
    let asan = Command::new("cc").arg("-print-file-name=libasan.so").output().unwrap();
    let asan = Path::new(String::from_utf8(asan.stdout).unwrap().trim()).canonicalize();
    let Ok(asan) = asan else {
        println!("skipped: no libasan");
        return;
    };
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let place = Place::new();
        let built = forebay().parent().unwrap();
        let own = place.join("bin");
        std::fs::create_dir(&own).unwrap();
        for name in ["forebay", "forebayd", "libforebay.so", "libforebay_preload.so"] {
            std::fs::copy(built.join(name), own.join(name)).unwrap();
        }
        let mut make = Command::new("make");
        make.arg("-s").arg("-C").arg(source("")).arg(format!("OUT={}", own.display()));
        make.arg("CFLAGS=-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all");
        assert!(make.status().unwrap().success());
        for (program, words, hints) in [
            ("calls", &["/forebay/file"][..], ""),
            ("misuse", &["/forebay/file"], ""),
            ("exchange", &["/forebay/pieces", "1", "10"], ""),
            ("datarep", &["/forebay/file"], ""),
            ("views", &["/forebay/view", "-", "900", "10"], ""),
            (
                "views",
                &["/forebay/view", "-", "920", "10"],
                "romio_cb_write=enable romio_cb_read=enable cb_buffer_size=4096",
            ),
        ] {
            let program = compile(&place, mpi, program);
            let mut command = Command::new(own.join("forebay"));
            place.dress(&mut command);
            command.args(["run", "--own", "--quiet", "--"]).args(mpi.launcher).arg("2").arg(&program);
            command.args(words).env("VIEWS_HINTS", hints).env("LD_PRELOAD", &asan);
            command.env("ASAN_OPTIONS", "detect_leaks=0:verify_asan_link_order=0");
            let ran = Ran::of(command.output().unwrap());
            assert!(ran.code == Some(0) && ran.out.contains("passed"), "{}: {ran:?}", mpi.name);
        }
    }
}
