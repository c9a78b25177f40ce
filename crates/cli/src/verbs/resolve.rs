//! `forebay resolve`.

use std::path::PathBuf;
use std::process::ExitCode;

use forebay_client::{PathBuffer, Place};
use forebay_tasks::{Keep, MoverClient};
use forebay_types::{Code, Error, Result};
use serde_json::json;

use super::ls::put_name;
use crate::arguments::Resolve;
use crate::{failure, pool, table};

pub(super) fn resolve(named: Option<PathBuf>, arguments: &Resolve) -> Result<ExitCode> {
    let dir = pool::directory(named)?;
    let pool = pool::attach(&dir)?;
    let path = pool::path_within(&arguments.path);
    let what = || format!("cannot settle the conflict at {}", table::printable(&path));
    // The name itself may be gone from the pool, so only the directory above is looked up.
    let Place { dir: start, path: whole } = pool::place(&path);
    let whole = whole.strip_suffix(b"/").unwrap_or(whole);
    let (above, name) = match whole.iter().rposition(|&b| b == b'/') {
        Some(slash) => (&whole[..slash], &whole[slash + 1..]),
        None => (&whole[..0], whole),
    };
    if name.is_empty() {
        return Err(
            Error::new(Code::Invalid, what()).why("the pool's root has no name that could be in conflict")
        );
    }
    let parent = pool.resolve(Place { dir: start, path: above }, true, &mut PathBuffer::new());
    let parent = pool::worded(parent, "find the directory of", &path)?;
    let keep = Keep::from(arguments.keep);
    MoverClient::connect(&dir)?.resolve(parent.attr.ino.0, name, keep)?;
    if arguments.json {
        let mut object = json!({ "keep": keep });
        put_name(&mut object, "path", &path);
        failure::print_json(&object);
        return Ok(ExitCode::SUCCESS);
    }
    let how = match keep {
        Keep::Pool => "the pool's version replaces the store's",
        Keep::Store => "the store's version is there, the pool's is gone",
        Keep::Both => "both versions are kept, the pool's under a name of its own",
    };
    failure::put(format!("{}: {how}\n", table::printable(&path)));
    Ok(ExitCode::SUCCESS)
}
