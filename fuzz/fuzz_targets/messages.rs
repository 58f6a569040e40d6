//! Every answer of a guest, as it comes off the link.
#![no_main]
use buffa::{Message as _, MessageView as _};
use mainbrella_guest_protocol::pb;

macro_rules! decode {
    ($bytes:expr, $($message:ident / $view:ident),* $(,)?) => {$(
        if let Ok(view) = pb::$view::decode_view($bytes)
            && let Ok(owned) = view.to_owned_message()
        {
            // What was taken can be said again, and is then the same.
            let again = pb::$message::decode_from_slice(&owned.encode_to_vec()).expect("what was encoded");
            assert_eq!(again, owned);
        }
    )*};
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    decode!(
        bytes,
        HelloResponse / HelloResponseView,
        ConfigureResponse / ConfigureResponseView,
        QuiesceResponse / QuiesceResponseView,
        UsageResponse / UsageResponseView,
        JobStatus / JobStatusView,
        JobEvent / JobEventView,
        ListJobsResponse / ListJobsResponseView,
        SignalJobResponse / SignalJobResponseView,
        WriteJobStdinResponse / WriteJobStdinResponseView,
        ResizeJobResponse / ResizeJobResponseView,
        ForgetJobResponse / ForgetJobResponseView,
        AckJobResponse / AckJobResponseView,
        ListProcessesResponse / ListProcessesResponseView,
        SignalProcessResponse / SignalProcessResponseView,
        WriteFileResponse / WriteFileResponseView,
        FileStat / FileStatView,
        FileChunk / FileChunkView,
        ListDirPage / ListDirPageView,
        RemoveResponse / RemoveResponseView,
        WatchEvents / WatchEventsView,
        TreeChunk / TreeChunkView,
        UnpackTreeResponse / UnpackTreeResponseView,
    );
});
