//! The processes of a machine, as its guest tells of them. Nothing of it is believed beyond its bounds.

use mainbrella_guest_protocol::limits::{PROCESS_ARGV_MAX, PROCESSES_MAX};
use mainbrella_guest_protocol::{GuestError, pb};
use mainbrella_types::ErrorCode;

use crate::error::EngineError;
use crate::machine::command::reason;
use crate::machine::handle::MachineHandle;
use crate::machine::link::silent;

/// A process of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Its parent.
    pub ppid: u32,
    /// Whose it is.
    pub uid: u32,
    /// One letter: R runs, S sleeps, D waits for a device, T is stopped, Z has ended.
    pub state: char,
    /// The name the kernel knows, at most 15 bytes; bytes that are not UTF-8 are replaced.
    pub command: String,
    /// Its arguments, shortened where they are long.
    pub argv: Vec<String>,
    /// When it began, milliseconds since the epoch.
    pub started_at_ms: i64,
    /// Processor time, milliseconds.
    pub cpu_time_ms: u64,
    /// Memory in use, bytes.
    pub rss_bytes: u64,
    /// The job in whose session it is.
    pub job_id: Option<String>,
}

/// Processes, by number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessList {
    /// The processes.
    pub processes: Vec<Process>,
    /// Whether there are more than can be listed.
    pub truncated: bool,
}

impl MachineHandle {
    /// Every process of the machine, whoever started it, but the kernel's own.
    ///
    /// # Errors
    /// When the machine does not run or its guest does not answer.
    pub async fn processes(&self) -> Result<ProcessList, EngineError> {
        let _pass = self.enter().await?;
        let link = self.link()?;
        let call = async {
            let client = link.client().await?;
            let reply = client.rpc().list_processes(pb::ListProcessesRequest::default()).await;
            let reply = reply.map_err(|e| silent(&GuestError::from_connect(&e).to_string()))?;
            Ok(read(reply.view()))
        };
        self.unless_gone(call).await
    }

    /// Sends a signal to one process of the machine.
    ///
    /// # Errors
    /// `not_found` when there is none of this number, or when it is not known whether the guest did it.
    pub async fn signal_process(&self, pid: u32, signal: i32) -> Result<(), EngineError> {
        let _pass = self.enter().await?;
        let link = self.link()?;
        let call = async {
            let client = link.client().await?;
            let request = pb::SignalProcessRequest { pid, signal, ..Default::default() };
            client.rpc().signal_process(request).await.map(|_| ()).map_err(|e| {
                let fault = GuestError::from_connect(&e);
                match fault.errno {
                    libc::ESRCH => {
                        EngineError::new(ErrorCode::NotFound, format!("there is no process {pid} in the machine"))
                    }
                    0 => silent(&fault.to_string()),
                    errno => {
                        let why = reason(&std::io::Error::from_raw_os_error(errno));
                        EngineError::new(ErrorCode::InvalidRequest, format!("the process was not signalled: {why}"))
                            .because(fault.to_string())
                    }
                }
            })
        };
        self.unless_gone(call).await
    }
}

/// Reads a guest's list within bounds.
fn read(view: &pb::ListProcessesResponseView<'_>) -> ProcessList {
    let text = |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(PROCESS_ARGV_MAX)]).into_owned();
    let one = |p: &pb::ProcessView<'_>| {
        let mut left = PROCESS_ARGV_MAX;
        let argv = p.argv.iter().take_while(|arg| {
            let fits = left > 0;
            left = left.saturating_sub(arg.len().max(1));
            fits
        });
        Process {
            pid: p.pid,
            ppid: p.ppid,
            uid: p.uid,
            state: p.state.chars().next().filter(char::is_ascii_alphabetic).unwrap_or('?'),
            command: text(&p.command[..p.command.len().min(64)]),
            argv: argv.map(|arg| text(arg)).collect(),
            started_at_ms: p.started_at_ms,
            cpu_time_ms: p.cpu_time_ms,
            rss_bytes: p.rss_bytes,
            job_id: Some(p.job_id)
                .filter(|id| id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit()))
                .map(str::to_owned),
        }
    };
    let processes: Vec<Process> = view.processes.iter().take(PROCESSES_MAX).map(one).collect();
    ProcessList { truncated: view.truncated || view.processes.len() > PROCESSES_MAX, processes }
}

/// Any bytes as a list of processes: what is taken stays within bounds.
#[cfg(any(test, fuzzing))]
pub(crate) fn any_list(bytes: &[u8]) {
    use buffa::MessageView as _;
    let Ok(view) = pb::ListProcessesResponseView::decode_view(bytes) else { return };
    let list = read(&view);
    assert!(list.processes.len() <= PROCESSES_MAX);
    for p in list.processes {
        assert!(p.argv.iter().map(String::len).sum::<usize>() <= 6 * PROCESS_ARGV_MAX && p.command.len() <= 192);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use buffa::{Message as _, MessageView as _};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn whatever_a_guest_lists_stays_within_bounds(
            argv in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..900), 0..8),
            state in ".{0,3}", job_id in ".{0,40}", command in prop::collection::vec(any::<u8>(), 0..200), number in any::<u64>(),
        ) {
            let process = pb::Process {
                pid: number as u32, state, job_id, command, argv, started_at_ms: number as i64, rss_bytes: number,
                ..Default::default()
            };
            let bytes = pb::ListProcessesResponse { processes: vec![process; 3], ..Default::default() }.encode_to_vec();
            let list = read(&pb::ListProcessesResponseView::decode_view(&bytes).expect("what was encoded"));
            prop_assert_eq!(list.processes.len(), 3);
            for p in list.processes {
                prop_assert!(p.argv.iter().map(String::len).sum::<usize>() <= 6 * PROCESS_ARGV_MAX && p.command.len() <= 192);
                prop_assert!(p.state.is_ascii());
            }
        }

        #[test]
        fn arbitrary_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            any_list(&bytes);
        }
    }
}
