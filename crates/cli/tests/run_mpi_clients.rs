//! Unchanged file libraries: parallel HDF5, NetCDF-4, PnetCDF and h5py write the same files into a pool as on tmpfs,
//! with 1, 2 and 4 ranks.
//!
//! A library that is not installed is skipped with a line. Debian has HDF5 for both MPIs, the others for Open MPI.

mod common;

use std::path::Path;

use common::mpi::{alone, compile, compile_with, driver, passes, Mpi, Native, MPIS};
use common::{Place, Ran};

/// How a program's files are compared.
struct Files<'a> {
    /// Suffixes of the files that the program makes.
    endings: &'a [&'a str],
    /// The command that compares two files.
    compare: &'a str,
    /// Number of backing files of each file in the pool.
    stripes: u32,
}

const ONE: Files<'_> = Files { endings: &[""], compare: "cmp", stripes: 1 };

/// Runs a program on a file of the pool and on one of tmpfs, and compares the results. Another program reads the pool's
/// files through the preload library. `words` has FILE in place of the path.
fn same_as_on_tmpfs(place: &Place, mpi: &Mpi, words: &str, files: &Files<'_>) {
    for ranks in [1, 2, 4] {
        let native = Native::new("clients");
        let reference = native.0.join("file").display().to_string();
        let run = |file: &str| format!("{} {ranks} {}", mpi.launcher.join(" "), words.replace("FILE", file));
        let mut script = format!(
            "set -e; forebay layout set --stripe-count {} --stripe-size 4KiB /; {}; {}",
            files.stripes,
            run("/forebay/file"),
            run(&reference)
        );
        for ending in files.endings {
            script += &format!("; {} /forebay/file{ending} {reference}{ending}", files.compare);
        }
        script += "; echo same";
        let path = format!("{}:/usr/bin:/bin", common::forebay().parent().unwrap().display());
        let mut command = place.command(["run", "--own", "--quiet", "--", "sh", "-c", &script]);
        let ran = Ran::of(command.env("PATH", path).output().unwrap());
        assert!(
            ran.code == Some(0) && ran.out.ends_with("same\n") && ran.out.matches("passed").count() == 2,
            "{}, {ranks} ranks: {ran:?}",
            mpi.name
        );
    }
    place.assert_nothing_left();
}

#[test]
fn parallel_hdf5_writes_the_file_that_it_writes_on_tmpfs() {
    let _alone = alone();
    for (mpi, compiler) in MPIS.iter().zip(["h5pcc.openmpi", "h5pcc.mpich"]) {
        let place = Place::new();
        if !driver(mpi) {
            continue;
        }
        match compile_with(&place, compiler, "hdf5", &["-shlib"]) {
            Some(program) => {
                let words = format!("{} FILE", program.display());
                same_as_on_tmpfs(&place, mpi, &words, &ONE);
                // With several backing files; cmp's open converts them to one.
                same_as_on_tmpfs(&place, mpi, &words, &Files { stripes: 3, ..ONE });
                let compressed = format!("{words} compressed");
                same_as_on_tmpfs(&place, mpi, &compressed, &Files { compare: "h5diff", ..ONE });
            }
            None => println!("skipped: no parallel HDF5 for {} ({compiler})", mpi.name),
        }
    }
}

#[test]
fn parallel_netcdf4_writes_the_file_that_it_writes_on_tmpfs() {
    let _alone = alone();
    let (place, mpi) = (Place::new(), &MPIS[0]);
    let include = "-I/usr/lib/x86_64-linux-gnu/netcdf/mpi/include";
    if !driver(mpi) {
        return;
    }
    match compile_with(
        &place,
        mpi.compiler,
        "netcdf",
        &["-Wall", "-Wextra", "-Werror", include, "-lnetcdf_mpi"],
    ) {
        Some(program) => same_as_on_tmpfs(&place, mpi, &format!("{} FILE", program.display()), &ONE),
        None => println!("skipped: no parallel NetCDF (libnetcdf-mpi-dev)"),
    }
}

#[test]
fn pnetcdf_writes_the_files_that_it_writes_on_tmpfs() {
    let _alone = alone();
    let (place, mpi) = (Place::new(), &MPIS[0]);
    if !driver(mpi) {
        return;
    }
    match compile_with(&place, mpi.compiler, "pnetcdf", &["-Wall", "-Wextra", "-Werror", "-lpnetcdf"]) {
        Some(program) => {
            let files = Files { endings: &[".1", ".2", ".5"], ..ONE };
            same_as_on_tmpfs(&place, mpi, &format!("{} FILE", program.display()), &files);
        }
        None => println!("skipped: no PnetCDF (libpnetcdf-dev)"),
    }
}

/// `ncmpi_open` also opens the file by open(2), which would copy it into one backing file. It also accepts names with a
/// prefix that open(2) does not understand.
#[test]
fn pnetcdf_opens_a_file_of_several_backing_files_as_it_is() {
    let _alone = alone();
    let (place, mpi) = (Place::new(), &MPIS[0]);
    if !driver(mpi) {
        return;
    }
    let Some(program) = compile_with(&place, mpi.compiler, "pnetcdf", &["-lpnetcdf"]) else {
        println!("skipped: no PnetCDF (libpnetcdf-dev)");
        return;
    };
    let run = format!("{} 2 {}", mpi.launcher.join(" "), program.display());
    let script = format!(
        "set -e; forebay layout set --stripe-count 3 --stripe-size 4KiB /; {run} /forebay/a; {run} forebay:/b; \
         for f in a.1 a.2 a.5 b.1 b.2 b.5; do forebay layout get /$f; done"
    );
    let path = format!("{}:/usr/bin:/bin", common::forebay().parent().unwrap().display());
    let mut command = place.command(["run", "--own", "--quiet", "--", "sh", "-c", &script]);
    let ran = Ran::of(command.env("PATH", path).output().unwrap());
    assert_eq!((ran.code, ran.out.matches("passed").count()), (Some(0), 2), "{ran:?}");
    assert_eq!(ran.out.matches(": 3 backing files").count(), 6, "{ran:?}");
    place.assert_nothing_left();
}

/// PnetCDF in a Python module: the module's calls reach the driver's function, but only the module can find PnetCDF's
/// own.
#[test]
fn pnetcdf_in_a_module_is_found_and_none_is_an_error() {
    let _alone = alone();
    for mpi in MPIS.iter().filter(|mpi| driver(mpi)) {
        let place = Place::new();
        let module = compile_with(&place, mpi.compiler, "module", &["-shared", "-fPIC", "-DMODULE"]).unwrap();
        let library = place.join("module.so");
        std::fs::rename(module, &library).unwrap();
        let program = compile(&place, mpi, "module");
        let words = [program.to_str().unwrap(), library.to_str().unwrap(), "/forebay/file"];
        passes(&place, mpi, 1, &words);
        place.assert_nothing_left();
    }
}

#[test]
fn parallel_h5py_writes_the_file_that_it_writes_on_tmpfs() {
    let _alone = alone();
    let (place, mpi) = (Place::new(), &MPIS[0]);
    let there = Path::new("/usr/lib/python3/dist-packages/h5py/_debian_h5py_mpi").exists();
    if !driver(mpi) || !there {
        println!("skipped: no parallel h5py (python3-h5py-mpi)");
        return;
    }
    let words = format!("/usr/bin/python3 {} FILE", common::mpi::source("tests/h5py_parallel.py").display());
    same_as_on_tmpfs(&place, mpi, &words, &ONE);
}
