//! forebayd: the owner of a node's shard and targets.
