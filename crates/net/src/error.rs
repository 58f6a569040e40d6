use std::io;

/// A step of network set-up that failed. The machine has no network then.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// A system call or file.
    #[error("{0}")]
    Io(&'static str, #[source] io::Error),
    /// A netlink request.
    #[error("{0}")]
    Link(&'static str, #[source] Box<rtnetlink::Error>),
    /// The packet filter refused its rules; what it said.
    #[error("the packet filter did not load its rules: {0}")]
    Rules(String),
    /// All of so many addresses for `open` seats are taken.
    #[error("all {0} addresses of the network block are taken")]
    Exhausted(u32),
    /// A setting that cannot be used.
    #[error("{0}")]
    Config(String),
}

pub(crate) fn io_error(what: &'static str) -> impl FnOnce(io::Error) -> NetError {
    move |e| NetError::Io(what, e)
}

pub(crate) fn link_error(what: &'static str) -> impl FnOnce(rtnetlink::Error) -> NetError {
    move |e| NetError::Link(what, Box::new(e))
}
