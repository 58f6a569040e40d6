"""What live tests share: a service from the environment, the printed samples, and a bad network in front of it."""

from __future__ import annotations

import os
import random
import re
import socket
import threading
import unittest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mainbrella import Mainbrella, Sandbox

HERE = Path(__file__).parent

live = unittest.skipUnless(os.environ.get("MAINBRELLA_API_URL"), "MAINBRELLA_API_URL is not set")


def samples(page: str = "samples.md") -> list[str]:
    """The code blocks of a page of the product, in order, exactly as printed there."""
    return re.findall(r"^```python\n(.*?)^```", (HERE / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)


class OnOneMachine(unittest.TestCase):
    """Tests that share a machine."""

    client: Mainbrella
    sandbox: Sandbox

    @classmethod
    def setUpClass(cls) -> None:
        cls.client = Mainbrella(os.environ["MAINBRELLA_API_KEY"])
        cls.sandbox = cls.client.create(ttl_seconds=1200)

    @classmethod
    def tearDownClass(cls) -> None:
        try:
            cls.sandbox.kill()
        finally:
            cls.client.close()


class BadNetwork:
    """Passes connections on to the service, and cuts each after some bytes of what comes back."""

    def __init__(self, shortest: int, longest: int, *, seed: int = 1) -> None:
        address = urlsplit(os.environ["MAINBRELLA_API_URL"])
        self._service = (address.hostname or "127.0.0.1", address.port or 80)
        self._range = (shortest, longest)
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.cuts = 0
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> BadNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._open:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._service)
            except OSError:
                return
            self._open += [near, far]
            room = self._random.randint(*self._range)
            threading.Thread(target=self._pass, args=(near, far, None), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, room), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, room: int | None) -> None:
        try:
            while data := source.recv(65536):
                if room is not None:
                    data, room = data[:room], room - len(data)
                target.sendall(data)
                if room is not None and room <= 0:
                    self.cuts += 1
                    break
        except OSError:
            pass
        for sock in (source, target):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def run_sample(code: str, **names: Any) -> dict[str, Any]:
    """Runs a printed sample where ``names`` are known, and gives back all names it knew in the end."""
    exec(compile(code, "<sample>", "exec"), names)
    return names
