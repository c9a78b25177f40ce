//! The sockets of an endpoint's port, which the provider opens and closes by itself, as the kernel describes them.
//!
//! The tcp provider of libfabric 1.17 does not limit the connections of hosts without the pool's secret, and loses
//! track of connections that end at a bad moment. So this module checks, once a second, the descriptors of the process
//! that belong to the port. It does three things. It makes the kernel drop packets of hosts without a node before the
//! provider sees them. It breaks excess connections, and those that never sent a whole request. It reports when the
//! provider leaves bytes unread. Only the thread that uses the endpoint opens or closes these sockets, so a descriptor
//! number stays valid during a check.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::size_of;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use rustix::net::{self, SocketAddrAny};

/// Connections allowed from a host, plus those for each node on it. A node has one or two with each other node.
const CONNECTIONS_PER_HOST: usize = 64;
const CONNECTIONS_PER_NODE: usize = 8;
/// Connections allowed from all hosts together, if it is not known which hosts have nodes.
const CONNECTIONS_MAX: usize = 1024;
/// Checks, one a second, after which unread bytes count as left unread, and after which a connection without a whole
/// request is broken.
const LOOKS_LEFT: u32 = 3;
const LOOKS_MUTE: u32 = 5;
/// The length of a connection request. A connection that has sent less has requested nothing yet.
const REQUEST_BYTES: u64 = 56;
/// Addresses that the filter compares one by one. If there are more, it compares networks (/24, /64).
const FILTER_ADDRESSES_MAX: usize = 256;

/// If this variable is set, hosts without a node are accepted too. For nodes that reach each other through a gateway
/// that changes the source address of packets.
const HEAR_ALL: &str = "FOREBAY_HEAR_ALL";
/// Hosts that a log line names.
const HOSTS_SHOWN: usize = 8;

/// States of TCP, as the kernel numbers them.
const CLOSED: u8 = 7;
const CLOSE_WAIT: u8 = 8;

/// The kernel's data on a connection.
struct Connection {
    fd: RawFd,
    peer: Option<(IpAddr, u16)>,
    state: u8,
    unread: u64,
    received: u64,
    silent_ms: u32,
}

/// The results of earlier checks of a connection.
#[derive(Debug)]
struct Past {
    consumed: u64,
    /// Checks since the connection was first seen, and since the provider last read from it.
    looks: u32,
    left: u32,
}

/// The result of a check.
#[derive(Debug, Default)]
pub(super) struct Look {
    /// Connections whose bytes, or whose end, the provider has left unread.
    pub(super) left: usize,
    /// Connections that were broken.
    pub(super) broken: usize,
    /// The peers of broken connections.
    pub(super) hosts: BTreeSet<IpAddr>,
}

/// The sockets of a port.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    /// None if the port is of all the machine's addresses.
    host: Option<IpAddr>,
    port: u16,
    past: BTreeMap<(RawFd, u16), Past>,
    /// The number of nodes at each address. Empty if it is not known which hosts have nodes.
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

/// The descriptors of this process that are TCP sockets of a local port, and of the local host if it is given.
fn of_port(host: Option<IpAddr>, port: u16) -> Vec<RawFd> {
    let Ok(all) = std::fs::read_dir("/proc/self/fd") else { return Vec::new() };
    let numbers = all.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers
        .filter(|fd| {
            // SAFETY: only the calls below use the number. If another thread closes the descriptor meanwhile, they fail.
            let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
            let local = net::getsockname(fd).ok().and_then(of_any);
            local.is_some_and(|(of_host, of)| of == port && host.is_none_or(|host| host == of_host))
                && net::sockopt::socket_type(fd) == Ok(net::SocketType::STREAM)
        })
        .collect()
}

/// A socket of the port. It stays open as long as the provider is not called.
fn borrow(fd: &RawFd) -> BorrowedFd<'_> {
    // SAFETY: see the module: only the provider closes it, and the provider runs in this thread only.
    unsafe { BorrowedFd::borrow_raw(*fd) }
}

fn look_at(fd: RawFd) -> Option<Connection> {
    let socket = borrow(&fd);
    if net::sockopt::socket_acceptconn(socket).ok()? {
        return None;
    }
    let mut info = [0u8; 256];
    let mut bytes = info.len() as libc::socklen_t;
    // SAFETY: the buffer has the length that is passed.
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

/// Ends a connection so that the provider notices it in any of its states. An error comes first, because the provider
/// ignores a plain end of file while it waits for a request. An end of file follows.
fn break_off(fd: RawFd) {
    let _ = net::connect_unspec(borrow(&fd));
    let _ = net::shutdown(borrow(&fd), net::Shutdown::Both);
}

impl Sockets {
    pub(super) fn of(address: &[u8]) -> Option<Sockets> {
        let (host, port) = host_and_port(address)?;
        let host = Some(host.to_canonical()).filter(|host| !host.is_unspecified());
        Some(Sockets { host, port, ..Sockets::default() })
    }

    /// Adds a node at this host. From the first one on, only hosts with nodes are accepted.
    pub(super) fn admit(&mut self, host: IpAddr) {
        *self.nodes.entry(host).or_default() += 1;
        self.filtered = false;
    }

    /// The listening socket was replaced: forgets all state of the old sockets.
    pub(super) fn forget(&mut self) {
        self.filtered = false;
        self.past.clear();
    }

    /// Closes sockets that the closed provider left open. No other code uses these descriptors.
    pub(super) fn close_leftovers(&self) -> usize {
        let left = of_port(self.host, self.port);
        for fd in &left {
            // SAFETY: the provider that opened it is closed, and no other code has its number.
            unsafe { libc::close(*fd) };
        }
        left.len()
    }

    /// Checks all sockets, and breaks excess connections.
    pub(super) fn look(&mut self) -> Look {
        let all = of_port(self.host, self.port);
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
            // Live nodes send several times a second, so connections with the longest silence are broken first.
            connections.sort_by_key(|c| std::cmp::Reverse(c.silent_ms));
            for connection in connections.iter().take(excess) {
                look.broken += 1;
                look.hosts.insert(host);
                break_off(connection.fd);
            }
        }
        look
    }

    /// Makes the kernel drop packets of hosts without a node at the listening socket, and so at connections accepted
    /// from it.
    fn filter(&mut self, all: &[RawFd]) {
        let listener = all.iter().find(|fd| net::sockopt::socket_acceptconn(borrow(fd)) == Ok(true));
        let Some(listener) = listener else { return };
        self.filtered = true;
        if std::env::var_os(HEAR_ALL).is_some_and(|value| !value.is_empty()) {
            return;
        }
        let Some(mut program) = program(self.nodes.keys()) else {
            // The previous filter drops packets of nodes that were admitted since.
            let ignored: libc::c_int = 0;
            // SAFETY: the value has the length that is passed.
            unsafe {
                libc::setsockopt(
                    *listener,
                    libc::SOL_SOCKET,
                    libc::SO_DETACH_FILTER,
                    (&raw const ignored).cast(),
                    size_of::<libc::c_int>() as libc::socklen_t,
                )
            };
            tracing::warn!(
                "port {} accepts all hosts: a filter cannot hold the {} hosts of the nodes (IPv4 and IPv6, or too many \
                 networks)",
                self.port,
                self.nodes.len()
            );
            return;
        };
        let filter = libc::sock_fprog { len: program.len() as libc::c_ushort, filter: program.as_mut_ptr() };
        // SAFETY: the program is read within the call and has the stated number of instructions.
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
            tracing::warn!("port {} accepts all hosts: the kernel refused the filter: {why}", self.port);
            return;
        }
        let hosts: Vec<String> = self.nodes.keys().take(HOSTS_SHOWN).map(|host| host.to_string()).collect();
        let more = self.nodes.len().saturating_sub(HOSTS_SHOWN);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        tracing::info!(
            "port {} accepts only the nodes' hosts: {}{more} ({HEAR_ALL}=1 makes it accept all)",
            self.port,
            hosts.join(", ")
        );
    }
}

/// A filter (classic BPF: McCanne, Jacobson, USENIX 1993) that accepts packets from these hosts. None if they are of
/// both IPv4 and IPv6, or too many.
fn program<'a>(hosts: impl Iterator<Item = &'a IpAddr>) -> Option<Vec<libc::sock_filter>> {
    let instruction = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let network = |offset: u32| (libc::SKF_NET_OFF as u32).wrapping_add(offset);
    // The addresses as words of 32 bits, and the offset of the source address in the IP header.
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
        // IPv4 addresses are one word, which is loaded once. This keeps the program short, as the kernel limits its
        // bytes (net.core.optmem_max).
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
            // The jump to the next host skips the remaining words, three instructions each, and the instruction that
            // accepts.
            let next = (3 * (count - 1 - i) + 1) as u8;
            program.push(instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, next, *word));
        }
        program.push(instruction(libc::BPF_RET | libc::BPF_K, 0, 0, u32::MAX));
    }
    program.push(instruction(libc::BPF_RET | libc::BPF_K, 0, 0, 0));
    Some(program)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::Endpoint;
    use crate::libfabric::{LibfabricEndpoint, Settings};
    use std::net::{TcpListener, TcpStream, UdpSocket};

    fn sockets_of(listener: &TcpListener) -> Sockets {
        let address = listener.local_addr().unwrap();
        Sockets { host: Some(address.ip()), port: address.port(), ..Sockets::default() }
    }

    /// Instructions of the filter at a socket.
    fn filter_length(socket: &impl AsRawFd) -> libc::socklen_t {
        let mut length = 0;
        // SAFETY: with the length 0 the call only stores the number of instructions there.
        let returned = unsafe {
            let none = std::ptr::null_mut();
            libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_GET_FILTER, none, &mut length)
        };
        assert_eq!(returned, 0, "{}", std::io::Error::last_os_error());
        length
    }

    #[test]
    fn sockets_of_a_port_are_those_of_tcp_and_of_its_address() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let _udp = UdpSocket::bind(("127.0.0.1", port)).unwrap();
        let _elsewhere = TcpListener::bind(("127.0.0.2", port)).unwrap();
        let _out = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let accepted = listener.accept().unwrap().0;
        let sockets = sockets_of(&listener);
        let mut found = of_port(sockets.host, sockets.port);
        found.sort_unstable();
        let mut expected = [listener.as_raw_fd(), accepted.as_raw_fd()];
        expected.sort_unstable();
        assert_eq!(found, expected);
    }

    #[test]
    fn sockets_of_an_endpoint_on_any_address_have_its_listener() {
        let provider = Some("tcp;ofi_rxm".to_owned());
        let endpoint = LibfabricEndpoint::open(Settings { provider, ..Settings::default() }).unwrap();
        let sockets = Sockets::of(endpoint.address()).unwrap();
        let found = of_port(sockets.host, sockets.port);
        assert!(
            found.iter().any(|fd| net::sockopt::socket_acceptconn(borrow(fd)) == Ok(true)),
            "{sockets:?}"
        );
    }

    #[test]
    fn filter_that_cannot_hold_all_nodes_is_detached() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sockets = sockets_of(&listener);
        sockets.admit("127.0.0.1".parse().unwrap());
        sockets.look();
        assert!(filter_length(&listener) > 0);
        sockets.admit("::1".parse().unwrap());
        sockets.look();
        assert_eq!(filter_length(&listener), 0);
    }
}
