//! Commands: bytes, codes, limits, time.

use std::time::{Duration, Instant};

use base64::Engine as _;
use mainbrella_tests::{Machine, Service, host};
use mainbrella_types::ErrorCode;

use crate::code;

#[tokio::test(flavor = "multi_thread")]
async fn commands_get_what_was_said_and_answer_byte_for_byte() {
    let mut service = Service::start().await;
    let m = service.machine().await;

    let out = m.sh("echo out; echo err >&2; printf '\\000\\377'; exit 3").await;
    assert_eq!(
        (out.stdout.as_slice(), out.stderr.as_slice(), out.raw.exit_code),
        (&b"out\n\0\xff"[..], &b"err\n"[..], 3)
    );
    assert_eq!((out.raw.stdout_bytes, out.raw.signal, out.raw.timed_out), (6, None, false));

    // A string is a shell's, arguments are nobody's.
    assert_eq!(m.text("echo $((1+2)) | cat").await, "3\n");
    let tricky = ["printf", "%s|", "a b", "$HOME", "`id`", "\"q\"", "\\", "", "é\n", "-n", "*"];
    let out = m.run(&Machine::argv_order(&tricky)).await.expect("argv");
    assert_eq!(out.text(), "a b|$HOME|`id`|\"q\"|\\||é\n|-n|*|");

    let mut order = Machine::shell_order("pwd; printf '%s' \"$A$B\"");
    order.cwd = Some("/usr/share".into());
    order.env = [("A".into(), "1 \"x\"\n".into()), ("B".into(), "é".into())].into();
    assert_eq!(m.run(&order).await.expect("run").text(), "/usr/share\n1 \"x\"\né");

    // The shell is a login shell.
    let login = "echo $LANG; echo $PATH; setpriv --reuid=65534 --clear-groups sh -lc 'echo $PATH'";
    let paths: Vec<String> = m.text(login).await.lines().map(str::to_owned).collect();
    assert_eq!((paths[0].as_str(), paths[1].split(':').next()), ("C.UTF-8", Some("/usr/local/sbin")));
    assert!(!paths[2].contains("sbin"), "{paths:?}");

    let mut order = Machine::shell_order("wc -c");
    order.stdin_base64 = Some(base64::engine::general_purpose::STANDARD.encode(vec![0u8; 1024 * 1024]));
    assert_eq!(m.run(&order).await.expect("stdin").text(), "1048576\n");
    let begin = Instant::now();
    assert_eq!(m.sh("cat; echo end").await.text(), "end\n");
    assert!(begin.elapsed() < Duration::from_secs(10), "standard input is at its end");

    for (script, exit, signal) in [
        ("kill -SEGV $$", 139, Some(11)),
        ("kill -9 $$", 137, Some(9)),
        ("exit 255", 255, None),
        ("exit 139", 139, None),
    ] {
        let out = m.sh(script).await;
        assert_eq!((out.raw.exit_code, out.raw.signal), (exit, signal), "{script}");
    }

    assert_eq!(code(m.run(&Machine::argv_order(&["/no/such/program"])).await), ErrorCode::CommandNotStarted);
    assert_eq!(code(m.run(&Machine::argv_order(&["no-such-program"])).await), ErrorCode::CommandNotStarted);
    let mut order = Machine::shell_order("true");
    order.cwd = Some("/no/such/folder".into());
    assert_eq!(code(m.run(&order).await), ErrorCode::CommandNotStarted);
    assert_eq!(m.sh("no-such-program").await.raw.exit_code, 127, "in a shell it is the shell's answer");
    assert_eq!(code(m.run(&Machine::argv_order(&[])).await), ErrorCode::InvalidRequest);
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_ends_in_time_and_so_does_the_call() {
    let mut service = Service::start().await;
    let m = service.machine().await;

    let mut order = Machine::shell_order("echo partial; echo noise >&2; sleep 61 | sleep 62");
    order.timeout_ms = Some(1500);
    let begin = Instant::now();
    let out = m.run(&order).await.expect("run");
    assert_eq!((out.text().as_str(), out.error().as_str()), ("partial\n", "noise\n"));
    assert_eq!((out.raw.exit_code, out.raw.timed_out), (-1, true));
    assert!((1400..8000).contains(&out.raw.duration_ms), "{}", out.raw.duration_ms);
    assert!(begin.elapsed() < Duration::from_secs(10));
    assert_eq!(m.sh("pgrep -x sleep").await.raw.exit_code, 1, "nothing of it runs on");

    // One that will not go.
    let mut order = Machine::shell_order("trap '' TERM INT HUP; echo stays; while :; do sleep 1; done");
    order.timeout_ms = Some(1000);
    let begin = Instant::now();
    let out = m.run(&order).await.expect("run");
    assert!(out.raw.timed_out && out.text() == "stays\n");
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());

    // One that has stopped itself, and one whose child has.
    for script in ["echo stopped; kill -STOP $$; echo never", "echo stopped; sh -c 'kill -STOP $$'; echo never"] {
        let mut order = Machine::shell_order(script);
        order.timeout_ms = Some(1000);
        let begin = Instant::now();
        let out = m.run(&order).await.expect("run");
        assert!(out.raw.timed_out && out.text() == "stopped\n", "{script}: {out:?}");
        assert!(begin.elapsed() < Duration::from_secs(10), "{script}: {:?}", begin.elapsed());
    }
    assert_eq!(m.text("ps -eo stat= | grep -c '^T' || true").await, "0\n", "nothing stays stopped");

    // One that stands still before it has begun: the user has frozen everything of the user's.
    let frozen = service.machine().await;
    let mut order = Machine::shell_order("echo 1 > /sys/fs/cgroup/user/cgroup.freeze; echo never");
    order.timeout_ms = Some(1000);
    for _ in 0..3 {
        let begin = Instant::now();
        let out = frozen.run(&order).await.expect("run");
        assert!(out.raw.timed_out && out.stdout.is_empty(), "{out:?}");
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    }
    frozen.stop().await;

    // A grandchild with the pipe in its hands does not hold the call.
    let begin = Instant::now();
    let out = m.sh("sleep 300 & echo hi").await;
    assert_eq!((out.text().as_str(), out.raw.exit_code), ("hi\n", 0));
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    assert_eq!(m.sh("pgrep -x sleep").await.raw.exit_code, 0, "it was meant to go on");

    let begin = Instant::now();
    for _ in 0..50 {
        assert_eq!(m.sh("true").await.raw.exit_code, 0);
    }
    // None waits for something that does not come, however busy the host is.
    assert!(begin.elapsed() < Duration::from_secs(100), "50 times true: {:?}", begin.elapsed());
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn much_output_keeps_head_and_tail_and_says_what_is_missing() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    // Numbered lines of ten bytes: every piece can be checked against where it must have been.
    let out = m.sh("seq -f '%09.0f' 0 1999999").await;
    let total = 20_000_000;
    let gap = out.raw.stdout_omitted.expect("something is missing");
    assert_eq!(out.raw.stdout_bytes, total);
    assert_eq!(out.stdout.len() as u64, 1024 * 1024);
    assert_eq!(out.stdout.len() as u64 + gap.length, total);
    let line_byte = |at: u64| format!("{:09}\n", at / 10).into_bytes()[usize::try_from(at % 10).expect("small")];
    for (i, byte) in out.stdout.iter().enumerate() {
        let i = i as u64;
        let at = if i < gap.offset { i } else { i + gap.length };
        assert_eq!(*byte, line_byte(at), "byte {i}");
    }
    assert!(gap.offset > 400_000 && out.stdout.ends_with(b"001999999\n"));

    let mut order = Machine::shell_order("seq -f '%09.0f' 0 1199999");
    order.output_limit_bytes = Some(16 * 1024 * 1024);
    let out = m.run(&order).await.expect("run");
    assert!(out.raw.stdout_omitted.is_none() && out.stdout.len() == 12_000_000);

    // Both streams at once, twenty megabytes on each.
    let flood = "head -c 20000000 /dev/zero | tr '\\0' O & head -c 20000000 /dev/zero | tr '\\0' E >&2; wait";
    let out = m.sh(flood).await;
    for (bytes, total, gap, mark) in [
        (&out.stdout, out.raw.stdout_bytes, &out.raw.stdout_omitted, b'O'),
        (&out.stderr, out.raw.stderr_bytes, &out.raw.stderr_omitted, b'E'),
    ] {
        let gap = gap.as_ref().expect("something is missing");
        assert_eq!((total, bytes.len() as u64 + gap.length), (20_000_000, 20_000_000));
        assert_eq!((gap.offset, bytes.len()), (512 * 1024, 1024 * 1024), "half from the start, half from the end");
        assert!(bytes.iter().all(|b| *b == mark), "each stream has its own bytes");
    }

    // Any limit, odd ones too.
    for (limit, kept) in [(1, "1"), (2, "1\n"), (11, "1\n2\n3\n\n100\n"), (291, "")] {
        let mut order = Machine::shell_order("seq 1 100; echo >&2 12345");
        order.output_limit_bytes = Some(limit);
        let out = m.run(&order).await.unwrap_or_else(|e| panic!("limit {limit}: {e:?}"));
        assert_eq!((out.raw.stdout_bytes, out.stdout.len() as u64), (292, limit), "limit {limit}");
        assert!(kept.is_empty() || out.text() == kept, "limit {limit}: {}", out.text());
        assert_eq!(out.stderr.len() as u64, limit.min(6), "limit {limit}");
    }
    let mut order = Machine::shell_order("true");
    order.output_limit_bytes = Some(0);
    assert_eq!(code(m.run(&order).await), ErrorCode::InvalidRequest);

    // One stream does not keep the other waiting.
    let out = m.sh("seq 1 500000; echo wrong >&2; seq 1 500000; exit 1").await;
    assert_eq!((out.error().as_str(), out.raw.exit_code), ("wrong\n", 1));
    let out = m.sh("head -c 100000 /dev/zero; echo oops >&2; exit 1").await;
    assert_eq!((out.stdout.len(), out.error().as_str(), out.raw.exit_code), (100_000, "oops\n", 1));
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_commands_at_once_keep_their_exit_codes() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    // Orphans end all the while.
    m.text("nohup sh -c 'for i in $(seq 400); do (sleep 0.01 &) ; sleep 0.02; done' >/dev/null 2>&1 &").await;
    let orders = (0..500).map(|i| {
        let m = m.clone();
        // A busy host may need long for so many; this is about their codes.
        let mut order = Machine::shell_order(&format!("echo {i}; exit 7"));
        order.timeout_ms = Some(300_000);
        async move { m.run(&order).await.expect("run") }
    });
    let begin = Instant::now();
    for (i, out) in futures::future::join_all(orders).await.into_iter().enumerate() {
        assert_eq!((out.raw.exit_code, out.raw.signal, out.text()), (7, None, format!("{i}\n")));
    }
    eprintln!("500 commands at once: {:?}", begin.elapsed());
    // One that has just ended may be seen before it is reaped; none stays.
    let reaped = "for _ in $(seq 100); do ps -eo stat= | grep -q '^Z' || exit 0; sleep 0.1; done; ps -e; exit 1";
    let left = m.sh(reaped).await;
    assert_eq!(left.raw.exit_code, 0, "zombies: {}", left.text());
    assert!(host::status_kib(service.pid(), "VmRSS") < 300 * 1024);
    service.finish().await;
}
