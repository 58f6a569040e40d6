//! What was denied, or would have been: the latest of it, in memory and in a file of bounded size, with counters of all.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use mainbrella_types::DenyRule;
use mainbrella_types::limits::EGRESS_EVENTS_KEPT;

/// Most events of one machine kept in a second; more are counted only.
const PER_SECOND: u32 = 50;
/// Longest sentence kept, bytes.
const REASON_MAX: usize = 600;
/// Longest name kept, bytes.
const NAME_MAX: usize = 255;
/// Longest file that is read back.
const FILE_MAX: u64 = 4 * 1024 * 1024;

/// What became of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Not made.
    Denied,
    /// Made, because the policy is a dry run.
    WouldDeny,
}

impl Verdict {
    /// The wire name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Denied => "denied",
            Self::WouldDeny => "would-deny",
        }
    }
}

/// One denied connection or lookup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressEvent {
    /// Strictly increasing in a machine, from 1; every denial has one, also those that were only counted.
    pub sequence: u64,
    /// Milliseconds since the Unix epoch.
    pub time_ms: u64,
    /// What became of it.
    pub verdict: Verdict,
    /// The name that was asked for, if there was one.
    pub name: Option<String>,
    /// The address, if there was one.
    pub address: Option<IpAddr>,
    /// The port; 53 for a lookup, 0 for what has none.
    pub port: u16,
    /// Which rule.
    pub rule: DenyRule,
    /// Why, in one sentence.
    pub reason: String,
}

/// A denial, before it has a number and a time.
#[derive(Clone, Copy, Debug)]
pub struct Denied<'a> {
    /// What becomes of it.
    pub verdict: Verdict,
    /// The name that was asked for.
    pub name: Option<&'a str>,
    /// The address.
    pub address: Option<IpAddr>,
    /// The port.
    pub port: u16,
    /// Which rule.
    pub rule: DenyRule,
    /// Why, in one sentence.
    pub reason: &'a str,
}

/// One page of a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EgressPage {
    /// Events after the cursor, oldest first.
    pub events: Vec<EgressEvent>,
    /// Whether there are more now.
    pub more: bool,
    /// How many connections and lookups were denied, in all.
    pub denied: u64,
    /// How many would have been, but for the dry run.
    pub would_deny: u64,
}

#[derive(Debug, Default)]
struct Kept {
    ring: VecDeque<EgressEvent>,
    denied: u64,
    would_deny: u64,
    second: u64,
    in_second: u32,
    /// Lines in the file.
    lines: usize,
    file: Option<File>,
    /// The file is not written any more.
    broken: bool,
}

/// The log of one machine. Writing it never waits for a reader, and never fails: what cannot be kept is counted.
#[derive(Debug, Default)]
pub struct EgressLog {
    path: Option<PathBuf>,
    kept: Mutex<Kept>,
}

impl EgressLog {
    /// The log kept at `path`, with what is there of it. Lines that cannot be read are left out. Blocks.
    #[must_use]
    pub fn open(path: PathBuf) -> Self {
        let mut kept = Kept::default();
        if let Ok(file) = File::open(&path) {
            let mut whole = true;
            for line in BufReader::new(file.take(FILE_MAX)).split(b'\n').map_while(Result::ok) {
                kept.lines += 1;
                let read = std::str::from_utf8(&line).ok().and_then(parse);
                // The numbers of a file that was tampered with still may only grow.
                let Some((event, denied)) =
                    read.filter(|(e, denied)| e.sequence > kept.denied + kept.would_deny && *denied <= e.sequence)
                else {
                    whole = false;
                    continue;
                };
                (kept.denied, kept.would_deny) = (denied, event.sequence - denied);
                push(&mut kept.ring, event);
            }
            if !whole {
                // Made anew with the next event: what was cut off must not swallow it.
                kept.lines = usize::MAX;
            }
        }
        Self { path: Some(path), kept: Mutex::new(kept) }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a denial.
    pub fn record(&self, what: Denied<'_>) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut kept = self.kept();
        match what.verdict {
            Verdict::Denied => kept.denied += 1,
            Verdict::WouldDeny => kept.would_deny += 1,
        }
        if kept.second != since.as_secs() {
            (kept.second, kept.in_second) = (since.as_secs(), 0);
        }
        kept.in_second = kept.in_second.saturating_add(1);
        if kept.in_second > PER_SECOND {
            return;
        }
        let event = EgressEvent {
            sequence: kept.denied + kept.would_deny,
            time_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
            verdict: what.verdict,
            name: what.name.map(|n| plain(n, NAME_MAX)),
            address: what.address,
            port: what.port,
            rule: what.rule,
            reason: plain(what.reason, REASON_MAX),
        };
        let line = line(&event, kept.denied);
        push(&mut kept.ring, event);
        if let Some(path) = &self.path
            && !kept.broken
            && let Err(e) = kept.write(path, &line)
        {
            tracing::warn!(error = %e, "the egress log of a machine is not written any more");
            kept.broken = true;
        }
    }

    /// Events after `cursor`, oldest first, at most `limit`.
    #[must_use]
    pub fn after(&self, cursor: u64, limit: usize) -> EgressPage {
        let kept = self.kept();
        let mut later = kept.ring.iter().filter(|e| e.sequence > cursor);
        let events = later.by_ref().take(limit).cloned().collect();
        EgressPage { events, more: later.next().is_some(), denied: kept.denied, would_deny: kept.would_deny }
    }
}

impl Kept {
    /// Adds a line; a file with too many is made anew from what is kept in memory.
    fn write(&mut self, path: &Path, line: &str) -> io::Result<()> {
        if self.lines >= 2 * EGRESS_EVENTS_KEPT {
            let half = path.with_extension("new");
            // What each line says of the counters need only be right in the last one.
            let text: String = self.ring.iter().map(|e| self::line(e, self.denied.min(e.sequence))).collect();
            fs::write(&half, text)?;
            fs::rename(&half, path)?;
            self.file = Some(File::options().append(true).open(path)?);
            self.lines = self.ring.len();
            return Ok(());
        }
        if self.file.is_none() {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)?;
            }
            self.file = Some(File::options().create(true).append(true).open(path)?);
        }
        if let Some(file) = &mut self.file {
            file.write_all(line.as_bytes())?;
            self.lines += 1;
        }
        Ok(())
    }
}

fn push(ring: &mut VecDeque<EgressEvent>, event: EgressEvent) {
    if ring.len() == EGRESS_EVENTS_KEPT {
        ring.pop_front();
    }
    ring.push_back(event);
}

/// Text of a guest's as it may be shown and kept: one line, bounded.
fn plain(text: &str, max: usize) -> String {
    let mut plain: String = text.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    if plain.len() > max {
        plain.truncate(plain.floor_char_boundary(max));
    }
    plain
}

/// One line of the file: fields between tabs, `-` for none. The second is how many were denied so far.
fn line(e: &EgressEvent, denied: u64) -> String {
    let address = e.address.map_or_else(|| "-".to_owned(), |a| a.to_string());
    format!(
        "{}\t{denied}\t{}\t{}\t{}\t{address}\t{}\t{}\t{}\n",
        e.sequence,
        e.time_ms,
        e.verdict.as_str(),
        e.name.as_deref().filter(|n| !n.is_empty()).unwrap_or("-"),
        e.port,
        e.rule.as_str(),
        e.reason
    )
}

fn parse(line: &str) -> Option<(EgressEvent, u64)> {
    let mut fields = line.split('\t');
    let sequence = fields.next()?.parse().ok()?;
    let denied = fields.next()?.parse().ok()?;
    let time_ms = fields.next()?.parse().ok()?;
    let verdict = match fields.next()? {
        "denied" => Verdict::Denied,
        "would-deny" => Verdict::WouldDeny,
        _ => return None,
    };
    let optional = |text: &str| (text != "-").then(|| plain(text, NAME_MAX));
    let name = optional(fields.next()?);
    let address = match fields.next()? {
        "-" => None,
        text => Some(text.parse().ok()?),
    };
    let port = fields.next()?.parse().ok()?;
    let rule = fields.next()?.parse().ok()?;
    let reason = plain(fields.next()?, REASON_MAX);
    fields
        .next()
        .is_none()
        .then_some((EgressEvent { sequence, time_ms, verdict, name, address, port, rule, reason }, denied))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn denial(verdict: Verdict, reason: &str) -> Denied<'_> {
        Denied {
            verdict,
            name: Some("example.org"),
            address: Some("93.184.216.34".parse().expect("an address")),
            port: 443,
            rule: DenyRule::NoRule,
            reason,
        }
    }

    #[test]
    fn a_flood_is_counted_whole_and_kept_in_part() {
        let log = EgressLog::default();
        for n in 0..5000u32 {
            log.record(denial(if n % 5 == 0 { Verdict::WouldDeny } else { Verdict::Denied }, "no rule"));
        }
        let page = log.after(0, usize::MAX);
        assert_eq!((page.denied, page.would_deny, page.more), (4000, 1000, false));
        assert!(page.events.len() <= EGRESS_EVENTS_KEPT);
        assert!(page.events.windows(2).all(|w| w[0].sequence < w[1].sequence));
        let last = page.events.last().expect("some").sequence;
        assert!(log.after(last, 10).events.is_empty());
    }

    #[test]
    fn pages_follow_each_other_without_gap_or_repetition() {
        let log = EgressLog::default();
        for _ in 0..20 {
            log.record(denial(Verdict::Denied, "x"));
        }
        let (mut cursor, mut seen) = (0, Vec::new());
        loop {
            let page = log.after(cursor, 7);
            seen.extend(page.events.iter().map(|e| e.sequence));
            cursor = *seen.last().expect("some");
            if !page.more {
                break;
            }
        }
        assert_eq!(seen, (1..=20).collect::<Vec<_>>());
    }

    #[test]
    fn a_log_goes_on_where_the_former_service_left_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("deep").join("egress.log");
        let log = EgressLog::open(path.clone());
        log.record(denial(Verdict::Denied, "a\tb\nc"));
        log.record(Denied {
            name: None,
            address: None,
            port: 0,
            rule: DenyRule::Off,
            ..denial(Verdict::WouldDeny, "")
        });
        let before = log.after(0, 10);
        drop(log);
        // A line that was cut off, and one that was never one.
        let mut file = File::options().append(true).open(&path).expect("the file");
        file.write_all(b"7\t1\t12\tden\n\xff\xfe\n5").expect("written");
        let log = EgressLog::open(path.clone());
        assert_eq!(log.after(0, 10), before);
        assert_eq!(before.events[0].reason, "a?b?c");
        log.record(denial(Verdict::Denied, "later"));
        let again = EgressLog::open(path);
        assert_eq!(again.after(2, 10), log.after(2, 10));
        assert_eq!(again.after(0, 10).events.len(), 3);
    }

    #[test]
    fn its_file_stays_small() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("egress.log");
        let log = EgressLog::open(path.clone());
        for n in 0..5 * EGRESS_EVENTS_KEPT {
            // As if each came in a second of its own.
            log.kept().second = 0;
            log.record(denial(if n % 3 == 0 { Verdict::WouldDeny } else { Verdict::Denied }, "no rule"));
        }
        let lines = fs::read_to_string(&path).expect("the file").lines().count();
        assert!(lines <= 2 * EGRESS_EVENTS_KEPT, "{lines}");
        assert_eq!(EgressLog::open(path).after(0, usize::MAX), log.after(0, usize::MAX));
    }

    #[test]
    fn a_log_that_cannot_be_written_still_counts() {
        let log = EgressLog::open("/proc/nowhere/egress.log".into());
        log.record(denial(Verdict::Denied, "x"));
        log.record(denial(Verdict::Denied, "x"));
        assert_eq!((log.after(0, 10).events.len(), log.after(0, 10).denied), (2, 2));
    }

    proptest! {
        #[test]
        fn any_line_is_an_event_or_not(text in "\\PC{0,80}", tabs in proptest::collection::vec("[a-z0-9.-]{0,12}", 0..12)) {
            let _ = parse(&text);
            let _ = parse(&tabs.join("\t"));
        }
    }
}
