//! Finds all errors in the user's pairs that can be detected before anything is copied.

use std::collections::HashMap;

use forebay_types::{Code, Error, Kind, Result};

use crate::names::{Tag, Use};
use crate::pair::{Mapped, Pair, Spot};
use crate::report::{display, reason};
use crate::tree::{Meta, Tree};

/// Mode of directories that are created above destinations, before the umask.
const PARENT_MODE: u32 = 0o777;

/// A pair that passed the checks.
#[derive(Clone, Debug)]
pub(crate) struct Top {
    pub(crate) source: Spot,
    /// Its destination.
    pub(crate) destination: Spot,
    /// The path under which it is staged: the destination itself, or a temporary that is renamed to it at the end.
    pub(crate) staged: Spot,
    pub(crate) kind: Kind,
    /// The destination exists.
    pub(crate) exists: bool,
    /// The destination, or its staged copy, gets the source's own attributes.
    pub(crate) keeps_attributes: bool,
    /// `staged` is a leftover of a killed staging.
    pub(crate) adopted: bool,
}

impl Top {
    pub(crate) fn is_directory(&self) -> bool {
        self.kind == Kind::Directory
    }

    /// The directory that must exist before staging starts.
    fn base(&self) -> &[u8] {
        &self.staged.parent
    }
}

/// Checks the pairs. `whole` is the tag of an all-or-nothing staging, whose copies first get temporary names.
///
/// # Errors
/// The error of the first pair that cannot be staged. Nothing was changed.
pub(crate) fn check<S: Tree, D: Tree>(
    source: &S,
    destination: &D,
    pairs: &[Pair],
    whole: Option<&Tag>,
) -> Result<Vec<Top>> {
    if pairs.is_empty() {
        return Err(Error::new(Code::Invalid, "cannot stage")
            .why("no source is named")
            .cure("name a SOURCE"));
    }
    let mut tops: Vec<Top> = Vec::with_capacity(pairs.len());
    let mut taken: HashMap<Vec<u8>, usize> = HashMap::new();
    for pair in pairs {
        let mapped = Mapped::of(pair)?;
        let meta = check_source(source, &mapped)?;
        let mut top = check_destination(destination, &mapped, &meta, whole.is_some())?;
        if let Some(&other) = taken.get(&top.destination.path()) {
            if !(top.is_directory() && tops[other].is_directory()) || whole.is_some() {
                return Err(Error::new(
                    Code::Exists,
                    format!("cannot stage {}", display(&top.source.path())),
                )
                .why(format!(
                    "{} has the same destination {}",
                    display(&tops[other].source.path()),
                    display(&top.destination.path())
                ))
                .cure("give each source a destination of its own"));
            }
        }
        taken.insert(top.destination.path(), tops.len());
        if let Some(tag) = whole {
            let name = tag.temporary(&top.destination.name, Use::Part);
            // Within an existing directory, which may be the top of a file system; else beside its final name.
            let within = top.exists && top.is_directory();
            top.staged = if within {
                top.destination.child(&name)
            } else {
                Spot { parent: top.destination.parent.clone(), name }
            };
        }
        tops.push(top);
    }
    Ok(tops)
}

fn check_source<S: Tree>(tree: &S, mapped: &Mapped) -> Result<Meta> {
    let spot = &mapped.source;
    let path = display(&spot.path());
    let wrong = |code: Code| {
        let cure = match code {
            Code::NotFound => format!("name an existing path in {}", tree.title()),
            Code::AccessDenied | Code::NotPermitted => {
                "make it readable (chmod u+r, directories u+rx), or run as a user who may read it".into()
            }
            Code::NotDirectory => "remove the slash at the end: it means a directory's contents".into(),
            Code::CrossDevice => {
                "a link or `..` on the way leads out of the pool: give the target's path in the store".into()
            }
            Code::TooManySymlinks => "its symbolic links form a loop: name the file itself".into(),
            _ => String::new(),
        };
        Error::new(code, format!("cannot stage {path}: cannot read it in {}", tree.title()))
            .why(reason(code))
            .cure(cure)
    };
    let (parent, _) = tree.open_path(&spot.parent).map_err(wrong)?;
    let meta = tree.stat(&parent, &spot.name, true).map_err(wrong)?;
    match meta.kind {
        Kind::Directory => tree.open_directory(&parent, &spot.name, true).map(|_| ()).map_err(wrong)?,
        _ if mapped.contents => return Err(wrong(Code::NotDirectory)),
        Kind::File => tree.open(&parent, &spot.name, true).map(|_| ()).map_err(wrong)?,
        _ => {}
    }
    Ok(meta)
}

fn check_destination<D: Tree>(tree: &D, mapped: &Mapped, source: &Meta, whole: bool) -> Result<Top> {
    let mut destination = mapped.destination.clone();
    let mut found = look(tree, &destination)?;
    if let (Some((_, meta)), true) = (&found, source.kind != Kind::Directory) {
        if meta.kind == Kind::Directory {
            destination = destination.child(&mapped.source.name);
            found = look(tree, &destination)?;
        }
    }
    let path = display(&destination.path());
    let wrong = |code: Code, why: &str, cure: &str| {
        Error::new(code, format!("cannot stage to {path} in {}", tree.title())).why(why).cure(cure)
    };
    let denied = |code: Code| match code {
        Code::AccessDenied | Code::NotPermitted | Code::ReadOnly => wrong(
            code,
            &format!("its directory cannot be written to: {}", reason(code)),
            "choose a destination that you may write to",
        ),
        Code::NotSupported => wrong(
            code,
            "its directory is one of the kernel's own (as /proc and /sys are), in which no files can be made",
            "choose a destination on another file system",
        ),
        code => wrong(code, &reason(code), ""),
    };
    if let Some((directory, meta)) = &found {
        match (source.kind == Kind::Directory, meta.kind == Kind::Directory) {
            (true, false) => {
                return Err(wrong(
                    Code::NotDirectory,
                    "there is a file of that name, and the source is a directory",
                    "choose another destination, or remove the file",
                ));
            }
            (false, true) => {
                return Err(wrong(
                    Code::IsDirectory,
                    "there is a directory of that name, and the source is a file",
                    "choose another destination",
                ));
            }
            (true, true) => {
                let writable = tree
                    .open_directory(directory, &destination.name, true)
                    .and_then(|(opened, _)| tree.check_writable(&opened));
                // A directory of this user, to which an earlier staging gave the source's restrictive mode, gets
                // accessible again.
                let own = meta.uid == rustix::process::geteuid().as_raw() && !whole;
                match writable {
                    Err(Code::AccessDenied) if own => {}
                    other => other.map_err(denied)?,
                }
            }
            (false, false) => tree.check_writable(directory).map_err(denied)?,
        }
    } else {
        let (nearest, _) = nearest(tree, &destination.parent).map_err(denied)?;
        tree.check_writable(&nearest).map_err(denied)?;
    }
    let exists = found.is_some();
    Ok(Top {
        source: mapped.source.clone(),
        staged: destination.clone(),
        kind: source.kind,
        exists,
        keeps_attributes: !(exists && (mapped.contents || destination.is_root())),
        adopted: false,
        destination,
    })
}

/// The parent directory and the attributes of a path; `None` if it does not exist. Links are followed if they lead to
/// an existing object.
fn look<D: Tree>(tree: &D, spot: &Spot) -> Result<Option<(D::Directory, Meta)>> {
    let failed = |code: Code| {
        Error::new(code, format!("cannot read the destination {} in {}", display(&spot.path()), tree.title()))
            .why(reason(code))
            .cure(match code {
                Code::NotDirectory => "a directory on the way to it is a file: choose another destination",
                Code::AccessDenied => "choose a destination that you may write to",
                _ => "",
            })
    };
    let (parent, _) = match tree.open_path(&spot.parent) {
        Ok(opened) => opened,
        Err(Code::NotFound) => return Ok(None),
        Err(code) => return Err(failed(code)),
    };
    let followed = tree.stat(&parent, &spot.name, true);
    let meta = match followed {
        Err(Code::NotFound | Code::TooManySymlinks) => tree.stat(&parent, &spot.name, false),
        other => other,
    };
    match meta {
        Ok(meta) => Ok(Some((parent, meta))),
        Err(Code::NotFound) => Ok(None),
        Err(code) => Err(failed(code)),
    }
}

/// The deepest existing directory on the way to `path`.
fn nearest<D: Tree>(tree: &D, path: &[u8]) -> std::result::Result<(D::Directory, Meta), Code> {
    let mut path = path;
    loop {
        match tree.open_path(path) {
            Err(Code::NotFound) if path != b"/" => {
                let cut = path.iter().rposition(|&b| b == b'/').unwrap_or(0);
                path = if cut == 0 { b"/" } else { &path[..cut] };
            }
            other => return other,
        }
    }
}

/// Creates missing directories above the destinations, and returns those that it created.
pub(crate) fn make_parents<D: Tree>(tree: &D, tops: &[Top]) -> Result<Vec<Spot>> {
    let mut parents = Vec::new();
    for top in tops {
        let path = top.base();
        if tree.open_path(path).is_ok() {
            continue;
        }
        let mut ends: Vec<usize> = (1..path.len()).filter(|&i| path[i] == b'/').collect();
        ends.push(path.len());
        for end in ends {
            let Ok(spot) = Spot::of(&path[..end]) else { continue };
            let made = tree
                .open_path(&spot.parent)
                .and_then(|(parent, _)| tree.make_directory(&parent, &spot.name, PARENT_MODE));
            match made {
                Ok(()) => parents.push(spot),
                Err(Code::Exists) => {}
                Err(code) => {
                    return Err(Error::new(
                        code,
                        format!("cannot make the directory {} in {}", display(&spot.path()), tree.title()),
                    )
                    .why(reason(code))
                    .cure("make it yourself, or choose another destination"));
                }
            }
        }
    }
    Ok(parents)
}
