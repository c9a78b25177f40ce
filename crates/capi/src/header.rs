//! Structs and constants of include/forebay.h, as the build script writes them.

use std::os::raw::{c_int, c_void};

include!(concat!(env!("OUT_DIR"), "/types.rs"));

// `forebay_client::Run` is this struct, with numbers that cannot be negative.
const _: () = {
    use forebay_client::Run;
    use std::mem::offset_of;
    assert!(size_of::<forebay_run>() == size_of::<Run>());
    assert!(offset_of!(forebay_run, offset) == offset_of!(Run, offset));
    assert!(offset_of!(forebay_run, bytes) == offset_of!(Run, bytes));
};
