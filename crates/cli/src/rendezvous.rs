//! How the ranks of a job find each other when they start a pool together: by notes in a directory that all of them
//! see.
//!
//! ```text
//! rank r:  writes rank-r (its host, a random word)
//!          ─► waits for `pool` with its word ─► writes seen-r ─► waits until `pool` is removed
//! rank 0:  does the same, and: all rank-* exist ─► writes `pool` (the bundle, all words)
//!          ─► all seen-* name this `pool` ─► removes everything
//! ```
//! Notes that an earlier job of the same name left have other words and are ignored; rank 0 writes `pool` again when a
//! word changes. Only the user can read the directory, and thus the secret in `pool`. Every wait has a timeout.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_server::bundle::Bundle;
use forebay_server::hosts_file::NamedHost;
use forebay_types::{Code, Error, Result};
use serde::{Deserialize, Serialize};

use crate::failure;

/// First and longest pause between two polls.
const LOOK_AGAIN: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(200));
/// How long notes that cannot form a pool must stay the same before they count as notes of this job.
const NOTES_GRACE: Duration = Duration::from_secs(3);

/// This process among the processes that start the pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Rank {
    /// Names the job, so that ranks of two jobs do not mix.
    pub(crate) job: String,
    /// From 0.
    pub(crate) rank: usize,
    /// The number of ranks.
    pub(crate) size: usize,
}

/// The variables for rank and size, as launchers set them, and those that name their job.
const LAUNCHERS: [(&str, &str, &[&str]); 5] = [
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"]),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", &["FLUX_JOB_ID"]),
    ("PALS_RANKID", "PALS_NRANKS", &["PALS_APID"]),
    // Slurm also sets the PMI's variables for its ranks, to the same values; its own variables name job and step too.
    ("SLURM_PROCID", "SLURM_NTASKS", &["SLURM_JOB_ID", "SLURM_STEP_ID"]),
    ("PMI_RANK", "PMI_SIZE", &[]),
];

impl Rank {
    /// The rank of this process, from its launcher's environment. `named`: the user's name for the job, or empty.
    ///
    /// # Errors
    /// [`Code::Invalid`] outside a launcher, and when neither the launcher nor the user names the job.
    pub(crate) fn of_this_process(named: &str) -> Result<Rank> {
        Rank::of(
            &std::env::vars_os()
                .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)))
                .collect(),
            named,
        )
    }

    fn of(environment: &BTreeMap<String, String>, named: &str) -> Result<Rank> {
        let get = |name: &str| environment.get(name).map(String::as_str).filter(|v| !v.is_empty());
        let number = |name: &str| get(name).and_then(|v| v.parse::<usize>().ok());
        let what = "cannot start this rank's node";
        let found = LAUNCHERS.iter().find_map(|(rank, size, job)| {
            let (rank, size) = (number(rank)?, number(size)?);
            (rank < size).then_some((rank, size, *job))
        });
        let Some((rank, size, names)) = found else {
            return Err(failure::invalid(
                what,
                "no launcher says which rank of how many this is",
                "start it by srun or mpirun, or name the hosts: --hosts LIST",
            ));
        };
        let mut parts: Vec<&str> = names.iter().filter_map(|name| get(name)).collect();
        // PMIx needs one name; Slurm's steps differ in the second.
        if names.first() == Some(&"PMIX_NAMESPACE") {
            parts.truncate(1);
        }
        if !named.is_empty() {
            parts = vec![named];
        }
        if parts.is_empty() {
            return Err(failure::invalid(
                what,
                "this launcher gives its job no name by which its ranks know each other",
                "give one that is the same for all ranks and no other job's: --job=NAME",
            ));
        }
        let job = parts.join(".").replace(['/', '\0'], "_");
        Ok(Rank { job, rank, size })
    }
}

/// A rank's note about itself.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Note {
    word: String,
    name: String,
    host: String,
    /// The capacity of its host's target in bytes, if set.
    #[serde(default)]
    capacity_bytes: Option<u64>,
}

/// Rank 0's note to all ranks.
#[derive(Serialize, Deserialize)]
struct Pool {
    bundle: Bundle,
    words: Vec<String>,
    /// Identifies this writing of the note: rank 0 may write it several times.
    edition: String,
}

struct Meeting {
    dir: PathBuf,
    until: Instant,
    waited: Duration,
}

/// Meets the other ranks in `shared` and returns the pool of all their hosts. Rank 0 makes it with `make` from one node
/// a host, in the order of their ranks.
///
/// # Errors
/// A directory that cannot be used; ranks that are missing after `timeout`, with their numbers.
pub(crate) fn meet(
    shared: &Path,
    rank: &Rank,
    me: &NamedHost,
    timeout: Duration,
    make: impl Fn(&[NamedHost]) -> Result<Bundle>,
) -> Result<Bundle> {
    let dir = shared.join(format!("forebay-job-{}", rank.job));
    let meeting = Meeting { dir, until: Instant::now() + timeout, waited: timeout };
    meeting.open()?;
    let word = new_word()?;
    let NamedHost { name, host, capacity_bytes } = me.clone();
    let note = Note { word: word.clone(), name, host, capacity_bytes };
    meeting.write(&format!("rank-{}", rank.rank), &note)?;
    match rank.rank {
        0 => meeting.lead(rank.size, make),
        _ => meeting.follow(rank.rank, &word),
    }
}

fn new_word() -> Result<String> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::io("cannot draw random bytes", &e.into()))?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

impl Meeting {
    /// Creates the directory, unless another rank did.
    fn open(&self) -> Result<()> {
        let what = || format!("cannot meet the other ranks in {}", self.dir.display());
        let cure = "name a directory of yours that all ranks see: --shared DIR, or FOREBAY_SHARED";
        match DirBuilder::new().mode(0o700).create(&self.dir) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(Error::io(what(), &e).cure(cure));
            }
            // The umask may have cleared bits.
            Ok(()) => std::fs::set_permissions(&self.dir, std::fs::Permissions::from_mode(0o700))
                .map_err(|e| Error::io(what(), &e))?,
            Err(_) => {}
        }
        let stat = std::fs::symlink_metadata(&self.dir).map_err(|e| Error::io(what(), &e))?;
        if !stat.is_dir() || stat.mode() & 0o077 != 0 || stat.uid() != rustix::process::geteuid().as_raw() {
            return Err(Error::new(Code::AccessDenied, what())
                .why("it is not a directory of yours alone, and the pool's secret would be in it")
                .cure(cure));
        }
        Ok(())
    }

    /// Writes a note atomically: a reader sees none, the one before, or this one.
    fn write(&self, name: &str, value: &impl Serialize) -> Result<()> {
        let what = || format!("cannot write {}", self.dir.join(name).display());
        let text = serde_json::to_vec(value).map_err(|e| Error::new(Code::Invalid, what()).why(e))?;
        let new = self.dir.join(format!("{name}.new"));
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new)
            .map_err(|e| Error::io(what(), &e))?;
        // Synced, so that on a network file system the data are there when the rename shows the name.
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(|e| Error::io(what(), &e))?;
        std::fs::rename(&new, self.dir.join(name)).map_err(|e| Error::io(what(), &e))
    }

    fn read<T: for<'a> Deserialize<'a>>(&self, name: &str) -> Option<T> {
        serde_json::from_slice(&std::fs::read(self.dir.join(name)).ok()?).ok()
    }

    /// Polls until `look` finds what it waits for; `None` on timeout.
    fn wait<T>(&self, mut look: impl FnMut() -> Result<Option<T>>) -> Result<Option<T>> {
        let mut pause = LOOK_AGAIN.0;
        loop {
            // Opening a directory makes NFS fetch its changes from the server.
            let _ = std::fs::File::open(&self.dir);
            if let Some(found) = look()? {
                return Ok(Some(found));
            }
            if Instant::now() >= self.until {
                return Ok(None);
            }
            std::thread::sleep(pause);
            pause = (pause * 3 / 2).min(LOOK_AGAIN.1);
        }
    }

    fn lead(&self, size: usize, make: impl Fn(&[NamedHost]) -> Result<Bundle>) -> Result<Bundle> {
        let mut made: Option<(Vec<Note>, Pool)> = None;
        let mut refused: Option<(Vec<Note>, Instant)> = None;
        let met = self.wait(|| {
            let notes: Option<Vec<Note>> = (0..size).map(|r| self.read(&format!("rank-{r}"))).collect();
            let Some(notes) = notes else { return Ok(None) };
            if made.as_ref().is_none_or(|(before, _)| *before != notes) {
                let mut hosts: Vec<NamedHost> = Vec::new();
                for note in &notes {
                    if hosts.iter().all(|h| h.name != note.name) {
                        let Note { name, host, capacity_bytes, .. } = note.clone();
                        hosts.push(NamedHost { name, host, capacity_bytes });
                    }
                }
                let words = notes.iter().map(|n| n.word.clone()).collect();
                let bundle = match make(&hosts) {
                    Ok(bundle) => bundle,
                    // Notes of an earlier job among them can make the set invalid; their ranks are about to replace
                    // them.
                    Err(e) => match &refused {
                        Some((before, since)) if *before == notes && since.elapsed() >= NOTES_GRACE => {
                            return Err(e)
                        }
                        Some((before, _)) if *before == notes => return Ok(None),
                        _ => {
                            refused = Some((notes, Instant::now()));
                            return Ok(None);
                        }
                    },
                };
                let pool = Pool { bundle, words, edition: new_word()? };
                self.write("pool", &pool)?;
                made = Some((notes, pool));
            }
            let Some((_, pool)) = &made else { return Ok(None) };
            let seen =
                |r: usize| self.read::<String>(&format!("seen-{r}")).is_some_and(|e| e == pool.edition);
            Ok((1..size).all(seen).then(|| pool.bundle.clone()))
        });
        let missing = || -> Vec<usize> {
            let seen = |r: usize| match &made {
                None => self.read::<Note>(&format!("rank-{r}")).is_some(),
                Some((_, pool)) => {
                    self.read::<String>(&format!("seen-{r}")).is_some_and(|e| e == pool.edition)
                }
            };
            (1..size).filter(|r| !seen(*r)).collect()
        };
        let absent = if matches!(met, Ok(Some(_))) { Vec::new() } else { missing() };
        // When `pool` disappears, the other ranks conclude that all have come. So it is removed only then.
        if matches!(met, Ok(Some(_))) {
            self.clear(size);
        }
        met?.ok_or_else(|| {
            let first: Vec<String> = absent.iter().take(8).map(usize::to_string).collect();
            let more = absent.len().saturating_sub(first.len());
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            self.too_late(format!("of {size} ranks {}{more} have not come", first.join(", ")))
        })
    }

    fn follow(&self, rank: usize, word: &str) -> Result<Bundle> {
        let mut taken: Option<Pool> = None;
        let met = self.wait(|| {
            let Some(pool) = self.read::<Pool>("pool") else {
                return Ok((taken.is_some() && !self.dir.join("pool").exists()).then_some(()));
            };
            if pool.words.get(rank).is_none_or(|w| w != word) {
                // If this rank has seen its own pool, its rank 0 has finished and another job of this name has begun.
                // Otherwise the note is from an earlier job.
                return Ok(taken.is_some().then_some(()));
            }
            if taken.as_ref().is_none_or(|t| t.edition != pool.edition) {
                self.write(&format!("seen-{rank}"), &pool.edition)?;
                taken = Some(pool);
            }
            Ok(None)
        });
        match (met?, taken) {
            (Some(()), Some(pool)) => Ok(pool.bundle),
            _ => Err(self.too_late("rank 0 has not said which nodes there are".to_owned())),
        }
    }

    fn too_late(&self, why: String) -> Error {
        Error::new(Code::TimedOut, format!("cannot meet the other ranks in {}", self.dir.display()))
            .why(format!("after {} s {why}", self.waited.as_secs()))
            .cure("do all ranks run `forebay up --job`, and see that directory? --shared DIR names another, --wait SECONDS waits longer")
    }

    /// Removes the notes, `pool` first: the other ranks wait for its removal.
    fn clear(&self, size: usize) {
        let _ = std::fs::remove_file(self.dir.join("pool"));
        for r in 0..size {
            for name in [format!("rank-{r}"), format!("seen-{r}")] {
                let _ = std::fs::remove_file(self.dir.join(name));
            }
        }
        let _ = std::fs::remove_dir(&self.dir);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_server::hosts_file::{self, Alike};

    fn environment(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect()
    }

    #[test]
    fn rank_is_read_from_each_launcher() {
        let openmpi = environment(&[
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("PMIX_NAMESPACE", "a@1/2"),
            ("OMPI_MCA_ess_base_jobid", "17"),
        ]);
        let rank = Rank::of(&openmpi, "").unwrap();
        assert_eq!((rank.job.as_str(), rank.rank, rank.size), ("a@1_2", 3, 4));
        let slurm = environment(&[
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_JOB_ID", "77"),
            ("SLURM_STEP_ID", "0"),
            ("PMI_RANK", "1"),
            ("PMI_SIZE", "2"),
        ]);
        assert_eq!(Rank::of(&slurm, "").unwrap().job, "77.0");
        let hydra = environment(&[("PMI_RANK", "0"), ("PMI_SIZE", "2")]);
        let error = Rank::of(&hydra, "").unwrap_err().to_string();
        assert!(error.contains("--job=NAME"), "{error}");
        assert_eq!(Rank::of(&hydra, "mine").unwrap().job, "mine");
        let none = Rank::of(&environment(&[]), "x").unwrap_err().to_string();
        assert!(none.contains("--hosts"), "{none}");
        assert!(Rank::of(&environment(&[("PMI_RANK", "2"), ("PMI_SIZE", "2")]), "x").is_err());
    }

    fn shared(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("forebay-meet-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        dir
    }

    fn make(hosts: &[NamedHost]) -> Result<Bundle> {
        let alike = Alike { path: "/p%n".into(), media: None, port: None, provider: None };
        Bundle::new(hosts_file::text(hosts, &alike))
    }

    fn host(rank: usize) -> NamedHost {
        // Two ranks a host.
        let (name, host) = (format!("n{}", rank / 2), format!("h{}", rank / 2));
        // The first host has no target.
        NamedHost { name, host, capacity_bytes: (rank / 2 == 0).then_some(0) }
    }

    #[test]
    fn meet_of_all_ranks_gives_each_the_same_pool_and_leaves_nothing() {
        let dir = shared("all");
        // Left by a killed job of this name: notes of another size and an old pool.
        let old = dir.join("forebay-job-j");
        DirBuilder::new().mode(0o700).create(&old).unwrap();
        let stale =
            Pool { bundle: make(&[host(40)]).unwrap(), words: vec!["x".into(); 6], edition: "e".into() };
        std::fs::write(old.join("pool"), serde_json::to_vec(&stale).unwrap()).unwrap();
        for r in 1..6 {
            let (name, host) = (format!("old{r}"), "h".into());
            let note = Note { word: "x".into(), name, host, capacity_bytes: None };
            std::fs::write(old.join(format!("rank-{r}")), serde_json::to_vec(&note).unwrap()).unwrap();
            std::fs::write(old.join(format!("seen-{r}")), "\"e\"").unwrap();
        }
        let bundles: Vec<Bundle> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..6)
                .map(|r| {
                    let dir = &dir;
                    scope.spawn(move || {
                        // The ranks start one after another, the last ones late.
                        std::thread::sleep(Duration::from_millis(r as u64 * 15));
                        let rank = Rank { job: "j".into(), rank: r, size: 6 };
                        meet(dir, &rank, &host(r), Duration::from_secs(60), make)
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap().unwrap()).collect()
        });
        assert!(bundles.iter().all(|b| *b == bundles[0]), "one secret, one list");
        let file = bundles[0].pool_file(Path::new("/")).unwrap();
        let names: Vec<&str> = file.nodes.iter().map(|n| n.name.as_str()).collect();
        assert_eq!(names, ["n1", "n2", "n0"], "that of no target last");
        assert!(file.nodes[2].is_shard_only());
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
        std::fs::remove_dir(&dir).unwrap();
    }

    #[test]
    fn meet_of_hosts_that_make_no_pool_says_why() {
        let dir = shared("none");
        let rank = Rank { job: "j".into(), rank: 0, size: 1 };
        let me = NamedHost { name: "a/b".into(), host: "h".into(), capacity_bytes: None };
        let error = meet(&dir, &rank, &me, Duration::from_secs(60), make).unwrap_err().to_string();
        assert!(error.contains("no slash"), "{error}");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn meet_without_all_ranks_names_who_is_missing() {
        let dir = shared("missing");
        let rank = |rank| Rank { job: "j".into(), rank, size: 3 };
        let (first, second) = std::thread::scope(|scope| {
            let second = scope.spawn(|| meet(&dir, &rank(1), &host(1), Duration::from_millis(200), make));
            let first = meet(&dir, &rank(0), &host(0), Duration::from_millis(400), make);
            (first.unwrap_err().to_string(), second.join().unwrap().unwrap_err().to_string())
        });
        assert!(first.contains("of 3 ranks 2 have not come") && first.contains("--shared"), "{first}");
        assert!(second.contains("rank 0"), "{second}");
        use std::os::unix::fs::PermissionsExt;
        let open = dir.join("forebay-job-j");
        std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o755)).unwrap();
        let refused = meet(&dir, &rank(0), &host(0), Duration::ZERO, make).unwrap_err();
        assert_eq!(refused.code, Code::AccessDenied);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
