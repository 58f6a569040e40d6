//! Believing a certificate authority: the host's gateway shows itself with certificates of it, to this machine alone.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::Path;

use connectrpc::ConnectError;
use mainbrella_guest_protocol::limits::CERTIFICATE_MAX;
use mainbrella_guest_protocol::pb;

/// Where Debian and most others have all authorities in one file.
const BUNDLE: &str = "etc/ssl/certs/ca-certificates.crt";
/// Where certificates of the administrator are, so that `update-ca-certificates` keeps ours.
const LOCAL: &str = "usr/local/share/ca-certificates/mainbrella-machine.crt";
/// Largest bundle that is added to, bytes; those of distributions have some hundred kilobytes.
const BUNDLE_MAX: u64 = 16 << 20;
/// Stand around ours in the bundle.
const BEGIN: &str = "# mainbrella machine authority\n";
const END: &str = "# end of mainbrella machine authority\n";

/// Checks a request before anything is changed.
pub(crate) fn check(request: &pb::TrustRequest) -> Result<(), ConnectError> {
    let pem = std::str::from_utf8(&request.certificate).unwrap_or("");
    if pem.len() > CERTIFICATE_MAX || !pem.starts_with("-----BEGIN CERTIFICATE-----\n") {
        return Err(ConnectError::invalid_argument("certificate: one certificate as PEM, at most 16 KiB"));
    }
    let hash = &request.subject_hash;
    if hash.len() != 8 || !hash.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(ConnectError::invalid_argument("subject_hash: eight hexadecimal digits"));
    }
    Ok(())
}

/// Puts the certificate where the system's libraries look: the one file, and the folder by the name OpenSSL gives it.
pub(crate) fn apply(request: &pb::TrustRequest, root: &Path) -> io::Result<()> {
    let pem = &request.certificate;
    let bundle = root.join(BUNDLE);
    let old = read(&bundle)?;
    let mut new = without_ours(&old);
    if !new.is_empty() && !new.ends_with('\n') {
        new.push('\n');
    }
    new.push_str(BEGIN);
    new.push_str(&String::from_utf8_lossy(pem));
    new.push_str(END);
    write(&bundle, new.as_bytes())?;
    write(&root.join(format!("etc/ssl/certs/{}.0", request.subject_hash)), pem)?;
    write(&root.join(LOCAL), pem)
}

/// What points programs with authorities of their own to the system's. What the machine's owner set counts more.
pub(crate) fn point(env: &mut HashMap<String, String>) {
    for (name, file) in [("SSL_CERT_FILE", BUNDLE), ("REQUESTS_CA_BUNDLE", BUNDLE), ("NODE_EXTRA_CA_CERTS", LOCAL)] {
        env.entry(name.to_owned()).or_insert_with(|| format!("/{file}"));
    }
}

/// The text of a file; none where there is no such file, or something else in its place, or too much of it.
fn read(file: &Path) -> io::Result<String> {
    use std::os::unix::fs::OpenOptionsExt;
    // A pipe would be waited for.
    let opened = fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(file);
    let mut opened = match opened {
        Ok(opened) => opened,
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENXIO | libc::ELOOP)) => {
            return Ok(String::new());
        }
        Err(e) => return Err(e),
    };
    let stat = opened.metadata()?;
    if !stat.is_file() || stat.len() > BUNDLE_MAX {
        return Ok(String::new());
    }
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut opened, &mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn without_ours(text: &str) -> String {
    match text.split_once(BEGIN) {
        Some((before, rest)) => {
            let after = rest.split_once(END).map_or("", |(_, after)| after);
            format!("{before}{after}")
        }
        None => text.to_owned(),
    }
}

/// Whole or not at all: a reader in between sees the old file.
fn write(file: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder)?;
    let half = folder.join(".mainbrella-half");
    fs::write(&half, bytes)?;
    fs::rename(&half, file).inspect_err(|_| drop(fs::remove_file(&half)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn request(pem: &str) -> pb::TrustRequest {
        pb::TrustRequest {
            certificate: format!("-----BEGIN CERTIFICATE-----\n{pem}\n-----END CERTIFICATE-----\n").into_bytes(),
            subject_hash: "0123abcd".into(),
            ..Default::default()
        }
    }

    #[test]
    fn it_is_added_once_and_takes_nothing_away() {
        let root = tempfile::tempdir().unwrap();
        let bundle = root.path().join(BUNDLE);
        // Also where there is nothing yet.
        apply(&request("first"), root.path()).unwrap();
        fs::write(&bundle, "-----BEGIN CERTIFICATE-----\nothers\n-----END CERTIFICATE-----").unwrap();
        apply(&request("first"), root.path()).unwrap();
        apply(&request("second"), root.path()).unwrap();
        let text = fs::read_to_string(&bundle).unwrap();
        assert_eq!((text.matches("others").count(), text.matches("second").count()), (1, 1));
        assert!(!text.contains("first"));
        assert!(text.contains("-----END CERTIFICATE-----\n# mainbrella"), "{text}");
        let named = fs::read(root.path().join("etc/ssl/certs/0123abcd.0")).unwrap();
        assert_eq!(named, request("second").certificate);
        assert_eq!(fs::read(root.path().join(LOCAL)).unwrap(), named);
        let left: Vec<_> = fs::read_dir(root.path().join("etc/ssl/certs")).unwrap().collect();
        assert_eq!(left.len(), 2, "nothing half made is left");
    }

    #[test]
    fn what_is_no_file_is_not_waited_for() {
        let root = tempfile::tempdir().unwrap();
        let bundle = root.path().join(BUNDLE);
        fs::create_dir_all(bundle.parent().unwrap()).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &bundle, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        apply(&request("first"), root.path()).unwrap();
        assert!(fs::read_to_string(&bundle).unwrap().contains("first"));
    }

    #[test]
    fn what_the_owner_set_counts_more() {
        let mut env = HashMap::from([("SSL_CERT_FILE".to_owned(), "/mine".to_owned())]);
        point(&mut env);
        assert_eq!(env["SSL_CERT_FILE"], "/mine");
        assert_eq!(env["REQUESTS_CA_BUNDLE"], "/etc/ssl/certs/ca-certificates.crt");
    }

    #[test]
    fn what_is_no_certificate_is_refused() {
        assert!(check(&request("x")).is_ok());
        assert!(check(&pb::TrustRequest { subject_hash: "../../etc".into(), ..request("x") }).is_err());
        assert!(check(&pb::TrustRequest { certificate: b"x".to_vec(), ..request("x") }).is_err());
        assert!(check(&pb::TrustRequest { certificate: vec![0xff; 40], ..request("x") }).is_err());
        assert!(check(&request(&"x".repeat(CERTIFICATE_MAX))).is_err());
    }
}
