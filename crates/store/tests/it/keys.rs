//! API keys: found by prefix, listed, revoked, touched.

use crate::common::*;
use mainbrella_store::{KeyRole, LAST_USED_STEP_MS, NewApiKey, StoreError};
use mainbrella_types::Millis;

fn key(n: i64) -> NewApiKey {
    NewApiKey {
        id: format!("key-{n}"),
        project: project(),
        name: format!("laptop {n}"),
        role: if n == 0 { KeyRole::Admin } else { KeyRole::User },
        prefix: format!("mb_{n:08}"),
        secret_hash: [u8::try_from(n).expect("small"); 32],
        now: Millis(NOW + n),
    }
}

#[tokio::test]
async fn a_key_is_found_by_its_prefix_until_and_after_it_is_revoked() {
    for db in Fresh::every_kind().await {
        assert_eq!(db.store.count_keys().await.expect("counted"), 0);
        for n in 0..5 {
            db.store.insert_key(&key(n)).await.expect("kept");
        }
        let found = db.store.key_by_prefix("mb_00000003").await.expect("read").expect("there");
        assert_eq!((found.id.as_str(), found.role, found.secret_hash), ("key-3", KeyRole::User, [3; 32]));
        assert_eq!((found.created_at, found.last_used_at, found.revoked_at), (Millis(NOW + 3), None, None));
        assert_eq!(db.store.key_by_id("key-3").await.expect("read"), Some(found.clone()));
        assert_eq!(db.store.key_by_prefix("MB_00000003").await.expect("read"), None);
        assert!(!format!("{found:?}").contains("secret"), "the hash is not in logs");

        assert!(db.store.revoke_key("key-3", Millis(NOW + 9)).await.expect("revoked"));
        assert!(!db.store.revoke_key("key-3", Millis(NOW + 10)).await.expect("answered"));
        assert!(!db.store.revoke_key("key-9", Millis(NOW)).await.expect("answered"));
        let revoked = db.store.key_by_prefix("mb_00000003").await.expect("read").expect("there");
        assert_eq!(revoked.revoked_at, Some(Millis(NOW + 9)));
        assert_eq!(db.store.count_keys().await.expect("counted"), 4);

        let (mut ids, mut after) = (Vec::new(), None);
        loop {
            let page = db.store.list_keys(&project(), after, 2).await.expect("listed");
            ids.extend(page.keys.into_iter().map(|k| k.id));
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(ids, ["key-0", "key-1", "key-2", "key-3", "key-4"]);
        db.remove().await;
    }
}

#[tokio::test]
async fn keys_that_cannot_be_kept_are_refused_with_the_reason() {
    for db in Fresh::every_kind().await {
        db.store.insert_key(&key(1)).await.expect("kept");
        let twin = NewApiKey { id: "other".to_owned(), ..key(1) };
        assert!(matches!(db.store.insert_key(&twin).await, Err(StoreError::Duplicate)));
        let stranger = NewApiKey { project: "nobody".parse().expect("valid"), ..key(2) };
        assert!(matches!(db.store.insert_key(&stranger).await, Err(StoreError::UnknownProject)));
        for bad in [
            NewApiKey { name: "x".repeat(65), ..key(3) },
            NewApiKey { name: "a\0".to_owned(), ..key(3) },
            NewApiKey { id: String::new(), ..key(3) },
            NewApiKey { prefix: "é".to_owned(), ..key(3) },
        ] {
            assert!(matches!(db.store.insert_key(&bad).await, Err(StoreError::Invalid(_))), "{bad:?}");
        }
        assert_eq!(db.store.count_keys().await.expect("counted"), 1);
        db.remove().await;
    }
}

#[tokio::test]
async fn the_last_use_is_coarse_and_never_goes_back() {
    for db in Fresh::every_kind().await {
        db.store.insert_key(&key(1)).await.expect("kept");
        let step = i64::try_from(LAST_USED_STEP_MS).expect("small");
        let fresh = db.store.key_by_id("key-1").await.expect("read").expect("there");
        for (now, expected) in [(0, 0), (step, 0), (step + 1, step + 1), (5, step + 1), (9 * step, 9 * step)] {
            // The note the caller holds may be old: the database decides.
            db.store.touch_key(&fresh, Millis(NOW + now)).await.expect("touched");
            let key = db.store.key_by_id("key-1").await.expect("read").expect("there");
            assert_eq!(key.last_used_at, Some(Millis(NOW + expected)), "at {now}");
        }
        db.remove().await;
    }
}
