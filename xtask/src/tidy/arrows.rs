//! Which crate may depend on what.

use std::collections::BTreeMap;

use serde_json::Value;

use super::Finding;

/// A crate of the workspace, with its normal and build dependencies. Tests may use what they like.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Crate {
    /// Its name without `mainbrella-`.
    pub name: String,
    /// Everything it depends on, without `mainbrella-` for our own.
    pub depends_on: Vec<String>,
}

/// The arrows of `ARCHITECTURE.md`.
const ARROWS: &[(&str, &[&str])] = &[
    ("types", &[]),
    ("api", &["types"]),
    ("client", &["api", "types"]),
    ("guest-protocol", &[]),
    ("tree", &[]),
    ("recipe", &["tree", "types"]),
    ("oci", &["tree", "types"]),
    ("guest", &["guest-protocol", "tree"]),
    ("job-log", &[]),
    ("net", &["types"]),
    ("engine", &["guest-protocol", "job-log", "net", "oci", "tree", "types"]),
    ("builder", &["engine", "recipe", "tree", "types"]),
    ("store", &["types"]),
    ("preview", &["types"]),
    ("server", &["api", "builder", "engine", "preview", "recipe", "store", "types"]),
    ("cli", &["api", "client", "engine", "recipe", "server", "store", "tree", "types"]),
    ("tests", &["api", "client", "engine", "guest-protocol", "net", "server", "store", "tree", "types"]),
    ("bench", &["client", "engine", "guest-protocol", "net", "preview", "store", "tests", "types"]),
    ("xtask", &["server"]),
];

/// Foreign crates that a crate of ours must not use, with the reason.
const ABSENT: &[(&str, &[&str], &str)] = &[
    (
        "types",
        &["serde", "serde_json", "tokio", "futures", "async-trait"],
        "types has no I/O, no clock, no async, no serde",
    ),
    ("engine", &["axum", "tower-http", "utoipa", "sqlx"], "engine knows neither the store nor HTTP servers"),
    ("net", &["axum", "sqlx", "serde"], "net knows links, rules and names, and nothing of the service"),
    ("recipe", &["tokio", "serde", "reqwest", "axum"], "recipe is text and files and runs nothing"),
    ("builder", &["axum", "hyper", "http", "sqlx", "reqwest"], "builder knows neither HTTP nor the store"),
    ("oci", &["axum", "sqlx"], "oci knows images, and nothing of the service"),
    ("store", &["axum", "hyper", "http", "tower-http", "utoipa"], "store knows no HTTP"),
    ("preview", &["axum", "sqlx", "tower-http", "reqwest"], "preview is a proxy and knows no more"),
    ("job-log", &["tokio", "futures", "serde", "axum"], "job-log is files and nothing else"),
    ("api", &["tokio", "axum", "sqlx", "hyper"], "api only says what travels over the wire"),
    ("guest", &["axum", "sqlx", "reqwest"], "the guest agent is small and serves one stream"),
];

/// Reads what `cargo metadata --no-deps` says.
///
/// # Errors
/// When it has another form.
pub fn crates(metadata: &Value) -> Result<Vec<Crate>, String> {
    let packages = metadata["packages"].as_array().ok_or("cargo metadata names no packages")?;
    let short = |v: &Value| v.as_str().map(|n| n.strip_prefix("mainbrella-").unwrap_or(n).to_owned());
    let mut found = Vec::new();
    for package in packages {
        let name = short(&package["name"]).ok_or("a package has no name")?;
        let listed = package["dependencies"].as_array().ok_or("a package lists no dependencies")?;
        let used = listed.iter().filter(|d| d["kind"] != "dev");
        found.push(Crate { name, depends_on: used.filter_map(|d| short(&d["name"])).collect() });
    }
    Ok(found)
}

/// Checks the arrows.
pub fn check(crates: &[Crate]) -> Vec<Finding> {
    let allowed: BTreeMap<&str, &[&str]> = ARROWS.iter().copied().collect();
    let mut findings = Vec::new();
    for one in crates {
        let place = format!("crate {}", one.name);
        let Some(may) = allowed.get(one.name.as_str()) else {
            findings.push(Finding::new(&place, "is not known to `xtask tidy`: say in ARROWS what it may depend on"));
            continue;
        };
        for dependency in &one.depends_on {
            let ours = allowed.contains_key(dependency.as_str());
            if ours && !may.contains(&dependency.as_str()) {
                findings
                    .push(Finding::new(&place, format!("depends on {dependency}; ARCHITECTURE.md has no such arrow")));
            }
            for (_, names, reason) in ABSENT.iter().filter(|(name, ..)| *name == one.name) {
                if names.contains(&dependency.as_str()) {
                    findings.push(Finding::new(&place, format!("depends on {dependency}; {reason}")));
                }
            }
        }
    }
    findings
}

/// Checks that the table of rooms lists every crate under `crates/`, and none that is not there.
pub fn check_table(crates: &[Crate], architecture: &str) -> Vec<Finding> {
    let rows: Vec<&str> = architecture.lines().filter_map(|l| l.strip_prefix("| `")?.split('`').next()).collect();
    let in_rooms = |name: &str| !matches!(name, "bench" | "tests" | "xtask");
    let missing = crates.iter().filter(|c| in_rooms(&c.name) && !rows.contains(&c.name.as_str()));
    let extra = rows.iter().filter(|r| !crates.iter().any(|c| c.name == **r));
    missing
        .map(|c| Finding::new("ARCHITECTURE.md", format!("the table of rooms does not list {}", c.name)))
        .chain(
            extra.map(|r| Finding::new("ARCHITECTURE.md", format!("the table of rooms lists {r}, which is no crate"))),
        )
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn package(name: &str, dependencies: &[(&str, &str)]) -> Value {
        let list: Vec<Value> = dependencies
            .iter()
            .map(|(n, kind)| json!({"name": n, "kind": if *kind == "normal" { Value::Null } else { json!(kind) }}))
            .collect();
        json!({"name": name, "dependencies": list})
    }

    fn told(packages: Vec<Value>) -> Vec<String> {
        let crates = crates(&json!({ "packages": packages })).expect("metadata");
        check(&crates).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn wrong_arrows_are_found_and_right_ones_are_not() {
        let good = package(
            "mainbrella-engine",
            &[("mainbrella-types", "normal"), ("mainbrella-guest-protocol", "build"), ("tokio", "normal")],
        );
        assert_eq!(told(vec![good]), Vec::<String>::new());
        let bad = told(vec![package("mainbrella-engine", &[("mainbrella-store", "normal"), ("axum", "normal")])]);
        assert_eq!(
            bad,
            [
                "crate engine: depends on store; ARCHITECTURE.md has no such arrow",
                "crate engine: depends on axum; engine knows neither the store nor HTTP servers",
            ]
        );
        assert_eq!(told(vec![package("mainbrella-types", &[("serde", "normal")])]).len(), 1);
        assert_eq!(told(vec![package("mainbrella-store", &[("mainbrella-engine", "build")])]).len(), 1);
        assert_eq!(told(vec![package("mainbrella-utils", &[])]).len(), 1);
    }

    #[test]
    fn tests_may_use_what_they_like() {
        assert!(told(vec![package("mainbrella-engine", &[("mainbrella-store", "dev"), ("axum", "dev")])]).is_empty());
    }

    #[test]
    fn the_table_must_list_exactly_the_crates() {
        let crates =
            [Crate { name: "types".into(), ..Crate::default() }, Crate { name: "net".into(), ..Crate::default() }];
        let table = "| crate | purpose |\n|---|---|\n| `types` | words | – |\n| `preview` | later | – |\n";
        let found: Vec<String> = check_table(&crates, table).iter().map(ToString::to_string).collect();
        assert_eq!(
            found,
            [
                "ARCHITECTURE.md: the table of rooms does not list net",
                "ARCHITECTURE.md: the table of rooms lists preview, which is no crate",
            ]
        );
    }
}
