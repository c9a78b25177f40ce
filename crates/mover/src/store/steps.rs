//! Test support: a hook before each system call of a thread, so that tests can act, or die, between any two of them.

use std::cell::RefCell;

type Hook = Box<dyn FnMut(u64)>;

thread_local! {
    static HOOK: RefCell<Option<(u64, Hook)>> = const { RefCell::new(None) };
}

/// Runs `run` with a hook that gets the number of each system call, counted from 0, before it is made. Returns how many
/// there were. The hook ends with `run`, also when that panics.
pub fn with_steps<R>(hook: impl FnMut(u64) + 'static, run: impl FnOnce() -> R) -> (R, u64) {
    struct Ends;
    impl Drop for Ends {
        fn drop(&mut self) {
            HOOK.with_borrow_mut(|hook| *hook = None);
        }
    }
    HOOK.with_borrow_mut(|slot| *slot = Some((0, Box::new(hook))));
    let ends = Ends;
    let result = run();
    let steps = HOOK.with_borrow(|hook| hook.as_ref().map_or(0, |(step, _)| *step));
    drop(ends);
    (result, steps)
}

/// Before a system call.
pub(super) fn step() {
    // Taken out while it runs: what the hook does has no steps.
    let Some((step, mut hook)) = HOOK.with_borrow_mut(Option::take) else { return };
    hook(step);
    HOOK.with_borrow_mut(|slot| *slot = Some((step + 1, hook)));
}
