//! The functions that include/forebay.h declares, as C calls them.
//!
//! The build script (`build/exports.rs`) writes one for each declaration. `forebay_stat`, for example, converts its
//! arguments and calls `stat` of `public.rs` inside the guard. Pointers become references and slices, so that the
//! functions that do the work are safe Rust where their C contract allows it.

use std::os::raw::{c_char, c_int, c_void};

use forebay_client::Pool as forebay_pool;

use crate::allocation::*;
use crate::answer::{self, call};
use crate::backing::*;
use crate::boundary::guard;
use crate::completion_queue::*;
use crate::completions::*;
use crate::file::*;
use crate::group::*;
use crate::header::{
    forebay_calibration, forebay_completion, forebay_corrections, forebay_dirent, forebay_path_state,
    forebay_pattern, forebay_run, forebay_stage_status, forebay_times,
};
use crate::later::*;
use crate::layout::*;
use crate::memory::*;
use crate::model::*;
use crate::public::*;
use crate::staging::*;
use crate::text::*;
use crate::volume::*;

include!(concat!(env!("OUT_DIR"), "/functions.rs"));
