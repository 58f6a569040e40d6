//! Users and groups by name, as a machine's own files say. They are a stranger's.

use mainbrella_engine::EngineError;

use crate::failure::{Failure, Reason};
use crate::ground::Machine;

/// Most bytes of `/etc/passwd` or `/etc/group` that are looked at.
const MOST: u64 = 1024 * 1024;

/// Whom something belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// `USER` or `USER:GROUP`, each by name or number; `None`: root.
pub(crate) async fn owner(machine: &dyn Machine, text: Option<&str>) -> Result<Owner, Failure> {
    let Some(text) = text else { return Ok(Owner::default()) };
    let (user, group) = text.split_once(':').map_or((text, None), |(user, group)| (user, Some(group)));
    let mut owner = match user.parse::<u32>() {
        // A number alone stands for the group, too.
        Ok(uid) => Owner { uid, gid: uid },
        Err(_) => {
            let text = file(machine, "/etc/passwd").await?;
            let found =
                fields(&text, user).and_then(|f| Some(Owner { uid: number(f.get(2))?, gid: number(f.get(3))? }));
            found.ok_or_else(|| unknown("user", user, "/etc/passwd"))?
        }
    };
    if let Some(group) = group {
        owner.gid = match group.parse() {
            Ok(gid) => gid,
            Err(_) => {
                let text = file(machine, "/etc/group").await?;
                fields(&text, group)
                    .and_then(|f| number(f.get(2)))
                    .ok_or_else(|| unknown("group", group, "/etc/group"))?
            }
        };
    }
    Ok(owner)
}

async fn file(machine: &dyn Machine, path: &str) -> Result<String, Failure> {
    let failed = |e: EngineError| Failure::of(Reason::Step, &e);
    let bytes = machine.read(path, MOST).await.map_err(failed)?;
    Ok(String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned())
}

/// The fields of the line that begins with `name`.
fn fields<'a>(text: &'a str, name: &str) -> Option<Vec<&'a str>> {
    text.lines().map(|line| line.split(':').take(8).collect::<Vec<_>>()).find(|fields| fields.first() == Some(&name))
}

fn number(field: Option<&&str>) -> Option<u32> {
    field?.parse().ok()
}

fn unknown(what: &str, name: &str, path: &str) -> Failure {
    Failure::new(Reason::Step, format!("there is no {what} `{name}` in {path} of the machine; add it in a RUN before"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_strangers_are_read() {
        let text = "root:x:0:0::/root:/bin/sh\n\nbroken\napp:x:1000:50:a:/srv:/bin/sh\nnone:x::\n";
        let app = fields(text, "app").expect("there");
        assert_eq!((number(app.get(2)), number(app.get(3))), (Some(1000), Some(50)));
        assert_eq!(number(fields(text, "none").expect("there").get(2)), None);
        assert!(fields(text, "ap").is_none());
        assert_eq!(number(fields(text, "broken").expect("there").get(2)), None);
    }
}
