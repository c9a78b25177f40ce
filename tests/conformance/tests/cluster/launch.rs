//! Ranks on the nodes of a test's cluster: the two MPIs, programs of `mpi/tests` built with them, and a program
//! launched with a rank wherever one is wanted. For the MPI all are on this host and its network; each is of a node's
//! pool.

use std::path::PathBuf;
use std::process::{Command, Output};

use crate::nodes::{program, said, Cluster, PATIENCE_S};

/// An MPI, as Debian names what belongs to it.
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
    /// Whether it can build and launch; a line says where it cannot.
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

/// Builds a program of mpi/tests beside the cluster, named after its compiler too; none, and a line, where its library
/// is not installed.
pub(crate) fn built(c: &Cluster, compiler: &str, name: &str, words: &[&str]) -> Option<PathBuf> {
    let source = format!("{}/../../mpi/tests/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let program = c.file().with_file_name(format!("{name}-{compiler}"));
    let mut command = Command::new(compiler);
    command.args(["-O1", "-o"]).arg(&program).arg(source).args(words);
    // Its object file goes where it is called.
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
    /// Runs a line as ranks of an MPI, one on each node that is named; a node may have several.
    pub(crate) fn by_ranks(&self, mpi: &Mpi, at: &[usize], line: &str) -> Output {
        // To launchers all are on one host: each rank is told how many its node really has, which `forebay run` waits
        // for.
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
        command.env_remove("FOREBAY_POOL").output().unwrap()
    }
}
