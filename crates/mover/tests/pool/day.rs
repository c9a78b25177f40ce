//! A day in the life of a pool that is smaller than what is written into it, in front of a slow store.

use super::bed::Bed;

/// Forty checkpoints of 5 MB, as fast as the pool takes them, a log that is open throughout, and a second program that
/// reads old checkpoints back, in a pool of 96 MiB. No write fails, every byte is right when it is read back, and all
/// are in the store at the end.
#[test]
fn checkpoints_of_more_bytes_than_the_pool_has_all_reach_the_store_and_no_write_fails() {
    let bed = Bed::attached("96MiB", "?rate=40MB/s", "");
    std::fs::create_dir(bed.store().with_file_name("sums")).unwrap();
    bed.sh("set -o pipefail; cd /forebay/s; sums=$S/../sums
        reader() {
            for i in $(seq 1 3 30); do
                n=0
                until test -e $sums/$((i + 8)); do
                    n=$((n + 1)); test $n -lt 3000 || { echo no checkpoint $((i + 8)) >&2; exit 1; }
                    sleep 0.02
                done
                md5sum < c$i | cmp - $sums/$i
            done
        }
        exec 9>> log
        set -e; reader & reader=$!
        for i in $(seq 40); do
            head -c 5000000 /dev/urandom | tee c$i.part | md5sum > $sums/$i.part
            mv c$i.part c$i; mv $sums/$i.part $sums/$i
            echo checkpoint $i >&9
        done
        wait $reader
        exec 9>&-");
    bed.wait_drained();
    bed.sh("for i in $(seq 40); do md5sum < $S/c$i | cmp - $S/../sums/$i; done
        for i in $(seq 40); do echo checkpoint $i; done | cmp - $S/log; ls $S | wc -l | grep -qx 41");
}
