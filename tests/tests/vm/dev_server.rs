//! Vite's dev server in a real machine, seen through a preview in a real browser: what is changed in the machine shows without a reload.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mainbrella_client::Upload;
use mainbrella_client::api::{CommandLine, CreatePreview, StartJob};
use mainbrella_tests::{Service, host, machine_body};
use serde_json::{Value, json};
use tokio::sync::mpsc;

/// Vite's own port.
const PORT: u32 = 5173;
/// Node and Vite start slowly under emulation.
const PATIENCE: Duration = Duration::from_secs(240);

/// A browser that follows one page. Ends when dropped.
struct Page {
    browser: Child,
    told: mpsc::UnboundedReceiver<Value>,
}

impl Page {
    fn open(url: &str) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vm/browser.py");
        let mut browser = Command::new("python3")
            .arg(script)
            .args(["--follow", url])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3");
        let lines = BufReader::new(browser.stdout.take().expect("piped")).lines();
        let (tell, told) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let _ = tell.send(serde_json::from_str(&line).expect("JSON"));
            }
        });
        Self { browser, told }
    }

    async fn next(&mut self) -> Value {
        let told = tokio::time::timeout(PATIENCE, self.told.recv()).await;
        told.expect("the page tells something in time").expect("the browser goes on")
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        drop(self.browser.stdin.take());
        let _ = self.browser.wait();
    }
}

/// The application with its packages, as a tar.
fn application() -> Vec<u8> {
    let dir = tempfile::tempdir().expect("a folder");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vm/vite");
    let script = "cp -r \"$1\"/. . && npm ci --no-audit --no-fund --loglevel=error >&2 && tar cf - .";
    let made = Command::new("sh").args(["-ec", script, "sh"]).arg(source).current_dir(dir.path()).output().expect("sh");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    made.stdout
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_in_the_machine_shows_in_the_browser_without_a_reload() {
    let found = ["/usr/bin/chromium", "/usr/bin/chromedriver"].iter().all(|p| Path::new(p).exists());
    assert!(found, "Debian packages chromium and chromium-driver are needed; ./run test installs them");
    let packed = tokio::task::spawn_blocking(application).await.expect("packed");
    let mut service = Service::start().await;
    let mut body = machine_body();
    (body.catalog_id, body.size) = ("node".to_owned(), "small".to_owned());
    let m = service.create(&body).await.unwrap_or_else(|e| panic!("create: {e:?}; log: {}", service.log()));
    let upload = Upload { length: Some(packed.len() as u64), bytes: futures::stream::iter([Ok(packed.into())]) };
    m.client.upload_tree(&m.name, "/workspace/app", upload).await.expect("unpacked");
    let mut vite =
        StartJob::new(CommandLine::Text("exec node_modules/.bin/vite --host 127.0.0.1 --strictPort".to_owned()));
    (vite.cwd, vite.timeout_ms) = (Some("/workspace/app".to_owned()), Some(600_000));
    m.client.start_job(&m.name, &vite, None).await.expect("started");
    let asked = CreatePreview { port: PORT, ttl_seconds: None };
    let preview = m.client.create_preview(&m.name, &asked, "vite").await.expect("a preview");
    host::until("Vite", PATIENCE, async || {
        m.sh(&format!("curl -sf -m 20 -o /dev/null http://127.0.0.1:{PORT}/ && echo up || echo down")).await.text()
            == "up\n"
    })
    .await;
    let url = preview.url.expect("told");
    let mut page = Page::open(&url);
    assert_eq!(page.next().await, json!({"value": "first", "loads": 1}));
    for value in ["second", "third"] {
        m.write("/workspace/app/src/value.js", format!("export const value = \"{value}\";\n")).await.expect("written");
        assert_eq!(page.next().await, json!({"value": value, "loads": 1}), "a hot update, not a reload");
    }
    drop(page);
    service.finish().await;
}
