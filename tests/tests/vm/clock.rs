//! Time in a machine whose template was frozen long ago.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mainbrella_tests::{Service, Setup};

const DAYS_OLD: u32 = 3;

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after the epoch").as_secs_f64()
}

/// A QEMU whose hardware clock is days behind: what is frozen with it was frozen then, for the guest's kernel.
fn late_qemu(dir: &Path) -> String {
    let path = dir.join("qemu-with-a-late-clock");
    // In the jail there are /usr and this file.
    let script = format!(
        "#!/usr/bin/sh\nlate=$(/usr/bin/date -u -d '{DAYS_OLD} days ago' +%Y-%m-%dT%H:%M:%S)\n\
         exec /usr/bin/qemu-system-x86_64 -rtc \"base=$late\" \"$@\"\n"
    );
    std::fs::write(&path, script).expect("write");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("chmod");
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).expect("chmod");
    path.to_str().expect("text").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_is_three_days_old_makes_machines_of_today() {
    let dir = tempfile::tempdir().expect("temp dir");
    let qemu = late_qemu(dir.path());
    let setup = Setup { pool: 1, arguments: vec!["--qemu".into(), qemu], ..Setup::default() };
    let mut service = Service::with(setup).await;
    // What others have frozen is of another time.
    for old in std::fs::read_dir(service.data().join("frozen")).expect("frozen").flatten() {
        std::fs::remove_dir_all(old.path()).expect("remove");
    }
    // The second one may come from a VMM that waited.
    for which in ["first", "second"] {
        let m = service.machine().await;
        // The very first thing that user code does is to ask for the time.
        let before = now();
        let told: f64 = m.text("date +%s.%N").await.trim().parse().expect("seconds");
        let after = now();
        assert!(told > before - 0.5 && told < after + 0.5, "{which}: {before} < {told} < {after}");
        // The clock of the machine's hardware shows that this was a trial at all.
        let hardware: f64 = m.text("cat /sys/class/rtc/rtc0/since_epoch").await.trim().parse().expect("seconds");
        let behind = now() - hardware;
        let days = f64::from(DAYS_OLD) * 86_400.0;
        assert!((days - 60.0..days + 600.0).contains(&behind), "{which}: the hardware's clock is {behind} s behind");

        // What goes by the time of day goes by the right one, and nothing has jumped where nothing may.
        let script = r#"
import os, ssl, time
open("/tmp/new", "w").close()
print(time.time() - os.stat("/tmp/new").st_mtime)
print(time.time() - ssl.cert_time_to_seconds(time.strftime("%b %d %H:%M:%S %Y GMT", time.gmtime())))
print(time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic())
print(time.monotonic())
a = time.monotonic(); time.sleep(1); print(time.monotonic() - a)
"#;
        m.write("/tmp/clocks.py", script).await.expect("write");
        let begin = Instant::now();
        let told = m.text("python3 /tmp/clocks.py").await;
        let told: Vec<f64> = told.lines().map(|l| l.parse().expect("seconds")).collect();
        assert!((-0.1..2.0).contains(&told[0]), "{which}: a new file is {} s old", told[0]);
        assert!((-0.1..2.0).contains(&told[1]), "{which}: TLS compares with a time {} s away", told[1]);
        assert!(told[2].abs() < 1.0, "{which}: the machine thinks it slept {} s", told[2]);
        assert!((0.0..3600.0).contains(&told[3]), "{which}: it counts {} s since its start", told[3]);
        assert!((0.98..2.5).contains(&told[4]), "{which}: a second took {} s", told[4]);
        assert!(begin.elapsed() > Duration::from_millis(950));
        // Time that is counted in timer ticks is slow by as much as the host is busy.
        let source = m.text("cat /sys/devices/system/clocksource/clocksource0/current_clocksource").await;
        assert!(matches!(source.trim(), "tsc" | "kvm-clock"), "{which}: time comes from {source}");
        let sleeping = m.text("timeout 20 sh -c 'sleep 1; echo woke'").await;
        assert_eq!(sleeping, "woke\n", "{which}: timers set after the start fire");
        m.stop().await;
    }
    // A machine that outlives the service keeps its time.
    let m = service.machine().await;
    service.crash().await;
    let m = service.attach(m.name);
    let before = now();
    let told: f64 = m.text("date +%s.%N").await.trim().parse().expect("seconds");
    assert!(told > before - 0.5 && told < now() + 0.5, "after a restart: {before} < {told}");
    service.finish().await;
}
