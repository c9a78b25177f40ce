//! What Slurm's burst_buffer/lua calls on the controller, as SlurmUser.
//!
//! Hooks write records and orders and look for results; none opens a file of a user but results, and none transfers
//! data. `job_process`, `pools` and `paths` run inside slurmctld and only read and write small files. The others run in
//! processes of their own, and Slurm ends them after the times in burst_buffer.conf. Each can be called again after
//! slurmctld was restarted.

use std::path::Path;
use std::time::{Duration, Instant};

use forebay_types::{Code, Error, Result};
use serde_json::json;

use super::config::Config;
use super::directives::{self, Persistent, Request};
use super::registry::{now_s, Job, Order, Outcome, Pool, Registry, State};
use super::{command, destroying, lost, steward, user};
use crate::failure;

/// How often results are looked for.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// A pool's steward that has been silent for so long is dead.
pub(crate) const STEWARD_SILENCE: Duration = Duration::from_secs(30);
/// Slurm may ask again for a job that was torn down: it was requeued. After so long it is forgotten.
const MEMORY_S: u64 = 24 * 3600;
/// The unit in which Slurm counts space.
const GRANULE: u64 = 1 << 20;
/// How much longer than the silence of a node a controller waits for a job's epilog to begin: Slurm kills its steps
/// first.
const EPILOG_GRACE: Duration = Duration::from_secs(120);

/// The controller's view.
pub(crate) struct Hooks {
    config: Config,
    pub(crate) registry: Registry,
}

fn script_of(path: &Path) -> Result<Option<Request>> {
    let bytes = std::fs::read(path).map_err(|e| Error::io(format!("cannot read {}", path.display()), &e))?;
    directives::parse(&String::from_utf8_lossy(&bytes))
}

fn no_record(job: u32) -> Error {
    Error::new(Code::NotFound, format!("cannot find the burst buffer of job {job}"))
        .why("the registry has no record of it")
        .cure("submit the job again")
}

impl Hooks {
    pub(crate) fn new() -> Result<Hooks> {
        let config = Config::read()?;
        let registry = Registry::of(&config);
        registry.prepare()?;
        Ok(Hooks { config, registry })
    }

    /// The same for `job_process`, which slurmctld waits for at each submission: a shared directory that hangs must not keep
    /// it. It looks at the settings alone.
    pub(crate) fn without_registry() -> Result<Hooks> {
        let config = Config::read()?;
        let registry = Registry::of(&config);
        Ok(Hooks { config, registry })
    }

    /// Checks a script's directives at submission.
    pub(crate) fn job_process(&self, script: &Path) -> Result<String> {
        let request = script_of(script)?.ok_or_else(|| {
            failure::invalid(
                "cannot use the directives of this job",
                "none is for forebay",
                "write `#BB_LUA forebay ...`",
            )
        })?;
        let most = self.config.total_bytes();
        match request.capacity_bytes {
            Some(bytes) if bytes > most => Err(failure::invalid(
                format!("cannot give a pool of {}", crate::table::bytes(bytes)),
                format!("all nodes together have {}", crate::table::bytes(most)),
                "write a smaller capacity=",
            )),
            _ => Ok(String::new()),
        }
    }

    /// The space, as JSON. Slurm subtracts what it has given to jobs itself.
    pub(crate) fn pools(&self) -> Result<String> {
        self.forget_old();
        lost::start_if_due(&self.registry);
        if self.registry.pools().iter().any(|pool| destroying::is_agreed(&self.registry, pool)) {
            let _lock = self.registry.lock()?;
            self.end_agreed();
        }
        let total = self.config.total_bytes() / GRANULE;
        let elsewhere: u64 = self
            .registry
            .pools()
            .iter()
            .filter(|pool| pool.outlives)
            .map(|pool| pool.capacity_bytes.div_ceil(GRANULE))
            .sum();
        let free = total.saturating_sub(elsewhere);
        Ok(json!({ "pools": [
            { "id": directives::SPACE, "granularity": GRANULE, "quantity": total, "free": free }
        ] })
        .to_string())
    }

    /// Ends the pools that their users have destroyed. The lock is held.
    fn end_agreed(&self) {
        for pool in self.registry.pools() {
            if pool.users.is_empty() && destroying::is_agreed(&self.registry, &pool) {
                self.registry.forget_pool(&pool.name);
            }
        }
    }

    fn forget_old(&self) {
        for job in self.registry.jobs() {
            if job.state == State::TornDown && now_s().saturating_sub(job.changed_s) > MEMORY_S {
                self.registry.forget_job(job.job);
            }
        }
    }

    /// Begins a run of a job.
    pub(crate) fn setup(&self, id: u32, uid: u32, gid: u32, script: &Path) -> Result<String> {
        let request = script_of(script)?.ok_or_else(|| no_record(id))?;
        let _lock = self.registry.lock()?;
        let mut before = self.registry.job(id)?;
        if let Some(job) = before.take_if(|job| job.state != State::TornDown && self.has_run(job)) {
            // It was requeued, and its teardown was lost: its next run must not find the results of this one.
            before = Some(self.close(job, false)?);
        }
        let (run, failed, ended_s) = match &before {
            Some(job) if job.uid != uid => (0, None, None), // another cluster's life used the number
            Some(job) if job.state == State::TornDown => (job.run + 1, job.failed.clone(), job.ended_s),
            Some(job) => (job.run, job.failed.clone(), job.ended_s),
            None => (0, None, None),
        };
        let pool_key = match &request.persistent {
            Some(persistent) => Some(self.claim(id, uid, persistent, &request)?),
            None => None,
        };
        let job = Job {
            job: id,
            run,
            uid,
            gid,
            request,
            state: State::Setup,
            hurry: false,
            failed,
            changed_s: now_s(),
            ended_s,
            pool_key,
            reconciled: false,
            unsaved: None,
            data_out_failed: None,
            is_second_start: false,
        };
        // An earlier life of this number may have left some.
        if before.as_ref().is_none_or(|b| b.state == State::TornDown) {
            self.registry.forget_results(&job.key());
        }
        self.registry.put_job(&job)?;
        Ok(String::new())
    }

    /// Finds or makes the record of a persistent pool for a job. The lock is held.
    fn claim(&self, job: u32, uid: u32, persistent: &Persistent, request: &Request) -> Result<String> {
        let name = persistent.name();
        let what = format!("cannot use the persistent pool {name}");
        self.end_agreed();
        let found = self.registry.pool(name)?;
        let Some(mut pool) = found else {
            let Persistent::Create(_) = persistent else {
                return Err(Error::new(Code::NotFound, what)
                    .why("there is none of this name")
                    .cure(format!("create it in a job before: `#BB_LUA forebay persistent name={name} capacity=SIZE pool=forebay`")));
            };
            let pool = Pool {
                name: name.to_owned(),
                serial: now_s(),
                uid,
                capacity_bytes: request.capacity_bytes.unwrap_or(0),
                creator: job,
                outlives: false,
                users: vec![job],
                ends: false,
            };
            self.registry.put_pool(&pool)?;
            return Ok(pool.key());
        };
        if pool.uid != uid {
            return Err(Error::new(Code::AccessDenied, what)
                .why("it belongs to another user")
                .cure("choose another name, or use a pool of yours"));
        }
        match persistent {
            Persistent::Create(_) if pool.creator != job => {
                return Err(Error::new(Code::Exists, what)
                    .why(format!("job {} has created it", pool.creator))
                    .cure(format!("write `use name={name}`, or destroy it first")));
            }
            Persistent::Use(_) if pool.ends => {
                return Err(Error::new(Code::Busy, what).why("a job destroys it").cure("create it again"));
            }
            _ => {}
        }
        if !pool.users.contains(&job) {
            pool.users.push(job);
            self.registry.put_pool(&pool)?;
        }
        Ok(pool.key())
    }

    fn job(&self, id: u32) -> Result<Job> {
        self.registry.job(id)?.ok_or_else(|| no_record(id))
    }

    fn advance(&self, id: u32, state: State) -> Result<Job> {
        let _lock = self.registry.lock()?;
        let mut job = self.job(id)?;
        if job.state == State::TornDown {
            return Err(torn(id));
        }
        job.state = state;
        job.changed_s = now_s();
        self.registry.put_job(&job)?;
        Ok(job)
    }

    /// Stages into a persistent pool. A pool of the job's own is filled when its nodes are there.
    pub(crate) fn data_in(&self, id: u32) -> Result<String> {
        let _works = self.registry.works_on(id)?;
        let mut job = self.advance(id, State::StagingIn)?;
        if let Some(why) = job.failed.take() {
            let _lock = self.registry.lock()?;
            self.registry.put_job(&job)?;
            return Err(Error::new(Code::Io, why).cure(released(id)));
        }
        self.await_restart(&job)?;
        if let (Some(Persistent::Use(name)), false) =
            (&job.request.persistent, job.request.stage_in.is_empty())
        {
            let outcome = self.order(&job, name, true)?;
            if !outcome.ok {
                return Err(Error::new(Code::Io, outcome.why).cure(released(id)));
            }
        }
        self.advance(id, State::StagedIn)?;
        Ok(String::new())
    }

    /// Keeps a job from starting again as long as slurmd may still know its last run, and would run no prolog for it.
    fn await_restart(&self, job: &Job) -> Result<()> {
        let is_over = |now: &Job| now.run != job.run || now.state == State::TornDown;
        // A clock that was set back does not make it wait longer.
        let waits =
            |ended_s: u64| now_s().checked_sub(ended_s).is_some_and(|s| s < self.config.restart_pause_s);
        while job.ended_s.is_some_and(waits) {
            if is_over(&self.job(job.job)?) {
                return Err(torn(job.job));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }

    /// Has the persistent pool of a job stage, and waits.
    fn order(&self, job: &Job, name: &str, into_pool: bool) -> Result<Outcome> {
        let pool = self.registry.pool(name)?.ok_or_else(|| {
            Error::new(Code::NotFound, format!("cannot stage with the pool {name}")).why("it is gone")
        })?;
        let (way, pairs) =
            if into_pool { ("in", &job.request.stage_in) } else { ("out", &job.request.stage_out) };
        let key = format!("{}.{way}", job.key());
        let result = steward::result_name(&key);
        let order = Order { key: key.clone(), job: job.job, into_pool, pairs: pairs.clone() };
        if self.registry.result(&pool.key(), pool.uid, &result)?.is_none() {
            self.registry.put_order(name, &order)?;
        }
        let since = Instant::now();
        loop {
            if let Some(outcome) = self.registry.result(&pool.key(), pool.uid, &result)? {
                self.registry.forget_order(name, &key);
                return Ok(outcome);
            }
            let now = self.job(job.job)?;
            if now.run != job.run || now.state == State::TornDown {
                self.registry.forget_order(name, &key);
                return Err(torn(job.job));
            }
            let silent = self.registry.silent_for(&pool.key(), pool.uid, super::registry::LEADER_FILE)?;
            if silent.unwrap_or_else(|| since.elapsed()) > STEWARD_SILENCE {
                self.registry.forget_order(name, &key);
                return Err(Error::new(Code::PoolGone, format!("cannot stage with the pool {name}"))
                    .why("no process of it answers; a node of it may be down")
                    .cure(format!("create the pool again after `forebay bb destroy {name}`")));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// The space that the job has, as Slurm counts it.
    pub(crate) fn real_size(&self, id: u32) -> Result<String> {
        let job = self.job(id)?;
        let bytes = job.request.capacity_bytes.unwrap_or(0);
        Ok(bytes.next_multiple_of(GRANULE).to_string())
    }

    /// Adds to the job's environment. Slurm calls it once for each start of a job.
    pub(crate) fn paths(&self, id: u32, file: &Path) -> Result<String> {
        let job = self.begin_again(self.job(id)?)?;
        let dir = job.pool_dir(&self.config);
        let mut text = format!(
            "FOREBAY_POOL={0}/pool\nFOREBAY_PREFIX={1}\nFOREBAY_JOB={2}\n",
            dir.display(),
            crate::pool::DEFAULT_PREFIX,
            job.key()
        );
        if self.config.mount {
            text += &format!("FOREBAY_MOUNT={}/mnt\n", dir.display());
        }
        std::fs::write(file, text).map_err(|e| Error::io(format!("cannot write {}", file.display()), &e))?;
        Ok(String::new())
    }

    /// Another run, if this one has had its nodes: slurmctld was killed before it had saved that the job has started. The
    /// first start may still be under way on its nodes. Its results must not count as those of the second.
    fn begin_again(&self, job: Job) -> Result<Job> {
        // `pre_run` is called before any node can start.
        let has_begun = |job: &Job| matches!(job.state, State::Running | State::StagingOut | State::Done);
        if !has_begun(&job) && self.starts(&job)?.is_empty() && self.out_of(&job)?.is_none() {
            return Ok(job);
        }
        let _lock = self.registry.lock()?;
        let mut job = self.job(job.job)?;
        if job.state == State::TornDown {
            return Err(torn(job.job));
        }
        job.run += 1;
        job.is_second_start = true;
        job.state = State::StagedIn;
        job.hurry = false;
        job.reconciled = false;
        job.unsaved = None;
        job.data_out_failed = None;
        job.failed = None;
        job.changed_s = now_s();
        self.registry.forget_results(&job.key());
        self.registry.put_job(&job)?;
        Ok(job)
    }

    /// The job has its nodes; slurmd's prolog starts the pool there after this has returned.
    pub(crate) fn pre_run(&self, id: u32) -> Result<String> {
        self.advance(id, State::Running)?;
        Ok(String::new())
    }

    /// The job has ended.
    pub(crate) fn post_run(&self, id: u32) -> Result<String> {
        let job = self.job(id)?;
        if !job.reconciled && job.state != State::TornDown {
            self.advance(id, State::StagingOut)?;
        }
        Ok(String::new())
    }

    /// Waits until the job's data are out. A slurmctld that was killed before it had saved that the job is over takes it for
    /// one that runs, finds it missing, and calls this again after the teardown: it is told the same again. Another error
    /// would hold a job that is to run again.
    pub(crate) fn data_out(&self, id: u32) -> Result<String> {
        // Data are staged out also where the registry cannot be locked.
        let _works = self.registry.works_on(id).ok();
        let job = self.job(id)?;
        if !job.reconciled && job.state != State::TornDown {
            let staged = self.stage_out(id);
            if let Err(e) = &staged {
                self.note_data_out(&job, &e.to_string());
            }
            return staged;
        }
        match job.unsaved.or(job.data_out_failed) {
            Some(why) => Err(Error::new(Code::Io, why)),
            None => Ok(String::new()),
        }
    }

    /// Notes why data_out fails. A record that cannot be written is no reason to fail otherwise.
    fn note_data_out(&self, seen: &Job, why: &str) {
        let Ok(_lock) = self.registry.lock() else { return };
        if let Ok(Some(mut job)) = self.registry.job(seen.job) {
            if job.run == seen.run && job.state != State::TornDown {
                job.data_out_failed = Some(why.to_owned());
                let _ = self.registry.put_job(&job);
            }
        }
    }

    /// The same, for one that has said that it works on the job.
    pub(crate) fn stage_out(&self, id: u32) -> Result<String> {
        let job = self.advance(id, State::StagingOut)?;
        let outcome = match &job.request.persistent {
            None => self.epilog_of(&job)?,
            Some(Persistent::Destroy(_)) => Outcome { ok: true, ..Outcome::default() },
            Some(Persistent::Create(name) | Persistent::Use(name)) => {
                if job.request.stage_out.is_empty() || self.start_failure(&job)?.is_some() {
                    Outcome { ok: true, ..Outcome::default() }
                } else {
                    self.order(&job, name, false)?
                }
            }
        };
        if !outcome.ok {
            return Err(Error::new(Code::Io, format!("cannot stage out job {id}"))
                .why(outcome.why)
                .cure(format!("`scancel --hurry {id}` ends the job")));
        }
        self.advance(id, State::Done)?;
        Ok(String::new())
    }

    /// What the epilog of a run has said.
    fn out_of(&self, job: &Job) -> Result<Option<Outcome>> {
        self.registry.result(&job.key(), job.uid, super::registry::OUT_FILE)
    }

    /// What the epilog of a job has done.
    fn epilog_of(&self, job: &Job) -> Result<Outcome> {
        let key = job.key();
        let since = Instant::now();
        loop {
            if let Some(outcome) = self.out_of(job)? {
                return Ok(outcome);
            }
            let now = self.job(job.job)?;
            if now.run != job.run || now.state == State::TornDown {
                return Err(torn(job.job));
            }
            let patience = Duration::from_secs(self.config.silence_s) + EPILOG_GRACE;
            let beat = self.registry.silent_for(&key, job.uid, user::BEAT_FILE)?;
            if since.elapsed() > patience && beat.is_none_or(|silent| silent > patience) {
                let nodes = self.nodes_of(job)?.join(", ");
                return Ok(Outcome {
                    why: format!(
                        "no node of the job answers: data that were not staged out are on {nodes} until a reboot, in {}",
                        job.pool_dir(&self.config).display()
                    ),
                    ..Outcome::default()
                });
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// What the nodes have said of their prologs.
    fn starts(&self, job: &Job) -> Result<Vec<(String, Outcome)>> {
        let dir = self.registry.results(&job.key());
        let mut starts = Vec::new();
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let Some(node) = name.strip_suffix(".up.json") else { continue };
            if let Some(outcome) = self.registry.result(&job.key(), job.uid, &name)? {
                starts.push((node.to_owned(), outcome));
            }
        }
        Ok(starts)
    }

    fn nodes_of(&self, job: &Job) -> Result<Vec<String>> {
        Ok(self.starts(job)?.into_iter().next().map(|(_, outcome)| outcome.nodes).unwrap_or_default())
    }

    fn start_failure(&self, job: &Job) -> Result<Option<String>> {
        let mut failed: Vec<(String, String)> =
            self.starts(job)?.into_iter().filter(|(_, o)| !o.ok).map(|(node, o)| (node, o.why)).collect();
        failed.sort();
        // Others fail because that one did.
        let first = failed.iter().find(|(_, why)| why.contains("stage in")).or(failed.first());
        Ok(first.map(|(node, why)| command::reason(&format!("node {node}: {why}"))))
    }

    /// Ends a run, however it ended.
    pub(crate) fn teardown(&self, id: u32, hurry: bool) -> Result<String> {
        let _lock = self.registry.lock()?;
        if let Some(job) = self.registry.job(id)?.filter(|job| job.state != State::TornDown) {
            self.close(job, hurry)?;
        }
        Ok(String::new())
    }

    /// The same, where Slurm's controller has lost the hooks.
    pub(crate) fn end_lost(&self, ended: &Job, unsaved: Option<String>) -> Result<()> {
        let _lock = self.registry.lock()?;
        let now = self.registry.job(ended.job)?;
        if let Some(mut job) = now.filter(|now| now.run == ended.run && now.state != State::TornDown) {
            job.reconciled = true;
            job.unsaved = unsaved;
            self.close(job, false)?;
        }
        Ok(())
    }

    /// Whether a run has got its nodes. Those have left results, should the controller not have said so.
    pub(crate) fn has_run(&self, job: &Job) -> bool {
        let said = matches!(job.state, State::Running | State::StagingOut | State::Done);
        said || self.starts(job).is_ok_and(|starts| !starts.is_empty())
    }

    /// Ends a run. The lock is held.
    fn close(&self, mut job: Job, hurry: bool) -> Result<Job> {
        let has_run = self.has_run(&job);
        if has_run {
            job.failed = self.start_failure(&job)?;
            job.ended_s = Some(now_s());
        }
        if let Some(persistent) = &job.request.persistent {
            self.leave(&job, persistent, has_run)?;
        }
        // It was requeued while it started. That is no reason to hold it.
        job.failed = job.failed.filter(|why| !why.ends_with(command::ENDED));
        job.state = State::TornDown;
        job.hurry = hurry;
        job.changed_s = now_s();
        self.registry.put_job(&job)?;
        Ok(job)
    }

    /// A job that runs, although the controller has lost the hook that says so.
    pub(crate) fn runs(&self, seen: &Job) -> Result<()> {
        let _lock = self.registry.lock()?;
        let now = self.registry.job(seen.job)?;
        if let Some(mut job) = now.filter(|now| now.run == seen.run && now.state == seen.state) {
            job.state = State::Running;
            job.changed_s = now_s();
            self.registry.put_job(&job)?;
        }
        Ok(())
    }

    /// Takes jobs from the users of persistent pools that are over or were never set up, and forgets pools that no job
    /// has begun: a controller that was killed has written one of two records.
    pub(crate) fn settle_pools(&self) -> Result<()> {
        let _lock = self.registry.lock()?;
        for mut pool in self.registry.pools() {
            let users: Vec<u32> =
                pool.users.iter().copied().filter(|user| self.registry.uses(&pool, *user)).collect();
            if users != pool.users {
                pool.users = users;
                self.registry.put_pool(&pool)?;
            }
            let was_begun = pool.outlives || self.registry.results(&pool.key()).exists();
            if pool.users.is_empty() && (pool.ends || !was_begun) {
                self.registry.forget_pool(&pool.name);
            }
        }
        Ok(())
    }

    /// Takes a job from a persistent pool's users. The lock is held.
    fn leave(&self, job: &Job, persistent: &Persistent, has_run: bool) -> Result<()> {
        let name = persistent.name();
        for way in ["in", "out"] {
            self.registry.forget_order(name, &format!("{}.{way}", job.key()));
        }
        let Some(mut pool) = self.registry.pool(name)? else { return Ok(()) };
        if Some(pool.key()) != job.pool_key {
            return Ok(());
        }
        pool.users.retain(|user| *user != job.job);
        match persistent {
            Persistent::Create(_) if !has_run || job.failed.is_some() => {
                self.registry.forget_pool(name);
                return Ok(());
            }
            Persistent::Create(_) => pool.outlives = true,
            Persistent::Destroy(_) if has_run => pool.ends = true,
            _ => {}
        }
        self.registry.put_pool(&pool)?;
        self.forget_ended(&pool);
        Ok(())
    }

    /// Forgets a pool that has ended and whose nodes have all left it, or do not answer.
    fn forget_ended(&self, pool: &Pool) {
        if pool.ends && pool.users.is_empty() {
            self.registry.forget_pool(&pool.name);
        }
    }

    /// `forebay bb destroy NAME` of an administrator. Users have `destroying::ask`.
    pub(crate) fn destroy(&self, name: &str) -> Result<String> {
        let _lock = self.registry.lock()?;
        let mut pool = self.registry.pool(name)?.ok_or_else(|| {
            Error::new(Code::NotFound, format!("cannot destroy the pool {name}"))
                .why("there is none of this name")
                .cure("`scontrol show bbstat` lists them")
        })?;
        pool.ends = true;
        self.registry.put_pool(&pool)?;
        self.forget_ended(&pool);
        Ok(match pool.users.as_slice() {
            [] => format!("pool {name} is destroyed\n"),
            users => format!("pool {name} will be destroyed after the jobs {users:?}\n"),
        })
    }

    /// What `scontrol show bbstat` prints.
    pub(crate) fn status(&self, words: &[String]) -> Result<String> {
        Ok(super::queue::text(&self.config, &self.registry, words))
    }
}

/// Slurm lets only administrators release a job that it holds for its burst buffer.
fn released(id: u32) -> String {
    format!("mend it, then submit the job again, or have an administrator `scontrol release {id}`")
}

fn torn(id: u32) -> Error {
    Error::new(Code::Busy, format!("cannot go on with job {id}")).why("its burst buffer was torn down")
}
