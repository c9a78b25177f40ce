//! Connections to the supervisor, and the requests on them.

use std::io::Read;
use std::os::fd::AsFd;
use std::time::Duration;

use forebay_types::{Code, Error};
use rustix::io::Errno;
use serde_json::json;

use super::{programs, Supervisor};
use crate::connection::Connection;
use crate::frame;
use crate::identity::random_bytes;
use crate::members::{Answers, MemberId};
use crate::mount_process::Wanted;
use crate::protocol::{Ask, Reply};
use crate::reserve::Reserve;
use crate::store::{Kept, PIECE_TAG, THIN_PIECE_TAG};

/// Maximum bytes of unread answers of a connection.
const UNREAD_BYTES_MAX: usize = 1 << 20;
/// Maximum number of connections: those of members and of single requests.
const CONNECTIONS_MAX: usize = 4096;
/// Pause after an accept failed.
const ACCEPT_AGAIN: Duration = Duration::from_millis(10);

impl Supervisor {
    /// Accepts all waiting connections.
    pub(super) fn accept(&mut self) {
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(e) => match Errno::from_io_error(&e) {
                    Some(Errno::INTR | Errno::CONNABORTED) => continue,
                    Some(e) if Reserve::is_wanted(e) => match self.refuse_one(e) {
                        Ok(()) | Err(Errno::INTR | Errno::CONNABORTED) => continue,
                        Err(Errno::AGAIN) => return,
                        Err(_) => return std::thread::sleep(ACCEPT_AGAIN),
                    },
                    _ => return,
                },
            };
            let Ok(peer) = rustix::net::sockopt::socket_peercred(&stream) else { continue };
            let me = rustix::process::geteuid();
            if peer.uid != me && !peer.uid.is_root() || self.connections.len() >= CONNECTIONS_MAX {
                tracing::warn!(uid = peer.uid.as_raw(), "connection refused");
                continue;
            }
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            let connection =
                Connection { stream, received: Vec::new(), to_send: Vec::new(), close_when_sent: false };
            self.connections.insert(self.next_id, connection);
            self.next_id += 1;
        }
    }

    /// Refuses a connection because no descriptor is left.
    fn refuse_one(&mut self, e: Errno) -> std::result::Result<(), Errno> {
        let error = Error::new(Code::NoResources, "the pool's daemon cannot take another connection")
            .why(e)
            .cure("start the pool with a higher limit of open files (ulimit -n)");
        if self.refusals.may_say() {
            tracing::error!("{error}");
        }
        let refusal = frame::encode(&Reply::failed(&error)).unwrap_or_default();
        self.reserve.refuse(self.listener.as_fd(), &refusal)
    }

    /// Sends a connection's queued answers, and handles the requests that it sent.
    pub(super) fn serve(&mut self, id: MemberId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let mut open = connection.flush();
        let mut buffer = [0u8; 16 * 1024];
        while open {
            match connection.stream.read(&mut buffer) {
                Ok(0) => open = false,
                Ok(n) => connection.received.extend_from_slice(&buffer[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => open = false,
            }
        }
        while let Some(connection) = self.connections.get_mut(&id) {
            match frame::take::<Ask>(&mut connection.received) {
                Ok(Some(ask)) => self.handle(id, ask),
                Ok(None) => break,
                Err(e) => {
                    self.send(id, &Reply::failed(&e));
                    if let Some(connection) = self.connections.get_mut(&id) {
                        connection.close_when_sent = true;
                        connection.received.clear();
                        open &= !connection.to_send.is_empty();
                    }
                    break;
                }
            }
        }
        if !open {
            self.close(id);
        }
    }

    fn close(&mut self, id: MemberId) {
        if self.connections.remove(&id).is_none() {
            return;
        }
        let (answers, token) = self.members.disconnect(id, self.now_ms());
        if let Some(token) = token {
            let killed = crate::programs::kill_marked(&token);
            tracing::warn!(member = id, killed, "a member vanished; its programs were ended");
        }
        self.answer(answers);
    }

    fn handle(&mut self, id: MemberId, ask: Ask) {
        let now = self.now_ms();
        let answers = match ask {
            Ask::Join(_) if self.stopping.is_some() => {
                let gone = Error::new(Code::PoolGone, "cannot join the pool").why("it is stopping");
                return self.send(id, &Reply::failed(&gone));
            }
            Ask::Join(request) => match random_bytes() {
                Ok(bytes) => {
                    tracing::info!(member = id, label = request.label, group = request.group, "joins");
                    self.is_drained = false;
                    let token = bytes.iter().map(|b| format!("{b:02x}")).collect();
                    self.members.join(id, request, token, now)
                }
                Err(e) => return self.send(id, &Reply::failed(&e)),
            },
            Ask::Claim { key } => self.members.claim(id, &key),
            Ask::Finish { key, failure } => self.members.finish(id, &key, failure),
            Ask::LeavePlan { success } => self.members.leave_plan(id, success, now),
            Ask::Status => {
                let reply = Reply::Status(self.status());
                return self.send(id, &reply);
            }
            Ask::Keep => {
                tracing::info!(member = id, "pool stays after its last member");
                self.pool.identity.embedded = false;
                let reply = match self.pool.identity.write(&self.pool.dir) {
                    Ok(()) => Reply::Kept,
                    Err(e) => Reply::failed(&e),
                };
                return self.send(id, &reply);
            }
            Ask::Draining => {
                self.members.drain_begins(id);
                return self.send(id, &Reply::Noted);
            }
            Ask::Drained => {
                // What the programs of other members have written meanwhile, or write from now on, may not be copied.
                self.is_drained = self.members.drain_ends(id);
                return self.send(id, &Reply::Noted);
            }
            Ask::Mount { .. } if self.stopping.is_some() => {
                let gone = Error::new(Code::PoolGone, "cannot mount the pool").why("it is stopping");
                return self.send(id, &Reply::failed(&gone));
            }
            Ask::Mount { at, options } => {
                self.mounts += 1;
                return self.mount.mount(Wanted { at, options }, id);
            }
            Ask::Unmount { at, lazy } => return self.mount.unmount(at.as_deref(), lazy, id),
            Ask::StartMover if self.stopping.is_some() => {
                let gone = Error::new(Code::PoolGone, "cannot start the mover").why("the pool is stopping");
                return self.send(id, &Reply::failed(&gone));
            }
            Ask::StartMover => return self.mover.start(&self.pool.dir, id),
            // One that stops already stops as it was told to.
            Ask::Down { keep, .. } if self.stopping.is_some() => return self.begin_stop(keep, Some(id)),
            Ask::Down { keep, uses, spares_volumes } => {
                // A program that has attached and a piece that was made are in the store, or in what the worker has sent.
                self.hear_worker();
                if uses.is_some_and(|uses| self.is_used_since(uses)) || spares_volumes && self.has_volumes() {
                    return self.send(id, &Reply::Used);
                }
                return self.begin_stop(keep, Some(id));
            }
        };
        self.answer(answers);
    }

    /// How often programs could begin to use the pool: its members, mounts and attached programs so far. A first backing
    /// store counts too: what was there before it has nothing to copy.
    fn uses(&self) -> u64 {
        self.members.ever() + self.mounts + self.programs + u64::from(self.mover.is_wanted())
    }

    /// True if programs use the pool, or have used it since `uses` was reported.
    fn is_used_since(&self, uses: u64) -> bool {
        uses != self.uses() || self.members.count() > 0 || !programs::living(&self.kept).is_empty()
    }

    /// True if the pool has pieces of volumes. If not, none can be made from now on.
    fn has_volumes(&mut self) -> bool {
        let has_pieces =
            |kept: &Kept| [PIECE_TAG, THIN_PIECE_TAG].iter().any(|start| kept.of(start).next().is_some());
        if has_pieces(&self.kept) {
            return true;
        }
        self.close_to_volumes(true);
        self.hear_worker();
        let has = has_pieces(&self.kept);
        if has {
            self.close_to_volumes(false);
        }
        has
    }

    fn close_to_volumes(&self, closed: bool) {
        self.life.iter().for_each(|life| life.close_to_volumes(closed));
    }

    fn status(&mut self) -> serde_json::Value {
        self.hear_worker();
        let living = programs::living(&self.kept);
        let state = match &self.worker {
            _ if self.stopping.is_some() => "stopping",
            Some(worker) if worker.ready => "up",
            _ => "restarting",
        };
        let identity = &self.pool.identity;
        json!({
            "pool": self.pool.dir.path().to_string_lossy(),
            "uuid": identity.uuid,
            "state": state,
            "node": identity.node,
            "pool_id": self.pool_id,
            "node_count": self.pool.membership.as_ref().map_or(1, |m| m.nodes.len()),
            "media": identity.media.to_string(),
            "backing": identity.backing,
            "embedded": identity.embedded,
            "capacity_bytes": identity.capacity_of_all(),
            "targets": self.pool.targets_status(),
            "pids": {
                "supervisor": std::process::id(),
                "worker": self.worker.as_ref().map(|w| w.pid()),
            },
            "mounts": self.mount.status(),
            "mover": self.mover.status(),
            "restarts": self.restarts,
            "last_crash": self.last_end,
            "uptime_s": self.born.elapsed().as_secs(),
            "members": self.members.count(),
            "member_labels": self.members.labels(),
            "programs": living.len(),
            "program_labels": programs::labels(&living),
            "uses": self.uses(),
            "costs": self.pool.costs,
            "capabilities": self.pool.capabilities,
        })
    }

    pub(super) fn answer(&mut self, answers: Answers) {
        for (id, answer) in answers {
            self.send(id, &Reply::Member(answer));
        }
    }

    pub(super) fn send(&mut self, id: MemberId, reply: &Reply) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let Ok(bytes) = frame::encode(reply) else { return };
        connection.to_send.extend_from_slice(&bytes);
        if !connection.flush() || connection.to_send.len() > UNREAD_BYTES_MAX {
            self.close(id);
        }
    }
}
