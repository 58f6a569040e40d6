//! One request: from its token to the application and back.

use std::net::IpAddr;
use std::sync::Arc;

use http::{HeaderValue, Method, Request, Response, StatusCode, Uri, Version};
use hyper::body::{Body as _, Incoming};
use tokio::sync::OwnedSemaphorePermit;

use crate::body::{Relay, Reply, Upload};
use crate::headers;
use crate::origin::{Nowhere, Public, Target};
use crate::page::{Why, page, wants_html};
use crate::route::{Dial, DialFault, NoRoute, Route, Routes};
use crate::serve::Connection;
use crate::tunnel;
use crate::upstream::{Lent, Unsent};

/// Everything a request may reach.
#[derive(Clone)]
pub struct Ingress {
    pub(crate) public: Arc<Public>,
    pub(crate) routes: Arc<dyn Routes>,
    pub(crate) dial: Arc<dyn Dial>,
}

impl Ingress {
    /// An ingress that is called `public`, finds routes in `routes` and connects through `dial`.
    #[must_use]
    pub fn new(public: Public, routes: Arc<dyn Routes>, dial: Arc<dyn Dial>) -> Self {
        Self { public: Arc::new(public), routes, dial }
    }

    /// Answers one request.
    pub(crate) async fn answer(&self, connection: &Connection, request: Request<Incoming>) -> Response<Reply> {
        let html = wants_html(request.headers());
        match self.pass(connection, request).await {
            Ok(response) => response,
            Err(why) => page(why, html),
        }
    }

    async fn pass(&self, connection: &Connection, request: Request<Incoming>) -> Result<Response<Reply>, Why> {
        if request.method() == Method::CONNECT {
            return Err(Why::Method);
        }
        let target = self.public.locate(request.uri(), request.headers()).map_err(|nowhere| match nowhere {
            Nowhere::Malformed => Why::Malformed,
            Nowhere::NoToken => Why::NoToken,
        })?;
        let route = self.routes.find(&target.token).await.map_err(|none| match none {
            NoRoute::Unknown => Why::Unknown,
            NoRoute::Over => Why::Over,
        })?;
        // A connection that carries one request at a time ends with its route; of others, only what uses the route.
        if request.version() != Version::HTTP_2 {
            connection.uses(&route);
        }
        let place = Arc::clone(&route.places).try_acquire_owned().map_err(|_| Why::TooMany)?;
        tokio::select! {
            biased;
            () = route.cut.cancelled() => Err(Why::Over),
            passed = self.forward(connection, &route, &target, request, place) => passed,
        }
    }

    async fn forward(
        &self,
        connection: &Connection,
        route: &Arc<Route>,
        target: &Target,
        mut request: Request<Incoming>,
        place: OwnedSemaphorePermit,
    ) -> Result<Response<Reply>, Why> {
        let shared = request.version() == Version::HTTP_2;
        let protocol = headers::upgrade_of(request.headers()).filter(|_| request.version() == Version::HTTP_11);
        let caller = protocol.is_some().then(|| hyper::upgrade::on(&mut request));
        let request = self.outgoing(request, target, connection.peer.ip(), protocol.clone())?;
        let (mut lent, mut response) = self.exchange(route, request).await?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let (Some(caller), Some(asked)) = (caller, protocol) else { return Err(Why::BrokenOff) };
            let agreed = response.headers().get(http::header::UPGRADE).cloned().unwrap_or(asked);
            let application = hyper::upgrade::on(&mut response);
            let places = (place, connection.place.clone());
            tokio::spawn(tunnel::carry(caller, application, route.cut.clone(), connection.closing.clone(), places));
            headers::of_reply(response.headers_mut(), target);
            headers::keep_upgrade(response.headers_mut(), agreed);
            return Ok(response.map(|_| Reply::Page(http_body_util::Full::default())));
        }
        lent.used = true;
        headers::of_reply(response.headers_mut(), target);
        *response.version_mut() = Version::HTTP_11;
        let (head, body) = response.into_parts();
        // A connection that carries one request at a time ends with its route, and this with it.
        let cut = shared.then(|| route.cut.clone().cancelled_owned());
        let mut relay = Box::new(Relay::new(body, cut, lent, place));
        relay.begin().await;
        Ok(Response::from_parts(head, Reply::Relay(relay)))
    }

    /// The request as the application is to see it.
    fn outgoing(
        &self,
        request: Request<Incoming>,
        target: &Target,
        peer: IpAddr,
        protocol: Option<HeaderValue>,
    ) -> Result<Request<Upload>, Why> {
        let (mut parts, body) = request.into_parts();
        let mut uri = http::uri::Parts::default();
        uri.path_and_query = Some(target.path.clone());
        parts.uri = Uri::from_parts(uri).map_err(|_| Why::Malformed)?;
        parts.version = Version::HTTP_11;
        parts.extensions.clear();
        headers::of_request(&mut parts.headers, target, &self.public, peer);
        if let Some(protocol) = protocol {
            headers::keep_upgrade(&mut parts.headers, protocol);
        }
        Ok(Request::from_parts(parts, Upload::new(body)))
    }

    /// Sends a request on a connection that waits, else on a new one. What never left goes on another connection; so
    /// does what an old connection lost, where sending it twice does no harm.
    async fn exchange(
        &self,
        route: &Arc<Route>,
        mut request: Request<Upload>,
    ) -> Result<(Lent, Response<Incoming>), Why> {
        let mut fresh = false;
        loop {
            let lent = Lent::get(route, self.dial.as_ref(), fresh).await;
            let mut lent = lent.map_err(|fault| match fault {
                DialFault::NothingListens => Why::NothingListens(route.port),
                fault => Why::Dial(fault),
            })?;
            if !request.body().is_end_stream() || request.headers().contains_key(http::header::UPGRADE) {
                lent.detach();
            }
            let again = if lent.used { repeatable(&request) } else { None };
            match lent.send(request).await {
                Ok(response) => return Ok((lent, response)),
                Err(Unsent::Back(back)) if lent.used => request = *back,
                Err(Unsent::Back(_)) => return Err(Why::BrokenOff),
                Err(Unsent::Lost(e)) => {
                    tracing::debug!(preview = route.id, error = %e, "an application gave no reply");
                    request = again.ok_or(Why::BrokenOff)?;
                }
            }
            fresh = true;
        }
    }
}

/// The same request once more, if it changes nothing and has no body.
fn repeatable(request: &Request<Upload>) -> Option<Request<Upload>> {
    let safe = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    if !safe || !request.body().is_end_stream() {
        return None;
    }
    let mut copy = Request::new(Upload::empty());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.headers_mut() = request.headers().clone();
    Some(copy)
}
