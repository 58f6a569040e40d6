from __future__ import annotations

import os
import pickle
import unittest
from unittest import mock

from mainbrella import ConfigurationError, Mainbrella

KEY = "mb_0123abcd_" + "s" * 43


class Addresses(unittest.TestCase):
    def test_https_is_required_unless_the_address_is_this_machine(self) -> None:
        for url in (
            "https://mainbrella.example",
            "https://10.0.0.7:8443/team",
            "http://127.0.0.1:8787",
            "http://127.9.9.9",
            "http://localhost:1",
            "http://[::1]:8787/",
        ):
            Mainbrella(KEY, base_url=url).close()
        for url in (
            "http://mainbrella.example",
            "http://10.0.0.7",
            "http://127.0.0.1.evil.example",
            "http://localhost.evil.example",
            "http://0.0.0.0",
            "http://[::2]",
            "ftp://127.0.0.1",
            "127.0.0.1:8787",
            "https://",
            "https://user:pw@mainbrella.example",
            "https://mainbrella.example/?a=b",
            "https://mainbrella.example/#x",
            "https://mainbrella.example:port",
            "https://mainbrella.example/\r\nX-Evil: 1",
        ):
            with self.subTest(url), self.assertRaises(ConfigurationError):
                Mainbrella(KEY, base_url=url)

    def test_the_address_comes_from_the_argument_then_the_environment_then_the_default(self) -> None:
        with mock.patch.dict(os.environ, {"MAINBRELLA_API_URL": "http://127.0.0.1:9999/"}):
            self.assertEqual(Mainbrella(KEY).base_url, "http://127.0.0.1:9999")
            self.assertEqual(Mainbrella(KEY, base_url="http://[::1]:1/p/").base_url, "http://[::1]:1/p")
        with mock.patch.dict(os.environ):
            os.environ.pop("MAINBRELLA_API_URL", None)
            self.assertEqual(Mainbrella(KEY).base_url, "http://127.0.0.1:8787")

    def test_the_key_is_shown_nowhere_and_cannot_smuggle_headers(self) -> None:
        client = Mainbrella(KEY, base_url="http://127.0.0.1:1")
        self.assertNotIn("sss", repr(client))
        with self.assertRaises(TypeError):
            pickle.dumps(client)
        for bad in ("", "a b", "mb_x\r\nX: y", "mb_\x00", "mb_é"):
            with self.subTest(bad), self.assertRaises(ConfigurationError) as caught:
                Mainbrella(bad)
            self.assertTrue(not bad or bad not in str(caught.exception))


if __name__ == "__main__":
    unittest.main()
