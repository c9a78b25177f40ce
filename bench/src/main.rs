//! The benchmark: Forebay beside tmpfs and the disk, in one run.

fn main() {}
