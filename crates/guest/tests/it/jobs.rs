//! Jobs, as real processes of this machine.

use std::time::{Duration, Instant};

use crate::support::{OwnProcess, all, in_process, run, sh};
use mainbrella_guest_protocol::pb::job_exit::Cause;
use mainbrella_guest_protocol::{GuestError, pb};

#[tokio::test]
async fn says_hello_and_who_it_was_configured_to_be() {
    let client = in_process().await;
    let hello = client.rpc().hello(pb::HelloRequest::default()).await.unwrap().into_owned();
    assert_eq!(hello.protocol_version, mainbrella_guest_protocol::PROTOCOL_VERSION);
    assert_eq!(hello.generation, "");
    let configure = pb::ConfigureRequest {
        generation: "g-1".into(),
        hostname: "box".into(),
        env: [("FROM_MACHINE".to_owned(), "m".to_owned())].into_iter().collect(),
        ..Default::default()
    };
    client.rpc().configure(configure).await.unwrap();
    let hello = client.rpc().hello(pb::HelloRequest::default()).await.unwrap().into_owned();
    assert_eq!((hello.generation.as_str(), hello.hostname.as_str()), ("g-1", "box"));
    client.rpc().quiesce(pb::QuiesceRequest { freeze: true, sync: true, ..Default::default() }).await.unwrap();

    let mut request = sh("env", "echo $HOME $LANG $FROM_MACHINE $OWN; echo $PATH");
    request.env.insert("OWN".into(), "o".into());
    let told = run(&client, request).await;
    assert_eq!(told.text(), "/root C.UTF-8 m o\n/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n");
}

#[tokio::test]
async fn both_outputs_and_the_code_arrive() {
    let client = in_process().await;
    let told = run(&client, sh("a", "echo out; echo err >&2; exit 7")).await;
    assert_eq!((told.stdout.as_slice(), told.stderr.as_slice()), (&b"out\n"[..], &b"err\n"[..]));
    assert_eq!(told.code(), Some(7));
    let exit = told.exit.unwrap();
    assert_eq!((exit.stdout_bytes, exit.stderr_bytes), (4, 4));
}

#[tokio::test]
async fn a_background_process_holds_nobody_up_and_does_not_die_of_its_output() {
    let client = in_process().await;
    let started = Instant::now();
    let dir = tempfile::tempdir().unwrap();
    let script = format!(
        "(sleep 0.3; echo late; echo alive > {0}/mark) & sleep 300 & echo hi; echo $! > {0}/pid",
        dir.path().display()
    );
    let told = run(&client, sh("bg", &script)).await;
    assert_eq!(told.text(), "hi\n");
    assert_eq!(told.code(), Some(0));
    assert!(started.elapsed() < Duration::from_millis(290), "{:?}", started.elapsed());
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(std::fs::read_to_string(dir.path().join("mark")).unwrap(), "alive\n");
    let pid = std::fs::read_to_string(dir.path().join("pid")).unwrap();
    run(&client, sh("end", &format!("kill {pid}"))).await;
}

#[tokio::test]
async fn input_not_given_is_at_its_end() {
    let client = in_process().await;
    let told = run(&client, sh("cat", "cat; echo done")).await;
    assert_eq!(told.text(), "done\n");
}

#[tokio::test]
async fn input_given_arrives_whole_and_ends() {
    let client = in_process().await;
    let mut request = sh("wc", "wc -c");
    request.stdin = vec![b'x'; 1024 * 1024];
    assert_eq!(run(&client, request).await.text().trim(), "1048576");

    let mut request = sh("open", "cat");
    request.stdin = b"one ".to_vec();
    request.stdin_open = true;
    let stream = client.streams().run_job(request).await.unwrap();
    for (data, eof) in [("two ", false), ("three", true)] {
        let write = pb::WriteJobStdinRequest { job_id: "open".into(), data: data.into(), eof, ..Default::default() };
        client.rpc().write_job_stdin(write).await.unwrap();
    }
    let late = pb::WriteJobStdinRequest { job_id: "open".into(), data: b"x".to_vec(), ..Default::default() };
    let error = GuestError::from_connect(&client.rpc().write_job_stdin(late).await.unwrap_err());
    assert_eq!((error.stage.as_str(), error.errno), ("stdin", 32));
    assert_eq!(all(stream).await.text(), "one two three");
}

#[tokio::test]
async fn input_nobody_reads_makes_the_writer_wait() {
    let client = in_process().await;
    let mut request = sh("deaf", "sleep 1; wc -c");
    request.stdin_open = true;
    let stream = client.streams().run_job(request).await.unwrap();
    let mut accepted = 0;
    let began = Instant::now();
    for i in 0..8 {
        let data = vec![0u8; 128 * 1024];
        let write = pb::WriteJobStdinRequest { job_id: "deaf".into(), data, eof: i == 7, ..Default::default() };
        accepted = client.rpc().write_job_stdin(write).await.unwrap().into_owned().accepted;
    }
    assert!(began.elapsed() > Duration::from_millis(700), "1 MiB does not fit what may be pending");
    assert_eq!(accepted, 1024 * 1024);
    assert_eq!(all(stream).await.text().trim(), "1048576");
}

#[tokio::test]
async fn what_cannot_start_says_where_it_failed() {
    let client = in_process().await;
    let mut request = sh("cwd", "true");
    request.cwd = b"/no/such/place".to_vec();
    assert_eq!(run(&client, request).await.not_started, Some((2, "cwd".into())));
    for (id, program, errno) in [("none", "no-such-program", 2), ("path", "/no/such", 2), ("dir", "/tmp", 13)] {
        let request = pb::StartJobRequest { job_id: id.into(), argv: vec![program.into()], ..Default::default() };
        assert_eq!(run(&client, request).await.not_started, Some((errno, "exec".into())), "{program}");
    }
    let request = pb::StartJobRequest {
        job_id: "found".into(),
        argv: vec![b"printf".to_vec(), b"%s".to_vec(), b"a b\xff".to_vec()],
        ..Default::default()
    };
    assert_eq!(run(&client, request).await.stdout, b"a b\xff");
}

#[tokio::test]
async fn a_script_without_an_interpreter_runs_in_the_shell() {
    use std::os::unix::fs::PermissionsExt;
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("plain");
    std::fs::write(&script, "echo got $1\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let argv = vec![script.as_os_str().as_encoded_bytes().to_vec(), b"it".to_vec()];
    let request = pb::StartJobRequest { job_id: "plain".into(), argv, ..Default::default() };
    assert_eq!(run(&client, request).await.text(), "got it\n");
}

#[tokio::test]
async fn a_flood_on_one_output_keeps_nothing_from_the_other() {
    let client = in_process().await;
    let mut request = sh("flood", "head -c 100000000 /dev/zero & sleep 0.2; echo seen >&2; wait; exit 1");
    request.output_limit = 1 << 20;
    let told = run(&client, request).await;
    assert_eq!(told.stderr, b"seen\n");
    assert_eq!(told.code(), Some(1));
    assert_eq!(told.stdout.len(), 1 << 20);
    assert_eq!(told.gaps, [(pb::Stream::STREAM_STDOUT, 1 << 19, 100_000_000 - (1 << 20))]);
    assert_eq!(told.exit.unwrap().stdout_bytes, 100_000_000);
}

#[tokio::test]
async fn a_limit_keeps_head_and_tail() {
    let client = in_process().await;
    let mut request = sh("limit", "seq 1 10000");
    request.output_limit = 100;
    let told = run(&client, request).await;
    let whole: String = (1..=10000).map(|n| format!("{n}\n")).collect();
    assert_eq!(&told.stdout[..50], &whole.as_bytes()[..50]);
    assert_eq!(&told.stdout[50..], &whole.as_bytes()[whole.len() - 50..]);
    assert_eq!(told.gaps, [(pb::Stream::STREAM_STDOUT, 50, whole.len() as u64 - 100)]);

    let mut request = sh("fits", "printf 12345678");
    request.output_limit = 8;
    let told = run(&client, request).await;
    assert_eq!((told.text().as_str(), told.gaps.len()), ("12345678", 0));
}

#[tokio::test]
async fn a_time_out_ends_the_group_and_gives_what_there_was() {
    let client = in_process().await;
    let began = Instant::now();
    let mut request = sh("slow", "echo partial; sleep 321 | sleep 321");
    request.timeout_ms = 200;
    let told = run(&client, request).await;
    assert_eq!((told.text().as_str(), told.cause()), ("partial\n", Cause::CAUSE_TIMED_OUT));
    assert_eq!(told.exit.as_ref().unwrap().signal, 9);
    assert!(began.elapsed() < Duration::from_secs(2));
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(run(&client, sh("look", "pgrep -x -f 'sleep 321'")).await.code(), Some(1), "the whole group died");
}

#[tokio::test]
async fn a_cancelled_job_gets_its_grace_and_then_its_end() {
    let client = in_process().await;
    let script = "trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.02; done";
    let mut stream = client.streams().run_job(sh("polite", script)).await.unwrap();
    let mut told = crate::support::Told::default();
    while told.stdout != b"up\n" {
        told.add(stream.message().await.unwrap().unwrap().to_owned_message());
    }
    let cancel =
        |id: &str, grace_ms| pb::SignalJobRequest { job_id: id.into(), cancel: true, grace_ms, ..Default::default() };
    assert!(client.rpc().signal_job(cancel("polite", 5000)).await.unwrap().into_owned().delivered);
    while let Some(event) = stream.message().await.unwrap() {
        told.add(event.to_owned_message());
    }
    assert_eq!((told.text().as_str(), told.cause()), ("up\nbye\n", Cause::CAUSE_CANCELLED));

    let script = "trap '' TERM; echo up; while :; do sleep 0.02; done";
    let mut stream = client.streams().run_job(sh("stubborn", script)).await.unwrap();
    let mut told = crate::support::Told::default();
    while told.stdout != b"up\n" {
        told.add(stream.message().await.unwrap().unwrap().to_owned_message());
    }
    let began = Instant::now();
    client.rpc().signal_job(cancel("stubborn", 100)).await.unwrap();
    while let Some(event) = stream.message().await.unwrap() {
        told.add(event.to_owned_message());
    }
    assert_eq!((told.cause(), told.exit.as_ref().unwrap().signal), (Cause::CAUSE_CANCELLED, 9));
    assert!(began.elapsed() < Duration::from_secs(2));
    assert!(!client.rpc().signal_job(cancel("stubborn", 100)).await.unwrap().into_owned().delivered);
}

#[tokio::test]
async fn a_signal_reaches_the_process() {
    let client = in_process().await;
    let mut stream = client.streams().run_job(sh("sig", "echo up; exec sleep 300")).await.unwrap();
    let mut told = crate::support::Told::default();
    while told.stdout != b"up\n" {
        told.add(stream.message().await.unwrap().unwrap().to_owned_message());
    }
    let signal = pb::SignalJobRequest { job_id: "sig".into(), signal: 15, ..Default::default() };
    assert!(client.rpc().signal_job(signal).await.unwrap().into_owned().delivered);
    while let Some(event) = stream.message().await.unwrap() {
        told.add(event.to_owned_message());
    }
    assert_eq!((told.cause(), told.exit.unwrap().signal), (Cause::CAUSE_SIGNALLED, 15));
}

#[tokio::test]
async fn a_dropped_stream_kills_nothing_and_following_again_loses_nothing() {
    let client = in_process().await;
    let script = "for i in $(seq 1 200000); do echo $i; done";
    let mut stream = client.streams().run_job(sh("long", script)).await.unwrap();
    let mut told = crate::support::Told::default();
    let mut breaks = 0;
    loop {
        let mut taken = 0;
        let event = loop {
            match stream.message().await.unwrap() {
                Some(event) if taken < 5 => {
                    taken += 1;
                    told.add(event.to_owned_message());
                }
                other => break other,
            }
        };
        if event.is_none() {
            break;
        }
        // The event in hand is thrown away with the stream: the link "broke".
        drop(stream);
        breaks += 1;
        let follow =
            pb::FollowJobRequest { job_id: "long".into(), after_sequence: told.last_sequence, ..Default::default() };
        stream = client.streams().follow_job(follow).await.unwrap();
    }
    let whole: String = (1..=200_000).map(|n| format!("{n}\n")).collect();
    assert!(breaks > 2, "{breaks}");
    assert!(told.text() == whole, "{} of {} bytes after {breaks} breaks", told.stdout.len(), whole.len());
    assert!(told.gaps.is_empty());
    assert_eq!(told.code(), Some(0));
}

#[tokio::test]
async fn without_a_limit_a_process_nobody_follows_waits() {
    let client = in_process().await;
    let stream = client.streams().run_job(sh("press", "head -c 20000000 /dev/zero; echo end >&2")).await.unwrap();
    drop(stream);
    tokio::time::sleep(Duration::from_millis(500)).await;
    let get = || client.rpc().get_job(pb::GetJobRequest { job_id: "press".into(), ..Default::default() });
    assert!(!get().await.unwrap().into_owned().finished, "20 MB do not fit what may be held");
    let follow = pb::FollowJobRequest { job_id: "press".into(), ..Default::default() };
    let told = all(client.streams().follow_job(follow).await.unwrap()).await;
    assert_eq!((told.stdout.len(), told.stderr.as_slice()), (20_000_000, &b"end\n"[..]));
    assert!(get().await.unwrap().into_owned().finished);
    // From the beginning again, long after: what is gone is told, the end is there.
    let follow = pb::FollowJobRequest { job_id: "press".into(), ..Default::default() };
    let again = all(client.streams().follow_job(follow).await.unwrap()).await;
    assert_eq!(again.gaps.len(), 1);
    assert_eq!(again.gaps[0].2 as usize + again.stdout.len(), 20_000_000);
    assert_eq!(again.code(), Some(0));
}

#[tokio::test]
async fn an_acked_job_waits_for_the_ack_and_loses_nothing_between_hosts() {
    let client = in_process().await;
    let mut request = sh("owed", "for i in $(seq 1 400000); do echo $i; done; echo end >&2");
    request.acked = true;
    let mut stream = client.streams().run_job(request).await.unwrap();
    // Read without a word: the process is held up.
    let mut told = crate::support::Told::default();
    let ack = |sequence| {
        let client = client.clone();
        async move {
            let ack = pb::AckJobRequest { job_id: "owed".into(), sequence, ..Default::default() };
            client.rpc().ack_job(ack).await.unwrap();
        }
    };
    let mut lost = crate::support::Told::default();
    let until = tokio::time::Instant::now() + Duration::from_secs(60);
    loop {
        match tokio::time::timeout(Duration::from_millis(700), stream.message()).await {
            Ok(event) => lost.add(event.unwrap().expect("it cannot end").to_owned_message()),
            // On a busy host a silence may only mean that the process had no turn.
            Err(_) if lost.stdout.len() < 100_000 && tokio::time::Instant::now() < until => {}
            Err(_) => break,
        }
    }
    // What is owed is counted with what each event costs: of a drip of small pieces it is fewer bytes.
    assert!((100_000..2_000_000).contains(&lost.stdout.len()), "{}", lost.stdout.len());
    let get = || client.rpc().get_job(pb::GetJobRequest { job_id: "owed".into(), ..Default::default() });
    assert!(!get().await.unwrap().into_owned().finished);
    drop((stream, lost));
    // Another host, which holds nothing, gets all of it, and a third one what the second did not ack.
    let follow = |after_sequence| pb::FollowJobRequest { job_id: "owed".into(), after_sequence, ..Default::default() };
    let mut rounds = 0;
    let whole: String = (1..=400_000).map(|n| format!("{n}\n")).collect();
    while told.exit.is_none() {
        rounds += 1;
        let mut stream = client.streams().follow_job(follow(told.last_sequence)).await.unwrap();
        for _ in 0..16 {
            let Some(event) = stream.message().await.unwrap() else { break };
            told.add(event.to_owned_message());
        }
        ack(told.last_sequence).await;
    }
    assert!(rounds > 3 && told.text() == whole, "{} of {} bytes", told.stdout.len(), whole.len());
    assert_eq!((told.stderr.as_slice(), told.code(), told.gaps.len()), (&b"end\n"[..], Some(0), 0));
    let status = get().await.unwrap().into_owned();
    assert_eq!((status.acked_sequence, status.finished), (told.last_sequence, true));
    assert_eq!(status.exit.stdout_bytes, whole.len() as u64);
}

#[tokio::test]
async fn input_says_how_it_stands_and_refuses_what_would_have_to_wait() {
    let client = in_process().await;
    let mut request = sh("deaf", "sleep 0.7; wc -c");
    request.stdin_open = true;
    let stream = client.streams().run_job(request).await.unwrap();
    let write = |n: usize, eof| {
        let data = vec![0u8; n];
        pb::WriteJobStdinRequest { job_id: "deaf".into(), data, eof, no_wait: true, ..Default::default() }
    };
    // The pipe itself takes 64 KiB; the rest is pending.
    let mut accepted = 0u64;
    let refused = loop {
        match client.rpc().write_job_stdin(write(64 * 1024, false)).await {
            Ok(answer) => {
                accepted += 64 * 1024;
                assert_eq!(answer.view().accepted, accepted);
                assert!(answer.view().pending <= 256 * 1024);
            }
            Err(error) => break GuestError::from_connect(&error),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert_eq!((refused.stage.as_str(), refused.errno), ("stdin", 11));
    assert!((256 * 1024..=384 * 1024).contains(&accepted), "{accepted}");
    let status = client.rpc().get_job(pb::GetJobRequest { job_id: "deaf".into(), ..Default::default() }).await.unwrap();
    assert!(status.view().stdin_open && status.view().stdin_accepted == accepted && status.view().stdin_pending > 0);
    tokio::time::sleep(Duration::from_millis(900)).await;
    client.rpc().write_job_stdin(write(0, true)).await.unwrap();
    assert_eq!(all(stream).await.text().trim(), accepted.to_string());
}

#[tokio::test]
async fn processes_are_listed_with_their_job_and_ended_by_number() {
    let client = in_process().await;
    let mut stream = client.streams().run_job(sh("tree", "sleep 432 & sleep 432 & echo up; wait")).await.unwrap();
    let mut told = crate::support::Told::default();
    while told.stdout != b"up\n" {
        told.add(stream.message().await.unwrap().unwrap().to_owned_message());
    }
    let list = || client.rpc().list_processes(pb::ListProcessesRequest::default());
    // A child between its fork and its program still looks like the shell.
    let mine = loop {
        let all = list().await.unwrap().into_owned();
        assert!(!all.truncated);
        let mine: Vec<_> = all.processes.into_iter().filter(|p| p.job_id == "tree").collect();
        if mine.iter().filter(|p| p.argv == [b"sleep".to_vec(), b"432".to_vec()]).count() == 2 {
            break mine;
        }
    };
    assert_eq!(mine.len(), 3);
    for process in mine.iter().filter(|p| p.command == b"sleep") {
        let signal = pb::SignalProcessRequest { pid: process.pid, signal: 9, ..Default::default() };
        client.rpc().signal_process(signal).await.unwrap();
    }
    assert_eq!(all(stream).await.code(), Some(0));
    let gone = pb::SignalProcessRequest { pid: mine[0].pid, signal: 9, ..Default::default() };
    let error = GuestError::from_connect(&client.rpc().signal_process(gone).await.unwrap_err());
    assert_eq!((error.stage.as_str(), error.errno), ("kill", 3));
}

#[tokio::test]
async fn the_table_is_listed_and_forgotten() {
    let client = in_process().await;
    let told = run(&client, sh("one", "true")).await;
    assert_eq!(told.code(), Some(0));
    let again = run(&client, sh("one", "echo another")).await;
    assert_eq!((again.text().as_str(), again.code()), ("", Some(0)), "the id names the first job");
    let mut request = sh("two", "true");
    request.forget_when_followed = true;
    run(&client, request).await;
    let jobs = client.rpc().list_jobs(pb::ListJobsRequest::default()).await.unwrap().into_owned().jobs;
    assert_eq!(jobs.iter().map(|job| job.job_id.as_str()).collect::<Vec<_>>(), ["one"]);
    client.rpc().forget_job(pb::ForgetJobRequest { job_id: "one".into(), ..Default::default() }).await.unwrap();
    let gone = client.rpc().get_job(pb::GetJobRequest { job_id: "one".into(), ..Default::default() }).await;
    assert_eq!(gone.unwrap_err().code, connectrpc::ErrorCode::NotFound);
}

#[tokio::test]
async fn a_terminal_is_one() {
    let client = in_process().await;
    let mut request = sh(
        "tty",
        "test -t 0 && test -t 1 && tty; stty size; trap 'stty size; exit 4' WINCH; echo ready; while :; do sleep 0.02; done",
    );
    request.pty = buffa::MessageField::some(pb::PtySize { cols: 80, rows: 24, ..Default::default() });
    let mut stream = client.streams().run_job(request).await.unwrap();
    let mut told = crate::support::Told::default();
    while !told.text().contains("ready") {
        told.add(stream.message().await.unwrap().unwrap().to_owned_message());
    }
    let size = buffa::MessageField::some(pb::PtySize { cols: 132, rows: 43, ..Default::default() });
    client.rpc().resize_job(pb::ResizeJobRequest { job_id: "tty".into(), size, ..Default::default() }).await.unwrap();
    while let Some(event) = stream.message().await.unwrap() {
        told.add(event.to_owned_message());
    }
    assert!(told.text().starts_with("/dev/pts/"), "{:?}", told.text());
    assert!(told.text().contains("24 80\r\n") && told.text().ends_with("43 132\r\n"), "{:?}", told.text());
    assert_eq!(told.code(), Some(4));

    let mut request = sh("talk", "read line; echo \"<$line>\"; cat >/dev/null; echo over");
    request.pty = buffa::MessageField::some(pb::PtySize { cols: 80, rows: 24, ..Default::default() });
    let stream = client.streams().run_job(request).await.unwrap();
    let write =
        pb::WriteJobStdinRequest { job_id: "talk".into(), data: b"hello\n".to_vec(), eof: true, ..Default::default() };
    client.rpc().write_job_stdin(write).await.unwrap();
    let told = tokio::time::timeout(Duration::from_secs(10), all(stream)).await.unwrap();
    assert!(told.text().contains("<hello>") && told.text().contains("over"), "{:?}", told.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_sevens_in_a_storm_of_orphans() {
    let agent = OwnProcess::start();
    let client = agent.attach().await;
    let storm = "for i in $(seq 1 400); do (true & true & sleep 0.0$((i % 10)) &) ; done; exit 0";
    let mut storms = Vec::new();
    for i in 0..4 {
        let client = client.clone();
        storms.push(tokio::spawn(async move { run(&client, sh(&format!("storm-{i}"), storm)).await.code() }));
    }
    let mut sevens = Vec::new();
    for i in 0..500 {
        let client = client.clone();
        sevens.push(tokio::spawn(async move {
            let request = pb::StartJobRequest {
                job_id: format!("seven-{i}"),
                argv: vec![b"/bin/sh".to_vec(), b"-c".to_vec(), b"exit 7".to_vec()],
                ..Default::default()
            };
            run(&client, request).await.code()
        }));
    }
    for seven in sevens {
        assert_eq!(seven.await.unwrap(), Some(7));
    }
    for storm in storms {
        assert_eq!(storm.await.unwrap(), Some(0));
    }
    // Every orphan was collected.
    tokio::time::sleep(Duration::from_millis(400)).await;
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", agent.pid())).unwrap();
    assert_eq!(children.trim(), "");
}

#[tokio::test]
async fn other_children_of_the_process_are_left_alone() {
    let client = in_process().await;
    let mut child = std::process::Command::new("/bin/sh").args(["-c", "exit 9"]).spawn().unwrap();
    for i in 0..20 {
        assert_eq!(run(&client, sh(&format!("{i}"), "exit 3")).await.code(), Some(3));
    }
    assert_eq!(child.wait().unwrap().code(), Some(9));
}

#[tokio::test]
async fn a_child_has_nothing_of_ours_open() {
    let client = in_process().await;
    let _busy = client.streams().run_job(sh("other", "sleep 5")).await.unwrap();
    let told = run(
        &client,
        sh(
            "fds",
            "ls /proc/self/fd; grep SigIgn /proc/self/status; grep SigBlk /proc/self/status; ps -o sid=,pgid= -p $$",
        ),
    )
    .await;
    let text = told.text();
    let mut lines = text.lines();
    // The last is what `ls` itself opened.
    assert_eq!(lines.by_ref().take(4).collect::<Vec<_>>(), ["0", "1", "2", "3"]);
    assert_eq!(lines.next().unwrap(), "SigIgn:\t0000000000000000");
    assert_eq!(lines.next().unwrap(), "SigBlk:\t0000000000000000");
    let ids: Vec<_> = lines.next().unwrap().split_whitespace().collect();
    assert_eq!(ids[0], ids[1]);
}

#[tokio::test]
async fn requests_out_of_bounds_are_refused() {
    let client = in_process().await;
    let mut long = sh("a", "true");
    long.argv.push(vec![b'x'; 300 * 1024]);
    let mut nul = sh("b", "true");
    nul.argv.push(b"a\0b".to_vec());
    let mut env = sh("c", "true");
    env.env.insert("A=B".into(), "x".into());
    let mut relative = sh("d", "true");
    relative.cwd = b"tmp".to_vec();
    let empty = pb::StartJobRequest { job_id: "e".into(), ..Default::default() };
    for bad in [long, nul, env, relative, empty, sh("", "true"), sh("a b", "true")] {
        let error = client.streams().run_job(bad).await.unwrap_err();
        assert_eq!(error.code, connectrpc::ErrorCode::InvalidArgument);
    }
}
