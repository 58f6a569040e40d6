//! What goes into a root image: the recipes of `guest-image/`, compiled in.

use std::collections::BTreeMap;

use mainbrella_types::TemplateName;
use serde::Deserialize;

use super::error::ImageError;
use super::shelf;

/// Form of the image; a change builds every template anew.
const FORM: &[u8] = b"rootfs 2";
/// Run over every tree.
pub(super) const FINISH: &str = include_str!("../../../../guest-image/finish.sh");
/// Libraries of ours, by the package that brings their language: where they go, and their text.
const LIBRARIES: [(&str, &str, &str); 2] = [
    (
        "python3",
        "/usr/lib/python3/dist-packages/mainbrella_reseed.py",
        include_str!("../../../../guest-image/reseed/mainbrella_reseed.py"),
    ),
    (
        "nodejs",
        "/usr/share/nodejs/mainbrella-reseed/index.js",
        include_str!("../../../../guest-image/reseed/mainbrella-reseed.js"),
    ),
];
const RECIPES: [(&str, &str); 2] = [
    ("python", include_str!("../../../../guest-image/python.toml")),
    ("node", include_str!("../../../../guest-image/node.toml")),
];

/// A recipe for the root image of a template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// Name of the template.
    pub name: TemplateName,
    /// What it is, in one line.
    pub description: String,
    /// Debian packages on top of a minimal system.
    pub packages: Vec<String>,
    /// `sha256:` and the digest of all that shapes the image but the packages' versions.
    pub digest: String,
    pub(super) remove: Vec<String>,
    pub(super) links: BTreeMap<String, String>,
    pub(super) files: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    name: String,
    description: String,
    packages: Vec<String>,
    #[serde(default)]
    remove: Vec<String>,
    #[serde(default)]
    links: BTreeMap<String, String>,
    #[serde(default)]
    files: BTreeMap<String, String>,
}

/// Every recipe there is.
pub(super) fn all() -> Result<Vec<Recipe>, ImageError> {
    RECIPES.iter().map(|(name, text)| parse(name, text)).collect()
}

/// The recipe called `name`.
pub(super) fn named(name: &str) -> Result<Recipe, ImageError> {
    let found = RECIPES.iter().find(|(known, _)| *known == name);
    let known = || RECIPES.map(|(name, _)| name).join(", ");
    let (name, text) = found.ok_or_else(|| ImageError::UnknownRecipe { name: name.to_owned(), known: known() })?;
    parse(name, text)
}

fn made_of(text: &str, extra: &[u8]) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || extra.contains(&b))
}

/// An absolute path below the root, without `.`, `..` or empty parts.
fn is_path(path: &str, extra: &[u8]) -> bool {
    let allowed: Vec<u8> = b"/._+-".iter().chain(extra).copied().collect();
    let whole = path.strip_prefix('/').is_some_and(|rest| rest.split('/').all(|p| !matches!(p, "" | "." | "..")));
    whole && made_of(path, &allowed)
}

fn parse(file: &str, text: &str) -> Result<Recipe, ImageError> {
    let bad = |problem: String| ImageError::BadRecipe { name: file.to_owned(), problem };
    let raw: Raw = toml::from_str(text).map_err(|e| bad(e.message().to_owned()))?;
    let name: TemplateName = raw.name.parse().map_err(|e| bad(format!("{e}")))?;
    if name.as_str() != file {
        return Err(bad(format!("it calls itself `{name}`")));
    }
    if raw.packages.is_empty() {
        return Err(bad("it has no packages".to_owned()));
    }
    if let Some(package) = raw.packages.iter().find(|p| !made_of(p, b"+-.") || p.starts_with('-')) {
        return Err(bad(format!("`{package}` is not the name of a package")));
    }
    let paths = raw.links.keys().chain(raw.files.keys());
    if let Some(path) = raw.remove.iter().find(|p| !is_path(p, b"*")).or(paths.into_iter().find(|p| !is_path(p, b""))) {
        return Err(bad(format!("`{path}` is not an absolute path of plain letters")));
    }
    let Raw { description, packages, remove, links, mut files, .. } = raw;
    let mut shapes = vec![FORM, text.as_bytes(), FINISH.as_bytes()];
    for (package, path, library) in LIBRARIES {
        if packages.iter().any(|p| p == package) {
            shapes.push(library.as_bytes());
            files.insert(path.to_owned(), library.to_owned());
        }
    }
    let digest = format!("sha256:{}", shelf::digest_of(shapes));
    Ok(Recipe { name, description, packages, digest, remove, links, files })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_recipes_are_valid_and_differ() {
        let all = all().expect("valid");
        assert_eq!(all.len(), RECIPES.len());
        assert_ne!(all[0].digest, all[1].digest);
        for recipe in &all {
            assert_eq!(named(recipe.name.as_str()).expect("found"), *recipe);
            for needed in ["ca-certificates", "curl", "git", "procps", "tmux"] {
                assert!(recipe.packages.iter().any(|p| p == needed), "{}: {needed}", recipe.name);
            }
        }
    }

    #[test]
    fn an_unknown_name_is_answered_with_those_known() {
        let e = named("ruby").expect_err("unknown");
        assert_eq!(e.to_string(), "there is no recipe `ruby`; known are: python, node");
    }

    #[test]
    fn bad_recipes_are_refused_with_their_reason() {
        let good = "name = \"x\"\ndescription = \"d\"\npackages = [\"a\"]\n";
        assert!(parse("x", good).is_ok());
        for (text, why) in [
            (good.replace("\"a\"", ""), "no packages"),
            (good.replace("\"a\"", "\"-o=x\""), "not the name of a package"),
            (good.replace("\"a\"", "\"a b\""), "not the name of a package"),
            (good.replace("name = \"x\"", "name = \"y\""), "calls itself `y`"),
            (format!("{good}remove = [\"/etc/../x\"]\n"), "not an absolute path"),
            (format!("{good}remove = [\"/*; rm\"]\n"), "not an absolute path"),
            (format!("{good}[files]\n\"etc/x\" = \"\"\n"), "not an absolute path"),
            (format!("{good}[links]\n\"/\" = \"x\"\n"), "not an absolute path"),
            (format!("{good}typo = 1\n"), "unknown field"),
        ] {
            let e = parse("x", &text).expect_err(why);
            assert!(e.to_string().contains(why), "{why}: {e}");
        }
    }

    #[test]
    fn a_change_changes_the_digest() {
        let text = "name = \"x\"\ndescription = \"d\"\npackages = [\"a\"]\n";
        let other = text.replace("\"a\"", "\"b\"");
        assert_ne!(parse("x", text).expect("ok").digest, parse("x", &other).expect("ok").digest);
    }
}
