from __future__ import annotations

import threading
import time
import unittest
from typing import Any

from mainbrella import (
    AuthenticationError,
    CallerStoppedWaitingError,
    CleanupUncertainError,
    ConfigurationError,
    CreateFailedError,
    IdempotencyConflictError,
    InvalidResponseError,
    MachineNotRunningError,
    Mainbrella,
    RateLimitedError,
    RedirectRefusedError,
    TransportError,
    UnsupportedError,
)

from .both import both, make_client
from .scripted import CREATED_AT, Handler, Request, Server, machine, stopped

KEY = "mb_0123abcd_" + "s" * 43


def client(server: Server, **options: Any) -> Mainbrella:
    return make_client(KEY, base_url=server.url, **options)


def ok(r: Request) -> None:
    r.reply(201, machine())


def stop(r: Request) -> None:
    assert r.path == "/v1/machines/m-1/stop", r.path
    assert r.query == {"createdAt": CREATED_AT}
    r.reply(200, stopped())


@both
class Creation(unittest.TestCase):
    def test_a_session_sends_what_was_asked_and_stops_only_its_own_generation(self) -> None:
        with Server([ok, stop]) as server, client(server) as c:
            with c.create(
                "node", size="micro", slot="s", ttl_seconds=60, metadata={"a": "b"}, env={"X": "1"}, persistent=True
            ) as sandbox:
                self.assertEqual((sandbox.id, sandbox.created_at, sandbox.state), ("m-1", CREATED_AT, "running"))
                self.assertEqual(sandbox.info.limits.memory_mib, 1024)
            self.assertEqual(sandbox.state, "stopped")
            made = server.requests[0]
            self.assertEqual(
                made.json(),
                {
                    "catalogId": "node",
                    "size": "micro",
                    "slot": "s",
                    "ttlSeconds": 60,
                    "persistent": True,
                    "metadata": {"a": "b"},
                    "env": {"X": "1"},
                },
            )
            self.assertEqual(made.headers["authorization"], f"Bearer {KEY}")
            self.assertTrue(made.headers["idempotency-key"])
            self.assertEqual(len(server.requests), 2)
            self.assertEqual(server.connections, 1, "the connection is kept and used again")

    def test_a_machine_that_is_to_be_paused_when_unused_is_asked_for_and_told(self) -> None:
        def paused(r: Request) -> None:
            r.reply(201, machine() | {"onIdle": "pause", "autoResume": True})

        with Server([paused]) as server, client(server) as c:
            made = c.create(idle_timeout_seconds=60, on_idle="pause", auto_resume=True)
            self.assertEqual((made.info.on_idle, made.info.auto_resume), ("pause", True))
            asked = server.requests[0].json()
            self.assertEqual((asked["onIdle"], asked["autoResume"]), ("pause", True))
            with self.assertRaises(ConfigurationError):
                c.create(on_idle="sleep")
            self.assertEqual(len(server.requests), 1)

    def test_lost_responses_are_reconciled_with_one_key(self) -> None:
        def lost(r: Request) -> None:
            r.cut()

        def half(r: Request) -> None:
            r.raw(b'HTTP/1.1 201 Created\r\nContent-Length: 500\r\n\r\n{"id":')
            r.cut()

        def nonsense(r: Request) -> None:
            r.reply(201, b"<html>")

        with Server([lost, half, nonsense, ok]) as server, client(server) as c:
            self.assertEqual(c.create().id, "m-1")
            self.assertEqual(len(server.requests), 4)
            self.assertEqual(len({r.headers["idempotency-key"] for r in server.requests}), 1)
            self.assertEqual(len({r.body for r in server.requests}), 1)
            self.assertEqual(len({r.headers["x-request-id"] for r in server.requests}), 4)

    def test_an_unanswered_create_says_which_key_would_find_the_machine(self) -> None:
        def lost(r: Request) -> None:
            r.cut()

        with Server([lost]) as server, client(server) as c, self.assertRaises(TransportError) as caught:
            c.create()
        self.assertEqual(len(server.requests), 5, "attempts are bounded")
        self.assertTrue(caught.exception.ambiguous)
        self.assertEqual(caught.exception.idempotency_key, server.requests[0].headers["idempotency-key"])

    def test_doubt_stays_when_a_later_attempt_cannot_even_connect(self) -> None:
        def lost_and_gone(r: Request) -> None:
            server.__exit__()

        server = Server([lost_and_gone])
        with client(server) as c, self.assertRaises(TransportError) as caught:
            c.create(idempotency_key="mine")
        self.assertEqual(caught.exception.code, "connection_failed")
        self.assertTrue(caught.exception.ambiguous, "the first attempt may have made a machine")
        self.assertEqual(caught.exception.idempotency_key, "mine")

    def test_a_service_that_is_not_there_is_plain_and_certain(self) -> None:
        with Server([ok]) as server:
            url = server.url
        with make_client(KEY, base_url=url) as c, self.assertRaises(TransportError) as caught:
            c.create()
        self.assertEqual(caught.exception.code, "connection_failed")
        self.assertFalse(caught.exception.ambiguous)
        self.assertIn("MAINBRELLA_API_URL", caught.exception.hint)

    def test_silence_ends_at_the_deadline_with_the_key(self) -> None:
        release = threading.Event()

        def silent(r: Request) -> None:
            release.wait(10)

        with Server([silent]) as server, client(server) as c:
            begin = time.monotonic()
            with self.assertRaises(CallerStoppedWaitingError) as caught:
                c.create(timeout=0.4)
            self.assertLess(time.monotonic() - begin, 3)
            self.assertIsNotNone(caught.exception.idempotency_key)
            self.assertTrue(caught.exception.ambiguous)
            release.set()

    def test_a_drip_of_bytes_does_not_stretch_the_deadline(self) -> None:
        def drip(r: Request) -> None:
            r.raw(b"HTTP/1.1 201 Created\r\n")
            for _ in range(100):
                r.raw(b"X-A: b\r\n")
                time.sleep(0.05)

        with Server([drip]) as server, client(server) as c:
            begin = time.monotonic()
            with self.assertRaises(CallerStoppedWaitingError):
                c.create(timeout=0.4)
            self.assertLess(time.monotonic() - begin, 2)

    def test_busy_answers_are_repeated_after_the_pause_they_ask_for(self) -> None:
        def limited(r: Request) -> None:
            r.error(429, "rate_limited", {"Retry-After": "1"})

        def in_progress(r: Request) -> None:
            r.error(409, "in_progress", {"Retry-After": "0"})

        def broken(r: Request) -> None:
            r.error(500, "internal")

        with Server([limited, in_progress, broken, ok]) as server, client(server) as c:
            begin = time.monotonic()
            c.create()
            self.assertGreaterEqual(time.monotonic() - begin, 1)
            self.assertEqual(len({r.headers["idempotency-key"] for r in server.requests}), 1)

    def test_a_long_pause_is_the_callers_decision(self) -> None:
        def limited(r: Request) -> None:
            r.error(429, "rate_limited", {"Retry-After": "3600"})

        with Server([limited]) as server, client(server) as c, self.assertRaises(RateLimitedError) as caught:
            c.create()
        self.assertEqual((caught.exception.retry_after, caught.exception.retryable), (3600, True))
        self.assertEqual(len(server.requests), 1)

    def test_definite_refusals_are_not_repeated(self) -> None:
        cases: list[tuple[int, str, type[Exception]]] = [
            (401, "unauthenticated", AuthenticationError),
            (409, "idempotency_conflict", IdempotencyConflictError),
            (502, "create_failed", CreateFailedError),
            (422, "unsupported", UnsupportedError),
        ]
        for status, code, kind in cases:
            with self.subTest(code):

                def refuse(r: Request, status: int = status, code: str = code) -> None:
                    r.error(status, code)

                with Server([refuse]) as server, client(server) as c, self.assertRaises(kind) as caught:
                    c.create()
                self.assertEqual(len(server.requests), 1)
                error: Any = caught.exception
                self.assertEqual((error.code, error.status, error.hint), (code, status, "Do something."))
                self.assertEqual((error.request_id, error.ambiguous), ("r-1", False))

    def test_redirects_are_refused_and_the_key_stays_here(self) -> None:
        with Server([ok]) as other:

            def redirect(r: Request) -> None:
                r.reply(307, b"", {"Location": other.url + "/v1/machines"})

            with Server([redirect]) as server, client(server) as c, self.assertRaises(RedirectRefusedError):
                c.create()
            self.assertEqual(other.requests, [])

    def test_create_or_reconcile_gives_the_same_request_for_the_same_key(self) -> None:
        with Server([ok]) as server, client(server) as c:
            c.create_or_reconcile("python", idempotency_key="k-1", size="micro")
            c.create_or_reconcile("python", idempotency_key="k-1", size="micro")
            self.assertEqual(server.requests[0].body, server.requests[1].body)
            self.assertEqual({r.headers["idempotency-key"] for r in server.requests}, {"k-1"})
            for bad in ("", "a b", "x" * 256, "a\r\nb", "é"):
                with self.subTest(bad), self.assertRaises(ConfigurationError):
                    c.create(idempotency_key=bad)

    def test_a_foreign_answer_is_an_error_with_its_status(self) -> None:
        def page(r: Request) -> None:
            r.reply(404, b"<html>nginx</html>")

        with Server([page]) as server, client(server) as c, self.assertRaises(Exception) as caught:
            c.create()
        error: Any = caught.exception
        self.assertEqual((error.code, error.status), ("http_404", 404))

    def test_an_answer_without_required_fields_is_named(self) -> None:
        def lacking(r: Request) -> None:
            body = machine()
            del body["hardDeadlineMs"]
            r.reply(200, body)

        with Server([lacking]) as server, client(server) as c, self.assertRaises(InvalidResponseError) as caught:
            c.get("m-1")
        self.assertIn("machine.hardDeadlineMs", caught.exception.message)


@both
class Internet(unittest.TestCase):
    @staticmethod
    def flags(**networking: bool) -> Handler:
        def handler(r: Request) -> None:
            assert r.path == "/v1/capabilities"
            r.reply(200, {"networking": networking})

        return handler

    def test_offline_is_checked_before_and_confirmed_after(self) -> None:
        def offline(r: Request) -> None:
            assert r.json()["internet"] is False
            r.reply(201, machine(internet=False))

        with Server([self.flags(internet=True, internetControl=True), offline]) as server, client(server) as c:
            self.assertFalse(c.create(internet=False).info.internet)

    def test_offline_is_not_attempted_where_it_cannot_be_enforced(self) -> None:
        with Server([self.flags(internet=True, internetControl=False)]) as server, client(server) as c:
            with self.assertRaises(UnsupportedError):
                c.create(internet=False)
            self.assertEqual(len(server.requests), 1)

    def test_online_is_not_attempted_where_there_is_no_network(self) -> None:
        with Server([self.flags(internet=False, internetControl=True)]) as server, client(server) as c:
            with self.assertRaises(UnsupportedError):
                c.create(internet=True)

    def test_a_machine_that_is_online_against_the_order_is_stopped(self) -> None:
        with Server([self.flags(internet=True, internetControl=True), ok, stop]) as server, client(server) as c:
            with self.assertRaises(UnsupportedError):
                c.create(internet=False, idempotency_key="off")
            self.assertEqual(len(server.requests), 3)


@both
class CleanUp(unittest.TestCase):
    def test_the_exception_of_the_body_wins_over_a_failed_stop(self) -> None:
        def broken(r: Request) -> None:
            r.error(500, "internal")

        with Server([ok, broken]) as server, client(server) as c, self.assertRaises(KeyError) as caught, c.create():
            raise KeyError("mine")
        notes = getattr(caught.exception, "__notes__", None)
        if notes is not None:
            self.assertIn("stopping machine m-1@", notes[0])
        self.assertEqual(len(server.requests), 2)

    def test_interrupts_stop_the_machine_too(self) -> None:
        with Server([ok, stop]) as server, client(server) as c:
            with self.assertRaises(KeyboardInterrupt), c.create():
                raise KeyboardInterrupt
            self.assertEqual(server.requests[1].path, "/v1/machines/m-1/stop")

    def test_a_stop_whose_answer_is_lost_is_sent_again(self) -> None:
        def lost(r: Request) -> None:
            r.cut()

        with Server([ok, lost, stop]) as server, client(server) as c:
            with c.create():
                pass
            self.assertEqual(len(server.requests), 3)

    def test_an_uncertain_stop_is_asked_again_and_then_said(self) -> None:
        def uncertain(r: Request) -> None:
            r.reply(200, {"outcome": "uncertain", "machine": machine(state="stopping")})

        with Server([ok, uncertain, stop]) as server, client(server) as c:
            with c.create():
                pass
        with (
            Server([ok, uncertain]) as server,
            client(server) as c,
            self.assertRaises(CleanupUncertainError),
            c.create(),
        ):
            pass

    def test_a_slot_that_holds_a_newer_machine_is_left_alone(self) -> None:
        def newer(r: Request) -> None:
            r.error(409, "generation_mismatch")

        with Server([ok, newer]) as server, client(server) as c:
            with c.create():
                pass
            self.assertEqual(len(server.requests), 2)

    def test_an_answer_about_another_generation_is_never_taken_over(self) -> None:
        def other(r: Request) -> None:
            r.reply(200, machine(createdAt="2026-10-08T12:00:00.001Z"))

        with Server([ok, other]) as server, client(server) as c:
            sandbox = c.create()
            with self.assertRaises(Exception) as caught:
                sandbox.inspect()
            self.assertEqual(getattr(caught.exception, "code", None), "generation_mismatch")
            self.assertEqual(sandbox.created_at, CREATED_AT)


@both
class Attaching(unittest.TestCase):
    def test_connect_makes_nothing_and_stops_nothing(self) -> None:
        def get(r: Request) -> None:
            assert (r.method, r.path, r.query) == ("GET", "/v1/machines/m-1", {"createdAt": CREATED_AT})
            r.reply(200, machine())

        with Server([get]) as server, client(server) as c:
            with c.connect("m-1", CREATED_AT) as sandbox:
                self.assertEqual(sandbox.id, "m-1")
            self.assertEqual(len(server.requests), 1)

    def test_connect_refuses_what_is_not_running_and_says_why(self) -> None:
        def gone(r: Request) -> None:
            r.reply(200, machine(state="failed", reason={"code": "vmm_died", "message": "Its VMM ended."}))

        with Server([gone]) as server, client(server) as c, self.assertRaises(MachineNotRunningError) as caught:
            c.connect("m-1", CREATED_AT)
        self.assertIn("Its VMM ended.", str(caught.exception))
        self.assertNotIn("..", str(caught.exception))

    def test_list_follows_pages_lazily_with_its_filter(self) -> None:
        def page(ids: list[str], cursor: str | None) -> Handler:
            return lambda r: r.reply(200, {"machines": [machine(id=i) for i in ids], "nextCursor": cursor})

        with Server([page(["a", "b"], "c1"), page([], "c2"), page(["c"], None)]) as server, client(server) as c:
            found = c.list(state="running", metadata={"owner name": "é&x"}, page_size=2)
            self.assertEqual(next(found).id, "a")
            self.assertEqual(len(server.requests), 1)
            self.assertEqual([s.id for s in found], ["b", "c"])
            first = server.requests[0].query
            self.assertEqual(first, {"metadata.owner name": "é&x", "state": "running", "limit": "2"})
            self.assertEqual([r.query.get("cursor") for r in server.requests], [None, "c1", "c2"])

    def test_a_list_that_turns_in_a_circle_ends(self) -> None:
        def circle(r: Request) -> None:
            r.reply(200, {"machines": [], "nextCursor": "again"})

        with Server([circle]) as server, client(server) as c, self.assertRaises(InvalidResponseError):
            list(c.list())

    def test_extend_sends_only_what_was_given(self) -> None:
        def extended(r: Request) -> None:
            r.reply(200, machine(hardDeadlineMs=1_900_000_000_000))

        with Server([ok, extended, extended]) as server, client(server) as c:
            sandbox = c.create()
            self.assertEqual(sandbox.extend(ttl_seconds=90).hard_deadline_ms, 1_900_000_000_000)
            self.assertEqual(server.requests[1].json(), {"ttlSeconds": 90})
            sandbox.extend(on_idle="pause", idle_timeout_seconds=60, auto_resume=False)
            wanted = {"idleTimeoutSeconds": 60, "onIdle": "pause", "autoResume": False}
            self.assertEqual(server.requests[2].json(), wanted)
            for wrong in ({}, {"on_idle": "sleep"}):
                with self.assertRaises(ConfigurationError):
                    sandbox.extend(**wrong)


if __name__ == "__main__":
    unittest.main()
