//! Addresses: how previews are called from outside, and which one a request means.

use http::uri::{Authority, PathAndQuery};
use http::{HeaderMap, Uri, header};

use crate::token::Token;

/// Before the token in the path form.
const PATH_PREFIX: &str = "/p/";

/// How the ingress is called from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Public {
    /// Whether callers use https.
    pub https: bool,
    /// The domain below which each preview has a name, lower case, without a final dot.
    pub domain: String,
    /// The port callers use.
    pub port: u16,
    /// Whether a proxy of ours stands in front, whose word on where a request came from is believed.
    pub behind_proxy: bool,
}

/// Which of the two forms a request has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Host,
    Path,
}

/// What a request means.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) token: Token,
    pub(crate) form: Form,
    /// `host[:port]` the application is told it has.
    pub(crate) host: String,
    /// What the application is asked for.
    pub(crate) path: PathAndQuery,
}

/// Why a request means nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nowhere {
    /// It has no host, or more than one.
    Malformed,
    /// It carries no token.
    NoToken,
}

impl Public {
    /// `http` or `https`.
    #[must_use]
    pub fn scheme(&self) -> &'static str {
        if self.https { "https" } else { "http" }
    }

    fn authority(&self, host: &str) -> String {
        let default = if self.https { 443 } else { 80 };
        if self.port == default { host.to_owned() } else { format!("{host}:{}", self.port) }
    }

    /// The host name of a preview, with the port where it is not the scheme's own.
    fn host_of(&self, token: &Token) -> String {
        self.authority(&format!("{}.{}", token.expose(), self.domain))
    }

    /// The URL of a preview. A secret.
    #[must_use]
    pub fn url(&self, token: &Token) -> String {
        format!("{}://{}/", self.scheme(), self.host_of(token))
    }

    /// The same for clients that cannot resolve host names below the domain. A secret.
    #[must_use]
    pub fn path_url(&self, token: &Token) -> String {
        format!("{}://{}{PATH_PREFIX}{}/", self.scheme(), self.authority(&self.domain), token.expose())
    }

    /// Which preview a request means.
    pub(crate) fn locate(&self, uri: &Uri, headers: &HeaderMap) -> Result<Target, Nowhere> {
        let authority = authority_of(uri, headers)?;
        let path = uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        if let Some(token) = self.token_of(authority.host()) {
            let host = self.host_of(&token);
            return Ok(Target { token, form: Form::Host, host, path });
        }
        let rest = path.as_str().strip_prefix(PATH_PREFIX).ok_or(Nowhere::NoToken)?;
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (token, rest) = rest.split_at(end);
        let token = Token::parse(token).ok_or(Nowhere::NoToken)?;
        let rest = if rest.starts_with('/') { rest.to_owned() } else { format!("/{rest}") };
        let path = PathAndQuery::try_from(rest).map_err(|_| Nowhere::Malformed)?;
        Ok(Target { token, form: Form::Path, host: authority.as_str().to_owned(), path })
    }

    fn token_of(&self, host: &str) -> Option<Token> {
        let host = host.strip_suffix('.').unwrap_or(host);
        let (label, domain) = host.split_once('.')?;
        if domain.eq_ignore_ascii_case(&self.domain) { Token::parse(label) } else { None }
    }
}

/// What a path of the path form begins with.
pub(crate) fn prefix(token: &Token) -> String {
    format!("{PATH_PREFIX}{}", token.expose())
}

/// The one host a request names. User names in it are an attempt at something.
fn authority_of(uri: &Uri, headers: &HeaderMap) -> Result<Authority, Nowhere> {
    let authority = match uri.authority() {
        Some(authority) => authority.clone(),
        None => {
            let mut hosts = headers.get_all(header::HOST).iter();
            let (Some(host), None) = (hosts.next(), hosts.next()) else { return Err(Nowhere::Malformed) };
            Authority::try_from(host.as_bytes()).map_err(|_| Nowhere::Malformed)?
        }
    };
    if authority.as_str().contains('@') || authority.host().is_empty() {
        Err(Nowhere::Malformed)
    } else {
        Ok(authority)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn public() -> Public {
        Public { https: false, domain: "localhost".into(), port: 8788, behind_proxy: false }
    }

    fn token() -> Token {
        Token::of(&[7; 20])
    }

    fn ask(host: &str, uri: &str) -> Result<Target, Nowhere> {
        let mut headers = HeaderMap::new();
        if !host.is_empty() {
            headers.insert(header::HOST, HeaderValue::from_str(host).expect("a value"));
        }
        public().locate(&uri.parse().expect("a uri"), &headers)
    }

    #[test]
    fn both_forms_are_understood_in_any_spelling() {
        let t = token().expose().to_owned();
        for host in
            [format!("{t}.localhost:8788"), format!("{}.LOCALHOST", t.to_uppercase()), format!("{t}.localhost.:1")]
        {
            let target = ask(&host, "/a/b?c=/p/x").expect("found");
            assert_eq!((target.token, target.form), (token(), Form::Host));
            assert_eq!(target.host, format!("{t}.localhost:8788"), "the canonical one, not what was sent");
            assert_eq!(target.path.as_str(), "/a/b?c=/p/x");
        }
        for (path, wanted) in
            [("", "/"), ("/", "/"), ("/a?b", "/a?b"), ("?q=1", "/?q=1"), ("//x", "//x"), ("/p/y", "/p/y")]
        {
            let target = ask("127.0.0.1:8788", &format!("/p/{t}{path}")).expect("found");
            assert_eq!((target.form, target.path.as_str()), (Form::Path, wanted));
            assert_eq!(target.host, "127.0.0.1:8788");
        }
        let target = public().locate(&format!("http://{t}.localhost/x").parse().expect("a uri"), &HeaderMap::new());
        assert_eq!(target.expect("found").path.as_str(), "/x");
    }

    #[test]
    fn whatever_else_is_sent_leads_nowhere() {
        let t = token().expose().to_owned();
        for host in
            ["localhost", "x.localhost", "127.0.0.1:8787", &format!("{t}.localhost.evil"), &format!("a.{t}.localhost")]
        {
            assert_eq!(ask(host, "/").expect_err("nowhere"), Nowhere::NoToken, "{host}");
        }
        for host in ["", "a b", "u@localhost", &format!("x@{t}.localhost")] {
            assert_eq!(ask(host, "/").expect_err("nowhere"), Nowhere::Malformed, "{host}");
        }
        assert_eq!(ask("localhost", &format!("/q/{t}/")).expect_err("nowhere"), Nowhere::NoToken);
        assert_eq!(ask("localhost", &format!("/p/{t}x/")).expect_err("nowhere"), Nowhere::NoToken);
        let mut two = HeaderMap::new();
        two.append(header::HOST, HeaderValue::from_static("a"));
        two.append(header::HOST, HeaderValue::from_static("b"));
        assert_eq!(public().locate(&Uri::from_static("/"), &two).expect_err("nowhere"), Nowhere::Malformed);
    }

    #[test]
    fn urls_name_a_port_only_where_it_is_needed() {
        let t = token().expose().to_owned();
        assert_eq!(public().url(&token()), format!("http://{t}.localhost:8788/"));
        assert_eq!(public().path_url(&token()), format!("http://localhost:8788/p/{t}/"));
        let https = Public { https: true, domain: "pre.example".into(), port: 443, behind_proxy: true };
        assert_eq!(https.url(&token()), format!("https://{t}.pre.example/"));
        assert_eq!(https.path_url(&token()), format!("https://pre.example/p/{t}/"));
    }
}
