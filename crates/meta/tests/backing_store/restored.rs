//! Reports of restores that meet changes of the file's attributes, and releases that are taken back.

use forebay_types::{Code, Ino, Layout, NodeId, Request, SetAttr, StoreVersion, TimeSet, Timestamp};

use super::pool::Pool;

#[test]
fn restore_that_has_read_times_before_they_were_set_is_refused_until_it_has_those() {
    let mut pool = Pool::new(false);
    let ino = pool.clean_file(pool.top, b"f", 3);
    pool.release(ino).unwrap();
    let epoch = pool.attr(ino).unwrap().epoch();
    let time = |sec| TimeSet::At(Timestamp { sec, nsec: 5 });
    for (atime, mtime) in [(time(7), TimeSet::Omit), (TimeSet::Omit, time(8))] {
        let restored = pool.restored(ino, epoch);
        pool.ask(Request::SetAttr { ino, set: SetAttr { atime, mtime, ..SetAttr::default() } }).unwrap();
        let set = pool.attr(ino).unwrap();
        assert_eq!(pool.ask(restored), Err(Code::Busy));
        assert_eq!(pool.report(&[restored]), [Err(Code::Busy)]);
        assert_eq!(pool.attr(ino).unwrap(), set, "it is released");
    }
    pool.restore(ino, epoch).unwrap();
    assert!(pool.attr(ino).unwrap().is_resident());
    pool.assert_clean();
}

#[test]
fn release_of_a_striped_file_that_is_taken_back_leaves_it_striped() {
    let mut pool = Pool::new(false);
    let (parent, name) = (pool.top, b"f".as_slice());
    let ino = pool.create(parent, name).unwrap();
    let striped = Layout::overstriped(NodeId(1), 0, 3, 4096).unwrap();
    pool.ask(Request::SetLayout { ino, layout: striped }).unwrap();
    let epoch = pool.entry(Request::BeginDrain { ino }).unwrap().epoch();
    let (seen, version) = (pool.pending()[0].changes, StoreVersion { ino: 3, ..StoreVersion::NOTHING });
    pool.ask(Request::Published { parent, name, ino, epoch, seen, version }).unwrap();
    pool.release(ino).unwrap();
    let epoch = pool.attr(ino).unwrap().epoch();
    assert_eq!(pool.layout(ino), Ok(Layout::single(NodeId(1), 0)), "it is restored into one backing file");
    let (atime, mtime) = pool.attr(ino).map(|attr| (attr.atime, attr.mtime)).unwrap();
    let back = |ino: Ino, layout| Request::Restored { ino, epoch, atime, mtime, layout };
    assert_eq!(pool.ask(back(ino, Layout::single(NodeId(2), 0))), Err(Code::Invalid), "another place");
    pool.ask(back(ino, striped)).unwrap();
    assert_eq!(pool.layout(ino), Ok(striped));
    pool.assert_clean();
}
