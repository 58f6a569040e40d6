"""Code contexts of one machine: JSON lines on one side, Jupyter kernels on the other.

The host hands this text to a Python of the machine, writes one JSON object a line to its input and reads one a line
from its output. Nothing is installed for it but Debian's ipykernel and jupyter-client.

Three kinds of process. The *nursery* has imported all that a kernel needs and forks one for each context, so that a
context after the first starts in a moment; it is the parent of the kernels and sees their deaths. The *bridge* speaks
with host and kernels. A *kernel* is an unchanged ipykernel in a session (process group) of its own, reached over unix
sockets that only root can open. If bridge or nursery end, the others end with them.

From the host. Every command but `hello` has a `seq`; one that was seen already is not carried out again, a line that is
not JSON is ignored, so that a host which does not know whether a write arrived ends the line and repeats the command.
  {"do": "hello", "nonce"}                               who is there
  {"seq", "do": "start", "id", "createdMs", "cwd"?, "env"}
  {"seq", "do": "run", "id", "cell", "code", "timeoutMs"}
  {"seq", "do": "interrupt", "id", "cell"?}              only that cell, if one is named
  {"seq", "do": "restart", "id"} {"seq", "do": "close", "id"}
To the host.
  {"ev": "hello", "version", "nonce", "seen", "contexts": [{"id", "state", "createdMs", "cwd", "env", "cell"}]}
  {"ev": "unable", "why"}                                there can be no kernels here; the bridge ends
  {"ev": "reply", "seq", "error"?: {"kind", "why"}}      the command is done, or cannot be
  {"ev": "dead", "id", "signal" | "code"}                a kernel ended by itself
  {"ev": "stdout" | "stderr", "id", "cell", "text"}      {"ev": "gap", "id", "cell", "stream", "offset", "length"}
  {"ev": "result" | "display", "id", "cell", "data": {mime: text or JSON}}
  {"ev": "error", "id", "cell", "name", "value", "traceback": [..]}
  {"ev": "done", "id", "cell", "status", "count", "truncated", "ms"}   the last of a cell
"""

import asyncio
import collections
import json
import os
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import time

# Of these lines. One that meets another is ended: nothing half understood goes on.
VERSION = 1
# Text of one stream of a cell: so many bytes at once as they come, and so many of its end.
HEAD_BYTES = 512 * 1024
TAIL_BYTES = 512 * 1024
# What each event costs of the head beside its text: a million prints of one letter are a flood, too.
EVENT_COST = 64
# Text gathers for so long, or up to so much, before it is sent.
GATHER_S = 0.04
GATHER_BYTES = 32 * 1024
# Rich results of a cell.
VALUE_BYTES = 4 * 1024 * 1024
RICH_BYTES = 8 * 1024 * 1024
RICH_COUNT = 256
PLAIN_BYTES = 64 * 1024
MIMES = 32
# An exception.
FRAMES = 64
FRAME_BYTES = 16 * 1024
NAME_BYTES = 1024

START_S = 90.0
# A cell at its time limit is interrupted, again each second, and its kernel killed after so long.
GRACE_S = 5.0
# How long the end of a cell's output may come after its result.
IDLE_S = 2.0
ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def clean(text):
    """Text that can be sent as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def cut(text, most):
    """At most `most` bytes of `text`, and whether that was less than all."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= most:
        return raw.decode("utf-8"), False
    return raw[:most].decode("utf-8", "ignore"), True


def plain(text, most):
    return cut(ANSI.sub("", str(text)), most)[0]


# ---- the nursery ---------------------------------------------------------------------------------------------------


def load():
    """Imports what a kernel and the bridge need; what only editors need of it is left out."""
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    left_out = [name for name in ("debugpy", "debugpy.server", "jedi") if name not in sys.modules]
    for name in left_out:
        sys.modules[name] = None
    try:
        import ipykernel.ipkernel
        import ipykernel.kernelapp
        import jupyter_client.session
        import zmq.asyncio  # noqa: F401
    finally:
        for name in left_out:
            if sys.modules.get(name, 0) is None:
                del sys.modules[name]


def set_oom_score(score):
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(score))
    except OSError:
        pass


def die_with_parent(parent):
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def be_kernel(order):
    """What a forked child does: becomes a kernel, never returns."""
    status = 1
    try:
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.closerange(3, 4096)
        set_oom_score(0)
        os.environ.update(order["env"])
        for place in reversed([p for p in order["env"].get("PYTHONPATH", "").split(":") if p]):
            if place not in sys.path:
                sys.path.insert(0, place)
        os.chdir(order["cwd"])
        try:
            # A copy of the machine has it draw other random numbers.
            import mainbrella_reseed  # noqa: F401
        except ImportError:
            pass
        sys.argv[:] = ["ipykernel_launcher", "-f", order["file"]]
        from ipykernel.kernelapp import IPKernelApp

        IPKernelApp.launch_instance(
            [
                "-f",
                order["file"],
                "--IPKernelApp.quiet=True",
                "--HistoryManager.enabled=False",
                "--Application.log_level=50",
            ]
        )
        status = 0
        import atexit

        atexit._run_exitfuncs()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        status = 1
    finally:
        os._exit(status & 0xFF)


def nurse(channel, place):
    """The nursery's whole life: forks, tells of deaths, delivers signals to those who live; it ends with the bridge."""
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    import gc

    gc.collect()
    gc.freeze()
    me = os.getpid()
    children = {}
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd != channel.fileno():
                pid = children.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                # What a kernel started and did not put into a session of its own ends with it.
                end_group(pid)
                _, status = os.waitpid(pid, 0)
                code = os.waitstatus_to_exitcode(status)
                tell(channel, {"ended": pid, "signal" if code < 0 else "code": abs(code)})
                continue
            try:
                message = channel.recv(1 << 20)
            except OSError:
                message = b""
            if not message:
                for pid in children.values():
                    end_group(pid)
                # A bridge that was killed has not tidied up.
                shutil.rmtree(place, ignore_errors=True)
                os._exit(0)
            order = json.loads(message)
            if "kill" in order:
                if order["kill"] in children.values():
                    end_group(order["kill"], order["signal"])
                continue
            pid = os.fork()
            if pid == 0:
                die_with_parent(me)
                be_kernel(order)
            fd = os.pidfd_open(pid)
            children[fd] = pid
            poll.register(fd, select.POLLIN)
            tell(channel, {"born": order["token"], "pid": pid})


def end_group(pid, number=signal.SIGKILL):
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        # It has not made its group yet.
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
    except PermissionError:
        pass


def tell(channel, message):
    try:
        channel.send(json.dumps(message).encode())
    except OSError:
        os._exit(0)


# ---- the bridge ----------------------------------------------------------------------------------------------------


class Refused(Exception):
    """A command that cannot be carried out; `kind` is one word the host knows."""

    def __init__(self, kind, why):
        super().__init__(why)
        self.kind = kind


class Stream:
    """One text stream of a cell: its beginning goes out as it comes, its end is kept, the middle is counted."""

    def __init__(self):
        self.head = HEAD_BYTES
        self.sent = 0
        self.total = 0
        self.tail = collections.deque()
        self.tail_bytes = 0

    def take(self, text):
        """The part of `text` that may go out now."""
        raw = text.encode("utf-8", "replace")
        self.total += len(raw)
        if self.tail_bytes or self.total - len(raw) > self.sent:
            self.keep(raw)
            return ""
        now, more = cut(text, max(self.head - EVENT_COST, 0))
        size = len(now.encode("utf-8"))
        self.head -= size + EVENT_COST
        self.sent += size
        if more:
            self.keep(raw[size:])
        return now

    def keep(self, raw):
        self.tail.append(raw)
        self.tail_bytes += len(raw)
        while self.tail_bytes - len(self.tail[0]) >= TAIL_BYTES:
            self.tail_bytes -= len(self.tail.popleft())

    def end(self):
        """What is missing, as (offset, length) or None, and the text after it."""
        raw = b"".join(self.tail)[-TAIL_BYTES:]
        text = raw.decode("utf-8", "ignore")
        missing = self.total - self.sent - len(text.encode("utf-8"))
        return ((self.sent, missing) if missing else None), text


class Cell:
    """A piece of code that runs."""

    def __init__(self, bridge, context, name, message, limit):
        self.bridge, self.context, self.name, self.message = bridge, context, name, message
        self.begun = time.monotonic()
        self.streams = {"stdout": Stream(), "stderr": Stream()}
        self.gathered = None
        self.rich_bytes, self.rich_count = RICH_BYTES, RICH_COUNT
        self.truncated = False
        self.executing = False
        self.stop = None  # "interrupted" or "timed_out": why it is being ended
        self.failed = False
        self.reply = None
        self.idle = False
        self.timers = [bridge.loop.call_later(limit, self.time_is_up)]

    def send(self, event, **fields):
        self.bridge.send({"ev": event, "id": self.context.name, "cell": self.name, **fields})

    # Output.

    def text(self, name, text):
        if name not in self.streams or not isinstance(text, str):
            return
        if self.gathered and self.gathered[0] != name:
            self.flush()
        if not self.gathered:
            self.gathered = [name, [], 0, self.bridge.loop.call_later(GATHER_S, self.flush)]
        self.gathered[1].append(text)
        self.gathered[2] += len(text)
        if self.gathered[2] >= GATHER_BYTES:
            self.flush()

    def flush(self):
        if not self.gathered:
            return
        name, parts, _, timer = self.gathered
        self.gathered = None
        timer.cancel()
        text = clean("".join(parts))
        for at in range(0, len(text), GATHER_BYTES):
            now = self.streams[name].take(text[at : at + GATHER_BYTES])
            if now:
                self.send(name, text=now)

    def rich(self, event, data):
        self.flush()
        if self.rich_count <= 0:
            self.truncated = True
            return
        kept = {}
        for mime, value in list(data.items())[:MIMES]:
            if not isinstance(mime, str) or len(mime) > 127 or not mime.isascii():
                continue
            if mime == "text/plain":
                value, less = cut(str(value), PLAIN_BYTES)
                self.truncated |= less
            elif isinstance(value, str):
                value = clean(value)
            try:
                size = len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8"))
            except (ValueError, TypeError):
                self.truncated = True
                continue
            if size > min(VALUE_BYTES, self.rich_bytes):
                self.truncated = True
                continue
            self.rich_bytes -= size
            kept[mime] = value
        if kept:
            self.rich_count -= 1
            self.send(event, data=kept)

    def error(self, content):
        self.flush()
        lines = content.get("traceback") or []
        if len(lines) > FRAMES:
            lines = lines[: FRAMES // 2] + ["…"] + lines[-FRAMES // 2 :]
            self.truncated = True
        self.failed = True
        self.send(
            "error",
            name=plain(content.get("ename", ""), NAME_BYTES),
            value=plain(content.get("evalue", ""), FRAME_BYTES),
            traceback=[plain(line, FRAME_BYTES) for line in lines],
        )

    # Its end.

    def time_is_up(self):
        self.stop = "timed_out"
        self.timers.append(self.bridge.loop.call_later(GRACE_S, self.kill))
        self.press()

    def press(self):
        self.context.signal(signal.SIGINT)
        self.timers.append(self.bridge.loop.call_later(1.0, self.press))

    def kill(self):
        self.context.signal(signal.SIGKILL)

    def interrupt(self):
        self.stop = self.stop or "interrupted"
        if self.executing:
            self.context.signal(signal.SIGINT)

    def begins(self):
        if not self.executing:
            self.executing = True
            if self.stop == "interrupted":
                self.context.signal(signal.SIGINT)

    def settle(self):
        """Ends the cell when its result and the end of its output are there."""
        if self.reply is None:
            return
        if not self.idle:
            self.timers.append(self.bridge.loop.call_later(IDLE_S, self.finish))
            return
        self.finish()

    def finish(self):
        reply = self.reply or {}
        status = "ok" if reply.get("status") == "ok" else "error"
        if self.stop and (status == "error" or self.stop == "timed_out"):
            status = self.stop
        if status == "error" and not self.failed and reply.get("status") == "error":
            self.error(reply)
        self.conclude(status, reply.get("execution_count"))

    def conclude(self, status, count=None):
        if self.context.cell is not self:
            return
        self.context.cell = None
        for timer in self.timers:
            timer.cancel()
        self.flush()
        for name, stream in self.streams.items():
            gap, tail = stream.end()
            if gap:
                self.truncated = True
                self.send("gap", stream=name, offset=gap[0], length=gap[1])
            for at in range(0, len(tail), GATHER_BYTES):
                self.send(name, text=tail[at : at + GATHER_BYTES])
        ms = int((time.monotonic() - self.begun) * 1000)
        count = count if isinstance(count, int) else None
        self.send("done", status=status, count=count, truncated=self.truncated, ms=ms)


class Context:
    """A kernel, and what is needed to make it anew."""

    def __init__(self, bridge, name, created, cwd, env):
        self.bridge, self.name, self.created, self.cwd, self.env = bridge, name, created, cwd, env
        self.state = "starting"
        self.pid = None
        self.ended = None  # a future: the kernel's end
        self.cell = None
        self.wanted = False  # its end is our wish
        self.tasks, self.sockets = [], []
        self.place = None

    def describe(self):
        cell = self.cell.name if self.cell else None
        state = "busy" if self.state == "idle" and cell else self.state
        return {"id": self.name, "state": state, "createdMs": self.created, "cwd": self.cwd, "env": self.env, "cell": cell}

    def signal(self, number):
        if self.pid:
            tell(self.bridge.nursery, {"kill": self.pid, "signal": int(number)})

    async def open(self):
        """Starts a kernel and waits until it answers."""
        import zmq
        from jupyter_client.session import Session

        self.state, self.wanted = "starting", False
        self.place = tempfile.mkdtemp(prefix="k", dir=self.bridge.place)
        key = os.urandom(32).hex()
        ports = {f"{name}_port": at for at, name in enumerate(("shell", "iopub", "stdin", "control", "hb"), 1)}
        file = os.path.join(self.place, "connection.json")
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            info = {"transport": "ipc", "ip": os.path.join(self.place, "s"), "key": key, "kernel_name": "python3"}
            json.dump({**info, **ports, "signature_scheme": "hmac-sha256"}, out)
        self.session = Session(key=key.encode(), signature_scheme="hmac-sha256")
        self.ended = self.bridge.loop.create_future()
        self.pid = await self.bridge.bear(self, file)

        def connect(kind, port):
            sock = self.bridge.zmq.socket(kind)
            sock.linger = 0
            sock.rcvhwm = 0
            if kind == zmq.SUB:
                sock.subscribe(b"")
            sock.connect(f"ipc://{self.place}/s-{ports[port]}")
            self.sockets.append(sock)
            return sock

        self.shell = connect(zmq.DEALER, "shell_port")
        iopub = connect(zmq.SUB, "iopub_port")
        self.ready = self.heard = False
        for sock, take in ((self.shell, self.on_shell), (iopub, self.on_iopub)):
            self.tasks.append(self.bridge.loop.create_task(self.pump(sock, take)))
        greet = self.bridge.loop.create_task(self.greet())
        try:
            done, _ = await asyncio.wait({greet, self.ended}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            greet.cancel()
        if greet not in done:
            ended = self.ended in done
            await self.shut()
            self.state = "dead"
            raise Refused("failed", "the kernel ended at once" if ended else "the kernel did not answer in time")
        greet.result()
        self.state = "idle"

    async def greet(self):
        """Asks until an answer and an announcement arrived: from then on nothing said is missed."""
        while True:
            self.session.send(self.shell, "kernel_info_request")
            patience = time.monotonic() + 0.5
            while not self.ready or (not self.heard and time.monotonic() < patience):
                await asyncio.sleep(0.02)
            if self.heard:
                return
            self.ready = False

    async def pump(self, sock, take):
        while True:
            parts = await sock.recv_multipart()
            try:
                _, parts = self.session.feed_identities(parts)
                message = self.session.deserialize(parts)
            except (ValueError, TypeError, KeyError, IndexError):
                # Not signed with our key, or not a message: not from the kernel.
                continue
            try:
                take(message.get("header", {}).get("msg_type"), message["parent_header"], message["content"])
            except (KeyError, TypeError, AttributeError):
                continue

    def on_shell(self, kind, parent, content):
        if kind == "kernel_info_reply":
            self.ready = True
        cell = self.cell
        if kind == "execute_reply" and cell and parent.get("msg_id") == cell.message:
            cell.reply = content
            cell.settle()

    def on_iopub(self, kind, parent, content):
        self.heard = True
        cell = self.cell
        if not cell or parent.get("msg_id") != cell.message:
            return
        if kind == "stream":
            cell.text(content["name"], content["text"])
        elif kind == "execute_result":
            cell.rich("result", content["data"])
        elif kind in ("display_data", "update_display_data"):
            cell.rich("display", content["data"])
        elif kind == "error":
            cell.error(content)
        elif kind == "execute_input":
            cell.begins()
        elif kind == "status" and content.get("execution_state") == "idle":
            cell.idle = True
            cell.settle()

    def run(self, name, code, limit):
        if self.state != "idle":
            raise Refused("dead" if self.state == "dead" else "busy", f"the context is {self.state}")
        if self.cell:
            raise Refused("busy", "a cell runs")
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            # Runs come one at a time: one that follows a failed one at once must not be given up with it.
            "stop_on_error": False,
        }
        message = self.session.send(self.shell, "execute_request", content)
        self.cell = Cell(self.bridge, self, name, message["header"]["msg_id"], limit)

    def on_end(self, how):
        """The kernel is gone."""
        self.pid = None
        if self.ended and not self.ended.done():
            self.ended.set_result(how)
        if self.wanted or self.state == "starting":
            return
        # What it said before it ended is still on its way.
        self.state = "dead"
        self.bridge.loop.call_later(0.2, self.mourn, how)

    def mourn(self, how):
        if self.state != "dead":
            return
        self.bridge.send({"ev": "dead", "id": self.name, **how})
        cell = self.cell
        if cell:
            cell.conclude(cell.stop if cell.stop == "timed_out" else "dead")
        self.bridge.loop.create_task(self.shut())

    async def shut(self):
        """Ends the kernel and lets go of everything of it."""
        self.wanted = True
        if self.pid:
            self.signal(signal.SIGKILL)
            await self.ended
        if self.cell:
            self.cell.conclude(self.cell.stop or "interrupted")
        for task in self.tasks:
            task.cancel()
        for sock in self.sockets:
            sock.close()
        self.tasks, self.sockets = [], []
        if self.place:
            shutil.rmtree(self.place, ignore_errors=True)
            self.place = None


class Bridge:
    """Speaks with the host; holds the contexts."""

    def __init__(self, loop, nursery, reader, place):
        import zmq.asyncio

        self.loop, self.nursery, self.reader, self.place = loop, nursery, reader, place
        self.zmq = zmq.asyncio.Context()
        self.contexts = {}
        self.births = {}
        self.seen = 0
        self.writer = None
        self.tasks = set()
        self.over = loop.create_future()
        loop.add_reader(nursery.fileno(), self.on_nursery)

    def send(self, event):
        # Nothing here grows without end: what a cell may say is counted, and one cell runs in a context.
        self.writer.write(json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n")

    def on_nursery(self):
        try:
            message = self.nursery.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            if not self.over.done():
                self.over.set_result(None)
            self.loop.remove_reader(self.nursery.fileno())
            return
        news = json.loads(message)
        if "born" in news:
            context, birth = self.births.pop(news["born"])
            context.pid = news["pid"]
            if not birth.done():
                birth.set_result(news["pid"])
            return
        how = {key: news[key] for key in ("signal", "code") if key in news}
        for context in list(self.contexts.values()):
            if context.pid == news["ended"]:
                context.on_end(how)

    async def bear(self, context, file):
        token = os.urandom(8).hex()
        birth = self.loop.create_future()
        self.births[token] = (context, birth)
        tell(self.nursery, {"token": token, "file": file, "cwd": context.cwd, "env": context.env})
        return await birth

    def known(self, order):
        context = self.contexts.get(order["id"])
        if not context:
            raise Refused("unknown", "there is no such context")
        return context

    async def obey(self, order):
        do = order["do"]
        if do == "hello":
            contexts = [context.describe() for context in self.contexts.values()]
            self.send({"ev": "hello", "version": VERSION, "nonce": order["nonce"], "seen": self.seen, "contexts": contexts})
        elif do == "start":
            if order["id"] in self.contexts:
                raise Refused("busy", "there is such a context")
            cwd = order.get("cwd") or os.getcwd()
            if not os.path.isdir(cwd) or not os.access(cwd, os.X_OK):
                raise Refused("cwd", "the working directory could not be entered")
            context = Context(self, order["id"], order["createdMs"], cwd, order["env"])
            self.contexts[context.name] = context
            try:
                await context.open()
            except BaseException:
                self.contexts.pop(context.name, None)
                raise
        elif do == "run":
            self.known(order).run(order["cell"], order["code"], order["timeoutMs"] / 1000)
        elif do == "interrupt":
            cell = self.known(order).cell
            if cell and order.get("cell") in (None, cell.name):
                cell.interrupt()
        elif do == "restart":
            context = self.known(order)
            if context.state == "starting":
                raise Refused("busy", "the context is starting")
            context.state = "starting"
            await context.shut()
            await context.open()
        elif do == "close":
            context = self.known(order)
            if context.state == "starting":
                raise Refused("busy", "the context is starting")
            context.state = "starting"
            await context.shut()
            self.contexts.pop(context.name, None)
        else:
            raise Refused("unknown", "there is no such command")

    async def carry_out(self, order):
        answer = {"ev": "reply", "seq": order.get("seq")}
        try:
            await self.obey(order)
        except Refused as no:
            answer["error"] = {"kind": no.kind, "why": str(no)}
        except (KeyError, TypeError, ValueError, OSError) as fault:
            answer["error"] = {"kind": "failed", "why": cut(f"{type(fault).__name__}: {fault}", 500)[0]}
        if order["do"] != "hello":
            self.send(answer)

    async def live(self):
        out = os.fdopen(1, "wb", 0, closefd=False)
        self.writer, _ = await self.loop.connect_write_pipe(asyncio.streams.FlowControlMixin, out)
        listening = self.loop.create_task(self.listen())
        await self.over
        listening.cancel()

    async def listen(self):
        lines = asyncio.StreamReader(limit=16 * 1024 * 1024)
        await self.loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), self.reader)
        while True:
            try:
                line = await lines.readline()
            except ValueError:
                continue
            if not line:
                break
            try:
                order = json.loads(line)
                if order["do"] != "hello":
                    if order["seq"] <= self.seen:
                        continue
                    self.seen = order["seq"]
            except (ValueError, KeyError, TypeError):
                continue
            task = self.loop.create_task(self.carry_out(order))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        if not self.over.done():
            self.over.set_result(None)


def main():
    # The user's machine may be short of memory: a kernel goes first, this last.
    set_oom_score(-500)
    try:
        load()
    except ImportError as missing:
        print(json.dumps({"ev": "unable", "why": cut(str(missing), 500)[0]}), flush=True)
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    place = tempfile.mkdtemp(prefix="mb-contexts-")
    if os.fork() == 0:
        try:
            ours.close()
            nurse(theirs, place)
        finally:
            os._exit(1)
    theirs.close()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(Bridge(loop, ours, sys.stdin, place).live())
    finally:
        ours.close()
        shutil.rmtree(place, ignore_errors=True)
        os._exit(0)


if __name__ == "__main__":
    main()
