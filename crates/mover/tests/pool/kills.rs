//! Movers, workers, supervisors, mounts and programs that are killed while programs change files: whenever all has been
//! drained, pool and store are equal, and nothing is lost that a program was told to be done.
//!
//! `FOREBAY_KILLS=2000` kills so often; `FOREBAY_KILL_SEED=7` chooses what is killed.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::bed::{text, Bed};
use crate::killing::{kill, kill_below};

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Kills, unless FOREBAY_KILLS says otherwise.
fn rounds() -> u64 {
    number("FOREBAY_KILLS", if std::env::var_os("FOREBAY_SOAK").is_some() { 2000 } else { 50 })
}

/// Kills between two comparisons of pool and store.
const ROUNDS_A_PHASE: u64 = 25;

const CAPACITY: &str = "256MiB";

/// A program that changes files and directories, by a number as its seed.
const CHANGES: &str = include_str!("../changes.sh");

/// A program that replaces files by new versions, and notes outside the pool what was done. `$W` is its directory.
const WITNESS: &str = "n=$(cat $S/../$W.n 2>/dev/null || echo 0); until test -e $S/../stop; do
    mkdir -p $W; n=$((n + 1)); echo $n > $S/../$W.n; f=$W/f$((n % 5))
    printf $n > $f.new && mv -f $f.new $f && echo $f $n >> $S/../acknowledged
    test $((n % 7)) = 0 && cat $W/* >/dev/null; done 2>/dev/null; true";

fn pids(bed: &Bed) -> [Option<u64>; 4] {
    let status = bed.status();
    let (mount, pids) = (&status["mounts"][0], &status["pids"]);
    [&status["mover"]["pid"], &pids["worker"], &pids["supervisor"], &mount["pid"]].map(|pid| pid.as_u64())
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

/// The files of the witnesses that have an older version than the last that was acknowledged.
fn lost(bed: &Bed) -> Vec<String> {
    let acknowledged = std::fs::read_to_string(bed.store().join("../acknowledged")).unwrap_or_default();
    let last: std::collections::BTreeMap<&str, u64> = acknowledged
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(name, n)| Some((name, n.parse().ok()?)))
        .collect();
    let mut lost = Vec::new();
    for (name, n) in last {
        let found = std::fs::read_to_string(bed.store().join(name)).unwrap_or_default();
        if found.parse::<u64>().is_ok_and(|found| found >= n) {
            continue;
        }
        lost.push(format!("{name}: {n} was acknowledged, the store has {found:?}"));
    }
    lost
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

/// Which program, and the door through which it uses the pool.
#[derive(Clone, Copy)]
struct Kind {
    is_witness: bool,
    /// Through the mount; else through the preload library.
    by_mount: bool,
}

const KINDS: [Kind; 5] = [
    Kind { is_witness: false, by_mount: false },
    Kind { is_witness: false, by_mount: false },
    Kind { is_witness: true, by_mount: false },
    Kind { is_witness: false, by_mount: true },
    Kind { is_witness: true, by_mount: true },
];

/// Starts a program in a session of its own, so that it is killed with its children.
fn start(bed: &Bed, kind: Kind, random: &mut Random) -> Child {
    let script = if kind.is_witness { WITNESS } else { CHANGES };
    let mut command = match kind.by_mount {
        false => bed.command(&format!("cd /forebay/s; exec setsid -w bash -c '{script}'")),
        true => {
            let at = bed.mountpoint().join("s");
            let mut command = Command::new("setsid");
            // The mount may be on its way.
            let enter = format!("until cd {} || test -e $S/../stop; do sleep 0.1; done", at.display());
            command.args([
                "-w",
                "bash",
                "-c",
                &format!("{enter} 2>/dev/null; cd {} && {{ {script}; }}", at.display()),
            ]);
            command.env("S", bed.store());
            command
        }
    };
    command.env("SEED", random.below(30_000).to_string());
    command.env("W", if kind.by_mount { "w-mount" } else { "w" });
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

struct Programs(Vec<(Kind, Child)>);

impl Programs {
    fn start(bed: &Bed, random: &mut Random, has_mount: bool) -> Programs {
        let kinds = KINDS.into_iter().filter(|kind| has_mount || !kind.by_mount);
        Programs(kinds.map(|kind| (kind, start(bed, kind, random))).collect())
    }

    /// Kills those that `which` chooses, and starts them again after `then`.
    fn replace(
        &mut self,
        bed: &Bed,
        random: &mut Random,
        which: impl Fn(usize, Kind) -> bool,
        then: impl FnOnce(),
    ) {
        let chosen: Vec<usize> = (0..self.0.len()).filter(|i| which(*i, self.0[*i].0)).collect();
        for i in &chosen {
            kill_below(self.0[*i].1.id());
            let _ = self.0[*i].1.wait();
        }
        then();
        for i in chosen {
            self.0[i].1 = start(bed, self.0[i].0, random);
        }
    }
}

/// Starts a pool again whose supervisor was killed.
fn up_again(bed: &Bed, has_mount: bool) {
    bed.wait("the pool is up again", || bed.up(CAPACITY).status.success());
    if has_mount {
        bed.wait("the pool is mounted again", || bed.mount().status.success());
    }
}

#[test]
fn killed_movers_workers_and_programs_leave_store_and_pool_equal() {
    let seed = number("FOREBAY_KILL_SEED", u64::from(std::process::id()));
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let bed = Bed::attached(CAPACITY, "", "");
    let mounted = bed.mount();
    let has_mount = mounted.status.success();
    if !has_mount {
        println!("without a mount: {}", text(&mounted));
    }
    let pool = bed.pool().to_str().unwrap().to_owned();
    let stop = bed.store().join("../stop");
    let (mut done, rounds, mut kills) = (0, rounds(), [0; 5]);
    while done < rounds {
        let mut programs = Programs::start(&bed, &mut random, has_mount);
        for _ in 0..ROUNDS_A_PHASE.min(rounds - done) {
            std::thread::sleep(Duration::from_millis(50 + random.below(600)));
            let [mover, worker, supervisor, mount] = pids(&bed);
            let kind = random.below(20);
            if kind < 9 {
                kills[0] += u32::from(mover.is_some());
                mover.into_iter().for_each(kill);
            }
            if kind == 8 {
                std::thread::sleep(Duration::from_millis(random.below(4)));
            }
            if (8..13).contains(&kind) {
                kills[1] += u32::from(worker.is_some());
                worker.into_iter().for_each(kill);
            }
            match (kind, supervisor, mount) {
                (13..=15, ..) => {
                    kills[2] += 1;
                    let chosen = random.below(programs.0.len() as u64) as usize;
                    programs.replace(&bed, &mut random, |i, _| i == chosen, || {});
                }
                (16..=18, _, Some(mount)) => {
                    kills[3] += 1;
                    kill(mount);
                    programs.replace(&bed, &mut random, |_, kind| kind.by_mount, || {});
                }
                (19, Some(supervisor), _) => {
                    kills[4] += 1;
                    kill(supervisor);
                    programs.replace(&bed, &mut random, |_, _| true, || up_again(&bed, has_mount));
                }
                _ => {}
            }
            if random.below(3) == 0 {
                bed.forebay(&["--pool", &pool, "release", "-r", "--no-wait", "/s"]);
            }
            done += 1;
        }
        std::fs::write(&stop, "").unwrap();
        for (_, program) in &mut programs.0 {
            program.wait().unwrap();
        }
        std::fs::remove_file(&stop).unwrap();
        bed.wait_drained();
        assert_eq!(differences(&bed), "", "seed {seed}, after {done} kills\n{}", bed.log());
        assert_eq!(lost(&bed), Vec::<String>::new(), "seed {seed}, after {done} kills\n{}", bed.log());
    }
    let [movers, workers, killed_programs, mounts, supervisors] = kills;
    println!(
        "seed {seed}: killed {movers} movers, {workers} workers, {killed_programs} programs, {mounts} mounts, \
         {supervisors} supervisors"
    );
    let check = bed.forebay(&["--pool", &pool, "fsck"]);
    assert!(check.status.success(), "seed {seed}: {}", text(&check));
}
