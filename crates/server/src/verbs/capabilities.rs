use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::Capabilities;
use mainbrella_api::capabilities::{
    Execution, Files, IsolationReport, Limits, Networking, Observability, Persistence, Previews, Size,
};
use mainbrella_engine::Language;
use mainbrella_types::{Accelerator, SizeClass};

use crate::auth::Permit;
use crate::convert::{self, verbs};
use crate::error::ApiResult;
use crate::extract::{Query, json};
use crate::state::AppState;

/// What this service on this host can really do
///
/// Derived from the driver's probes and from the verbs of this version. What is `false` here answers `unsupported` or 404.
#[utoipa::path(get, path = "/v1/capabilities", tag = "service", operation_id = "getCapabilities",
    responses((status = 200, description = "What can be done.", body = Capabilities)))]
pub(crate) async fn capabilities(State(state): State<AppState>, _permit: Permit, query: Query) -> ApiResult<Response> {
    query.finish()?;
    let report = state.engine.report();
    let known = state.engine.templates().await?;
    let code_contexts = (Language::ALL.into_iter())
        .filter(|language| known.iter().any(|t| t.languages.contains(language)))
        .map(|language| language.as_str().to_owned())
        .collect();
    let mut templates: Vec<_> = known.into_iter().map(|t| t.name.as_str().to_owned()).collect();
    templates.sort();
    let previews = state.previews.public().is_some();
    let memory_snapshot = report.memory_snapshot && verbs::SNAPSHOTS;
    json(
        StatusCode::OK,
        &Capabilities {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            driver: report.driver.to_owned(),
            isolation: IsolationReport {
                kind: report.isolation.as_str().to_owned(),
                accelerator: report.accelerator.map(|a: Accelerator| a.as_str().to_owned()),
                reason: report.accelerator_reason.clone(),
                vmm: report.vmm.clone(),
                jail: convert::jail(&report.jail),
            },
            execution: Execution {
                blocking_run: true,
                argv: true,
                stdin: true,
                inline_stdin: true,
                managed_jobs: true,
                signals: true,
                managed_process_listing: true,
                programmatic_pty: true,
                pty_resize: true,
                code_contexts,
            },
            files: Files {
                read: true,
                write: true,
                list: true,
                stat: true,
                mkdir: true,
                r#move: true,
                chmod: true,
                remove: true,
                watch: true,
                tree: true,
                signed_urls: true,
            },
            networking: Networking {
                internet: report.internet,
                internet_control: report.internet_off,
                internet_default: report.internet,
                egress_allow_list: report.allow_list,
                egress_change: report.internet || report.allow_list,
                egress_secrets: report.internet || report.allow_list,
            },
            previews: Previews { supported: previews, idempotent: previews, renewal: previews },
            persistence: Persistence {
                snapshots: memory_snapshot,
                memory_snapshot,
                pause_resume: report.memory_snapshot && verbs::PAUSE_RESUME,
                auto_pause: report.memory_snapshot && verbs::PAUSE_RESUME,
                fork: report.fork && verbs::FORK,
                endpoint_renewal: previews,
            },
            observability: Observability::default(),
            sizes: SizeClass::ALL
                .into_iter()
                .map(|class| {
                    let s = class.spec();
                    Size {
                        name: class.as_str().to_owned(),
                        memory_mib: s.memory_mib,
                        vcpus: s.vcpus,
                        disk_mib: s.disk_mib,
                    }
                })
                .collect(),
            templates,
            limits: Limits::current(),
        },
    )
}
