//! A template whose server was started when it was built: from the request for a machine to the server's first answer, through
//! the API and a preview. Beside it: a machine of a template without it, in which the same server is started.

use std::time::{Duration, Instant};

use mainbrella_client::api::{BuildState, CreateBuild, CreateMachine, CreatePreview};
use mainbrella_client::{MachineRef, Upload};
use mainbrella_tests::Service;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::milliseconds;
use crate::Fault;
use crate::table::{Row, Target};
use crate::world::{Need, World, stocked};

/// The first answer, ms: `targets.md`.
const FIRST_ANSWER: f64 = 250.0;
const PORT: u16 = 8000;
const NAME: &str = "warm";
/// Longest wait for a build, for a waiting VMM, and for an answer.
const PATIENCE: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(10);
const SERVER: [&str; 4] = ["python3", "-m", "http.server", "8000"];

fn recipe() -> String {
    let words = SERVER.map(|word| format!("\"{word}\"")).join(", ");
    let probe = format!(r#"["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:{PORT}/')"]"#);
    format!(
        "FROM python\nWORKDIR /srv\nRUN echo warm > index.html\nEXPOSE {PORT}\n\
         HEALTHCHECK --start-period=60s CMD {probe}\nCMD [{words}]\n"
    )
}

/// Builds it; how long that took.
async fn build(service: &Service) -> Result<Duration, Fault> {
    let client = service.client();
    let begun = Instant::now();
    let order = CreateBuild { recipe: Some(recipe()), size: Some("micro".to_owned()), ..CreateBuild::new(NAME) };
    let id = client.create_build(&order).await?.id;
    // An archive with nothing in it.
    let empty = bytes::Bytes::from_static(&[0; 1024]);
    let bytes = futures::stream::iter([Ok::<_, std::io::Error>(empty)]);
    client.send_context(&id, Upload { bytes, length: Some(1024) }).await?;
    loop {
        let build = client.build(&id).await?;
        match build.state {
            BuildState::Succeeded => return Ok(begun.elapsed()),
            BuildState::Failed | BuildState::Cancelled => return Err(format!("the build failed: {build:?}").into()),
            _ if begun.elapsed() > PATIENCE => return Err("the build does not end".into()),
            _ => tokio::time::sleep(LOOK).await,
        }
    }
}

/// Asks once; the answer, if there was one with status 200.
async fn ask(url: &str) -> Result<Option<String>, Fault> {
    let authority = url.strip_prefix("http://").unwrap_or(url).trim_end_matches('/');
    let port = authority.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    let mut stream = TcpStream::connect(("127.0.0.1", port.ok_or("a preview without a port")?)).await?;
    let request = format!("GET / HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await?;
    Ok(reply.starts_with("HTTP/1.1 200").then_some(reply))
}

/// From the request for a machine to the server's first answer.
async fn first_answer(service: &Service, template: &str, start: bool) -> Result<Duration, Fault> {
    let client = service.client();
    let mut body = CreateMachine::new(template);
    body.size = "micro".to_owned();
    let begun = Instant::now();
    let machine = client.create(&body, None).await?.machine;
    let machine = MachineRef::from(&machine);
    if start {
        let line = format!(
            "mkdir -p /srv && cd /srv && echo warm > index.html && setsid {} >/dev/null 2>&1 &",
            SERVER.join(" ")
        );
        service.attach(machine.clone()).try_sh(&line).await?;
    }
    let order = CreatePreview { port: u32::from(PORT), ttl_seconds: None };
    let preview = client.create_preview(&machine, &order, &uuid::Uuid::now_v7().to_string()).await?;
    let url = preview.url.ok_or("a preview without a URL")?;
    let reply = loop {
        if let Some(reply) = ask(&url).await? {
            break reply;
        }
        if begun.elapsed() > PATIENCE {
            return Err("the server does not answer".into());
        }
        tokio::time::sleep(LOOK).await;
    };
    let took = begun.elapsed();
    client.stop(&machine).await?;
    if reply.ends_with("warm\n") { Ok(took) } else { Err(format!("another answer: {reply}").into()) }
}

pub(super) async fn run(world: &World, rows: &mut Vec<Row>) -> Result<(), Fault> {
    let count = world.scale.snapshots;
    let mut built = Vec::new();
    for need in [Need::WarmService, Need::Service] {
        let service = world.service(need)?;
        built.push(build(service).await?);
        let (mut ours, mut beside) = (Vec::new(), Vec::new());
        // The first one has the service get its waiting VMM ready.
        first_answer(service, NAME, false).await?;
        for n in 0..count {
            if need == Need::WarmService {
                // Both: a VMM that is being made ready would take the processors from what is measured.
                stocked(service, "python").await?;
                stocked(service, NAME).await?;
            }
            ours.push(first_answer(service, NAME, false).await?);
            beside.push(first_answer(service, "python", true).await?);
            crate::progress("template", n + 1, count);
        }
        let (how, target) = match need {
            Need::WarmService => ("a VMM waits", Target::value(FIRST_ANSWER)),
            _ => ("no VMM waits", Target::default()),
        };
        rows.push(Row {
            group: "template",
            what: format!("create of a template with a running server → its first answer, {how}"),
            measured: milliseconds(&ours)?,
            beside: Some(("server started after create", milliseconds(&beside)?)),
            target,
        });
    }
    let again = build(world.service(Need::Service)?).await?;
    rows.push(Row {
        group: "template",
        what: "build whose steps are all known".to_owned(),
        measured: milliseconds(&[again])?,
        beside: Some(("first build", milliseconds(&built)?)),
        target: Target::default(),
    });
    Ok(())
}
