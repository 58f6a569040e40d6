use std::net::IpAddr;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::{
    EgressEvent, EgressExplanation, EgressLog, EgressOutcome, EgressPolicy, Machine, ResolvedAddress,
};
use mainbrella_engine::{Outcome, Verdict};
use mainbrella_types::egress::unmapped;
use mainbrella_types::{HostName, Target, limits};

use crate::auth::Permit;
use crate::error::{ApiError, ApiResult, sentence};
use crate::extract::{JsonBody, Query, SlotPath, json};
use crate::state::AppState;
use crate::{convert, fence};

/// Change what a machine may reach
///
/// Takes effect at once; connections made under the former policy end. `off` is for the rest of the generation: a machine that has it
/// answers `egress_locked`. A policy that cannot be put in force lets nothing through until one is set.
#[utoipa::path(put, path = "/v1/machines/{id}/egress", tag = "network", operation_id = "setEgress",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    request_body = EgressPolicy,
    responses((status = 200, description = "The machine under its new policy.", body = Machine)))]
pub(crate) async fn set(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
    JsonBody(body): JsonBody<EgressPolicy>,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let policy = body.checked().map_err(|e| ApiError::invalid(sentence(e)))?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let record = handle.set_egress(policy).await?;
    json(StatusCode::OK, &convert::machine(&record, &state.traits()))
}

/// What would become of a connection
///
/// Says whether a connection from inside to `host` and `port` would be made under the policy in force, and why. Nothing is connected; a
/// name that the policy allows is resolved by the host.
#[utoipa::path(get, path = "/v1/machines/{id}/egress/explain", tag = "network", operation_id = "explainEgress",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant."),
           ("host" = String, Query, description = "A host name or an address."),
           ("port" = Option<u16>, Query, description = "The port. Default 443.", minimum = 1, maximum = 65535)),
    responses((status = 200, description = "What would become of it.", body = EgressExplanation)))]
pub(crate) async fn explain(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    let host = query.take("host").ok_or_else(|| ApiError::invalid("host must be given."))?;
    let port = query.parsed::<u16>("port", "1 to 65535")?.unwrap_or(443);
    query.finish()?;
    if port == 0 {
        return Err(ApiError::invalid("port must be 1 to 65535."));
    }
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().ok().map(unmapped);
    let name = match address {
        Some(_) => None,
        None => Some(host.parse::<HostName>().map_err(|e| ApiError::invalid(sentence(format!("host: {e}"))))?),
    };
    let target = match (&name, address) {
        (Some(name), _) => Target::Name(name),
        (None, Some(address)) => Target::Address(address),
        (None, None) => return Err(ApiError::invalid("host must be a host name or an address.")),
    };
    let shown = name.as_ref().map_or_else(|| address.map(|a| a.to_string()).unwrap_or_default(), ToString::to_string);
    let handle = fence::generation(&state, &permit, &id, created_at).await?.living()?;
    let said = handle.explain_egress(&target, port).await?;
    let explanation = EgressExplanation {
        host: shown,
        port,
        outcome: match said.outcome {
            Outcome::Allowed => EgressOutcome::Allowed,
            Outcome::WouldDeny => EgressOutcome::WouldDeny,
            Outcome::Denied => EgressOutcome::Denied,
        },
        allowed_by: said.allowed_by,
        denied_by: said.denied_by.map(|rule| rule.as_str().to_owned()),
        reason: sentence(said.reason),
        addresses: (said.addresses.into_iter())
            .map(|(address, reserved)| ResolvedAddress {
                address: address.to_string(),
                reserved: reserved.map(str::to_owned),
            })
            .collect(),
    };
    json(StatusCode::OK, &explanation)
}

/// What a machine was not let through to
///
/// Denied connections and lookups, oldest first; also of a machine that has ended. The latest 512 are kept, at most 50 a second; the
/// counters count all.
#[utoipa::path(get, path = "/v1/machines/{id}/egress/log", tag = "network", operation_id = "egressLog",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant."),
           ("cursor" = Option<u64>, Query, description = "`nextCursor` of the page before. Default: from the beginning."),
           ("limit" = Option<u32>, Query, description = "Most events of the page. Default 100.", minimum = 1, maximum = 1000)),
    responses((status = 200, description = "One page.", body = EgressLog)))]
pub(crate) async fn log(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    let cursor = query.parsed::<u64>("cursor", "a whole number")?.unwrap_or(0);
    let limit = query.parsed::<u32>("limit", "1 to 1000")?.unwrap_or(limits::LIST_LIMIT_DEFAULT);
    query.finish()?;
    if !(1..=limits::EVENTS_LIMIT_MAX).contains(&limit) {
        return Err(ApiError::invalid("limit must be 1 to 1000."));
    }
    let record = fence::generation(&state, &permit, &id, created_at).await?.with(Clone::clone);
    let page = state.engine.egress_log_of(&record).await?.after(cursor, limit as usize);
    let events: Vec<EgressEvent> = page.events.into_iter().map(event).collect();
    let log = EgressLog {
        id: record.generation.id.as_str().to_owned(),
        created_at: record.generation.created_at.to_string(),
        next_cursor: events.last().map_or(cursor, |e| e.sequence),
        events,
        has_more: page.more,
        denied: page.denied,
        would_deny: page.would_deny,
    };
    json(StatusCode::OK, &log)
}

fn event(e: mainbrella_engine::EgressEvent) -> EgressEvent {
    EgressEvent {
        sequence: e.sequence,
        time_ms: e.time_ms,
        outcome: match e.verdict {
            Verdict::Denied => EgressOutcome::Denied,
            Verdict::WouldDeny => EgressOutcome::WouldDeny,
        },
        name: e.name,
        address: e.address.map(|a| a.to_string()),
        port: e.port,
        rule: e.rule.as_str().to_owned(),
        reason: sentence(e.reason),
    }
}
