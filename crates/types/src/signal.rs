//! Names of signals, as Linux on x86-64 numbers them.

use std::str::FromStr;

use crate::IdError;

const NAMES: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM", "TERM",
    "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO",
    "PWR", "SYS",
];

/// A signal, 1 to 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Signal(i32);

impl Signal {
    /// The signal of this number.
    ///
    /// # Errors
    /// When there is none.
    pub fn new(number: i64) -> Result<Self, IdError> {
        match i32::try_from(number) {
            Ok(n @ 1..=64) => Ok(Self(n)),
            _ => Err(Self::unknown()),
        }
    }

    const fn unknown() -> IdError {
        IdError::new("signal", "1 to 64, or a name such as TERM or SIGUSR1")
    }

    /// Its number.
    #[must_use]
    pub const fn number(self) -> i32 {
        self.0
    }

    /// Its name without `SIG`; real-time signals have none here.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        NAMES.get(usize::try_from(self.0 - 1).ok()?).copied()
    }
}

impl FromStr for Signal {
    type Err = IdError;

    /// Accepts a number, or a name with or without `SIG`, in capitals or not.
    fn from_str(text: &str) -> Result<Self, IdError> {
        if let Ok(number) = text.parse::<i64>() {
            return Self::new(number);
        }
        let upper = text.to_ascii_uppercase();
        let bare = upper.strip_prefix("SIG").unwrap_or(&upper);
        let found = NAMES.iter().position(|name| *name == bare);
        found.and_then(|at| i32::try_from(at + 1).ok()).map(Self).ok_or(Self::unknown())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_those_of_the_kernel() {
        for (text, number) in [
            ("SIGUSR1", 10),
            ("usr1", 10),
            ("10", 10),
            ("TERM", 15),
            ("SIGKILL", 9),
            ("WINCH", 28),
            ("64", 64),
            ("SYS", 31),
        ] {
            assert_eq!(text.parse::<Signal>().map(Signal::number), Ok(number), "{text}");
        }
        for bad in ["", "0", "65", "-9", "SIG", "SIGSIGTERM", "TERMINATE", "9 "] {
            assert!(bad.parse::<Signal>().is_err(), "{bad}");
        }
        for number in 1..=31 {
            let signal = Signal::new(number).expect("valid");
            assert_eq!(signal.name().and_then(|n| n.parse().ok()), Some(signal));
        }
    }
}
