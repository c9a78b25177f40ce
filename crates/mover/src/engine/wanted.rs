//! A file whose data are to be uploaded, and how it is told to another node's mover.

use forebay_types::{Code, Entry, Error, PendingPlace, Reader, Result, StoreVersion, Wanted, Writer};

use super::peers::{from_hex, to_hex};
use crate::store::StorePath;

/// Bytes of an encoded place, at most: three names, and numbers.
const PLACE_BYTES_MAX: usize = 4096;

/// What is done with files that programs have open for writing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum OpenFiles {
    /// They are not copied.
    Wait,
    /// They are copied as they are.
    Copied,
}

/// Files whose data are to be uploaded. Lists of them are sorted and split: a file has a kilobyte, and its box is moved.
#[allow(clippy::vec_box)]
pub(super) type Uploads = Vec<Box<WantedUpload>>;

/// A file whose data are to be uploaded.
#[derive(Clone, Debug)]
pub(super) struct WantedUpload {
    pub(super) place: PendingPlace,
    pub(super) entry: Entry,
    pub(super) directory: StorePath,
    pub(super) path: StorePath,
    pub(super) replaces: Option<StoreVersion>,
    pub(super) open_files: OpenFiles,
}

impl WantedUpload {
    /// It as text. The entry is that of the place.
    pub(super) fn encode(&self) -> Result<String> {
        let (directory, path) = (self.directory.as_bytes(), self.path.as_bytes());
        let mut bytes = vec![0; PLACE_BYTES_MAX + directory.len() + path.len()];
        let mut w = Writer::new(&mut bytes);
        let mut put = || {
            w.short_bytes(directory)?;
            w.short_bytes(path)?;
            w.u8(u8::from(self.open_files == OpenFiles::Copied))?;
            w.u8(u8::from(self.replaces.is_some()))?;
            if let Some(version) = &self.replaces {
                version.encode(&mut w)?;
            }
            self.place.encode(&mut w)?;
            Ok(w.len())
        };
        let n = put().map_err(|code: Code| Error::new(code, "cannot tell another node of a file"))?;
        Ok(to_hex(&bytes[..n]))
    }

    pub(super) fn decode(text: &str) -> Result<WantedUpload> {
        let bytes = from_hex(text)?;
        let read = || {
            let mut r = Reader::new(&bytes);
            let directory = StorePath::new(r.short_bytes()?)?;
            let path = StorePath::new(r.short_bytes()?)?;
            let open_files = if r.u8()? == 0 { OpenFiles::Wait } else { OpenFiles::Copied };
            let replaces = match r.u8()? {
                0 => None,
                _ => Some(StoreVersion::decode(&mut r)?),
            };
            let place = PendingPlace::decode_list(r.rest())?.pop().ok_or(Code::Malformed)?;
            match &place.wanted {
                Some(Wanted::Here(entry, _)) => {
                    Ok(WantedUpload { entry: *entry, place, directory, path, replaces, open_files })
                }
                _ => Err(Code::Malformed),
            }
        };
        read().map_err(|code: Code| Error::new(code, "cannot read another node's request to upload a file"))
    }
}
