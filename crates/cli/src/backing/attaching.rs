//! Puts a directory of the pool in front of a store.

use std::path::Path;

use forebay_client::{Fail, PathBuffer, Pool};
use forebay_server::control;
use forebay_tasks::{Durable, MoverClient, Recall, StoreSettings};
use forebay_types::{Code, Entry, Error, Ino, Reply, Request, Result, FLAG_ATTACHED, FLAG_STORE};

use super::detaching::forget_all;
use super::trees::SETTINGS;
use super::{path_of, settings_of, store_of, Url};
use crate::{pool, table};

/// A store that was attached.
#[derive(Debug)]
pub(crate) struct Attached {
    /// The directory of the pool.
    pub(crate) at: Vec<u8>,
    /// How.
    pub(crate) settings: StoreSettings,
    /// True when it was attached before, in the same way.
    pub(crate) already: bool,
}

impl Attached {
    /// The directory, for people.
    pub(crate) fn place(&self) -> String {
        table::printable(&self.at)
    }

    /// The result in words.
    pub(crate) fn text(&self) -> String {
        let StoreSettings {
            url,
            read_only,
            drain,
            rules,
            durable,
            explicit,
            recall,
            yield_to,
            directory_ino: _,
            file_system: _,
        } = &self.settings;
        let already = if self.already { "; it was already" } else { "" };
        let shows = match explicit {
            true => ", which shows only what the pool gets",
            false => "",
        };
        let writes = match read_only {
            true => "read-only".to_owned(),
            false => {
                let rules = rules.iter().map(|rule| format!("; {}: {}", rule.pattern, rule.policy));
                let waits = match durable {
                    Durable::No => "",
                    Durable::Fsync => "; fsync waits for the store",
                    Durable::Close => "; fsync and close wait for the store",
                };
                let yields = yield_to.as_ref().map(|files| format!("; gives way to {files}"));
                let yields = yields.unwrap_or_default();
                format!("drained: {drain}{}{waits}{yields}", rules.collect::<String>())
            }
        };
        let reads = match recall {
            Recall::Yes => String::new(),
            recall => format!("; {}", recall_in_words(*recall)),
        };
        format!("{} is in front of {url}{shows}, {writes}{reads}{already}\n", self.place())
    }
}

/// What `--recall` means.
pub(crate) fn recall_in_words(recall: Recall) -> String {
    match recall {
        Recall::Yes => "programs have released files copied by reading them".to_owned(),
        Recall::No => "no program has released files copied by reading them".to_owned(),
        Recall::UpTo(bytes) => {
            format!("a process has at most {} copied within 10 minutes by reading", table::bytes(bytes))
        }
    }
}

/// Attaches a store at the directory `at` of the pool in `dir`. Creates the directory if it is missing. On failure
/// everything is as before.
///
/// A store that is attached there in the same way, but for its directory, gets to know that one: an older version did not
/// note it, or the user says that it was `replaced`.
pub(crate) fn attach(
    dir: &Path,
    pool: &'static Pool,
    at: &[u8],
    url: &Url,
    mut settings: StoreSettings,
    replaced: bool,
) -> Result<Attached> {
    let what = format!("cannot attach {} at {}", url.text, table::printable(at));
    if settings.durable != Durable::No && !settings.is_written() {
        return Err(Error::new(Code::Invalid, what)
            .why(format!("with --durable {} programs would wait for ever", settings.durable.name()))
            .cure("leave out --durable, or --read-only and --drain never"));
    }
    (settings.directory_ino, settings.file_system) = url.check_place(dir, &control::status(dir)?)?;
    let (entry, made) = directory(pool, at, &what)?;
    let before = settings_of(pool, entry.attr.ino).filter(|_| entry.attr.flags & FLAG_STORE != 0);
    if let Some(before) = before.filter(|before| before.differ_in_directory_alone(&settings)) {
        let is_unknown = (before.directory_ino, before.file_system) == (None, None);
        if before != settings && !is_unknown && !replaced {
            return Err(Error::new(Code::Exists, what)
                .why("it is attached there, with another directory than the one that is there now")
                .cure(
                    "mount its file system; if it was made anew there, such as from a backup: `forebay attach \
                     --replaced`, and the other options as before",
                ));
        }
        if before != settings {
            MoverClient::connect(dir)?.probe(&settings.url)?;
            let value = serde_json::to_vec(&settings).map_err(|e| Error::new(Code::Invalid, &what).why(e))?;
            let request = Request::SetXattr { ino: entry.attr.ino, name: SETTINGS, value: &value, flags: 0 };
            pool.request(&request, |_| Ok(())).map_err(|code| refused(code, &what))?;
        }
        return Ok(Attached { at: at.to_owned(), settings, already: true });
    }
    let done = try_attach(dir, pool, &entry, &settings, &what);
    if let (Err(_), true) = (&done, made) {
        let _ = pool.remove_directory(pool::place(at), &mut PathBuffer::new());
    }
    done.map(|()| Attached { at: at.to_owned(), settings, already: false })
}

/// The directory, and whether it was created.
fn directory(pool: &Pool, at: &[u8], what: &str) -> Result<(Entry, bool)> {
    let look = || pool.resolve(pool::place(at), true, &mut PathBuffer::new());
    match look() {
        Ok(entry) if entry.attr.is_directory() => Ok((entry, false)),
        Ok(_) => Err(Error::new(Code::NotDirectory, what).why("it is no directory")),
        Err(Fail::Code(Code::NotFound)) => {
            // SAFETY: sets the mask that it had before; this process has one thread that creates files.
            let mask = unsafe { libc::umask(0o022) };
            // SAFETY: as above.
            unsafe { libc::umask(mask) };
            let made = pool.make_directory(pool::place(at), 0o777 & !mask, &mut PathBuffer::new());
            pool::worded(made, "create", at)?;
            Ok((pool::worded(look(), "find", at)?, true))
        }
        Err(fail) => Err(pool::worded::<()>(Err(fail), "find", at).unwrap_err()),
    }
}

fn try_attach(
    dir: &Path,
    pool: &'static Pool,
    entry: &Entry,
    settings: &StoreSettings,
    what: &str,
) -> Result<()> {
    let ino = entry.attr.ino;
    refuse_used(pool, entry, what)?;
    control::start_mover(dir)?;
    // The mover opens the store first: its errors tell a wrong option from a directory that is missing.
    MoverClient::connect(dir)?.probe(&settings.url)?;
    let text = serde_json::to_vec(settings).map_err(|e| Error::new(Code::Invalid, what).why(e))?;
    let request = Request::Attach { ino, listed: !settings.explicit, settings: &text };
    pool.request(&request, |_| Ok(())).map_err(|code| refused(code, what))?;
    // Before anything is imported, which inherits it.
    let listed = wait_for_store(pool, ino, settings.durable).and_then(|()| verify(pool, ino));
    let Err(code) = listed else { return Ok(()) };
    // What was listed before the failure is forgotten, and the directory is as it was.
    let taken_back = forget_all(pool, ino, settings.explicit, true).and_then(|()| {
        pool.request(&Request::Detach { ino }, |_| Ok(())).map_err(|code| refused(code, what))
    });
    if let Err(e) = taken_back {
        note!("forebay: {} stays attached: {e}", path_of(pool, ino));
    }
    Err(unlisted(dir, settings, code, what))
}

fn refuse_used(pool: &'static Pool, entry: &Entry, what: &str) -> Result<()> {
    let ino = entry.attr.ino;
    if entry.attr.flags & FLAG_STORE != 0 {
        let there = settings_of(pool, ino).map_or_else(|| "a store".to_owned(), |settings| settings.url);
        return Err(Error::new(Code::Exists, what)
            .why(format!("{there} is attached there"))
            .cure(format!("take it away first: forebay detach {}", path_of(pool, ino))));
    }
    if entry.attr.flags & FLAG_ATTACHED != 0 {
        let above =
            store_of(pool, entry.attr.parent).map_or_else(|| "/".to_owned(), |root| path_of(pool, root));
        return Err(Error::new(Code::Exists, what)
            .why(format!("it belongs to the store that is attached at {above}"))
            .cure("name a directory outside that one"));
    }
    if entry.attr.size != 0 {
        return Err(refused(Code::NotEmpty, what));
    }
    Ok(())
}

/// Words for a refusal of the pool.
fn refused(code: Code, what: &str) -> Error {
    let error = Error::new(code, what);
    match code {
        Code::NotEmpty => {
            error.why("the directory has entries").cure("name an empty directory, or one that does not exist")
        }
        Code::Exists => error.why("it belongs to a store by now"),
        Code::NotSupported => error.why("its entries are spread over several nodes"),
        code => error.why(pool::words(code)),
    }
}

fn wait_for_store(pool: &Pool, ino: Ino, durable: Durable) -> std::result::Result<(), Code> {
    if durable == Durable::No {
        return Ok(());
    }
    let request = Request::WaitForStore { ino, fsync: true, close: durable == Durable::Close };
    pool.request(&request, |_| Ok(()))
}

/// Reads the first entry through the pool, as a program would: the store must list its root for it.
fn verify(pool: &Pool, ino: Ino) -> std::result::Result<(), Code> {
    let mut buffer = vec![0; forebay_types::limits::READDIR_REPLY_BYTES];
    let request = Request::ReadDirectory { ino, cookie: 0, attributes: false };
    let n = pool.call(&request, &mut buffer)?;
    Reply::decode(&buffer[..n]).map(drop)
}

/// The error when a store does not list its root. The mover knows more than the code.
fn unlisted(dir: &Path, settings: &StoreSettings, code: Code, what: &str) -> Error {
    let said = control::status(dir).ok().and_then(|status| status.mover).and_then(|mover| {
        let mine = mover.report.stores.into_iter().find(|store| store.url == settings.url);
        mine.and_then(|store| store.last_error).or(mover.last_failure)
    });
    Error::new(code, what)
        .why(said.unwrap_or_else(|| format!("the store does not list its root: {}", pool::words(code))))
        .cure(format!("see {}/log", dir.display()))
}
