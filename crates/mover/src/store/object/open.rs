//! Opening a bucket: configuration, credentials, and which conditions the store evaluates.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use forebay_types::Code;
use opendal::layers::RetryLayer;
use opendal::options::CopyOptions;
use opendal::services::S3;
use opendal::{ErrorKind, Operator};

use super::super::error::{StoreError, StoreResult};
use super::super::path::StorePath;
use super::super::temporary::{MoverId, Temporaries};
use super::failures::describe;
use super::late::LateUploads;
use super::listing::Going;
use super::{ObjectStore, RequestLimits, REQUEST_LIMIT};

/// Threads of the runtime: they only move bytes between sockets and buffers.
const RUNTIME_THREADS: usize = 2;
/// Repetitions of a request before the mover gets the error, and the longest pause between them.
const RETRIES: usize = 3;
const RETRY_PAUSE: Duration = Duration::from_secs(2);
/// The region of services that have none.
const DEFAULT_REGION: &str = "us-east-1";

/// A prefix of a bucket of an S3-compatible service. Credentials are not part of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct S3Place {
    /// The bucket.
    pub bucket: String,
    /// The prefix, without slashes at its ends; empty for the whole bucket.
    pub prefix: String,
    /// `http(s)://host:port`; none: from the environment, or AWS.
    pub endpoint: Option<String>,
    /// The region; none: from the environment.
    pub region: Option<String>,
    /// The bucket is in the path of requests (most services), not in the host's name.
    pub path_style: bool,
    /// How long one request without data may take; one with data may take twice as long, a copy inside the store ten
    /// times. None: a minute.
    pub timeout: Option<Duration>,
}

impl Default for S3Place {
    fn default() -> S3Place {
        S3Place {
            bucket: String::new(),
            prefix: String::new(),
            endpoint: None,
            region: None,
            path_style: true,
            timeout: None,
        }
    }
}

impl ObjectStore {
    /// Opens a bucket. Sends requests: errors as those of calls, [`Code::NotFound`] without the bucket.
    pub fn open(place: &S3Place, mover: MoverId) -> StoreResult<ObjectStore> {
        let title = match &place.prefix[..] {
            "" => format!("s3://{}", place.bucket),
            prefix => format!("s3://{}/{prefix}", place.bucket),
        };
        let what = format!("cannot open the store {title}");
        // Fails if another part of the process has chosen one, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(RUNTIME_THREADS)
            .thread_name("forebay-s3")
            .enable_all()
            .build()
            .map_err(|e| StoreError::transient(Code::NoResources, &what).why(e))?;
        let operator = {
            let _inside = runtime.enter();
            let operator = Operator::new(builder(place)).map_err(|e| describe(&e, what))?;
            let retries = RetryLayer::new().with_max_times(RETRIES).with_max_delay(RETRY_PAUSE).with_jitter();
            operator.layer(retries).finish()
        };
        let mut store = ObjectStore {
            title,
            operator,
            runtime,
            temporaries: Temporaries::new(mover),
            is_conditional: false,
            has_tags: false,
            lost_xattrs: AtomicU64::new(0),
            limits: RequestLimits::of(place.timeout.unwrap_or(REQUEST_LIMIT)),
            late: LateUploads::default(),
        };
        // A listing shows whether bucket and credentials are right.
        store.each_key("open", &StorePath::root(), |_, _| Ok(Going::Stop))?;
        store.probe();
        Ok(store)
    }

    /// Finds out whether the store has etags in all answers and evaluates conditions of copies, with two small objects.
    /// Without the right to write it has neither, as far as Forebay is concerned.
    fn probe(&mut self) {
        let (first, second) =
            (self.temporaries.next(&StorePath::root()), self.temporaries.next(&StorePath::root()));
        let (first, second) = (first.to_string(), second.to_string());
        let written = self.wait(self.limits.request, self.operator.write(&first, "probe"));
        if written.is_ok() {
            let tag = self.wait(self.limits.request, self.operator.stat(&first)).ok();
            self.has_tags = tag.is_some_and(|metadata| metadata.etag().is_some());
            let copy = |options| {
                self.wait(self.limits.request, self.operator.copy_options(&first, &second, options))
            };
            let new = || CopyOptions { if_not_exists: true, ..CopyOptions::default() };
            let matching = CopyOptions { if_match: Some("\"no such tag\"".into()), ..CopyOptions::default() };
            let refused =
                |copied: opendal::Result<_>| copied.is_err_and(|e| e.kind() == ErrorKind::ConditionNotMatch);
            self.is_conditional = copy(new()).is_ok() && refused(copy(new())) && refused(copy(matching));
        }
        for key in [first, second] {
            let _ = self.wait(self.limits.request, self.operator.delete(&key));
        }
    }
}

fn builder(place: &S3Place) -> S3 {
    let mut builder = S3::default().bucket(&place.bucket);
    if !place.prefix.is_empty() {
        builder = builder.root(&format!("/{}", place.prefix));
    }
    if let Some(endpoint) = &place.endpoint {
        builder = builder.endpoint(endpoint);
    }
    let has_region = ["AWS_REGION", "AWS_DEFAULT_REGION"].iter().any(|name| std::env::var_os(name).is_some());
    match &place.region {
        Some(region) => builder = builder.region(region),
        None if !has_region => builder = builder.region(DEFAULT_REGION),
        None => {}
    }
    if !place.path_style {
        builder = builder.enable_virtual_host_style();
    }
    builder
}
