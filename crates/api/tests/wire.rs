//! The wire as bytes: what is sent looks as documented, what is not documented is refused.

use mainbrella_api::{
    CodeEvent, CommandLine, CommandResult, CreateKey, CreateMachine, ErrorBody, ExtendMachine, JobEventKind, JobFrame,
    KeyRole, Machine, NewKey, RunCommand, State,
};
use mainbrella_types::{ErrorCode, MachineState};
use serde_json::json;
use utoipa::PartialSchema as _;

#[test]
fn a_create_needs_only_a_template_and_has_the_documented_defaults() {
    let c: CreateMachine = serde_json::from_value(json!({"catalogId": "python"})).expect("minimal");
    assert_eq!(c, CreateMachine::new("python"));
    assert_eq!(c.size, "small");
    assert!(!c.persistent);
    let c: CreateMachine =
        serde_json::from_value(json!({"catalogId": "python", "internet": null, "slot": null})).expect("nulls");
    assert_eq!(c, CreateMachine::new("python"));
}

#[test]
fn requests_refuse_unknown_fields_and_replies_tolerate_them() {
    assert!(serde_json::from_value::<CreateMachine>(json!({"catalogId": "python", "ttl": 1})).is_err());
    assert!(serde_json::from_value::<ExtendMachine>(json!({"ttl_seconds": 100})).is_err());
    assert!(serde_json::from_value::<RunCommand>(json!({"command": "ls", "shell": true})).is_err());
    assert!(serde_json::from_value::<CreateKey>(json!({"name": "a", "role": "user", "x": 1})).is_err());
    assert!(serde_json::from_value::<CreateKey>(json!({"name": "a", "role": "root"})).is_err());
    let e: ErrorBody = serde_json::from_value(
        json!({"code": "from_the_future", "message": "m", "hint": "h", "requestId": "r", "more": 1}),
    )
    .expect("grows");
    assert_eq!(e.known_code(), None);
}

#[test]
fn every_error_code_is_known_by_its_wire_name() {
    for c in ErrorCode::ALL {
        let e = ErrorBody {
            code: c.as_str().into(),
            message: String::new(),
            hint: String::new(),
            request_id: String::new(),
            preview_id: None,
        };
        assert_eq!(e.known_code(), Some(*c));
    }
}

#[test]
fn a_command_is_text_or_arguments() {
    let run = |v| serde_json::from_value::<RunCommand>(json!({"command": v})).map(|r| r.command);
    assert_eq!(run(json!("ls -l")).expect("text"), CommandLine::Text("ls -l".into()));
    assert_eq!(run(json!(["ls", "-l"])).expect("argv"), CommandLine::Argv(vec!["ls".into(), "-l".into()]));
    assert!(run(json!(7)).is_err());
    assert!(run(json!(["ls", 7])).is_err());
}

#[test]
fn states_have_the_names_of_the_vocabulary_in_both_directions() {
    for s in MachineState::ALL {
        let wire = State::from(s);
        assert_eq!(serde_json::to_value(wire).expect("name"), json!(s.as_str()));
        assert_eq!(MachineState::from(wire), s);
        assert_eq!(wire.is_final(), s.is_final());
    }
    for r in [KeyRole::Admin, KeyRole::User] {
        assert_eq!(serde_json::to_value(r).expect("name"), json!(r.as_str()));
    }
}

#[test]
fn a_machine_looks_as_documented() {
    let text = r#"{"id":"a","createdAt":"2026-10-08T12:00:00.000Z","state":"failed","forkedFrom":"b@2026-10-08T11:00:00.000Z","restoredFrom":"s-0123456789abcdef0123456789abcdef","catalogId":"python","size":"small",
        "internet":true,"egress":{"policy":"allow-list","rules":["a.example"],"dryRun":true},"metadata":{"k":"v"},"isolation":"emulated","limits":{"memoryMib":1024,"vcpus":1,"diskMib":8192},
        "hardDeadlineMs":5,"idleTimeoutSeconds":null,"onIdle":"pause","autoResume":true,"idleDeadlineMs":null,"startedAtMs":1,"endedAtMs":2,
        "reason":{"code":"vmm_died","message":"m"},
        "capabilities":{"commands":true,"files":true,"internet":false,"previews":false,"memorySnapshot":false,"pauseResume":false,"fork":false}}"#;
    let value: serde_json::Value = serde_json::from_str(text).expect("JSON");
    let machine: Machine = serde_json::from_value(value.clone()).expect("a machine");
    assert_eq!(serde_json::to_value(&machine).expect("back"), value, "null fields stay visible");
}

#[test]
fn a_result_keeps_null_fields_visible() {
    let r = CommandResult {
        exit_code: -1,
        signal: None,
        timed_out: true,
        stdout_base64: String::new(),
        stderr_base64: String::new(),
        stdout_bytes: 0,
        stderr_bytes: 0,
        stdout_omitted: None,
        stderr_omitted: None,
        duration_ms: 7,
        job_id: "j".into(),
        still_running: false,
    };
    let v = serde_json::to_value(r).expect("JSON");
    assert_eq!(
        v,
        json!({"exitCode": -1, "signal": null, "timedOut": true, "stdoutBase64": "", "stderrBase64": "", "stdoutBytes": 0,
               "stderrBytes": 0, "stdoutOmitted": null, "stderrOmitted": null, "durationMs": 7,
               "jobId": "j", "stillRunning": false})
    );
}

#[test]
fn secrets_do_not_show_in_debug_output() {
    let k =
        NewKey { id: "0".into(), name: "n".into(), role: KeyRole::User, created_at_ms: 0, secret: "hush-hush".into() };
    assert!(!format!("{k:?}").contains("hush"));
    let mut c = CreateMachine::new("python");
    c.env.insert("TOKEN".into(), "hush-hush".into());
    let shown = format!("{c:?}");
    assert!(shown.contains("TOKEN") && !shown.contains("hush"));
}

#[test]
fn events_and_frames_are_described_as_they_are_written() {
    fn names(v: &serde_json::Value, found: &mut Vec<String>) {
        if let Some(properties) = v["properties"].as_object() {
            found.extend(properties.keys().cloned());
        }
        match v {
            serde_json::Value::Object(map) => map.values().for_each(|v| names(v, found)),
            serde_json::Value::Array(list) => list.iter().for_each(|v| names(v, found)),
            _ => {}
        }
    }
    let described = json!([JobEventKind::schema(), JobFrame::schema(), CodeEvent::schema()]);
    let mut found = vec![];
    names(&described, &mut found);
    // The description does not follow every attribute of serde.
    for name in ["dataBase64", "stdoutBytes", "durationMs", "executionCount"] {
        assert!(found.iter().any(|n| n == name), "{name} {found:?}");
    }
    assert!(found.iter().all(|name| !name.contains('_')), "{found:?}");
    let frame = json!({"type": "stdin", "dataBase64": "YQ=="});
    assert_eq!(json!(serde_json::from_value::<JobFrame>(frame.clone()).expect("as described")), frame);
    assert!(serde_json::from_value::<JobFrame>(json!({"type": "stdin", "data_base64": "YQ=="})).is_err());
}
