use axum::extract::{Path, State};
use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use mainbrella_api::{CreateKey, Key, KeyList, KeyRole, NewKey};
use mainbrella_store::{ApiKey, KeyRole as StoredRole, NewApiKey, StoreError};
use mainbrella_types::{ErrorCode, limits};

use crate::auth::AdminPermit;
use crate::auth::token::Token;
use crate::error::{ApiError, ApiResult};
use crate::extract::{JsonBody, Query, json};
use crate::state::AppState;

/// Tries for a public id that is not taken: 32 random bits each.
const TRIES: usize = 8;

fn wire_role(role: StoredRole) -> KeyRole {
    match role {
        StoredRole::Admin => KeyRole::Admin,
        StoredRole::User => KeyRole::User,
    }
}

fn wire(key: ApiKey) -> Key {
    Key {
        id: key.id,
        name: key.name,
        role: wire_role(key.role),
        created_at_ms: key.created_at.0,
        revoked_at_ms: key.revoked_at.map(|m| m.0),
    }
}

/// Make an API key
///
/// Needs the role admin. The secret is in this reply and nowhere else.
#[utoipa::path(post, path = "/v1/keys", tag = "keys", operation_id = "createKey", request_body = CreateKey,
    responses((status = 201, description = "The key, with its secret.", body = NewKey)))]
pub(crate) async fn create(
    State(state): State<AppState>,
    AdminPermit(permit): AdminPermit,
    query: Query,
    JsonBody(body): JsonBody<CreateKey>,
) -> ApiResult<Response> {
    query.finish()?;
    let name_ok = (1..=limits::KEY_NAME_MAX).contains(&body.name.len()) && !body.name.chars().any(char::is_control);
    if !name_ok {
        return Err(ApiError::invalid("name must be 1 to 64 bytes without control characters."));
    }
    let role = match body.role {
        KeyRole::Admin => StoredRole::Admin,
        KeyRole::User => StoredRole::User,
    };
    for _ in 0..TRIES {
        let token = Token::generate().map_err(|e| ApiError::internal(format!("no random bits: {e}")))?;
        let new = NewApiKey {
            id: token.id().to_owned(),
            project: permit.project.clone(),
            name: body.name.clone(),
            role,
            prefix: token.id().to_owned(),
            secret_hash: token.hash(),
            now: state.now(),
        };
        match state.store.insert_key(&new).await {
            Ok(()) => {
                tracing::info!(made = new.id, by = permit.key_id, role = body.role.as_str(), "an API key was made");
                let made = NewKey {
                    id: new.id,
                    name: new.name,
                    role: body.role,
                    created_at_ms: new.now.0,
                    secret: token.expose().to_owned(),
                };
                return json(StatusCode::CREATED, &made);
            }
            Err(StoreError::Duplicate) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Err(ApiError::internal("no free public id for a key was found"))
}

/// List the API keys of the project, oldest first
///
/// Needs the role admin. Revoked keys are included; secrets never are.
#[utoipa::path(get, path = "/v1/keys", tag = "keys", operation_id = "listKeys",
    responses((status = 200, description = "The keys.", body = KeyList)))]
pub(crate) async fn list(
    State(state): State<AppState>,
    AdminPermit(permit): AdminPermit,
    query: Query,
) -> ApiResult<Response> {
    query.finish()?;
    let mut keys = Vec::new();
    let mut after = None;
    loop {
        let page = state.store.list_keys(&permit.project, after, limits::LIST_LIMIT_MAX).await?;
        keys.extend(page.keys.into_iter().map(wire));
        match page.next {
            Some(next) => after = Some(next),
            None => return json(StatusCode::OK, &KeyList { keys }),
        }
    }
}

/// Revoke an API key
///
/// Needs the role admin. Takes effect at once and ends what the key has open. Idempotent.
#[utoipa::path(delete, path = "/v1/keys/{id}", tag = "keys", operation_id = "revokeKey",
    params(("id" = String, Path, description = "Public id of the key.")),
    responses((status = 204, description = "The key is not valid any more.")))]
pub(crate) async fn revoke(
    State(state): State<AppState>,
    AdminPermit(permit): AdminPermit,
    Path(id): Path<String>,
    query: Query,
) -> ApiResult<Response> {
    query.finish()?;
    let missing =
        || ApiError::new(ErrorCode::NotFound, "There is no key of this id.").hint("`GET /v1/keys` lists the keys.");
    let key = state.store.key_by_id(&id).await?.filter(|k| k.project == permit.project).ok_or_else(missing)?;
    let first = state.store.revoke_key(&key.id, state.now()).await?;
    state.auth.revoked(&key.id);
    if first {
        tracing::info!(revoked = key.id, by = permit.key_id, "an API key was revoked");
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}
