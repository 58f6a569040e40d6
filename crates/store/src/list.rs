//! Lists of machines, newest first, by keyset: a page costs the same wherever it starts.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use mainbrella_types::limits::LIST_LIMIT_MAX;
use mainbrella_types::{GenerationKey, IdError, MachineRecord, MachineState, ProjectId};

use crate::backend::Arg;
use crate::error::Result;
use crate::{Store, record, sql};

/// Comes after every generation key.
const AFTER_ALL_KEYS: &str = "~";
/// Matches of one label are counted up to this many, to find the rarest one.
const PROBE_LIMIT: i64 = 1000;

/// A place in the list of a project. Opaque to callers: text that is parsed back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    created_at: i64,
    key: GenerationKey,
}

impl Cursor {
    fn of(record: &MachineRecord) -> Self {
        Self { created_at: record.generation.created_at.0.0, key: record.key }
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "m1{:016x}{}", self.created_at, self.key)
    }
}

impl FromStr for Cursor {
    type Err = IdError;
    fn from_str(s: &str) -> std::result::Result<Self, IdError> {
        let parse = || {
            let digits = s.strip_prefix("m1").filter(|d| d.len() == 48 && d.bytes().all(|b| b.is_ascii_hexdigit()))?;
            let (at, key) = digits.split_at_checked(16)?;
            let created_at = u64::from_str_radix(at, 16).ok()?.cast_signed();
            Some(Self { created_at, key: key.parse().ok()? })
        };
        parse().ok_or(IdError::new("cursor", "a nextCursor as it was returned"))
    }
}

/// Which machines to list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListQuery {
    /// Owner.
    pub project: ProjectId,
    /// Only machines in one of these states; empty: in any state.
    pub states: Vec<MachineState>,
    /// Only machines that carry all of these labels.
    pub metadata: BTreeMap<String, String>,
    /// Only machines after this place; `None`: from the newest.
    pub before: Option<Cursor>,
    /// Most machines returned; 1 to [`LIST_LIMIT_MAX`], what is outside is brought inside.
    pub limit: u32,
}

/// A page of machines, newest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// The machines.
    pub machines: Vec<MachineRecord>,
    /// Where the next page starts; `None`: this was the last.
    pub next: Option<Cursor>,
}

impl Store {
    /// One page of the machines of a project.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn list(&self, query: &ListQuery) -> Result<Page> {
        let limit = query.limit.clamp(1, LIST_LIMIT_MAX) as usize;
        // One more than asked for tells whether there is a next page.
        let mut machines = match (query.metadata.len(), query.states.is_empty()) {
            (0, true) => self.scan(query, &Scan::All, limit + 1).await?,
            (0, false) => {
                let mut states = query.states.clone();
                states.sort_unstable();
                states.dedup();
                let mut all = Vec::new();
                for state in states {
                    all.append(&mut self.scan(query, &Scan::State(state), limit + 1).await?);
                }
                all.sort_unstable_by_key(|r| std::cmp::Reverse((r.generation.created_at, r.key)));
                // A machine that changed its state between two scans is there twice.
                all.dedup_by_key(|r| r.key);
                all
            }
            _ => {
                let (name, value) = self.rarest(query).await?;
                self.scan(query, &Scan::Label(name, value), limit + 1).await?
            }
        };
        let more = machines.len() > limit;
        machines.truncate(limit);
        let next = if more { machines.last().map(Cursor::of) } else { None };
        Ok(Page { machines, next })
    }

    /// Reads along one index until `wanted` machines match the whole query, or none is left.
    async fn scan(&self, query: &ListQuery, scan: &Scan<'_>, wanted: usize) -> Result<Vec<MachineRecord>> {
        let mut found = Vec::new();
        let mut place = query.before;
        loop {
            let (at, key) = place.map_or((i64::MAX, AFTER_ALL_KEYS.to_owned()), |c| (c.created_at, c.key.to_string()));
            let project = Arg::text(query.project.as_str());
            let tail = [Arg::Int(at), Arg::Text(key), Arg::Int(i64::try_from(wanted).unwrap_or(i64::MAX))];
            let (sql, head) = match scan {
                Scan::All => (sql::LIST_ALL, vec![project]),
                Scan::State(state) => (sql::LIST_STATE, vec![project, Arg::text(state.as_str())]),
                Scan::Label(name, value) => (sql::LIST_METADATA, vec![project, Arg::text(name), Arg::text(value)]),
            };
            let args: Vec<Arg> = head.into_iter().chain(tail).collect();
            let rows = self.db.fetch_all(sql, &args).await?;
            let last = rows.len() < wanted;
            for row in &rows {
                let machine = record::machine(row)?;
                place = Some(Cursor::of(&machine));
                if query.matches(&machine) {
                    found.push(machine);
                    if found.len() == wanted {
                        return Ok(found);
                    }
                }
            }
            if last {
                return Ok(found);
            }
        }
    }

    /// The label of the query that the fewest machines carry.
    async fn rarest<'q>(&self, query: &'q ListQuery) -> Result<(&'q str, &'q str)> {
        let mut best = ("", "");
        let mut fewest = i64::MAX;
        for (name, value) in &query.metadata {
            let mut count = 0;
            if query.metadata.len() > 1 {
                let args =
                    [Arg::text(query.project.as_str()), Arg::text(name), Arg::text(value), Arg::Int(PROBE_LIMIT)];
                count = match self.db.fetch_optional(sql::METADATA_COUNT, &args).await? {
                    Some(row) => row.int(0)?,
                    None => 0,
                };
            }
            if count < fewest {
                fewest = count;
                best = (name, value);
            }
        }
        Ok(best)
    }
}

enum Scan<'q> {
    All,
    State(MachineState),
    Label(&'q str, &'q str),
}

impl ListQuery {
    fn matches(&self, machine: &MachineRecord) -> bool {
        (self.states.is_empty() || self.states.contains(&machine.state))
            && self.metadata.iter().all(|(name, value)| machine.spec.metadata.get(name) == Some(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_round_trips_and_refuses_everything_else() {
        for at in [0, 1, -1, i64::MAX, i64::MIN, 1_790_000_000_000] {
            let c = Cursor { created_at: at, key: GenerationKey(uuid::Uuid::from_u128(0xfeed)) };
            assert_eq!(c.to_string().parse::<Cursor>(), Ok(c));
        }
        let good = Cursor { created_at: 5, key: GenerationKey(uuid::Uuid::from_u128(1)) }.to_string();
        for bad in ["", "m1", "x", &good[1..], &format!("{good}0"), &good.replace("m1", "m2"), &good.replace('0', "é")]
        {
            assert_eq!(bad.parse::<Cursor>().map_err(|e| e.field), Err("cursor"), "{bad}");
        }
    }
}
