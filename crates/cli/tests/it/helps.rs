//! Help texts and completions.

use crate::support::{mainbrella, snapshot, told};

#[test]
fn help_of_every_verb() {
    let verbs = [
        "",
        "create",
        "list",
        "get",
        "exec",
        "context",
        "context create",
        "context list",
        "context run",
        "context restart",
        "context interrupt",
        "context rm",
        "shell",
        "jobs",
        "logs",
        "ps",
        "cp",
        "preview",
        "preview create",
        "preview list",
        "preview renew",
        "preview revoke",
        "extend",
        "fork",
        "pause",
        "resume",
        "save",
        "restore",
        "snapshots",
        "snapshots list",
        "snapshots get",
        "snapshots update",
        "snapshots rm",
        "export",
        "import",
        "stop",
        "template",
        "template build",
        "template list",
        "template rm",
        "template tag",
        "template inspect",
        "template create",
        "template builds",
        "template prune",
        "df",
        "key",
        "key create",
        "key list",
        "key revoke",
        "env",
        "doctor",
        "completions",
    ];
    for verb in verbs {
        let words: Vec<&str> = verb.split_whitespace().chain(["--help"]).collect();
        snapshot(format!("help {verb}").trim(), told(mainbrella().args(&words), b""));
    }
}

#[test]
fn serve_offers_every_key_of_the_configuration() {
    let help = told(mainbrella().args(["serve", "--help"]), b"");
    assert!(help.starts_with("code: 0"), "{help}");
    for key in mainbrella_server::config::KEYS {
        assert!(help.contains(&format!("--{}", key.name)), "{} is not offered", key.name);
        assert!(help.contains(key.env), "{} is not told", key.env);
    }
}

#[test]
fn completions_for_every_shell_name_the_verbs() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = told(mainbrella().args(["completions", shell]), b"");
        assert!(
            script.starts_with("code: 0") && script.contains("template") && script.ends_with("--- stderr\n"),
            "{shell}"
        );
    }
}

#[test]
fn nothing_at_all_is_answered_with_help() {
    let said = told(&mut mainbrella(), b"");
    assert!(said.starts_with("code: 2") && said.contains("Usage: mainbrella"), "{said}");
}
