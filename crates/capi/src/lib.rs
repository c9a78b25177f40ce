//! forebay.h and libforebay.so: the one copy of the client in a process.
