//! The wall clock, as something a test can move.

use mainbrella_types::Millis;

/// Tells the time.
pub trait Clock: Send + Sync {
    /// Now.
    fn now(&self) -> Millis;
}

/// The host's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Millis {
        let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Millis(i64::try_from(since_epoch.as_millis()).unwrap_or(i64::MAX))
    }
}

/// A clock that follows tokio's, so that `tokio::time::pause` moves both.
#[derive(Clone, Debug)]
pub struct TokioClock {
    base: Millis,
    start: tokio::time::Instant,
}

impl TokioClock {
    /// A clock that says `base` now.
    #[must_use]
    pub fn starting_at(base: Millis) -> Self {
        Self { base, start: tokio::time::Instant::now() }
    }
}

impl Clock for TokioClock {
    fn now(&self) -> Millis {
        self.base.plus(u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX))
    }
}
