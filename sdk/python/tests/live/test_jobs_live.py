"""Managed jobs on real machines."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
import unittest
from typing import cast

from mainbrella import (
    AsyncMainbrella,
    Execution,
    IdempotencyConflictError,
    InputClosedError,
    InputFullError,
    Job,
    JobEvent,
    JobStateError,
    JobStillRunningError,
    Mainbrella,
    NotFoundError,
    PayloadTooLargeError,
    RunResult,
)

from .common import BadNetwork, OnOneMachine, live, run_sample, samples


def text(events: list[JobEvent], stream: str = "stdout") -> str:
    return "".join(e.text for e in events if e.type == "output" and e.stream == stream)


@live
class Jobs(OnOneMachine):
    def test_the_sample_runs_as_printed(self) -> None:
        known = run_sample(samples("samples-jobs.md")[0], sandbox=self.sandbox)
        job, result, attached = cast("Job", known["job"]), cast("RunResult", known["result"]), known["attached"]
        self.assertEqual((result.exit_code, result.stdout, result.stderr), (0, "hello\n", ""))
        self.assertEqual(attached.id, job.id)
        self.assertIn(job.id, [e["id"] for e in known["executions"]])
        ended = known["terminal"].get()
        self.assertEqual((ended.ended, ended.exit.code, ended.pty), (True, 0, {"cols": 132, "rows": 40}))

    def test_events_are_complete_and_can_be_taken_up_anywhere(self) -> None:
        script = "for i in $(seq 40); do printf 'é€😀 %s\\n' $i; echo oh $i >&2; done; exit 3"
        job = self.sandbox.commands.start(script, env={"LC_ALL": "C.UTF-8"})
        events = list(job.events())
        self.assertEqual(text(events), "".join(f"é€😀 {i}\n" for i in range(1, 41)))
        self.assertEqual(text(events, "stderr"), "".join(f"oh {i}\n" for i in range(1, 41)))
        first, last = events[0], events[-1]
        assert first.type == "started" and last.type == "exit"
        self.assertEqual((last.exit_code, last.exit.cause, first.pid), (3, "exited", job.get().pid))
        self.assertEqual(list(job.events()), [])
        for begin in range(0, len(events), 7):
            again = Execution(self.sandbox, job.id, cursor=events[begin].cursor)
            self.assertEqual([e.cursor for e in again.events()], [e.cursor for e in events[begin + 1 :]])
        result = job.wait()
        self.assertEqual((result.exit_code, result.stdout), (3, text(events)))

    def test_a_bad_network_costs_time_and_nothing_else(self) -> None:
        script = "import sys\nfor n in range(200000): print('line', n)\nprint('done', file=sys.stderr)"
        expected = "".join(f"line {n}\n" for n in range(200_000)).encode()
        with BadNetwork(2_000, 300_000) as network:
            with Mainbrella(os.environ["MAINBRELLA_API_KEY"], base_url=network.url) as client:
                sandbox = client.connect(self.sandbox.id, self.sandbox.created_at)
                job = sandbox.commands.start(["python3", "-c", script])
                got, cursors = hashlib.sha256(), [0]
                for event in job.events():
                    self.assertGreater(event.cursor, cursors[-1])
                    cursors.append(event.cursor)
                    if event.type == "output" and event.stream == "stdout":
                        got.update(event.data)
                self.assertEqual(got.digest(), hashlib.sha256(expected).digest())
                self.assertGreater(network.cuts, 3)
        result = Execution(self.sandbox, job.id).wait(output_limit=1000)
        self.assertEqual((result.stdout_total_bytes, len(result.stdout_bytes)), (len(expected), 1000))
        self.assertEqual(result.stdout_bytes, expected[:500] + expected[-500:])

    def test_one_key_one_job(self) -> None:
        key = os.urandom(8).hex()
        job = self.sandbox.commands.start("echo once >> /tmp/once; sleep 1", idempotency_key=key)
        again = self.sandbox.commands.start("echo once >> /tmp/once; sleep 1", idempotency_key=key)
        self.assertEqual(again.id, job.id)
        with self.assertRaises(IdempotencyConflictError):
            self.sandbox.commands.start("echo other", idempotency_key=key)
        job.wait()
        self.assertEqual(self.sandbox.files.read("/tmp/once"), b"once\n")

    def test_two_kinds_of_late(self) -> None:
        job = self.sandbox.commands.start("echo so far; sleep 60", timeout_ms=1500)
        with self.assertRaises(JobStillRunningError):
            job.wait(timeout=0.2)
        result = job.wait()
        self.assertEqual((result.timed_out, result.cause, result.exit_code), (True, "timed_out", -1))
        self.assertEqual(result.stdout, "so far\n")
        late = self.sandbox.commands.run("echo so far; sleep 2; echo end", wait_ms=700)
        self.assertEqual((late.still_running, late.timed_out, late.stdout), (True, False, "so far\n"))
        assert late.job is not None
        self.assertEqual(late.job.wait(timeout=60).stdout, "so far\nend\n")

    def test_signals_and_cancels_reach_the_group(self) -> None:
        job = self.sandbox.commands.start("trap 'echo usr' USR1; echo ready; while :; do sleep 0.1; done")
        events = job.events()
        while not (text([next(events)])).startswith("ready"):
            pass
        job.signal("SIGUSR1")
        while not (text([next(events)])).startswith("usr"):
            pass
        job.cancel(grace_ms=300)
        last = list(events)[-1]
        assert last.type == "exit"
        self.assertEqual(last.exit.cause, "cancelled")
        self.assertTrue(job.cancel().ended, "and again, harmlessly")
        with self.assertRaises(JobStateError):
            job.signal("SIGTERM")
        ended = self.sandbox.commands.start("kill -9 $$").wait()
        self.assertEqual((ended.cause, ended.signal, ended.exit_code), ("signalled", 9, 137))

    def test_input_has_its_limits(self) -> None:
        job = self.sandbox.commands.start(["sleep", "30"], stdin=True)
        with self.assertRaises(PayloadTooLargeError):
            job.stdin.write(bytes(64 * 1024 + 1))
        accepted = 0
        with self.assertRaises(InputFullError):
            for _ in range(20):
                accepted = job.stdin.write(bytes(64 * 1024)).accepted_bytes
        self.assertGreaterEqual(accepted, 128 * 1024)
        self.assertEqual(job.get().stdin_accepted_bytes, accepted)
        job.cancel(grace_ms=0)
        job.wait()
        silent = self.sandbox.commands.start("cat; sleep 5")
        with self.assertRaises(InputClosedError):
            silent.stdin.write(b"x")
        silent.cancel(grace_ms=0)

    def test_a_terminal_hears_of_its_size(self) -> None:
        script = "stty -echo; trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.1; done"
        job = self.sandbox.commands.start(script, pty={"cols": 80, "rows": 24}, timeout_ms=20_000)
        events = job.events()
        seen = ""
        while "ready" not in seen:
            seen += text([next(events)])
        job.resize(101, 33)
        self.assertIn("33 101", text(list(events)))

    def test_processes_are_listed_and_killed(self) -> None:
        job = self.sandbox.commands.start(["sleep", "321"])
        found = [p for p in self.sandbox.processes() if p.argv == ["sleep", "321"]]
        self.assertEqual([(p.pid, p.job_id) for p in found], [(job.get().pid, job.id)])
        self.sandbox.kill_process(found[0].pid)
        self.assertEqual(job.wait(timeout=30).signal, 9)

    def test_a_job_that_is_forgotten_is_gone(self) -> None:
        job = self.sandbox.commands.start("true")
        job.wait()
        job.forget()
        with self.assertRaises(NotFoundError):
            self.sandbox.commands.attach(job.id)

    def test_the_asynchronous_client_follows_several_at_once(self) -> None:
        async def follow() -> list[str]:
            async with AsyncMainbrella(os.environ["MAINBRELLA_API_KEY"]) as client:
                sandbox = await client.connect(self.sandbox.id, self.sandbox.created_at)

                async def one(n: int) -> str:
                    job = await sandbox.commands.start(f"for i in 1 2 3; do echo {n}.$i; sleep 0.2; done")
                    out = ""
                    async for event in job.events():
                        out += event.text if event.type == "output" else ""
                    return out

                return await asyncio.gather(*(one(n) for n in range(6)))

        self.assertEqual(asyncio.run(follow()), [f"{n}.1\n{n}.2\n{n}.3\n" for n in range(6)])


@live
class LastWords(unittest.TestCase):
    def test_a_machine_that_stops_ends_its_jobs_and_keeps_what_they_said(self) -> None:
        with Mainbrella(os.environ["MAINBRELLA_API_KEY"]) as client:
            with client.create(ttl_seconds=600) as sandbox:
                job = sandbox.commands.start("echo last words; sleep 600")
                events = job.events()
                seen: list[JobEvent] = []
                while "last words" not in text(seen):
                    seen.append(next(events))
            begin = time.monotonic()
            seen += list(events)
            self.assertLess(time.monotonic() - begin, 5)
            last = seen[-1]
            assert last.type == "exit"
            self.assertEqual(last.exit.cause, "machine_stopped")
            self.assertEqual(Execution(sandbox, job.id).wait().stdout, "last words\n")


if __name__ == "__main__":
    unittest.main()
