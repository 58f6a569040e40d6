//! Secrets of machines. What is secret is here only as the sealed bytes the caller made of it, and only while the machine
//! lives.

use mainbrella_types::limits::SECRETS_MAX;
use mainbrella_types::secret::{OnFork, SecretError};
use mainbrella_types::{GenerationKey, HostName, Millis, Placement, SecretSpec};

use crate::backend::{Arg, Row, Tx};
use crate::error::{Result, StoreError};
use crate::record::key_arg;
use crate::{Store, sql};

/// A secret as it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretRecord {
    /// What is known of it.
    pub spec: SecretSpec,
    /// Its value, sealed.
    pub sealed: Vec<u8>,
    /// When it was put.
    pub created_at: Millis,
    /// What a fork gives its children of it.
    pub on_fork: OnFork,
}

/// The secrets a machine is made with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewSecrets {
    /// The machine.
    pub machine: GenerationKey,
    /// The key of its authority, sealed.
    pub authority: Vec<u8>,
    /// What it has, all sealed for it.
    pub secrets: Vec<SecretRecord>,
}

/// What became of the wish to keep a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutSecret {
    /// It is kept, in place of one of the same name if there was one.
    Kept,
    /// The machine has as many others as it may.
    TooMany,
    /// The generation does not run, or is not remembered.
    NotRunning,
}

impl Store {
    /// Keeps a secret of a running machine, and `authority` for its first one.
    ///
    /// # Errors
    /// What befell the database. [`StoreError::Uncertain`]: it may have been kept.
    pub async fn put_secret(&self, machine: &GenerationKey, new: &SecretRecord, authority: &[u8]) -> Result<PutSecret> {
        let mut tx = self.db.begin().await?;
        // The row of the machine is held from here on: its secrets change one after the other, and not while it ends.
        if tx.execute(sql::MACHINE_HOLD_RUNNING, &[key_arg(machine)]).await? == 0 {
            tx.rollback().await?;
            return Ok(PutSecret::NotRunning);
        }
        let others = [key_arg(machine), Arg::text(new.spec.name.as_str())];
        let others = tx.fetch_optional(sql::SECRET_COUNT_OTHERS, &others).await?.map_or(Ok(0), |row| row.int(0))?;
        if others >= SECRETS_MAX as i64 {
            tx.rollback().await?;
            return Ok(PutSecret::TooMany);
        }
        tx.execute(sql::SECRET_PUT, &put_args(machine, new)).await?;
        tx.execute(sql::AUTHORITY_KEEP, &[key_arg(machine), Arg::Bytes(authority.to_vec())]).await?;
        tx.commit().await?;
        Ok(PutSecret::Kept)
    }

    /// The secrets of a machine, by name.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn secrets(&self, machine: &GenerationKey) -> Result<Vec<SecretRecord>> {
        self.db.fetch_all(sql::SECRET_LIST, &[key_arg(machine)]).await?.iter().map(secret).collect()
    }

    /// The key of a machine's authority, sealed. `None`: it has no secrets.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn authority(&self, machine: &GenerationKey) -> Result<Option<Vec<u8>>> {
        self.db.fetch_optional(sql::AUTHORITY_GET, &[key_arg(machine)]).await?.map(|row| row.bytes(0)).transpose()
    }

    /// Forgets a secret, and with the last one the authority. Says whether there was one of that name.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn remove_secret(&self, machine: &GenerationKey, name: &str) -> Result<bool> {
        let mut tx = self.db.begin().await?;
        tx.execute(sql::MACHINE_HOLD_RUNNING, &[key_arg(machine)]).await?;
        let removed = tx.execute(sql::SECRET_REMOVE, &[key_arg(machine), Arg::text(name)]).await? > 0;
        tx.execute(sql::AUTHORITY_FORGET_UNUSED, &[key_arg(machine)]).await?;
        tx.commit().await?;
        Ok(removed)
    }
}

fn put_args(machine: &GenerationKey, new: &SecretRecord) -> [Arg; 9] {
    let (header, username) = match &new.spec.placement {
        Placement::Header(name) => (Some(name.clone()), None),
        Placement::Basic(username) => (None, Some(username.clone())),
    };
    [
        key_arg(machine),
        Arg::text(new.spec.name.as_str()),
        Arg::text(new.spec.host.as_str()),
        Arg::Int(new.spec.port.into()),
        Arg::MaybeText(header),
        Arg::MaybeText(username),
        Arg::Bytes(new.sealed.clone()),
        Arg::Int(new.created_at.0),
        Arg::text(new.on_fork.as_str()),
    ]
}

/// Keeps what a machine is made with, in the transaction of its intent.
pub(crate) async fn begin(tx: &mut Tx, new: &NewSecrets) -> Result<()> {
    tx.execute(sql::AUTHORITY_KEEP, &[key_arg(&new.machine), Arg::Bytes(new.authority.clone())]).await?;
    for secret in &new.secrets {
        tx.execute(sql::SECRET_PUT, &put_args(&new.machine, secret)).await?;
    }
    Ok(())
}

/// Forgets all of a machine that ends.
pub(crate) async fn forget(tx: &mut Tx, machine: &GenerationKey) -> Result<()> {
    tx.execute(sql::SECRETS_FORGET, &[key_arg(machine)]).await?;
    tx.execute(sql::AUTHORITY_FORGET_UNUSED, &[key_arg(machine)]).await?;
    Ok(())
}

fn secret(row: &Row) -> Result<SecretRecord> {
    let broken = |_| StoreError::corrupt("a secret on record is none");
    let placement = match (row.maybe_text(3)?, row.maybe_text(4)?) {
        (Some(header), None) => Placement::header(&header),
        (None, Some(username)) => Placement::basic(&username),
        _ => Err(SecretError::Header),
    };
    let host = row.text(1)?.parse::<HostName>().map_err(|_| StoreError::corrupt("the host of a secret is none"))?;
    Ok(SecretRecord {
        spec: SecretSpec {
            name: row.text(0)?.parse().map_err(broken)?,
            host,
            port: u16::try_from(row.int(2)?).map_err(|_| StoreError::corrupt("the port of a secret is none"))?,
            placement: placement.map_err(broken)?,
        },
        sealed: row.bytes(5)?,
        created_at: Millis(row.int(6)?),
        on_fork: row.maybe_text(7)?.map(|text| text.parse().map_err(broken)).transpose()?.unwrap_or_default(),
    })
}
