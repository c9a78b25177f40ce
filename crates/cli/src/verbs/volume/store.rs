//! The store's side of a copy: `forebay-mover --volume-copy` makes it, as only the mover knows the stores.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc::{channel, RecvTimeoutError};
use std::time::{Duration, Instant};

use forebay_tasks::volume_copy::{VolumeCopyEvent, VolumeCopyPlan};
use forebay_types::{Code, Error, Result};
use indicatif::ProgressBar;

/// How often signals are looked for.
const SIGNAL_PERIOD: Duration = Duration::from_millis(50);

/// Has the mover's program copy. Returns the bytes that it copied. Signals that are blocked here are in the program too,
/// so that a terminal's ^C leaves it the time to remove what it has begun; `stops` says that it is to end.
pub(super) fn copy(
    plan: &VolumeCopyPlan,
    bar: &ProgressBar,
    stops: &mut dyn FnMut() -> Result<()>,
) -> Result<u64> {
    let what = "cannot copy a volume";
    let mut text = serde_json::to_vec(plan).map_err(|e| Error::new(Code::Invalid, what).why(e))?;
    text.push(b'\n');
    let mut child = Command::new(forebay_server::mover_program()?)
        .arg("--volume-copy")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| Error::io(what, &e))?;
    let mut input = child.stdin.take();
    if let Some(input) = &mut input {
        // If it died, its end says so.
        let _ = input.write_all(&text);
    }
    let (to_here, lines) = channel();
    let output = child.stdout.take();
    let reader = std::thread::spawn(move || {
        for line in output.into_iter().flat_map(|output| BufReader::new(output).split(b'\n')) {
            if to_here.send(line).is_err() {
                break;
            }
        }
    });
    let (mut bytes, mut is_over, mut failure) = (0, false, None);
    let mut looked = Instant::now();
    loop {
        let line = lines.recv_timeout(SIGNAL_PERIOD);
        // Also while one line follows the other.
        if looked.elapsed() >= SIGNAL_PERIOD {
            looked = Instant::now();
            if let Err(e) = stops() {
                match input.take() {
                    // It gives up when its standard input is closed.
                    Some(input) => drop(input),
                    // A second signal: it hangs in the store.
                    None => drop(child.kill()),
                }
                failure.get_or_insert(e);
            }
        }
        let line = match line {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        let event = line.map_err(|e| Error::io(what, &e)).and_then(|line| {
            let malformed =
                |e| Error::new(Code::Malformed, what).why(e).cure("install one version of Forebay");
            serde_json::from_slice(&line).map_err(malformed)
        });
        match event {
            Ok(VolumeCopyEvent::Size(size)) => {
                bytes = size;
                bar.set_length(size);
            }
            Ok(VolumeCopyEvent::Copied(copied)) => bar.set_position(copied),
            Ok(VolumeCopyEvent::Over) => is_over = true,
            Ok(VolumeCopyEvent::Failed(e)) => drop(failure.get_or_insert(Error::from(e))),
            // Nothing that it says is understood.
            Err(e) => {
                failure.get_or_insert(e);
                let _ = child.kill();
            }
        }
    }
    let status = child.wait().map_err(|e| Error::io(what, &e))?;
    let _ = reader.join();
    match failure {
        Some(e) => Err(e),
        None if is_over && status.success() => Ok(bytes),
        None => Err(Error::new(Code::Io, what)
            .why(format!("forebay-mover ended before it was done ({status})"))
            .cure("the object is as it was: run this again")),
    }
}
