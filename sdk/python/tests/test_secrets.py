from __future__ import annotations

import asyncio
import dataclasses
import threading
import unittest
from typing import Any

from mainbrella import (
    AsyncMainbrella,
    ConfigurationError,
    ConflictError,
    EgressLockedError,
    InvalidResponseError,
    MainbrellaError,
    Secret,
    SecretInfo,
    SecretLimitError,
    UnsupportedError,
)

from .both import both, make_client, make_sandbox
from .scripted import CREATED_AT, Request, Server, machine, stopped
from .test_use import KEY, Session

VALUE = "Bearer s3cr3t"
GITHUB = Secret("github", host="api.github.com", header="Authorization", value=VALUE)
GIT = Secret("git", host="git.example", username="me", value="s3cr3t", port=8443)


def told(**changes: Any) -> dict[str, Any]:
    return {
        "name": "github",
        "host": "api.github.com",
        "port": 443,
        "header": "authorization",
        "username": None,
        "createdAt": "2026-10-08T12:00:01.000Z",
        "newer": 1,
        **changes,
    }


def made(r: Request) -> None:
    assert "secrets" not in r.json(), "values are sent to their own place"
    r.reply(201, machine())


def put(r: Request) -> None:
    r.reply(200, told())


def stop(r: Request) -> None:
    assert (r.method, r.path) == ("POST", "/v1/machines/m-1/stop"), r.target
    assert r.query == {"createdAt": CREATED_AT}
    r.reply(200, stopped())


class Values(unittest.TestCase):
    def test_the_value_is_not_shown(self) -> None:
        for secret in (GITHUB, GIT):
            for shown in (repr(secret), str(secret), f"{[secret]}"):
                self.assertNotIn("s3cr3t", shown)
                self.assertIn(secret.host, shown)
        self.assertNotIn("value", {f.name for f in dataclasses.fields(SecretInfo)})

    def test_what_cannot_be_one_is_refused_without_showing_it(self) -> None:
        good: dict[str, Any] = {"name": "git", "host": "git.example", "header": "A", "value": "s3cr3t"}
        self.assertEqual(Secret(**good).port, 443)
        wrong: list[dict[str, Any]] = [
            {"username": "me"},
            {"header": None},
            {"value": b"s3cr3t"},
            {"value": None},
            {"value": ""},
            {"value": "s3cr3t\n"},
            {"value": "s3cr3té"},
            {"value": "s3cr3t\ud800"},
            {"host": ""},
            {"host": None},
            {"name": ""},
            {"name": "Git"},
            {"name": ".."},
            {"name": "git\n"},
            {"name": "a" * 65},
            {"name": None},
        ]
        for change in wrong:
            with self.subTest(change), self.assertRaises(ConfigurationError) as caught:
                Secret(**{**good, **change})
            self.assertNotIn("s3cr3t", str(caught.exception))


@both
class Using(unittest.TestCase):
    def test_one_is_set_listed_and_removed(self) -> None:
        def listed(r: Request) -> None:
            user = told(name="git", host="git.example", port=8443, header=None, username="me")
            r.reply(200, {"secrets": [user, told()]})

        handlers = [put, put, listed, lambda r: r.reply(200, {"removed": True})]
        with Session(*handlers, lambda r: r.reply(200, {"removed": False})) as (sandbox, server):
            info = sandbox.secrets.set("github", host="api.github.com", header="Authorization", value=VALUE)
            sent = server.requests[1]
            self.assertEqual((sent.method, sent.path), ("PUT", "/v1/machines/m-1/secrets/github"))
            self.assertEqual(sent.query, {"createdAt": CREATED_AT})
            self.assertEqual(
                sent.json(), {"host": "api.github.com", "port": 443, "header": "Authorization", "value": VALUE}
            )
            self.assertEqual((info.name, info.host, info.port), ("github", "api.github.com", 443))
            self.assertEqual((info.header, info.username), ("authorization", None))
            self.assertEqual(info.created_at, "2026-10-08T12:00:01.000Z")
            self.assertNotIn("s3cr3t", repr(info))

            sandbox.secrets.set("git", host="git.example", username="me", value="s3cr3t", port=8443)
            self.assertEqual(
                server.requests[2].json(),
                {"host": "git.example", "port": 8443, "username": "me", "value": "s3cr3t"},
            )

            secrets = sandbox.secrets.list()
            self.assertEqual([(s.name, s.username) for s in secrets], [("git", "me"), ("github", None)])
            asked = server.requests[3]
            self.assertEqual((asked.method, asked.path), ("GET", "/v1/machines/m-1/secrets"))

            self.assertIs(sandbox.secrets.remove("github"), True)
            gone = server.requests[4]
            self.assertEqual((gone.method, gone.path), ("DELETE", "/v1/machines/m-1/secrets/github"))
            self.assertEqual(gone.query, {"createdAt": CREATED_AT})
            self.assertIs(sandbox.secrets.remove("github"), False)

    def test_what_cannot_be_one_is_refused_before_anything_is_sent(self) -> None:
        with Session() as (sandbox, server):
            with self.assertRaises(ConfigurationError):
                sandbox.secrets.set("git", host="git.example", value="s3cr3t")
            with self.assertRaises(ConfigurationError):
                sandbox.secrets.set("git", host="git.example", header="A", username="me", value="s3cr3t")
            for name in ("..", "", "a/b", "A"):
                with self.assertRaises(ConfigurationError):
                    sandbox.secrets.remove(name)
            self.assertEqual(len(server.requests), 1)

    def test_refusals_have_classes_of_their_own(self) -> None:
        cases: list[tuple[int, str, type[MainbrellaError]]] = [
            (409, "secret_limit", SecretLimitError),
            (409, "egress_locked", EgressLockedError),
            (422, "unsupported", UnsupportedError),
        ]
        for status, code, kind in cases:

            def refuse(r: Request, status: int = status, code: str = code) -> None:
                r.error(status, code)

            with self.subTest(code), Session(refuse) as (sandbox, server):
                with self.assertRaises(kind) as caught:
                    sandbox.secrets.set("github", host="api.github.com", header="Authorization", value=VALUE)
                self.assertEqual(len(server.requests), 2, "an answer is an answer")
                self.assertNotIn("s3cr3t", str(caught.exception))
        self.assertTrue(issubclass(SecretLimitError, ConflictError))

    def test_an_answer_without_its_fields_is_none(self) -> None:
        for answer in ({}, {"removed": 1}):

            def reply(r: Request, answer: Any = answer) -> None:
                r.reply(200, answer)

            with Session(reply) as (sandbox, _), self.assertRaises(InvalidResponseError):
                sandbox.secrets.remove("git")
        with Session(lambda r: r.reply(200, {"secrets": [{}]})) as (sandbox, _):
            with self.assertRaises(InvalidResponseError):
                sandbox.secrets.list()


@both
class Creating(unittest.TestCase):
    def test_they_are_set_in_order_once_the_machine_is_there(self) -> None:
        with Server([made, put, put, stop]) as server, make_client(KEY, base_url=server.url) as client:
            with client.create(secrets=[GITHUB, GIT]) as sandbox:
                self.assertEqual(sandbox.id, "m-1")
            names = [(r.method, r.path.rsplit("/", 1)[1]) for r in server.requests]
            self.assertEqual(names, [("POST", "machines"), ("PUT", "github"), ("PUT", "git"), ("POST", "stop")])
            self.assertEqual(server.requests[1].query, {"createdAt": CREATED_AT})
            self.assertEqual(server.requests[1].json()["value"], VALUE)

    def test_the_short_form_sets_them_too(self) -> None:
        with Server([made, put, stop]) as server:
            with make_sandbox(api_key=KEY, base_url=server.url, secrets=[GITHUB]) as sandbox:
                self.assertNotIn("s3cr3t", repr(sandbox))
            self.assertEqual([r.method for r in server.requests], ["POST", "PUT", "POST"])

    def test_one_that_cannot_be_set_ends_exactly_the_generation_that_was_made(self) -> None:
        def refuse(r: Request) -> None:
            r.error(409, "egress_locked")

        with Server([made, put, refuse, stop]) as server, make_client(KEY, base_url=server.url) as client:
            with self.assertRaises(EgressLockedError) as caught:
                client.create(secrets=[GITHUB, GIT, GITHUB])
            self.assertEqual(len(server.requests), 4, "what comes after it is not tried")
            self.assertNotIn("s3cr3t", str(caught.exception))
        with Server([made, refuse, stop]) as server:
            with self.assertRaises(EgressLockedError):
                make_sandbox(api_key=KEY, base_url=server.url, secrets=[GITHUB])
            self.assertEqual(len(server.requests), 3)

    def test_a_lost_answer_ends_it_as_well(self) -> None:
        with Server([made, lambda r: r.cut(), stop]) as server, make_client(KEY, base_url=server.url) as client:
            with self.assertRaises(MainbrellaError):
                client.create(secrets=[GITHUB])
            self.assertEqual(len(server.requests), 3)

    def test_the_error_of_the_secret_wins_over_a_failed_stop(self) -> None:
        def refuse(r: Request) -> None:
            r.error(409, "egress_locked")

        def broken(r: Request) -> None:
            r.error(500, "internal")

        with Server([made, refuse, broken]) as server, make_client(KEY, base_url=server.url) as client:
            with self.assertRaises(EgressLockedError) as caught:
                client.create(secrets=[GITHUB])
            notes = getattr(caught.exception, "__notes__", None)
            if notes is not None:
                self.assertIn(f"stopping machine m-1@{CREATED_AT}", notes[0])

    def test_what_is_no_secret_makes_no_machine(self) -> None:
        with Server([made]) as server, make_client(KEY, base_url=server.url) as client:
            wrong: Any = [GITHUB.wire()]
            with self.assertRaises(ConfigurationError) as caught:
                client.create(secrets=wrong)
            self.assertNotIn("s3cr3t", str(caught.exception))
            self.assertEqual(server.requests, [])


class Cancelling(unittest.TestCase):
    def test_a_cancelled_create_ends_the_machine_it_has_made(self) -> None:
        asked, release = threading.Event(), threading.Event()

        def silent(r: Request) -> None:
            asked.set()
            release.wait(10)

        async def work(url: str) -> None:
            async with AsyncMainbrella(KEY, base_url=url) as client:
                task = asyncio.ensure_future(client.create(secrets=[GITHUB]))
                await asyncio.to_thread(asked.wait, 10)
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task

        with Server([made, silent, stop]) as server:
            asyncio.run(work(server.url))
            release.set()
            self.assertEqual(len(server.requests), 3)


if __name__ == "__main__":
    unittest.main()
