//! The verbs, one a file.

mod attach;
mod batch;
mod completions;
mod down;
mod durable;
mod emulate;
mod fsck;
mod layout;
mod ls;
mod model;
mod mount;
mod nodes;
mod pin;
mod recover;
mod resolve;
mod stage;
mod stat;
mod state;
mod status;
mod tasks;
mod up;
mod volume;

use std::process::ExitCode;

use forebay_types::Result;

use crate::arguments::{Arguments, Verb};

/// Runs the verb of the command line.
pub(crate) fn dispatch(arguments: Arguments) -> Result<ExitCode> {
    let Arguments { pool, verb } = arguments;
    match verb {
        Verb::Up(a) => up::up(pool, &a),
        Verb::Down(a) => down::down(pool, &a),
        Verb::Status(a) => status::status(pool, &a),
        Verb::Ls(a) => ls::ls(pool, &a),
        Verb::Stat(a) => stat::stat(pool, &a),
        Verb::Mount(a) => mount::mount(pool, &a),
        Verb::Umount(a) => mount::umount(pool, &a),
        Verb::Run(a) => crate::run::run(pool, a),
        Verb::StageIn(a) => stage::stage_in(pool, a),
        Verb::StageOut(a) => stage::stage_out(pool, a),
        Verb::Attach(a) => attach::attach(pool, &a),
        Verb::Detach(a) => attach::detach(pool, &a),
        Verb::State(a) => state::state(pool, &a),
        Verb::WaitDurable(a) => durable::wait_durable(pool, &a),
        Verb::Sync(a) => tasks::work(pool, forebay_tasks::Verb::Sync, &a.work),
        Verb::Prestage(a) => tasks::work(pool, forebay_tasks::Verb::Prestage, &a.work),
        Verb::Release(a) => tasks::work(pool, forebay_tasks::Verb::Release, &a.work),
        Verb::Purge(a) => tasks::work(pool, forebay_tasks::Verb::Purge, &a.work),
        Verb::Refresh(a) => tasks::work(pool, forebay_tasks::Verb::Refresh, &a.work),
        Verb::Pin(a) => pin::pin(pool, &a.paths, true),
        Verb::Unpin(a) => pin::pin(pool, &a.paths, false),
        Verb::Tasks(a) => tasks::tasks(pool, &a),
        Verb::Resolve(a) => resolve::resolve(pool, &a),
        Verb::Recover(a) => match a.job() {
            Some(job) => batch::recover(job, &a),
            None => recover::recover(&a),
        },
        Verb::Layout(a) => layout::layout(pool, &a.verb),
        Verb::Volume(a) => volume::volume(pool, &a.verb),
        Verb::Emulate(a) => emulate::emulate(&a.verb),
        Verb::Model(a) => model::model(pool, &a.verb),
        Verb::Bb(a) => batch::bb(a),
        Verb::Job(a) => batch::job(a),
        Verb::Queue(a) => batch::queue(&a),
        Verb::Fsck(a) => fsck::fsck(pool, &a),
        Verb::Completions(a) => completions::completions(&a),
    }
}
