//! Bounds that host and guest both keep. Every number of the wire stands here once.

use std::time::Duration;

/// Longest certificate that is to be believed, bytes.
pub const CERTIFICATE_MAX: usize = 16 * 1024;
/// Largest message a guest accepts, bytes: a job with full inline input, environment and argv.
pub const REQUEST_BYTES_MAX: usize = 2 * 1024 * 1024;
/// Largest message a host accepts from a guest, bytes.
pub const RESPONSE_BYTES_MAX: usize = 512 * 1024;
/// Most memory the decoder may spend on elements of one message, bytes.
pub const ELEMENT_MEMORY_MAX: usize = 4 * 1024 * 1024;
/// Size of one chunk of a file, bytes. A receiver accepts up to [`CHUNK_BYTES_MAX`].
pub const CHUNK_BYTES: usize = 64 * 1024;
/// Largest chunk of file content or process output in one message, bytes.
pub const CHUNK_BYTES_MAX: usize = 128 * 1024;

/// HTTP/2 flow-control window of one stream, bytes.
pub const STREAM_WINDOW: u32 = 256 * 1024;
/// HTTP/2 flow-control window of the connection, bytes: the most a peer can make us hold unread. Eight streams that
/// nobody reads fill it and then hold up all others: whoever calls must read, or drop, what it asked for.
pub const CONNECTION_WINDOW: u32 = 2 * 1024 * 1024;
/// Largest HTTP/2 frame, bytes (the protocol's own minimum).
pub const FRAME_BYTES: u32 = 16 * 1024;
/// Largest header list, bytes: also what an error message must fit in.
pub const HEADER_LIST_MAX: u32 = 16 * 1024;
/// Most bytes HTTP/2 holds to send for one stream before the writer waits.
pub const SEND_BUFFER: usize = 128 * 1024;
/// Most streaming calls at once (jobs followed, files read and written).
pub const STREAMING_CALLS_MAX: usize = 1088;
/// Most unary calls at once. Counted apart, so that followed jobs cannot keep a probe or a cancel out.
pub const UNARY_CALLS_MAX: usize = 64;
/// Most connections to ports of the machine at once. Counted apart, so that they keep no other call out.
pub const DIALS_MAX: usize = 1024;
/// Most HTTP/2 streams at once.
pub const CONCURRENT_STREAMS: u32 = (STREAMING_CALLS_MAX + UNARY_CALLS_MAX + DIALS_MAX) as u32;
/// Bytes each side of a dialled connection may send before the other has taken any.
pub const DIAL_WINDOW_FIRST: usize = 32 * 1024;
/// Most bytes of one direction of a dialled connection that are sent and not taken.
pub const DIAL_WINDOW: usize = 256 * 1024;
/// What each side of a link spends on windows beyond the first, for all its dialled connections together, bytes.
pub const DIAL_MEMORY: usize = 32 * 1024 * 1024;
/// Largest piece of a dialled connection in one message, bytes.
pub const DIAL_CHUNK: usize = 64 * 1024;
/// DATA frames without a byte that a guest may send in the life of a connection. An honest one sends none.
pub const EMPTY_FRAMES_MAX: u32 = 1_000;
/// DATA frames of less than 256 bytes that a guest may have sent and the host not read.
pub const SMALL_FRAMES_MAX: u32 = 150_000;
/// Header blocks a guest may send beyond two for each call.
pub const HEADERS_SLACK: u32 = 64;

/// Stale bytes a host discards while it looks for the guest's answer.
pub const HOST_DISCARD_MAX: u64 = 8 * 1024 * 1024;
/// Stale bytes a guest discards before it gives an attempt up and starts a new one.
pub const GUEST_DISCARD_MAX: u64 = 64 * 1024 * 1024;
/// How long a host waits for the answer before its first repetition; doubles up to [`LINK_RETRY_MAX`].
pub const LINK_RETRY_FIRST: Duration = Duration::from_millis(25);
/// Longest pause between repetitions: a guest that needs longer for an answer is not there.
pub const LINK_RETRY_MAX: Duration = Duration::from_secs(4);

/// Jobs the agent keeps, finished ones included.
pub const JOBS_MAX: usize = 2048;
/// Followers of one job at once.
pub const JOB_FOLLOWERS_MAX: usize = 16;
/// Longest job id, bytes.
pub const JOB_ID_MAX: usize = 64;
/// Longest `USER[:GROUP]`, bytes.
pub const USER_MAX: usize = 65;
/// Most argv entries of a job.
pub const ARGV_ENTRIES_MAX: usize = 1024;
/// Longest argv of a job in all, bytes. Linux takes at most 128 KiB for one argument.
pub const ARGV_BYTES_MAX: usize = 256 * 1024;
/// Most environment entries.
pub const ENV_ENTRIES_MAX: usize = 256;
/// Longest environment in all, bytes.
pub const ENV_BYTES_MAX: usize = 128 * 1024;
/// Input that may come with the start of a job, bytes.
pub const STDIN_INLINE_MAX: usize = 1024 * 1024;
/// Input written to a running job that it has not read yet, bytes; a write above that waits.
pub const STDIN_PENDING_MAX: usize = 256 * 1024;
/// Output of one job that no follower took yet, bytes; above that the process is made to wait.
pub const UNSENT_MAX: usize = 1024 * 1024;
/// Output kept after it was handed to a follower, bytes: more than a broken link can lose, so that
/// `FollowJob` from the last sequence that arrived finds everything.
pub const RETAINED_MAX: usize = 1024 * 1024;
/// Most processes in one list.
pub const PROCESSES_MAX: usize = 4096;
/// Most bytes of arguments shown of one process.
pub const PROCESS_ARGV_MAX: usize = 1024;
/// Most bytes of one list of processes.
pub const PROCESSES_BYTES_MAX: usize = 384 * 1024;
/// Largest `output_limit`, bytes.
pub const OUTPUT_LIMIT_MAX: u64 = 16 * 1024 * 1024;
/// Longest path, bytes.
pub const PATH_MAX: usize = 4095;
/// Longest name of one path component, bytes.
pub const NAME_MAX: usize = 255;
/// Most entries of one listing.
pub const LIST_ENTRIES_MAX: u32 = 1000;
/// Furthest entry a listing may begin at: the agent holds about as many names while it looks for them.
pub const LIST_OFFSET_MAX: u64 = 1_000_000;
/// Most bytes of names and link targets in one page of a listing, and of paths in one message of a watch.
pub const PAGE_BYTES: usize = 64 * 1024;
/// Most remaining paths a removal names.
pub const REMAINING_NAMED_MAX: usize = 100;
/// Events in one message of a watch.
pub const WATCH_EVENTS_MAX: usize = 256;
/// Directories one watch follows; changes in further ones are reported as overflow.
pub const WATCH_DIRECTORIES_MAX: usize = 8192;
/// Longest host name, bytes.
pub const HOSTNAME_MAX: usize = 64;
/// Most reseed hooks that are run.
pub const HOOKS_MAX: usize = 16;
/// Longest name of a reseed hook, bytes; those with a longer one are not run.
pub const HOOK_NAME_MAX: usize = 64;
/// Longest generation text, bytes.
pub const GENERATION_MAX: usize = 128;
/// Most entropy in one `Configure`, bytes.
pub const ENTROPY_MAX: usize = 512;

// What a broken link can lose: the windows and buffers between agent and host.
const _: () = assert!(STREAM_WINDOW as usize + SEND_BUFFER + 2 * CHUNK_BYTES_MAX < RETAINED_MAX);
const _: () = assert!(PROCESSES_BYTES_MAX + PROCESS_ARGV_MAX + 1024 < RESPONSE_BYTES_MAX);
const _: () = assert!(STDIN_INLINE_MAX + ENV_BYTES_MAX + ARGV_BYTES_MAX < REQUEST_BYTES_MAX);
// The paths that a removal names, as long as paths can be, and a page that ends with the longest entry.
const _: () = assert!(REMAINING_NAMED_MAX * (PATH_MAX + 8) < RESPONSE_BYTES_MAX);
const _: () = assert!(PAGE_BYTES + 2 * (PATH_MAX + NAME_MAX + 64) < RESPONSE_BYTES_MAX);
const _: () =
    assert!(DIAL_WINDOW_FIRST < DIAL_WINDOW && DIAL_CHUNK < REQUEST_BYTES_MAX && DIAL_CHUNK < RESPONSE_BYTES_MAX);
const _: () = assert!(CHUNK_BYTES <= CHUNK_BYTES_MAX && CHUNK_BYTES_MAX * 2 <= RESPONSE_BYTES_MAX);
