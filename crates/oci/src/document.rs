//! The documents of an image: index, manifest, configuration.

use std::collections::BTreeMap;
use std::time::Duration;

use mainbrella_types::limits::{
    ARGV_ENTRIES_MAX, COMMAND_BYTES_MAX, ENV_BYTES_MAX, ENV_ENTRIES_MAX, IMAGE_LAYERS_MAX, IMAGE_TRANSFER_MAX,
};
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::error::{OciError, shown};

/// Manifests of one index that are looked at.
const INDEX_MAX: usize = 1000;

/// Something that an image has, by its digest.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    #[serde(default)]
    pub(crate) media_type: String,
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    #[serde(default)]
    platform: Option<Platform>,
    #[serde(default)]
    pub(crate) annotations: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Clone, Deserialize)]
struct Platform {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    #[serde(default)]
    variant: Option<String>,
}

/// Either of two documents that a name can stand for.
#[derive(Debug)]
pub(crate) enum Document {
    Index(Vec<Descriptor>),
    Manifest(Manifest),
}

/// An image for one platform.
#[derive(Debug)]
pub(crate) struct Manifest {
    pub(crate) config: Descriptor,
    pub(crate) layers: Vec<Descriptor>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Raw {
    schema_version: u32,
    #[serde(default)]
    manifests: Option<Vec<Descriptor>>,
    #[serde(default)]
    config: Option<Descriptor>,
    #[serde(default)]
    layers: Option<Vec<Descriptor>>,
}

/// Reads an index or a manifest.
pub(crate) fn document(bytes: &[u8]) -> Result<Document, OciError> {
    // An old form has neither; what it lacks says too little of what is wrong.
    let raw: Raw = serde_json::from_slice(bytes)
        .map_err(|e| OciError::malformed(format!("a manifest of the image is malformed: {}", shown(&e.to_string()))))?;
    if raw.schema_version != 2 {
        return Err(OciError::Unsupported("an image in the form of the first registries".to_owned()));
    }
    match (raw.manifests, raw.config, raw.layers) {
        (Some(list), None, None) if list.len() <= INDEX_MAX => Ok(Document::Index(list)),
        (Some(_), None, None) => {
            Err(OciError::Limit { what: "manifests in the index of an image", max: INDEX_MAX as u64 })
        }
        (None, Some(config), Some(layers)) => Ok(Document::Manifest(Manifest::checked(config, layers)?)),
        _ => Err(OciError::malformed("a manifest of the image is neither an index nor a manifest")),
    }
}

impl Manifest {
    fn checked(config: Descriptor, layers: Vec<Descriptor>) -> Result<Self, OciError> {
        if layers.len() > IMAGE_LAYERS_MAX {
            return Err(OciError::Limit { what: "layers of an image", max: IMAGE_LAYERS_MAX as u64 });
        }
        let total = layers.iter().try_fold(config.size, |sum, l| sum.checked_add(l.size));
        if total.is_none_or(|t| t > IMAGE_TRANSFER_MAX) {
            return Err(OciError::Limit { what: "bytes of an image's layers", max: IMAGE_TRANSFER_MAX });
        }
        for layer in &layers {
            let kind = layer.media_type.as_str();
            let known = ["application/vnd.oci.image.layer.v1.tar", "application/vnd.docker.image.rootfs.diff.tar"];
            let fine = kind.is_empty()
                || known.iter().any(|k| {
                    kind.strip_prefix(k).is_some_and(|end| matches!(end, "" | "+gzip" | ".gzip" | "+zstd" | ".zstd"))
                });
            if !fine {
                return Err(OciError::Unsupported(format!("a layer of the kind `{}`", shown(kind))));
            }
        }
        Ok(Self { config, layers })
    }
}

/// The manifest of an index that is for our machines.
pub(crate) fn choose(list: &[Descriptor]) -> Result<&Descriptor, OciError> {
    let ours = |p: &Platform| p.os == "linux" && p.architecture == "amd64";
    let of = |plain: bool| {
        list.iter().find(move |d| d.platform.as_ref().is_some_and(|p| ours(p) && (p.variant.is_none() || !plain)))
    };
    if let Some(found) = of(true).or_else(|| of(false)) {
        return Ok(found);
    }
    // One alone need not say; its configuration does.
    if let [one] = list
        && one.platform.is_none()
    {
        return Ok(one);
    }
    let mut names: Vec<String> = list
        .iter()
        .filter_map(|d| d.platform.as_ref())
        .filter(|p| p.os != "unknown")
        .map(|p| shown(&format!("{}/{}", p.os, p.architecture)))
        .take(20)
        .collect();
    names.dedup();
    Err(OciError::Platform(if names.is_empty() { "what it does not name".to_owned() } else { names.join(", ") }))
}

/// How to tell that what an image starts is ready.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Health {
    /// The command; a line for a shell when [`Self::line`].
    pub test: Vec<String>,
    /// [`Self::test`] is one line for the image's shell.
    pub line: bool,
    /// Between tries.
    pub interval: Option<Duration>,
    /// Longest time of one try.
    pub timeout: Option<Duration>,
    /// How long failures do not count.
    pub start_period: Option<Duration>,
    /// Between tries in that time.
    pub start_interval: Option<Duration>,
    /// Failures in a row that count.
    pub retries: Option<u32>,
}

/// What an image says of how it is run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ImageConfig {
    /// Environment, in order.
    pub env: Vec<(String, String)>,
    /// Directory commands begin in; may be empty.
    pub workdir: String,
    /// User and perhaps group; may be empty.
    pub user: String,
    /// Words in front of [`Self::cmd`].
    pub entrypoint: Vec<String>,
    /// Words of the start command, or those behind the entry point.
    pub cmd: Vec<String>,
    /// What runs a command that is given as a line; may be empty.
    pub shell: Vec<String>,
    /// Ports, as in `80/tcp`.
    pub ports: Vec<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// How to tell that it is ready.
    pub health: Option<Health>,
}

#[derive(Deserialize)]
struct RawImage {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    #[serde(default)]
    config: Option<RawConfig>,
    rootfs: RawRoot,
}

#[derive(Deserialize)]
struct RawRoot {
    #[serde(rename = "type")]
    kind: String,
    diff_ids: Vec<Digest>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase", default)]
struct RawConfig {
    env: Option<Vec<String>>,
    working_dir: Option<String>,
    user: Option<String>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    shell: Option<Vec<String>>,
    exposed_ports: Option<BTreeMap<String, serde::de::IgnoredAny>>,
    labels: Option<BTreeMap<String, String>>,
    healthcheck: Option<RawHealth>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase", default)]
struct RawHealth {
    test: Option<Vec<String>>,
    interval: Option<i64>,
    timeout: Option<i64>,
    start_period: Option<i64>,
    start_interval: Option<i64>,
    retries: Option<i64>,
}

/// Reads a configuration: how the image is run, and the digest of each layer when unpacked.
pub(crate) fn config(bytes: &[u8]) -> Result<(ImageConfig, Vec<Digest>), OciError> {
    let raw: RawImage = serde_json::from_slice(bytes).map_err(|e| {
        OciError::malformed(format!("the configuration of the image is malformed: {}", shown(&e.to_string())))
    })?;
    if (raw.os.as_str(), raw.architecture.as_str()) != ("linux", "amd64") {
        return Err(OciError::Platform(shown(&format!("{}/{}", raw.os, raw.architecture))));
    }
    if raw.rootfs.kind != "layers" || raw.rootfs.diff_ids.len() > IMAGE_LAYERS_MAX {
        return Err(OciError::malformed("the configuration of the image does not list its layers"));
    }
    let c = raw.config.unwrap_or_default();
    let mut env = Vec::new();
    for one in c.env.unwrap_or_default() {
        // Without a value it would stand for the one of who runs the image: there is none.
        if let Some((name, value)) = one.split_once('=').filter(|(name, _)| !name.is_empty()) {
            env.push((name.to_owned(), value.to_owned()));
        }
    }
    let config = ImageConfig {
        env,
        workdir: c.working_dir.unwrap_or_default(),
        user: c.user.unwrap_or_default(),
        entrypoint: c.entrypoint.unwrap_or_default(),
        cmd: c.cmd.unwrap_or_default(),
        shell: c.shell.unwrap_or_default(),
        ports: c.exposed_ports.unwrap_or_default().into_keys().collect(),
        labels: c.labels.unwrap_or_default(),
        health: c.healthcheck.and_then(health),
    };
    check(&config)?;
    Ok((config, raw.rootfs.diff_ids))
}

fn health(raw: RawHealth) -> Option<Health> {
    let time = |ns: Option<i64>| ns.and_then(|n| u64::try_from(n).ok()).filter(|n| *n > 0).map(Duration::from_nanos);
    let mut words = raw.test.unwrap_or_default().into_iter();
    let line = match words.next()?.as_str() {
        "CMD" => false,
        "CMD-SHELL" => true,
        // `NONE`, or nothing that is known.
        _ => return None,
    };
    let test: Vec<String> = words.collect();
    (!test.is_empty()).then(|| Health {
        test,
        line,
        interval: time(raw.interval),
        timeout: time(raw.timeout),
        start_period: time(raw.start_period),
        start_interval: time(raw.start_interval),
        retries: raw.retries.and_then(|n| u32::try_from(n).ok()).filter(|n| *n > 0),
    })
}

fn check(c: &ImageConfig) -> Result<(), OciError> {
    let limit = |what, max: usize| Err(OciError::Limit { what, max: max as u64 });
    if c.env.len() > ENV_ENTRIES_MAX {
        return limit("variables of an image", ENV_ENTRIES_MAX);
    }
    if c.env.iter().map(|(k, v)| k.len() + v.len()).sum::<usize>() > ENV_BYTES_MAX {
        return limit("bytes of an image's variables", ENV_BYTES_MAX);
    }
    let words = [&c.entrypoint, &c.cmd, &c.shell].into_iter().flatten().chain(c.health.iter().flat_map(|h| &h.test));
    let (mut count, mut bytes, mut nul) = (0, 0, false);
    for word in words {
        count += 1;
        bytes += word.len() + 1;
        nul |= word.contains('\0');
    }
    if count > ARGV_ENTRIES_MAX || bytes > COMMAND_BYTES_MAX {
        return limit("bytes of an image's commands", COMMAND_BYTES_MAX);
    }
    nul |= c.env.iter().any(|(k, v)| k.contains('\0') || v.contains('\0'))
        || c.workdir.contains('\0')
        || c.user.contains('\0');
    if nul { Err(OciError::malformed("the configuration of the image has a NUL in it")) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn digest(n: u8) -> String {
        Digest::of(&[n]).to_string()
    }

    #[test]
    fn the_manifest_for_our_machines_is_chosen() {
        let one = |n: u8, platform: &str| format!("{{\"digest\":\"{}\",\"size\":1{platform}}}", digest(n));
        let p = |os: &str, arch: &str, more: &str| {
            format!(",\"platform\":{{\"os\":\"{os}\",\"architecture\":\"{arch}\"{more}}}")
        };
        let index = |list: &[String]| match document(
            format!("{{\"schemaVersion\":2,\"manifests\":[{}]}}", list.join(",")).as_bytes(),
        )
        .expect("valid")
        {
            Document::Index(list) => list,
            Document::Manifest(_) => panic!("an index"),
        };
        let chosen = |list: &[String]| choose(&index(list)).map(|d| d.digest.to_string());
        let arm = one(1, &p("linux", "arm64", ""));
        let amd = one(2, &p("linux", "amd64", ""));
        let v3 = one(3, &p("linux", "amd64", ",\"variant\":\"v3\""));
        assert_eq!(chosen(&[arm.clone(), v3.clone(), amd]).expect("found"), digest(2));
        assert_eq!(chosen(&[arm.clone(), v3]).expect("found"), digest(3));
        assert_eq!(chosen(&[one(4, "")]).expect("found"), digest(4));
        let e = chosen(&[arm, one(5, &p("unknown", "unknown", ""))]).expect_err("none");
        assert!(matches!(&e, OciError::Platform(p) if p == "linux/arm64"), "{e}");
    }

    #[test]
    fn manifests_are_checked() {
        let d = format!("{{\"digest\":\"{}\",\"size\":1}}", digest(1));
        let with =
            |layers: &str| document(format!("{{\"schemaVersion\":2,\"config\":{d},\"layers\":[{layers}]}}").as_bytes());
        assert!(with(&d).is_ok());
        let kind = |k: &str| with(&d.replace("\"size\"", &format!("\"mediaType\":\"{k}\",\"size\"")));
        assert!(kind("application/vnd.oci.image.layer.v1.tar+zstd").is_ok());
        assert!(kind("application/vnd.docker.image.rootfs.diff.tar.gzip").is_ok());
        assert!(matches!(
            kind("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"),
            Err(OciError::Unsupported(_))
        ));
        assert!(matches!(kind("application/vnd.oci.image.layer.v1.tar+gzip+encrypted"), Err(OciError::Unsupported(_))));
        assert!(matches!(with(&vec![d.as_str(); 300].join(",")), Err(OciError::Limit { .. })));
        assert!(matches!(with(&d.replace(":1}", &format!(":{}}}", u64::MAX))), Err(OciError::Limit { .. })));
        assert!(document(b"{\"schemaVersion\":1,\"fsLayers\":[]}").is_err());
        assert!(document(b"{\"schemaVersion\":2}").is_err() && document(b"").is_err());
    }

    #[test]
    fn configurations_are_read() {
        let text = format!(
            r#"{{"os":"linux","architecture":"amd64","config":{{"Env":["A=1","B=x=y","=z","C"],"WorkingDir":"/w","User":"u:g",
            "Entrypoint":["e"],"Cmd":null,"ExposedPorts":{{"80/tcp":{{}}}},"Labels":{{"l":"v"}},
            "Healthcheck":{{"Test":["CMD-SHELL","curl x"],"Interval":1000000000,"Retries":2,"Timeout":0}}}},
            "rootfs":{{"type":"layers","diff_ids":["{}"]}}}}"#,
            digest(9)
        );
        let (c, ids) = config(text.as_bytes()).expect("valid");
        assert_eq!(ids, [Digest::of(&[9])]);
        assert_eq!(c.env, [("A".to_owned(), "1".to_owned()), ("B".to_owned(), "x=y".to_owned())]);
        assert_eq!(
            (c.workdir.as_str(), c.user.as_str(), c.ports.as_slice()),
            ("/w", "u:g", ["80/tcp".to_owned()].as_slice())
        );
        let health = c.health.expect("has one");
        assert_eq!(
            (health.line, health.interval, health.timeout, health.retries),
            (true, Some(Duration::from_secs(1)), None, Some(2))
        );
        assert!(matches!(config(text.replace("amd64", "arm64").as_bytes()), Err(OciError::Platform(_))));
        assert!(config(text.replace("A=1", "A=\\u0000").as_bytes()).is_err());
        assert!(config(text.replace("sha256:", "sha512:").as_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = document(&bytes);
            let _ = config(&bytes);
        }
    }
}
