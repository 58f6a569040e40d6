//! What the first bytes of a connection say about whom it is for. The bytes are a guest's: whatever they are, the answer
//! is one of these, in bounded memory.

use std::io::Cursor;

use mainbrella_types::HostName;
use rustls::server::Acceptor;

/// Most bytes looked at before a connection is given up.
pub const LOOKED_AT_MAX: usize = 32 * 1024;

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sniffed {
    /// More bytes are needed.
    More,
    /// The client's hello names this host.
    Tls(HostName),
    /// The request names this host.
    Http(HostName),
    /// It names nobody, or nobody that can be checked.
    Nameless(&'static str),
}

/// Looks at the first bytes of a connection.
#[must_use]
pub fn sniff(bytes: &[u8]) -> Sniffed {
    match bytes.first() {
        None => Sniffed::More,
        Some(0x16) => tls(bytes),
        Some(b) if b.is_ascii_uppercase() => http(bytes),
        Some(_) => Sniffed::Nameless("it is neither TLS nor HTTP"),
    }
}

fn more(bytes: &[u8]) -> Sniffed {
    if bytes.len() >= LOOKED_AT_MAX { Sniffed::Nameless("its beginning is too long") } else { Sniffed::More }
}

fn tls(bytes: &[u8]) -> Sniffed {
    let mut acceptor = Acceptor::default();
    let mut cursor = Cursor::new(bytes);
    loop {
        match acceptor.read_tls(&mut cursor) {
            Ok(0) => return more(bytes),
            Ok(_) => {}
            Err(_) => return Sniffed::Nameless("its TLS hello is damaged"),
        }
        match acceptor.accept() {
            Ok(Some(accepted)) => {
                return match accepted.client_hello().server_name().map(str::parse) {
                    Some(Ok(name)) => Sniffed::Tls(name),
                    Some(Err(_)) => Sniffed::Nameless("its TLS hello names no host that can be checked"),
                    None => Sniffed::Nameless("its TLS hello names no host"),
                };
            }
            Ok(None) => {}
            Err(_) => return Sniffed::Nameless("its TLS hello is damaged"),
        }
    }
}

fn http(bytes: &[u8]) -> Sniffed {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Err(_) => Sniffed::Nameless("its HTTP request is damaged"),
        Ok(httparse::Status::Partial) => more(bytes),
        Ok(httparse::Status::Complete(_)) => {
            let mut hosts = request.headers.iter().filter(|h| h.name.eq_ignore_ascii_case("host"));
            let (Some(host), None) = (hosts.next(), hosts.next()) else {
                return Sniffed::Nameless("its HTTP request does not name exactly one host");
            };
            let text = std::str::from_utf8(host.value).unwrap_or("").trim();
            // A target that names a host itself would win over the header.
            let path_only = request.path.is_some_and(|p| p.starts_with('/') || p == "*");
            match text.split(':').next().unwrap_or("").parse() {
                Ok(name) if path_only => Sniffed::Http(name),
                _ => Sniffed::Nameless("its HTTP request names no host that can be checked"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_request_names_its_host_once_all_of_it_is_there() {
        let text = b"GET /x HTTP/1.1\r\nHost: Example.org:80\r\nA: b\r\n\r\n";
        for cut in 0..text.len() {
            assert_eq!(sniff(&text[..cut]), Sniffed::More, "{cut}");
        }
        assert_eq!(sniff(text), Sniffed::Http("example.org".parse().expect("a name")));
    }

    #[test]
    fn a_request_that_names_none_two_or_another_is_nameless() {
        for text in [
            "GET / HTTP/1.1\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a.org\r\nHost: b.org\r\n\r\n",
            "GET http://b.org/ HTTP/1.1\r\nHost: a.org\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: 10.0.0.1\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: [::1]\r\n\r\n",
            "SSH-2.0-x\r\n",
            "\u{1}",
        ] {
            assert!(matches!(sniff(text.as_bytes()), Sniffed::Nameless(_) | Sniffed::More), "{text}");
        }
        assert!(matches!(sniff(b"GET / HTTP/1.1\r\nHost: a.org\r\nHost: b.org\r\n\r\n"), Sniffed::Nameless(_)));
    }

    #[test]
    fn an_endless_beginning_is_given_up() {
        let mut text = b"GET / HTTP/1.1\r\nX: ".to_vec();
        text.resize(LOOKED_AT_MAX, b'a');
        assert!(matches!(sniff(&text), Sniffed::Nameless(_)));
    }

    proptest! {
        #[test]
        fn any_bytes_have_an_answer(kind in prop_oneof![Just(0x16u8), Just(b'G'), any::<u8>()], rest in proptest::collection::vec(any::<u8>(), 0..600)) {
            let mut bytes = vec![kind];
            bytes.extend(rest);
            let _ = sniff(&bytes);
        }
    }
}
