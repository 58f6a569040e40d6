"""What only the asynchronous client can do: be cancelled, be shared by tasks, be used from one loop after another."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import unittest
import warnings
from collections.abc import AsyncIterator
from typing import Any

from mainbrella import AsyncExecution, AsyncMainbrella, AsyncSandbox, CallerStoppedWaitingError, ConfigurationError

from .jobs_server import CHUNKED, chunk, ended, follow, output, sse, started
from .scripted import CREATED_AT, Handler, Request, Server, machine, result, stopped
from .test_use import KEY

EVENTS = [started(1), output(2, 0, b"ab"), ended(3)]


def ok(r: Request) -> None:
    r.reply(200, machine())


class Session:
    """A server and an asynchronous client attached to a machine."""

    def __init__(self, *handlers: Handler, timeout: float = 30.0) -> None:
        self.server = Server([ok, *handlers])
        self.client = AsyncMainbrella(KEY, base_url=self.server.url, timeout=timeout)

    async def __aenter__(self) -> tuple[AsyncSandbox, Server]:
        return await self.client.connect("m-1", CREATED_AT), self.server

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await asyncio.to_thread(self.server.__exit__)


def held(gone: threading.Event, first: bytes = b"") -> Handler:
    """Says ``first`` and then nothing, and sets ``gone`` when the caller has left."""

    def handler(r: Request) -> None:
        if first:
            r.raw(first)
        try:
            left = r.sock.recv(1) == b""
        except ConnectionError:
            left = True
        if left:
            gone.set()

    return handler


class Asynchronous(unittest.IsolatedAsyncioTestCase):
    async def test_a_cancelled_task_lets_go_of_its_connection(self) -> None:
        gone = threading.Event()
        async with Session(held(gone)) as (sandbox, server):
            task = asyncio.create_task(sandbox.commands.run("sleep 9"))
            while len(server.requests) < 2:
                await asyncio.sleep(0.01)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            self.assertTrue(await asyncio.to_thread(gone.wait, 3))

    async def test_cancelling_an_iteration_loses_no_event(self) -> None:
        gone = threading.Event()
        quiet = held(gone, CHUNKED + chunk(sse(EVENTS[:2])))
        async with Session(quiet, follow(EVENTS)) as (sandbox, _):
            job = AsyncExecution(sandbox, "j-1")
            seen: list[int] = []
            stream = job.events()
            while True:
                try:
                    seen.append((await asyncio.wait_for(anext(stream), 0.3)).cursor)
                except asyncio.TimeoutError:
                    self.assertEqual(job.cursor, 2)
                    break
            self.assertTrue(await asyncio.to_thread(gone.wait, 3))
            seen += [event.cursor async for event in stream]
            self.assertEqual(seen, [1, 2, 3])

    async def test_streams_close_cleanly_in_every_way(self) -> None:
        for way in ("aclosing", "async with", "let go"):
            gone = threading.Event()
            async with Session(held(gone, CHUNKED + chunk(sse(EVENTS[:1])))) as (sandbox, server):
                stream: Any = AsyncExecution(sandbox, "j-1").events()
                if way == "aclosing":
                    async with contextlib.aclosing(stream):
                        await anext(stream)
                elif way == "async with":
                    async with stream:
                        await anext(stream)
                else:
                    await anext(stream)
                del stream
                gc.collect()
                self.assertTrue(await asyncio.to_thread(gone.wait, 3), way)
                self.assertEqual(len(server.requests), 2)

    async def test_many_tasks_share_one_client(self) -> None:
        together = threading.Barrier(40)

        def run(r: Request) -> None:
            if len(server.requests) <= 41:
                together.wait(30)  # nobody is answered before all have asked
            r.reply(200, result())

        async with Session(run) as (sandbox, server):
            done = await asyncio.gather(*(sandbox.commands.run("true") for _ in range(40)))
            self.assertEqual([r.stdout for r in done], ["hi\n"] * 40)
            await sandbox.commands.run("true")
            self.assertEqual(server.connections, 40, "and a kept connection was used again")

    async def test_the_event_loop_is_not_stopped_by_waits_files_and_sources(self) -> None:
        def slow(r: Request) -> None:
            time.sleep(0.3)
            r.reply(200, {"size": len(r.body)})

        def lazy() -> Any:
            for _ in range(3):
                time.sleep(0.1)
                yield b"x" * 1000

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(3):
                await asyncio.sleep(0.01)
                yield b"y" * 1000

        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        async with Session(slow) as (sandbox, server):
            ticking = asyncio.create_task(tick())
            self.assertEqual(await sandbox.files.write("/a", lazy()), 3000)
            self.assertEqual(await sandbox.files.write("/a", pieces()), 3000)
            ticking.cancel()
            self.assertEqual(server.requests[2].body, b"y" * 3000)
            self.assertGreater(ticks, 8)

    async def test_a_deadline_holds(self) -> None:
        async with Session(held(threading.Event()), timeout=0.2) as (sandbox, _):
            begin = time.monotonic()
            with self.assertRaises(CallerStoppedWaitingError):
                await sandbox.commands.run("sleep 9", timeout_ms=200)
            self.assertLess(time.monotonic() - begin, 10)

    async def test_a_session_from_create_to_stop(self) -> None:
        def stop(r: Request) -> None:
            r.reply(200, stopped())

        server = Server([ok, lambda r: r.reply(200, result()), stop, ok, stop])
        async with AsyncMainbrella(KEY, base_url=server.url) as client:
            async with await client.create() as sandbox:
                self.assertEqual((await sandbox.commands.run("true")).stdout, "hi\n")
            with self.assertRaises(KeyError):
                async with await client.create():
                    raise KeyError("mine")
        with self.assertRaises(ConfigurationError):
            await client.create()
        self.assertEqual(len(server.requests), 5)
        await asyncio.to_thread(server.__exit__)

    async def test_a_list_is_fetched_as_it_is_used(self) -> None:
        def page(r: Request) -> None:
            more = None if r.query.get("cursor") else "c"
            r.reply(200, {"machines": [machine(), machine(id="m-2")], "nextCursor": more})

        async with Session(page) as (_, server):
            client = AsyncMainbrella(KEY, base_url=server.url)
            self.assertEqual([s.id async for s in client.list()], ["m-1", "m-2"] * 2)
            await client.close()


class Loops(unittest.TestCase):
    def test_one_client_in_one_loop_after_another(self) -> None:
        with Server([ok]) as server, warnings.catch_warnings():
            # What a loop that was closed leaves behind is told by asyncio itself.
            warnings.simplefilter("ignore", ResourceWarning)
            client = AsyncMainbrella(KEY, base_url=server.url)

            async def look() -> str:
                return (await client.get("m-1")).id

            for _ in range(3):
                self.assertEqual(asyncio.run(look()), "m-1")
            asyncio.run(client.close())
            gc.collect()


if __name__ == "__main__":
    unittest.main()
