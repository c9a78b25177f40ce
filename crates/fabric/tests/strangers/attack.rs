//! A host without the pool's secret: what it sends to a daemon's port. Connections that it opens at will, each with a
//! mixture of random bytes, truncated, damaged and replayed bytes of true connections, half of which it leaves open,
//! closes or resets in the middle.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_fabric::Numbers;
use rustix::net::{self, AddressFamily, SocketType};

/// Where the request for a connection has its client's port: behind the header of the tcp provider, and four bytes of
/// ofi_rxm.
const PORT_AT: std::ops::Range<usize> = 36..38;

/// What a true peer sent on a connection, write by write.
pub(crate) type Recording = Vec<Vec<u8>>;

/// Passes one connection on to a server, and keeps what its client sent.
pub(crate) struct Recorder {
    pub(crate) port: u16,
    kept: Arc<Mutex<Recording>>,
    thread: JoinHandle<()>,
}

impl Recorder {
    /// Records the first connection that comes.
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

    /// What was recorded, when both ends have closed the connection.
    pub(crate) fn finish(self) -> Recording {
        self.thread.join().unwrap();
        Arc::try_unwrap(self.kept).unwrap().into_inner().unwrap()
    }
}

/// How much there is of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) connections: usize,
    pub(crate) messages: usize,
    /// In which it is spread.
    pub(crate) lasts: Duration,
    /// Connections that are left open until the end.
    pub(crate) held: usize,
}

/// A connection from an address of this host to a port of it.
fn connect(from: Ipv4Addr, port: u16) -> std::io::Result<TcpStream> {
    let socket = net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
    net::bind(&socket, &SocketAddrV4::new(from, 0))?;
    net::connect(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))?;
    Ok(TcpStream::from(socket))
}

/// Closing it resets it.
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

/// Opens connections that end in the middle of a message, one after the other: each takes a receive buffer of ofi_rxm
/// with it.
pub(crate) fn break_off(from: Ipv4Addr, port: u16, seed: u64, recording: &Recording, count: usize) {
    let mut numbers = Numbers::new(seed);
    let message = recording.iter().skip(1).find(|bytes| bytes.len() > 64).expect("a peer says something");
    let held: Vec<TcpStream> = (0..count)
        .filter_map(|_| {
            // It may be opened anew at this moment.
            let mut stream = connect(from, port).ok()?;
            let mut opening = recording[0].clone();
            opening[PORT_AT].copy_from_slice(&(numbers.draw() as u16).to_le_bytes());
            stream.write_all(&opening).ok()?;
            stream.set_read_timeout(Some(Duration::from_millis(200))).ok()?;
            // The answer: what follows is taken for messages.
            let _ = stream.read(&mut [0; 512]);
            stream.write_all(&message[..message.len() - 20]).ok()?;
            Some(stream)
        })
        .collect();
    std::thread::sleep(Duration::from_millis(300));
    held.into_iter().for_each(reset);
}

/// True if a host is let in: its connection comes about.
pub(crate) fn is_let_in(from: Ipv4Addr, port: u16, within: Duration) -> bool {
    let socket = net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    net::bind(&socket, &SocketAddrV4::new(from, 0)).unwrap();
    rustix::io::ioctl_fionbio(&socket, true).unwrap();
    let _ = net::connect(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port));
    let mut connected = [rustix::event::PollFd::new(&socket, rustix::event::PollFlags::OUT)];
    let within = rustix::event::Timespec { tv_sec: within.as_secs() as i64, tv_nsec: 0 };
    rustix::event::poll(&mut connected, Some(&within)).unwrap() > 0
}

/// Attacks a port from an address; the number of connections that were made.
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
        // Two of three begin as a true connection does, so that what follows is taken for messages.
        if numbers.below(3) > 0 {
            let mut opening = recording[0].clone();
            if numbers.below(8) == 0 {
                opening.truncate(1 + numbers.below(opening.len() as u64) as usize);
            }
            // Each as if it were another endpoint of the host: its port stands in the opening.
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
