//! `(id, createdAt)` and idempotency keys.

use mainbrella_client::api::{ExtendMachine, State};
use mainbrella_client::{ClientError, MachineRef};
use mainbrella_tests::{Service, machine_body};
use mainbrella_types::ErrorCode;

use crate::code;

#[tokio::test(flavor = "multi_thread")]
async fn an_old_name_never_touches_the_newer_machine_in_its_slot() {
    let mut service = Service::start().await;
    let mut body = machine_body();
    body.slot = Some("desk".into());
    let old = service.create(&body).await.expect("create");
    assert_eq!(code(service.create(&body).await), ErrorCode::SlotInUse);
    old.stop().await;
    let new = service.create(&body).await.expect("create again");
    assert_eq!(new.name.id, "desk");
    assert!(new.name.created_at > old.name.created_at);
    new.text("echo mine > /root/f").await;
    let deadline = new.record().await.hard_deadline_ms;

    assert_eq!(code(old.try_sh("rm /root/f").await), ErrorCode::GenerationMismatch);
    assert_eq!(code(old.write("/root/f", "theirs").await), ErrorCode::GenerationMismatch);
    assert_eq!(code(old.read("/root/f").await), ErrorCode::GenerationMismatch);
    let longer = ExtendMachine { ttl_seconds: Some(7200), ..ExtendMachine::default() };
    assert_eq!(code(service.client().extend(&old.name, &longer).await), ErrorCode::GenerationMismatch);
    match service.client().stop(&old.name).await {
        Ok(done) => assert_eq!(done.machine.created_at, old.name.created_at, "its own end is told"),
        Err(e) => assert_eq!(e.code(), Some(ErrorCode::GenerationMismatch)),
    }
    let never = service.attach(MachineRef { id: "desk".into(), created_at: "2020-01-01T00:00:00.000Z".into() });
    assert_eq!(code(never.try_sh("true").await), ErrorCode::GenerationMismatch);
    assert_eq!(code(service.client().stop(&never.name).await), ErrorCode::GenerationMismatch);

    assert_eq!(new.text("cat /root/f").await, "mine\n");
    let record = new.record().await;
    assert_eq!((record.state, record.hard_deadline_ms), (State::Running, deadline));
    assert_eq!(code(service.client().machine("desk", Some(&old.name.created_at)).await), ErrorCode::GenerationMismatch);
    let newest = service.client().machine("desk", None).await.expect("get");
    assert_eq!(newest.created_at, new.name.created_at);
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_idempotency_key_is_one_machine() {
    let mut service = Service::start().await;
    let body = machine_body();
    let client = service.client().clone();
    let creates = (0..8).map(|_| client.create(&body, Some("same-key")));
    let mut made = Vec::new();
    for answer in futures::future::join_all(creates).await {
        match answer {
            Ok(created) => made.push(created),
            // The first is still being made; asking again is what the code says.
            Err(e) if e.code() == Some(ErrorCode::InProgress) => {
                made.push(client.create_or_reconcile(&body, "same-key").await.expect("reconcile"));
            }
            Err(e) => panic!("{e:?}"),
        }
    }
    assert_eq!(made.iter().filter(|c| !c.replayed).count(), 1, "exactly one made it");
    let name = MachineRef::from(&made[0].machine);
    assert!(made.iter().all(|c| MachineRef::from(&c.machine) == name));
    assert_eq!(service.keys().len(), 1);
    let mut other = body.clone();
    other.ttl_seconds = Some(601);
    assert_eq!(code(client.create(&other, Some("same-key")).await), ErrorCode::IdempotencyConflict);
    let elsewhere = client.create(&body, Some("other-key")).await.expect("create");
    assert_ne!(MachineRef::from(&elsewhere.machine), name);

    service.crash().await;
    let again = service.client().create(&body, Some("same-key")).await.expect("replay after kill -9");
    assert!(again.replayed);
    assert_eq!(MachineRef::from(&again.machine), name);
    assert_eq!(code(service.client().create(&other, Some("same-key")).await), ErrorCode::IdempotencyConflict);
    service.attach(name.clone()).stop().await;
    let ended = service.client().create(&body, Some("same-key")).await.expect("replay of an ended machine");
    assert_eq!((MachineRef::from(&ended.machine), ended.machine.state), (name, State::Stopped));
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_minus_nine_in_the_middle_of_creates_leaves_one_machine_a_key() {
    let mut service = Service::start().await;
    // Spread over the whole of a create, which takes some 0.2 s.
    for (round, wait_ms) in [0u64, 8, 25, 60, 110, 170, 260].into_iter().enumerate() {
        let mut body = machine_body();
        body.metadata.insert("round".into(), round.to_string());
        let key = format!("round-{round}");
        let (client, first, sent) = (service.client().clone(), body.clone(), key.clone());
        let attempt = tokio::spawn(async move { client.create(&first, Some(&sent)).await });
        tokio::time::sleep(std::time::Duration::from_millis(wait_ms)).await;
        service.crash().await;
        let cut = attempt.await.expect("joined");
        let again = service.client().create_or_reconcile(&body, &key).await;
        let again = again.unwrap_or_else(|e| panic!("round {round}: {e:?}; log: {}", service.log()));
        let machine = service.attach(MachineRef::from(&again.machine));
        if let Ok(first) = cut {
            assert_eq!(MachineRef::from(&first.machine), machine.name, "round {round}: the same machine");
        } else {
            assert!(matches!(cut, Err(ClientError::Lost { .. } | ClientError::Connect { .. })), "{cut:?}");
        }
        assert_eq!(machine.text("echo alive").await, "alive\n", "round {round}");
        let living = service.list().await.iter().filter(|m| !m.state.is_final()).count();
        assert_eq!(
            (living, service.keys().len()),
            (round + 1, round + 1),
            "round {round}: no more than were asked for"
        );
    }
    service.finish().await;
}
