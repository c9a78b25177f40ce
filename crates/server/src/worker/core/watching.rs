//! Connects watched directories (`watches`).

use super::state::ShardThread;
use crate::worker::watches::Chunk;
use crate::worker::watches::Command;
use crate::worker::watches::Watched;
use crate::worker::watches::Word;
use forebay_meta::{Effects, PAYLOAD_BYTES_MAX};
use forebay_types::{Caller, Code, Cookie, Ino, Reply, Request, Result};

impl ShardThread<'_> {
    /// Directories that are watched, for `status`.
    pub(in crate::worker) fn watched_directories(&self) -> usize {
        self.watched.as_ref().map_or(0, |watched| watched.directories.len())
    }

    /// Executes a command of the watch thread.
    pub(in crate::worker) fn mind_watches(&mut self, order: Command) -> Result<()> {
        let (directory, cookie) = match order {
            Command::Leave(directory) => {
                if let Some(watched) = &mut self.watched {
                    watched.directories.remove(&directory);
                }
                return Ok(());
            }
            Command::List(directory, cookie) => {
                let is_watched = |watched: &Watched| watched.directories.contains(&directory);
                if !self.watched.as_ref().is_some_and(is_watched) {
                    // The watch thread is about to receive the end of its watches.
                    return Ok(());
                }
                (directory, cookie)
            }
            Command::Enrol(directory, words) => {
                let watched = self.watched.get_or_insert_with(|| Watched::new(words));
                watched.directories.insert(directory);
                (directory, 0)
            }
        };
        let listed = self.list_watched(directory, cookie)?;
        if let Some(watched) = &mut self.watched {
            match &listed {
                Ok((entries, _)) => entries.iter().for_each(|(_, ino, _)| watched.named.insert(*ino)),
                Err(_) => {
                    watched.directories.remove(&directory);
                }
            }
            watched.words.send(Word::Listed(directory, listed));
        }
        Ok(())
    }

    /// Entries of a watched directory after a cookie. [`Code::NotSupported`] if other nodes have the entries.
    fn list_watched(&mut self, directory: Ino, cookie: Cookie) -> Result<std::result::Result<Chunk, Code>> {
        if self.network.as_ref().is_some_and(|network| network.node != directory.birth_node()) {
            return Ok(Err(Code::NotSupported));
        }
        let (mut payload, mut effects) = (vec![0; PAYLOAD_BYTES_MAX], Effects::new());
        let (caller, batch) = (Caller { uid: 0, gid: 0 }, self.batch()?);
        let attributes = Request::GetAttr { ino: directory };
        match batch.apply(caller, &attributes, crate::worker::now(), &mut effects, &mut payload) {
            Ok(Reply::Entry(entry)) if !entry.attr.is_directory() => return Ok(Err(Code::NotDirectory)),
            Ok(Reply::Entry(entry)) if entry.attr.width_log2 != 0 => return Ok(Err(Code::NotSupported)),
            Ok(Reply::Entry(_)) => {}
            Ok(_) => return Ok(Err(Code::Io)),
            Err(refusal) => return Ok(Err(refusal.code())),
        }
        let entries = Request::ReadDirectory { ino: directory, cookie, attributes: false };
        let entries = match batch.apply(caller, &entries, crate::worker::now(), &mut effects, &mut payload) {
            Ok(Reply::Entries(entries)) => entries,
            Ok(_) => return Ok(Err(Code::Io)),
            Err(refusal) => return Ok(Err(refusal.code())),
        };
        let (mut list, mut last) = (Vec::new(), None);
        for entry in entries.iter() {
            let Ok(entry) = entry else { return Ok(Err(Code::Io)) };
            last = Some(entry.cookie);
            if !matches!(entry.name, b"." | b"..") {
                list.push((entry.name.to_vec(), entry.ino, entry.kind));
            }
        }
        Ok(Ok((list, last.filter(|_| !entries.end))))
    }
}
