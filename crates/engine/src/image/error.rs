//! What can go wrong while a guest image is made. Each says in one plain sentence what to do.

use std::io;

/// A failure while making, finding or removing a guest image.
///
/// The text is for the operator at the command line; [`ImageError::detail`] holds the last lines the
/// failing program wrote.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// A program this host needs is not installed.
    #[error("`{tool}` is not installed; run `apt install {package}` and try again")]
    MissingTool {
        /// The program (or file) that was looked for.
        tool: &'static str,
        /// The Debian package that has it.
        package: &'static str,
    },
    /// The host's package sources name no Debian archive.
    #[error(
        "no Debian archive was found in this host's apt sources; add one that serves `main`, or name a mirror in the settings"
    )]
    NoMirror,
    /// The mirror could not be reached.
    #[error("the Debian mirror could not be reached; check this host's network, DNS and apt proxy, then try again")]
    Network {
        /// What the program said.
        detail: String,
    },
    /// The mirror answers, but does not have what is needed.
    #[error(
        "the Debian mirror of this host does not serve what is needed; use a mirror that carries Debian 13 (trixie)"
    )]
    MirrorLacks {
        /// What the program said.
        detail: String,
    },
    /// The archive's signature or a checksum did not match.
    #[error(
        "the Debian archive's signature could not be verified and nothing of it was used; \
         update `debian-archive-keyring`, check this host's clock, or use another mirror"
    )]
    Signature {
        /// What the program said.
        detail: String,
    },
    /// No space left.
    #[error("the disk is full; free at least 3 GB in the data directory and try again")]
    DiskFull,
    /// Neither root nor unprivileged user namespaces.
    #[error(
        "this user may not build images; run as root, or `apt install uidmap`, give the user a range in /etc/subuid and \
         /etc/subgid, and allow unprivileged user namespaces"
    )]
    NotAllowed {
        /// What the program said.
        detail: String,
    },
    /// A program took too long and was stopped.
    #[error(
        "`{tool}` was stopped after {seconds} seconds without finishing; check the network and the disk, then try again"
    )]
    TimedOut {
        /// The program.
        tool: String,
        /// The time limit.
        seconds: u64,
        /// The last lines it wrote.
        detail: String,
    },
    /// The caller asked to stop.
    #[error("the build was cancelled and its half-made files were removed")]
    Cancelled,
    /// A program failed in a way not known here.
    #[error("`{tool}` failed; the lines it wrote last say why")]
    Tool {
        /// The program.
        tool: String,
        /// The last lines it wrote.
        detail: String,
    },
    /// There is no recipe of that name.
    #[error("there is no recipe `{name}`; known are: {known}")]
    UnknownRecipe {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// A template that is made of an image may not be called so.
    #[error("`{0}` is the name of a template of another kind; give this one another name")]
    NameTaken(String),
    /// What is not built from a recipe has no versions.
    #[error("`{0}` names a version or tag; give the template a name without one")]
    Labelled(String),
    /// Numbers of versions are given, not chosen.
    #[error("`{0}` names a version; give a tag that is not `v` and a number")]
    Numbered(String),
    /// A tag still means it.
    #[error("`{name}` is what {tags} means; move or remove the tag first")]
    Tagged {
        /// The version.
        name: String,
        /// The tags.
        tags: String,
    },
    /// There are as many as there may be.
    #[error("there are {max} {what} already; remove some first")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many.
        max: usize,
    },
    /// Only root can lay out an image.
    #[error("this user may not make templates of images; run as root")]
    NotRoot,
    /// The image of a container could not be had, or is not one that can be used.
    #[error(transparent)]
    Image(mainbrella_oci::OciError),
    /// A recipe breaks a rule.
    #[error("recipe `{name}` is not valid: {problem}")]
    BadRecipe {
        /// The recipe.
        name: String,
        /// The rule it breaks.
        problem: String,
    },
    /// The template is not built.
    #[error("template `{0}` is not built on this host; run `mainbrella template build {0}`")]
    NotBuilt(String),
    /// Something has not the form it must have.
    #[error("{what}; report this with the version of Mainbrella and of the package")]
    Malformed {
        /// What is wrong with what.
        what: String,
    },
    /// The agent cannot be the first process of a machine.
    #[error("the guest agent at `{path}` cannot be used: {problem}")]
    BadAgent {
        /// Where it was looked for.
        path: String,
        /// Why not.
        problem: &'static str,
    },
    /// A build that died left something mounted.
    #[error("`{place}` is still mounted by a build that died; run `umount {place}` and try again")]
    LeftMount {
        /// The mount point.
        place: String,
    },
    /// An operating-system call failed.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: String,
        /// The cause.
        source: io::Error,
    },
}

impl ImageError {
    /// An I/O failure while doing `what`; a full disk becomes [`Self::DiskFull`].
    pub fn io(what: impl Into<String>, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull,
            _ => Self::Io { what: what.into(), source },
        }
    }

    pub(super) fn malformed(what: impl Into<String>) -> Self {
        Self::Malformed { what: what.into() }
    }

    /// The last lines of the program that failed, if one did.
    #[must_use]
    pub fn detail(&self) -> Option<&str> {
        match self {
            Self::Network { detail }
            | Self::MirrorLacks { detail }
            | Self::Signature { detail }
            | Self::NotAllowed { detail }
            | Self::TimedOut { detail, .. }
            | Self::Tool { detail, .. } => Some(detail),
            Self::Image(mainbrella_oci::OciError::Unreachable { detail, .. }) => Some(detail),
            _ => None,
        }
    }

    /// Tells from what `tool` wrote last (`detail`, in the C locale) what went wrong.
    pub(super) fn from_output(tool: &str, detail: String) -> Self {
        let says = |needles: &[&str]| needles.iter().any(|n| detail.contains(n));
        if says(&["No space left on device", "not enough free space", "Disk quota exceeded"]) {
            Self::DiskFull
        } else if says(&[
            "NO_PUBKEY",
            "BADSIG",
            "EXPKEYSIG",
            "REVKEYSIG",
            "is not signed",
            "not signed by",
            "invalid signature",
            "signatures couldn't be verified",
            "signatures were invalid",
            "OpenPGP signature verification failed",
            "Hash Sum mismatch",
            "is expired (invalid since",
            "is not valid yet",
        ]) {
            Self::Signature { detail }
        } else if says(&["404  Not Found", "404 Not Found", "does not have a Release file", "Unable to locate package"])
        {
            Self::MirrorLacks { detail }
        } else if says(&[
            "Could not resolve",
            "Temporary failure resolving",
            "Could not connect",
            "Unable to connect",
            "Cannot initiate the connection",
            "Connection failed",
            "Connection timed out",
            "Connection refused",
            "Network is unreachable",
            "Failed to fetch",
            "Some index files failed to download",
        ]) {
            Self::Network { detail }
        } else if says(&[
            "newuidmap",
            "/etc/subuid",
            "unshare failed",
            "unprivileged_userns_clone",
            "unable to use unshare",
            "unshare syscall failed",
        ]) {
            Self::NotAllowed { detail }
        } else {
            Self::Tool { tool: tool.to_owned(), detail }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(text: &str) -> &'static str {
        match ImageError::from_output("apt-get", text.to_owned()) {
            ImageError::DiskFull => "disk",
            ImageError::Signature { .. } => "signature",
            ImageError::MirrorLacks { .. } => "lacks",
            ImageError::Network { .. } => "network",
            ImageError::NotAllowed { .. } => "rights",
            ImageError::Tool { .. } => "tool",
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_programs_write_is_told_apart() {
        for (text, want) in [
            ("dpkg: error: cannot copy: No space left on device", "disk"),
            (
                "W: GPG error: http://m/debian trixie InRelease: NO_PUBKEY 0E98404D386FA1D9\nE: Failed to fetch",
                "signature",
            ),
            ("E: Release file for http://m is expired (invalid since 3d). Updates will not be applied.", "signature"),
            ("E: The repository 'http://m trixie Release' does not have a Release file.", "lacks"),
            ("E: Failed to fetch http://m/x  404  Not Found [IP: 10.0.0.1 80]", "lacks"),
            ("Err:1 http://m trixie InRelease\n  Temporary failure resolving 'm'", "network"),
            ("E: cannot find entry for user in /etc/subuid", "rights"),
            ("Segmentation fault", "tool"),
        ] {
            assert_eq!(kind(text), want, "{text}");
        }
    }

    #[test]
    fn a_full_disk_is_recognised_from_the_system_call_too() {
        let e = ImageError::io("writing", io::Error::from_raw_os_error(libc::ENOSPC));
        assert!(matches!(e, ImageError::DiskFull), "{e:?}");
    }
}
