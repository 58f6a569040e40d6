"""Code contexts and the short form on real machines."""

from __future__ import annotations

import asyncio
import os
import time
import unittest
from typing import Any

from mainbrella import AsyncSandbox, CodeEvent, CommandFailedError, ContextDeadError, Sandbox

from .common import OnOneMachine, live, run_sample, samples

PLOT = """
import matplotlib.pyplot as plt
plt.plot([1, 2, 3], [1, 4, 9])
plt.show()
"""


@live
class Contexts(OnOneMachine):
    def test_state_output_results_and_exceptions(self) -> None:
        with self.sandbox.create_code_context(cwd="/tmp", env={"FROM": "context"}) as ctx:
            self.assertEqual(ctx.run_code("import os, sys\nx = 41").exit_code, 0)
            r = ctx.run_code("print('é', os.environ['FROM'], os.getcwd())\nprint('oh', file=sys.stderr)\nx + 1")
            self.assertEqual((r.stdout, r.stderr, r.text), ("é context /tmp\n", "oh\n", "42"))
            r = ctx.run_code("print('before')\n{}['gone']")
            assert r.error is not None
            self.assertEqual(
                (r.exit_code, r.stdout, r.error.name, r.error.value), (1, "before\n", "KeyError", "'gone'")
            )
            self.assertIn("KeyError", "\n".join(r.error.traceback))
            r = ctx.run_code(
                "from IPython.display import HTML, JSON, display\ndisplay(HTML('<b>x</b>'))\nJSON({'a': [1]})"
            )
            self.assertEqual([o.type for o in r.results], ["display", "result"])
            self.assertEqual((r.results[0].html, r.results[1].json), ("<b>x</b>", {"a": [1]}))
            self.assertEqual(ctx.run_code("x").text, "41", "the state has lasted")

    def test_plots_are_pictures(self) -> None:
        with self.sandbox.create_code_context() as ctx:
            r = ctx.run_code(PLOT, timeout_seconds=120)
            pictures = [o.png for o in r.results if o.png is not None]
            self.assertEqual(len(pictures), 1, r)
            assert pictures[0] is not None
            self.assertTrue(pictures[0].startswith(b"\x89PNG\r\n\x1a\n") and len(pictures[0]) > 1000)

    def test_a_limit_interrupts_and_keeps_the_state(self) -> None:
        with self.sandbox.create_code_context() as ctx:
            ctx.run_code("y = 7")
            r = ctx.run_code("print('so far')\nimport time\ntime.sleep(60)", timeout_seconds=1.5)
            self.assertEqual((r.timed_out, r.exit_code, r.stdout), (True, -1, "so far\n"))
            self.assertEqual(ctx.run_code("y").text, "7")

    def test_a_caller_that_leaves_interrupts_the_code(self) -> None:
        with self.sandbox.create_code_context() as ctx:
            with ctx.stream_code("import time\nprint('begun', flush=True)\ntime.sleep(60)\nz = 1") as stream:
                self.assertEqual(next(stream).text.strip(), "begun")
            begin = time.monotonic()
            r = ctx.run_code("'z' in globals()", timeout_seconds=30)
            self.assertEqual(r.text, "False")
            self.assertLess(time.monotonic() - begin, 20)

    def test_what_code_does_can_be_followed(self) -> None:
        with self.sandbox.create_code_context() as ctx:
            seen: list[CodeEvent] = list(ctx.stream_code("for n in range(3): print(n, flush=True)\n'end'"))
            self.assertEqual("".join(e.text for e in seen if e.type == "stdout"), "0\n1\n2\n")
            self.assertEqual([e.output.text for e in seen if e.output is not None], ["'end'"])
            self.assertEqual((seen[-1].type, seen[-1].status), ("done", "ok"))

    def test_a_killed_interpreter_is_told_and_begun_anew(self) -> None:
        with self.sandbox.create_code_context() as ctx, self.sandbox.create_code_context() as other:
            other.run_code("w = 5")
            begin = time.monotonic()
            with self.assertRaises(ContextDeadError):
                ctx.run_code("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
            self.assertLess(time.monotonic() - begin, 10)
            self.assertEqual(ctx.inspect().state, "dead")
            with self.assertRaises(ContextDeadError):
                ctx.run_code("1")
            ctx.restart()
            self.assertEqual(ctx.run_code("1 + 1").text, "2")
            self.assertEqual(other.run_code("w").text, "5", "another context is not touched")
            self.assertLessEqual({ctx.id, other.id}, {c.id for c in self.sandbox.code_contexts()})


@live
class ShortForm(unittest.TestCase):
    def test_the_runtime_of_the_seed_runs_with_another_import(self) -> None:
        known = run_sample(samples("samples-runtime.md")[0].replace("from pandastack import", "from mainbrella import"))
        runtime: Any = known["MicroVMRuntime"](session_id="issue-4412", ttl_seconds=900)
        try:
            self.assertEqual(runtime.sbx.info.metadata, {"openhands_session": "issue-4412"})
            self.assertIsNone(runtime.sbx.info.idle_timeout_seconds)
            done = runtime.run_bash("echo out; echo oh >&2; exit 3")
            self.assertEqual(done, {"exit_code": 3, "stdout": "out\n", "stderr": "oh\n"})
            self.assertEqual(runtime.run_bash("yes | head -c 20000")["stdout"], "y\n" * 4000)
            self.assertEqual(runtime.run_python("df = [1, 2, 3]")["exit_code"], 0)
            self.assertEqual(runtime.run_python("print(sum(df))")["stdout"], "6\n")
            self.assertEqual(runtime.run_python("1 / 0")["exit_code"], 1)
            runtime.write_file("pkg/é.txt", "naïve\n")
            self.assertEqual(runtime.read_file("pkg/é.txt"), "naïve\n")
            self.assertEqual(runtime.run_bash("cat pkg/é.txt")["stdout"], "naïve\n")
        finally:
            runtime.close()
        self.assertEqual(runtime.sbx.inspect().state, "stopped")

    def test_checked_commands(self) -> None:
        with Sandbox.create(ttl_seconds=600) as sbx:
            with self.assertRaises(CommandFailedError) as caught:
                sbx.exec("echo why >&2; exit 4", check=True)
            assert caught.exception.result is not None
            self.assertEqual(caught.exception.result.exit_code, 4)
            self.assertIn("why", str(caught.exception))

    def test_the_asynchronous_short_form(self) -> None:
        async def session() -> None:
            async with await AsyncSandbox.create(ttl_seconds=600) as sbx:
                ctx = await sbx.create_code_context()
                self.assertEqual((await ctx.run_code("6 * 7")).text, "42")
                running = asyncio.create_task(ctx.run_code("v = 1\nimport time\ntime.sleep(60)\nv = 2"))
                await asyncio.sleep(3)
                running.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await running
                self.assertEqual((await ctx.run_code("v")).text, "1", "a cancelled task interrupts its code")
                await ctx.close()

        self.assertTrue(os.environ["MAINBRELLA_API_KEY"])
        asyncio.run(session())


if __name__ == "__main__":
    unittest.main()
