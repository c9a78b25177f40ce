//! Conflicts are settled again and again, beside files of the names that would be used, and where the pool has a
//! directory.

use super::bed::{text, Bed};
use super::foreign::{meet, wait_conflicts};

/// The mover, which will be stopped, is not needed for names after that.
const LISTED: &str = "ls -R /forebay/s > $S/../listed";

fn resolve(bed: &Bed, path: &str, keep: &str) {
    let done = bed.pool_verb(&["resolve", path, "--keep", keep]);
    assert!(done.status.success(), "{}\nlog: {}", text(&done), bed.log());
}

/// A file that pool and store have both changed.
fn conflict(bed: &Bed, name: &str, mine: &str, theirs: &str) {
    bed.sh(&format!("cat /forebay/s/{name} > $S/../read"));
    meet(bed, &format!("printf {mine} > {name}"), &format!("printf {theirs} > {name}"));
    wait_conflicts(bed, 1);
}

#[test]
fn both_versions_are_kept_whatever_has_their_names_already() {
    let bed = Bed::attached("128MiB", "", "");
    let long = "n".repeat(255);
    // The pool's version of the second name would have the name of that of the first.
    let like_it = format!("{}m", "n".repeat(254));
    bed.sh(&format!(
        "cd /forebay/s; echo a > a; echo mine > a.from-pool; echo 1 > {long}; echo 2 > {like_it}"
    ));
    bed.wait_drained();
    bed.sh(LISTED);
    for round in 1..=2 {
        conflict(&bed, "a", &format!("pool{round}"), &format!("the-store-{round}"));
        resolve(&bed, "/s/a", "both");
        bed.wait_drained();
    }
    let shown = bed.sh("cd /forebay/s; for f in a a.from-pool*; do echo $f: $(cat $f); done");
    let expected = "a: the-store-2\na.from-pool: mine\na.from-pool-2: pool1\na.from-pool-3: pool2\n";
    assert_eq!(shown, expected, "{}", bed.log());
    for (name, mine) in [(&long, "first"), (&like_it, "second")] {
        conflict(&bed, name, mine, "the-store");
        resolve(&bed, &format!("/s/{name}"), "both");
        bed.wait_drained();
    }
    let all = bed.sh("cd /forebay/s; for f in n*from-pool*; do echo $(cat $f); done | sort");
    assert_eq!(all, "first\nsecond\n", "{}", bed.log());
    let stored: Vec<_> = bed.stored().into_iter().filter(|(name, _)| name.contains("from-pool")).collect();
    assert_eq!(stored.len(), 5, "{stored:?}");
}

#[test]
fn directory_in_the_place_of_a_file_of_the_store_is_not_removed() {
    let bed = Bed::attached("128MiB", "", "");
    bed.sh("cd /forebay/s; echo x > x");
    bed.wait_drained();
    bed.sh(LISTED);
    meet(&bed, "mkdir d; echo inside > d/file", "echo theirs > d");
    wait_conflicts(&bed, 1);
    let refused = bed.pool_verb(&["resolve", "/s/d", "--keep", "store"]);
    assert!(!refused.status.success());
    let said = text(&refused);
    assert!(said.contains("it is a directory in the pool") && said.contains("another name"), "{said}");
    bed.sh("mv /forebay/s/d /forebay/s/e");
    resolve(&bed, "/s/d", "store");
    bed.wait_drained();
    assert_eq!(bed.sh("cat /forebay/s/d /forebay/s/e/file"), "theirs\ninside\n");
    assert!(bed.stored().contains(&("e/file".into(), b"inside\n".to_vec())), "{:?}", bed.stored());
}
