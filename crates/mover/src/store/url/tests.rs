use super::*;

fn parse(text: &str) -> StoreUrl {
    text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
}

fn failure(text: &str) -> String {
    text.parse::<StoreUrl>().expect_err(text).to_string()
}

#[test]
fn url_shown_parses_to_the_same_store() {
    for text in [
        "/scratch/user",
        "/odd?rate=1",
        "file:///scratch/a%20b?rate=100MB/s&latency=30ms",
        "file:///x?parallel=1-8",
        "s3://bucket",
        "s3://bucket/a/b?endpoint=http://127.0.0.1:9000&region=eu-west-1&path_style=no",
    ] {
        let url = parse(text);
        assert_eq!(parse(&url.to_string()), url, "{text}");
    }
    assert_eq!(parse("/scratch/user").to_string(), "/scratch/user");
    let raw = StoreUrl::parse(b"/a\xff").unwrap();
    assert_eq!(parse(&raw.to_string()), raw);
    let slow = parse("file:///d?rate=100MB/s&latency=30ms");
    assert_eq!(slow.limits.bytes_per_second, 100_000_000);
    assert_eq!(slow.limits.latency, Duration::from_millis(30));
    assert_eq!(slow.place, StorePlace::Directory("/d".into()));
}

#[test]
fn url_with_a_wrong_word_names_the_word_and_the_cure() {
    for (text, words) in [
        ("scratch/x", &["no absolute path", "s3://BUCKET"][..]),
        ("s4://b/x", &["\"s4\"", "did you mean s3://"]),
        ("gopher://b/x", &["\"gopher\"", "file://"]),
        ("file://server/x", &["\"server\"", "file:///DIR"]),
        ("file:///x?rat=1", &["\"rat\"", "did you mean rate"]),
        ("file:///x?region=eu", &["\"region\"", "rate, latency"]),
        ("file:///x?rate=fast", &["\"fast\"", "rate=100MB/s"]),
        ("file:///x?latency=30", &["\"30\"", "latency=30ms"]),
        ("file:///x?rate", &["\"rate\"", "rate=VALUE"]),
        ("file:///a%2", &["%XX"]),
        ("s3://", &["no name of a bucket"]),
        ("s3://Bucket/x", &["\"Bucket\"", "lower-case"]),
        ("s3://b/../x", &["\"../x\""]),
        ("s3://b/x?endpoint=host:9", &["http://"]),
        ("s3://b/x?endpoint=http://h/path", &["host and a port"]),
    ] {
        let message = failure(text);
        for word in words {
            assert!(message.contains(word), "{text}: {message}");
        }
    }
}

#[test]
fn url_with_credentials_is_refused_and_they_are_not_repeated() {
    for text in [
        "s3://AKIA123:hunter2@bucket/x",
        "s3://bucket/x?secret_access_key=hunter2",
        "s3://bucket/x?access_key_id=hunter2",
        "s3://bucket/x?Token=hunter2",
        "s3://bucket/x?endpoint=http://me:hunter2@host:9000",
        "s3://bucket/x?endpoint=hunter2@host",
    ] {
        let error = text.parse::<StoreUrl>().expect_err(text);
        let shown = format!("{error} {error:?}");
        assert!(!shown.contains("hunter2"), "{shown}");
        assert!(shown.contains("AWS_ACCESS_KEY_ID") || shown.contains("http"), "{shown}");
    }
}

#[test]
fn url_of_an_object_is_the_store_of_its_directory_and_its_name() {
    let split = |text: &str| {
        let (store, path) = parse(text).object().unwrap();
        (store, path.as_bytes().to_vec())
    };
    assert_eq!(split("/a/b"), (parse("/a"), b"b".to_vec()));
    assert_eq!(split("file:///a%20b/c?rate=1MB/s"), (parse("file:///a%20b?rate=1MB/s"), b"c".to_vec()));
    assert_eq!(split("s3://bucket/c"), (parse("s3://bucket"), b"c".to_vec()));
    assert_eq!(split("s3://bucket/a/b/c?region=x"), (parse("s3://bucket/a/b?region=x"), b"c".to_vec()));
    for text in ["/", "s3://bucket", "s3://bucket/"] {
        let e = parse(text).object().unwrap_err();
        assert!(e.to_string().contains("names no object"), "{text}: {e}");
    }
}
