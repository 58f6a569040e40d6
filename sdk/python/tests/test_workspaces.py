"""Saved workspaces, snapshots, and workspaces as archives, against a scripted service."""

from __future__ import annotations

import io
import os
import pickle
import tempfile
import unittest
from pathlib import Path
from typing import Any

from mainbrella import (
    ConfigurationError,
    IdempotencyConflictError,
    InvalidResponseError,
    MainbrellaError,
    PayloadTooLargeError,
    SnapshotDamagedError,
    SnapshotLimitError,
    SnapshotMismatchError,
    TransportError,
)

from .both import both
from .jobs_server import CHUNKED, chunk
from .scripted import CREATED_AT, Request, machine
from .test_use import Session

ID = "s-0123456789abcdef0123456789abcdef"


def snapshot(**changes: Any) -> dict[str, Any]:
    return {
        "id": ID,
        "name": "Project files",
        "kind": "workspace",
        "source": f"m-1@{CREATED_AT}",
        "catalogId": "python",
        "templateDigest": "sha256:1",
        "size": "small",
        "internet": False,
        "egress": {"policy": "off"},
        "bytes": 4096,
        "createdAtMs": 5,
        "expiresAtMs": None,
        "archived": False,
        "newer": 1,
        **changes,
    }


def lost(r: Request) -> None:
    r.cut()


@both
class Snapshots(unittest.TestCase):
    def test_a_workspace_is_saved_and_a_machine_started_from_it(self) -> None:
        def saved(r: Request) -> None:
            r.reply(201, snapshot(stopOutcome="stopped"))

        def restored(r: Request) -> None:
            r.reply(201, machine(id="m-2"))

        session = Session(saved, saved, restored, restored, restored)
        with session as (sandbox, server):
            made = sandbox.save_workspace("Project files", stop=True, idempotency_key="mine")
            self.assertEqual((made["id"], made["bytes"], made["stopOutcome"]), (ID, 4096, "stopped"))
            asked = server.requests[1]
            self.assertEqual((asked.method, asked.path), ("POST", "/v1/machines/m-1/snapshots"))
            self.assertEqual(asked.query, {"createdAt": CREATED_AT})
            self.assertEqual(asked.json(), {"name": "Project files", "kind": "workspace", "stop": True})
            self.assertEqual(asked.headers["idempotency-key"], "mine")
            sandbox.save_snapshot("All of it", ttl_seconds=60)
            asked = server.requests[2]
            self.assertEqual(asked.json(), {"name": "All of it", "kind": "full", "stop": False, "ttlSeconds": 60})
            self.assertTrue(asked.headers["idempotency-key"])
            back = session.client.workspaces.restore(ID, idempotency_key="other")
            self.assertEqual((back.id, back.state), ("m-2", "running"))
            asked = server.requests[3]
            self.assertEqual((asked.path, asked.headers["idempotency-key"]), (f"/v1/snapshots/{ID}/restore", "other"))
            self.assertEqual(asked.json(), {"ttlSeconds": 3600, "persistent": False})
            session.client.snapshots.restore(
                ID, size="small", egress=["a.example"], env={"A": "1"}, metadata={"b": "c"}, template_digest="d"
            )
            body = server.requests[4].json()
            self.assertEqual(body["egress"], {"policy": "allow-list", "rules": ["a.example"]})
            self.assertEqual((body["env"], body["metadata"], body["templateDigest"]), ({"A": "1"}, {"b": "c"}, "d"))
            session.client.workspaces.restore(ID, on_idle="pause", idle_timeout_seconds=60, auto_resume=False)
            body = server.requests[5].json()
            self.assertEqual((body["onIdle"], body["idleTimeoutSeconds"], body["autoResume"]), ("pause", 60, False))
            with self.assertRaises(ConfigurationError):
                session.client.workspaces.restore(ID, on_idle="sleep")

    def test_they_are_listed_page_by_page_changed_and_deleted(self) -> None:
        def page(cursor: str | None) -> Any:
            return lambda r: r.reply(200, {"snapshots": [snapshot()], "nextCursor": cursor})

        def changed(r: Request) -> None:
            r.reply(200, snapshot(name="Other", archived=True))

        def gone(r: Request) -> None:
            r.reply(204)

        session = Session(page("n1"), page(None), page(None), changed, changed, gone)
        with session as (_, server):
            found = session.client.workspaces.list(archived=False)
            self.assertEqual([s["id"] for s in found], [ID, ID])
            self.assertEqual(server.requests[1].query, {"kind": "workspace", "archived": "false", "limit": "1000"})
            self.assertEqual(server.requests[2].query["cursor"], "n1")
            session.client.snapshots.list(name="a&b")
            self.assertEqual(server.requests[3].query, {"name": "a&b", "limit": "1000"})
            self.assertEqual(session.client.workspaces.get(ID)["name"], "Other")
            self.assertTrue(session.client.workspaces.update(ID, name="Other", archived=True)["archived"])
            asked = server.requests[5]
            self.assertEqual((asked.method, asked.path), ("PATCH", f"/v1/snapshots/{ID}"))
            self.assertEqual(asked.json(), {"name": "Other", "archived": True})
            self.assertIsNone(session.client.workspaces.delete(ID))
            self.assertEqual((server.requests[6].method, server.requests[6].path), ("DELETE", f"/v1/snapshots/{ID}"))
            with self.assertRaises(ConfigurationError):
                session.client.workspaces.update(ID)
            with self.assertRaises(ConfigurationError):
                session.client.workspaces.restore("")
            self.assertEqual(len(server.requests), 7)

    def test_a_lost_answer_is_asked_for_again_under_the_same_key_and_a_doubt_carries_it(self) -> None:
        with Session(lost, lambda r: r.reply(200, snapshot())) as (sandbox, server):
            self.assertEqual(sandbox.save_workspace("n")["id"], ID)
            first, second = server.requests[1:]
            self.assertEqual(first.headers["idempotency-key"], second.headers["idempotency-key"])
            self.assertEqual(first.json(), second.json())
        session = Session(lost)
        with session as (sandbox, server):
            for call in (lambda: sandbox.save_workspace("n"), lambda: session.client.workspaces.restore(ID)):
                before = len(server.requests)
                with self.assertRaises(TransportError) as caught:
                    call()
                self.assertTrue(caught.exception.ambiguous)
                keys = {r.headers["idempotency-key"] for r in server.requests[before:]}
                self.assertEqual(keys, {caught.exception.idempotency_key})

    def test_refusals_are_told_apart(self) -> None:
        for code, kind in (
            ("snapshot_limit", SnapshotLimitError),
            ("snapshot_mismatch", SnapshotMismatchError),
            ("snapshot_damaged", SnapshotDamagedError),
            ("idempotency_conflict", IdempotencyConflictError),
        ):
            session = Session(lambda r, code=code: r.error(409, code))
            with session as (_, server):
                with self.assertRaises(kind) as caught:
                    session.client.workspaces.restore(ID)
                error = caught.exception
                self.assertEqual((error.code, error.ambiguous, len(server.requests)), (code, False, 2))
                again = pickle.loads(pickle.dumps(error))
                self.assertIs(type(again), kind)

    def test_an_answer_that_is_none_is_an_error(self) -> None:
        session = Session(lambda r: r.reply(200, {"snapshots": [{"id": ID}], "nextCursor": None}))
        with session as _:
            with self.assertRaises(InvalidResponseError):
                session.client.workspaces.list()


@both
class ReadWithoutAMachine(unittest.TestCase):
    def test_files_are_read_where_the_snapshot_is(self) -> None:
        entry = {"name": "a", "path": "/w/a", "type": "file", "size": 3, "mode": "0644", "uid": 0, "gid": 0, "mtime": 1}

        def content(r: Request) -> None:
            r.raw(CHUNKED + chunk(b"one") + b"0\r\n\r\n")

        answers = [
            content,
            content,
            lambda r: r.reply(200, {"entries": [entry], "nextOffset": None}),
            lambda r: r.reply(200, entry),
            content,
            content,
            lambda r: r.error(409, "snapshot_damaged"),
        ]
        session = Session(*answers)
        with session as (_, server), tempfile.TemporaryDirectory() as folder:
            files = session.client.workspaces.files(ID)
            self.assertEqual(files.read("/w/a", offset=1, length=2), b"one")
            self.assertEqual(files.read_text("/w/a"), "one")
            self.assertEqual([e["name"] for e in files.list("/w", limit=5)["entries"]], ["a"])
            self.assertEqual(files.stat("/w/a", follow_symlinks=True)["size"], 3)
            target = Path(folder, "t.tar")
            with target.open("wb") as file:
                self.assertEqual(files.download_tree("/w", file).bytes, 3)
            self.assertEqual(files.export_workspace(), b"one")
            with self.assertRaises(SnapshotDamagedError):
                session.client.snapshots.files(ID).read("/w/a")
            asked = [(r.method, r.path, r.query) for r in server.requests[1:7]]
            at = f"/v1/snapshots/{ID}"
            self.assertEqual(
                asked,
                [
                    ("GET", at + "/files/content", {"path": "/w/a", "offset": "1", "length": "2"}),
                    ("GET", at + "/files/content", {"path": "/w/a"}),
                    ("GET", at + "/files/list", {"path": "/w", "limit": "5"}),
                    ("GET", at + "/files/stat", {"path": "/w/a", "followSymlinks": "true"}),
                    ("GET", at + "/files/tree", {"path": "/w"}),
                    ("GET", at + "/workspace", {}),
                ],
            )
            self.assertFalse(hasattr(files, "write") or hasattr(files, "remove"))
            before = len(server.requests)
            for wrong in (lambda: files.read("relative"), lambda: session.client.workspaces.files("")):
                with self.assertRaises(ConfigurationError):
                    wrong()
            self.assertEqual(len(server.requests), before)


@both
class Archives(unittest.TestCase):
    def test_a_small_one_fits_into_memory_and_any_into_a_file(self) -> None:
        def archive(r: Request) -> None:
            r.raw(CHUNKED + chunk(b"one") + chunk(b"two") + b"0\r\n\r\n")

        with Session(archive) as (sandbox, server), tempfile.TemporaryDirectory() as folder:
            self.assertEqual(sandbox.export_workspace(), b"onetwo")
            asked = server.requests[1]
            self.assertEqual((asked.method, asked.path), ("GET", "/v1/machines/m-1/workspace"))
            self.assertEqual(asked.query, {"createdAt": CREATED_AT})
            target = Path(folder, "w.tar.gz")
            self.assertEqual(sandbox.export_workspace_to(target), 6)
            self.assertEqual(target.read_bytes(), b"onetwo")
            memory = io.BytesIO()
            self.assertEqual(sandbox.export_workspace_to(memory), 6)
            self.assertEqual(memory.getvalue(), b"onetwo")
            self.assertEqual(os.listdir(folder), ["w.tar.gz"])

    def test_one_of_exactly_sixteen_mebibytes_fits_and_a_byte_more_names_the_other_way(self) -> None:
        whole = bytes(16 * 1024 * 1024)

        def archive(data: bytes) -> Any:
            return lambda r: r.raw(CHUNKED + chunk(data) + b"0\r\n\r\n")

        with Session(archive(whole)) as (sandbox, _):
            self.assertEqual(len(sandbox.export_workspace()), len(whole))
        with Session(archive(whole + b"x")) as (sandbox, _):
            with self.assertRaises(PayloadTooLargeError) as caught:
                sandbox.export_workspace()
            self.assertIn("export_workspace_to", caught.exception.hint)

    def test_what_breaks_off_is_no_archive_and_leaves_what_was_there(self) -> None:
        def cut(r: Request) -> None:
            r.raw(CHUNKED + chunk(b"one"))
            r.cut()

        with Session(cut) as (sandbox, _), tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "w.tar.gz")
            target.write_bytes(b"before")
            for call in (sandbox.export_workspace, lambda: sandbox.export_workspace_to(target)):
                with self.assertRaises(MainbrellaError):
                    call()
            self.assertEqual((os.listdir(folder), target.read_bytes()), (["w.tar.gz"], b"before"))

    def test_archives_and_folders_go_in(self) -> None:
        def unpacked(r: Request) -> None:
            r.reply(200, {"entries": 2, "bytes": 3, "skipped": 1})

        with Session(unpacked) as (sandbox, server), tempfile.TemporaryDirectory() as folder:
            done = sandbox.import_workspace(b"packed")
            self.assertEqual((done.entries, done.bytes, done.skipped), (2, 3, 1))
            asked = server.requests[1]
            self.assertEqual((asked.method, asked.path, asked.body), ("PUT", "/v1/machines/m-1/workspace", b"packed"))
            path = Path(folder, "a")
            path.write_bytes(b"from a file")
            sandbox.import_workspace(path)
            self.assertEqual(server.requests[2].body, b"from a file")
            sandbox.import_workspace(folder)
            self.assertIn(b"ustar", server.requests[3].body)
            self.assertIn(b"from a file", server.requests[3].body)
            with self.assertRaises(OSError):
                sandbox.import_workspace(Path(folder, "missing"))
            self.assertEqual(len(server.requests), 4)
