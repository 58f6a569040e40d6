//! Reads the host's package sources: one-line `.list` and deb822 `.sources` files.

/// One entry of the host's package sources that is in use.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(super) struct Source {
    pub(super) uris: Vec<String>,
    pub(super) suites: Vec<String>,
    pub(super) components: Vec<String>,
    /// `Signed-By`: a key file, a fingerprint, or an embedded key.
    pub(super) signed_by: Option<String>,
}

/// Entries of type `deb` in a one-line file.
pub(super) fn one_line(text: &str) -> Vec<Source> {
    text.lines().filter_map(one_entry).collect()
}

fn one_entry(line: &str) -> Option<Source> {
    let line = line.split('#').next()?.trim();
    let rest = line.strip_prefix("deb").filter(|r| r.starts_with([' ', '\t', '[']))?.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(inner) => inner.split_once(']')?,
        None => ("", rest),
    };
    let mut words = rest.split_whitespace().map(str::to_owned);
    let (uri, suite) = (words.next()?, words.next()?);
    let signed_by = options.split_whitespace().find_map(|o| {
        let (name, value) = o.split_once('=')?;
        name.eq_ignore_ascii_case("signed-by").then(|| value.to_owned())
    });
    Some(Source { uris: vec![uri], suites: vec![suite], components: words.collect(), signed_by })
}

/// Enabled stanzas of type `deb` in a deb822 file.
pub(super) fn deb822(text: &str) -> Vec<Source> {
    let mut found = Vec::new();
    let mut fields: Vec<(String, String)> = Vec::new();
    for line in text.lines().chain([""]) {
        if line.starts_with('#') {
            continue;
        }
        if line.trim().is_empty() {
            found.extend(stanza(&fields));
            fields.clear();
        } else if line.starts_with([' ', '\t']) {
            if let Some((_, value)) = fields.last_mut() {
                value.push('\n');
                value.push_str(line.trim());
            }
        } else if let Some((name, value)) = line.split_once(':') {
            fields.push((name.trim().to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
    found
}

fn stanza(fields: &[(String, String)]) -> Option<Source> {
    let text = |name: &str| fields.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str());
    let words = |name: &str| text(name).unwrap_or("").split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let off = matches!(text("enabled").map(str::to_ascii_lowercase).as_deref(), Some("no" | "false" | "0" | "off"));
    let binary = words("types").iter().any(|t| t == "deb");
    (binary && !off).then(|| Source {
        uris: words("uris"),
        suites: words("suites"),
        components: words("components"),
        signed_by: text("signed-by").map(|v| v.trim().to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(words: &[&str]) -> Vec<String> {
        words.iter().map(|w| (*w).to_owned()).collect()
    }

    #[test]
    fn one_line_entries_with_and_without_options() {
        let text = "# deb http://off.test/debian trixie main\n\
                    deb http://a.test/debian trixie main contrib # note\n\
                    deb-src http://a.test/debian trixie main\n\
                    deb [ arch=amd64 signed-by=/usr/share/keyrings/x.gpg ] https://b.test/linux stable main\n\
                    deb [trusted=yes\n\
                    deb http://incomplete.test\n";
        assert_eq!(
            one_line(text),
            [
                Source {
                    uris: strings(&["http://a.test/debian"]),
                    suites: strings(&["trixie"]),
                    components: strings(&["main", "contrib"]),
                    signed_by: None
                },
                Source {
                    uris: strings(&["https://b.test/linux"]),
                    suites: strings(&["stable"]),
                    components: strings(&["main"]),
                    signed_by: Some("/usr/share/keyrings/x.gpg".into())
                },
            ]
        );
    }

    #[test]
    fn deb822_stanzas_with_comments_continuations_and_disabled_ones() {
        let text = "Types: deb deb-src\n# a comment inside\nURIs: http://a.test/debian\n http://b.test/debian\n\
                    Suites: bookworm bookworm-updates\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n\
                    \n\nEnabled: no\nTypes: deb\nURIs: http://off.test/debian\nSuites: bookworm\nComponents: main\n\n\
                    Types: deb-src\nURIs: http://src.test/debian\nSuites: bookworm\nComponents: main\n\n\
                    types: deb\nuris: http://c.test/repo\nsuites: ./\nSigned-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n xyz\n";
        let found = deb822(text);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].uris, strings(&["http://a.test/debian", "http://b.test/debian"]));
        assert_eq!(found[0].suites, strings(&["bookworm", "bookworm-updates"]));
        assert_eq!(found[0].signed_by.as_deref(), Some("/usr/share/keyrings/debian-archive-keyring.gpg"));
        assert_eq!(found[1].uris, strings(&["http://c.test/repo"]));
        assert!(found[1].components.is_empty());
        assert!(found[1].signed_by.as_deref().is_some_and(|k| k.starts_with("-----BEGIN")));
    }
}
