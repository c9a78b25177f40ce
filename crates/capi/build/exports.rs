//! Writes the Rust side of forebay.h: its structs and constants, and the functions that libforebay.so exports.

use std::fmt::Write;

use crate::header::{Function, Header, Variable};

/// Functions that use their memory argument after they have returned, or whose memory other processes may write
/// meanwhile. They receive its address instead of a slice.
const KEEP_MEMORY: [&str; 10] = [
    "forebay_file_read_start",
    "forebay_file_write_start",
    "forebay_memory_register",
    "forebay_register",
    "forebay_volume_put",
    "forebay_volume_get",
    "forebay_volume_putv",
    "forebay_volume_getv",
    "forebay_volume_put_start",
    "forebay_volume_get_start",
];

/// The structs and constants.
pub(crate) fn types(header: &Header) -> String {
    let mut out = String::new();
    for (name, number) in &header.constants {
        let (number, kind) =
            number.strip_suffix('u').map_or((&number[..], "c_int"), |number| (number, "u32"));
        writeln!(out, "/// See forebay.h.\npub const {name}: {kind} = {number};").unwrap();
    }
    for found in &header.structs {
        let name = &found.name;
        writeln!(out, "/// See forebay.h.\n#[repr(C)]\npub struct {name} {{").unwrap();
        for member in &found.members {
            writeln!(out, "    /// See forebay.h.\n    pub {}: {},", member.name, rust(&member.kind))
                .unwrap();
        }
        out.push_str("}\n");
    }
    out
}

/// The functions. Each converts its arguments and calls the function without `forebay_` inside the guard.
pub(crate) fn functions(header: &Header) -> String {
    header.functions.iter().map(exported).collect()
}

fn exported(function: &Function) -> String {
    let Function { returns, name, parameters } = function;
    let declared: Vec<_> = parameters.iter().map(|p| format!("{}: {}", p.name, rust(&p.kind))).collect();
    let body = name.strip_prefix("forebay_").unwrap_or_else(|| panic!("{name} is not a name of forebay.h"));
    let call = format!("{body}({})", arguments(function).join(", "));
    let kind = rust(returns);
    let call = match returns.as_str() {
        "const char *" => format!("guard(|| {call})"),
        "int64_t" => format!("call(|| unsafe {{ {call} }})"),
        _ => format!("call(|| unsafe {{ {call} }}) as {kind}"),
    };
    format!(
        "/// See forebay.h.\n///\n/// # Safety\n/// As forebay.h says.\n#[no_mangle]\n\
         pub unsafe extern \"C\" fn {name}({}) -> {kind} {{\n    \
         // SAFETY: forebay.h tells C callers what the arguments must be.\n    {call}\n}}\n\n",
        declared.join(", ")
    )
}

/// The arguments that the exported function passes for its parameters.
fn arguments(function: &Function) -> Vec<String> {
    let mut arguments = Vec::new();
    let mut left = function.parameters.as_slice();
    while let [first, rest @ ..] = left {
        left = rest;
        let name = &first.name;
        let counted = rest.first().filter(|next| is_count(next) && first.kind.ends_with('*'));
        let is_const = first.kind.starts_with("const ");
        arguments.push(match (counted, first.kind.as_str()) {
            (Some(_), kind) if kind.ends_with("void *") && KEEP_MEMORY.contains(&function.name.as_str()) => {
                name.clone()
            }
            (Some(count), kind) => {
                left = &left[1..];
                let is_bytes = kind.ends_with("char *") || kind.ends_with("void *");
                let slice = match (is_bytes, is_const) {
                    (true, true) => "answer::given_bytes",
                    (true, false) => "answer::given_room",
                    (false, true) => "answer::array",
                    (false, false) => "answer::array_mut",
                };
                let cast = if is_bytes { ".cast()" } else { "" };
                format!("{slice}({name}{cast}, {})?", count.name)
            }
            (None, "const char *") => format!("answer::text({name})"),
            (None, "forebay_pool *") => format!("answer::given({name})?"),
            (None, kind) if is_const && kind.ends_with(']') => format!("{name}.as_ref()"),
            (None, kind) if is_const && kind.ends_with('*') => format!("answer::given({name})?"),
            (None, kind) if is_handle(kind) => name.clone(),
            (None, kind) if kind.ends_with('*') => format!("{name}.as_mut()"),
            (None, _) => name.clone(),
        });
    }
    arguments
}

/// True for a parameter that is the number of elements, or bytes, at the pointer before it.
fn is_count(parameter: &Variable) -> bool {
    match parameter.kind.as_str() {
        "size_t" => matches!(parameter.name.as_str(), "bytes" | "room"),
        "int" => parameter.name == "room" || parameter.name.ends_with("_count"),
        _ => false,
    }
}

/// True for a handle of the library, a callback or its state, which are passed unchanged.
fn is_handle(kind: &str) -> bool {
    kind == "void *" || kind.starts_with("forebay_") && kind.ends_with(" *")
}

/// The Rust type of a C type.
fn rust(kind: &str) -> String {
    if let Some((element, count)) = kind.strip_suffix(']').and_then(|kind| kind.split_once('[')) {
        return match element.strip_prefix("const ") {
            // A parameter.
            Some(element) => format!("*const [{}; {count}]", rust(element)),
            None if element == "char" => format!("[u8; {count}]"),
            None => format!("[{}; {count}]", rust(element)),
        };
    }
    if kind == "forebay_done *" {
        return "Option<forebay_done>".into();
    }
    if let Some(target) = kind.strip_suffix('*') {
        return match target.trim().strip_prefix("const ") {
            Some(target) => format!("*const {}", rust(target)),
            None => format!("*mut {}", rust(target.trim())),
        };
    }
    match kind {
        "void" => "c_void".into(),
        "char" => "c_char".into(),
        "unsigned char" => "u8".into(),
        "int" => "c_int".into(),
        "unsigned int" | "uint32_t" => "u32".into(),
        "uint64_t" => "u64".into(),
        "int64_t" => "i64".into(),
        "size_t" => "usize".into(),
        "mode_t" | "uid_t" | "gid_t" => format!("libc::{kind}"),
        "struct stat" | "struct statvfs" | "struct timespec" | "struct iovec" => {
            kind.replace("struct ", "libc::")
        }
        _ if kind.starts_with("struct forebay_") => kind.replace("struct ", ""),
        _ if kind.starts_with("forebay_") => kind.into(),
        _ => panic!("forebay.h uses the type `{kind}`, of which build/exports.rs knows no Rust type"),
    }
}
