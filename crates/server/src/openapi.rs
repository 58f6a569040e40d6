//! The description of the API. Paths and bodies come from the verbs; what holds for all of them is added here.

use std::sync::OnceLock;

use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use http::header;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Content, InfoBuilder, OpenApi, OpenApiBuilder, Ref, RefOr, ResponseBuilder, ServerBuilder};
use utoipa::{PartialSchema as _, ToSchema as _};

use crate::verbs;

const SCHEME: &str = "apiKey";

/// What every description starts from.
pub(crate) fn skeleton() -> OpenApi {
    OpenApiBuilder::new()
        .info(
            InfoBuilder::new()
                .title("Mainbrella")
                .version(env!("CARGO_PKG_VERSION"))
                .description(Some(
                    "One virtual machine per session. A machine is named by `(id, createdAt)`: a slot and one generation of it; \
                     calls act on exactly the generation they name. Every error has the body `ErrorBody`.",
                ))
                .license(Some(utoipa::openapi::LicenseBuilder::new().name("Apache-2.0").identifier(Some("Apache-2.0")).build()))
                .build(),
        )
        .servers(Some([ServerBuilder::new().url("http://127.0.0.1:8787").description(Some("A service on this machine.")).build()]))
        .build()
}

/// The whole description.
#[must_use]
pub fn document() -> OpenApi {
    let mut document = verbs::described().into_openapi();
    let components = document.components.get_or_insert_default();
    components.schemas.insert(mainbrella_api::ErrorBody::name().into_owned(), mainbrella_api::ErrorBody::schema());
    components.security_schemes.insert(
        SCHEME.to_owned(),
        RefOr::T(SecurityScheme::Http(
            HttpBuilder::new()
                .scheme(HttpAuthScheme::Bearer)
                .bearer_format("mb_<id>_<secret>")
                .description(Some("An API key."))
                .build(),
        )),
    );
    let failure = ResponseBuilder::new()
        .description("It failed; the body says how, and what to do next.")
        .content("application/json", Content::new(Some(Ref::from_schema_name(mainbrella_api::ErrorBody::name()))))
        .build();
    for item in document.paths.paths.values_mut() {
        let verbs = [
            &mut item.get,
            &mut item.put,
            &mut item.post,
            &mut item.delete,
            &mut item.patch,
            &mut item.head,
            &mut item.options,
        ];
        for operation in verbs.into_iter().flatten() {
            operation.responses.responses.insert("default".to_owned(), RefOr::T(failure.clone()));
            // `security(())` on a verb says that it needs no key; everything else does.
            operation.security = match operation.security.take() {
                Some(open) => Some(open),
                None => Some(vec![SecurityRequirement::new(SCHEME, Vec::<String>::new())]),
            };
        }
    }
    document
}

/// The description as it is committed: JSON with a final newline.
#[must_use]
pub fn text() -> String {
    // Through a map, so that the order of keys does not hang on the library.
    let value = serde_json::to_value(document()).unwrap_or_default();
    let mut text = serde_json::to_string_pretty(&value).unwrap_or_default();
    text.push('\n');
    text
}

/// Serves the description; needs no key.
pub(crate) async fn serve() -> Response {
    static TEXT: OnceLock<Bytes> = OnceLock::new();
    let bytes = TEXT.get_or_init(|| text().into()).clone();
    ([(header::CONTENT_TYPE, "application/json"), (header::CACHE_CONTROL, "max-age=60")], bytes).into_response()
}
