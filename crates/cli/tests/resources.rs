//! `forebay up --resources`: a pool in front of the stores that a file names.

use std::path::Path;
use std::process::{Command, Output};

/// A directory of the test, with a pool that is taken down at its end.
struct Place(std::path::PathBuf);

impl Place {
    fn new(name: &str) -> Place {
        let path = std::env::temp_dir().join(format!("forebay-resources-{}-{name}", std::process::id()));
        std::fs::create_dir_all(path.join("slow/in")).unwrap();
        std::fs::create_dir_all(path.join("archive")).unwrap();
        std::fs::write(path.join("slow/in/mesh"), "a mesh\n").unwrap();
        Place(path)
    }

    fn forebay(&self, arguments: &[&str]) -> Output {
        let pool = self.0.join("pool");
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.env_remove("FOREBAY_POOL").args(["--pool", pool.to_str().unwrap()]).args(arguments);
        command.output().unwrap()
    }

    fn up(&self, file: &str, text: &str) -> Output {
        let file = self.0.join(file);
        std::fs::write(&file, text.replace("@", self.0.to_str().unwrap())).unwrap();
        self.forebay(&["up", "--json", "--resources", file.to_str().unwrap()])
    }

    fn run(&self, script: &str) -> String {
        let done = self.forebay(&["run", "--", "sh", "-ec", script]);
        assert!(done.status.success(), "{script}: {}", words(&done));
        String::from_utf8_lossy(&done.stdout).into_owned()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = self.forebay(&["down", "--discard"]);
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn words(done: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr))
}

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

#[test]
fn pool_of_a_resources_file_has_its_stores_policies_and_data() {
    let place = Place::new("own");
    let done = place.up(
        "case.toml",
        "capacity = \"128MiB\"\n[stores]\nslow = \"@/slow\"\n[[directories]]\nat = \"/run\"\nstore = \"slow\"\n\
         rules = [\"*.tmp=temporary\"]\nprestage = [\"in\"]\n\
         [[directories]]\nat = \"/old\"\nurl = \"@/archive\"\ndrain = \"request\"\n",
    );
    assert!(done.status.success(), "{}", words(&done));
    let said: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(said["capacity_bytes"], 128 << 20);
    assert_eq!(said["directories"][0]["rules"][0]["policy"], "never", "{said}");
    let task = said["directories"][0]["tasks"][0].as_u64().unwrap();
    let waited = place.forebay(&["tasks", "wait", &task.to_string()]);
    assert!(waited.status.success(), "{}", words(&waited));
    let state = place.forebay(&["state", "--json", "/run/in/mesh"]);
    let state: serde_json::Value = serde_json::from_slice(&state.stdout).unwrap();
    assert_eq!(state[0]["state"], "clean", "{state}");
    assert_eq!(
        place.run("cd /forebay; cat run/in/mesh; echo 1 > run/x; echo 2 > run/x.tmp; echo 3 > old/y"),
        "a mesh\n"
    );
    let down = place.forebay(&["down"]);
    assert!(down.status.success(), "{}", words(&down));
    let found = ["slow/x", "slow/x.tmp", "archive/y"].map(|name| read(&place.0.join(name)));
    assert_eq!(found, [Some("1\n".into()), None, Some("3\n".into())]);
}

#[test]
fn pool_of_a_file_of_echofs_copies_persistent_files_back() {
    let place = Place::new("echofs");
    let done = place.up(
        "job.conf",
        "global-settings: [\n  root-dir: \"@/slow\",\n  results-dir: \"@/slow/job\"\n]\nbackends: [\n  [ id: \"dram://\", \
         type: \"DRAM\", capacity: \"128 MiB\" ]\n]\nresources: [\n  [ path: \"@/slow/in/mesh\", backend: \"dram://\", \
         flags: \"persistent\" ]\n]\n",
    );
    assert!(done.status.success() && words(&done).contains("results-dir is ignored"), "{}", words(&done));
    place.run("cd /forebay; cat in/mesh; echo new >> in/mesh; echo scratch > in/other");
    let down = place.forebay(&["down"]);
    assert!(down.status.success(), "{}", words(&down));
    assert_eq!(read(&place.0.join("slow/in/mesh")).as_deref(), Some("a mesh\nnew\n"));
    assert_eq!(read(&place.0.join("slow/in/other")), None);
}

#[test]
fn file_with_an_error_or_a_store_that_is_missing_starts_no_pool() {
    let place = Place::new("wrong");
    let down = || !place.forebay(&["status"]).status.success();
    let done = place.up(
        "case.toml",
        "capacity = \"128MiB\"\n[[directories]]\nat = \"/d\"\nurl = \"@/slow\"\ndrian = \"close\"\n",
    );
    assert!(!done.status.success() && down());
    assert!(words(&done).contains("line 5, key directories[0].drian"), "{}", words(&done));
    let done =
        place.up("case.toml", "capacity = \"128MiB\"\n[[directories]]\nat = \"/d\"\nurl = \"@/none\"\n");
    assert!(
        !done.status.success() && words(&done).contains("no such directory") && down(),
        "{}",
        words(&done)
    );
    let done = place.forebay(&["up", "--resources", "/none.toml"]);
    assert!(!done.status.success() && words(&done).contains("resources file /none.toml"), "{}", words(&done));
}
