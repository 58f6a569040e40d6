//! The public way to ports of machines: a reverse proxy that knows routes and permits, and nothing else.
//!
//! This crate answers one reviewer's question: *what can the internet reach?* A request carries a token, in the first
//! label of its host (`http://TOKEN.DOMAIN/…`) or in its path (`/p/TOKEN/…`). The token leads to one port of one
//! generation ([`Routes`]); a connection to that port comes from [`Dial`]. There is no other way through: no address,
//! name or port that a caller sends is ever connected to. When a route is cut, everything that goes over it ends.

mod body;
mod headers;
mod origin;
mod page;
mod patience;
mod proxy;
mod route;
mod serve;
mod tls;
mod token;
mod tunnel;
mod upstream;

pub use origin::Public;
pub use proxy::Ingress;
pub use route::{Dial, DialFault, Io, NoRoute, Route, Routes};
pub use serve::serve;
pub use tls::{Tls, TlsError};
pub use token::Token;
