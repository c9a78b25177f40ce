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
