//! What of a request and of a reply passes, and what is put right on the way.

use std::net::IpAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_SECURITY_POLICY, EXPECT, FORWARDED, HOST, LOCATION, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, REFERRER_POLICY, SET_COOKIE, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::origin::{Form, Public, Target, prefix};

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const FORWARDED_PORT: HeaderName = HeaderName::from_static("x-forwarded-port");
const FORWARDED_PREFIX: HeaderName = HeaderName::from_static("x-forwarded-prefix");
const REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const ALT_SVC: HeaderName = HeaderName::from_static("alt-svc");

/// Headers that belong to one connection, beside those `Connection` names.
const OF_A_CONNECTION: [HeaderName; 8] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];
/// Longest list of addresses of proxies that is passed on, bytes.
const FORWARDED_FOR_MAX: usize = 1024;
/// Documents under the path form share one origin with all others: each is shut into an origin of its own.
const PATH_FORM_SANDBOX: HeaderValue =
    HeaderValue::from_static("sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts");

/// The protocol a message asks to change to, if it does.
pub(crate) fn upgrade_of(headers: &HeaderMap) -> Option<HeaderValue> {
    let asks = headers.get_all(CONNECTION).iter().filter_map(|v| v.to_str().ok());
    let asks = asks.flat_map(|v| v.split(',')).any(|word| word.trim().eq_ignore_ascii_case("upgrade"));
    if asks { headers.get(UPGRADE).cloned() } else { None }
}

/// Removes what belongs to a connection.
fn strip_connection(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = (headers.get_all(CONNECTION).iter().filter_map(|v| v.to_str().ok()))
        .flat_map(|v| v.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named.iter().chain(&OF_A_CONNECTION) {
        headers.remove(name);
    }
}

/// Keeps the request to change protocols, and nothing else of the connection.
pub(crate) fn keep_upgrade(headers: &mut HeaderMap, protocol: HeaderValue) {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, protocol);
}

/// Makes a request's headers those the application is to see.
pub(crate) fn of_request(headers: &mut HeaderMap, target: &Target, public: &Public, peer: IpAddr) {
    let trailers = headers.get_all(TE).iter().any(|v| v.as_bytes().eq_ignore_ascii_case(b"trailers"));
    strip_connection(headers);
    headers.remove(TE);
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    // Answered here, when the body is read.
    headers.remove(EXPECT);
    for name in [AUTHORIZATION, API_KEY] {
        if headers.get_all(&name).iter().any(is_platform_key) {
            headers.remove(name);
        }
    }
    let came_through = headers.remove(FORWARDED_FOR).filter(|_| public.behind_proxy);
    for name in [FORWARDED, FORWARDED_PREFIX, FORWARDED_PORT, REAL_IP] {
        headers.remove(name);
    }
    let peer = peer.to_canonical().to_string();
    let came_from = match came_through.as_ref().and_then(|v| v.to_str().ok()) {
        Some(before) if before.len() <= FORWARDED_FOR_MAX => format!("{before}, {peer}"),
        _ => peer,
    };
    let mut set = |name: HeaderName, value: &str| {
        if let Ok(value) = HeaderValue::from_str(value) {
            headers.insert(name, value);
        }
    };
    set(HOST, &target.host);
    set(FORWARDED_HOST, &target.host);
    set(FORWARDED_FOR, &came_from);
    set(FORWARDED_PROTO, public.scheme());
    if target.form == Form::Path {
        set(FORWARDED_PREFIX, &prefix(&target.token));
    }
}

/// Makes a reply's headers those the caller is to see.
pub(crate) fn of_reply(headers: &mut HeaderMap, target: &Target) {
    strip_connection(headers);
    // It would send callers to another port than ours.
    headers.remove(ALT_SVC);
    if headers.contains_key(SET_COOKIE) {
        let own = host_without_port(&target.host);
        let cookies: Vec<HeaderValue> = headers.get_all(SET_COOKIE).iter().map(|c| of_this_host(c, own)).collect();
        headers.remove(SET_COOKIE);
        for cookie in cookies {
            headers.append(SET_COOKIE, cookie);
        }
    }
    // The address is a secret: other sites are not told where a visitor came from.
    let mut policies = headers.get_all(REFERRER_POLICY).iter();
    let strict = [&b"no-referrer"[..], b"same-origin"];
    let is_strict = |v: &HeaderValue| strict.iter().any(|s| v.as_bytes().eq_ignore_ascii_case(s));
    if policies.next().is_none_or(|first| !is_strict(first)) || policies.next().is_some() {
        headers.insert(REFERRER_POLICY, HeaderValue::from_static("same-origin"));
    }
    if target.form == Form::Path {
        headers.append(CONTENT_SECURITY_POLICY, PATH_FORM_SANDBOX);
        let within = headers.get(LOCATION).and_then(|v| v.to_str().ok());
        if let Some(path) = within.filter(|path| path.starts_with('/') && !path.starts_with("//"))
            && let Ok(location) = HeaderValue::from_str(&format!("{}{path}", prefix(&target.token)))
        {
            headers.insert(LOCATION, location);
        }
    }
}

fn host_without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    }
}

/// A cookie that goes to `own` and what is below it, whatever its application asked for.
fn of_this_host(cookie: &HeaderValue, own: &str) -> HeaderValue {
    let is_foreign = |attribute: &[u8]| {
        let mut halves = attribute.splitn(2, |b| *b == b'=');
        let (name, value) = (halves.next().unwrap_or_default(), halves.next().unwrap_or_default());
        let value = value.trim_ascii();
        let value = value.strip_prefix(b".").unwrap_or(value);
        name.trim_ascii().eq_ignore_ascii_case(b"domain") && !value.eq_ignore_ascii_case(own.as_bytes())
    };
    // The first part is the cookie itself, whatever it is called.
    let parts: Vec<&[u8]> = cookie.as_bytes().split(|b| *b == b';').collect();
    if !parts.iter().skip(1).any(|part| is_foreign(part)) {
        return cookie.clone();
    }
    let kept = parts.iter().enumerate().filter(|(at, part)| *at == 0 || !is_foreign(part)).map(|(_, part)| *part);
    let kept = kept.collect::<Vec<_>>().join(&b';');
    HeaderValue::from_bytes(&kept).unwrap_or_else(|_| cookie.clone())
}

/// Whether a value carries a key of this platform: it belongs to the API and to nobody behind here.
fn is_platform_key(value: &HeaderValue) -> bool {
    let text = value.as_bytes().trim_ascii();
    let (scheme, rest) = match text.iter().position(|b| *b == b' ') {
        Some(at) => (&text[..at], text[at..].trim_ascii()),
        None => (&b""[..], text),
    };
    if scheme.eq_ignore_ascii_case(b"basic") {
        let Ok(pair) = STANDARD.decode(rest) else { return false };
        return pair.split(|b| *b == b':').any(looks_like_a_key);
    }
    rest.split(|b| matches!(b, b' ' | b',' | b'=' | b'"')).any(looks_like_a_key)
}

/// `mb_ID_SECRET`.
fn looks_like_a_key(text: &[u8]) -> bool {
    text.strip_prefix(b"mb_").is_some_and(|rest| rest.contains(&b'_'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::token::Token;
    use http::uri::PathAndQuery;

    fn target(form: Form) -> Target {
        let token = Token::of(&[1; 20]);
        let host = format!("{}.localhost:8788", token.expose());
        Target { token, form, host, path: PathAndQuery::from_static("/") }
    }

    fn map(pairs: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            let name: HeaderName = name.parse().expect("a name");
            headers.append(name, HeaderValue::from_str(value).expect("a value"));
        }
        headers
    }

    fn asked(pairs: &[(&str, &str)], behind_proxy: bool) -> HeaderMap {
        let public = Public { https: false, domain: "localhost".into(), port: 8788, behind_proxy };
        let mut headers = map(pairs);
        of_request(&mut headers, &target(Form::Host), &public, "::ffff:10.1.2.3".parse().expect("an address"));
        headers
    }

    fn replied(pairs: &[(&str, &str)], form: Form) -> HeaderMap {
        let mut headers = map(pairs);
        of_reply(&mut headers, &target(form));
        headers
    }

    #[test]
    fn keys_of_the_platform_go_no_further_and_others_do() {
        let key = "mb_0123_secret";
        let basic = |text: &str| format!("Basic {}", STANDARD.encode(text));
        for stripped in
            [format!("Bearer {key}"), format!("bearer  {key}"), key.to_owned(), basic(&format!("x:{key}")), basic(key)]
        {
            assert!(!asked(&[("authorization", &stripped)], false).contains_key(AUTHORIZATION), "{stripped}");
            assert!(!asked(&[("x-api-key", &stripped)], false).contains_key("x-api-key"), "{stripped}");
        }
        for kept in ["Bearer abc", "Basic dXNlcjpwYXNz", "Digest username=\"mb_x\"", "Basic %%%"] {
            assert_eq!(asked(&[("authorization", kept)], false)[AUTHORIZATION], kept);
        }
        assert!(!asked(&[("proxy-authorization", "Basic eA==")], false).contains_key("proxy-authorization"));
    }

    #[test]
    fn where_a_request_came_from_is_what_we_saw_unless_a_proxy_of_ours_says_more() {
        let sent = [
            ("x-forwarded-for", "6.6.6.6"),
            ("x-forwarded-host", "evil"),
            ("forwarded", "for=6.6.6.6"),
            ("x-real-ip", "6.6.6.6"),
            ("x-forwarded-proto", "https"),
            ("host", "spoofed"),
        ];
        let headers = asked(&sent, false);
        assert_eq!(headers[FORWARDED_FOR], "10.1.2.3");
        assert_eq!(headers[FORWARDED_HOST], headers[HOST]);
        assert_eq!(headers[HOST], target(Form::Host).host.as_str());
        assert_eq!(headers[FORWARDED_PROTO], "http");
        assert!(!headers.contains_key("forwarded") && !headers.contains_key("x-real-ip"));
        assert_eq!(asked(&sent, true)[FORWARDED_FOR], "6.6.6.6, 10.1.2.3");
        let long = "1.1.1.1, ".repeat(200);
        assert_eq!(asked(&[("x-forwarded-for", long.trim_end_matches(", "))], true)[FORWARDED_FOR], "10.1.2.3");
    }

    #[test]
    fn what_belongs_to_a_connection_stays_there() {
        let headers = asked(
            &[
                ("connection", "keep-alive, X-Secret"),
                ("x-secret", "1"),
                ("keep-alive", "5"),
                ("te", "trailers"),
                ("transfer-encoding", "chunked"),
                ("upgrade", "h2c"),
                ("expect", "100-continue"),
                ("origin", "http://a"),
                ("cookie", "a=b"),
            ],
            false,
        );
        for gone in ["connection", "x-secret", "keep-alive", "transfer-encoding", "upgrade", "expect"] {
            assert!(!headers.contains_key(gone), "{gone}");
        }
        assert_eq!(
            (&headers["te"], &headers["origin"], &headers["cookie"]),
            (
                &HeaderValue::from_static("trailers"),
                &HeaderValue::from_static("http://a"),
                &HeaderValue::from_static("a=b")
            )
        );
        assert_eq!(
            upgrade_of(&map(&[("connection", "Keep-Alive, Upgrade"), ("upgrade", "websocket")])).expect("asked"),
            "websocket"
        );
        assert!(upgrade_of(&map(&[("connection", "close"), ("upgrade", "websocket")])).is_none());
    }

    #[test]
    fn a_cookie_belongs_to_its_preview() {
        let own = target(Form::Host).host.replace(":8788", "");
        let cookies = [
            ("a=1; Path=/; HttpOnly", "a=1; Path=/; HttpOnly".to_owned()),
            ("a=1; Domain=localhost; Path=/", "a=1; Path=/".to_owned()),
            ("domain=1; DOMAIN = .localhost", "domain=1".to_owned()),
            ("a=1;domain=127.0.0.1;Secure", "a=1;Secure".to_owned()),
            (&format!("a=1; Domain={own}"), format!("a=1; Domain={own}")),
            (&format!("a=1; domain=.{}", own.to_uppercase()), format!("a=1; domain=.{}", own.to_uppercase())),
        ];
        for (sent, wanted) in cookies {
            let headers = replied(&[("set-cookie", sent), ("set-cookie", "b=2")], Form::Host);
            let got: Vec<_> = headers.get_all(SET_COOKIE).iter().collect();
            assert_eq!(got, [wanted.as_str(), "b=2"]);
        }
    }

    #[test]
    fn other_sites_are_not_told_the_address() {
        for (sent, wanted) in [
            ("", "same-origin"),
            ("no-referrer", "no-referrer"),
            ("Same-Origin", "Same-Origin"),
            ("unsafe-url", "same-origin"),
        ] {
            let pairs = [("referrer-policy", sent)];
            let headers = replied(if sent.is_empty() { &[] } else { &pairs }, Form::Host);
            assert_eq!(headers[REFERRER_POLICY], wanted);
        }
        let two = replied(
            &[("referrer-policy", "no-referrer"), ("referrer-policy", "unsafe-url"), ("alt-svc", "h3=\":1\"")],
            Form::Host,
        );
        assert_eq!(two.get_all(REFERRER_POLICY).iter().collect::<Vec<_>>(), ["same-origin"]);
        assert!(!two.contains_key("alt-svc"));
    }

    #[test]
    fn under_the_path_form_redirects_stay_below_it_and_documents_are_apart() {
        let prefix = prefix(&target(Form::Path).token);
        for (sent, wanted) in [
            ("/login?x", format!("{prefix}/login?x")),
            ("login", "login".into()),
            ("//other/x", "//other/x".into()),
            ("http://other/", "http://other/".into()),
        ] {
            let headers = replied(&[("location", sent)], Form::Path);
            assert_eq!(headers[LOCATION], wanted.as_str());
            assert!(headers[CONTENT_SECURITY_POLICY].to_str().expect("text").starts_with("sandbox "));
        }
        let headers = replied(&[("location", "/login")], Form::Host);
        assert!(headers[LOCATION] == "/login" && !headers.contains_key(CONTENT_SECURITY_POLICY));
    }
}
