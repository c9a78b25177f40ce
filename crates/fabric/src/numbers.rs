//! Random numbers: from a seed for simulations, from the kernel for keys.

/// A stream of numbers, reproducible from its seed (splitmix64: Steele, Lea, Flood, OOPSLA 2014). Not for secrets.
#[derive(Clone, Debug)]
pub struct Numbers {
    state: u64,
}

impl Numbers {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Numbers {
        Numbers { state: seed }
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ self.state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number below `n`, which is not 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.draw() % n
    }

    /// True in `permille` of 1000 cases.
    pub fn chance(&mut self, permille: u32) -> bool {
        self.below(1000) < u64::from(permille)
    }
}

/// The source of nonces, keys and incarnations.
#[derive(Clone, Debug)]
pub(crate) enum Entropy {
    /// The kernel's random numbers.
    System,
    /// Numbers from a seed, for simulations only.
    Seeded(Numbers),
}

impl Entropy {
    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        match self {
            Entropy::System => {
                let mut filled = 0;
                while filled < bytes.len() {
                    match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())
                    {
                        Ok(n) => filled += n,
                        Err(rustix::io::Errno::INTR) => {}
                        // Linux 3.17 and later have the call. It cannot fail once the kernel's entropy pool is ready.
                        Err(e) => panic!("the kernel gives no random bytes: {e}"),
                    }
                }
            }
            Entropy::Seeded(numbers) => {
                for chunk in bytes.chunks_mut(8) {
                    chunk.copy_from_slice(&numbers.draw().to_le_bytes()[..chunk.len()]);
                }
            }
        }
    }

    pub(crate) fn u64(&mut self) -> u64 {
        let mut bytes = [0; 8];
        self.fill(&mut bytes);
        u64::from_le_bytes(bytes)
    }
}
