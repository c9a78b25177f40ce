//! Volumes: create, list, resize and delete them, and open them for one-sided access (docs/decisions/0048).
//!
//! A volume is made in steps, each a request: its record first, which nothing shows yet; then its memory, in pieces of
//! [`VOLUME_STEP_BYTES`]; then the record becomes visible. If this process dies in between, the daemon drops what it made.
//!
//! Not for signal handlers: these calls allocate. Tests: `tests/conformance/tests/volumes`.

use std::os::fd::AsFd;

use forebay_types::limits::VOLUME_STEP_BYTES;
use forebay_types::{
    node_of, target_of, Code, Error, NodeId, PieceId, Reader, Reply, Request, Segment, Targets, Volume,
};
use forebay_volume::{Life, Mapped, Place, Specifier, Striped};

use crate::connection::PieceFds;
use crate::pool::{caller, Pool};

type Named = (Vec<u8>, Volume);

/// A volume's record out of a reply.
fn record(reply: Reply<'_>) -> Result<Volume, Code> {
    match reply {
        Reply::Bytes(bytes) => Volume::decode(&mut Reader::new(bytes)),
        _ => Err(Code::Malformed),
    }
}

fn done(reply: Reply<'_>) -> Result<(), Code> {
    match reply {
        Reply::Done => Ok(()),
        _ => Err(Code::Malformed),
    }
}

/// Whether a place of a specifier is this node: its number, or its host name with or without the domain.
fn is_node(place: &Place, node: NodeId, here: NodeId) -> bool {
    if let Ok(number) = place.node.parse::<u16>() {
        return number == node.0;
    }
    let mut name = [0u8; 256];
    // SAFETY: the buffer is writable, and the call ends the name within it or leaves it cut.
    if node != here || unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) } != 0 {
        return false;
    }
    let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
    let host = &name[..end];
    let short = host.split(|b| *b == b'.').next().unwrap_or(host);
    [host, short].contains(&place.node.as_bytes())
}

impl Pool {
    /// The record of a volume.
    ///
    /// # Errors
    /// [`Code::NotFound`].
    pub fn volume(&self, name: &[u8]) -> Result<Volume, Code> {
        self.request(&Request::GetVolume { name }, record)
    }

    /// All volumes of the pool, by name.
    pub fn volumes(&self) -> Result<Vec<Named>, Code> {
        let mut all: Vec<Named> = Vec::new();
        loop {
            let after = all.last().map_or(Vec::new(), |(name, _)| name.clone());
            let before = all.len();
            self.request(&Request::ListVolumes { after: &after }, |reply| {
                let Reply::Bytes(bytes) = reply else { return Err(Code::Malformed) };
                let mut r = Reader::new(bytes);
                while !r.rest().is_empty() {
                    all.push((r.short_bytes()?.to_vec(), Volume::decode(&mut r)?));
                }
                Ok(())
            })?;
            if all.len() == before {
                return Ok(all);
            }
        }
    }

    /// Makes a volume of `bytes` bytes on this node's first target. `progress` gets the bytes that are reserved so far; the
    /// call ends with [`Code::Interrupted`], and leaves nothing, once it returns false.
    ///
    /// # Errors
    /// [`Code::Exists`]; [`Code::Invalid`] for names and sizes that no volume can have; [`Code::NoSpace`];
    /// [`Code::NotSupported`] where the pool's memory cannot be shared with volumes.
    pub fn volume_create(
        &self,
        name: &[u8],
        mode: u32,
        bytes: u64,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Volume, Code> {
        forebay_types::check_volume_name(name)?;
        let segment = self.local_segment(bytes)?;
        let maker = self.session_number()?;
        let made = self.request(&Request::CreateVolume { name, mode, maker, segment }, record)?;
        self.complete(name, made, progress)
    }

    /// Makes a volume larger, by a further segment, or smaller, by its last ones. A volume that grows stays in use.
    ///
    /// # Errors
    /// As [`Pool::volume_create`]; [`Code::NotFound`]; [`Code::NotPermitted`]; [`Code::Busy`] for one that is being
    /// resized, or is open and is to shrink; [`Code::Invalid`] for a size below the present one at which no segment ends;
    /// [`Code::TooManyLinks`] if it has grown too often.
    pub fn volume_resize(
        &self,
        name: &[u8],
        bytes: u64,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Volume, Code> {
        let volume = self.volume(name)?;
        let ino = volume.ino;
        match bytes.checked_sub(volume.bytes()) {
            Some(0) => Ok(volume),
            None => {
                let shrunk = self.request(&Request::ShrinkVolume { name, ino, bytes }, record)?;
                // Otherwise its file would end there again when the volume grows. Whoever may shrink a volume may write to
                // it, unless its mode says otherwise: then its file stays as it is.
                let _ = self.volume_open(name, true).map(|volume| volume.trim_file());
                Ok(shrunk)
            }
            Some(more) => {
                let (segment, maker) = (self.local_segment(more)?, self.session_number()?);
                let grown = self.request(&Request::GrowVolume { name, ino, maker, segment }, record)?;
                self.complete(name, grown, progress)
            }
        }
    }

    /// Deletes a volume.
    ///
    /// # Errors
    /// [`Code::NotFound`], [`Code::NotPermitted`], [`Code::Busy`] while a process has it open or it is being resized.
    pub fn volume_delete(&self, name: &[u8]) -> Result<(), Code> {
        let ino = self.volume(name)?.ino;
        self.request(&Request::DeleteVolume { name, ino }, done)
    }

    fn session_number(&self) -> Result<u64, Code> {
        Ok(self.attached()?.reply.session)
    }

    /// A segment with one piece on this node.
    fn local_segment(&self, bytes: u64) -> Result<Segment, Code> {
        let target = target_of(self.attached()?.reply.node, 0);
        Segment::new(bytes, Striped::STRIPE_BYTES, Targets::new(&[target]).ok_or(Code::Invalid)?)
    }

    /// Reserves the last segment of a volume, and makes it visible.
    fn complete(
        &self,
        name: &[u8],
        volume: Volume,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Volume, Code> {
        let ino = volume.ino;
        let reserved = self.reserve_pieces(&volume, progress);
        let committed = reserved.and_then(|()| self.request(&Request::CommitVolume { name, ino }, record));
        if committed.is_err() {
            // If this fails too, the daemon does it when this process ends.
            let _ = self.request(&Request::AbandonVolume { name, ino }, done);
        }
        committed
    }

    fn reserve_pieces(&self, volume: &Volume, progress: &mut dyn FnMut(u64) -> bool) -> Result<(), Code> {
        let mut before = 0;
        for (piece, target, bytes) in volume.pieces().filter(|(id, ..)| id.segment >= volume.complete) {
            let mut reserved = 0;
            loop {
                let until = bytes.min(reserved + VOLUME_STEP_BYTES);
                let request = Request::MakePiece { node: node_of(target), piece, target, bytes, until };
                reserved = self.ask_as(caller(), &request, |reply| match reply {
                    Reply::Count(reserved) => Ok(reserved),
                    _ => Err(Code::Malformed),
                })?;
                if !progress(before + reserved) {
                    return Err(Code::Interrupted);
                }
                if reserved >= bytes {
                    break;
                }
            }
            before += bytes;
        }
        Ok(())
    }

    /// Opens a volume, or several that are joined, by a specifier (`[local[.link]/]node[.link]:volume`, or its name alone;
    /// `+` joins). The error says which part of the specifier is wrong.
    ///
    /// # Errors
    /// [`Code::Invalid`] for a specifier with errors; [`Code::NotFound`]; [`Code::AccessDenied`]; [`Code::NoDevice`] if the
    /// volume is not on the node of the specifier; [`Code::NotSupported`] for a volume with pieces on other nodes;
    /// [`Code::Io`] if a piece is lost.
    pub fn volume_open(&self, specifier: &[u8], writes: bool) -> Result<Striped, Error> {
        let what = || format!("cannot open volume {}", String::from_utf8_lossy(specifier).escape_debug());
        let parsed = Specifier::parse_all(specifier)
            .map_err(|problem| Error::new(Code::Invalid, what()).why(problem))?;
        let count = parsed.len();
        let mut parts = Vec::new();
        for (i, one) in parsed.iter().enumerate() {
            let part = self.open_one(one, writes).map_err(|(code, why)| {
                let why = if count > 1 { format!("specifier {}: {why}", i + 1) } else { why };
                Error::new(code, what()).why(why)
            });
            parts.push(part?);
        }
        Striped::new(parts)
            .map_err(|code| Error::new(code, what()).why("a joined volume is smaller than a stripe of 1 MiB"))
    }

    /// The memory of a volume that is one piece on this node, as a descriptor. The volume is open as long as it, or what
    /// was made from it.
    ///
    /// # Errors
    /// [`Code::NotFound`], [`Code::AccessDenied`]; [`Code::NotSupported`] for a volume of several pieces, or on another
    /// node; [`Code::Io`] if the piece is lost.
    pub fn volume_memory(&self, name: &[u8], writes: bool) -> Result<std::os::fd::OwnedFd, Code> {
        let here = self.attached()?.reply.node;
        let volume = self.volume(name)?;
        match volume.usable() {
            [only] if only.pieces() == 1 && volume.nodes() == [here] => {
                self.piece(PieceId { volume: volume.ino, segment: 0, index: 0 }, writes).map(|fds| fds.piece)
            }
            _ => Err(Code::NotSupported),
        }
    }

    fn open_one(&self, specifier: &Specifier, writes: bool) -> Result<Mapped, (Code, String)> {
        let name = || String::from_utf8_lossy(&specifier.volume).escape_debug().to_string();
        let failed = |code: Code| {
            let why = match code {
                Code::NotFound => format!("there is no volume `{}`", name()),
                Code::PoolGone => "the pool's daemon is gone".to_owned(),
                code => format!("`{}`: {code}", name()),
            };
            (code, why)
        };
        let here = self.attached().map_err(failed)?.reply.node;
        if let Some(local) = specifier.local.as_ref().filter(|local| !is_node(local, here, here)) {
            return Err((Code::NoDevice, format!("`{}` is not this node", local.node)));
        }
        let volume = self.volume(&specifier.volume).map_err(failed)?;
        let nodes = volume.nodes();
        if let Some(place) = &specifier.node {
            if nodes.len() != 1 || !is_node(place, nodes[0], here) {
                return Err((Code::NoDevice, format!("volume `{}` is not on node `{}`", name(), place.node)));
            }
        }
        if nodes != [here] {
            return Err((Code::NotSupported, format!("volume `{}` has pieces on other nodes", name())));
        }
        self.map_volume(&volume, writes).map_err(|code| match code {
            Code::Io => (code, format!("the memory of volume `{}` is lost", name())),
            Code::AccessDenied => (code, format!("the mode of volume `{}` does not allow it", name())),
            code => failed(code),
        })
    }

    fn map_volume(&self, volume: &Volume, writes: bool) -> Result<Mapped, Code> {
        let first = PieceId { volume: volume.ino, segment: 0, index: 0 };
        let PieceFds { piece, life, head } = self.piece(first, writes)?;
        let life = Life::map(life.as_fd())?;
        let mut first = Some(piece);
        let mapped = Mapped::new(volume, writes, life, |id| match first.take() {
            Some(piece) => Ok(piece),
            None => self.piece(id, writes).map(|fds| fds.piece),
        })?;
        mapped.with_head(head.ok_or(Code::Malformed)?.as_fd())
    }

    fn piece(&self, id: PieceId, writes: bool) -> Result<PieceFds, Code> {
        self.address().piece(id, writes)
    }
}
