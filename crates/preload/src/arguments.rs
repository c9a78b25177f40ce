//! An argument list that can grow at its front, and the variadic exec calls, which gather their arguments in such a
//! list.
//!
//! Nothing here uses malloc, as exec is called in signal handlers and in children of vfork(2). Short lists are on the
//! stack, long ones in memory that is mapped for the call.

use std::os::raw::c_char;

/// The number of pointers that a list holds without a mapping.
const SHORT: usize = 512;
/// Levels of interpreters, as in the kernel.
pub(crate) const LEVELS_MAX: usize = 5;
/// Free places at the front: for an interpreter and its argument, at each level of interpreters.
pub(crate) const FRONT: usize = 2 * LEVELS_MAX;

type Argument = *const c_char;

/// Arguments, with free places at the front and a null at the end.
pub(crate) struct Arguments {
    short: [Argument; SHORT],
    /// A mapping, or null.
    long: *mut Argument,
    room: usize,
    start: usize,
    end: usize,
}

impl Arguments {
    /// A list with room for `count` arguments; an errno when there is no memory.
    pub(crate) fn with_room(count: usize) -> Result<Arguments, isize> {
        let room = FRONT + count + 1;
        let mut list = Arguments {
            short: [std::ptr::null(); SHORT],
            long: std::ptr::null_mut(),
            room,
            start: FRONT,
            end: FRONT,
        };
        if room > SHORT {
            let (protection, flags) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            // SAFETY: a fresh mapping.
            let mapped = unsafe {
                let bytes = room * size_of::<Argument>();
                system_call!(libc::SYS_mmap, 0, bytes, protection, flags, -1i32, 0)
            };
            if mapped < 0 && mapped > -4096 {
                return Err(mapped);
            }
            list.long = mapped as *mut Argument;
        }
        Ok(list)
    }

    /// A copy of a list that ends with a null; a null list is empty.
    ///
    /// # Safety
    /// `argv` is null, or ends with a null.
    pub(crate) unsafe fn copy_of(argv: *const Argument) -> Result<Arguments, isize> {
        let mut count = 0;
        // SAFETY: the caller's promise.
        unsafe {
            while !argv.is_null() && !(*argv.add(count)).is_null() {
                count += 1;
            }
            let mut list = Arguments::with_room(count)?;
            for i in 0..count {
                list.push(*argv.add(i));
            }
            Ok(list)
        }
    }

    fn first(&mut self) -> *mut Argument {
        if self.long.is_null() {
            self.short.as_mut_ptr()
        } else {
            self.long
        }
    }

    fn set(&mut self, at: usize, argument: Argument) {
        debug_assert!(at < self.room);
        if at < self.room {
            // SAFETY: within the list.
            unsafe { self.first().add(at).write(argument) };
        }
    }

    /// Appends an argument.
    pub(crate) fn push(&mut self, argument: Argument) {
        self.set(self.end, argument);
        self.end += 1;
        self.set(self.end.min(self.room - 1), std::ptr::null());
    }

    /// Removes the first argument, if there is one.
    pub(crate) fn pop_front(&mut self) {
        self.start = (self.start + 1).min(self.end);
    }

    /// Adds an argument at the front.
    pub(crate) fn push_front(&mut self, argument: Argument) {
        if self.start == self.end {
            self.set(self.end, std::ptr::null());
        }
        self.start = self.start.saturating_sub(1);
        self.set(self.start, argument);
    }

    /// The list as exec takes it.
    pub(crate) fn as_argv(&mut self) -> *const Argument {
        let start = self.start;
        // SAFETY: within the list.
        unsafe { self.first().add(start) }
    }
}

impl Drop for Arguments {
    fn drop(&mut self) {
        if !self.long.is_null() {
            // SAFETY: the mapping is ours.
            unsafe { system_call!(libc::SYS_munmap, self.long, self.room * size_of::<Argument>()) };
        }
    }
}

/// The arguments of a variadic call: those passed in registers, then those passed in memory.
///
/// C declares execl as `int execl(const char *path, const char *arg, ...)`, all of them pointers. Both conventions pass
/// the first words in registers and the others in consecutive words of memory.
#[derive(Clone, Copy)]
pub(crate) struct Variadic {
    registers: *const usize,
    memory: *const usize,
}

#[cfg(target_arch = "x86_64")]
const REGISTERS: usize = 6;
#[cfg(target_arch = "aarch64")]
const REGISTERS: usize = 8;

impl Variadic {
    /// # Safety
    /// `registers` points to the words that were passed in registers, `memory` to those that were not.
    pub(crate) unsafe fn new(registers: *const usize, memory: *const usize) -> Variadic {
        Variadic { registers, memory }
    }

    /// The argument at `index`.
    ///
    /// # Safety
    /// The caller passed that many.
    pub(crate) unsafe fn get(&self, index: usize) -> usize {
        // SAFETY: the caller's promise, and that of `new`.
        unsafe {
            match index.checked_sub(REGISTERS) {
                None => *self.registers.add(index),
                Some(index) => *self.memory.add(index),
            }
        }
    }

    /// The strings from index 1 up to the null, and the word behind the null.
    ///
    /// # Safety
    /// The call's arguments are strings that end with a null.
    pub(crate) unsafe fn strings(&self) -> Result<(Arguments, usize), isize> {
        // SAFETY: the caller's promise: the words up to the null are there.
        unsafe {
            let mut end = 1;
            while self.get(end) != 0 {
                end += 1;
            }
            let mut list = Arguments::with_room(end - 1)?;
            for i in 1..end {
                list.push(self.get(i) as Argument);
            }
            Ok((list, end + 1))
        }
    }
}

/// Defines a variadic function: `$body` gets the words that were passed in registers and those in memory.
macro_rules! variadic {
    ($(#[$doc:meta])* $name:ident => $body:ident) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As libc's.
        #[cfg(target_arch = "x86_64")]
        #[unsafe(naked)]
        #[cfg_attr(not(test), no_mangle)]
        #[allow(unreachable_pub, dead_code)]
        pub unsafe extern "C-unwind" fn $name() {
            std::arch::naked_asm!(
                ".cfi_startproc",
                "sub rsp, 56",
                ".cfi_adjust_cfa_offset 56",
                "mov [rsp], rdi",
                "mov [rsp + 8], rsi",
                "mov [rsp + 16], rdx",
                "mov [rsp + 24], rcx",
                "mov [rsp + 32], r8",
                "mov [rsp + 40], r9",
                "mov rdi, rsp",
                "lea rsi, [rsp + 64]",
                "call {body}",
                "add rsp, 56",
                ".cfi_adjust_cfa_offset -56",
                "ret",
                ".cfi_endproc",
                body = sym $body,
            )
        }

        $(#[$doc])*
        ///
        /// # Safety
        /// As libc's.
        #[cfg(target_arch = "aarch64")]
        #[unsafe(naked)]
        #[cfg_attr(not(test), no_mangle)]
        #[allow(unreachable_pub, dead_code)]
        pub unsafe extern "C-unwind" fn $name() {
            std::arch::naked_asm!(
                ".cfi_startproc",
                "stp x29, x30, [sp, -80]!",
                ".cfi_adjust_cfa_offset 80",
                ".cfi_rel_offset x29, 0",
                ".cfi_rel_offset x30, 8",
                "stp x0, x1, [sp, 16]",
                "stp x2, x3, [sp, 32]",
                "stp x4, x5, [sp, 48]",
                "stp x6, x7, [sp, 64]",
                "add x0, sp, 16",
                "add x1, sp, 80",
                "bl {body}",
                "ldp x29, x30, [sp], 80",
                ".cfi_adjust_cfa_offset -80",
                ".cfi_restore x29",
                ".cfi_restore x30",
                "ret",
                ".cfi_endproc",
                body = sym $body,
            )
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe fn listed(list: &mut Arguments) -> Vec<usize> {
        let mut argv = list.as_argv();
        let mut all = Vec::new();
        // SAFETY: the list ends with a null.
        unsafe {
            while !(*argv).is_null() {
                all.push(*argv as usize);
                argv = argv.add(1);
            }
        }
        all
    }

    #[test]
    fn copy_of_lists_of_all_lengths_is_equal_and_grows_at_the_front() {
        for count in [0, 1, 2, 500, 501, 502, 510, 511, 512, 5000] {
            let given: Vec<Argument> = (1..=count).map(|i| i as Argument).chain([std::ptr::null()]).collect();
            // SAFETY: the list ends with a null.
            let mut list = unsafe { Arguments::copy_of(given.as_ptr()) }.unwrap();
            // SAFETY: as above.
            assert_eq!(unsafe { listed(&mut list) }, (1..=count).collect::<Vec<_>>());
            list.pop_front();
            for i in 0..FRONT {
                list.push_front((9000 + i) as Argument);
            }
            // SAFETY: as above.
            let all = unsafe { listed(&mut list) };
            assert_eq!(all.len(), count.saturating_sub(1) + FRONT);
            assert_eq!(all[0], 9000 + FRONT - 1);
        }
    }
}
