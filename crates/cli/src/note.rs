//! Lines on stderr.

/// Prints a line on stderr. A reader that has gone (`2>&1 | head`) must not end the verb.
macro_rules! note {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($words)*);
    }};
}
