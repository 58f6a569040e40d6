//! Frequency of the host's time stamp counter.

use std::time::{Duration, Instant};

/// Measures it, kHz. Takes about 60 ms. `None` where it is not a plausible constant rate.
#[must_use]
pub fn measure_khz() -> Option<u32> {
    let a = sample();
    std::thread::sleep(Duration::from_millis(20));
    let b = sample();
    std::thread::sleep(Duration::from_millis(40));
    let c = sample();
    let (whole, part) = (rate(a, c)?, rate(a, b)?);
    // Two windows must agree, or something moved the clock or the counter in between.
    let apart = whole.abs_diff(part);
    (apart < whole / 500 && (100_000..20_000_000).contains(&whole)).then_some(whole)
}

/// Counter and clock at the same moment: the closest of several pairs.
fn sample() -> (u64, Instant) {
    (0..16)
        .map(|_| {
            let before = counter();
            let clock = Instant::now();
            let after = counter();
            (after.wrapping_sub(before), before.wrapping_add(after.wrapping_sub(before) / 2), clock)
        })
        .min_by_key(|s| s.0)
        .map_or((0, Instant::now()), |s| (s.1, s.2))
}

fn rate((c0, t0): (u64, Instant), (c1, t1): (u64, Instant)) -> Option<u32> {
    let ticks = u128::from(c1.checked_sub(c0)?);
    let ns = t1.duration_since(t0).as_nanos();
    u32::try_from(ticks * 1_000_000 / ns.max(1)).ok()
}

#[cfg(target_arch = "x86_64")]
fn counter() -> u64 {
    // SAFETY: reads a counter; has no other effect.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn counter() -> u64 {
    0
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn two_measurements_agree_within_half_a_percent() {
        // On a busy host single measurements may be refused.
        let mut good = (0..10).filter_map(|_| measure_khz());
        let (a, b) = (good.next().expect("one"), good.next().expect("two"));
        assert!(a.abs_diff(b) < a / 200, "{a} {b}");
    }
}
