"""An application to look at through a preview: a page, cookies, a stream of events, a WebSocket, bodies of any size.

``python3 preview_app.py PORT NAME`` listens on the loopback address alone.
"""

import asyncio
import base64
import hashlib
import sys

PAGE = """<!doctype html><title>working</title><script>
const told = {};
const parts = {
  who: async () => (await fetch("/who")).text(),
  posted: async () => (await fetch("/count", {method: "POST", body: "x".repeat(100000)})).text(),
  socket: () => new Promise((done, failed) => {
    const socket = new WebSocket(`ws://${location.host}/ws`);
    socket.onopen = () => socket.send("ping");
    socket.onmessage = (event) => { socket.close(); done(event.data); };
    socket.onerror = () => failed("the socket failed");
  }),
  event: () => new Promise((done, failed) => {
    const source = new EventSource("/events");
    source.onmessage = (event) => { source.close(); done(event.data); };
    source.onerror = () => failed("the stream failed");
  }),
};
(async () => {
  document.cookie = "script=NAME; domain=localhost";
  for (const [name, part] of Object.entries(parts)) {
    try { told[name] = await part(); } catch (error) { told[name] = String(error); }
  }
  told.cookie = document.cookie;
  document.title = JSON.stringify(told);
})();
</script>"""


async def frame(reader):
    """One message of a WebSocket, without fragments; ``None`` at its end."""
    first, second = await reader.readexactly(2)
    length = second & 127
    if length == 126:
        length = int.from_bytes(await reader.readexactly(2), "big")
    mask = await reader.readexactly(4)
    data = bytes(b ^ mask[i % 4] for i, b in enumerate(await reader.readexactly(length)))
    return None if first & 15 == 8 else data


async def socket(reader, writer, headers):
    accept = hashlib.sha1(headers["sec-websocket-key"].encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
    writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
                 b"Sec-WebSocket-Accept: " + base64.b64encode(accept) + b"\r\n\r\n")
    while (data := await frame(reader)) is not None:
        head = bytes([129, len(data)]) if len(data) < 126 else bytes([129, 126]) + len(data).to_bytes(2, "big")
        writer.write(head + data)
        await writer.drain()


async def body(reader, headers):
    """The pieces of a request's body."""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            yield await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
        return
    left = int(headers.get("content-length", 0))
    while left:
        piece = await reader.read(min(left, 65536))
        left -= len(piece)
        yield piece


async def serve(reader, writer):
    try:
        while line := await reader.readline():
            method, path, _ = line.decode().split()
            headers = {}
            while (line := await reader.readline()) not in (b"\r\n", b""):
                name, _, value = line.decode().partition(":")
                headers[name.strip().lower()] = value.strip()
            count, digest = 0, hashlib.sha256()
            async for piece in body(reader, headers):
                count += len(piece)
                digest.update(piece)

            def reply(content, kind="text/plain", extra=""):
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n{extra}\r\n"
                             .encode() + content)

            if path == "/ws":
                return await socket(reader, writer, headers)
            if path == "/events":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
                for n in range(100000):
                    writer.write(f"data: {n}\n\n".encode())
                    await writer.drain()
                    await asyncio.sleep(0.1)
            elif path == "/count":
                reply(f"{count} {digest.hexdigest()}".encode())
            elif path.startswith("/bytes/"):
                size = int(path.removeprefix("/bytes/"))
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode())
                for at in range(0, size, 65536):
                    writer.write(bytes(min(65536, size - at)))
                    await writer.drain()
            elif path == "/who":
                told = "\n".join(f"{n}: {headers.get(n, '')}" for n in ("host", "cookie", "x-forwarded-proto"))
                reply(told.encode())
            else:
                cookie = f"Set-Cookie: sid={NAME}; Domain=localhost; Path=/; HttpOnly\r\n"
                reply(PAGE.replace("NAME", NAME).encode(), "text/html", cookie)
            await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]))
    async with server:
        await server.serve_forever()


NAME = sys.argv[2]
asyncio.run(main())
