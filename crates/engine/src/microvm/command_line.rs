//! From a plan to QEMU's arguments: a pure function.
//!
//! QEMU opens nothing by path. Every file and socket is a descriptor with a fixed number ([`fd`]), so the arguments of
//! all machines of one template size are the same but for the name.

use mainbrella_types::Accelerator;

/// Descriptor numbers in the VMM.
pub mod fd {
    /// Standard output (the log).
    pub const OUT: i32 = 1;
    /// Standard error (the log).
    pub const ERR: i32 = 2;
    /// Guest memory.
    pub const MEMORY: i32 = 3;
    /// Listening socket of the agent port.
    pub const AGENT: i32 = 4;
    /// Listening socket of the control channel.
    pub const QMP: i32 = 5;
    /// Root image, read-only.
    pub const ROOT: i32 = 6;
    /// Data disk: written directly when cold, else the read-only base.
    pub const DATA: i32 = 7;
    /// The machine's own overlay of the data disk.
    pub const OVERLAY: i32 = 8;
    /// Kernel (cold only).
    pub const KERNEL: i32 = 9;
    /// Initramfs (cold only).
    pub const INITRD: i32 = 10;
    /// The tap, made by the launcher.
    pub const TAP: i32 = 11;
    /// The first of the former overlays that are read below the machine's own, the oldest first.
    pub const LAYERS: i32 = 12;
}

/// Most former overlays below a machine's own. Every one of them is a look-up more for what a disk was not written since.
pub const LAYERS_MAX: usize = 8;

/// Size of the translator's code cache under software emulation, MiB: what it once filled is not given back. QEMU's own
/// default is up to 1 GiB a machine; docs/decisions/008 has the trials.
pub const TRANSLATION_CACHE_MIB: u32 = 64;
/// The processor under software emulation: all that can be emulated but fast string moves. Told of those, a guest copies and
/// clears memory byte by byte, and every byte is a round of the emulator; else it moves words (docs/decisions/008).
const EMULATED_PROCESSOR: &str = "max,-erms";
/// Bytes of guest console kept, a power of two. The oldest are overwritten: a guest cannot fill anything with it.
pub const CONSOLE_BYTES: u32 = 64 * 1024;

/// How the machine comes to life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// From the kernel; memory is shared so that it can be kept.
    Cold {
        /// Kernel command line.
        kernel_arguments: String,
    },
    /// From saved device state that arrives over the control channel; memory is private.
    Restore {
        /// Former overlays below its own, at most [`LAYERS_MAX`].
        layers: usize,
    },
}

/// When a guest mounts its data disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GuestDisk {
    /// As it boots: its memory knows the file system from then on, and no other disk may take its place.
    AtBoot,
    /// When it is told who it is: any disk of the same size will do until then.
    Later,
}

/// How the guest agent is asked for [`GuestDisk::Later`].
const DISK_LATER: &str = "mainbrella.disk=later";

/// Which of them the kernel's command line asks for.
#[must_use]
pub fn guest_disk(kernel_arguments: &str) -> GuestDisk {
    let later = kernel_arguments.split_ascii_whitespace().any(|word| word == DISK_LATER);
    if later { GuestDisk::Later } else { GuestDisk::AtBoot }
}

/// All that shapes a VMM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmPlan {
    /// Name in the process list.
    pub name: String,
    /// Accelerator.
    pub accelerator: Accelerator,
    /// Memory, MiB.
    pub memory_mib: u32,
    /// Virtual processors.
    pub vcpus: u32,
    /// How it comes to life.
    pub start: Start,
    /// Whether QEMU's seccomp sandbox is asked for.
    pub sandbox: bool,
    /// Whether it has a network card.
    pub network: bool,
}

/// The kernel command line of a cold boot. `tsc_khz`: frequency of the host's time stamp counter; without it and under
/// load, calibration against the emulated timer fails and about half of all emulated boots hang.
///
/// An emulated guest reads the host's counter, which is always right. Its kernel must not judge it by the timer ticks that
/// arrive: on a busy host they are late, the counter would be found wrong, and time would be counted in ticks from then on,
/// slow by as much as the host is busy, in every machine of the template.
///
/// `disk`: whether the guest mounts the data disk as it boots.
#[must_use]
pub fn kernel_arguments(tsc_khz: Option<u32>, disk: GuestDisk) -> String {
    let mut text =
        String::from("console=ttyS0 quiet loglevel=4 reboot=t panic=-1 random.trust_cpu=on nowatchdog psi=0");
    if let Some(khz) = tsc_khz {
        text.push_str(&format!(" no_timer_check tsc=reliable tsc_early_khz={khz}"));
    }
    if disk == GuestDisk::Later {
        text.push(' ');
        text.push_str(DISK_LATER);
    }
    text
}

/// QEMU's arguments, the program's name first.
#[must_use]
pub fn command_line(plan: &VmPlan) -> Vec<String> {
    let cold = matches!(plan.start, Start::Cold { .. });
    let (accelerator, cpu) = match plan.accelerator {
        Accelerator::Kvm => ("kvm".to_owned(), "host"),
        Accelerator::Tcg => (format!("tcg,tb-size={TRANSLATION_CACHE_MIB}"), EMULATED_PROCESSOR),
    };
    let mut a = Arguments(vec!["qemu-system-x86_64".to_owned()]);
    a.pair("-name", plan.name.clone());
    a.pair("-machine", "microvm,rtc=on,memory-backend=m,suppress-vmdesc=on");
    a.pair("-accel", accelerator);
    a.pair("-cpu", cpu);
    a.pair("-m", plan.memory_mib.to_string());
    a.pair("-smp", plan.vcpus.to_string());
    a.pair(
        "-object",
        format!(
            "memory-backend-file,id=m,size={}M,mem-path=/proc/self/fd/{},share={}",
            plan.memory_mib,
            fd::MEMORY,
            if cold { "on" } else { "off" }
        ),
    );
    a.flag("-nodefaults");
    a.flag("-no-user-config");
    a.flag("-no-reboot");
    a.pair("-display", "none");
    // A guest that ends leaves its VMM behind, stopped, so that even a service that was away learns how it ended.
    a.pair("-action", "reboot=shutdown,shutdown=pause,panic=pause");
    a.pair("-global", "migration.send-configuration=off");
    a.pair("-chardev", format!("ringbuf,id=console,size={CONSOLE_BYTES}"));
    a.pair("-serial", "chardev:console");

    a.pair("-add-fd", format!("fd={},set=1", fd::ROOT));
    a.pair("-blockdev", "driver=file,node-name=root-file,filename=/dev/fdset/1,read-only=on,auto-read-only=off");
    a.pair("-blockdev", "driver=raw,node-name=root,file=root-file,read-only=on");
    a.pair("-device", "virtio-blk-device,drive=root,serial=root");
    a.pair("-add-fd", format!("fd={},set=2", fd::DATA));
    match plan.start {
        Start::Cold { .. } => {
            a.pair("-blockdev", "driver=file,node-name=data-file,filename=/dev/fdset/2,discard=unmap");
            a.pair("-blockdev", "driver=raw,node-name=data,file=data-file,discard=unmap");
        }
        Start::Restore { layers } => {
            a.pair("-add-fd", format!("fd={},set=3", fd::OVERLAY));
            a.pair(
                "-blockdev",
                "driver=file,node-name=base-file,filename=/dev/fdset/2,read-only=on,auto-read-only=off",
            );
            a.pair("-blockdev", "driver=raw,node-name=base,file=base-file,read-only=on");
            let mut below = "base".to_owned();
            for (n, fd) in (0..layers).zip(fd::LAYERS..) {
                a.pair("-add-fd", format!("fd={fd},set={fd}"));
                a.pair(
                    "-blockdev",
                    format!(
                        "driver=file,node-name=layer-file-{n},filename=/dev/fdset/{fd},read-only=on,auto-read-only=off"
                    ),
                );
                let layer = format!("layer-{n}");
                a.pair(
                    "-blockdev",
                    format!("driver=qcow2,node-name={layer},file=layer-file-{n},backing={below},read-only=on"),
                );
                below = layer;
            }
            a.pair("-blockdev", "driver=file,node-name=data-file,filename=/dev/fdset/3,discard=unmap");
            a.pair("-blockdev", format!("driver=qcow2,node-name=data,file=data-file,backing={below},discard=unmap"));
        }
    }
    // A full host stops the machine instead of telling the guest of a broken disk; the service lets it go on when there is space.
    a.pair("-device", "virtio-blk-device,drive=data,serial=data,werror=enospc,rerror=report");
    a.pair("-device", "virtio-serial-device");
    a.pair("-chardev", format!("socket,id=agent,fd={},server=on,wait=off", fd::AGENT));
    a.pair("-device", "virtserialport,chardev=agent,name=agent");
    a.pair("-device", "virtio-rng-device");
    if plan.network {
        let mac = mainbrella_net::tap::GUEST_MAC.map(|b| format!("{b:02x}")).join(":");
        a.pair("-netdev", format!("tap,id=net,fd={},vhost=off", fd::TAP));
        a.pair("-device", format!("virtio-net-device,netdev=net,mac={mac}"));
    }
    a.pair("-chardev", format!("socket,id=qmp,fd={},server=on,wait=off", fd::QMP));
    a.pair("-mon", "chardev=qmp,mode=control");
    match &plan.start {
        Start::Cold { kernel_arguments } => {
            a.pair("-kernel", format!("/proc/self/fd/{}", fd::KERNEL));
            a.pair("-initrd", format!("/proc/self/fd/{}", fd::INITRD));
            a.pair("-append", kernel_arguments.clone());
        }
        Start::Restore { .. } => {
            a.pair("-incoming", "defer");
            a.flag("-S");
        }
    }
    if plan.sandbox {
        a.pair("-sandbox", SANDBOX);
    }
    a.0
}

/// QEMU's own seccomp filter, at its strictest.
pub const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// Numbers of the descriptors a plan needs, in the order in which [`super::vmm`] passes them.
#[must_use]
pub fn descriptors(start: &Start) -> Vec<i32> {
    let mut numbers = vec![fd::OUT, fd::ERR, fd::MEMORY, fd::AGENT, fd::QMP, fd::ROOT, fd::DATA];
    match start {
        Start::Cold { .. } => numbers.extend([fd::KERNEL, fd::INITRD]),
        Start::Restore { layers } => {
            numbers.push(fd::OVERLAY);
            numbers.extend((0..*layers).zip(fd::LAYERS..).map(|(_, fd)| fd));
        }
    }
    numbers
}

struct Arguments(Vec<String>);

impl Arguments {
    fn flag(&mut self, name: &str) {
        self.0.push(name.to_owned());
    }

    fn pair(&mut self, name: &str, value: impl Into<String>) {
        self.0.push(name.to_owned());
        self.0.push(value.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(start: Start) -> VmPlan {
        VmPlan {
            name: "mainbrella-k".into(),
            accelerator: Accelerator::Tcg,
            memory_mib: 512,
            vcpus: 1,
            start,
            sandbox: true,
            network: true,
        }
    }

    fn text(p: &VmPlan) -> String {
        command_line(p).join(" ").replace(" -", "\n-")
    }

    #[test]
    fn a_restore_is_exactly_this() {
        assert_eq!(text(&plan(Start::Restore { layers: 0 })), include_str!("testdata/restore.args").trim_end());
    }

    #[test]
    fn former_overlays_are_read_below_the_machines_own_the_oldest_lowest() {
        let t = text(&plan(Start::Restore { layers: 2 }));
        let below: Vec<&str> = t.lines().filter(|l| l.contains("backing=")).collect();
        assert_eq!(
            below,
            [
                "-blockdev driver=qcow2,node-name=layer-0,file=layer-file-0,backing=base,read-only=on",
                "-blockdev driver=qcow2,node-name=layer-1,file=layer-file-1,backing=layer-0,read-only=on",
                "-blockdev driver=qcow2,node-name=data,file=data-file,backing=layer-1,discard=unmap",
            ]
        );
    }

    #[test]
    fn a_cold_boot_is_exactly_this() {
        let start = Start::Cold { kernel_arguments: kernel_arguments(Some(2_600_000), GuestDisk::AtBoot) };
        assert_eq!(text(&plan(start)), include_str!("testdata/cold.args").trim_end());
    }

    #[test]
    fn kvm_uses_the_hosts_processor_and_no_clock_hint() {
        let p = VmPlan {
            accelerator: Accelerator::Kvm,
            ..plan(Start::Cold { kernel_arguments: kernel_arguments(None, GuestDisk::AtBoot) })
        };
        let t = text(&p);
        assert!(t.contains("\n-accel kvm\n-cpu host\n") && !t.contains("tsc"), "{t}");
    }

    #[test]
    fn every_descriptor_named_in_the_arguments_is_passed_and_no_other() {
        let restores = [0, 1, LAYERS_MAX].map(|layers| Start::Restore { layers });
        for start in restores.into_iter().chain([Start::Cold { kernel_arguments: String::new() }]) {
            let t = text(&plan(start.clone()));
            for n in (3..=10).chain(fd::LAYERS..fd::LAYERS + LAYERS_MAX as i32) {
                let named = [format!("fd={n},"), format!("/fd/{n},"), format!("/fd/{n}\n")]
                    .iter()
                    .any(|s| t.contains(s.as_str()));
                assert_eq!(named, descriptors(&start).contains(&n), "descriptor {n} in {t}");
            }
        }
    }
}
