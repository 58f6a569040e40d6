//! The `mainbrella` command.
fn main() {}
