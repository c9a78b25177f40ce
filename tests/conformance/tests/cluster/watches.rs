//! inotify in a pool of several nodes: a directory can be watched on its own node. The watch reports changes by
//! programs of all nodes.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Stdio};

use crate::nodes::{said, Cluster};

/// Python that watches a directory and prints its events until a name `end` appears, or prints why it cannot watch.
fn watch(dir: &str) -> String {
    format!(
        r#"exec python3 -c '
import ctypes, os, struct
names = {{0x40: "MOVED_FROM", 0x80: "MOVED_TO", 0x100: "CREATE", 0x200: "DELETE"}}
libc = ctypes.CDLL(None, use_errno=True)
instance = libc.inotify_init1(0)
if libc.inotify_add_watch(instance, b"{dir}", 0x3c0) < 0:
    print(os.strerror(ctypes.get_errno()))
    raise SystemExit
print("ready", flush=True)
name = ""
while name != "end":
    events = os.read(instance, 65536)
    while events:
        _, mask, _, length = struct.unpack_from("iIII", events)
        name = events[16:16 + length].rstrip(b"\0").decode()
        events = events[16 + length:]
        print(names[mask & 0xfff], name, flush=True)
'"#
    )
}

/// A watcher on a node, which ends with the test.
struct Watcher<'c>(&'c Cluster, Child, BufReader<ChildStdout>);

impl Drop for Watcher<'_> {
    fn drop(&mut self) {
        self.0.kill_program(&mut self.1);
    }
}

impl Watcher<'_> {
    fn start<'c>(c: &'c Cluster, node: usize, dir: &str) -> Watcher<'c> {
        let mut child = c.command(node, &watch(dir)).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut watcher = Watcher(c, child, lines);
        assert_eq!(watcher.line(), "ready");
        watcher
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.2.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }
}

#[test]
fn a_directory_is_watched_on_its_own_node_and_changes_by_all_nodes_are_heard() {
    let c = Cluster::up("watches", 2);
    for node in 1..=2 {
        c.tell(node, &format!("mkdir /forebay/d{node}"));
    }
    // A watch on another node fails: an error is better than missing events.
    assert_eq!(c.tell(1, &watch("/forebay/d2")), "Operation not supported\n");
    let mut watcher = Watcher::start(&c, 2, "/forebay/d2");
    c.tell(1, "echo text > /forebay/d2/file; mv /forebay/d2/file /forebay/d2/renamed");
    let heard: Vec<String> = (0..3).map(|_| watcher.line()).collect();
    assert_eq!(heard, ["CREATE file", "MOVED_FROM file", "MOVED_TO renamed"]);
    // A rename between directories of two nodes.
    c.tell(1, "mv /forebay/d2/renamed /forebay/d1/elsewhere");
    assert_eq!(watcher.line(), "DELETE renamed");
    c.tell(1, "mv /forebay/d1/elsewhere /forebay/d2/back; mkdir /forebay/d2/end");
    assert_eq!([watcher.line(), watcher.line()], ["CREATE back", "CREATE end"]);
    drop(watcher);
    c.tell(1, "mkdir /forebay/wide");
    let widened = c.layout(1, &["set", "--width", "0", "/wide"]);
    assert!(widened.status.success(), "{}", said(&widened));
    assert_eq!(
        c.tell(1, &watch("/forebay/wide")),
        "Operation not supported\n",
        "a directory on several nodes"
    );
    c.check();
}
