//! A tree that a guest packed, unpacked on this side: nothing outside of the folder is touched.
#![no_main]
use std::cell::RefCell;
use std::os::fd::OwnedFd;

use mainbrella_tree::{Owners, UnpackOptions, Unpacker};

thread_local! {
    static OUTSIDE: RefCell<Option<tempfile::TempDir>> = const { RefCell::new(None) };
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    OUTSIDE.with_borrow_mut(|kept| {
        let outside = kept.get_or_insert_with(|| {
            let outside = tempfile::tempdir().expect("a folder");
            std::fs::write(outside.path().join("witness"), "untouched").expect("a witness");
            outside
        });
        let inside = outside.path().join("inside");
        std::fs::create_dir(&inside).expect("a folder");
        let root = OwnedFd::from(std::fs::File::open(&inside).expect("opened"));
        let mut unpacker = Unpacker::new(root, UnpackOptions { owners: Owners::Unpacker, mode_mask: 0o777, own_root: false });
        let (first, second) = bytes.split_at(bytes.len() / 2);
        if unpacker.push(first).and_then(|()| unpacker.push(second)).is_ok() {
            let _ = unpacker.finish();
        }
        let names: Vec<_> =
            std::fs::read_dir(outside.path()).expect("read").map(|e| e.expect("an entry").file_name()).collect();
        assert_eq!(names.len(), 2, "{names:?}");
        assert_eq!(std::fs::read(outside.path().join("witness")).expect("a witness"), b"untouched");
        std::fs::remove_dir_all(&inside).expect("removed");
    });
});
