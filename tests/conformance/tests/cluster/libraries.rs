//! Parallel HDF5, NetCDF-4 and PnetCDF with a rank on each of four nodes: the files that they write, striped over all, are those
//! that they write on tmpfs.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::nodes::{plain, said, Cluster};

const NODES: usize = 4;

/// What the libraries write on tmpfs; removed with the test.
struct Reference(PathBuf);

impl Drop for Reference {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Builds a program of mpi/tests beside the cluster; none, and a line, where its library is not installed.
fn built(c: &Cluster, compiler: &str, name: &str, words: &[&str]) -> Option<PathBuf> {
    let source = format!("{}/../../mpi/tests/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let program = c.file().with_file_name(name);
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

/// Runs a program on a file of each layout and on one of tmpfs; each node then reads what was made.
fn same_on_all_nodes(c: &Cluster, mounts: &[PathBuf], program: &Path, endings: &[&str]) {
    let name = program.file_name().unwrap().to_str().unwrap();
    let reference = Reference(PathBuf::from(format!("/dev/shm/fbt-libraries-{name}-{}", std::process::id())));
    std::fs::create_dir(&reference.0).unwrap();
    let passed = |file: &Path| {
        let ran = c.by_ranks(NODES, &format!("{} {}", program.display(), file.display()));
        assert!(ran.status.success() && said(&ran).contains("passed"), "{name}: {}", said(&ran));
    };
    passed(&reference.0.join("file"));
    for layout in ["striped", "plain"] {
        let file = PathBuf::from(format!("{layout}/{name}"));
        passed(&Path::new("/forebay").join(&file));
        for (ending, mount) in endings.iter().flat_map(|e| mounts.iter().map(move |m| (e, m))) {
            let (ours, theirs) = (mount.join(&file), reference.0.join("file"));
            let compared = plain(
                "cmp",
                &[&format!("{}{ending}", ours.display()), &format!("{}{ending}", theirs.display())],
            );
            assert!(compared.status.success(), "{name}, {layout}: {}", said(&compared));
        }
    }
}

#[test]
fn files_of_libraries_that_are_striped_over_four_nodes_are_those_of_tmpfs() {
    let c = Cluster::up("libraries", NODES);
    let Some(mounts) = (1..=NODES).map(|node| c.mount(node)).collect::<Option<Vec<_>>>() else { return };
    c.tell(1, "mkdir /forebay/striped /forebay/plain");
    let set = c.layout(2, &["set", "-c", "4", "-S", "4KiB", "/striped"]);
    assert!(set.status.success(), "{}", said(&set));
    let netcdf = "-I/usr/lib/x86_64-linux-gnu/netcdf/mpi/include";
    if let Some(program) = built(&c, "h5pcc.openmpi", "hdf5", &["-shlib"]) {
        same_on_all_nodes(&c, &mounts, &program, &[""]);
    }
    if let Some(program) = built(&c, "mpicc.openmpi", "netcdf", &[netcdf, "-lnetcdf_mpi"]) {
        same_on_all_nodes(&c, &mounts, &program, &[""]);
    }
    if let Some(program) = built(&c, "mpicc.openmpi", "pnetcdf", &["-lpnetcdf"]) {
        same_on_all_nodes(&c, &mounts, &program, &[".1", ".2", ".5"]);
    }
    c.check();
}
