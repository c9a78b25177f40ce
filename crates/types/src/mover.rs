//! Files in the pool's directory that the supervisor, the mover, the command and programs have in common.

/// Exists once a backing store was attached: the supervisor then keeps a mover.
pub const STORES_MARK: &str = "stores";

/// The mover answers here.
pub const MOVER_SOCKET: &str = "mover.sock";

/// The mover's tasks.
pub const TASKS_FILE: &str = "tasks.json";

/// The next contents of [`TASKS_FILE`], until they are whole.
pub const TASKS_FILE_NEW: &str = "tasks.json.new";

/// The pool's calibration of the model of collective and independent I/O (`forebay model calibrate`).
pub const MODEL_FILE: &str = "model.toml";

/// The next contents of [`MODEL_FILE`], until they are whole.
pub const MODEL_FILE_NEW: &str = "model.toml.new";
