//! Arbitrary bytes in the place of everything a guest may send: no decoder panics, and none makes much of little.

use buffa::MessageView as _;
use connectrpc::{ConnectError, ErrorCode};
use mainbrella_guest_protocol::link::{Kind, NONCE_LEN, Record, Scanner};
use mainbrella_guest_protocol::{GuestError, pb};
use proptest::prelude::*;

/// Bytes that look like a message more often than noise does: keys of low fields with lengths that nearly fit.
fn nearly() -> impl Strategy<Value = Vec<u8>> {
    let field =
        (1u8..12, 0u8..6, prop::collection::vec(any::<u8>(), 0..40), -2i32..3).prop_map(|(number, kind, data, off)| {
            let mut bytes = vec![number << 3 | kind];
            if kind == 2 {
                bytes.push(u8::try_from((data.len() as i32 + off).max(0)).unwrap());
            }
            bytes.extend(data);
            bytes
        });
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..400),
        prop::collection::vec(field, 0..12).prop_map(|fields| fields.concat()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn no_answer_of_a_guest_does_harm(bytes in nearly()) {
        let _ = pb::HelloResponseView::decode_view(&bytes);
        let _ = pb::ConfigureResponseView::decode_view(&bytes);
        let _ = pb::QuiesceResponseView::decode_view(&bytes);
        let _ = pb::UsageResponseView::decode_view(&bytes);
        let _ = pb::JobStatusView::decode_view(&bytes);
        let _ = pb::SignalJobResponseView::decode_view(&bytes);
        let _ = pb::WriteJobStdinResponseView::decode_view(&bytes);
        let _ = pb::ResizeJobResponseView::decode_view(&bytes);
        let _ = pb::ForgetJobResponseView::decode_view(&bytes);
        let _ = pb::AckJobResponseView::decode_view(&bytes);
        let _ = pb::SignalProcessResponseView::decode_view(&bytes);
        let _ = pb::WriteFileResponseView::decode_view(&bytes);
        let _ = pb::FileStatView::decode_view(&bytes);
        if let Ok(answer) = pb::DialResponseView::decode_view(&bytes) {
            prop_assert!(answer.data.len() <= bytes.len());
        }
        if let Ok(chunk) = pb::FileChunkView::decode_view(&bytes) {
            prop_assert!(chunk.data.len() <= bytes.len());
        }
        if let Ok(event) = pb::JobEventView::decode_view(&bytes) {
            let _ = event.to_owned_message();
        }
        if let Ok(list) = pb::ListJobsResponseView::decode_view(&bytes) {
            prop_assert!(list.jobs.len() <= bytes.len());
        }
        if let Ok(list) = pb::ListProcessesResponseView::decode_view(&bytes) {
            prop_assert!(list.processes.iter().map(|p| p.argv.len() + 1).sum::<usize>() <= bytes.len());
        }
    }

    #[test]
    fn the_preamble_is_found_behind_anything_and_nothing_is_taken_for_it(
        noise in prop::collection::vec(any::<u8>(), 0..300), cut in 0usize..24, pieces in 1usize..50, nonce in any::<[u8; NONCE_LEN]>(),
    ) {
        let record = Record { kind: Kind::Welcome, nonce };
        let whole = record.encode();
        // Noise, a record that was cut short, more noise, a whole record.
        let mut bytes = noise.clone();
        bytes.extend(&whole[..cut]);
        bytes.extend(&noise);
        let mut scanner = Scanner::new();
        for part in bytes.chunks(pieces) {
            let mut input = part;
            prop_assert_eq!(scanner.advance(&mut input), None);
            prop_assert!(input.is_empty());
        }
        bytes.extend(whole);
        let mut scanner = Scanner::new();
        let mut found = None;
        for part in bytes.chunks(pieces) {
            let mut input = part;
            found = found.or(scanner.advance(&mut input));
        }
        prop_assert_eq!(found, Some(record));
    }

    #[test]
    fn a_failure_a_guest_tells_of_is_bounded_text(message in ".{0,900}") {
        let fault = GuestError::from_connect(&ConnectError::new(ErrorCode::Internal, message));
        prop_assert!(fault.message.chars().count() <= 512 && fault.stage.len() <= 32 && (0..4096).contains(&fault.errno));
    }
}
