//! From the vocabulary to the wire.

use mainbrella_api::capabilities::Jail;
use mainbrella_api::{EgressPolicy, Machine, MachineCapabilities, MachineLimits, Reason, ReseedHook, Reseeded};
use mainbrella_types::{DriverReport, JailReport, MachineRecord, MachineState};

use crate::error::sentence;

/// What the driver gives every machine, worked out once.
#[derive(Clone, Copy, Debug)]
pub struct Traits {
    isolation: &'static str,
    memory_snapshot: bool,
    pause_resume: bool,
    fork: bool,
    previews: bool,
}

impl Traits {
    /// From a driver's report, and whether previews are issued.
    #[must_use]
    pub fn of(report: &DriverReport, previews: bool) -> Self {
        Self {
            isolation: report.isolation.as_str(),
            memory_snapshot: report.memory_snapshot && verbs::SNAPSHOTS,
            pause_resume: report.memory_snapshot && verbs::PAUSE_RESUME,
            fork: report.fork && verbs::FORK,
            previews,
        }
    }
}

/// Which powers this version of the API has verbs for. A driver's power without a verb is not offered.
pub(crate) mod verbs {
    pub(crate) const SNAPSHOTS: bool = true;
    pub(crate) const PAUSE_RESUME: bool = true;
    pub(crate) const FORK: bool = true;
}

/// A machine as callers see it.
pub(crate) fn machine(record: &MachineRecord, traits: &Traits) -> Machine {
    let size = record.spec.size.spec();
    Machine {
        id: record.generation.id.as_str().to_owned(),
        created_at: record.generation.created_at.to_string(),
        state: record.state.into(),
        forked_from: record.forked_from.as_ref().map(ToString::to_string),
        restored_from: record.restored_from.as_ref().map(ToString::to_string),
        catalog_id: record.spec.template.as_str().to_owned(),
        size: record.spec.size.as_str().to_owned(),
        internet: record.spec.egress.leads_out(),
        egress: EgressPolicy::from(&record.spec.egress),
        metadata: record.spec.metadata.clone(),
        isolation: traits.isolation.to_owned(),
        limits: MachineLimits { memory_mib: size.memory_mib, vcpus: size.vcpus, disk_mib: size.disk_mib },
        hard_deadline_ms: record.lease.hard_deadline.0,
        idle_timeout_seconds: record.lease.idle_timeout_ms.map(|ms| ms / 1000),
        idle_deadline_ms: record.lease.idle_deadline().filter(|_| record.state != MachineState::Paused).map(|m| m.0),
        on_idle: record.spec.on_idle.into(),
        auto_resume: record.spec.auto_resume,
        started_at_ms: record.running_at.map(|m| m.0),
        ended_at_ms: record.ended_at.map(|m| m.0),
        reason: record
            .ending
            .as_ref()
            .map(|e| Reason { code: e.kind.as_str().to_owned(), message: sentence(e.message.clone()) }),
        capabilities: MachineCapabilities {
            commands: true,
            files: true,
            internet: record.spec.egress.leads_out(),
            previews: traits.previews,
            memory_snapshot: traits.memory_snapshot,
            pause_resume: traits.pause_resume,
            fork: traits.fork,
        },
    }
}

/// What was done for random numbers, as callers see it.
pub(crate) fn reseeded(done: &mainbrella_engine::Reseeded) -> Reseeded {
    let hook = |run: &mainbrella_engine::HookRun| ReseedHook {
        name: run.name.clone(),
        exit_code: run.exit_code,
        timed_out: run.timed_out,
    };
    Reseeded {
        kernel: done.kernel,
        hooks: done.hooks.iter().map(hook).collect(),
        registered: done.registered,
        acknowledged: done.acknowledged,
    }
}

/// The walls of the jail.
pub(crate) fn jail(report: &JailReport) -> Jail {
    Jail {
        own_uid: report.own_uid,
        no_new_privs: report.no_new_privs,
        seccomp: report.seccomp,
        mount_namespace: report.mount_namespace,
        pid_namespace: report.pid_namespace,
        network_namespace: report.network_namespace,
        landlock: report.landlock,
        memory_limit: report.memory_limit,
        cpu_limit: report.cpu_limit,
        pids_limit: report.pids_limit,
    }
}
