//! The members of a pool, their groups, and the work that a group does once.
//!
//! A member is one `forebay run`. A group is the runs of one job step on this node (the ranks of one `mpirun`), or a
//! single run. The first member that requests a *claim* (a stage-in) does it while the others wait. The last member
//! that releases a *hold* (a stage-out) does it. A group has the number of members that its launcher started on this
//! node, so that a rank that ends before another begins is not mistaken for the last one.
//!
//! This is a state machine without I/O: events in, answers out; the caller passes the time. Tests: below.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// How long to wait for a group with fewer members than its launcher announced, in milliseconds: ranks of one node
/// start within this time of one another.
pub(crate) const GROUP_GRACE_MS: u64 = 10_000;

/// A member's number, which is the number of its connection.
pub(crate) type MemberId = u64;

/// A member's request to join.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JoinRequest {
    /// The command that it runs, for messages.
    pub label: String,
    /// The group's name: job, step and launcher, or a name of this run alone.
    pub group: String,
    /// The number of members that the launcher starts on this node; 1 if unknown.
    pub expected: u32,
    /// The member's holds: the keys of its stage-outs.
    pub holds: Vec<String>,
}

/// An answer to a member.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Answer {
    /// It has joined. The token marks its programs.
    Joined {
        /// 32 unpredictable hexadecimal digits.
        token: String,
    },
    /// This member does the claim, then reports the result.
    Mine,
    /// A member of the group has done it.
    Done,
    /// A member of the group tried and failed.
    Failed {
        /// The reason.
        why: String,
    },
    /// The holds that no other member has, whose work this member must do.
    Plan {
        /// The keys of the holds.
        keys: Vec<String>,
        /// True when a member of the group failed or disconnected early.
        any_failed: bool,
    },
    /// The request is not valid now.
    Refused {
        /// The reason.
        why: String,
    },
}

#[derive(Debug)]
struct Member {
    label: String,
    group: String,
    token: String,
    holds: BTreeSet<String>,
    /// Set while its request for a plan waits until the group is complete: whether its program succeeded.
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
    /// The member that copies what the store lacks, and [`Members::ever`] when it began and no program ran.
    drain_from: Option<(MemberId, u64)>,
}

/// Answers to send, each to its member.
pub(crate) type Answers = Vec<(MemberId, Answer)>;

impl Members {
    /// `id` joins; `token` marks its programs.
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

    /// `id` claims `key`. No answer while another member does it.
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

    /// `id` has done `key`, or has failed.
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

    /// `id`'s program has ended, successfully or not, and `id` releases all of its holds. The answer is sent once the
    /// group is complete.
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

    /// `id`'s connection has ended. Also returns the token of its programs, unless it left in good order (after its
    /// plan).
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
                        // The member that waited longest takes over the claim of the member that disconnected.
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

    /// Answers that are due by time: plans of groups that are now complete. Removes groups that have ended.
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

    /// When [`Members::tick`] must next be called although no event occurs.
    pub(crate) fn next_tick_ms(&self, now_ms: u64) -> Option<u64> {
        self.groups
            .values()
            .filter(|g| !g.is_complete(now_ms))
            .map(|g| g.first_join_ms + GROUP_GRACE_MS)
            .min()
    }

    /// True when there were members, all have left, and no group still waits for members.
    pub(crate) fn all_gone(&self) -> bool {
        self.ever > 0 && self.members.is_empty() && self.groups.is_empty()
    }

    /// True once a member has joined.
    pub(crate) fn ever_used(&self) -> bool {
        self.ever > 0
    }

    /// `id` begins to copy to the backing store what it lacks.
    pub(crate) fn drain_begins(&mut self, id: MemberId) {
        self.drain_from = self.others_have_ended(id).then_some((id, self.ever));
    }

    /// `id` has copied everything. True when no program can have written since that began.
    pub(crate) fn drain_ends(&mut self, id: MemberId) -> bool {
        self.drain_from.take() == Some((id, self.ever))
    }

    /// True when the programs of all members but `id` have ended.
    fn others_have_ended(&self, id: MemberId) -> bool {
        self.members.iter().all(|(&other, member)| other == id || member.let_go)
    }

    /// How many members have joined so far.
    pub(crate) fn ever(&self) -> u64 {
        self.ever
    }

    /// The labels of the present members.
    pub(crate) fn labels(&self) -> Vec<&str> {
        self.members.values().map(|m| m.label.as_str()).collect()
    }

    /// The number of present members.
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
        // A group whose name is used again after all its members left is a new one.
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
    fn others_have_ended_when_they_have_their_plans_or_are_gone() {
        let mut m = Members::default();
        join(&mut m, 1, "g", 2, &[], 0);
        join(&mut m, 2, "g", 2, &[], 0);
        join(&mut m, 3, "within", 1, &[], 0);
        m.leave_plan(2, true, 1);
        assert!(!m.others_have_ended(1), "3 runs");
        m.disconnect(3, 2);
        assert!(m.others_have_ended(1));
        assert!(!m.others_have_ended(2));
    }

    #[test]
    fn drain_is_whole_when_no_program_ran_from_its_begin_to_its_end() {
        let mut m = Members::default();
        join(&mut m, 1, "g", 1, &[], 0);
        assert!(!m.drain_ends(1), "it did not begin");
        m.drain_begins(1);
        assert!(m.drain_ends(1));
        join(&mut m, 2, "ends before the other's drain ends", 1, &[], 0);
        m.drain_begins(1);
        m.disconnect(2, 1);
        assert!(!m.drain_ends(1));
        m.drain_begins(1);
        join(&mut m, 3, "joins meanwhile", 1, &[], 2);
        m.disconnect(3, 3);
        assert!(!m.drain_ends(1));
        m.drain_begins(1);
        assert!(m.drain_ends(1));
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
