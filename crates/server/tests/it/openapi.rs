//! The committed description is fresh and whole.

use serde_json::Value;

#[test]
fn the_committed_description_is_fresh() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../openapi/v1.json");
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(committed == mainbrella_server::openapi::text(), "openapi/v1.json is stale: run `cargo xtask openapi`");
}

#[test]
fn the_committed_configuration_page_is_fresh() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        committed == mainbrella_server::config::reference(),
        "docs/configuration.md is stale: run `cargo xtask docs`"
    );
}

#[test]
fn the_description_is_openapi_3_1_and_every_part_is_described() {
    let d = crate::common::document();
    assert!(d["openapi"].as_str().unwrap().starts_with("3.1."));
    let mut ids = std::collections::HashSet::new();
    for (path, item) in d["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let at = format!("{method} {path}");
            assert!(
                ids.insert(operation["operationId"].as_str().unwrap().to_owned()),
                "{at}: operationId is not unique"
            );
            assert!(!operation["summary"].as_str().unwrap().is_empty(), "{at}");
            assert!(operation["security"].is_array(), "{at}");
            let responses = operation["responses"].as_object().unwrap();
            assert!(responses.keys().any(|s| s.starts_with('2')) && responses.contains_key("default"), "{at}");
            for (status, response) in responses {
                assert!(
                    !response["description"].as_str().unwrap_or_default().is_empty(),
                    "{at} {status} has no description"
                );
            }
            let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
            for p in &parameters {
                assert!(p["description"].as_str().is_some_and(|d| !d.is_empty()), "{at} {p}");
                assert!(p["schema"].is_object(), "{at} {p}");
            }
            let named = path.matches('{').count();
            assert_eq!(parameters.iter().filter(|p| p["in"] == "path" && p["required"] == true).count(), named, "{at}");
        }
    }
    assert!(ids.len() >= 14, "{ids:?}");
}

#[test]
fn every_reference_leads_somewhere_and_every_schema_property_is_described() {
    let d = crate::common::document();
    fn walk(v: &Value, d: &Value, count: &mut usize) {
        match v {
            Value::Object(map) => {
                if let Some(Value::String(r)) = map.get("$ref") {
                    *count += 1;
                    let pointer = r.strip_prefix('#').expect("a local reference");
                    assert!(d.pointer(pointer).is_some(), "{r} leads nowhere");
                }
                map.values().for_each(|v| walk(v, d, count));
            }
            Value::Array(list) => list.iter().for_each(|v| walk(v, d, count)),
            _ => {}
        }
    }
    let mut count = 0;
    walk(&d, &d, &mut count);
    assert!(count > 20);
    for (name, schema) in d["components"]["schemas"].as_object().unwrap() {
        for (property, p) in schema["properties"].as_object().into_iter().flatten() {
            let described = p["description"].is_string()
                || p["oneOf"].as_array().is_some_and(|all| all.iter().any(|o| o["description"].is_string()));
            assert!(described || p["$ref"].is_string(), "{name}.{property} has no description");
        }
    }
    // Requests are closed, replies are open.
    for closed in [
        "CreateMachine",
        "ExtendMachine",
        "RunCommand",
        "CreateKey",
        "MakeDirectory",
        "MoveFile",
        "ChangeMode",
        "RemoveFile",
        "CreateFileUrl",
        "StartJob",
        "CancelJob",
        "SendSignal",
        "TerminalSize",
        "CreatePreview",
        "RenewPreview",
    ] {
        assert_eq!(d["components"]["schemas"][closed]["additionalProperties"], false, "{closed}");
    }
    assert_eq!(d["components"]["schemas"]["Machine"]["additionalProperties"], Value::Null);
}

#[tokio::test]
async fn the_service_serves_what_is_committed_and_has_every_path_in_it() {
    let s = crate::common::Service::start().await;
    let request =
        http::Request::builder().uri("/v1/openapi.json").header("host", "localhost").body(Default::default()).unwrap();
    let reply = s.send(request).await;
    assert_eq!(reply.json(), crate::common::document());
    for (path, item) in crate::common::document()["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys() {
            let method = http::Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
            let request = s.request(method.clone(), &path.replace("{id}", "x")).body(Default::default()).unwrap();
            let reply = s.send(request).await;
            assert!(reply.status != 405, "{method} {path}");
            assert!(reply.status != 404 || !reply.error().message.contains("path"), "{method} {path}");
        }
    }
}
