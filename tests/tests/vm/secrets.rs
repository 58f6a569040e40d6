//! Secrets that real machines never see: programs with their own ideas of TLS, a host of the test's own world.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use mainbrella_client::api::fork::Reissue;
use mainbrella_client::api::{EgressPolicy, ForkMachine, OnFork, SecretBody, SecretForChildren, SecretOutcome};
use mainbrella_net::NetError;
use mainbrella_tests::{Machine, Service, Setup, machine_body};

use crate::network::{World, fetch, sh};

const VALUE: &str = "Bearer what-the-machine-never-sees";

/// The world with TLS for `good.example` and `other.example`, and the authority the host believes.
struct TlsWorld {
    world: World,
    child: Child,
    folder: tempfile::TempDir,
}

impl TlsWorld {
    fn new() -> Self {
        let (world, folder) = (World::new(), tempfile::tempdir().expect("a folder"));
        let at = folder.path().display();
        sh(&format!(
            "cd {at}; openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=world \
             -addext 'basicConstraints=critical,CA:TRUE' -keyout ca.key -out ca.pem 2>/dev/null; \
             openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=host -keyout host.key -out host.csr 2>/dev/null; \
             echo 'subjectAltName=DNS:good.example,DNS:other.example' >ext; \
             openssl x509 -req -in host.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile ext -out host.pem 2>/dev/null"
        ));
        let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/vm/tls_host.py");
        let mut child = world
            .namespace
            .run(|| {
                let mut python = Command::new("python3");
                python.arg(script).args([folder.path().join("host.pem"), folder.path().join("host.key")]);
                python.stdout(Stdio::piped()).spawn().map_err(|e| NetError::Io("python", e))
            })
            .expect("a host with TLS");
        let mut ready = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut ready).expect("a line");
        assert_eq!(ready, "ready\n");
        Self { world, child, folder }
    }

    fn setup(&self) -> Setup {
        let roots = self.folder.path().join("ca.pem").display().to_string();
        Setup { env: vec![("SSL_CERT_FILE".into(), roots)], ..self.world.setup() }
    }
}

impl Drop for TlsWorld {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn secret(host: &str) -> SecretBody {
    SecretBody {
        host: host.into(),
        port: None,
        header: Some("Authorization".into()),
        username: None,
        value: VALUE.into(),
        on_fork: OnFork::Drop,
    }
}

/// Asks the host with curl, with Python's own library, and through the proxy where there is one.
async fn every_way(machine: &Machine, proxy: bool) -> Vec<String> {
    let python = "import urllib.request as u; r = u.Request('https://good.example/', headers={'X-Own': '1'}); \
                  print(u.urlopen(r, timeout=30).read().decode(), end='')";
    let mut said = vec![
        machine.sh("curl -sS -m 30 -H 'X-Own: 1' https://good.example/ 2>&1").await.text(),
        machine.sh(&format!("python3 -c \"{python}\" 2>&1 | tail -n 1")).await.text(),
        machine.sh("env -u SSL_CERT_FILE curl -sS -m 30 -H 'X-Own: 1' https://good.example/ 2>&1").await.text(),
    ];
    if proxy {
        let through = "curl -sS -m 30 -x http://172.31.255.1:3128 -H 'X-Own: 1' https://good.example/ 2>&1";
        said.push(machine.sh(through).await.text());
    }
    said
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_carry_what_the_machine_never_sees_under_either_policy_and_after_a_kill() {
    let world = TlsWorld::new();
    let mut service = Service::with(world.setup()).await;
    let mut body = machine_body();
    body.egress = Some(EgressPolicy::allow_list(["good.example", "other.example"]));
    let listed = service.create(&body).await.expect("made");
    body.egress = Some(EgressPolicy::open());
    let open = service.create(&body).await.expect("made");
    // Without a secret the host's own certificate is what they see, and they do not know who made it.
    assert!(fetch(&listed, "https://good.example/").await.contains("none"));
    for machine in [&listed, &open] {
        service.client().set_secret(&machine.name, "good", &secret("good.example")).await.expect("put");
        // `open` machines ask the world's name server, which knows no `.example`: the one with a secret is answered here.
        for said in every_way(machine, machine.name == listed.name).await {
            assert_eq!(said, format!("{VALUE} 1\n"));
        }
    }
    // Nowhere inside is the value, nor the key of the authority.
    let found = listed.sh("env; grep -rls what-the-machine-never-sees /etc /root /run /tmp /usr/local /workspace; ls /usr/local/share/ca-certificates").await;
    assert!(!found.text().contains("what-the-machine"), "{}", found.text());
    assert_eq!(found.text().lines().last(), Some("mainbrella-machine.crt"));
    // A packed body of some size, both ways.
    let packed = "head -c 6000000 /dev/urandom | gzip >/tmp/sent && curl -sS -m 120 -T /tmp/sent -H 'Content-Encoding: gzip' \
                  -o /tmp/back https://good.example/ && cmp /tmp/sent /tmp/back && echo same";
    assert_eq!(listed.sh(packed).await.text(), "same\n");
    // Other hosts are none of its business: their TLS goes through as it is.
    assert!(fetch(&listed, "https://other.example/").await.contains("none"));
    assert_eq!(listed.sh("curl -sSk -m 30 https://other.example/").await.text(), "None None\n");

    service.crash().await;
    let (listed, open) = (service.attach(listed.name.clone()), service.attach(open.name.clone()));
    for machine in [&listed, &open] {
        for said in every_way(machine, false).await {
            assert_eq!(said, format!("{VALUE} 1\n"), "after a kill of the service");
        }
    }
    let log = service.log();
    assert!(!log.contains("what-the-machine"), "a log never has the value");
    service.client().remove_secret(&listed.name, "good").await.expect("removed");
    assert_eq!(listed.sh("curl -sSk -m 30 https://good.example/").await.text(), "None None\n");
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn children_of_a_fork_carry_what_they_were_given_under_an_authority_of_their_own() {
    let world = TlsWorld::new();
    let mut service = Service::with(world.setup()).await;
    let mut body = machine_body();
    body.egress = Some(EgressPolicy::allow_list(["good.example", "other.example"]));
    let trunk = service.create(&body).await.expect("made");
    let inherited = SecretBody { on_fork: OnFork::Inherit, ..secret("good.example") };
    service.client().set_secret(&trunk.name, "good", &inherited).await.expect("put");
    let authority = "openssl x509 -in /usr/local/share/ca-certificates/mainbrella-machine.crt -noout -fingerprint";
    let mut seen = vec![trunk.text(authority).await];
    let ask = |wish: Option<SecretForChildren>| ForkMachine {
        secrets: wish.map(|wish| ("good".to_owned(), wish)).into_iter().collect(),
        ..ForkMachine::default()
    };
    let another = Reissue { reissue: "Bearer another".into() };
    let wishes = [
        (None, SecretOutcome::Inherited, format!("{VALUE} 1\n")),
        (Some(SecretForChildren::Reissue(another)), SecretOutcome::Reissued, "Bearer another 1\n".to_owned()),
    ];
    let mut children = Vec::new();
    for (wish, outcome, value) in wishes {
        let made = trunk.client.fork(&trunk.name, &ask(wish), None).await.expect("forked");
        assert_eq!(made.receipts[0].secrets[0].outcome, outcome);
        children.push((mainbrella_client::MachineRef::from(&made.children[0]), value));
    }
    let drop = ask(Some(SecretForChildren::Plain(OnFork::Drop)));
    let none = trunk.client.fork(&trunk.name, &drop, None).await.expect("forked");
    // Before any of them has asked for anything, the service is killed.
    service.crash().await;
    for (name, value) in children {
        let child = service.attach(name);
        for said in every_way(&child, true).await {
            assert_eq!(said, value);
        }
        seen.push(child.text(authority).await);
    }
    let none = service.attach((&none.children[0]).into());
    assert!(fetch(&none, "https://good.example/").await.contains("none"), "it sees the host's own certificate");
    let trunk = service.attach(trunk.name.clone());
    for said in every_way(&trunk, true).await {
        assert_eq!(said, format!("{VALUE} 1\n"), "the source goes on as it was");
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 3, "each has an authority of its own: {seen:?}");
    assert!(!service.log().contains("what-the-machine") && !service.log().contains("another"));
    service.finish().await;
}
