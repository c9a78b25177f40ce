//! include/forebay.f90, the module for Fortran, follows from include/forebay.h, and a Fortran program works with it.
//!
//! `FOREBAY_PRINT=1 cargo test --workspace --test fortran` prints the module as the header demands it.

#[path = "../build/header.rs"]
#[allow(dead_code)] // The build script uses all of it.
mod header;
#[path = "../../preload/tests/support/mod.rs"]
mod support;

use header::{Function, Header, Variable};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{binary, succeeds, Pool, Scratch};

const HEAD: &str = "\
! forebay.f90 - the functions of forebay.h for Fortran 2018 programs. Compile it, and link with -lforebay.
!
! It is made from forebay.h, which says what each function does. Arguments have the same names and order. In Fortran:
!
! - Pools, files, volumes and queues are type(c_ptr). An argument that C declares with two stars is intent(out).
! - Data are any contiguous array (type(*), dimension(*)). Those of a function whose name ends in _start must have the
!   asynchronous attribute, and target or the like, so that the compiler keeps no copy until the call has ended.
! - Paths, names and specifiers end with c_null_char: 'results'//c_null_char.
! - Numbers without a sign in C have the same bits in Fortran: 2**63 and more are negative.
! - Arguments that may be NULL in C are optional; those that are passed by value take c_null_ptr or c_null_funptr.
! - Functions with a struct stat or statvfs are not here.
!
! SPDX-License-Identifier: Apache-2.0 OR MIT
module forebay
    use, intrinsic :: iso_c_binding
    implicit none
    private
";

/// A struct of the system's headers: name here, name in C, types and names of its members.
type SystemStruct = (&'static str, &'static str, &'static [(&'static str, &'static str)]);

/// Structs of the system's headers that functions take.
const SYSTEM_STRUCTS: [SystemStruct; 2] = [
    ("forebay_iovec", "struct iovec", &[("type(c_ptr)", "iov_base"), ("integer(c_size_t)", "iov_len")]),
    ("forebay_timespec", "struct timespec", &[("integer(c_long)", "tv_sec"), ("integer(c_long)", "tv_nsec")]),
];

/// Numbers of the system's headers, for `flags`.
const SYSTEM_CONSTANTS: [(&str, i32); 9] = [
    ("forebay_o_rdonly", libc::O_RDONLY),
    ("forebay_o_wronly", libc::O_WRONLY),
    ("forebay_o_rdwr", libc::O_RDWR),
    ("forebay_o_creat", libc::O_CREAT),
    ("forebay_o_excl", libc::O_EXCL),
    ("forebay_o_trunc", libc::O_TRUNC),
    ("forebay_o_append", libc::O_APPEND),
    ("forebay_at_symlink_nofollow", libc::AT_SYMLINK_NOFOLLOW),
    ("forebay_rename_noreplace", libc::RENAME_NOREPLACE as i32),
];

/// Arguments that the header allows to be NULL.
const OPTIONAL: [(&str, &str); 6] = [
    ("forebay_attach", "dir"),
    ("forebay_utimens", "times"),
    ("forebay_stage_test", "status"),
    ("forebay_stage_wait", "status"),
    ("forebay_file_read_start", "request"),
    ("forebay_file_write_start", "request"),
];

/// Arguments that functions read and change.
const CHANGED: [(&str, &str); 2] =
    [("forebay_model_learn", "corrections"), ("forebay_model_quick", "calibration")];

/// A number's type in Fortran.
fn number(kind: &str) -> Option<&'static str> {
    Some(match kind {
        "int" => "integer(c_int)",
        "unsigned int" | "uint32_t" | "mode_t" | "uid_t" | "gid_t" => "integer(c_int32_t)",
        "int64_t" | "uint64_t" => "integer(c_int64_t)",
        "size_t" => "integer(c_size_t)",
        "unsigned char" => "integer(c_signed_char)",
        _ => return None,
    })
}

/// A struct's type in Fortran.
fn structure(kind: &str) -> Option<String> {
    let system = SYSTEM_STRUCTS.iter().find(|(_, c, _)| *c == kind).map(|(name, ..)| (*name).to_owned());
    system.or_else(|| kind.strip_prefix("struct forebay_").map(|name| format!("forebay_{name}")))
}

/// The declaration of a parameter but for its name.
fn parameter(function: &Function, index: usize) -> String {
    let Variable { kind, name } = &function.parameters[index];
    if let Some(number) = number(kind) {
        return format!("{number}, value");
    }
    let may_lack = OPTIONAL.contains(&(&function.name, name));
    let optional = if may_lack { ", optional" } else { "" };
    if kind == "forebay_done *" {
        return "type(c_funptr), value".into();
    }
    if kind.ends_with("**") {
        return format!("type(c_ptr), intent(out){optional}");
    }
    let is_const = kind.starts_with("const ");
    let intent = match is_const {
        true => "intent(in)",
        false if CHANGED.contains(&(&function.name, name)) => "intent(inout)",
        false => "intent(out)",
    };
    let target = kind.trim_start_matches("const ").trim_end_matches("[2]").trim_end_matches('*').trim();
    if target == "char" {
        return format!("character(kind=c_char), dimension(*), {intent}{optional}");
    }
    if target == "void" {
        let waits = if function.name.ends_with("_start") || function.name.contains("_memory_") {
            ", asynchronous"
        } else {
            ""
        };
        return match name.as_str() {
            "state" | "memory" => "type(c_ptr), value".into(),
            // An assumed type cannot be intent(out).
            _ if is_const => format!("type(*), dimension(*), intent(in){waits}"),
            _ => format!("type(*), dimension(*), intent(inout){waits}"),
        };
    }
    let is_array = kind.ends_with("[2]")
        || function
            .parameters
            .get(index + 1)
            .is_some_and(|next| next.name.ends_with("_count") || next.name == "room");
    let dimension = if is_array { ", dimension(*)" } else { "" };
    match (number(target), structure(target)) {
        (Some(number), _) => format!("{number}{dimension}, {intent}{optional}"),
        (None, Some(name)) => format!("type({name}){dimension}, {intent}{optional}"),
        (None, None) => {
            assert!(
                target.starts_with("forebay_"),
                "{}: {kind} {name}: no such type is known",
                function.name
            );
            "type(c_ptr), value".into()
        }
    }
}

fn result(kind: &str) -> &'static str {
    number(kind).unwrap_or_else(|| {
        assert_eq!(kind, "const char *", "no such result is known");
        "type(c_ptr)"
    })
}

fn is_left_out(function: &Function) -> bool {
    function.parameters.iter().any(|p| p.kind.contains("struct stat"))
}

/// A statement, broken at commas into lines of at most 120 columns.
fn statement(out: &mut String, indent: usize, text: &str) {
    let mut line = " ".repeat(indent);
    for (i, word) in text.split_inclusive(", ").enumerate() {
        if i > 0 && line.len() + word.len() > 117 {
            let _ = writeln!(out, "{} &", line.trim_end());
            line = " ".repeat(indent + 4);
        }
        line.push_str(word);
    }
    let _ = writeln!(out, "{}", line.trim_end());
}

fn constant(out: &mut String, name: &str, written: &str) {
    let value = match written.trim_end_matches('u').strip_prefix("0x") {
        Some(digits) => format!("int(z'{digits}', c_int32_t)"),
        None => written.to_owned(),
    };
    let _ = writeln!(out, "    integer(c_int), parameter, public :: {name} = {value}");
}

fn types(out: &mut String, header: &Header) {
    let system = SYSTEM_STRUCTS.iter().map(|(name, _, members)| {
        let members = members.iter().map(|(kind, name)| format!("{kind} :: {name}"));
        ((*name).to_owned(), members.collect::<Vec<_>>())
    });
    let own = header.structs.iter().map(|s| {
        let members = s.members.iter().map(|member| match member.kind.strip_prefix("char[") {
            Some(length) => format!("character(kind=c_char) :: {}({}", member.name, length.replace(']', ")")),
            None if member.kind == "void *" => format!("type(c_ptr) :: {}", member.name),
            None => {
                let (kind, array) = member.kind.split_at(member.kind.find('[').unwrap_or(member.kind.len()));
                let kind = number(kind).unwrap_or_else(|| panic!("{}: {}", s.name, member.kind));
                format!("{kind} :: {}{}", member.name, array.replace('[', "(").replace(']', ")"))
            }
        });
        (s.name.clone(), members.collect())
    });
    for (name, members) in system.chain(own) {
        let _ = writeln!(out, "\n    type, bind(c), public :: {name}");
        for member in members {
            let _ = writeln!(out, "        {member}");
        }
        let _ = writeln!(out, "    end type");
    }
}

fn interface(out: &mut String, function: &Function) {
    let declared: Vec<_> = (0..function.parameters.len()).map(|i| parameter(function, i)).collect();
    let answer = result(&function.returns);
    let text = declared.iter().map(String::as_str).chain([answer]).collect::<Vec<_>>().join(" ");
    let words: BTreeSet<_> =
        text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| w.len() > 2).collect();
    let imports = words.into_iter().filter(|w| w.starts_with("c_") || w.starts_with("forebay_"));
    let names: Vec<_> = function.parameters.iter().map(|p| p.name.as_str()).collect();
    let head = format!("function {}({}) bind(c)", function.name, names.join(", "));
    statement(out, 8, &head);
    statement(out, 12, &format!("import :: {}", imports.collect::<Vec<_>>().join(", ")));
    for (name, declared) in names.iter().zip(&declared) {
        let _ = writeln!(out, "            {declared} :: {name}");
    }
    let _ = writeln!(out, "            {answer} :: {}", function.name);
    let _ = writeln!(out, "        end function");
}

/// The module that follows from the header.
fn module(header: &Header) -> String {
    let mut out = HEAD.to_owned();
    out.push('\n');
    for (name, number) in &header.constants {
        constant(&mut out, &name.to_lowercase(), number);
    }
    for (name, number) in SYSTEM_CONSTANTS {
        constant(&mut out, name, &number.to_string());
    }
    types(&mut out, header);
    let functions: Vec<_> = header.functions.iter().filter(|function| !is_left_out(function)).collect();
    let names: Vec<_> = functions.iter().map(|function| function.name.as_str()).collect();
    out.push('\n');
    for some in names.chunks(4) {
        statement(&mut out, 4, &format!("public :: {}", some.join(", ")));
    }
    out.push_str("    public :: forebay_target\n\n    interface\n");
    for function in functions {
        interface(&mut out, function);
    }
    out.push_str(
        "    end interface

contains

    ! A target's number: as the macro FOREBAY_TARGET.
    pure integer(c_int32_t) function forebay_target(node, index)
        integer, intent(in) :: node, index
        forebay_target = ior(shiftl(int(node, c_int32_t), 16), int(index, c_int32_t))
    end function

end module
",
    );
    out
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn fortran_module_is_what_the_header_demands() {
    let expected = module(&header::read(&root()));
    if std::env::var_os("FOREBAY_PRINT").is_some() {
        println!("{expected}");
    }
    let found = std::fs::read_to_string(root().join("include/forebay.f90")).unwrap_or_default();
    let differs = expected.lines().zip(found.lines()).find(|(expected, found)| expected != found);
    assert!(
        expected == found,
        "include/forebay.f90 is not what forebay.h demands ({differs:?}): \
         FOREBAY_PRINT=1 cargo test --workspace --test fortran -- --nocapture"
    );
}

fn build(scratch: &Path) -> PathBuf {
    let libraries = binary("libforebay.so").parent().unwrap().to_owned();
    let program = scratch.join("interface");
    let mut compiler = Command::new("gfortran");
    compiler.args(["-std=f2018", "-Wall", "-Wextra", "-Werror", "-O2", "-fcheck=all"]);
    // What was read must have the bits that were written.
    compiler.arg("-Wno-compare-reals").arg("-J").arg(scratch).arg("-o").arg(&program);
    compiler.arg(root().join("include/forebay.f90")).arg(root().join("tests/interface.f90"));
    compiler.arg("-L").arg(&libraries).arg("-lforebay").arg(format!("-Wl,-rpath,{}", libraries.display()));
    succeeds(&mut compiler);
    program
}

#[test]
fn interface_from_fortran_does_what_the_header_says() {
    let pool = Pool::start();
    // SAFETY: geteuid has no arguments.
    let has_volumes = unsafe { libc::geteuid() } == 0;
    if has_volumes {
        let mut forebay = Command::new(binary("forebay"));
        succeeds(forebay.arg("--pool").arg(pool.path()).args(["volume", "create", "v", "--size", "4MiB"]));
    }
    let scratch = Scratch::new();
    let mut program = Command::new(build(scratch.path()));
    succeeds(program.env("FOREBAY_POOL", pool.path()).arg(if has_volumes { "volumes" } else { "" }));
}
