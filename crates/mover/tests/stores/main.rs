//! Stores, from outside: one suite for all kinds, chosen by abilities; races with foreign programs; escapes; faults.
//!
//! Every kind of store is a [`Subject`](subject::Subject). `FOREBAY_TEST_S3=http://host:port/bucket` with credentials in
//! the environment runs the suite against a server that runs already.

#![forbid(unsafe_code)]

mod escapes;
mod faults;
mod leftovers;
mod object;
mod races;
mod s3_server;
mod steps;
mod subject;
mod suite;
