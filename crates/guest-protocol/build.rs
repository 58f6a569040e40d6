//! Generates the messages and service stubs of `proto/guest.proto`, with a protobuf compiler written
//! in Rust: no `protoc` is needed on the machine.

use std::path::PathBuf;

fn main() {
    println!("cargo::rerun-if-changed=proto/guest.proto");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("guest.binpb");
    let mut compiler = protox::Compiler::new(["proto"]).expect("the include folder is there");
    compiler
        .include_imports(true)
        .include_source_info(true)
        .open_file("guest.proto")
        .expect("proto/guest.proto is valid");
    std::fs::write(&out, compiler.encode_file_descriptor_set()).expect("OUT_DIR is writable");
    connectrpc_build::Config::new()
        .files(&["guest.proto"])
        .descriptor_set(out)
        .include_file("_connectrpc.rs")
        .generate_json(false)
        // It would watch the descriptors, which are written by this very run and so always look changed.
        .emit_rerun_directives(false)
        .compile()
        .expect("the descriptors of proto/guest.proto give code");
}
