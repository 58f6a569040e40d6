//! Machines as rows.

use std::collections::BTreeMap;

use mainbrella_types::{
    AllowList, CreatedAt, EgressPolicy, Failure, Generation, GenerationKey, Lease, MachineRecord, MachineSpec, Millis,
};

use crate::backend::{Arg, Row};
use crate::error::{Result, StoreError};

/// How many columns `machine` reads; further ones may follow.
pub(crate) const MACHINE_COLUMNS: usize = 26;

pub(crate) fn parsed<T>(text: &str) -> Result<T>
where
    T: std::str::FromStr,
    T::Err: std::error::Error + Send + Sync + 'static,
{
    text.parse().map_err(|e: T::Err| StoreError::corrupt(e))
}

pub(crate) fn unsigned(value: i64) -> Result<u64> {
    u64::try_from(value).map_err(StoreError::corrupt)
}

/// A duration as the database holds it; what is beyond its range is as good as for ever.
pub(crate) fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

pub(crate) fn map(json: &str) -> Result<BTreeMap<String, String>> {
    serde_json::from_str(json).map_err(StoreError::corrupt)
}

pub(crate) fn json(map: &BTreeMap<String, String>) -> Result<String> {
    serde_json::to_string(map).map_err(|e| StoreError::Internal(e.into()))
}

/// Reads a machine from the columns named by `machine_columns!`.
pub(crate) fn machine(row: &Row) -> Result<MachineRecord> {
    let ending = match (row.maybe_text(13)?, row.maybe_text(14)?) {
        (Some(kind), Some(message)) => Some(Failure { kind: parsed(&kind)?, message }),
        (None, None) => None,
        _ => return Err(StoreError::corrupt("half an ending")),
    };
    Ok(MachineRecord {
        key: parsed(&row.text(0)?)?,
        project: parsed(&row.text(1)?)?,
        generation: Generation { id: parsed(&row.text(2)?)?, created_at: CreatedAt(Millis(row.int(3)?)) },
        host: row.text(4)?,
        spec: MachineSpec {
            template: parsed(&row.text(5)?)?,
            size: parsed(&row.text(6)?)?,
            egress: egress(row.int(7)? != 0, row.maybe_text(21)?),
            ttl_ms: unsigned(row.int(8)?)?,
            idle_timeout_ms: row.maybe_int(9)?.map(unsigned).transpose()?,
            on_idle: row.maybe_text(24)?.map(|text| parsed(&text)).transpose()?.unwrap_or_default(),
            auto_resume: row.maybe_int(25)?.is_some_and(|flag| flag != 0),
            metadata: map(&row.text(10)?)?,
            env: map(&row.text(11)?)?,
        },
        state: parsed(&row.text(12)?)?,
        ending,
        lease: Lease {
            hard_deadline: Millis(row.int(15)?),
            idle_timeout_ms: row.maybe_int(16)?.map(unsigned).transpose()?,
            last_activity: Millis(row.int(17)?),
        },
        forked_from: row.maybe_text(22)?.map(|text| parsed(&text)).transpose()?,
        restored_from: row.maybe_text(23)?.map(|text| parsed(&text)).transpose()?,
        running_at: row.maybe_int(18)?.map(Millis),
        ended_at: row.maybe_int(19)?.map(Millis),
        revision: row.int(20)?,
    })
}

/// What a machine may reach. Records from before there were policies say only whether it is anything. It fails closed: a
/// policy that this version does not understand lets nothing through until it is set again.
pub(crate) fn egress(internet: bool, text: Option<String>) -> EgressPolicy {
    match text.map(|text| text.parse()) {
        _ if !internet => EgressPolicy::Off,
        None => EgressPolicy::Open,
        Some(Ok(policy)) => policy,
        Some(Err(e)) => {
            tracing::error!(error = %e, "an egress policy on record is not understood; its machine is let through to nothing");
            EgressPolicy::AllowList(AllowList::default())
        }
    }
}

/// The values of `MACHINE_INSERT`.
pub(crate) fn insert_args(r: &MachineRecord) -> Result<Vec<Arg>> {
    Ok(vec![
        key_arg(&r.key),
        Arg::text(r.project.as_str()),
        Arg::text(r.generation.id.as_str()),
        Arg::Int(r.generation.created_at.0.0),
        Arg::text(&r.host),
        Arg::text(r.spec.template.as_str()),
        Arg::text(r.spec.size.as_str()),
        Arg::Int(i64::from(r.spec.egress.leads_out())),
        Arg::Int(signed(r.spec.ttl_ms)),
        Arg::MaybeInt(r.spec.idle_timeout_ms.map(signed)),
        Arg::Text(json(&r.spec.metadata)?),
        Arg::Text(json(&r.spec.env)?),
        Arg::text(r.state.as_str()),
        Arg::Int(r.lease.hard_deadline.0),
        Arg::MaybeInt(r.lease.idle_timeout_ms.map(signed)),
        Arg::Int(r.lease.last_activity.0),
        Arg::Text(r.spec.egress.to_string()),
        Arg::MaybeText(r.forked_from.as_ref().map(ToString::to_string)),
        Arg::MaybeText(r.restored_from.as_ref().map(ToString::to_string)),
        Arg::text(r.spec.on_idle.as_str()),
        Arg::Int(i64::from(r.spec.auto_resume)),
    ])
}

/// The values of `MACHINE_UPDATE`, which takes effect only at `revision`.
pub(crate) fn update_args(r: &MachineRecord, revision: i64) -> Vec<Arg> {
    vec![
        key_arg(&r.key),
        Arg::Int(revision),
        Arg::text(r.state.as_str()),
        Arg::MaybeText(r.ending.as_ref().map(|e| e.kind.as_str().to_owned())),
        Arg::MaybeText(r.ending.as_ref().map(|e| e.message.clone())),
        Arg::Int(r.lease.hard_deadline.0),
        Arg::MaybeInt(r.lease.idle_timeout_ms.map(signed)),
        Arg::Int(r.lease.last_activity.0),
        Arg::MaybeInt(r.running_at.map(|t| t.0)),
        Arg::MaybeInt(r.ended_at.map(|t| t.0)),
        Arg::Int(i64::from(r.spec.egress.leads_out())),
        Arg::Text(r.spec.egress.to_string()),
        Arg::text(r.spec.on_idle.as_str()),
        Arg::Int(i64::from(r.spec.auto_resume)),
    ]
}

/// A generation key as it is stored.
pub(crate) fn key_arg(key: &GenerationKey) -> Arg {
    Arg::Text(key.to_string())
}
