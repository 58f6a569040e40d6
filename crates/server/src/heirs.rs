//! Which secrets the children of a fork have: by what each was put with, and by what the fork says of it.

use std::collections::BTreeMap;

use mainbrella_api::{ForkedSecret, OnFork, SecretForChildren, SecretOutcome};
use mainbrella_store::{NewSecrets, SecretRecord};
use mainbrella_types::{ErrorCode, GenerationKey, SecretValue, secret};

use crate::error::{ApiError, ApiResult, sentence};
use crate::state::AppState;

/// What each child of one fork gets.
pub(crate) struct Heirloom {
    /// What is handed on, as the source has it, with the value a child gets.
    kept: Vec<(SecretRecord, SecretValue)>,
    /// What becomes of every secret of the source, by name.
    pub(crate) outcomes: Vec<ForkedSecret>,
}

/// Looks at the secrets of `source`, and at what was `asked`. Values are opened only where they are handed on.
pub(crate) async fn heirloom(
    state: &AppState,
    source: &GenerationKey,
    mut asked: BTreeMap<String, SecretForChildren>,
) -> ApiResult<Heirloom> {
    let (mut kept, mut outcomes) = (Vec::new(), Vec::new());
    for record in state.store.secrets(source).await? {
        let name = record.spec.name.to_string();
        let wish = asked.remove(&name).unwrap_or_else(|| SecretForChildren::Plain(record.on_fork.into()));
        let outcome = match wish {
            SecretForChildren::Plain(OnFork::Drop) => SecretOutcome::Dropped,
            SecretForChildren::Plain(OnFork::Inherit) => {
                let value = state.vault.value(source, &record)?;
                kept.push((record, value));
                SecretOutcome::Inherited
            }
            SecretForChildren::Reissue(new) => {
                let wrong = |e: secret::SecretError| ApiError::invalid(sentence(format!("secrets.{name}: {e}")));
                kept.push((record, SecretValue::new(new.reissue).map_err(wrong)?));
                SecretOutcome::Reissued
            }
        };
        outcomes.push(ForkedSecret { name, outcome });
    }
    if let Some(name) = asked.keys().next() {
        let name: String = name.chars().take(64).filter(|c| c.is_ascii_graphic()).collect();
        return Err(ApiError::new(ErrorCode::InvalidRequest, format!("The machine has no secret {name}.")).hint(
            "`secrets` of a fork names secrets that the machine has; others are put in the child when it is there.",
        ));
    }
    Ok(Heirloom { kept, outcomes })
}

impl Heirloom {
    /// What one child is made with, sealed for it, under an authority of its own. `None`: it has no secrets.
    pub(crate) fn sealed_for(&self, state: &AppState, child: GenerationKey) -> ApiResult<Option<NewSecrets>> {
        if self.kept.is_empty() {
            return Ok(None);
        }
        let seal = |(record, value): &(SecretRecord, SecretValue)| {
            let sealed = state.vault.seal_value(&child, record.spec.name.as_str(), value)?;
            Ok(SecretRecord { sealed, created_at: state.now(), ..record.clone() })
        };
        let secrets = self.kept.iter().map(seal).collect::<ApiResult<_>>()?;
        Ok(Some(NewSecrets { machine: child, authority: state.vault.new_authority(&child)?, secrets }))
    }
}

/// What was asked, with stand-ins for values: what is kept of a request to know it again holds no value.
pub(crate) fn without_values(
    state: &AppState,
    asked: &BTreeMap<String, SecretForChildren>,
) -> ApiResult<BTreeMap<String, SecretForChildren>> {
    let mut known = asked.clone();
    for wish in known.values_mut() {
        if let SecretForChildren::Reissue(new) = wish {
            new.reissue = state.vault.stand_in(&new.reissue)?;
        }
    }
    Ok(known)
}
