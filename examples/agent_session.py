"""An agent's session: a job that is left and taken up again, a tree in and out, and an interpreter with a memory.

Needs MAINBRELLA_API_KEY (and MAINBRELLA_API_URL when the service is not on 127.0.0.1:8787); `./run env` prints both.
"""

import asyncio
import tempfile
from itertools import islice
from pathlib import Path

from mainbrella import AsyncMainbrella, AsyncSandbox, Execution, Mainbrella, Sandbox

PROJECT = {
    "primes.py": """\
import sys
for n in range(2, int(sys.argv[1])):
    if all(n % d for d in range(2, int(n**0.5) + 1)):
        print(n, flush=True)
""",
    "README.md": "Counts primes.\n",
}

PLOT = """
import matplotlib.pyplot as plt
gaps = [b - a for a, b in zip(primes, primes[1:])]
plt.plot(gaps)
plt.show()
"""


def follow_a_job(sandbox: Sandbox) -> None:
    """Starts a job, reads a part of what it says, and goes on elsewhere with its id and cursor alone."""
    job = sandbox.commands.start(["python3", "primes.py", "2000"], cwd="/workspace/project")
    with job.events() as events:
        first = list(islice(events, 5))
    print(f"  job {job.id}: left after event {first[-1].cursor}")

    again = Execution(sandbox, job.id, cursor=job.cursor)
    rest = list(again.events())
    text = "".join(e.text for e in [*first, *rest] if e.type == "output")
    last = rest[-1]
    assert last.type == "exit" and text.split()[-1] == "1999"
    print(f"  taken up again, {len(text.split())} primes in all, nothing lost or repeated; exit code {last.exit_code}")
    sandbox.files.write("/workspace/project/primes.txt", text)


def think_in_python(sandbox: Sandbox) -> None:
    """Runs code in an interpreter that remembers, and gets a picture back."""
    with sandbox.create_code_context(cwd="/workspace/project") as ctx:
        ctx.run_code("primes = [int(line) for line in open('primes.txt')]")
        print("  the largest:", ctx.run_code("max(primes)").text)
        failed = ctx.run_code("primes['no']")
        print("  a mistake is a normal result:", failed.error)
        plot = ctx.run_code(PLOT, timeout_seconds=120)
        pictures = [output.png for output in plot.results if output.png]
        print(f"  a plot of {len(pictures[0] or b'')} bytes of PNG")


async def many_at_once(id: str, created_at: str) -> None:
    """The same machine through the asynchronous client: jobs side by side."""

    async def one(sandbox: AsyncSandbox, n: int) -> int:
        job = await sandbox.commands.start(f"sleep 0.5; exit {n}")
        return (await job.wait()).exit_code

    async with AsyncMainbrella() as client:
        sandbox = await client.connect(id, created_at)
        codes = await asyncio.gather(*(one(sandbox, n) for n in range(10)))
    print("  exit codes of ten jobs at once:", codes)


def main() -> None:
    """Runs the session."""
    with Mainbrella() as client, client.create(metadata={"example": "agent session"}) as sandbox:
        print(f"machine {sandbox.id} {sandbox.created_at}")
        with tempfile.TemporaryDirectory() as folder:
            for name, text in PROJECT.items():
                Path(folder, name).write_text(text, "utf-8")
            sent = sandbox.files.upload_tree(folder, "/workspace/project")
            print(f"  a tree of {sent.entries} entries went in")
            follow_a_job(sandbox)
            think_in_python(sandbox)
            asyncio.run(many_at_once(sandbox.id, sandbox.created_at))
            got = sandbox.files.download_tree("/workspace/project", Path(folder, "back"))
            print(f"  and {got.entries} entries, {got.bytes} bytes, came out")


if __name__ == "__main__":
    main()
