"""Saved workspaces against a real service: set MAINBRELLA_API_URL and MAINBRELLA_API_KEY."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import tempfile
import unittest
import uuid
from pathlib import Path
from typing import Any

from mainbrella import IdempotencyConflictError, Mainbrella, NotFoundError, SnapshotMismatchError

from .common import live, samples


def contents(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        names = [member.name for member in tar if member.isfile()]
        return {os.path.normpath(name): (tar.extractfile(name) or io.BytesIO()).read() for name in names}


@live
class Workspaces(unittest.TestCase):
    client: Mainbrella

    @classmethod
    def setUpClass(cls) -> None:
        cls.client = Mainbrella(os.environ["MAINBRELLA_API_KEY"])
        if not cls.client.capabilities()["persistence"]["snapshots"]:
            raise unittest.SkipTest("this host cannot save machines")

    @classmethod
    def tearDownClass(cls) -> None:
        cls.client.close()

    def test_the_sample_runs_as_it_is_printed(self) -> None:
        [sample] = samples("samples-workspaces.md")
        data = os.urandom(300_000)
        with self.client.create(ttl_seconds=900) as sandbox:
            sandbox.files.write("/workspace/deep/data.bin", data)
            scope: dict[str, Any] = {"client": self.client, "sandbox": sandbox}
            exec(compile(sample, "samples-workspaces.md", "exec"), scope)
            self.assertEqual(sandbox.inspect().state, "stopped")
            self.assertEqual(contents(scope["archive"])["deep/data.bin"], data)
            self.assertEqual(scope["restored"].inspect().state, "stopped")
            self.assertNotEqual(scope["restored"].id, sandbox.id)
            with self.assertRaises(NotFoundError):
                self.client.workspaces.get(scope["saved"]["id"])

    def test_a_key_stands_for_one_save_and_a_snapshot_for_any_number_of_machines(self) -> None:
        key = str(uuid.uuid4())
        with self.client.create(ttl_seconds=900, internet=False) as sandbox:
            sandbox.files.write("/workspace/a", b"saved")
            saved = sandbox.save_workspace("one", idempotency_key=key)
            try:
                self.assertEqual(sandbox.save_workspace("one", idempotency_key=key)["id"], saved["id"])
                with self.assertRaises(IdempotencyConflictError):
                    sandbox.save_workspace("two", idempotency_key=key)
                sandbox.files.write("/workspace/a", b"changed")
                self.assertIn(saved["id"], [s["id"] for s in self.client.workspaces.list(name="one")])
                self.assertTrue(self.client.workspaces.update(saved["id"], archived=True)["archived"])
                with self.assertRaises(SnapshotMismatchError):
                    self.client.workspaces.restore(saved["id"], internet=True)
                restore = self.client.workspaces.restore
                with restore(saved["id"]) as one, restore(saved["id"]) as two:
                    for back in (one, two):
                        self.assertEqual(back.files.read("/workspace/a"), b"saved")
                        self.assertFalse(back.info.internet)
                    one.files.write("/workspace/a", b"its own")
                    self.assertEqual(two.files.read("/workspace/a"), b"saved")
                    self.client.workspaces.delete(saved["id"])
                    self.assertEqual(two.files.read("/workspace/a"), b"saved")
            finally:
                if any(s["id"] == saved["id"] for s in self.client.workspaces.list()):
                    self.client.workspaces.delete(saved["id"])
            self.assertEqual(sandbox.files.read("/workspace/a"), b"changed")

    def test_files_of_a_snapshot_are_read_without_a_machine(self) -> None:
        data = os.urandom(300_000)
        with self.client.create(ttl_seconds=900, internet=False) as sandbox:
            sandbox.files.write("/workspace/deep/data.bin", data)
            sandbox.files.write("/workspace/text", "é")
            saved = sandbox.save_workspace("to read", stop=True)
        try:
            before = {machine.id for machine in self.client.list()}
            files = self.client.workspaces.files(saved["id"])
            self.assertEqual(files.read("/workspace/deep/data.bin"), data)
            self.assertEqual(files.read("/workspace/deep/data.bin", offset=5, length=7), data[5:12])
            self.assertEqual(files.read_text("/workspace/text"), "é")
            self.assertEqual([e["name"] for e in files.list("/workspace/deep")["entries"]], ["data.bin"])
            self.assertEqual(files.stat("/workspace/deep/data.bin")["size"], len(data))
            with tempfile.TemporaryDirectory() as folder:
                files.download_tree("/workspace/deep", folder)
                self.assertEqual(Path(folder, "data.bin").read_bytes(), data)
            self.assertEqual(contents(files.export_workspace())["deep/data.bin"], data)
            self.assertEqual({machine.id for machine in self.client.list()}, before)
        finally:
            self.client.workspaces.delete(saved["id"])
        with self.assertRaises(NotFoundError):
            self.client.workspaces.files(saved["id"]).list("/")

    def test_processes_come_back_from_a_full_snapshot(self) -> None:
        with self.client.create(ttl_seconds=900) as sandbox:
            job = sandbox.commands.start("i=0; while true; do i=$((i+1)); echo $i; sleep 0.2; done")
            saved = sandbox.save_snapshot("running", stop=True)
        try:
            with self.client.snapshots.restore(saved["id"]) as back:
                self.assertTrue(any(p.job_id == job.id for p in back.processes()))
                again = back.commands.attach(job.id)
                self.assertEqual(again.get().state, "running")
        finally:
            self.client.snapshots.delete(saved["id"])

    def test_an_archive_of_any_size_goes_out_and_in(self) -> None:
        with self.client.create(ttl_seconds=900) as sandbox, tempfile.TemporaryDirectory() as folder:
            sandbox.commands.run("dd if=/dev/urandom of=/workspace/big bs=1M count=20 2>/dev/null", timeout_ms=120_000)
            digest = sandbox.commands.run("sha256sum /workspace/big").stdout.split()[0]
            target = Path(folder, "w.tar.gz")
            self.assertGreater(sandbox.export_workspace_to(target), 16 * 1024 * 1024)
            sandbox.files.remove("/workspace/big")
            sandbox.import_workspace(target)
            self.assertEqual(sandbox.commands.run("sha256sum /workspace/big").stdout.split()[0], digest)
            with tarfile.open(target, "r:gz") as tar:
                member = next(m for m in tar if m.name.endswith("big"))
                content = tar.extractfile(member)
                assert content is not None
                self.assertEqual(hashlib.sha256(content.read()).hexdigest(), digest)
