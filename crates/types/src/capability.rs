//! What a driver can really do on this host. Derived from probes, never declared by hand.

use crate::egress::EgressPolicy;

/// How strongly a machine is separated from the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isolation {
    /// Own kernel behind hardware virtualisation.
    Hardware,
    /// Own kernel under software emulation; the jail around the VMM is the boundary.
    Emulated,
    /// System calls served by an application kernel.
    ApplicationKernel,
    /// The host's kernel.
    SharedKernel,
}

impl Isolation {
    /// The wire name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hardware => "hardware",
            Self::Emulated => "emulated",
            Self::ApplicationKernel => "application-kernel",
            Self::SharedKernel => "shared-kernel",
        }
    }
}

/// What executes guest instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accelerator {
    /// The processor, through KVM.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

impl Accelerator {
    /// The name QEMU and our flags use.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

/// Which walls of the jail stand around a VMM on this host. Each was observed, not assumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct JailReport {
    /// A user id of its own that owns nothing else.
    pub own_uid: bool,
    /// `no_new_privs` and no capabilities.
    pub no_new_privs: bool,
    /// QEMU's seccomp sandbox.
    pub seccomp: bool,
    /// A mount namespace that holds only its own files.
    pub mount_namespace: bool,
    /// A process namespace of its own.
    pub pid_namespace: bool,
    /// A network namespace of its own.
    pub network_namespace: bool,
    /// Landlock rules on what may be opened.
    pub landlock: bool,
    /// A cgroup memory limit.
    pub memory_limit: bool,
    /// A cgroup processor limit.
    pub cpu_limit: bool,
    /// A cgroup limit on tasks.
    pub pids_limit: bool,
}

impl DriverReport {
    /// Whether this driver on this host can enforce `policy`.
    ///
    /// # Errors
    /// Why not, in one sentence that may be told.
    pub fn enforces(&self, policy: &EgressPolicy) -> Result<(), &'static str> {
        match policy {
            EgressPolicy::Open if !self.internet => Err("this host cannot give machines a way to the internet"),
            EgressPolicy::AllowList(_) if !self.allow_list => Err("this host cannot keep machines to an allow-list"),
            EgressPolicy::Off if !self.internet_off => Err("this host cannot keep machines off the internet"),
            _ => Ok(()),
        }
    }
}

/// What a driver says of itself after its probes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverReport {
    /// Driver name: `microvm`, `fake`.
    pub driver: &'static str,
    /// The accelerator in use; `None` for drivers without one.
    pub accelerator: Option<Accelerator>,
    /// One sentence on why this accelerator was chosen.
    pub accelerator_reason: String,
    /// Separation from the host.
    pub isolation: Isolation,
    /// The jail.
    pub jail: JailReport,
    /// The VMM and its version, e.g. `QEMU 7.2.22`.
    pub vmm: String,
    /// Whether machines can be given a way to the internet.
    pub internet: bool,
    /// Whether machines can be kept to an allow-list.
    pub allow_list: bool,
    /// Whether the driver can enforce that a machine has none.
    pub internet_off: bool,
    /// Whether memory and disk can be captured and brought back.
    pub memory_snapshot: bool,
    /// Whether a running machine can be forked.
    pub fork: bool,
}
