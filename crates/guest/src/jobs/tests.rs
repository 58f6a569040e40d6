//! The log under any order of writing and following.

use bytes::Bytes;
use mainbrella_guest_protocol::limits::{RETAINED_MAX, UNSENT_MAX};
use mainbrella_guest_protocol::pb;
use proptest::prelude::*;

use super::log::{Happened, Log, Output};
use super::stdin::{Next, Stdin, StdinError};

fn content(output: Output, offset: u64, length: usize) -> Vec<u8> {
    (offset..offset + length as u64).map(|at| (at.wrapping_mul(31) >> 3) as u8 ^ output as u8).collect()
}

#[derive(Debug, Clone)]
enum Step {
    Write(Output, usize),
    Take(usize),
    /// The follower forgets the last few events it was given and follows again from there.
    Break(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (prop_oneof![Just(Output::Stdout), Just(Output::Stderr)], 1usize..70_000)
            .prop_map(|(output, length)| Step::Write(output, length)),
        3 => (1usize..8).prop_map(Step::Take),
        1 => (0usize..4).prop_map(Step::Break),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_follower_that_breaks_off_gets_every_byte(steps in prop::collection::vec(step(), 1..200)) {
        let mut log = Log::new(0, false);
        log.push(Happened::Started { pid: 7 });
        let mut written = [0u64; 2];
        let mut got: Vec<(u64, Happened)> = Vec::new();
        let take = |log: &mut Log, got: &mut Vec<(u64, Happened)>| {
            let after = got.last().map_or(0, |(sequence, _)| *sequence);
            let next = log.take_after(after);
            let some = next.is_some();
            got.extend(next);
            some
        };
        for step in steps {
            match step {
                // A process that has to wait writes nothing.
                Step::Write(output, length) if !log.is_full() => {
                    log.write(output, &content(output, written[output as usize], length));
                    written[output as usize] += length as u64;
                }
                Step::Write(..) => {}
                Step::Take(n) => (0..n).for_each(|_| { take(&mut log, &mut got); }),
                Step::Break(n) => got.truncate(got.len().saturating_sub(n)),
            }
            prop_assert!(log.held() < UNSENT_MAX + RETAINED_MAX + 4 * 70_000);
        }
        log.finish(pb::JobExit::default());
        while take(&mut log, &mut got) {}
        let mut read = [0u64; 2];
        for (i, (sequence, event)) in got.iter().enumerate() {
            prop_assert_eq!(*sequence, i as u64 + 1);
            if let Happened::Output { output, offset, data } = event {
                prop_assert_eq!(*offset, read[*output as usize]);
                prop_assert!(data[..] == content(*output, *offset, data.len()));
                read[*output as usize] += data.len() as u64;
            }
        }
        prop_assert_eq!(read, written);
        prop_assert!(got.last().unwrap().1.is_last());
    }

    #[test]
    fn what_is_not_acked_is_kept_and_what_is_acked_is_let_go(steps in prop::collection::vec(step(), 1..200)) {
        let mut log = Log::new(0, true);
        log.push(Happened::Started { pid: 7 });
        let mut written = [0u64; 2];
        // What the host holds durably, and what it was given beyond that and may lose with its link or itself.
        let mut held: Vec<(u64, Happened)> = Vec::new();
        let mut given = Vec::new();
        let take = |log: &mut Log, held: &[(u64, Happened)], given: &mut Vec<(u64, Happened)>| {
            let after = given.last().or(held.last()).map_or(0, |(sequence, _)| *sequence);
            let next = log.take_after(after);
            let some = next.is_some();
            given.extend(next);
            some
        };
        for step in steps {
            match step {
                Step::Write(output, length) if !log.is_full() => {
                    log.write(output, &content(output, written[output as usize], length));
                    written[output as usize] += length as u64;
                }
                Step::Write(..) => {}
                Step::Take(n) => (0..n).for_each(|_| { take(&mut log, &held, &mut given); }),
                // Everything that is not held durably is lost.
                Step::Break(0) => given.clear(),
                Step::Break(n) => {
                    held.extend(given.drain(..given.len().min(n * 3)));
                    log.ack(held.last().map_or(0, |(sequence, _)| *sequence));
                }
            }
            prop_assert!(log.held() < UNSENT_MAX + 4 * 70_000, "only what is not acked is kept");
        }
        log.finish(pb::JobExit::default());
        prop_assert!(log.is_owed());
        given.clear();
        while take(&mut log, &held, &mut given) {}
        held.append(&mut given);
        let mut read = [0u64; 2];
        for (i, (sequence, event)) in held.iter().enumerate() {
            prop_assert_eq!(*sequence, i as u64 + 1);
            if let Happened::Output { output, offset, data } = event {
                prop_assert_eq!(*offset, read[*output as usize]);
                prop_assert!(data[..] == content(*output, *offset, data.len()));
                read[*output as usize] += data.len() as u64;
            }
        }
        prop_assert_eq!(read, written);
        log.ack(u64::MAX);
        prop_assert!(!log.is_owed() && log.exit().is_some());
        prop_assert_eq!((log.held(), log.acked()), (0, Some(log.last_sequence())));
    }

    #[test]
    fn a_limit_gives_head_gap_and_tail(pieces in prop::collection::vec(0usize..300, 0..40), limit in 1u64..2000) {
        let mut log = Log::new(limit, false);
        let mut written = 0;
        for length in pieces {
            log.write(Output::Stdout, &content(Output::Stdout, written, length));
            written += length as u64;
        }
        log.finish(pb::JobExit::default());
        let (mut after, mut at, mut sent) = (0, 0, 0);
        while let Some((sequence, event)) = log.take_after(after) {
            after = sequence;
            match event {
                Happened::Output { offset, data, .. } => {
                    prop_assert_eq!(offset, at);
                    prop_assert!(data[..] == content(Output::Stdout, offset, data.len()));
                    at += data.len() as u64;
                    sent += data.len() as u64;
                }
                Happened::Gap { offset, length, .. } => {
                    prop_assert_eq!(offset, at);
                    prop_assert_eq!(offset, limit.div_ceil(2));
                    at += length;
                }
                Happened::Exit(exit) => prop_assert_eq!(exit.stdout_bytes, written),
                other => prop_assert!(false, "{:?}", other),
            }
        }
        prop_assert_eq!(at, written);
        prop_assert_eq!(sent, written.min(limit), "all that was asked for, and no more");
    }
}

#[test]
fn what_is_gone_is_told_once_for_each_output() {
    let mut log = Log::new(0, false);
    log.push(Happened::Started { pid: 7 });
    let mut after = 0;
    let mut written = 0;
    while written < 3 * RETAINED_MAX as u64 {
        for output in [Output::Stdout, Output::Stderr] {
            log.write(output, &content(output, written, 50_000));
        }
        written += 50_000;
        while let Some((sequence, _)) = log.take_after(after) {
            after = sequence;
        }
    }
    let (mut after, mut gaps, mut at) = (0, Vec::new(), [0, 0]);
    while let Some((sequence, event)) = log.take_after(after) {
        assert!(sequence > after);
        after = sequence;
        match event {
            Happened::Gap { output, offset, length } => {
                gaps.push(output);
                at[output as usize] = offset + length;
            }
            Happened::Output { output, offset, data } => {
                assert_eq!(offset, at[output as usize], "nothing is missing after the gap");
                at[output as usize] = offset + data.len() as u64;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(gaps, [Output::Stdout, Output::Stderr]);
    assert_eq!(at, [written, written]);
}

#[test]
fn events_cost_something_even_without_bytes() {
    let mut log = Log::new(0, false);
    while !log.is_full() {
        log.push(Happened::Output { output: Output::Stdout, offset: 0, data: Bytes::from_static(b"x") });
    }
    assert!(log.last_sequence() < 10_000);
}

#[tokio::test]
async fn input_keeps_its_order_and_its_end() {
    let stdin = Stdin::new(b"first ", true);
    assert_eq!(stdin.write(b"second", true, true).await.map(|s| s.accepted), Ok(12));
    assert_eq!(stdin.write(b"third", false, true).await, Err(StdinError::Closed));
    let Next::Write(bytes) = stdin.next().await else { panic!("there is input") };
    assert_eq!(bytes, b"first second");
    stdin.wrote(6);
    let Next::Write(bytes) = stdin.next().await else { panic!("there is more") };
    assert_eq!(bytes, b"second");
    stdin.wrote(6);
    assert!(matches!(stdin.next().await, Next::End));
    assert_eq!(stdin.write(&vec![0; 300_000], false, true).await, Err(StdinError::TooLarge));
}
