//! Requests a second of the shard, for batches of one, batches of 16, and one long transaction, compared with raw LMDB.
//! Each in a directory of the pool alone, and in one in front of a store, whose changes make places pending.
//!
//! `cargo run --release -p forebay-meta --example shard_rate -- /dev/shm/NAME [FILES]` creates the directory, and
//! removes it afterwards. Each change keeps its reply, as in the daemon.

use std::path::Path;
use std::time::{Duration, SystemTime};

use forebay_meta::{Effects, Shard, ShardOptions, PAYLOAD_BYTES_MAX};
use forebay_types::{limits, Caller, Ino, NodeId, Reply, Request, Timestamp};
use heed::types::Bytes;
use heed::{Database, EnvFlags, EnvOpenOptions};

const CALLER: Caller = Caller { uid: 1000, gid: 1000 };
const MAP_BYTES: u64 = 8 << 30;

/// CPU time of this thread, so that other processes on a busy machine do not count.
fn clock() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

type Failure = Box<dyn std::error::Error>;

fn now() -> Timestamp {
    let t = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Timestamp { sec: t.as_secs() as i64, nsec: t.subsec_nanos() }
}

/// Applies `count` requests, which `request` makes from their index, `batch` of them in a transaction.
fn drive(
    shard: &Shard,
    count: usize,
    batch_requests: usize,
    mut request: impl for<'a> FnMut(usize, &'a mut Vec<u8>) -> Request<'a>,
) -> Result<Duration, Failure> {
    let mut out = vec![0; limits::MESSAGE_BYTES_MAX];
    let mut payload = vec![0; PAYLOAD_BYTES_MAX];
    let (mut name, mut effects) = (Vec::new(), Effects::new());
    let start = clock();
    let mut done = 0;
    while done < count {
        let mut batch = shard.begin()?;
        effects.clear();
        for _ in 0..batch_requests.min(count - done) {
            name.clear();
            let request = request(done, &mut name);
            let answer = batch.apply(CALLER, &request, now(), &mut effects, &mut payload);
            if let Err(refusal) = &answer {
                return Err(format!("{request:?}: {}", refusal.code()).into());
            }
            let n = Reply::encode_answer(&answer, &mut out).unwrap_or(0);
            if request.changes() {
                batch.keep_reply(7, 0, done as u64, &out[..n])?;
            }
            done += 1;
        }
        let orphans: Vec<Ino> = effects.orphaned().iter().map(|o| o.0).collect();
        if batch_requests > 1 && !orphans.is_empty() {
            batch.remove_orphans(&orphans)?;
        }
        batch.commit()?;
        if batch_requests == 1 && done % 64 == 0 {
            remove_orphans(shard)?;
        }
    }
    remove_orphans(shard)?;
    Ok(clock() - start)
}

fn remove_orphans(shard: &Shard) -> Result<(), Failure> {
    let mut batch = shard.begin()?;
    let orphans: Vec<Ino> = batch.orphans()?.iter().map(|o| o.0).collect();
    batch.remove_orphans(&orphans)?;
    batch.commit()?;
    Ok(())
}

/// What a round measures.
const STEPS: [&str; 5] = ["create", "lookup", "rename", "unlink", "mkdir, rmdir"];

/// Creates, looks up, renames and unlinks `files` files, and makes and removes a tenth as many directories. Returns the
/// rate of each.
fn round(shard: &Shard, files: usize, batch: usize, parent: Ino) -> Result<[f64; STEPS.len()], Failure> {
    use std::io::Write as _;
    // Not in the order of creation, as in real programs.
    let spread = |i: usize, count: usize| i.wrapping_mul(7919) % count;
    let write_name = |what: &str, i: usize, name: &mut Vec<u8>| {
        let _ = write!(name, "{what}.{:08}", spread(i, files));
    };
    let create = drive(shard, files, batch, |i, name| {
        write_name("file", i, name);
        Request::Create {
            parent,
            name,
            mode: 0o644,
            exclusive: true,
            dirty: true,
            layout: None,
            number: None,
            reserve: false,
        }
    })?;
    let lookup = drive(shard, files, batch, |i, name| {
        write_name("file", i, name);
        Request::Lookup { parent, name }
    })?;
    let rename = drive(shard, files, batch, |i, name| {
        write_name("file", i, name);
        let middle = name.len();
        write_name("name", i, name);
        let (name, new_name) = name.split_at(middle);
        Request::Rename { parent, name, new_parent: parent, new_name, flags: 0 }
    })?;
    let unlink = drive(shard, files, batch, |i, name| {
        write_name("name", i, name);
        Request::Unlink { parent, name }
    })?;
    let directories = files / 10;
    let write_directory = |i: usize, name: &mut Vec<u8>| {
        let _ = write!(name, "made.{i:08}");
    };
    let mut made = drive(shard, directories, batch, |i, name| {
        write_directory(i, name);
        Request::MakeDirectory { parent, name, mode: 0o755 }
    })?;
    made += drive(shard, directories, batch, |i, name| {
        write_directory(i, name);
        Request::RemoveDirectory { parent, name }
    })?;
    let of_files = [create, lookup, rename, unlink].map(|t| files as f64 / t.as_secs_f64());
    let [create, lookup, rename, unlink] = of_files;
    Ok([create, lookup, rename, unlink, directories as f64 / made.as_secs_f64()])
}

/// Makes a directory; returns its number.
fn make_directory(shard: &Shard, name: &[u8]) -> Result<Ino, Failure> {
    let request = Request::MakeDirectory { parent: Ino::ROOT, name, mode: 0o755 };
    let answer = apply_alone(shard, &request, |reply| match reply {
        Reply::Entry(entry) => Some(entry.attr.ino),
        _ => None,
    })?;
    answer.ok_or_else(|| "a directory was answered otherwise".into())
}

fn apply_alone<T>(
    shard: &Shard,
    request: &Request<'_>,
    then: impl FnOnce(&Reply<'_>) -> T,
) -> Result<T, Failure> {
    let mut payload = vec![0; PAYLOAD_BYTES_MAX];
    let mut batch = shard.begin()?;
    let answer = batch.apply(CALLER, request, now(), &mut Effects::new(), &mut payload);
    let told =
        answer.map(|reply| then(&reply)).map_err(|refusal| format!("{request:?}: {}", refusal.code()))?;
    batch.commit()?;
    Ok(told)
}

/// The rate of LMDB alone: transactions that put the same bytes as a create.
fn raw(dir: &Path, files: usize, batch: usize) -> Result<f64, Failure> {
    std::fs::create_dir(dir)?;
    let mut options = EnvOpenOptions::new().read_txn_without_tls();
    options.map_size(MAP_BYTES as usize);
    // SAFETY: only one thread of one process uses this environment, and it is deleted afterwards.
    let env = unsafe {
        options.flags(EnvFlags::WRITE_MAP | EnvFlags::NO_SYNC | EnvFlags::NO_META_SYNC | EnvFlags::NO_LOCK);
        options.open(dir)?
    };
    let mut txn = env.write_txn()?;
    let tree: Database<Bytes, Bytes> = env.create_database(&mut txn, None)?;
    txn.commit()?;
    let start = clock();
    let mut done = 0usize;
    while done < files {
        let mut txn = env.write_txn()?;
        for _ in 0..batch.min(files - done) {
            let spread = (done as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut entry = [2; 17];
            entry[9..].copy_from_slice(&spread.to_be_bytes());
            tree.put(&mut txn, &entry, &[1; 26])?;
            let mut inode = [3; 9];
            inode[1..].copy_from_slice(&(done as u64).to_be_bytes());
            tree.put(&mut txn, &inode, &[1; 101])?;
            tree.put(&mut txn, &[1; 10], &[1; 165])?;
            done += 1;
        }
        tree.put(&mut txn, &[1], &[1; 80])?;
        txn.commit()?;
    }
    Ok(files as f64 / (clock() - start).as_secs_f64())
}

fn measure(dir: &Path, files: usize) -> Result<(), Failure> {
    println!("{files} files, requests per second of processor time");
    print!("{:>5} {:>12}", "batch", "directory");
    STEPS.iter().for_each(|step| print!(" {step:>12}"));
    println!(" {:>16}", "raw LMDB create");
    for batch in [1, 16, 1000] {
        let place = dir.join(format!("shard{batch}"));
        std::fs::create_dir(&place)?;
        let options = ShardOptions {
            node: NodeId::FIRST,
            map_bytes: MAP_BYTES,
            root_mode: 0o755,
            root_uid: 0,
            root_gid: 0,
        };
        let shard = Shard::create(&place, &options, now())?;
        let alone = make_directory(&shard, b"alone")?;
        let attached = make_directory(&shard, b"attached")?;
        apply_alone(&shard, &Request::Attach { ino: attached, settings: b"{}", listed: false }, |_| ())?;
        let raw = raw(&dir.join(format!("raw{batch}")), files, batch)?;
        for (parent, what) in [(alone, "the pool's"), (attached, "a store's")] {
            // The first round fills free lists and caches, the second is measured.
            round(&shard, files, 64, parent)?;
            let rates = round(&shard, files, batch, parent)?;
            print!("{batch:>5} {what:>12}");
            rates.iter().for_each(|rate| print!(" {rate:>12.0}"));
            println!(" {raw:>16.0}");
        }
        let report = shard.check(&mut |_| {})?;
        if !report.is_clean() {
            return Err(format!("the shard is damaged: {:?}", report.problems).into());
        }
    }
    Ok(())
}

fn main() -> Result<(), Failure> {
    let mut args = std::env::args_os().skip(1);
    let dir = args.next().ok_or("usage: shard_rate DIR [FILES]: DIR is made, and removed afterwards")?;
    let dir = Path::new(&dir);
    let files = match args.next() {
        Some(n) => n.to_str().and_then(|n| n.parse().ok()).ok_or("FILES must be a number")?,
        None => 100_000,
    };
    std::fs::create_dir(dir)?;
    let done = measure(dir, files);
    std::fs::remove_dir_all(dir)?;
    done
}
