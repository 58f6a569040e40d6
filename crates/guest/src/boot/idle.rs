//! A machine that nobody uses should cost nothing. Everything here wakes an idle guest, or its VMM, many times a second for
//! nothing that a machine of ours needs; hundreds of idle machines would keep a host busy. See docs/decisions/011.

use std::fs;
use std::io;

/// What the kernel does every so often, and how often it may.
const SETTINGS: [(&str, &str); 4] = [
    // Moving pages together ahead of need: twice a second.
    ("vm/compaction_proactiveness", "0"),
    // Adding up counters of virtual memory, seconds.
    ("vm/stat_interval", "300"),
    // Looking whether a processor is stuck; the host sees that.
    ("kernel/watchdog", "0"),
    // Looking for processes that hang, which would only be said on the console.
    ("kernel/hung_task_timeout_secs", "0"),
];

/// Brings to rest what would go on for ever. What cannot be is only a pity.
pub(super) fn settle() {
    for (name, value) in SETTINGS {
        // Not every kernel has each of them.
        let _ = fs::write(format!("/proc/sys/{name}"), value);
    }
    if let Err(e) = stop_interval_timer() {
        super::say(&format!("the interval timer goes on: {e}"));
    }
}

/// Ends the square wave of the PC's interval timer. It runs from reset, and nobody listens: this kernel keeps time by other
/// means and leaves it alone. The VMM wakes for each of its edges, 36 times a second.
#[cfg(target_arch = "x86_64")]
fn stop_interval_timer() -> io::Result<()> {
    const COUNTER_0: u16 = 0x40;
    const MODE: u16 = 0x43;
    /// Counter 0, both bytes, mode 0: count down once.
    const ONCE: u8 = 0b0011_0000;
    // SAFETY: it changes this process's right to use four ports, and nothing in memory.
    if unsafe { libc::ioperm(COUNTER_0.into(), 4, 1) } != 0 {
        return Err(io::Error::last_os_error());
    }
    for (port, value) in [(MODE, ONCE), (COUNTER_0, 0), (COUNTER_0, 0)] {
        // SAFETY: the right to these ports was just given; writing them touches no memory.
        unsafe {
            std::arch::asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack, preserves_flags))
        };
    }
    // SAFETY: as above.
    unsafe { libc::ioperm(COUNTER_0.into(), 4, 0) };
    Ok(())
}

#[cfg(not(target_arch = "x86_64"))]
fn stop_interval_timer() -> io::Result<()> {
    Ok(())
}
