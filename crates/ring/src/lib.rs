//! Shared memory between a process and its daemon: ring and board.
