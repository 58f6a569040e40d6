//! Every decoder of a guest's bytes in this crate, as a function of bytes that panics when a promise is broken.
//!
//! Fuzz targets (`fuzz/`) call them one by one; here they are all given bytes that look like messages. A decoder that is
//! added to the crate is added to [`DECODERS`].

use crate::machine::{contexts, files, jobs, processes};
use crate::microvm::qmp;

/// A decoder under test.
pub type Decoder = fn(&[u8]);

/// Name of the fuzz target, and what it calls.
pub const DECODERS: &[(&str, Decoder)] = &[
    ("job_event", jobs::pull::any_event),
    ("processes", processes::any_list),
    ("listing", files::list::any_listing),
    ("removal", files::change::any_removal),
    ("watch", files::watch::any_changes),
    ("bridge", contexts::wire::any_lines),
    ("qmp", any_qmp),
];

/// Not the guest's words but its VMM's, which a guest may have taken over.
fn any_qmp(bytes: &[u8]) {
    for line in bytes.split(|b| *b == b'\n') {
        if let Some(qmp::Line::Answer { outcome: Err((_, text)), .. }) = qmp::parse(line) {
            assert!(text.len() <= qmp::ERROR_TEXT_MAX);
        }
    }
}

/// Calls the decoder of this name.
///
/// # Panics
/// When there is none, or when it does not keep its promise.
pub fn call(name: &str, bytes: &[u8]) {
    match DECODERS.iter().find(|(n, _)| *n == name) {
        Some((_, decoder)) => decoder(bytes),
        None => panic!("no decoder is called {name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Bytes that pass for a message more often than noise does, down to messages in messages.
    fn nearly() -> impl Strategy<Value = Vec<u8>> {
        let leaf = prop::collection::vec(any::<u8>(), 0..40);
        let nested = leaf.prop_recursive(3, 64, 8, |inner| {
            prop::collection::vec((1u8..12, 0u8..3, inner, any::<u8>()), 0..8).prop_map(|fields| {
                let mut bytes = Vec::new();
                for (number, kind, inner, small) in fields {
                    match (kind, u8::try_from(inner.len())) {
                        (0, Ok(length)) if length < 128 => {
                            bytes.extend([number << 3 | 2, length]);
                            bytes.extend(inner);
                        }
                        (1, _) => bytes.extend([number << 3, small & 0x7f]),
                        _ => bytes.extend([number << 3 | 2, 2, b'/', small]),
                    }
                }
                bytes
            })
        });
        prop_oneof![prop::collection::vec(any::<u8>(), 0..400), nested]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(3000) })]

        #[test]
        fn no_decoder_breaks_its_promise(bytes in nearly()) {
            for (_, decoder) in DECODERS {
                decoder(&bytes);
            }
        }
    }

    /// What fuzzing has found, and what each decoder is known to take, stays tried.
    #[test]
    fn what_was_found_before_does_no_harm() {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds");
        let mut tried = 0;
        for (name, decoder) in DECODERS {
            for file in std::fs::read_dir(format!("{corpus}/{name}")).unwrap_or_else(|e| panic!("seeds of {name}: {e}"))
            {
                decoder(&std::fs::read(file.expect("an entry").path()).expect("a seed"));
                tried += 1;
            }
        }
        assert!(tried >= DECODERS.len());
    }
}
