//! libforebay_preload.so: interposed calls, thin over libforebay.so.
