from __future__ import annotations

import base64
import json
import os
import threading
import time
import unittest
from typing import Any
from unittest import mock

from mainbrella import (
    AuthenticationError,
    CallerStoppedWaitingError,
    CodeEvent,
    CommandFailedError,
    ConfigurationError,
    ContextDeadError,
    GuestUnavailableError,
    InvalidResponseError,
    MachineNotRunningError,
    MainbrellaError,
    TransportError,
    UnavailableError,
)

from .both import both, make_sandbox
from .jobs_server import CHUNKED, chunk
from .scripted import CREATED_AT, Handler, Request, Server, machine, result, stopped
from .test_use import KEY, Session

CONTEXT = {"id": "c-1", "language": "python", "state": "idle", "createdAt": CREATED_AT, "newer": 1}
PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


def created(r: Request) -> None:
    r.reply(201, CONTEXT)


def code_result(**changes: Any) -> dict[str, Any]:
    return {
        "executionCount": 1,
        "status": "ok",
        "stdout": "",
        "stderr": "",
        "results": [],
        "error": None,
        "truncated": False,
        "stdoutOmitted": None,
        "stderrOmitted": None,
        "durationMs": 3,
        **changes,
    }


def events(*items: dict[str, Any]) -> bytes:
    return b"".join(f"event: {i['type']}\ndata: {json.dumps(i)}\n\n".encode() for i in items)


DONE = {"type": "done", "status": "ok", "executionCount": 2, "truncated": False, "durationMs": 1}


@both
class Contexts(unittest.TestCase):
    def test_code_is_sent_and_everything_it_gave_is_there(self) -> None:
        outputs = [
            {"type": "display", "data": {"image/png": base64.b64encode(PNG).decode(), "text/plain": "<Figure>"}},
            {"type": "display", "data": {"text/html": "<b>x</b>", "application/json": {"a": [1]}}},
            {"type": "result", "data": {"text/plain": "42", "image/svg+xml": "<svg/>", "text/latex": "$x$"}},
        ]
        reply = code_result(stdout="hi\n", stderr="oh\n", results=outputs, executionCount=7)
        with Session(created, lambda r: r.reply(200, reply)) as (sandbox, server):
            ctx = sandbox.create_code_context(language="python", cwd="/workspace", env={"A": "b"})
            self.assertEqual((ctx.id, ctx.info.state), ("c-1", "idle"))
            made = server.requests[1]
            self.assertEqual(made.path, "/v1/machines/m-1/contexts")
            self.assertEqual(made.json(), {"language": "python", "cwd": "/workspace", "env": {"A": "b"}})
            r = ctx.run_code("x = 42\nx", timeout_seconds=1.5)
            sent = server.requests[2]
            self.assertEqual((sent.path, sent.query), ("/v1/machines/m-1/contexts/c-1/run", {"createdAt": CREATED_AT}))
            self.assertEqual(sent.json(), {"code": "x = 42\nx", "timeoutMs": 1500})
            self.assertEqual((r.exit_code, r.ok, r.stdout, r.stderr), (0, True, "hi\n", "oh\n"))
            self.assertEqual((r.execution_count, r.text, r.error), (7, "42", None))
            figure, page, value = r.results
            self.assertEqual((figure.type, figure.png, figure.text, figure.html), ("display", PNG, "<Figure>", None))
            self.assertEqual((page.html, page.json, page.png), ("<b>x</b>", {"a": [1]}, None))
            self.assertEqual((value.svg, value.latex, value.jpeg, value.markdown), ("<svg/>", "$x$", None, None))
            self.assertIn("text='42', forms=['image/svg+xml', 'text/latex', 'text/plain']", repr(r))
            self.assertNotIn(base64.b64encode(PNG).decode(), repr(r))

    def test_an_exception_of_the_code_is_a_normal_result(self) -> None:
        error = {"name": "ValueError", "value": "no", "traceback": ["Traceback", "ValueError: no"]}
        cases: list[tuple[dict[str, Any], int, bool]] = [
            (code_result(status="error", error=error), 1, False),
            (code_result(status="timed_out", stdout="so far"), -1, True),
            (code_result(status="interrupted", executionCount=None), -1, False),
        ]
        for reply, exit_code, timed_out in cases:
            with self.subTest(reply["status"]), Session(created, lambda r, d=reply: r.reply(200, d)) as (sandbox, _):  # type: ignore[misc]
                r = sandbox.create_code_context().run_code("x")
                self.assertEqual((r.exit_code, r.timed_out, r.ok), (exit_code, timed_out, False))
                if r.error is not None:
                    self.assertEqual((r.error.name, str(r.error)), ("ValueError", "ValueError: no"))
                    self.assertEqual(r.error.traceback[-1], "ValueError: no")

    def test_code_is_never_sent_twice(self) -> None:
        def lost(r: Request) -> None:
            r.cut()

        with Session(created, lost) as (sandbox, server):
            ctx = sandbox.create_code_context()
            with self.assertRaises(TransportError) as caught:
                ctx.run_code("pay()")
            self.assertTrue(caught.exception.ambiguous)
            with self.assertRaises(TransportError):
                list(ctx.stream_code("pay()"))
            self.assertEqual(len(server.requests), 4)

    def test_a_caller_that_stops_waiting_lets_go_of_the_connection(self) -> None:
        gone = threading.Event()

        def silent(r: Request) -> None:
            if r.sock.recv(1) == b"":
                gone.set()

        with Session(created, silent, timeout=0.3) as (sandbox, _):
            begin = time.monotonic()
            with self.assertRaises(CallerStoppedWaitingError):
                sandbox.create_code_context().run_code("x", timeout_seconds=0.4)
            self.assertGreater(time.monotonic() - begin, 0.6)
            self.assertTrue(gone.wait(3), "which is what interrupts the code")

    def test_a_dead_interpreter_is_told_and_can_be_begun_anew(self) -> None:
        dead: list[Handler] = [
            lambda r: r.error(409, "context_dead"),
            lambda r: r.reply(200, {**CONTEXT, "state": "idle"}),
            lambda r: r.reply(200, code_result()),
        ]
        with Session(created, *dead) as (sandbox, server):
            ctx = sandbox.create_code_context()
            with self.assertRaises(ContextDeadError):
                ctx.run_code("x")
            ctx.restart()
            self.assertTrue(ctx.run_code("x").ok)
            self.assertEqual(server.requests[3].path, "/v1/machines/m-1/contexts/c-1/restart")

    def test_contexts_are_listed_looked_at_interrupted_and_closed(self) -> None:
        def handler(r: Request) -> None:
            if r.method == "DELETE":
                r.reply(204)
            elif r.path.endswith("/contexts"):
                r.reply(200, {"contexts": [CONTEXT, {**CONTEXT, "id": "c-2"}]})
            elif r.path.endswith("/interrupt"):
                r.reply(200, {**CONTEXT, "state": "idle"})
            else:
                r.reply(200, {**CONTEXT, "state": "busy"})

        with Session(handler) as (sandbox, server):
            found = sandbox.code_contexts()
            self.assertEqual([c.id for c in found], ["c-1", "c-2"])
            self.assertEqual(found[0].inspect().state, "busy")
            found[0].interrupt()
            with found[0]:
                pass
            self.assertEqual(
                (server.requests[-1].method, server.requests[-1].path), ("DELETE", "/v1/machines/m-1/contexts/c-1")
            )

    def test_closing_what_has_ended_is_harmless(self) -> None:
        for status, code in ((404, "not_found"), (409, "machine_not_running")):
            with Session(created, lambda r, s=status, c=code: r.error(s, c)) as (sandbox, _):  # type: ignore[misc]
                sandbox.create_code_context().close()

    def test_what_code_does_can_be_followed(self) -> None:
        items: list[dict[str, Any]] = [
            {"type": "stdout", "text": "é\n"},
            {"type": "gap", "stream": "stdout", "offset": 3, "length": 9},
            {"type": "stderr", "text": "oh"},
            {"type": "weather"},
            {"type": "display", "data": {"image/png": base64.b64encode(PNG).decode()}},
            {"type": "error", "name": "E", "value": "", "traceback": []},
            DONE,
        ]

        def stream(r: Request) -> None:
            assert r.headers["accept"] == "text/event-stream"
            assert r.json() == {"code": "x", "timeoutMs": 60_000}
            data = events(*items)
            r.raw(CHUNKED + b"".join(chunk(data[i : i + 3]) for i in range(0, len(data), 3)) + b"0\r\n\r\n")

        with Session(created, stream) as (sandbox, _):
            seen: list[CodeEvent] = list(sandbox.create_code_context().stream_code("x"))
            self.assertEqual([e.type for e in seen], ["stdout", "gap", "stderr", "display", "error", "done"])
            self.assertEqual((seen[0].text, seen[2].text, seen[-1].status), ("é\n", "oh", "ok"))
            assert seen[1].omitted is not None and seen[3].output is not None
            self.assertEqual((seen[1].omitted.length, seen[3].output.png, str(seen[4].error)), (9, PNG, "E"))

    def test_a_followed_run_that_breaks_off_is_an_error(self) -> None:
        failed = {"type": "failed", "code": "context_dead", "message": "Gone.", "hint": "Restart.", "requestId": "r-9"}
        cut = CHUNKED + chunk(events({"type": "stdout", "text": "a"}))
        cases: list[tuple[bytes, type[MainbrellaError]]] = [
            (cut + b"0\r\n\r\n", InvalidResponseError),
            (cut + chunk(events(failed)), ContextDeadError),
        ]
        for raw, kind in cases:
            with self.subTest(kind), Session(created, lambda r, d=raw: r.raw(d)) as (sandbox, server):  # type: ignore[misc]
                stream = sandbox.create_code_context().stream_code("x")
                self.assertEqual(next(stream).text, "a")
                with self.assertRaises(kind):
                    next(stream)
                self.assertEqual(list(stream), [], "and it is not begun again")
                self.assertEqual(len(server.requests), 3)

    def test_a_failure_of_a_followed_run_is_the_error_it_names_after_all_that_came_before(self) -> None:
        output = [{"type": "stdout", "text": "a"}, {"type": "stderr", "text": "b"}]
        cases: list[tuple[str, type[MainbrellaError], bool]] = [
            ("context_dead", ContextDeadError, False),
            ("machine_not_running", MachineNotRunningError, False),
            ("unauthenticated", AuthenticationError, False),
            ("guest_unavailable", GuestUnavailableError, True),
            # Elsewhere nothing was done after it; here code was running.
            ("shutting_down", UnavailableError, True),
            ("of_the_future", MainbrellaError, False),
        ]
        for code, kind, ambiguous in cases:
            failed = {"type": "failed", "code": code, "message": "Gone.", "hint": "Restart.", "requestId": "r-9"}
            raw = CHUNKED + chunk(events(*output, failed)) + b"0\r\n\r\n"
            with self.subTest(code), Session(created, lambda r, d=raw: r.raw(d)) as (sandbox, server):  # type: ignore[misc]
                stream = sandbox.create_code_context().stream_code("x")
                self.assertEqual([next(stream).text, next(stream).text], ["a", "b"], "one piece brought all of it")
                with self.assertRaises(kind) as caught:
                    next(stream)
                error = caught.exception
                self.assertEqual((error.code, error.message, error.request_id), (code, "Gone.", "r-9"))
                self.assertEqual((error.retryable, error.ambiguous), (False, ambiguous))
                self.assertEqual(list(stream), [])
                self.assertEqual(len(server.requests), 3)

    def test_leaving_a_followed_run_lets_go_of_the_connection(self) -> None:
        gone = threading.Event()

        def endless(r: Request) -> None:
            r.raw(CHUNKED + chunk(events({"type": "stdout", "text": "a"})))
            if r.sock.recv(1) == b"":
                gone.set()

        with Session(created, endless) as (sandbox, _):
            with sandbox.create_code_context().stream_code("x") as stream:
                next(stream)
            self.assertTrue(gone.wait(3))

    def test_bad_arguments_are_refused_here(self) -> None:
        with Session(created) as (sandbox, server):
            ctx = sandbox.create_code_context()
            with self.assertRaises(ConfigurationError):
                ctx.run_code("x", timeout_seconds=0)
            with self.assertRaises(ConfigurationError):
                ctx.run_code("\udcff")
            self.assertEqual(len(server.requests), 2)


@both
class ShortForm(unittest.TestCase):
    def test_a_session_in_the_short_form(self) -> None:
        files: dict[str, bytes] = {}

        def service(r: Request) -> None:
            if r.path == "/v1/templates":
                r.reply(200, {"templates": [{"name": "python"}]})
            elif r.path == "/v1/machines":
                r.reply(201, machine())
            elif r.path.endswith("/stop"):
                r.reply(200, stopped())
            elif r.method == "PUT":
                files[r.query["path"]] = r.body
                r.reply(200, {"size": len(r.body)})
            elif r.method == "GET":
                r.reply(200, files[r.query["path"]])
            else:
                code = 3 if r.json()["command"] == "false" else 0
                r.reply(200, result(exitCode=code, stderrBase64=base64.b64encode(b"why").decode()))

        with Server([service]) as server:
            env = {"MAINBRELLA_API_KEY": KEY, "MAINBRELLA_API_URL": server.url}
            with mock.patch.dict(os.environ, env):
                sbx = make_sandbox(template="agent", persistent=True, ttl_seconds=60, metadata={"session": "s"})
            sent = server.requests[1].json()
            self.assertEqual(sent["catalogId"], "python", "there is no template called agent")
            self.assertEqual((sent["persistent"], sent["ttlSeconds"], sent["metadata"]), (True, 60, {"session": "s"}))
            self.assertEqual(server.requests[0].headers["authorization"], f"Bearer {KEY}")
            self.assertEqual(sbx.exec("true", check=True, timeout_seconds=1.5).exit_code, 0)
            self.assertEqual(server.requests[2].json(), {"command": "true", "timeoutMs": 1500})
            self.assertEqual(sbx.exec("false").exit_code, 3)
            with self.assertRaises(CommandFailedError) as caught:
                sbx.exec("false", check=True)
            assert caught.exception.result is not None
            self.assertEqual((caught.exception.result.exit_code, caught.exception.code), (3, "command_failed"))
            self.assertIn("why", str(caught.exception))
            sbx.filesystem.write("/workspace/a.txt", "naïve")
            self.assertEqual(sbx.filesystem.read("/workspace/a.txt").decode(), "naïve")
            self.assertTrue(sbx.kill().stopped)
            self.assertTrue(sbx.kill().stopped, "and again, harmlessly")

    def test_leaving_its_block_stops_it(self) -> None:
        def service(r: Request) -> None:
            r.reply(200, stopped()) if r.path.endswith("/stop") else r.reply(201, machine())

        with Server([service]) as server:
            with make_sandbox(api_key=KEY, base_url=server.url):
                pass
            self.assertEqual([r.path for r in server.requests], ["/v1/machines", "/v1/machines/m-1/stop"])

    def test_no_key_is_said_before_anything_is_sent(self) -> None:
        with mock.patch.dict(os.environ):
            os.environ.pop("MAINBRELLA_API_KEY", None)
            with self.assertRaises(ConfigurationError) as caught:
                make_sandbox()
            self.assertIn("MAINBRELLA_API_KEY", caught.exception.hint)


if __name__ == "__main__":
    unittest.main()
