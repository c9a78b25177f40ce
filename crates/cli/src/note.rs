//! Lines on stderr.

/// Prints a line on stderr. The verb must not end because the reader has gone (`2>&1 | head`).
macro_rules! note {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($words)*);
    }};
}
