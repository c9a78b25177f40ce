//! Compares the kept bindings' sizes and offsets with those that a C compiler gives the installed headers, if these
//! describe the same ABI. Checks that an installed library has every symbol in the requested version.

use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::Command;

use forebay_fabric_sys::*;

macro_rules! facts {
    ($(struct $type:ident { $($field:ident $(as $c:ident)?),* })*) => {
        [$(
            (format!("sizeof(struct {})", stringify!($type)), size_of::<$type>()),
            $((
                format!("offsetof(struct {}, {})", stringify!($type), facts!(@name $field $($c)?)),
                offset_of!($type, $field),
            ),)*
        )*]
    };
    (@name $field:ident) => { stringify!($field) };
    (@name $field:ident $c:ident) => { stringify!($c) };
}

#[test]
fn kept_bindings_agree_with_the_installed_headers() {
    let header = Path::new("/usr/include/rdma/fabric.h");
    let Ok(text) = std::fs::read_to_string(header) else {
        return println!("skipped: {} is not installed (libfabric-dev)", header.display());
    };
    let number = |name: &str| -> Option<u32> {
        text.lines().find_map(|l| l.strip_prefix("#define ")?.strip_prefix(name)?.trim().parse().ok())
    };
    let version = (number("FI_MAJOR_VERSION").unwrap(), number("FI_MINOR_VERSION").unwrap());
    if !((1, 15)..(1, 20)).contains(&version) {
        return println!("skipped: headers of libfabric {version:?} describe an ABI newer than FABRIC_1.3");
    }
    let facts = facts! {
        struct fi_info { next, caps, mode, addr_format, src_addrlen, src_addr, dest_addr, tx_attr, rx_attr, ep_attr,
                         domain_attr, fabric_attr, nic }
        struct fi_tx_attr { caps, op_flags, msg_order, inject_size, size, tclass }
        struct fi_rx_attr { caps, op_flags, msg_order, total_buffered_recv, size }
        struct fi_ep_attr { type_ as type, protocol, max_msg_size, mem_tag_format }
        struct fi_domain_attr { name, threading, control_progress, data_progress, resource_mgmt, av_type, mr_mode,
                                mr_key_size, caps, mr_cnt, tclass }
        struct fi_fabric_attr { name, prov_name, prov_version, api_version }
        struct fi_cq_attr { size, flags, format, wait_obj, wait_cond, wait_set }
        struct fi_cq_tagged_entry { op_context, flags, len, buf, data, tag }
        struct fi_cq_err_entry { op_context, flags, len, tag, olen, err, prov_errno, err_data, err_data_size }
        struct fi_av_attr { type_ as type, count, name, flags }
        struct fi_msg_rma { msg_iov, desc, iov_count, addr, rma_iov, rma_iov_count, context, data }
        struct fi_rma_iov { addr, len, key }
        struct fi_context2 { internal }
        struct fid { fclass, context, ops }
        struct fid_ep { fid, ops, cm, rma, tagged }
        struct fid_mr { fid, mem_desc, key }
        struct fid_cq { fid, ops }
        struct fid_av { fid, ops }
        struct fid_domain { fid, ops, mr }
        struct fid_fabric { fid, ops, api_version }
        struct fi_ops { close, bind, control }
        struct fi_ops_fabric { domain, trywait }
        struct fi_ops_domain { av_open, cq_open, endpoint }
        struct fi_ops_cq { read, readerr }
        struct fi_ops_av { insert, remove }
        struct fi_ops_ep { cancel, setopt }
        struct fi_ops_cm { getname }
        struct fi_ops_mr { reg }
        struct fi_ops_rma { readmsg, writemsg }
        struct fi_ops_tagged { recv, send }
    };
    let mut source = String::new();
    for header in ["fabric", "fi_cm", "fi_domain", "fi_endpoint", "fi_eq", "fi_errno", "fi_rma", "fi_tagged"]
    {
        source += &format!("#include <rdma/{header}.h>\n");
    }
    source += "#include <stddef.h>\n";
    for (what, value) in &facts {
        source += &format!("_Static_assert({what} == {value}, \"{what} is not {value}\");\n");
    }
    let path = std::env::temp_dir().join(format!("forebay-abi-{}.c", std::process::id()));
    std::fs::write(&path, source).unwrap();
    let output =
        Command::new("cc").args(["-std=gnu11", "-fsyntax-only"]).arg(&path).output().expect("cc runs");
    std::fs::remove_file(&path).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    println!("{} sizes and offsets agree with libfabric {version:?}", facts.len());
}

#[test]
fn library_where_installed_has_every_symbol() {
    match Library::get() {
        Ok(library) => {
            assert!(library.version() >= (1, 15));
            assert!(!library.strerror(-(FI_EAVAIL as i64)).is_empty());
        }
        Err(why) => {
            assert!(!Path::new("/usr/lib/x86_64-linux-gnu/libfabric.so.1").exists(), "{why}");
            println!("skipped: {why}");
        }
    }
}
