//! Directories whose entry is on one shard and whose inode is on another, step by step (docs/decisions/0012), with two shards
//! in one process.

use forebay_meta::{Effects, Shard, ShardOptions};
use forebay_types::limits::MESSAGE_BYTES_MAX;
use forebay_types::{Caller, Code, Ino, Kind, NodeId, Reply, Request, Timestamp, RENAME_EXCHANGE};

const NOW: Timestamp = Timestamp { sec: 5, nsec: 0 };
const CALLER: Caller = Caller { uid: 7, gid: 8 };

/// Two shards, in a directory that goes with them.
struct Pair {
    place: std::path::PathBuf,
    shards: [Shard; 2],
}

/// What a reply says, in a form that outlives its buffer.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Said {
    Done,
    Inode(Ino, u32, u64),
    Elsewhere(Ino),
    Bytes(Vec<u8>),
    Part(Ino, Ino, Vec<u8>),
    Names(Vec<(Vec<u8>, Ino)>),
    Other,
}

impl Pair {
    fn new(name: &str) -> Pair {
        let place = std::env::temp_dir().join(format!("forebay-elsewhere-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&place);
        let make = |node: u16| {
            let dir = place.join(node.to_string());
            std::fs::create_dir_all(&dir).unwrap();
            let options = ShardOptions {
                node: NodeId(node),
                map_bytes: 64 << 20,
                root_mode: 0o755,
                root_uid: 0,
                root_gid: 0,
            };
            Shard::create(&dir, &options, NOW).unwrap()
        };
        Pair { shards: [make(1), make(2)], place }
    }

    /// Asks the shard that serves a request.
    fn ask(&self, request: Request<'_>) -> Result<Said, Code> {
        let node = request.node().expect("a request of one node");
        let mut batch = self.shards[usize::from(node.0) - 1].begin().unwrap();
        let mut out = vec![0; MESSAGE_BYTES_MAX];
        let n = batch.apply(CALLER, &request, NOW, &mut Effects::new(), &mut out);
        batch.commit().unwrap();
        Ok(match Reply::decode(&out[..n])? {
            Reply::Done => Said::Done,
            Reply::Entry(e) | Reply::Created { entry: e, .. } => {
                Said::Inode(e.attr.ino, e.attr.nlink, e.attr.size)
            }
            Reply::Elsewhere { ino, kind: Kind::Directory } => Said::Elsewhere(ino),
            Reply::Bytes(bytes) => Said::Bytes(bytes.to_vec()),
            Reply::PartOfPath { top, parent, path } => Said::Part(top, parent, path.to_vec()),
            Reply::Entries(entries) => {
                let entries = entries.iter().map(Result::unwrap);
                Said::Names(entries.map(|e| (e.name.to_vec(), e.ino)).collect())
            }
            _ => Said::Other,
        })
    }

    fn inode(&self, request: Request<'_>) -> Ino {
        match self.ask(request) {
            Ok(Said::Inode(ino, ..)) => ino,
            other => panic!("{request:?}: {other:?}"),
        }
    }

    /// A directory of shard 2 under a name in the root, which is on shard 1.
    fn make(&self, name: &[u8]) -> Ino {
        let ino = self.inode(Request::AllocateDirectory { node: NodeId(2), parent: Ino::ROOT, mode: 0o750 });
        self.ask(Request::EnterDirectory { parent: Ino::ROOT, name, ino }).unwrap();
        ino
    }

    fn check(&self) {
        for shard in &self.shards {
            let report = shard.check(&mut |_| {}).unwrap();
            assert!(report.is_clean(), "{:?}", report.problems);
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.place);
    }
}

fn create(parent: Ino, name: &[u8]) -> Request<'_> {
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
}

#[test]
fn make_leaves_an_entry_here_and_an_inode_there() {
    let p = Pair::new("make");
    let d = p.make(b"d");
    assert_eq!(d.birth_node(), NodeId(2));
    assert_eq!(p.ask(Request::Lookup { parent: Ino::ROOT, name: b"d" }), Ok(Said::Elsewhere(d)));
    assert_eq!(p.ask(Request::GetAttr { ino: Ino::ROOT }), Ok(Said::Inode(Ino::ROOT, 3, 1)));
    assert_eq!(p.ask(Request::EnterDirectory { parent: Ino::ROOT, name: b"d", ino: d }), Err(Code::Exists));
    assert_eq!(p.ask(create(Ino::ROOT, b"d")), Err(Code::Exists));
    let file = p.inode(create(d, b"f"));
    assert_eq!(file.birth_node(), NodeId(2), "files are where their directory is");
    let listed = Request::ReadDirectory { ino: Ino::ROOT, cookie: 0, attributes: true };
    assert_eq!(p.ask(listed), Ok(Said::Names(vec![(b"d".to_vec(), d)])));
    let deep = p.inode(Request::MakeDirectory { parent: d, name: b"e", mode: 0 });
    let part = Said::Part(d, Ino::ROOT, b"/e".to_vec());
    assert_eq!(p.ask(Request::PathOf { ino: deep }), Ok(part));
    assert_eq!(p.ask(Request::NameOf { parent: Ino::ROOT, ino: d }), Ok(Said::Bytes(b"d".to_vec())));
    assert_eq!(p.ask(Request::NameOf { parent: Ino::ROOT, ino: deep }), Err(Code::NotFound));
    p.check();
}

#[test]
fn remove_condemns_an_empty_directory_before_its_entry_goes() {
    let p = Pair::new("remove");
    let d = p.make(b"d");
    let parent = Ino::ROOT;
    assert_eq!(
        p.ask(Request::RemoveDirectory { parent, name: b"d" }),
        Ok(Said::Elsewhere(d)),
        "not in one step"
    );
    p.inode(create(d, b"f"));
    assert_eq!(p.ask(Request::CondemnDirectory { ino: d }), Err(Code::NotEmpty));
    p.ask(Request::Unlink { parent: d, name: b"f" }).unwrap();
    p.ask(Request::CondemnDirectory { ino: d }).unwrap();
    p.ask(Request::CondemnDirectory { ino: d }).unwrap();
    assert_eq!(p.ask(create(d, b"f")), Err(Code::NotFound), "nothing is made in it any more");
    assert_eq!(p.ask(Request::MakeDirectory { parent: d, name: b"e", mode: 0 }), Err(Code::NotFound));
    p.ask(Request::PardonDirectory { ino: d }).unwrap();
    p.inode(create(d, b"f"));
    p.ask(Request::Unlink { parent: d, name: b"f" }).unwrap();
    p.ask(Request::CondemnDirectory { ino: d }).unwrap();
    let other = p.make(b"other");
    let leave = |name, ino| p.ask(Request::LeaveDirectory { parent, name, ino });
    assert_eq!(leave(b"d", other), Err(Code::NotFound), "that entry leads to another");
    leave(b"d", d).unwrap();
    assert_eq!(leave(b"d", d), Err(Code::NotFound));
    p.ask(Request::FreeDirectory { ino: d }).unwrap();
    p.ask(Request::FreeDirectory { ino: d }).unwrap();
    assert_eq!(p.ask(Request::GetAttr { ino: d }), Err(Code::NotFound));
    assert_eq!(p.ask(Request::GetAttr { ino: Ino::ROOT }), Ok(Said::Inode(Ino::ROOT, 3, 1)));
    p.check();
}

#[test]
fn condemned_mark_survives_a_restart_of_the_shard() {
    let mut p = Pair::new("restart");
    let d = p.make(b"d");
    p.ask(Request::CondemnDirectory { ino: d }).unwrap();
    let dir = p.shards[1].dir().to_owned();
    let spare = p.place.join("spare");
    std::fs::create_dir(&spare).unwrap();
    let options =
        ShardOptions { node: NodeId(3), map_bytes: 64 << 20, root_mode: 0, root_uid: 0, root_gid: 0 };
    p.shards[1] = Shard::create(&spare, &options, NOW).unwrap();
    p.shards[1] = Shard::open(&dir).unwrap();
    assert_eq!(p.ask(create(d, b"f")), Err(Code::NotFound));
    p.ask(Request::PardonDirectory { ino: d }).unwrap();
    p.inode(create(d, b"f"));
}

#[test]
fn free_of_a_directory_that_is_in_use_is_refused() {
    let p = Pair::new("free");
    let d = p.make(b"d");
    let local = p.inode(Request::MakeDirectory { parent: Ino::ROOT, name: b"local", mode: 0 });
    assert_eq!(p.ask(Request::FreeDirectory { ino: local }), Err(Code::Invalid), "its entry is here");
    assert_eq!(p.ask(Request::FreeDirectory { ino: Ino::ROOT }), Err(Code::Invalid));
    assert_eq!(p.ask(Request::CondemnDirectory { ino: Ino::ROOT }), Err(Code::NotEmpty));
    let stray = p.ask(Request::AllocateDirectory { node: NodeId(1), parent: Ino::ROOT, mode: 0 });
    assert_eq!(stray, Err(Code::Invalid), "its entry would be here");
    p.inode(create(d, b"f"));
    assert_eq!(p.ask(Request::FreeDirectory { ino: d }), Err(Code::NotEmpty));
    let entered = p.ask(Request::EnterDirectory { parent: Ino::ROOT, name: b"x", ino: local });
    assert_eq!(entered, Err(Code::Invalid), "a second link to a directory of this shard");
    assert_eq!(
        p.ask(Request::LeaveDirectory { parent: Ino::ROOT, name: b"local", ino: local }),
        Err(Code::Invalid)
    );
    p.check();
}

#[test]
fn rename_takes_a_directory_of_another_shard_no_further_than_its_parent() {
    let p = Pair::new("rename");
    let (d, e) = (p.make(b"d"), p.make(b"e"));
    let root = Ino::ROOT;
    let local = p.inode(Request::MakeDirectory { parent: root, name: b"local", mode: 0 });
    let rename = |parent, name, new_parent, new_name, flags| {
        p.ask(Request::Rename { parent, name, new_parent, new_name, flags })
    };
    rename(root, b"d", root, b"moved", 0).unwrap();
    assert_eq!(p.ask(Request::Lookup { parent: root, name: b"moved" }), Ok(Said::Elsewhere(d)));
    assert_eq!(p.ask(Request::Lookup { parent: root, name: b"d" }), Err(Code::NotFound));
    for (name, new_parent, new_name, flags) in [
        (b"moved".as_slice(), local, b"x".as_slice(), 0),
        (b"moved", root, b"e", 0),
        (b"moved", root, b"local", RENAME_EXCHANGE),
        (b"local", root, b"e", 0),
        (b"local", e, b"x", 0),
    ] {
        assert_eq!(rename(root, name, new_parent, new_name, flags), Err(Code::CrossDevice), "{name:?}");
    }
    p.inode(create(root, b"file"));
    assert_eq!(rename(root, b"file", root, b"e", 0), Err(Code::IsDirectory));
    // On the other shard: below one directory of its own it can tell what lies above what, between two it cannot.
    let make = |parent, name| p.inode(Request::MakeDirectory { parent, name, mode: 0 });
    let (a, b) = (make(d, b"a"), make(d, b"b"));
    let c = make(a, b"c");
    rename(a, b"c", b, b"c", 0).unwrap();
    assert_eq!(rename(d, b"b", c, b"x", 0), Err(Code::Invalid), "below itself");
    assert_eq!(rename(d, b"a", e, b"a", 0), Err(Code::CrossDevice));
    p.inode(create(d, b"f"));
    rename(d, b"f", e, b"f", 0).unwrap();
    assert_eq!(p.ask(Request::Link { ino: local, parent: d, name: b"l" }), Err(Code::CrossDevice));
    p.check();
}
