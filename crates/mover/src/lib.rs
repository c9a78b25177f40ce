//! Between the pool and its backing stores.
//!
//! [`store`] is the one door to the stores: directories and object stores behind one trait.

#![forbid(unsafe_code)]

pub mod store;
