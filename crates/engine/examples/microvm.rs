//! Drives the microVM driver by hand, and is the launcher of its tests: freezes a template, makes machines, says how long
//! each step took, removes everything. Figures to quote come from `bench/run`.
//!
//! `cargo run -p mainbrella-engine --example microvm -- DATA_DIR KERNEL INITRAMFS ROOT [MACHINES] [SIZE]`

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mainbrella_engine::driver::{Driver, Instance, LaunchOrder};
use mainbrella_engine::error::DriverError;
use mainbrella_engine::microvm::{AcceleratorChoice, BootFiles, Images, MicroVm, MicroVmConfig};
use mainbrella_guest_protocol::host::{GuestClient, LinkOptions, connect};
use mainbrella_guest_protocol::proto::mainbrella::guest::v1 as pb;
use mainbrella_types::{GenerationKey, SizeClass, TemplateName};
use sha2::{Digest, Sha256};

struct Files(BootFiles);

impl Images for Files {
    fn boot_files(&self, _: &TemplateName) -> Result<BootFiles, DriverError> {
        Ok(self.0.clone())
    }

    fn base_files(&self) -> Result<BootFiles, DriverError> {
        Ok(self.0.clone())
    }

    fn list(&self) -> Result<Vec<(TemplateName, String, u64)>, DriverError> {
        let name = "python".parse().map_err(|_| DriverError::TemplateMissing("python".to_owned()))?;
        Ok(vec![(name, self.0.root_digest.clone(), 0)])
    }
}

fn digest(path: &Path) -> std::io::Result<String> {
    Ok(format!("sha256:{}", hex::encode(Sha256::digest(std::fs::read(path)?))))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Before anything else: the launcher needs a process with one thread.
    if std::env::args().nth(1).as_deref() == Some(mainbrella_engine::jail::LAUNCH_ARGUMENT) {
        mainbrella_engine::jail::launcher_main();
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [data, kernel, initramfs, root, rest @ ..] = arguments.as_slice() else {
        return Err("usage: microvm DATA_DIR KERNEL INITRAMFS ROOT [MACHINES] [SIZE]".into());
    };
    let count: usize = rest.first().map_or(Ok(10), |n| n.parse())?;
    let class: SizeClass = rest.get(1).map_or(Ok(SizeClass::Micro), |s| s.parse())?;
    let (kernel, initramfs, root) = (PathBuf::from(kernel), PathBuf::from(initramfs), PathBuf::from(root));
    let files = BootFiles {
        kernel_digest: digest(&kernel)?,
        initramfs_digest: digest(&initramfs)?,
        root_digest: digest(&root)?,
        content: None,
        kernel,
        initramfs,
        root,
    };
    tokio::runtime::Runtime::new()?.block_on(measure(PathBuf::from(data), files, count, class))
}

async fn measure(
    data: PathBuf,
    files: BootFiles,
    count: usize,
    class: SizeClass,
) -> Result<(), Box<dyn std::error::Error>> {
    let template: TemplateName = "python".parse()?;
    let choice = match std::env::var("ACCEL").as_deref() {
        Ok("auto") => AcceleratorChoice::Auto,
        Ok("kvm") => AcceleratorChoice::Kvm,
        _ => AcceleratorChoice::Tcg,
    };
    let open = |waiting| {
        let config = MicroVmConfig { waiting, accelerator: choice, ..MicroVmConfig::new(data.clone()) };
        MicroVm::open(config, Arc::new(Files(files.clone())))
    };
    let t = Instant::now();
    let driver = open(0).await?;
    println!("open (with jail probe): {:.0?}", t.elapsed());
    println!("{:#?}\nmissing: {:?}", driver.report(), driver.missing_walls());
    let t = Instant::now();
    driver.freeze(&template, class).await?;
    println!("freeze (or find): {:.0?}", t.elapsed());
    round("no waiting VMM", &driver, &template, class, count, false).await?;
    driver.shutdown().await;
    drop(driver);

    let driver = open(1).await?;
    driver.freeze(&template, class).await?;
    round("one waiting VMM", &driver, &template, class, count, true).await?;
    driver.shutdown().await;
    let left = driver.inventory().await?;
    println!("left over: {left:?}");
    Ok(())
}

async fn round(
    what: &str,
    driver: &MicroVm,
    template: &TemplateName,
    class: SizeClass,
    count: usize,
    wait: bool,
) -> Result<(), Box<dyn std::error::Error>> {
    let (mut launches, mut answers, mut firsts, mut seconds, mut ends, mut configured) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..count {
        while wait && driver.waiting(template, class).await == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let key = GenerationKey::new(uuid::Uuid::now_v7());
        let t = Instant::now();
        let order = LaunchOrder {
            key,
            template: template.clone(),
            size: class,
            egress: Default::default(),
            snapshot: None,
            disk_only: false,
        };
        let machine = driver.launch(&order).await?;
        launches.push(t.elapsed());
        let client = hello(&*machine).await?;
        answers.push(t.elapsed());
        configure(&client, &key).await?;
        configured.push(t.elapsed());
        run(&client, &["true"]).await?;
        firsts.push(t.elapsed());
        let t = Instant::now();
        run(&client, &["true"]).await?;
        seconds.push(t.elapsed());
        let t = Instant::now();
        driver.destroy(&key).await?;
        ends.push(t.elapsed());
    }
    println!("== {what}");
    report("launch", &mut launches);
    report("create → agent answers", &mut answers);
    report("create → configured", &mut configured);
    report("create → first `true` finished", &mut firsts);
    report("second `true`", &mut seconds);
    report("destroy", &mut ends);
    Ok(())
}

fn report(what: &str, times: &mut [Duration]) {
    times.sort_unstable();
    if let (Some(p50), Some(least), Some(most)) = (times.get(times.len() / 2), times.first(), times.last()) {
        println!("{what}: p50 {p50:.1?}, {least:.1?} to {most:.1?}");
    }
}

async fn hello(machine: &dyn Instance) -> Result<GuestClient, Box<dyn std::error::Error>> {
    let client = connect(machine.dial().await?, LinkOptions::default()).await?;
    client.rpc().hello(pb::HelloRequest { protocol_version: 1, ..Default::default() }).await?;
    Ok(client)
}

async fn configure(client: &GuestClient, key: &GenerationKey) -> Result<(), Box<dyn std::error::Error>> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    let mut entropy = vec![0u8; 64];
    getrandom::fill(&mut entropy)?;
    let request = pb::ConfigureRequest {
        generation: key.to_string(),
        clock_realtime_ns: i64::try_from(now.as_nanos())?,
        entropy,
        hostname: "machine".to_owned(),
        machine_id: key.to_string(),
        ..Default::default()
    };
    client.rpc().configure(request).await?;
    Ok(())
}

async fn run(client: &GuestClient, argv: &[&str]) -> Result<(), Box<dyn std::error::Error>> {
    let request = pb::StartJobRequest {
        job_id: uuid::Uuid::now_v7().to_string(),
        argv: argv.iter().map(|a| a.as_bytes().to_vec()).collect(),
        timeout_ms: 60_000,
        forget_when_followed: true,
        ..Default::default()
    };
    let mut stream = client.streams().run_job(request).await?;
    while stream.message().await?.is_some() {}
    Ok(())
}
