//! The first key: made at the first start, kept in `keys/admin.key` for whoever may read the data directory.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use mainbrella_store::{KeyRole, NewApiKey, Store, StoreError};
use mainbrella_types::{Millis, ProjectId};
use subtle::ConstantTimeEq as _;

use super::token::Token;

/// What was done about the first key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminKey {
    /// The file holds a valid key.
    Present,
    /// A key was made and written to the file.
    Made,
    /// There is no usable file, but there are keys; nothing was made.
    OtherKeys,
}

/// Why the first key could not be seen to.
#[derive(Debug, thiserror::Error)]
pub enum AdminKeyError {
    /// A file-system call failed.
    #[error("{0} cannot be read or written")]
    File(PathBuf, #[source] io::Error),
    /// The store failed.
    #[error("the key cannot be kept in the database")]
    Store(#[from] StoreError),
    /// No random bits.
    #[error("the system gives no random bits: {0}")]
    Random(getrandom::Error),
}

/// Where the key is.
#[must_use]
pub fn path(data_dir: &Path) -> PathBuf {
    data_dir.join("keys").join("admin.key")
}

/// Sees to it that there is a key: keeps a valid one, makes one when the file is missing or holds no valid one.
///
/// A file that is missing although other keys exist was taken away on purpose and is not made again.
///
/// # Errors
/// When the folder or the store cannot be written.
pub async fn ensure(store: &Store, data_dir: &Path, now: Millis) -> Result<AdminKey, AdminKeyError> {
    let file = path(data_dir);
    let folder = data_dir.join("keys");
    let failed = |e| AdminKeyError::File(file.clone(), e);
    private_folder(&folder).map_err(failed)?;
    let text = match read(&file) {
        Ok(text) => Some(text),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(failed(e)),
    };
    if let Some(token) = text.as_deref().and_then(|t| Token::parse(t.trim())) {
        let kept = store.key_by_prefix(token.id()).await?;
        let valid = kept.is_some_and(|k| k.revoked_at.is_none() && bool::from(k.secret_hash.ct_eq(&token.hash())));
        if valid {
            std::fs::set_permissions(&file, Permissions::from_mode(0o600)).map_err(failed)?;
            return Ok(AdminKey::Present);
        }
    }
    if text.is_none() && store.count_keys().await? > 0 {
        return Ok(AdminKey::OtherKeys);
    }
    let token = Token::generate().map_err(AdminKeyError::Random)?;
    // The file first: a crash in between leaves a file without a key, which the next start replaces.
    write(&folder, &file, token.expose()).map_err(failed)?;
    store
        .insert_key(&NewApiKey {
            id: token.id().to_owned(),
            project: ProjectId::default_project(),
            name: "first key".to_owned(),
            role: KeyRole::Admin,
            prefix: token.id().to_owned(),
            secret_hash: token.hash(),
            now,
        })
        .await?;
    Ok(AdminKey::Made)
}

fn private_folder(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            std::fs::set_permissions(folder, Permissions::from_mode(0o700))
        }
        Err(e) => Err(e),
    }
}

fn read(file: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(file)?.take(1024).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Whole or not at all, 0600 from its first moment.
fn write(folder: &Path, file: &Path, text: &str) -> io::Result<()> {
    let half = folder.join(".admin.key.new");
    match std::fs::remove_file(&half) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut out = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&half)?;
    out.write_all(format!("{text}\n").as_bytes())?;
    out.sync_all()?;
    std::fs::rename(&half, file)?;
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn store(dir: &Path) -> Store {
        Store::open_sqlite(&dir.join("s.sqlite"), Millis(1)).await.expect("store")
    }

    #[tokio::test]
    async fn a_key_is_made_once_private_and_valid() {
        let dir = tempfile::tempdir().expect("temp dir");
        let store = store(dir.path()).await;
        assert_eq!(ensure(&store, dir.path(), Millis(1)).await.expect("made"), AdminKey::Made);
        let text = std::fs::read_to_string(path(dir.path())).expect("file");
        assert_eq!(ensure(&store, dir.path(), Millis(2)).await.expect("kept"), AdminKey::Present);
        assert_eq!(std::fs::read_to_string(path(dir.path())).expect("file"), text);
        let mode = |p: &Path| std::fs::metadata(p).expect("there").permissions().mode() & 0o777;
        assert_eq!((mode(&path(dir.path())), mode(&dir.path().join("keys"))), (0o600, 0o700));
        let token = Token::parse(text.trim()).expect("of the form");
        let kept = store.key_by_prefix(token.id()).await.expect("read").expect("there");
        assert_eq!((kept.secret_hash, kept.role), (token.hash(), KeyRole::Admin));
    }

    #[tokio::test]
    async fn a_revoked_or_foreign_key_is_replaced_and_a_removed_one_is_not() {
        let dir = tempfile::tempdir().expect("temp dir");
        let store = store(dir.path()).await;
        ensure(&store, dir.path(), Millis(1)).await.expect("made");
        let first = std::fs::read_to_string(path(dir.path())).expect("file");
        let id = Token::parse(first.trim()).expect("of the form").id().to_owned();
        store.revoke_key(&id, Millis(2)).await.expect("revoked");
        assert_eq!(ensure(&store, dir.path(), Millis(3)).await.expect("made"), AdminKey::Made);
        assert_ne!(std::fs::read_to_string(path(dir.path())).expect("file"), first);
        std::fs::write(path(dir.path()), "nonsense").expect("write");
        assert_eq!(ensure(&store, dir.path(), Millis(4)).await.expect("made"), AdminKey::Made);
        std::fs::remove_file(path(dir.path())).expect("remove");
        assert_eq!(ensure(&store, dir.path(), Millis(5)).await.expect("left"), AdminKey::OtherKeys);
        assert!(!path(dir.path()).exists());
    }
}
