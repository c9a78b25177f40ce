//! fts(3) for trees in the pool. libc's own makes its system calls itself, so they would not reach this library.
//!
//! The nodes have libc's layout and are allocated with malloc, as fts(3) may not be called in signal handlers. Unlike
//! libc's, this walk never changes the working directory: an access path starts with the path that the program passed,
//! as with FTS_NOCHDIR. A table distinguishes handles of this library from libc's.

use std::os::raw::{c_char, c_int, c_long, c_short, c_ushort, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::classify::may_lead_to_pool;
use crate::interpose::{errno, set_errno};
use crate::stat::{lstat, stat as stat_call};
use crate::{path, real};

const COMFOLLOW: c_int = 0x01;
const LOGICAL: c_int = 0x02;
const NOSTAT: c_int = 0x08;
const SEEDOT: c_int = 0x20;
const XDEV: c_int = 0x40;
const OPTIONS: c_int = 0xff;
const NAMEONLY: c_int = 0x100;

const D: c_ushort = 1;
const DC: c_ushort = 2;
const DEFAULT: c_ushort = 3;
const DNR: c_ushort = 4;
const DOT: c_ushort = 5;
const DP: c_ushort = 6;
const ERR: c_ushort = 7;
const F: c_ushort = 8;
const NS: c_ushort = 10;
const NSOK: c_ushort = 11;
const SL: c_ushort = 12;
const SLNONE: c_ushort = 13;

const AGAIN: c_ushort = 1;
const FOLLOW: c_ushort = 2;
const NOINSTR: c_ushort = 3;
const SKIP: c_ushort = 4;

/// libc's FTSENT.
#[repr(C)]
pub(crate) struct Node {
    cycle: *mut Node,
    parent: *mut Node,
    link: *mut Node,
    number: c_long,
    pointer: *mut c_void,
    accpath: *mut c_char,
    path: *mut c_char,
    errno: c_int,
    symfd: c_int,
    pathlen: c_ushort,
    namelen: c_ushort,
    ino: libc::ino_t,
    dev: libc::dev_t,
    nlink: libc::nlink_t,
    level: c_short,
    info: c_ushort,
    flags: c_ushort,
    instr: c_ushort,
    statp: *mut libc::stat,
    name: [c_char; 1],
}

type Compare = Option<unsafe extern "C-unwind" fn(*const *const Node, *const *const Node) -> c_int>;

/// libc's FTS, of which programs read nothing, followed by the state of a walk of this library.
#[repr(C)]
pub(crate) struct Walk {
    cur: *mut Node,
    child: *mut Node,
    array: *mut *mut Node,
    dev: libc::dev_t,
    path: *mut c_char,
    rfd: c_int,
    pathlen: c_int,
    nitems: c_int,
    compar: Compare,
    options: c_int,
    /// Nodes that the walk has not reached yet, beside and below `cur`.
    roots: *mut Node,
}

/// The maximum number of walks at a time.
const WALKS_MAX: usize = 64;
static WALKS: [AtomicUsize; WALKS_MAX] = [const { AtomicUsize::new(0) }; WALKS_MAX];

fn is_ours(walk: *mut Walk) -> bool {
    WALKS.iter().any(|place| place.load(Ordering::Acquire) == walk as usize)
}

/// A node for `name` below `parent`, or a root with the path that the program passed. It has its own memory for path
/// and attributes. Null without memory.
unsafe fn new_node(parent: *mut Node, name: &[u8], level: c_short) -> *mut Node {
    // SAFETY: the sizes are those of the data that are written: node, name, NUL; path, NUL; attributes.
    unsafe {
        let node = libc::calloc(1, size_of::<Node>() + name.len() + 1).cast::<Node>();
        let above =
            if parent.is_null() || (*parent).path.is_null() { &[][..] } else { path::bytes((*parent).path) };
        let slash = !above.is_empty() && above.last() != Some(&b'/');
        let bytes = above.len() + usize::from(slash) + name.len();
        let full = libc::malloc(bytes + 1).cast::<u8>();
        let stat = libc::calloc(1, size_of::<libc::stat>()).cast::<libc::stat>();
        if node.is_null() || full.is_null() || stat.is_null() {
            libc::free(node.cast());
            libc::free(full.cast());
            libc::free(stat.cast());
            set_errno(libc::ENOMEM);
            return null_mut();
        }
        full.copy_from_nonoverlapping(above.as_ptr(), above.len());
        if slash {
            full.add(above.len()).write(b'/');
        }
        full.add(bytes - name.len()).copy_from_nonoverlapping(name.as_ptr(), name.len());
        full.add(bytes).write(0);
        let own = (&raw mut (*node).name).cast::<u8>();
        own.copy_from_nonoverlapping(name.as_ptr(), name.len());
        (*node).parent = parent;
        (*node).path = full.cast();
        (*node).accpath = full.cast();
        (*node).pathlen = bytes as c_ushort;
        (*node).namelen = name.len() as c_ushort;
        (*node).level = level;
        (*node).instr = NOINSTR;
        (*node).symfd = -1;
        (*node).statp = stat;
        node
    }
}

unsafe fn free_node(node: *mut Node) {
    // SAFETY: `new_node` made it, and no other node links to it any more.
    unsafe {
        libc::free((*node).path.cast());
        libc::free((*node).statp.cast());
        libc::free(node.cast());
    }
}

unsafe fn free_list(mut node: *mut Node) {
    while !node.is_null() {
        // SAFETY: a list of nodes of this library.
        unsafe {
            let next = (*node).link;
            free_node(node);
            node = next;
        }
    }
}

/// Reads a node's attributes and sets its info.
unsafe fn look(walk: &Walk, node: &mut Node, follow: bool) {
    // SAFETY: the path is a C string, the attributes are writable.
    unsafe {
        let st = &mut *node.statp;
        let follows = follow || walk.options & LOGICAL != 0;
        let mut failed = if follows { stat_call(node.path, st) } else { lstat(node.path, st) } != 0;
        if failed && follows && lstat(node.path, st) == 0 {
            node.info = SLNONE;
            if st.st_mode & libc::S_IFMT == libc::S_IFLNK {
                return;
            }
            failed = true;
        }
        if failed {
            node.errno = errno();
            *st = std::mem::zeroed();
            node.info = NS;
            return;
        }
        (node.ino, node.dev, node.nlink) = (st.st_ino, st.st_dev, st.st_nlink);
        node.info = match st.st_mode & libc::S_IFMT {
            libc::S_IFDIR if node.level > 0 && is_dot(node) => DOT,
            libc::S_IFDIR => {
                let mut above = node.parent;
                while !above.is_null() && (*above).level >= 0 {
                    if ((*above).ino, (*above).dev) == (node.ino, node.dev) {
                        node.cycle = above;
                        node.info = DC;
                        return;
                    }
                    above = (*above).parent;
                }
                D
            }
            libc::S_IFLNK => SL,
            libc::S_IFREG => F,
            _ => DEFAULT,
        };
    }
}

fn is_dot(node: &Node) -> bool {
    // SAFETY: a C string behind the node.
    matches!(unsafe { path::bytes((&raw const node.name).cast()) }, b"." | b"..")
}

/// Sorts a list with the program's function.
unsafe fn sorted(walk: &Walk, list: *mut Node, count: usize) -> *mut Node {
    let Some(compare) = walk.compar.filter(|_| count > 1) else { return list };
    let mut nodes = Vec::with_capacity(count);
    let mut node = list;
    while !node.is_null() {
        nodes.push(node.cast_const());
        // SAFETY: a list of nodes of this library.
        node = unsafe { (*node).link };
    }
    // SAFETY: the program's function gets what fts(3) specifies: pointers to pointers to nodes.
    nodes.sort_by(|a, b| unsafe { compare(a, b) }.cmp(&0));
    for i in 0..nodes.len() {
        let next = nodes.get(i + 1).map_or(null_mut(), |next| next.cast_mut());
        // SAFETY: as above; they are constant only for the comparison.
        unsafe { (*nodes[i].cast_mut()).link = next };
    }
    nodes[0].cast_mut()
}

/// The list of a directory's entries. `errno` of the directory is set when it cannot be read.
unsafe fn children(walk: &Walk, directory: &mut Node, names_only: bool) -> *mut Node {
    // SAFETY: paths are C strings. Each entry is used before the next is read. The stream is closed.
    unsafe {
        let stream = crate::directory::opendir(directory.path);
        if stream.is_null() {
            directory.errno = errno();
            return null_mut();
        }
        let (mut first, mut last, mut count): (*mut Node, *mut Node, usize) = (null_mut(), null_mut(), 0);
        set_errno(0);
        loop {
            let entry = crate::directory::readdir(stream);
            if entry.is_null() {
                break;
            }
            let name = path::bytes((&raw const (*entry).d_name).cast());
            if matches!(name, b"." | b"..") && walk.options & SEEDOT == 0 {
                continue;
            }
            let node = new_node(directory, name, directory.level + 1);
            if node.is_null() {
                directory.errno = libc::ENOMEM;
                break;
            }
            let kind = (*entry).d_type;
            let is_plain = !matches!(kind, libc::DT_DIR | libc::DT_UNKNOWN)
                && (walk.options & LOGICAL == 0 || kind != libc::DT_LNK);
            (*node).ino = (*entry).d_ino;
            if names_only || (walk.options & NOSTAT != 0 && is_plain) {
                (*node).info = NSOK;
            } else {
                look(walk, &mut *node, false);
            }
            if first.is_null() {
                first = node;
            } else {
                (*last).link = node;
            }
            (last, count) = (node, count + 1);
        }
        crate::directory::closedir(stream);
        sorted(walk, first, count)
    }
}

unsafe fn open_walk(argv: *const *mut c_char, options: c_int, compare: Compare) -> *mut Walk {
    // SAFETY: libc's contract: C strings up to a null.
    unsafe {
        let walk = libc::calloc(1, size_of::<Walk>()).cast::<Walk>();
        let top = new_node(null_mut(), b"", -1);
        if walk.is_null() || top.is_null() {
            libc::free(walk.cast());
            return null_mut();
        }
        // Roots have the paths that the program passed.
        *(*top).path = 0;
        (*walk).options = options;
        (*walk).compar = compare;
        (*walk).rfd = -1;
        let (mut first, mut last, mut count): (*mut Node, *mut Node, usize) = (null_mut(), null_mut(), 0);
        let mut at = argv;
        while !(*at).is_null() {
            let given = path::bytes(*at);
            at = at.add(1);
            let node = new_node(top, given, 0);
            if node.is_null() {
                break;
            }
            look(&*walk, &mut *node, options & COMFOLLOW != 0);
            if first.is_null() {
                first = node;
            } else {
                (*last).link = node;
            }
            (last, count) = (node, count + 1);
        }
        (*walk).cur = top;
        (*walk).roots = sorted(&*walk, first, count);
        for place in &WALKS {
            if place.compare_exchange(0, walk as usize, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return walk;
            }
        }
        free_list((*walk).roots);
        free_node(top);
        libc::free(walk.cast());
        set_errno(libc::ENOMEM);
        null_mut()
    }
}

/// Moves to a node, whose attributes are read again before the program sees it.
unsafe fn arrive(walk: &mut Walk, node: *mut Node) -> *mut Node {
    walk.cur = node;
    // SAFETY: a node of this walk.
    unsafe {
        if (*node).level == 0 {
            walk.dev = (*node).dev;
            // Roots are compared by the paths that the program passed. Their name is what follows the last slash.
            let own = (&raw mut (*node).name).cast::<u8>();
            let bytes = usize::from((*node).namelen);
            let given = path::bytes(own.cast());
            if let Some(slash) = given.iter().rposition(|b| *b == b'/').filter(|at| bytes > at + 1) {
                own.copy_from(own.add(slash + 1), bytes - slash);
                (*node).namelen = (bytes - slash - 1) as c_ushort;
            }
        }
        if (*node).instr == FOLLOW {
            look(walk, &mut *node, true);
            (*node).instr = NOINSTR;
        }
    }
    node
}

unsafe fn next(walk: &mut Walk) -> *mut Node {
    // SAFETY: nodes of this walk.
    unsafe {
        loop {
            let here = walk.cur;
            if here.is_null() {
                set_errno(0);
                return null_mut();
            }
            let node = &mut *here;
            if node.level < 0 {
                let first = walk.roots;
                walk.roots = null_mut();
                if first.is_null() {
                    set_errno(0);
                    return null_mut();
                }
                return arrive(walk, first);
            }
            let instr = std::mem::replace(&mut node.instr, NOINSTR);
            if instr == AGAIN {
                look(walk, node, false);
                return here;
            }
            if instr == FOLLOW && matches!(node.info, SL | SLNONE) {
                look(walk, node, true);
                return here;
            }
            if node.info == D {
                let enters = instr != SKIP && (walk.options & XDEV == 0 || node.dev == walk.dev);
                let mut list = std::mem::replace(&mut walk.child, null_mut());
                let listed = !list.is_null();
                if !enters || (listed && walk.options & NAMEONLY != 0) {
                    free_list(list);
                    list = null_mut();
                    walk.options &= !NAMEONLY;
                }
                if !enters {
                    node.info = DP;
                    return here;
                }
                if list.is_null() {
                    node.errno = 0;
                    list = children(walk, node, false);
                }
                if list.is_null() {
                    node.info = if node.errno != 0 { DNR } else { DP };
                    return here;
                }
                return arrive(walk, list);
            }
            // Moves to the next node beside it, otherwise up.
            let (beside, above) = (node.link, node.parent);
            free_node(here);
            if beside.is_null() {
                walk.cur = above;
                if (*above).level < 0 {
                    free_node(above);
                    walk.cur = null_mut();
                    continue;
                }
                (*above).info = if (*above).errno != 0 { ERR } else { DP };
                return above;
            }
            arrive(walk, beside);
            if (*beside).instr != SKIP {
                return beside;
            }
            // The directory counts as walked. As in libc, its first node cannot be skipped from above.
            (*beside).instr = NOINSTR;
            (*beside).info = DP;
        }
    }
}

interpose! {
    /// fts_open(3): a walk of this library when one of the paths leads into the pool.
    fts_open, fts64_open = fn(argv: *const *mut c_char, options: c_int, compare: Compare) -> *mut Walk {
        // SAFETY: libc's contract.
        unsafe {
            let mut at = argv;
            let mut ours = false;
            while options & !OPTIONS == 0 && !argv.is_null() && !(*at).is_null() {
                ours |= may_lead_to_pool(libc::AT_FDCWD, *at);
                at = at.add(1);
            }
            if !ours {
                let compare = compare.map_or(std::ptr::null(), |f| f as *const c_void);
                return real::libc_own::fts_open(argv.cast(), options, compare).cast();
            }
            open_walk(argv, options, compare)
        }
    }

    /// fts_read(3)
    fts_read, fts64_read = fn(walk: *mut Walk) -> *mut Node {
        // SAFETY: libc's contract.
        unsafe {
            if is_ours(walk) {
                return next(&mut *walk);
            }
            real::libc_own::fts_read(walk.cast()).cast()
        }
    }

    /// fts_children(3)
    fts_children, fts64_children = fn(walk: *mut Walk, options: c_int) -> *mut Node {
        // SAFETY: libc's contract.
        unsafe {
            if !is_ours(walk) {
                return real::libc_own::fts_children(walk.cast(), options).cast();
            }
            let walk = &mut *walk;
            if options != 0 && options != NAMEONLY {
                set_errno(libc::EINVAL);
                return null_mut();
            }
            let node = walk.cur;
            set_errno(0);
            if node.is_null() || (*node).level < 0 {
                return walk.roots;
            }
            if (*node).info != D {
                return null_mut();
            }
            free_list(walk.child);
            walk.options = walk.options & !NAMEONLY | options;
            (*node).errno = 0;
            walk.child = children(walk, &mut *node, options == NAMEONLY);
            set_errno((*node).errno);
            walk.child
        }
    }

    /// fts_set(3)
    fts_set, fts64_set = fn(walk: *mut Walk, node: *mut Node, instruction: c_int) -> c_int {
        // SAFETY: libc's contract.
        unsafe {
            if !is_ours(walk) {
                return real::libc_own::fts_set(walk.cast(), node.cast(), instruction);
            }
            if !(0..=4).contains(&instruction) {
                set_errno(libc::EINVAL);
                return 1;
            }
            (*node).instr = instruction as c_ushort;
            0
        }
    }

    /// fts_close(3)
    fts_close, fts64_close = fn(walk: *mut Walk) -> c_int {
        // SAFETY: libc's contract.
        unsafe {
            if !is_ours(walk) {
                return real::libc_own::fts_close(walk.cast());
            }
            free_list((*walk).roots);
            free_list((*walk).child);
            // Frees the nodes from the current one upwards, with those beside them.
            let mut node = (*walk).cur;
            while !node.is_null() {
                let (above, beside) = ((*node).parent, (*node).link);
                free_list(beside);
                free_node(node);
                node = above;
            }
            for place in &WALKS {
                let _ = place.compare_exchange(walk as usize, 0, Ordering::AcqRel, Ordering::Relaxed);
            }
            libc::free(walk.cast());
            0
        }
    }
}
