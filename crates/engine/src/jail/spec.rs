//! What the service tells the launcher, and what it answers: one JSON message each, over a socket.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Walls to build. A wall that is `true` and cannot be built fails the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Walls {
    /// A user namespace; how the others are had without being root.
    pub user_namespace: bool,
    /// A mount namespace with a root that holds only what is listed.
    pub mount_namespace: bool,
    /// A process namespace.
    pub pid_namespace: bool,
    /// A network namespace without any interface up.
    pub network_namespace: bool,
    /// Own System V IPC and host name.
    pub ipc_uts_namespaces: bool,
    /// Landlock rules.
    pub landlock: bool,
}

impl Walls {
    /// Everything; with a user namespace only where we are not root.
    #[must_use]
    pub fn all(root: bool) -> Self {
        Self {
            user_namespace: !root,
            mount_namespace: true,
            pid_namespace: true,
            network_namespace: true,
            ipc_uts_namespaces: true,
            landlock: true,
        }
    }
}

/// What to run, and in what.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JailSpec {
    /// The program, an absolute path outside the jail that lies under one of `read_only`.
    pub program: PathBuf,
    /// Its arguments, the zeroth included.
    pub argv: Vec<String>,
    /// Walls.
    pub walls: Walls,
    /// User and group id to become; `None`: stay (not root, or a host that does not allow it).
    pub uid: Option<u32>,
    /// Further groups (access to `/dev/kvm`).
    pub groups: Vec<u32>,
    /// Files a process writes `0` to, to join its control groups.
    pub cgroup_join: Vec<PathBuf>,
    /// An empty folder over which the jail's root is mounted, in the jail's own mount namespace only.
    pub scratch: PathBuf,
    /// Folders and files bound read-only at the same path. Those that do not exist are left out.
    pub read_only: Vec<PathBuf>,
    /// Device nodes bound at the same path.
    pub devices: Vec<PathBuf>,
    /// Largest file it may write, bytes.
    pub file_size_max: u64,
    /// Number that a tap made in the new network namespace gets; `None`: no tap.
    #[serde(default)]
    pub tap: Option<i32>,
    /// Numbers the passed descriptors get, in the order they are sent. Output and errors are 1 and 2; 0 is `/dev/null`.
    pub descriptors: Vec<i32>,
}

/// What the launcher says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Said {
    /// The process that will become the VMM exists and waits for [`GO`].
    Started {
        /// Its process id as the service sees it.
        pid: i32,
        /// Its start time (`/proc/PID/stat`, field 22).
        start_time: u64,
    },
    /// A stage failed; nothing runs.
    Failed {
        /// Which.
        stage: String,
        /// `errno`, or 0.
        errno: i32,
        /// More, where there is more to say.
        detail: String,
    },
}

/// The service's word that the process is on record and may become the VMM.
pub(super) const GO: &[u8] = b"go";

/// Longest message of either side, bytes.
pub(super) const MESSAGE_MAX: usize = 128 * 1024;
/// Most descriptors passed.
pub(super) const DESCRIPTORS_MAX: usize = 32;
