//! The floor: the same QEMU with the same arguments, memory and device state, started with nothing around it. No jail, no
//! control group, no record, no service.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use mainbrella_engine::microvm::command_line::{Start, VmPlan, command_line, descriptors, fd};
use mainbrella_engine::microvm::freeze::Frozen;
use mainbrella_engine::microvm::qmp::Qmp;
use mainbrella_engine::microvm::{folder, qcow2};
use mainbrella_types::Accelerator;
use serde_json::json;
use tokio::net::UnixStream;

use crate::{Fault, guest};

/// Time-out of one call to QEMU.
const CALL: Duration = Duration::from_secs(20);

/// What a bare restore took.
pub struct Bare {
    /// From the start of the process to a machine whose device state is loaded and that runs.
    pub restored: Duration,
    /// To the first answer of the agent in it.
    pub answered: Duration,
    /// From standing still to going on, with its devices' state saved in between.
    pub saved: Duration,
}

/// A QEMU that ends with its owner.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Restores once, in a new folder below `parent`.
pub async fn restore(
    parent: &Path,
    qemu: &Path,
    frozen: &Frozen,
    accelerator: Accelerator,
    sandbox: bool,
) -> Result<Bare, Fault> {
    let dir = tempfile::Builder::new().prefix("bare-").tempdir_in(parent)?;
    let size = frozen.class.spec();
    let memory = frozen.memory().await?;
    let overlay = File::options().read(true).write(true).create_new(true).open(dir.path().join("disk.qcow2"))?;
    qcow2::write_empty(&overlay, u64::from(size.disk_mib) << 20)?;
    let start = Instant::now();
    let agent = folder::listen(dir.path(), folder::AGENT_SOCKET)?;
    let qmp = folder::listen(dir.path(), folder::QMP_SOCKET)?;
    let (root, disk) = frozen.open_disks()?;
    let null = File::options().write(true).open("/dev/null")?;
    let plan = VmPlan {
        name: "mainbrella-bench-bare".to_owned(),
        accelerator,
        memory_mib: size.memory_mib,
        vcpus: size.vcpus,
        start: Start::Restore { layers: 0 },
        sandbox,
        network: true,
    };
    // In a namespace of its own, like a machine's; nothing is attached to it.
    let tap = mainbrella_net::namespace::Namespace::new()?
        .run(|| mainbrella_net::tap::open().map_err(|e| mainbrella_net::NetError::Io("making a tap", e)))?;
    let passed = [
        null.as_fd(),
        null.as_fd(),
        memory.as_fd(),
        agent.as_fd(),
        qmp.as_fd(),
        root.as_fd(),
        disk.as_fd(),
        overlay.as_fd(),
        tap.as_fd(),
    ];
    let numbers = descriptors(&plan.start).into_iter().chain([fd::TAP]);
    let pairs: Vec<(i32, i32)> = passed.iter().map(AsRawFd::as_raw_fd).zip(numbers).collect();
    let mut command = Command::new(qemu);
    command.args(&command_line(&plan)[1..]).stdin(Stdio::null());
    // SAFETY: only system calls, which are allowed between fork and exec, and nothing is allocated.
    unsafe {
        command.pre_exec(move || {
            // A session of its own, as every VMM has: a scheduler that is fair between sessions treats both alike.
            if libc::setsid() < 0 {
                return Err(io::Error::last_os_error());
            }
            // Out of the way first: a target may be the source of another.
            for (from, to) in &pairs {
                if libc::dup2(*from, 500 + to) < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            for (_, to) in &pairs {
                if libc::dup2(500 + to, *to) < 0 || libc::close(500 + to) < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    let running = Running(command.spawn()?);
    let stream = UnixStream::from_std(folder::connect(dir.path(), folder::QMP_SOCKET)?)?;
    let (control, mut events) = Qmp::open(stream, CALL).await?;
    let capabilities = json!({"capabilities": [
        {"capability": "x-ignore-shared", "state": true},
        {"capability": "events", "state": true},
    ]});
    control.call("migrate-set-capabilities", capabilities, CALL).await?;
    let device = frozen.open_device()?;
    control.call_with("getfd", json!({"fdname": "state"}), Some(device.as_fd()), CALL).await?;
    control.call("migrate-incoming", json!({"uri": "fd:state"}), CALL).await?;
    let loaded = async {
        while let Some(event) = events.recv().await {
            match event.data["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("failed") => return Err(Fault::from("the bare QEMU could not load the device state")),
                _ => {}
            }
        }
        Err(Fault::from("the bare QEMU ended"))
    };
    tokio::time::timeout(CALL, loaded).await.map_err(|_| "the bare QEMU does not load the device state")??;
    control.call("cont", json!({}), CALL).await?;
    let restored = start.elapsed();
    let client =
        guest::attach_stream(UnixStream::from_std(folder::connect(dir.path(), folder::AGENT_SOCKET)?)?).await?;
    let answered = start.elapsed();
    client.close();
    let state = File::create(dir.path().join("device"))?;
    let start = Instant::now();
    control.call("stop", json!({}), CALL).await?;
    let added = control.call_with("add-fd", json!({}), Some(state.as_fd()), CALL).await?;
    let set = added["fdset-id"].as_u64().ok_or("the bare QEMU took no descriptor")?;
    let to = json!({"filename": format!("/dev/fdset/{set}"), "live": false});
    control.call("xen-save-devices-state", to, CALL).await?;
    control.call("cont", json!({}), CALL).await?;
    let saved = start.elapsed();
    drop(running);
    Ok(Bare { restored, answered, saved })
}
