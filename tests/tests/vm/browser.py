"""Debian's Chromium, driven through its chromedriver with nothing but the standard library.

Pages tell what they see as JSON in their title.
``python3 browser.py URL_ONE URL_TWO`` looks at two previews in one browser, and prints what they told.
``python3 browser.py --follow URL`` prints what a page tells now, and again each time it tells something else, until its standard input ends.
"""

import contextlib
import json
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

PATIENCE = 120


@contextlib.contextmanager
def browser():
    """Gives a function that asks the session of a new browser."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    profile = tempfile.mkdtemp(prefix="mb-browser-")
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            return json.load(reply)["value"]

    session = None
    try:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                ask("GET", "/status")
                break
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
                 "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
        options = {"binary": shutil.which("chromium"), "args": flags}
        made = ask("POST", "/session", {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}})
        session = f"/session/{made['sessionId']}"
        yield lambda method, path, body=None: ask(method, session + path, body)
    finally:
        if session:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                ask("DELETE", session)
        driver.terminate()
        try:
            driver.wait(20)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()
        shutil.rmtree(profile, ignore_errors=True)


def told(ask):
    """What the page tells; none before it tells anything."""
    title = ask("GET", "/title")
    return json.loads(title) if title.startswith("{") else None


def look(ask, url):
    """Opens a page and waits for what it tells."""
    ask("POST", "/url", {"url": url})
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if (found := told(ask)) is not None:
            return found
        time.sleep(0.1)
    raise TimeoutError(f"the page did not finish; its title is {ask('GET', '/title')!r}")


def follow(ask, url):
    last = look(ask, url)
    print(json.dumps(last), flush=True)
    while not (select.select([sys.stdin], [], [], 0.1)[0] and not sys.stdin.read(1)):
        now = told(ask)
        if now not in (None, last):
            last = now
            print(json.dumps(last), flush=True)


def main():
    with browser() as ask:
        if sys.argv[1] == "--follow":
            follow(ask, sys.argv[2])
        else:
            one, two = sys.argv[1:]
            print(json.dumps({"one": look(ask, one), "two": look(ask, two), "one again": look(ask, one)}))


main()
