//! IOR's options as a pattern.

use forebay_types::{Code, Error, Result};

use crate::pattern::{Access, Pattern};

/// What a command line of IOR does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IorRun {
    /// One call: a transfer of each rank.
    pub pattern: Pattern,
    /// How many of these calls follow each other.
    pub calls: u64,
    /// The run writes (`-w`; the default).
    pub writes: bool,
    /// The run reads (`-r`; the default).
    pub reads: bool,
    /// Calls are collective (`-c`).
    pub is_collective: bool,
    /// A file for each rank (`-F`).
    pub file_per_rank: bool,
}

fn refuse(why: impl std::fmt::Display) -> Error {
    Error::new(Code::Invalid, "cannot use these options of IOR")
        .why(why)
        .cure("known are -a API, -b SIZE, -t SIZE, -s N, -c, -z, -F, -w, -r; others are for IOR alone")
}

/// A size as IOR writes it: 4k, 1m, 2g, 1t, in powers of 1024.
fn size(text: &str) -> Option<u64> {
    let (number, shift) = match text.as_bytes().last()?.to_ascii_lowercase() {
        b'k' => (&text[..text.len() - 1], 10),
        b'm' => (&text[..text.len() - 1], 20),
        b'g' => (&text[..text.len() - 1], 30),
        b't' => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift).filter(|bytes| *bytes > 0)
}

/// Options without an argument that change nothing here.
const IGNORED: &str = "BCegHkKlmnoQRuvVWxyYZ";
/// Options with an argument that change nothing here.
const IGNORED_WITH_ARGUMENT: &str = "AdDfGhijJNOpqTUX";

/// Reads the options of an IOR run by `ranks` ranks, of which there is at least one. In a shared file each segment has a
/// block of every rank. With random offsets (`-z`) transfers lie anywhere.
pub fn parse(text: &str, ranks: u64) -> Result<IorRun> {
    let mut words = text.split_whitespace();
    let (mut block, mut transfer, mut segments) = (1u64 << 20, 1u64 << 18, 1u64);
    let (mut writes, mut reads, mut collective, mut random, mut per_rank) =
        (false, false, false, false, false);
    while let Some(word) = words.next() {
        if word.rsplit('/').next() == Some("ior") {
            continue;
        }
        let mut letters = word
            .strip_prefix('-')
            .filter(|rest| !rest.is_empty())
            .ok_or_else(|| refuse(format!("`{word}`")))?;
        while let Some(letter) = letters.chars().next() {
            letters = &letters[letter.len_utf8()..];
            match letter {
                'c' => collective = true,
                'z' => random = true,
                'F' => per_rank = true,
                'w' => writes = true,
                'r' => reads = true,
                _ if IGNORED.contains(letter) => {}
                'a' | 'b' | 't' | 's' | 'o' => {}
                _ if IGNORED_WITH_ARGUMENT.contains(letter) => {}
                _ => return Err(refuse(format!("-{letter} is not known"))),
            }
            if !"abtso".contains(letter) && !IGNORED_WITH_ARGUMENT.contains(letter) {
                continue;
            }
            let argument = std::mem::take(&mut letters);
            let argument = match argument {
                "" => words.next().ok_or_else(|| refuse(format!("-{letter} has no argument")))?,
                attached => attached.trim_start_matches('='),
            };
            let number = || size(argument).ok_or_else(|| refuse(format!("-{letter} {argument} is no size")));
            match letter {
                'b' => block = number()?,
                't' => transfer = number()?,
                's' => segments = number()?,
                _ => {}
            }
        }
    }
    if transfer > block || block % transfer != 0 {
        return Err(refuse(format!(
            "a block of {block} bytes is not a multiple of a transfer of {transfer}"
        )));
    }
    let too_large = || refuse("the sizes are too large");
    let bytes = block.checked_mul(segments).ok_or_else(too_large)?;
    // The transfers of a call lie a block apart, and the next call's follow each of them.
    let gap_bytes = block.checked_mul(ranks).ok_or_else(too_large)? - transfer;
    let access = match (random, per_rank || ranks == 1) {
        (true, _) => Access::Random,
        (false, true) => Access::Sequential,
        (false, false) => Access::Strided,
    };
    let pattern = Pattern {
        ranks,
        bytes: transfer,
        run_bytes: transfer,
        gap_bytes: if access == Access::Strided { gap_bytes } else { 0 },
        access,
        ..Pattern::default()
    };
    // IOR does both if neither is requested.
    let neither = !writes && !reads;
    Ok(IorRun {
        pattern,
        calls: bytes / transfer,
        writes: writes || neither,
        reads: reads || neither,
        is_collective: collective,
        file_per_rank: per_rank,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_of_a_shared_file_lie_a_block_apart() {
        let run = parse("-a MPIIO -b 16m -t 64k -s 4 -c", 4).unwrap();
        let p = run.pattern;
        assert!(run.is_collective && run.writes && run.reads && !run.file_per_rank);
        assert_eq!((p.bytes, p.run_bytes, run.calls, p.access), (64 << 10, 64 << 10, 1024, Access::Strided));
        assert_eq!(p.density(), 64.0 / (16.0 * 1024.0), "a transfer of each block");
        let whole = parse("-b 64k -t 64k -s 4 -c", 4).unwrap();
        assert_eq!((whole.pattern.density(), whole.calls), (1.0, 4));
    }

    #[test]
    fn attached_arguments_and_a_program_name_are_understood() {
        let run = parse("/opt/bin/ior -a=MPIIO -b1m -t4k -wz -o /forebay/x", 2).unwrap();
        assert!(run.writes && !run.reads && !run.is_collective);
        assert_eq!((run.pattern.run_bytes, run.pattern.access), (4096, Access::Random));
        let own = parse("-F -b 1g -s 3 -r", 8).unwrap();
        assert!(own.file_per_rank && own.pattern.access == Access::Sequential && own.pattern.gap_bytes == 0);
    }

    #[test]
    fn options_that_make_no_sense_are_refused_with_the_option() {
        for (line, said) in [
            ("-b 10k -t 4k", "multiple"),
            ("-b", "-b has no argument"),
            ("-b fast", "-b fast"),
            ("-b 0", "-b 0"),
            ("-L", "-L is not known"),
            ("-s 9999999t -b 1t", "too large"),
            ("file", "`file`"),
        ] {
            let error = parse(line, 2).unwrap_err().to_string();
            assert!(error.contains(said), "{line}: {error}");
        }
    }
}
