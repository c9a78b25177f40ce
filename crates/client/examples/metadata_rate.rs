//! Creates, looks up and removes files through the client, and prints the rates: `metadata_rate POOL_DIRECTORY COUNT`.

use std::time::Instant;

use forebay_client::{PathBuffer, Place, Pool};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (dir, count) = (arguments.next().expect("POOL_DIRECTORY"), arguments.next().expect("COUNT"));
    let count: u64 = count.parse().expect("COUNT is a number");
    let pool = Pool::attach(std::path::Path::new(&dir)).unwrap_or_else(|e| panic!("{e}"));
    let root = pool.root().unwrap();
    let mut escape = PathBuffer::new();
    let names: Vec<String> = (0..count)
        .map(|i| format!("f{:08x}.{}", (i as u32).wrapping_mul(2_654_435_761), std::process::id()))
        .collect();
    let mut timed = |what: &str, on: &mut dyn FnMut(&[u8], &mut PathBuffer)| {
        let started = Instant::now();
        for name in &names {
            on(name.as_bytes(), &mut escape);
        }
        println!("{what:<8} {:>9.0}/s", count as f64 / started.elapsed().as_secs_f64());
    };
    for _ in 0..3 {
        timed("create", &mut |name, escape| {
            let place = Place { dir: root, path: name };
            let fd = pool.open(place, libc::O_CREAT | libc::O_RDWR, 0o644, escape).unwrap();
            // SAFETY: the descriptor is ours.
            unsafe { libc::close(fd) };
        });
        timed("stat", &mut |name, escape| {
            pool.stat(Place { dir: root, path: name }, true, escape).unwrap();
        });
        timed("absent", &mut |name, escape| {
            pool.stat(Place { dir: root, path: &name[1..] }, true, escape).unwrap_err();
        });
        timed("open", &mut |name, escape| {
            let fd = pool.open(Place { dir: root, path: name }, libc::O_RDONLY, 0, escape).unwrap();
            // SAFETY: the descriptor is ours.
            unsafe { libc::close(fd) };
        });
        timed("unlink", &mut |name, escape| {
            pool.unlink(Place { dir: root, path: name }, escape).unwrap();
        });
    }
}
