//! A build as it is remembered.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use mainbrella_types::{EgressPolicy, SizeClass, TemplateName};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::failure::Failure;

const FILE: &str = "build.json";
/// A record is small but for its recipe and arguments, which are bounded.
const RECORD_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// Where a build stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BuildState {
    /// It waits for its context.
    AwaitingContext,
    /// It waits for its turn.
    Queued,
    /// It is carried out.
    Running,
    /// It became a template.
    Succeeded,
    /// It did not; the record says why.
    Failed,
    /// Somebody cancelled it.
    Cancelled,
}

impl BuildState {
    /// The wire name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AwaitingContext => "awaiting-context",
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// Whether it is over.
    #[must_use]
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Cancelled)
    }
}

/// What is asked of a build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BuildRequest {
    /// The family the template will be a version of.
    #[serde(serialize_with = "as_text", deserialize_with = "from_text")]
    pub name: TemplateName,
    /// Tags that will point to it: names of the family.
    #[serde(serialize_with = "as_texts", deserialize_with = "from_texts")]
    pub tags: Vec<TemplateName>,
    /// Text of the recipe; `None`: it is in the context.
    pub recipe: Option<String>,
    /// Where in the context the recipe is.
    pub recipe_path: String,
    /// Build arguments.
    pub arguments: BTreeMap<String, String>,
    /// The size it is built in; `None`: that of its base, or `small`.
    #[serde(serialize_with = "as_size", deserialize_with = "from_size")]
    pub size: Option<SizeClass>,
    /// Do every step anew.
    pub no_cache: bool,
    /// Fetch an image that `FROM` names anew.
    pub pull: bool,
    /// What its machine may reach.
    #[serde(serialize_with = "as_text", deserialize_with = "from_text")]
    pub egress: EgressPolicy,
    /// Longest time it may take, seconds.
    pub timeout_seconds: u64,
}

fn as_text<T: ToString, S: Serializer>(value: &T, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(&value.to_string())
}

fn from_text<'de, T: std::str::FromStr, D: Deserializer<'de>>(d: D) -> Result<T, D::Error> {
    String::deserialize(d)?.parse().map_err(|_| de::Error::custom("a value is not of its form"))
}

fn as_texts<S: Serializer>(values: &[TemplateName], s: S) -> Result<S::Ok, S::Error> {
    s.collect_seq(values.iter().map(ToString::to_string))
}

fn from_texts<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<TemplateName>, D::Error> {
    let texts = Vec::<String>::deserialize(d)?;
    texts.iter().map(|t| t.parse()).collect::<Result<_, _>>().map_err(de::Error::custom)
}

fn as_size<S: Serializer>(value: &Option<SizeClass>, s: S) -> Result<S::Ok, S::Error> {
    value.map(SizeClass::as_str).serialize(s)
}

fn from_size<'de, D: Deserializer<'de>>(d: D) -> Result<Option<SizeClass>, D::Error> {
    Option::<String>::deserialize(d)?.map(|t| t.parse()).transpose().map_err(de::Error::custom)
}

/// A build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Build {
    /// Its id: 32 hexadecimal digits, in the order of their creation.
    pub id: String,
    /// What is asked.
    pub request: BuildRequest,
    /// Where it stands.
    pub state: BuildState,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
    /// Steps in all, once they are known.
    pub steps: u32,
    /// Steps that are done, cached ones included.
    pub steps_done: u32,
    /// Steps that were cached.
    pub steps_cached: u32,
    /// The version it became.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// When it was asked for, milliseconds since 1970.
    pub created_ms: i64,
    /// When it was begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_ms: Option<i64>,
    /// When it was over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_ms: Option<i64>,
}

impl Build {
    /// Writes it into its folder: all of it or nothing, on the disk for good. Blocks.
    pub(crate) fn write(&self, dir: &Path) -> io::Result<()> {
        let half = dir.join("build.json.new");
        let mut file = File::create(&half)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        file.sync_all()?;
        fs::rename(&half, dir.join(FILE))?;
        File::open(dir)?.sync_all()
    }

    /// Reads it from its folder. Blocks.
    pub(crate) fn read(dir: &Path) -> io::Result<Self> {
        let path = dir.join(FILE);
        if fs::metadata(&path)?.len() > RECORD_BYTES_MAX {
            return Err(io::Error::other("the record of a build is too large"));
        }
        Ok(serde_json::from_slice(&fs::read(path)?)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_comes_back_as_it_was() {
        let dir = tempfile::tempdir().expect("a folder");
        let request = BuildRequest {
            name: "app".parse().expect("a name"),
            tags: vec!["app:stable".parse().expect("a name")],
            recipe: Some("FROM python\n".to_owned()),
            recipe_path: "Dockerfile".to_owned(),
            arguments: [("A".to_owned(), "1".to_owned())].into(),
            size: Some(SizeClass::Micro),
            no_cache: true,
            pull: false,
            egress: "allow-list example.org".parse().expect("a policy"),
            timeout_seconds: 60,
        };
        let build = Build {
            id: "0".repeat(32),
            request,
            state: BuildState::AwaitingContext,
            failure: None,
            steps: 3,
            steps_done: 1,
            steps_cached: 1,
            template: None,
            created_ms: 5,
            started_ms: None,
            ended_ms: Some(7),
        };
        build.write(dir.path()).expect("written");
        assert_eq!(Build::read(dir.path()).expect("read"), build);
    }
}
