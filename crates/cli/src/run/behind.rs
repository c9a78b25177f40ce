//! The backing store of a run's own pool: attached before the program, drained after it.

use std::ffi::OsStr;

use forebay_client::{Pool, Role};
use forebay_server::control::{self, Turn};
use forebay_sys::signals::Signals;
use forebay_tasks::StoreSettings;
use forebay_types::{Code, Error, Result};

use super::enter::Entered;
use crate::backing::{self, Url};
use crate::staging::Style;
use crate::{failure, table};

/// The store that a run's pool is in front of.
#[derive(Debug)]
pub(super) struct Behind {
    url: Url,
}

impl Behind {
    pub(super) fn read(url: &OsStr) -> Result<Behind> {
        Url::parse(url).map(|url| Behind { url })
    }

    /// What the members of a job hold until their programs have ended.
    pub(super) fn key(&self) -> String {
        format!("drain {}", self.url.text)
    }

    /// Attaches the store at the root, unless another rank does.
    pub(super) fn attach(&self, entered: &mut Entered) -> Result<()> {
        let claim = format!("attach {}", self.url.text);
        match entered.membership.claim(&claim)? {
            Turn::Done => return Ok(()),
            Turn::Failed(why) => {
                let what = format!("cannot attach {}", self.url.text);
                return Err(Error::new(Code::Io, what).why(format!("another rank tried: {why}")));
            }
            Turn::Mine => {}
        }
        let attached = Pool::attach_as(&entered.dir, Role::Tool).and_then(|pool| {
            backing::attach(&entered.dir, pool, b"/", &self.url, StoreSettings::of(&self.url.text), false)
        });
        let told = attached.as_ref().map(drop).map_err(|e| format!("{}: {}", e.what, e.why));
        entered.membership.finish_claim(&claim, told)?;
        attached.map(drop)
    }

    /// Copies to the store what it lacks. If that is not possible, the pool stays up. True when the store has
    /// everything.
    pub(super) fn drain(&self, entered: &mut Entered, style: Style, signals: &Signals) -> bool {
        // Without an answer the daemon copies once more, when the last member has left.
        if let Err(e) = entered.membership.draining() {
            failure::say(&e);
        }
        let drained = Pool::attach_as(&entered.dir, Role::Tool).and_then(|pool| {
            let drained = backing::drain_until_stopped(&entered.dir, pool, None, style, signals)?;
            Ok((drained, backing::would_lose(&entered.dir, pool, None)?))
        });
        let e = match drained {
            Ok((drained, lacking)) if lacking.is_nothing() => {
                if drained.files > 0 && style != Style::Messages {
                    let (files, bytes) = (table::count(drained.files, "file"), table::bytes(drained.bytes));
                    note!("forebay: copied to {}: {files} ({bytes})", self.url.text);
                }
                if let Err(e) = entered.membership.drained() {
                    failure::say(&e);
                }
                return true;
            }
            Ok((drained, lacking)) => {
                let what = format!("cannot copy everything to {}", self.url.text);
                drained.refusal(what, lacking, &format!("down --pool {} --discard", entered.dir.display()))
            }
            Err(e) => e,
        };
        failure::say(&e);
        self.rescue(entered);
        false
    }

    fn rescue(&self, entered: &mut Entered) {
        let dir = entered.dir.display();
        if entered.embedded {
            if let Err(e) = entered.membership.keep_pool() {
                return failure::say(&e);
            }
            entered.embedded = false;
        }
        note!("forebay: the results are not lost: their pool stays up, and goes on copying. To copy them and stop it:");
        note!("  forebay down --pool {dir}");
        if control::status(&entered.dir).is_err() {
            note!("forebay: the pool does not answer: see {dir}/log");
        }
    }
}
