//! Signals and terminals: which signals reach the program, and how often; and what is left when `forebay run` is
//! killed.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};

use common::{eventually, is_alive, kill, start, Guarded, Place};

/// Runs a shell script and waits for its first line, `ready`.
fn ready(place: &Place, script: &str) -> (Guarded, BufReader<std::process::ChildStdout>) {
    let mut command = place.command(["run", "--quiet", "--", "sh", "-c", script]);
    let mut run = start({
        command.stdout(Stdio::piped());
        command
    });
    let mut out = BufReader::new(run.0.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    (run, out)
}

#[test]
fn signals_sent_to_run_reach_the_program_once() {
    let place = Place::new();
    let script = "for s in INT TERM HUP QUIT USR1 USR2 WINCH; do trap \"echo $s\" $s; done; echo ready; \
                  while [ ! -e \"$0\" ]; do sleep 0.05 & wait $!; done; exit 7";
    let stop = place.join("stop");
    let mut command = place.command(["run", "--quiet", "--", "sh", "-c", script]);
    command.arg(&stop).stdout(Stdio::piped());
    // The process that started the tests may ignore some of these (nohup, a shell's background jobs), and a shell
    // cannot trap a signal that it inherited as ignored.
    // SAFETY: only a system call between fork and exec.
    unsafe {
        command.pre_exec(|| {
            for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        })
    };
    let mut run = start(command);
    let mut out = BufReader::new(run.0.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    for (signal, name) in [
        (libc::SIGUSR1, "USR1"),
        (libc::SIGTERM, "TERM"),
        (libc::SIGINT, "INT"),
        (libc::SIGHUP, "HUP"),
        (libc::SIGQUIT, "QUIT"),
        (libc::SIGWINCH, "WINCH"),
        (libc::SIGUSR2, "USR2"),
    ] {
        kill(run.pid(), signal);
        line.clear();
        out.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), name);
    }
    std::fs::write(&stop, "").unwrap();
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "", "each came once");
    assert_eq!(run.wait().code(), Some(7));
    place.assert_nothing_left();
}

#[test]
fn program_that_dies_of_a_signal_takes_run_with_the_same() {
    let place = Place::new();
    let (mut run, _out) = ready(&place, "echo ready; exec sleep 60");
    kill(run.pid(), libc::SIGTERM);
    let status = run.wait();
    assert_eq!((status.signal(), status.core_dumped()), (Some(libc::SIGTERM), false));
    place.assert_nothing_left();
}

#[test]
fn run_that_is_killed_leaves_nothing_not_even_what_its_program_started() {
    let place = Place::new();
    let script = "sleep 61 & echo ready; echo $!; echo $$; sh -c 'sleep 62 & echo $!; wait' & wait";
    let (mut run, mut out) = ready(&place, script);
    let pids: Vec<i32> = (0..3)
        .map(|_| {
            let mut line = String::new();
            out.read_line(&mut line).unwrap();
            line.trim().parse().unwrap()
        })
        .collect();
    let pool = place.pools().remove(0);
    let daemon = common::lock_holder(&pool).unwrap();
    kill(run.pid(), 9);
    assert_eq!(run.wait().signal(), Some(9));
    eventually("the program and all that it started are gone", || !pids.iter().any(|&p| is_alive(p)));
    eventually("the daemon is gone", || !is_alive(daemon));
    place.assert_nothing_left();
}

#[test]
fn run_that_is_killed_over_a_pool_that_is_up_leaves_the_pool() {
    let place = Place::new();
    let pool = place.up("p");
    let mut command =
        place.command(["--pool", pool.to_str().unwrap(), "run", "--quiet", "--", "sleep", "63"]);
    command.stdout(Stdio::null());
    let mut run = start(command);
    let status = || place.json(["status", "--json", "--pool", pool.to_str().unwrap()]);
    eventually("it is a member", || status()["members"] == 1);
    kill(run.pid(), 9);
    run.wait();
    eventually("it is no member", || status()["members"] == 0);
    assert_eq!(status()["state"], "up");
}

/// A new pseudoterminal: the end that the test types at, and the program's end.
fn terminal() -> (std::fs::File, OwnedFd) {
    let (mut ours, mut theirs) = (0, 0);
    // SAFETY: both numbers are written; names and settings are not asked for.
    let made = unsafe {
        libc::openpty(&mut ours, &mut theirs, std::ptr::null_mut(), std::ptr::null(), std::ptr::null())
    };
    assert_eq!(made, 0);
    // SAFETY: both are new and nobody else's.
    unsafe { (std::fs::File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) }
}

/// Runs a command as the foreground job of a new terminal.
fn on_terminal(mut command: Command) -> (Guarded, std::fs::File) {
    let (ours, theirs) = terminal();
    command
        .stdin(theirs.try_clone().unwrap())
        .stdout(theirs.try_clone().unwrap())
        .stderr(theirs.try_clone().unwrap());
    // SAFETY: system calls alone: a new session whose terminal is the standard input.
    unsafe {
        command.pre_exec(|| {
            if libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        });
    }
    let child = start(command);
    drop(theirs);
    (child, ours)
}

/// Reads from a terminal until `text` appears.
fn read_until(terminal: &mut std::fs::File, text: &str, seen: &mut String) {
    let mut buffer = [0u8; 1024];
    while !seen.contains(text) {
        let mut fds = [rustix::event::PollFd::new(&*terminal, rustix::event::PollFlags::IN)];
        let limit = rustix::event::Timespec { tv_sec: common::TIMEOUT.as_secs() as i64, tv_nsec: 0 };
        assert!(rustix::event::poll(&mut fds, Some(&limit)).unwrap() > 0, "{text:?} did not come: {seen:?}");
        let n = terminal.read(&mut buffer).unwrap_or(0);
        assert!(n > 0, "{text:?} did not come: {seen:?}");
        seen.push_str(&String::from_utf8_lossy(&buffer[..n]));
    }
}

/// Prints the sender of each interrupt; ends with status 5 one second after the last. A shell would not do: it merges
/// two that arrive together.
const COUNTER: &str = r#"
#include <signal.h>
#include <stdio.h>
#include <time.h>
int main(void) {
    sigset_t set;
    siginfo_t info;
    struct timespec limit = {60, 0};
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigprocmask(SIG_BLOCK, &set, NULL);
    setvbuf(stdout, NULL, _IONBF, 0);
    puts("ready");
    while (sigtimedwait(&set, &info, &limit) == SIGINT) {
        printf("interrupt from %s;", info.si_code > 0 ? "the terminal" : "a process");
        limit.tv_sec = 1;
    }
    return 5;
}
"#;

#[test]
fn interrupt_key_reaches_the_program_once_and_its_status_counts() {
    let place = Place::new();
    let source = place.write("counter.c", COUNTER);
    let counter = place.join("counter");
    assert!(Command::new("cc").arg(&source).arg("-o").arg(&counter).status().unwrap().success());
    let (mut run, mut terminal) =
        on_terminal(place.command(["run", "--quiet", "--", counter.to_str().unwrap()]));
    let mut seen = String::new();
    read_until(&mut terminal, "ready", &mut seen);
    // Run is stopped until the program has taken its interrupt. A forwarded one would then arrive as a second signal
    // instead of merging with the first.
    kill(run.pid(), libc::SIGSTOP);
    terminal.write_all(b"\x03").unwrap();
    read_until(&mut terminal, "interrupt from", &mut seen);
    kill(run.pid(), libc::SIGCONT);
    let status = run.wait();
    let mut rest = Vec::new();
    let _ = terminal.read_to_end(&mut rest); // ends with an error: the other end is closed
    seen.push_str(&String::from_utf8_lossy(&rest));
    assert_eq!(status.code(), Some(5), "{seen}");
    assert_eq!(seen.matches("interrupt from").count(), 1, "{seen}");
    assert!(seen.contains("from the terminal"), "{seen}");
    place.assert_nothing_left();
}

#[test]
fn stop_key_stops_run_and_program_and_continue_continues_both() {
    let place = Place::new();
    let script = "echo ready $$; while [ ! -e \"$0\" ]; do sleep 0.05; done; exit 4";
    let go = place.join("go");
    let mut command = place.command(["run", "--quiet", "--", "sh", "-c", script]);
    command.arg(&go);
    let (mut run, mut terminal) = on_terminal(command);
    let mut seen = String::new();
    read_until(&mut terminal, "ready ", &mut seen);
    read_until(&mut terminal, "\n", &mut seen);
    let program: i32 =
        seen.split("ready ").nth(1).unwrap().split_whitespace().next().unwrap().parse().unwrap();
    let state = |pid: i32| forebay_sys::process::Stat::of(pid as u32).unwrap().state;
    // The terminal cannot stop a session leader in an orphaned process group, such as this one, so the signal is sent
    // with kill.
    kill(run.pid(), libc::SIGTSTP);
    eventually("run has stopped", || state(run.pid()) == b'T');
    assert!(is_alive(program));
    std::fs::write(&go, "").unwrap();
    kill(run.pid(), libc::SIGCONT);
    assert_eq!(run.wait().code(), Some(4));
    place.assert_nothing_left();
}
