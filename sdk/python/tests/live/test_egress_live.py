"""What real machines may reach."""

from __future__ import annotations

import unittest

from mainbrella import EgressLockedError, EgressPolicy, InvalidRequestError, Mainbrella

from .common import live


@live
class Egress(unittest.TestCase):
    def test_a_policy_is_confirmed_changed_explained_and_its_denials_are_told(self) -> None:
        with Mainbrella() as client:
            if not client.capabilities()["networking"]["egressAllowList"]:
                self.skipTest("this host gives machines no network")
            with client.create(size="micro", egress=["good.example", "*.good.example:8443"]) as sandbox:
                self.assertTrue(sandbox.info.internet)
                self.assertEqual(sandbox.egress.policy, EgressPolicy.allow("good.example", "*.good.example:8443"))
                why = sandbox.egress.explain("evil.example")
                self.assertEqual((why.allowed, why.denied_by), (False, "no-rule"))
                self.assertEqual(sandbox.egress.explain("10.0.0.1", 80).denied_by, "reserved")
                fetch = "curl -sS -m 10 http://evil.example/ 2>/dev/null"
                self.assertNotEqual(sandbox.commands.run(fetch).exit_code, 0)
                event = next(e for e in sandbox.egress.events() if e.name == "evil.example")
                self.assertEqual((event.rule, event.port, event.outcome), ("no-rule", 53, "denied"))
                with self.assertRaises(InvalidRequestError):
                    sandbox.egress.set(["10.0.0.0/8"])
                self.assertEqual(sandbox.egress.set("off").egress, EgressPolicy("off"))
                with self.assertRaises(EgressLockedError):
                    sandbox.egress.set("open")
                self.assertFalse(sandbox.inspect().internet)

    def test_a_machine_without_internet_says_so_and_has_none(self) -> None:
        with Mainbrella() as client, client.create(size="micro", internet=False) as sandbox:
            self.assertEqual((sandbox.info.internet, sandbox.egress.policy), (False, EgressPolicy("off")))
            reached = sandbox.commands.run("timeout 5 bash -c 'echo > /dev/tcp/1.1.1.1/80'")
            self.assertNotEqual(reached.exit_code, 0)
            self.assertEqual(sandbox.egress.explain("example.org").denied_by, "off")


if __name__ == "__main__":
    unittest.main()
