//! What comes before the link: the same record is found however the bytes are cut.
#![no_main]
use mainbrella_guest_protocol::link::Scanner;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let found = |pieces: usize| {
        let (mut scanner, mut at) = (Scanner::new(), 0);
        for piece in bytes.chunks(pieces) {
            let mut input = piece;
            if let Some(record) = scanner.advance(&mut input) {
                return Some((record, at + piece.len() - input.len()));
            }
            at += piece.len();
        }
        None
    };
    let whole = found(bytes.len().max(1));
    assert_eq!(whole, found(1));
    assert_eq!(whole, found(7));
});
