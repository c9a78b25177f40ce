//! Who uses a pool together: members, their groups, and what a group does once.
//!
//! A member is one `forebay run`; a group is the runs of one job step on this node (the ranks of one `mpirun`), or one
//! run alone. Within a group a *claim* (a stage-in) is done by the first that asks while others wait, and a *hold* (a
//! stage-out) is done by the last that lets go. A group knows how many members its launcher started here, so that a
//! rank that ends before another begins is not taken for the last.
//!
//! This is a state machine: events in, answers out, the clock given; no I/O. Tests: below.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// How long a group is waited for that is smaller than its launcher said, in milliseconds: ranks of one node start
/// within this time of one another.
pub(crate) const GROUP_GRACE_MS: u64 = 10_000;

/// A member's number: that of its connection.
pub(crate) type MemberId = u64;

/// What a member says when it comes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JoinRequest {
    /// For people: the command that it runs.
    pub label: String,
    /// The group: job, step and launcher, or the run's own name.
    pub group: String,
    /// Members that the launcher starts on this node; 1 when nobody knows.
    pub expected: u32,
    /// What it will hold: the keys of its stage-outs.
    pub holds: Vec<String>,
}

/// What a member is answered.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Answer {
    /// It is a member. The token marks its programs.
    Joined {
        /// 32 hexadecimal digits that nobody else knows.
        token: String,
    },
    /// The claim is this member's to do, and to report.
    Mine,
    /// Somebody of the group has done it.
    Done,
    /// Somebody of the group tried and failed.
    Failed {
        /// Why.
        why: String,
    },
    /// What this member is the last to hold, and so must do.
    Plan {
        /// Keys of the holds.
        keys: Vec<String>,
        /// True when a member of the group failed: ended badly, or vanished.
        any_failed: bool,
    },
    /// What was asked makes no sense now.
    Refused {
        /// Why.
        why: String,
    },
}

#[derive(Debug)]
struct Member {
    label: String,
    group: String,
    token: String,
    holds: BTreeSet<String>,
    /// It asked for its plan, and how its program ended, while the group was not complete.
    waits_for_plan: Option<bool>,
    let_go: bool,
}

#[derive(Debug)]
enum Claim {
    Running { owner: MemberId, waiting: Vec<MemberId> },
    Done,
    Failed(String),
}

#[derive(Debug)]
struct Group {
    joined: u32,
    expected: u32,
    first_join_ms: u64,
    any_failed: bool,
    claims: BTreeMap<String, Claim>,
}

impl Group {
    fn is_complete(&self, now_ms: u64) -> bool {
        self.joined >= self.expected || now_ms >= self.first_join_ms + GROUP_GRACE_MS
    }
}

/// All members of a pool.
#[derive(Debug, Default)]
pub(crate) struct Members {
    members: BTreeMap<MemberId, Member>,
    groups: BTreeMap<String, Group>,
    ever: u64,
}

/// Answers to send, each to its member.
pub(crate) type Answers = Vec<(MemberId, Answer)>;

impl Members {
    /// `id` joins; `token` is what marks its programs.
    pub(crate) fn join(&mut self, id: MemberId, request: JoinRequest, token: String, now_ms: u64) -> Answers {
        if self.members.contains_key(&id) {
            return vec![(id, refused("it joined before"))];
        }
        self.ever += 1;
        let group = self.groups.entry(request.group.clone()).or_insert(Group {
            joined: 0,
            expected: 1,
            first_join_ms: now_ms,
            any_failed: false,
            claims: BTreeMap::new(),
        });
        group.joined += 1;
        group.expected = group.expected.max(request.expected);
        self.members.insert(
            id,
            Member {
                label: request.label,
                group: request.group,
                token: token.clone(),
                holds: request.holds.into_iter().collect(),
                waits_for_plan: None,
                let_go: false,
            },
        );
        let mut answers = vec![(id, Answer::Joined { token })];
        answers.extend(self.tick(now_ms));
        answers
    }

    /// `id` wants to do `key`, or to know that it is done. No answer while another does it.
    pub(crate) fn claim(&mut self, id: MemberId, key: &str) -> Answers {
        let Some(group) = self.group_of(id) else { return vec![(id, refused("it has not joined"))] };
        let answer = match group.claims.get_mut(key) {
            None => {
                group.claims.insert(key.to_owned(), Claim::Running { owner: id, waiting: Vec::new() });
                Answer::Mine
            }
            Some(Claim::Done) => Answer::Done,
            Some(Claim::Failed(why)) => Answer::Failed { why: why.clone() },
            Some(Claim::Running { owner, .. }) if *owner == id => refused("it is doing this already"),
            Some(Claim::Running { waiting, .. }) => {
                waiting.push(id);
                return Vec::new();
            }
        };
        vec![(id, answer)]
    }

    /// `id` has done `key`, or failed to.
    pub(crate) fn finish(&mut self, id: MemberId, key: &str, failure: Option<String>) -> Answers {
        let Some(group) = self.group_of(id) else { return vec![(id, refused("it has not joined"))] };
        match group.claims.get_mut(key) {
            Some(claim @ Claim::Running { .. }) => {
                let Claim::Running { owner, waiting } = &claim else { unreachable!("matched above") };
                if *owner != id {
                    return vec![(id, refused("another does this"))];
                }
                let answer = match &failure {
                    None => Answer::Done,
                    Some(why) => Answer::Failed { why: why.clone() },
                };
                let mut answers: Answers = waiting.iter().map(|&w| (w, answer.clone())).collect();
                *claim = match failure {
                    None => Claim::Done,
                    Some(why) => Claim::Failed(why),
                };
                answers.push((id, Answer::Done));
                answers
            }
            _ => vec![(id, refused("it was not claimed"))],
        }
    }

    /// `id`'s program has ended, well or not, and `id` lets go of all it holds. The answer comes once the group is
    /// complete.
    pub(crate) fn leave_plan(&mut self, id: MemberId, success: bool, now_ms: u64) -> Answers {
        match self.members.get_mut(&id) {
            None => vec![(id, refused("it has not joined"))],
            Some(member) if member.let_go || member.waits_for_plan.is_some() => {
                vec![(id, refused("it asked before"))]
            }
            Some(member) => {
                member.waits_for_plan = Some(success);
                self.tick(now_ms)
            }
        }
    }

    /// `id`'s connection has ended. The token of its programs, unless it left in good order (after its plan).
    pub(crate) fn disconnect(&mut self, id: MemberId, now_ms: u64) -> (Answers, Option<String>) {
        let Some(member) = self.members.remove(&id) else { return (Vec::new(), None) };
        let mut answers = Vec::new();
        if let Some(group) = self.groups.get_mut(&member.group) {
            if !member.let_go {
                group.any_failed = true;
            }
            for claim in group.claims.values_mut() {
                if let Claim::Running { owner, waiting } = claim {
                    waiting.retain(|&w| w != id);
                    if *owner == id {
                        // Who waited longest does it in the place of the one that vanished.
                        if waiting.is_empty() {
                            *owner = 0;
                        } else {
                            *owner = waiting.remove(0);
                            answers.push((*owner, Answer::Mine));
                        }
                    }
                }
            }
            group.claims.retain(|_, c| !matches!(c, Claim::Running { owner: 0, .. }));
        }
        answers.extend(self.tick(now_ms));
        (answers, (!member.let_go).then_some(member.token))
    }

    /// What the clock brings: plans of groups that are complete, groups that are over.
    pub(crate) fn tick(&mut self, now_ms: u64) -> Answers {
        let ready: Vec<(MemberId, bool)> = self
            .members
            .iter()
            .filter(|(_, m)| self.groups.get(&m.group).is_some_and(|g| g.is_complete(now_ms)))
            .filter_map(|(&id, m)| m.waits_for_plan.map(|success| (id, success)))
            .collect();
        let mut answers = Vec::new();
        for (id, success) in ready {
            let Some(member) = self.members.get_mut(&id) else { continue };
            member.waits_for_plan = None;
            member.let_go = true;
            let mine = std::mem::take(&mut member.holds);
            let name = member.group.clone();
            let keys = mine.into_iter().filter(|k| !self.is_held(&name, k)).collect();
            let Some(group) = self.groups.get_mut(&name) else { continue };
            group.any_failed |= !success;
            answers.push((id, Answer::Plan { keys, any_failed: group.any_failed }));
        }
        let members = &self.members;
        self.groups.retain(|name, g| !g.is_complete(now_ms) || members.values().any(|m| m.group == *name));
        answers
    }

    /// When [`Members::tick`] has something to do that no event announces.
    pub(crate) fn next_tick_ms(&self, now_ms: u64) -> Option<u64> {
        self.groups
            .values()
            .filter(|g| !g.is_complete(now_ms))
            .map(|g| g.first_join_ms + GROUP_GRACE_MS)
            .min()
    }

    /// True when members were here, all have gone, and no more of their groups is awaited.
    pub(crate) fn all_gone(&self) -> bool {
        self.ever > 0 && self.members.is_empty() && self.groups.is_empty()
    }

    /// True once a member has been here.
    pub(crate) fn ever_used(&self) -> bool {
        self.ever > 0
    }

    /// Members now, by label.
    pub(crate) fn labels(&self) -> Vec<&str> {
        self.members.values().map(|m| m.label.as_str()).collect()
    }

    /// Members now.
    pub(crate) fn count(&self) -> usize {
        self.members.len()
    }

    fn group_of(&mut self, id: MemberId) -> Option<&mut Group> {
        let name = &self.members.get(&id)?.group;
        self.groups.get_mut(name)
    }

    fn is_held(&self, group: &str, key: &str) -> bool {
        self.members.values().any(|m| m.group == group && m.holds.contains(key))
    }
}

fn refused(why: &str) -> Answer {
    Answer::Refused { why: why.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn join(m: &mut Members, id: MemberId, group: &str, expected: u32, holds: &[&str], now: u64) {
        let request = JoinRequest {
            label: format!("rank {id}"),
            group: group.into(),
            expected,
            holds: holds.iter().map(|s| s.to_string()).collect(),
        };
        let answers = m.join(id, request, format!("token {id}"), now);
        assert_eq!(answers[0], (id, Answer::Joined { token: format!("token {id}") }));
    }

    fn plan(keys: &[&str], any_failed: bool) -> Answer {
        Answer::Plan { keys: keys.iter().map(|s| s.to_string()).collect(), any_failed }
    }

    #[test]
    fn claim_is_done_once_and_the_others_wait_for_it() {
        let mut m = Members::default();
        for id in 1..4 {
            join(&mut m, id, "g", 3, &[], 0);
        }
        assert_eq!(m.claim(2, "in"), [(2, Answer::Mine)]);
        assert_eq!(m.claim(1, "in"), []);
        assert_eq!(m.claim(3, "in"), []);
        assert_eq!(m.claim(3, "other"), [(3, Answer::Mine)]);
        let done = m.finish(2, "in", None);
        assert_eq!(done, [(1, Answer::Done), (3, Answer::Done), (2, Answer::Done)]);
        assert_eq!(m.claim(1, "in"), [(1, Answer::Done)]);
        let failed = Answer::Failed { why: "no such file".into() };
        assert_eq!(m.finish(3, "other", Some("no such file".into())), [(3, Answer::Done)]);
        assert_eq!(m.claim(1, "other"), [(1, failed)]);
    }

    #[test]
    fn claim_of_a_member_that_vanishes_goes_to_the_one_that_waited() {
        let mut m = Members::default();
        for id in 1..4 {
            join(&mut m, id, "g", 3, &[], 0);
        }
        m.claim(1, "in");
        assert_eq!(m.claim(2, "in"), []);
        assert_eq!(m.claim(3, "in"), []);
        let (answers, token) = m.disconnect(1, 1);
        assert_eq!(answers, [(2, Answer::Mine)]);
        assert_eq!(token.as_deref(), Some("token 1"));
        assert_eq!(m.finish(2, "in", None), [(3, Answer::Done), (2, Answer::Done)]);
    }

    #[test]
    fn claim_that_nobody_waits_for_is_free_again_when_its_owner_vanishes() {
        let mut m = Members::default();
        join(&mut m, 1, "g", 1, &[], 0);
        join(&mut m, 2, "g", 1, &[], 0);
        m.claim(1, "in");
        m.disconnect(1, 1);
        assert_eq!(m.claim(2, "in"), [(2, Answer::Mine)]);
    }

    #[test]
    fn claims_of_another_group_are_its_own() {
        let mut m = Members::default();
        join(&mut m, 1, "a", 1, &[], 0);
        join(&mut m, 2, "b", 1, &[], 0);
        assert_eq!(m.claim(1, "in"), [(1, Answer::Mine)]);
        assert_eq!(m.claim(2, "in"), [(2, Answer::Mine)]);
        // A group that comes again after all its members left starts anew.
        m.finish(1, "in", None);
        m.leave_plan(1, true, 5);
        m.disconnect(1, 5);
        join(&mut m, 3, "a", 1, &[], 6);
        assert_eq!(m.claim(3, "in"), [(3, Answer::Mine)]);
    }

    #[test]
    fn leave_plan_names_what_only_the_last_holds() {
        let mut m = Members::default();
        join(&mut m, 1, "g", 2, &["out", "mine"], 0);
        join(&mut m, 2, "g", 2, &["out"], 0);
        assert_eq!(m.leave_plan(1, true, 1), [(1, plan(&["mine"], false))]);
        assert_eq!(m.leave_plan(2, true, 2), [(2, plan(&["out"], false))]);
        assert!(!m.all_gone());
        assert_eq!(m.disconnect(1, 3).1, None, "left in good order");
        m.disconnect(2, 3);
        assert!(m.all_gone());
    }

    #[test]
    fn leave_plan_waits_for_ranks_that_are_still_to_come() {
        let mut m = Members::default();
        join(&mut m, 1, "g", 2, &["out"], 100);
        assert_eq!(m.leave_plan(1, true, 101), []);
        assert_eq!(m.next_tick_ms(101), Some(100 + GROUP_GRACE_MS));
        let request =
            JoinRequest { label: "late".into(), group: "g".into(), expected: 2, holds: vec!["out".into()] };
        let answers = m.join(2, request, "t".into(), 200);
        assert_eq!(answers, [(2, Answer::Joined { token: "t".into() }), (1, plan(&[], false))]);
        assert_eq!(m.leave_plan(2, false, 300), [(2, plan(&["out"], true))]);
    }

    #[test]
    fn leave_plan_does_not_wait_for_ever_for_ranks_that_never_come() {
        let mut m = Members::default();
        join(&mut m, 1, "g", 8, &["out"], 0);
        assert_eq!(m.leave_plan(1, true, 1), []);
        assert_eq!(m.tick(GROUP_GRACE_MS - 1), []);
        assert_eq!(m.tick(GROUP_GRACE_MS), [(1, plan(&["out"], false))]);
        m.disconnect(1, GROUP_GRACE_MS);
        assert!(m.all_gone());
    }

    #[test]
    fn pool_is_not_left_while_ranks_are_still_to_come() {
        let mut m = Members::default();
        assert!(!m.all_gone(), "nobody has come yet");
        join(&mut m, 1, "g", 2, &[], 0);
        m.disconnect(1, 1);
        assert!(!m.all_gone());
        m.tick(GROUP_GRACE_MS);
        assert!(m.all_gone());
    }

    #[test]
    fn member_that_vanishes_counts_as_failed() {
        let mut m = Members::default();
        join(&mut m, 1, "g", 2, &["out"], 0);
        join(&mut m, 2, "g", 2, &["out"], 0);
        m.disconnect(1, 1);
        assert_eq!(m.leave_plan(2, true, 2), [(2, plan(&["out"], true))]);
    }

    #[test]
    fn requests_out_of_order_are_refused() {
        let mut m = Members::default();
        assert!(matches!(m.claim(9, "k")[..], [(9, Answer::Refused { .. })]));
        assert!(matches!(m.finish(9, "k", None)[..], [(9, Answer::Refused { .. })]));
        assert!(matches!(m.leave_plan(9, true, 0)[..], [(9, Answer::Refused { .. })]));
        join(&mut m, 1, "g", 1, &[], 0);
        assert!(matches!(m.finish(1, "k", None)[..], [(1, Answer::Refused { .. })]));
        m.claim(1, "k");
        assert!(matches!(m.claim(1, "k")[..], [(1, Answer::Refused { .. })]));
        join(&mut m, 2, "g", 1, &[], 0);
        assert!(matches!(m.finish(2, "k", None)[..], [(2, Answer::Refused { .. })]));
    }
}
