//! Movers, workers and programs that are killed while programs change files: whenever all has been drained, pool and
//! store are equal.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::bed::Bed;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Kills, unless FOREBAY_KILLS says otherwise.
fn rounds() -> u64 {
    number("FOREBAY_KILLS", if std::env::var_os("FOREBAY_SOAK").is_some() { 2000 } else { 50 })
}

/// Kills between two comparisons of pool and store.
const ROUNDS_A_PHASE: u64 = 25;

/// A program that changes files and directories, by a number as its seed.
const CHANGES: &str = include_str!("../changes.sh");

fn pids(bed: &Bed) -> (Option<u64>, Option<u64>) {
    let status = bed.status();
    (status["mover"]["pid"].as_u64(), status["pids"]["worker"].as_u64())
}

fn kill(pid: u64) {
    let _ = Command::new("kill").args(["-9", &pid.to_string()]).stderr(Stdio::null()).status();
}

/// Kills a process and all processes below it.
fn kill_below(pid: u32) {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    kill(u64::from(pid));
    children.split_whitespace().flat_map(str::parse).for_each(kill_below);
}

/// What differs between pool and store.
fn differences(bed: &Bed) -> String {
    let done = bed.run(
        "cd /forebay/s; find . -type d -printf '%P/ %m\n' -o -type f -printf '%P %m %s %T@\n' -o -printf '%P %l\n' | sort > $S/../a;
         cd $S; find . -type d -printf '%P/ %m\n' -o -type f -printf '%P %m %s %T@\n' -o -printf '%P %l\n' | sort > $S/../b;
         diff $S/../a $S/../b; diff -r --no-dereference /forebay/s $S",
    );
    String::from_utf8_lossy(&done.stdout).into_owned()
}

/// Numbers in an order that a seed decides.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % bound
    }
}

/// Two programs that change files, each in a session of its own so that it is killed with its children.
fn start(bed: &Bed, random: &mut Random) -> Child {
    let mut command = bed.command(&format!("cd /forebay/s; exec setsid -w bash -c '{CHANGES}'"));
    command.env("SEED", random.below(30_000).to_string()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

#[test]
fn killed_movers_workers_and_programs_leave_store_and_pool_equal() {
    let seed = number("FOREBAY_KILL_SEED", u64::from(std::process::id()));
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let bed = Bed::attached("256MiB", "", "");
    let pool = bed.pool().to_str().unwrap().to_owned();
    let stop = bed.store().join("../stop");
    let (mut done, rounds) = (0, rounds());
    while done < rounds {
        let mut programs: Vec<Child> = (0..2).map(|_| start(&bed, &mut random)).collect();
        for _ in 0..ROUNDS_A_PHASE.min(rounds - done) {
            std::thread::sleep(Duration::from_millis(50 + random.below(600)));
            let (mover, worker) = pids(&bed);
            let kind = random.below(8);
            if kind < 5 {
                mover.into_iter().for_each(kill);
            }
            if kind == 4 {
                std::thread::sleep(Duration::from_millis(random.below(4)));
            }
            if kind == 4 || kind == 5 || kind == 6 {
                worker.into_iter().for_each(kill);
            }
            if kind == 7 {
                let which = random.below(2) as usize;
                kill_below(programs[which].id());
                let _ = programs[which].wait();
                programs[which] = start(&bed, &mut random);
            }
            if random.below(3) == 0 {
                bed.forebay(&["--pool", &pool, "release", "-r", "--no-wait", "/s"]);
            }
            done += 1;
        }
        std::fs::write(&stop, "").unwrap();
        for program in &mut programs {
            program.wait().unwrap();
        }
        std::fs::remove_file(&stop).unwrap();
        bed.wait_drained();
        assert_eq!(differences(&bed), "", "seed {seed}, after {done} kills\n{}", bed.log());
    }
    let check = bed.forebay(&["--pool", &pool, "fsck"]);
    assert!(check.status.success(), "seed {seed}: {}", crate::bed::text(&check));
}
