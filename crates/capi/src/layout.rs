//! The functions of include/forebay.h on layouts: stripes, targets, and the width of a directory.

use forebay_client::{targets_of, PathBuffer, Pool, Striping};
use forebay_types::limits::TARGETS_MAX;
use forebay_types::{Code, Targets};

use crate::answer::{Failed, FAULT, INVALID};
use crate::public::{at, Text};

type Done = Result<(), Failed>;

/// Checks the number of targets.
pub(crate) fn checked(targets: &[u32]) -> Result<&[u32], Failed> {
    (targets.len() <= TARGETS_MAX).then_some(targets).ok_or(INVALID)
}

pub(crate) fn layout_get(
    pool: &Pool,
    path: Text<'_>,
    stripe_count: Option<&mut u32>,
    stripe_bytes: Option<&mut u32>,
) -> Done {
    let place = at(path)?;
    let (count, bytes) = (stripe_count.ok_or(FAULT)?, stripe_bytes.ok_or(FAULT)?);
    let striping = Striping::of(&pool.resolve(place, true, &mut PathBuffer::new())?.layout);
    (*count, *bytes) = (striping.stripe_count.into(), striping.stripe_bytes);
    Ok(())
}

pub(crate) fn layout_set(pool: &Pool, path: Text<'_>, stripe_count: u32, stripe_bytes: u32) -> Done {
    layout_set_on(pool, path, stripe_count, stripe_bytes, &[])
}

pub(crate) fn layout_set_on(
    pool: &Pool,
    path: Text<'_>,
    stripe_count: u32,
    stripe_bytes: u32,
    targets: &[u32],
) -> Done {
    let place = at(path)?;
    let targets = checked(targets)?;
    let directory = pool.resolve(place, true, &mut PathBuffer::new())?;
    let count = u16::try_from(stripe_count).map_err(|_| INVALID)?;
    Ok(pool.set_layout_of_new(&directory, (count, stripe_bytes), targets)?)
}

pub(crate) fn layout_migrate(pool: &Pool, path: Text<'_>) -> Done {
    let entry = pool.resolve(at(path)?, true, &mut PathBuffer::new())?;
    Ok(pool.make_single(entry.attr.ino, false)?)
}

pub(crate) fn layout_targets(pool: &Pool, path: Text<'_>, targets: &mut [u32]) -> Result<usize, Failed> {
    let entry = pool.resolve(at(path)?, true, &mut PathBuffer::new())?;
    // A directory without a layout of its own has a default, which names the first target of its home.
    let is_default = entry.attr.is_directory() && !entry.layout.is_set(entry.attr.home);
    let found = if is_default { None } else { targets_of(&entry.layout.components()[0]) };
    let found = found.as_ref().map_or(&[][..], Targets::as_slice);
    for (target, found) in targets.iter_mut().zip(found) {
        *target = *found;
    }
    Ok(found.len())
}

pub(crate) fn layout_width(pool: &Pool, path: Text<'_>) -> Result<usize, Failed> {
    let attr = pool.resolve(at(path)?, true, &mut PathBuffer::new())?.attr;
    if !attr.is_directory() {
        return Err(Code::NotDirectory.into());
    }
    let parts = if attr.width_log2 == 0 { None } else { pool.parts_of(attr.ino)? };
    Ok(parts.map_or(1, |parts| parts.as_slice().len()))
}

pub(crate) fn layout_set_width(pool: &Pool, path: Text<'_>, width: u32) -> Done {
    let attr = pool.resolve(at(path)?, true, &mut PathBuffer::new())?.attr;
    let width = u16::try_from(width).map_err(|_| INVALID)?;
    if attr.is_directory() && width == 1 && attr.width_log2 == 0 {
        return Ok(());
    }
    pool.set_width(attr.ino, width)?;
    Ok(())
}
