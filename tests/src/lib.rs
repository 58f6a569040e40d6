//! Support for the whole-system tests.
