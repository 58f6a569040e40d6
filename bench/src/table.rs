//! Rows of the table: what was measured, beside what, against which target.

use serde_json::{Value, json};

/// What a figure counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Milliseconds; less is better.
    Milliseconds,
    /// Mebibytes of memory; less is better.
    Mebibytes,
    /// Mebibytes a second; more is better.
    MebibytesPerSecond,
    /// Requests a second; more is better.
    RequestsPerSecond,
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Self::Milliseconds => "ms",
            Self::Mebibytes => "MiB",
            Self::MebibytesPerSecond => "MiB/s",
            Self::RequestsPerSecond => "req/s",
        }
    }

    fn more_is_better(self) -> bool {
        matches!(self, Self::MebibytesPerSecond | Self::RequestsPerSecond)
    }

    fn number(self, value: f64) -> String {
        match self {
            Self::RequestsPerSecond => format!("{value:.0}"),
            _ if value >= 100.0 => format!("{value:.0}"),
            _ => format!("{value:.1}"),
        }
    }
}

/// Samples of one thing.
#[derive(Clone, Debug)]
pub struct Samples {
    unit: Unit,
    /// From the best to the worst.
    sorted: Vec<f64>,
}

impl Samples {
    /// Takes samples in any order. `None` when there are none.
    pub fn new(unit: Unit, mut values: Vec<f64>) -> Option<Self> {
        values.retain(|v| v.is_finite());
        values.sort_by(|a, b| if unit.more_is_better() { b.total_cmp(a) } else { a.total_cmp(b) });
        (!values.is_empty()).then_some(Self { unit, sorted: values })
    }

    /// The value that `percent` of the samples are as good as or better than (nearest rank).
    pub fn percentile(&self, percent: usize) -> f64 {
        let rank = (self.sorted.len() * percent).div_ceil(100).clamp(1, self.sorted.len());
        self.sorted[rank - 1]
    }

    fn p50(&self) -> f64 {
        self.percentile(50)
    }

    fn json(&self) -> Value {
        json!({"unit": self.unit.name(), "samples": self.sorted.len(), "p50": self.p50(), "p99": self.percentile(99)})
    }
}

/// What a row should reach. Every bound that is there counts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Target {
    /// Bound of the median: at most, or at least where more is better.
    pub value: Option<f64>,
    /// Bound of the ratio to the floor or peer, in the same sense.
    pub ratio: Option<f64>,
}

impl Target {
    /// A bound of the median alone.
    pub fn value(value: f64) -> Self {
        Self { value: Some(value), ratio: None }
    }

    /// A bound of the ratio alone.
    pub fn ratio(ratio: f64) -> Self {
        Self { value: None, ratio: Some(ratio) }
    }
}

/// One line of the table.
#[derive(Clone, Debug)]
pub struct Row {
    /// The group it belongs to, a word for `--only`.
    pub group: &'static str,
    /// What was measured.
    pub what: String,
    /// The samples.
    pub measured: Samples,
    /// The floor or peer of the same run, and what it is.
    pub beside: Option<(&'static str, Samples)>,
    /// What it should reach.
    pub target: Target,
}

impl Row {
    fn ratio(&self) -> Option<f64> {
        let (_, beside) = self.beside.as_ref()?;
        (beside.p50() > 0.0).then(|| self.measured.p50() / beside.p50())
    }

    /// Whether the target was met; `None` when there is none.
    pub fn met(&self) -> Option<bool> {
        let within =
            |value: f64, bound: f64| if self.measured.unit.more_is_better() { value >= bound } else { value <= bound };
        let by_value = self.target.value.map(|bound| within(self.measured.p50(), bound));
        let by_ratio = self.target.ratio.and_then(|bound| Some(within(self.ratio()?, bound)));
        match (by_value, by_ratio) {
            (None, None) => None,
            (a, b) => Some(a.unwrap_or(true) && b.unwrap_or(true)),
        }
    }

    fn target_text(&self) -> String {
        let sign = if self.measured.unit.more_is_better() { '≥' } else { '≤' };
        let value = self.target.value.map(|v| format!("{sign} {v} {}", self.measured.unit.name()));
        let ratio = self.target.ratio.map(|r| format!("{sign} {r} ×"));
        let parts: Vec<String> = value.into_iter().chain(ratio).collect();
        if parts.is_empty() { "–".to_owned() } else { parts.join(", ") }
    }

    fn cells(&self) -> [String; 7] {
        let unit = self.measured.unit;
        let word = match self.met() {
            Some(true) => "met",
            Some(false) => "**missed**",
            None => "",
        };
        [
            self.what.clone(),
            format!("{} {}", unit.number(self.measured.p50()), unit.name()),
            unit.number(self.measured.percentile(99)),
            self.beside.as_ref().map_or_else(
                || "–".to_owned(),
                |(what, s)| format!("{} {} {what}", s.unit.number(s.p50()), s.unit.name()),
            ),
            self.ratio().map_or_else(|| "–".to_owned(), |r| format!("{r:.2} ×")),
            self.target_text(),
            word.to_owned(),
        ]
    }

    /// The same for programs.
    pub fn json(&self) -> Value {
        json!({
            "group": self.group,
            "what": self.what,
            "measured": self.measured.json(),
            "beside": self.beside.as_ref().map(|(what, s)| json!({"what": what, "measured": s.json()})),
            "ratio": self.ratio(),
            "target": {"value": self.target.value, "ratio": self.target.ratio},
            "met": self.met(),
        })
    }
}

/// The table, in Markdown.
pub fn render(rows: &[Row]) -> String {
    let head = ["what", "p50", "p99", "floor or peer, same run", "ratio", "target", ""].map(str::to_owned);
    let cells: Vec<[String; 7]> = std::iter::once(head).chain(rows.iter().map(Row::cells)).collect();
    let widths: Vec<usize> =
        (0..7).map(|i| cells.iter().map(|c| c[i].chars().count()).max().unwrap_or(0).max(3)).collect();
    let line = |c: &[String; 7]| {
        let padded = c.iter().zip(&widths).map(|(text, w)| format!("{text}{}", " ".repeat(w - text.chars().count())));
        format!("| {} |\n", padded.collect::<Vec<_>>().join(" | "))
    };
    let mut text = line(&cells[0]);
    text.push_str(&format!("|{}|\n", widths.iter().map(|w| "-".repeat(w + 2)).collect::<Vec<_>>().join("|")));
    cells[1..].iter().for_each(|c| text.push_str(&line(c)));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(unit: Unit, values: &[f64]) -> Samples {
        Samples::new(unit, values.to_vec()).expect("some")
    }

    #[test]
    fn percentiles_are_samples_and_the_worse_end_is_the_worse_end() {
        let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let less = samples(Unit::Milliseconds, &hundred);
        assert_eq!((less.percentile(50), less.percentile(99), less.percentile(100)), (50.0, 99.0, 100.0));
        let more = samples(Unit::RequestsPerSecond, &hundred);
        assert_eq!((more.percentile(50), more.percentile(99)), (51.0, 2.0));
        let one = samples(Unit::Mebibytes, &[7.0]);
        assert_eq!((one.percentile(1), one.percentile(99)), (7.0, 7.0));
        assert!(Samples::new(Unit::Mebibytes, vec![f64::NAN]).is_none(), "what is no number is no sample");
    }

    #[test]
    fn a_row_is_met_when_every_bound_is() {
        let row = |unit, measured: f64, beside: Option<f64>, target| Row {
            group: "g",
            what: "w".into(),
            measured: samples(unit, &[measured]),
            beside: beside.map(|b| ("bare", samples(unit, &[b]))),
            target,
        };
        let both = Target { value: Some(60.0), ratio: Some(1.6) };
        assert_eq!(row(Unit::Milliseconds, 50.0, Some(40.0), both).met(), Some(true));
        assert_eq!(row(Unit::Milliseconds, 50.0, Some(30.0), both).met(), Some(false), "the ratio is over");
        assert_eq!(row(Unit::Milliseconds, 70.0, Some(60.0), both).met(), Some(false), "the value is over");
        assert_eq!(row(Unit::MebibytesPerSecond, 79.0, Some(100.0), Target::ratio(0.8)).met(), Some(false));
        assert_eq!(row(Unit::MebibytesPerSecond, 81.0, Some(100.0), Target::ratio(0.8)).met(), Some(true));
        assert_eq!(row(Unit::Mebibytes, 81.0, None, Target::default()).met(), None);
    }

    #[test]
    fn the_table_is_markdown_with_a_line_for_each_row() {
        let row = Row {
            group: "g",
            what: "first `true`".into(),
            measured: samples(Unit::Milliseconds, &[12.34, 200.0]),
            beside: Some(("bare", samples(Unit::Milliseconds, &[10.0]))),
            target: Target { value: Some(10.0), ratio: Some(1.3) },
        };
        let text = render(&[row]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(
            lines[2],
            "| first `true` | 12.3 ms | 200 | 10.0 ms bare            | 1.23 × | ≤ 10 ms, ≤ 1.3 × | **missed** |"
        );
        assert!(lines.iter().all(|l| l.chars().count() == lines[0].chars().count()), "{text}");
    }
}
