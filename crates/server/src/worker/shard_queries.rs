//! Queries of the worker's own to the shard.

use forebay_meta::{Batch, Effects};
use forebay_types::limits::RING_SLOTS;
use forebay_types::{Caller, Code, Ino, Refusal, Request, Result};

use super::session::decode_kept;

/// True when there is an inode of this number, or when the shard cannot tell.
pub(super) fn has_inode(batch: &mut Batch<'_>, ino: Ino) -> bool {
    let (request, caller) = (Request::GetAttr { ino }, Caller { uid: 0, gid: 0 });
    let answer = batch.apply(caller, &request, super::now(), &mut Effects::new(), &mut []);
    !matches!(answer, Err(Refusal::Code(Code::NotFound)))
}

/// The reserved numbers of a session.
pub(super) fn reserved_for(batch: &Batch<'_>, session: u64) -> Result<Vec<Ino>> {
    let mut numbers = Vec::new();
    for slot in 0..RING_SLOTS {
        let kept = batch.kept_reply(session, slot as u8)?;
        numbers.extend(kept.and_then(|(_, kept)| decode_kept(kept).0));
    }
    Ok(numbers)
}

/// The reserved numbers of all sessions. Their backing files are not leaked, though they have no inodes.
pub(super) fn reserved(batch: &Batch<'_>) -> Result<Vec<Ino>> {
    let mut numbers = Vec::new();
    for session in batch.sessions()? {
        numbers.append(&mut reserved_for(batch, session)?);
    }
    Ok(numbers)
}
