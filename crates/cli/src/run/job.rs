//! Groups runs: the runs of one job step on this node share a pool and stage once.
//!
//! Batch systems and launchers name job, step and launch in the environment. Ranks of one `mpirun` share its name for
//! the launch (PMIX_NAMESPACE). Without that name they share the process that started them: the nearest ancestor that
//! has no rank itself. A run outside a job forms a group alone.

use forebay_sys::process::Stat;
use std::collections::BTreeMap;

use forebay_types::name_hash;

/// Variables that name a batch system's job, and those that distinguish parts of one job.
const JOBS: [&[&str]; 9] = [
    &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    &["PBS_JOBID"],
    &["LSB_JOBID", "LSB_JOBINDEX"],
    &["FLUX_JOB_ID"],
    &["COBALT_JOBID"],
    &["OAR_JOB_ID"],
    &["LOADL_STEP_ID"],
    &["PJM_JOBID"],
    &["SGE_TASK_ID", "JOB_ID"],
];
/// A launcher's name for one launch.
const LAUNCH: &str = "PMIX_NAMESPACE";
/// The rank, as launchers set it. A process with one of these variables was started by a launcher.
const RANKS: [&str; 7] = [
    "PMIX_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "MV2_COMM_WORLD_RANK",
    "PALS_RANKID",
    "FLUX_TASK_RANK",
    "SLURM_PROCID",
];
/// How many ranks the launcher starts on this node.
const LOCAL_SIZES: [&str; 5] = [
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "PMI_LOCAL_SIZE",
];
/// Ancestors examined: shells and wrappers between a launcher and a run.
const ANCESTORS_MAX: usize = 32;

/// The job of a run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Job {
    /// Names the embedded pool that the runs of the job share.
    pub(super) pool_key: String,
    /// Names the group within which staging is done once.
    pub(super) group: String,
    /// The number of runs of the group on this node, as far as the launcher sets it.
    pub(super) expected: u32,
}

impl Job {
    /// The job of this process, which is nested in `level` runs.
    pub(super) fn of_this_process(level: u32) -> Job {
        let environment: BTreeMap<String, String> = std::env::vars_os()
            .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)))
            .collect();
        let me = std::process::id();
        let own = format!("process {me} {}", started(me).unwrap_or_default());
        Job::of(&environment, level, launcher, &own, &host())
    }

    fn of(
        environment: &BTreeMap<String, String>,
        level: u32,
        launcher: impl Fn(&str, &str) -> Option<String>,
        own: &str,
        host: &str,
    ) -> Job {
        let get = |name: &str| environment.get(name).map(String::as_str).filter(|v| !v.is_empty());
        let mut parts = Vec::new();
        for names in JOBS {
            // Other programs also use SGE's names, so all of them must be set; for the others the first is enough.
            let needed = if names[0] == "SGE_TASK_ID" { names.len() } else { 1 };
            if names[..needed].iter().all(|name| get(name).is_some()) {
                parts.extend(names.iter().filter_map(|name| Some(format!("{name}={}", get(name)?))));
            }
        }
        let rank = RANKS.iter().find_map(|name| Some((*name, get(name)?)));
        let in_step = get("SLURM_STEP_ID").is_some() && get("SLURM_PROCID").is_some();
        match (get(LAUNCH), rank) {
            (Some(launch), _) => parts.push(format!("{LAUNCH}={launch}")),
            // The batch script of a Slurm job has a rank too, but no launcher of its own.
            (None, Some((name, _))) if name == "SLURM_PROCID" || in_step => {}
            (None, Some((name, value))) => parts.extend(launcher(name, value)),
            (None, None) => {}
        }
        let alone = parts.is_empty() || level > 0 && rank.is_none();
        if alone {
            parts = vec![own.to_owned()];
        }
        let text = parts.join(" ");
        let expected = if alone { 1 } else { local_size(&get, in_step) };
        Job {
            pool_key: format!("{:014x}", name_hash(format!("{host} {text} level {level}").as_bytes())),
            group: format!("{text} level {level}"),
            expected,
        }
    }
}

fn local_size<'a>(get: &impl Fn(&str) -> Option<&'a str>, in_step: bool) -> u32 {
    let said = LOCAL_SIZES.iter().find_map(|name| get(name)?.parse().ok());
    let slurm = || {
        let tasks = get("SLURM_STEP_TASKS_PER_NODE").filter(|_| in_step)?;
        tasks_of_node(tasks, get("SLURM_NODEID")?.parse().ok()?)
    };
    said.or_else(slurm).unwrap_or(1).max(1)
}

/// The number of tasks of one node, from Slurm's list such as `4(x2),3`.
fn tasks_of_node(list: &str, node: u32) -> Option<u32> {
    let mut first = 0u32;
    for part in list.split(',') {
        let (tasks, nodes) = match part.split_once("(x") {
            Some((tasks, rest)) => (tasks, rest.strip_suffix(')')?.parse().ok()?),
            None => (part, 1u32),
        };
        if node < first.checked_add(nodes)? {
            return tasks.parse().ok();
        }
        first += nodes;
    }
    None
}

/// The process that started the ranks: the nearest ancestor whose environment does not have this rank.
fn launcher(name: &str, value: &str) -> Option<String> {
    let mark = format!("{name}={value}").into_bytes();
    let mut pid = std::os::unix::process::parent_id();
    for _ in 0..ANCESTORS_MAX {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        if !environment.split(|&b| b == 0).any(|variable| variable == mark) {
            break;
        }
        pid = Stat::of(pid).ok()?.parent;
    }
    Some(format!("launcher {pid} {}", started(pid)?))
}

/// When a process started, in ticks since boot. Pid and start time together are never used again.
fn started(pid: u32) -> Option<String> {
    Stat::of(pid).ok().map(|stat| stat.start_ticks.to_string())
}

fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(level: u32, variables: &[(&str, &str)]) -> Job {
        let environment = variables.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        Job::of(&environment, level, |_, _| Some("launcher 7".into()), "process 1", "node")
    }

    #[test]
    fn job_without_a_batch_system_is_alone() {
        let j = job(0, &[("HOME", "/root")]);
        assert_eq!((j.group.as_str(), j.expected), ("process 1 level 0", 1));
    }

    #[test]
    fn job_of_ranks_of_one_launch_is_one_and_of_another_is_another() {
        let rank = |ns: &str, rank: &str| {
            job(0, &[("PMIX_NAMESPACE", ns), ("PMIX_RANK", rank), ("OMPI_COMM_WORLD_LOCAL_SIZE", "4")])
        };
        assert_eq!(rank("a@1", "0"), rank("a@1", "3"));
        assert_ne!(rank("a@1", "0").pool_key, rank("b@1", "0").pool_key);
        assert_eq!(rank("a@1", "0").expected, 4);
    }

    #[test]
    fn job_of_ranks_without_a_namespace_is_that_of_their_launcher() {
        let j = job(0, &[("PMI_RANK", "2"), ("MPI_LOCALNRANKS", "3")]);
        assert_eq!((j.group.as_str(), j.expected), ("launcher 7 level 0", 3));
    }

    #[test]
    fn job_of_a_slurm_step_has_its_tasks_on_this_node() {
        let step = [
            ("SLURM_JOB_ID", "12"),
            ("SLURM_STEP_ID", "3"),
            ("SLURM_PROCID", "9"),
            ("SLURM_NODEID", "2"),
            ("SLURM_STEP_TASKS_PER_NODE", "4(x2),3"),
        ];
        let j = job(0, &step);
        assert_eq!((j.group.as_str(), j.expected), ("SLURM_JOB_ID=12 SLURM_STEP_ID=3 level 0", 3));
        let batch =
            job(0, &[("SLURM_JOB_ID", "12"), ("SLURM_PROCID", "0"), ("SLURM_STEP_TASKS_PER_NODE", "9")]);
        assert_eq!((batch.group.as_str(), batch.expected), ("SLURM_JOB_ID=12 level 0", 1));
        assert_ne!(j.pool_key, batch.pool_key);
    }

    #[test]
    fn job_within_another_run_stages_for_itself_unless_it_is_a_rank() {
        let inner = job(1, &[("PBS_JOBID", "77.pbs")]);
        assert_eq!((inner.group.as_str(), inner.expected), ("process 1 level 1", 1));
        let rank = job(1, &[("PBS_JOBID", "77.pbs"), ("PMIX_NAMESPACE", "n"), ("PMIX_RANK", "0")]);
        assert_eq!(rank.group, "PBS_JOBID=77.pbs PMIX_NAMESPACE=n level 1");
    }

    #[test]
    fn tasks_of_node_reads_slurms_short_form() {
        assert_eq!([0, 1, 2, 3].map(|n| tasks_of_node("2,4(x2),1", n)), [Some(2), Some(4), Some(4), Some(1)]);
        assert_eq!(
            [tasks_of_node("2", 1), tasks_of_node("x", 0), tasks_of_node("2(x", 0)],
            [None, None, None]
        );
    }

    #[test]
    fn launcher_is_the_nearest_ancestor_without_the_rank() {
        let parent = std::os::unix::process::parent_id();
        let seen = launcher("FOREBAY_TEST_RANK", "nobody has it").unwrap();
        assert!(seen.starts_with(&format!("launcher {parent} ")), "{seen}");
    }
}
