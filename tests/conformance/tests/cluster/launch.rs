//! MPI ranks on the nodes of a test's cluster: the two MPIs, programs of `mpi/tests` built with them, and a launcher
//! that starts a rank on each given node. The MPI sees all ranks on this host and its network; each rank uses its own
//! node's pool.

use std::path::PathBuf;
use std::process::{Command, Output};

use crate::nodes::{program, said, Cluster, PATIENCE_S};

/// An MPI, with Debian's names of its programs.
pub(crate) struct Mpi {
    pub(crate) name: &'static str,
    pub(crate) compiler: &'static str,
    launcher: &'static [&'static str],
}

pub(crate) const OPEN_MPI: Mpi = Mpi {
    name: "openmpi",
    compiler: "mpicc.openmpi",
    launcher: &["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n"],
};

pub(crate) const MPICH: Mpi =
    Mpi { name: "mpich", compiler: "mpicc.mpich", launcher: &["mpiexec.hydra", "-n"] };

pub(crate) const MPIS: [Mpi; 2] = [OPEN_MPI, MPICH];

impl Mpi {
    /// True if its compiler and launcher run here. Otherwise prints that tests are skipped.
    pub(crate) fn is_here(&self) -> bool {
        let runs =
            |program| Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
        let here = runs(self.compiler) && runs(self.launcher[0]);
        if !here {
            println!("skipped: no {} and {}", self.compiler, self.launcher[0]);
        }
        here
    }
}

/// Builds a program of mpi/tests in the cluster's directory; its name contains the compiler's. None, after printing the
/// reason, if it cannot be built, such as without its library.
pub(crate) fn built(c: &Cluster, compiler: &str, name: &str, words: &[&str]) -> Option<PathBuf> {
    let source = format!("{}/../../mpi/tests/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let program = c.file().with_file_name(format!("{name}-{compiler}"));
    let mut command = Command::new(compiler);
    command.args(["-O1", "-o"]).arg(&program).arg(source).args(words);
    // Some compilers write the object file to the current directory.
    let output = command.current_dir(program.parent()?).output();
    match output {
        Ok(output) if output.status.success() => Some(program),
        Ok(output) => {
            println!("skipped: {compiler} does not build {name}.c: {}", said(&output));
            None
        }
        Err(e) => {
            println!("skipped: {compiler}: {e}");
            None
        }
    }
}

impl Cluster {
    /// Runs a command line as ranks of an MPI, one for each element of `at`, which may name a node several times.
    pub(crate) fn by_ranks(&self, mpi: &Mpi, at: &[usize], line: &str) -> Output {
        // The launchers see one host. So each rank receives the true number of ranks on its node, for which `forebay
        // run` waits.
        let told = |node: &usize| {
            let here = at.iter().filter(|other| *other == node).count();
            format!("{here} {}", self.pool(*node).display())
        };
        let script = format!(
            "shift ${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}; set -- $1; export OMPI_COMM_WORLD_LOCAL_SIZE=$1; \
             exec {} run --quiet --pool $2 -- {line}",
            program("forebay").display(),
        );
        let mut command = Command::new("/usr/bin/timeout");
        command.arg(PATIENCE_S).args(mpi.launcher).arg(at.len().to_string());
        command.args(["sh", "-c", &script, "sh"]).args(at.iter().map(told));
        command.env_remove("FOREBAY_POOL").envs(self.apart()).output().unwrap()
    }
}
