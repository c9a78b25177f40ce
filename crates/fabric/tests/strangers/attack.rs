//! The traffic of a host without the pool's secret to a daemon's port: many connections, each with a mixture of random
//! bytes and of truncated, damaged and replayed bytes of real connections. It leaves half of the connections open, and
//! closes or resets them in the middle.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_fabric::Numbers;
use rustix::net::{self, AddressFamily, SocketType};

/// The offset of the client's port in a connection request: behind the tcp provider's header and four bytes of ofi_rxm.
const PORT_AT: std::ops::Range<usize> = 36..38;

/// The bytes that a real peer sent on a connection, by write.
pub(crate) type Recording = Vec<Vec<u8>>;

/// Forwards one connection to a server, and records what its client sends.
pub(crate) struct Recorder {
    pub(crate) port: u16,
    kept: Arc<Mutex<Recording>>,
    thread: JoinHandle<()>,
}

impl Recorder {
    /// Records the first connection.
    pub(crate) fn start(server: u16) -> Recorder {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let kept = Arc::new(Mutex::new(Vec::new()));
        let into = kept.clone();
        let thread = std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            let mut server = TcpStream::connect(("127.0.0.1", server)).unwrap();
            let (mut back_from, mut back_to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            let back = std::thread::spawn(move || {
                let _ = std::io::copy(&mut back_from, &mut back_to);
                let _ = back_to.shutdown(std::net::Shutdown::Both);
            });
            let mut bytes = [0; 1 << 16];
            while let Ok(count @ 1..) = client.read(&mut bytes) {
                into.lock().unwrap().push(bytes[..count].to_vec());
                if server.write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
            let _ = server.shutdown(std::net::Shutdown::Both);
            back.join().unwrap();
        });
        Recorder { port, kept, thread }
    }

    /// The recording, when both ends have closed the connection.
    pub(crate) fn finish(self) -> Recording {
        self.thread.join().unwrap();
        Arc::try_unwrap(self.kept).unwrap().into_inner().unwrap()
    }
}

/// The extent of an attack.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) connections: usize,
    pub(crate) messages: usize,
    /// The time over which the connections are spread.
    pub(crate) lasts: Duration,
    /// Connections that stay open until the end.
    pub(crate) held: usize,
}

/// Connects from an address of this host to a port of it.
fn connect(from: Ipv4Addr, port: u16) -> std::io::Result<TcpStream> {
    let socket = net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
    net::bind(&socket, &SocketAddrV4::new(from, 0))?;
    net::connect(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))?;
    Ok(TcpStream::from(socket))
}

/// Closes a connection with a reset.
fn reset(stream: TcpStream) {
    let _ = net::sockopt::set_socket_linger(stream.as_fd(), Some(Duration::ZERO));
}

fn message(numbers: &mut Numbers, recording: &Recording) -> Vec<u8> {
    let random = |numbers: &mut Numbers| {
        let bytes = 1 + numbers.below(1500);
        (0..bytes).map(|_| numbers.draw() as u8).collect::<Vec<u8>>()
    };
    let of = recording.len() as u64;
    let mut bytes = recording[numbers.below(of) as usize].clone();
    match numbers.below(5) {
        0 => return random(numbers),
        1 => bytes.truncate(1 + numbers.below(bytes.len() as u64) as usize),
        2 => {
            for _ in 0..1 + numbers.below(6) {
                let at = numbers.below(bytes.len() as u64) as usize;
                bytes[at] = [0, 1, 0x7f, 0xff, numbers.draw() as u8][numbers.below(5) as usize];
            }
        }
        3 => bytes.extend(random(numbers)),
        _ => {}
    }
    bytes
}

/// Opens connections one after the other that end in the middle of a message. Each takes one receive buffer of ofi_rxm
/// with it.
pub(crate) fn break_off(from: Ipv4Addr, port: u16, seed: u64, recording: &Recording, count: usize) {
    let mut numbers = Numbers::new(seed);
    let message = recording.iter().skip(1).find(|bytes| bytes.len() > 64).expect("a peer says something");
    let held: Vec<TcpStream> = (0..count)
        .filter_map(|_| {
            // The server may be opening its endpoint again at this moment.
            let mut stream = connect(from, port).ok()?;
            let mut opening = recording[0].clone();
            opening[PORT_AT].copy_from_slice(&(numbers.draw() as u16).to_le_bytes());
            stream.write_all(&opening).ok()?;
            stream.set_read_timeout(Some(Duration::from_millis(200))).ok()?;
            // The answer. The server takes the bytes after it for messages.
            let _ = stream.read(&mut [0; 512]);
            stream.write_all(&message[..message.len() - 20]).ok()?;
            Some(stream)
        })
        .collect();
    std::thread::sleep(Duration::from_millis(300));
    held.into_iter().for_each(reset);
}

/// True if the server accepts a connection from this host.
pub(crate) fn is_let_in(from: Ipv4Addr, port: u16, within: Duration) -> bool {
    let socket = net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    net::bind(&socket, &SocketAddrV4::new(from, 0)).unwrap();
    rustix::io::ioctl_fionbio(&socket, true).unwrap();
    let _ = net::connect(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port));
    let mut connected = [rustix::event::PollFd::new(&socket, rustix::event::PollFlags::OUT)];
    let within = rustix::event::Timespec { tv_sec: within.as_secs() as i64, tv_nsec: 0 };
    rustix::event::poll(&mut connected, Some(&within)).unwrap() > 0
}

/// Attacks a port from an address. Returns the number of connections made.
pub(crate) fn attack(from: Ipv4Addr, port: u16, seed: u64, recording: &Recording, extent: Extent) -> usize {
    let (mut numbers, start) = (Numbers::new(seed), Instant::now());
    let (mut held, mut made) = (Vec::new(), 0);
    for i in 0..extent.connections {
        let due = extent.lasts * i as u32 / extent.connections as u32;
        std::thread::sleep(due.saturating_sub(start.elapsed()));
        let Ok(mut stream) = connect(from, port) else { continue };
        made += 1;
        let _ = stream.set_nodelay(true);
        let _ = stream.set_nonblocking(true);
        // Two of three begin like a real connection, so that the server takes the bytes after it for messages.
        if numbers.below(3) > 0 {
            let mut opening = recording[0].clone();
            if numbers.below(8) == 0 {
                opening.truncate(1 + numbers.below(opening.len() as u64) as usize);
            }
            // Each poses as another endpoint of the host, with its own port in the request.
            if let Some(place) = opening.get_mut(PORT_AT) {
                place.copy_from_slice(&(numbers.draw() as u16).to_le_bytes());
            }
            let _ = stream.write(&opening);
            if numbers.below(2) == 0 {
                let mut answer = [0; 512];
                std::thread::sleep(Duration::from_millis(1));
                let _ = stream.read(&mut answer);
            }
        }
        for _ in 0..2 * numbers.below(extent.messages as u64 / extent.connections as u64 + 1) {
            if stream.write(&message(&mut numbers, recording)).is_err() {
                break;
            }
        }
        match numbers.below(4) {
            0 => drop(stream),
            1 => reset(stream),
            _ => held.push(stream),
        }
        while held.len() > extent.held {
            let gone = held.swap_remove(numbers.below(held.len() as u64) as usize);
            if numbers.below(2) == 0 {
                reset(gone);
            }
        }
    }
    made
}
