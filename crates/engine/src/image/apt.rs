//! apt's own client with a state of its own: nothing of the host's package state is read or changed.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::error::ImageError;
use super::mirror::{self, Mirror};
use super::progress::Progress;
use super::tool::Tool;

const UPDATE: Duration = Duration::from_secs(5 * 60);
const DOWNLOAD: Duration = Duration::from_secs(15 * 60);
const ASK: Duration = Duration::from_secs(60);

/// Read after the host's own configuration: undoes its hooks and whatever could weaken verification.
const CONFIGURATION: &str = r#"#clear APT::Architectures;
#clear APT::Update;
#clear APT::Install;
#clear APT::Default-Release;
#clear DPkg;
#clear Acquire::IndexTargets::deb::DEP-11;
APT::Architecture "amd64";
APT::Architectures { "amd64"; };
APT::Sandbox::User "root";
APT::Get::AllowUnauthenticated "false";
Acquire::AllowInsecureRepositories "false";
Acquire::AllowWeakRepositories "false";
Acquire::AllowDowngradeToInsecureRepositories "false";
Acquire::Languages "none";
Acquire::Retries "3";
Acquire::http::Timeout "30";
Acquire::https::Timeout "30";
"#;

/// A private apt in a directory.
pub(super) struct Apt {
    dir: PathBuf,
}

impl Apt {
    /// Fetches and verifies the package lists of `suite` into `dir`, which must exist and be empty.
    pub(super) fn update(
        dir: &Path,
        mirror: &Mirror,
        suite: &str,
        progress: &dyn Progress,
    ) -> Result<Self, ImageError> {
        let apt = Self { dir: dir.to_owned() };
        for sub in ["state/lists/partial", "cache/archives/partial", "empty"] {
            std::fs::create_dir_all(dir.join(sub)).map_err(|e| ImageError::io("making a directory for apt", e))?;
        }
        let list = mirror.list(suite, mirror::keyring()?, " arch=amd64 lang=none target=Packages");
        for (name, text) in [("sources.list", list.as_str()), ("status", ""), ("apt.conf", CONFIGURATION)] {
            std::fs::write(dir.join(name), text).map_err(|e| ImageError::io("writing apt's settings", e))?;
        }
        apt.tool("apt-get", UPDATE)?.args(["-qq", "--error-on=any", "update"]).run(progress)?;
        Ok(apt)
    }

    fn tool(&self, program: &'static str, limit: Duration) -> Result<Tool, ImageError> {
        let mut tool = Tool::new(program, "apt", limit)?.arg("-c").arg(self.dir.join("apt.conf"));
        for (option, path) in [
            ("Dir::State", "state"),
            ("Dir::State::lists", "state/lists"),
            ("Dir::State::status", "status"),
            ("Dir::Cache", "cache"),
            ("Dir::Cache::archives", "cache/archives"),
            ("Dir::Etc::sourcelist", "sources.list"),
            ("Dir::Etc::sourceparts", "empty"),
            ("Dir::Etc::preferences", "empty/none"),
            ("Dir::Etc::preferencesparts", "empty"),
            ("Dir::Etc::trusted", "empty/none"),
            ("Dir::Etc::trustedparts", "empty"),
        ] {
            let mut setting = std::ffi::OsString::from(format!("{option}="));
            setting.push(self.dir.join(path));
            tool = tool.arg("-o").arg(setting);
        }
        Ok(tool)
    }

    /// The package and version that metapackage `meta` stands for, of those it depends on the one
    /// whose name starts with `prefix`.
    pub(super) fn resolve(
        &self,
        meta: &str,
        prefix: &str,
        progress: &dyn Progress,
    ) -> Result<(String, String), ImageError> {
        let shown = self.tool("apt-cache", ASK)?.args(["--no-all-versions", "show", meta]).run(progress)?;
        resolved(&String::from_utf8_lossy(&shown), prefix)
            .ok_or_else(|| ImageError::malformed(format!("package {meta} does not depend on one exact {prefix}*")))
    }

    /// Downloads `package` of exactly `version` into `dir`; the file.
    pub(super) fn download(
        &self,
        package: &str,
        version: &str,
        dir: &Path,
        progress: &dyn Progress,
    ) -> Result<PathBuf, ImageError> {
        std::fs::create_dir_all(dir).map_err(|e| ImageError::io("making the download directory", e))?;
        self.tool("apt-get", DOWNLOAD)?
            .args(["-qq", "download"])
            .arg(format!("{package}={version}"))
            .dir(dir)
            .run(progress)?;
        let entries = std::fs::read_dir(dir).map_err(|e| ImageError::io("reading the download directory", e))?;
        let mut files = entries.flatten().map(|entry| entry.path());
        files
            .find(|f| f.extension().is_some_and(|e| e == "deb"))
            .ok_or_else(|| ImageError::malformed(format!("apt-get did not leave a file for {package}")))
    }

    /// The newest `Date` of the verified release files, seconds since 1970: no package is younger.
    pub(super) fn newest_release(&self) -> Result<i64, ImageError> {
        let what = "reading apt's lists";
        let mut newest = None;
        for entry in std::fs::read_dir(self.dir.join("state/lists")).map_err(|e| ImageError::io(what, e))? {
            let path = entry.map_err(|e| ImageError::io(what, e))?.path();
            if path.to_string_lossy().ends_with("Release") {
                let text = std::fs::read_to_string(path).map_err(|e| ImageError::io(what, e))?;
                newest = newest.max(release_date(&text));
            }
        }
        newest.ok_or_else(|| ImageError::malformed("no release file of the mirror has a date"))
    }
}

fn resolved(shown: &str, prefix: &str) -> Option<(String, String)> {
    let depends = shown.lines().find_map(|l| l.strip_prefix("Depends:"))?;
    depends.split(',').find_map(|one| {
        let (name, version) = one.trim().split_once(" (= ")?;
        let version = version.strip_suffix(')')?;
        let plain = |s: &str| s.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.:~".contains(&b));
        (name.starts_with(prefix) && plain(name) && plain(version)).then(|| (name.to_owned(), version.to_owned()))
    })
}

/// `Date: Sat, 08 Nov 2025 10:20:30 UTC`, as seconds since 1970.
fn release_date(text: &str) -> Option<i64> {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let date = text.lines().find_map(|l| l.strip_prefix("Date:"))?;
    let words: Vec<&str> = date.split_whitespace().collect();
    let [_, day, month, year, time, zone] = words[..] else { return None };
    if !matches!(zone, "UTC" | "GMT" | "+0000") {
        return None;
    }
    let month = i64::try_from(MONTHS.iter().position(|m| *m == month)?).ok()? + 1;
    let (day, year) = (day.parse::<i64>().ok()?, year.parse::<i64>().ok()?);
    let clock: Vec<i64> = time.split(':').map(|n| n.parse().ok()).collect::<Option<_>>()?;
    let [hour, minute, second] = clock[..] else { return None };
    // Days since 1970 of a date in the Gregorian calendar, years beginning in March.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days =
        365 * y + y.div_euclid(4) - y.div_euclid(100) + y.div_euclid(400) + (153 * m + 2) / 5 + day - 1 - 719_468;
    Some(days * 86_400 + hour * 3600 + minute * 60 + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metapackage_resolves_to_one_exact_package() {
        let shown = "Package: linux-image-cloud-amd64\nVersion: 6.12.9-1\n\
                     Depends: foo, linux-image-6.12.9+deb13-cloud-amd64 (= 6.12.9-1)\n";
        let want = ("linux-image-6.12.9+deb13-cloud-amd64".to_owned(), "6.12.9-1".to_owned());
        assert_eq!(resolved(shown, "linux-image-"), Some(want));
        assert_eq!(resolved("Depends: linux-image-1 (>= 2)\n", "linux-image-"), None);
        assert_eq!(resolved("Depends: linux-image-1 (= 2 -o x)\n", "linux-image-"), None);
    }

    #[test]
    fn release_dates_are_read() {
        let date = |d: &str| release_date(&format!("Origin: Debian\nDate: {d}\n"));
        assert_eq!(date("Thu, 01 Jan 1970 00:00:00 UTC"), Some(0));
        assert_eq!(date("Sat, 09 Aug 2025 09:11:08 UTC"), Some(1_754_730_668));
        assert_eq!(date("Thu, 29 Feb 2024 23:59:59 UTC"), Some(1_709_251_199));
        assert_eq!(date("Sat, 09 Aug 2025 09:11:08 CEST"), None);
        assert_eq!(date("soon"), None);
    }
}
