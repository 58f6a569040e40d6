"""Previews, policies and secrets on real machines."""

from __future__ import annotations

import time
import unittest
import urllib.error
import urllib.request

from mainbrella import EgressLockedError, Mainbrella

from .common import live


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@live
class Network(unittest.TestCase):
    def test_a_preview_leads_to_a_server_until_it_is_revoked(self) -> None:
        with Mainbrella() as client, client.create("python", size="micro") as sandbox:
            sandbox.files.write("/workspace/index.html", "hello from inside")
            sandbox.commands.start("cd /workspace && exec python3 -m http.server 3000 --bind 127.0.0.1")
            preview = sandbox.previews.create(3000, ttl_seconds=300)
            end = time.monotonic() + 120
            while (said := fetch(preview["pathUrl"]))[0] == 502 and time.monotonic() < end:
                time.sleep(0.3)
            self.assertEqual(said, (200, "hello from inside"))
            self.assertEqual([p["id"] for p in sandbox.previews.list()["previews"]], [preview["id"]])
            self.assertGreaterEqual(sandbox.previews.renew(preview["id"], 600)["expiresAt"], preview["expiresAt"])
            sandbox.pause()
            self.assertEqual(fetch(preview["pathUrl"])[0], 503)
            sandbox.resume()
            self.assertEqual(fetch(preview["pathUrl"]), (200, "hello from inside"))
            sandbox.previews.revoke(preview["id"])
            self.assertEqual(fetch(preview["pathUrl"])[0], 410)

    def test_a_policy_is_changed_explained_and_told(self) -> None:
        with Mainbrella() as client, client.create("python", size="micro", egress=["good.example"]) as sandbox:
            self.assertEqual(sandbox.egress.explain("other.example").outcome, "denied")
            sandbox.commands.run("getent hosts other.example")
            self.assertIn("other.example", [event.name for event in sandbox.egress.events()])
            sandbox.secrets.set("token", host="good.example", header="Authorization", value="Bearer x")
            self.assertEqual([s.name for s in sandbox.secrets.list()], ["token"])
            self.assertNotIn("Bearer x", sandbox.commands.run("env; cat /etc/ssl/certs/*.0").stdout)
            self.assertTrue(sandbox.secrets.remove("token"))
            sandbox.egress.set("off")
            with self.assertRaises(EgressLockedError):
                sandbox.egress.set("open")
