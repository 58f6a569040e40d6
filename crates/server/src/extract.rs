//! Bodies, queries and path names, read strictly, with our errors.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::body::HttpBody as _;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::response::Response;
use http::request::Parts;
use http::{HeaderValue, StatusCode, header};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use mainbrella_types::{CreatedAt, ErrorCode, MachineId, limits};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{ApiError, ApiResult};
use crate::state::AppState;

/// How long a caller may take to send a JSON body.
const BODY_WAIT: Duration = Duration::from_secs(30);
/// Longest part of a parser's message that is passed on, bytes.
const PARSER_MESSAGE_MAX: usize = 300;
/// Most parameters of one query.
const PARAMETERS_MAX: usize = 64;

/// A JSON body of at most [`limits::JSON_BODY_MAX`] bytes.
pub struct JsonBody<T>(pub T);

impl<T: DeserializeOwned> FromRequest<AppState> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &AppState) -> ApiResult<Self> {
        if !is_json(request.headers().get(header::CONTENT_TYPE)) {
            return Err(ApiError::invalid("The body must be JSON, sent as `Content-Type: application/json`.")
                .status(StatusCode::UNSUPPORTED_MEDIA_TYPE));
        }
        let too_large = || ApiError::new(ErrorCode::PayloadTooLarge, "The body is larger than 4 MiB.");
        if request.body().size_hint().lower() > limits::JSON_BODY_MAX as u64 {
            return Err(too_large());
        }
        let read = Limited::new(request.into_body(), limits::JSON_BODY_MAX).collect();
        let bytes = match tokio::time::timeout(BODY_WAIT, read).await {
            Ok(Ok(whole)) => whole.to_bytes(),
            Ok(Err(e)) if e.downcast_ref::<LengthLimitError>().is_some() => {
                return Err(too_large());
            }
            Ok(Err(_)) => return Err(ApiError::invalid("The body ended before it was whole.")),
            Err(_) => {
                return Err(
                    ApiError::invalid("The body did not arrive within 30 seconds.").status(StatusCode::REQUEST_TIMEOUT)
                );
            }
        };
        serde_json::from_slice(&bytes).map(Self).map_err(|e| ApiError::invalid(parser_message(&e)))
    }
}

fn is_json(content_type: Option<&HeaderValue>) -> bool {
    let text = content_type.and_then(|v| v.to_str().ok()).unwrap_or_default();
    text.split(';').next().is_some_and(|t| t.trim().eq_ignore_ascii_case("application/json"))
}

/// What the parser says, in the words of JSON instead of those of this program.
fn parser_message(e: &serde_json::Error) -> String {
    let mut text = e.to_string();
    if let Some((before, after)) = text.rsplit_once("expected ") {
        let (what, place) = after.rfind(" at line ").map_or((after, ""), |at| after.split_at(at));
        let what = match what {
            "u64" | "u32" | "u16" | "u8" | "usize" => "a whole number",
            "i64" | "i32" => "a whole number, negative or not",
            "f64" => "a number",
            "a map" => "an object",
            "a sequence" => "a list",
            "a boolean" => "true or false",
            other if other.starts_with("struct ") => "an object",
            other => other,
        };
        text = format!("{before}expected {what}{place}");
    }
    if text.len() > PARSER_MESSAGE_MAX {
        text.truncate(text.floor_char_boundary(PARSER_MESSAGE_MAX));
        text.push('…');
    }
    format!("The body is not as required: {text}.")
}

/// The parameters of a query: decoded, strict UTF-8, none twice. A verb takes what it knows and calls
/// [`Query::finish`], which refuses the rest.
#[derive(Debug)]
pub struct Query {
    pairs: BTreeMap<String, String>,
}

impl FromRequestParts<AppState> for Query {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &AppState) -> ApiResult<Self> {
        Self::parse(parts.uri.query().unwrap_or_default())
    }
}

impl Query {
    /// Reads a raw query.
    ///
    /// # Errors
    /// `invalid_request` when it is not percent-encoded UTF-8, has a name twice, or too many parameters.
    pub fn parse(raw: &str) -> ApiResult<Self> {
        let mut pairs = BTreeMap::new();
        for part in raw.split('&').filter(|p| !p.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let (name, value) = (decode(name)?, decode(value)?);
            if pairs.len() >= PARAMETERS_MAX {
                return Err(ApiError::invalid("The query has more than 64 parameters."));
            }
            if pairs.insert(name, value).is_some() {
                return Err(ApiError::invalid("The query has a parameter twice."));
            }
        }
        Ok(Self { pairs })
    }

    /// Takes a parameter.
    pub fn take(&mut self, name: &str) -> Option<String> {
        self.pairs.remove(name)
    }

    /// Takes a parameter and parses it.
    ///
    /// # Errors
    /// `invalid_request` when it does not parse; `expected` says what would.
    pub fn parsed<T: std::str::FromStr>(&mut self, name: &str, expected: &str) -> ApiResult<Option<T>> {
        let value = self.take(name);
        value.map(|v| v.parse().map_err(|_| ApiError::invalid(format!("{name} must be {expected}.")))).transpose()
    }

    /// Takes the parameters whose names begin with `prefix`, without it.
    pub fn prefixed(&mut self, prefix: &str) -> BTreeMap<String, String> {
        let names: Vec<String> = self.pairs.keys().filter(|k| k.starts_with(prefix)).cloned().collect();
        names.into_iter().filter_map(|n| Some((n.get(prefix.len()..)?.to_owned(), self.pairs.remove(&n)?))).collect()
    }

    /// Takes the creation instant that every generation-bound call carries.
    ///
    /// # Errors
    /// `invalid_request` when it is missing or no instant.
    pub fn created_at(&mut self) -> ApiResult<CreatedAt> {
        match self.take("createdAt") {
            Some(text) => Ok(text.parse::<CreatedAt>()?),
            None => Err(ApiError::invalid("createdAt must name the generation that is meant.")),
        }
    }

    /// Refuses what nobody took.
    ///
    /// # Errors
    /// `invalid_request` with the name of an unknown parameter.
    pub fn finish(self) -> ApiResult<()> {
        match self.pairs.keys().next() {
            None => Ok(()),
            Some(name) => {
                let shown: String = name.chars().filter(|c| !c.is_control()).take(64).collect();
                Err(ApiError::invalid(format!("There is no parameter `{shown}` here.")))
            }
        }
    }
}

fn decode(text: &str) -> ApiResult<String> {
    let bad = || ApiError::invalid("The query is not percent-encoded UTF-8.");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        rest = tail;
        match first {
            b'%' => {
                let digits = tail.get(..2).ok_or_else(bad)?;
                let mut byte = [0u8];
                hex::decode_to_slice(digits, &mut byte).map_err(|_| bad())?;
                bytes.push(byte[0]);
                rest = &tail[2..];
            }
            b'+' => bytes.push(b' '),
            other => bytes.push(*other),
        }
    }
    String::from_utf8(bytes).map_err(|_| bad())
}

/// The `{id}` of a path. What cannot be a slot names none.
pub struct SlotPath(pub MachineId);

impl FromRequestParts<AppState> for SlotPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> ApiResult<Self> {
        let missing = || ApiError::new(ErrorCode::NotFound, "There is no machine of this id.");
        let Path(id) = Path::<String>::from_request_parts(parts, state).await.map_err(|_| missing())?;
        id.parse().map(Self).map_err(|_| missing())
    }
}

/// The `{id}` and the second name of a path.
pub struct TwoPath(pub MachineId, pub String);

impl FromRequestParts<AppState> for TwoPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> ApiResult<Self> {
        let missing = || ApiError::new(ErrorCode::NotFound, "There is no machine of this id.");
        let Path((id, second)) =
            Path::<(String, String)>::from_request_parts(parts, state).await.map_err(|_| missing())?;
        Ok(Self(id.parse().map_err(|_| missing())?, second))
    }
}

/// A JSON reply.
///
/// # Errors
/// When the value cannot be written as JSON, which is a fault of ours.
pub fn json<T: Serialize>(status: StatusCode, value: &T) -> ApiResult<Response> {
    let bytes = serde_json::to_vec(value).map_err(|e| ApiError::internal(e.to_string()))?;
    let mut response = Response::new(bytes.into());
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_read_strictly() {
        let mut q =
            Query::parse("path=%2Fa%20b%2Bc+d%C3%A9%22&createdAt=2026-10-08T12:00:00.000Z&metadata.k=v&metadata.=x")
                .expect("valid");
        assert_eq!(q.take("path").as_deref(), Some("/a b+c d\u{e9}\""));
        assert!(q.created_at().is_ok());
        assert_eq!(q.prefixed("metadata.").len(), 2);
        assert!(q.finish().is_ok());
        for bad in ["a=%", "a=%4", "a=%zz", "a=%ff", "a=1&a=2", "a=%+1", &"a=1&".repeat(2)] {
            assert!(Query::parse(bad).is_err(), "{bad}");
        }
        assert!(Query::parse("x=1").expect("valid").finish().is_err());
        assert!(Query::parse("").expect("empty").created_at().is_err());
        let many: String = (0..65).map(|i| format!("p{i}=&")).collect();
        assert!(Query::parse(&many).is_err());
    }

    #[test]
    fn parsers_speak_of_json_and_not_of_this_program() {
        let told = |text: &str| match serde_json::from_str::<mainbrella_api::CreateMachine>(text) {
            Ok(_) => panic!("{text} is accepted"),
            Err(e) => parser_message(&e),
        };
        for (text, word) in [
            ("null", "expected an object at line 1"),
            ("[]", "expected an object at line 1"),
            (r#"{"catalogId":"a","ttlSeconds":-1}"#, "expected a whole number at line 1"),
            (r#"{"catalogId":"a","ttlSeconds":60.5}"#, "expected a whole number at line 1"),
            (r#"{"catalogId":"a","metadata":3}"#, "expected an object at line 1"),
            (r#"{"catalogId":"a","internet":3}"#, "expected true or false at line 1"),
            (r#"{"catalogId":7}"#, "expected a string at line 1"),
            (r#"{"catalogId":"a","expected struct X":1}"#, "expected one of `catalogId`"),
            ("{", "EOF while parsing"),
        ] {
            let message = told(text);
            assert!(message.contains(word), "{text}: {message}");
            assert!(!message.contains("CreateMachine") && !message.contains("u64"), "{text}: {message}");
        }
    }

    #[test]
    fn only_json_is_json() {
        let is = |s: &'static str| is_json(Some(&HeaderValue::from_static(s)));
        assert!(is("application/json") && is("Application/JSON; charset=utf-8"));
        assert!(!is("text/plain") && !is("application/jsonp") && !is_json(None));
    }
}
