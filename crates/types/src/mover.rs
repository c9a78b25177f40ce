//! Files in the pool's directory by which the supervisor, the mover and the command find each other.

/// Exists once a backing store was attached: the supervisor then keeps a mover.
pub const STORES_MARK: &str = "stores";

/// The mover answers here.
pub const MOVER_SOCKET: &str = "mover.sock";

/// The mover's tasks.
pub const TASKS_FILE: &str = "tasks.json";

/// The next contents of [`TASKS_FILE`], until they are whole.
pub const TASKS_FILE_NEW: &str = "tasks.json.new";
