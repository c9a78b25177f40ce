//! The worker: the process of `forebayd` that owns the shard, the rings and the board.
//!
//! Threads and what they exchange:
//!
//! ```text
//!  clients' rings ──► shard thread ──► board, replies     (or the thread that runs its rounds: handoff.rs)
//!                        ▲    │ orphans of dead clients
//!        new sessions,   │    ▼
//!        status, check   │  sweeper      unlinks backing files, then reports back
//!                        │
//!  the kernel that has the pool mounted ◄─── notifiers (processes) ◄─► shard thread
//!  other nodes, if the pool has several ◄─── network thread, I/O workers ◄─► shard thread
//!
//!  P/socket ─────────► attendant ──► a short-lived thread for each slow connection (attach, control)
//!  pidfds, SIGTERM ───────┘
//! ```
//!
//! Threads communicate through channels, and clients wake the shard thread with the doorbell. The shard thread and the
//! network thread run each other's rounds while the other one sleeps (`handoff.rs`); the shard thread waits for another
//! thread only while that one runs such a round. Order of a request: record in the flight recorder, apply in the open
//! transaction, write to the journal, publish on the board, answer. The transaction is committed when it is long and
//! when the shard rests. A worker that is killed at any of these steps leaves what the next one needs: it applies the
//! changes of the journal to the last commit, sends their replies again, and serves all else as new.
//!
//! Tests: `tests/worker.rs`, and the crash tests of the conformance crate.

mod acks;
mod adaptive_spin;
mod arrivals;
mod attached_programs;
mod attached_ring;
mod attendant;
mod backing_files;
mod batch;
mod call;
mod channel;
mod check;
mod clock;
mod coordination;
mod core;
mod cross_check;
mod device_nodes;
mod durable_table;
mod end_of_worker;
#[cfg(debug_assertions)]
mod faults;
mod handoff;
mod journal;
mod known_parts;
mod late_removals;
mod layout_change;
mod leases;
mod message;
mod moments;
mod mounter;
mod mover_mail;
mod network;
mod notifier;
mod own_answers;
mod piece_table;
mod recall_limits;
mod recorder;
mod session;
mod session_id;
mod sessions;
mod shard_queries;
mod snapshot_hold;
mod snapshots;
mod statistics;
#[cfg(any(test, feature = "simulation"))]
pub mod stepped;
mod store_waits;
mod sweeper;
mod targets;
mod volumes;
mod watches;
mod wide;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc;
use std::sync::Arc;

use forebay_meta::{Shard, ShardOptions};
use forebay_ring::{BoardWriter, Doorbell};
use forebay_sys::descriptor;
use forebay_types::limits::{BOARD_BYTES_MAX, BOARD_BYTES_MIN, BOARD_FRACTION};
use forebay_types::{Code, Error, NodeId, Result};

use crate::identity::PoolIdentity;
use crate::notifier::Starter;
use crate::pacing;
use crate::setup::{WorkerSetup, WAS_STOPPED};
use crate::store::FdStore;
use attendant::{Attendant, Attending, Restored};
pub(crate) use clock::now;
use core::state::ShardThread;
use handoff::Handoff;
use journal::Journal;
use known_parts::KnownParts;
use message::Message;
use recorder::FlightRecorder;
use statistics::Statistics;
use targets::{device_of, has_stable_inodes, open_targets, shard_dir};
use volumes::Volumes;
use watches::Watches;
use wide::Wide;

/// Checks the shard and the backing files of a node's targets while no daemon serves them. There is at least one
/// target. Changes that the last daemon acknowledged and did not commit are applied first.
pub fn check_at_rest(target_dirs: &[OwnedFd], identity: &PoolIdentity) -> Result<serde_json::Value> {
    let target_dir = &target_dirs[0];
    let dir = shard_dir(target_dir);
    let shard = match Shard::open(&dir) {
        Ok(shard) => {
            core::recovery::replay(&shard, &mut Journal::open(target_dir.as_fd())?)?;
            shard
        }
        // Damaged: the journal waits until the shard is repaired.
        Err(e) if e.code == Code::Corrupt => Shard::open_for_check(&dir)?,
        Err(e) => return Err(e),
    };
    check::check(&shard, &open_targets(target_dirs, identity)?, Vec::new())
}

/// Applies to the shard in a target what was acknowledged and not committed, while no daemon serves it.
pub(crate) fn settle_at_rest(target_dir: &OwnedFd) -> Result<()> {
    let shard = Shard::open(&shard_dir(target_dir))?;
    core::recovery::replay(&shard, &mut Journal::open(target_dir.as_fd())?)
}

fn open_shard(setup: &WorkerSetup) -> Result<Shard> {
    let dir = shard_dir(&setup.target_dirs[0]);
    if dir.join("data.mdb").exists() {
        return Shard::open(&dir);
    }
    let owner = rustix::process::getuid().as_raw();
    let options = ShardOptions {
        node: NodeId(setup.identity.node),
        map_bytes: setup.identity.capacity_bytes,
        root_mode: 0o755,
        root_uid: owner,
        root_gid: rustix::process::getgid().as_raw(),
    };
    Shard::create(&dir, &options, now())
}

/// The doorbell that clients of the last worker hold, or a new one that outlives this worker.
fn take_doorbell(setup: &mut WorkerSetup) -> Result<(OwnedFd, Doorbell)> {
    const TAG: &str = "doorbell";
    let what = |e: std::io::Error| Error::io("cannot make the doorbell", &e);
    let left = setup.restored.iter().position(|(tag, fds)| tag == TAG && fds.len() == 1);
    if let Some(fd) = left.and_then(|i| setup.restored.swap_remove(i).1.pop()) {
        let doorbell = Doorbell::open(fd.as_fd()).map_err(what)?;
        return Ok((fd, doorbell));
    }
    let (fd, doorbell) = Doorbell::create().map_err(what)?;
    setup.store.put(TAG, &[fd.as_fd()])?;
    Ok((fd, doorbell))
}

/// The size of the board of a pool with this capacity.
pub(crate) fn board_bytes(capacity_bytes: u64) -> u64 {
    (capacity_bytes / BOARD_FRACTION).clamp(BOARD_BYTES_MIN, BOARD_BYTES_MAX)
}

/// Serves until SIGTERM, then closes cleanly.
///
/// # Errors
/// Errors that make serving impossible: a shard of a newer format or a damaged one, a full medium, no memory.
pub fn run(mut setup: WorkerSetup) -> Result<()> {
    let stop = attendant::block_signals()?;
    if setup.membership.is_some() {
        forebay_sys::stopped::watch(handoff::STOPPED_MAX, WAS_STOPPED);
    }
    let device = device_of(&setup.target_dirs[0])?;
    let stable = |(bit, target)| u64::from(has_stable_inodes(target)) << bit;
    let stable_inodes = setup.target_dirs.iter().enumerate().map(stable).sum();
    let new = !shard_dir(&setup.target_dirs[0]).join("data.mdb").exists();
    let shard_box = Box::into_raw(Box::new(open_shard(&setup)?));
    // An error from here on ends the process, and leaves the shard open until then.
    // SAFETY: only the end of this function frees it, after its last borrower.
    let shard: &'static Shard = unsafe { &*shard_box };
    let what = |e: std::io::Error| Error::io("cannot make shared memory for clients", &e);
    let board_bytes = board_bytes(setup.identity.capacity_bytes);
    let (board_fd, mut board) = BoardWriter::create(board_bytes).map_err(what)?;
    if setup.membership.is_some() {
        board.set_node(NodeId(setup.identity.node));
    }
    let (doorbell_fd, doorbell) = take_doorbell(&mut setup)?;
    let again = doorbell_fd.try_clone().map_err(what)?;
    let notifiers = Arc::new(Starter::new(again, Some(setup.store.try_clone()?)));
    let doorbell = Arc::new(doorbell);
    let statistics = Arc::new(Statistics::default());
    let pacing = pacing::taken_from(&mut setup.restored);
    let pacers = pacing.as_ref().map(pacing::opened).transpose()?;
    let targets = Arc::new(open_targets(&setup.target_dirs, &setup.identity)?.paced_by(pacers));
    let recorder = FlightRecorder::open(setup.flight_recorder.as_fd())?;
    let (to_shard, from_others) = mpsc::channel::<Message>();
    let epoch = clock::new_epoch();

    // The shard's rounds create backing files on all targets, so each must be in memory.
    let in_memory = (0..setup.target_dirs.len()).all(|target| stable_inodes >> target & 1 == 1);
    let handoff = Handoff::new(Arc::clone(&doorbell), in_memory);
    let pieces = piece_table::PieceTable::default();
    let network = match &setup.membership {
        None => None,
        Some(membership) => Some(network::start(
            membership,
            setup.identity.capacity_of_all(),
            Arc::clone(&targets),
            to_shard.clone(),
            &handoff,
            network::KeptOpen::restored(setup.store.try_clone()?, &mut setup.restored, pieces.clone())?,
            &statistics,
        )?),
    };
    let known_parts = match &network {
        Some(_) => KnownParts::restored(&setup.store, &mut setup.restored)?,
        None => KnownParts::default(),
    };
    let first = setup.target_dirs[0].try_clone().map_err(|e| Error::io("cannot open the target", &e))?;
    // Mirrors cause many small changes, which are cheap in memory.
    let mirrors = if has_stable_inodes(&first) { descriptor::path(&first) } else { setup.pool_dir.clone() };
    let watches = Watches::restored(
        &mirrors,
        &targets,
        &to_shard,
        &doorbell,
        setup.store.try_clone()?,
        &mut setup.restored,
    );
    let volumes = Volumes::restored(
        &setup.identity,
        &targets,
        setup.store.try_clone()?,
        &mut setup.restored,
        pieces,
        {
            let (to_shard, doorbell) = (to_shard.clone(), Arc::clone(&doorbell));
            move |done| {
                let told = to_shard.send(Message::Volumes(done)).is_ok();
                doorbell.ring();
                told
            }
        },
    )?;
    let to_network = network.as_ref().map(|n| n.commands.clone());
    let beyond = network.as_ref().map(|n| (n.node, n.commands.clone()));
    let sweeper = sweeper::start(Arc::clone(&targets), to_shard.clone(), Arc::clone(&doorbell), beyond)?;
    let journal = Journal::open(setup.target_dirs[0].as_fd())?;
    let supervisor = setup.store.try_clone()?;
    let places = snapshots::Places::of(&setup.target_dirs, &setup.identity)?;
    let is_embedded = setup.identity.embedded;
    let snapshots = match &places {
        Some(places) => {
            let statistics = Arc::clone(&statistics);
            Some(snapshots::start(places, to_shard.clone(), Arc::clone(&doorbell), statistics)?)
        }
        None => None,
    };
    let attendant = Attendant {
        setup,
        pacing,
        stop,
        board_fd,
        board_bytes: board.bytes() as u64,
        doorbell_fd,
        doorbell: Arc::clone(&doorbell),
        device,
        stable_inodes,
        epoch,
        to_shard: to_shard.clone(),
        network: to_network,
        watches,
    };
    let mut shard_thread = ShardThread::new(
        shard,
        targets,
        board,
        recorder,
        journal,
        (to_shard, from_others),
        sweeper,
        statistics,
        epoch,
        network,
        new,
    )?;
    shard_thread.wide = Wide::with(known_parts);
    shard_thread.volumes = volumes;
    shard_thread.notifiers = Some(notifiers);
    let Restored { attending, sessions, mount } = attendant.restore()?;
    if let Some((session, device)) = mount {
        shard_thread.resume_mount(session, device)?;
    }
    shard_thread.recover(sessions)?;
    #[cfg(debug_assertions)]
    {
        shard_thread.watcher = faults::asked_for();
    }
    handoff.install(shard_thread)?;
    attending.ready()?;
    let served = serve(&handoff, attending, &supervisor);
    handoff.take_core();
    drop(snapshots);
    if let (Some(places), Ok(()), false) = (&places, &served, is_embedded) {
        places.write_last(shard);
    }
    if served.is_ok() {
        // The pool ends. Programs may keep a target in memory alive, and their watches would get no more events.
        watches::end(&mirrors);
    }
    // SAFETY: from `Box::into_raw`; its borrower was dropped with the core.
    drop(unsafe { Box::from_raw(shard_box) });
    served
}

/// Serves in this thread, and attends to connections in another, until both are told to stop.
fn serve(handoff: &Handoff, mut attending: Attending, supervisor: &FdStore) -> Result<()> {
    std::thread::scope(|scope| {
        let attendant = std::thread::Builder::new()
            .name("attendant".into())
            .spawn_scoped(scope, move || attending.attend())
            .map_err(|e| Error::io("cannot start a thread", &e))?;
        let served = handoff.serve();
        if let Err(e) = &served {
            // The next worker takes over at once, and what was acknowledged is in the journal. Without the exit, the
            // attendant would wait for clients for ever.
            tracing::error!("the shard thread cannot continue: {e}");
            if e.code == Code::Stale {
                supervisor.failed(e); // no next worker could serve either
            }
            std::process::exit(1);
        }
        match attendant.join() {
            Ok(attended) => served.and(attended),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}
