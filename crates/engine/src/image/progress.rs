//! How a build tells what it is doing.

/// One thing a build has to say.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A step begins; the one before it, if any, is finished. In a few words, e.g. `Downloading the kernel`.
    Step(&'a str),
    /// How far the present step is, 0 to 1. Steps that cannot know never send it.
    Fraction(f32),
    /// A line a program wrote, without its end, at most 4 KiB.
    Line(&'a str),
    /// All is done; the result was there already when `cached`.
    Finished {
        /// Nothing had to be built.
        cached: bool,
    },
}

/// Receives what a build has to say. Called from the building thread; must not block for long.
pub trait Progress: Send + Sync {
    /// Called for every event, in order.
    fn event(&self, event: Event<'_>);

    /// Asked several times a second; `true` stops the build, which then fails with
    /// [`ImageError::Cancelled`](super::ImageError::Cancelled) and leaves nothing behind.
    fn cancelled(&self) -> bool {
        false
    }
}

/// Says nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn event(&self, _: Event<'_>) {}
}
