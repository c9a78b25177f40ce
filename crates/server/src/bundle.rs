//! A bundle: the pool file and the secret, which a host needs to be a node of a pool when no shared file system has
//! them. A bundle is one JSON text that a pipe carries. It is never an argument or in the environment, which other
//! users of the host may be able to read.
//!
//! The daemon keeps both in the pool's directory, as [`NODES_FILE`] and [`SECRET_FILE`]. Its workers read them there,
//! and so do commands that name the directory to reach the whole pool.

use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};

use forebay_fabric::secret_file;
use forebay_types::{Code, Error, Result};
use forebay_wire::SECRET_BYTES;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use crate::directory::{PoolDirectory, NODES_FILE, NODES_FILE_NEW, SECRET_FILE, SECRET_FILE_NEW};
use crate::pool_file::PoolFile;

/// The version that makes and accepts bundles: nodes of different versions could not communicate.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// A pool file's text and the pool's secret.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bundle {
    version: String,
    file: String,
    /// In hexadecimal digits.
    secret: String,
}

impl fmt::Debug for Bundle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bundle").field("file", &self.file).finish_non_exhaustive()
    }
}

/// Hexadecimal digits of bytes.
pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn bytes_of(digits: &str) -> Option<Vec<u8>> {
    let digits = digits.as_bytes();
    let digit = |b: u8| char::from(b).to_digit(16).map(|d| d as u8);
    digits.chunks(2).map(|pair| Some(digit(pair[0])? << 4 | digit(*pair.get(1)?)?)).collect()
}

impl Bundle {
    /// A pool file's text with a new secret.
    ///
    /// # Errors
    /// When the kernel returns no random bytes, and the errors of [`PoolFile::from_text`].
    pub fn new(file: String) -> Result<Bundle> {
        let mut secret = [0; SECRET_BYTES];
        for half in secret.chunks_mut(16) {
            half.copy_from_slice(&crate::identity::random_bytes()?[..half.len()]);
        }
        let bundle = Bundle { version: VERSION.to_owned(), file, secret: hexadecimal(&secret) };
        bundle.pool_file(Path::new("/"))?;
        Ok(bundle)
    }

    /// A pool file and its secret, as they are on disk.
    ///
    /// # Errors
    /// The errors of [`PoolFile::read`]; a secret that is missing, or that other users may read.
    pub fn of_files(path: &Path) -> Result<Bundle> {
        let file = PoolFile::read(path)?;
        let what = || format!("cannot read {}", path.display());
        let text = std::fs::read_to_string(path).map_err(|e| Error::io(what(), &e))?;
        secret_file::read(&file.key)?;
        let secret = std::fs::read(&file.key)
            .map_err(|e| Error::io(format!("cannot read {}", file.key.display()), &e))?;
        Ok(Bundle { version: VERSION.to_owned(), file: text, secret: hexadecimal(&secret) })
    }

    /// The bytes to write to a pipe.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Decodes the bytes of [`Bundle::encode`].
    ///
    /// # Errors
    /// [`Code::Invalid`] for bytes that are no bundle, and [`Code::NotSupported`] for a bundle of another version.
    pub fn decode(bytes: &[u8]) -> Result<Bundle> {
        /// Parsed first, because the rest of another version's bundle may have other fields.
        #[derive(Deserialize)]
        struct VersionOnly {
            version: String,
        }
        let what = "cannot take part in the pool";
        let unusable = |e: serde_json::Error| {
            Error::new(Code::Invalid, what).why(format!("standard input is not a pool bundle ({e})"))
        };
        let VersionOnly { version } = serde_json::from_slice(bytes).map_err(unusable)?;
        if version != VERSION {
            return Err(Error::new(Code::NotSupported, what)
                .why(format!("it is started by Forebay {version}, and here is Forebay {VERSION}"))
                .cure("install the same version on all hosts"));
        }
        serde_json::from_slice(bytes).map_err(unusable)
    }

    /// The bundle's pool file, as it will lie in the pool directory `dir`.
    ///
    /// # Errors
    /// The errors of [`PoolFile::from_text`].
    pub fn pool_file(&self, dir: &Path) -> Result<PoolFile> {
        let mut file = PoolFile::from_text(&dir.join(NODES_FILE), &self.file)?;
        file.key = dir.join(SECRET_FILE);
        Ok(file)
    }

    /// The pool's id, as `status` reports it.
    ///
    /// # Errors
    /// [`Code::Invalid`] when the bundle's secret is malformed.
    pub fn pool_id(&self) -> Result<String> {
        Ok(hexadecimal(&self.secret()?.pool()))
    }

    /// The files to write for a pool file at `path`: the path, mode and bytes of each, the secret's first.
    ///
    /// # Errors
    /// As [`PoolFile::from_text`].
    pub fn files(&self, path: &Path) -> Result<[(PathBuf, u32, Vec<u8>); 2]> {
        let file = PoolFile::from_text(path, &self.file)?;
        let secret = bytes_of(&self.secret).unwrap_or_default();
        Ok([(file.key, 0o600, secret), (path.to_owned(), 0o644, self.file.clone().into_bytes())])
    }

    fn secret(&self) -> Result<forebay_wire::Secret> {
        let wrong = |code| Error::new(code, "cannot take part in the pool").why("its secret is malformed");
        let bytes = bytes_of(&self.secret).ok_or_else(|| wrong(Code::Invalid))?;
        forebay_wire::Secret::new(&bytes).map_err(wrong)
    }

    /// Writes both files into a pool directory whose lock this process holds. A reader of one file sees its old or its
    /// new content, never a part.
    pub(crate) fn write(&self, dir: &PoolDirectory) -> Result<()> {
        self.secret()?;
        let secret = bytes_of(&self.secret).unwrap_or_default();
        let both = [
            (SECRET_FILE_NEW, SECRET_FILE, secret.as_slice()),
            (NODES_FILE_NEW, NODES_FILE, self.file.as_bytes()),
        ];
        for (new, name, bytes) in both {
            let what = || format!("cannot write {}", dir.file(name).display());
            // A start that was killed may have left one with another mode.
            dir.remove_file(new)?;
            let fd = dir.open_file(new, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)?;
            std::fs::File::from(fd).write_all(bytes).map_err(|e| Error::io(what(), &e))?;
            rustix::fs::renameat(dir.fd(), new, dir.fd(), name).map_err(|e| Error::io(what(), &e.into()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "[[node]]\nname = \"a\"\ntarget = [{ path = \"/p\" }]\n";

    #[test]
    fn bundle_comes_as_it_went_and_shows_no_secret() {
        let bundle = Bundle::new(FILE.to_owned()).unwrap();
        assert_eq!(Bundle::decode(&bundle.encode()).unwrap(), bundle);
        assert!(!format!("{bundle:?}").contains(&bundle.secret));
        assert_ne!(bundle.pool_id().unwrap(), Bundle::new(FILE.to_owned()).unwrap().pool_id().unwrap());
        assert!(Bundle::new("colour = 1".to_owned()).is_err());
    }

    #[test]
    fn decode_of_another_version_or_of_nonsense_says_so() {
        let other = Bundle::decode(br#"{"version": "7.0.0", "papers": []}"#).unwrap_err();
        assert_eq!(other.code, Code::NotSupported);
        assert!(other.to_string().contains("7.0.0") && other.to_string().contains(VERSION), "{other}");
        for text in ["", "{}", "{\"version\": 1}", "no"] {
            assert_eq!(Bundle::decode(text.as_bytes()).unwrap_err().code, Code::Invalid, "{text}");
        }
        let mut bad = Bundle::new(FILE.to_owned()).unwrap();
        for secret in ["", "zz", "0", "00", &"0".repeat(64)] {
            bad.secret = secret.to_owned();
            assert!(bad.pool_id().is_err(), "{secret}");
        }
    }

    #[test]
    fn write_leaves_a_pool_file_and_a_secret_for_its_user_alone() {
        use std::os::unix::fs::PermissionsExt;
        let path = std::env::temp_dir().join(format!("forebay-bundle-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        let (dir, _) = PoolDirectory::make(&path).unwrap();
        let bundle = Bundle::new(FILE.to_owned()).unwrap();
        bundle.write(&dir).unwrap();
        bundle.write(&dir).unwrap();
        let file = PoolFile::read(&path.join(NODES_FILE)).unwrap();
        assert_eq!(file, bundle.pool_file(&path).unwrap());
        let secret = secret_file::read(&file.key).unwrap();
        assert_eq!(hexadecimal(&secret.pool()), bundle.pool_id().unwrap());
        assert_eq!(std::fs::metadata(&file.key).unwrap().permissions().mode() & 0o7777, 0o600);
        assert_eq!(Bundle::of_files(&file.path).unwrap(), bundle);
        std::fs::remove_dir_all(&path).unwrap();
    }
}
