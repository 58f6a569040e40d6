"""Runs against a real service: set MAINBRELLA_API_URL and MAINBRELLA_API_KEY."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import re
import subprocess
import sys
import time
import unittest
import uuid
from collections.abc import Iterator
from pathlib import Path

from mainbrella import (
    AsyncMainbrella,
    ConflictError,
    GenerationMismatchError,
    GuestFileExistsError,
    GuestFileNotFoundError,
    IdempotencyConflictError,
    Mainbrella,
    SlotInUseError,
)

HERE = Path(__file__).parent


def samples() -> list[str]:
    """The code blocks of the product's Python page, in order, exactly as printed there."""
    return re.findall(r"^```python\n(.*?)^```", (HERE / "samples.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)


@unittest.skipUnless(os.environ.get("MAINBRELLA_API_URL"), "MAINBRELLA_API_URL is not set")
class Live(unittest.TestCase):
    client: Mainbrella

    @classmethod
    def setUpClass(cls) -> None:
        cls.client = Mainbrella(os.environ["MAINBRELLA_API_KEY"])

    @classmethod
    def tearDownClass(cls) -> None:
        cls.client.close()

    def test_the_first_sample_runs_as_printed(self) -> None:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", samples()[0]],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("'execution'", done.stdout)

    def test_a_session_from_create_to_stop(self) -> None:
        tag = uuid.uuid4().hex
        with self.client.create(metadata={"tag": tag}, ttl_seconds=600, env={"FROM_CREATE": "yes"}) as sandbox:
            run = sandbox.commands.run
            self.assertRegex(run("python --version").stdout, r"^Python 3\.")
            self.assertEqual(run("exit 7").exit_code, 7)
            self.assertEqual(run("kill -9 $$").signal, 9)
            self.assertEqual(run(["printf", "%s", "a b\n"]).stdout, "a b\n")
            self.assertEqual(run("cat", stdin=b"\xff\x00").stdout_bytes, b"\xff\x00")
            self.assertEqual(run("cat").stdout, "")
            self.assertEqual(run("printf $FROM_CREATE$X", env={"X": "é"}).stdout, "yesé")
            late = run("echo so far; sleep 60", timeout_ms=1000)
            self.assertEqual((late.timed_out, late.exit_code, late.stdout), (True, -1, "so far\n"))
            begin = time.monotonic()
            self.assertEqual(run("sleep 300 & echo hi").stdout, "hi\n")
            self.assertLess(time.monotonic() - begin, 30)
            cut = run("yes é | head -c 20000000", output_limit=1000)
            self.assertTrue(cut.truncated)
            self.assertEqual((len(cut.stdout_bytes), cut.stdout_total_bytes), (1000, 20_000_000))
            self.assertNotIn("\ufffd", cut.stdout)
            self.assertEqual([s.id for s in self.client.list(state="running", metadata={"tag": tag})], [sandbox.id])
            attached = self.client.connect(sandbox.id, sandbox.created_at)
            self.assertTrue(attached.commands.run("true").ok)
            longer = sandbox.extend(ttl_seconds=1200)
            self.assertGreater(longer.hard_deadline_ms, time.time() * 1000 + 1_000_000)
        after = self.client.get(sandbox.id, sandbox.created_at)
        self.assertEqual(after.state, "stopped")
        self.assertTrue(after.kill().stopped, "stopping again is harmless")
        with self.assertRaises(ConflictError):
            after.commands.run("true")

    def test_files_of_any_name_and_many_sizes(self) -> None:
        with self.client.create(ttl_seconds=600) as sandbox:
            for name in ('re"port', "a\nb", "x\\", "é", "n" * 255, "-rf", "a b&c=d?e#f%41+"):
                path = f"/tmp/odd/{name}"
                data = bytes(range(256))
                sandbox.files.write(path, data)
                self.assertEqual(sandbox.files.read(path), data)
            for size in (0, 1, 65_535, 65_536, 65_537, 3_000_001):
                data = os.urandom(size)
                self.assertEqual(sandbox.files.write("/tmp/sized", data, mode="0600"), size)
                self.assertEqual(sandbox.files.read("/tmp/sized"), data)
            self.assertEqual(sandbox.commands.run("stat -c %a /tmp/sized").stdout, "600\n")
            self.assertEqual(sandbox.files.read("/tmp/sized", offset=10, length=5), data[10:15])
            with self.assertRaises(GuestFileNotFoundError):
                sandbox.files.read("/tmp/none")
            with self.assertRaises(GuestFileExistsError):
                sandbox.files.write("/tmp/sized", b"", exclusive=True)
            self.assertEqual(sandbox.files.read("/tmp/sized"), data)

            digest = hashlib.sha256()

            def blocks() -> Iterator[bytes]:
                for n in range(64):
                    block = bytes([n]) * (1024 * 1024)
                    digest.update(block)
                    yield block

            sandbox.files.write("/tmp/big", blocks())
            target = io.BytesIO()
            self.assertEqual(sandbox.files.read_to("/tmp/big", target), 64 * 1024 * 1024)
            self.assertEqual(hashlib.sha256(target.getbuffer()).digest(), digest.digest())

    def test_the_asynchronous_client_has_the_same_session(self) -> None:
        async def session() -> None:
            async with AsyncMainbrella(os.environ["MAINBRELLA_API_KEY"]) as client:
                async with await client.create(ttl_seconds=600) as sandbox:
                    runs = await asyncio.gather(*(sandbox.commands.run(f"echo {n}; exit {n}") for n in range(8)))
                    self.assertEqual([(r.exit_code, r.stdout) for r in runs], [(n, f"{n}\n") for n in range(8)])
                    data = os.urandom(1_000_003)
                    await sandbox.files.write("/tmp/é", data)
                    self.assertEqual(await sandbox.files.read("/tmp/é"), data)
                    with self.assertRaises(GuestFileNotFoundError):
                        await sandbox.files.read("/tmp/none")
                self.assertEqual((await client.get(sandbox.id, sandbox.created_at)).state, "stopped")

        asyncio.run(session())

    def test_one_key_one_machine(self) -> None:
        key, slot = str(uuid.uuid4()), f"t-{uuid.uuid4().hex[:8]}"
        with self.client.create(slot=slot, ttl_seconds=300, idempotency_key=key) as sandbox:
            again = self.client.create_or_reconcile(slot=slot, ttl_seconds=300, idempotency_key=key)
            self.assertEqual((again.id, again.created_at), (sandbox.id, sandbox.created_at))
            with self.assertRaises(IdempotencyConflictError):
                self.client.create(slot=slot, ttl_seconds=301, idempotency_key=key)
            with self.assertRaises(SlotInUseError):
                self.client.create(slot=slot, ttl_seconds=300)
        with self.client.create(slot=slot, ttl_seconds=300) as newer:
            self.assertGreater(newer.created_at, sandbox.created_at)
            with self.assertRaises(GenerationMismatchError):
                sandbox.kill()  # the older generation is gone, and the newer one is not meant
            self.assertTrue(newer.commands.run("true").ok)


if __name__ == "__main__":
    unittest.main()
