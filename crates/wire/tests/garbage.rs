//! Truncations, bit flips, random and mutated input: no decoder panics, and no forged frame is accepted. `fuzz/` uses
//! the same entry point.

use std::time::{Duration, Instant};

use forebay_types::{BackingId, Caller, Code, Ino, NodeId, Request};
use forebay_wire::{exercise, DataLocation, Frames, Hello, Initiator, Kind, Memory, Message, Secret};

/// A stream of numbers (splitmix64, Steele et al. 2014), reproducible from its seed.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// Inputs of `exercise`: a byte that selects the decoder, then a body, or a frame whose MAC `exercise` replaces.
fn corpus() -> Vec<Vec<u8>> {
    let stripe = BackingId { target: 1 << 16, ino: Ino(7), number: 1, stripe: 3 };
    let bodies = [
        Message::Ask(Caller { uid: 1, gid: 2 }, Request::Lookup { parent: Ino::ROOT, name: b"name" }),
        Message::Ask(
            Caller { uid: 1, gid: 2 },
            Request::SetXattr { ino: Ino(1), name: b"user.a", value: b"value", flags: 1 },
        ),
        Message::Answer(Err(Code::NoSpace.into())),
        Message::ReadStripe {
            id: stripe,
            offset: 5,
            bytes: 6,
            to: DataLocation::Remote(Memory { address: 7, key: 8 }),
        },
        Message::WriteStripe {
            id: stripe,
            append: false,
            offset: 5,
            bytes: 4,
            from: DataLocation::Inline(b"data"),
        },
        Message::WriteStripe {
            id: stripe,
            append: false,
            offset: 5,
            bytes: 4,
            from: DataLocation::Eager {
                memory: Memory { address: 7, key: 8 },
                grant: 9,
                buffer: 10,
                generation: 11,
            },
        },
        Message::TakeEagerBuffers { grant: 9 },
        Message::GrantEagerBuffers { memory: Memory { address: 7, key: 8 }, buffers: 3, bytes: 4 },
        Message::Alive { echo_us: 1, clock_us: 2 },
        Message::Goodbye { detail: b"down" },
        Message::Failure { code: Code::Io, detail: b"why" },
    ];
    let mut all = Vec::new();
    for message in bodies {
        let mut body = Vec::new();
        message.encode_to(&mut body).unwrap();
        let choice = Kind::ALL.iter().position(|k| *k == message.kind()).unwrap() as u8;
        // As a body, and as a frame of the session that `exercise` opens. That session does not check link and counter.
        let mut frame = vec![choice];
        frame.extend(b"FBAY\x01\x00");
        frame.extend([message.kind() as u8, 0]);
        frame.extend((body.len() as u32).to_le_bytes());
        frame.extend([0; 44]);
        frame.extend(&body);
        body.insert(0, choice);
        // As a bundle: twice, with invalid MACs.
        let whole = [&frame[1..], &[0; 32]].concat();
        let bundle = [&[choice], &whole[..], &whole[..]].concat();
        assert_eq!(Frames::of(&bundle[1..]).filter(Result::is_ok).count(), 2);
        all.extend([body, frame, bundle]);
    }
    let secret = Secret::new(&(1..33).collect::<Vec<u8>>()).unwrap();
    let me = Hello {
        protocols: (1, 1),
        pool: [9; 16],
        node: NodeId(5),
        incarnation: 5,
        link: 5,
        capacity_bytes: 5,
        clock_us: 5,
        nonce: [5; 32],
        address: b"somewhere".to_vec(),
    };
    let hello = Initiator::start(&secret, me).unwrap();
    let mut frame = vec![0];
    frame.extend(&hello.frame()[..hello.frame().len() - 32]);
    all.push(frame);
    all
}

#[test]
fn every_truncation_and_every_bit_flip_of_the_corpus_is_survived() {
    for good in corpus() {
        for end in 0..=good.len() {
            exercise(&good[..end]);
        }
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[at] ^= 1 << bit;
                exercise(&bad);
            }
        }
    }
}

#[test]
fn random_and_mutated_input_for_two_seconds_is_survived() {
    let seed = std::env::var("FOREBAY_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(20);
    let (mut numbers, corpus, start) = (Numbers(seed), corpus(), Instant::now());
    let mut rounds = 0u64;
    while start.elapsed() < Duration::from_secs(2) {
        let mut input = corpus[numbers.below(corpus.len())].clone();
        match numbers.below(4) {
            0 => {
                let n = numbers.below(300);
                input = (0..n).map(|_| numbers.next() as u8).collect();
            }
            1 => {
                let other = &corpus[numbers.below(corpus.len())];
                let (cut, from) = (numbers.below(input.len()), numbers.below(other.len()));
                input.truncate(cut);
                input.extend(&other[from..]);
            }
            _ => {
                for _ in 0..1 + numbers.below(6) {
                    let at = numbers.below(input.len());
                    match numbers.below(4) {
                        0 => input[at] = numbers.next() as u8,
                        1 => input[at] = [0, 1, 0x7f, 0x80, 0xff][numbers.below(5)],
                        2 => input.insert(at, numbers.next() as u8),
                        _ => drop(input.remove(at)),
                    }
                    if input.is_empty() {
                        break;
                    }
                }
            }
        }
        exercise(&input);
        rounds += 1;
    }
    println!("{rounds} inputs, seed {seed}");
    assert!(rounds > 100);
}

/// The canary test: a valid body reaches the decoders by the same entry point.
#[test]
fn exercise_reaches_the_decoders() {
    let reached = corpus().into_iter().filter(|input| {
        let kind = Kind::ALL[input[0] as usize % Kind::ALL.len()];
        Message::decode(kind, &input[1..]).is_ok()
    });
    assert!(reached.count() >= 11);
}
