//! Templates with versions, and the builds they come from.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::Stream;
use reqwest::header::ACCEPT;
use reqwest::{Method, Response};

use mainbrella_api::{
    Build, BuildEvent, BuildEventKind, BuildList, CreateBuild, CreateTemplate, TagTemplate, TemplateDetails,
    TemplateRemoved,
};

use crate::error::ClientError;
use crate::files::Upload;
use crate::transport::{Client, with_json};

/// How long a log that broke is taken up again before that is given up.
const RECONNECT: Duration = Duration::from_secs(60);
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// The service gives a sign of life every ten seconds; after so long without one the connection is given up.
const SILENCE_MAX: Duration = Duration::from_secs(35);
/// Longest event on its way, bytes.
const EVENT_MAX: usize = 256 * 1024;
/// How long the making of a template of a snapshot may take beyond the usual wait: its files are looked at.
const MAKING: Duration = Duration::from_secs(360);

impl Client {
    /// Asks for a build. It waits for its context then.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn create_build(&self, body: &CreateBuild) -> Result<Build, ClientError> {
        let request = self.request(Method::POST, self.endpoint(&["v1", "builds"], []));
        self.json(with_json(request, body), Duration::ZERO).await
    }

    /// Sends the context of a build: a tar archive, packed with gzip or not. Never repeated.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Source`] when the stream failed. The context may then be sent again.
    pub async fn send_context<S>(&self, build: &str, upload: Upload<S>) -> Result<Build, ClientError>
    where
        S: Stream<Item = io::Result<Bytes>> + Send + 'static,
    {
        let url = self.endpoint(&["v1", "builds", build, "context"], []);
        self.send_upload(url, "application/x-tar", upload).await
    }

    /// Builds that are remembered, the newest first.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn builds(&self) -> Result<BuildList, ClientError> {
        self.json(self.request(Method::GET, self.endpoint(&["v1", "builds"], [])), Duration::ZERO).await
    }

    /// A build as it is now.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn build(&self, id: &str) -> Result<Build, ClientError> {
        self.json(self.request(Method::GET, self.endpoint(&["v1", "builds", id], [])), Duration::ZERO).await
    }

    /// Cancels a build.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn cancel_build(&self, id: &str) -> Result<Build, ClientError> {
        let request = self.request(Method::POST, self.endpoint(&["v1", "builds", id, "cancel"], []));
        self.json(request, Duration::ZERO).await
    }

    /// Follows the log of a build after event `cursor` until its end. A connection that breaks is made anew from where it
    /// broke: nothing is lost and nothing comes twice.
    #[must_use]
    pub fn follow_build(&self, id: &str, cursor: u64) -> BuildStream {
        let (response, held, ready) = (None, Vec::new(), VecDeque::new());
        BuildStream { client: self.clone(), id: id.to_owned(), cursor, response, held, ready, over: false }
    }

    /// A template with all that is known of it.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn template(&self, name: &str) -> Result<TemplateDetails, ClientError> {
        self.json(self.request(Method::GET, self.endpoint(&["v1", "templates", name], [])), Duration::ZERO).await
    }

    /// Lets the name `tag` mean what `source` means now.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn tag_template(&self, source: &str, tag: &str) -> Result<TemplateDetails, ClientError> {
        let request = self.request(Method::PUT, self.endpoint(&["v1", "templates", tag], []));
        self.json(with_json(request, &TagTemplate { source: source.to_owned() }), Duration::ZERO).await
    }

    /// Removes a version or a tag; with `all` everything of a name.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn remove_template(&self, name: &str, all: bool) -> Result<TemplateRemoved, ClientError> {
        let query = all.then_some(("all", "true"));
        self.json(self.request(Method::DELETE, self.endpoint(&["v1", "templates", name], query)), Duration::ZERO).await
    }

    /// Makes a template of a full snapshot.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn create_template(&self, body: &CreateTemplate) -> Result<TemplateDetails, ClientError> {
        let request = self.request(Method::POST, self.endpoint(&["v1", "templates"], []));
        self.json(with_json(request, body), MAKING).await
    }
}

/// The events of a build as they come. Holds little more than one reading.
#[derive(Debug)]
pub struct BuildStream {
    client: Client,
    id: String,
    cursor: u64,
    response: Option<Response>,
    held: Vec<u8>,
    ready: VecDeque<BuildEvent>,
    over: bool,
}

impl BuildStream {
    /// The next event; `None` after the end of the build.
    ///
    /// # Errors
    /// [`ClientError`] when the service refuses, or cannot be reached again within a minute. A later call tries again.
    pub async fn next(&mut self) -> Result<Option<BuildEvent>, ClientError> {
        let (mut since, mut pause) = (None, PAUSE_FIRST);
        loop {
            if let Some(event) = self.ready.pop_front() {
                self.cursor = event.sequence;
                self.over = matches!(event.kind, BuildEventKind::Done { .. });
                return Ok(Some(event));
            }
            if self.over {
                return Ok(None);
            }
            let error = match self.more().await {
                Ok(()) => {
                    (since, pause) = (None, PAUSE_FIRST);
                    continue;
                }
                Err(e) => e,
            };
            (self.response, self.held) = (None, Vec::new());
            let begun = *since.get_or_insert_with(Instant::now);
            let again = error.is_retryable() || matches!(error, ClientError::Lost { .. } | ClientError::StoppedWaiting);
            if !again || begun.elapsed() > RECONNECT {
                return Err(error);
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Reads on, connecting where there is no connection.
    async fn more(&mut self) -> Result<(), ClientError> {
        let response = match &mut self.response {
            Some(response) => response,
            none => {
                let cursor = self.cursor.to_string();
                let url = self.client.endpoint(&["v1", "builds", &self.id, "events"], [("cursor", cursor.as_str())]);
                let request = self.client.request(Method::GET, url).header(ACCEPT, "text/event-stream");
                let wait = tokio::time::timeout(self.client.answer_timeout(), self.client.send(request));
                none.insert(wait.await.map_err(|_| ClientError::StoppedWaiting)??)
            }
        };
        let chunk =
            tokio::time::timeout(SILENCE_MAX, response.chunk()).await.map_err(|_| ClientError::StoppedWaiting)?;
        match chunk.map_err(|e| self.client.failed(e))? {
            Some(chunk) => self.held.extend_from_slice(&chunk),
            // The service ended it before the build did: it is going down.
            None => return Err(ClientError::StoppedWaiting),
        }
        let mut taken = 0;
        while let Some(length) = self.held[taken..].windows(2).position(|w| w == b"\n\n") {
            let block = &self.held[taken..taken + length];
            taken += length + 2;
            for data in block.split(|b| *b == b'\n').filter_map(|line| line.strip_prefix(b"data: ")) {
                let event: BuildEvent = serde_json::from_slice(data)
                    .map_err(|_| ClientError::Malformed("an event does not have the expected fields"))?;
                let last = self.ready.back().map_or(self.cursor, |e| e.sequence);
                if event.sequence > last {
                    self.ready.push_back(event);
                }
            }
        }
        self.held.drain(..taken);
        if self.held.len() > EVENT_MAX {
            return Err(ClientError::Malformed("an event is too long"));
        }
        Ok(())
    }
}
