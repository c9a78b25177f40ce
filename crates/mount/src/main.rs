use std::path::PathBuf;
use std::sync::Arc;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let pool_dir = PathBuf::from(&a[1]);
    let at = forebay_mount::place::full_path(&PathBuf::from(&a[2])).unwrap();
    let pool = forebay_client::Pool::attach(&pool_dir).unwrap();
    forebay_mount::place::check_place(&at, &a[1]).unwrap();
    let dev = forebay_mount::place::mount(&at, &a[1], forebay_mount::place::Options { allow_other: true }).unwrap();
    let fs = Arc::new(forebay_mount::FileSystem::new(pool, Arc::new(dev)).unwrap());
    let s = forebay_mount::Session::start(&fs, 4).unwrap();
    eprintln!("{:?}", s.agreement);
    s.wait();
}
