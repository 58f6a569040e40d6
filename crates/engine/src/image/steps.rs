//! Results of steps of builds, by what they depend on: `steps/KEY.json` names the snapshot that was taken after the step.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::PathBuf;

use mainbrella_types::SnapshotKey;
use serde::{Deserialize, Serialize};

use super::error::ImageError;
use super::{ImageStore, shelf, text};

const DIR: &str = "steps";

/// What is kept of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CachedStep {
    /// The machine's disk after it.
    #[serde(with = "text")]
    pub snapshot: SnapshotKey,
    /// Bytes that the step wrote.
    pub bytes: u64,
    /// When it was made or used last, milliseconds since 1970.
    pub used_ms: i64,
}

impl ImageStore {
    /// The file of a step. `None`: that is no key.
    fn step_file(&self, key: &str) -> Option<PathBuf> {
        let fine = key.len() == 64 && key.bytes().all(|b| b.is_ascii_hexdigit());
        fine.then(|| self.data.join(DIR).join(format!("{key}.json")))
    }

    /// What is kept of the step `key`, which counts as used now.
    #[must_use]
    pub fn step(&self, key: &str) -> Option<CachedStep> {
        let file = self.step_file(key)?;
        let mut step: CachedStep = shelf::read_json(&file)?;
        step.used_ms = shelf::now_ms();
        // That it was used is worth nothing but a longer life.
        let _ = shelf::replace_json(&file, &step);
        Some(step)
    }

    /// Keeps a step. Its snapshot belongs to it from then on.
    ///
    /// # Errors
    /// When `key` is none, or it cannot be written.
    pub fn keep_step(&self, key: &str, step: &CachedStep) -> Result<(), ImageError> {
        let file = self.step_file(key).ok_or_else(|| ImageError::malformed("that is no key of a step"))?;
        fs::create_dir_all(self.data.join(DIR)).map_err(|e| ImageError::io("making the directory for steps", e))?;
        shelf::replace_json(&file, step)
    }

    /// Forgets a step; its snapshot is then nobody's.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn forget_step(&self, key: &str) -> Result<(), ImageError> {
        let Some(file) = self.step_file(key) else { return Ok(()) };
        match fs::remove_file(file) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(ImageError::io("forgetting a step", e)),
            _ => Ok(()),
        }
    }

    /// All that are kept, by key; the one that was not used for longest first.
    #[must_use]
    pub fn steps(&self) -> Vec<(String, CachedStep)> {
        let mut all: Vec<_> = self
            .step_keys()
            .unwrap_or_default()
            .into_iter()
            .filter_map(|key| {
                let step = shelf::read_json(&self.step_file(&key)?)?;
                Some((key, step))
            })
            .collect();
        all.sort_by(|(a, one): &(String, CachedStep), (b, other)| (one.used_ms, a).cmp(&(other.used_ms, b)));
        all
    }

    fn step_keys(&self) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(self.data.join(DIR)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let names = entries.map(|entry| Ok(entry?.file_name()));
        let names: Vec<_> = names.collect::<io::Result<_>>()?;
        let keys = names.iter().filter_map(|name| name.to_str()?.strip_suffix(".json").map(str::to_owned));
        Ok(keys.filter(|key| self.step_file(key).is_some()).collect())
    }

    /// Snapshots of all of them. An error: not all are known.
    pub(super) fn step_snapshots(&self) -> Result<HashSet<SnapshotKey>, ImageError> {
        let keys = self.step_keys().map_err(|e| ImageError::io("listing the steps of builds", e))?;
        let mut kept = HashSet::new();
        for file in keys.iter().filter_map(|key| self.step_file(key)) {
            match shelf::read_json::<CachedStep>(&file) {
                Some(step) => drop(kept.insert(step.snapshot)),
                None if file.exists() => return Err(ImageError::malformed("what is kept of a step cannot be read")),
                None => {}
            }
        }
        Ok(kept)
    }
}
