//! The commands that mount and unmount, with good input and bad.

mod common;

use common::{is_mounted, wait_for, Place};
use std::fs;

#[test]
fn mount_shows_the_pool_and_umount_takes_it_away() {
    let Some(place) = Place::new() else { return };
    place.done(&["mount", place.mnt().to_str().unwrap()]);
    fs::write(place.file("a"), "x").unwrap();
    assert_eq!(place.preloaded("cat /forebay/a"), "x");
    let mount = &place.status()["mounts"][0];
    assert_eq!((&mount["state"], &mount["data"]), (&"mounted".into(), &"passthrough".into()), "{mount:#}");
    place.done(&["umount"]);
    assert!(!is_mounted(&place.mnt()));
    assert_eq!(place.status()["mounts"].as_array().map(Vec::len), Some(0));
    place.done(&["mount", place.mnt().to_str().unwrap()]);
    assert_eq!(fs::read(place.file("a")).unwrap(), b"x");
}

#[test]
fn mount_on_bad_places_says_what_to_do() {
    let Some(place) = Place::new() else { return };
    let at = |name: &str| place.dir.join(name).to_str().unwrap().to_owned();
    assert!(place.refused(&["mount", &at("missing")]).contains("mkdir -p"));
    fs::create_dir(place.dir.join("full")).unwrap();
    fs::write(place.dir.join("full/file"), "").unwrap();
    assert!(place.refused(&["mount", &at("full")]).contains("empty directory"));
    assert!(place.refused(&["mount", &at("full/file")]).contains("empty directory"));
    place.done(&["mount", &at("mnt")]);
    assert!(place.refused(&["mount", &at("mnt")]).contains("is mounted on"));
    assert!(place.refused(&["umount", &at("full")]).contains("not mounted there"));
    assert!(is_mounted(&place.mnt()), "still there");
}

#[test]
fn mount_over_another_pools_is_refused() {
    let Some(place) = Place::mounted() else { return };
    let Some(other) = Place::new() else { return };
    let words = other.refused(&["mount", place.mnt().to_str().unwrap()]);
    assert!(words.contains("is mounted there"), "{words}");
    assert!(is_mounted(&place.mnt()));
}

#[test]
fn umount_and_down_of_a_mount_in_use_name_who_uses_it() {
    let Some(place) = Place::mounted() else { return };
    let held = fs::File::create(place.file("held")).unwrap();
    let me = std::process::id().to_string();
    for words in [place.refused(&["umount"]), place.refused(&["down"])] {
        assert!(words.contains("in use") && words.contains(&me), "{words}");
    }
    place.done(&["umount", "--lazy"]);
    assert!(!is_mounted(&place.mnt()));
    drop(held);
    place.done(&["down"]);
}

#[test]
fn down_unmounts() {
    let Some(place) = Place::mounted() else { return };
    place.done(&["down"]);
    assert!(!is_mounted(&place.mnt()));
}

#[test]
fn up_with_a_mount_that_cannot_be_leaves_no_pool() {
    let Some(place) = Place::new() else { return };
    place.done(&["down"]);
    let pool = place.pool();
    let missing = place.dir.join("missing");
    let up = ["up", "--path", pool.to_str().unwrap(), "--mount"];
    place.refused(&[&up[..], &[missing.to_str().unwrap()]].concat());
    place.refused(&["status"]);
    place.done(&[&up[..], &[place.mnt().to_str().unwrap()]].concat());
    assert!(is_mounted(&place.mnt()));
}

#[test]
fn umount_by_hand_ends_the_mounts_process() {
    let Some(place) = Place::mounted() else { return };
    assert!(std::process::Command::new("umount").arg(place.mnt()).status().unwrap().success());
    wait_for("the supervisor notices", || {
        place.status()["mounts"].as_array().is_some_and(|mounts| mounts.is_empty())
    });
    place.done(&["mount", place.mnt().to_str().unwrap()]);
}
