//! The automatic choice between two-phase and independent collective MPI-IO, as the debug line shows it: by the rule that
//! holds without a calibration, and by the one that ranks of several nodes make. The data must be the same either way.

use crate::launch::{built, Mpi, MPIS};
use crate::nodes::{said, Cluster};

/// A case: `record` bytes a record, `count` records a rank, and the expected choice for a write and for a read.
struct Case {
    record: u32,
    count: u32,
    /// Environment variables of the program, for hints and for the position of records.
    set: &'static str,
    write: &'static str,
    read: &'static str,
}

const TOGETHER: &str = "two-phase (hint: automatic; ";
const ALONE: &str = "independent (hint: automatic; ";

/// Cases with data on other nodes.
const FAR: [Case; 8] = [
    Case { record: 64, count: 16384, set: "", write: TOGETHER, read: TOGETHER },
    // Few data a rank: a read that includes the gaps is faster than an agreement of the ranks.
    Case { record: 64, count: 100, set: "", write: TOGETHER, read: ALONE },
    Case { record: 32768, count: 32, set: "", write: TOGETHER, read: TOGETHER },
    Case { record: 65536, count: 16, set: "", write: ALONE, read: ALONE },
    Case { record: 64, count: 4, set: "", write: ALONE, read: ALONE },
    // Gaps as long as one round of records of all ranks, and fifteen times as long.
    Case { record: 1024, count: 1024, set: "RECORDS_SPREAD=2", write: TOGETHER, read: TOGETHER },
    Case { record: 1024, count: 1024, set: "RECORDS_SPREAD=16", write: ALONE, read: ALONE },
    Case {
        record: 64,
        count: 1000,
        set: "RECORDS_HINTS='romio_cb_write=disable romio_cb_read=disable'",
        write: "independent (hint: disable; ",
        read: "independent (hint: disable; ",
    },
];

/// Cases with data on the ranks' own node.
const HERE: [Case; 2] = [
    Case { record: 64, count: 16384, set: "", write: ALONE, read: ALONE },
    Case {
        record: 64,
        count: 1000,
        set: "RECORDS_HINTS='romio_cb_write=enable romio_cb_read=enable'",
        write: "two-phase (hint: enable; ",
        read: "two-phase (hint: enable; ",
    },
];

/// The last rank has no data, and a view of bytes: the choice ignores it.
const IDLE: Case = Case { record: 64, count: 16384, set: "RECORDS_IDLE=1", write: TOGETHER, read: TOGETHER };

fn holds(c: &Cluster, mpi: &Mpi, program: &str, at: &[usize], file: &str, lies: &str, cases: &[Case]) {
    for case in cases {
        // The program also makes calls with wrong arguments on one rank. Their results depend on the choice, so it gets
        // the expected choices as arguments.
        let of = |way: &str| if way.starts_with("two-phase") { "together" } else { "alone" };
        let line = format!(
            "env FOREBAY_MPI_DEBUG=1 FOREBAY_MODEL=off {} {program} {file} {} {} {} {}",
            case.set,
            case.record,
            case.count,
            of(case.write),
            of(case.read)
        );
        let ran = c.by_ranks(mpi, at, &line);
        let text = said(&ran);
        assert!(ran.status.success() && text.contains("passed"), "{}, {line}: {text}", mpi.name);
        for (kind, way) in [("write", case.write), ("read", case.read)] {
            let told = format!("collective {kind} is {way}in runs of {} bytes; data on {lies};", case.record);
            assert!(text.contains(&told), "{}, {line}: {told}: {text}", mpi.name);
        }
    }
}

#[test]
fn collective_calls_go_through_aggregators_where_data_is_on_other_nodes_and_runs_are_short() {
    let c = Cluster::up("collective", 4);
    for (node, name) in [(1, "one"), (2, "two")] {
        c.tell(node, &format!("mkdir /forebay/{name}; touch /forebay/{name}/file"));
        assert_eq!(c.lies_on(&format!("/{name}/file")), format!("n{node}"));
    }
    c.tell(1, "mkdir /forebay/striped");
    let set = c.layout(1, &["set", "-c", "4", "-S", "64KiB", "/striped"]);
    assert!(set.status.success(), "{}", said(&set));
    for mpi in MPIS.iter().filter(|mpi| mpi.is_here()) {
        let words = ["-Wall", "-Wextra", "-Werror"];
        let program = built(&c, mpi.compiler, "records", &words).expect("it builds");
        let program = program.to_str().unwrap();
        // All ranks on one node, the file on another or on theirs.
        holds(&c, mpi, program, &[1, 1], "/forebay/two/file", "nodes without ranks", &FAR);
        holds(&c, mpi, program, &[1, 1], "/forebay/one/file", "this node", &HERE);
        holds(&c, mpi, program, &[1, 1, 1], "/forebay/two/file", "nodes without ranks", &[IDLE]);
        // One of the ranks is on the file's node.
        holds(&c, mpi, program, &[1, 2], "/forebay/one/file", "other nodes", &FAR[..1]);
        // A file over all nodes, which the open creates.
        holds(&c, mpi, program, &[1, 2, 3, 4], "/forebay/striped/file", "other nodes", &FAR[..2]);
        c.tell(1, "rm /forebay/striped/file");
    }
    c.check();
}

/// Windows of 4 KiB to 1 MiB: while one is moved, the ranks exchange the next one.
#[test]
fn two_phase_calls_move_pieces_of_all_lengths_to_and_from_other_nodes() {
    let c = Cluster::up("pieces", 4);
    c.tell(1, "mkdir /forebay/striped");
    c.tell(2, "mkdir /forebay/two");
    let set = c.layout(1, &["set", "-c", "4", "-S", "64KiB", "/striped"]);
    assert!(set.status.success(), "{}", said(&set));
    for mpi in MPIS.iter().filter(|mpi| mpi.is_here()) {
        let words = ["-Wall", "-Wextra", "-Werror"];
        let program = built(&c, mpi.compiler, "exchange", &words).expect("it builds");
        for (at, file, makes) in
            [(&[1, 1][..], "/forebay/two/file", Some(2)), (&[1, 2, 3, 4], "/forebay/striped/file", None)]
        {
            if let Some(node) = makes {
                c.tell(node, &format!("touch {file}"));
            }
            let line = format!("env FOREBAY_MPI_DEBUG=1 {} {file} 1 10", program.display());
            let ran = c.by_ranks(mpi, at, &line);
            let text = said(&ran);
            assert!(ran.status.success() && text.contains("passed"), "{}, {at:?}: {text}", mpi.name);
            assert!(text.contains("is two-phase (hint: enable;"), "{}, {at:?}: {text}", mpi.name);
            assert!(!text.contains("data on this node;"), "{}, {at:?}: {text}", mpi.name);
        }
    }
    c.check();
}

#[test]
fn ranks_of_several_nodes_measure_once_and_choose_by_the_model() {
    let c = Cluster::up("quick", 2);
    c.tell(1, "mkdir /forebay/striped");
    let set = c.layout(1, &["set", "-c", "2", "-S", "64KiB", "/striped"]);
    assert!(set.status.success(), "{}", said(&set));
    for mpi in MPIS.iter().filter(|mpi| mpi.is_here()) {
        let words = ["-Wall", "-Wextra", "-Werror", "-rdynamic", "-ldl"];
        let program = built(&c, mpi.compiler, "choice", &words).expect("it builds");
        for set in ["", "CHOICE_SLOW=1", "CHOICE_LIAR=1"] {
            let line = format!("env FOREBAY_MPI_DEBUG=1 {set} {} /forebay/striped/file", program.display());
            let ran = c.by_ranks(mpi, &[1, 2, 2], &line);
            let text = said(&ran);
            assert!(ran.status.success() && text.contains("passed"), "{}, {set}: {text}", mpi.name);
            assert_eq!(
                text.matches("measured for the choice: a message ").count(),
                1,
                "{}: {text}",
                mpi.name
            );
            // Where no exchange can pay, ranks do not even exchange their patterns.
            let is_exchanged = text.contains("the model predicts ");
            assert!(
                is_exchanged || text.contains("the model says that no exchange pays"),
                "{}: {text}",
                mpi.name
            );
            assert_eq!(text.contains(" us each, measured "), is_exchanged, "{}: {text}", mpi.name);
            // Of two-phase calls, and of no others, the part in the file is reported.
            for line in text.lines().filter(|line| line.contains(" us each, measured ")) {
                let is_two_phase = line.contains("were two-phase");
                assert_eq!(line.ends_with(" in the file"), is_two_phase, "{}: {line}", mpi.name);
            }
        }
        c.tell(1, "rm /forebay/striped/file");
    }
    c.check();
}

#[test]
fn rank_that_is_killed_on_one_of_four_nodes_takes_nothing_along_that_was_written() {
    let c = Cluster::up("rank-killed", 4);
    c.tell(1, "mkdir /forebay/striped");
    let set = c.layout(1, &["set", "-c", "4", "-S", "4KiB", "/striped"]);
    assert!(set.status.success(), "{}", said(&set));
    for mpi in MPIS.iter().filter(|mpi| mpi.is_here()) {
        let program = built(&c, mpi.compiler, "dies", &["-Wall", "-Wextra", "-Werror"]).expect("it builds");
        let ran = c.by_ranks(mpi, &[1, 2, 3, 4], &format!("{} /forebay/striped/file", program.display()));
        assert!(!ran.status.success() && !said(&ran).contains("dies.c"), "{}: {}", mpi.name, said(&ran));
        let (pool, out) = (c.pool(2), c.file().with_file_name(format!("out-{}", mpi.name)));
        let pair = format!("/striped/file:{}", out.display());
        let staged = c.forebay(2, &["--pool", pool.to_str().unwrap(), "stage-out", &pair]);
        assert!(staged.status.success(), "{}", said(&staged));
        let expected: Vec<u8> = (1..=4u8).flat_map(|i| vec![i; 100_000]).collect();
        assert!(std::fs::read(&out).unwrap() == expected, "{}", mpi.name);
        // Other ranks can use the file and its lock.
        let records = built(&c, mpi.compiler, "records", &[]).expect("it builds");
        let line = format!("{} /forebay/striped/file 100 1000", records.display());
        let again = c.by_ranks(mpi, &[4, 3, 2, 1], &line);
        assert!(again.status.success() && said(&again).contains("passed"), "{}: {}", mpi.name, said(&again));
        c.tell(3, "rm /forebay/striped/file");
    }
    c.check();
}
