from __future__ import annotations

import ssl
import threading
import unittest
from pathlib import Path

from mainbrella import CallerStoppedWaitingError, TransportError

from .both import both, make_client
from .scripted import CREATED_AT, Request, Server, machine, result
from .test_use import KEY

PEM = Path(__file__).parent / "tls.pem"


def server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    return context


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(PEM))


@both
class Secured(unittest.TestCase):
    def test_a_session_over_tls(self) -> None:
        def files(r: Request) -> None:
            if r.method == "GET":
                r.reply(200, machine() if r.path == "/v1/machines/m-1" else bytes(1000) * 3000)
            elif r.path.endswith("/run"):
                r.reply(200, result())
            else:
                r.reply(200, {"size": len(r.body)})

        with Server([files], tls=server_context()) as server:
            with make_client(KEY, base_url=server.url, ssl_context=trusting(), timeout=5) as c:
                sandbox = c.connect("m-1", CREATED_AT)
                for _ in range(3):
                    self.assertEqual(sandbox.commands.run("true").stdout, "hi\n")
                # Large enough to be sent in pieces, each of which looks for an early answer: the tickets TLS sends by
                # itself are none.
                self.assertEqual(sandbox.files.write("/a", bytes(5_000_000)), 5_000_000)
                self.assertEqual(sandbox.files.write("/a", (bytes(70_000) for _ in range(30))), 2_100_000)
                self.assertEqual(sandbox.files.read("/a"), bytes(3_000_000))
                self.assertEqual(server.connections, 1, "one connection carried all of it")

    def test_the_first_request_of_a_connection_may_be_a_large_upload(self) -> None:
        def closing(r: Request) -> None:
            r.reply(200, machine(), {"Connection": "close"})

        with Server([closing, lambda r: r.reply(200, {"size": len(r.body)})], tls=server_context()) as server:
            with make_client(KEY, base_url=server.url, ssl_context=trusting(), timeout=5) as c:
                sandbox = c.connect("m-1", CREATED_AT)
                self.assertEqual(sandbox.files.write("/a", bytes(3_000_000)), 3_000_000)
                self.assertEqual(server.connections, 2)

    def test_a_stranger_is_not_spoken_to(self) -> None:
        with Server([lambda r: r.reply(200, machine())], tls=server_context()) as server:
            with make_client(KEY, base_url=server.url, timeout=5) as c:
                with self.assertRaises(TransportError) as caught:
                    c.get("m-1")
                self.assertEqual((caught.exception.code, caught.exception.ambiguous), ("tls_failed", False))
                self.assertEqual(server.requests, [])

    def test_a_deadline_holds_over_tls(self) -> None:
        release = threading.Event()

        def silent(r: Request) -> None:
            release.wait(10)

        with Server([silent], tls=server_context()) as server:
            with make_client(KEY, base_url=server.url, ssl_context=trusting(), timeout=0.5) as c:
                with self.assertRaises(CallerStoppedWaitingError):
                    c.get("m-1")
                release.set()


if __name__ == "__main__":
    unittest.main()
