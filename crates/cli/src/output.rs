//! Tables for people, JSON for programs.

use std::io::{self, IsTerminal as _, Write as _};

use comfy_table::{Cell, Color, ColumnConstraint, ContentArrangement, Table, presets};

use serde::Serialize;

use crate::failure::Failure;

/// The least room in which the last column of a table is wrapped, columns.
const LAST_MIN: u16 = 16;

/// How this run talks.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// JSON on standard output and error.
    pub json: bool,
}

/// What a word in a table means, for its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// Nothing special.
    Plain,
    /// As it should be.
    Good,
    /// On its way, or worth a look.
    Busy,
    /// Wrong.
    Bad,
    /// Over; of less interest.
    Faint,
}

impl Output {
    /// Whether colours are wanted on `stream`.
    fn coloured(terminal: bool) -> bool {
        terminal
            && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
            && std::env::var_os("TERM").is_none_or(|t| t != "dumb")
    }

    /// Whether a person watches standard error, and a bar or a note may be drawn there.
    pub fn watched(self) -> bool {
        !self.json && io::stderr().is_terminal()
    }

    /// Writes `value` as one JSON document.
    pub fn json<T: Serialize>(self, value: &T) -> Result<(), Failure> {
        let text = serde_json::to_string_pretty(value).map_err(|e| Failure::io("making JSON", &e.into()))?;
        self.line(&text)
    }

    /// Writes a line to standard output.
    pub fn line(self, text: &str) -> Result<(), Failure> {
        self.raw(format!("{text}\n").as_bytes())
    }

    /// Writes bytes to standard output.
    pub fn raw(self, bytes: &[u8]) -> Result<(), Failure> {
        let mut out = io::stdout().lock();
        out.write_all(bytes).and_then(|()| out.flush()).map_err(|e| Failure::io("writing to standard output", &e))
    }

    /// A remark for people, on standard error.
    pub fn note(self, text: &str) {
        if !self.json {
            // Nobody can be told that standard error is closed.
            let _ = writeln!(io::stderr().lock(), "{text}");
        }
    }

    /// Prints a table; nothing but its header line when it is empty.
    pub fn table(self, header: &[&str], rows: Vec<Vec<(String, Tone)>>) -> Result<(), Failure> {
        let terminal = io::stdout().is_terminal();
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_header(header);
        // Wrapped to the terminal's width; without a terminal, or with one that tells no width, lines stay lines.
        let width = if terminal { rustix::termios::tcgetwinsize(io::stdout()).map_or(0, |s| s.ws_col) } else { 0 };
        if Self::coloured(terminal) {
            table.enforce_styling();
        } else {
            table.force_no_tty();
        }
        for row in rows {
            table.add_row(row.into_iter().map(|(text, tone)| {
                let cell = Cell::new(printable(&text));
                match tone {
                    Tone::Plain => cell,
                    Tone::Good => cell.fg(Color::Green),
                    Tone::Busy => cell.fg(Color::Yellow),
                    Tone::Bad => cell.fg(Color::Red),
                    Tone::Faint => cell.fg(Color::DarkGrey),
                }
            }));
        }
        let fixed: u16 = table.column_max_content_widths().iter().rev().skip(1).map(|w| w.saturating_add(2)).sum();
        if width >= fixed.saturating_add(LAST_MIN) {
            table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
        } else {
            table.set_content_arrangement(ContentArrangement::Disabled);
        }
        for (n, column) in table.column_iter_mut().enumerate() {
            column.set_padding((0, 2));
            // What people copy stays in one piece; the last column takes the rest of the line.
            if n + 1 < header.len() {
                column.set_constraint(ColumnConstraint::ContentWidth);
            }
        }
        let lines: Vec<String> = table.lines().map(|l| l.trim_end().to_owned()).collect();
        self.line(&lines.join("\n"))
    }

    /// `text` in the colour of `tone`, when standard output shows colours.
    pub fn paint(self, text: &str, tone: Tone) -> String {
        let code = match tone {
            Tone::Plain => return text.to_owned(),
            Tone::Good => 32,
            Tone::Busy => 33,
            Tone::Bad => 31,
            Tone::Faint => 90,
        };
        if Self::coloured(io::stdout().is_terminal()) { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Text of others, harmless on a terminal: control characters are shown as escapes.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// A span of time as people say it, e.g. `42s`, `3m`, `5h 10m`, `2d 4h`.
pub fn span(ms: i64) -> String {
    let s = ms.max(0) / 1000;
    let two = |a: i64, an: &str, b: i64, bn: &str| if b == 0 { format!("{a}{an}") } else { format!("{a}{an} {b}{bn}") };
    match s {
        0..=119 => format!("{s}s"),
        120..=7199 => format!("{}m", s / 60),
        7200..=86_399 => two(s / 3600, "h", s % 3600 / 60, "m"),
        _ => two(s / 86_400, "d", s % 86_400 / 3600, "h"),
    }
}

/// A number of bytes as people say it, e.g. `1.5 GiB`.
pub fn size(bytes: u64) -> String {
    #[allow(clippy::cast_precision_loss)]
    let mut n = bytes as f64;
    let mut units = ["B", "KiB", "MiB", "GiB", "TiB"].into_iter();
    let mut unit = units.next().unwrap_or("B");
    for next in units {
        if n < 1024.0 {
            break;
        }
        n /= 1024.0;
        unit = next;
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{n:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_and_sizes_read_well() {
        let said: Vec<String> =
            [-5, 0, 119_999, 120_000, 7_200_000, 36_600_000, 86_400_000, 190_000_000].map(span).into();
        assert_eq!(said, ["0s", "0s", "119s", "2m", "2h", "10h 10m", "1d", "2d 4h"]);
        let said: Vec<String> = [0, 1023, 1024, 1_610_612_736, u64::MAX].map(size).into();
        assert_eq!(said, ["0 B", "1023 B", "1.0 KiB", "1.5 GiB", "16777216.0 TiB"]);
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(printable("a\x1b[31mb\nc\u{9b}é"), "a\\u{1b}[31mb\\nc\\u{9b}é");
    }
}
