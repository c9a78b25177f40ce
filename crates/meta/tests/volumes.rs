//! Records of volumes: each request in each state of a record, what a maker's end leaves, and the check.

mod place;

use forebay_meta::{Batch, Shard};
use forebay_types::{target_of, Code, NodeId, Reader, Reply, Request, Segment, Targets, Volume};
use place::{at, Driver, Place, CALLER, OPTIONS};

const MAKER: u64 = 77;

fn segment(bytes: u64) -> Segment {
    Segment::new(bytes, 1 << 20, Targets::new(&[target_of(NodeId::FIRST, 0)]).unwrap()).unwrap()
}

fn volume(driver: &mut Driver, batch: &mut Batch<'_>, request: Request<'_>) -> Result<Volume, Code> {
    match driver.ask(batch, request)? {
        Reply::Bytes(bytes) => Ok(Volume::decode(&mut Reader::new(bytes)).unwrap()),
        other => panic!("{request:?} was answered with {other:?}"),
    }
}

fn create(driver: &mut Driver, batch: &mut Batch<'_>, name: &[u8], bytes: u64) -> Result<Volume, Code> {
    volume(driver, batch, Request::CreateVolume { name, mode: 0o600, maker: MAKER, segment: segment(bytes) })
}

/// A volume that can be used.
fn made(driver: &mut Driver, batch: &mut Batch<'_>, name: &[u8], bytes: u64) -> Volume {
    let ino = create(driver, batch, name, bytes).unwrap().ino;
    volume(driver, batch, Request::CommitVolume { name, ino }).unwrap()
}

fn names(driver: &mut Driver, batch: &mut Batch<'_>) -> Vec<Vec<u8>> {
    let (mut names, mut after) = (Vec::<Vec<u8>>::new(), Vec::new());
    loop {
        let Reply::Bytes(bytes) = driver.ask(batch, Request::ListVolumes { after: &after }).unwrap() else {
            panic!()
        };
        if bytes.is_empty() {
            return names;
        }
        let mut r = Reader::new(bytes);
        while !r.rest().is_empty() {
            names.push(r.short_bytes().unwrap().to_vec());
            Volume::decode(&mut r).unwrap();
        }
        after = names.last().unwrap().clone();
    }
}

#[test]
fn volume_is_seen_once_it_is_complete_and_not_after_it_was_deleted() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    let (mut driver, mut batch) = (Driver::new(), shard.begin().unwrap());
    let (d, b) = (&mut driver, &mut batch);
    let new = create(d, b, b"v", 8 << 20).unwrap();
    assert_eq!((new.uid, new.gid, new.maker, new.complete), (CALLER.uid, CALLER.gid, MAKER, 0));
    assert_eq!(volume(d, b, Request::GetVolume { name: b"v" }), Err(Code::NotFound));
    assert_eq!(names(d, b), Vec::<Vec<u8>>::new());
    assert_eq!(create(d, b, b"v", 4096).unwrap_err(), Code::Exists, "the name is taken meanwhile");
    assert_eq!(d.ask(b, Request::DeleteVolume { name: b"v", ino: new.ino }), Err(Code::Busy));
    let done = volume(d, b, Request::CommitVolume { name: b"v", ino: new.ino }).unwrap();
    assert_eq!((done.maker, done.complete, done.bytes()), (0, 1, 8 << 20));
    assert_eq!(volume(d, b, Request::GetVolume { name: b"v" }), Ok(done.clone()));
    assert_eq!(volume(d, b, Request::CommitVolume { name: b"v", ino: new.ino }), Err(Code::Stale), "once");
    assert_eq!(names(d, b), [b"v".to_vec()]);
    batch.commit().unwrap();
    assert_eq!(shard.check(&mut |_| {}).unwrap().volumes, 1);
    let mut batch = shard.begin().unwrap();
    let (d, b) = (&mut driver, &mut batch);
    assert_eq!(d.ask(b, Request::DeleteVolume { name: b"v", ino: new.ino }), Ok(Reply::Done));
    assert_eq!(volume(d, b, Request::GetVolume { name: b"v" }), Err(Code::NotFound));
    let again = create(d, b, b"v", 4096).unwrap();
    assert_ne!(again.ino, new.ino, "a number is never used again");
    assert_eq!(d.ask(b, Request::AbandonVolume { name: b"v", ino: new.ino }), Err(Code::Stale));
    assert_eq!(d.ask(b, Request::AbandonVolume { name: b"v", ino: again.ino }), Ok(Reply::Done));
    assert_eq!(b.volumes().unwrap(), []);
}

#[test]
fn grown_segments_are_appended_and_shrink_drops_whole_ones_from_the_end() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    let (mut driver, mut batch) = (Driver::new(), shard.begin().unwrap());
    let (d, b) = (&mut driver, &mut batch);
    let name = b"v".as_slice();
    let ino = made(d, b, name, 8 << 20).ino;
    let grow = |bytes| Request::GrowVolume { name, ino, maker: MAKER, segment: segment(bytes) };
    let grown = volume(d, b, grow(4 << 20)).unwrap();
    assert_eq!((grown.bytes(), grown.segments.len(), grown.maker), (8 << 20, 2, MAKER), "as before, so far");
    assert_eq!(volume(d, b, grow(4096)), Err(Code::Busy));
    assert_eq!(volume(d, b, Request::ShrinkVolume { name, ino, bytes: 8 << 20 }), Err(Code::Busy));
    let thin = Request::GrowVolume { name, ino, maker: MAKER, segment: segment(4096).thin(true) };
    assert_eq!(volume(d, b, thin), Err(Code::Invalid), "its other pieces are mapped");
    assert_eq!(d.ask(b, Request::AbandonVolume { name, ino }), Ok(Reply::Done));
    assert_eq!(volume(d, b, Request::GetVolume { name }).unwrap().segments, [segment(8 << 20)]);
    for bytes in [4 << 20, 2 << 20] {
        volume(d, b, grow(bytes)).unwrap();
        volume(d, b, Request::CommitVolume { name, ino }).unwrap();
    }
    assert_eq!(volume(d, b, Request::GetVolume { name }).unwrap().bytes(), 14 << 20);
    for bytes in [0, 1 << 20, 13 << 20, 15 << 20] {
        assert_eq!(volume(d, b, Request::ShrinkVolume { name, ino, bytes }), Err(Code::Invalid), "{bytes}");
    }
    let shrunk = volume(d, b, Request::ShrinkVolume { name, ino, bytes: 12 << 20 }).unwrap();
    assert_eq!((shrunk.bytes(), shrunk.complete), (12 << 20, 2));
    assert_eq!(volume(d, b, Request::ShrinkVolume { name, ino, bytes: 8 << 20 }).unwrap().segments.len(), 1);
    for _ in 1..forebay_types::limits::VOLUME_SEGMENTS_MAX {
        volume(d, b, grow(4096)).unwrap();
        volume(d, b, Request::CommitVolume { name, ino }).unwrap();
    }
    assert_eq!(volume(d, b, grow(4096)), Err(Code::TooManyLinks));
}

#[test]
fn what_a_maker_leaves_goes_with_its_session_and_other_makers_keep_theirs() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    let (mut driver, mut batch) = (Driver::new(), shard.begin().unwrap());
    let (d, b) = (&mut driver, &mut batch);
    let whole = made(d, b, b"whole", 4096);
    let grown = made(d, b, b"grown", 4096);
    let grow = Request::GrowVolume { name: b"grown", ino: grown.ino, maker: MAKER, segment: segment(8192) };
    volume(d, b, grow).unwrap();
    create(d, b, b"half", 4096).unwrap();
    let other = Request::CreateVolume { name: b"other", mode: 0o600, maker: 5, segment: segment(4096) };
    let other = volume(d, b, other).unwrap();
    assert_eq!(b.abandon_volumes(|maker| maker == MAKER).unwrap(), 2);
    assert_eq!(b.abandon_volumes(|maker| maker == MAKER).unwrap(), 0);
    // The number of the segment that was given up is not used again.
    let grown = Volume { next_number: grown.next_number + 1, ..grown };
    let left = [(b"grown".to_vec(), grown), (b"other".to_vec(), other), (b"whole".to_vec(), whole)];
    assert_eq!(b.volumes().unwrap(), left);
    batch.commit().unwrap();
    assert!(shard.check(&mut |_| {}).unwrap().is_clean());
}

#[test]
fn other_users_cannot_change_a_volume_and_root_can() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    let (mut driver, mut batch) = (Driver::new(), shard.begin().unwrap());
    let (d, b) = (&mut driver, &mut batch);
    let ino = made(d, b, b"v", 4096).ino;
    let name = b"v".as_slice();
    let mut effects = forebay_meta::Effects::new();
    let mut out = vec![0; forebay_types::limits::MESSAGE_BYTES_MAX];
    let mut as_user = |b: &mut Batch<'_>, uid, request: Request<'_>| {
        let caller = forebay_types::Caller { uid, gid: 100 };
        b.apply(caller, &request, at(900), &mut effects, &mut out).map(|_| ()).map_err(|r| r.code())
    };
    let grow = Request::GrowVolume { name, ino, maker: 5, segment: segment(4096) };
    for request in
        [Request::DeleteVolume { name, ino }, Request::ShrinkVolume { name, ino, bytes: 4096 }, grow]
    {
        assert_eq!(as_user(b, 1001, request), Err(Code::NotPermitted), "{request:?}");
    }
    assert_eq!(as_user(b, 1001, Request::GetVolume { name }), Ok(()));
    assert_eq!(as_user(b, 0, Request::DeleteVolume { name, ino }), Ok(()));
}

#[test]
fn bad_names_modes_and_makers_are_refused_and_many_volumes_are_listed_in_their_order() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    let (mut driver, mut batch) = (Driver::new(), shard.begin().unwrap());
    let (d, b) = (&mut driver, &mut batch);
    assert_eq!(create(d, b, b"a:b", 4096).unwrap_err(), Code::Invalid);
    let bad = Request::CreateVolume { name: b"v", mode: 0o4600, maker: 1, segment: segment(4096) };
    assert_eq!(volume(d, b, bad).unwrap_err(), Code::Invalid);
    let bad = Request::CreateVolume { name: b"v", mode: 0o600, maker: 0, segment: segment(4096) };
    assert_eq!(volume(d, b, bad).unwrap_err(), Code::Invalid);
    let mut expected: Vec<Vec<u8>> =
        (0..700).map(|i| format!("{i}-{}", "x".repeat(200)).into_bytes()).collect();
    for name in &expected {
        made(d, b, name, 4096);
    }
    expected.sort();
    assert_eq!(names(d, b), expected);
}
