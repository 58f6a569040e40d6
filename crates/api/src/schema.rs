//! Closed vocabularies of string fields, taken from `mainbrella-types` so that the document cannot drift.

use mainbrella_types::{DenyRule, ErrorCode, FailureKind, Isolation};
use utoipa::openapi::schema::{Object, ObjectBuilder, SchemaType, Type};

fn one_of(description: &str, names: impl IntoIterator<Item = &'static str>) -> Object {
    ObjectBuilder::new()
        .schema_type(SchemaType::Type(Type::String))
        .description(Some(description))
        .enum_values(Some(names))
        .build()
}

pub(crate) fn error_code() -> Object {
    one_of("A stable name for programs.", ErrorCode::ALL.iter().map(|c| c.as_str()))
}

pub(crate) fn bundle() -> Object {
    ObjectBuilder::new()
        .schema_type(SchemaType::Type(Type::Object))
        .description(Some("Content by MIME type: a string (base64 for pictures), or JSON."))
        .additional_properties(Some(utoipa::openapi::schema::AdditionalProperties::FreeForm(true)))
        .build()
}

pub(crate) fn ending() -> Object {
    one_of("A stable name for programs.", FailureKind::ALL.iter().map(|k| k.as_str()))
}

pub(crate) fn egress_rule() -> Object {
    one_of("What denied it.", DenyRule::ALL.iter().map(|r| r.as_str()))
}

pub(crate) fn maybe_egress_rule() -> Object {
    let mut names = egress_rule();
    names.schema_type = SchemaType::from_iter([Type::String, Type::Null]);
    if let Some(values) = &mut names.enum_values {
        values.push(serde_json::Value::Null);
    }
    names
}

pub(crate) fn isolation() -> Object {
    let all = [Isolation::Hardware, Isolation::Emulated, Isolation::ApplicationKernel, Isolation::SharedKernel];
    one_of("How machines are separated from the host.", all.map(Isolation::as_str))
}
