//! A daemon under a peer that has the pool's secret and says anything. `crates/server/tests/garbage.rs` runs the same
//! entry point for some seconds in every `make test`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| forebay_server::exercise::exercise_known(bytes));
