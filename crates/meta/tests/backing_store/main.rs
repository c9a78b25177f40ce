//! Backing stores: what the shard knows of them, against a mover and programs in every order.

mod examples;
mod links;
mod meta;
mod mover;
#[path = "../place/mod.rs"]
mod place;
mod pool;
mod random;
mod reports;
mod restored;
mod states;
mod store;
mod unlisted;
mod world;
