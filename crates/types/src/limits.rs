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
/// Most argv entries.
pub const ARGV_ENTRIES_MAX: usize = 1024;
/// Output returned for each stream by default, bytes; half of it head, half tail.
pub const OUTPUT_LIMIT_DEFAULT: u64 = 1024 * 1024;
/// Most output returned for each stream, bytes.
pub const OUTPUT_LIMIT_MAX: u64 = 16 * 1024 * 1024;
/// Standard input that may accompany a blocking command, bytes.
pub const STDIN_INLINE_MAX: usize = 1024 * 1024;

/// Longest guest path, bytes (`PATH_MAX` less the final NUL).
pub const PATH_MAX: usize = 4095;
/// Longest name of one path component, bytes.
pub const PATH_COMPONENT_MAX: usize = 255;
/// Largest file that may be written, bytes (5 GiB).
pub const FILE_BYTES_MAX: u64 = 5 * 1024 * 1024 * 1024;
/// File operations at once on one machine (contract section 3).
pub const FILE_OPERATIONS_MAX: usize = 4;
/// Blocking commands at once on one machine; further calls wait their turn, up to the queue.
pub const COMMANDS_MAX: usize = 1024;

/// Most items a list returns at once.
pub const LIST_LIMIT_MAX: u32 = 1000;
/// Items a list returns by default.
pub const LIST_LIMIT_DEFAULT: u32 = 100;

/// Largest JSON body, bytes.
pub const JSON_BODY_MAX: usize = 4 * 1024 * 1024;
/// Longest name or label of an API key, bytes.
pub const KEY_NAME_MAX: usize = 64;

const _: () = assert!(IDEMPOTENCY_RETENTION_MS >= 3600 * 1000);
const _: () = assert!(FINISHED_RETENTION_MS >= IDEMPOTENCY_RETENTION_MS);
const _: () = assert!(TTL_MIN_SECONDS <= TTL_DEFAULT_SECONDS && TTL_DEFAULT_SECONDS <= TTL_MAX_SECONDS);
const _: () = assert!(OUTPUT_LIMIT_DEFAULT <= OUTPUT_LIMIT_MAX);
// A blocking command with the longest argv, a full environment and full inline input (as base64) fits one body.
const _: () = assert!(COMMAND_BYTES_MAX + ENV_BYTES_MAX + STDIN_INLINE_MAX / 3 * 4 < JSON_BODY_MAX);

/// Most rules of one egress policy.
pub const EGRESS_RULES_MAX: usize = 256;
/// Longest host name, bytes.
pub const HOST_NAME_MAX: usize = 253;
