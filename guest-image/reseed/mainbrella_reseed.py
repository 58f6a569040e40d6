"""Fresh random numbers in a copy of a running machine.

`import mainbrella_reseed` registers this process. When the machine becomes another generation, as the children of a fork do, the
generators of `random`, of NumPy's module functions and of OpenSSL (`ssl`) are seeded anew; generators that are objects of your own
are seeded by what you pass to `on_reseed`. Without a machine around it, importing does nothing.
"""

import os
import random
import socket
import sys
import threading

__all__ = ["on_reseed", "reseed"]

_FOLDER = "/run/mainbrella/reseed"
_PATIENCE_SECONDS = 5
_callbacks = []
_mine = None


def on_reseed(callback):
    """Has `callback()` called after each reseed, in a thread of its own; also usable as a decorator."""
    _callbacks.append(callback)
    return callback


def reseed():
    """Seeds every generator this module knows from the kernel's. Says whether every callback did its part."""
    random.seed(os.urandom(64))
    # Only what is loaded: a module that is not has drawn no numbers yet.
    numpy = sys.modules.get("numpy")
    numpy_random = getattr(numpy, "random", None)
    if numpy_random is not None:
        words = os.urandom(32)
        numpy_random.seed([int.from_bytes(words[at : at + 4], "little") for at in range(0, len(words), 4)])
    ssl = sys.modules.get("ssl")
    if ssl is not None:
        ssl.RAND_add(os.urandom(32), 32.0)
    fine = True
    for callback in list(_callbacks):
        try:
            callback()
        except Exception:
            fine = False
            sys.excepthook(*sys.exc_info())
    return fine


def _answer(peer):
    with peer:
        try:
            peer.settimeout(_PATIENCE_SECONDS)
            if peer.recv(16) == b"reseed\n":
                peer.sendall(b"done\n" if reseed() else b"failed\n")
        except OSError:
            pass


def _serve(listener):
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        _answer(peer)


def _register():
    global _mine
    if not os.path.isdir(_FOLDER):
        return
    place = f"{_FOLDER}/{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            os.unlink(place)
        except FileNotFoundError:
            pass
        listener.bind(place)
        listener.listen(4)
    except OSError:
        listener.close()
        return
    _mine = listener
    threading.Thread(target=_serve, args=(listener,), name="mainbrella-reseed", daemon=True).start()


def _register_child():
    if _mine is not None:
        _mine.close()
    _register()


_register()
os.register_at_fork(after_in_child=_register_child)
