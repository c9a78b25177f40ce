//! Bytes between two files: data ranges by the kernel's own copy where it can, else through a buffer.

use std::cell::RefCell;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_types::Code;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::super::source::{code, next_data, retried, Source};
use super::read_ahead::{self, LargeRange, LargeRanges};

/// Bytes of one read and write. They stay in the processor's cache between the two, and the page cache need not look for
/// larger free blocks of memory than these: with 2 to 4 MiB a copy took up to eight times the processor time. Network file
/// systems join what is written one after the other.
const BUFFER_BYTES: usize = 512 << 10;
/// Bytes after which the writing of what was copied is started, so that the medium works meanwhile.
const WRITE_OUT_BYTES: u64 = 8 << 20;
/// Bytes of one copy by the kernel, so that a thread looks up now and then.
const KERNEL_COPY_BYTES: u64 = 64 << 20;
/// Up to so many bytes are sent. The kernel passes them on page by page.
const SEND_BYTES_MAX: u64 = 1 << 20;

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// How a store's files are copied: what the kernel does by itself, and the large ranges in progress. A flag is cleared when the
/// kernel refuses that as a whole.
#[derive(Debug)]
pub(super) struct Copying {
    /// By copy_file_range: not between file systems of different types.
    ranges: AtomicBool,
    /// By sendfile: in one copy of the bytes, where a read and a write are two.
    sends: AtomicBool,
    /// Ranges that are being copied into the store.
    large: LargeRanges,
}

impl Default for Copying {
    fn default() -> Copying {
        let (ranges, sends) = (AtomicBool::new(true), AtomicBool::new(true));
        Copying { ranges, sends, large: LargeRanges::default() }
    }
}

/// Which side of a copy failed.
#[derive(Debug)]
pub(super) enum CopyFailure {
    Source(Code),
    Destination(Errno),
}

/// A file as a source.
pub(super) struct File<'a> {
    pub(super) fd: BorrowedFd<'a>,
    pub(super) bytes: u64,
    /// It has no holes, as far as is known: none are looked for.
    pub(super) is_dense: bool,
}

impl Source for File<'_> {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn next_data(&self, within: Range<u64>) -> Result<Option<Range<u64>>, Code> {
        match self.is_dense {
            true => Ok((!within.is_empty()).then_some(within)),
            false => next_data(self.fd, within),
        }
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
        retried(|| rustix::io::pread(self.fd, &mut *buffer, offset)).map_err(code)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd)
    }
}

/// What to do about holes of the source.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Holes {
    /// The destination is new, and was opened for this copy: what is not written is a hole, and its offset is at 0.
    Skip,
    /// The destination may have data there.
    Punch,
}

/// Copies a range to the same offsets of `into`, data ranges only. Returns where the last of them ended.
pub(super) fn copy(
    source: &dyn Source,
    range: Range<u64>,
    into: BorrowedFd<'_>,
    holes: Holes,
    copying: &Copying,
) -> Result<u64, CopyFailure> {
    // Threads copy one file after the other: memory of the kernel for each would cost more than the copy of a small one.
    let mut buffer = BUFFER.take();
    let copied = copy_through(source, range, into, holes, (copying, &mut buffer));
    BUFFER.set(buffer);
    copied
}

fn copy_through(
    source: &dyn Source,
    range: Range<u64>,
    into: BorrowedFd<'_>,
    holes: Holes,
    (copying, buffer): (&Copying, &mut Vec<u8>),
) -> Result<u64, CopyFailure> {
    let (mut at, mut end) = (range.start, range.start);
    // The offset of the destination's descriptor, where this copy alone has it.
    let mut offset = (holes == Holes::Skip && range.end - range.start <= SEND_BYTES_MAX).then_some(0);
    while at < range.end {
        let data = source.next_data(at..range.end).map_err(CopyFailure::Source)?;
        let data = data.unwrap_or(range.end..range.end);
        if holes == Holes::Punch && at < data.start {
            punch(into, at..data.start, buffer).map_err(CopyFailure::Destination)?;
        }
        let mut copied = data.start;
        if let Some(fd) = source.descriptor().filter(|_| !data.is_empty()) {
            if copying.ranges.load(Ordering::Relaxed) {
                copied = copy_in_kernel(fd, into, data.clone(), copying);
            }
            if copying.sends.load(Ordering::Relaxed) && offset == Some(copied) {
                copied = send(fd, into, copied..data.end, copying);
                offset = Some(copied);
            }
        }
        copy_by_buffer(source, into, copied..data.end, holes, (copying, buffer))?;
        if !data.is_empty() {
            end = data.end;
        }
        at = data.end;
    }
    Ok(end)
}

/// Copies as much of a range as the kernel does, and returns where it stopped. All its errors end here, because the
/// buffer's reads and writes find out which side failed.
fn copy_in_kernel(from: BorrowedFd<'_>, into: BorrowedFd<'_>, range: Range<u64>, copying: &Copying) -> u64 {
    let (mut read, mut written) = (range.start, range.start);
    while read < range.end {
        let bytes = (range.end - read).min(KERNEL_COPY_BYTES) as usize;
        match rustix::fs::copy_file_range(from, Some(&mut read), into, Some(&mut written), bytes) {
            Ok(0) => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => {
                if matches!(e, Errno::XDEV | Errno::OPNOTSUPP | Errno::NOSYS) {
                    copying.ranges.store(false, Ordering::Relaxed);
                }
                break;
            }
        }
    }
    written
}

/// The same by sendfile, which writes at the descriptor's own offset: that is at the begin of the range.
fn send(from: BorrowedFd<'_>, into: BorrowedFd<'_>, range: Range<u64>, copying: &Copying) -> u64 {
    let mut read = range.start;
    while read < range.end {
        let bytes = (range.end - read) as usize;
        match rustix::fs::sendfile(into, from, Some(&mut read), bytes) {
            Ok(0) => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => {
                if matches!(e, Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) {
                    copying.sends.store(false, Ordering::Relaxed);
                }
                break;
            }
        }
    }
    read
}

fn copy_by_buffer(
    source: &dyn Source,
    into: BorrowedFd<'_>,
    range: Range<u64>,
    holes: Holes,
    (copying, buffer): (&Copying, &mut Vec<u8>),
) -> Result<(), CopyFailure> {
    let mut started = range.start;
    let mut write = |bytes: &[u8], at: u64| {
        write_all(into, bytes, at).map_err(CopyFailure::Destination)?;
        let end = at + bytes.len() as u64;
        // What the pool gets stays in memory.
        if holes == Holes::Skip && end - started >= WRITE_OUT_BYTES {
            forebay_sys::written::start(into, started, end - started);
            started = end;
        }
        Ok(())
    };
    let large = if holes == Holes::Skip { copying.large.begin(&range) } else { None };
    // It counts until the copy ends.
    if large.as_ref().is_some_and(LargeRange::is_read_ahead)
        && read_ahead::copy(source, range.clone(), BUFFER_BYTES, CopyFailure::Source, &mut write)?
    {
        return Ok(());
    }
    let mut at = range.start;
    while at < range.end {
        let wanted = (range.end - at).min(BUFFER_BYTES as u64) as usize;
        if buffer.len() < wanted {
            buffer.resize(wanted, 0);
        }
        match source.read_at(&mut buffer[..wanted], at).map_err(CopyFailure::Source)? {
            // The source is shorter than it was.
            0 => return Err(CopyFailure::Source(Code::Stale)),
            read => {
                write(&buffer[..read], at)?;
                at += read as u64;
            }
        }
    }
    Ok(())
}

fn write_all(into: BorrowedFd<'_>, mut bytes: &[u8], mut offset: u64) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match retried(|| rustix::io::pwrite(into, bytes, offset))? {
            0 => return Err(Errno::IO),
            written => {
                bytes = &bytes[written..];
                offset += written as u64;
            }
        }
    }
    Ok(())
}

/// Makes a range zeros without changing the size, as a hole if the file system can.
fn punch(into: BorrowedFd<'_>, range: Range<u64>, buffer: &mut Vec<u8>) -> Result<(), Errno> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match retried(|| rustix::fs::fallocate(into, flags, range.start, range.end - range.start)) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
        other => return other,
    }
    buffer.clear();
    buffer.resize(BUFFER_BYTES.min((range.end - range.start) as usize), 0);
    let size = retried(|| rustix::fs::fstat(into))?.st_size as u64;
    let mut at = range.start;
    while at < range.end.min(size) {
        let bytes = (range.end.min(size) - at).min(buffer.len() as u64) as usize;
        write_all(into, &buffer[..bytes], at)?;
        at += bytes as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::os::fd::AsFd;
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::path::PathBuf;

    use super::*;

    /// A file that is removed when this is dropped.
    struct Scratch(PathBuf, std::fs::File);

    impl Scratch {
        fn new(directory: &str, name: &str) -> Scratch {
            let path = PathBuf::from(directory).join(format!("forebay-copy-{}-{name}", std::process::id()));
            let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
            Scratch(path, file)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    /// The same file, which no kernel copies.
    struct Read<'a>(File<'a>);

    impl Source for Read<'_> {
        fn bytes(&self) -> u64 {
            self.0.bytes()
        }

        fn next_data(&self, within: Range<u64>) -> Result<Option<Range<u64>>, Code> {
            self.0.next_data(within)
        }

        fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
            self.0.read_at(buffer, offset)
        }
    }

    #[test]
    fn files_with_and_without_holes_are_the_same_whether_they_are_sent_or_read() {
        let temporary = std::env::temp_dir().to_string_lossy().into_owned();
        let dense: &[(u64, u64)] = &[(0, 70_001)];
        let large: &[(u64, u64)] = &[(0, SEND_BYTES_MAX + 4096)];
        let hole_first: &[(u64, u64)] = &[(65_536, 70_000)];
        let hole_between: &[(u64, u64)] = &[(0, 4096), (131_072, 140_000)];
        for (i, data) in [dense, large, hole_first, hole_between, &[]].into_iter().enumerate() {
            let from = Scratch::new("/dev/shm", &format!("from{i}"));
            from.1.set_len(200_000.max(data.last().map_or(0, |(_, end)| *end))).unwrap();
            for (start, end) in data {
                let bytes: Vec<u8> = (*start..*end).map(|n| (n % 251) as u8 + 1).collect();
                from.1.write_all_at(&bytes, *start).unwrap();
            }
            let bytes = from.1.metadata().unwrap().len();
            for is_sent in [true, false] {
                let into = Scratch::new(&temporary, &format!("into{i}{is_sent}"));
                let copying = Copying::default();
                let file = || File { fd: from.1.as_fd(), bytes, is_dense: false };
                let (sent, read) = (file(), Read(file()));
                let source: &dyn Source = if is_sent { &sent } else { &read };
                copy(source, 0..bytes, into.1.as_fd(), Holes::Skip, &copying).unwrap();
                into.1.set_len(bytes).unwrap();
                assert_eq!(
                    std::fs::read(&into.0).unwrap(),
                    std::fs::read(&from.0).unwrap(),
                    "{data:?} {is_sent}"
                );
                let blocks = |file: &std::fs::File| file.metadata().unwrap().blocks();
                assert!(blocks(&into.1) <= blocks(&from.1) + 64, "{data:?} {is_sent}: its holes are there");
            }
        }
    }

    #[test]
    fn source_that_became_shorter_is_stale_also_when_it_is_sent() {
        let from = Scratch::new("/dev/shm", "shorter");
        from.1.write_all_at(&[7; 5000], 0).unwrap();
        let into = Scratch::new(&std::env::temp_dir().to_string_lossy(), "shorter");
        let source = File { fd: from.1.as_fd(), bytes: 9000, is_dense: true };
        let copied = copy(&source, 0..9000, into.1.as_fd(), Holes::Skip, &Copying::default());
        assert!(matches!(copied, Err(CopyFailure::Source(Code::Stale))), "{copied:?}");
    }

    /// A source that is read by the thread that asks for it, and that begins to be read when it may.
    struct Noting<'a> {
        bytes: u64,
        begins: &'a std::sync::Barrier,
        readers: std::sync::Mutex<std::collections::HashSet<std::thread::ThreadId>>,
    }

    impl Source for Noting<'_> {
        fn bytes(&self) -> u64 {
            self.bytes
        }

        fn next_data(&self, within: Range<u64>) -> Result<Option<Range<u64>>, Code> {
            Ok((!within.is_empty()).then_some(within))
        }

        fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
            if offset == 0 {
                self.begins.wait();
            }
            self.readers.lock().unwrap().insert(std::thread::current().id());
            buffer.fill(7);
            Ok(buffer.len())
        }
    }

    #[test]
    fn of_two_large_files_at_a_time_at_most_one_is_read_by_a_second_thread() {
        // Both are in progress before any byte is read.
        let begins = std::sync::Barrier::new(2);
        let bytes = 32 << 20;
        let sources = [0, 1].map(|_| Noting { bytes, begins: &begins, readers: Default::default() });
        let copying = Copying::default();
        let own = std::thread::scope(|scope| {
            let copies = [0, 1].map(|i| {
                let (source, copying) = (&sources[i], &copying);
                scope.spawn(move || {
                    let into = Scratch::new(&std::env::temp_dir().to_string_lossy(), &format!("large{i}"));
                    copy(source, 0..bytes, into.1.as_fd(), Holes::Skip, copying).unwrap();
                    assert_eq!(into.1.metadata().unwrap().len(), bytes);
                    std::thread::current().id()
                })
            });
            copies.map(|copy| copy.join().unwrap())
        });
        let ahead = (0..2).filter(|i| !sources[*i].readers.lock().unwrap().contains(&own[*i])).count();
        let expected = usize::from(std::thread::available_parallelism().unwrap().get() > 1);
        assert_eq!(ahead, expected);
    }
}
