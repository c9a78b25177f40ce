//! Requests to many nodes at once, mostly for operations on their backing files. All requests are in progress at the
//! same time, and the nodes do not wait for one another.

use forebay_ring::{Claim, Ring};
use forebay_types::limits::BACKING_AHEAD;
use forebay_types::{BackingAttr, BackingId, BackingOp, Caller, Code, Reply, Request};

use crate::attached::Attached;
use crate::call_deadline::CallDeadline;
use crate::pool::Pool;
use crate::remote_inodes::gone_is_stale;

/// Room for a request without data, and for its reply.
const MESSAGE_BYTES: usize = 256;
/// Root, which passes every check: permissions were checked when the file was opened, or are not required.
const NOBODY: Caller = Caller { uid: 0, gid: 0 };

impl Pool {
    /// Sends all of `asks`. `take` gets the replies in the order of the requests, each with the request's key.
    pub(crate) fn ask_many<'a, K>(
        &self,
        asks: &mut dyn Iterator<Item = (K, BackingId, BackingOp<'a>)>,
        take: impl FnMut(K, Result<Reply<'_>, Code>),
    ) -> Result<(), Code> {
        self.ask_each(&mut asks.map(|(key, id, op)| (key, Request::Backing { id, op })), take)
    }

    /// Sends all of `asks`, which must be short requests with short replies. `take` gets the replies in the order of
    /// the requests, each with the request's key.
    pub(crate) fn ask_each<'a, K>(
        &self,
        asks: &mut dyn Iterator<Item = (K, Request<'a>)>,
        mut take: impl FnMut(K, Result<Reply<'_>, Code>),
    ) -> Result<(), Code> {
        let attached: &'static Attached = self.attached()?;
        let (ring, alive): (&'static Ring, _) = (&attached.ring, || self.is_alive(attached));
        // A circular buffer that starts at `first`. Nothing is allocated, because a stat may run in a signal handler.
        let mut under_way: [Option<(K, Claim<'_>)>; BACKING_AHEAD] = [const { None }; BACKING_AHEAD];
        let (mut first, mut count, mut next, mut deadline) = (0, 0, None, CallDeadline::new());
        loop {
            while count < BACKING_AHEAD {
                let Some((key, request)) = next.take().or_else(|| asks.next()) else { break };
                if deadline.is_over() {
                    take(key, Err(Code::PoolGone));
                    continue;
                }
                let claimed = match count == 0 {
                    true => ring.claim(&alive).map(Some).map_err(|failure| self.failed(attached, failure)),
                    // A call waits for a slot only while it holds none. Otherwise calls that hold slots could wait for
                    // one another for ever.
                    false => Ok(ring.try_claim()),
                };
                let claim = match claimed {
                    Ok(Some(claim)) => claim,
                    Ok(None) => {
                        next = Some((key, request));
                        break;
                    }
                    Err(code) => {
                        take(key, Err(code));
                        continue;
                    }
                };
                let mut message = [0; MESSAGE_BYTES];
                match request.encode(NOBODY, &mut message) {
                    Ok(n) => {
                        self.post(attached, &claim, &message[..n]);
                        under_way[(first + count) % BACKING_AHEAD] = Some((key, claim));
                        count += 1;
                    }
                    Err(code) => take(key, Err(code)),
                }
            }
            let Some((key, claim)) = under_way[first].take() else { return Ok(()) };
            (first, count) = ((first + 1) % BACKING_AHEAD, count - 1);
            let mut key = Some(key);
            let until_ns = deadline.until_ns();
            let finished = claim.finish_by(until_ns, &mut [0; MESSAGE_BYTES], &alive, |reply, _| {
                if let Some(key) = key.take() {
                    take(key, Reply::decode(reply));
                }
            });
            match finished {
                Ok(()) => deadline.answered(),
                Err(_) => deadline.end(),
            }
            if let (Err(failure), Some(key)) = (finished, key) {
                take(key, Err(self.failed(attached, failure)));
            }
        }
    }

    /// Applies operations whose replies carry no data to many backing files of other nodes. Returns the first error.
    pub(crate) fn ask_all<'a>(
        &self,
        asks: &mut dyn Iterator<Item = (BackingId, BackingOp<'a>)>,
    ) -> Result<(), Code> {
        let mut all = Ok(());
        self.ask_many(&mut asks.map(|(id, op)| ((), id, op)), |(), reply| {
            let done = match reply {
                Ok(Reply::Done) => Ok(()),
                Ok(_) => Err(Code::Malformed),
                Err(code) => Err(gone_is_stale(code)),
            };
            all = all.and(done);
        })?;
        all
    }

    /// Queries the attributes of many backing files.
    pub(crate) fn stat_all<K>(
        &self,
        asks: &mut dyn Iterator<Item = (K, BackingId)>,
        mut take: impl FnMut(K, Result<BackingAttr, Code>),
    ) -> Result<(), Code> {
        self.ask_many(&mut asks.map(|(key, id)| (key, id, BackingOp::Stat)), |key, reply| {
            take(
                key,
                reply.and_then(|reply| match reply {
                    Reply::Backing(attr) => Ok(attr),
                    _ => Err(Code::Malformed),
                }),
            );
        })
    }
}
