//! Several changes in one pass of the mover, each of which changes in the store what a later one begins from: no such change
//! is taken for one of another program.

use super::bed::Bed;
use super::foreign::meet;

/// Scripts on the files `a`, `b` and `c` and the directory `d`, all of which the store has.
const SCRIPTS: [&str; 8] = [
    "mv b a; ln -s nowhere b",
    "mv b a; mkfifo b",
    "mv b a; mkdir b",
    "mv b a; mv c b; ln -s nowhere c",
    "mv b a; mv d b; ln -s nowhere d",
    "mv a t; mv b a; mv t b; ln -s nowhere t",
    "ln c d/c; mv b a; mv c b; ln -s nowhere c",
    "mv a d/a; mv b a; ln -s nowhere b; mv d b.d; ln -s nowhere d",
];

#[test]
fn places_that_other_places_take_from_get_what_the_pool_has_there_without_a_conflict() {
    for script in SCRIPTS {
        let bed = Bed::attached("256MiB", "", "");
        bed.sh("cd /forebay/s; mkdir d; for f in a b c d/e; do echo $f > $f; done");
        bed.wait_drained();
        bed.sh("ls -R /forebay/s > $S/../listed");
        meet(&bed, script, "true");
        bed.wait_drained();
        assert_eq!(bed.sums()["conflicts"], 0, "{script}: {}", bed.log());
        let tree = "find . ! -name '*.tmp' ! -name '*.uploads' -printf '%p %y %l\n' | sort; cat $(find . -type f | sort)";
        let (there, here) = (bed.sh(&format!("cd $S; {tree}")), bed.sh(&format!("cd /forebay/s; {tree}")));
        assert_eq!(there, here, "{script}: {}", bed.log());
    }
}

/// A pass has put a copy aside, and uploads its file under another name. Before the next pass removes the copy, the upload
/// has to be put aside too.
#[test]
fn copy_that_is_put_aside_while_an_earlier_one_of_the_file_still_is_makes_no_conflict() {
    let bed = Bed::attached("256MiB", "", "");
    bed.sh("cd /forebay/s; for f in a aa b c; do echo $f > $f; done");
    bed.wait_drained();
    bed.sh("ls -R /forebay/s > $S/../listed");
    meet(&bed, "echo more >> a; mv a aa; mv b a", "true");
    let uploaded = || std::fs::read(bed.store().join("aa")).is_ok_and(|bytes| bytes == b"a\nmore\n");
    while !uploaded() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    meet(&bed, "mv aa ab; mv c aa", "true");
    bed.wait_drained();
    assert_eq!(bed.sums()["conflicts"], 0, "{}", bed.log());
    assert_eq!(bed.sh("cd $S; ls; cat a aa ab"), "a\naa\nab\nb\nc\na\nmore\n", "{}", bed.log());
}
