#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| mainbrella_engine::fuzzing::call("processes", bytes));
