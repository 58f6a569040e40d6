"""A first session: what a harness does with a machine, step by step, and how long each step takes.

Needs MAINBRELLA_API_KEY (and MAINBRELLA_API_URL when the service is not on 127.0.0.1:8787); `./run env` prints both.
"""

import os
import sys
import time

from mainbrella import Mainbrella

REPORT = """\
import json, platform, sys
print(json.dumps({"python": platform.python_version(), "kernel": platform.release(), "argument": sys.argv[1]}))
"""


class Stopwatch:
    """Prints what was done and how long it took."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def lap(self, what: str, result: str = "") -> None:
        now = time.perf_counter()
        print(f"  {(now - self.last) * 1000:8.0f} ms  {what:<34} {result}", flush=True)
        self.last = time.perf_counter()


def main() -> None:
    client = Mainbrella(os.environ["MAINBRELLA_API_KEY"])
    isolation = client.capabilities()["isolation"]
    print(f"\nA session on this host ({isolation['vmm']}, {isolation['kind']}):\n")
    watch = Stopwatch()

    # The first machine of a size freezes its template in that size, which takes some seconds, once.
    with client.create(catalog_id="python", size="small") as sandbox:
        watch.lap("create a machine", f"{sandbox.id} {sandbox.created_at}")

        sandbox.commands.run("true")
        watch.lap("first command")

        result = sandbox.commands.run("uname -sr; python --version; grep PRETTY /etc/os-release | cut -d'\"' -f2")
        watch.lap("ask who it is", "; ".join(result.stdout.split("\n")[:3]))

        data = os.urandom(4 * 1024 * 1024)
        sandbox.files.write("/workspace/data.bin", data)
        watch.lap("write a file of 4 MiB")
        if sandbox.files.read("/workspace/data.bin") != data:
            sys.exit("the file came back different")
        watch.lap("read it back", "byte for byte the same")

        sandbox.files.write("/workspace/report.py", REPORT)
        result = sandbox.commands.run(["python3", "report.py", "odd 'name' \"here\""], cwd="/workspace")
        watch.lap("run a program", result.stdout.strip())

        result = sandbox.commands.run("echo started; sleep 60", timeout_ms=500)
        watch.lap("let one run into its time limit", f"timed_out={result.timed_out}, kept: {result.stdout.strip()!r}")

    watch.lap("stop exactly that machine")

    with client.create(catalog_id="python", size="small") as sandbox:
        watch.lap("create another", sandbox.created_at)
    watch.lap("and stop it")


if __name__ == "__main__":
    main()
