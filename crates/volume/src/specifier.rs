//! Specifiers: `[local[.link]/]node[.link]:volume`, several of them joined by `+`.
//!
//! The form is that of the systems that pool memory over special hardware. `local` is the node that the access begins at,
//! `node` the one that has the volume, a link the number of a network port. This version has one link for each node, 0,
//! and refuses others in words. A specifier without a node names a volume of the pool wherever it is. Several specifiers
//! mean one volume that is striped over theirs, in this order.
//!
//! A node is written by its number in the pool or by its name in the pool file; this node also by the name of the host. Node
//! names hold dots, so a link is only what follows the last dot and has nothing but digits; a name that ends like that needs
//! the link: `10.0.0.7.0:v`.

use std::fmt;

use forebay_types::check_volume_name;
use forebay_types::Code;

/// The most specifiers that are joined.
const JOINED_MAX: usize = 64;

/// A node and its link, as written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// The node's number or name.
    pub node: String,
    /// The link; 0 unless one was written.
    pub link: u32,
}

/// One specifier.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Specifier {
    /// The node at which the access begins, if it was written.
    pub local: Option<Place>,
    /// The node that has the volume, if it was written.
    pub node: Option<Place>,
    /// The name of the volume.
    pub volume: Vec<u8>,
}

/// What is wrong with a specifier, and with which part of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    /// Which of the joined specifiers, from 1 on; 0 for all together.
    pub index: usize,
    /// The wrong part, as it was written.
    pub part: String,
    /// What is wrong.
    pub why: &'static str,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.index {
            0 => write!(f, "`{}`: {}", self.part, self.why),
            n => write!(f, "specifier {n}, `{}`: {}", self.part, self.why),
        }
    }
}

impl Specifier {
    /// Parses one specifier, or several that are joined by `+`.
    pub fn parse_all(text: &[u8]) -> Result<Vec<Specifier>, Problem> {
        let shown = || shown(text);
        if text.is_empty() {
            return Err(Problem { index: 0, part: shown(), why: "a specifier names a volume" });
        }
        let parts: Vec<&[u8]> = text.split(|b| *b == b'+').collect();
        if parts.len() > JOINED_MAX {
            return Err(Problem { index: 0, part: shown(), why: "at most 64 volumes can be joined" });
        }
        let parse = |(i, part): (usize, &&[u8])| {
            Specifier::parse(part).map_err(|(part, why)| Problem { index: i + 1, part, why })
        };
        parts.iter().enumerate().map(parse).collect()
    }

    fn parse(text: &[u8]) -> Result<Specifier, (String, &'static str)> {
        let Some(colon) = text.iter().rposition(|b| *b == b':') else {
            return Ok(Specifier { local: None, node: None, volume: name(text)? });
        };
        let (nodes, volume) = (&text[..colon], &text[colon + 1..]);
        let volume = name(volume)?;
        let nodes =
            std::str::from_utf8(nodes).map_err(|_| (shown(nodes), "a node's name is text in UTF-8"))?;
        let (local, node) = match nodes.split_once('/') {
            Some((local, node)) => (Some(Place::parse(local)?), node),
            None => (None, nodes),
        };
        Ok(Specifier { local, node: Some(Place::parse(node)?), volume })
    }
}

impl Place {
    fn parse(text: &str) -> Result<Place, (String, &'static str)> {
        let failed = |why| Err((text.to_owned(), why));
        let (node, link) = match text.rsplit_once('.') {
            Some((node, link)) if !link.is_empty() && link.bytes().all(|b| b.is_ascii_digit()) => {
                (node, link)
            }
            _ => (text, "0"),
        };
        if node.is_empty() {
            return failed("a node is missing here: write its number or name");
        }
        if node.contains(['/', ':']) || node.bytes().any(|b| b < b' ') {
            return failed("this is no node: the form is [local[.link]/]node[.link]:volume");
        }
        match link.parse() {
            Ok(0) => Ok(Place { node: node.to_owned(), link: 0 }),
            _ => failed("a node has one link in this version, 0"),
        }
    }
}

fn name(bytes: &[u8]) -> Result<Vec<u8>, (String, &'static str)> {
    match check_volume_name(bytes) {
        Ok(()) => Ok(bytes.to_vec()),
        Err(Code::NotFound) => Err((shown(bytes), "the name of the volume is missing")),
        Err(Code::NameTooLong) => Err((shown(bytes), "the name of a volume has at most 255 bytes")),
        Err(_) => Err((shown(bytes), "the name of a volume has no `/`, `:`, `+` and no control characters")),
    }
}

fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).escape_debug().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(node: &str) -> Option<Place> {
        Some(Place { node: node.into(), link: 0 })
    }

    #[test]
    fn parts_are_found_in_every_form() {
        for (text, local, node, volume) in [
            ("v", None, None, "v"),
            ("v.1.2", None, None, "v.1.2"),
            ("2:v", None, place("2"), "v"),
            ("n01.cluster:v", None, place("n01.cluster"), "v"),
            ("n01.0:v", None, place("n01"), "v"),
            ("10.0.0.7.0:v", None, place("10.0.0.7"), "v"),
            ("n02/n01:v x", place("n02"), place("n01"), "v x"),
            ("n02.0/n01.0:v", place("n02"), place("n01"), "v"),
        ] {
            let parsed = Specifier::parse_all(text.as_bytes()).unwrap();
            let expected = Specifier { local, node, volume: volume.into() };
            assert_eq!(parsed, [expected], "{text}");
        }
    }

    #[test]
    fn joined_specifiers_keep_their_order() {
        let all = Specifier::parse_all(b"b+2:a+b").unwrap();
        let names: Vec<&[u8]> = all.iter().map(|s| s.volume.as_slice()).collect();
        assert_eq!(names, [b"b".as_slice(), b"a", b"b"]);
    }

    #[test]
    fn problem_names_the_part_that_is_wrong() {
        for (text, index, part, why) in [
            ("", 0, "", "names a volume"),
            ("a+", 2, "", "missing"),
            ("+a", 1, "", "missing"),
            ("a+1:", 2, "", "name of the volume is missing"),
            ("a+:b", 2, "", "node is missing"),
            ("/1:b", 1, "", "node is missing"),
            ("1/:b", 1, "", "node is missing"),
            ("a/b", 1, "a/b", "no `/`"),
            ("1/2/3:b", 1, "2/3", "no node"),
            ("1:2:b", 1, "1:2", "no node"),
            ("n.1:b", 1, "n.1", "one link"),
            ("n.99999999999:b", 1, "n.99999999999", "one link"),
            ("10.0.0.7:b", 1, "10.0.0.7", "one link"),
            ("x.3/1:b", 1, "x.3", "one link"),
            ("1:a\nb", 1, "a\\nb", "control"),
            ("..", 1, "..", "no `/`"),
        ] {
            let problem = Specifier::parse_all(text.as_bytes()).unwrap_err();
            assert_eq!((problem.index, problem.part.as_str()), (index, part), "{text:?}: {problem}");
            assert!(problem.why.contains(why), "{text:?}: {problem}");
        }
        let long = "x".repeat(256);
        assert!(Specifier::parse_all(long.as_bytes()).unwrap_err().why.contains("255"));
        assert!(Specifier::parse_all("a+".repeat(70).as_bytes()).unwrap_err().why.contains("64"));
        assert!(Specifier::parse_all(b"\xff:v").unwrap_err().why.contains("UTF-8"));
        assert_eq!(Specifier::parse_all(b"\xff").unwrap()[0].volume, b"\xff", "a volume's name is any bytes");
    }

    proptest::proptest! {
        #[test]
        fn parse_of_any_bytes_never_panics(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..80)) {
            let _ = Specifier::parse_all(&bytes);
        }
    }
}
