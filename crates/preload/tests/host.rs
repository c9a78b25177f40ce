//! The library never harms the host program: calls that pass through, a dead or absent pool, and when libraries are
//! loaded.

mod support;

use std::path::Path;
use std::process::Command;
use support::{binary, said, succeeds, under_door, Pool, Scratch};

/// The memory map of a process that ran these shell commands, which lists its libraries.
fn libraries_after(pool: &Pool, script: &str) -> String {
    let script = format!("{script} && cat /proc/$$/maps && true");
    succeeds(pool.command("bash").args(["-c", &script]))
}

#[test]
fn program_that_never_touches_the_pool_does_not_load_the_client() {
    let pool = Pool::start();
    let maps = libraries_after(&pool, "test -d /usr && test ! -e /usr/nothing && cd /tmp && test -d .");
    assert!(maps.contains("libforebay_preload.so"));
    assert!(!maps.contains("libforebay.so"), "the client was loaded for nothing");
    let maps = libraries_after(&pool, "test -d /forebay");
    assert!(maps.contains("libforebay.so"), "the client is loaded by the first call on the pool");
}

/// A program that is linked with a libforebay.so elsewhere keeps that copy, and the preload library uses it too. Two
/// clients in a process would not recognize each other's descriptors.
#[test]
fn program_linked_with_the_client_shares_its_copy_with_the_door() {
    let (pool, scratch) = (Pool::start(), Scratch::new());
    let copy = scratch.path().join("libforebay.so");
    std::fs::copy(binary("libforebay.so"), &copy).unwrap();
    let (source, program) = (scratch.path().join("linked.c"), scratch.path().join("linked"));
    let lines = [
        "#include <forebay.h>",
        "#include <stdio.h>",
        "#include <unistd.h>",
        "int main(void) {",
        "    forebay_pool *pool;",
        "    if (forebay_attach(NULL, &pool) < 0 || access(\"/forebay\", F_OK) != 0 || access(\"/forebay/no\", F_OK) == 0)",
        "        return 1;",
        "    char line[4096];",
        "    for (FILE *maps = fopen(\"/proc/self/maps\", \"r\"); fgets(line, sizeof line, maps) != NULL;)",
        "        fputs(line, stdout);",
        "    return 0;",
        "}",
    ];
    std::fs::write(&source, lines.join("\n")).unwrap();
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("../capi/include");
    let mut compiler = Command::new("cc");
    compiler.arg("-I").arg(header).arg(&source).arg("-o").arg(&program).arg(&copy);
    succeeds(compiler.arg(format!("-Wl,-rpath,{}", scratch.text())));
    let maps = succeeds(pool.command(&program).env_remove("LD_LIBRARY_PATH"));
    let at: std::collections::BTreeSet<_> = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]))
        .filter(|p| p.ends_with("/libforebay.so"))
        .collect();
    assert_eq!(at.into_iter().collect::<Vec<_>>(), [copy.to_str().unwrap()]);
}

#[test]
fn disabled_door_passes_everything_through() {
    let pool = Pool::start();
    let mut command = pool.command("sh");
    let (output, text) =
        said(command.args(["-c", "ls -d /forebay; cat /proc/self/maps"]).env("FOREBAY_DISABLE", "1"));
    assert!(output.status.success() && text.contains("No such file or directory"), "{text}");
    assert!(!text.contains("libforebay.so"));
    succeeds(pool.command("ls").args(["-d", "/forebay"]).env("FOREBAY_DISABLE", "0"));
}

#[test]
fn no_pool_named_passes_everything_through() {
    let mut command = Command::new("ls");
    let (output, text) =
        said(command.args(["-d", "/forebay", "/usr"]).env("LD_PRELOAD", binary("libforebay_preload.so")));
    assert_eq!(output.status.code(), Some(2));
    assert!(text.contains("/usr") && text.contains("No such file") && !text.contains("forebay:"), "{text}");
}

#[test]
fn absent_pool_is_eio_and_reported_on_one_line() {
    let scratch = Scratch::new();
    let nowhere = scratch.path().join("nowhere");
    let script =
        "cat /forebay/a; cat /forebay/b; echo x > /forebay/c; cd /forebay; test -d /usr && echo still here";
    let (_, text) = said(under_door("bash", &nowhere).args(["-c", script]).current_dir("/"));
    assert!(text.contains("still here"), "{text}");
    assert_eq!(text.matches("Input/output error").count(), 4, "{text}");
    // bash itself, and each cat, print it once.
    let lines: Vec<_> = text.lines().filter(|line| line.starts_with("forebay: ")).collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert!(lines.iter().all(|line| line.contains("nowhere") && line.contains("forebay up")), "{text}");
}

#[test]
fn library_without_its_client_is_eio_and_says_what_to_install() {
    let scratch = Scratch::new();
    let lone = scratch.path().join("libforebay_preload.so");
    std::fs::copy(binary("libforebay_preload.so"), &lone).unwrap();
    let mut command = under_door("cat", Path::new("/nowhere"));
    let (output, text) = said(command.arg("/forebay/a").env("LD_PRELOAD", &lone));
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("install libforebay.so beside"), "{text}");
    assert!(text.contains("Input/output error"), "{text}");
}

/// To attach, the client opens the pool's directory. That open goes to the kernel, which has no such directory. If the
/// preload library interposed it, it would try to attach again.
#[test]
fn pool_whose_directory_is_below_its_own_prefix_is_not_found() {
    let mut command = under_door("timeout", Path::new("/forebay/pool"));
    let (output, text) = said(command.args(["20", "ls", "/forebay"]));
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("Input/output error") && text.contains("/forebay/pool"), "{text}");
}

#[test]
fn bad_prefix_is_reported_and_everything_passes_through() {
    let pool = Pool::start();
    for bad in ["forebay", "/", "/a/../b"] {
        let (output, text) = said(pool.command("ls").arg("/usr").env("FOREBAY_PREFIX", bad));
        assert!(output.status.success());
        assert!(text.contains(&format!("FOREBAY_PREFIX={bad} ")), "{text}");
    }
}

#[test]
fn pool_named_by_a_relative_path_is_found_after_chdir() {
    let pool = Pool::start();
    let (parent, name) = (pool.path(), "pool");
    let parent = parent.parent().unwrap();
    let mut command = pool.command("sh");
    command
        .args(["-c", "cd /usr && echo found > /forebay/made && read -r line < /forebay/made && echo $line"]);
    assert_eq!(succeeds(command.env("FOREBAY_POOL", name).current_dir(parent)), "found\n");
}

#[test]
fn descriptors_handed_to_a_program_are_found_again() {
    let pool = Pool::start();
    let script = "
        mkdir -p /forebay/d && echo abc > /forebay/d/f && cd /forebay/d && chmod 640 f
        stat -c '%a %s' - < f
        exec 7< /forebay/d
        cd / && python3 -c '
import os
print(sorted(os.listdir(7)), os.stat(\"f\", dir_fd=7).st_size, os.fstat(7).st_ino == os.stat(\"/forebay/d\").st_ino)
os.fchdir(7)
print(os.getcwd())'
    ";
    let text = succeeds(pool.command("bash").args(["-c", script]));
    assert_eq!(text, "640 4\n['f'] 4 True\n/forebay/d\n");
}

#[test]
fn vforked_child_that_uses_the_pool_first_leaves_its_parent_intact() {
    // subprocess makes its children with vfork. They change directory and exec in the memory of their parent, with
    // their own descriptors.
    let pool = Pool::start();
    succeeds(pool.command("sh").args(["-c", "mkdir /forebay/d && cp /bin/echo /forebay/d/own"]));
    let script = "
        import os, subprocess
        say = lambda *args, **more: subprocess.check_output(args, text=True, **more).strip()
        print(say('pwd', cwd='/forebay/d'), os.getcwd())
        print(say('./own', 'in d', cwd='/forebay/d'), say('/forebay/d/own', 'whole'), os.path.exists('d'))
        open('/forebay/d/new', 'w').write('by the parent')
        before = len(os.listdir('/proc/self/fd'))
        for i in range(5): say('./own', 'again', cwd='/forebay/d', close_fds=True)
        print(sorted(os.listdir('/forebay/d')), open('/forebay/d/new').read())
        print(len(os.listdir('/proc/self/fd')) - before, 'descriptors more')
    ";
    let script = script.lines().map(str::trim).collect::<Vec<_>>().join("\n");
    let text = succeeds(pool.command("python3").args(["-c", &script]));
    let expected = "/forebay/d /\nin d whole False\n['new', 'own'] by the parent\n0 descriptors more\n";
    assert_eq!(text, expected);
}

#[test]
fn calls_of_dead_pool_fail_and_of_new_one_work() {
    let pool = Pool::start();
    let path = pool.path();
    let script = "
        import os, sys, time
        print(os.path.isdir('/forebay'), flush=True)
        sys.stdin.readline()
        try: os.mkdir('/forebay/x'); print('made')
        except OSError as e: print(os.strerror(e.errno))
        print(os.path.isdir('/usr'))
    ";
    let script = script.lines().map(str::trim).collect::<Vec<_>>().join("\n");
    let mut child = under_door("python3", &path)
        .args(["-c", &script])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    assert_eq!(lines.next().unwrap().unwrap(), "True");
    drop(pool);
    drop(child.stdin.take());
    assert_eq!(lines.next().unwrap().unwrap(), "Input/output error");
    assert_eq!(lines.next().unwrap().unwrap(), "True", "the program goes on");
    assert!(child.wait().unwrap().success());
}
