//! The I/O kernels of `kernels/`: built for both MPIs, run in a pool, on tmpfs and on a disk, with their data verified;
//! a flipped byte is found; wrong arguments are refused.
//!
//! An MPI that is not installed is skipped with a line.

mod common;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use common::mpi::{alone, driver, Mpi, Native, MPIS};
use common::{forebay, Place, Ran};
use serde_json::Value;

/// A kernel with its options in the pool, on tmpfs and on a disk.
struct Case<'a> {
    kernel: &'a str,
    options: [&'a str; 3],
    /// Its phases, with their bytes: of the whole run, and further ones for each rank.
    phases: &'a [(&'a str, u64, u64)],
    /// The phases whose bytes are verified.
    verified: &'a [&'a str],
}

/// In place of a number of bytes: some, which the verification counts. The sizes of s3asim's results are random.
const SOME: u64 = u64::MAX;

/// Ranks in the pool, on tmpfs, on the disk.
const RANKS: [u32; 3] = [2, 3, 1];

const MATRICES: u64 = 4 * 60 * 60 * 8;

const CASES: &[Case<'_>] = &[
    Case {
        kernel: "hacc-io",
        options: [
            "--particles 3001 --api collective --layout variable --hints cb_nodes=1",
            "--particles 3001 --api independent --files rank --shift 1",
            "--particles 3001 --api posix --sync",
        ],
        phases: &[
            ("checkpoint-open", 0, 0),
            ("checkpoint", 0, 3001 * 38),
            ("checkpoint-close", 0, 0),
            ("restart-open", 0, 0),
            ("restart", 0, 3001 * 38),
            ("restart-close", 0, 0),
        ],
        verified: &["restart"],
    },
    Case {
        kernel: "io-modelling",
        options: [
            "--count 100 --size 1000 --api posix",
            "--count 100 --size 1000 --api independent",
            "--count 100 --size 1000 --files rank --sync-each",
        ],
        phases: &[
            ("sequential-write", 0, 100_000),
            ("random-write", 0, 100_000),
            ("sequential-read", 0, 100_000),
            ("random-read", 0, 100_000),
        ],
        verified: &["sequential-read", "random-read"],
    },
    Case {
        kernel: "madbench2",
        options: [
            "--pixels 60 --bins 4 --gangs 2 --api collective",
            "--pixels 60 --bins 4 --api independent --files rank",
            "--pixels 60 --bins 4 --busy-work 1.1",
        ],
        phases: &[
            ("S-write", MATRICES, 0),
            ("S-work", 0, 0),
            ("W-read", MATRICES, 0),
            ("W-work", 0, 0),
            ("W-write", MATRICES, 0),
            ("C-read", MATRICES, 0),
            ("C-work", 0, 0),
        ],
        verified: &["W-read", "C-read"],
    },
    Case {
        kernel: "s3asim",
        options: [
            "--queries 5 --fragments 4 --fragment-size 20KB --buffer 8KiB --api collective --batch 2",
            "--queries 5 --fragments 4 --fragment-size 20KB --buffer 8KiB --api list --writer master",
            "--queries 5 --fragments 4 --fragment-size 20KB --buffer 8KiB --sync --search-rate 1GB",
        ],
        phases: &[
            ("database", 80_000, 0),
            ("stream", 5 * 80_000, 0),
            ("search", 0, 0),
            ("merge", 0, 0),
            ("write", SOME, 0),
            ("check", SOME, 0),
        ],
        verified: &["stream", "check"],
    },
    Case {
        kernel: "netcdf-bench",
        options: [
            "--geometry 4:9:7:5 --layout chunked --chunk 1:3:4:5 --api collective --unlimited --fill",
            "--geometry 4:9:7:5 --shift 2",
            "--geometry 4:9:7:5 --layout chunked --fill --sync",
        ],
        phases: &[
            ("create", 0, 0),
            ("write", 4 * 9 * 7 * 5 * 8, 0),
            ("write-close", 0, 0),
            ("open", 0, 0),
            ("read", 4 * 9 * 7 * 5 * 8, 0),
            ("read-close", 0, 0),
        ],
        verified: &["read"],
    },
];

/// Runs `make` for an MPI, into a directory beside the command.
fn make(mpi: &Mpi, words: &[&str]) -> (PathBuf, Ran) {
    let out = forebay().parent().unwrap().join(format!("kernels-{}", mpi.compiler));
    let mut make = Command::new("make");
    make.arg("-C").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels"));
    make.args([&format!("OUT={}", out.display()), &format!("CC={}", mpi.compiler), "CFLAGS=-O1"]).args(words);
    (out, Ran::of(make.output().unwrap()))
}

/// The directory of the kernels for an MPI, built once. None where the MPI is missing.
fn kernels(mpi: &Mpi) -> Option<PathBuf> {
    static BUILT: Mutex<BTreeMap<&str, Option<PathBuf>>> = Mutex::new(BTreeMap::new());
    let build = || {
        driver(mpi).then(|| {
            let (out, ran) = make(mpi, &["-s"]);
            assert_eq!(ran.code, Some(0), "{}: {ran:?}", mpi.name);
            out
        })
    };
    BUILT.lock().unwrap().entry(mpi.name).or_insert_with(build).clone()
}

/// The MPIs that are installed, with their kernels. MPICH comes first: its launches are faster, so it runs what is the
/// same with every MPI.
fn installed() -> Vec<(&'static Mpi, PathBuf)> {
    MPIS.iter().rev().filter_map(|mpi| Some((mpi, kernels(mpi)?))).collect()
}

/// Runs a program with the launcher, without Forebay.
fn plain(place: &Place, mpi: &Mpi, ranks: u32, words: &[&str]) -> Ran {
    let mut command = Command::new(mpi.launcher[0]);
    command.args(&mpi.launcher[1..]).arg(ranks.to_string()).args(words).current_dir(&place.path);
    place.dress(&mut command);
    Ran::of(command.output().unwrap())
}

/// The cases of the kernels that are built: netcdf-bench needs a NetCDF of the same MPI.
fn cases(mpi: &Mpi, built: &Path) -> Vec<&'static Case<'static>> {
    let (there, missing): (Vec<_>, Vec<_>) = CASES.iter().partition(|case| built.join(case.kernel).exists());
    for case in missing {
        assert_eq!(case.kernel, "netcdf-bench");
        println!("skipped: no netcdf-bench for {}", mpi.name);
    }
    there
}

/// The words of a run.
fn words<'a>(program: &'a Path, options: &'a str, file: &'a str) -> Vec<&'a str> {
    let mut all = vec![program.to_str().unwrap()];
    all.extend(options.split_whitespace());
    all.push(file);
    all
}

/// Checks one line of JSON against what was to be moved and verified.
fn check(mpi: &Mpi, case: &Case<'_>, ranks: u32, line: &str) {
    let ran: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{}: {e}: {line}", mpi.name));
    assert_eq!(ran["kernel"], case.kernel);
    assert_eq!(ran["ranks"], ranks);
    assert!(ran["mpi"].as_str().unwrap().starts_with(mpi.name), "{line}");
    let phases = ran["phases"].as_array().unwrap();
    let bytes_of = |phase: &Value| phase["bytes"].as_u64().unwrap();
    assert_eq!(phases.len(), case.phases.len(), "{}: {line}", mpi.name);
    for (phase, &(name, all, each)) in phases.iter().zip(case.phases) {
        let bytes = bytes_of(phase);
        assert_eq!(phase["name"], name, "{}: {line}", mpi.name);
        let right = if all == SOME { bytes > 0 } else { bytes == all + each * u64::from(ranks) };
        assert!(right, "{}: {name}: {line}", mpi.name);
    }
    for phase in phases {
        let seconds = &phase["seconds"];
        let [least, mean, most] = ["min", "mean", "max"].map(|s| seconds[s].as_f64().unwrap());
        assert!(0.0 <= least && least <= mean * 1.000001 && mean <= most * 1.000001, "{line}");
        assert!(phase["bytes"] == 0 || phase["bytes_per_second"].as_f64().unwrap() > 0.0, "{line}");
    }
    let verified = phases.iter().filter(|p| case.verified.contains(&p["name"].as_str().unwrap()));
    assert_eq!(ran["verified_bytes"], verified.map(bytes_of).sum::<u64>(), "{}: {line}", mpi.name);
    assert_eq!(ran["blocks_that_differ"], 0, "{line}");
}

/// The one line of JSON that a run printed.
fn result(mpi: &Mpi, ran: &Ran) -> String {
    assert!(ran.code == Some(0), "{}: {ran:?}", mpi.name);
    ran.out.trim_end().to_owned()
}

#[test]
fn kernels_read_back_from_a_pool_what_they_wrote() {
    let _alone = alone();
    for (mpi, built) in installed() {
        let place = Place::new();
        // One pool for all of them; each removes its files.
        let mut script = "set -e".to_owned();
        let cases = cases(mpi, &built);
        for case in &cases {
            let program = built.join(case.kernel);
            let run = words(&program, case.options[0], "/forebay/file").join(" ");
            script += &format!("; {} {} {run} --verify --json", mpi.launcher.join(" "), RANKS[0]);
        }
        script += "; ls -A /forebay";
        let mut command = place.command(["run", "--own", "--quiet", "--", "sh", "-c", &script]);
        let out = result(mpi, &Ran::of(command.output().unwrap()));
        assert_eq!(out.lines().count(), cases.len(), "{}: {out}", mpi.name);
        for (case, line) in cases.iter().zip(out.lines()) {
            check(mpi, case, RANKS[0], line);
        }
        place.assert_nothing_left();
    }
}

#[test]
fn kernels_read_back_from_tmpfs_and_a_disk_what_they_wrote() {
    let _alone = alone();
    for (mpi, built) in installed() {
        let (place, tmpfs) = (Place::new(), Native::new("kernels"));
        let disk = place.join("disk");
        std::fs::create_dir(&disk).unwrap();
        for case in cases(mpi, &built) {
            for (which, directory) in [(1, &tmpfs.0), (2, &disk)] {
                let (program, file) = (built.join(case.kernel), directory.join("file"));
                let mut run = words(&program, case.options[which], file.to_str().unwrap());
                run.extend(["--verify", "--json"]);
                let ran = plain(&place, mpi, RANKS[which], &run);
                check(mpi, case, RANKS[which], &result(mpi, &ran));
                assert_eq!(
                    std::fs::read_dir(directory).unwrap().count(),
                    0,
                    "{}: files are left",
                    case.kernel
                );
            }
        }
    }
}

/// Ranks and options of runs.
type Runs = &'static [(u32, &'static str)];

/// A kernel, the suffix of its file, and runs that all make the same file.
const SAME: &[(&str, &str, Runs)] = &[
    (
        "hacc-io",
        "",
        &[
            (1, "--part checkpoint --layout variable --particles 600"),
            (3, "--part checkpoint --layout variable --particles 200 --api collective"),
        ],
    ),
    (
        "madbench2",
        ".W",
        &[
            (1, "--phases SW --pixels 40 --bins 4"),
            (3, "--phases SW --pixels 40 --bins 4 --gangs 2 --api collective"),
        ],
    ),
    (
        "s3asim",
        ".results",
        &[
            (1, "--keep --queries 4 --fragments 5 --fragment-size 1000"),
            (2, "--keep --queries 4 --fragments 5 --fragment-size 1000 --api list --writer master"),
            (3, "--keep --queries 4 --fragments 5 --fragment-size 1000 --api collective --batch 3"),
        ],
    ),
];

#[test]
fn files_do_not_depend_on_the_interface_and_the_number_of_ranks() {
    let _alone = alone();
    let Some((mpi, built)) = installed().into_iter().next() else { return };
    let (place, tmpfs) = (Place::new(), Native::new("kernels"));
    for (kernel, suffix, runs) in SAME {
        let (program, file) = (built.join(kernel), tmpfs.0.join(kernel));
        let file = file.to_str().unwrap();
        let contents: Vec<_> = runs
            .iter()
            .map(|(ranks, options)| {
                let ran = plain(&place, mpi, *ranks, &words(&program, options, file));
                assert_eq!(ran.code, Some(0), "{kernel} {options}: {ran:?}");
                std::fs::read(format!("{file}{suffix}")).unwrap()
            })
            .collect();
        assert!(!contents[0].is_empty() && contents.iter().all(|c| *c == contents[0]), "{kernel}");
        if *kernel == "hacc-io" {
            // 38 bytes a particle; behind the seven floats come the numbers of all.
            assert_eq!(contents[0].len(), 600 * 38);
            let numbers = contents[0][600 * 28..600 * 36].chunks(8);
            assert!(numbers.map(|n| i64::from_le_bytes(n.try_into().unwrap())).eq(0..600));
        }
    }
}

/// A kernel that finds a flipped byte: the options of both runs, those of the first and of the second, the file's
/// suffix, and the byte's offset.
const FLIPS: &[(&str, &str, &str, &str, &str, u64)] = &[
    ("hacc-io", "--particles 1000", "--part checkpoint", "--part restart", "", 56_789),
    ("hacc-io", "--particles 1000 --files rank", "--part checkpoint", "--part restart", ".00001", 23_456),
    (
        "io-modelling",
        "--count 50 --size 700 --orders reverse",
        "--operations write",
        "--operations read",
        "",
        69_999,
    ),
    ("madbench2", "--pixels 40 --bins 3", "--phases S", "--phases W", ".S", 30_001),
    ("madbench2", "--pixels 40 --bins 3 --gangs 2", "--phases SW", "--phases C", ".W", 12_345),
    (
        "s3asim",
        "--queries 1 --fragments 3 --fragment-size 9000 --buffer 2000",
        "--part database",
        "--part search",
        ".database",
        26_999,
    ),
    ("s3asim", "--queries 4 --fragments 3 --fragment-size 9000", "--keep", "--part check", ".results", 5_000),
];

fn flip(path: &Path, offset: u64) -> (u8, u8) {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
    (byte[0], byte[0] ^ 0x10)
}

#[test]
fn flipped_byte_is_reported_with_file_offset_and_both_values() {
    let _alone = alone();
    for (number, (mpi, built)) in installed().into_iter().enumerate() {
        let (place, tmpfs) = (Place::new(), Native::new("kernels"));
        // The comparison is the kernels' own, so a further MPI only shows that it passes on what a rank says.
        for (kernel, both, write, read, suffix, offset) in &FLIPS[..if number == 0 { FLIPS.len() } else { 1 }]
        {
            let (program, file) = (built.join(kernel), tmpfs.0.join(kernel));
            let file = file.to_str().unwrap();
            let first = format!("{both} {write}");
            let ran = plain(&place, mpi, 2, &words(&program, &first, file));
            assert_eq!(ran.code, Some(0), "{}, {kernel}: {ran:?}", mpi.name);
            let path = format!("{file}{suffix}");
            let (expected, found) = flip(Path::new(&path), *offset);
            let second = format!("{both} {read} --verify --keep --json");
            let ran = plain(&place, mpi, 2, &words(&program, &second, file));
            let report =
                format!("{path}: offset {offset}: expected 0x{expected:02x}, found 0x{found:02x} (1 of");
            assert!(
                ran.code == Some(3) && ran.err.contains(&report),
                "{}, {kernel}: {report}: {ran:?}",
                mpi.name
            );
            assert_eq!(ran.err.matches("expected 0x").count(), 1, "{}, {kernel}: {ran:?}", mpi.name);
            assert!(ran.out.contains("\"blocks_that_differ\": 1}"), "{}, {kernel}: {ran:?}", mpi.name);
        }
    }
}

/// NetCDF has no call for the place of an element in the file, so the offset is that in the variable. The variable
/// begins where two files of different contents begin to differ.
#[test]
fn flipped_byte_of_a_netcdf_variable_is_reported_with_its_element() {
    let _alone = alone();
    for (mpi, built) in installed() {
        let program = built.join("netcdf-bench");
        if !program.exists() {
            continue;
        }
        let (place, tmpfs) = (Place::new(), Native::new("kernels"));
        let contents = ["1", "2"].map(|seed| {
            let (file, options) =
                (tmpfs.0.join(seed), format!("--geometry 3:4:5:6 --part write --seed {seed}"));
            let ran = plain(&place, mpi, 2, &words(&program, &options, file.to_str().unwrap()));
            assert_eq!(ran.code, Some(0), "{}: {ran:?}", mpi.name);
            std::fs::read(file).unwrap()
        });
        let first = contents[0].iter().zip(&contents[1]).position(|(a, b)| a != b).unwrap() as u64;
        // Element 2:1:3:4, its sixth byte.
        let offset = (((2 * 4 + 1) * 5 + 3) * 6 + 4) * 8 + 5;
        let path = tmpfs.0.join("1");
        let (expected, found) = flip(&path, first + offset);
        let options = "--geometry 3:4:5:6 --part read --verify --keep";
        let ran = plain(&place, mpi, 2, &words(&program, options, path.to_str().unwrap()));
        let report = format!(
            "{}: variable data, element 2:1:3:4, offset {offset} of the variable: expected 0x{expected:02x}, \
             found 0x{found:02x}",
            path.display()
        );
        assert!(ran.code == Some(3) && ran.err.contains(&report), "{}: {report}: {ran:?}", mpi.name);
        let ran = plain(&place, mpi, 2, &words(&program, "--part read --keep", path.to_str().unwrap()));
        ran.assert_refused(1, &["has 3 for t, not 100", "--geometry"]);
    }
}

#[test]
fn make_says_that_netcdf_is_missing_and_builds_the_others() {
    let _alone = alone();
    for (mpi, _) in installed() {
        let (_, ran) = make(mpi, &["-s", "NETCDF_LIBS=-lnetcdf_of_nowhere"]);
        let said = format!("netcdf-bench is not built: no parallel NetCDF-4 for {}", mpi.compiler);
        assert!(ran.code == Some(0) && ran.out.contains(&said), "{ran:?}");
    }
}

/// In a pool too, where the byte is flipped by a program under the preload library.
#[test]
fn flipped_byte_of_a_file_in_a_pool_is_found() {
    let _alone = alone();
    for (mpi, built) in installed() {
        let place = Place::new();
        let run = format!(
            "{} 2 {}/hacc-io --particles 500 --api collective",
            mpi.launcher.join(" "),
            built.display()
        );
        let script = format!(
            "set -e; {run} --part checkpoint /forebay/file; \
             old=$(od -An -tx1 -j20000 -N1 /forebay/file | tr -d ' '); \
             [ $old = 5a ] && new=a5 || new=5a; \
             printf \"\\\\x$new\" >{0}/byte; dd if={0}/byte of=/forebay/file bs=1 seek=20000 conv=notrunc status=none; \
             echo \"offset 20000: expected 0x$old, found 0x$new\"; {run} --part restart --verify /forebay/file",
            place.path.display()
        );
        let mut command = place.command(["run", "--own", "--quiet", "--", "bash", "-c", &script]);
        let ran = Ran::of(command.output().unwrap());
        let report = ran.out.lines().find(|l| l.starts_with("offset")).unwrap_or("nothing was flipped");
        assert!(ran.code == Some(3) && ran.err.contains(report), "{}: {report}: {ran:?}", mpi.name);
        place.assert_nothing_left();
    }
}

#[test]
fn full_pool_ends_all_ranks_with_the_failed_write() {
    let _alone = alone();
    let Some((mpi, built)) = installed().into_iter().next() else { return };
    let place = Place::new();
    for api in ["posix", "collective"] {
        let program = built.join("hacc-io");
        let options = format!("--particles 1100000 --api {api}");
        let mut command = place.command(["run", "--own", "--quiet", "--capacity", "64MiB", "--"]);
        command.args(mpi.launcher).arg("2").args(words(&program, &options, "/forebay/file"));
        let ran = Ran::of(command.output().unwrap());
        ran.assert_refused(1, &["/forebay/file: write of ", " bytes at offset ", "make room, or write less"]);
        assert_eq!(ran.err.matches("hacc-io: ").count(), 1, "{ran:?}");
    }
    place.assert_nothing_left();
}

/// Options, and what the refusal says: the word, and what to write.
const REFUSED: &[(&str, &str, &[&str])] = &[
    ("hacc-io", "--partcles 5", &["no option --partcles", "did you mean --particles?"]),
    ("hacc-io", "--zzzzzzzz 5", &["no option --zzzzzzzz", "hacc-io --help"]),
    ("hacc-io", "-n 5", &["no option -n", "two dashes"]),
    ("hacc-io", "--particles 1KiB", &["--particles", "'1KiB'", "digits alone"]),
    ("hacc-io", "--particles 0", &["--particles: 0 is too little", "least is 1"]),
    ("hacc-io", "--particles", &["--particles lacks its value", "--particles N"]),
    ("hacc-io", "--api mpi", &["no 'mpi'", "posix|independent|collective"]),
    ("hacc-io", "--verify=yes", &["--verify has no value"]),
    ("hacc-io", "--hints cb_nodes", &["'cb_nodes' is no hint", "NAME=VALUE"]),
    ("hacc-io", "--layout variable --files rank", &["--layout variable", "leave out --files rank"]),
    ("hacc-io", "--verify --part checkpoint", &["--verify", "--part both"]),
    ("hacc-io", "more", &["'FILE' is too much", "'more'"]),
    ("io-modelling", "--size 4QiB", &["--size: '4QiB' is no size", "64KiB"]),
    ("io-modelling", "--size 2GiB", &["--size: 2GiB is too much", "1073741824"]),
    (
        "io-modelling",
        "--orders sequential,backwards",
        &["no 'backwards'", "sequential,random,strided,reverse"],
    ),
    ("io-modelling", "--orders random,random", &["'random' is there twice"]),
    ("io-modelling", "--direct --size 1000", &["--size: 1000", "multiple of 512"]),
    ("madbench2", "--phases CS", &["no 'CS'", "SW, WC or SWC"]),
    ("madbench2", "--busy-work much", &["'much' is no exponent", "1.5"]),
    ("madbench2", "--gangs 2", &["2 gangs need as many ranks", "write less"]),
    ("s3asim", "--least-size 8KiB", &["--least-size: 8192 is more than --most-size 4096"]),
    ("s3asim", "--part check", &["--part check", "--verify"]),
    ("s3asim", "--part database --verify", &["--verify needs a part that reads"]),
    ("netcdf-bench", "--geometry 1:2:3", &["'1:2:3' is no T:X:Y:Z", "100:16:64:4"]),
    ("netcdf-bench", "--unlimited", &["--unlimited needs --layout chunked --api collective"]),
    ("netcdf-bench", "--layout chunked --chunk 1:17:1:1", &["--chunk: 17 is more than the 16 of x"]),
];

#[test]
fn wrong_arguments_are_refused_with_the_word_and_a_remedy() {
    let _alone = alone();
    let built = installed();
    let place = Place::new();
    let alone = |kernel: &str, words: &[&str]| {
        let program = built.iter().map(|(_, built)| built.join(kernel)).find(|program| program.exists())?;
        let mut command = Command::new(program);
        command.args(words).current_dir(&place.path);
        place.dress(&mut command);
        Some(Ran::of(command.output().unwrap()))
    };
    for (kernel, options, said) in REFUSED {
        let mut all: Vec<&str> = options.split(' ').collect();
        if *options != "--particles" {
            all.push("FILE");
        }
        if let Some(ran) = alone(kernel, &all) {
            ran.assert_refused(2, said);
        }
    }
    for case in CASES {
        let Some(ran) = alone(case.kernel, &["--json"]) else { continue };
        ran.assert_refused(2, &["there is no FILE", case.kernel]);
        let ran = alone(case.kernel, &["--help"]).unwrap();
        let helps = ran.code == Some(0) && ran.out.contains("examples:\n  mpirun -n ");
        assert!(helps && ran.out.contains("--verify") && ran.out.contains("Exit status: 0;"), "{ran:?}");
    }
    // Ranks refuse together, and the message appears once.
    for (mpi, built) in &built {
        let ran = plain(&place, mpi, 3, &words(&built.join("hacc-io"), "--api none", "file"));
        ran.assert_refused(2, &["no 'none'"]);
        assert_eq!(ran.err.matches("no 'none'").count(), 1, "{ran:?}");
        let ran = plain(&place, mpi, 2, &words(&built.join("hacc-io"), "--api collective", "none/file"));
        ran.assert_refused(1, &["none/file cannot be opened", "its directory must exist"]);
    }
    assert_eq!(std::fs::read_dir(&place.path).unwrap().count(), 0, "a refused run made a file");
}

/// A read across the end of a file fails on one rank, and all ranks end.
#[test]
fn file_that_is_too_short_ends_all_ranks_with_the_failed_read() {
    let _alone = alone();
    let Some((mpi, built)) = installed().into_iter().next() else { return };
    let place = Place::new();
    let ran =
        plain(&place, mpi, 2, &words(&built.join("hacc-io"), "--part checkpoint --particles 10", "file"));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for api in ["posix", "independent", "collective"] {
        let options = format!("--part restart --particles 11 --api {api}");
        let ran = plain(&place, mpi, 2, &words(&built.join("hacc-io"), &options, "file"));
        ran.assert_refused(1, &["rank 1: file: read of", "the file ends before; read it with the options"]);
    }
}

/// The times of all calls go to a file on request, and the percentiles are those of its lines.
#[test]
fn percentiles_of_io_modelling_are_those_of_the_times_in_its_file() {
    let _alone = alone();
    let Some((mpi, built)) = installed().into_iter().next() else { return };
    let (place, tmpfs) = (Place::new(), Native::new("kernels"));
    let (program, file) = (built.join("io-modelling"), tmpfs.0.join("file"));
    let options = "--count 200 --size 512 --orders strided,random --stride 7 --json --times times.csv";
    let ran = plain(&place, mpi, 2, &words(&program, options, file.to_str().unwrap()));
    let ran: Value = serde_json::from_str(&result(mpi, &ran)).unwrap();
    let text = std::fs::read_to_string(place.join("times.csv")).unwrap();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("phase,rank,number,offset,start_seconds,seconds"));
    let rows: Vec<Vec<&str>> = lines.map(|l| l.split(',').collect()).collect();
    for phase in ran["phases"].as_array().unwrap() {
        let of_phase: Vec<_> = rows.iter().filter(|row| phase["name"] == row[0]).collect();
        let mut offsets: Vec<u64> = of_phase.iter().map(|row| row[3].parse().unwrap()).collect();
        if phase["name"] == "strided-write" {
            assert_eq!(offsets[..3], [0, 7 * 512, 14 * 512]);
        }
        offsets.sort_unstable();
        assert!(offsets.into_iter().eq((0..400).map(|i| i * 512)), "each block once: {}", phase["name"]);
        let mut times: Vec<f64> = of_phase.iter().map(|row| row[5].parse().unwrap()).collect();
        times.sort_unstable_by(f64::total_cmp);
        for (name, index) in
            [("min", 0), ("p50", 199), ("p95", 379), ("p99", 395), ("p99.9", 399), ("max", 399)]
        {
            assert_eq!(
                phase["call_seconds"][name].as_f64(),
                Some(times[index]),
                "{name} of {}",
                phase["name"]
            );
        }
        let counts = phase["calls_by_microseconds"].as_array().unwrap();
        assert_eq!(counts.iter().map(|c| c["calls"].as_u64().unwrap()).sum::<u64>(), 400);
    }
}
