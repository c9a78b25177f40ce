//! OpenDAL's errors as errors of the store, without credentials.

use std::time::Duration;

use forebay_types::Code;
use opendal::{Error, ErrorKind};

use super::super::error::StoreError;

/// Environment variables whose values never appear in an error, wherever they come from.
const SECRETS: [&str; 3] = ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN"];
/// S3's codes of a store that is full.
const FULL: [&str; 4] =
    ["QuotaExceeded", "StorageFull", "InsufficientStorage", "XMinioAdminBucketQuotaExceeded"];
/// Shortest value that is taken for a secret: shorter ones would blank out ordinary words.
const SECRET_BYTES: usize = 4;

/// A request that was not answered in time.
pub(super) fn timed_out(limit: Duration) -> Error {
    let message = format!("no answer within {} s", limit.as_secs_f64());
    Error::new(ErrorKind::Unexpected, message).with_context(TIMED_OUT, "yes").set_temporary()
}

/// S3's code for a bucket that is not there.
pub(super) const NO_BUCKET: &str = "NoSuchBucket";
const TIMED_OUT: &str = "forebay-timed-out";

/// The error of the store for one of OpenDAL.
pub(super) fn describe(e: &Error, what: String) -> StoreError {
    // RetryLayer makes a temporary error persistent when it gives up.
    let is_transient = e.is_temporary() || e.is_persistent();
    let shown = e.to_string();
    let code = match e.kind() {
        _ if shown.contains(NO_BUCKET) => Code::NotFound,
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::PermissionDenied => Code::AccessDenied,
        ErrorKind::ConfigInvalid => Code::Invalid,
        ErrorKind::RateLimited => Code::Busy,
        ErrorKind::ConditionNotMatch => Code::Stale,
        ErrorKind::IsADirectory => Code::IsDirectory,
        ErrorKind::NotADirectory => Code::NotDirectory,
        ErrorKind::AlreadyExists => Code::Exists,
        ErrorKind::Unsupported => Code::NotSupported,
        _ if FULL.iter().any(|word| shown.contains(word)) => Code::NoSpace,
        _ if shown.contains(TIMED_OUT) => Code::TimedOut,
        _ => Code::Io,
    };
    // OpenDAL repeats refused requests, because new credentials may be there. The mover waits for people.
    let is_transient = is_transient && !matches!(code, Code::NoSpace | Code::AccessDenied);
    let mut failure = StoreError::lasting(code, what).why(scrubbed(&reason(e)));
    failure.is_transient = is_transient;
    match code {
        Code::AccessDenied => failure.cure(
            "check the credentials (environment, ~/.aws, or the instance's role) and what they may do with the bucket",
        ),
        Code::Busy => failure.cure("the store is overloaded: Forebay keeps the data, and tries again more slowly"),
        Code::NoSpace => failure.cure("free space or raise the quota there; Forebay keeps the data until then"),
        Code::NotFound if shown.contains(NO_BUCKET) => failure.cure("create the bucket, or correct its name"),
        _ => failure,
    }
}

/// The store's own words where OpenDAL passes them on, else OpenDAL's.
fn reason(e: &Error) -> String {
    let message = e.message();
    let field = |name: &str| {
        let start = message.find(&format!("{name}: \""))? + name.len() + 3;
        let end = start + message[start..].find('"')?;
        Some(&message[start..end]).filter(|text| !text.is_empty())
    };
    match (field("code"), field("message")) {
        (Some(code), Some(text)) => format!("{text} ({code})"),
        (Some(code), None) => code.to_owned(),
        // An answer without a body.
        _ if message.is_empty() => match e.to_string().split_once("status: ") {
            Some((_, status)) => format!("the service answered {}", status.get(..3).unwrap_or(status)),
            None => e.kind().to_string(),
        },
        _ => {
            let source = std::error::Error::source(e).map(|source| format!(": {source}")).unwrap_or_default();
            format!("{message}{source}")
        }
    }
}

/// The text without values of secrets from the environment.
pub(super) fn scrubbed(text: &str) -> String {
    let mut text = text.to_owned();
    for name in SECRETS {
        if let Ok(secret) = std::env::var(name) {
            if secret.len() >= SECRET_BYTES {
                text = text.replace(&secret, "***");
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_has_the_words_of_the_store() {
        let message = r#"S3Error { code: "NoSuchBucket", message: "The bucket is gone", resource: "/b" }"#;
        let e = Error::new(ErrorKind::NotFound, message);
        let failure = describe(&e, "cannot read s3://b/x".into());
        assert_eq!(failure.code(), Code::NotFound);
        let shown = failure.to_string();
        assert!(shown.starts_with("cannot read s3://b/x: The bucket is gone (NoSuchBucket)"), "{shown}");
        assert!(shown.contains("create the bucket"), "{shown}");
    }

    #[test]
    fn error_says_whether_it_passes() {
        let kinds = [
            (timed_out(Duration::from_secs(1)), Code::TimedOut, true),
            (Error::new(ErrorKind::RateLimited, "SlowDown").set_persistent(), Code::Busy, true),
            (Error::new(ErrorKind::Unexpected, "503").set_temporary(), Code::Io, true),
            (Error::new(ErrorKind::Unexpected, "QuotaExceeded").set_temporary(), Code::NoSpace, false),
            (Error::new(ErrorKind::PermissionDenied, "no"), Code::AccessDenied, false),
        ];
        for (e, code, is_transient) in kinds {
            let failure = describe(&e, String::new());
            assert_eq!((failure.code(), failure.is_transient), (code, is_transient), "{e}");
        }
    }
}
