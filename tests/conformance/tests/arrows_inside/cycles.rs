//! A crate's modules and the arrows between them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

#[derive(Default)]
pub(crate) struct Graph {
    /// Importing module → imported module → the names that it imports.
    arrows: BTreeMap<String, BTreeMap<String, BTreeSet<String>>>,
}

impl Graph {
    pub(crate) fn add(&mut self, from: &str, to: &str, name: &str) {
        if from != to {
            let names = self.arrows.entry(from.into()).or_default().entry(to.into()).or_default();
            names.insert(name.into());
        }
    }

    fn imports(&self, module: &str) -> impl Iterator<Item = &str> {
        self.arrows.get(module).into_iter().flatten().map(|(to, _)| to.as_str())
    }

    /// The shortest path from one module to another, both included.
    fn way(&self, from: &str, to: &str) -> Option<Vec<String>> {
        let mut came_from = BTreeMap::from([(from, None)]);
        let mut queue = VecDeque::from([self.arrows.get_key_value(from)?.0.as_str()]);
        while let Some(module) = queue.pop_front() {
            if module == to {
                let back = std::iter::successors(Some(module), |module| came_from[module]);
                let mut way: Vec<String> = back.map(str::to_owned).collect();
                way.reverse();
                return Some(way);
            }
            for next in self.imports(module) {
                came_from.entry(next).or_insert_with(|| {
                    queue.push_back(next);
                    Some(module)
                });
            }
        }
        None
    }

    pub(crate) fn shortest_cycle(&self) -> Option<BTreeSet<String>> {
        let arrows =
            self.arrows.iter().flat_map(|(from, imported)| imported.keys().map(move |to| (from, to)));
        let cycle = arrows.filter_map(|(from, to)| self.way(to, from)).min_by_key(Vec::len)?;
        Some(cycle.into_iter().collect())
    }

    /// Groups of modules in which each module reaches each other one.
    pub(crate) fn groups(&self) -> Vec<BTreeSet<String>> {
        let mut groups: BTreeSet<BTreeSet<String>> = BTreeSet::new();
        for module in self.arrows.keys() {
            let back =
                |other: &&String| self.way(module, other).is_some() && self.way(other, module).is_some();
            groups.insert(self.arrows.keys().filter(back).cloned().collect());
        }
        groups.into_iter().filter(|group| group.len() > 1).collect()
    }

    /// The arrows inside a group, one on a line, with the imported names.
    pub(crate) fn describe(&self, group: &BTreeSet<String>) -> String {
        let inside = self.arrows.iter().filter(|(from, _)| group.contains(*from));
        let arrows =
            inside.flat_map(|(from, imported)| imported.iter().map(move |(to, names)| (from, to, names)));
        let arrows = arrows.filter(|(_, to, _)| group.contains(*to));
        let lines: Vec<String> =
            arrows.map(|(from, to, names)| format!("\n  {from} → {to} {names:?}")).collect();
        format!("{} modules import one another{}", group.len(), lines.concat())
    }
}
