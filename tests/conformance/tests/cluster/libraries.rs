//! Parallel HDF5, NetCDF-4, PnetCDF and h5py with a rank on each of four nodes: their files, striped over all nodes,
//! are equal to the files that they write on tmpfs. Likewise every call of MPI-IO, random views and mpi4py. The same
//! libraries on volumes over all nodes, and the calls of forebay.h on such a volume.

use std::path::{Path, PathBuf};

use crate::launch::{built, Mpi, MPICH, MPIS, OPEN_MPI};
use crate::nodes::{plain, program, said, until, Cluster};
use crate::volumes::{succeeds, volume};

/// One rank on each of these nodes.
const NODES: [usize; 4] = [1, 2, 3, 4];

/// The directory of the files that the libraries write on tmpfs. Dropping it removes the directory.
struct Reference(PathBuf);

impl Drop for Reference {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A cluster with a directory whose files are striped over all nodes, and one whose files are each on one node.
fn cluster(name: &str) -> Cluster {
    let c = Cluster::up(name, NODES.len());
    c.tell(1, "mkdir /forebay/striped /forebay/plain");
    let set = c.layout(2, &["set", "-c", "4", "-S", "4KiB", "/striped"]);
    assert!(set.status.success(), "{}", said(&set));
    c
}

fn script(name: &str) -> String {
    format!("/usr/bin/python3 -m mpi4py {}/../../mpi/tests/{name}.py", env!("CARGO_MANIFEST_DIR"))
}

fn passes(c: &Cluster, mpi: &Mpi, line: &str) {
    let ran = c.by_ranks(mpi, &NODES, line);
    assert!(ran.status.success() && said(&ran).contains("passed"), "{}, {line}: {}", mpi.name, said(&ran));
}

/// Runs a command line on a file of each layout and on one of tmpfs, and compares them on each node.
fn same_on_all_nodes(c: &Cluster, mounts: &[PathBuf], mpi: &Mpi, name: &str, line: &str, endings: &[&str]) {
    let own = std::process::id();
    let reference = Reference(PathBuf::from(format!("/dev/shm/fbt-libraries-{name}-{}-{own}", mpi.name)));
    std::fs::create_dir(&reference.0).unwrap();
    passes(c, mpi, &format!("{line} {}", reference.0.join("file").display()));
    for layout in ["striped", "plain"] {
        let file = format!("{layout}/{name}-{}", mpi.name);
        passes(c, mpi, &format!("{line} /forebay/{file}"));
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
    let c = cluster("libraries");
    let Some(mounts) = NODES.iter().map(|node| c.mount(*node)).collect::<Option<Vec<_>>>() else { return };
    let same = |mpi: &Mpi, program: Option<PathBuf>, endings: &[&str]| {
        let Some(program) = program else { return };
        let name = program.file_name().unwrap().to_str().unwrap();
        same_on_all_nodes(&c, &mounts, mpi, name, program.to_str().unwrap(), endings);
    };
    let netcdf = "-I/usr/lib/x86_64-linux-gnu/netcdf/mpi/include";
    for mpi in MPIS.iter().filter(|mpi| mpi.is_here()) {
        same(mpi, built(&c, &format!("h5pcc.{}", mpi.name), "hdf5", &["-shlib"]), &[""]);
    }
    // Debian has these libraries for Open MPI only.
    same(&OPEN_MPI, built(&c, OPEN_MPI.compiler, "netcdf", &[netcdf, "-lnetcdf_mpi"]), &[""]);
    same(&OPEN_MPI, built(&c, OPEN_MPI.compiler, "pnetcdf", &["-lpnetcdf"]), &[".1", ".2", ".5"]);
    match Path::new("/usr/lib/python3/dist-packages/h5py/_debian_h5py_mpi").exists() {
        true => same_on_all_nodes(&c, &mounts, &OPEN_MPI, "h5py", &script("h5py_parallel"), &[""]),
        false => println!("skipped: no parallel h5py (python3-h5py-mpi)"),
    }
    c.check();
}

#[test]
fn every_call_and_random_views_are_the_same_with_ranks_on_four_nodes() {
    let c = cluster("calls");
    for mpi in MPIS.iter().filter(|mpi| mpi.is_here()) {
        let program = |name| {
            let built = built(&c, mpi.compiler, name, &["-Wall", "-Wextra", "-Werror"]).expect("it builds");
            built.display().to_string()
        };
        let (calls, misuse, views) = (program("calls"), program("misuse"), program("views"));
        let counts = (mpi.name == MPICH.name).then(|| program("counts"));
        for layout in ["striped", "plain"] {
            for calls in [Some(&calls), Some(&misuse), counts.as_ref()].into_iter().flatten() {
                passes(&c, mpi, &format!("{calls} /forebay/{layout}/calls"));
            }
            passes(&c, mpi, &format!("{views} /forebay/{layout}/view - 200 6"));
            let hints = "romio_cb_write=enable romio_cb_read=enable cb_buffer_size=8192";
            passes(&c, mpi, &format!("env VIEWS_HINTS='{hints}' {views} /forebay/{layout}/view - 300 4"));
        }
    }
    let mpi4py = plain("/usr/bin/python3", &["-c", "import mpi4py"]);
    match OPEN_MPI.is_here() && mpi4py.status.success() {
        true => passes(&c, &OPEN_MPI, &format!("{} /forebay/striped/python", script("mpi4py_views"))),
        false => println!("skipped: no mpi4py"),
    }
    c.check();
}

/// Volumes over all nodes.
fn striped(c: &Cluster, names: &[&str]) {
    for name in names {
        let words = ["create", name, "--size", "16MiB", "--on", "n2,n4,n1,n3", "--stripe-size", "64KiB"];
        succeeds(volume(c, 1, &words));
    }
}

/// Deletes volumes whose users have ended: their daemons may not have noticed yet.
fn deleted(c: &Cluster, names: &[&str]) {
    for name in names {
        until("the deletion", || volume(c, 3, &["delete", name]).status.success().then_some(()));
    }
}

/// Runs a library's program on volumes and on tmpfs, and compares the files as each node has them.
fn same_in_volumes(c: &Cluster, mpi: &Mpi, program: &Path, endings: &[&str]) {
    let name = program.file_name().unwrap().to_str().unwrap();
    let reference = Reference(PathBuf::from(format!("/dev/shm/fbt-volumes-{name}-{}", std::process::id())));
    std::fs::create_dir(&reference.0).unwrap();
    let volumes: Vec<String> = endings.iter().map(|ending| format!("v{ending}")).collect();
    let volumes: Vec<&str> = volumes.iter().map(String::as_str).collect();
    striped(c, &volumes);
    passes(c, mpi, &format!("{} {}", program.display(), reference.0.join("file").display()));
    passes(c, mpi, &format!("{} forebay:v", program.display()));
    for (ending, made) in endings.iter().zip(&volumes) {
        let theirs = std::fs::read(reference.0.join(format!("file{ending}"))).unwrap();
        let copy = reference.0.join("copy");
        for node in NODES {
            let shown = succeeds(volume(c, node, &["show", made, "--json"]));
            let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
            assert_eq!(shown[0]["file_bytes"], theirs.len() as u64, "{name}, {made}, node {node}");
            let size = theirs.len().to_string();
            succeeds(volume(c, node, &["copy", made, copy.to_str().unwrap(), "--bytes", &size]));
            assert!(std::fs::read(&copy).unwrap() == theirs, "{name}, {made}, as node {node} reads it");
            std::fs::remove_file(&copy).unwrap();
        }
    }
    deleted(c, &volumes);
}

#[test]
fn libraries_write_into_volumes_over_four_nodes_what_they_write_on_tmpfs() {
    let c = Cluster::up("libraries-volumes", NODES.len());
    let same = |mpi: &Mpi, program: Option<PathBuf>, endings: &[&str]| {
        if let Some(program) = program {
            same_in_volumes(&c, mpi, &program, endings);
        }
    };
    for mpi in MPIS.iter().filter(|mpi| mpi.is_here()) {
        same(mpi, built(&c, &format!("h5pcc.{}", mpi.name), "hdf5", &["-shlib"]), &[""]);
    }
    // Debian has these libraries for Open MPI only.
    if OPEN_MPI.is_here() {
        let netcdf = ["-I/usr/lib/x86_64-linux-gnu/netcdf/mpi/include", "-lnetcdf_mpi"];
        same(&OPEN_MPI, built(&c, OPEN_MPI.compiler, "netcdf", &netcdf), &[""]);
        same(&OPEN_MPI, built(&c, OPEN_MPI.compiler, "pnetcdf", &["-lpnetcdf"]), &[".1", ".2", ".5"]);
    }
    c.check();
}

/// mpi/tests/puts.c: each rank calls the functions of forebay.h on a volume that has pieces on all nodes.
#[test]
fn ranks_on_four_nodes_put_get_and_change_words_of_one_volume() {
    let c = Cluster::up("puts", NODES.len());
    let libraries = program("forebay").parent().unwrap().display().to_string();
    let words = [
        "-Wall".into(),
        "-Wextra".into(),
        "-Werror".into(),
        format!("-I{}/../../crates/capi/include", env!("CARGO_MANIFEST_DIR")),
        format!("-L{libraries}"),
        "-lforebay".into(),
        format!("-Wl,-rpath,{libraries}"),
    ];
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    for mpi in MPIS.iter().filter(|mpi| mpi.is_here()) {
        let puts = built(&c, mpi.compiler, "puts", &words).expect("it builds").display().to_string();
        striped(&c, &["v", "w"]);
        // A rank on each node, and two on each of two.
        for (at, line) in [
            (&NODES[..], format!("env PUTS_MAPPED=part {puts} v")),
            (&[1, 2, 1, 2], format!("env PUTS_MAPPED=part {puts} v")),
            (&[3, 1], format!("{puts} v+w")),
        ] {
            let ran = c.by_ranks(mpi, at, &line);
            assert!(
                ran.status.success() && said(&ran).contains("passed"),
                "{}, {line}: {}",
                mpi.name,
                said(&ran)
            );
        }
        deleted(&c, &["v", "w"]);
    }
    c.check();
}

/// IOR, on a volume over all nodes, compares what each rank reads with what another node's rank wrote.
#[test]
fn ior_finds_in_a_volume_over_four_nodes_what_it_wrote() {
    let libraries = plain("sh", &["-c", "ldd \"$(command -v ior)\""]);
    if !libraries.status.success() {
        println!("skipped: ior is not on PATH");
        return;
    }
    let mpi = if said(&libraries).contains("libmpich") { MPICH } else { OPEN_MPI };
    if !mpi.is_here() {
        return;
    }
    let c = Cluster::up("ior-volumes", NODES.len());
    striped(&c, &["v"]);
    for words in ["-t 1m -b 3m", "-t 1m -b 3m -c", "-t 47008 -b 47008 -s 40", "-t 47008 -b 47008 -s 40 -c"] {
        let ran = c.by_ranks(&mpi, &NODES, &format!("ior -a MPIIO -w -r -W -R -C {words} -o forebay:v"));
        let all = said(&ran);
        let right = ran.status.success() && all.contains("Finished") && !all.contains("WARNING");
        assert!(right && !all.contains("rror"), "{words}: {all}");
    }
    deleted(&c, &["v"]);
    c.check();
}
