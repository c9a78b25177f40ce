//! The forebay command.
