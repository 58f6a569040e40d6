"""Pausing, resuming and forking, against a scripted service."""

from __future__ import annotations

import unittest
from typing import Any, cast

from mainbrella import ConfigurationError, CreateFailedError

from .both import both
from .scripted import CREATED_AT, Request, machine, stopped
from .test_use import Session


def forked(*children: dict[str, Any], **more: Any) -> Any:
    body = {"children": list(children), "stillMs": 20, "memoryBytes": 1000, **more}
    return lambda r: r.reply(201, body)


def lost(r: Request) -> None:
    r.cut()


def child(n: int, **changes: Any) -> dict[str, Any]:
    return machine(id=f"c-{n}", **changes)


@both
class Forks(unittest.TestCase):
    def test_one_is_a_machine_and_several_are_a_list(self) -> None:
        several = forked(child(1), child(2), child(3))
        with Session(forked(child(0)), several) as (sandbox, server):
            one = sandbox.fork()
            self.assertEqual((one.id, one.state), ("c-0", "running"))
            asked = server.requests[1]
            self.assertEqual((asked.path, asked.query), ("/v1/machines/m-1/fork", {"createdAt": CREATED_AT}))
            self.assertEqual(asked.json(), {"count": 1, "ttlSeconds": 3600})
            self.assertTrue(asked.headers["idempotency-key"])
            three = sandbox.fork(3, ttl_seconds=60, idle_timeout_seconds=30, metadata={"a": "b"}, idempotency_key="mine")
            self.assertEqual([c.id for c in three], ["c-1", "c-2", "c-3"])
            asked = server.requests[2]
            self.assertEqual(asked.headers["idempotency-key"], "mine")
            self.assertEqual(
                asked.json(), {"count": 3, "ttlSeconds": 60, "idleTimeoutSeconds": 30, "metadata": {"a": "b"}}
            )

    def test_what_each_gets_of_secrets_is_asked_and_told_and_no_value_shown(self) -> None:
        hook = {"name": "10-hook", "exitCode": None, "timedOut": False}
        random = {"kernel": True, "hooks": [hook], "registered": 2, "acknowledged": 1}
        receipt: dict[str, Any] = {"id": "c-0", "createdAt": CREATED_AT, "secrets": [{"name": "git", "outcome": "reissued"}]}
        receipt["random"] = random
        with Session(forked(child(0), receipts=[receipt])) as (sandbox, server):
            self.assertIsNone(sandbox.fork_receipt)
            one = sandbox.fork(secrets={"git": {"reissue": "hush"}, "npm": "inherit"})
            assert one.fork_receipt is not None
            self.assertEqual(one.fork_receipt.secrets, {"git": "reissued"})
            self.assertEqual((one.fork_receipt.registered, one.fork_receipt.acknowledged), (2, 1))
            self.assertEqual((one.fork_receipt.hooks[0].name, one.fork_receipt.hooks[0].exit_code), ("10-hook", None))
            self.assertEqual(server.requests[1].json()["secrets"], {"git": {"reissue": "hush"}, "npm": "inherit"})
            for wrong in ({"git": "copy"}, {"git": {"value": "hush"}}, {"git": {"reissue": ""}}, {"GIT": "drop"}):
                with self.assertRaises(ConfigurationError) as caught:
                    sandbox.fork(secrets=cast(Any, wrong))
                self.assertNotIn("hush", str(caught.exception))
            self.assertEqual(len(server.requests), 2)

    def test_a_lost_answer_is_asked_for_again_under_the_same_key(self) -> None:
        with Session(lost, forked(child(0))) as (sandbox, server):
            self.assertEqual(sandbox.fork().id, "c-0")
            first, second = server.requests[1:]
            self.assertEqual(first.headers["idempotency-key"], second.headers["idempotency-key"])

    def test_where_one_is_missing_the_others_are_not_left_behind(self) -> None:
        def stop(r: Request) -> None:
            self.assertEqual(r.path, "/v1/machines/c-1/stop")
            r.reply(200, stopped(id="c-1"))

        dead = child(2, state="failed", reason={"code": "create_failed", "message": "It could not be copied."})
        with Session(forked(child(1), dead), stop) as (sandbox, server):
            with self.assertRaises(CreateFailedError):
                sandbox.fork(2)
            self.assertEqual(len(server.requests), 3)

    def test_none_is_no_number_of_copies(self) -> None:
        with Session() as (sandbox, server):
            with self.assertRaises(ConfigurationError):
                sandbox.fork(0)
            self.assertEqual(len(server.requests), 1)


@both
class Pauses(unittest.TestCase):
    def test_the_state_is_learnt(self) -> None:
        def paused(r: Request) -> None:
            self.assertEqual((r.method, r.path), ("POST", "/v1/machines/m-1/pause"))
            r.reply(200, machine(state="paused"))

        def resumed(r: Request) -> None:
            self.assertEqual((r.method, r.path), ("POST", "/v1/machines/m-1/resume"))
            r.reply(200, machine())

        with Session(paused, resumed) as (sandbox, _):
            self.assertEqual(sandbox.pause().state, "paused")
            self.assertEqual(sandbox.state, "paused")
            sandbox.resume()
            self.assertEqual(sandbox.state, "running")
