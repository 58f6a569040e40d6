//! Bytes of a stranger's output made into lines for people.

use mainbrella_types::limits::BUILD_LINE_BYTES_MAX;

/// Collects the lines of one stream.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    part: Vec<u8>,
    /// The line was too long, and the rest of it is passed over.
    over: bool,
}

impl Lines {
    /// Takes bytes and gives the lines they complete.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut done = Vec::new();
        for piece in bytes.split_inclusive(|b| *b == b'\n') {
            let (text, whole) = piece.strip_suffix(b"\n").map_or((piece, false), |text| (text, true));
            if !self.over {
                let room = BUILD_LINE_BYTES_MAX - self.part.len();
                self.part.extend_from_slice(&text[..text.len().min(room)]);
                if text.len() > room {
                    self.over = true;
                }
            }
            if whole {
                done.push(self.take());
            }
        }
        done
    }

    /// What is left when the stream is over.
    pub(crate) fn rest(&mut self) -> Option<String> {
        (!self.part.is_empty() || self.over).then(|| self.take())
    }

    fn take(&mut self) -> String {
        let mut line = readable(&std::mem::take(&mut self.part));
        if std::mem::take(&mut self.over) {
            line.push('…');
        }
        line
    }
}

/// Text without what would disturb a terminal: of a line that was written over, what stands there last.
pub(crate) fn readable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim_end_matches('\r');
    let last = text.rsplit('\r').find(|part| !part.is_empty()).unwrap_or(text);
    let mut out = String::with_capacity(last.len());
    let mut chars = last.chars().peekable();
    while let Some(c) = chars.next() {
        // The escape sequences of colours and cursors: up to their final letter.
        if c == '\u{1b}' {
            if chars.next_if_eq(&'[').is_some() {
                while chars.next_if(|c| !('\u{40}'..='\u{7e}').contains(c)).is_some() {}
                chars.next();
            }
        } else if c == '\t' || !c.is_control() {
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_whole_whatever_the_pieces() {
        let mut lines = Lines::default();
        assert_eq!(lines.push(b"one\ntw"), ["one"]);
        assert_eq!(lines.push(b"o\n\nthree"), ["two", ""]);
        assert_eq!(lines.rest().as_deref(), Some("three"));
        assert_eq!(lines.rest(), None);
    }

    #[test]
    fn a_line_without_end_is_cut() {
        let mut lines = Lines::default();
        for _ in 0..100 {
            assert!(lines.push(&[b'x'; 1000]).is_empty());
            assert!(lines.part.len() <= BUILD_LINE_BYTES_MAX);
        }
        let line = lines.push(b"\nnext\n");
        assert_eq!(line[0].len(), BUILD_LINE_BYTES_MAX + '…'.len_utf8());
        assert_eq!(line[1], "next");
    }

    #[test]
    fn what_would_disturb_a_terminal_is_left_out() {
        assert_eq!(readable(b"\x1b[31mred\x1b[0m\ta\x07b\xff"), "red\tab\u{fffd}");
        assert_eq!(readable(b"10%\r50%\r100%\r"), "100%");
        assert_eq!(readable(b"text\r"), "text");
        assert_eq!(readable(b"\x1b"), "");
        assert_eq!(readable(b"\x1b[2"), "");
    }
}
