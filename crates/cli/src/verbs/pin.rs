//! `forebay pin` and `forebay unpin`.

use std::path::PathBuf;
use std::process::ExitCode;

use forebay_types::{Request, Result};
use serde_json::{json, Value};

use super::ls::{failed_path, put_name};
use crate::arguments::Pinned;
use crate::{backing, failure, pool, table};

pub(super) fn pin(named: Option<PathBuf>, arguments: &Pinned, pinned: bool) -> Result<ExitCode> {
    let pool = pool::attach(&pool::directory(named)?)?;
    let (verb, done) = if pinned { ("pin", "pinned") } else { ("unpin", "not pinned") };
    let mut all = Vec::new();
    let mut status = ExitCode::SUCCESS;
    for text in &arguments.paths {
        let path = pool::path_within(text);
        let pin = |ino| pool.request(&Request::Pin { ino, pinned }, |_| Ok(()));
        let result = backing::look(pool, &path, verb)
            .and_then(|entry| pin(entry.attr.ino).map_err(|code| backing::failed(code, verb, &path)));
        match result {
            Ok(()) if arguments.json => {
                let mut object = json!({ "pinned": pinned });
                put_name(&mut object, "path", &path);
                all.push(object);
            }
            Ok(()) => failure::put(format!("{} is {done}\n", table::printable(&path))),
            Err(e) => {
                failure::say(&e);
                all.push(failed_path(&path, &e));
                status = ExitCode::from(failure::FAILED);
            }
        }
    }
    if arguments.json {
        failure::print_json(&Value::Array(all));
    }
    Ok(status)
}
