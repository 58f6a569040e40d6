//! One file a verb. Each takes a permit, checks what came in, and hands over to engine or store.

mod builds;
mod capabilities;
mod contexts;
pub(crate) mod create;
mod disk;
mod egress;
mod extend;
mod files;
mod fork;
mod get;
mod healthz;
mod jobs;
mod keys;
mod list;
mod pause;
mod previews;
mod processes;
mod resume;
mod run;
mod secrets;
mod snapshots;
mod stop;
mod templates;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware::from_fn_with_state;
use axum::routing::get;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::ApiError;
use crate::state::AppState;
use crate::{layers, openapi};

/// The verbs and their description.
pub(crate) fn described() -> OpenApiRouter<AppState> {
    OpenApiRouter::with_openapi(openapi::skeleton())
        .routes(routes!(healthz::healthz))
        .routes(routes!(capabilities::capabilities))
        .routes(routes!(templates::list::list, templates::create::create))
        .routes(routes!(templates::get::get, templates::tag::tag, templates::remove::remove))
        .routes(routes!(builds::create::create, builds::list::list))
        .routes(routes!(builds::get::get))
        .routes(routes!(builds::context::send))
        .routes(routes!(builds::cancel::cancel))
        .routes(routes!(builds::events::events))
        .routes(routes!(create::create, list::list))
        .routes(routes!(get::get))
        .routes(routes!(extend::extend))
        .routes(routes!(fork::fork))
        .routes(routes!(pause::pause))
        .routes(routes!(resume::resume))
        .routes(routes!(stop::stop))
        .routes(routes!(egress::set))
        .routes(routes!(egress::explain))
        .routes(routes!(egress::log))
        .routes(routes!(secrets::put::put, secrets::remove::remove))
        .routes(routes!(secrets::list::list))
        .routes(routes!(run::run))
        .routes(routes!(files::read::read_file, files::write::write_file))
        .routes(routes!(files::list::list))
        .routes(routes!(files::stat::stat))
        .routes(routes!(files::mkdir::mkdir))
        .routes(routes!(files::move_file::move_file))
        .routes(routes!(files::chmod::chmod))
        .routes(routes!(files::remove::remove))
        .routes(routes!(files::watch::watch))
        .routes(routes!(files::read_tree::read_tree, files::write_tree::write_tree))
        .routes(routes!(files::read_workspace::read_workspace, files::write_workspace::write_workspace))
        .routes(routes!(files::url::create_url))
        .routes(routes!(files::signed::read_signed, files::signed::write_signed))
        .routes(routes!(jobs::start::start, jobs::look::list))
        .routes(routes!(jobs::look::get, jobs::look::forget))
        .routes(routes!(jobs::look::wait))
        .routes(routes!(jobs::act::cancel))
        .routes(routes!(jobs::act::signal))
        .routes(routes!(jobs::act::resize))
        .routes(routes!(jobs::act::stdin))
        .routes(routes!(jobs::events::events))
        .routes(routes!(jobs::output::output))
        .routes(routes!(processes::list))
        .routes(routes!(processes::signal))
        .routes(routes!(contexts::create::create, contexts::list::list))
        .routes(routes!(contexts::get::get, contexts::close::close))
        .routes(routes!(contexts::run::run))
        .routes(routes!(contexts::interrupt::interrupt))
        .routes(routes!(contexts::restart::restart))
        .routes(routes!(previews::create::create, previews::list::list))
        .routes(routes!(previews::revoke::revoke))
        .routes(routes!(previews::renew::renew))
        .routes(routes!(disk::disk))
        .routes(routes!(snapshots::save::save))
        .routes(routes!(snapshots::list::list))
        .routes(routes!(snapshots::get::get, snapshots::update::update, snapshots::delete::delete))
        .routes(routes!(snapshots::restore::restore))
        .routes(routes!(snapshots::files::list::list))
        .routes(routes!(snapshots::files::stat::stat))
        .routes(routes!(snapshots::files::read::read))
        .routes(routes!(snapshots::files::read_tree::read_tree))
        .routes(routes!(snapshots::files::read_workspace::read_workspace))
        .routes(routes!(keys::create, keys::list))
        .routes(routes!(keys::revoke))
}

/// The whole HTTP application.
pub fn router(state: AppState) -> Router {
    let (router, _) = described().split_for_parts();
    router
        .route("/v1/openapi.json", get(openapi::serve))
        .fallback(nowhere)
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn_with_state(state.clone(), layers::outermost))
        .with_state(state)
}

async fn nowhere() -> ApiError {
    ApiError::new(mainbrella_types::ErrorCode::NotFound, "There is no such path.")
        .hint("The paths are listed in `/v1/openapi.json`.")
}
