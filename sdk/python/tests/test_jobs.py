from __future__ import annotations

import gc
import random
import threading
import time
import unittest
from typing import Any
from unittest import mock

from mainbrella import (
    CallerStoppedWaitingError,
    ConfigurationError,
    ConflictError,
    Execution,
    IdempotencyConflictError,
    InvalidResponseError,
    JobEvent,
    JobStillRunningError,
    NotFoundError,
    PayloadTooLargeError,
    TransportError,
)

from .both import both, twin
from .jobs_server import (
    CHUNKED,
    UNFRAMED,
    chunk,
    ended,
    finished,
    follow,
    follow_cut,
    gap,
    job,
    output,
    pieces,
    sse,
    started,
)
from .scripted import CREATED_AT, Request, Server, result
from .test_use import KEY, Session

TEXT = "aé€😀" * 3
WHOLE = [started(1), *pieces(TEXT.encode(), 5), output(90, 0, b"oh", "stderr"), ended(95)]


def bytes_of(events: list[JobEvent], stream: str = "stdout") -> bytes:
    return b"".join(e.data for e in events if e.type == "output" and e.stream == stream)


def text_of(events: list[JobEvent], stream: str = "stdout") -> str:
    return "".join(e.text for e in events if e.type == "output" and e.stream == stream)


def quick() -> Any:
    """Reconnects without a pause."""
    return mock.patch.multiple("mainbrella._clock.Backoff", next_pause=lambda self, asked=None: 0.0)  # pyright: ignore


def silence(seconds: float) -> Any:
    """Gives up a silent stream sooner."""
    stack = mock.patch("mainbrella._sync.sse._SILENCE_SECONDS", seconds)
    other = mock.patch("mainbrella._async.sse._SILENCE_SECONDS", seconds)

    class Both:
        def __enter__(self) -> None:
            stack.start()
            other.start()

        def __exit__(self, *_: object) -> None:
            stack.stop()
            other.stop()

    return Both()


@both
class Starting(unittest.TestCase):
    def test_what_was_asked_is_sent_and_the_job_is_there(self) -> None:
        with Session(lambda r: r.reply(201, job())) as (sandbox, server):
            started_job = sandbox.commands.start(
                ["cat"],
                stdin=True,
                cwd="/tmp",
                user="1000",
                env={"TASK": "probe"},
                pty={"cols": 80, "rows": 24},
                timeout_ms=9,
            )
            self.assertEqual((started_job.id, started_job.cursor), ("j-1", 0))
            info = started_job.info
            assert info is not None
            self.assertEqual((info.state, info.ended, info.exit, info.pid), ("running", False, None, 77))
            sent = server.requests[1]
            self.assertEqual((sent.method, sent.path), ("POST", "/v1/machines/m-1/jobs"))
            self.assertEqual(sent.query, {"createdAt": CREATED_AT})
            self.assertEqual(
                sent.json(),
                {
                    "command": ["cat"],
                    "timeoutMs": 9,
                    "cwd": "/tmp",
                    "user": "1000",
                    "env": {"TASK": "probe"},
                    "stdin": True,
                    "pty": {"cols": 80, "rows": 24},
                },
            )
            sandbox.commands.start("true")
            self.assertEqual(server.requests[2].json(), {"command": "true", "timeoutMs": 300_000})
            keys = {r.headers["idempotency-key"] for r in server.requests[1:]}
            self.assertEqual(len(keys), 2)

    def test_a_lost_answer_is_reconciled_with_one_key(self) -> None:
        def lost(r: Request) -> None:
            r.cut()

        with Session(lost, lost, lambda r: r.reply(200, job(), {"Idempotency-Replayed": "true"})) as (sandbox, server):
            self.assertEqual(sandbox.commands.start("make").id, "j-1")
            self.assertEqual(len({r.headers["idempotency-key"] for r in server.requests[1:]}), 1)
            self.assertEqual(len({r.body for r in server.requests[1:]}), 1)

    def test_an_error_carries_the_key_that_would_find_the_job(self) -> None:
        with Session(lambda r: r.cut()) as (sandbox, server):
            with self.assertRaises(TransportError) as caught:
                sandbox.commands.start("make")
            self.assertTrue(caught.exception.ambiguous)
            self.assertEqual(caught.exception.idempotency_key, server.requests[1].headers["idempotency-key"])
        with Session(lambda r: r.error(409, "idempotency_conflict")) as (sandbox, server):
            with self.assertRaises(IdempotencyConflictError) as conflict:
                sandbox.commands.start("make", idempotency_key="mine")
            self.assertEqual(conflict.exception.idempotency_key, "mine")
            self.assertEqual(len(server.requests), 2)
            with self.assertRaises(ConfigurationError):
                sandbox.commands.start("make", idempotency_key="")

    def test_a_run_that_outlasts_its_wait_gives_the_job(self) -> None:
        reply = result(exitCode=None, stillRunning=True, jobId="j-1")
        with Session(lambda r: r.reply(200, reply), follow(WHOLE)) as (sandbox, server):
            r = sandbox.commands.run("make", wait_ms=50, timeout_ms=60_000)
            self.assertEqual(server.requests[1].json()["waitMs"], 50)
            self.assertEqual((r.still_running, r.timed_out, r.exit_code, r.cause), (True, False, -1, ""))
            self.assertEqual((r.stdout, r.ok), ("hi\n", False))
            assert r.job is not None
            self.assertEqual([e.type for e in r.job.events()][-1], "exit")

    def test_an_older_service_that_names_no_job_is_understood(self) -> None:
        with Session(lambda r: r.reply(200, result(jobId="j-1", stillRunning=False))) as (sandbox, _):
            r = sandbox.commands.run("true")
            self.assertEqual((r.job, r.job_id), (None, "j-1"), "a delivered end is not kept")
        with Session(lambda r: r.reply(200, result())) as (sandbox, _):
            r = sandbox.commands.run("true")
            self.assertEqual((r.still_running, r.job, r.job_id, r.cause), (False, None, None, "exited"))


@both
class Following(unittest.TestCase):
    def test_events_arrive_in_order_and_the_cursor_keeps_up(self) -> None:
        events = [started(1), output(2, 0, b"ab"), output(5, 0, b"oh", "stderr"), gap(6, 2, 10), output(9, 12, b"z")]
        with Session(follow([*events, ended(11, "signalled", None, 9)])) as (sandbox, server):
            made = twin(Execution)(sandbox, "j-1")
            seen: list[JobEvent] = []
            for event in made.events():
                seen.append(event)
                self.assertEqual(made.cursor, event.cursor)
            self.assertEqual([e.type for e in seen], ["started", "output", "output", "gap", "output", "exit"])
            self.assertEqual([e.cursor for e in seen], [1, 2, 5, 6, 9, 11])
            self.assertEqual((bytes_of(seen), bytes_of(seen, "stderr")), (b"abz", b"oh"))
            first, hole, last = seen[0], seen[3], seen[-1]
            assert first.type == "started" and hole.type == "gap" and last.type == "exit"
            self.assertEqual((first.pid, hole.offset, hole.length), (77, 2, 10))
            self.assertEqual((last.exit.cause, last.exit.signal, last.exit_code), ("signalled", 9, 137))
            self.assertEqual(len(server.requests), 2)
            self.assertEqual(server.requests[1].query, {"createdAt": CREATED_AT, "cursor": "0"})

    def test_a_connection_cut_at_any_byte_loses_and_repeats_nothing(self) -> None:
        few = [started(1), output(2, 0, b"a\xc3"), output(3, 0, b"oh", "stderr"), output(4, 2, b"\xa9b"), ended(5)]
        for framing in (CHUNKED, UNFRAMED):
            body = len(sse(few))
            total = len(framing) + body + (len(b"32\r\n\r\n") * (body // 50 + 1) + 5 if framing is CHUNKED else 0)
            with Session() as (sandbox, server), quick():
                for at in range(0, total + 1, 1 if framing is CHUNKED else 5):
                    server.handlers[:] = [follow_cut(few, at, framing), follow(few)]
                    server.requests.clear()
                    made = twin(Execution)(sandbox, "j-1")
                    seen = list(made.events())
                    self.assertEqual([e.cursor for e in seen], [1, 2, 3, 4, 5], f"cut at {at}")
                    self.assertEqual((text_of(seen), text_of(seen, "stderr")), ("aéb", "oh"), f"cut at {at}")

    def test_a_connection_cut_again_and_again_loses_and_repeats_nothing(self) -> None:
        data = bytes(random.Random(7).randbytes(6000))
        events = [started(1), *pieces(data, 100), ended(500)]
        for seed in range(3):
            rng = random.Random(seed)

            def unlucky(r: Request, rng: random.Random = rng) -> None:
                follow_cut(events, rng.randrange(2500), rng.choice((CHUNKED, UNFRAMED)), rng.randrange(1, 300))(r)

            with Session(unlucky) as (sandbox, _), quick():
                seen = list(twin(Execution)(sandbox, "j-1").events())
            self.assertEqual([e.cursor for e in seen], [e["cursor"] for e in events])
            self.assertEqual(bytes_of(seen), data)

    def test_events_that_are_delivered_twice_are_given_out_once(self) -> None:
        def again(r: Request) -> None:
            r.raw(CHUNKED + chunk(sse([*WHOLE[:3], *WHOLE[1:4], *WHOLE])) + b"0\r\n\r\n")

        with Session(follow_cut(WHOLE, 700), again) as (sandbox, _):
            seen = list(twin(Execution)(sandbox, "j-1").events())
            self.assertEqual([e.cursor for e in seen], [e["cursor"] for e in WHOLE])

    def test_a_stream_the_service_ends_is_asked_for_again(self) -> None:
        def rotated(n: int) -> Any:
            def handler(r: Request) -> None:
                r.raw(CHUNKED + chunk(sse(WHOLE[:n][-1:])) + b"0\r\n\r\n")

            return handler

        rotations = [rotated(n) for n in range(1, len(WHOLE) + 1)]
        with Session(*rotations) as (sandbox, server):
            seen = list(twin(Execution)(sandbox, "j-1").events())
            self.assertEqual([e.cursor for e in seen], [e["cursor"] for e in WHOLE])
            asked = [int(r.query["cursor"]) for r in server.requests[1:]]
            self.assertEqual(asked, [0, *[e["cursor"] for e in WHOLE[:-1]]])

    def test_a_stream_that_falls_silent_is_left(self) -> None:
        release = threading.Event()

        def stalled(r: Request) -> None:
            r.raw(CHUNKED + chunk(sse(WHOLE[:2])) + b"40\r\nid: ")
            release.wait(10)

        with silence(0.3), Session(stalled, follow(WHOLE)) as (sandbox, server):
            begin = time.monotonic()
            seen = list(twin(Execution)(sandbox, "j-1").events())
            release.set()
            self.assertLess(time.monotonic() - begin, 10)
            self.assertEqual([e.cursor for e in seen], [e["cursor"] for e in WHOLE])
            self.assertEqual(server.requests[2].query["cursor"], "2")

    def test_signs_of_life_keep_a_quiet_stream(self) -> None:
        def quiet(r: Request) -> None:
            r.raw(CHUNKED + chunk(sse(WHOLE[:2])))
            for _ in range(25):
                time.sleep(0.1)
                r.raw(chunk(b": still here\n\n"))
            r.raw(chunk(sse(WHOLE[2:])) + b"0\r\n\r\n")

        with silence(1.5), Session(quiet) as (sandbox, server):
            self.assertEqual(len(list(twin(Execution)(sandbox, "j-1").events())), len(WHOLE))
            self.assertEqual(len(server.requests), 2)

    def test_a_service_that_restarts_is_waited_for(self) -> None:
        session = Session(follow_cut(WHOLE, 700))
        with session as (sandbox, server):
            port = int(server.url.rsplit(":", 1)[1])
            events = twin(Execution)(sandbox, "j-1").events()
            seen = [next(events)]
            server.__exit__()

            def busy(r: Request) -> None:
                r.error(503, "shutting_down")

            def again() -> None:
                time.sleep(0.5)
                session.server = Server([busy, follow(WHOLE)], port=port)

            back = threading.Thread(target=again)
            back.start()
            seen += list(events)
            back.join()
            self.assertEqual([e.cursor for e in seen], [e["cursor"] for e in WHOLE])
            self.assertEqual(len(session.server.requests), 2)

    def test_a_service_that_stays_away_is_an_error_in_the_end(self) -> None:
        session = Session(follow_cut(WHOLE, 700))
        with session as (sandbox, server):
            port = int(server.url.rsplit(":", 1)[1])
            made = twin(Execution)(sandbox, "j-1")
            events = made.events(reconnect_seconds=0.4)
            next(events)
            server.__exit__()
            begin = time.monotonic()
            with self.assertRaises(TransportError) as caught:
                list(events)
            self.assertLess(time.monotonic() - begin, 10)
            self.assertEqual(caught.exception.code, "connection_failed")
            session.server = Server([follow(WHOLE)], port=port)
            rest = list(made.events())
            self.assertEqual(made.cursor, 95, "and goes on from its cursor when asked again")
            self.assertTrue(rest)

    def test_what_will_not_pass_is_raised_at_once(self) -> None:
        with Session(lambda r: r.error(404, "not_found")) as (sandbox, server):
            with self.assertRaises(NotFoundError):
                list(twin(Execution)(sandbox, "j-1").events())
            self.assertEqual(len(server.requests), 2)

    def test_output_that_is_left_out_is_an_error_never_silence(self) -> None:
        holed = [started(1), output(2, 0, b"ab"), output(3, 4, b"ef"), ended(4)]
        with Session(follow(holed)) as (sandbox, _):
            seen: list[JobEvent] = []
            with self.assertRaises(InvalidResponseError):
                for event in twin(Execution)(sandbox, "j-1").events(reconnect_seconds=0.3):
                    seen.append(event)
            self.assertEqual([e.cursor for e in seen], [1, 2])

    def test_nonsense_is_an_error(self) -> None:
        for data in (b"data: {\n\n", b"data: []\n\n", b'data: {"cursor":"1","type":"output"}\n\n'):
            with self.subTest(data), Session(lambda r, d=data: r.raw(CHUNKED + chunk(d))) as (sandbox, _):  # type: ignore[misc]
                with self.assertRaises(InvalidResponseError):
                    next(twin(Execution)(sandbox, "j-1").events(reconnect_seconds=0.1))
        with Session(lambda r: r.reply(200, {"events": []})) as (sandbox, _):
            with self.assertRaises(InvalidResponseError):
                next(twin(Execution)(sandbox, "j-1").events(reconnect_seconds=0.1))

    def test_kinds_of_events_from_the_future_are_passed_over(self) -> None:
        future = {"cursor": 3, "type": "weather", "time": 1, "rain": True}
        with Session(follow([started(1), future, ended(4)])) as (sandbox, _):
            self.assertEqual([e.cursor for e in twin(Execution)(sandbox, "j-1").events()], [1, 4])

    def test_text_never_has_half_a_character(self) -> None:
        raw = TEXT.encode()
        for size in range(1, 9):
            events = [*pieces(raw, size, first=1), ended(99)]
            with Session(follow(events)) as (sandbox, _):
                made = twin(Execution)(sandbox, "j-1")
                self.assertEqual(text_of(list(made.events())), TEXT)
                for begin in range(1, len(events) - 1):
                    tail = text_of(list(made.events(cursor=begin)))
                    self.assertNotIn("\ufffd", tail)
                    self.assertTrue(TEXT.endswith(tail))
        with Session(follow([output(1, 0, b"\xff\xc3("), ended(2)])) as (sandbox, _):
            self.assertEqual(text_of(list(twin(Execution)(sandbox, "j-1").events())), "\ufffd\ufffd(")

    def test_an_iterator_that_is_left_and_taken_up_again_continues_its_text(self) -> None:
        raw = TEXT.encode()
        with Session(follow([*pieces(raw, 1, first=1), ended(99)])) as (sandbox, _):
            made = twin(Execution)(sandbox, "j-1")
            text = ""
            while made.cursor < 99:
                with made.events() as events:
                    for event in events:
                        text += event.text if event.type == "output" else ""
                        break
            self.assertEqual(text, TEXT)

    def test_closing_or_letting_go_detaches_and_cancels_nothing(self) -> None:
        for way in ("close", "with", "let go", "break"):
            gone = threading.Event()

            def endless(r: Request, gone: threading.Event = gone) -> None:
                r.raw(CHUNKED + chunk(sse(WHOLE[:2])))
                if r.sock.recv(1) == b"":
                    gone.set()

            with self.subTest(way), Session(endless) as (sandbox, server):
                made = twin(Execution)(sandbox, "j-1")
                events: Any = made.events()
                if way == "with":
                    with events:
                        next(events)
                elif way == "break":
                    for _ in made.events():
                        break
                else:
                    next(events)
                    if way == "close":
                        events.close()
                        self.assertEqual(list(events), [])
                del events
                gc.collect()
                self.assertTrue(gone.wait(3), "the connection has ended")
                self.assertEqual(len(server.requests), 2)

    def test_after_the_last_event_there_is_nothing_more(self) -> None:
        def handler(r: Request) -> None:
            if r.path.endswith("/events"):
                r.raw(CHUNKED + (chunk(sse(WHOLE)) if r.query["cursor"] == "0" else b"") + b"0\r\n\r\n")
            else:
                r.reply(200, finished(cursor=95))

        with Session(handler) as (sandbox, server):
            made = twin(Execution)(sandbox, "j-1")
            self.assertEqual(len(list(made.events())), len(WHOLE))
            self.assertEqual(list(made.events()), [])
            self.assertEqual(list(twin(Execution)(sandbox, "j-1", cursor=95).events()), [])
            self.assertEqual(len(server.requests), 6)

    def test_another_thread_can_close_an_iterator_that_waits(self) -> None:
        release = threading.Event()

        def quiet(r: Request) -> None:
            r.raw(CHUNKED + chunk(sse(WHOLE[:1])))
            release.wait(10)

        with Session(quiet) as (sandbox, _):
            events = twin(Execution)(sandbox, "j-1").events()
            next(events)
            threading.Timer(0.2, events.close).start()
            begin = time.monotonic()
            self.assertEqual(list(events), [])
            self.assertLess(time.monotonic() - begin, 10)
            release.set()


@both
class Waiting(unittest.TestCase):
    @staticmethod
    def outputs(out: bytes, err: bytes = b"") -> Any:
        def handler(r: Request) -> None:
            if r.path.endswith("/output"):
                data = out if r.query["stream"] == "stdout" else err
                begin = int(r.query["offset"])
                r.reply(200, data[begin : begin + int(r.query["length"])], {"X-Mainbrella-Size": str(len(data))})
            else:
                assert r.path.endswith("/jobs/j-1/wait"), r.path
                r.reply(200, finished("timed_out", None, stdoutBytes=len(out), stderrBytes=len(err)))

        return handler

    def test_the_process_that_timed_out_and_the_caller_that_stopped_waiting_differ(self) -> None:
        with Session(self.outputs(b"so far\n", b"oh")) as (sandbox, _):
            r = twin(Execution)(sandbox, "j-1").wait(timeout=5)
            self.assertEqual((r.timed_out, r.still_running, r.cause, r.exit_code), (True, False, "timed_out", -1))
            self.assertEqual((r.stdout, r.stderr, r.duration_ms), ("so far\n", "oh", 250))

        def running(r: Request) -> None:
            time.sleep(int(r.query["timeoutMs"]) / 1000)
            r.reply(200, job())

        with Session(running) as (sandbox, server):
            begin = time.monotonic()
            with self.assertRaises(JobStillRunningError) as caught:
                twin(Execution)(sandbox, "j-1").wait(timeout=0.3)
            self.assertLess(time.monotonic() - begin, 10)
            self.assertIsInstance(caught.exception, CallerStoppedWaitingError)
            self.assertEqual(caught.exception.job_id, "j-1")
            self.assertEqual({r.method for r in server.requests}, {"GET"}, "nothing was cancelled")

    def test_a_wait_goes_on_over_lost_connections(self) -> None:
        def lost(r: Request) -> None:
            r.cut()

        def busy(r: Request) -> None:
            r.error(503, "shutting_down", {"Retry-After": "0"})

        def running(r: Request) -> None:
            r.reply(200, job())

        handlers = [lost, running, busy, running, lost, self.outputs(b"done\n")]
        with Session(*handlers) as (sandbox, _):
            self.assertEqual(twin(Execution)(sandbox, "j-1").wait().stdout, "done\n")

    def test_long_output_is_fetched_as_head_and_tail(self) -> None:
        data = "é".encode() * 50_000
        with Session(self.outputs(data)) as (sandbox, server):
            r = twin(Execution)(sandbox, "j-1").wait(output_limit=1001)
            self.assertEqual((len(r.stdout_bytes), r.stdout_total_bytes), (1001, 100_000))
            self.assertEqual(r.stdout_bytes, data[:501] + data[-500:])
            assert r.stdout_omitted is not None
            self.assertEqual((r.stdout_omitted.offset, r.stdout_omitted.length), (501, 98_999))
            self.assertNotIn("\ufffd", r.stdout)
            self.assertEqual(len(server.requests), 4)

    def test_what_the_log_did_not_keep_is_told(self) -> None:
        kept, total = "é".encode() * 100, 1_000_000  # 151 bytes of head, 49 of tail

        def handler(r: Request) -> None:
            if not r.path.endswith("/output"):
                return r.reply(200, finished(stdoutBytes=total, stderrBytes=0))
            begin, end = int(r.query["offset"]), int(r.query["offset"]) + int(r.query["length"])
            parts = [(0, kept[:151]), (total - 49, kept[-49:])]
            body = b"".join(d[max(0, begin - at) : max(0, end - at)] for at, d in parts)
            hole = (max(begin, 151), min(end, total - 49))
            headers = {"X-Mainbrella-Size": str(total)}
            if hole[0] < hole[1]:
                headers["X-Mainbrella-Omitted"] = f"{hole[0]}+{hole[1] - hole[0]}"
            return r.reply(200, body, headers)

        with Session(handler) as (sandbox, _):
            made = twin(Execution)(sandbox, "j-1")
            for limit, head, tail in ((2_000_000, 151, 49), (400, 151, 49), (200, 100, 49), (60, 30, 30)):
                r = made.wait(output_limit=limit)
                self.assertEqual(r.stdout_bytes, kept[:head] + kept[-tail:], limit)
                assert r.stdout_omitted is not None
                self.assertEqual((r.stdout_omitted.offset, r.stdout_omitted.length), (head, total - head - tail))
                self.assertNotIn("\ufffd", r.stdout)
            part = made.output(offset=101, length=total)
            self.assertEqual(part.around_gap(), (kept[101:151], kept[-49:]))
            self.assertEqual((part.total_bytes, part.text.strip("\ufffd")), (total, "é" * 48))

    def test_every_end_has_an_exit_code(self) -> None:
        cases: list[tuple[str, int | None, int | None, int]] = [
            ("exited", 7, None, 7),
            ("signalled", None, 15, 143),
            ("cancelled", None, 15, 143),
            ("cancelled", 3, None, 3),
            ("timed_out", None, 9, -1),
            ("machine_stopped", None, None, -1),
            ("lost", None, None, -1),
        ]
        for cause, code, signal, expected in cases:
            done = finished(cause, code, signal, stdoutBytes=0, stderrBytes=0)
            with self.subTest(cause), Session(lambda r, d=done: r.reply(200, d)) as (sandbox, _):  # type: ignore[misc]
                r = twin(Execution)(sandbox, "j-1").wait()
                self.assertEqual((r.exit_code, r.cause, r.ok), (expected, cause, False))

    def test_a_job_that_is_not_retained_is_said_at_once(self) -> None:
        with Session(lambda r: r.error(404, "not_found")) as (sandbox, server):
            with self.assertRaises(NotFoundError):
                twin(Execution)(sandbox, "j-1").wait()
            with self.assertRaises(NotFoundError):
                sandbox.commands.attach("j-1")
            self.assertEqual(len(server.requests), 3)


@both
class Steering(unittest.TestCase):
    def test_input_is_sent_once_and_ended(self) -> None:
        state = {"acceptedBytes": 8, "pendingBytes": 2, "closed": False}

        def take(r: Request) -> None:
            r.reply(200, {**state, "closed": r.query["eof"] == "true"})

        with Session(lambda r: r.reply(201, job()), take) as (sandbox, server):
            made = sandbox.commands.start(["cat"], stdin=True)
            status = made.stdin.write(b"hell\x00\xff\n")
            self.assertEqual((status.accepted_bytes, status.pending_bytes, status.closed), (8, 2, False))
            self.assertTrue(made.stdin.close().closed)
            made.stdin.write("é")
            sent = server.requests[2:]
            self.assertEqual([r.body for r in sent], [b"hell\x00\xff\n", b"", "é".encode()])
            self.assertEqual([r.query["eof"] for r in sent], ["false", "true", "false"])
            self.assertEqual({r.path for r in sent}, {"/v1/machines/m-1/jobs/j-1/stdin"})

    def test_closing_an_input_that_is_closed_or_of_a_job_that_is_over_is_harmless(self) -> None:
        for code in ("stdin_closed", "job_ended"):
            for had_input in (True, False):

                def answer(r: Request, code: str = code, had_input: bool = had_input) -> None:
                    if r.method == "POST":
                        r.error(409, code)
                    else:
                        r.reply(200, finished(stdin=had_input, stdinAcceptedBytes=3))

                with self.subTest(code, had_input=had_input), Session(answer) as (sandbox, _):
                    made = twin(Execution)(sandbox, "j-1")
                    if had_input:
                        status = made.stdin.close()
                        self.assertEqual((status.accepted_bytes, status.closed), (3, True))
                    else:
                        with self.assertRaises(ConflictError):
                            made.stdin.close()

    def test_input_whose_fate_is_unknown_is_not_sent_again(self) -> None:
        def lost(r: Request) -> None:
            r.cut()

        def full(r: Request) -> None:
            r.error(413, "payload_too_large")

        with Session(lost) as (sandbox, server):
            with self.assertRaises(TransportError) as caught:
                twin(Execution)(sandbox, "j-1").stdin.write(b"x")
            self.assertTrue(caught.exception.ambiguous)
            self.assertEqual(len(server.requests), 2)
        with Session(full) as (sandbox, server):
            with self.assertRaises(PayloadTooLargeError):
                twin(Execution)(sandbox, "j-1").stdin.write(b"x" * 70_000)
            self.assertEqual(len(server.requests), 2)

    def test_verbs_say_what_they_should(self) -> None:
        with Session(lambda r: r.reply(200, job()) if r.method != "DELETE" else r.reply(204)) as (sandbox, server):
            made = sandbox.commands.attach("j-1")
            made.cancel()
            made.cancel(grace_ms=500)
            made.signal("SIGUSR1")
            made.signal(10)
            made.resize(132, 40)
            made.forget()
            sent = [(r.method, r.path.removeprefix("/v1/machines/m-1/jobs/j-1"), r.body) for r in server.requests[1:]]
            self.assertEqual(
                sent,
                [
                    ("GET", "", b""),
                    ("POST", "/cancel", b"{}"),
                    ("POST", "/cancel", b'{"graceMs": 500}'),
                    ("POST", "/signal", b'{"signal": "SIGUSR1"}'),
                    ("POST", "/signal", b'{"signal": 10}'),
                    ("POST", "/resize", b'{"cols": 132, "rows": 40}'),
                    ("DELETE", "", b""),
                ],
            )
            for bad in ("", 0, 65, True):
                with self.subTest(bad), self.assertRaises(ConfigurationError):
                    made.signal(bad)

    def test_an_answer_about_another_job_is_not_taken_over(self) -> None:
        with Session(lambda r: r.reply(200, job(id="j-2"))) as (sandbox, _):
            with self.assertRaises(InvalidResponseError):
                twin(Execution)(sandbox, "j-1").get()

    def test_retained_jobs_are_listed_by_pages(self) -> None:
        page = {"executions": [job(), finished(id="j-0")], "nextCursor": "c"}
        with Session(lambda r: r.reply(200, page)) as (sandbox, server):
            listed = sandbox.commands.list(limit=2)
            self.assertEqual([e["id"] for e in listed["executions"]], ["j-1", "j-0"])
            sandbox.commands.list(cursor=listed["nextCursor"])
            self.assertEqual(server.requests[1].query, {"createdAt": CREATED_AT, "limit": "2"})
            self.assertEqual(server.requests[2].query, {"createdAt": CREATED_AT, "cursor": "c"})

    def test_processes_are_listed_and_killed(self) -> None:
        entry = {
            "pid": 5,
            "ppid": 1,
            "uid": 0,
            "state": "S",
            "command": "sleep",
            "argv": ["sleep", "9"],
            "startedAtMs": 1,
            "cpuTimeMs": 2,
            "rssBytes": 3,
            "jobId": None,
        }

        def handler(r: Request) -> None:
            r.reply(200, {"processes": [entry], "truncated": True} if r.method == "GET" else {})

        with Session(handler) as (sandbox, server):
            found = sandbox.processes()
            self.assertEqual((len(found), found.truncated, found[0].argv), (1, True, ["sleep", "9"]))
            sandbox.kill_process(found[0].pid)
            self.assertEqual(server.requests[2].path, "/v1/machines/m-1/processes/5/signal")
            self.assertEqual(server.requests[2].json(), {"signal": "SIGKILL"})

    def test_bad_arguments_are_refused_here(self) -> None:
        with Session(lambda r: r.reply(200, job())) as (sandbox, server):
            with self.assertRaises(ConfigurationError):
                twin(Execution)(sandbox, "")
            with self.assertRaises(ConfigurationError):
                twin(Execution)(sandbox, "j-1", cursor=-1)
            for command in ([], "", 5, b"ls", ["sleep", 5]):
                with self.subTest(command), self.assertRaises(ConfigurationError):
                    sandbox.commands.start(command)
            for size in (True, {"cols": 80}, (80, 24)):
                with self.subTest(size), self.assertRaises(ConfigurationError):
                    sandbox.commands.start("x", pty=size)
            with self.assertRaises(ConfigurationError):
                sandbox.commands.run("x", env={"A": 1})
            with self.assertRaises(ConfigurationError):
                sandbox.commands.run("x", wait_ms=0)
            self.assertEqual(len(server.requests), 1)


assert KEY

if __name__ == "__main__":
    unittest.main()
