//! Volumes: create, list, resize and delete them, and open them for one-sided access (docs/decisions/0048).
//!
//! A volume is made in steps, each a request: its record first, which nothing shows yet; then its memory, in pieces of
//! [`VOLUME_STEP_BYTES`]; then the record becomes visible. If this process dies in between, the daemon drops what it made.
//!
//! Not for signal handlers: these calls allocate. Tests: `tests/conformance/tests/cluster/volume*.rs`.

use std::os::fd::AsFd;
use std::sync::Arc;

use forebay_types::limits::VOLUME_STEP_BYTES;
use forebay_types::{
    node_of, target_of, BackingId, Code, Error, NodeId, PieceId, Reader, Reply, Request, Segment, Targets,
    Volume,
};
use forebay_volume::{Far, Life, Mapped, Place, Specifier, Striped};

use crate::connection::PieceFds;
use crate::far_pieces::FarPieces;
use crate::pool::{caller, Pool};

type Named = (Vec<u8>, Volume);

/// Where a new volume is.
#[derive(Clone, Debug)]
pub struct VolumePlaces {
    /// The target of each piece; this node's first if there are none.
    pub targets: Vec<u32>,
    /// Bytes of a stripe.
    pub stripe_bytes: u64,
    /// Nothing is reserved ([`Segment::is_thin`]).
    pub is_thin: bool,
}

impl Default for VolumePlaces {
    fn default() -> VolumePlaces {
        VolumePlaces { targets: Vec::new(), stripe_bytes: Striped::STRIPE_BYTES, is_thin: false }
    }
}

/// Why a volume was not made or resized. It is as it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VolumeFailure {
    /// The reason.
    pub code: Code,
    /// The node whose piece was the reason, and the piece's bytes.
    pub piece: Option<(NodeId, u64)>,
}

impl From<Code> for VolumeFailure {
    fn from(code: Code) -> VolumeFailure {
        VolumeFailure { code, piece: None }
    }
}

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

/// Whether a name is that of this host, with or without the domain.
fn is_this_host(name: &str) -> bool {
    let mut host = [0u8; 256];
    // SAFETY: the buffer is writable, and the call ends the name within it or leaves it cut.
    if unsafe { libc::gethostname(host.as_mut_ptr().cast(), host.len() - 1) } != 0 {
        return false;
    }
    let end = host.iter().position(|b| *b == 0).unwrap_or(host.len());
    let host = &host[..end];
    let short = host.split(|b| *b == b'.').next().unwrap_or(host);
    [host, short].contains(&name.as_bytes())
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

    /// Makes a volume of `bytes` bytes on these targets, also of other nodes. `progress` gets the bytes that are reserved so far; the
    /// call ends with [`Code::Interrupted`], and leaves nothing, once it returns false.
    ///
    /// # Errors
    /// [`Code::Exists`]; [`Code::Invalid`] for names and sizes that no volume can have; [`Code::NoSpace`];
    /// [`Code::NotSupported`] where the pool's memory cannot be shared with volumes; [`Code::NoDevice`] for a node without
    /// targets; [`Code::Io`] for one that is down.
    pub fn volume_create(
        &self,
        name: &[u8],
        mode: u32,
        bytes: u64,
        places: &VolumePlaces,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Volume, VolumeFailure> {
        forebay_types::check_volume_name(name)?;
        let here = [target_of(self.attached()?.reply.node, 0)];
        let targets = if places.targets.is_empty() { here.as_slice() } else { &places.targets };
        let targets = Targets::new(targets).ok_or(Code::Invalid)?;
        let segment = Segment::new(bytes, places.stripe_bytes, targets)?.thin(places.is_thin);
        let maker = self.session_number()?;
        let made = self.request(&Request::CreateVolume { name, mode, maker, segment }, record)?;
        self.complete(name, made, progress)
    }

    /// Makes a volume larger, by a further segment with the places and stripes of the last, or smaller, by its last ones.
    /// A volume that grows stays in use. If one of its nodes refuses, or cannot be reached, the volume stays as it is.
    ///
    /// # Errors
    /// As [`Pool::volume_create`]; [`Code::NotFound`]; [`Code::NotPermitted`]; [`Code::Busy`] for one that is being
    /// resized, or is open and is to shrink; [`Code::Invalid`] for a size below the present one at which no segment ends;
    /// [`Code::TooManyLinks`] if it has grown too often; [`Code::Io`] if one of its nodes is down.
    pub fn volume_resize(
        &'static self,
        name: &[u8],
        bytes: u64,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Volume, VolumeFailure> {
        let volume = self.volume(name)?;
        let ino = volume.ino;
        match bytes.checked_sub(volume.bytes()) {
            Some(0) => Ok(volume),
            None => {
                let elsewhere = || volume.nodes().into_iter().filter(|node| *node != ino.birth_node());
                for node in elsewhere() {
                    self.request(&Request::PiecesUnused { node, volume: ino }, done)?;
                }
                let shrunk = self.request(&Request::ShrinkVolume { name, ino, bytes }, record)?;
                // Otherwise its file would end there again when the volume grows. Whoever may shrink a volume may write to
                // it, unless its mode says otherwise: then its file stays as it is.
                let _ = self.volume_open(name, true).map(|volume| volume.trim_file());
                self.review_pieces(elsewhere());
                Ok(shrunk)
            }
            Some(more) => {
                let last = volume.usable().last().ok_or(Code::NotFound)?;
                let segment = Segment::new(more, last.stripe_bytes, last.targets)?.thin(last.is_thin);
                let maker = self.session_number()?;
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
        let volume = self.volume(name)?;
        let ino = volume.ino;
        let elsewhere = || volume.nodes().into_iter().filter(|node| *node != ino.birth_node());
        for node in elsewhere() {
            // What a node that is down has is lost, or is dropped when it is back.
            if self.request(&Request::PiecesUnused { node, volume: ino }, done) == Err(Code::Busy) {
                return Err(Code::Busy);
            }
        }
        self.request(&Request::DeleteVolume { name, ino }, done)?;
        self.review_pieces(elsewhere());
        Ok(())
    }

    /// Has nodes drop their pieces of volumes that are gone. They do it some time later anyway.
    fn review_pieces(&self, nodes: impl Iterator<Item = NodeId>) {
        for node in nodes {
            let _ = self.request(&Request::ReviewPieces { node }, done);
        }
    }

    fn session_number(&self) -> Result<u64, Code> {
        Ok(self.attached()?.reply.session)
    }

    /// Reserves the last segment of a volume, and makes it visible.
    fn complete(
        &self,
        name: &[u8],
        volume: Volume,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Volume, VolumeFailure> {
        let ino = volume.ino;
        let reserved = self.reserve_pieces(&volume, progress);
        let committed =
            reserved.and_then(|()| Ok(self.request(&Request::CommitVolume { name, ino }, record)?));
        if committed.is_err() {
            // If this fails too, the daemon does it when this process ends.
            let _ = self.request(&Request::AbandonVolume { name, ino }, done);
            self.review_pieces(volume.nodes().into_iter().filter(|node| *node != ino.birth_node()));
        }
        committed
    }

    fn reserve_pieces(
        &self,
        volume: &Volume,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<(), VolumeFailure> {
        let (mut before, home) = (0, volume.ino.birth_node());
        for (piece, target, bytes) in volume.open_pieces() {
            let mut reserved = 0;
            loop {
                let until = bytes.min(reserved + VOLUME_STEP_BYTES);
                let (node, mode, is_thin) = (node_of(target), volume.mode, volume.is_thin());
                let request = match node == home {
                    true => Request::MakePiece { node, piece, target, bytes, until },
                    false => Request::MakePieceAway { node, piece, target, bytes, until, mode, is_thin },
                };
                let answer = self.ask_as(caller(), &request, |reply| match reply {
                    Reply::Count(reserved) => Ok(reserved),
                    _ => Err(Code::Malformed),
                });
                reserved = answer.map_err(|code| VolumeFailure { code, piece: Some((node, bytes)) })?;
                if !progress(before + reserved) {
                    return Err(Code::Interrupted.into());
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
    /// volume is not on the node of the specifier; [`Code::Io`] if a piece is lost or on a node that is down.
    pub fn volume_open(&'static self, specifier: &[u8], writes: bool) -> Result<Striped, Error> {
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

    /// The memory of a volume's pieces on this node, as descriptors for reading.
    ///
    /// # Errors
    /// [`Code::AccessDenied`]; [`Code::Io`] if a piece is lost.
    pub fn volume_pieces_here(&self, volume: &Volume) -> Result<Vec<std::os::fd::OwnedFd>, Code> {
        let here = self.attached()?.reply.node;
        let all = volume.usable_pieces().filter(|(_, target, _)| node_of(*target) == here);
        all.map(|(id, ..)| self.piece(id, false).map(|fds| fds.piece)).collect()
    }

    fn open_one(&'static self, specifier: &Specifier, writes: bool) -> Result<Mapped, (Code, String)> {
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
        if let Some(local) = &specifier.local {
            if !self.is_node(local, here, here).map_err(failed)? {
                return Err((Code::NoDevice, format!("`{}` is not this node", local.node)));
            }
        }
        let volume = self.volume(&specifier.volume).map_err(failed)?;
        let nodes = volume.nodes();
        if let Some(place) = &specifier.node {
            if nodes.len() != 1 || !self.is_node(place, nodes[0], here).map_err(failed)? {
                return Err((Code::NoDevice, format!("volume `{}` is not on node `{}`", name(), place.node)));
            }
        }
        let far = self.open_far(&volume, here).map_err(|(node, code)| match code {
            Code::Io => {
                (code, format!("node {node} has lost its piece of volume `{}`, or cannot be reached", name()))
            }
            Code::AccessDenied => (code, format!("the mode of volume `{}` does not allow it", name())),
            code => failed(code),
        })?;
        self.map_volume(&volume, writes, here, far).map_err(|code| match code {
            Code::Io => (code, format!("the memory of volume `{}` is lost", name())),
            Code::AccessDenied => (code, format!("the mode of volume `{}` does not allow it", name())),
            code => failed(code),
        })
    }

    /// Whether a place of a specifier is a node: its number, its name in the pool file, or for this node the name of the host.
    fn is_node(&self, place: &Place, node: NodeId, here: NodeId) -> Result<bool, Code> {
        if let Ok(number) = place.node.parse::<u16>() {
            return Ok(number == node.0);
        }
        match self.address().node_named(place.node.as_bytes()) {
            Ok(named) => Ok(named == node),
            Err(Code::NotFound) => Ok(node == here && is_this_host(&place.node)),
            Err(code) => Err(code),
        }
    }

    /// Opens the pieces of a volume on other nodes, if there are any.
    fn open_far(
        &'static self,
        volume: &Volume,
        here: NodeId,
    ) -> Result<Option<Arc<dyn Far>>, (NodeId, Code)> {
        let pieces: Vec<BackingId> = volume
            .usable_pieces()
            .filter(|(_, target, _)| node_of(*target) != here)
            .map(|(id, target, _)| BackingId::of_piece(target, id))
            .collect();
        match pieces.is_empty() {
            true => Ok(None),
            false => self.open_pieces(pieces).map(Some),
        }
    }

    /// Opens pieces of a volume on other nodes.
    ///
    /// # Errors
    /// The node of the piece that could not be opened, and why: [`Code::Io`] if the piece is lost or its node is down;
    /// [`Code::AccessDenied`].
    pub fn open_pieces(&'static self, pieces: Vec<BackingId>) -> Result<Arc<dyn Far>, (NodeId, Code)> {
        Ok(Arc::new(FarPieces::open(self, pieces)?))
    }

    fn map_volume(
        &self,
        volume: &Volume,
        writes: bool,
        here: NodeId,
        far: Option<Arc<dyn Far>>,
    ) -> Result<Mapped, Code> {
        let (mut life, mut opened, mut head) = (None, None, None);
        if let Some((id, ..)) = volume.usable_pieces().find(|(_, target, _)| node_of(*target) == here) {
            let fds = self.piece(id, writes)?;
            (life, head) = (Some(Life::map(fds.life.as_fd())?), fds.head);
            opened = Some(fds.piece);
        }
        let mapped = Mapped::new(volume, writes, (life, far), |id, target| {
            if node_of(target) != here {
                return Ok(None);
            }
            match opened.take() {
                Some(piece) => Ok(Some(piece)),
                None => self.piece(id, writes).map(|fds| Some(fds.piece)),
            }
        })?;
        match head {
            Some(head) => mapped.with_head(head.as_fd()),
            None => Ok(mapped),
        }
    }

    fn piece(&self, id: PieceId, writes: bool) -> Result<PieceFds, Code> {
        self.address().piece(id, writes)
    }
}
