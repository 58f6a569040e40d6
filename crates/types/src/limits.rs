//! Every documented number, once. `/v1/capabilities` reports them; tests assert them.

/// Longest slot, template or project name, bytes.
pub const NAME_MAX: usize = 63;

/// Default hard lease, seconds.
pub const TTL_DEFAULT_SECONDS: u64 = 3600;
/// Shortest hard lease, seconds.
pub const TTL_MIN_SECONDS: u64 = 10;
/// Longest hard lease counted from now, seconds (7 days).
pub const TTL_MAX_SECONDS: u64 = 7 * 24 * 3600;
/// Shortest idle timeout, seconds.
pub const IDLE_MIN_SECONDS: u64 = 5;

/// Metadata entries of one machine.
pub const METADATA_ENTRIES_MAX: usize = 32;
/// Longest metadata key, bytes.
pub const METADATA_KEY_MAX: usize = 64;
/// Longest metadata value, bytes.
pub const METADATA_VALUE_MAX: usize = 512;
/// Environment entries given at create or with one command.
pub const ENV_ENTRIES_MAX: usize = 128;
/// Total size of those environment names and values, bytes.
pub const ENV_BYTES_MAX: usize = 64 * 1024;

/// Longest Idempotency-Key, bytes.
pub const IDEMPOTENCY_KEY_MAX: usize = 255;
/// How long an idempotency key is kept, milliseconds (contract: at least one hour).
pub const IDEMPOTENCY_RETENTION_MS: u64 = 24 * 3600 * 1000;
/// How long the record of a finished machine is kept, milliseconds.
pub const FINISHED_RETENTION_MS: u64 = 7 * 24 * 3600 * 1000;

/// Default time-out of a blocking command, milliseconds.
pub const COMMAND_TIMEOUT_DEFAULT_MS: u64 = 60_000;
/// Longest time-out of a command, milliseconds (24 hours).
pub const COMMAND_TIMEOUT_MAX_MS: u64 = 24 * 3600 * 1000;
/// Longest command: the string, or the sum of the argv strings, bytes.
pub const COMMAND_BYTES_MAX: usize = 128 * 1024;
/// Longest name of a user or group in a machine, bytes.
pub const USER_NAME_MAX: usize = 32;
/// Most argv entries.
pub const ARGV_ENTRIES_MAX: usize = 1024;
/// Output returned for each stream by default, bytes; half of it head, half tail.
pub const OUTPUT_LIMIT_DEFAULT: u64 = 1024 * 1024;
/// Most output returned for each stream, bytes.
pub const OUTPUT_LIMIT_MAX: u64 = 16 * 1024 * 1024;
/// Standard input that may accompany a blocking command, bytes.
pub const STDIN_INLINE_MAX: usize = 1024 * 1024;

/// Default time-out of a managed job, milliseconds.
pub const JOB_TIMEOUT_DEFAULT_MS: u64 = 300_000;
/// Output kept of each of a job's stdout and stderr, bytes; beyond it the first and the last halves are kept.
pub const JOB_LOG_MAX_BYTES: u64 = 64 * 1024 * 1024;
/// Output kept of all jobs of one machine, bytes. Above it the oldest finished jobs are let go and running ones keep less.
pub const JOB_LOGS_TOTAL_MAX_BYTES: u64 = 512 * 1024 * 1024;
/// Finished jobs kept for one machine; the oldest are let go.
pub const JOBS_RETAINED_MAX: usize = 2048;
/// How long the idempotency key of a job's start is kept, milliseconds.
pub const JOB_IDEMPOTENCY_RETENTION_MS: u64 = 3600 * 1000;
/// Longest wait of one call for a job, milliseconds.
pub const JOB_WAIT_MAX_MS: u64 = 60_000;
/// Longest grace between the polite and the hard end of a cancelled job, milliseconds.
pub const JOB_GRACE_MAX_MS: u64 = 60_000;
/// Default grace of a cancel, milliseconds.
pub const JOB_GRACE_DEFAULT_MS: u64 = 2_000;
/// Input of one write to a job, bytes.
pub const JOB_STDIN_WRITE_MAX: usize = 64 * 1024;
/// Input accepted for one job in all, bytes.
pub const JOB_STDIN_TOTAL_MAX: u64 = 1024 * 1024;
/// Input of a job that it has not read yet, bytes.
pub const JOB_STDIN_PENDING_MAX: u64 = 256 * 1024;
/// Most columns or rows of a terminal.
pub const TERMINAL_SIDE_MAX: u32 = 4096;
/// Most events of one page.
pub const EVENTS_LIMIT_MAX: u32 = 1000;

/// Longest guest path, bytes (`PATH_MAX` less the final NUL).
pub const PATH_MAX: usize = 4095;
/// Longest name of one path component, bytes.
pub const PATH_COMPONENT_MAX: usize = 255;
/// Largest file that may be written, bytes (5 GiB).
pub const FILE_BYTES_MAX: u64 = 5 * 1024 * 1024 * 1024;
/// File operations at once on one machine (contract section 3).
pub const FILE_OPERATIONS_MAX: usize = 4;
/// Furthest entry a listing of a directory may begin at.
pub const LIST_OFFSET_MAX: u64 = 1_000_000;
/// Most paths a removal names of those that are left.
pub const REMAINING_NAMED_MAX: usize = 100;
/// Largest archive of a tree that may be unpacked, bytes (32 GiB).
pub const TREE_BYTES_MAX: u64 = 32 * 1024 * 1024 * 1024;
/// Watches at once on one machine; more are refused.
pub const FILE_WATCHES_MAX: usize = 8;
/// Shortest life of a signed URL, seconds.
pub const SIGNED_URL_MIN_SECONDS: u64 = 10;
/// Longest life of a signed URL, seconds.
pub const SIGNED_URL_MAX_SECONDS: u64 = 3600;
/// Life of a signed URL by default, seconds.
pub const SIGNED_URL_DEFAULT_SECONDS: u64 = 900;
/// Blocking commands at once on one machine; further calls wait their turn, up to the queue.
pub const COMMANDS_MAX: usize = 1024;

/// Lowest port of a machine that a preview may lead to.
pub const PREVIEW_PORT_MIN: u16 = 1024;
/// Shortest life of a preview, seconds.
pub const PREVIEW_TTL_MIN_SECONDS: u64 = 60;
/// Life of a preview by default, seconds.
pub const PREVIEW_TTL_DEFAULT_SECONDS: u64 = 900;
/// Longest life of a preview counted from now, seconds.
pub const PREVIEW_TTL_MAX_SECONDS: u64 = 3600;
/// Previews of one generation that are active at once.
pub const PREVIEWS_ACTIVE_MAX: usize = 8;
/// Previews of one generation that are remembered, ended ones included; they are for a day.
pub const PREVIEWS_REMEMBERED_MAX: usize = 10_000;
/// Connections to the ports of one machine at once; more are refused.
pub const PORT_CONNECTIONS_MAX: usize = 1024;

/// Code contexts of one machine.
pub const CONTEXTS_MAX: usize = 8;
/// Longest code of one run, bytes.
pub const CODE_BYTES_MAX: usize = 1024 * 1024;
/// Default time-out of a run of code, milliseconds.
pub const CODE_TIMEOUT_DEFAULT_MS: u64 = 60_000;
/// Longest time-out of a run of code, milliseconds (24 hours).
pub const CODE_TIMEOUT_MAX_MS: u64 = 24 * 3600 * 1000;
/// Runs that may wait for their turn in one context.
pub const CODE_QUEUE_MAX: usize = 16;
/// Text kept of each stream of a run, bytes: half of it head, half tail.
pub const CODE_STREAM_MAX: usize = 1024 * 1024;
/// Largest rich result of one type, bytes as JSON (a picture is base64 there).
pub const CODE_VALUE_MAX: usize = 4 * 1024 * 1024;
/// Rich results of one run in all, bytes as JSON.
pub const CODE_RESULTS_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Rich results of one run.
pub const CODE_RESULTS_MAX: usize = 256;

/// Most items a list returns at once.
pub const LIST_LIMIT_MAX: u32 = 1000;
/// Items a list returns by default.
pub const LIST_LIMIT_DEFAULT: u32 = 100;

/// Largest JSON body, bytes.
pub const JSON_BODY_MAX: usize = 4 * 1024 * 1024;
/// Longest name or label of an API key, bytes.
pub const KEY_NAME_MAX: usize = 64;

/// Most rules of one egress policy.
pub const EGRESS_RULES_MAX: usize = 256;
/// Denied connections kept of one machine, the latest; older ones are only counted.
pub const EGRESS_EVENTS_KEPT: usize = 512;
/// Machines of one fork.
pub const FORK_CHILDREN_MAX: u32 = 8;
/// Longest name of a snapshot, bytes.
pub const SNAPSHOT_NAME_MAX: usize = 128;
/// Snapshots of a project, archived ones included, unless the service is configured otherwise.
pub const SNAPSHOTS_DEFAULT: u32 = 100;
/// Longest time until a snapshot is removed by itself, seconds: a year.
pub const SNAPSHOT_TTL_MAX_SECONDS: u64 = 365 * 24 * 3600;
/// Shortest.
pub const SNAPSHOT_TTL_MIN_SECONDS: u64 = 60;
/// Snapshots of a host that are read at once without a machine of the caller.
pub const SNAPSHOT_READERS_MAX: usize = 4;
/// How long what reads a snapshot is kept after its last use, milliseconds.
pub const SNAPSHOT_READER_IDLE_MS: u64 = 60_000;
/// Secrets of one machine.
pub const SECRETS_MAX: usize = 16;
/// Longest name of a secret, bytes.
pub const SECRET_NAME_MAX: usize = 64;
/// Longest user name of HTTP basic credentials, bytes.
pub const SECRET_USERNAME_MAX: usize = 256;
/// Longest value of a secret, bytes.
pub const SECRET_VALUE_MAX: usize = 8192;
/// Longest host name, bytes.
pub const HOST_NAME_MAX: usize = 253;

/// Longest recipe of a template, bytes.
pub const RECIPE_BYTES_MAX: usize = 256 * 1024;
/// Instructions of one recipe.
pub const RECIPE_INSTRUCTIONS_MAX: usize = 512;
/// Steps of one recipe that change the machine: what runs, copies or makes a directory.
pub const RECIPE_STEPS_MAX: usize = 128;
/// Longest value in a recipe after its variables are put in, bytes.
pub const RECIPE_VALUE_MAX: usize = 64 * 1024;
/// Build arguments of one build.
pub const BUILD_ARGUMENTS_MAX: usize = 128;
/// Patterns of one `.dockerignore`.
pub const IGNORE_PATTERNS_MAX: usize = 1024;
/// Files, directories and links of a build's context.
pub const CONTEXT_ENTRIES_MAX: usize = 200_000;
/// Size of all that one recipe copies out of its context, bytes (8 GiB).
pub const CONTEXT_BYTES_MAX: u64 = 8 * 1024 * 1024 * 1024;
/// Tags that one build may ask for.
pub const BUILD_TAGS_MAX: usize = 16;
/// Time limit of a build by default, seconds.
pub const BUILD_TIMEOUT_DEFAULT_SECONDS: u64 = 30 * 60;
/// Shortest time limit of a build, seconds.
pub const BUILD_TIMEOUT_MIN_SECONDS: u64 = 10;
/// Longest time limit of a build, seconds (6 hours).
pub const BUILD_TIMEOUT_MAX_SECONDS: u64 = 6 * 3600;
/// Builds that wait for their context or their turn.
pub const BUILDS_WAITING_MAX: usize = 16;
/// Builds that are remembered, unfinished ones included.
pub const BUILDS_KEPT: usize = 100;
/// How long a build waits for its context, seconds.
pub const BUILD_CONTEXT_WAIT_SECONDS: u64 = 15 * 60;
/// Log kept of one build, bytes; beyond it output is left out, steps and notices are not.
pub const BUILD_LOG_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// Longest line of a build's log, bytes.
pub const BUILD_LINE_BYTES_MAX: usize = 4096;

/// Versions of one template that are kept at once.
pub const TEMPLATE_VERSIONS_MAX: usize = 256;
/// Tags of all templates.
pub const TEMPLATE_TAGS_MAX: usize = 4096;
/// Longest time for the start command of a template to get ready, milliseconds.
pub const TEMPLATE_READY_MAX_MS: u64 = 600_000;
/// Longest description of a version, bytes.
pub const BUILT_MANIFEST_MAX: u64 = 4 * 1024 * 1024;
/// Layers of an image.
pub const IMAGE_LAYERS_MAX: usize = 256;
/// Largest manifest, index or configuration of an image, bytes.
pub const IMAGE_DOCUMENT_MAX: u64 = 4 * 1024 * 1024;
/// Size of all layers of an image as they are transferred, bytes (16 GiB).
pub const IMAGE_TRANSFER_MAX: u64 = 16 * 1024 * 1024 * 1024;
/// Size of all layers of an image when unpacked, bytes (32 GiB).
pub const IMAGE_UNPACKED_MAX: u64 = 32 * 1024 * 1024 * 1024;
/// Files, directories and links in all layers of an image.
pub const IMAGE_ENTRIES_MAX: u64 = 4_000_000;

const _: () = assert!(IDEMPOTENCY_RETENTION_MS >= 3600 * 1000);
const _: () = assert!(FINISHED_RETENTION_MS >= IDEMPOTENCY_RETENTION_MS);
const _: () = assert!(TTL_MIN_SECONDS <= TTL_DEFAULT_SECONDS && TTL_DEFAULT_SECONDS <= TTL_MAX_SECONDS);
const _: () = assert!(SIGNED_URL_MIN_SECONDS <= SIGNED_URL_DEFAULT_SECONDS);
const _: () = assert!(SIGNED_URL_DEFAULT_SECONDS <= SIGNED_URL_MAX_SECONDS);
const _: () = assert!(PREVIEW_TTL_MIN_SECONDS <= PREVIEW_TTL_DEFAULT_SECONDS);
const _: () = assert!(PREVIEW_TTL_DEFAULT_SECONDS <= PREVIEW_TTL_MAX_SECONDS);
const _: () = assert!(OUTPUT_LIMIT_DEFAULT <= OUTPUT_LIMIT_MAX);
// A blocking command with the longest argv, a full environment and full inline input (as base64) fits one body.
const _: () = assert!(COMMAND_BYTES_MAX + ENV_BYTES_MAX + STDIN_INLINE_MAX / 3 * 4 < JSON_BODY_MAX);
// Code as JSON, at worst six bytes a byte, is not promised to fit; code as text is.
const _: () = assert!(CODE_BYTES_MAX + ENV_BYTES_MAX < JSON_BODY_MAX);
const _: () = assert!(CODE_VALUE_MAX <= CODE_RESULTS_BYTES_MAX);
