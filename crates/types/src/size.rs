//! Size classes: how much memory, processor and disk a machine has.

use std::fmt;
use std::str::FromStr;

use crate::IdError;

/// A size class, by name on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SizeClass {
    /// 512 MiB, 1 vCPU, 4 GiB of writable disk.
    Micro,
    /// 1 GiB, 1 vCPU, 8 GiB of writable disk.
    Small,
    /// 2 GiB, 2 vCPUs, 16 GiB of writable disk.
    Medium,
    /// 4 GiB, 4 vCPUs, 32 GiB of writable disk.
    Large,
}

/// What a size class means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeSpec {
    /// Guest memory, MiB.
    pub memory_mib: u32,
    /// Virtual processors.
    pub vcpus: u32,
    /// Writable disk, MiB. Space is taken on the host as it is written.
    pub disk_mib: u32,
}

impl SizeClass {
    /// Every size, smallest first.
    pub const ALL: [Self; 4] = [Self::Micro, Self::Small, Self::Medium, Self::Large];

    /// The wire name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Micro => "micro",
            Self::Small => "small",
            Self::Medium => "medium",
            Self::Large => "large",
        }
    }

    /// What the class means.
    #[must_use]
    pub const fn spec(self) -> SizeSpec {
        match self {
            Self::Micro => SizeSpec { memory_mib: 512, vcpus: 1, disk_mib: 4 * 1024 },
            Self::Small => SizeSpec { memory_mib: 1024, vcpus: 1, disk_mib: 8 * 1024 },
            Self::Medium => SizeSpec { memory_mib: 2048, vcpus: 2, disk_mib: 16 * 1024 },
            Self::Large => SizeSpec { memory_mib: 4096, vcpus: 4, disk_mib: 32 * 1024 },
        }
    }
}

impl fmt::Display for SizeClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for SizeClass {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        Self::ALL.into_iter().find(|c| c.as_str() == s).ok_or(IdError::new("size", "micro, small, medium or large"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_sizes_grow() {
        for c in SizeClass::ALL {
            assert_eq!(c.as_str().parse::<SizeClass>().expect("valid"), c);
        }
        assert!("Small".parse::<SizeClass>().is_err());
        assert!(SizeClass::ALL.windows(2).all(|w| w[0].spec().memory_mib < w[1].spec().memory_mib));
    }
}
