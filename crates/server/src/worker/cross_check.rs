//! `forebay fsck` over several nodes: compares entries with the inodes that they lead to on other nodes.
//!
//! This node sends these questions:
//! - To each other node: which of its entries lead here? Every link that is counted here, and every directory here
//!   whose parent is there, must be found exactly once, and nothing else.
//! - To the birth node of each inode that an entry here leads to: does the inode exist, and does it count the entry?
//! - To nodes with wide directories or their parts: do directory and part name each other?
//!
//! The pool serves requests meanwhile, so a mismatch may be a change in progress. Only what is wrong in each of three
//! passes is reported. A problem that only a certain node's answer can confirm is not dropped by a pass in which that
//! node did not answer. Nodes that did not answer in one of the passes are listed in the report.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::mpsc::Sender;
use std::time::Duration;

use forebay_meta::{ForeignPart, ForeignReferences, Leading};
use forebay_types::{Caller, Code, Ino, NodeId, Reply, Request, Result, TxId};
use serde_json::Value;

/// Passes at most, and the pause between two: longer than a cross-node transaction takes.
const LOOKS: u32 = 3;
const PAUSE: Duration = Duration::from_millis(300);
/// Questions without an answer at one time.
const AHEAD: usize = 16;
/// Problems that the report describes. Further ones are only counted.
const TOLD_MAX: usize = 100;
const NOBODY: Caller = Caller { uid: 0, gid: 0 };

/// A question to another node.
#[derive(Clone, Debug)]
enum Question {
    /// Which entries of a node lead here, from this directory and cookie on?
    LeadsHere(NodeId, Ino, u64),
    /// Is the inode of this local entry there, and does it count the entry?
    IsLed { parent: Ino, name: Vec<u8>, ino: Ino, link: TxId },
    /// Does this part of a local directory exist?
    HasPart { part: Ino, of: Ino },
    /// Does this local part's directory list it, at the place that the part's record has?
    Lists(ForeignPart),
}

/// A check that is in progress.
#[derive(Debug)]
pub(super) struct CrossCheck {
    here: NodeId,
    others: Vec<NodeId>,
    reply: Sender<Result<Value>>,
    report: Value,
    look: u32,
    /// When the next pass starts. None while one is in progress.
    pub(super) next_at: Option<Duration>,
    questions: VecDeque<Question>,
    asked: BTreeMap<u64, Question>,
    next: u64,
    /// Links that are counted here, with how often an entry was found.
    links: BTreeMap<(u64, TxId), u32>,
    /// Directories whose parent is on another node: the parent, and how often an entry was found.
    directories: BTreeMap<u64, (Ino, u32)>,
    /// Problems of this pass.
    found: Problems,
    /// Problems that no pass so far has disproved.
    problems: Option<Problems>,
    /// Nodes that did not answer a question of this pass.
    silent: BTreeSet<NodeId>,
    /// Nodes that did not answer a question of any pass.
    ever_silent: BTreeSet<NodeId>,
}

/// Problems in words, each with the node whose answers confirm or disprove it. None: every node's answers do.
type Problems = BTreeMap<String, Option<NodeId>>;

fn shown(name: &[u8]) -> String {
    String::from_utf8_lossy(name).escape_debug().to_string()
}

impl CrossCheck {
    /// `report`: result of the check of this node alone.
    pub(super) fn new(
        here: NodeId,
        others: Vec<NodeId>,
        report: Value,
        reply: Sender<Result<Value>>,
    ) -> CrossCheck {
        CrossCheck {
            here,
            others,
            reply,
            report,
            look: 0,
            next_at: Some(Duration::ZERO),
            questions: VecDeque::new(),
            asked: BTreeMap::new(),
            next: 0,
            links: BTreeMap::new(),
            directories: BTreeMap::new(),
            found: Problems::new(),
            problems: None,
            silent: BTreeSet::new(),
            ever_silent: BTreeSet::new(),
        }
    }

    /// Starts a pass with the shard's present references to other nodes.
    pub(super) fn begin(&mut self, beyond: ForeignReferences) {
        self.look += 1;
        self.next_at = None;
        self.found.clear();
        self.silent.clear();
        self.links = beyond.links.iter().map(|(ino, link)| ((ino.0, *link), 0)).collect();
        self.directories = beyond.directories.iter().map(|(ino, parent)| (ino.0, (*parent, 0))).collect();
        self.questions = self.others.iter().map(|node| Question::LeadsHere(*node, Ino(0), 0)).collect();
        self.questions.extend(beyond.entries.into_iter().map(|e| Question::IsLed {
            parent: e.parent,
            name: e.name,
            ino: e.ino,
            link: e.link,
        }));
        let parts = beyond.parts_elsewhere.into_iter().map(|(part, of)| Question::HasPart { part, of });
        self.questions.extend(parts);
        self.questions.extend(beyond.parts.into_iter().map(Question::Lists));
    }

    /// The next question: its number, the node, and the encoded request.
    pub(super) fn next_question(&mut self) -> Option<(u64, NodeId, Vec<u8>)> {
        if self.asked.len() >= AHEAD {
            return None;
        }
        let question = self.questions.pop_front()?;
        let (node, request) = match &question {
            Question::LeadsHere(node, parent, cookie) => {
                (*node, Request::LeadsTo { node: self.here, parent: *parent, cookie: *cookie })
            }
            Question::IsLed { parent, ino, link, .. } => {
                (ino.birth_node(), Request::IsLed { ino: *ino, parent: *parent, link: *link })
            }
            Question::HasPart { part, of } => {
                (part.birth_node(), Request::IsLed { ino: *part, parent: *of, link: TxId::NONE })
            }
            Question::Lists(ForeignPart { of, .. }) => (of.birth_node(), Request::PartsOf { ino: *of }),
        };
        let mut message = vec![0; 128];
        let n = request.encode(NOBODY, &mut message).unwrap_or(0);
        message.truncate(n);
        self.next += 1;
        self.asked.insert(self.next, question);
        Some((self.next, node, message))
    }

    /// Handles an answer. True when all questions of the pass are answered.
    pub(super) fn answered(&mut self, number: u64, reply: std::result::Result<Reply<'_>, Code>) -> bool {
        let Some(question) = self.asked.remove(&number) else { return false };
        match (question, reply) {
            (Question::LeadsHere(node, ..), Ok(Reply::Bytes(bytes))) => {
                let mut last = None;
                for leading in Leading::decode_all(bytes).map_while(std::result::Result::ok) {
                    last = Some((leading.parent, leading.cookie));
                    self.leads_here(node, &leading);
                }
                if let Some((parent, cookie)) = last {
                    self.questions.push_front(Question::LeadsHere(node, parent, cookie));
                }
            }
            (Question::IsLed { .. } | Question::HasPart { .. }, Ok(_)) => {}
            (Question::HasPart { part, of }, Err(Code::NotFound)) => {
                let node = part.birth_node();
                self.found.insert(
                    format!("directory {of}: its part {part} on node {node} does not exist"),
                    Some(node),
                );
            }
            (Question::Lists(part), Ok(Reply::Parts(parts))) if parts.as_slice().contains(&part.part) => {
                let ForeignPart { part, of, index, width } = part;
                if parts.as_slice().len() != width || parts.as_slice().get(index) != Some(&part) {
                    let problem =
                        format!("part {part} of directory {of}: has another place in the directory's list");
                    self.found.insert(problem, Some(of.birth_node()));
                }
            }
            (
                Question::Lists(ForeignPart { part, of, .. }),
                Ok(_) | Err(Code::NotFound | Code::NoAttribute),
            ) => {
                let node = of.birth_node();
                self.found.insert(
                    format!("part {part}: directory {of} of node {node} does not list it"),
                    Some(node),
                );
            }
            (Question::IsLed { parent, name, ino, .. }, Err(Code::NotFound)) => {
                let node = ino.birth_node();
                let problem = format!(
                    "directory {parent}: entry \"{}\" leads to inode {ino} of node {node}, which does not exist or \
                     does not count it",
                    shown(&name)
                );
                self.found.insert(problem, Some(node));
            }
            (Question::LeadsHere(node, ..), _) => {
                self.silent.insert(node);
            }
            (
                Question::IsLed { ino, .. }
                | Question::HasPart { part: ino, .. }
                | Question::Lists(ForeignPart { of: ino, .. }),
                _,
            ) => {
                self.silent.insert(ino.birth_node());
            }
        }
        self.asked.is_empty() && self.questions.is_empty()
    }

    fn leads_here(&mut self, node: NodeId, leading: &Leading<'_>) {
        let Leading { parent, ino, link, name, .. } = *leading;
        let count = match link {
            TxId::NONE => match self.directories.get_mut(&ino.0) {
                Some((of, count)) if *of == parent => Some(count),
                _ => None,
            },
            link => self.links.get_mut(&(ino.0, link)),
        };
        let decided_by = match count {
            Some(count @ 0) => {
                *count = 1;
                return;
            }
            // The other entry may be on any node.
            Some(count) => {
                *count += 1;
                None
            }
            None => Some(node),
        };
        let problem = format!(
            "directory {parent} of node {node}: entry \"{}\" leads to inode {ino} of this node, which does not exist, \
             does not count it, or has another entry",
            shown(name)
        );
        self.found.insert(problem, decided_by);
    }

    /// All questions of a pass are answered: sends the report, or schedules another pass. True when the report is sent.
    pub(super) fn conclude(&mut self, now: Duration) -> bool {
        // A node that did not answer may have the missing entries.
        if self.silent.is_empty() {
            for ((ino, link), _) in self.links.iter().filter(|(_, count)| **count == 0) {
                let problem = format!("inode {ino:016x}: counts link {link}, which no entry of any node has");
                self.found.insert(problem, None);
            }
            for (ino, (parent, _)) in self.directories.iter().filter(|(_, (_, count))| *count == 0) {
                let node = parent.birth_node();
                let problem = format!(
                    "directory {ino:016x}: no entry of directory {parent} of node {node} leads to it"
                );
                self.found.insert(problem, None);
            }
        }
        let found = std::mem::take(&mut self.found);
        let problems = match self.problems.take() {
            None => found,
            Some(mut before) => {
                let is_open = |decided_by: &Option<NodeId>| match decided_by {
                    Some(node) => self.silent.contains(node),
                    None => !self.silent.is_empty(),
                };
                before.retain(|problem, decided_by| found.contains_key(problem) || is_open(decided_by));
                before
            }
        };
        self.ever_silent.append(&mut self.silent);
        if !problems.is_empty() && self.look < LOOKS {
            self.problems = Some(problems);
            self.next_at = Some(now + PAUSE);
            return false;
        }
        self.tell(&problems);
        true
    }

    /// Sends the report without the problems found so far.
    pub(super) fn give_up(&mut self) {
        self.ever_silent.append(&mut self.silent);
        self.tell(&Problems::new());
    }

    fn tell(&mut self, problems: &Problems) {
        let mut report = std::mem::take(&mut self.report);
        let count = report["problems_found"].as_u64().unwrap_or(0) + problems.len() as u64;
        if let Some(told) = report["problems"].as_array_mut() {
            let room = TOLD_MAX.saturating_sub(told.len());
            told.extend(problems.keys().take(room).map(|problem| Value::from(problem.as_str())));
        }
        report["problems_found"] = count.into();
        report["clean"] = (count == 0).into();
        report["nodes_silent"] = self.ever_silent.iter().map(|node| node.0).collect::<Vec<u16>>().into();
        let _ = self.reply.send(Ok(report));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_meta::ForeignEntry;
    use std::sync::mpsc;

    const HERE: NodeId = NodeId(1);
    const THERE: NodeId = NodeId(2);

    fn leading(parent: Ino, ino: Ino, link: TxId) -> Vec<u8> {
        let mut bytes = Vec::new();
        for number in [parent.0, 128, ino.0, link.0] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend([1, 0, b'n']);
        bytes
    }

    /// Answers all questions of a pass: `leads` to the first `LeadsHere`; `is_led` to questions about inodes.
    fn look(check: &mut CrossCheck, beyond: ForeignReferences, leads: &[u8], is_led: bool) -> bool {
        check.begin(beyond);
        let mut first = true;
        loop {
            let Some((number, node, message)) = check.next_question() else { panic!("no question is left") };
            assert_eq!(node, THERE);
            let reply = match Request::decode(&message).unwrap().1 {
                Request::LeadsTo { .. } => {
                    Ok(Reply::Bytes(if std::mem::take(&mut first) { leads } else { &[] }))
                }
                _ if is_led => Ok(Reply::Done),
                _ => Err(Code::NotFound),
            };
            if check.answered(number, reply) {
                return check.conclude(Duration::ZERO);
            }
        }
    }

    #[test]
    fn check_tells_only_what_is_wrong_at_every_look() {
        let (file, dir) = (Ino::new(HERE, 5), Ino::new(HERE, 6));
        let (parent, link) = (Ino::new(THERE, 9), TxId::new(THERE, 3));
        let entry = ForeignEntry { parent: dir, name: b"e".to_vec(), ino: parent, link: TxId::NONE };
        let beyond = || ForeignReferences {
            links: vec![(file, link)],
            directories: vec![(dir, parent)],
            entries: vec![entry.clone()],
            ..ForeignReferences::default()
        };
        let both = [leading(parent, file, link), leading(parent, dir, TxId::NONE)].concat();
        let run = |looks: &[(&[u8], bool)]| {
            let (send, receive) = mpsc::channel();
            let report = serde_json::json!({ "problems": [], "problems_found": 0, "clean": true });
            let mut check = CrossCheck::new(HERE, vec![THERE], report, send);
            let mut looks = looks.iter();
            for (leads, is_led) in looks.by_ref() {
                if look(&mut check, beyond(), leads, *is_led) {
                    break;
                }
            }
            assert!(looks.next().is_none(), "it was over before");
            receive.try_recv().unwrap().unwrap()
        };
        assert_eq!(run(&[(&both, true)])["clean"], true);
        // Wrong in one pass, and right in the next.
        assert_eq!(run(&[(&[][..], true), (&both, true)])["clean"], true);
        let wrong = run(&[(&[][..], false); 3]);
        assert_eq!(wrong["problems_found"], 3, "{wrong}");
        // An entry that is not counted, and a second one to a directory.
        let more = [both.clone(), leading(parent, dir, TxId::NONE), leading(parent, file, TxId(1))].concat();
        let wrong = run(&[(more.as_slice(), true); 3]);
        assert_eq!(wrong["problems_found"], 2, "{wrong}");
    }

    #[test]
    fn check_compares_the_place_of_a_part_with_its_directory_s_list() {
        let (part, of) = (Ino::part(HERE, 5), Ino::new(THERE, 9));
        let parts = forebay_types::Parts::new(of, &[Ino::part(THERE, 9), part]).unwrap();
        for (index, width, problems) in [(1, 2, 0), (0, 2, 1), (1, 3, 1), (7, 2, 1)] {
            let (send, receive) = mpsc::channel();
            let report = serde_json::json!({ "problems": [], "problems_found": 0, "clean": true });
            let mut check = CrossCheck::new(HERE, vec![THERE], report, send);
            for _ in 0..LOOKS {
                let part = ForeignPart { part, of, index, width };
                check.begin(ForeignReferences { parts: vec![part], ..ForeignReferences::default() });
                while let Some((number, _, message)) = check.next_question() {
                    let is_parts_of = matches!(Request::decode(&message).unwrap().1, Request::PartsOf { .. });
                    check.answered(
                        number,
                        Ok(if is_parts_of { Reply::Parts(parts) } else { Reply::Bytes(&[]) }),
                    );
                }
                if check.conclude(Duration::ZERO) {
                    break;
                }
            }
            let report = receive.try_recv().unwrap().unwrap();
            assert_eq!(report["problems_found"], problems, "{report}");
        }
    }

    #[test]
    fn check_keeps_the_problems_that_a_silent_node_could_confirm() {
        let (file, link) = (Ino::new(HERE, 5), TxId::new(THERE, 3));
        let entry = ForeignEntry {
            parent: Ino::new(HERE, 6),
            name: b"e".to_vec(),
            ino: Ino::new(THERE, 9),
            link: TxId::NONE,
        };
        let beyond = || ForeignReferences {
            links: vec![(file, link)],
            entries: vec![entry.clone()],
            ..ForeignReferences::default()
        };
        let right = leading(Ino::new(THERE, 8), file, link);
        // What each pass finds: None is a pass in which the other node does not answer.
        let run = |passes: [Option<bool>; 3]| {
            let (send, receive) = mpsc::channel();
            let report = serde_json::json!({ "problems": [], "problems_found": 0, "clean": true });
            let mut check = CrossCheck::new(HERE, vec![THERE], report, send);
            for is_right in passes {
                let is_over = match is_right {
                    Some(true) => look(&mut check, beyond(), &right, true),
                    Some(false) => look(&mut check, beyond(), &[], false),
                    None => {
                        check.begin(beyond());
                        while let Some((number, ..)) = check.next_question() {
                            check.answered(number, Err(Code::TimedOut));
                        }
                        check.conclude(Duration::ZERO)
                    }
                };
                if is_over {
                    break;
                }
            }
            receive.try_recv().unwrap().unwrap()
        };
        for passes in
            [[Some(false), None, Some(false)], [Some(false), Some(false), None], [Some(false), None, None]]
        {
            let report = run(passes);
            assert_eq!(
                (&report["problems_found"], &report["clean"]),
                (&2.into(), &false.into()),
                "{passes:?}: {report}"
            );
            assert_eq!(report["nodes_silent"], serde_json::json!([THERE.0]));
        }
        assert_eq!(run([Some(false), None, Some(true)])["clean"], true, "an answer disproves them");
    }
}
