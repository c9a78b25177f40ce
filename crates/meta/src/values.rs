//! Values of inodes: extended attributes, symlinks' targets, and the parts of wide directories. The latter two are
//! stored as the value of the empty name.
//!
//! A value is cut into pieces that each fit an LMDB page. So the shard never needs consecutive pages, of which a nearly
//! full shard may have none. The values of an inode are stored next to one another and have a common bound, so that one
//! transaction can remove all of them with the inode's last link.

use forebay_types::limits::{
    MESSAGE_BYTES_MAX, XATTR_NAME_MAX, XATTR_OVERHEAD, XATTR_TOTAL_MAX, XATTR_VALUE_MAX,
};
use forebay_types::{Code, Ino, Kind, Reply, REPLY_HEADER_BYTES, XATTR_CREATE, XATTR_REPLACE};

use crate::batch::{Answer, Batch, Context};
use crate::keys::{self, Key, ValueKey};
use crate::page_budget::{Class, Work};
use crate::record::MARK_VALUES;

/// Bytes of a piece. With the longest key it stays below the largest record that LMDB keeps in a page, 2038 bytes of
/// 4096.
pub(crate) const PIECE_BYTES: usize = 1700;

const _: () = assert!(PIECE_BYTES + keys::VALUE_KEY_BYTES + 8 <= 2038);
const _: () = assert!(MESSAGE_BYTES_MAX >= XATTR_VALUE_MAX + REPLY_HEADER_BYTES);

/// Refuses names outside the supported name spaces of extended attributes.
fn check_name(name: &[u8], kind: Kind, writes: bool) -> Answer<()> {
    if name.is_empty() || name.len() > XATTR_NAME_MAX {
        return Err(Code::Range);
    }
    if name.contains(&0) {
        return Err(Code::Invalid);
    }
    if matches!(name, b"system.posix_acl_access" | b"system.posix_acl_default") {
        return Ok(());
    }
    let rest = [b"user.".as_slice(), b"trusted.", b"security."].iter().find_map(|p| name.strip_prefix(*p));
    match rest {
        None => Err(Code::NotSupported),
        Some(b"") => Err(Code::Invalid),
        // As on Linux: for other kinds the mode bits do not define who may use these attributes.
        Some(_) if name.starts_with(b"user.") && !matches!(kind, Kind::File | Kind::Directory) => {
            Err(if writes { Code::NotPermitted } else { Code::NoAttribute })
        }
        Some(_) => Ok(()),
    }
}

impl Batch<'_> {
    /// Number of pieces of a value of `bytes` bytes.
    pub(crate) fn pieces_of(bytes: usize) -> u64 {
        bytes.div_ceil(PIECE_BYTES).max(1) as u64
    }

    /// Stores a value over the pieces of an old one. Further pieces of the old one stay.
    pub(crate) fn put_value(&mut self, ino: Ino, name: &[u8], value: &[u8]) -> Answer<()> {
        let mut key = ValueKey::new(ino, name);
        if value.is_empty() {
            return self.tx.append(key.bytes(), value);
        }
        for (piece, bytes) in value.chunks(PIECE_BYTES).enumerate() {
            key.set_piece(piece as u16);
            self.tx.append(key.bytes(), bytes)?;
        }
        Ok(())
    }

    fn remove_pieces(&mut self, ino: Ino, name: &[u8], from: u64, to: u64) -> Answer<()> {
        let mut key = ValueKey::new(ino, name);
        for piece in from..to {
            key.set_piece(piece as u16);
            self.tx.delete(key.bytes())?;
        }
        Ok(())
    }

    /// Number of pieces and bytes of a value; zero if it does not exist.
    fn measure_value(&self, ino: Ino, name: &[u8]) -> Answer<(u64, usize)> {
        let (first, mut last) = (ValueKey::new(ino, name), ValueKey::new(ino, name));
        last.set_piece(u16::MAX);
        let (mut pieces, mut bytes) = (0, 0);
        for item in self.tx.range(first.bytes(), last.bytes())? {
            pieces += 1;
            bytes += item?.1.len();
        }
        Ok((pieces, bytes))
    }

    /// The reply with a value; none if it does not exist.
    fn reply_value<'o>(&self, ino: Ino, name: &[u8], payload: &'o mut [u8]) -> Answer<Option<Reply<'o>>> {
        let (first, mut last) = (ValueKey::new(ino, name), ValueKey::new(ino, name));
        last.set_piece(u16::MAX);
        let (mut end, mut any) = (0, false);
        for item in self.tx.range(first.bytes(), last.bytes())? {
            let (_, bytes) = item?;
            payload.get_mut(end..end + bytes.len()).ok_or(Code::TooBig)?.copy_from_slice(bytes);
            end += bytes.len();
            any = true;
        }
        Ok(any.then_some(Reply::Bytes(&payload[..end])))
    }

    /// Bytes of all extended attributes of an inode that count towards their bound.
    fn xattr_total(&self, ino: Ino) -> Answer<usize> {
        let (first, last) = keys::values_of(ino);
        let mut total = 0;
        for item in self.tx.range(&first, &last)? {
            let (key, bytes) = item?;
            match keys::decode(key) {
                Some(Key::Value(_, b"", _)) => {}
                Some(Key::Value(_, name, 0)) => total += name.len() + bytes.len() + XATTR_OVERHEAD,
                Some(Key::Value(..)) => total += bytes.len(),
                _ => return Err(Code::Corrupt),
            }
        }
        Ok(total)
    }

    /// Removes all values of an inode.
    pub(crate) fn remove_values(&mut self, ino: Ino) -> Answer<()> {
        let (first, last) = keys::values_of(ino);
        loop {
            let mut key = [0; keys::VALUE_KEY_BYTES];
            let n = match self.tx.first_in(&first, &last)? {
                Some((found, _)) => {
                    key.get_mut(..found.len()).ok_or(Code::Corrupt)?.copy_from_slice(found);
                    found.len()
                }
                None => return Ok(()),
            };
            self.tx.delete(&key[..n])?;
        }
    }

    pub(crate) fn read_link<'o>(&mut self, ino: Ino, payload: &'o mut [u8]) -> Answer<Reply<'o>> {
        if !self.inode(ino)?.attr.is_symlink() {
            return Err(Code::Invalid);
        }
        self.reply_value(ino, b"", payload)?.ok_or(Code::Corrupt)
    }

    pub(crate) fn get_xattr<'o>(
        &mut self,
        ino: Ino,
        name: &[u8],
        payload: &'o mut [u8],
    ) -> Answer<Reply<'o>> {
        let inode = self.inode(ino)?;
        check_name(name, inode.attr.kind(), false)?;
        if inode.marks & MARK_VALUES == 0 {
            return Err(Code::NoAttribute);
        }
        self.reply_value(ino, name, payload)?.ok_or(Code::NoAttribute)
    }

    pub(crate) fn set_xattr(
        &mut self,
        c: &mut Context<'_>,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: u32,
    ) -> Answer<Reply<'static>> {
        let mut inode = self.inode(ino)?;
        check_name(name, inode.attr.kind(), true)?;
        if value.len() > XATTR_VALUE_MAX {
            return Err(Code::TooBig);
        }
        let (mut old_pieces, mut total) = (0, 0);
        if inode.marks & MARK_VALUES != 0 {
            let (pieces, bytes) = self.measure_value(ino, name)?;
            old_pieces = pieces;
            total = self.xattr_total(ino)?;
            if pieces > 0 {
                total -= name.len() + bytes + XATTR_OVERHEAD;
            }
        }
        match flags {
            XATTR_CREATE if old_pieces > 0 => return Err(Code::Exists),
            XATTR_REPLACE if old_pieces == 0 => return Err(Code::NoAttribute),
            0 | XATTR_CREATE | XATTR_REPLACE => {}
            _ => return Err(Code::Invalid),
        }
        if total + name.len() + value.len() + XATTR_OVERHEAD > XATTR_TOTAL_MAX {
            return Err(Code::NoSpace);
        }
        let pieces = Self::pieces_of(value.len());
        // Inode, kept reply.
        self.admit(Class::Growth, Work { writes: 2, run: pieces + old_pieces })?;
        self.put_value(ino, name, value)?;
        self.remove_pieces(ino, name, pieces, old_pieces)?;
        inode.mark_values();
        inode.attr.ctime = c.now;
        self.store_inode(&inode)?;
        c.effects.inode(inode.entry());
        Ok(Reply::Done)
    }

    pub(crate) fn list_xattr<'o>(&mut self, ino: Ino, payload: &'o mut [u8]) -> Answer<Reply<'o>> {
        let inode = self.inode(ino)?;
        let mut end = 0;
        if inode.marks & MARK_VALUES != 0 {
            let (first, last) = keys::values_of(ino);
            for item in self.tx.range(&first, &last)? {
                let (key, _) = item?;
                match keys::decode(key) {
                    Some(Key::Value(_, name, 0)) if !name.is_empty() => {
                        let to = payload.get_mut(end..end + name.len() + 1).ok_or(Code::TooBig)?;
                        to[..name.len()].copy_from_slice(name);
                        to[name.len()] = 0;
                        end += name.len() + 1;
                    }
                    Some(Key::Value(..)) => {}
                    _ => return Err(Code::Corrupt),
                }
            }
        }
        Ok(Reply::Bytes(&payload[..end]))
    }

    pub(crate) fn remove_xattr(
        &mut self,
        c: &mut Context<'_>,
        ino: Ino,
        name: &[u8],
    ) -> Answer<Reply<'static>> {
        let mut inode = self.inode(ino)?;
        check_name(name, inode.attr.kind(), true)?;
        let pieces = if inode.marks & MARK_VALUES == 0 { 0 } else { self.measure_value(ino, name)?.0 };
        if pieces == 0 {
            return Err(Code::NoAttribute);
        }
        self.admit(Class::Removal, Work { writes: 2, run: pieces })?;
        self.remove_pieces(ino, name, 0, pieces)?;
        inode.attr.ctime = c.now;
        self.store_inode(&inode)?;
        c.effects.inode(inode.entry());
        Ok(Reply::Done)
    }
}
