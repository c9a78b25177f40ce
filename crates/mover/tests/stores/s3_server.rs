//! S3 servers in this process, on 127.0.0.1: objects in memory, with S3's rules, and `s3s-fs`.
//!
//! The protocol is that of the `s3s` crate. Credentials are checked, and can be taken away.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, SystemTime};

use forebay_mover::store::S3Place;
use futures_core::Stream;
use hyper_util::rt::TokioIo;
use s3s::auth::{S3Auth, SecretKey};
use s3s::dto::*;
use s3s::service::S3ServiceBuilder;
use s3s::{s3_error, S3Request, S3Response, S3Result, S3};
use tokio::net::TcpListener;

pub(crate) const ACCESS_KEY: &str = "AKIAFOREBAYTEST";
pub(crate) const SECRET_KEY: &str = "forebay-test-secret-dont-print";
const PAGE: usize = 1000;

/// The environment from which all stores of this process take their credentials.
fn set_credentials() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        std::env::set_var("AWS_ACCESS_KEY_ID", ACCESS_KEY);
        std::env::set_var("AWS_SECRET_ACCESS_KEY", SECRET_KEY);
        std::env::set_var("AWS_EC2_METADATA_DISABLED", "true");
    });
}

struct Stored {
    bytes: Vec<u8>,
    etag: String,
    modified: SystemTime,
    metadata: Option<HashMap<String, String>>,
}

/// What the server does with the next request that it would execute.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ServerFault {
    /// 503, without effect.
    Unavailable,
    /// It takes effect, and answers 503.
    AnswerLost,
    /// The store is full, and stays so.
    Full,
    /// No answer; it takes effect after this time. For `put` and `copy`.
    #[allow(dead_code)] // Of the tests of pools.
    Late(Duration),
}

struct Upload {
    metadata: Option<HashMap<String, String>>,
    parts: BTreeMap<i32, (Vec<u8>, String)>,
}

/// Objects in memory.
pub(crate) struct Memory {
    evaluates_conditions: bool,
    objects: Mutex<BTreeMap<String, Stored>>,
    uploads: Mutex<HashMap<String, Upload>>,
    faults: Mutex<VecDeque<(&'static str, ServerFault)>>,
    next: AtomicU64,
    /// Keys of late requests that have taken effect, or were refused.
    pub(crate) landed: Mutex<Vec<(String, bool)>>,
    pub(crate) refuses_credentials: AtomicBool,
    /// All requests get 503 SlowDown.
    pub(crate) slows_down: AtomicBool,
}

impl Memory {
    pub(crate) fn new(evaluates_conditions: bool) -> Arc<Memory> {
        Arc::new(Memory {
            evaluates_conditions,
            objects: Mutex::default(),
            uploads: Mutex::default(),
            faults: Mutex::default(),
            next: AtomicU64::new(1),
            landed: Mutex::default(),
            refuses_credentials: AtomicBool::new(false),
            slows_down: AtomicBool::new(false),
        })
    }

    /// The next request of this kind meets a fault.
    pub(crate) fn inject(&self, request: &'static str, fault: ServerFault) {
        self.faults.lock().unwrap().push_back((request, fault));
    }

    /// Stores an object as another program does.
    pub(crate) fn put(&self, key: &str, bytes: &[u8]) -> String {
        self.store(key, bytes.to_vec(), None)
    }

    pub(crate) fn get(&self, key: &str) -> Option<Vec<u8>> {
        self.objects.lock().unwrap().get(key).map(|stored| stored.bytes.clone())
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        self.objects.lock().unwrap().keys().cloned().collect()
    }

    /// No more faults.
    pub(crate) fn clear_faults(&self) {
        self.faults.lock().unwrap().clear();
    }

    pub(crate) fn unfinished_uploads(&self) -> usize {
        self.uploads.lock().unwrap().len()
    }

    fn store(&self, key: &str, bytes: Vec<u8>, metadata: Option<HashMap<String, String>>) -> String {
        let etag = self.etag();
        let stored = Stored { bytes, etag: etag.clone(), modified: SystemTime::now(), metadata };
        self.objects.lock().unwrap().insert(key.to_owned(), stored);
        etag
    }

    /// Unlike S3's, different for each object, which S3 allows to other services.
    fn etag(&self) -> String {
        format!("\"{:032x}\"", self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// The fault of a request, checked at its beginning and at its end.
    fn fault(&self, request: &'static str, at_end: bool) -> S3Result<()> {
        if self.slows_down.load(Ordering::Relaxed) && !at_end {
            return Err(s3_error!(SlowDown, "Please reduce your request rate."));
        }
        let mut faults = self.faults.lock().unwrap();
        let Some(found) = faults.iter().position(|(wanted, _)| *wanted == request) else { return Ok(()) };
        match (faults[found].1, at_end) {
            (ServerFault::AnswerLost, false) | (ServerFault::Late(_), _) => return Ok(()),
            (ServerFault::Unavailable | ServerFault::Full, true) => return Ok(()),
            _ => {}
        }
        let fault = faults[found].1;
        if fault != ServerFault::Full {
            faults.remove(found);
        }
        match fault {
            ServerFault::Full => {
                let mut e = s3s::S3Error::with_message(
                    s3s::S3ErrorCode::Custom("QuotaExceeded".into()),
                    "the bucket's quota is used up",
                );
                e.set_status_code(hyper::StatusCode::INSUFFICIENT_STORAGE);
                Err(e)
            }
            _ => Err(s3_error!(ServiceUnavailable, "injected")),
        }
    }

    /// After which time a request takes effect without an answer.
    fn late(&self, request: &'static str) -> Option<Duration> {
        let mut faults = self.faults.lock().unwrap();
        let is_late = |(wanted, fault): &(&str, ServerFault)| match fault {
            ServerFault::Late(after) if *wanted == request => Some(*after),
            _ => None,
        };
        let (index, after) = faults.iter().enumerate().find_map(|(i, entry)| Some((i, is_late(entry)?)))?;
        faults.remove(index);
        Some(after)
    }

    /// Stores an object if the conditions hold, in one step.
    fn store_if(
        &self,
        key: &str,
        (if_match, is_new): (Option<&str>, bool),
        bytes: Vec<u8>,
        metadata: Option<HashMap<String, String>>,
    ) -> S3Result<String> {
        let etag = self.etag();
        let mut objects = self.objects.lock().unwrap();
        if self.evaluates_conditions {
            let found = objects.get(key).map(|stored| &stored.etag[..]);
            if is_new && found.is_some() {
                return Err(s3_error!(PreconditionFailed));
            }
            match (if_match, found) {
                (Some(_), None) => return Err(s3_error!(NoSuchKey)),
                (Some(wanted), Some(found)) if wanted != found => return Err(s3_error!(PreconditionFailed)),
                _ => {}
            }
        }
        let stored = Stored { bytes, etag: etag.clone(), modified: SystemTime::now(), metadata };
        objects.insert(key.to_owned(), stored);
        Ok(etag)
    }
}

async fn collect(body: Option<StreamingBlob>) -> S3Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let Some(mut body) = body else { return Ok(bytes) };
    while let Some(chunk) = poll_fn(|context| Pin::new(&mut body).poll_next(context)).await {
        bytes.extend_from_slice(&chunk.map_err(|_| s3_error!(IncompleteBody))?);
    }
    Ok(bytes)
}

fn check_bucket(bucket: &str) -> S3Result<()> {
    if bucket == "bucket" {
        Ok(())
    } else {
        Err(s3_error!(NoSuchBucket, "The specified bucket does not exist"))
    }
}

/// What the server answers from.
struct Shared(Arc<Memory>);

impl std::ops::Deref for Shared {
    type Target = Memory;

    fn deref(&self) -> &Memory {
        &self.0
    }
}

impl Shared {
    /// Takes effect after a time, which the client does not wait for: it never gets an answer.
    async fn land_later<T>(
        &self,
        after: Duration,
        key: String,
        (if_match, is_new): (Option<String>, bool),
        bytes: Vec<u8>,
        metadata: Option<HashMap<String, String>>,
    ) -> Res<T> {
        let memory = Arc::clone(&self.0);
        tokio::spawn(async move {
            tokio::time::sleep(after).await;
            let landed = memory.store_if(&key, (if_match.as_deref(), is_new), bytes, metadata);
            memory.landed.lock().unwrap().push((key, landed.is_ok()));
        });
        std::future::pending().await
    }
}

type Req<T> = S3Request<T>;
type Res<T> = S3Result<S3Response<T>>;

#[async_trait::async_trait]
impl S3 for Shared {
    async fn put_object(&self, req: Req<PutObjectInput>) -> Res<PutObjectOutput> {
        self.fault("put", false)?;
        let input = req.input;
        check_bucket(&input.bucket)?;
        let bytes = collect(input.body).await?;
        if input.content_length.is_some_and(|length| length as usize != bytes.len()) {
            return Err(s3_error!(IncompleteBody));
        }
        let conditions = (input.if_match.as_deref(), input.if_none_match.is_some());
        if let Some(after) = self.late("put") {
            let (if_match, is_new) = (conditions.0.map(str::to_owned), conditions.1);
            return self.land_later(after, input.key, (if_match, is_new), bytes, input.metadata).await;
        }
        let etag = self.store_if(&input.key, conditions, bytes, input.metadata)?;
        self.fault("put", true)?;
        Ok(S3Response::new(PutObjectOutput { e_tag: Some(etag), ..Default::default() }))
    }

    async fn get_object(&self, req: Req<GetObjectInput>) -> Res<GetObjectOutput> {
        self.fault("get", false)?;
        let input = req.input;
        let objects = self.objects.lock().unwrap();
        let stored = objects.get(&input.key).ok_or_else(|| s3_error!(NoSuchKey))?;
        if self.evaluates_conditions && input.if_match.is_some_and(|wanted| wanted != stored.etag) {
            return Err(s3_error!(PreconditionFailed));
        }
        let full = stored.bytes.len() as u64;
        let range = match input.range {
            Some(range) => range.check(full)?,
            None => 0..full,
        };
        let bytes = stored.bytes[range.start as usize..range.end as usize].to_vec();
        let content_range =
            input.range.map(|_| format!("bytes {}-{}/{full}", range.start, range.end.saturating_sub(1)));
        Ok(S3Response::new(GetObjectOutput {
            content_length: Some(bytes.len() as i64),
            body: Some(StreamingBlob::from(s3s::Body::from(bytes))),
            content_range,
            e_tag: Some(stored.etag.clone()),
            last_modified: Some(stored.modified.into()),
            metadata: stored.metadata.clone(),
            ..Default::default()
        }))
    }

    async fn head_object(&self, req: Req<HeadObjectInput>) -> Res<HeadObjectOutput> {
        self.fault("head", false)?;
        check_bucket(&req.input.bucket)?;
        let objects = self.objects.lock().unwrap();
        let stored = objects.get(&req.input.key).ok_or_else(|| s3_error!(NoSuchKey))?;
        Ok(S3Response::new(HeadObjectOutput {
            content_length: Some(stored.bytes.len() as i64),
            e_tag: Some(stored.etag.clone()),
            last_modified: Some(stored.modified.into()),
            metadata: stored.metadata.clone(),
            ..Default::default()
        }))
    }

    async fn delete_object(&self, req: Req<DeleteObjectInput>) -> Res<DeleteObjectOutput> {
        self.fault("delete", false)?;
        self.objects.lock().unwrap().remove(&req.input.key);
        self.fault("delete", true)?;
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    async fn copy_object(&self, req: Req<CopyObjectInput>) -> Res<CopyObjectOutput> {
        self.fault("copy", false)?;
        let CopySource::Bucket { key, .. } = &req.input.copy_source else {
            return Err(s3_error!(NotImplemented));
        };
        let (bytes, metadata) = {
            let objects = self.objects.lock().unwrap();
            let stored = objects.get(&**key).ok_or_else(|| s3_error!(NoSuchKey))?;
            (stored.bytes.clone(), stored.metadata.clone())
        };
        // Conditions on the target are younger than the protocol crate.
        let header = |name| req.headers.get(name).and_then(|value| value.to_str().ok());
        let conditions = (header("if-match"), header("if-none-match").is_some());
        if let Some(after) = self.late("copy") {
            let (if_match, is_new) = (conditions.0.map(str::to_owned), conditions.1);
            return self.land_later(after, req.input.key.clone(), (if_match, is_new), bytes, metadata).await;
        }
        let etag = self.store_if(&req.input.key, conditions, bytes, metadata)?;
        self.fault("copy", true)?;
        let result = CopyObjectResult {
            e_tag: Some(etag),
            last_modified: Some(SystemTime::now().into()),
            ..Default::default()
        };
        Ok(S3Response::new(CopyObjectOutput { copy_object_result: Some(result), ..Default::default() }))
    }

    async fn list_objects_v2(&self, req: Req<ListObjectsV2Input>) -> Res<ListObjectsV2Output> {
        self.fault("list", false)?;
        let input = req.input;
        check_bucket(&input.bucket)?;
        let prefix = input.prefix.clone().unwrap_or_default();
        let after = input.continuation_token.clone().or(input.start_after.clone()).unwrap_or_default();
        let most = input.max_keys.map_or(PAGE, |most| (most as usize).min(PAGE));
        let objects = self.objects.lock().unwrap();
        let (mut contents, mut prefixes) = (Vec::new(), Vec::<String>::new());
        let mut last = String::new();
        let mut is_truncated = false;
        for (key, stored) in objects.range(prefix.clone()..).take_while(|(key, _)| key.starts_with(&prefix)) {
            let delimiter = input.delimiter.as_deref().unwrap_or_default();
            let rest = &key[prefix.len()..];
            let common = match rest.find(delimiter) {
                Some(end) if !delimiter.is_empty() => Some(&key[..prefix.len() + end + delimiter.len()]),
                _ => None,
            };
            let name = common.unwrap_or(key);
            if *name <= *after || prefixes.last().is_some_and(|known| known == name) {
                continue;
            }
            if contents.len() + prefixes.len() == most {
                is_truncated = true;
                break;
            }
            last = name.to_owned();
            match common {
                Some(common) => prefixes.push(common.to_owned()),
                None => contents.push(Object {
                    key: Some(key.clone()),
                    e_tag: Some(stored.etag.clone()),
                    size: Some(stored.bytes.len() as i64),
                    last_modified: Some(stored.modified.into()),
                    ..Default::default()
                }),
            }
        }
        let prefixes: Vec<_> =
            prefixes.into_iter().map(|prefix| CommonPrefix { prefix: Some(prefix) }).collect();
        Ok(S3Response::new(ListObjectsV2Output {
            key_count: Some((contents.len() + prefixes.len()) as i32),
            contents: Some(contents),
            common_prefixes: Some(prefixes),
            is_truncated: Some(is_truncated),
            next_continuation_token: is_truncated.then_some(last),
            name: Some(input.bucket),
            prefix: input.prefix,
            ..Default::default()
        }))
    }

    async fn create_multipart_upload(
        &self,
        req: Req<CreateMultipartUploadInput>,
    ) -> Res<CreateMultipartUploadOutput> {
        let id = format!("upload-{}", self.next.fetch_add(1, Ordering::Relaxed));
        let upload = Upload { metadata: req.input.metadata, parts: BTreeMap::new() };
        self.uploads.lock().unwrap().insert(id.clone(), upload);
        Ok(S3Response::new(CreateMultipartUploadOutput {
            bucket: Some(req.input.bucket),
            key: Some(req.input.key),
            upload_id: Some(id),
            ..Default::default()
        }))
    }

    async fn upload_part(&self, req: Req<UploadPartInput>) -> Res<UploadPartOutput> {
        self.fault("part", false)?;
        let bytes = collect(req.input.body).await?;
        let etag = self.etag();
        let mut uploads = self.uploads.lock().unwrap();
        let upload = uploads.get_mut(&req.input.upload_id).ok_or_else(|| s3_error!(NoSuchUpload))?;
        upload.parts.insert(req.input.part_number, (bytes, etag.clone()));
        Ok(S3Response::new(UploadPartOutput { e_tag: Some(etag), ..Default::default() }))
    }

    async fn complete_multipart_upload(
        &self,
        req: Req<CompleteMultipartUploadInput>,
    ) -> Res<CompleteMultipartUploadOutput> {
        self.fault("complete", false)?;
        let input = req.input;
        let upload =
            self.uploads.lock().unwrap().remove(&input.upload_id).ok_or_else(|| s3_error!(NoSuchUpload))?;
        let mut bytes = Vec::new();
        for part in input.multipart_upload.and_then(|upload| upload.parts).unwrap_or_default() {
            let (data, _) = part
                .part_number
                .and_then(|number| upload.parts.get(&number))
                .filter(|(_, etag)| part.e_tag.as_deref() == Some(&etag[..]))
                .ok_or_else(|| s3_error!(InvalidPart))?;
            bytes.extend_from_slice(data);
        }
        let etag = self.store(&input.key, bytes, upload.metadata);
        Ok(S3Response::new(CompleteMultipartUploadOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            e_tag: Some(etag),
            ..Default::default()
        }))
    }

    async fn abort_multipart_upload(
        &self,
        req: Req<AbortMultipartUploadInput>,
    ) -> Res<AbortMultipartUploadOutput> {
        self.uploads.lock().unwrap().remove(&req.input.upload_id);
        Ok(S3Response::new(AbortMultipartUploadOutput::default()))
    }
}

struct Keys(Arc<Memory>);

#[async_trait::async_trait]
impl S3Auth for Keys {
    async fn get_secret_key(&self, access_key: &str) -> S3Result<SecretKey> {
        if access_key != ACCESS_KEY || self.0.refuses_credentials.load(Ordering::Relaxed) {
            return Err(s3_error!(InvalidAccessKeyId, "The key {access_key} is not known here"));
        }
        Ok(SecretKey::from(SECRET_KEY))
    }
}

/// A running server. It ends with its value.
pub(crate) struct Server {
    address: std::net::SocketAddr,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Server {
    pub(crate) fn memory(memory: Arc<Memory>) -> Server {
        let mut builder = S3ServiceBuilder::new(Shared(memory.clone()));
        builder.set_auth(Keys(memory));
        Server::serve(builder)
    }

    /// `s3s-fs` over a directory that has a subdirectory for each bucket.
    pub(crate) fn files(root: &std::path::Path) -> Server {
        let files = s3s_fs::FileSystem::new(root).unwrap();
        let mut builder = S3ServiceBuilder::new(files);
        builder.set_auth(s3s::auth::SimpleAuth::from_single(ACCESS_KEY, SECRET_KEY));
        Server::serve(builder)
    }

    fn serve(builder: S3ServiceBuilder) -> Server {
        set_credentials();
        let service = builder.build().into_shared();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind(("127.0.0.1", 0))).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let service = service.clone();
                tokio::spawn(async move {
                    let http = hyper::server::conn::http1::Builder::new();
                    // A client that hangs up is no failure of the server.
                    let _ = http.serve_connection(TokioIo::new(socket), service).await;
                });
            }
        });
        Server { address, runtime: Some(runtime) }
    }

    /// The address of a prefix of a bucket.
    pub(crate) fn place(&self, bucket: &str, prefix: &str) -> S3Place {
        S3Place {
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
            endpoint: Some(format!("http://{}", self.address)),
            region: Some("us-east-1".to_owned()),
            ..S3Place::default()
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
