//! Resources files in both forms, and what is said of wrong ones.

use super::*;
use forebay_tasks::Recall;

fn parsed(name: &str, text: &str) -> Result<Resources> {
    parse(text, Path::new(name))
}

const OWN: &str = r#"
capacity = "8GiB"
media = "dram"
mount = "/mnt/pool"

[stores.project]
url = "file:///lustre/project?rate=1GB/s"

[stores]
bucket = "s3://bucket/prefix?region=eu"

[[directories]]
at = "/project"
store = "project"
drain = "close,open=snapshot:10m"
durable = "fsync"
rules = ["*.tmp=temporary", "ckpt/**=age:10m"]
prestage = ["mesh.nc", "input"]

[[directories]]
at = "data"
store = "bucket"
read-only = true
recall = "10GiB"
[directories.rules]
"mesh*" = "reusable"
"#;

#[test]
fn own_form_says_stores_directories_policies_and_capacity() {
    let resources = parsed("case.toml", OWN).unwrap();
    assert_eq!((resources.capacity, &resources.mount), (Some(8 << 30), &Some("/mnt/pool".into())));
    let [first, second] = &resources.directories[..] else { panic!("{resources:?}") };
    assert_eq!((&first.at[..], &*first.url.text), (&b"/project"[..], "file:///lustre/project?rate=1GB/s"));
    assert_eq!(first.settings.url, first.url.text);
    assert_eq!(first.settings.drain.to_string(), "close,open=snapshot:600s");
    assert_eq!(first.settings.policy_of(b"ckpt/1/x").to_string(), "age:600s");
    assert_eq!(
        (first.settings.durable, &first.prestage[..]),
        (forebay_tasks::Durable::Fsync, &["mesh.nc".into(), "input".into()][..])
    );
    assert_eq!((&second.at[..], second.settings.read_only), (&b"/data"[..], true));
    assert_eq!((first.settings.recall, second.settings.recall), (Recall::Yes, Recall::UpTo(10 << 30)));
    assert!(second.settings.policy_of(b"a/mesh.1").reusable);
}

#[test]
fn own_form_is_read_in_yaml_too() {
    let text = "capacity: 1GiB\nstores: {p: /lustre}\ndirectories:\n- at: /d\n  store: p\n  rules: ['*.tmp=never']\n  recall: no\n";
    let resources = parsed("case.yaml", text).unwrap();
    assert_eq!((resources.capacity, resources.directories.len()), (Some(1 << 30), 1));
    assert!(resources.directories[0].settings.policy_of(b"x.tmp").is_temporary());
    assert_eq!(resources.directories[0].settings.recall, Recall::No);
}

const ECHOFS: &str = r#"
## global settings
global-settings: [
    root-dir: "/slow/root/",
    mount-dir: "/local/mnt/",
    results-dir: "/slow/root/job42",
    workers: "1",
    transfer-size: "128KiB"
]

backends: [
    [ id: "dram://",
      type: "DRAM",
      capacity: "1 GiB" ],

    [ id: "nvml://",
      type: "NVRAM-NVML",
      capacity: "2 GiB",
      daxfs: "/pmem/"
    ]
]

resources: [
    # transferred back at the end
    [ path: "/slow/root/a.txt",
      backend: "nvml://",
      flags: "persistent" ],
    [ path: "/slow/root/in/b",
      backend: "dram://",
      flags: "temporary" ],
    [ path: "/slow/root/mesh/",
      backend: "dram://",
      flags: "reusable" ]
]
"#;

#[test]
fn form_of_echofs_is_a_store_at_the_root_with_rules() {
    let resources = parsed("job.conf", ECHOFS).unwrap();
    assert_eq!((resources.capacity, &resources.mount), (Some(3 << 30), &Some("/local/mnt".into())));
    assert_eq!(resources.notes.len(), 3, "{:?}", resources.notes);
    let [root] = &resources.directories[..] else { panic!("{:?}", resources.directories) };
    assert_eq!((&root.at[..], &*root.url.text), (&b"/"[..], "/slow/root"));
    assert_eq!(root.prestage, ["a.txt", "in/b", "mesh"]);
    let policy = |path: &str| root.settings.policy_of(path.as_bytes()).to_string();
    assert_eq!(
        (policy("a.txt"), policy("in/b"), policy("new")),
        ("close".into(), "never".into(), "never".into())
    );
    assert_eq!((policy("mesh/x/y"), policy("mesh")), ("close,reusable".into(), "close,reusable".into()));
}

#[test]
fn errors_name_line_and_key() {
    let directory = |more: &str| {
        format!("[stores]\np = \"/lustre\"\n[[directories]]\nat = \"/d\"\nstore = \"p\"\n{more}\n")
    };
    for (name, text, words) in [
        ("a.toml", "capacity = 8GiB\n".to_owned(), &["line 1", "not TOML"][..]),
        ("a.toml", "\ncapacity = \"much\"".to_owned(), &["line 2", "key capacity"]),
        ("a.toml", "media = \"paper\"".to_owned(), &["line 1", "key media"]),
        (
            "a.toml",
            "capcity = \"1GiB\"".to_owned(),
            &["line 1", "key capcity", "no such key", "capacity, media"],
        ),
        (
            "a.toml",
            directory("drain = \"sometimes\""),
            &["line 6", "key directories[0].drain", "none of close"],
        ),
        (
            "a.toml",
            directory("recall = \"some\""),
            &["line 6", "key directories[0].recall", "neither yes nor no"],
        ),
        ("a.toml", directory("durable = true"), &["line 6", "directories[0].durable", "a text is wanted"]),
        (
            "a.toml",
            directory("read-only = \"yes\""),
            &["line 6", "directories[0].read-only", "true or false"],
        ),
        (
            "a.toml",
            directory("rules = [\n\"*.tmp\"]"),
            &["line 7", "directories[0].rules[0]", "PATTERN=POLICY"],
        ),
        ("a.toml", directory("url = \"/x\""), &["line 4", "directories[0]", "both store and url"]),
        ("a.toml", directory("colour = \"red\""), &["line 6", "directories[0].colour", "no such key"]),
        (
            "a.toml",
            "[[directories]]\nat = \"\"\nurl = \"/x\"".to_owned(),
            &["line 2", "directories[0].at", "empty"],
        ),
        ("a.toml", directory("prestage = [\"\"]"), &["line 6", "directories[0].prestage[0]", "empty"]),
        ("a.yaml", "- capacity: 1GiB\n- capacity: 2GiB\n".to_owned(), &["line 2", "capacity", "twice"]),
        (
            "a.toml",
            directory("[[directories]]\nat = \"/d/e\"\nurl = \"/x\""),
            &["directories[1]", "/d is in front"],
        ),
        ("a.toml", "[[directories]]\nat = \"/d\"\nstore = \"q\"".to_owned(), &["line 3", "no store \"q\""]),
        ("a.toml", "[[directories]]\nurl = \"/d\"".to_owned(), &["line 2", "no `at`"]),
        ("a.toml", "[stores]\np = \"http://x\"".to_owned(), &["line 2", "stores.p", "no kind of store"]),
        ("a.yaml", "stores: [unclosed".to_owned(), &["not YAML"]),
        ("a.conf", "{{{".to_owned(), &["not TOML", "not YAML"]),
        (
            "a.conf",
            ECHOFS.replace("\"persistent\"", "\"precious\""),
            &["line 27", "resources[0].flags", "no flag"],
        ),
        (
            "a.conf",
            ECHOFS.replace("/slow/root/in/b", "/other/b"),
            &["line 28", "resources[1].path", "not below root-dir"],
        ),
        (
            "a.conf",
            ECHOFS.replace(
                "backend: \"dram://\",\n      flags: \"temporary\"",
                "backend: \"disk://\",\n      flags: \"temporary\"",
            ),
            &["line 29", "no backend"],
        ),
        (
            "a.conf",
            ECHOFS.replace("workers", "wrokers"),
            &["line 7", "global-settings.wrokers", "no such key"],
        ),
    ] {
        let e = match parsed(name, &text) {
            Err(e) => e,
            Ok(resources) => panic!("{text}: {resources:?}"),
        };
        let said = format!("{e}; {}", e.cure);
        for words in words {
            assert!(said.contains(words), "{words:?} is not in {said:?}, for\n{text}");
        }
    }
}

#[test]
fn credentials_in_a_url_are_refused_and_not_repeated() {
    let e = parsed("a.toml", "[stores]\np = \"s3://me:hunter2@b\"").unwrap_err();
    assert!(e.to_string().contains("line 2") && !e.to_string().contains("hunter2"), "{e}");
}
