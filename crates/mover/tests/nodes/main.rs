//! Pools of several nodes in front of a store: names and data from every node, drained by the nodes that have them.

mod bed;

use bed::Nodes;

#[test]
fn every_node_sees_lists_restores_and_changes_the_store() {
    let Some(nodes) = Nodes::up(3, "128MiB") else { return };
    let store = nodes.store();
    std::fs::create_dir_all(store.join("in/deep")).unwrap();
    std::fs::write(store.join("in/a"), "hello\n").unwrap();
    std::fs::write(store.join("in/deep/x"), "x").unwrap();
    let big: Vec<u8> = (0..9_000_000u32).map(|i| ((i * 7) >> 3) as u8).collect();
    std::fs::write(store.join("in/big"), &big).unwrap();
    std::os::unix::fs::symlink("a", store.join("in/link")).unwrap();
    nodes.attach(2, "", &[]);
    // The first look comes from a node that does not have the tree.
    assert_eq!(nodes.sh(3, "ls -R s"), "s:\nin\n\ns/in:\na\nbig\ndeep\nlink\n\ns/in/deep:\nx\n");
    assert_eq!(nodes.sh(1, "stat -c '%s %Y' s/in/big"), nodes.sh(1, "stat -c '%s %Y' $S/in/big"));
    assert_eq!(nodes.preloaded(1, "cat /forebay/s/in/link"), "hello\n");
    // A file comes to the node that opens it first.
    nodes.sh(1, "cmp s/in/big $S/in/big");
    assert!(nodes.ok(3, &["layout", "get", "/s/in/big"]).contains("n1"), "it was restored to its reader");
    nodes.sh(3, "cmp s/in/big $S/in/big");
    nodes.preloaded(3, "test $(cat /forebay/s/in/deep/x) = x");
    // Every node writes, in directories of every node's making.
    for i in 1..=3 {
        nodes.sh(i, &format!("mkdir s/d{i}; echo by {i} > s/in/by{i}"));
        nodes.preloaded(i, &format!("mkdir /forebay/s/in/p{i}; echo p{i} > /forebay/s/in/p{i}/f"));
    }
    for i in 1..=3 {
        for j in 1..=3 {
            nodes.sh(i, &format!("head -c {} /dev/urandom > s/d{j}/f{i}; mkdir s/d{j}/e{i}", i * 300_000));
        }
    }
    nodes.durable(1);
    assert_eq!(nodes.differences(2), "");
    assert!(nodes.ok(1, &["layout", "get", "/s/d1/f3"]).contains("n3"), "data stay with their writer");
    // Renames, links and removals by nodes that have neither the tree nor the data.
    nodes.sh(1, "mv s/d2/f2 s/d3/g2; mv s/d3/e1 s/d1/moved; ln s/d1/f1 s/d2/hard; rm s/d3/f3; rmdir s/d3/e2");
    nodes.sh(3, "mv s/d1/moved s/d2/again; printf more >> s/d3/g2; chmod 600 s/d1/f2; ln -s f1 s/d1/l");
    nodes.durable(3);
    assert_eq!(nodes.differences(1), "");
    assert_eq!(nodes.sh(2, "stat -c '%h %a' $S/d2/hard $S/d1/f2"), "2 644\n1 600\n");
    // The tree's border.
    let refused =
        nodes.command(1, "mkdir out; mv s/d1/f2 out/ 2>&1; ls out; mv out s/", false).output().unwrap();
    assert!(refused.status.success(), "mv copies over the border: {}", bed::text(&refused));
    let script =
        "import os, errno\nfor a, b in (('s/d1/l', 'here'), ('s/d1', 'there')):\n try: os.rename(a, b)\n \
                  except OSError as e: assert e.errno == errno.EXDEV, e\n else: raise Exception('done')";
    nodes.sh(3, &format!("python3 -c \"{script}\""));
    assert!(!nodes.command(1, "rmdir s", false).output().unwrap().status.success());
    nodes.durable(2);
    assert_eq!(nodes.differences(3), "");
    nodes.check();
}
