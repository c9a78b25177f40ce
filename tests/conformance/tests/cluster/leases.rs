//! Leases on other nodes' directories (docs/decisions/0022): a path walk sends a request only for the last name, and
//! once a change is acknowledged no node uses what it had cached of it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use crate::nodes::Cluster;

/// A long-running program on a node that calls `stat` on paths, so that it uses what the node has cached.
struct Looker {
    child: Child,
    /// Closed to end the program.
    asks: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

const LOOK: &str = r#"
import os, sys
for line in sys.stdin:
    try: print(os.stat(line.strip()).st_ino, flush=True)
    except FileNotFoundError: print("absent", flush=True)
    except OSError as e: print(e.strerror, flush=True)
"#;

impl Looker {
    fn new(c: &Cluster, node: usize) -> Looker {
        let mut command = c.command(node, &format!("exec python3 -c '{LOOK}'"));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (asks, answers) = (child.stdin.take(), child.stdout.take().unwrap());
        Looker { child, asks, answers: BufReader::new(answers) }
    }

    /// The inode number at a path, or the error.
    fn look(&mut self, path: &str) -> String {
        writeln!(self.asks.as_ref().unwrap(), "{path}").unwrap();
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Calls `stat` 20 times, after which the node has a lease and the path is on its board. Returns the last result.
    fn warm(&mut self, path: &str) -> String {
        (0..20).map(|_| self.look(path)).next_back().unwrap()
    }
}

impl Drop for Looker {
    fn drop(&mut self) {
        drop(self.asks.take());
        let _ = self.child.wait();
    }
}

fn requests(c: &Cluster, node: usize) -> u64 {
    c.status(node)["ring"]["requests"].as_u64().unwrap()
}

#[test]
fn walks_through_directories_of_other_nodes_ask_for_the_last_name_alone() {
    let c = Cluster::up("walks", 2);
    c.tell(1, "mkdir -p /forebay/a/b/c && echo x > /forebay/a/b/c/f");
    let mut two = Looker::new(&c, 2);
    two.warm("/forebay/a/b/c/f");
    let before = requests(&c, 1);
    const LOOKS: u64 = 500;
    for _ in 0..LOOKS {
        two.look("/forebay/a/b/c/f");
    }
    let asked = requests(&c, 1) - before;
    // Without leases each `stat` would take five requests: root, a, b, c, f. Some take more than one, because leases
    // expire on a busy machine.
    assert!((LOOKS..3 * LOOKS).contains(&asked), "{asked} requests for {LOOKS} looks");
}

#[test]
fn a_directory_that_was_renamed_or_removed_is_believed_by_nobody() {
    let c = Cluster::up("recalls", 3);
    c.tell(1, "mkdir -p /forebay/a0/b/c && echo x > /forebay/a0/b/c/f");
    let (mut two, mut three) = (Looker::new(&c, 2), Looker::new(&c, 3));
    let file = two.warm("/forebay/a0/b/c/f");
    assert_eq!(three.warm("/forebay/a0/b/c/f"), file);
    for i in 0..20 {
        let (old, new) = (format!("/forebay/a{i}/b/c/f"), format!("/forebay/a{}/b/c/f", i + 1));
        for looker in [&mut two, &mut three] {
            assert_eq!(looker.warm(&old), file);
        }
        // A program on one of the three nodes renames. Nodes 2 and 3 have the old name cached.
        c.tell(i % 3 + 1, &format!("mv /forebay/a{i} /forebay/a{}", i + 1));
        for looker in [&mut two, &mut three] {
            assert_eq!(
                (looker.look(&old).as_str(), looker.look(&new)),
                ("absent", file.clone()),
                "round {i}"
            );
        }
    }
    c.tell(2, "mkdir /forebay/a20/own && mkdir /forebay/a20/own/deeper");
    assert!(three.warm("/forebay/a20/own/deeper").parse::<u64>().is_ok());
    c.tell(1, "rm -r /forebay/a20/own && mkdir -p /forebay/a20/own");
    assert_eq!(three.look("/forebay/a20/own/deeper"), "absent");
    c.check();
}

#[test]
fn a_node_that_is_stopped_holds_a_rename_up_for_a_lease_and_believes_the_old_name_no_longer() {
    let c = Cluster::up("stopped-holder", 2);
    c.tell(1, "mkdir -p /forebay/a/b && echo x > /forebay/a/b/f");
    let mut two = Looker::new(&c, 2);
    let file = two.warm("/forebay/a/b/f");
    let go_on = c.stop_worker(2);
    c.tell(1, "mv /forebay/a /forebay/z");
    // The lease of node 2 has expired, so its program ignores the board, sends a request and waits for the worker.
    let looking = std::thread::spawn(move || (two.look("/forebay/a/b/f"), two.look("/forebay/z/b/f")));
    go_on();
    assert_eq!(looking.join().unwrap(), ("absent".to_owned(), file));
    c.check();
}

#[test]
fn a_home_whose_worker_was_killed_acknowledges_no_rename_that_others_do_not_know_of() {
    let c = Cluster::up("killed-home", 2);
    c.tell(1, "mkdir -p /forebay/a0/b && echo x > /forebay/a0/b/f");
    let mut two = Looker::new(&c, 2);
    for i in 0..3 {
        let old = format!("/forebay/a{i}/b/f");
        let file = two.warm(&old);
        assert!(file.parse::<u64>().is_ok(), "{file}");
        c.kill_worker(1);
        c.tell(1, &format!("mv /forebay/a{i} /forebay/a{}", i + 1));
        assert_eq!(two.look(&old), "absent", "round {i}");
    }
    c.check();
}
