//! `forebay model`: a calibration of a directory and of a pool, what is predicted and advised from it, and what is refused.

mod common;

use std::path::Path;

use common::mpi::{alone, driver, source, MPIS};
use common::{Place, Ran};
use forebay_model::{Calibration, Document};
use serde_json::Value;

fn run(place: &Place, words: &[&str]) -> Ran {
    Ran::of(place.command(words).output().unwrap())
}

fn json(ran: &Ran) -> Value {
    assert_eq!(ran.code, Some(0), "{ran:?}");
    serde_json::from_str(&ran.out).unwrap_or_else(|e| panic!("{e}: {ran:?}"))
}

/// A document with the default values.
fn guessed(place: &Place) -> String {
    let path = place.join("guessed.toml");
    let made = Document {
        made_s: 1_800_000_000,
        host: "test".into(),
        medium: "none".into(),
        messages: "none".into(),
        busy_percent: 0,
        calibration: Calibration::default(),
    };
    std::fs::write(&path, made.text()).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn directory_is_calibrated_and_the_document_is_what_predict_reads() {
    let place = Place::new();
    let file = place.join("c.toml");
    let file = file.to_str().unwrap();
    let dir = place.path.to_str().unwrap().to_owned();
    let ran = run(&place, &["model", "calibrate", "--quick", "--medium", &dir, "--output", file, "--json"]);
    let found = json(&ran);
    let document = Document::parse(&std::fs::read_to_string(file).unwrap()).unwrap();
    assert!(
        document.medium.starts_with(&dir) && document.messages.contains("no MPI was given"),
        "{document:?}"
    );
    for (name, value) in Calibration::NAMES.iter().zip(document.calibration.values()) {
        assert_eq!(found["values"][name]["value"], value.value, "{name}");
    }
    // What was measured is not the guess.
    let guess = Calibration::default();
    assert_ne!(document.calibration.write_sequential_byte_ps, guess.write_sequential_byte_ps);
    assert_ne!(document.calibration.read_run_ns, guess.read_run_ns);
    assert_ne!(document.calibration.local_message_ns, guess.local_message_ns);
    assert_ne!(document.calibration.copy_byte_ps, guess.copy_byte_ps);
    let predicted =
        json(&run(&place, &["model", "predict", "--calibration", file, "--ranks", "4", "--json"]));
    assert!(predicted["independent"]["ns"].as_u64().unwrap() > 0, "{predicted}");
    assert_eq!(predicted["calibration"]["medium"], document.medium.as_str());
    let left: Vec<_> = std::fs::read_dir(&place.path).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().contains("forebay-model")), "{left:?}");
}

#[test]
fn calibration_of_a_pool_is_stored_with_it_and_goes_with_it() {
    let place = Place::new();
    let pool = place.join("pool");
    let pool = pool.to_str().unwrap();
    let of = |words: &[&str]| run(&place, &[&["--pool", pool], words].concat());
    assert_eq!(of(&["up", "--capacity", "256MiB"]).code, Some(0));
    let none = of(&["model", "predict"]);
    assert!(none.code == Some(1) && none.err.contains("forebay model calibrate"), "{none:?}");
    let text = of(&["model", "calibrate", "--quick"]);
    assert!(text.code == Some(0) && text.out.contains("the pool (pool)"), "{text:?}");
    assert!(Path::new(pool).join("model.toml").is_file());
    let listed = of(&["ls", "-a", "/"]);
    assert!(
        listed.code == Some(0) && listed.out.trim().is_empty(),
        "nothing is left in the pool: {listed:?}"
    );
    let advised = json(&of(&["model", "advise", "--ranks", "4", "--bytes", "4MiB", "--json"]));
    assert_eq!(advised["choice"], "independent", "one long run of each rank: {advised}");
    assert_eq!(advised["hints"]["romio_cb_write"], "disable");
    assert_eq!(of(&["down"]).code, Some(0));
    assert!(!Path::new(pool).join("model.toml").exists());
    place.assert_nothing_left();
}

#[test]
fn messages_are_measured_by_ranks_where_a_command_is_given() {
    let _alone = alone();
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let place = Place::new();
        let kernels = place.join("kernels");
        let mut make = std::process::Command::new("make");
        make.arg("-s").arg("-C").arg(source("../kernels")).arg(format!("OUT={}", kernels.display()));
        let program = kernels.join("ping-pong");
        assert!(make.arg(format!("CC={}", mpi.compiler)).arg(&program).status().unwrap().success());
        let launcher = format!("{} 2 {}", mpi.launcher.join(" "), program.display());
        let (dir, file) = (place.path.to_str().unwrap(), place.join("c.toml"));
        let file = file.to_str().unwrap();
        let words = ["model", "calibrate", "--quick", "--medium", dir, "--output", file, "--mpi", &launcher];
        let ran = run(&place, &words);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        let document = Document::parse(&std::fs::read_to_string(file).unwrap()).unwrap();
        assert!(document.messages.contains("ping-pong"), "{document:?}");
        let guess = Calibration::default();
        assert_ne!(document.calibration.local_message_ns, guess.local_message_ns);
        // Both ranks are on this node, so the other values remain guesses.
        assert_eq!(document.calibration.message_ns.value, guess.message_ns.value);
    }
}

#[test]
fn patterns_and_options_of_ior_are_predicted_and_hints_can_be_pasted() {
    let place = Place::new();
    let file = guessed(&place);
    let of = |words: &[&str]| run(&place, &[words, &["--calibration", &file]].concat());
    let short = ["--ranks", "8", "--nodes", "4", "--bytes", "4MiB", "--run", "64", "--interleaved", "--far"];
    let predicted = json(&of(&[&["model", "predict", "--json"][..], &short].concat()));
    assert_eq!(predicted["choice"], "collective", "{predicted}");
    assert_eq!(predicted["pattern"]["gap_bytes"], 7 * 64);
    let (c, i) = (&predicted["collective"], &predicted["independent"]);
    assert!(c["low_ns"].as_u64() <= c["ns"].as_u64() && c["ns"].as_u64() < i["ns"].as_u64(), "{predicted}");
    // The paper's model has no requests to other nodes.
    let base = json(&of(&[&["model", "predict", "--json", "--without", "all"][..], &short].concat()));
    assert!(base["independent"]["ns"].as_u64() < i["ns"].as_u64(), "{base}");
    let advised = of(&[&["model", "advise"][..], &short].concat());
    assert!(advised.out.contains("romio_cb_write=enable;cb_nodes="), "{advised:?}");
    let ior =
        json(&of(&["model", "predict", "--ranks", "4", "--ior", "-a MPIIO -b 16m -t 64k -s 4 -c", "--json"]));
    assert_eq!((&ior["pattern"]["calls"], &ior["pattern"]["bytes"]), (&1024.into(), &65536.into()), "{ior}");
}

#[test]
fn what_makes_no_sense_is_refused_with_what_to_write() {
    let place = Place::new();
    let file = guessed(&place);
    let bad = place.join("bad.toml");
    std::fs::write(&bad, "version = 7\n").unwrap();
    let bad = bad.to_str().unwrap();
    let output = place.join("x.toml");
    let output = output.to_str().unwrap();
    for (words, said) in [
        (&["model", "predict", "--calibration", bad][..], "version 7"),
        (&["model", "predict", "--calibration", "/nowhere/c.toml"], "--calibration FILE"),
        (&["model", "predict", "--calibration", &file, "--ranks", "0"], "ranks is 0"),
        (
            &["model", "predict", "--calibration", &file, "--ranks", "2", "--nodes", "3"],
            "3 nodes for 2 ranks",
        ),
        (&["model", "predict", "--calibration", &file, "--aggregators", "9"], "9 aggregators"),
        (&["model", "predict", "--calibration", &file, "--without", "speed"], "known are runs"),
        (&["model", "predict", "--calibration", &file, "--ior", "-b 10k -t 4k"], "not a multiple"),
        (&["model", "advise", "--calibration", &file, "--stripes", "0"], "--stripes"),
        (&["model", "calibrate", "--medium", "/nowhere", "--output", output], "/nowhere"),
        (
            &["model", "calibrate", "--quick", "--medium", "/tmp", "--output", output, "--mpi", "false"],
            "ping-pong",
        ),
    ] {
        let ran = run(&place, words);
        assert!(ran.code == Some(1) && ran.err.contains(said), "{words:?}: {ran:?}");
    }
    assert!(!Path::new(output).exists());
}
