//! Calls that wait for names of a store, while these arrive in parts.

use super::caches::{object, objects};
use super::*;

/// Objects of a part of a listing.
const PART: usize = 100;

/// The `part`th names of a store.
fn names(part: usize) -> Vec<Vec<u8>> {
    (0..PART).map(|i| format!("n{part:04}-{i:04}-{}", "x".repeat(180)).into_bytes()).collect()
}

fn part_of(part: usize) -> Vec<u8> {
    let names = names(part);
    objects(&names.iter().map(|name| object(name, Kind::File)).collect::<Vec<_>>())
}

fn unlisted(s: &mut Scene) -> Ino {
    let d = s.make_directory(Ino::ROOT, b"d");
    s.ask_and_wait(2, DAEMON | 1, 1, &Request::Attach { ino: d, listed: true, settings: b"s" });
    d
}

/// How many objects of an answer's request are there, if that is not all.
fn count(answer: &[u8]) -> Option<u64> {
    match Reply::decode(answer) {
        Ok(Reply::Count(count)) if count < PART as u64 => Some(count),
        _ => None,
    }
}

/// The first part for which a transaction has no room left, and how many objects of it fit.
fn partial() -> (usize, u64) {
    let mut s = Scene::new("fills");
    let d = unlisted(&mut s);
    for part in 0.. {
        let objects = part_of(part);
        let request = Request::Import { ino: d, objects: &objects };
        if let Some(count) = count(&s.ask_and_wait(2, DAEMON | 1, 2 + part as u64, &request)) {
            return (part, count);
        }
    }
    unreachable!("the shard is full");
}

#[test]
fn part_of_a_listing_wakes_the_calls_for_its_names_alone() {
    let (last, fit) = partial();
    let mut s = Scene::new("part");
    let d = unlisted(&mut s);
    let import = |s: &mut Scene, part: usize| {
        let objects = part_of(part);
        s.ask_and_wait(2, DAEMON | 1, 2 + part as u64, &Request::Import { ino: d, objects: &objects });
    };
    let (first, of_last) = (names(0), names(last));
    let (ring, _) = s.process(5);
    let look = |name: &[u8]| post(&ring, &Request::Lookup { parent: d, name });
    let [early, arrives, absent] = [&first[7][..], &of_last[0], b"absent"].map(look);
    let listing = post(&ring, &Request::ReadDirectory { ino: d, cookie: 0, attributes: false });
    s.pass(Duration::from_millis(50));
    let are_answered = || [&early, &arrives, &absent, &listing].map(|claim| claim.is_answered());
    assert_eq!(are_answered(), [false; 4]);
    import(&mut s, 0);
    s.pass(Duration::from_millis(50));
    assert_eq!(are_answered(), [true, false, false, false]);
    (1..last).for_each(|part| import(&mut s, part));
    let objects = part_of(last);
    let request = Request::Listed { ino: d, epoch: 0, objects: &objects };
    assert_eq!(count(&s.ask_and_wait(2, DAEMON | 1, 2 + last as u64, &request)), Some(fit));
    s.pass(Duration::from_millis(50));
    assert_eq!(are_answered(), [true, true, false, false]);
}
