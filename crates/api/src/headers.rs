//! Names of the headers this API uses beside the standard ones.

/// Request id: accepted when sane (1 to 64 of `A-Z a-z 0-9 . _ -`), made otherwise, always sent back.
pub const REQUEST_ID: &str = "x-request-id";
/// Key under which a create may be repeated without making a second machine.
pub const IDEMPOTENCY_KEY: &str = "idempotency-key";
/// `true` on a reply that repeats the outcome of an earlier create.
pub const IDEMPOTENCY_REPLAYED: &str = "idempotency-replayed";
/// Permission bits of a read file, octal, e.g. `0644`.
pub const FILE_MODE: &str = "x-mainbrella-mode";
/// Size of the whole file at the time it was opened, bytes.
pub const FILE_SIZE: &str = "x-mainbrella-size";
/// Last modification of a read file, whole seconds since the Unix epoch.
pub const FILE_MTIME: &str = "x-mainbrella-mtime";
/// Part of a job's output that is not kept, as `OFFSET+LENGTH` in bytes of the stream: the body has what stands around it.
pub const OUTPUT_OMITTED: &str = "x-mainbrella-omitted";
