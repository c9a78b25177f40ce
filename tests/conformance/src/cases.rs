//! The cases, a file for each heading of docs/semantics.md.

mod attributes;
mod children;
mod data;
mod directories;
mod links;
mod mapping;
mod names;
mod nodes;
mod opening;
mod permissions;
mod rename;
mod space;
mod times;
mod unnamed;
mod xattrs;

use crate::case::Case;

/// Every case, in the order of the document.
pub fn all() -> impl Iterator<Item = &'static Case> {
    [
        names::CASES,
        links::CASES,
        opening::CASES,
        data::CASES,
        mapping::CASES,
        children::CASES,
        unnamed::CASES,
        attributes::CASES,
        times::CASES,
        permissions::CASES,
        directories::CASES,
        rename::CASES,
        xattrs::CASES,
        nodes::CASES,
        space::CASES,
    ]
    .into_iter()
    .flatten()
}
