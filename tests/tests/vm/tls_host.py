"""A host of the world with TLS: says what it was asked, or gives back what it was sent. Arguments: certificate, key."""

import http.server
import ssl
import sys


class Host(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.reply(f"{self.headers.get('Authorization')} {self.headers.get('X-Own')}\n".encode())

    def do_PUT(self):
        length = int(self.headers["Content-Length"])
        self.send_response(200)
        self.send_header("Content-Encoding", self.headers.get("Content-Encoding", "identity"))
        self.send_header("Content-Length", str(length))
        self.end_headers()
        while length:
            piece = self.rfile.read(min(length, 65536))
            length -= len(piece)
            self.wfile.write(piece)

    def reply(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1], sys.argv[2])
server = http.server.ThreadingHTTPServer(("0.0.0.0", 443), Host)
server.socket = context.wrap_socket(server.socket, server_side=True)
print("ready", flush=True)
server.serve_forever()
