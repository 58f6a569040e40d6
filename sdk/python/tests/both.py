"""Runs the same tests against the blocking and the asynchronous client.

``@both`` on a test case adds a second one to its module, in which ``make_client`` gives an ``AsyncMainbrella`` behind a
front that blocks: its coroutines run on an event loop in a thread.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import unittest
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar, cast

from mainbrella import AsyncMainbrella, AsyncSandbox, Mainbrella, Sandbox

C = TypeVar("C", bound=type[unittest.TestCase])

_loop: asyncio.AbstractEventLoop | None = None
_asynchronous = False


def make_client(*args: Any, **options: Any) -> Mainbrella:
    """A client of the kind that is being tested."""
    if not _asynchronous:
        return Mainbrella(*args, **options)
    return cast("Mainbrella", front(AsyncMainbrella(*args, **options)))


def make_sandbox(**options: Any) -> Sandbox:
    """The short form of the kind that is being tested."""
    if not _asynchronous:
        return Sandbox.create(**options)
    return cast("Sandbox", front(run(AsyncSandbox.create(**options))))


def twin(kind: Any) -> Any:
    """The class that is being tested: ``kind``, or its asynchronous twin."""
    if not _asynchronous:
        return kind
    import mainbrella

    made = getattr(mainbrella, f"Async{kind.__name__}")
    return lambda *args, **options: front(made(*map(_back, args), **options))  # pyright: ignore


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs on the event loop of the tests."""
    assert _loop is not None
    return asyncio.run_coroutine_threadsafe(coroutine, _loop).result()


def both(case: C) -> C:
    """Adds the asynchronous twin of a test case to its module."""

    def set_up(cls: type[unittest.TestCase]) -> None:
        global _asynchronous, _loop
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, daemon=True).start()
        _asynchronous = True
        case.setUpClass.__func__(cls)  # type: ignore[attr-defined]

    def tear_down(cls: type[unittest.TestCase]) -> None:
        global _asynchronous
        case.tearDownClass.__func__(cls)  # type: ignore[attr-defined]
        _asynchronous = False

    name = f"{case.__name__}Async"
    members = {
        "setUpClass": classmethod(set_up),
        "tearDownClass": classmethod(tear_down),
        "__module__": case.__module__,
    }
    made = type(name, (case,), members)
    setattr(sys.modules[case.__module__], name, made)
    return case


def front(value: Any) -> Any:
    """A blocking front of an asynchronous object; anything else as it is."""
    if type(value).__module__.startswith("mainbrella._async."):
        return value if isinstance(value, BaseException) or not _is_worker(value) else _Front(value)
    if inspect.isasyncgen(value):
        return _iterate(value)
    kind: Any = value.__class__
    return [front(v) for v in value] if kind is list else value


def _is_worker(value: Any) -> bool:
    return not hasattr(value, "__dataclass_fields__") or hasattr(value, "job")


def _back(value: Any) -> Any:
    return object.__getattribute__(value, "_of") if isinstance(value, _Front) else value


def _iterate(source: AsyncIterator[Any]) -> Any:
    while True:
        try:
            value = run(source.__anext__())  # type: ignore[arg-type] # pyright: ignore
        except StopAsyncIteration:
            return
        yield front(value)


async def _do(work: Any, args: Any, options: Any) -> Any:
    made = work(*map(_back, args), **{k: _back(v) for k, v in options.items()})
    return await made if inspect.isawaitable(made) else made


class _Front:
    def __init__(self, of: Any) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        name = {"close": "aclose"}.get(name, name) if not hasattr(self._of, name) else name
        value = getattr(self._of, name)
        if inspect.ismethod(value):
            return lambda *args, **options: front(run(_do(value, args, options)))  # pyright: ignore
        return front(value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_of":
            object.__setattr__(self, name, value)
        else:
            setattr(self._of, name, value)

    def __repr__(self) -> str:
        return repr(self._of)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return front(run(_do(self._of, args, options)))

    def __enter__(self) -> Any:
        return front(run(self._of.__aenter__()))

    def __exit__(self, *args: Any) -> Any:
        return run(self._of.__aexit__(*args))

    def __iter__(self) -> Any:
        made = self._of.__aiter__()
        return self if made is self._of else _iterate(made)

    def __next__(self) -> Any:
        try:
            return front(run(self._of.__anext__()))
        except StopAsyncIteration:
            raise StopIteration from None
