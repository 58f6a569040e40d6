//! Images in registries, by the protocol they all speak.
//!
//! Own code and not a library's because of what a registry may do to who asks it: no answer is read further than it may be
//! long, credentials go only to the registry and to who it names over TLS, and redirects neither lead from TLS to plain HTTP
//! nor take credentials along.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

use base64::Engine as _;
use mainbrella_types::limits::IMAGE_DOCUMENT_MAX;
use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderValue, LOCATION, RANGE, WWW_AUTHENTICATE};
use reqwest::{Response, StatusCode, Url};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::digest::Digest;
use crate::document::{Descriptor, Document, Manifest, choose, config, document};
use crate::error::{OciError, shown};
use crate::image::{Image, Layer};
use crate::reference::Reference;
use crate::stream::Watch;

const MANIFESTS: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json";
const CONNECT: Duration = Duration::from_secs(15);
/// Longest stand-still of a transfer.
const STALL: Duration = Duration::from_secs(60);
const REDIRECTS_MAX: usize = 5;
/// Transfers of one blob that are tried.
const TRIES: u32 = 4;
/// Between looks at whether to stop.
const TICK: Duration = Duration::from_millis(100);
const TOKEN_MAX: u64 = 64 * 1024;

/// A name and a password.
#[derive(Clone)]
pub struct Credentials {
    /// The name.
    pub user: String,
    /// The password, or a token in its place.
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credentials({}, …)", self.user)
    }
}

/// How registries are asked.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// Registries, as in references, that may be asked without TLS. Those of this host always may.
    pub plain: BTreeSet<String>,
    /// Who asks; nobody in particular when missing.
    pub credentials: Option<Credentials>,
}

/// Whether `registry` is on this host.
fn is_local(registry: &str) -> bool {
    let host = match registry.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => registry.split(':').next().unwrap_or_default(),
    };
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Fetches an image into `work`.
pub(crate) fn fetch(reference: &Reference, work: &Path, access: &Access, watch: &dyn Watch) -> Result<Image, OciError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(OciError::io("starting the transfer"))?;
    runtime.block_on(async {
        let mut session = Session::open(reference, access, watch).await?;
        session.image(reference, work).await
    })
}

struct Session<'a> {
    http: reqwest::Client,
    base: Url,
    registry: &'a str,
    repository: &'a str,
    credentials: Option<&'a Credentials>,
    authorization: Option<HeaderValue>,
    watch: &'a dyn Watch,
}

impl<'a> Session<'a> {
    async fn open(reference: &'a Reference, access: &'a Access, watch: &'a dyn Watch) -> Result<Self, OciError> {
        let registry = reference.registry.as_str();
        let local = is_local(registry);
        // An error means that the process has a provider already, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT)
            .read_timeout(STALL)
            .user_agent(concat!("mainbrella/", env!("CARGO_PKG_VERSION")));
        if local {
            builder = builder.no_proxy();
        }
        let http = builder
            .build()
            .map_err(|e| OciError::Unreachable { registry: registry.to_owned(), detail: e.to_string() })?;
        let base = |scheme: &str| {
            Url::parse(&format!("{scheme}://{registry}/v2/"))
                .map_err(|_| OciError::Name { name: shown(registry), problem: "its registry is no host name" })
        };
        let mut session = Self {
            http,
            base: base("https")?,
            registry,
            repository: &reference.repository,
            credentials: access.credentials.as_ref(),
            authorization: None,
            watch,
        };
        watch.step("Asking the registry");
        match session.send(session.base.clone(), None, None).await {
            Ok(_) => Ok(session),
            // TLS is tried first wherever it is.
            Err(OciError::Unreachable { .. }) if local || access.plain.contains(registry) => {
                session.base = base("http")?;
                session.send(session.base.clone(), None, None).await?;
                Ok(session)
            }
            Err(OciError::Unreachable { registry, detail })
                if detail.contains("InvalidContentType") || detail.contains("corrupt message") =>
            {
                Err(OciError::Plain(registry))
            }
            Err(e) => Err(e),
        }
    }

    fn unreachable(&self, e: &reqwest::Error) -> OciError {
        let mut detail = e.to_string();
        let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(e);
        while let Some(e) = cause {
            detail.push_str(&format!(": {e}"));
            cause = e.source();
        }
        OciError::Unreachable { registry: self.registry.to_owned(), detail: shown_long(&detail) }
    }

    /// Waits for what is awaited, and for nothing once the caller wants to stop.
    async fn or_stop<T>(&self, what: impl Future<Output = T>) -> Result<T, OciError> {
        let mut what = std::pin::pin!(what);
        loop {
            if self.watch.cancelled() {
                return Err(OciError::Cancelled);
            }
            if let Ok(done) = tokio::time::timeout(TICK, what.as_mut()).await {
                return Ok(done);
            }
        }
    }

    /// One request, redirects followed. Credentials go to the registry's own address only.
    async fn send(&self, url: Url, accept: Option<&'static str>, from: Option<u64>) -> Result<Response, OciError> {
        let mut at = url;
        for _ in 0..=REDIRECTS_MAX {
            let mut request = self.http.get(at.clone());
            if let Some(accept) = accept {
                request = request.header(ACCEPT, accept);
            }
            if let Some(from) = from {
                request = request.header(RANGE, format!("bytes={from}-"));
            }
            if let Some(authorization) = self.authorization.as_ref().filter(|_| at.origin() == self.base.origin()) {
                request = request.header(AUTHORIZATION, authorization.clone());
            }
            let answer = self.or_stop(request.send()).await?.map_err(|e| self.unreachable(&e))?;
            if !answer.status().is_redirection() || answer.status() == StatusCode::NOT_MODIFIED {
                return Ok(answer);
            }
            let to = answer.headers().get(LOCATION).and_then(|l| l.to_str().ok()).and_then(|l| at.join(l).ok());
            at = to
                .filter(|to| self.may_lead_to(to))
                .ok_or_else(|| self.answer("with a redirect that is not followed"))?;
        }
        Err(self.answer("with one redirect after the other"))
    }

    /// From TLS only to TLS; else where it began, or to TLS.
    fn may_lead_to(&self, to: &Url) -> bool {
        to.username().is_empty()
            && to.password().is_none()
            && (to.scheme() == "https" || to.origin() == self.base.origin())
    }

    fn answer(&self, answer: impl Into<String>) -> OciError {
        OciError::Answer { registry: self.registry.to_owned(), answer: answer.into() }
    }

    /// A request that is made again with a token when the registry wants one.
    async fn get(
        &mut self,
        path: &str,
        accept: Option<&'static str>,
        from: Option<u64>,
        what: &str,
    ) -> Result<Response, OciError> {
        let url = self.base.join(path).map_err(|_| self.answer("at no address"))?;
        let mut answer = self.send(url.clone(), accept, from).await?;
        if answer.status() == StatusCode::UNAUTHORIZED {
            let challenges: Vec<String> = answer
                .headers()
                .get_all(WWW_AUTHENTICATE)
                .iter()
                .filter_map(|h| h.to_str().ok())
                .map(str::to_owned)
                .collect();
            self.authorization = Some(self.authorize(&challenges).await?);
            answer = self.send(url, accept, from).await?;
        }
        match answer.status() {
            status if status.is_success() => Ok(answer),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(OciError::Denied(self.registry.to_owned())),
            StatusCode::NOT_FOUND => Err(OciError::NotFound(what.to_owned())),
            status => Err(self.answer(status.to_string())),
        }
    }

    async fn authorize(&self, challenges: &[String]) -> Result<HeaderValue, OciError> {
        let denied = || OciError::Denied(self.registry.to_owned());
        let secret = |text: String| {
            let mut value = HeaderValue::from_str(&text).map_err(|_| denied())?;
            value.set_sensitive(true);
            Ok::<_, OciError>(value)
        };
        let basic = self.credentials.map(|c| {
            format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(format!("{}:{}", c.user, c.password)))
        });
        let parsed: Vec<_> = challenges.iter().filter_map(|c| challenge(c)).collect();
        if let Some((_, fields)) = parsed.iter().find(|(scheme, _)| scheme == "bearer") {
            let field = |name: &str| fields.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str());
            let mut realm = field("realm")
                .and_then(|r| Url::parse(r).ok())
                .filter(|r| self.may_lead_to(r))
                .ok_or_else(|| self.answer("that tokens are had at an address that is not asked"))?;
            let scope = format!("repository:{}:pull", self.repository);
            realm.query_pairs_mut().append_pair("scope", &scope);
            if let Some(service) = field("service") {
                realm.query_pairs_mut().append_pair("service", service);
            }
            let mut request = self.http.get(realm);
            if let Some(basic) = basic {
                request = request.header(AUTHORIZATION, secret(basic)?);
            }
            let answer = self.or_stop(request.send()).await?.map_err(|e| self.unreachable(&e))?;
            if !answer.status().is_success() {
                return Err(denied());
            }
            #[derive(Deserialize)]
            struct Token {
                token: Option<String>,
                access_token: Option<String>,
            }
            let body = self.body(answer, TOKEN_MAX).await?;
            let token: Token = serde_json::from_slice(&body).map_err(|_| self.answer("with no token"))?;
            let token = token.token.or(token.access_token).ok_or_else(|| self.answer("with no token"))?;
            return secret(format!("Bearer {token}"));
        }
        match basic {
            Some(basic) if parsed.iter().any(|(scheme, _)| scheme == "basic") => secret(basic),
            _ => Err(denied()),
        }
    }

    /// All of a short answer.
    async fn body(&self, mut answer: Response, most: u64) -> Result<Vec<u8>, OciError> {
        let mut out = Vec::new();
        while let Some(piece) = self.or_stop(answer.chunk()).await?.map_err(|e| self.unreachable(&e))? {
            if out.len() as u64 + piece.len() as u64 > most {
                return Err(OciError::Limit { what: "bytes of a document of an image", max: most });
            }
            out.extend_from_slice(&piece);
        }
        Ok(out)
    }

    async fn image(&mut self, reference: &Reference, work: &Path) -> Result<Image, OciError> {
        let name = reference.to_string();
        let (mut digest, mut found) = self.manifest(&reference.manifest(), reference.digest, &name).await?;
        if let Document::Index(list) = &found {
            let chosen = choose(list)?.digest;
            (digest, found) = self.manifest(&chosen.to_string(), Some(chosen), &name).await?;
        }
        let Document::Manifest(manifest) = found else {
            return Err(OciError::malformed("the index of the image names another index"));
        };
        self.parts(name, digest, &manifest, work).await
    }

    async fn manifest(
        &mut self,
        which: &str,
        wanted: Option<Digest>,
        name: &str,
    ) -> Result<(Digest, Document), OciError> {
        let path = format!("{}/manifests/{which}", self.repository);
        let answer = self.get(&path, Some(MANIFESTS), None, name).await?;
        let bytes = self.body(answer, IMAGE_DOCUMENT_MAX).await?;
        let digest = Digest::of(&bytes);
        if wanted.is_some_and(|w| w != digest) {
            return Err(OciError::Digest("the manifest of the image".to_owned()));
        }
        Ok((digest, document(&bytes)?))
    }

    async fn parts(
        &mut self,
        name: String,
        digest: Digest,
        manifest: &Manifest,
        work: &Path,
    ) -> Result<Image, OciError> {
        if manifest.config.size > IMAGE_DOCUMENT_MAX {
            return Err(OciError::Limit { what: "bytes of a document of an image", max: IMAGE_DOCUMENT_MAX });
        }
        let path = format!("{}/blobs/{}", self.repository, manifest.config.digest);
        let answer = self.get(&path, None, None, &name).await?;
        let bytes = self.body(answer, IMAGE_DOCUMENT_MAX).await?;
        if Digest::of(&bytes) != manifest.config.digest {
            return Err(OciError::Digest("the configuration of the image".to_owned()));
        }
        let (settings, contents) = config(&bytes)?;
        if contents.len() != manifest.layers.len() {
            return Err(OciError::malformed("the image has more or fewer layers than its configuration says"));
        }
        let total = manifest.layers.iter().map(|l| l.size).sum::<u64>().max(1);
        let mut before = 0;
        let mut layers = Vec::new();
        for (n, (layer, content)) in manifest.layers.iter().zip(contents).enumerate() {
            self.watch.step(&format!("Fetching layer {} of {}", n + 1, manifest.layers.len()));
            let file = work.join(layer.digest.hex());
            // One that is in the image twice is fetched once.
            if !layers.iter().any(|l: &Layer| l.file == file) {
                self.blob(layer, &file, before, total, n + 1).await?;
            }
            before += layer.size;
            layers.push(Layer { file, offset: 0, bytes: layer.size, content });
        }
        Ok(Image { name, digest, config: settings, layers })
    }

    /// Fetches a layer into `to`, going on where a transfer broke off.
    async fn blob(&mut self, layer: &Descriptor, to: &Path, before: u64, total: u64, n: usize) -> Result<(), OciError> {
        let mut part = Part {
            file: File::create_new(to).map_err(OciError::io("making a file for a layer"))?,
            hash: Sha256::new(),
            have: 0,
        };
        let mut tries = 0;
        loop {
            tries += 1;
            match self.transfer(layer, &mut part, before, total, n).await {
                Ok(()) => break,
                Err(OciError::Unreachable { .. }) if tries < TRIES => {
                    self.or_stop(tokio::time::sleep(Duration::from_millis(250 << tries))).await?;
                }
                Err(e) => return Err(e),
            }
        }
        if Digest::from_hash(part.hash) != layer.digest {
            return Err(OciError::Digest(format!("layer {n}")));
        }
        Ok(())
    }

    async fn transfer(
        &mut self,
        layer: &Descriptor,
        part: &mut Part,
        before: u64,
        total: u64,
        n: usize,
    ) -> Result<(), OciError> {
        let path = format!("{}/blobs/{}", self.repository, layer.digest);
        let from = (part.have > 0).then_some(part.have);
        let mut answer = self.get(&path, None, from, &format!("layer {n}")).await?;
        let goes_on = answer.status() == StatusCode::PARTIAL_CONTENT
            && answer
                .headers()
                .get("content-range")
                .and_then(|v| v.to_str().ok())
                .is_some_and(|v| v.starts_with(&format!("bytes {}-", part.have)));
        if from.is_some() && !goes_on {
            part.again().map_err(OciError::io("writing a layer"))?;
        }
        while let Some(piece) = self.or_stop(answer.chunk()).await?.map_err(|e| self.unreachable(&e))? {
            part.have += piece.len() as u64;
            if part.have > layer.size {
                return Err(OciError::Digest(format!("layer {n}")));
            }
            part.hash.update(&piece);
            part.file.write_all(&piece).map_err(OciError::io("writing a layer"))?;
            #[allow(clippy::cast_precision_loss)]
            self.watch.fraction((before + part.have) as f32 / total as f32);
        }
        if part.have == layer.size {
            return Ok(());
        }
        Err(OciError::Unreachable { registry: self.registry.to_owned(), detail: "the transfer ended early".to_owned() })
    }
}

/// A file on its way.
struct Part {
    file: File,
    hash: Sha256,
    have: u64,
}

impl Part {
    fn again(&mut self) -> std::io::Result<()> {
        self.file.set_len(0)?;
        self.file.seek(SeekFrom::Start(0))?;
        self.hash = Sha256::new();
        self.have = 0;
        Ok(())
    }
}

fn shown_long(text: &str) -> String {
    text.chars().take(500).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// `SCHEME name="value",name=value…`: the scheme in small letters.
fn challenge(text: &str) -> Option<(String, Vec<(String, String)>)> {
    let (scheme, mut rest) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
    let mut fields = Vec::new();
    loop {
        rest = rest.trim_start_matches([' ', ',']);
        if rest.is_empty() {
            break;
        }
        let (name, after) = rest.split_once('=')?;
        let value;
        if let Some(quoted) = after.strip_prefix('"') {
            let (inner, after) = quoted.split_once('"')?;
            (value, rest) = (inner, after);
        } else {
            (value, rest) = after.split_once(',').unwrap_or((after, ""));
        }
        fields.push((name.trim().to_ascii_lowercase(), value.trim().to_owned()));
    }
    Some((scheme.to_ascii_lowercase(), fields))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_read() {
        let (scheme, fields) =
            challenge("Bearer realm=\"https://a.example/t?x=1,2\",service=\"s\", scope=repository:a:pull")
                .expect("one");
        assert_eq!(scheme, "bearer");
        let of = |name: &str| fields.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str());
        assert_eq!(
            (of("realm"), of("service"), of("scope")),
            (Some("https://a.example/t?x=1,2"), Some("s"), Some("repository:a:pull"))
        );
        assert_eq!(challenge("Basic realm=\"x\"").expect("one").0, "basic");
        assert_eq!(challenge("Negotiate"), Some(("negotiate".to_owned(), vec![])));
        assert_eq!(challenge("Bearer realm=\"open"), None);
        assert_eq!(challenge("Bearer realm"), None);
    }

    #[test]
    fn only_this_host_is_local() {
        for yes in ["localhost", "localhost:5000", "127.0.0.1:5000", "127.1.2.3", "[::1]:5000"] {
            assert!(is_local(yes), "{yes}");
        }
        for no in ["example.org", "10.0.0.1:5000", "[fe80::1]", "localhost.example.org", "127.0.0.1.example.org"] {
            assert!(!is_local(no), "{no}");
        }
    }
}
