//! Which Debian archive this host uses: found in its own apt sources, never written in our code.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::error::ImageError;
use super::progress::Progress;
use super::sources::{self, Source};
use super::tool::Tool;

/// The keys every download is verified with.
const KEYRINGS: [&str; 2] =
    ["/usr/share/keyrings/debian-archive-keyring.gpg", "/usr/share/keyrings/debian-archive-keyring.pgp"];
/// Time limit of the questions put to apt, which touch no network.
const ASK: Duration = Duration::from_secs(60);
/// Debian release names a host's sources may carry.
const RELEASES: [&str; 12] = [
    "stable",
    "oldstable",
    "oldoldstable",
    "testing",
    "unstable",
    "sid",
    "buster",
    "bullseye",
    "bookworm",
    "trixie",
    "forky",
    "duke",
];

/// Where Debian packages come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mirror {
    /// URI of the archive that serves Debian `main`, without a final slash.
    pub main: String,
    /// Whether it serves `SUITE-updates` too.
    pub updates: bool,
    /// URI of the archive that serves `SUITE-security`, if the host has one.
    pub security: Option<String>,
}

/// What apt knows of an archive from a release file it verified before.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Evidence {
    uri: String,
    suite: String,
    origin: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Main,
    Updates,
    Security,
}

impl Mirror {
    /// The mirror this host's apt is configured with.
    ///
    /// # Errors
    /// [`ImageError::NoMirror`] when no source is one of Debian's; [`ImageError::MissingTool`] without apt.
    pub fn of_host(progress: &dyn Progress) -> Result<Self, ImageError> {
        let shell = Tool::new("apt-config", "apt", ASK)?
            .args(["shell", "LIST", "Dir::Etc::sourcelist/f", "PARTS", "Dir::Etc::sourceparts/d"])
            .run(progress)?;
        let shell = String::from_utf8_lossy(&shell).into_owned();
        let value = |name: &str| {
            let line = shell.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix('='))?;
            Some(PathBuf::from(line.trim_matches('\'')))
        };
        let mut found = Vec::new();
        if let Some(list) = value("LIST") {
            found.extend(read_sources(&list));
        }
        if let Some(parts) = value("PARTS") {
            let mut files: Vec<_> =
                std::fs::read_dir(parts).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
            files.sort();
            found.extend(files.iter().flat_map(|f| read_sources(f)));
        }
        // Unverified or never fetched indexes are simply not in the answer.
        let targets = Tool::new("apt-get", "apt", ASK)?
            .args(["indextargets", "--format", "$(REPO_URI)|$(RELEASE)|$(ORIGIN)", "Created-By: Packages"])
            .run(progress)
            .unwrap_or_default();
        choose(&found, &evidence(&String::from_utf8_lossy(&targets)), &read_mirror_list).ok_or(ImageError::NoMirror)
    }

    /// Lines of a one-line sources file for `suite`, verified with `keyring`; `options` go between the brackets too.
    pub(super) fn list(&self, suite: &str, keyring: &str, options: &str) -> String {
        let line = |uri: &str, suite: &str| format!("deb [signed-by={keyring}{options}] {uri} {suite} main\n");
        let mut text = line(&self.main, suite);
        if self.updates {
            text.push_str(&line(&self.main, &format!("{suite}-updates")));
        }
        if let Some(uri) = &self.security {
            text.push_str(&line(uri, &format!("{suite}-security")));
        }
        text
    }

    /// The deb822 sources file of a guest: the same archives, without any credentials in their URIs.
    pub(super) fn guest_sources(&self, suite: &str) -> String {
        let stanza = |uri: &str, suites: &str| {
            let uri = without_credentials(uri);
            format!("Types: deb\nURIs: {uri}\nSuites: {suites}\nComponents: main\nSigned-By: {}\n", KEYRINGS[0])
        };
        let updates = if self.updates { format!(" {suite}-updates") } else { String::new() };
        let mut text = stanza(&self.main, &format!("{suite}{updates}"));
        if let Some(uri) = &self.security {
            text.push('\n');
            text.push_str(&stanza(uri, &format!("{suite}-security")));
        }
        text
    }
}

/// The key file of the Debian archive on this host.
pub(super) fn keyring() -> Result<&'static str, ImageError> {
    KEYRINGS
        .into_iter()
        .find(|path| Path::new(path).is_file())
        .ok_or(ImageError::MissingTool { tool: "debian-archive-keyring.gpg", package: "debian-archive-keyring" })
}

/// Settings of the host's apt that reaching its mirror depends on (proxies, address family, clock checks),
/// as lines of an apt configuration file.
pub(super) fn transport_settings(progress: &dyn Progress) -> Result<Vec<String>, ImageError> {
    let dump =
        Tool::new("apt-config", "apt", ASK)?.args(["dump", "--no-empty", "--format", "%F \"%v\";%n"]).run(progress)?;
    Ok(relevant_settings(&String::from_utf8_lossy(&dump)))
}

fn relevant_settings(dump: &str) -> Vec<String> {
    const WANTED: [&str; 8] = [
        "Acquire::http::Proxy",
        "Acquire::https::Proxy",
        "Acquire::https::CaInfo",
        "Acquire::Check-Valid-Until",
        "Acquire::Check-Date",
        "Acquire::Max-ValidTime",
        "Acquire::ForceIPv4",
        "Acquire::ForceIPv6",
    ];
    let wanted = |line: &&str| {
        let name = line.split_once(' ').map_or(*line, |(name, _)| name);
        WANTED.iter().any(|w| name.strip_prefix(w).is_some_and(|rest| rest.is_empty() || rest.starts_with("::")))
    };
    dump.lines().filter(wanted).map(str::to_owned).collect()
}

/// Those of `settings` a guest needs to use the same mirror: clock checks only, no proxy, no path of the host.
pub(super) fn guest_settings(settings: &[String]) -> String {
    let kept = settings.iter().filter(|s| s.starts_with("Acquire::Check-") || s.starts_with("Acquire::Max-ValidTime"));
    kept.fold(String::new(), |text, line| text + line + "\n")
}

fn read_sources(path: &Path) -> Vec<Source> {
    let Ok(text) = std::fs::read_to_string(path) else { return Vec::new() };
    match path.extension().and_then(|e| e.to_str()) {
        Some("list") => sources::one_line(&text),
        Some("sources") => sources::deb822(&text),
        _ => Vec::new(),
    }
}

fn read_mirror_list(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn evidence(targets: &str) -> Vec<Evidence> {
    let entry = |line: &str| {
        let mut parts = line.split('|');
        let (uri, suite, origin) = (parts.next()?, parts.next()?, parts.next()?);
        // A field apt does not know is left as it was written.
        let origin = if origin.starts_with("$(") { "" } else { origin };
        Some(Evidence { uri: bare(uri).to_owned(), suite: suite.to_owned(), origin: origin.to_owned() })
    };
    targets.lines().filter_map(entry).collect()
}

fn bare(uri: &str) -> &str {
    uri.trim_end_matches('/')
}

fn kind(suite: &str) -> Option<Kind> {
    let suite = suite.trim_end_matches('/');
    let known = |release: &str| RELEASES.contains(&release);
    if known(suite) {
        Some(Kind::Main)
    } else if suite.strip_suffix("-security").or(suite.strip_suffix("/updates")).is_some_and(known) {
        Some(Kind::Security)
    } else if suite.strip_suffix("-updates").is_some_and(known) {
        Some(Kind::Updates)
    } else {
        None
    }
}

/// How sure it is that `uri` is Debian's archive: 3 verified before, 2 by its key, 1 by its path, `None` not.
fn trust(source: &Source, uri: &str, suite: &str, kind: Kind, evidence: &[Evidence]) -> Option<u8> {
    let known = evidence.iter().find(|e| e.uri == bare(uri) && e.suite == suite.trim_end_matches('/'));
    match known.map(|e| e.origin.as_str()) {
        Some("Debian") => return Some(3),
        Some("") | None => {}
        Some(_) => return None,
    }
    match &source.signed_by {
        Some(key) => key.contains("debian-archive-").then_some(2),
        None => {
            let last = bare(uri).rsplit('/').next()?;
            let fits = last == "debian" || (kind == Kind::Security && last == "debian-security");
            fits.then_some(1)
        }
    }
}

/// A URI a guest could use as well: http or https, `mirror+file:` lists replaced by their first entry.
fn usable(uri: &str, read: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    if uri.starts_with("http://") || uri.starts_with("https://") {
        return Some(bare(uri).to_owned());
    }
    let path = uri.strip_prefix("mirror+file:").or(uri.strip_prefix("mirror:file:"))?;
    let text = read(&format!("/{}", path.trim_start_matches('/')))?;
    let entries = text.lines().filter_map(|l| l.split_whitespace().next());
    entries.filter(|e| e.starts_with("http://") || e.starts_with("https://")).map(|e| bare(e).to_owned()).next()
}

fn choose(found: &[Source], evidence: &[Evidence], read: &dyn Fn(&str) -> Option<String>) -> Option<Mirror> {
    let mut main: Option<(u8, String)> = None;
    let mut security: Option<(u8, String)> = None;
    let mut updates = Vec::new();
    for source in found.iter().filter(|s| s.components.iter().any(|c| c == "main" || c == "updates/main")) {
        for uri in &source.uris {
            for suite in &source.suites {
                let Some(kind) = kind(suite) else { continue };
                let Some(trust) = trust(source, uri, suite, kind, evidence) else { continue };
                let Some(uri) = usable(uri, read) else { continue };
                let place = match kind {
                    Kind::Updates => {
                        updates.push(uri);
                        continue;
                    }
                    Kind::Main => &mut main,
                    Kind::Security => &mut security,
                };
                if place.as_ref().is_none_or(|(best, _)| trust > *best) {
                    *place = Some((trust, uri));
                }
            }
        }
    }
    let (_, main) = main?;
    Some(Mirror { updates: updates.contains(&main), main, security: security.map(|(_, uri)| uri) })
}

fn without_credentials(uri: &str) -> String {
    let Some((scheme, rest)) = uri.split_once("://") else { return uri.to_owned() };
    let (host, path) = rest.split_once('/').map_or((rest, None), |(h, p)| (h, Some(p)));
    let host = host.rsplit('@').next().unwrap_or(host);
    path.map_or_else(|| format!("{scheme}://{host}"), |p| format!("{scheme}://{host}/{p}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEB822: &str = "Types: deb\nURIs: http://cache.test/debian/\nSuites: bookworm bookworm-updates bookworm-backports\n\
        Components: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n\n\
        Types: deb\nURIs: http://cache.test/debian-security\nSuites: bookworm-security\nComponents: main\n\
        Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n";

    fn pick(found: &[Source], targets: &str) -> Option<Mirror> {
        choose(found, &evidence(targets), &|_| None)
    }

    #[test]
    fn deb822_with_updates_and_security() {
        let mirror = pick(&sources::deb822(DEB822), "").expect("found");
        assert_eq!(
            mirror,
            Mirror {
                main: "http://cache.test/debian".into(),
                updates: true,
                security: Some("http://cache.test/debian-security".into())
            }
        );
        assert_eq!(
            mirror.list("trixie", "/k.gpg", " arch=amd64"),
            "deb [signed-by=/k.gpg arch=amd64] http://cache.test/debian trixie main\n\
             deb [signed-by=/k.gpg arch=amd64] http://cache.test/debian trixie-updates main\n\
             deb [signed-by=/k.gpg arch=amd64] http://cache.test/debian-security trixie-security main\n"
        );
    }

    #[test]
    fn one_line_with_the_old_security_layout() {
        let text = "deb http://a.test/debian bullseye main\ndeb http://s.test/debian-security bullseye/updates main\n";
        let mirror = pick(&sources::one_line(text), "").expect("found");
        assert_eq!(mirror.security.as_deref(), Some("http://s.test/debian-security"));
        assert!(!mirror.updates);
    }

    #[test]
    fn third_party_repositories_are_ignored_even_when_they_look_alike() {
        let third = "deb [signed-by=/etc/apt/keyrings/vendor.gpg] https://vendor.test/debian bookworm main\n\
            deb https://vendor.test/linux/debian bookworm stable\n\
            deb https://graphs.test/oss/deb stable main\n\
            deb http://pg.test/pub/repos/apt bookworm-pgdg main\n\
            deb http://evil.test/debian bookworm main\n";
        let origin = "http://evil.test/debian/|bookworm|Somebody\n";
        assert_eq!(pick(&sources::one_line(third), origin), None);
        let mut all = sources::one_line(third);
        all.extend(sources::deb822(DEB822));
        assert_eq!(pick(&all, origin).expect("found").main, "http://cache.test/debian");
    }

    #[test]
    fn what_apt_verified_before_wins_over_looks() {
        let text = "deb http://guess.test/debian trixie main\n\
                    deb [signed-by=/etc/keys/ours.gpg] https://proxy.test/repository/apt-debian trixie main\n";
        let targets =
            "https://proxy.test/repository/apt-debian/|trixie|Debian\nhttp://guess.test/debian/|trixie|$(ORIGIN)\n";
        assert_eq!(
            pick(&sources::one_line(text), targets).expect("found").main,
            "https://proxy.test/repository/apt-debian"
        );
        assert_eq!(pick(&sources::one_line(text), "").expect("found").main, "http://guess.test/debian");
    }

    #[test]
    fn mirror_lists_are_followed_and_media_are_not_used() {
        let text = "Types: deb\nURIs: mirror+file:///etc/apt/mirrors/debian.list\nSuites: trixie\nComponents: main\n\
                    Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n";
        let read = |path: &str| {
            assert_eq!(path, "/etc/apt/mirrors/debian.list");
            Some("# ours\nhttps://near.test/debian/\tpriority:1\n".to_owned())
        };
        assert_eq!(choose(&sources::deb822(text), &[], &read).expect("found").main, "https://near.test/debian");
        assert_eq!(
            pick(&sources::one_line("deb cdrom:[Debian]/ trixie main\ndeb file:/srv/debian trixie main\n"), ""),
            None
        );
    }

    #[test]
    fn a_guest_gets_the_same_mirror_without_credentials() {
        let mirror = Mirror { main: "https://me:secret@m.test:8443/debian".into(), updates: true, security: None };
        let text = mirror.guest_sources("trixie");
        assert!(text.contains("URIs: https://m.test:8443/debian\nSuites: trixie trixie-updates\n"), "{text}");
        assert!(!text.contains("secret"));
    }

    #[test]
    fn only_settings_about_reaching_the_mirror_are_taken_over() {
        let dump = "APT::Architecture \"amd64\";\nAcquire::http::Proxy \"http://p.test:3142\";\n\
            Acquire::http::Proxy::m.test \"DIRECT\";\nAcquire::http::ProxyX \"no\";\nAcquire::AllowInsecureRepositories \"1\";\n\
            Acquire::Check-Valid-Until \"false\";\n";
        let settings = relevant_settings(dump);
        assert_eq!(
            settings,
            [
                "Acquire::http::Proxy \"http://p.test:3142\";",
                "Acquire::http::Proxy::m.test \"DIRECT\";",
                "Acquire::Check-Valid-Until \"false\";"
            ]
        );
        assert_eq!(guest_settings(&settings), "Acquire::Check-Valid-Until \"false\";\n");
    }
}
