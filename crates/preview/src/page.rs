//! What is said when there is nothing to pass on. No page says more of a preview than its caller knew.

use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use http_body_util::Full;

use crate::body::Reply;
use crate::route::DialFault;

/// Says to programs what a page says to people.
const REASON: HeaderName = HeaderName::from_static("x-mainbrella-preview");

/// Why nothing is passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    Malformed,
    NoToken,
    Unknown,
    Over,
    Method,
    TooMany,
    NothingListens(u16),
    Dial(DialFault),
    BrokenOff,
}

struct Text {
    status: StatusCode,
    reason: &'static str,
    title: &'static str,
    text: String,
    again: bool,
}

impl Why {
    fn text(self) -> Text {
        let (status, reason, title, text, again) = match self {
            Self::Malformed => {
                (400, "malformed", "Not a request", "The request names no host, or more than one.".into(), false)
            }
            Self::NoToken => (
                404,
                "no_preview",
                "No preview",
                "This address shows previews of machines; the link to one is needed.".into(),
                false,
            ),
            Self::Unknown => (
                404,
                "unknown",
                "No such preview",
                "There is no preview at this address. Links end after a while; ask for a new one.".into(),
                false,
            ),
            Self::Over => (
                410,
                "ended",
                "This preview has ended",
                "The link was valid until a while ago. Ask for a new one.".into(),
                false,
            ),
            Self::Method => {
                (405, "method", "Not possible here", "This method is for proxies, and this is none.".into(), false)
            }
            Self::TooMany => (
                503,
                "busy",
                "Too many at once",
                "This preview serves as many requests as it may. Try again shortly.".into(),
                true,
            ),
            Self::NothingListens(port) => (
                502,
                "nothing_listens",
                "Nothing listens yet",
                format!(
                    "The machine runs, but no program in it listens on port {port}. Start the server; this page looks again every two seconds."
                ),
                true,
            ),
            Self::Dial(DialFault::NothingListens) => {
                (502, "nothing_listens", "Nothing listens yet", "No program listens on this port.".into(), true)
            }
            Self::Dial(DialFault::MachineOver) => (
                410,
                "ended",
                "This preview has ended",
                "The link was valid until a while ago. Ask for a new one.".into(),
                false,
            ),
            Self::Dial(DialFault::MachinePaused) => (
                503,
                "paused",
                "The machine is paused",
                "This preview leads on when the machine is resumed.".into(),
                true,
            ),
            Self::Dial(DialFault::Busy) => (
                503,
                "busy",
                "Too many at once",
                "The machine has as many connections as it may. Try again shortly.".into(),
                true,
            ),
            Self::Dial(DialFault::Unreachable) => (
                504,
                "unreachable",
                "The machine does not answer",
                "It may be busy. This page tries again every two seconds.".into(),
                true,
            ),
            Self::BrokenOff => (
                502,
                "broken_off",
                "The application broke off",
                "It ended the connection without a reply.".into(),
                false,
            ),
        };
        Text { status: StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY), reason, title, text, again }
    }
}

/// Whether a request asks for HTML.
pub(crate) fn wants_html(asked: &HeaderMap) -> bool {
    asked.get_all(ACCEPT).iter().filter_map(|v| v.to_str().ok()).any(|v| v.contains("text/html"))
}

/// The page for `why`: HTML for those who ask for it, else one line.
pub(crate) fn page(why: Why, html: bool) -> Response<Reply> {
    let Text { status, reason, title, text, again } = why.text();
    let body = if html {
        let refresh = if again { "<meta http-equiv=\"refresh\" content=\"2\">" } else { "" };
        format!(
            "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">{refresh}<title>{title}</title>\
             <meta name=\"viewport\" content=\"width=device-width\"><style>body{{font:16px/1.5 system-ui,sans-serif;\
             max-width:34rem;margin:20vh auto;padding:0 1rem;color:#222;background:#fff}}\
             @media(prefers-color-scheme:dark){{body{{color:#ddd;background:#1b1b1b}}}}</style></head>\
             <body><h1>{title}</h1><p>{text}</p></body></html>\n"
        )
    } else {
        format!("{title}: {text}\n")
    };
    let mut response = Response::new(Reply::Page(Full::new(body.into())));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    let kind = if html { "text/html; charset=utf-8" } else { "text/plain; charset=utf-8" };
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(
        CONTENT_SECURITY_POLICY,
        HeaderValue::from_static("default-src 'none'; style-src 'unsafe-inline'; frame-ancestors *"),
    );
    headers.insert(http::header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REASON, HeaderValue::from_static(reason));
    if again {
        headers.insert(RETRY_AFTER, HeaderValue::from_static("2"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt as _;

    const ALL: [Why; 13] = [
        Why::Malformed,
        Why::NoToken,
        Why::Unknown,
        Why::Over,
        Why::Method,
        Why::TooMany,
        Why::NothingListens(3000),
        Why::Dial(DialFault::NothingListens),
        Why::Dial(DialFault::MachineOver),
        Why::Dial(DialFault::MachinePaused),
        Why::Dial(DialFault::Busy),
        Why::Dial(DialFault::Unreachable),
        Why::BrokenOff,
    ];

    async fn shown(why: Why, accept: &'static str) -> (Response<()>, String) {
        let mut asked = HeaderMap::new();
        asked.insert(ACCEPT, HeaderValue::from_static(accept));
        let (parts, body) = page(why, wants_html(&asked)).into_parts();
        let text = body.collect().await.expect("a page").to_bytes();
        (Response::from_parts(parts, ()), String::from_utf8(text.to_vec()).expect("text"))
    }

    #[tokio::test]
    async fn every_page_is_a_failure_that_nobody_keeps_and_says_why_to_people_and_programs() {
        for why in ALL {
            let (head, html) = shown(why, "text/html,*/*;q=0.8").await;
            assert!(head.status().as_u16() >= 400 && html.starts_with("<!doctype html>"), "{why:?}");
            assert_eq!(head.headers()[CACHE_CONTROL], "no-store");
            assert_eq!(html.contains("http-equiv=\"refresh\""), head.headers().contains_key(RETRY_AFTER), "{why:?}");
            let (head, line) = shown(why, "*/*").await;
            assert!(line.lines().count() == 1 && head.headers()[CONTENT_TYPE] == "text/plain; charset=utf-8");
            assert!(!head.headers()[REASON].is_empty());
        }
        assert!(shown(Why::NothingListens(3000), "text/html").await.1.contains("port 3000"));
    }

    #[tokio::test]
    async fn a_token_that_ended_and_a_machine_that_ended_look_the_same() {
        assert_eq!(
            shown(Why::Over, "text/html").await.1,
            shown(Why::Dial(DialFault::MachineOver), "text/html").await.1
        );
    }
}
