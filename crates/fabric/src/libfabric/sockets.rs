//! What the kernel says of the sockets of an endpoint's port, which the provider opens and closes by itself.
//!
//! The tcp provider of libfabric 1.17 has no bound on what hosts without the pool's secret open, and loses its hold of
//! connections that end at a bad moment. So this room looks, once a second, at the descriptors of the process that
//! belong to the port. It does three things: it has the kernel drop what comes from hosts that are no nodes, before the
//! provider sees it; it breaks connections that are too many, or that never became one; and it says when the provider
//! leaves bytes unread. No thread but the one that has the endpoint opens or closes these sockets, so a descriptor that
//! is one stays one for as long as this looks at it.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::size_of;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use rustix::net::{self, SocketAddrAny};

/// Connections from a host: so many, and so many more for each node that is there. A node has one or two with each
/// other.
const CONNECTIONS_PER_HOST: usize = 64;
const CONNECTIONS_PER_NODE: usize = 8;
/// Connections from all hosts, where it is not known which hosts are nodes.
const CONNECTIONS_MAX: usize = 1024;
/// Looks, one a second, after which bytes that were not read have been left, and a connection that asked for nothing
/// has had its time.
const LOOKS_LEFT: u32 = 3;
const LOOKS_MUTE: u32 = 5;
/// Bytes of a whole request for a connection: what has sent fewer is none yet.
const REQUEST_BYTES: u64 = 56;
/// Addresses that a filter compares one by one; of more it compares the networks alone (/24, /64).
const FILTER_ADDRESSES_MAX: usize = 256;

/// Where it is set, hosts that are no nodes' are heard too: where nodes reach each other through a gateway that gives
/// their packets another address.
const HEAR_ALL: &str = "FOREBAY_HEAR_ALL";
/// Hosts that the log names.
const HOSTS_SHOWN: usize = 8;

/// States of TCP, as the kernel numbers them.
const CLOSED: u8 = 7;
const CLOSE_WAIT: u8 = 8;

/// What the kernel says of a connection.
struct Connection {
    fd: RawFd,
    peer: Option<(IpAddr, u16)>,
    state: u8,
    unread: u64,
    received: u64,
    silent_ms: u32,
}

/// What was seen of a connection at earlier looks.
#[derive(Debug)]
struct Past {
    consumed: u64,
    /// Looks since it was first seen, and since the provider last read from it.
    looks: u32,
    left: u32,
}

/// What a look found.
#[derive(Debug, Default)]
pub(super) struct Look {
    /// Connections whose bytes, or whose end, the provider has left unread.
    pub(super) left: usize,
    /// Connections that were broken.
    pub(super) broken: usize,
    /// From these hosts.
    pub(super) hosts: BTreeSet<IpAddr>,
}

/// The sockets of a port.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    port: u16,
    past: BTreeMap<(RawFd, u16), Past>,
    /// Nodes at each address that is one's; empty: whose is not known.
    nodes: BTreeMap<IpAddr, usize>,
    filtered: bool,
}

/// Host and port of a `sockaddr_in` or `sockaddr_in6`.
pub(super) fn host_and_port(address: &[u8]) -> Option<(IpAddr, u16)> {
    let family = i32::from(u16::from_ne_bytes(address.get(..2)?.try_into().ok()?));
    let port = u16::from_be_bytes(address.get(2..4)?.try_into().ok()?);
    let host = match family {
        libc::AF_INET => IpAddr::from(<[u8; 4]>::try_from(address.get(4..8)?).ok()?),
        libc::AF_INET6 => IpAddr::from(<[u8; 16]>::try_from(address.get(8..24)?).ok()?),
        _ => return None,
    };
    Some((host, port))
}

fn of_any(address: SocketAddrAny) -> Option<(IpAddr, u16)> {
    let address = std::net::SocketAddr::try_from(address).ok()?;
    Some((address.ip().to_canonical(), address.port()))
}

/// The descriptors of this process that are sockets of a local port.
fn of_port(port: u16) -> Vec<RawFd> {
    let Ok(all) = std::fs::read_dir("/proc/self/fd") else { return Vec::new() };
    let numbers = all.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers
        .filter(|fd| {
            // SAFETY: the number is only asked about. One that is closed meanwhile, by another thread, is answered with
            // an error.
            let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
            net::getsockname(fd).ok().and_then(of_any).is_some_and(|(_, of)| of == port)
        })
        .collect()
}

/// A socket of the port, which stays open as long as nobody calls the provider.
fn borrow(fd: &RawFd) -> BorrowedFd<'_> {
    // SAFETY: see the module: only the provider closes it, and that runs in this thread alone.
    unsafe { BorrowedFd::borrow_raw(*fd) }
}

fn look_at(fd: RawFd) -> Option<Connection> {
    let socket = borrow(&fd);
    if net::sockopt::socket_acceptconn(socket).ok()? {
        return None;
    }
    let mut info = [0u8; 256];
    let mut bytes = info.len() as libc::socklen_t;
    // SAFETY: the buffer has as many bytes as are said.
    let returned = unsafe {
        libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &mut bytes)
    };
    if returned != 0 || (bytes as usize) < 136 {
        return None;
    }
    // struct tcp_info of the kernel's interface, which only grows: tcpi_state, tcpi_last_data_recv,
    // tcpi_bytes_received.
    let silent_ms = u32::from_ne_bytes(info[52..56].try_into().ok()?);
    let received = u64::from_ne_bytes(info[128..136].try_into().ok()?);
    Some(Connection {
        fd,
        peer: net::getpeername(socket).ok().flatten().and_then(of_any),
        state: info[0],
        unread: rustix::io::ioctl_fionread(socket).ok()?,
        received,
        silent_ms,
    })
}

/// Ends a connection in a way that the provider notices in whatever state it has it: with an error first (a plain end
/// it takes for nothing while it waits for a request), and an end behind it.
fn break_off(fd: RawFd) {
    let _ = net::connect_unspec(borrow(&fd));
    let _ = net::shutdown(borrow(&fd), net::Shutdown::Both);
}

impl Sockets {
    pub(super) fn of(address: &[u8]) -> Option<Sockets> {
        let (_, port) = host_and_port(address)?;
        Some(Sockets { port, ..Sockets::default() })
    }

    /// A node is at this host. From the first on, only hosts of nodes are heard.
    pub(super) fn admit(&mut self, host: IpAddr) {
        *self.nodes.entry(host).or_default() += 1;
        self.filtered = false;
    }

    /// The listening socket is a new one.
    pub(super) fn forget(&mut self) {
        self.filtered = false;
        self.past.clear();
    }

    /// Closes what a provider that is closed has left open: nobody else has these descriptors.
    pub(super) fn close_leftovers(&self) -> usize {
        let left = of_port(self.port);
        for fd in &left {
            // SAFETY: the provider that opened it is gone, and kept its number nowhere else.
            unsafe { libc::close(*fd) };
        }
        left.len()
    }

    /// Looks at all of them, and breaks those that are too many.
    pub(super) fn look(&mut self) -> Look {
        let all = of_port(self.port);
        if !self.nodes.is_empty() && !self.filtered {
            self.filter(&all);
        }
        let (mut look, mut seen) = (Look::default(), BTreeMap::new());
        let (mut by_host, mut total) = (BTreeMap::<IpAddr, Vec<Connection>>::new(), 0);
        for connection in all.into_iter().filter_map(look_at) {
            let consumed = connection.received.saturating_sub(connection.unread);
            let (host, key) =
                (connection.peer.map(|p| p.0), (connection.fd, connection.peer.map_or(0, |p| p.1)));
            let mut past = self.past.remove(&key).unwrap_or(Past { consumed: u64::MAX, looks: 0, left: 0 });
            past.looks += 1;
            let has_news = connection.unread > 0 || matches!(connection.state, CLOSED | CLOSE_WAIT);
            past.left = if has_news && past.consumed == consumed { past.left + 1 } else { 0 };
            past.consumed = consumed;
            let mute = connection.received < REQUEST_BYTES && past.looks > LOOKS_MUTE;
            let ended = connection.unread == 0 && past.left >= LOOKS_LEFT;
            look.left += usize::from(connection.unread > 0 && past.left >= LOOKS_LEFT);
            if mute || ended {
                look.broken += 1;
                look.hosts.extend(host);
                break_off(connection.fd);
                continue;
            }
            seen.insert(key, past);
            total += 1;
            if let Some(host) = host {
                by_host.entry(host).or_default().push(connection);
            }
        }
        self.past = seen;
        let hears_all = std::env::var_os(HEAR_ALL).is_some_and(|value| !value.is_empty());
        let most = |host: &IpAddr| match self.nodes.get(host) {
            Some(nodes) => CONNECTIONS_PER_HOST + CONNECTIONS_PER_NODE * nodes,
            None if self.nodes.is_empty() || hears_all => {
                CONNECTIONS_PER_HOST.max(CONNECTIONS_MAX.saturating_sub(total))
            }
            None => 0,
        };
        for (host, mut connections) in by_host {
            let excess = connections.len().saturating_sub(most(&host));
            // Nodes speak several times a second, so those that were silent longest go first.
            connections.sort_by_key(|c| std::cmp::Reverse(c.silent_ms));
            for connection in connections.iter().take(excess) {
                look.broken += 1;
                look.hosts.insert(host);
                break_off(connection.fd);
            }
        }
        look
    }

    /// Has the kernel drop what comes to the listening socket, and so to the connections that come of it, from hosts
    /// that are no nodes.
    fn filter(&mut self, all: &[RawFd]) {
        let listener = all.iter().find(|fd| net::sockopt::socket_acceptconn(borrow(fd)) == Ok(true));
        let Some(listener) = listener else { return };
        self.filtered = true;
        if std::env::var_os(HEAR_ALL).is_some_and(|value| !value.is_empty()) {
            return;
        }
        let Some(mut program) = program(self.nodes.keys()) else { return };
        let filter = libc::sock_fprog { len: program.len() as libc::c_ushort, filter: program.as_mut_ptr() };
        // SAFETY: the program is read within the call, and has as many instructions as it says.
        let returned = unsafe {
            libc::setsockopt(
                listener.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_FILTER,
                (&raw const filter).cast(),
                size_of::<libc::sock_fprog>() as libc::socklen_t,
            )
        };
        if returned != 0 {
            let why = std::io::Error::last_os_error();
            tracing::warn!("the kernel does not keep hosts that are no nodes from port {}: {why}", self.port);
            return;
        }
        let hosts: Vec<String> = self.nodes.keys().take(HOSTS_SHOWN).map(|host| host.to_string()).collect();
        let more = self.nodes.len().saturating_sub(HOSTS_SHOWN);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        tracing::info!(
            "port {} hears the nodes' hosts alone: {}{more} ({HEAR_ALL}=1 ends that)",
            self.port,
            hosts.join(", ")
        );
    }
}

/// A filter (classic BPF: McCanne, Jacobson, USENIX 1993) that lets packets from these hosts through; None: they are of
/// no one family, or too many.
fn program<'a>(hosts: impl Iterator<Item = &'a IpAddr>) -> Option<Vec<libc::sock_filter>> {
    let instruction = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let network = |offset: u32| (libc::SKF_NET_OFF as u32).wrapping_add(offset);
    // As words of the address, where in the header they begin, and how many words a network's number has.
    let mut words: BTreeSet<Vec<u32>> = BTreeSet::new();
    let mut start = None;
    for host in hosts {
        let (bytes, at) = match host {
            IpAddr::V4(v4) => (v4.octets().to_vec(), 12),
            IpAddr::V6(v6) => (v6.octets().to_vec(), 8),
        };
        if start.is_some_and(|start| start != at) {
            return None;
        }
        start = Some(at);
        words.insert(bytes.chunks(4).map(|w| u32::from_be_bytes([w[0], w[1], w[2], w[3]])).collect());
    }
    let start = start?;
    let mut mask = u32::MAX;
    if words.len() > FILTER_ADDRESSES_MAX {
        let v4 = start == 12;
        mask = if v4 { 0xffff_ff00 } else { u32::MAX };
        let shorter = |w: &Vec<u32>| if v4 { vec![w[0] & mask] } else { w[..2].to_vec() };
        words = words.iter().map(shorter).collect();
        if words.len() > FILTER_ADDRESSES_MAX {
            return None;
        }
    }
    let mut program = Vec::new();
    if start == 12 {
        // One word each, loaded once: a program of few instructions, as the kernel bounds its bytes
        // (net.core.optmem_max).
        let at = network(start);
        program.push(instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, at));
        program.push(instruction(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, mask));
        for host in &words {
            program.push(instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, host[0]));
            program.push(instruction(libc::BPF_RET | libc::BPF_K, 0, 0, u32::MAX));
        }
        program.push(instruction(libc::BPF_RET | libc::BPF_K, 0, 0, 0));
        return Some(program);
    }
    for host in &words {
        let count = host.len();
        for (i, word) in host.iter().enumerate() {
            program.push(instruction(
                libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
                0,
                0,
                network(start + 4 * i as u32),
            ));
            program.push(instruction(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, mask));
            // To the next host: over the words that are left, three instructions each, and the one that lets it
            // through.
            let next = (3 * (count - 1 - i) + 1) as u8;
            program.push(instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, next, *word));
        }
        program.push(instruction(libc::BPF_RET | libc::BPF_K, 0, 0, u32::MAX));
    }
    program.push(instruction(libc::BPF_RET | libc::BPF_K, 0, 0, 0));
    Some(program)
}
