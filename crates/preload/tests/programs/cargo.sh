# cargo and rustc: a crate of this workspace, a macro that the compiler loads, a build script, a program.
here=$(cd "$(dirname "$0")/../../.." && pwd); cd "$1" || exit 1
export CARGO_HOME=${CARGO_HOME:-$OWN_HOME/.cargo} RUSTUP_HOME=${RUSTUP_HOME:-$OWN_HOME/.rustup} CARGO_TARGET_DIR=$1/target CARGO_NET_OFFLINE=true CARGO_TERM_COLOR=never CARGO_BUILD_JOBS=2 CARGO_PROFILE_DEV_DEBUG=0
for name in $(env | sed -n 's/^\(CARGO_[A-Z_]*\)=.*/\1/p'); do case $name in CARGO_HOME | CARGO_TARGET_DIR | CARGO_NET_OFFLINE | CARGO_TERM_COLOR | CARGO_BUILD_JOBS | CARGO_PROFILE_DEV_DEBUG) ;; *) unset "$name" ;; esac; done; unset CARGO RUSTFLAGS
mkdir -p shout/src program/src; cp -r "$here/types" types; cp "$here/../Cargo.lock" .; sed 's/^members = .*/members = ["types", "shout", "program"]/; s/^proptest = .*//' "$here/../Cargo.toml" > Cargo.toml; sed -i '/^\[dev-dependencies\]/,/^$/d' types/Cargo.toml
printf '[package]\nname = "shout"\nversion = "1.0.0"\nedition = "2021"\n[lib]\nproc-macro = true\n' > shout/Cargo.toml
cat > shout/src/lib.rs <<'R'
#[proc_macro]
pub fn shout(words: proc_macro::TokenStream) -> proc_macro::TokenStream {
    format!("{:?}", words.to_string().to_uppercase()).parse().unwrap()
}
R
printf '[package]\nname = "program"\nversion = "1.0.0"\nedition = "2021"\n[dependencies]\nshout = { path = "../shout" }\nforebay-types = { workspace = true }\n' > program/Cargo.toml; sed -i 's|path = "crates/types"|path = "types"|' Cargo.toml
cat > program/build.rs <<'R'
fn main() {
    let out = std::path::PathBuf::from(std::env::var_os("OUT_DIR").unwrap());
    std::fs::write(out.join("made.rs"), "pub const MADE: &str = \"by the build script\";").unwrap();
    println!("cargo:rerun-if-changed=build.rs");
}
R
cat > program/src/main.rs <<'R'
include!(concat!(env!("OUT_DIR"), "/made.rs"));
fn main() {
    println!("{} {} {}", shout::shout!(whisper), MADE, forebay_types::Code::NotFound.errno());
}
#[test]
fn two() { assert_eq!(1 + 1, 2); std::fs::write("tested", "yes").unwrap(); }
R
said() { grep -E '^ +(Compiling|Finished|Fresh|Dirty|Running)|^error|^warning' | sed 's/ in .*//; s/ (.*//; s/`.*//' | sort; }
cargo build --offline 2>&1 | said; target/debug/program; (cd program && cargo run -q --offline); cargo build --offline 2>&1 | said; echo '// more' >> program/src/main.rs; cargo build --offline 2>&1 | said; cargo test -q --offline -p program 2>&1 | grep -c 'test result: ok. 1 passed'; cat program/tested
sed -i 's/whisper/murmur/' program/src/main.rs; cargo run -q --offline -p program; cargo check --offline -p shout 2>&1 | said; echo 'fn main() { nothing() }' > program/src/main.rs; cargo build --offline 2>&1 | grep -c '^error'; cargo metadata --offline --no-deps --format-version 1 | grep -o '"name":"program"' | head -1
rustc --edition 2021 -O -o alone - <<< 'fn main() { println!("alone at {}", std::env::current_exe().unwrap().display()); }' && ./alone; cargo clean --offline 2> /dev/null; ls -A; rm -rf target types Cargo.lock
