//! include/forebay.h compiles alone, as C11 and as C++17, with all warnings.

#[path = "../build/header.rs"]
#[allow(dead_code)] // The build script uses all of it.
mod header;

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

fn compile(compiler: &str, language: &str, standard: &str, source: &str) {
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("forebay-header-{}-{count}", std::process::id());
    let file = std::env::temp_dir().join(name).with_extension(language);
    std::fs::write(&file, source).unwrap();
    let output = Command::new(compiler)
        .args(["-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror"])
        .arg(format!("-std={standard}"))
        .arg("-I")
        .arg(include)
        .arg(&file)
        .output()
        .unwrap_or_else(|e| panic!("{compiler} cannot be run: {e}; install a C and C++ compiler"));
    std::fs::remove_file(&file).ok();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Uses some functions, so that a declaration that is not a function would be noticed.
const USES: &str = "
    #include <forebay.h>
    int use(void);
    int use(void) {
        forebay_pool *pool;
        struct forebay_dirent entry;
        forebay_dir *dir;
        struct stat st;
        if (forebay_attach(0, &pool) < 0 || forebay_open(pool, \"/f\", 0, 0) < 0) return 1;
        if (forebay_stat(pool, \"/f\", &st) < 0 || forebay_opendir(pool, \"/\", &dir) < 0) return 1;
        while (forebay_readdir(dir, &entry) == 1) { if (entry.name[0] == 0) return 1; }
        return forebay_closedir(dir);
    }
";

#[test]
fn header_alone_compiles_as_c11() {
    compile("cc", "c", "c11", "#include <forebay.h>\ntypedef int not_empty;\n");
    compile("cc", "c", "c11", USES);
}

#[test]
fn header_alone_compiles_as_cpp17() {
    compile("c++", "cpp", "c++17", "#include <forebay.h>\n");
    compile("c++", "cpp", "c++17", USES);
}

/// A program in C++ that refers to every function is linked with the library: no name is C++'s.
#[test]
fn every_function_can_be_called_from_cpp() {
    let functions = header::read(Path::new(env!("CARGO_MANIFEST_DIR"))).functions;
    let mut source = String::from("#include <forebay.h>\ntypedef void any();\nany *const all[] = {\n");
    for function in &functions {
        source.push_str(&format!("    reinterpret_cast<any *>({}),\n", function.name));
    }
    source.push_str("};\nint main() { return all[0] == nullptr; }\n");
    let here = std::env::current_exe().unwrap();
    let libraries = here.ancestors().nth(2).unwrap();
    let program = std::env::temp_dir().join(format!("forebay-cpp-{}", std::process::id()));
    let file = program.with_extension("cpp");
    std::fs::write(&file, source).unwrap();
    let mut compiler = Command::new("c++");
    compiler.args(["-Wall", "-Wextra", "-Werror", "-std=c++17", "-I"]);
    compiler.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("include")).arg(&file).arg("-o").arg(&program);
    compiler.arg("-L").arg(libraries).arg("-lforebay").arg(format!("-Wl,-rpath,{}", libraries.display()));
    let output = compiler.output().unwrap_or_else(|e| panic!("c++ cannot be run: {e}"));
    let ran = Command::new(&program).status();
    std::fs::remove_file(&file).ok();
    std::fs::remove_file(&program).ok();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(ran.is_ok_and(|status| status.success()));
}

#[test]
#[should_panic(expected = "no_such_function")]
fn a_wrong_use_of_the_header_is_caught() {
    compile("cc", "c", "c11", "#include <forebay.h>\nint f(void) { return no_such_function(); }\n");
}
