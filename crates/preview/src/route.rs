//! What a token leads to, and what is asked of the rest of the service.

use std::sync::Arc;

use async_trait::async_trait;
use mainbrella_types::GenerationKey;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::token::Token;
use crate::upstream::Pool;

/// A byte stream to a port of a machine.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin + 'static {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> Io for T {}

/// Requests and tunnels of one route at once.
const ROUTE_REQUESTS_MAX: usize = 1024;

/// The right to reach one port of one generation. Whoever makes it cuts it when that right ends.
#[derive(Debug)]
pub struct Route {
    /// Its public id, for logs.
    pub id: String,
    /// Whose port.
    pub machine: GenerationKey,
    /// The port.
    pub port: u16,
    /// Cancelled when the right ends: everything that goes over the route ends with it.
    pub cut: CancellationToken,
    pub(crate) places: Arc<Semaphore>,
    pub(crate) pool: Pool,
}

impl Route {
    /// A route that is open until it is cut.
    #[must_use]
    pub fn new(id: String, machine: GenerationKey, port: u16) -> Arc<Self> {
        Arc::new(Self {
            id,
            machine,
            port,
            cut: CancellationToken::new(),
            places: Arc::new(Semaphore::new(ROUTE_REQUESTS_MAX)),
            pool: Pool::default(),
        })
    }
}

/// Why a token leads nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRoute {
    /// There was never such a token, as far as is known.
    Unknown,
    /// It has ended.
    Over,
}

/// Knows where tokens lead.
#[async_trait]
pub trait Routes: Send + Sync + 'static {
    /// The route of a token.
    ///
    /// # Errors
    /// That it leads nowhere.
    async fn find(&self, token: &Token) -> Result<Arc<Route>, NoRoute>;
}

/// Why there is no connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DialFault {
    /// The machine runs; nothing listens at the port.
    NothingListens,
    /// The machine does not run.
    MachineOver,
    /// The machine is paused; the route leads on when it is resumed.
    MachinePaused,
    /// The machine has as many connections as it may.
    Busy,
    /// The machine does not answer.
    Unreachable,
}

/// Connects to ports of machines.
#[async_trait]
pub trait Dial: Send + Sync + 'static {
    /// A connection to the route's port.
    ///
    /// # Errors
    /// Why there is none.
    async fn dial(&self, route: &Route) -> Result<Box<dyn Io>, DialFault>;
}
