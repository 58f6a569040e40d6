//! Recipes from text to plan, on real directories.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use mainbrella_recipe::{
    Base, Context, Copy, EntryKind, Fault, Plan, Recipe, RecipeError, Settings, StepKind, Warning,
};
use proptest::prelude::*;
use tempfile::TempDir;

fn arguments(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

fn base() -> Base {
    let env = arguments(&[("PATH", "/usr/bin:/bin"), ("BASE", "1")]);
    let settings = Settings { env, cmd: vec!["from-base".to_owned()], ..Settings::default() };
    Base { digest: "sha256:base".to_owned(), settings }
}

fn files(list: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (path, text) in list {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    }
    dir
}

fn plan_in(text: &str, given: &[(&str, &str)], dir: &Path) -> Result<Plan, RecipeError> {
    Recipe::parse(text, &arguments(given))?.plan(&base(), &Context::open(dir)?)
}

fn plan(text: &str) -> Result<Plan, RecipeError> {
    plan_in(text, &[], tempfile::tempdir().unwrap().path())
}

fn run(plan: &Plan, n: usize) -> (&[String], &BTreeMap<String, String>, &str, Option<&str>) {
    match &plan.steps[n].kind {
        StepKind::Run { argv, env, workdir, user } => (argv, env, workdir, user.as_deref()),
        other => panic!("{other:?}"),
    }
}

fn copied(plan: &Plan, n: usize) -> (&Copy, Vec<(&str, &str)>) {
    match &plan.steps[n].kind {
        StepKind::Copy(copy) => (copy, copy.entries.iter().map(|e| (e.from.as_str(), e.to.as_str())).collect()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_recipe_as_people_have_them_is_planned() {
    let dir = files(&[
        ("package.json", "{}"),
        ("package-lock.json", "{}"),
        ("src/main.js", "1"),
        ("src/lib/a.js", "2"),
        ("node_modules/x/y.js", "3"),
        (".dockerignore", "node_modules\n"),
    ]);
    let text = r#"# syntax=x/dockerfile:1
# A service.
ARG VERSION=22
FROM --platform=$TARGETPLATFORM node:${VERSION} AS app
ARG VERSION
ARG MODE=production
LABEL title="A service" stage=$MODE
ENV NODE_ENV=$MODE \
    # where things are
    APP_HOME=/srv/app
ENV PATH=$APP_HOME/bin:$PATH
WORKDIR $APP_HOME
COPY package*.json ./
RUN npm ci --omit=dev \
    # no need to keep it
    && npm cache clean
COPY --chown=1000:1000 --chmod=755 . .
USER 1000:1000
WORKDIR data
EXPOSE 8080 9000-9001/udp
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN ["echo", "$HOME"]
HEALTHCHECK --interval=2s --timeout=1s --start-period=1m --retries=5 CMD curl -f localhost:8080
ENTRYPOINT ["node"]
CMD ["src/main.js"]
"#;
    let recipe = Recipe::parse(text, &arguments(&[])).unwrap();
    assert_eq!((recipe.from(), recipe.from_line()), ("node:22", 4));
    assert_eq!(Recipe::parse(text, &arguments(&[("VERSION", "24")])).unwrap().from(), "node:24");
    let plan = plan_in(text, &[("MODE", "test"), ("TYPO", "1")], dir.path()).unwrap();
    assert_eq!(plan.warnings, [Warning::UnusedArgument("TYPO".to_owned())]);
    assert_eq!(plan.steps.iter().map(|s| s.line).collect::<Vec<_>>(), [12, 13, 14, 17, 19, 22]);
    assert!(matches!(&plan.steps[0].kind, StepKind::Workdir { path, user: None } if path == "/srv/app"));
    let (copy, entries) = copied(&plan, 1);
    assert_eq!((copy.to.as_str(), copy.into), ("/srv/app", true));
    assert_eq!(entries, [("package-lock.json", "package-lock.json"), ("package.json", "package.json")]);
    let (argv, env, workdir, user) = run(&plan, 2);
    assert_eq!(argv, ["/bin/sh", "-c", "npm ci --omit=dev     && npm cache clean"]);
    assert_eq!((env["NODE_ENV"].as_str(), env["VERSION"].as_str(), env["MODE"].as_str()), ("test", "22", "test"));
    assert_eq!(env["PATH"], "/srv/app/bin:/usr/bin:/bin");
    assert_eq!((workdir, user), ("/srv/app", None));
    let (copy, entries) = copied(&plan, 3);
    assert_eq!((copy.owner.as_deref(), copy.mode), (Some("1000:1000"), Some(0o755)));
    assert!(
        entries.contains(&("src/lib/a.js", "src/lib/a.js"))
            && !entries.iter().any(|(p, _)| p.starts_with("node_modules"))
    );
    assert_eq!(run(&plan, 5).0, ["echo", "$HOME"]);
    assert_eq!(run(&plan, 5).3, Some("1000:1000"));
    let s = &plan.settings;
    assert_eq!(s.start(), ["node", "src/main.js"]);
    assert_eq!((s.workdir.as_str(), s.ports.len()), ("/srv/app/data", 3));
    assert_eq!((s.labels["title"].as_str(), s.labels["stage"].as_str()), ("A service", "test"));
    assert!(!s.env.contains_key("MODE"), "arguments do not outlive the build");
    let probe = s.probe.as_ref().unwrap();
    assert_eq!(probe.argv, ["/bin/bash", "-o", "pipefail", "-c", "curl -f localhost:8080"]);
    assert_eq!((probe.interval, probe.timeout, probe.retries), (Duration::from_secs(2), Duration::from_secs(1), 5));
    assert_eq!(probe.start_period, Duration::from_secs(60));
}

#[test]
fn what_is_not_supported_is_refused_with_its_line_and_what_to_do() {
    for (text, line, why) in [
        ("FROM a\nADD https://x/y /y\n", 2, "RUN"),
        ("FROM a\n\nVOLUME /data\n", 3, "leave it out"),
        ("FROM a\nONBUILD RUN x\n", 2, "recipe that needs it"),
        ("FROM a\nSTOPSIGNAL 9\n", 2, "stopped as a whole"),
        ("FROM a AS b\nRUN x\nFROM b\n", 3, "template of its own"),
        ("FROM a\nCOPY --from=b /x /y\n", 2, "COPY --from"),
        ("FROM a\nRUN --mount=type=cache,target=/x y\n", 2, "--mount"),
        ("FROM a\nCOPY --parents x /y\n", 2, "--parents"),
        ("FROM a\nCOPY <<E /y\nx\nE\n", 2, "here-document"),
        ("FROM a\nRUN cat <<E > /y\nx\nE\n", 2, "here-document"),
        ("FROM a\nRUN <<E python3\nx\nE\n", 2, "here-document"),
        ("FROM scratch\n", 1, "has a shell"),
        ("FROM --platform=linux/arm64 a\n", 1, "amd64"),
        ("FROM $NOTHING\n", 1, "empty"),
        ("RUN x\n", 1, "FROM"),
        ("FROM a\nFRMO b\n", 2, "FRMO"),
        ("FROM a\nRUN \n", 2, "empty"),
        ("FROM a\nSHELL bash -c\n", 2, "JSON"),
        ("FROM a\nENV a\n", 2, "no `=`"),
        ("FROM a\nENV a=1 b\n", 2, "NAME=VALUE"),
        ("FROM a\nENV a='x\n", 2, "not closed"),
        ("FROM a\nARG a-b=1\n", 2, "no name"),
        ("FROM a\nUSER a b\n", 2, "USER:GROUP"),
        ("FROM a\nEXPOSE 99999\n", 2, "no port"),
        ("FROM a\nHEALTHCHECK --interval=1 CMD x\n", 2, "no duration"),
        ("FROM a\nHEALTHCHECK --retries=0 CMD x\n", 2, "retries"),
        ("FROM a\nCOPY --chmod=u+x x /y\n", 2, "octal"),
        ("FROM a\nWORKDIR ${X:?must be given}\n", 2, "must be given"),
        ("FROM a\nRUN a \\\n  b\nRUN []\n", 4, "at least one argument"),
        ("", 0, "FROM"),
        ("FROM a\nRUN a\0b\n", 0, "NUL"),
    ] {
        let e = plan(text).expect_err(text);
        assert_eq!(e.line, line, "{text}: {e}");
        assert!(e.to_string().contains(why), "{text}: {e}");
    }
}

#[test]
fn entry_points_and_commands_replace_each_other_as_they_do_elsewhere() {
    let start = |text: &str| plan(&format!("FROM a\n{text}")).unwrap().settings.start();
    assert_eq!(start(""), ["from-base"]);
    assert_eq!(start("ENTRYPOINT [\"e\"]\n"), ["e"]);
    assert_eq!(start("CMD [\"c\"]\nENTRYPOINT [\"e\"]\n"), ["e", "c"]);
    assert_eq!(start("CMD [\"c\"]\nENTRYPOINT e x\n"), ["/bin/sh", "-c", "e x"]);
    assert_eq!(start("CMD c $X\n"), ["/bin/sh", "-c", "c $X"]);
    assert_eq!(start("CMD []\n"), Vec::<String>::new());
}

#[test]
fn a_script_at_the_start_of_run_is_a_here_document_of_the_shell() {
    let plan = plan("FROM a\nRUN <<EOF\nset -e\necho \"$HOME\" \\\n  x\nEOF\nRUN b\n").unwrap();
    assert_eq!(run(&plan, 0).0, ["/bin/sh", "-c", "set -e\necho \"$HOME\" \\\n  x\n"]);
    assert_eq!(run(&plan, 1).0[2], "b");
}

#[test]
fn health_can_be_switched_off_and_the_escape_be_another() {
    let mut base = base();
    base.settings.probe = Some(mainbrella_recipe::Probe::new(vec!["x".to_owned()]));
    let dir = tempfile::tempdir().unwrap();
    let context = Context::open(dir.path()).unwrap();
    let probe =
        |text: &str| Recipe::parse(text, &arguments(&[])).unwrap().plan(&base, &context).unwrap().settings.probe;
    assert!(probe("FROM a\n").is_some() && probe("FROM a\nHEALTHCHECK NONE\n").is_none());
    let plan = plan("# escape=`\nFROM a\nRUN dir C:\\ `\n  x\nENV A=`$B\n").unwrap();
    assert_eq!(run(&plan, 0).0[2], "dir C:\\   x");
    assert_eq!(plan.settings.env["A"], "$B");
}

#[test]
fn copies_know_files_folders_and_patterns() {
    let dir =
        files(&[("a.txt", "a"), ("b.txt", "b"), ("d/e/f.txt", "f"), ("d/g", "g"), ("x y", "blank"), ("z[1]", "class")]);
    symlink("g", dir.path().join("d/link")).unwrap();
    symlink("a.txt", dir.path().join("l")).unwrap();
    fs::set_permissions(dir.path().join("d/g"), fs::Permissions::from_mode(0o4755)).unwrap();
    let copy = |text: &str| plan_in(&format!("FROM a\nWORKDIR /w\nCOPY {text}\n"), &[], dir.path());
    let entries = |text: &str| {
        let plan = copy(text).unwrap();
        let (copy, list) = copied(&plan, 1);
        (copy.to.clone(), copy.into, list.into_iter().map(|(a, b)| format!("{a}>{b}")).collect::<Vec<_>>())
    };
    let own =
        |to: &str, into, list: &[&str]| (to.to_owned(), into, list.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>());
    assert_eq!(entries("a.txt /t"), own("/t", false, &["a.txt>"]));
    assert_eq!(entries("a.txt t/"), own("/w/t", true, &["a.txt>a.txt"]));
    assert_eq!(entries("./a.txt ."), own("/w", true, &["a.txt>a.txt"]));
    assert_eq!(entries("*.txt /t/"), own("/t", true, &["a.txt>a.txt", "b.txt>b.txt"]));
    assert_eq!(entries("d /t"), own("/t", true, &["d/e>e", "d/e/f.txt>e/f.txt", "d/g>g", "d/link>link"]));
    assert_eq!(entries("d/*/f.txt /t"), own("/t", false, &["d/e/f.txt>"]));
    assert_eq!(entries("[\"x y\", \"/t/\"]"), own("/t", true, &["x y>x y"]));
    assert_eq!(entries("z[[]1] /t"), own("/t", false, &["z[1]>"]));
    assert_eq!(entries("z[1] /t"), own("/t", false, &["z[1]>"]), "a name that is there means itself");
    assert_eq!(entries("/a.txt ../../t"), own("/t", false, &["a.txt>"]));
    let plan = copy("d /t").unwrap();
    let (copied, _) = copied(&plan, 1);
    assert_eq!(copied.entries[3].entry.kind, EntryKind::Link { target: "g".to_owned() });
    assert_eq!((copied.entries[2].entry.mode, copied.bytes), (0o4755, 2));
    for (text, why) in [
        ("a.txt b.txt /t", "must end with"),
        ("*.txt /t", "must end with"),
        ("none /t", "not in the context"),
        ("*.none /t", "not in the context"),
        ("../x /t", "outside the context"),
        ("d/../../x /t", "outside the context"),
        ("l /t", "symbolic link"),
        ("[ /t", "not a pattern"),
        ("http://x/y /t", "download"),
    ] {
        let e = copy(text).expect_err(text);
        assert!(e.to_string().contains(why) && e.line == 3, "{text}: {e}");
    }
}

#[test]
fn an_ignore_file_can_take_back_from_a_folder_it_leaves_out() {
    let dir = files(&[
        (".dockerignore", "*\n!src/keep\n!*.md\n"),
        ("src/keep/a", "1"),
        ("src/drop/b", "2"),
        ("r.md", "3"),
        ("x", "4"),
    ]);
    let context = Context::open(dir.path()).unwrap();
    let all: Vec<&str> = context.entries().keys().map(String::as_str).collect();
    assert_eq!(all, ["r.md", "src", "src/keep", "src/keep/a"]);
}

#[test]
fn a_context_is_not_left_through_links_and_has_no_sockets() {
    let secret = files(&[("s", "secret")]);
    let dir = files(&[("a", "1")]);
    symlink(secret.path(), dir.path().join("out")).unwrap();
    let e = plan_in("FROM a\nCOPY out/s /t\n", &[], dir.path()).unwrap_err();
    assert!(matches!(e.fault, Fault::NotFound(_)), "{e}");
    let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("sock")).unwrap();
    let e = plan_in("FROM a\nCOPY . /t\n", &[], dir.path()).unwrap_err();
    assert!(e.to_string().contains(".dockerignore"), "{e}");
    fs::write(dir.path().join(".dockerignore"), "sock").unwrap();
    plan_in("FROM a\nCOPY . /t\n", &[], dir.path()).unwrap();
    let link = tempfile::tempdir().unwrap();
    symlink("/etc/passwd", link.path().join(".dockerignore")).unwrap();
    assert!(Context::open(link.path()).is_err());
}

#[test]
fn keys_change_with_everything_a_step_depends_on_and_with_nothing_else() {
    let dir = files(&[("a", "1"), ("b", "2")]);
    const TEXT: &str = "FROM x\nARG V=1\nENV E=1\nRUN one\nCOPY a /a\nRUN two\n";
    let keys = |text: &str, given: &[(&str, &str)]| -> Vec<String> {
        plan_in(text, given, dir.path()).unwrap().steps.into_iter().map(|s| s.key).collect()
    };
    let first = keys(TEXT, &[]);
    assert_eq!(first, keys(TEXT, &[]));
    assert_eq!(first, keys(&TEXT.replace("RUN one", "# note\nRUN   one"), &[]), "how it is written is no matter");
    let same = |other: &[String]| first.iter().zip(other).map(|(a, b)| a == b).collect::<Vec<_>>();
    assert_eq!(same(&keys(TEXT, &[("V", "2")])), [false, false, false]);
    assert_eq!(same(&keys(&TEXT.replace("RUN two", "RUN 2"), &[])), [true, true, false]);
    assert_eq!(same(&keys(&TEXT.replace("COPY a /a", "COPY b /a"), &[])), [true, false, false]);
    assert_eq!(same(&keys(&TEXT.replace("COPY a", "COPY --chown=1 a"), &[])), [true, false, false]);
    assert_eq!(same(&keys(&TEXT.replace("E=1", "E=2"), &[])), [false, false, false]);
    assert_eq!(same(&keys(&TEXT.replace("RUN two", "USER 5\nRUN two"), &[])), [true, true, false]);
    fs::write(dir.path().join("b"), "changed").unwrap();
    assert_eq!(first, keys(TEXT, &[]), "a file that is not copied");
    fs::set_permissions(dir.path().join("a"), fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(same(&keys(TEXT, &[])), [true, false, false]);
    fs::set_permissions(dir.path().join("a"), fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(first, keys(TEXT, &[]));
    fs::write(dir.path().join("a"), "other").unwrap();
    assert_eq!(same(&keys(TEXT, &[])), [true, false, false]);
    let last = |text: &str| plan_in(text, &[], dir.path()).unwrap().key;
    assert_ne!(last(TEXT), last(&format!("{TEXT}CMD x\n")), "the start command is part of the template");
}

#[test]
fn limits_are_kept() {
    let limit = |text: &str| matches!(plan(text).expect_err("over a limit").fault, Fault::Limit { .. });
    assert!(limit(&format!("FROM a\n{}", "RUN x\n".repeat(129))));
    assert!(limit(&format!("FROM a\n{}", "USER x\n".repeat(512))));
    assert!(limit(&format!("FROM a\nRUN {}\n", "x".repeat(300_000))));
    assert!(limit(&format!("FROM a\nRUN {}\n", "x".repeat(140_000))));
    let vars: String = (0..130).map(|n| format!("ENV V{n}=1\n")).collect();
    assert!(limit(&format!("FROM a\n{vars}")));
    let doubling = "ENV A=$A$A\n".repeat(40);
    assert!(limit(&format!("FROM a\nENV A=xxxxxxxx\n{doubling}")));
    let many: BTreeMap<String, String> = (0..129).map(|n| (format!("A{n}"), String::new())).collect();
    assert!(Recipe::parse("FROM a\n", &many).is_err());
    assert!(Recipe::parse("FROM a\n", &arguments(&[("a b", "1")])).is_err());
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(text in "(FROM a\n)?((RUN|COPY|ENV|ARG|USER|WORKDIR|EXPOSE|CMD|HEALTHCHECK|LABEL|SHELL|ADD|FROM|onbuild|VOLUME)[ \\\\\n\t$\\{\\}\\[\\]\",'#`=<a-c:/*?-]{0,24}\r?\n){0,5}") {
        let _ = plan(&text);
    }

    #[test]
    fn bytes_of_any_kind_do_not_either(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = plan(&format!("FROM a\n{}", String::from_utf8_lossy(&bytes)));
    }
}
