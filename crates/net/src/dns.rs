//! The name server of a machine. What it answers is the policy: under an allow-list only allowed names, each with an
//! address that means only that name ([`crate::names`]) and no question ever leaves the host; under `open` the host's own
//! answers, without addresses no machine may reach.

use std::net::{IpAddr, Ipv4Addr};

use hickory_proto::op::{Message, MessageType, Metadata, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{DNSClass, RData, Record, RecordType};
use mainbrella_types::egress::reserved;
use mainbrella_types::{DenyRule, EgressPolicy, HostName};

use crate::events::{Denied, EgressLog, Verdict};
use crate::names::{Names, TTL_SECONDS};
use crate::resolve::Outside;
use crate::secrets::SeatSecrets;

/// Longest question taken.
pub const QUESTION_MAX: usize = 1024;
/// Longest answer over UDP when the machine does not say that it takes more.
const UDP_PLAIN_MAX: usize = 512;
/// Longest answer over UDP at all.
const UDP_MAX: usize = 1232;

/// Answers one question. `None`: it is none, and gets no answer.
pub async fn answer(
    question: &[u8],
    policy: &EgressPolicy,
    names: &Names,
    outside: &dyn Outside,
    log: &EgressLog,
    secrets: &SeatSecrets,
) -> Option<Vec<u8>> {
    let asked = Message::from_vec(question).ok()?;
    if asked.metadata.message_type != MessageType::Query {
        return None;
    }
    let mut reply = Message::error_msg(asked.metadata.id, asked.metadata.op_code, ResponseCode::NoError);
    reply.metadata = Metadata::response_from_request(&asked.metadata);
    reply.metadata.recursion_available = true;
    let refuse = |mut reply: Message, code| {
        reply.metadata.response_code = code;
        reply.to_vec().ok()
    };
    if asked.metadata.op_code != OpCode::Query {
        return refuse(reply, ResponseCode::NotImp);
    }
    let [query] = asked.queries.as_slice() else { return refuse(reply, ResponseCode::FormErr) };
    let query = query.clone();
    reply.add_query(query.clone());
    if query.query_class() != DNSClass::IN {
        return refuse(reply, ResponseCode::Refused);
    }
    let name: Option<HostName> = query.name().to_ascii().parse().ok();
    match policy {
        EgressPolicy::Off => refuse(reply, ResponseCode::Refused),
        // Its connections come to the gateway, whatever the policy.
        EgressPolicy::Open if name.as_ref().is_some_and(|n| secrets.name(n)) => stand_in(&query, name, names, reply),
        EgressPolicy::Open => match outside.ask(question).await {
            Ok(answer) => filtered(&answer, &asked, reply),
            Err(_) => refuse(reply, ResponseCode::ServFail),
        },
        EgressPolicy::AllowList(list) => {
            let Some(name) = name.filter(|n| list.may_resolve(n)) else {
                let asked_for = query.name().to_ascii().to_ascii_lowercase();
                let asked_for = asked_for.strip_suffix('.').unwrap_or(&asked_for);
                log.record(Denied {
                    verdict: Verdict::Denied,
                    name: Some(asked_for),
                    address: None,
                    port: 53,
                    rule: DenyRule::NoRule,
                    reason: "no rule of the allow-list matches the name",
                });
                return refuse(reply, ResponseCode::NXDomain);
            };
            stand_in(&query, Some(name), names, reply)
        }
    }
}

/// The address that stands for a name. Of any other kind there is nothing: no IPv6, no mail, no keys. That is an answer, not an
/// error.
fn stand_in(query: &Query, name: Option<HostName>, names: &Names, mut reply: Message) -> Option<Vec<u8>> {
    if let Some(name) = name.filter(|_| query.query_type() == RecordType::A) {
        let address: Ipv4Addr = names.address(&name);
        reply.add_answer(Record::from_rdata(query.name().clone(), TTL_SECONDS, RData::A(A(address))));
    }
    reply.to_vec().ok()
}

/// The host's answer without addresses that lead inwards.
fn filtered(answer: &[u8], asked: &Message, mut reply: Message) -> Option<Vec<u8>> {
    let Ok(said) = Message::from_vec(answer) else {
        reply.metadata.response_code = ResponseCode::ServFail;
        return reply.to_vec().ok();
    };
    if said.metadata.id != asked.metadata.id || said.queries != asked.queries {
        reply.metadata.response_code = ResponseCode::ServFail;
        return reply.to_vec().ok();
    }
    let fit = |record: &Record| {
        let address = match &record.data {
            RData::A(a) => IpAddr::V4(a.0),
            // There is no IPv6 in a machine; an address of it would only cost the caller a time-out.
            RData::AAAA(_) => return false,
            _ => return true,
        };
        reserved(address).is_none()
    };
    reply.metadata.response_code = said.metadata.response_code;
    reply.metadata.truncation = said.metadata.truncation;
    reply.add_answers(said.answers.into_iter().filter(fit));
    reply.add_authorities(said.authorities.into_iter().filter(fit));
    reply.to_vec().ok()
}

/// What goes into a datagram: the answer, or the word that it is too long for one.
#[must_use]
pub fn for_udp(answer: Vec<u8>, question: &[u8]) -> Vec<u8> {
    let offered = Message::from_vec(question).ok().and_then(|m| m.edns.map(|e| usize::from(e.max_payload())));
    if answer.len() <= offered.unwrap_or(UDP_PLAIN_MAX).clamp(UDP_PLAIN_MAX, UDP_MAX) {
        return answer;
    }
    match Message::from_vec(&answer).map(|m| m.truncate().to_vec()) {
        Ok(Ok(short)) => short,
        _ => answer.into_iter().take(UDP_PLAIN_MAX).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::net::SocketAddr;

    use futures::future::BoxFuture;
    use hickory_proto::rr::Name;
    use mainbrella_types::AllowList;
    use proptest::prelude::*;
    use tokio::net::TcpStream;

    use super::*;

    /// A name server that says what it is told to.
    struct Says(Vec<RData>);
    impl Outside for Says {
        fn resolve<'a>(&'a self, _: &'a HostName) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
            Box::pin(async { Err(io::ErrorKind::Unsupported.into()) })
        }
        fn connect(&self, _: SocketAddr) -> BoxFuture<'_, io::Result<TcpStream>> {
            Box::pin(async { Err(io::ErrorKind::Unsupported.into()) })
        }
        fn ask<'a>(&'a self, question: &'a [u8]) -> BoxFuture<'a, io::Result<Vec<u8>>> {
            Box::pin(async move {
                let asked = Message::from_vec(question).map_err(io::Error::other)?;
                let mut m = Message::error_msg(asked.metadata.id, OpCode::Query, ResponseCode::NoError);
                m.add_queries(asked.queries.clone());
                for data in &self.0 {
                    m.add_answer(Record::from_rdata(asked.queries[0].name().clone(), 5, data.clone()));
                }
                m.to_vec().map_err(io::Error::other)
            })
        }
    }

    fn question(name: &str, kind: RecordType) -> Vec<u8> {
        let mut m = Message::query();
        m.add_query(Query::query(Name::from_ascii(name).expect("a name"), kind));
        m.to_vec().expect("encodes")
    }

    fn list(rules: &[&str]) -> EgressPolicy {
        let rules = rules.iter().map(|r| r.parse().expect("a rule")).collect();
        EgressPolicy::AllowList(AllowList::new(rules, false).expect("few"))
    }

    async fn ask(policy: &EgressPolicy, outside: &Says, q: &[u8]) -> (Message, EgressLog, Names) {
        let (names, log) = (Names::default(), EgressLog::default());
        let a = answer(q, policy, &names, outside, &log, &SeatSecrets::default()).await.expect("an answer");
        (Message::from_vec(&a).expect("a message"), log, names)
    }

    fn addresses(m: &Message) -> Vec<IpAddr> {
        let address = |r: &Record| match &r.data {
            RData::A(a) => Some(IpAddr::V4(a.0)),
            RData::AAAA(a) => Some(IpAddr::V6(a.0)),
            _ => None,
        };
        m.answers.iter().filter_map(address).collect()
    }

    #[tokio::test]
    async fn an_allowed_name_gets_an_address_that_means_it() {
        let (m, log, names) =
            ask(&list(&["*.example.org"]), &Says(Vec::new()), &question("A.Example.org.", RecordType::A)).await;
        let [IpAddr::V4(a)] = addresses(&m)[..] else { panic!("one address") };
        assert_eq!(names.name(a), Some("a.example.org".parse().expect("a name")));
        assert_eq!(log.after(0, 9).denied, 0);
        let (m, _, _) =
            ask(&list(&["*.example.org"]), &Says(Vec::new()), &question("a.example.org.", RecordType::AAAA)).await;
        assert_eq!((m.metadata.response_code, m.answers.len()), (ResponseCode::NoError, 0));
    }

    #[tokio::test]
    async fn other_names_do_not_exist_and_leave_no_trace_outside() {
        let long = format!("{}.{}.evil.example.", "a".repeat(63), "b".repeat(63));
        for name in ["example.com.", "example.org.evil.example.", long.as_str(), "*.example.org.", "_dmarc.x."] {
            for kind in [RecordType::A, RecordType::TXT, RecordType::NULL, RecordType::ANY] {
                let (m, log, _) = ask(
                    &list(&["example.org"]),
                    &Says(vec![RData::A(A(Ipv4Addr::new(8, 8, 8, 8)))]),
                    &question(name, kind),
                )
                .await;
                assert_eq!((m.metadata.response_code, m.answers.len()), (ResponseCode::NXDomain, 0), "{name}");
                assert_eq!(log.after(0, 9).denied, 1);
                assert_eq!(log.after(0, 9).events[0].name.as_deref(), name.strip_suffix('.'));
            }
        }
    }

    #[tokio::test]
    async fn an_open_machine_is_not_told_of_addresses_inside() {
        let says = Says(vec![
            RData::A(A(Ipv4Addr::new(127, 0, 0, 1))),
            RData::A(A(Ipv4Addr::new(169, 254, 169, 254))),
            RData::A(A(Ipv4Addr::new(93, 184, 216, 34))),
            RData::AAAA(hickory_proto::rr::rdata::AAAA("::ffff:10.0.0.1".parse().expect("an address"))),
        ]);
        let (m, _, _) = ask(&EgressPolicy::Open, &says, &question("rebind.example.", RecordType::A)).await;
        assert_eq!(addresses(&m), [IpAddr::V4(Ipv4Addr::new(93, 184, 216, 34))]);
        let (m, _, _) = ask(&EgressPolicy::Off, &says, &question("rebind.example.", RecordType::A)).await;
        assert_eq!(m.metadata.response_code, ResponseCode::Refused);
    }

    #[tokio::test]
    async fn an_answer_too_long_for_a_datagram_is_cut_and_says_so() {
        let says = Says((0..200).map(|n| RData::A(A(Ipv4Addr::new(93, 184, 216, n)))).collect());
        let q = question("many.example.", RecordType::A);
        let (names, log) = (Names::default(), EgressLog::default());
        let long =
            answer(&q, &EgressPolicy::Open, &names, &says, &log, &SeatSecrets::default()).await.expect("an answer");
        let short = for_udp(long.clone(), &q);
        assert!(long.len() > UDP_MAX && short.len() <= UDP_PLAIN_MAX);
        assert!(Message::from_vec(&short).expect("a message").metadata.truncation);
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered_or_not(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            for policy in [EgressPolicy::Off, EgressPolicy::Open, list(&["*.org"])] {
                let (names, log) = (Names::default(), EgressLog::default());
                let _ = runtime.block_on(answer(&bytes, &policy, &names, &Says(Vec::new()), &log, &SeatSecrets::default()));
                let _ = for_udp(bytes.clone(), &bytes);
            }
        }
    }
}
