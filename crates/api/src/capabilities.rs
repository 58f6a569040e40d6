//! What this service on this host can really do.
//!
//! What is `false` here answers `unsupported` or 404. The service derives every flag from its driver's
//! probes and from the verbs it has; nothing is declared by hand.

use mainbrella_types::limits;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What this service can do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Capabilities {
    /// Version of the service.
    pub version: String,
    /// What makes machines, e.g. `microvm`.
    pub driver: String,
    /// How machines are separated from the host.
    pub isolation: IsolationReport,
    /// Commands.
    pub execution: Execution,
    /// Files.
    pub files: Files,
    /// Network.
    pub networking: Networking,
    /// Ports reachable from outside.
    pub previews: Previews,
    /// Saving and copying machines. Five powers, five flags.
    pub persistence: Persistence,
    /// Watching machines.
    pub observability: Observability,
    /// Sizes a machine can have, smallest first.
    pub sizes: Vec<Size>,
    /// Templates that are ready.
    pub templates: Vec<String>,
    /// Every documented number.
    pub limits: Limits,
}

/// How machines are separated from the host and from each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct IsolationReport {
    /// The kind of wall.
    #[schema(schema_with = crate::schema::isolation)]
    pub kind: String,
    /// `kvm` or `tcg`; `null` for drivers without one.
    pub accelerator: Option<String>,
    /// One sentence on why this accelerator was chosen.
    pub reason: String,
    /// The VMM and its version.
    pub vmm: String,
    /// Walls around the VMM process, as observed.
    pub jail: Jail,
}

/// Walls around a VMM process that are in force on this host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[allow(clippy::struct_excessive_bools)]
pub struct Jail {
    /// A user id of its own.
    pub own_uid: bool,
    /// No way to gain privileges, and none held.
    pub no_new_privs: bool,
    /// A seccomp sandbox.
    pub seccomp: bool,
    /// A mount namespace with only its own files.
    pub mount_namespace: bool,
    /// A process namespace of its own.
    pub pid_namespace: bool,
    /// A network namespace of its own.
    pub network_namespace: bool,
    /// Landlock rules on what may be opened.
    pub landlock: bool,
    /// A memory limit.
    pub memory_limit: bool,
    /// A processor limit.
    pub cpu_limit: bool,
    /// A limit on tasks.
    pub pids_limit: bool,
}

/// What can be done with commands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Execution {
    /// Run and wait.
    pub blocking_run: bool,
    /// Arguments instead of text for a shell.
    pub argv: bool,
    /// Standard input of a managed job.
    pub stdin: bool,
    /// Standard input sent along with a blocking command.
    pub inline_stdin: bool,
    /// Jobs that outlive the call.
    pub managed_jobs: bool,
    /// Signals to jobs.
    pub signals: bool,
    /// A list of processes.
    pub managed_process_listing: bool,
    /// Jobs on a terminal.
    pub programmatic_pty: bool,
    /// Changing the size of that terminal.
    pub pty_resize: bool,
    /// Languages of code contexts that a template of this host brings.
    #[serde(default)]
    pub code_contexts: Vec<String>,
}

/// What can be done with files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Files {
    /// Read contents.
    pub read: bool,
    /// Write contents.
    pub write: bool,
    /// List a directory.
    pub list: bool,
    /// Ask for metadata.
    pub stat: bool,
    /// Make directories.
    pub mkdir: bool,
    /// Move without overwriting.
    pub r#move: bool,
    /// Change permission bits.
    pub chmod: bool,
    /// Remove files and trees.
    pub remove: bool,
    /// Watch directories.
    pub watch: bool,
    /// Up- and download of trees as tar.
    pub tree: bool,
    /// URLs that read or write one file without a key.
    pub signed_urls: bool,
}

/// What machines can reach.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Networking {
    /// A machine can be given a way to the internet.
    pub internet: bool,
    /// That a machine has none can be enforced.
    pub internet_control: bool,
    /// What a create that does not say gets.
    pub internet_default: bool,
    /// A machine can be kept to an allow-list of names and addresses.
    #[serde(default)]
    pub egress_allow_list: bool,
    /// What a running machine may reach can be changed.
    #[serde(default)]
    pub egress_change: bool,
    /// Whether the gateway of a machine can add credentials to its requests.
    pub egress_secrets: bool,
}

/// Ports of a machine reachable from outside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Previews {
    /// Whether they are issued. Those that exist can be listed and revoked in any case.
    pub supported: bool,
    /// Whether an issue can be repeated under an Idempotency-Key.
    #[serde(default)]
    pub idempotent: bool,
    /// Whether the end of one can be moved.
    #[serde(default)]
    pub renewal: bool,
}

/// Saving and copying machines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Persistence {
    /// Disks can be saved and machines started from them.
    pub snapshots: bool,
    /// The same with memory.
    pub memory_snapshot: bool,
    /// Pause and resume.
    pub pause_resume: bool,
    /// A machine can be paused instead of ended when nobody uses it, and resumed by the next use.
    #[serde(default)]
    pub auto_pause: bool,
    /// Live copies.
    pub fork: bool,
    /// A fresh address for the same machine.
    pub endpoint_renewal: bool,
}

/// Watching machines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Observability {
    /// A list of what happened to a generation.
    pub lifecycle_events: bool,
    /// Processor, memory, disk and network figures.
    pub metrics: bool,
    /// Calls to the owner's relay.
    pub webhooks: bool,
}

/// A size class.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Size {
    /// Its name.
    pub name: String,
    /// Memory, MiB.
    pub memory_mib: u32,
    /// Virtual processors.
    pub vcpus: u32,
    /// Writable disk, MiB.
    pub disk_mib: u32,
}

macro_rules! limits {
    ($($(#[$doc:meta])* $field:ident = $constant:ident;)*) => {
        /// Every documented number. The unit is the end of the name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
        #[serde(rename_all = "camelCase")]
        pub struct Limits { $($(#[$doc])* pub $field: u64,)* }

        impl Limits {
            /// The limits this build enforces.
            #[must_use]
            #[allow(clippy::unnecessary_cast)]
            pub const fn current() -> Self { Self { $($field: limits::$constant as u64,)* } }
        }

        #[cfg(test)]
        const REPORTED: &[&str] = &[$(stringify!($constant),)*];
    };
}

limits! {
    /// Longest slot, template or project name, bytes.
    name_max_bytes = NAME_MAX;
    /// Default hard lease.
    ttl_default_seconds = TTL_DEFAULT_SECONDS;
    /// Shortest hard lease.
    ttl_min_seconds = TTL_MIN_SECONDS;
    /// Longest hard lease, counted from now.
    ttl_max_seconds = TTL_MAX_SECONDS;
    /// Shortest idle timeout.
    idle_min_seconds = IDLE_MIN_SECONDS;
    /// Metadata entries of one machine.
    metadata_entries_max = METADATA_ENTRIES_MAX;
    /// Longest metadata key.
    metadata_key_max_bytes = METADATA_KEY_MAX;
    /// Longest metadata value.
    metadata_value_max_bytes = METADATA_VALUE_MAX;
    /// Environment entries.
    env_entries_max = ENV_ENTRIES_MAX;
    /// Total size of environment names and values.
    env_max_bytes = ENV_BYTES_MAX;
    /// Longest Idempotency-Key.
    idempotency_key_max_bytes = IDEMPOTENCY_KEY_MAX;
    /// How long an Idempotency-Key is kept.
    idempotency_retention_ms = IDEMPOTENCY_RETENTION_MS;
    /// How long a finished machine can be inspected.
    finished_retention_ms = FINISHED_RETENTION_MS;
    /// Default time-out of a blocking command.
    command_timeout_default_ms = COMMAND_TIMEOUT_DEFAULT_MS;
    /// Longest time-out of a command.
    command_timeout_max_ms = COMMAND_TIMEOUT_MAX_MS;
    /// Longest command.
    command_max_bytes = COMMAND_BYTES_MAX;
    /// Most arguments.
    argv_entries_max = ARGV_ENTRIES_MAX;
    /// Output kept of each stream by default.
    output_limit_default_bytes = OUTPUT_LIMIT_DEFAULT;
    /// Most output kept of each stream.
    output_limit_max_bytes = OUTPUT_LIMIT_MAX;
    /// Standard input sent along with a blocking command.
    stdin_inline_max_bytes = STDIN_INLINE_MAX;
    /// Default time-out of a managed job.
    job_timeout_default_ms = JOB_TIMEOUT_DEFAULT_MS;
    /// Output kept of each of a job's stdout and stderr.
    job_log_max_bytes = JOB_LOG_MAX_BYTES;
    /// Output kept of all jobs of one machine.
    job_logs_total_max_bytes = JOB_LOGS_TOTAL_MAX_BYTES;
    /// Finished jobs kept for one machine.
    jobs_retained_max = JOBS_RETAINED_MAX;
    /// How long the idempotency key of a job's start is kept.
    job_idempotency_retention_ms = JOB_IDEMPOTENCY_RETENTION_MS;
    /// Longest wait of one call for a job.
    job_wait_max_ms = JOB_WAIT_MAX_MS;
    /// Longest grace of a cancel.
    job_grace_max_ms = JOB_GRACE_MAX_MS;
    /// Default grace of a cancel.
    job_grace_default_ms = JOB_GRACE_DEFAULT_MS;
    /// Input of one write to a job.
    job_stdin_write_max_bytes = JOB_STDIN_WRITE_MAX;
    /// Input accepted for one job in all.
    job_stdin_total_max_bytes = JOB_STDIN_TOTAL_MAX;
    /// Input of a job that it has not read yet.
    job_stdin_pending_max_bytes = JOB_STDIN_PENDING_MAX;
    /// Most columns or rows of a terminal.
    terminal_side_max = TERMINAL_SIDE_MAX;
    /// Most events of one page.
    events_limit_max = EVENTS_LIMIT_MAX;
    /// Longest path in a machine.
    path_max_bytes = PATH_MAX;
    /// Longest name in a path.
    path_component_max_bytes = PATH_COMPONENT_MAX;
    /// Largest file that can be written.
    file_max_bytes = FILE_BYTES_MAX;
    /// File operations at once on one machine; more wait.
    file_operations_max = FILE_OPERATIONS_MAX;
    /// Furthest entry a listing of a directory can begin at.
    list_offset_max = LIST_OFFSET_MAX;
    /// Most paths a removal names of those that are left.
    remaining_named_max = REMAINING_NAMED_MAX;
    /// Largest archive of a tree that can be unpacked.
    tree_max_bytes = TREE_BYTES_MAX;
    /// Watches at once on one machine; more are refused.
    file_watches_max = FILE_WATCHES_MAX;
    /// Shortest life of a signed URL.
    signed_url_min_seconds = SIGNED_URL_MIN_SECONDS;
    /// Longest life of a signed URL.
    signed_url_max_seconds = SIGNED_URL_MAX_SECONDS;
    /// Life of a signed URL by default.
    signed_url_default_seconds = SIGNED_URL_DEFAULT_SECONDS;
    /// Blocking commands at once on one machine; more are refused.
    commands_max = COMMANDS_MAX;
    /// Lowest port of a machine that a preview can lead to.
    preview_port_min = PREVIEW_PORT_MIN;
    /// Shortest life of a preview.
    preview_ttl_min_seconds = PREVIEW_TTL_MIN_SECONDS;
    /// Life of a preview by default.
    preview_ttl_default_seconds = PREVIEW_TTL_DEFAULT_SECONDS;
    /// Longest life of a preview, counted from now.
    preview_ttl_max_seconds = PREVIEW_TTL_MAX_SECONDS;
    /// Active previews of one generation.
    previews_active_max = PREVIEWS_ACTIVE_MAX;
    /// Previews of one generation made within a day.
    previews_remembered_max = PREVIEWS_REMEMBERED_MAX;
    /// Connections to the ports of one machine at once.
    port_connections_max = PORT_CONNECTIONS_MAX;
    /// Code contexts of one machine.
    contexts_max = CONTEXTS_MAX;
    /// Longest code of one run.
    code_max_bytes = CODE_BYTES_MAX;
    /// Default time-out of a run of code.
    code_timeout_default_ms = CODE_TIMEOUT_DEFAULT_MS;
    /// Longest time-out of a run of code.
    code_timeout_max_ms = CODE_TIMEOUT_MAX_MS;
    /// Runs that may wait for their turn in one context.
    code_queue_max = CODE_QUEUE_MAX;
    /// Text kept of each stream of a run: half head, half tail.
    code_stream_max_bytes = CODE_STREAM_MAX;
    /// Largest rich result of one type, as JSON.
    code_value_max_bytes = CODE_VALUE_MAX;
    /// Rich results of one run in all, as JSON.
    code_results_max_bytes = CODE_RESULTS_BYTES_MAX;
    /// Rich results of one run.
    code_results_max = CODE_RESULTS_MAX;
    /// Most items of one page.
    list_limit_max = LIST_LIMIT_MAX;
    /// Items of a page by default.
    list_limit_default = LIST_LIMIT_DEFAULT;
    /// Largest JSON body.
    json_body_max_bytes = JSON_BODY_MAX;
    /// Longest label of a key.
    key_name_max_bytes = KEY_NAME_MAX;
    /// Most rules of one egress policy.
    egress_rules_max = EGRESS_RULES_MAX;
    /// Denied connections kept of one machine.
    egress_events_kept = EGRESS_EVENTS_KEPT;
    /// Machines of one fork.
    fork_children_max = FORK_CHILDREN_MAX;
    /// Longest name of a snapshot.
    snapshot_name_max_bytes = SNAPSHOT_NAME_MAX;
    /// Snapshots of a project, unless the service is configured otherwise.
    snapshots_default = SNAPSHOTS_DEFAULT;
    /// Longest time until a snapshot is removed by itself.
    snapshot_ttl_max_seconds = SNAPSHOT_TTL_MAX_SECONDS;
    /// Shortest.
    snapshot_ttl_min_seconds = SNAPSHOT_TTL_MIN_SECONDS;
    /// Snapshots of the host that are read at once without a machine of the caller.
    snapshot_readers_max = SNAPSHOT_READERS_MAX;
    /// How long what reads a snapshot is kept after its last use.
    snapshot_reader_idle_ms = SNAPSHOT_READER_IDLE_MS;
    /// Longest recipe of a template.
    recipe_max_bytes = RECIPE_BYTES_MAX;
    /// Instructions of one recipe.
    recipe_instructions_max = RECIPE_INSTRUCTIONS_MAX;
    /// Steps of one recipe that change the machine: what runs, copies or makes a directory.
    recipe_steps_max = RECIPE_STEPS_MAX;
    /// Longest value in a recipe after its variables are put in.
    recipe_value_max_bytes = RECIPE_VALUE_MAX;
    /// Build arguments of one build.
    build_arguments_max = BUILD_ARGUMENTS_MAX;
    /// Patterns of one `.dockerignore`.
    ignore_patterns_max = IGNORE_PATTERNS_MAX;
    /// Files, directories and links of a build's context.
    context_entries_max = CONTEXT_ENTRIES_MAX;
    /// Size of all that one recipe copies out of its context.
    context_max_bytes = CONTEXT_BYTES_MAX;
    /// Longest name of a user or group of a machine.
    user_name_max_bytes = USER_NAME_MAX;
    /// Versions of one template.
    template_versions_max = TEMPLATE_VERSIONS_MAX;
    /// Tags of all templates.
    template_tags_max = TEMPLATE_TAGS_MAX;
    /// Longest time for the start command of a template to get ready.
    template_ready_max_ms = TEMPLATE_READY_MAX_MS;
    /// Longest description of a version of a template.
    built_manifest_max_bytes = BUILT_MANIFEST_MAX;
    /// Tags that one build may ask for.
    build_tags_max = BUILD_TAGS_MAX;
    /// Time limit of a build by default.
    build_timeout_default_seconds = BUILD_TIMEOUT_DEFAULT_SECONDS;
    /// Shortest time limit of a build.
    build_timeout_min_seconds = BUILD_TIMEOUT_MIN_SECONDS;
    /// Longest time limit of a build.
    build_timeout_max_seconds = BUILD_TIMEOUT_MAX_SECONDS;
    /// Builds that are not over.
    builds_waiting_max = BUILDS_WAITING_MAX;
    /// Builds that are remembered.
    builds_kept = BUILDS_KEPT;
    /// How long a build waits for its context.
    build_context_wait_seconds = BUILD_CONTEXT_WAIT_SECONDS;
    /// Log kept of one build; beyond it output is left out.
    build_log_max_bytes = BUILD_LOG_BYTES_MAX;
    /// Longest line of a build's log.
    build_line_max_bytes = BUILD_LINE_BYTES_MAX;
    /// Layers of an image.
    image_layers_max = IMAGE_LAYERS_MAX;
    /// Largest manifest, index or configuration of an image.
    image_document_max_bytes = IMAGE_DOCUMENT_MAX;
    /// Size of all layers of an image as they are transferred, 16 GiB.
    image_transfer_max_bytes = IMAGE_TRANSFER_MAX;
    /// Size of all layers of an image when unpacked, 32 GiB.
    image_unpacked_max_bytes = IMAGE_UNPACKED_MAX;
    /// Files, directories and links in all layers of an image.
    image_entries_max = IMAGE_ENTRIES_MAX;
    /// Secrets of one machine.
    secrets_max = SECRETS_MAX;
    /// Longest name of a secret.
    secret_name_max_bytes = SECRET_NAME_MAX;
    /// Longest user name of HTTP basic credentials.
    secret_username_max_bytes = SECRET_USERNAME_MAX;
    /// Longest value of a secret.
    secret_value_max_bytes = SECRET_VALUE_MAX;
    /// Longest host name.
    host_name_max_bytes = HOST_NAME_MAX;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_the_vocabulary_is_reported() {
        let source = include_str!("../../types/src/limits.rs");
        let declared: Vec<&str> =
            source.lines().filter_map(|l| l.strip_prefix("pub const ")?.split(':').next()).collect();
        assert!(declared.len() > 20, "the scan found the constants");
        for name in declared {
            assert!(REPORTED.contains(&name), "{name} is not reported by /v1/capabilities");
        }
    }

    #[test]
    fn a_limit_reports_the_constant_it_names() {
        let json = serde_json::to_value(Limits::current()).expect("plain numbers");
        assert_eq!(json["fileMaxBytes"], limits::FILE_BYTES_MAX);
        assert_eq!(json["ttlMaxSeconds"], 604_800);
    }
}
