from __future__ import annotations

import importlib.util
import inspect
import unittest
from pathlib import Path
from types import ModuleType

import mainbrella

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "unasync.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("unasync", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class OneSource(unittest.TestCase):
    def test_the_blocking_code_is_what_the_script_makes_of_the_asynchronous_code(self) -> None:
        self.assertEqual(script().differences(), [], "run scripts/unasync.py")

    def test_every_asynchronous_name_has_a_blocking_twin_with_the_same_verbs_and_arguments(self) -> None:
        pairs = [(n, n.removeprefix("Async")) for n in mainbrella.__all__ if n.startswith("Async")]
        self.assertGreater(len(pairs), 10)
        for asynchronous, blocking in pairs:
            self.assertIn(blocking, mainbrella.__all__)
            there, here = getattr(mainbrella, asynchronous), getattr(mainbrella, blocking)
            verbs = {n for n in dir(there) if not n.startswith("_")}
            twins = {n for n in dir(here) if not n.startswith("_")}
            self.assertEqual({n.replace("aclose", "close") for n in verbs}, twins, asynchronous)
            for verb in verbs & twins:
                one, other = getattr(there, verb), getattr(here, verb)
                if inspect.isfunction(one):
                    self.assertEqual(
                        list(inspect.signature(one).parameters), list(inspect.signature(other).parameters), verb
                    )

    def test_nothing_asynchronous_is_left_in_the_blocking_code(self) -> None:
        for path, text in script().generated().items():
            for word in ("async ", "await ", "asyncio", "Async", "__aenter__", "aclose"):
                left = [line for line in text.splitlines()[1:] if word in line]
                self.assertEqual(left, [], f"{path.name}: {word}")

    def test_every_public_name_is_documented(self) -> None:
        for name in mainbrella.__all__:
            made = getattr(mainbrella, name)
            if not inspect.isclass(made):
                continue
            self.assertTrue(made.__doc__, name)
            for verb, member in inspect.getmembers(made, inspect.isfunction):
                if not verb.startswith("_") and member.__module__.startswith("mainbrella"):
                    self.assertTrue(member.__doc__, f"{name}.{verb}")


if __name__ == "__main__":
    unittest.main()
