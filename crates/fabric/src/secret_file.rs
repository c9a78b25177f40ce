//! The pool's secret on disk: 32 random bytes in a file that only its owner may read.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use forebay_types::{Code, Error, Result};
use forebay_wire::{Secret, SECRET_BYTES};

use crate::numbers::Entropy;

/// Creates the file with a new secret, mode 0600.
///
/// # Errors
/// [`Code::Exists`] if the file exists, as a running pool may use it.
pub fn make(path: &Path) -> Result<Secret> {
    let what = || format!("cannot make the secret {}", path.display());
    let mut bytes = [0; SECRET_BYTES];
    Entropy::System.fill(&mut bytes);
    let secret = Secret::new(&bytes).map_err(|code| Error::new(code, what()))?;
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(|e| Error::io(what(), &e))?;
    file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(|e| Error::io(what(), &e))?;
    Ok(secret)
}

/// Reads the secret.
///
/// # Errors
/// [`Code::AccessDenied`] if users other than its owner may access it, or if it belongs to another user.
/// [`Code::Invalid`] if it does not hold 32 bytes.
pub fn read(path: &Path) -> Result<Secret> {
    let what = || format!("cannot use the secret {}", path.display());
    let mut file = File::open(path).map_err(|e| Error::io(what(), &e))?;
    let stat = file.metadata().map_err(|e| Error::io(what(), &e))?;
    if stat.mode() & 0o077 != 0 {
        return Err(Error::new(Code::AccessDenied, what())
            .why(format!("its mode is {:04o}: others may use it", stat.mode() & 0o7777))
            .cure(format!("chmod 600 {}, and make a new one if others may have read it", path.display())));
    }
    if stat.uid() != rustix::process::geteuid().as_raw() {
        return Err(Error::new(Code::AccessDenied, what()).why(format!("it belongs to user {}", stat.uid())));
    }
    let mut bytes = Vec::with_capacity(SECRET_BYTES + 1);
    Read::take(&mut file, SECRET_BYTES as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| Error::io(what(), &e))?;
    Secret::new(&bytes)
        .map_err(|code| Error::new(code, what()).why(format!("it does not hold {SECRET_BYTES} random bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn secret_is_made_once_and_refused_when_others_may_read_it() {
        let dir = std::env::temp_dir().join(format!("forebay-secret-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("secret");
        let made = make(&path).unwrap();
        assert_eq!(read(&path).unwrap(), made);
        assert_eq!(make(&path).unwrap_err().code, Code::Exists);
        for mode in [0o640, 0o604, 0o620] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let error = read(&path).unwrap_err();
            assert_eq!(error.code, Code::AccessDenied);
            assert!(error.to_string().contains("chmod 600"), "{error}");
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::write(&path, [1; 40]).unwrap();
        assert_eq!(read(&path).unwrap_err().code, Code::Invalid);
        assert_eq!(read(&dir.join("none")).unwrap_err().code, Code::NotFound);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
