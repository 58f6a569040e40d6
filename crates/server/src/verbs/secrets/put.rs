use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::{Secret, SecretBody};
use mainbrella_store::{PutSecret, SecretRecord};
use mainbrella_types::{ErrorCode, HostName, Placement, SecretName, SecretSpec, SecretValue, limits};

use super::{SecretPath, put_in_force, secret};
use crate::auth::Permit;
use crate::error::{ApiError, ApiResult, sentence};
use crate::extract::{JsonBody, Query, json};
use crate::fence;
use crate::state::AppState;

/// Put a secret
///
/// From now on the gateway adds it to every request over TLS to exactly that host and port. The machine never sees the value; inside, the
/// host shows itself with a certificate of an authority that only this machine believes. An egress policy must let the host pass. One of the
/// same name is replaced. Nothing tells the value again.
#[utoipa::path(put, path = "/v1/machines/{id}/secrets/{name}", tag = "network", operation_id = "putSecret",
    params(("id" = String, Path, description = "The slot."),
           ("name" = String, Path, description = "Its name: 1 to 64 of `a-z`, `0-9`, `-` and `_`, a letter or digit first."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    request_body = SecretBody,
    responses((status = 200, description = "It is in force.", body = Secret)))]
pub(crate) async fn put(
    State(state): State<AppState>,
    permit: Permit,
    SecretPath(id, name): SecretPath,
    mut query: Query,
    JsonBody(body): JsonBody<SecretBody>,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let on_fork = body.on_fork.into();
    let (spec, value) = checked(name, body)?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let key = handle.record().key;
    let mut turn = handle.secrets_turn().await;
    turn.check().await?;
    // Two that fill one header of one host would get in each other's way without a word.
    let rival = state.store.secrets(&key).await?.into_iter().find(|other| {
        let place = (&other.spec.host, other.spec.port) == (&spec.host, spec.port);
        place && other.spec.name != spec.name && other.spec.placement.header_name() == spec.placement.header_name()
    });
    if let Some(rival) = rival {
        let (name, header) = (rival.spec.name, rival.spec.placement.header_name().to_owned());
        return Err(ApiError::invalid(format!("The secret {name} already fills the header {header} for this host.")));
    }
    let sealed = state.vault.seal_value(&key, spec.name.as_str(), &value)?;
    let record = SecretRecord { spec, sealed, created_at: state.now(), on_fork };
    // Its authority is made with its first secret; while this turn lasts nobody makes or forgets another one.
    let authority = match state.store.authority(&key).await? {
        Some(kept) => kept,
        None => state.vault.new_authority(&key)?,
    };
    match state.store.put_secret(&key, &record, &authority).await? {
        PutSecret::Kept => {}
        PutSecret::TooMany => {
            let message = format!("A machine has at most {} secrets.", limits::SECRETS_MAX);
            return Err(ApiError::new(ErrorCode::SecretLimit, message));
        }
        PutSecret::NotRunning => {
            return Err(ApiError::new(ErrorCode::MachineNotRunning, "The machine does not run any more."));
        }
    }
    put_in_force(&state, turn, &key, true).await?;
    json(StatusCode::OK, &secret(&record))
}

fn checked(name: SecretName, body: SecretBody) -> ApiResult<(SecretSpec, SecretValue)> {
    let invalid = |e: mainbrella_types::secret::SecretError| ApiError::invalid(sentence(e.to_string()));
    let host: HostName = body.host.parse().map_err(|e| ApiError::invalid(sentence(format!("host: {e}"))))?;
    let port = body.port.unwrap_or(443);
    if port == 0 {
        return Err(ApiError::invalid("port must be 1 to 65535."));
    }
    let placement = match (&body.header, &body.username) {
        (Some(header), None) => Placement::header(header),
        (None, Some(username)) => Placement::basic(username),
        _ => return Err(ApiError::invalid("Give exactly one of header and username.")),
    };
    let value = SecretValue::new(body.value).map_err(invalid)?;
    Ok((SecretSpec { name, host, port, placement: placement.map_err(invalid)? }, value))
}
