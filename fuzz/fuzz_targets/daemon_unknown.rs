//! A daemon under somebody who has not the pool's secret. `crates/server/tests/garbage.rs` runs the same entry point
//! for some seconds in every `make test`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| forebay_server::exercise::exercise_unknown(bytes));
