//! Layouts: how a file's bytes are distributed over backing files.
//!
//! A layout is a list of components, each for a range of offsets. Within a component, stripes of `stripe_size` bytes go
//! round robin over `stripe_count` backing files, RAID-0 and densely packed: backing file `i` holds stripes `i`, `i +
//! stripe_count`, ... one behind the other, with no gaps. With one component and stripe_count 1 the backing file is
//! byte for byte the file. Backing file `i` is on target `targets[i % target_count]`. More backing files than targets
//! is *overstriping*, by which several writers of one file avoid one inode's lock.
//!
//! A directory's layout is the layout of files that are created in it. It may leave the targets open
//! ([`Layout::on_any`]); a file's layout never does. A request that creates a file may let the directory's layout take
//! precedence ([`Layout::unless_set`]). Both use target 0, whose node no pool has, as a mark.

use crate::bytes::{Reader, Writer};
use crate::error::Code;
use crate::id::NodeId;
use crate::limits::{COMPONENTS_MAX, STRIPES_MAX, STRIPE_BYTES_MAX, STRIPE_BYTES_MIN, TARGETS_MAX};
use crate::target::{node_of, target_of, Targets};

/// Encoded bytes of a [`Component`].
pub const COMPONENT_BYTES: usize = 16 + 4 * TARGETS_MAX;

/// A range of a file striped over backing files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Component {
    /// First offset behind the component; `u64::MAX` for the last one.
    pub end: u64,
    /// Bytes of a stripe, a power of two from 4 KiB to 1 GiB.
    pub stripe_bytes: u32,
    /// Number of backing files, 1 to 256.
    pub stripe_count: u16,
    /// Number of targets in use, 1 to 8.
    pub target_count: u8,
    /// The targets: node number in the upper 16 bits, the node's target index in the lower.
    pub targets: [u32; TARGETS_MAX],
}

/// How a file's bytes are distributed over backing files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    count: u8,
    components: [Component; COMPONENTS_MAX],
}

/// A range of a file that lies in one backing file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Component index.
    pub component: usize,
    /// Stripe index: the backing file of the component.
    pub stripe: u16,
    /// Offset within the backing file.
    pub offset: u64,
    /// Length.
    pub len: u64,
}

impl Component {
    /// The target of stripe `i`.
    pub fn target(&self, stripe: u16) -> u32 {
        self.targets[stripe as usize % self.target_count as usize]
    }

    #[inline]
    fn decode(r: &mut Reader<'_>) -> Result<Component, Code> {
        // The bytes are taken at once, so that the length is checked once.
        let mut r = Reader::new(r.array::<COMPONENT_BYTES>()?);
        let (end, stripe_bytes, stripe_count, target_count) = (r.u64()?, r.u32()?, r.u16()?, r.u8()?);
        r.u8()?;
        let mut targets = [0; TARGETS_MAX];
        for t in &mut targets {
            *t = r.u32()?;
        }
        Ok(Component { end, stripe_bytes, stripe_count, target_count, targets })
    }

    #[inline]
    fn check(&self) -> Result<(), Code> {
        let ok = self.stripe_bytes.is_power_of_two()
            && (STRIPE_BYTES_MIN..=STRIPE_BYTES_MAX).contains(&self.stripe_bytes)
            && (1..=STRIPES_MAX).contains(&self.stripe_count)
            && (1..=TARGETS_MAX).contains(&(self.target_count as usize));
        if ok {
            Ok(())
        } else {
            Err(Code::Malformed)
        }
    }
}

impl Layout {
    /// The default: one backing file on target `index` of `node`.
    pub fn single(node: NodeId, index: u16) -> Layout {
        let mut targets = [0; TARGETS_MAX];
        targets[0] = target_of(node, index);
        let whole =
            Component { end: u64::MAX, stripe_bytes: 1 << 20, stripe_count: 1, target_count: 1, targets };
        Layout { count: 1, components: [whole; COMPONENTS_MAX] }
    }

    /// A layout of these components. Their `end`s must rise, and the last one must be `u64::MAX`.
    pub fn new(components: &[Component]) -> Result<Layout, Code> {
        if components.is_empty() || components.len() > COMPONENTS_MAX {
            return Err(Code::Invalid);
        }
        let mut all = [components[0]; COMPONENTS_MAX];
        all[..components.len()].copy_from_slice(components);
        let layout = Layout { count: components.len() as u8, components: all };
        layout.check()?;
        Ok(layout)
    }

    #[inline]
    fn check(&self) -> Result<(), Code> {
        let mut start = 0;
        for c in self.components() {
            c.check()?;
            if c.end <= start {
                return Err(Code::Malformed);
            }
            start = c.end;
        }
        if start == u64::MAX {
            Ok(())
        } else {
            Err(Code::Malformed)
        }
    }

    /// Overstriping: `stripe_count` stripes of `stripe_bytes` on target `index` of `node`.
    pub fn overstriped(
        node: NodeId,
        index: u16,
        stripe_count: u16,
        stripe_bytes: u32,
    ) -> Result<Layout, Code> {
        let mut c = Layout::single(node, index).components[0];
        c.stripe_count = stripe_count;
        c.stripe_bytes = stripe_bytes;
        Layout::new(&[c])
    }

    /// `stripe_count` stripes of `stripe_bytes`, round robin over these targets, 1 to [`TARGETS_MAX`]. One stripe on
    /// one target distributes the bytes like [`Layout::single`] but is not equal to it: it records that a user chose
    /// that target.
    pub fn on(targets: &[u32], stripe_count: u16, stripe_bytes: u32) -> Result<Layout, Code> {
        let named = Targets::new(targets).ok_or(Code::Invalid)?;
        let twice = [targets[0]; 2];
        let used = if stripe_count == 1 { &twice[..] } else { named.as_slice() };
        let mut all = [0; TARGETS_MAX];
        all[..used.len()].copy_from_slice(used);
        let target_count = used.len() as u8;
        Layout::new(&[Component { end: u64::MAX, stripe_bytes, stripe_count, target_count, targets: all }])
    }

    /// The same on targets that are chosen for each file when it is created. Only for directories.
    pub fn on_any(stripe_count: u16, stripe_bytes: u32) -> Result<Layout, Code> {
        Layout::on(&[0], stripe_count, stripe_bytes)
    }

    /// One backing file on `target`, unless the directory has a layout. Only for requests that create a file.
    pub fn unless_set(target: u32) -> Layout {
        let mut c = Layout::single(node_of(target), target as u16).components[0];
        c.target_count = 2;
        Layout { count: 1, components: [c; COMPONENTS_MAX] }
    }

    /// The target of a layout made by [`Layout::unless_set`].
    pub fn wish(&self) -> Option<u32> {
        let c = &self.components[0];
        (self.is_single() && c.target_count == 2 && c.targets[0] != 0 && c.targets[1] == 0)
            .then_some(c.targets[0])
    }

    /// True for a layout that names the target of each stripe, so that a file may have it.
    pub fn is_placed(&self) -> bool {
        self.components()
            .iter()
            .all(|c| c.targets[..usize::from(c.target_count)].iter().all(|t| t >> 16 != 0))
    }

    /// True if a user has set this layout of a directory on `home`.
    pub fn is_set(&self, home: NodeId) -> bool {
        *self != Layout::single(home, 0)
    }

    /// True when stripes are on more than one target.
    pub fn is_spread(&self) -> bool {
        let first = self.components[0].targets[0];
        self.components().iter().any(|c| (0..c.stripe_count).any(|stripe| c.target(stripe) != first))
    }

    /// The components, in the order of their offsets.
    pub fn components(&self) -> &[Component] {
        &self.components[..self.count as usize]
    }

    /// True when the file is one backing file, byte for byte.
    pub fn is_single(&self) -> bool {
        self.count == 1 && self.components[0].stripe_count == 1
    }

    /// The number of component `index` in the names of its backing files: 0 for a file of one backing file, from 1 on
    /// for others. So the two kinds share no name, and data can be copied from several backing files into one while
    /// both exist.
    pub fn file_number(&self, index: usize) -> usize {
        if self.is_single() {
            0
        } else {
            index + 1
        }
    }

    /// All backing files: (component index, stripe index).
    pub fn stripes(&self) -> impl Iterator<Item = (usize, u16)> + '_ {
        self.components().iter().enumerate().flat_map(|(i, c)| (0..c.stripe_count).map(move |s| (i, s)))
    }

    fn start_of(&self, component: usize) -> u64 {
        if component == 0 {
            0
        } else {
            self.components[component - 1].end
        }
    }

    /// Maps the byte at `offset` to its backing file, with how many of `len` bytes follow it there without a gap in the
    /// file.
    pub fn locate(&self, offset: u64, len: u64) -> Extent {
        let i = self.components().iter().position(|c| offset < c.end).unwrap_or(self.count as usize - 1);
        let c = &self.components[i];
        let start = self.start_of(i);
        let within = offset - start;
        let left_in_component = c.end - offset;
        if c.stripe_count == 1 {
            return Extent { component: i, stripe: 0, offset: within, len: len.min(left_in_component) };
        }
        let stripe_bytes = c.stripe_bytes as u64;
        let number = within / stripe_bytes;
        let in_stripe = within % stripe_bytes;
        let count = c.stripe_count as u64;
        Extent {
            component: i,
            stripe: (number % count) as u16,
            offset: number / count * stripe_bytes + in_stripe,
            len: len.min(stripe_bytes - in_stripe).min(left_in_component),
        }
    }

    /// The size of the file if its backing file (`component`, `stripe`) has `backing_bytes` bytes: the file offset
    /// behind that backing file's last byte; 0 for an empty one. The file's size is the greatest over all backing
    /// files.
    pub fn size_from(&self, component: usize, stripe: u16, backing_bytes: u64) -> u64 {
        if backing_bytes == 0 {
            return 0;
        }
        let c = &self.components[component];
        let start = self.start_of(component);
        if c.stripe_count == 1 {
            return start + backing_bytes;
        }
        let stripe_bytes = c.stripe_bytes as u64;
        let last = backing_bytes - 1;
        let number = last / stripe_bytes * c.stripe_count as u64 + stripe as u64;
        start + number * stripe_bytes + last % stripe_bytes + 1
    }

    /// The length to which truncate sets backing file (`component`, `stripe`) of a file of `file_bytes` bytes.
    pub fn backing_bytes(&self, component: usize, stripe: u16, file_bytes: u64) -> u64 {
        let c = &self.components[component];
        let start = self.start_of(component);
        let within = file_bytes.saturating_sub(start).min(c.end - start);
        if c.stripe_count == 1 {
            return within;
        }
        let stripe_bytes = c.stripe_bytes as u64;
        let full = within / stripe_bytes;
        let count = c.stripe_count as u64;
        let mut stripes = full / count;
        let mut rest = 0;
        match (full % count).cmp(&(stripe as u64)) {
            std::cmp::Ordering::Greater => stripes += 1,
            std::cmp::Ordering::Equal => rest = within % stripe_bytes,
            std::cmp::Ordering::Less => {}
        }
        stripes * stripe_bytes + rest
    }

    /// Encoded bytes.
    pub fn encoded_bytes(&self) -> usize {
        1 + self.count as usize * COMPONENT_BYTES
    }

    /// Appends a count and the components.
    pub fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        w.u8(self.count)?;
        for c in self.components() {
            w.u64(c.end)?;
            w.u32(c.stripe_bytes)?;
            w.u16(c.stripe_count)?;
            w.u8(c.target_count)?;
            w.u8(0)?;
            for t in c.targets {
                w.u32(t)?;
            }
        }
        Ok(())
    }

    /// Reads a layout; [`Code::Malformed`] for anything that [`Layout::encode`] does not write.
    #[inline]
    pub fn decode(r: &mut Reader<'_>) -> Result<Layout, Code> {
        let count = r.u8()? as usize;
        if count == 0 || count > COMPONENTS_MAX {
            return Err(Code::Malformed);
        }
        let first = Component::decode(r)?;
        let mut layout = Layout { count: count as u8, components: [first; COMPONENTS_MAX] };
        for c in &mut layout.components[1..count] {
            *c = Component::decode(r)?;
        }
        layout.check()?;
        Ok(layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn striped(count: u16, log2: u32, second: Option<(u64, u16)>) -> Layout {
        let base = Layout::overstriped(NodeId::FIRST, 0, count, 1 << log2).unwrap().components[0];
        match second {
            None => Layout::new(&[base]).unwrap(),
            Some((end, n)) => {
                let first = Component { end, ..base };
                Layout::new(&[first, Component { stripe_count: n, ..base }]).unwrap()
            }
        }
    }

    #[test]
    fn what_a_directory_or_a_wish_says_is_no_file_s_layout() {
        let (here, there) = (target_of(NodeId(2), 0), target_of(NodeId(3), 1));
        let wish = Layout::unless_set(there);
        assert_eq!(wish.wish(), Some(there));
        assert!(!wish.is_placed() && wish.is_single());
        let open = Layout::on_any(4, 4096).unwrap();
        assert!(!open.is_placed() && open.wish().is_none() && open.is_set(NodeId(2)));
        assert!(!Layout::on_any(1, 4096).unwrap().is_placed());
        let asked = Layout::on(&[here], 1, 1 << 20).unwrap();
        assert!(asked.is_single() && asked.is_placed() && asked.is_set(NodeId(2)) && asked.wish().is_none());
        assert!(!Layout::single(NodeId(2), 0).is_set(NodeId(2)) && Layout::single(NodeId(2), 0).is_placed());
        let spread = Layout::on(&[here, there], 3, 4096).unwrap();
        let on: Vec<u32> = (0..3).map(|i| spread.components()[0].target(i)).collect();
        assert_eq!(on, [here, there, here]);
        assert!(spread.is_spread() && spread.is_placed() && !asked.is_spread());
        assert!(!Layout::on(&[here, there], 1, 4096).unwrap().is_spread(), "its one stripe is on the first");
        for layout in [wish, open, asked, spread] {
            let mut buffer = [0; 200];
            let mut w = Writer::new(&mut buffer);
            layout.encode(&mut w).unwrap();
            let n = w.len();
            assert_eq!(Layout::decode(&mut Reader::new(&buffer[..n])).unwrap(), layout);
        }
        assert_eq!(Layout::on(&[], 1, 4096), Err(Code::Invalid));
        assert_eq!(Layout::on(&[here; TARGETS_MAX + 1], 1, 4096), Err(Code::Invalid));
    }

    proptest! {
        #[test]
        fn locate_then_size_from_names_the_same_byte(count in 1u16..9, log2 in 12u32..16, offset in 0u64..1 << 30,
                                                     second in proptest::option::of((1u64..1 << 29, 1u16..5))) {
            let layout = striped(count, log2, second);
            let e = layout.locate(offset, 1);
            prop_assert_eq!(e.len, 1);
            prop_assert_eq!(layout.size_from(e.component, e.stripe, e.offset + 1), offset + 1);
        }

        #[test]
        fn backing_bytes_of_all_stripes_add_up_to_the_file(count in 1u16..9, log2 in 12u32..16, size in 0u64..1 << 26,
                                                           second in proptest::option::of((1u64..1 << 25, 1u16..5))) {
            let layout = striped(count, log2, second);
            let parts: Vec<_> = layout.stripes().map(|(c, s)| (c, s, layout.backing_bytes(c, s, size))).collect();
            prop_assert_eq!(parts.iter().map(|p| p.2).sum::<u64>(), size);
            let back = parts.iter().map(|&(c, s, n)| layout.size_from(c, s, n)).max().unwrap();
            prop_assert_eq!(back, size);
        }

        #[test]
        fn locate_covers_a_range_once(count in 1u16..6, log2 in 12u32..14, offset in 0u64..1 << 20, len in 1u64..1 << 18) {
            let layout = striped(count, log2, Some((300_000, 3)));
            let (mut at, mut seen) = (offset, std::collections::HashSet::new());
            while at < offset + len {
                let e = layout.locate(at, offset + len - at);
                prop_assert!(e.len > 0);
                prop_assert!(seen.insert((e.component, e.stripe, e.offset)));
                at += e.len;
            }
            prop_assert_eq!(at, offset + len);
        }

        #[test]
        fn decode_of_any_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
            let _ = Layout::decode(&mut Reader::new(&bytes));
        }
    }

    #[test]
    fn encode_decode_round_trips() {
        for layout in [Layout::single(NodeId(3), 1), striped(5, 16, Some((1 << 20, 2)))] {
            let mut buffer = [0; 256];
            let mut w = Writer::new(&mut buffer);
            layout.encode(&mut w).unwrap();
            let n = w.len();
            assert_eq!(n, layout.encoded_bytes());
            assert_eq!(Layout::decode(&mut Reader::new(&buffer[..n])).unwrap(), layout);
        }
    }
}
