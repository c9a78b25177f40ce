//! The shard: the part of the namespace that a node owns, on LMDB.
