"""Directories, trees, watches and signed URLs on real machines."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from mainbrella import (
    AsyncMainbrella,
    FileOperationError,
    FileWatchEvent,
    GuestFileExistsError,
    GuestFileNotFoundError,
    PartlyRemovedError,
)

from .common import OnOneMachine, live, run_sample, samples


@live
class Trees(OnOneMachine):
    def test_the_sample_runs_as_printed(self) -> None:
        self.sandbox.files.write("/tmp/probe.bin", bytes([0, 128, 255]))
        known = run_sample(samples("samples-files.md")[0], sandbox=self.sandbox)
        self.assertIn("output", [e["name"] for e in known["page"]["entries"]])
        metadata = known["metadata"]
        self.assertEqual((metadata["type"], metadata["mode"], metadata["uid"]), ("directory", "0700", 0))
        with self.assertRaises(GuestFileNotFoundError):
            self.sandbox.files.stat("/workspace/output")
        with self.assertRaises(GuestFileNotFoundError):
            self.sandbox.files.stat("/tmp/probe.bin")

    def test_lists_are_sorted_by_bytes_and_paged(self) -> None:
        names = [f"n{i:03}" for i in range(120)] + ["Z", "a b", "é", "-rf", "x\ny"]
        for name in ("Z", "a b", "é", "-rf", "x\ny"):
            self.sandbox.files.write(f"/tmp/l/{name}", name)
        self.sandbox.commands.run(["sh", "-c", "cd /tmp/l && for i in $(seq -w 0 119); do : > n$i; done"])
        self.sandbox.commands.run(["python3", "-c", r"open(b'/tmp/l/\xff\xfe', 'w')"])
        seen: list[Any] = []
        offset: int | None = 0
        while offset is not None:
            page = self.sandbox.files.list("/tmp/l", limit=50, offset=offset)
            self.assertLessEqual(len(page["entries"]), 50)
            seen += page["entries"]
            offset = page["nextOffset"]
        *plain, odd = seen
        self.assertEqual([e["name"] for e in plain], sorted(names, key=lambda n: n.encode()))
        self.assertEqual((odd["name"], odd["nameBase64"]), ("\ufffd\ufffd", "//4="))
        self.assertEqual(next(e["size"] for e in plain if e["name"] == "é"), 2)

    def test_links_moves_and_modes(self) -> None:
        files = self.sandbox.files
        files.mkdir("/tmp/m/a", recursive=True)
        files.write("/tmp/m/a/f", b"abc", mode=0o600)
        self.sandbox.commands.run("ln -s a/f /tmp/m/link; ln -s nowhere /tmp/m/broken")
        self.assertEqual(files.stat("/tmp/m/link")["symlinkTarget"], "a/f")
        self.assertEqual(files.stat("/tmp/m/link", follow_symlinks=True)["type"], "file")
        with self.assertRaises(GuestFileNotFoundError):
            files.stat("/tmp/m/broken", follow_symlinks=True)
        self.assertEqual(files.chmod("/tmp/m/a/f", 0o640)["mode"], "0640")
        files.write("/tmp/m/g", b"other")
        with self.assertRaises(GuestFileExistsError):
            files.move("/tmp/m/a/f", "/tmp/m/g")
        self.assertEqual(files.read("/tmp/m/g"), b"other")
        self.assertEqual(files.move("/tmp/m/a", "/tmp/m/é")["path"], "/tmp/m/é")
        self.assertEqual(files.read("/tmp/m/é/f"), b"abc")
        self.assertEqual(files.remove("/tmp/m/link"), 1)
        with self.assertRaises(FileOperationError):
            files.remove("/tmp/m/é")
        self.assertEqual(files.remove("/tmp/m", recursive=True), 5)

    def test_a_removal_that_is_not_finished_says_what_is_left(self) -> None:
        self.sandbox.commands.run(
            "mkdir -p /tmp/r/a /tmp/r/mnt && touch /tmp/r/a/f && mount -t tmpfs t /tmp/r/mnt", timeout_ms=9000
        )
        try:
            with self.assertRaises(PartlyRemovedError) as caught:
                self.sandbox.files.remove("/tmp/r", recursive=True)
            self.assertEqual(caught.exception.removed, 2)
            self.assertIn("/tmp/r/mnt", caught.exception.remaining)
        finally:
            self.sandbox.commands.run("umount /tmp/r/mnt; rm -rf /tmp/r")

    def test_a_tree_goes_in_and_comes_out_the_same(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "in"), Path(folder, "out")
            (source / "sub" / "é").mkdir(parents=True)
            (source / "a").write_bytes(os.urandom(3_000_001))
            (source / "sub" / "é" / ("n" * 200)).write_bytes(b"x")
            (source / "tool").write_bytes(b"#!/bin/sh\necho it runs\n")
            (source / "tool").chmod(0o755)
            (source / "link").symlink_to("a")
            sent = self.sandbox.files.upload_tree(source, "/tmp/tree")
            self.assertEqual(sent.skipped, 0)
            self.assertEqual(
                self.sandbox.commands.run("/tmp/tree/tool; readlink /tmp/tree/link").stdout, "it runs\na\n"
            )
            self.sandbox.commands.run("cd /tmp/tree && ln -s /etc/passwd out && mkfifo pipe && ln a hard")
            got = self.sandbox.files.download_tree("/tmp/tree", target)
            self.assertEqual([name.removeprefix("./") for name in got.skipped], ["out"])
            for path in source.rglob("*"):
                copy = target / path.relative_to(source)
                self.assertEqual((copy.is_symlink(), copy.is_dir()), (path.is_symlink(), path.is_dir()))
                if path.is_file():
                    self.assertEqual(copy.read_bytes(), path.read_bytes())
            self.assertEqual(stat.S_IMODE((target / "tool").stat().st_mode), 0o755)
            self.assertEqual((target / "hard").read_bytes(), (source / "a").read_bytes())

    def test_changes_are_watched(self) -> None:
        self.sandbox.files.mkdir("/tmp/w/sub", recursive=True)
        with self.sandbox.files.watch("/tmp/w") as watch:
            self.sandbox.commands.run(
                "cd /tmp/w && echo 1 > sub/a && mv sub/a é && rm é && mkdir new && echo 2 > new/deep"
            )
            seen: list[FileWatchEvent] = []
            wanted = {("created", "/tmp/w/sub/a"), ("removed", "/tmp/w/é"), ("created", "/tmp/w/new")}
            stop = threading.Timer(30, watch.close)
            stop.start()
            while not (wanted <= {(e.type, e.path) for e in seen} and any(e.path == "/tmp/w/new/deep" for e in seen)):
                seen.append(next(watch))
            stop.cancel()
            moved = [e for e in seen if e.type == "renamed"]
            self.assertEqual([(e.path, e.new_path) for e in moved], [("/tmp/w/sub/a", "/tmp/w/é")])
        with self.assertRaises(GuestFileNotFoundError), self.sandbox.files.watch("/tmp/none"):
            pass

    def test_signed_urls_work_without_a_key_until_they_end(self) -> None:
        put = self.sandbox.files.signed_url("/tmp/signed é", method="PUT", max_bytes=100)
        get = self.sandbox.files.signed_url("/tmp/signed é", expires_in_seconds=10)

        def send(data: bytes) -> int:
            request = urllib.request.Request(put["url"], data=data, method="PUT")
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status)

        self.assertEqual(send(b"signed, sealed"), 200)
        with self.assertRaises(urllib.error.HTTPError) as caught:
            send(bytes(101))
        self.assertEqual(caught.exception.code, 413)
        caught.exception.close()
        with urllib.request.urlopen(get["url"], timeout=60) as answer:
            self.assertEqual(answer.read(), b"signed, sealed")
        time.sleep(11)
        with self.assertRaises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(get["url"], timeout=60)
        self.assertIn(caught.exception.code, (401, 403, 404))
        caught.exception.close()

    def test_the_asynchronous_client_moves_trees_too(self) -> None:
        async def session(folder: str) -> None:
            async with AsyncMainbrella(os.environ["MAINBRELLA_API_KEY"]) as client:
                sandbox = await client.connect(self.sandbox.id, self.sandbox.created_at)
                await sandbox.commands.run("mkdir -p /tmp/at && seq 100000 > /tmp/at/numbers")
                got = await sandbox.files.download_tree("/tmp/at", Path(folder, "out"))
                self.assertEqual(got.bytes, 588_895)
                await sandbox.files.upload_tree(Path(folder, "out"), "/tmp/at2")
                self.assertTrue((await sandbox.commands.run("cmp /tmp/at/numbers /tmp/at2/numbers")).ok)
                async with sandbox.files.watch("/tmp/at2") as watch:
                    await sandbox.files.write("/tmp/at2/x", b"x")
                    self.assertEqual((await anext(watch)).path.rsplit("/", 1)[0], "/tmp/at2")

        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(session(folder))


if __name__ == "__main__":
    unittest.main()
