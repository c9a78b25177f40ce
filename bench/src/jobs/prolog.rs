//! What the prolog costs a job that has no directives: slurmd starts the script, which looks for a file.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::report::Table;
use crate::stage::Place;

const STARTS: usize = 300;
const LOOKS: u32 = 20_000;

/// Seconds of a command.
fn seconds(command: &mut Command) -> Result<f64, String> {
    let begun = Instant::now();
    let ended = command.stdin(Stdio::null()).status().map_err(|e| format!("{command:?}: {e}"))?;
    match ended.success() {
        true => Ok(begun.elapsed().as_secs_f64()),
        false => Err(format!("{command:?} ended with {ended}")),
    }
}

/// A shell that looks so many times whether the job has a record.
fn looks(dir: &Path, count: u32) -> Command {
    let mut command = Command::new("sh");
    let script = "i=0; while [ $i -lt $1 ]; do [ -e \"$2/jobs/$SLURM_JOB_ID.json\" ]; i=$((i+1)); done; true";
    let none = "i=0; while [ $i -lt $1 ]; do [ -n \"$2/jobs/$SLURM_JOB_ID.json\" ]; i=$((i+1)); done; true";
    let script = if count == 0 { none } else { script };
    command.args(["-c", script, "looks", &LOOKS.to_string()]).arg(dir).env("SLURM_JOB_ID", "77");
    command
}

/// The table of the prolog; its script is that of the sources.
pub(super) fn measure(disk: &Path) -> Result<Table, String> {
    let place = Place::new(disk)?;
    let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let source = above.map(|dir| dir.join("slurm/prolog")).find(|path| path.is_file());
    let text =
        source.and_then(|path| std::fs::read_to_string(path).ok()).ok_or("there is no slurm/prolog")?;
    let text = text.replace("REGISTRY=/shared/forebay", &format!("REGISTRY={}", place.0.display()));
    let mut table = Table {
        title: "(j) the prolog of a job without directives".into(),
        unit: "µs",
        more_is_better: false,
        columns: ["Forebay", "empty script"].map(str::to_owned).to_vec(),
        rows: Vec::new(),
    };
    let scripts = [text, "#!/bin/sh\nexit 0\n".to_owned()];
    for (column, text) in scripts.iter().enumerate() {
        use std::os::unix::fs::PermissionsExt;
        let path = place.0.join(format!("prolog{column}"));
        std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))?;
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&path, mode).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    let mut least = [f64::INFINITY; 2];
    for _ in 0..STARTS {
        for (column, least) in least.iter_mut().enumerate() {
            let mut command = Command::new(place.0.join(format!("prolog{column}")));
            let took = seconds(command.env("SLURM_JOB_ID", "77"))?;
            table.add("the script is started", column, took * 1e6, Vec::new);
            *least = least.min(took);
        }
    }
    for (column, least) in least.into_iter().enumerate() {
        table.add("the same, the least", column, least * 1e6, Vec::new);
    }
    for _ in 0..5 {
        let both = [seconds(&mut looks(&place.0, LOOKS))?, seconds(&mut looks(&place.0, 0))?];
        let look = (both[0] - both[1]) / f64::from(LOOKS);
        table.add("a line in a prolog that is there", 0, look * 1e6, Vec::new);
    }
    Ok(table)
}
