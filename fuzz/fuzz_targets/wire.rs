//! Every decoder of crates/wire, forged and sealed. `crates/wire/tests/garbage.rs` runs the same entry point for some
//! seconds in every `make test`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| forebay_wire::exercise(bytes));
