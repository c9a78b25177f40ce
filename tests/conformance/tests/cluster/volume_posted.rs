//! Puts and gets of a piece on another node that are under way several at a time, while workers are killed, and when the
//! link is cut. Each ends, and no byte is lost of those that ended well.

use std::time::Duration;

use forebay_client::{call_clock, Pool, Role};
use forebay_types::Code;
use forebay_volume::{Access, Striped, UnderWay};

use crate::nodes::{until, Cluster};
use crate::volume_access::{persistently, Random};
use crate::volumes::{succeeds, volume};

const MIB: usize = 1 << 20;
/// Calls at a time. Each has a range of the volume, and memory, for itself.
const CALLS: usize = 8;

/// One of the calls that are under way, and what its range of the volume has.
struct Call {
    at: u64,
    memory: Vec<u8>,
    expected: Vec<u8>,
    under_way: Option<(bool, Box<dyn UnderWay>)>,
    /// How many were posted.
    posted: usize,
}

impl Call {
    fn access(&mut self) -> Access {
        Access { offset: self.at, memory: self.memory.as_mut_ptr(), bytes: self.memory.len() }
    }

    fn execute(&mut self, v: &Striped, puts: bool) -> Result<(), Code> {
        match puts {
            true => v.put_bytes(self.at, &self.memory),
            false => v.get_bytes(self.at, &mut self.memory),
        }
    }

    /// Begins a put of other bytes, or a get.
    fn begin(&mut self, v: &Striped, puts: bool, random: &mut Random) {
        if puts {
            let value = random.below(255) as u8;
            self.memory.iter_mut().enumerate().for_each(|(i, byte)| *byte = value.wrapping_add(i as u8));
        } else {
            self.memory.fill(0xee);
        }
        let access = self.access();
        // SAFETY: the memory is not touched until the end.
        self.under_way = unsafe { v.begin(&access, puts) }.map(|under_way| (puts, under_way));
        self.posted += usize::from(self.under_way.is_some());
        if self.under_way.is_none() {
            // A buffer that was left, or a daemon that starts.
            persistently(|| self.execute(v, puts));
            self.has_ended(puts);
        }
    }

    fn has_ended(&mut self, puts: bool) {
        match puts {
            true => self.expected.copy_from_slice(&self.memory),
            false => assert!(self.memory == self.expected, "at {}", self.at),
        }
    }

    /// Ends what is under way, if it is answered or lost.
    fn end(&mut self, v: &Striped, since_ns: u64) {
        let is_over =
            self.under_way.as_ref().is_some_and(|(_, one)| one.is_answered() || one.is_lost(since_ns));
        let Some((puts, under_way)) = self.under_way.take_if(|_| is_over) else { return };
        match under_way.finish() {
            Ok(true) => {}
            // Refused, or in doubt.
            Ok(false) | Err(Code::Io) => persistently(|| self.execute(v, puts)),
            Err(code) => panic!("{code}"),
        }
        self.has_ended(puts);
    }
}

fn calls() -> Vec<Call> {
    let call = |i: usize| {
        let bytes = MIB - i * 60_001;
        let memory = vec![0; bytes];
        Call { at: (i * MIB) as u64, expected: memory.clone(), memory, under_way: None, posted: 0 }
    };
    (0..CALLS).map(call).collect()
}

#[test]
fn puts_and_gets_under_way_survive_killed_workers() {
    let c = Cluster::up("posted-kills", 2);
    succeeds(volume(&c, 1, &["create", "v", "--size", "8MiB", "--on", "n2"]));
    let pool = Pool::attach_as(&c.pool(1), Role::Tool).unwrap();
    let v = pool.volume_open(b"v", true).unwrap();
    let (mut all, mut random) = (calls(), Random(11));
    let mut kills = [1, 2, 2, 1, 2, 1].into_iter();
    // Some rounds between two kills.
    for round in 0..180 {
        if round % 30 == 15 {
            let node = kills.next().unwrap();
            until("a worker", || c.status(node)["pids"]["worker"].as_u64());
            c.kill_worker(node);
        }
        for call in &mut all {
            call.begin(&v, random.below(2) == 0, &mut random);
        }
        let since = call_clock();
        while all.iter().any(|call| call.under_way.is_some()) {
            let first = all.iter().find_map(|call| call.under_way.as_ref());
            let sleeper = first.map(|(_, one)| one.sleeper()).unwrap();
            if sleeper.prepare() {
                sleeper.sleep(Duration::from_millis(2));
            }
            all.iter_mut().rev().for_each(|call| call.end(&v, since));
        }
    }
    let posted: usize = all.iter().map(|call| call.posted).sum();
    assert!(posted > 180 * CALLS / 2, "{posted} were posted");
    drop(v);
    let v = pool.volume_open(b"v", false).unwrap();
    for call in &mut all {
        call.memory.fill(0);
        call.execute(&v, false).unwrap();
        call.has_ended(false);
    }
    drop(v);
    c.check();
}

#[test]
fn puts_and_gets_under_way_end_with_an_error_when_the_link_is_cut() {
    let c = Cluster::up("posted-cut", 2);
    if !c.bed.is_apart() {
        return println!("skipped: links cannot be cut here");
    }
    succeeds(volume(&c, 1, &["create", "v", "--size", "8MiB", "--on", "n2"]));
    let pool = Pool::attach_as(&c.pool(1), Role::Tool).unwrap();
    let v = pool.volume_open(b"v", true).unwrap();
    let mut all = calls();
    let mut random = Random(12);
    assert!(c.bed.set_link(2, false));
    for (i, call) in all.iter_mut().enumerate() {
        let access = call.access();
        // SAFETY: the memory is not touched until the end.
        call.under_way = unsafe { v.begin(&access, i % 2 == 0) }.map(|one| (i % 2 == 0, one));
        assert!(call.under_way.is_some());
    }
    for call in &mut all {
        let (_, under_way) = call.under_way.take().unwrap();
        until("an answer", || under_way.is_answered().then_some(()));
        // It is in doubt, or nothing was sent.
        assert!(!matches!(under_way.finish(), Ok(true)));
    }
    assert!(c.bed.set_link(2, true));
    persistently(|| v.put_bytes(0, &[0; 8 * MIB]));
    for puts in [true, false] {
        for call in &mut all {
            call.begin(&v, puts, &mut random);
            until("the end", || {
                call.end(&v, call_clock());
                call.under_way.is_none().then_some(())
            });
        }
    }
    drop(v);
    c.check();
}
