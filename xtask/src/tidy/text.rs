//! What a look at the text of a file can tell.

use super::Finding;

/// Longest source file, lines.
const LINES_MAX: usize = 900;

/// What must not stand in a source file, and why. Written in halves so that this file is not one of its findings.
const WORDS: &[(&str, &str, &str)] = &[
    ("todo", "!(", "unfinished work is not committed"),
    ("unimplemented", "!(", "unfinished work is not committed"),
    ("#[igno", "re", "a test that does not run protects nothing"),
];

/// Package registries: names of hosts belong into the user's own configuration of their tools.
const REGISTRIES: &[(&str, &str)] = &[
    ("deb.debian", ".org"),
    ("security.debian", ".org"),
    ("snapshot.debian", ".org"),
    ("ftp.debian", ".org"),
    ("archive.ubuntu", ".com"),
    ("crates", ".io"),
    ("registry.npmjs", ".org"),
    ("pypi", ".org"),
    ("pythonhosted", ".org"),
    ("proxy.golang", ".org"),
];

const SOURCES: &[&str] = &[".rs", ".py", ".sh", ".proto", ".sql"];

/// Checks one file; `path` is relative to the root.
pub fn check(path: &str, content: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let is_source = SOURCES.iter().any(|s| path.ends_with(s));
    let lines = content.lines().count();
    if is_source && lines > LINES_MAX {
        findings.push(Finding::new(path, format!("has {lines} lines, more than {LINES_MAX}: one purpose a file")));
    }
    let mut in_tests = false;
    for (number, line) in content.lines().enumerate() {
        // Tests stand at the end of a file.
        in_tests |= line.trim() == "#[cfg(test)]";
        let place = || format!("{path}:{}", number + 1);
        if path.ends_with(".rs") {
            for (a, b, reason) in WORDS {
                if contains_joined(line, a, b) {
                    findings.push(Finding::new(place(), format!("{a}{b}: {reason}")));
                }
            }
            if !in_tests && !may_read_environment(path) && reads_environment(line) {
                findings.push(Finding::new(
                    place(),
                    "reads an environment variable; only server and cli do, so that there is one configuration",
                ));
            }
        }
        // Lock files name where packages came from; that is their purpose.
        if !is_lock_file(path) {
            for (a, b) in REGISTRIES {
                if contains_joined(line, a, b) {
                    findings.push(Finding::new(
                        place(),
                        format!("names the package registry {a}{b}; the user's tools know theirs"),
                    ));
                }
            }
        }
    }
    findings
}

fn contains_joined(line: &str, a: &str, b: &str) -> bool {
    line.match_indices(a).any(|(at, _)| line.get(at + a.len()..).is_some_and(|rest| rest.starts_with(b)))
}

fn is_lock_file(path: &str) -> bool {
    matches!(path.rsplit('/').next(), Some("Cargo.lock" | "package-lock.json" | "uv.lock"))
}

fn may_read_environment(path: &str) -> bool {
    let rooms = ["crates/server/", "crates/cli/", "xtask/", "tests/", "bench/"];
    rooms.iter().any(|r| path.starts_with(r))
        || path.ends_with("/build.rs")
        || path.contains("/tests/")
        || path.contains("/benches/")
        || path.contains("/examples/")
}

fn reads_environment(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    ["env::var(", "env::var_os(", "env::vars(", "env::vars_os("].iter().any(|call| code.contains(call))
}

/// The two commands of the house must stand in the README.
pub fn check_readme(readme: &str) -> Vec<Finding> {
    ["./run up", "./run test"]
        .into_iter()
        .filter(|command| !readme.contains(command))
        .map(|command| Finding::new("README.md", format!("does not mention `{command}`; a newcomer starts there")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(path: &str, content: &str) -> Vec<String> {
        check(path, content).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn unfinished_work_is_found_with_its_line() {
        let text = format!("fn a() {{\n    {}{}\"later\");\n}}\n", "todo", "!(");
        assert_eq!(
            told("crates/engine/src/a.rs", &text),
            [format!("crates/engine/src/a.rs:2: {}{}: unfinished work is not committed", "todo", "!(")]
        );
        let skipped = format!("#[test]\n{}{}]\nfn a() {{}}\n", "#[igno", "re");
        assert_eq!(told("crates/engine/tests/a.rs", &skipped).len(), 1);
        assert!(told("docs/a.md", &text).is_empty());
    }

    #[test]
    fn the_environment_is_read_in_two_places() {
        let text = "let home = std::env::var(\"HOME\");\n";
        assert_eq!(told("crates/engine/src/a.rs", text).len(), 1);
        for ok in [
            "crates/server/src/config/source.rs",
            "crates/cli/src/main.rs",
            "crates/guest/build.rs",
            "crates/engine/tests/a.rs",
            "xtask/src/main.rs",
        ] {
            assert!(told(ok, text).is_empty(), "{ok}");
        }
        let test = "fn a() {}\n#[cfg(test)]\nmod tests {\n    fn b() { std::env::var(\"X\"); }\n}\n";
        assert!(told("crates/engine/src/a.rs", test).is_empty());
        assert!(told("crates/engine/src/a.rs", "// never std::env::var(x)\nenv!(\"CARGO_PKG_VERSION\");\n").is_empty());
    }

    #[test]
    fn long_files_are_found() {
        let text = "x\n".repeat(LINES_MAX);
        assert!(told("a.rs", &text).is_empty());
        assert_eq!(told("a.rs", &format!("{text}x\n")).len(), 1);
        assert_eq!(told("sdk/python/a.py", &format!("{text}x\n")).len(), 1);
        assert!(told("openapi/v1.json", &format!("{text}x\n")).is_empty());
    }

    #[test]
    fn registries_are_found_everywhere_but_in_lock_files() {
        let text = format!("see https://{}{}/x\n", "deb.debian", ".org");
        assert_eq!(told("docs/a.md", &text).len(), 1);
        assert_eq!(told("run", &text).len(), 1);
        assert!(told("Cargo.lock", &text).is_empty());
    }

    #[test]
    fn the_readme_names_both_commands() {
        assert!(check_readme("Start: ./run up\nTest: ./run test\n").is_empty());
        assert_eq!(check_readme("Start: ./run up\n").len(), 1);
        assert_eq!(check_readme("").len(), 2);
    }
}
