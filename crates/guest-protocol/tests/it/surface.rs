//! The wire surface as it was published. It may only grow.

use buffa::Message;
use buffa_descriptor::generated::descriptor::{DescriptorProto, EnumDescriptorProto, FileDescriptorSet};

const PUBLISHED: &str = include_str!("surface.txt");

fn enumeration(out: &mut Vec<String>, prefix: &str, item: &EnumDescriptorProto) {
    let name = format!("{prefix}{}", item.name.as_deref().unwrap());
    for value in &item.value {
        out.push(format!("enum {name}.{} = {}", value.name.as_deref().unwrap(), value.number.unwrap()));
    }
}

fn message(out: &mut Vec<String>, prefix: &str, item: &DescriptorProto) {
    let name = format!("{prefix}{}", item.name.as_deref().unwrap());
    for field in &item.field {
        let kind = match field.type_name.as_deref() {
            Some(of) => of.trim_start_matches('.').to_owned(),
            None => format!("{:?}", field.r#type.unwrap()),
        };
        let (label, number) = (field.label.unwrap(), field.number.unwrap());
        out.push(format!("field {name}.{} = {number} {kind} {label:?}", field.name.as_deref().unwrap()));
    }
    let inner = format!("{name}.");
    item.nested_type.iter().for_each(|item| message(out, &inner, item));
    item.enum_type.iter().for_each(|item| enumeration(out, &inner, item));
}

fn surface() -> Vec<String> {
    let set = FileDescriptorSet::decode_from_slice(include_bytes!(concat!(env!("OUT_DIR"), "/guest.binpb"))).unwrap();
    let mut out = Vec::new();
    for file in &set.file {
        for service in &file.service {
            for method in &service.method {
                let stream = |on: Option<bool>| if on == Some(true) { "stream " } else { "" };
                out.push(format!(
                    "rpc {}.{}({}{}) -> {}{}",
                    service.name.as_deref().unwrap(),
                    method.name.as_deref().unwrap(),
                    stream(method.client_streaming),
                    method.input_type.as_deref().unwrap(),
                    stream(method.server_streaming),
                    method.output_type.as_deref().unwrap(),
                ));
            }
        }
        file.message_type.iter().for_each(|item| message(&mut out, "", item));
        file.enum_type.iter().for_each(|item| enumeration(&mut out, "", item));
    }
    out.sort();
    out
}

#[test]
fn nothing_published_is_gone_or_changed() {
    let now = surface();
    for line in PUBLISHED.lines() {
        assert!(now.iter().any(|now| now == line), "gone or changed: {line}");
    }
}

#[test]
fn everything_there_is_published() {
    let missing: Vec<_> = surface().into_iter().filter(|line| !PUBLISHED.lines().any(|old| old == line)).collect();
    assert!(missing.is_empty(), "add to tests/it/surface.txt:\n{}", missing.join("\n"));
}
