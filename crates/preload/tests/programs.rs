//! Real programs in the pool print and leave the same as on a plain file system.

mod support;

use std::process::Command;
use support::scripts::Script;
use support::{said, Pool};

/// Runs scripts one after the other in a pool of their own.
fn compare(scripts: &[Script]) {
    let pool = Pool::start();
    for script in scripts {
        script.compare(&pool, 1, |run| run());
    }
}

macro_rules! scripts {
    ($($test:ident: $($name:literal needs [$($need:literal),*]),+;)*) => {$(
        #[test]
        fn $test() {
            compare(&[$(Script { name: $name, needs: &[$($need),*] }),+]);
        }
    )*};
}

scripts! {
    small_tools_do_as_on_a_plain_file_system: "coreutils.sh" needs [], "archives.sh" needs ["tar"], "copies.sh" needs ["rsync"];
    shells_do_as_on_a_plain_file_system: "shell.sh" needs ["bash"], "jobs.sh" needs ["bash", "flock"];
    python_does_as_on_a_plain_file_system: "python.py" needs ["python3"];
    arrays_do_as_on_a_plain_file_system: "arrays.py" needs ["python:h5py", "python:numpy"];
    packages_do_as_on_a_plain_file_system: "pip.py" needs ["cc", "python:pip", "python:ensurepip"];
    builds_do_as_on_a_plain_file_system: "compile.sh" needs ["cc", "make"], "configure.sh" needs ["cc", "make"];
    cargo_does_as_on_a_plain_file_system: "cargo.sh" needs ["cargo", "cc"];
    databases_do_as_on_a_plain_file_system: "database.sh" needs ["sqlite3"], "wal.py" needs ["python:sqlite3"];
    git_does_as_on_a_plain_file_system: "git.sh" needs ["git"], "history.sh" needs ["git"];
    ranks_do_as_on_a_plain_file_system: "ranks.sh" needs ["mpirun", "mpicc"];
    fio_does_as_on_a_plain_file_system: "fio.sh" needs ["fio"];
}

#[test]
fn a_difference_between_pool_and_plain_is_detected() {
    let pool = Pool::start();
    let (_, inside) = said(pool.command("sh").args(["-c", "cd /forebay && pwd"]));
    let (_, outside) = said(Command::new("sh").args(["-c", "cd /dev/shm && pwd"]));
    assert_ne!(inside, outside);
}
