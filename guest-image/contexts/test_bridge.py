"""The bridge of code contexts against real kernels. Needs Debian's python3-ipykernel, -jupyter-client and -matplotlib."""

import base64
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import bridge  # noqa: E402

PATIENCE = 60.0


class Bridge:
    """A bridge, started as the engine starts it."""

    def __init__(self, cwd="/", prelude=""):
        with open(os.path.join(HERE, "loader.py"), encoding="utf-8") as file:
            loader = file.read()
        with open(os.path.join(HERE, "bridge.py"), "rb") as file:
            text = prelude.encode() + file.read()
        self.process = subprocess.Popen(
            [sys.executable, "-c", loader, str(len(text))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=cwd
        )
        self.lines = queue.Queue()
        threading.Thread(target=self.listen, daemon=True).start()
        self.seq = 0
        self.raw(text)

    def listen(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def raw(self, data):
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def order(self, do, **fields):
        self.seq += 1
        self.raw(json.dumps({"seq": self.seq, "do": do, **fields}).encode() + b"\n")
        return self.seq

    def next(self, patience=PATIENCE):
        line = self.lines.get(timeout=patience)
        return None if line is None else json.loads(line)

    def until(self, ev, **fields):
        """The next event of this kind with these fields, and what came before it."""
        before = []
        while True:
            event = self.next()
            if event is None:
                raise AssertionError(f"the bridge ended before {ev}: {before[-3:]}")
            if event["ev"] == ev and all(event.get(name) == value for name, value in fields.items()):
                return event, before
            before.append(event)

    def hello(self):
        nonce = os.urandom(4).hex()
        self.raw(json.dumps({"do": "hello", "nonce": nonce}).encode() + b"\n")
        return self.until("hello", nonce=nonce)[0]

    def call(self, do, **fields):
        return self.until("reply", seq=self.order(do, **fields))[0].get("error")

    def start(self, name, **fields):
        error = self.call("start", **{"id": name, "createdMs": 1, "env": {}, **fields})
        if error:
            raise AssertionError(error)

    def begin(self, name, code, timeout=PATIENCE):
        cell = f"cell-{self.seq}"
        self.order("run", id=name, cell=cell, code=code, timeoutMs=int(timeout * 1000))
        return cell

    def finish(self, cell):
        done, before = self.until("done", cell=cell)
        return Outcome(done, [e for e in before if e.get("cell") == cell])

    def run(self, name, code, timeout=PATIENCE):
        return self.finish(self.begin(name, code, timeout))

    def close(self):
        self.process.stdin.close()
        self.process.wait(PATIENCE)
        self.process.stdout.close()


class Outcome:
    """What a cell did."""

    def __init__(self, done, events):
        self.done, self.events = done, events
        self.status, self.truncated = done["status"], done["truncated"]

    def text(self, name):
        return "".join(e["text"] for e in self.events if e["ev"] == name)

    @property
    def stdout(self):
        return self.text("stdout")

    @property
    def value(self):
        return next((e["data"]["text/plain"] for e in self.events if e["ev"] == "result"), None)

    @property
    def error(self):
        return next((e for e in self.events if e["ev"] == "error"), None)

    def displayed(self):
        return [e["data"] for e in self.events if e["ev"] == "display"]


def processes_of(text):
    """Processes whose command line has this in it."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if text.encode() in file.read():
                    found.append(int(pid))
        except OSError:
            continue
    return found


class Streams(unittest.TestCase):
    def test_a_flood_of_small_pieces_is_a_flood(self):
        stream, said = bridge.Stream(), []
        for n in range(100_000):
            now = stream.take(f"{n}\n")
            if now:
                said.append(now)
        gap, tail = stream.end()
        self.assertLessEqual(len(said), bridge.HEAD_BYTES // bridge.EVENT_COST)
        whole = "".join(f"{n}\n" for n in range(100_000))
        head = "".join(said)
        self.assertEqual(head, whole[: len(head)])
        self.assertTrue(whole.endswith(tail))
        self.assertEqual(gap, (len(head), len(whole) - len(head) - len(tail)) if gap else None)

    def test_whatever_the_pieces_nothing_is_lost_that_is_not_said(self):
        for size in (1, 7, 1000, 40_000, 600_000, 3_000_000):
            stream, head = bridge.Stream(), ""
            whole = "\u20acx" * 1_000_000
            for at in range(0, len(whole), size):
                head += stream.take(whole[at : at + size])
                if len(head) * 4 > 4 * bridge.HEAD_BYTES and size < 1000:
                    break
            gap, tail = stream.end()
            self.assertLessEqual(len(head.encode()) + len(tail.encode()), bridge.HEAD_BYTES + bridge.TAIL_BYTES)
            self.assertEqual(whole[: len(head)], head)
            self.assertEqual(len(head.encode()) + len(tail.encode()) + (gap[1] if gap else 0), stream.total)


class Contexts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.bridge = Bridge()
        cls.bridge.hello()
        cls.bridge.start("a")

    @classmethod
    def tearDownClass(cls):
        cls.bridge.close()

    def run_code(self, code, timeout=PATIENCE):
        return self.bridge.run("a", code, timeout)

    def test_state_survives_and_output_comes_apart(self):
        first = self.run_code("import sys\nx = 20\nprint('out')\nprint('err', file=sys.stderr)\nx + 1")
        self.assertEqual((first.status, first.stdout, first.text("stderr"), first.value), ("ok", "out\n", "err\n", "21"))
        self.assertEqual(self.run_code("x").value, "20")

    def test_a_run_right_after_a_failed_one_is_run(self):
        for n in range(25):
            failed = self.run_code(f"raise KeyError({n})")
            self.assertEqual((failed.error or {}).get("value"), str(n))
            self.assertEqual(self.run_code(f"{n} + 1").value, str(n + 1))

    def test_an_exception_has_its_traceback_without_colours(self):
        failed = self.run_code("def f():\n    return 1 / 0\nprint('before')\nf()")
        self.assertEqual((failed.status, failed.stdout, failed.error["name"]), ("error", "before\n", "ZeroDivisionError"))
        self.assertIn("return 1 / 0", "\n".join(failed.error["traceback"]))
        self.assertNotIn("\x1b", json.dumps(failed.error))
        self.assertEqual(self.run_code("1 +").error["name"], "SyntaxError")
        self.assertEqual(self.run_code("raise SystemExit(3)").error["name"], "SystemExit")
        self.assertEqual(self.run_code("input()").status, "error")
        deep = self.run_code("def g(n): return g(n + 1)\ng(0)")
        self.assertEqual(deep.error["name"], "RecursionError")
        long = self.run_code("raise ValueError('x' * 1_000_000)")
        self.assertLessEqual(len(long.error["value"]), 16 * 1024)

    def test_odd_text_is_carried(self):
        odd = self.run_code("print('h\u00e9 \u2028 \\x00 \U0001f600')")
        self.assertEqual(odd.stdout, "h\u00e9 \u2028 \x00 \U0001f600\n")

    def test_rich_results_come_by_type(self):
        rich = self.run_code(
            "from IPython.display import display, HTML, JSON\ndisplay(HTML('<b>x</b>'))\nJSON({'a': [1]})"
        )
        self.assertEqual(rich.displayed()[0]["text/html"], "<b>x</b>")
        self.assertEqual([e["data"]["application/json"] for e in rich.events if e["ev"] == "result"], [{"a": [1]}])

    def test_a_plot_is_a_picture(self):
        plot = self.run_code("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()")
        picture = base64.b64decode(plot.displayed()[0]["image/png"])
        self.assertTrue(picture.startswith(b"\x89PNG"))

    def test_floods_are_cut_and_say_so(self):
        flood = self.run_code("print('begin'); print('x' * 20_000_000); print('end')")
        gap = next(e for e in flood.events if e["ev"] == "gap")
        self.assertTrue(flood.truncated)
        self.assertEqual(len(flood.stdout) + gap["length"], 20_000_011)
        self.assertLessEqual(len(flood.stdout), 1024 * 1024)
        self.assertTrue(flood.stdout.startswith("begin\nxx") and flood.stdout.endswith("xx\nend\n"))
        many = self.run_code("for n in range(400): display({'text/html': str(n)}, raw=True)")
        self.assertEqual((len(many.displayed()), many.truncated), (256, True))
        large = self.run_code("display({'image/png': 'A' * 5_000_000, 'text/plain': 'p' * 100_000}, raw=True)")
        self.assertEqual((list(large.displayed()[0]), large.truncated), (["text/plain"], True))
        total = self.run_code("for n in range(4): display({'image/png': 'A' * 3_000_000}, raw=True)")
        self.assertEqual((len(total.displayed()), total.truncated), (2, True))

    def test_the_end_of_multibyte_text_is_not_cut_in_a_letter(self):
        flood = self.run_code("print('\u20ac' * 3_000_000, end='')")
        gap = next(e for e in flood.events if e["ev"] == "gap")
        self.assertEqual(set(flood.stdout), {"\u20ac"})
        self.assertEqual(len(flood.stdout.encode()) + gap["length"], 9_000_000)

    def test_a_time_limit_interrupts(self):
        begin = time.monotonic()
        slow = self.run_code("import time\nprint('begun', flush=True)\ntime.sleep(60)", 1.0)
        self.assertEqual((slow.status, slow.stdout), ("timed_out", "begun\n"))
        self.assertLess(time.monotonic() - begin, 5)
        self.assertEqual(self.run_code("1").value, "1")

    def test_an_interrupt_reaches_code_and_what_it_started(self):
        cell = self.bridge.begin("a", "import subprocess\nprint('begun', flush=True)\nsubprocess.run(['sleep', '7777'])")
        self.bridge.until("stdout", cell=cell)
        self.assertIsNone(self.bridge.call("interrupt", id="a", cell="another"), "only the one that is meant")
        self.assertIsNone(self.bridge.call("interrupt", id="a", cell=cell))
        self.assertEqual(self.bridge.finish(cell).status, "interrupted")
        time.sleep(0.2)
        self.assertEqual(processes_of("sleep\x007777"), [])
        # One that comes before the code has begun is not lost.
        for _ in range(10):
            cell = self.bridge.begin("a", "import time\ntime.sleep(60)")
            self.bridge.order("interrupt", id="a", cell=cell)
            self.assertEqual(self.bridge.finish(cell).status, "interrupted")

    def test_one_cell_at_a_time(self):
        cell = self.bridge.begin("a", "import time\ntime.sleep(1)")
        error = self.bridge.call("run", id="a", cell="x", code="1", timeoutMs=1000)
        self.assertEqual(error["kind"], "busy")
        self.assertEqual(self.bridge.finish(cell).status, "ok")

    def test_commands_are_carried_out_once(self):
        self.run_code("counter = 0")
        self.bridge.seq += 1
        line = {"seq": self.bridge.seq, "do": "run", "id": "a", "cell": "once", "code": "counter += 1", "timeoutMs": 9000}
        whole = json.dumps(line).encode()
        # The link broke in the middle; nobody knows what arrived.
        self.bridge.raw(whole[:40] + b"\n" + whole + b"\n" + whole + b"\n\n" + b"{]\n[]\n" + whole + b"\n")
        self.assertEqual(self.bridge.finish("once").status, "ok")
        self.assertEqual(self.run_code("counter").value, "1")

    def test_what_cannot_be_is_refused(self):
        refused = lambda do, **fields: self.bridge.call(do, **fields)["kind"]
        self.assertEqual(refused("start", id="b", createdMs=1, env={}, cwd="/no/such/folder"), "cwd")
        self.assertEqual(refused("start", id="a", createdMs=1, env={}), "busy")
        self.assertEqual(refused("run", id="nobody", cell="x", code="1", timeoutMs=1), "unknown")
        self.assertEqual(refused("restart", id="nobody"), "unknown")
        self.assertEqual(refused("dance", id="a"), "unknown")
        self.assertEqual(refused("run", id="a"), "failed")


class Lives(unittest.TestCase):
    def test_kernels_come_and_go(self):
        with tempfile.TemporaryDirectory() as folder:
            # Files that must not stand in for modules of Python.
            for name in ("queue.py", "json.py", "zmq.py"):
                with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                    file.write("raise SystemExit('not me')")
            host = Bridge(cwd=folder)
            self.assertEqual(host.hello()["contexts"], [])
            host.start("a")
            begin = time.monotonic()
            host.start("b", cwd="/tmp", env={"GREETING": "h\u00e9", "PYTHONPATH": folder}, createdMs=7)
            self.assertLess(time.monotonic() - begin, 10)
            told = host.run("b", "import os, sys; print(os.getcwd(), os.environ['GREETING'])")
            self.assertEqual(told.stdout, "/tmp h\u00e9\n")
            # Kernels of one nursery draw different random numbers.
            draw = "import random; random.random()"
            self.assertNotEqual(host.run("a", draw).value, host.run("b", draw).value)

            with self.subTest("a killed kernel is told at once, and revived"):
                pid = int(host.run("b", "os.getpid()").value)
                cell = host.begin("b", "import time\nprint('begun', flush=True)\ntime.sleep(60)")
                host.until("stdout", cell=cell)
                begin = time.monotonic()
                os.kill(pid, signal.SIGKILL)
                dead, _ = host.until("dead", id="b")
                self.assertEqual(dead["signal"], 9)
                self.assertEqual(host.finish(cell).status, "dead")
                self.assertLess(time.monotonic() - begin, 2)
                self.assertEqual(host.call("run", id="b", cell="x", code="1", timeoutMs=1000)["kind"], "dead")
                self.assertIsNone(host.call("restart", id="b"))
                self.assertEqual(host.run("b", "'os' in globals()").value, "False")
                self.assertEqual(host.run("b", "import os; os.environ['GREETING']").value, "'h\u00e9'")

            with self.subTest("one that does not listen is killed"):
                stubborn = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(9)"
                begin = time.monotonic()
                self.assertEqual(host.run("b", stubborn, 0.5).status, "timed_out")
                self.assertLess(time.monotonic() - begin, 10)

            with self.subTest("exit() is an end like another"):
                self.assertIsNone(host.call("restart", id="b"))
                host.run("b", "exit()")
                self.assertEqual(host.until("dead", id="b")[0]["code"], 0)

            hello = host.hello()
            states = {c["id"]: (c["state"], c["createdMs"], c["cwd"]) for c in hello["contexts"]}
            self.assertEqual(states, {"a": ("idle", 1, folder), "b": ("dead", 7, "/tmp")})
            self.assertEqual(hello["contexts"][1]["env"]["GREETING"], "h\u00e9")
            self.assertEqual(hello["seen"], host.seq)

            with self.subTest("a restart ends what runs"):
                cell = host.begin("a", "import time\ntime.sleep(60)")
                restart = host.order("restart", id="a")
                self.assertEqual(host.finish(cell).status, "interrupted")
                host.until("reply", seq=restart)
                self.assertIsNone(host.call("close", id="b"))
                self.assertEqual([c["id"] for c in host.hello()["contexts"]], ["a"])

            with self.subTest("with the nursery ends the bridge"):
                parent = int(host.run("a", "import os; os.getppid()").value)
                kernel = int(host.run("a", "os.getpid()").value)
                os.kill(parent, signal.SIGKILL)
                while host.next(5) is not None:
                    pass
                self.assertEqual(host.process.wait(5), 0)
                time.sleep(0.3)
                self.assertFalse(os.path.exists(f"/proc/{kernel}/fd/0"), "the kernel went too")
            host.process.stdout.close()
            host.process.stdin.close()

    def test_kernels_end_with_a_bridge_that_is_killed(self):
        host = Bridge()
        host.hello()
        host.start("a")
        kernel = int(host.run("a", "import os; os.getpid()").value)
        asks = "from ipykernel import get_connection_file as f; os.path.dirname(os.path.dirname(f()))"
        place = host.run("a", asks).value[1:-1]
        self.assertTrue(os.path.isdir(place), place)
        host.process.kill()
        host.process.wait(5)
        time.sleep(0.5)
        self.assertFalse(os.path.exists(f"/proc/{kernel}/fd/0"))
        self.assertFalse(os.path.exists(place), "nothing is left behind")
        host.process.stdout.close()
        host.process.stdin.close()

    def test_without_a_kernel_it_says_so(self):
        host = Bridge(prelude="import sys; sys.modules['ipykernel'] = None\n")
        told = host.next()
        self.assertEqual(told["ev"], "unable")
        self.assertIn("ipykernel", told["why"])
        self.assertEqual(host.process.wait(5), 0)
        host.close()


if __name__ == "__main__":
    unittest.main()
