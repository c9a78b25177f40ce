//! Reports of a mover about many files, in one request.
//!
//! Invariant: each report changes what it would change alone, or nothing. What refuses it is found before its first
//! write, as with any request, and its effects go with it. Only a failure of the shard itself ends the list, and the
//! batch with it.

use forebay_types::{encode_outcome, Reply, Request, Writer};

use crate::batch::{Answer, Batch, Context};

impl Batch<'_> {
    /// Executes [`Request::StoreReports`].
    pub(crate) fn take_reports<'o>(
        &mut self,
        c: &mut Context<'_>,
        reports: &[u8],
        payload: &'o mut [u8],
    ) -> Answer<Reply<'o>> {
        let mut w = Writer::new(payload);
        for report in Request::decode_reports(reports)? {
            let mark = c.effects.mark();
            let outcome = self.take_report(c, &report);
            self.count_writes()?;
            if let Err(code) = outcome {
                if self.tx.is_broken() {
                    return Err(code);
                }
                c.effects.truncate(mark);
            }
            encode_outcome(outcome, &mut w)?;
        }
        let n = w.len();
        Ok(Reply::Bytes(&payload[..n]))
    }

    fn take_report(&mut self, c: &mut Context<'_>, report: &Request<'_>) -> Answer<u64> {
        let done = match *report {
            Request::BeginDrain { ino } => self.begin_drain(c, ino)?,
            Request::Restored { ino, epoch, atime, mtime, layout } => {
                // Targets of another layout are checked where the request comes alone.
                if self.attached_file(ino)?.layout != layout {
                    return Err(forebay_types::Code::Invalid);
                }
                self.restored(c, ino, epoch, (atime, mtime), layout)?
            }
            Request::Intend { parent, name, version } => self.intend(c, parent, name, version)?,
            Request::Published { parent, name, ino, epoch, seen, version } => {
                self.published(c, parent, name, ino, epoch, seen, version)?
            }
            // The list has been checked.
            _ => return Err(forebay_types::Code::Malformed),
        };
        Ok(match done {
            Reply::Entry(entry) => entry.attr.epoch(),
            _ => 0,
        })
    }
}
