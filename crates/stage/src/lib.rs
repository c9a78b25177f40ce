//! Between pool and backing store: stage in and out, manifests, checksums.
