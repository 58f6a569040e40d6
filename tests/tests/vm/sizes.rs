//! What a size promises is what its machine has.

use mainbrella_tests::{Machine, Service, machine_body};

async fn check(m: &Machine, memory_mib: u64, vcpus: u64, disk_mib: u64) {
    let record = m.record().await;
    let limits = &record.limits;
    let promised = (u64::from(limits.memory_mib), u64::from(limits.vcpus), u64::from(limits.disk_mib));
    assert_eq!(promised, (memory_mib, vcpus, disk_mib));
    assert_eq!(m.text("nproc").await.trim(), vcpus.to_string());
    let kib: u64 = m.text("awk '/^MemTotal/ {print $2}' /proc/meminfo").await.trim().parse().expect("KiB");
    // The kernel keeps some for itself.
    assert!(kib <= memory_mib * 1024 && kib >= memory_mib * 1024 * 85 / 100, "{kib} KiB of {memory_mib} MiB");
    let disk: u64 = m.text("df -BM --output=size / | tail -n1 | tr -dc 0-9").await.trim().parse().expect("MiB");
    assert!(disk <= disk_mib && disk >= disk_mib * 85 / 100, "{disk} MiB of {disk_mib}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_largest_machine_has_what_it_promises() {
    let mut service = Service::start().await;
    let mut body = machine_body();
    body.size = "large".into();
    let m = service.create(&body).await.expect("create");
    check(&m, 4096, 4, 32_768).await;
    // All four work at once, and memory beyond what other sizes have can be used.
    let script = "python3 - <<'E'\nimport multiprocessing, os\ndef f(i):\n    os.sched_setaffinity(0, {i}); return os.sched_getaffinity(0) == {i}\n\
        with multiprocessing.Pool(4) as p: print(all(p.map(f, range(4))))\nb = bytearray(2200 << 20)\n\
        b[::4096] = b'x' * len(range(0, len(b), 4096)); print(len(b) >> 20)\nE";
    assert_eq!(m.text(script).await, "True\n2200\n");
    m.stop().await;
    service.finish().await;
}
