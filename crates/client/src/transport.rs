//! Sending one request and reading its answer.

use std::fmt;
use std::time::Duration;

use http::header::{AUTHORIZATION, HeaderValue, RETRY_AFTER};
use reqwest::{Method, RequestBuilder, Response, redirect};
use serde::Serialize;
use serde::de::DeserializeOwned;
use url::Url;

use mainbrella_api::{ErrorBody, headers};

use crate::address;
use crate::error::{ApiFailure, ClientError};

/// Longest wait for a connection.
const CONNECT: Duration = Duration::from_secs(10);
/// Longest wait for an answer, beyond what the call itself takes.
const ANSWER: Duration = Duration::from_secs(60);
/// Largest JSON answer: two streams of 16 MiB as base64, and some.
const JSON_MAX: usize = 48 * 1024 * 1024;
/// Largest error answer.
const ERROR_MAX: usize = 256 * 1024;

/// An API key. Shown nowhere.
#[derive(Clone)]
pub struct ApiKey(HeaderValue);

impl ApiKey {
    /// Takes the text of a key, without the white space around it.
    ///
    /// # Errors
    /// When it is empty or holds what a header cannot carry.
    pub fn new(text: &str) -> Result<Self, ClientError> {
        let key = text.trim();
        let mut value = HeaderValue::from_str(&format!("Bearer {key}"))
            .ok()
            .filter(|_| !key.is_empty() && key.bytes().all(|b| b.is_ascii_graphic()));
        match value.take() {
            Some(mut v) => {
                v.set_sensitive(true);
                Ok(Self(v))
            }
            None => Err(ClientError::Configuration {
                message: "the API key must be a key such as mb_…, without spaces or line breaks".into(),
                hint: "`mainbrella key create` makes one.".into(),
            }),
        }
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(…)")
    }
}

/// A client of one service. Cheap to clone; clones share connections.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    base: Url,
    key: Option<ApiKey>,
    answer: Duration,
}

impl Client {
    /// A client of the service at `url`. Without a key only [`Client::health`] will be answered.
    ///
    /// # Errors
    /// When the URL may not be used, or the certificates of this machine cannot be read.
    pub fn new(url: &str, key: Option<ApiKey>) -> Result<Self, ClientError> {
        let base = address::parse(url)?;
        // An error means that the process has a provider already, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = reqwest::Client::builder()
            .redirect(redirect::Policy::none())
            .retry(reqwest::retry::never())
            .no_proxy()
            .tcp_nodelay(true)
            .connect_timeout(CONNECT)
            .user_agent(concat!("mainbrella-rust/", env!("CARGO_PKG_VERSION")));
        builder = if base.scheme() == "https" { builder.https_only(true) } else { builder.tls_certs_only([]) };
        let http = builder.build().map_err(|_| ClientError::Configuration {
            message: "no TLS client could be set up on this machine".into(),
            hint: "Install the package `ca-certificates`.".into(),
        })?;
        Ok(Self { http, base, key, answer: ANSWER })
    }

    /// The same client with another longest wait for answers. Commands and creates add their own time to it;
    /// a transfer may stand still for so long.
    #[must_use]
    pub fn with_answer_timeout(mut self, wait: Duration) -> Self {
        self.answer = wait;
        self
    }

    /// Where the service is, without a final slash.
    #[must_use]
    pub fn url(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    pub(crate) fn answer_timeout(&self) -> Duration {
        self.answer
    }

    /// The URL of `segments` below the base, with `query`, both percent-encoded.
    pub(crate) fn endpoint<'a>(&self, segments: &[&str], query: impl IntoIterator<Item = (&'a str, &'a str)>) -> Url {
        let mut url = self.base.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(segments);
        }
        let encode =
            |s: &str| url::form_urlencoded::byte_serialize(s.as_bytes()).collect::<String>().replace('+', "%20");
        let pairs: Vec<String> = query.into_iter().map(|(k, v)| format!("{}={}", encode(k), encode(v))).collect();
        url.set_query((!pairs.is_empty()).then(|| pairs.join("&")).as_deref());
        url
    }

    pub(crate) fn request(&self, method: Method, url: Url) -> RequestBuilder {
        let id = uuid::Uuid::new_v4().simple().to_string();
        let request = self.http.request(method, url).header(headers::REQUEST_ID, id);
        match &self.key {
            Some(key) => request.header(AUTHORIZATION, key.0.clone()),
            None => request,
        }
    }

    /// Sends, once, and gives the answer if it is a good one.
    pub(crate) async fn send(&self, request: RequestBuilder) -> Result<Response, ClientError> {
        let response = request.send().await.map_err(|e| self.failed(e))?;
        if response.status().is_success() { Ok(response) } else { Err(self.refused(response).await) }
    }

    /// Sends a request for another protocol, once, and gives the answer that grants it.
    pub(crate) async fn send_upgrade(&self, request: RequestBuilder) -> Result<Response, ClientError> {
        let response = request.send().await.map_err(|e| self.failed(e))?;
        match response.status() {
            reqwest::StatusCode::SWITCHING_PROTOCOLS => Ok(response),
            status if status.is_success() => Err(ClientError::Malformed("no other protocol was granted")),
            _ => Err(self.refused(response).await),
        }
    }

    /// The failure an answer tells of.
    async fn refused(&self, response: Response) -> ClientError {
        let status = response.status();
        if status.is_redirection() {
            return ClientError::Redirect { status: status.as_u16() };
        }
        let retry_after =
            response.headers().get(RETRY_AFTER).and_then(|v| v.to_str().ok()?.parse().ok()).map(Duration::from_secs);
        let status = status.as_u16();
        let body = self.read(response, ERROR_MAX).await.ok().and_then(|b| serde_json::from_slice::<ErrorBody>(&b).ok());
        match body {
            Some(body) => ClientError::Api(Box::new(ApiFailure { status, body, retry_after })),
            None => ClientError::Foreign { status },
        }
    }

    /// Sends and reads a JSON answer, waiting `extra` beyond the usual.
    pub(crate) async fn json<T: DeserializeOwned>(
        &self,
        request: RequestBuilder,
        extra: Duration,
    ) -> Result<T, ClientError> {
        let response = self.send(request.timeout(self.answer.saturating_add(extra))).await?;
        self.parse(response).await
    }

    pub(crate) async fn parse<T: DeserializeOwned>(&self, response: Response) -> Result<T, ClientError> {
        let body = self.read(response, JSON_MAX).await?;
        serde_json::from_slice(&body).map_err(|_| ClientError::Malformed("its JSON does not have the expected fields"))
    }

    pub(crate) fn failed(&self, e: reqwest::Error) -> ClientError {
        ClientError::from_http(e, &self.base)
    }

    async fn read(&self, mut response: Response, limit: usize) -> Result<Vec<u8>, ClientError> {
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|e| self.failed(e))? {
            if body.len() + chunk.len() > limit {
                return Err(ClientError::Malformed("it is too long"));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }
}

/// A JSON body.
pub(crate) fn with_json<T: Serialize>(request: RequestBuilder, body: &T) -> RequestBuilder {
    request.json(body)
}
