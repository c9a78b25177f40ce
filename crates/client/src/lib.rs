//! The one library behind every door in a process: path walk, handles, striping, retry.
