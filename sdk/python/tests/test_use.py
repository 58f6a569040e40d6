from __future__ import annotations

import base64
import io
import os
import socket
import threading
import time
import tracemalloc
import unittest
from collections.abc import Iterator
from typing import Any

from mainbrella import (
    CallerStoppedWaitingError,
    CommandNotStartedError,
    ConfigurationError,
    GuestFileExistsError,
    GuestFileNotFoundError,
    InvalidResponseError,
    MainbrellaError,
    Omitted,
    PayloadTooLargeError,
    Sandbox,
    TransportError,
)
from mainbrella.models import decode_around_gap

from .both import both, make_client
from .scripted import CREATED_AT, Handler, Request, Server, machine, result

KEY = "mb_0123abcd_" + "s" * 43


def ok(r: Request) -> None:
    r.reply(200, machine())


class Session:
    """A server that first answers about one machine, then runs the handlers."""

    def __init__(self, *handlers: Handler, timeout: float = 60.0, read_body: bool = True) -> None:
        self.server = Server([ok, *handlers], read_body=read_body)
        self.client = make_client(KEY, base_url=self.server.url, timeout=timeout)

    def __enter__(self) -> tuple[Sandbox, Server]:
        self.sandbox = self.client.connect("m-1", CREATED_AT)
        return self.sandbox, self.server

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server.__exit__()


@both
class Running(unittest.TestCase):
    def test_everything_given_is_sent_and_everything_said_is_returned(self) -> None:
        def run(r: Request) -> None:
            r.reply(
                200,
                result(
                    exitCode=143,
                    signal=15,
                    stdoutBase64=base64.b64encode(b"\xff\x00hi").decode(),
                    stdoutBytes=4,
                    stderrBase64=base64.b64encode("é".encode()).decode(),
                    stderrBytes=2,
                ),
            )

        with Session(run) as (sandbox, server):
            r = sandbox.commands.run(
                ["cat", "-"], timeout_ms=5000, cwd="/tmp", user="app:7", env={"A": "b"}, stdin="é", output_limit=9
            )
            self.assertEqual((r.exit_code, r.signal, r.timed_out, r.ok), (143, 15, False, False))
            self.assertEqual((r.stdout_bytes, r.stdout, r.stderr), (b"\xff\x00hi", "\ufffd\x00hi", "é"))
            self.assertEqual((r.stdout_total_bytes, r.stdout_omitted, r.truncated), (4, None, False))
            sent = server.requests[1]
            self.assertEqual((sent.path, sent.query), ("/v1/machines/m-1/commands/run", {"createdAt": CREATED_AT}))
            self.assertEqual(
                sent.json(),
                {
                    "command": ["cat", "-"],
                    "timeoutMs": 5000,
                    "cwd": "/tmp",
                    "user": "app:7",
                    "env": {"A": "b"},
                    "stdinBase64": base64.b64encode("é".encode()).decode(),
                    "outputLimitBytes": 9,
                },
            )

    def test_a_command_is_never_sent_twice(self) -> None:
        def lost(r: Request) -> None:
            r.cut()

        def half(r: Request) -> None:
            r.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{")
            r.cut()

        def broken(r: Request) -> None:
            r.error(500, "internal")

        def busy(r: Request) -> None:
            r.error(503, "overloaded", {"Retry-After": "0"})

        for handler in (lost, half, broken, busy):
            with self.subTest(handler.__name__), Session(handler) as (sandbox, server):
                with self.assertRaises(MainbrellaError) as caught:
                    sandbox.commands.run("true")
                self.assertEqual(len(server.requests), 2)
                self.assertEqual(caught.exception.ambiguous, handler is not busy)

    def test_a_timed_out_command_and_a_caller_that_stopped_waiting_differ(self) -> None:
        def timed_out(r: Request) -> None:
            r.reply(200, result(exitCode=-1, timedOut=True))

        with Session(timed_out) as (sandbox, _):
            r = sandbox.commands.run("sleep 9", timeout_ms=10)
            self.assertTrue(r.timed_out)
            self.assertEqual((r.exit_code, r.stdout), (-1, "hi\n"))

        release = threading.Event()

        def silent(r: Request) -> None:
            release.wait(10)

        with Session(silent, timeout=0.3) as (sandbox, server):
            begin = time.monotonic()
            with self.assertRaises(CallerStoppedWaitingError) as caught:
                sandbox.commands.run("sleep 9", timeout_ms=400)
            waited = time.monotonic() - begin
            self.assertGreaterEqual(waited, 0.69, "this side waits longer than the command's own time-out")
            self.assertLess(waited, 3)
            self.assertIn("may still be running", caught.exception.hint)
            self.assertEqual(len(server.requests), 2)
            release.set()

    def test_an_idle_connection_the_server_closed_is_not_used_for_a_command(self) -> None:
        def closing(r: Request) -> None:
            r.reply(200, machine())
            r.cut()

        server = Server([closing, lambda r: r.reply(200, result())])
        with server, make_client(KEY, base_url=server.url) as client:
            sandbox = client.connect("m-1", CREATED_AT)
            time.sleep(0.1)
            self.assertEqual(sandbox.commands.run("true").stdout, "hi\n")
            self.assertEqual(len(server.requests), 2)

    def test_text_is_not_mangled_at_a_gap(self) -> None:
        text = "aé€😀" * 50
        raw = text.encode()
        for head in range(0, 40):
            for tail in range(0, 40):
                kept = raw[:head] + (raw[-tail:] if tail else b"")
                out = decode_around_gap(kept, Omitted(head, len(raw) - len(kept)))
                self.assertNotIn("\ufffd", out)
                self.assertGreaterEqual(len(out.encode()), len(kept) - 6)
        self.assertEqual(decode_around_gap(b"\xff", None), "\ufffd")

    def test_errors_and_bad_arguments(self) -> None:
        with Session(lambda r: r.error(422, "command_not_started")) as (sandbox, server):
            with self.assertRaises(CommandNotStartedError):
                sandbox.commands.run(["nope"])
            bads: list[Any] = ["", [], b"ls"]
            for bad in bads:
                with self.subTest(bad), self.assertRaises(ConfigurationError):
                    sandbox.commands.run(bad)
            with self.assertRaises(ConfigurationError):
                sandbox.commands.run("ls", timeout_ms=0)
            self.assertEqual(len(server.requests), 2)

    def test_many_threads_share_one_client(self) -> None:
        def echo(r: Request) -> None:
            word = r.json()["command"]
            r.reply(200, result(stdoutBase64=base64.b64encode(word.encode()).decode()))

        with Session(echo) as (sandbox, _):
            wrong: list[str] = []

            def work(n: int) -> None:
                for i in range(20):
                    word = f"{n}-{i}"
                    if sandbox.commands.run(word).stdout != word:
                        wrong.append(word)

            threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            self.assertEqual(wrong, [])


@both
class Transfers(unittest.TestCase):
    def test_odd_names_and_bytes_arrive_as_they_are(self) -> None:
        names = ['/t/re"port', "/t/a\nb", "/t/x\\", "/t/é", "/t/" + "n" * 255, "/t/a b&c=d?e#f%41+", "/t/-rf", "/"]
        store: dict[str, bytes] = {}

        def files(r: Request) -> None:
            if r.method == "PUT":
                store[r.query["path"]] = r.body
                r.reply(200, {"size": len(r.body)})
            else:
                r.reply(200, store[r.query["path"]], {"X-Mainbrella-Mode": "0640", "X-Mainbrella-Size": "256"})

        data = bytes(range(256))
        with Session(files) as (sandbox, _):
            for name in names:
                self.assertEqual(sandbox.files.write(name, data), 256)
                self.assertEqual(sandbox.files.read(name), data)
            self.assertEqual(list(store), names)
            with sandbox.files.open_read("/t/é") as f:
                self.assertEqual((f.mode, f.size), (0o640, 256))
            sandbox.files.write("/t/é", "naïve")
            self.assertEqual(sandbox.files.read("/t/é"), "naïve".encode())
            sandbox.files.write("/t/empty", b"")
            self.assertEqual(sandbox.files.read("/t/empty"), b"")

    def test_paths_that_cannot_be_meant_are_refused_here(self) -> None:
        with Session(ok) as (sandbox, server):
            for bad in ("", "relative", "/nul\0", "/\udcff", "/" + "x" * 4095):
                with self.subTest(bad[:10]), self.assertRaises(ConfigurationError):
                    sandbox.files.read(bad)
            self.assertEqual(len(server.requests), 1)

    def test_options_of_a_write_are_sent(self) -> None:
        with Session(lambda r: r.reply(200, {"size": 1})) as (sandbox, server):
            sandbox.files.write("/a", b"x", mode=0o755, create_parents=False, exclusive=True)
            self.assertEqual(
                server.requests[1].query,
                {"createdAt": CREATED_AT, "path": "/a", "mode": "0755", "createParents": "false", "exclusive": "true"},
            )
            sandbox.files.write("/a", b"x", mode="0600")
            self.assertEqual(server.requests[2].query["mode"], "0600")
            for bad in ("9", "u+x", -1, 0o10000):
                with self.subTest(bad), self.assertRaises(ConfigurationError):
                    sandbox.files.write("/a", b"x", mode=bad)

    def test_every_kind_of_source_is_sent_whole(self) -> None:
        def pieces() -> Iterator[bytes]:
            yield b"ab"
            yield b""
            yield b"c" * 600_000

        with Session(lambda r: r.reply(200, {"size": len(r.body)})) as (sandbox, server):
            whole = b"ab" + b"c" * 600_000
            for source in (whole, bytearray(whole), memoryview(whole), io.BytesIO(whole), pieces(), [b"ab", whole[2:]]):
                with self.subTest(type(source)):
                    self.assertEqual(sandbox.files.write("/a", source), len(whole))
                    self.assertEqual(server.requests[-1].body, whole)
            bads: list[Any] = [io.StringIO("text"), ["text"], 7]
            for bad in bads:
                with self.subTest(type(bad)), self.assertRaises(ConfigurationError):
                    sandbox.files.write("/a", bad)

    def test_a_source_that_fails_leaves_an_incomplete_body_and_its_own_exception(self) -> None:
        def failing() -> Iterator[bytes]:
            yield b"some"
            raise RuntimeError("mine")

        with Session(lambda r: r.reply(200, {"size": 0})) as (sandbox, server):
            with self.assertRaisesRegex(RuntimeError, "mine"):
                sandbox.files.write("/a", failing())
            time.sleep(0.1)
            self.assertFalse(server.requests[1].complete)

    def test_an_answer_before_the_end_of_a_body_is_heard(self) -> None:
        def refuse(r: Request) -> None:
            r.error(413, "payload_too_large")
            r.sock.shutdown(socket.SHUT_WR)
            time.sleep(0.5)
            raise ConnectionAbortedError  # what is still in flight is a body, not a request

        def endless() -> Iterator[bytes]:
            while True:
                yield b"x" * 65536

        for source in (endless(), b"x" * (64 * 1024 * 1024)):
            session = Session(timeout=5)
            session.server.handlers.append(refuse)
            with session as (sandbox, server):
                server.read_body = False
                with self.assertRaises(PayloadTooLargeError):
                    sandbox.files.write("/a", source)
                self.assertEqual(len(server.requests), 2)

    def test_a_connection_on_which_a_body_was_refused_is_not_used_again(self) -> None:
        def refuse_and_go(r: Request) -> None:
            r.error(413, "payload_too_large")
            time.sleep(0.2)
            r.cut()

        with Session(refuse_and_go, lambda r: r.reply(200, result())) as (sandbox, server):
            with self.assertRaises(PayloadTooLargeError):
                sandbox.files.write("/a", b"x" * 70_000)
            self.assertTrue(sandbox.commands.run("true").ok)
            self.assertEqual(len(server.requests), 3)

    def test_a_write_whose_answer_is_lost_is_not_repeated(self) -> None:
        with Session(lambda r: r.cut()) as (sandbox, server):
            with self.assertRaises(TransportError) as caught:
                sandbox.files.write("/a", b"x")
            self.assertTrue(caught.exception.ambiguous)
            self.assertEqual(len(server.requests), 2)

    def test_a_cut_download_is_an_error_never_a_short_file(self) -> None:
        def sized(r: Request) -> None:
            r.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this")
            r.cut()

        def chunked(r: Request) -> None:
            r.raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\nonly this")
            r.cut()

        def between_chunks(r: Request) -> None:
            r.raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nonly\r\n")
            r.cut()

        def unframed(r: Request) -> None:
            r.raw(b"HTTP/1.1 200 OK\r\nX-Mainbrella-Size: 100\r\n\r\nonly this")
            r.cut()

        for handler in (sized, chunked, between_chunks, unframed):
            with self.subTest(handler.__name__), Session(handler) as (sandbox, _):
                with self.assertRaises(InvalidResponseError):
                    sandbox.files.read("/a")
            with self.subTest(handler.__name__), Session(handler) as (sandbox, _):
                with self.assertRaises(InvalidResponseError):
                    sandbox.files.read_to("/a", io.BytesIO())

    def test_chunked_downloads_and_ranges(self) -> None:
        def chunked(r: Request) -> None:
            r.raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")

        with Session(chunked) as (sandbox, server):
            self.assertEqual(sandbox.files.read("/a", offset=5, length=9), b"abcde")
            self.assertEqual(
                server.requests[1].query, {"createdAt": CREATED_AT, "path": "/a", "offset": "5", "length": "9"}
            )
            with sandbox.files.open_read("/a") as f:
                self.assertEqual((f.read(2), f.read(2), f.read(2), f.read(2)), (b"ab", b"cd", b"e", b""))
            self.assertEqual(server.connections, 1)

    def test_a_download_left_in_the_middle_does_not_spoil_the_next_call(self) -> None:
        def big(r: Request) -> None:
            r.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 5000000\r\n\r\n" + b"x" * 100)

        with Session(big, lambda r: r.reply(200, b"next")) as (sandbox, server):
            with sandbox.files.open_read("/a") as f:
                self.assertEqual(f.read(10), b"x" * 10)
            self.assertEqual(sandbox.files.read("/b"), b"next")
            self.assertEqual(server.connections, 2)

    def test_a_stalled_download_ends(self) -> None:
        release = threading.Event()

        def stall(r: Request) -> None:
            r.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this")
            release.wait(10)

        with Session(stall, timeout=0.3) as (sandbox, _):
            with self.assertRaises(CallerStoppedWaitingError):
                sandbox.files.read("/a")
            release.set()

    def test_missing_files_are_told_apart(self) -> None:
        with Session(lambda r: r.error(404, "file_not_found")) as (sandbox, _):
            with self.assertRaises(GuestFileNotFoundError):
                sandbox.files.read("/nope")

    def test_a_file_that_is_in_the_way_is_told_apart(self) -> None:
        with Session(lambda r: r.error(409, "file_exists")) as (sandbox, _):
            with self.assertRaises(GuestFileExistsError) as caught:
                sandbox.files.write("/there", b"", exclusive=True)
            self.assertEqual((caught.exception.code, caught.exception.status), ("file_exists", 409))

    def test_any_size_runs_in_flat_memory(self) -> None:
        total = 192 * 1024 * 1024
        block = os.urandom(1024 * 1024)

        def files(r: Request) -> None:
            if r.method == "GET":
                r.raw(f"HTTP/1.1 200 OK\r\nContent-Length: {total}\r\n\r\n".encode())
                for _ in range(total // len(block)):
                    r.raw(block)

        class Sink:
            got = 0

            def write(self, data: bytes, /) -> Any:
                self.got += len(data)

        with Session(files) as (sandbox, _):
            tracemalloc.start()
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            try:
                sink = Sink()
                self.assertEqual(sandbox.files.read_to("/a", sink), total)
                self.assertEqual(sink.got, total)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            self.assertLess(peak - before, 16 * 1024 * 1024)


if __name__ == "__main__":
    unittest.main()
