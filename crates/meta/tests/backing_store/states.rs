//! Every order of the steps of `world.rs`, breadth first: no state may have a fault, and from every state in which the
//! programs have ended the mover must make the store equal to the pool. Canaries: with each planted mistake the search
//! must find a fault.

use std::collections::HashSet;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

use super::meta::Defects;
use super::world::{Budget, Mistakes, World};

/// The result of a search: states seen, or a fault with the steps that lead to it.
type Outcome = Result<usize, (&'static str, Vec<&'static str>)>;

fn search(first: World, states_max: usize) -> Outcome {
    let hash = BuildHasherDefault::<DefaultHasher>::default();
    let mut seen = HashSet::from([hash.hash_one(&first)]);
    // For each state its predecessor, and the step from there.
    let mut from: Vec<(u32, &'static str)> = vec![(0, "")];
    let mut front = vec![(0, first)];
    let way = |from: &[(u32, &'static str)], mut at: u32| {
        let mut steps = Vec::new();
        while at != 0 {
            steps.push(from[at as usize].1);
            at = from[at as usize].0;
        }
        steps.reverse();
        steps
    };
    while !front.is_empty() {
        let mut next_front = Vec::new();
        for (at, world) in front {
            for (step, mut next) in world.steps() {
                next.shrink();
                if !seen.insert(hash.hash_one(&next)) {
                    continue;
                }
                from.push((at, step));
                let number = (from.len() - 1) as u32;
                if let Some(fault) = next.fault() {
                    return Err((fault, way(&from, number)));
                }
                if next.is_quiet() {
                    next.clone().settle().map_err(|fault| (fault, way(&from, number)))?;
                }
                assert!(from.len() <= states_max, "more than {states_max} states");
                next_front.push((number, next));
            }
        }
        front = next_front;
    }
    Ok(seen.len())
}

const STATES_MAX: usize = 20_000_000;

fn assert_sound(writers: usize, readers: usize, opens: u8, budget: Budget) {
    assert_sound_from(World::new(writers, readers, opens, budget, Mistakes::default(), Defects::default()));
}

fn assert_sound_from(first: World) {
    match search(first, STATES_MAX) {
        Ok(states) => println!("{states} states"),
        Err((fault, steps)) => panic!("{fault}: {steps:#?}"),
    }
}

#[test]
fn no_order_of_two_writers_a_reader_and_a_mover_that_is_killed_loses_data() {
    assert_sound(2, 1, 1, Budget { kills: 2, evicts: 3, breaks: 2, name_changes: 0, workers: 0, others: 0 });
}

#[test]
#[ignore = "7 million states: a minute"]
fn no_order_of_programs_that_open_again_and_again_loses_data() {
    assert_sound(2, 1, 2, Budget { kills: 1, evicts: 2, breaks: 2, name_changes: 0, workers: 0, others: 0 });
}

#[test]
fn no_order_of_a_writer_a_reader_and_a_name_change_loses_data() {
    assert_sound(1, 1, 1, Budget { kills: 1, evicts: 2, breaks: 1, name_changes: 1, workers: 0, others: 0 });
}

#[test]
#[ignore = "3 million states: half a minute"]
fn no_order_of_a_writer_a_reader_and_two_name_changes_loses_data() {
    assert_sound(1, 1, 2, Budget { kills: 1, evicts: 2, breaks: 1, name_changes: 2, workers: 0, others: 0 });
}

#[test]
fn no_order_of_many_name_changes_and_evictions_loses_data() {
    assert_sound(1, 0, 1, Budget { kills: 2, evicts: 2, breaks: 0, name_changes: 4, workers: 0, others: 0 });
}

#[test]
fn no_order_of_a_writer_of_another_node_and_workers_that_are_killed_loses_data() {
    let budget = Budget { kills: 1, evicts: 2, breaks: 1, name_changes: 0, workers: 2, others: 0 };
    let first = World::new(1, 1, 1, budget, Mistakes::default(), Defects::default());
    assert_sound_from(first.with_other_node());
}

#[test]
fn no_order_of_a_restore_and_versions_of_another_program_loses_data() {
    assert_sound(1, 1, 1, Budget { kills: 1, evicts: 2, breaks: 1, name_changes: 0, workers: 0, others: 2 });
}

#[test]
fn no_order_of_a_name_change_and_a_version_of_another_program_loses_data() {
    assert_sound(1, 1, 1, Budget { kills: 0, evicts: 1, breaks: 0, name_changes: 1, workers: 0, others: 1 });
}

#[test]
fn no_order_of_a_creator_and_a_mover_that_finds_its_file_first_loses_data() {
    let budget = Budget { kills: 0, evicts: 1, breaks: 1, name_changes: 0, workers: 0, others: 0 };
    let first = World::new(1, 1, 1, budget, Mistakes::default(), Defects::default());
    assert_sound_from(first.with_creator());
}

/// The search finds a fault when this mistake is planted.
fn assert_found(name: &str, mistakes: Mistakes, defects: Defects) {
    let of_node = mistakes.node_marks_not || mistakes.node_looks_not_at_name;
    let of_other = defects.other_version_keeps_epoch || defects.other_version_of_resident;
    let (name_changes, workers) = if of_node { (0, 1) } else { (2, 0) };
    let others = u8::from(of_other);
    let budget = Budget { kills: 0, evicts: 2, breaks: 1, name_changes, workers, others };
    let first = World::new(2, 1, 1, budget, mistakes, defects);
    let first = match mistakes.creator_reads_not_again {
        true => first.with_creator(),
        false if of_node => first.with_other_node(),
        false => first,
    };
    let outcome = search(first, STATES_MAX);
    let (fault, steps) = outcome.expect_err(name);
    println!("{name}: {fault}: {steps:?}");
}

macro_rules! canaries {
    ($($name:ident: $mistakes:expr, $defects:expr;)*) => {
        $(#[test]
        fn $name() {
            assert_found(stringify!($name), $mistakes, $defects);
        })*
    };
}

fn none<T: Default>() -> T {
    T::default()
}

canaries! {
    an_open_that_does_not_read_again_is_found: Mistakes { open_reads_not_again: true, ..none() }, none();
    an_open_that_keeps_what_is_gone_is_found: Mistakes { open_keeps_what_is_gone: true, ..none() }, none();
    a_creator_that_does_not_read_again_is_found: Mistakes { creator_reads_not_again: true, ..none() }, none();
    a_mark_whose_reply_is_not_read_is_found: Mistakes { mark_reply_not_read: true, ..none() }, none();
    an_evict_that_unlinks_first_is_found: Mistakes { evict_unlinks_first: true, ..none() }, none();
    an_evict_after_its_lease_is_found: Mistakes { evict_looks_not_at_lease: true, ..none() }, none();
    a_drain_without_lease_is_found: Mistakes { drain_takes_no_lease: true, ..none() }, none();
    a_drain_after_its_lease_is_found: Mistakes { drain_looks_not_at_lease: true, ..none() }, none();
    a_drain_that_does_not_begin_is_found: Mistakes { drain_begins_not: true, ..none() }, none();
    a_removal_of_the_only_copy_is_found: Mistakes { removes_unasked: true, ..none() }, none();
    a_node_that_writes_without_a_mark_is_found: Mistakes { node_marks_not: true, ..none() }, none();
    a_node_that_writes_a_file_without_a_name_is_found: Mistakes { node_looks_not_at_name: true, ..none() }, none();
    an_unfinished_version_is_found: Mistakes { publishes_unfinished: true, ..none() }, none();
    a_publication_of_any_epoch_is_found: none(), Defects { published_ignores_epoch: true, ..none() };
    a_mark_in_the_same_epoch_is_found: none(), Defects { mark_keeps_epoch: true, ..none() };
    a_release_in_the_same_epoch_is_found: none(), Defects { release_keeps_epoch: true, ..none() };
    a_shard_that_lets_anything_be_lost_is_found: none(), Defects { anything_may_be_lost: true, ..none() };
    another_version_in_the_same_epoch_is_found: none(), Defects { other_version_keeps_epoch: true, ..none() };
    another_version_of_a_resident_file_is_found: none(), Defects { other_version_of_resident: true, ..none() };
}
