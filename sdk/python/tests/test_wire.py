"""The readers of answers and of event streams: the same bytes give the same result however they are cut."""

from __future__ import annotations

import random
import unittest

from mainbrella._http1 import Answer, CutShortError, NotHttpError
from mainbrella._sse import Sse, SseParser, SseTooLongError

SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\nX-A: 1\r\nx-a: 2\r\n\r\nhello world"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n1;ext=1\r\n \r\n005\r\nworld\r\n0\r\nTrailer: x\r\n\r\n"
)
OPEN = b"HTTP/1.0 200\r\n\r\nhello world"
INTERIM = b"HTTP/1.1 103 Early\r\nA: b\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"


def read(data: bytes, cuts: list[int], method: str = "GET", limit: int = 100) -> tuple[Answer, bytes]:
    """Feeds ``data`` cut at ``cuts``, then the end of the connection."""
    answer = Answer(method)
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b] + [b""]
    while not answer.head():
        answer.feed(parts.pop(0))
    body = b""
    while (piece := answer.body(limit)) != b"":
        if piece is None:
            answer.feed(parts.pop(0))
        else:
            body += piece
    return answer, body


class Answers(unittest.TestCase):
    def test_any_cut_gives_the_same_answer(self) -> None:
        for data in (SIZED, CHUNKED, OPEN, INTERIM + SIZED, INTERIM + CHUNKED):
            for cut in range(len(data) + 1):
                self.assertEqual(read(data, [cut])[1], b"hello world")
            self.assertEqual(read(data, list(range(len(data))))[1], b"hello world")
            self.assertEqual(read(data, [], limit=1)[1], b"hello world")

    def test_an_end_before_the_end_is_never_a_short_body(self) -> None:
        for data in (SIZED, CHUNKED):
            for end in range(len(data)):
                with self.assertRaises(CutShortError) as caught:
                    read(data[:end], [])
                self.assertEqual(caught.exception.silent, end == 0)

    def test_repeated_headers_are_joined_and_names_have_no_case(self) -> None:
        self.assertEqual(read(SIZED, [])[0].headers["x-a"], "1, 2")

    def test_a_connection_is_used_again_only_when_nothing_is_in_doubt(self) -> None:
        def reusable(data: bytes, method: str = "GET") -> bool:
            answer = Answer(method)
            answer.feed(data)
            answer.head()
            while answer.body(100):
                pass
            return answer.reusable

        self.assertTrue(reusable(SIZED))
        self.assertTrue(reusable(CHUNKED))
        self.assertTrue(reusable(b"HTTP/1.1 204 No Content\r\n\r\n"))
        self.assertTrue(reusable(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", "HEAD"))
        self.assertFalse(reusable(SIZED + b"HTTP/1.1 200 OK\r\n"), "something that was not asked for")
        self.assertFalse(reusable(SIZED.replace(b"X-A: 1", b"Connection: x, Close")))
        self.assertFalse(reusable(SIZED.replace(b"1.1", b"1.0")))
        self.assertFalse(reusable(CHUNKED.replace(b"\r\n\r\n5", b"\r\nContent-Length: 3\r\n\r\n5")))

    def test_what_is_not_an_answer_is_refused(self) -> None:
        for data in (
            b"SSH-2.0-OpenSSH\r\n",
            b"HTTP/2 200\r\n\r\n",
            b"HTTP/1.1 20\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nA: b\r\n folded\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nBad Name: b\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nA: b\nB: c\r\n\r\n",
            b"HTTP/1.1 101 Switching\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 19 + b"\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 5000,
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 20000,
            b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20000,
        ):
            with self.subTest(data[:40]), self.assertRaises(NotHttpError):
                read(data, [])

    def test_random_bytes_never_do_anything_else(self) -> None:
        rng = random.Random(3)
        for _ in range(3000):
            data = bytearray(rng.choice((SIZED, CHUNKED, OPEN, INTERIM + CHUNKED)))
            for _ in range(rng.randrange(1, 5)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                read(bytes(data), sorted(rng.randrange(len(data)) for _ in range(3)))
            except (CutShortError, NotHttpError):
                pass


class Streams(unittest.TestCase):
    TEXT = (
        ': hello\n\nid: 1\nevent: output\ndata: {"a":\ndata: "é€😀"}\n\ndata:x\r\ndata:  y\r\r\nid\ndata: z\r\n\r\n'
        "event: nothing\n\nunknown: 1\nid: 2\ndata\n\ndata: never ended\n"
    )
    EXPECTED = (
        Sse("output", '{"a":\n"é€😀"}', "1"),
        Sse("message", "x\n y", None),
        Sse("message", "z", ""),
        Sse("message", "", "2"),
    )

    def test_any_cut_gives_the_same_events(self) -> None:
        data = self.TEXT.encode()
        for step in (1, 2, 3, 7, len(data)):
            parser = SseParser()
            events = [e for at in range(0, len(data), step) for e in parser.feed(data[at : at + step])]
            self.assertEqual(tuple(events), self.EXPECTED)
        for cut in range(len(data)):
            parser = SseParser()
            self.assertEqual((*parser.feed(data[:cut]), *parser.feed(data[cut:])), self.EXPECTED, f"cut at {cut}")

    def test_comments_are_a_sign_of_life_and_half_lines_are_not(self) -> None:
        parser = SseParser()
        self.assertEqual((parser.feed(b": still"), parser.heard), ([], 0))
        self.assertEqual((parser.feed(b" here\n"), parser.heard), ([], 1))

    def test_an_event_without_end_is_refused(self) -> None:
        for piece in (b"x" * 1_000_000, b"data: " + b"x" * 1_000_000 + b"\n"):
            parser = SseParser()
            with self.assertRaises(SseTooLongError):
                for _ in range(100):
                    parser.feed(piece)


if __name__ == "__main__":
    unittest.main()
