"""Looks at two previews in one real browser: ``python3 browser.py URL_ONE URL_TWO``. Prints what the pages told, as JSON.

Drives Debian's Chromium through its chromedriver, with nothing but the standard library.
"""

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

PATIENCE = 120


def main():
    one, two = sys.argv[1:]
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

        def look(url):
            ask("POST", session + "/url", {"url": url})
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end:
                title = ask("GET", session + "/title")
                if title.startswith("{"):
                    return json.loads(title)
                time.sleep(0.1)
            raise TimeoutError(f"the page did not finish; its title is {title!r}")

        print(json.dumps({"one": look(one), "two": look(two), "one again": look(one)}))
    finally:
        if session:
            try:
                ask("DELETE", session)
            except (urllib.error.URLError, ConnectionError):
                pass
        driver.terminate()
        try:
            driver.wait(20)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()
        shutil.rmtree(profile, ignore_errors=True)


main()
