"""Templates, versions and builds, against a scripted service."""

from __future__ import annotations

import io
import tarfile
import tempfile
import unittest
from pathlib import Path
from typing import Any

from mainbrella import (
    BuildFailedError,
    BuildStateError,
    ConfigurationError,
    InvalidResponseError,
    NotFoundError,
    TemplateInUseError,
    TransportError,
)

from .both import both, make_client
from .scripted import Request, Server

KEY = "mb_00000000_secret"
ID = "0" * 32


def build(**changes: Any) -> dict[str, Any]:
    return {"id": ID, "name": "app", "state": "awaiting-context", "newer": 1, **changes}


def template(**changes: Any) -> dict[str, Any]:
    return {"name": "app:v1", "kind": "built", "tags": ["app"], "details": {"recipe": "FROM python\n"}, **changes}


def event(sequence: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"sequence": sequence, "atMs": 1, "kind": kind, **more}


def page(*events: dict[str, Any]) -> Any:
    def reply(r: Request) -> None:
        r.reply(200, {"events": list(events), "nextCursor": 0})

    return reply


def created(r: Request) -> None:
    r.reply(201, build())


def queued(r: Request) -> None:
    r.reply(202, build(state="queued"))


def shown(r: Request) -> None:
    r.reply(200, template())


def lost(r: Request) -> None:
    r.cut()


def cancelled(r: Request) -> None:
    r.reply(200, build(state="cancelled"))


STEP = event(1, "step", step=1, steps=1, line=2, text="RUN x", cached=False)
OUTPUT = event(2, "output", stream="stdout", text="hello")
DONE = event(3, "done", state="succeeded", template="app:v1")


class Told:
    def __init__(self, *handlers: Any) -> None:
        self.server = Server(list(handlers))
        self.client = make_client(KEY, base_url=self.server.url)

    def __enter__(self) -> tuple[Any, Server]:
        return self.client, self.server

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server.__exit__()


@both
class Templates(unittest.TestCase):
    def test_a_template_is_built_and_its_log_told(self) -> None:
        log: list[Any] = []
        with (
            tempfile.TemporaryDirectory() as folder,
            Told(created, queued, page(STEP, OUTPUT), page(), lost, page(DONE), shown) as (client, server),
        ):
            Path(folder, "Dockerfile").write_text("FROM python\n")
            Path(folder, "src").mkdir()
            Path(folder, "src", "app.py").write_text("print()\n")
            made = client.templates.build(
                "app", context=folder, arguments={"A": "1"}, tags=["stable"], size="micro", internet=False,
                timeout_seconds=60, no_cache=True, on_log=log.append,
            )  # fmt: skip
            self.assertEqual((made["name"], made["details"]["recipe"]), ("app:v1", "FROM python\n"))
            self.assertEqual(log, [STEP, OUTPUT, DONE])
            asked = server.requests[0]
            self.assertEqual((asked.method, asked.path), ("POST", "/v1/builds"))
            self.assertEqual(
                asked.json(),
                {"name": "app", "tags": ["stable"], "recipePath": "Dockerfile", "arguments": {"A": "1"},
                 "size": "micro", "noCache": True, "internet": False, "timeoutSeconds": 60},
            )  # fmt: skip
            sent = server.requests[1]
            self.assertEqual((sent.method, sent.path), ("PUT", f"/v1/builds/{ID}/context"))
            names = tarfile.open(fileobj=io.BytesIO(sent.body)).getnames()
            self.assertIn("./src/app.py", names)
            # After the connection was lost it goes on from what was told.
            self.assertEqual([r.query["cursor"] for r in server.requests[2:6]], ["0", "2", "2", "2"])
            self.assertEqual(server.requests[6].path, "/v1/templates/app:v1")

    def test_a_recipe_alone_needs_no_context(self) -> None:
        with Told(created, queued, page(event(1, "done", state="succeeded", template="app:v1")), shown) as (c, server):
            c.templates.build("app", recipe="FROM python\n")
            self.assertEqual(server.requests[1].body, b"\0" * 1024)
            for wrong in ({}, {"recipe": "x", "tags": "stable"}):
                with self.assertRaises(ConfigurationError):
                    c.templates.build("app", **wrong)

    def test_a_build_that_fails_says_where(self) -> None:
        failure = {"reason": "step", "message": "The command exited with code 3.", "line": 2, "instruction": "RUN x"}
        failed = event(1, "done", state="failed", failure=failure)
        with Told(created, queued, page(failed)) as (client, _), self.assertRaises(BuildFailedError) as caught:
            client.templates.build("app", recipe="FROM python\nRUN x\n")
        e = caught.exception
        self.assertEqual((e.build, e.reason, e.line, e.instruction), (ID, "step", 2, "RUN x"))
        self.assertIn("line 2: RUN x: The command exited with code 3.", str(e))
        done = page(event(1, "done", state="cancelled"))
        with Told(created, queued, done) as (client, _), self.assertRaises(BuildFailedError) as caught:
            client.templates.build("app", recipe="FROM python\n")
        self.assertEqual(caught.exception.reason, "cancelled")

    def test_a_build_that_nobody_waits_for_is_cancelled(self) -> None:
        def stop(_: Any) -> None:
            raise RuntimeError("enough")

        with Told(created, queued, page(STEP), cancelled) as (client, server):
            with self.assertRaises(RuntimeError):
                client.templates.build("app", recipe="FROM python\n", on_log=stop)
            self.assertEqual(server.requests[-1].path, f"/v1/builds/{ID}/cancel")
        with Told(created, lost, cancelled) as (client, server):
            with self.assertRaises(TransportError):
                client.templates.build("app", recipe="FROM python\n")
            self.assertEqual(server.requests[-1].path, f"/v1/builds/{ID}/cancel")
        with Told(created, queued, page(STEP, STEP), cancelled) as (client, _):
            with self.assertRaises(InvalidResponseError):
                client.templates.build("app", recipe="FROM python\n")

    def test_versions_are_listed_tagged_and_removed(self) -> None:
        def all_of_them(r: Request) -> None:
            r.reply(200, {"templates": [template()]})

        def in_use(r: Request) -> None:
            r.error(409, "template_in_use")

        def missing(r: Request) -> None:
            r.error(404, "template_not_found")

        def removed(r: Request) -> None:
            r.reply(200, {"versions": ["app:v1"], "tags": ["app"]})

        def made(r: Request) -> None:
            r.reply(201, template(kind="full"))

        with Told(all_of_them, all_of_them, shown, in_use, removed, missing, made) as (client, server):
            self.assertEqual(client.templates()[0]["name"], "app:v1")
            self.assertEqual(client.templates.list()[0]["tags"], ["app"])
            self.assertEqual(client.templates.tag("app:v1", "app:stable")["name"], "app:v1")
            asked = server.requests[2]
            self.assertEqual((asked.method, asked.path, asked.json()),
                             ("PUT", "/v1/templates/app:stable", {"source": "app:v1"}))  # fmt: skip
            with self.assertRaises(TemplateInUseError):
                client.templates.remove("app:v1")
            self.assertEqual(client.templates.remove("app", all=True)["versions"], ["app:v1"])
            self.assertEqual(server.requests[4].query, {"all": "true"})
            with self.assertRaises(NotFoundError):
                client.templates.get("app")
            self.assertEqual(client.templates.from_snapshot("warm", "s-1", tags=["x"])["kind"], "full")
            self.assertEqual(server.requests[6].json(), {"name": "warm", "snapshotId": "s-1", "tags": ["x"]})

    def test_builds_are_listed_and_cancelled(self) -> None:
        def listed(r: Request) -> None:
            r.reply(200, {"builds": [build()]})

        def over(r: Request) -> None:
            r.error(409, "build_state")

        with Told(listed, created, cancelled, over) as (client, server):
            self.assertEqual(client.builds.list()[0]["id"], ID)
            self.assertEqual(client.builds.get(ID)["state"], "awaiting-context")
            self.assertEqual(client.builds.cancel(ID)["state"], "cancelled")
            self.assertEqual(server.requests[2].method, "POST")
            with self.assertRaises(BuildStateError):
                client.builds.cancel(ID)
            for wrong in (client.builds.get, client.templates.get):
                with self.assertRaises(ConfigurationError):
                    wrong("")


if __name__ == "__main__":
    unittest.main()
