//! Rounds of jobs at random, with slurmctld and the daemons of pools killed at random moments. `FOREBAY_JOBS_SEED` repeats
//! the choices of a run, though not its timing.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::lost::saves_its_jobs;
use super::site::{open_to_all, read, write, Site, ANN, BEN};

const ROUNDS: u64 = 5;
const JOBS: u64 = 5;
const KILLS: u64 = 2;

/// Numbers by a linear congruential generator.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

struct Job {
    id: u32,
    name: String,
}

pub(super) fn kills_at_random(mut site: Site) -> Site {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let seed = std::env::var("FOREBAY_JOBS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(now);
    println!("jobs at random: FOREBAY_JOBS_SEED={seed}");
    let mut random = Random(seed);
    open_to_all(&site.store("soak"));
    write(&site.store("soak/in"), "in\n");
    // It lives through all rounds: a change of it shows when Slurm has saved its jobs.
    let other = site.submit(ANN, "soaks", "", "touch soaks; sleep 10000\n").unwrap();
    site.await_file("soaks");
    for round in 0..ROUNDS {
        let jobs: Vec<Job> = (0..JOBS).map(|i| submit(&site, &mut random, round, i)).collect();
        // Slurm may forget jobs that it has not saved.
        saves_its_jobs(&site, other);
        for _ in 0..KILLS {
            std::thread::sleep(Duration::from_millis(random.below(15_000)));
            site.slurm.kill("slurmctld -D", Some(1));
            std::thread::sleep(Duration::from_millis(random.below(3_000)));
            site.slurm.start("slurmctld -D", Some(1));
            let answers = || Site::text_of(&site.slurm.on_first("scontrol ping")).contains("is UP");
            site.until("slurmctld answers", answers);
        }
        for job in &jobs {
            has_all(&site, job);
        }
    }
    assert!(site.by(ANN, &format!("scancel {other}")).status.success());
    site
}

fn submit(site: &Site, random: &mut Random, round: u64, i: u64) -> Job {
    let name = format!("soak{round}.{i}");
    let (nodes, user) = (1 + random.below(2), [ANN, BEN][random.below(2) as usize]);
    let kills = match random.below(3) {
        0 => "kill -KILL $(forebay status --json | sed -n 's/.*\"worker\": \\([0-9]*\\).*/\\1/p')\n",
        _ => "",
    };
    let (before, after) = (random.below(8), random.below(8));
    let end = ["", "exit 3\n"][random.below(2) as usize];
    let script = format!(
        "#BB_LUA forebay capacity={}MiB pool=forebay stage_in=%D/store/soak/in:/in stage_out=/r/:%D/store/soak/{name}\n\
         set -e\nsleep {before}\nforebay run --quiet -- sh -c 'mkdir /forebay/r; cat /forebay/in >/forebay/r/f'\n\
         {kills}sleep {after}\nforebay run --quiet -- sh -c 'echo {name} >>/forebay/r/f'\n{end}",
        64 * nodes
    );
    let id = site.submit(user, &name, &format!("--requeue --nodes={nodes}"), &script).unwrap();
    Job { id, name }
}

/// Waits until the store has what a job has written, and nothing else has anything of it.
fn has_all(site: &Site, job: &Job) {
    let wanted = format!("in\n{}\n", job.name);
    let stored = site.store(&format!("soak/{}/f", job.name));
    let output = site.dir().join(format!("work/{}.out", job.name));
    // A slurmctld that was killed may take a job that has ended for a running one, and start it again when it finds it
    // missing.
    let is_over = |site: &Site, states: &[&str]| {
        let shown = site.shown(job.id);
        states.iter().any(|state| shown.starts_with(state)) && read(&stored) == wanted
    };
    let (mut skipped, mut acts, mut ended, mut states) = (0, 0, 0, vec!["COMPLETED", "FAILED"]);
    loop {
        site.until(&format!("all of job {} {}, {}", job.id, job.name, site.shown(job.id)), || {
            is_helped(site, job, &output, &mut skipped)
                || is_over(site, &states)
                || hooks_ended(site, job) > ended
        });
        if is_over(site, &states) {
            break;
        }
        if hooks_ended(site, job) > ended {
            ended = hooks_ended(site, job);
            std::thread::sleep(Duration::from_secs(90));
            if site.shown(job.id).starts_with("PENDING") {
                println!("job {} {}: Slurm has ended its hook, and holds it; scancel", job.id, job.name);
                assert!(site.slurm.on_first(&format!("scancel {}", job.id)).status.success());
                states.push("CANCELLED");
            }
        }
        acts += 1;
        assert!(acts < 6, "job {} {} is helped again and again", job.id, job.name);
    }
    site.assert_clean(&format!("job {}", job.name), Some(job.id));
}

/// How many hooks of a job Slurm has ended by itself.
fn hooks_ended(site: &Site, job: &Job) -> usize {
    let log = read(&site.dir().join("ctld/slurmctld.log"));
    log.matches(&format!("for JobId={} terminated by slurmctld", job.id)).count()
}

/// Does what docs/slurm.md tells an administrator to do about a job that a killed slurmctld has started twice. True if there
/// was something to do.
fn is_helped(site: &Site, job: &Job, output: &Path, skipped: &mut usize) -> bool {
    let shown = site.shown(job.id);
    let (fails, now) =
        (shown.starts_with("FAILED"), read(output).matches("slurmd has run no prolog").count());
    let words = match () {
        () if fails && now > *skipped => format!("scontrol requeue {}", job.id),
        () if shown.contains("launch_failed_requeued_held") && !shown.contains("COMPLETING") => {
            format!("scontrol release {}", job.id)
        }
        () => return false,
    };
    *skipped = now;
    println!("job {} {}, {shown}: {words}", job.id, job.name);
    site.slurm.on_first(&words).status.success()
}
