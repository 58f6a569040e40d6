"""Directories, names, watches, trees and signed URLs."""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
import tempfile
import threading
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mainbrella import (
    ConfigurationError,
    FileWatchEvent,
    GuestFileExistsError,
    GuestFileNotFoundError,
    InvalidResponseError,
    MachineNotRunningError,
    MainbrellaError,
    PartlyRemovedError,
    TransportError,
    UnsafeArchiveError,
)

from .both import both
from .jobs_server import CHUNKED, chunk
from .scripted import CREATED_AT, Handler, Request
from .test_jobs import silence
from .test_use import Session


def entry(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "path": f"/w/{name}",
        "nameBase64": None,
        "type": "file",
        "size": 3,
        "mode": "0644",
        "uid": 0,
        "gid": 0,
        "mtime": 1_790_000_000,
        "symlinkTarget": None,
        **changes,
    }


@both
class Names(unittest.TestCase):
    def test_a_directory_is_read_page_by_page(self) -> None:
        odd = entry("\ufffd", nameBase64="/w==")

        def pages(r: Request) -> None:
            offset = int(r.query.get("offset", "0"))
            r.reply(
                200, {"entries": [entry("a"), odd] if offset == 0 else [], "nextOffset": 2 if offset == 0 else None}
            )

        with Session(pages) as (sandbox, server):
            page = sandbox.files.list("/w", limit=2)
            self.assertEqual([e["name"] for e in page["entries"]], ["a", "\ufffd"])
            self.assertEqual((page["entries"][1]["nameBase64"], page["nextOffset"]), ("/w==", 2))
            self.assertIsNone(sandbox.files.list("/w", offset=page["nextOffset"])["nextOffset"])
            self.assertEqual(server.requests[1].path, "/v1/machines/m-1/files/list")
            self.assertEqual(server.requests[1].query, {"createdAt": CREATED_AT, "path": "/w", "limit": "2"})
            self.assertEqual(server.requests[2].query, {"createdAt": CREATED_AT, "path": "/w", "offset": "2"})

    def test_verbs_send_what_was_asked(self) -> None:
        def handler(r: Request) -> None:
            r.reply(200, {"removed": 4, "remaining": [], "remainingCount": 0} if "remove" in r.path else entry("a"))

        with Session(handler) as (sandbox, server):
            files = sandbox.files
            self.assertEqual(files.stat("/w/a")["mode"], "0644")
            files.stat("/w/a", follow_symlinks=True)
            files.mkdir("/w/b", recursive=True, mode="0700")
            files.mkdir("/w/b")
            files.move("/w/a", "/w/é")
            files.chmod("/w/a", 0o640)
            self.assertEqual(files.remove("/w/a", recursive=True), 4)
            files.remove("/w/a")
            sent = [(r.method, r.path.rsplit("/", 1)[1], r.body and r.json()) for r in server.requests[3:]]
            self.assertEqual([r.query["followSymlinks"] for r in server.requests[1:3]], ["false", "true"])
            self.assertEqual(
                sent,
                [
                    ("POST", "mkdir", {"path": "/w/b", "recursive": True, "mode": "0700"}),
                    ("POST", "mkdir", {"path": "/w/b", "recursive": False}),
                    ("POST", "move", {"source": "/w/a", "destination": "/w/é"}),
                    ("POST", "chmod", {"path": "/w/a", "mode": "0640"}),
                    ("POST", "remove", {"path": "/w/a", "recursive": True}),
                    ("POST", "remove", {"path": "/w/a", "recursive": False}),
                ],
            )

    def test_changes_are_never_sent_twice_and_looks_are(self) -> None:
        changes: list[Callable[[Any], Any]] = [
            lambda f: f.mkdir("/w/b"),
            lambda f: f.move("/w/a", "/w/b"),
            lambda f: f.chmod("/w/a", 0o600),
            lambda f: f.remove("/w/a"),
            lambda f: f.signed_url("/w/a"),
            lambda f: f.upload_tree(b"", "/w"),
        ]
        for change in changes:
            with Session(lambda r: r.cut()) as (sandbox, server):
                with self.assertRaises(TransportError) as caught:
                    change(sandbox.files)
                self.assertTrue(caught.exception.ambiguous)
                self.assertEqual(len(server.requests), 2)
        with Session(lambda r: r.cut(), lambda r: r.reply(200, entry("a"))) as (sandbox, server):
            sandbox.files.stat("/w/a")
            self.assertEqual(len(server.requests), 3)

    def test_the_root_is_not_changed_and_bad_arguments_are_refused_here(self) -> None:
        bad: list[Callable[[Any], Any]] = [
            lambda f: f.remove("/", recursive=True),
            lambda f: f.remove("//"),
            lambda f: f.move("/", "/w"),
            lambda f: f.move("/w", "/"),
            lambda f: f.chmod("/", "0700"),
            lambda f: f.mkdir("/"),
            lambda f: f.mkdir("relative"),
            lambda f: f.chmod("/w", "rwx"),
            lambda f: f.signed_url("/w/a", method="DELETE"),
            lambda f: f.upload_tree("/no/such/folder", "/w"),
            lambda f: f.download_tree("/w", 7),
        ]
        with Session(lambda r: r.reply(200, entry("a"))) as (sandbox, server):
            for n, call in enumerate(bad):
                with self.subTest(n), self.assertRaises(ConfigurationError):
                    call(sandbox.files)
            self.assertEqual(len(server.requests), 1)

    def test_a_removal_that_was_not_finished_says_what_is_left(self) -> None:
        left = {"removed": 7, "remaining": ["/w/mnt", "/w/mnt/x"], "remainingCount": 150, "reason": "busy"}
        with Session(lambda r: r.reply(200, left)) as (sandbox, _):
            with self.assertRaises(PartlyRemovedError) as caught:
                sandbox.files.remove("/w", recursive=True)
            error = caught.exception
            self.assertEqual((error.removed, error.remaining_count, error.remaining), (7, 150, ("/w/mnt", "/w/mnt/x")))

    def test_errors_have_their_kinds(self) -> None:
        cases: list[tuple[int, str, type[MainbrellaError]]] = [
            (404, "file_not_found", GuestFileNotFoundError),
            (409, "file_exists", GuestFileExistsError),
        ]
        for status, code, kind in cases:
            with Session(lambda r, s=status, c=code: r.error(s, c)) as (sandbox, _):  # type: ignore[misc]
                with self.assertRaises(kind):
                    sandbox.files.move("/w/a", "/w/b")

    def test_signed_urls(self) -> None:
        link = {"url": "http://x/v1/files/t", "expiresAt": "2026-10-08T12:15:00.000Z", "method": "PUT"}
        with Session(lambda r: r.reply(201, link)) as (sandbox, server):
            made = sandbox.files.signed_url("/w/a", method="PUT", expires_in_seconds=60, max_bytes=10)
            self.assertEqual(made["url"], "http://x/v1/files/t")
            self.assertEqual(
                server.requests[1].json(), {"path": "/w/a", "method": "PUT", "expiresInSeconds": 60, "maxBytes": 10}
            )


def watched(*items: dict[str, Any]) -> bytes:
    return b"".join(f"event: {i['type']}\ndata: {json.dumps(i)}\n\n".encode() for i in items)


@both
class Watching(unittest.TestCase):
    def test_changes_are_told_until_the_end(self) -> None:
        def stream(r: Request) -> None:
            assert r.query == {"createdAt": CREATED_AT, "path": "/w", "recursive": "false"}, r.query
            r.raw(CHUNKED)
            for item in (
                {"type": "ready", "path": "/w"},
                {"type": "created", "path": "/w/é"},
                {"type": "renamed", "path": "/w/é", "newPath": "/w/b"},
                {"type": "overflow", "path": "/w"},
                {"type": "ended", "path": "/w"},
            ):
                r.raw(chunk(watched(item)))
            r.raw(b"0\r\n\r\n")

        with Session(stream) as (sandbox, server):
            seen = list(sandbox.files.watch("/w", recursive=False))
            self.assertEqual(
                seen,
                [
                    FileWatchEvent("created", "/w/é"),
                    FileWatchEvent("renamed", "/w/é", "/w/b"),
                    FileWatchEvent("overflow", "/w"),
                ],
            )
            self.assertEqual(len(server.requests), 2)

    def test_a_block_begins_when_watching_has_begun(self) -> None:
        begun = threading.Event()

        def slow(r: Request) -> None:
            r.raw(CHUNKED)
            time.sleep(0.3)
            begun.set()
            r.raw(chunk(watched({"type": "ready", "path": "/w"}, {"type": "created", "path": "/w/a"})))

        with Session(slow) as (sandbox, _):
            with sandbox.files.watch("/w") as watch:
                self.assertTrue(begun.is_set())
                self.assertEqual(next(watch).path, "/w/a")
            self.assertEqual(list(watch), [])

    def test_a_lost_connection_is_made_again_and_told(self) -> None:
        ready = {"type": "ready", "path": "/w"}

        def first(r: Request) -> None:
            r.raw(CHUNKED + chunk(watched(ready, {"type": "created", "path": "/w/a"})) + b"10\r\ndata")
            r.cut()

        def busy(r: Request) -> None:
            r.error(503, "overloaded")

        def second(r: Request) -> None:
            r.raw(CHUNKED + chunk(watched(ready, {"type": "removed", "path": "/w/a"}, {"type": "ended"})))

        with Session(first, busy, second) as (sandbox, _):
            seen = [e.type for e in sandbox.files.watch("/w")]
            self.assertEqual(seen, ["created", "overflow", "removed"])

        release = threading.Event()

        def stalled(r: Request) -> None:
            r.raw(CHUNKED + chunk(watched(ready, {"type": "created", "path": "/w/a"})))
            release.wait(10)

        with silence(0.3), Session(stalled, second) as (sandbox, _):
            self.assertEqual([e.type for e in sandbox.files.watch("/w")], ["created", "overflow", "removed"])
            release.set()

    def test_a_watch_that_failed_is_an_error_unless_it_passes(self) -> None:
        def failing(code: str) -> Handler:
            told = {"type": "error", "path": "/w", "code": code, "message": "No.", "hint": "Do."}
            return lambda r: r.raw(CHUNKED + chunk(watched({"type": "ready"}, told)))

        end = CHUNKED + chunk(watched({"type": "ready"}, {"type": "weather"}, {"type": "ended"}))
        with Session(failing("shutting_down"), lambda r: r.raw(end)) as (sandbox, _):
            self.assertEqual([e.type for e in sandbox.files.watch("/w")], ["overflow"])
        with Session(failing("machine_not_running")) as (sandbox, server):
            with self.assertRaises(MachineNotRunningError):
                list(sandbox.files.watch("/w"))
            self.assertEqual(len(server.requests), 2)

    def test_what_cannot_be_watched_is_said_at_once(self) -> None:
        with Session(lambda r: r.error(404, "file_not_found")) as (sandbox, server):
            with self.assertRaises(GuestFileNotFoundError):
                next(sandbox.files.watch("/w"))
            with self.assertRaises(GuestFileNotFoundError), sandbox.files.watch("/w"):
                pass
            self.assertEqual(len(server.requests), 3)


def tar(*members: tarfile.TarInfo, contents: bytes = b"abc") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for member in members:
            if member.isreg():
                member.size = len(contents)
                archive.addfile(member, io.BytesIO(contents))
            else:
                archive.addfile(member)
    return out.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.mtime = kind, link, mode, 1_700_000_000
    return info


@both
class Trees(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.here = Path(folder.name)

    def test_a_tree_goes_in_and_comes_out_the_same(self) -> None:
        source = self.here / "source"
        (source / "sub" / "é").mkdir(parents=True)
        (source / "empty").mkdir()
        (source / "a.txt").write_bytes(b"abc")
        (source / "sub" / "é" / ("n" * 200)).write_bytes(os.urandom(3_000_001))
        (source / "nothing").write_bytes(b"")
        (source / "tool").write_bytes(b"#!/bin/sh\n")
        (source / "tool").chmod(0o750)
        (source / "link").symlink_to("a.txt")
        os.mkfifo(source / "pipe")
        kept: list[bytes] = []

        def files(r: Request) -> None:
            assert r.path == "/v1/machines/m-1/files/tree"
            if r.method == "PUT":
                assert r.headers["content-type"] == "application/x-tar"
                kept.append(r.body)
                r.reply(200, {"entries": 8, "bytes": 3_000_014})
            else:
                assert r.headers["accept"] == "application/x-tar"
                r.reply(200, kept[0])

        with Session(files) as (sandbox, server):
            sent = sandbox.files.upload_tree(source, "/workspace")
            self.assertEqual((sent.entries, sent.bytes), (8, 3_000_014))
            self.assertTrue(server.requests[1].complete)
            names = tarfile.open(fileobj=io.BytesIO(kept[0])).getnames()  # noqa: SIM115
            self.assertEqual(names[:3], [".", "./a.txt", "./empty"])
            self.assertNotIn("./pipe", names)
            target = self.here / "made" / "target"
            got = sandbox.files.download_tree("/workspace", target)
            self.assertEqual((got.entries, got.bytes, got.skipped), (9, 3_000_014, ()))
            for path in (p for p in source.rglob("*") if p.name != "pipe"):
                copy = target / path.relative_to(source)
                self.assertEqual(copy.is_symlink(), path.is_symlink())
                if path.is_symlink():
                    self.assertEqual(os.readlink(copy), os.readlink(path))
                elif path.is_file():
                    self.assertEqual(copy.read_bytes(), path.read_bytes())
                    self.assertEqual(int(copy.stat().st_mtime), int(path.stat().st_mtime))
            self.assertEqual(stat.S_IMODE((target / "tool").stat().st_mode), 0o750)
            raw = io.BytesIO()
            sandbox.files.download_tree("/workspace", raw)
            self.assertEqual(raw.getvalue(), kept[0])
            sandbox.files.upload_tree(io.BytesIO(kept[0]), "/workspace")
            self.assertEqual(kept[1], kept[0])

    def test_nothing_a_machine_sends_leads_out_of_the_folder(self) -> None:
        outside = self.here / "outside"
        outside.mkdir()
        for bad in ("../outside/x", "a/../../outside/x"):
            target = self.here / "in"
            with self.subTest(bad), Session(lambda r, b=bad: r.reply(200, tar(member(b)))) as (sandbox, _):  # type: ignore[misc]
                with self.assertRaises(UnsafeArchiveError):
                    sandbox.files.download_tree("/w", target)
        hostile = tar(
            member("abs", tarfile.SYMTYPE, str(outside)),
            member("up", tarfile.SYMTYPE, "../outside"),
            member("up/x"),
            member("hard", tarfile.LNKTYPE, "../outside/x"),
            member("device", tarfile.CHRTYPE),
            member("pipe", tarfile.FIFOTYPE),
            member("inner", tarfile.SYMTYPE, "plain"),
            member("plain", mode=0o6755),
            member("/rooted"),
            member("closed", tarfile.DIRTYPE, mode=0),
            member("closed/x"),
        )
        target = self.here / "target"
        with Session(lambda r: r.reply(200, hostile)) as (sandbox, _):
            got = sandbox.files.download_tree("/w", target)
        self.assertEqual(list(outside.iterdir()), [])
        self.assertEqual(set(got.skipped), {"abs", "up", "hard", "device", "pipe"})
        self.assertEqual((target / "plain").read_bytes(), b"abc")
        self.assertEqual(stat.S_IMODE((target / "plain").stat().st_mode) & 0o7000, 0, "no set-user-id")
        self.assertEqual((target / "rooted").read_bytes(), b"abc")
        self.assertEqual((target / "closed" / "x").read_bytes(), b"abc")
        self.assertTrue((target / "up").is_dir() and not (target / "up").is_symlink())

    def test_a_tree_that_was_cut_is_an_error(self) -> None:
        whole = tar(member("a"), member("b"))

        def cut(r: Request) -> None:
            r.raw(CHUNKED + chunk(whole[:1024]))
            r.cut()

        def damaged(r: Request) -> None:
            r.reply(200, b"\xff" * 2048)

        for handler in (cut, damaged):
            with self.subTest(handler.__name__), Session(handler) as (sandbox, _):
                with self.assertRaises(InvalidResponseError):
                    sandbox.files.download_tree("/w", self.here / "t")

    def test_a_source_that_fails_leaves_an_incomplete_body(self) -> None:
        (self.here / "a").write_bytes(b"abc")

        class Odd:
            def read(self, size: int, /) -> bytes:
                raise OSError("gone")

        with Session(lambda r: r.reply(200, {"entries": 0, "bytes": 0})) as (sandbox, server):
            with self.assertRaisesRegex(OSError, "gone"):
                sandbox.files.upload_tree(Odd(), "/w")
            time.sleep(0.1)
            self.assertFalse(server.requests[1].complete)


if __name__ == "__main__":
    unittest.main()
