//! Connections to ports of machines, over the real protocol.

use std::sync::Arc;
use std::time::Duration;

use mainbrella_engine::{ExitReport, MachineHandle, PortError};
use mainbrella_types::ErrorCode;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::Bench;

const ECHO: u16 = 3000;

async fn machine(bench: &Bench, idle_timeout_ms: Option<u64>) -> MachineHandle {
    bench.driver.ports.listen(
        ECHO,
        Arc::new(|stream| {
            tokio::spawn(async move {
                let (mut reader, mut writer) = tokio::io::split(stream);
                let _ = tokio::io::copy(&mut reader, &mut writer).await;
                let _ = writer.shutdown().await;
            });
        }),
    );
    bench.engine.create(bench.intent("small", 600_000, idle_timeout_ms)).await.expect("made")
}

fn code(e: PortError) -> Option<ErrorCode> {
    match e {
        PortError::NothingListens => None,
        PortError::Failed(e) => Some(e.code()),
    }
}

#[tokio::test]
async fn what_is_sent_arrives_and_what_does_not_listen_is_told() {
    let bench = Bench::new();
    let machine = machine(&bench, None).await;
    let mut stream = machine.connect_port(ECHO).await.map_err(code).expect("connected");
    for round in 0..50 {
        let sent = vec![round; 40_000];
        stream.write_all(&sent).await.expect("sent");
        let mut heard = vec![0; sent.len()];
        stream.read_exact(&mut heard).await.expect("heard");
        assert_eq!(heard, sent);
    }
    stream.shutdown().await.expect("half closed");
    assert_eq!(stream.read(&mut [0; 1]).await.expect("ended"), 0);
    assert_eq!(machine.connect_port(3001).await.map(drop).map_err(code), Err(None), "nothing listens");
}

#[tokio::test]
async fn connections_are_counted_and_the_next_is_refused() {
    let bench = Bench::new();
    let machine = machine(&bench, None).await;
    let mut open = Vec::new();
    for _ in 0..1024 {
        open.push(machine.connect_port(ECHO).await.map_err(code).expect("connected"));
    }
    assert_eq!(machine.connect_port(ECHO).await.map(drop).map_err(code), Err(Some(ErrorCode::Overloaded)));
    // Commands have places of their own.
    let done = tokio::time::timeout(Duration::from_secs(5), machine.run(crate::order("true"))).await;
    done.expect("in time").expect("ran");
    open.pop();
    machine.connect_port(ECHO).await.map_err(code).expect("there is room again");
}

#[tokio::test]
async fn connections_end_with_their_machine_and_none_begin_after() {
    let bench = Bench::new();
    for how in ["stop", "kill"] {
        let machine = machine(&bench, None).await;
        let mut stream = machine.connect_port(ECHO).await.map_err(code).expect("connected");
        let reading = tokio::spawn(async move { stream.read(&mut [0; 1]).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!machine.gone().is_cancelled());
        match how {
            "stop" => drop(machine.stop().await.expect("stopped")),
            _ => bench.driver.kill(&machine.record().key, ExitReport::Vmm("killed".into())),
        }
        let ended = tokio::time::timeout(Duration::from_secs(1), reading).await.expect("in time").expect("read");
        assert_eq!(ended.expect_err("no end of content").kind(), std::io::ErrorKind::ConnectionReset, "{how}");
        assert!(machine.gone().is_cancelled());
        let refused = machine.connect_port(ECHO).await.map(drop).map_err(code);
        assert_eq!(refused, Err(Some(ErrorCode::MachineNotRunning)), "{how}");
    }
}

#[tokio::test]
async fn a_broken_link_breaks_connections_and_the_next_one_dials_again() {
    let bench = Bench::new();
    let machine = machine(&bench, None).await;
    let mut stream = machine.connect_port(ECHO).await.map_err(code).expect("connected");
    bench.driver.cut(&machine.record().key);
    assert!(stream.read(&mut [0; 1]).await.is_err());
    let mut stream = machine.connect_port(ECHO).await.map_err(code).expect("connected");
    stream.write_all(b"x").await.expect("sent");
    stream.read_exact(&mut [0; 1]).await.expect("heard");
}
