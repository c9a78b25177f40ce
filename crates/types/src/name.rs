//! Names of one component, in their encoding for requests.

use crate::bytes::Reader;
use crate::error::Code;
use crate::limits::NAME_MAX;

/// Refuses a name that no directory entry can have.
pub(crate) fn check(name: &[u8]) -> Result<(), Code> {
    match name {
        b"" => Err(Code::NotFound),
        b"." | b".." => Err(Code::Invalid),
        _ if name.len() > NAME_MAX => Err(Code::NameTooLong),
        _ if name.iter().any(|&b| b == b'/' || b == 0) => Err(Code::Invalid),
        _ => Ok(()),
    }
}

/// Reads and checks a name.
pub(crate) fn read<'a>(r: &mut Reader<'a>) -> Result<&'a [u8], Code> {
    let name = r.short_bytes()?;
    check(name)?;
    Ok(name)
}
