//! Attaches to a guest by the unix socket of its port and puts it through its paces: `attach SOCKET [COMMAND]`.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mainbrella_guest_protocol::pb::__buffa::oneof::job_event::Event;
use mainbrella_guest_protocol::{GuestClient, LinkOptions, connect, pb};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let socket = arguments.next().ok_or("usage: attach SOCKET [COMMAND]")?;
    let began = Instant::now();
    let stream = tokio::net::UnixStream::connect(socket).await?;
    let client = connect(stream, LinkOptions { deadline: Duration::from_secs(20), ..LinkOptions::default() }).await?;
    println!("attached after {:?}", began.elapsed());
    if let Some(command) = arguments.next() {
        return run(&client, &command).await;
    }
    let began = Instant::now();
    let hello = client.rpc().hello(pb::HelloRequest::default()).await?.into_owned();
    println!("{:?} {hello:?}", began.elapsed());
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let configure = pb::ConfigureRequest {
        generation: "by-hand".into(),
        clock_realtime_ns: i64::try_from(now.as_nanos())?,
        entropy: vec![7; 64],
        hostname: "by-hand".into(),
        machine_id: "0123456789abcdef0123456789abcdef".into(),
        ..Default::default()
    };
    let began = Instant::now();
    println!("{:?}", client.rpc().configure(configure.clone()).await?.into_owned());
    println!("configured in {:?}", began.elapsed());
    for _ in 0..5 {
        run(&client, "true").await?;
    }
    let began = Instant::now();
    let quiesce = pb::QuiesceRequest { freeze: true, sync: true, ..Default::default() };
    client.rpc().quiesce(quiesce).await?;
    println!("quiesced in {:?}", began.elapsed());
    let hello = client.rpc().hello(pb::HelloRequest::default()).await?.into_owned();
    println!("frozen: {}", hello.frozen);
    client.rpc().configure(configure).await?;
    println!("{:?}", client.rpc().usage(pb::UsageRequest::default()).await?.into_owned());
    let began = Instant::now();
    let read = pb::ReadFileRequest { path: b"/dev/shm/big".to_vec(), ..Default::default() };
    run(&client, "head -c 30000000 /dev/zero >/dev/shm/big").await?;
    let made = began.elapsed();
    let mut stream = client.streams().read_file(read).await?;
    let mut bytes = 0;
    while let Some(chunk) = stream.message().await? {
        bytes += chunk.view().data.len();
    }
    let took = (began.elapsed() - made).as_secs_f64();
    println!("read {bytes} bytes at {:.0} MB/s", bytes as f64 / took / 1e6);
    Ok(())
}

async fn run(client: &GuestClient, command: &str) -> Outcome<()> {
    let began = Instant::now();
    let request = pb::StartJobRequest {
        job_id: format!("{}", SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos()),
        argv: vec![b"/bin/sh".to_vec(), b"-c".to_vec(), command.as_bytes().to_vec()],
        timeout_ms: 60_000,
        forget_when_followed: true,
        ..Default::default()
    };
    let mut stream = client.streams().run_job(request).await?;
    while let Some(event) = stream.message().await? {
        match event.to_owned_message().event {
            Some(Event::Output(output)) => print!("{}", String::from_utf8_lossy(&output.data)),
            Some(Event::Exit(exit)) => println!("{:?}", exit),
            Some(Event::Started(_)) | None => {}
            Some(other) => println!("{other:?}"),
        }
    }
    println!("{command:.40}: {:?}", began.elapsed());
    Ok(())
}
