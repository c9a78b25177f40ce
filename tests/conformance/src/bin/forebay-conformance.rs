//! Runs the conformance suite through one door: see the crate's documentation, and `--help`.

use forebay_conformance::case::{self, Result as Outcome};
use forebay_conformance::cases;
use forebay_conformance::client_door::ClientDoor;
use forebay_conformance::disturbed_door::DisturbedDoor;
use forebay_conformance::door::{Ability, Door};
use forebay_conformance::libc_door::{LibcDoor, Spelling};
use forebay_conformance::nodes_door::NodesDoor;
use forebay_conformance::pair_door::PairDoor;
use forebay_conformance::trees;
use forebay_conformance::wrong_door::{Lie, WrongDoor};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const HELP: &str = "\
usage: forebay-conformance --root DIR [option]...
       forebay-conformance --pool DIR [option]...
       forebay-conformance --equal DIR --to DIR
Runs every case in a directory of its own: under DIR, which must be empty or absent, through the C library, or in the
empty pool of DIR through the client library. Or compares two trees.

  --spelling absolute|relative|at   how paths are given to calls (absolute)
  --claim ABILITY                   DIR's file system has this: xattrs, large-xattrs, own-space, small-space
  --lacks ABILITY                   leave out what needs this: own-data, large-xattrs
  --only TEXT                       only cases whose name contains TEXT
  --user UID                        as that user, who must own DIR
  --private-tmpfs OPTIONS           on a tmpfs mounted on DIR for this process alone
  --and DIR                         another node's door to the same pool, of --root's or --pool's kind; each call is made
                                    by the next door; may be given more than once
  --under NAME                      with --pool: below this directory of the pool
  --disturb SEED --mover DIR        files are drained and released by the mover of the pool in DIR between two calls
  --looks-at DIR                    look at the same files through DIR, and change them through --root
  --lie NAME                        through a door that lies; the suite must find it out
  --list                            the names of the cases, and what they need
";

struct Options {
    root: PathBuf,
    pool: Option<PathBuf>,
    spelling: Spelling,
    claimed: Vec<Ability>,
    lacks: Vec<Ability>,
    only: String,
    user: Option<u32>,
    private_tmpfs: Option<String>,
    lie: Option<Lie>,
    looks_at: Option<PathBuf>,
    and: Vec<PathBuf>,
    under: String,
    disturb: Option<u64>,
    mover: PathBuf,
    equal: Option<PathBuf>,
    to: PathBuf,
}

fn main() -> ExitCode {
    let options = match parse() {
        Ok(Some(options)) => options,
        Ok(None) => return ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("forebay-conformance: {message}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    if let Some(one) = &options.equal {
        return compare(one, &options.to);
    }
    let mut door = match prepare(&options).and_then(|()| door(&options)) {
        Ok(door) => door,
        Err(message) => {
            eprintln!("forebay-conformance: {message}");
            return ExitCode::from(2);
        }
    };
    let failed = match options.disturb {
        None => run_all(&mut *door, &options),
        Some(seed) => {
            let mut door = DisturbedDoor::new(door, &options.mover, seed);
            let failed = run_all(&mut door, &options);
            println!("disturbances: {:?}", door.disturbances());
            failed
        }
    };
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn compare(one: &Path, other: &Path) -> ExitCode {
    match trees::differences(one, other) {
        Ok(found) if found.is_empty() => ExitCode::SUCCESS,
        Ok(found) => {
            println!("{}", found.join("\n"));
            ExitCode::FAILURE
        }
        Err(e) => {
            eprintln!("forebay-conformance: the trees cannot be compared: {e}");
            ExitCode::from(2)
        }
    }
}

fn door(options: &Options) -> Result<Box<dyn Door>, String> {
    if !options.and.is_empty() {
        let first = options.pool.as_ref().unwrap_or(&options.root);
        let doors = std::iter::once(first).chain(&options.and).map(|dir| -> Result<Box<dyn Door>, String> {
            Ok(match options.pool {
                Some(_) => Box::new(ClientDoor::attach(dir, &options.under, &options.claimed)?),
                None => Box::new(LibcDoor::new(dir, Spelling::Absolute, &options.claimed)),
            })
        });
        return Ok(Box::new(NodesDoor::new(doors.collect::<Result<_, _>>()?)));
    }
    if let Some(pool) = &options.pool {
        return Ok(Box::new(ClientDoor::attach(pool, &options.under, &options.claimed)?));
    }
    let honest = LibcDoor::new(&options.root, options.spelling, &options.claimed);
    if let Some(other) = &options.looks_at {
        // Only absolute paths distinguish the two doors.
        let changes = LibcDoor::new(&options.root, Spelling::Absolute, &options.claimed);
        let looks = LibcDoor::new(other, Spelling::Absolute, &options.claimed);
        return Ok(Box::new(PairDoor { changes, looks }));
    }
    Ok(match options.lie {
        None => Box::new(honest),
        Some(lie) => Box::new(WrongDoor { inner: honest, lie }),
    })
}

/// Runs the cases and prints a line for each. Returns the number of failed cases.
fn run_all(door: &mut dyn Door, options: &Options) -> usize {
    println!("door: {}", door.name());
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for case in cases::all().filter(|case| case.name.contains(&options.only)) {
        let left_out = case.needs.iter().find(|need| options.lacks.contains(need));
        match left_out.map_or_else(|| case::run(case, door), |need| Outcome::Skipped(*need)) {
            Outcome::Passed => {
                println!("ok      {}", case.name);
                passed += 1;
            }
            Outcome::Skipped(lacking) => {
                println!("skipped {} (lacks {lacking:?})", case.name);
                skipped += 1;
            }
            Outcome::Failed(failure) => {
                println!("FAILED  {}: {} ({})", case.name, failure.what, failure.place);
                for promise in case.promises {
                    println!("          promised: {promise}");
                }
                failed += 1;
            }
        }
    }
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    failed
}

fn parse() -> Result<Option<Options>, String> {
    let mut options = Options {
        root: PathBuf::new(),
        pool: None,
        spelling: Spelling::Absolute,
        claimed: Vec::new(),
        lacks: Vec::new(),
        only: String::new(),
        user: None,
        private_tmpfs: None,
        lie: None,
        looks_at: None,
        and: Vec::new(),
        under: String::new(),
        disturb: None,
        mover: PathBuf::new(),
        equal: None,
        to: PathBuf::new(),
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--help" => {
                print!("{HELP}");
                return Ok(None);
            }
            "--list" => {
                for case in cases::all() {
                    println!("{} {:?}", case.name, case.needs);
                }
                return Ok(None);
            }
            _ => {}
        }
        let value = arguments.next().ok_or(format!("{argument} needs a value"))?;
        match argument.as_str() {
            "--root" => options.root = PathBuf::from(&value),
            "--pool" => options.pool = Some(PathBuf::from(&value)),
            "--and" => options.and.push(PathBuf::from(&value)),
            "--under" => options.under = value,
            "--disturb" => options.disturb = Some(value.parse().map_err(|_| format!("{value} is no seed"))?),
            "--mover" => options.mover = PathBuf::from(&value),
            "--equal" => options.equal = Some(PathBuf::from(&value)),
            "--to" => options.to = PathBuf::from(&value),
            "--looks-at" => options.looks_at = Some(PathBuf::from(&value)),
            "--spelling" => options.spelling = choose(&value, &SPELLINGS)?,
            "--claim" => options.claimed.push(choose(&value, &ABILITIES)?),
            "--lacks" => options.lacks.push(choose(&value, &LACKS)?),
            "--only" => options.only = value,
            "--user" => options.user = Some(value.parse().map_err(|_| format!("{value} is no user id"))?),
            "--private-tmpfs" => options.private_tmpfs = Some(value),
            "--lie" => options.lie = Some(choose(&value, &Lie::ALL.map(|lie| (format!("{lie:?}"), lie)))?),
            other => return Err(format!("there is no option {other}")),
        }
    }
    if options.equal.is_none() && options.root.as_os_str().is_empty() == options.pool.is_none() {
        return Err("either --root DIR or --pool DIR is needed".into());
    }
    Ok(Some(options))
}

const SPELLINGS: [(&str, Spelling); 3] =
    [("absolute", Spelling::Absolute), ("relative", Spelling::Relative), ("at", Spelling::At)];
const LACKS: [(&str, Ability); 2] = [("large-xattrs", Ability::LargeXattrs), ("own-data", Ability::OwnData)];
const ABILITIES: [(&str, Ability); 4] = [
    ("xattrs", Ability::Xattrs),
    ("large-xattrs", Ability::LargeXattrs),
    ("own-space", Ability::OwnSpace),
    ("small-space", Ability::SmallSpace),
];

fn choose<T: Copy>(value: &str, among: &[(impl AsRef<str> + Ord, T)]) -> Result<T, String> {
    let all: BTreeMap<&str, T> = among.iter().map(|(name, t)| (name.as_ref(), *t)).collect();
    let names: Vec<_> = all.keys().copied().collect();
    all.get(value).copied().ok_or(format!("{value} is none of {}", names.join(", ")))
}

/// Creates the root, mounts the private tmpfs and changes the user, as the options say.
fn prepare(options: &Options) -> Result<(), String> {
    if options.pool.is_none() && !options.root.is_dir() {
        make_root(&options.root)?;
    }
    if let Some(mount) = &options.private_tmpfs {
        mount_private_tmpfs(&options.root, mount)
            .map_err(|e| format!("no tmpfs can be mounted for this process alone: {e}"))?;
    }
    if let Some(user) = options.user {
        // SAFETY: no memory is passed; the process has one thread.
        let failed = unsafe {
            libc::setgroups(0, std::ptr::null()) != 0
                || libc::setresgid(user, user, user) != 0
                || libc::setresuid(user, user, user) != 0
        };
        if failed {
            return Err(format!("cannot become user {user}: {}", std::io::Error::last_os_error()));
        }
    }
    Ok(())
}

fn make_root(root: &Path) -> Result<(), String> {
    std::fs::create_dir_all(root).map_err(|e| format!("{} cannot be made: {e}", root.display()))
}

fn mount_private_tmpfs(root: &Path, options: &str) -> std::io::Result<()> {
    let text = |bytes: &[u8]| CString::new(bytes).map_err(std::io::Error::other);
    let root = text(root.as_os_str().as_encoded_bytes())?;
    let (tmpfs, slash, options) = (text(b"tmpfs")?, text(b"/")?, text(options.as_bytes())?);
    let null = std::ptr::null();
    // SAFETY: the strings end in NUL; the process has one thread.
    let failed = unsafe {
        libc::unshare(libc::CLONE_NEWNS) != 0
            || libc::mount(null, slash.as_ptr(), null, libc::MS_REC | libc::MS_PRIVATE, null.cast()) != 0
            || libc::mount(tmpfs.as_ptr(), root.as_ptr(), tmpfs.as_ptr(), 0, options.as_ptr().cast()) != 0
    };
    if failed {
        Err(std::io::Error::last_os_error())
    } else {
        Ok(())
    }
}
