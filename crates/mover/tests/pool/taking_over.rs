//! Movers are killed while they take over versions that another program wrote in the store: whenever one has ended its
//! work, the pool shows of each file what the store has.

use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::bed::{entry, Bed, TIMEOUT};
use crate::killing::kill;

const FILES: u32 = 400;
const KILLS: u32 = 8;

/// Names, sizes and times in a directory.
fn listed(bed: &Bed, directory: &str) -> String {
    bed.sh(&format!("cd {directory}; stat -c '%n %s %.Y' [0-9]*"))
}

#[test]
fn mover_that_is_killed_while_it_takes_over_versions_leaves_no_file_with_the_size_of_an_older_one() {
    let bed = Bed::attached("256MiB", "", "");
    bed.sh(&format!("cd /forebay/s; for i in $(seq {FILES}); do echo $i > $i; done"));
    bed.wait_drained();
    assert!(bed.pool_verb(&["release", "-r", "/s"]).status.success());
    let pool = bed.attach_client();
    let size = |name: &str| entry(pool, &format!("s/{name}")).map_or(0, |entry| entry.attr.size);
    for round in 1..=KILLS {
        let bytes = u64::from(round) + 10;
        bed.sh(&format!("cd $S; for f in *; do printf %0{bytes}d $f > $f; done"));
        let mover = bed.status()["mover"]["pid"].as_u64();
        let mut refresh = bed.command("exec $FOREBAY refresh -r /s");
        refresh.env("FOREBAY", bed.program()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut refresh = refresh.spawn().unwrap();
        // It has begun, and is killed soon.
        let begun = Instant::now();
        while (1..=FILES).all(|i| size(&i.to_string()) != bytes) && refresh.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < TIMEOUT, "{}", bed.log());
        }
        std::thread::sleep(Duration::from_micros(u64::from(round % 4) * 700));
        mover.into_iter().for_each(kill);
        refresh.wait().unwrap();
        bed.wait("the store is read again", || bed.pool_verb(&["refresh", "-r", "/s"]).status.success());
        assert_eq!(listed(&bed, "/forebay/s"), listed(&bed, "$S"), "round {round}\n{}", bed.log());
    }
    bed.sh("cd /forebay/s; for f in [0-9]*; do cmp $f $S/$f; done");
    assert_eq!(listed(&bed, "/forebay/s"), listed(&bed, "$S"), "{}", bed.log());
}
