"""One warm trunk, four children, each trying another patch: the first whose tests pass wins.

Run it against a service: `eval "$(./run env)"; python3 examples/branch_session.py`.
"""

from __future__ import annotations

import concurrent.futures as cf
import sys
import time

from mainbrella import Mainbrella, Sandbox

PROGRAM = "def middle(items):\n    return items[len(items) // 2 - 1]\n"
TESTS = """\
import unittest
from middle import middle

class Middle(unittest.TestCase):
    def test_odd(self):
        self.assertEqual(middle([1, 2, 3]), 2)
    def test_one(self):
        self.assertEqual(middle([7]), 7)
    def test_even_takes_the_lower(self):
        self.assertEqual(middle([1, 2, 3, 4]), 2)

if __name__ == "__main__":
    unittest.main()
"""
CANDIDATES = {
    "leave it": "items[len(items) // 2 - 1]",
    "upper middle": "items[len(items) // 2]",
    "lower middle": "items[(len(items) - 1) // 2]",
    "first": "items[0]",
}


def attempt(child: Sandbox, name: str, expression: str) -> tuple[str, bool]:
    """Applies one candidate in a machine of its own and runs the tests there."""
    with child:
        child.files.write("/workspace/repo/middle.py", f"def middle(items):\n    return {expression}\n")
        result = child.commands.run("cd /workspace/repo && python3 test_middle.py 2>&1", timeout_ms=120_000)
        return name, result.exit_code == 0


def main() -> int:
    with Mainbrella() as client, client.create("python", size="micro", ttl_seconds=1800) as trunk:
        # Set up once; every branch begins from here, with all of it in memory.
        trunk.files.write("/workspace/repo/middle.py", PROGRAM)
        trunk.files.write("/workspace/repo/test_middle.py", TESTS)
        before = trunk.commands.run("cd /workspace/repo && python3 test_middle.py", timeout_ms=120_000)
        assert before.exit_code != 0, "there is something to mend"
        begun = time.monotonic()
        children = trunk.fork(len(CANDIDATES))
        print(f"{len(children)} branches after {time.monotonic() - begun:.2f} s")
        with cf.ThreadPoolExecutor(max_workers=len(children)) as pool:
            tried = [pool.submit(attempt, child, *each) for child, each in zip(children, CANDIDATES.items())]
            results = dict(one.result() for one in tried)
        for name, passed in results.items():
            print(f"{'passed' if passed else 'failed'}  {name}")
        winners = [name for name, passed in results.items() if passed]
        assert winners == ["lower middle"], winners
        same = trunk.files.read("/workspace/repo/middle.py").decode() == PROGRAM
        assert same, "the trunk is as it was"
    return 0


if __name__ == "__main__":
    sys.exit(main())
