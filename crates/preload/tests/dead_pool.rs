//! A pool whose supervisor and worker are killed while programs use it. The programs' calls fail with EIO within a
//! bounded time, one line reports it, and the programs continue.

mod support;

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::{compile, succeeds, Pool, Scratch};

/// How long a program may run. It waits for nothing but its own calls.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Makes and removes directories until that fails, and prints the error. Then tries other calls on the dead pool.
const SHELL: &str = "own=/forebay/own$$; mkdir $own && cd $own && echo started
    while mkdir $own/d; do rmdir $own/d || break; done
    mkdir $own/e; ln -s a $own/b; echo x > new; mv $own/none other; rm -rf $own/none;
    ls . && echo listed; sync . && echo synced; (exec 3<.) && echo opened; ls -d /usr; cd /; mkdir /forebay/again; echo still here";

const PYTHON: &str = "
import errno, os, threading
os.chdir('/forebay')
failed = []
def work(own):
    try:
        while True:
            open(own, 'w').close()
            os.rename(own, own + 'r')
            os.unlink(own + 'r')
    except OSError as error:
        failed.append(errno.errorcode[error.errno])
threads = [threading.Thread(target=work, args=(f'{os.getpid()}.{i}',)) for i in range(4)]
[thread.start() for thread in threads]
print('started', flush=True)
[thread.join() for thread in threads]
print(failed, os.path.isdir('/usr'))
";

/// A running program, killed when it is dropped.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Running {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut running = Running(command.spawn().unwrap());
        // The first byte of its output shows that it is at work.
        let out = running.0.stdout.as_mut().unwrap();
        std::io::Read::read_exact(out, &mut [0]).unwrap();
        running
    }

    /// Waits for its end. Returns exit status, standard output and standard error.
    fn end(mut self) -> (Option<i32>, String, String) {
        let asked = Instant::now();
        let status = loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                break status;
            }
            assert!(asked.elapsed() < TIMEOUT, "a program does not end");
            std::thread::sleep(Duration::from_millis(20));
        };
        let read = |from: &mut dyn std::io::Read| {
            let mut text = String::new();
            from.read_to_string(&mut text).unwrap();
            text
        };
        let out = read(self.0.stdout.as_mut().unwrap());
        let err = read(self.0.stderr.as_mut().unwrap());
        (status.code(), out, err)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Kills the supervisor after `first` was sent to the worker.
fn dies(first: i32) {
    let pool = Pool::start();
    let shells: Vec<_> = (0..2).map(|_| Running::start(pool.command("bash").args(["-c", SHELL]))).collect();
    let pythons: Vec<_> =
        (0..2).map(|_| Running::start(pool.command("python3").args(["-c", PYTHON]))).collect();
    let worker = pool.worker().unwrap();
    // SAFETY: the processes of this test's own pool.
    unsafe {
        libc::kill(worker, first);
        libc::kill(pool.supervisor(), libc::SIGKILL);
    }
    for shell in shells {
        let (code, out, err) = shell.end();
        assert_eq!(code, Some(0), "{err}");
        // Programs that start in a directory of the dead pool do not find it empty, and sync nothing.
        assert_eq!(out, "tarted\n/usr\nstill here\n", "{err}");
        // The errors come from the shell's own redirection and from each program that it starts.
        assert!(err.matches("Input/output error").count() >= 5, "{err}");
        let lines: Vec<_> = err.lines().filter(|line| line.starts_with("forebay: ")).collect();
        assert!(lines.len() >= 5 && lines.iter().all(|line| line.contains("daemon")), "{err}");
    }
    for python in pythons {
        let (code, out, err) = python.end();
        assert_eq!(code, Some(0), "{err}");
        assert!(out.ends_with("['EIO', 'EIO', 'EIO', 'EIO'] True\n"), "{out}{err}");
        assert_eq!(err.lines().count(), 1, "one line: {err}");
        assert!(err.starts_with("forebay: calls on the pool at ") && err.contains("forebay status"), "{err}");
    }
}

#[test]
fn calls_of_a_pool_that_is_killed_fail_and_are_reported_once() {
    dies(libc::SIGKILL);
}

#[test]
fn calls_that_wait_for_a_worker_that_hangs_fail_when_its_supervisor_dies() {
    dies(libc::SIGSTOP);
}

#[test]
fn disabled_library_passes_everything_through() {
    // Everything that the sections do happens in the kernel's tree, as without the library.
    let (pool, scratch) = (Pool::start(), Scratch::new());
    let program = compile("calls", scratch.path());
    for section in ["directories", "paths", "exec", "locks", "closing"] {
        let root = scratch.path().join(section);
        std::fs::create_dir(&root).unwrap();
        succeeds(pool.command(&program).arg(&root).arg(section).env("FOREBAY_DISABLE", "1"));
        // The same outside the prefix, with the library enabled.
        let root = scratch.path().join(format!("{section}-enabled"));
        std::fs::create_dir(&root).unwrap();
        succeeds(pool.command(&program).arg(&root).arg(section));
    }
    let mut command = pool.command("sh");
    let text = succeeds(command.args(["-c", "test ! -e /forebay && echo none"]).env("FOREBAY_DISABLE", "1"));
    assert_eq!(text, "none\n");
    assert_eq!(succeeds(pool.command("ls").arg("/forebay")), "");
}
