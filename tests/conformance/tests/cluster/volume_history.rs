//! Histories of puts and gets of several processes, and a check of what the gets have returned (docs/semantics.md, Volumes).
//!
//! The promise is for each byte: a get returns the byte of a put that is not over when the get begins, or that begins before
//! the get ends, or of the last put that was over; of several puts at the same time, any. A put whose outcome is unknown may
//! store its bytes at any time after its start, or never. Ranges of one put's list that overlap are stored in their order.
//!
//! The bytes of a put depend on the put, the range and the place, so that bytes of another put, or of another place, are found
//! out: of n bytes of a wrong put, all are taken for those of a right one with a probability of about 256 to the power of -n.

/// A put of one range or several.
pub(crate) struct Put {
    /// Not 0, and of no other put.
    pub(crate) id: u32,
    pub(crate) began: u64,
    /// When it returned. None if its outcome is unknown.
    pub(crate) ended: Option<u64>,
    /// True if it may store its bytes after it has ended.
    pub(crate) is_late: bool,
    /// Offset and bytes of each range.
    pub(crate) runs: Vec<(u64, u64)>,
}

/// A get that succeeded.
pub(crate) struct Get {
    /// For the report.
    pub(crate) who: String,
    pub(crate) began: u64,
    pub(crate) ended: u64,
    pub(crate) runs: Vec<(u64, u64)>,
    /// What it returned: the bytes of all ranges, in their order.
    pub(crate) bytes: Vec<u8>,
}

/// The byte that a range of a put has at a place. `id` 0 is the volume as it was made.
pub(crate) fn content(id: u32, run: usize, place: u64) -> u8 {
    if id == 0 {
        return 0;
    }
    let mut z = (u64::from(id) << 32 | (run as u64) << 24 | place >> 3).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)).to_le_bytes()[(place % 8) as usize]
}

/// The bytes of a put, those of all ranges in their order.
pub(crate) fn contents(id: u32, runs: &[(u64, u64)]) -> Vec<u8> {
    let runs = runs.iter().enumerate();
    runs.flat_map(|(run, (offset, bytes))| (*offset..offset + bytes).map(move |at| content(id, run, at)))
        .collect()
}

/// A range of a put that a byte may be of.
#[derive(Clone, Copy)]
struct Candidate {
    id: u32,
    run: u32,
    /// The index of the put, for all but the volume as it was made.
    put: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    PutBegins,
    GetBegins,
    GetEnds,
    PutEnds,
}

/// A get in progress, and its bytes that are of no put that has begun: place and byte.
struct Open {
    get: usize,
    unexplained: Vec<(u64, u8)>,
}

fn events(puts: &[Put], gets: &[Get]) -> Vec<(u64, Event, usize)> {
    let of_puts = puts.iter().enumerate().flat_map(|(i, put)| {
        let ends = put.ended.map(|at| (at, Event::PutEnds, i));
        std::iter::once((put.began, Event::PutBegins, i)).chain(ends)
    });
    let of_gets = gets
        .iter()
        .enumerate()
        .flat_map(|(i, get)| [(get.began, Event::GetBegins, i), (get.ended, Event::GetEnds, i)]);
    let mut all: Vec<_> = of_puts.chain(of_gets).collect();
    all.sort_unstable();
    all
}

/// Which put a wrong byte is of, as far as the bytes around it tell.
fn origin(puts: &[Put], wrong: &[(u64, u8)]) -> String {
    let some = &wrong[..wrong.len().min(16)];
    let fits = |id: u32, run: usize| some.iter().all(|(at, byte)| content(id, run, *at) == *byte);
    if some.len() < 8 {
        return "too few to know".to_owned();
    }
    if fits(0, 0) {
        return "zeros".to_owned();
    }
    for put in puts {
        for run in 0..put.runs.len() {
            if fits(put.id, run) {
                let Put { id, began, ended, is_late, runs } = put;
                let at = runs[run];
                return format!("range {run} {at:?} of put {id:#x} of {began} to {ended:?}, late {is_late}");
            }
        }
    }
    "no single put".to_owned()
}

/// Checks what the gets of a volume of `bytes` bytes have returned.
///
/// # Errors
/// The first get, by its end, with a byte that it must not have.
pub(crate) fn check(bytes: u64, puts: &[Put], gets: &[Get]) -> Result<(), String> {
    let first = Candidate { id: 0, run: 0, put: u32::MAX };
    let mut places = vec![vec![first]; bytes as usize];
    let mut open: Vec<Open> = Vec::new();
    // A put that replaces another one's bytes when it ends has begun after the other could store any.
    let is_over = |candidate: &Candidate, before: u64| {
        let Some(put) = puts.get(candidate.put as usize) else { return true };
        !put.is_late && put.ended.is_some_and(|ended| ended < before)
    };
    for (_, event, i) in events(puts, gets) {
        match event {
            Event::PutBegins => {
                let put = &puts[i];
                for (run, (offset, bytes)) in put.runs.iter().enumerate() {
                    let range = *offset..offset + bytes;
                    let candidate = Candidate { id: put.id, run: run as u32, put: i as u32 };
                    places[range.start as usize..range.end as usize]
                        .iter_mut()
                        .for_each(|place| place.push(candidate));
                    for one in &mut open {
                        one.unexplained
                            .retain(|(at, byte)| !range.contains(at) || content(put.id, run, *at) != *byte);
                    }
                }
            }
            Event::PutEnds => {
                let put = &puts[i];
                for (run, (offset, bytes)) in put.runs.iter().enumerate() {
                    for place in &mut places[*offset as usize..(offset + bytes) as usize] {
                        place.retain(|other| {
                            let is_before = other.put as usize == i && (other.run as usize) < run;
                            !is_over(other, put.began) && (put.is_late || !is_before)
                        });
                    }
                }
            }
            Event::GetBegins => {
                let get = &gets[i];
                let all = get.runs.iter().flat_map(|(offset, bytes)| *offset..offset + bytes);
                let is_explained = |at: u64, byte: u8| {
                    places[at as usize].iter().any(|one| content(one.id, one.run as usize, at) == byte)
                };
                let unexplained = all
                    .zip(get.bytes.iter().copied())
                    .filter(|(at, byte)| !is_explained(*at, *byte))
                    .collect();
                open.push(Open { get: i, unexplained });
            }
            Event::GetEnds => {
                let index = open.iter().position(|one| one.get == i).unwrap_or(0);
                let Open { unexplained, .. } = open.swap_remove(index);
                if let Some((at, byte)) = unexplained.first() {
                    let Get { who, began, ended, runs, .. } = &gets[i];
                    return Err(format!(
                        "{who}, get of {runs:?} from {began} to {ended}: {} bytes, the first of them {byte:#x} at {at}, are of \
                         {}; allowed there: {:x?}",
                        unexplained.len(),
                        origin(puts, &unexplained),
                        places[*at as usize].iter().map(|one| (one.id, one.run)).collect::<Vec<_>>()
                    ));
                }
            }
        }
    }
    Ok(())
}

fn put(id: u32, began: u64, ended: Option<u64>, runs: &[(u64, u64)]) -> Put {
    Put { id, began, ended, is_late: false, runs: runs.to_vec() }
}

fn get(began: u64, ended: u64, offset: u64, bytes: Vec<u8>) -> Get {
    Get { who: "p".to_owned(), began, ended, runs: vec![(offset, bytes.len() as u64)], bytes }
}

#[test]
fn get_may_return_bytes_of_puts_at_its_time_and_of_none_that_was_replaced() {
    let range = [(10, 40)];
    let is_right = |puts: &[Put], began, id| {
        check(100, puts, &[get(began, began + 1, 10, contents(id, &range))]).is_ok()
    };
    let one_after_the_other = || [put(1, 10, Some(20), &range), put(2, 30, Some(40), &range)];
    for (at, expected) in [(5, [true, false, false]), (15, [true, true, false]), (25, [false, true, false])] {
        assert_eq!([0, 1, 2].map(|id| is_right(&one_after_the_other(), at, id)), expected, "at {at}");
    }
    for (at, expected) in [(35, [false, true, true]), (50, [false, false, true])] {
        assert_eq!([0, 1, 2].map(|id| is_right(&one_after_the_other(), at, id)), expected, "at {at}");
    }
    let overlapping = [put(1, 10, Some(35), &range), put(2, 30, Some(40), &range)];
    assert_eq!([0, 1, 2].map(|id| is_right(&overlapping, 50, id)), [false, true, true]);
    let mut unknown = one_after_the_other();
    unknown[0].ended = None;
    assert_eq!([0, 1, 2].map(|id| is_right(&unknown, 50, id)), [false, true, true]);
    let mut late = one_after_the_other();
    late[0].is_late = true;
    assert_eq!([0, 1, 2].map(|id| is_right(&late, 50, id)), [false, true, true]);
}

#[test]
fn one_wrong_byte_of_a_get_is_found_and_a_mixture_of_two_puts_is_right_only_at_their_time() {
    let range = [(10, 40)];
    let puts = [put(1, 10, Some(20), &range), put(2, 15, Some(25), &range)];
    let mixture = [&contents(1, &range)[..17], &contents(2, &range)[17..]].concat();
    assert_eq!(check(100, &puts, &[get(30, 31, 10, mixture.clone())]), Ok(()));
    let mut wrong = mixture.clone();
    wrong[5] = (0..=255).find(|byte| [0, 1, 2].iter().all(|id| content(*id, 0, 15) != *byte)).unwrap();
    assert!(check(100, &puts, &[get(30, 31, 10, wrong)]).unwrap_err().contains("at 15"));
    let third = [put(1, 10, Some(20), &range), put(2, 15, Some(25), &range), put(3, 26, Some(28), &range)];
    assert!(check(100, &third, &[get(30, 31, 10, mixture)]).is_err());
    // The bytes of another place.
    let moved = get(30, 31, 11, contents(1, &range));
    assert!(check(100, &puts, &[moved]).is_err());
}

#[test]
fn later_range_of_a_list_replaces_an_earlier_one_when_the_put_has_ended() {
    let runs = [(10, 20), (20, 20)];
    let list = [put(1, 10, Some(20), &runs)];
    let all = contents(1, &runs);
    let (earlier, later) = (all[10..20].to_vec(), all[20..30].to_vec());
    assert_eq!(check(100, &list, &[get(15, 16, 20, earlier.clone())]), Ok(()), "in execution");
    assert_eq!(check(100, &list, &[get(30, 31, 20, later.clone())]), Ok(()));
    assert!(check(100, &list, &[get(30, 31, 20, earlier)]).is_err());
    assert!(check(100, &list, &[get(5, 6, 20, later)]).is_err(), "before it began");
}
