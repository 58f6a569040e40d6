"""A template whose server runs already: built from a recipe once, every machine of it answers at once.

Run it against a service: `eval "$(./run env)"; python3 examples/warm_template.py`. It needs an admin key.
"""

from __future__ import annotations

import sys
import time
import urllib.request

from mainbrella import Mainbrella

RECIPE = """\
FROM python
ARG GREETING=hello
WORKDIR /srv/site
RUN useradd --create-home web && chown web /srv/site
USER web
RUN echo "$GREETING from a machine of your own" > index.html
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD python3 -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/')"
CMD ["python3", "-m", "http.server", "8000"]
"""


def show(event: dict[str, object]) -> None:
    if event["kind"] == "step":
        cached = " (cached)" if event["cached"] else ""
        print(f"  [{event['step']}/{event['steps']}] {event['text']}{cached}")


def fetch(path_url: str) -> bytes:
    with urllib.request.urlopen(path_url, timeout=30) as reply:
        return reply.read()


def main() -> int:
    with Mainbrella() as client:
        template = client.templates.build("warm-site", recipe=RECIPE, size="micro", internet=False, on_log=show)
        print(f"built {template['name']}")
        for attempt in ("first", "second"):
            begun = time.monotonic()
            with client.create("warm-site", size="micro", internet=False) as sandbox:
                preview = sandbox.previews.create(8000)
                answer = fetch(preview["pathUrl"])
                print(f"{attempt} machine answered after {(time.monotonic() - begun) * 1000:.0f} ms: {answer.decode().strip()}")
                assert answer == b"hello from a machine of your own\n", answer
                assert sandbox.commands.run("id -un").stdout == "web\n"
        again = client.templates.build("warm-site", recipe=RECIPE, size="micro", internet=False)
        assert again["name"] == template["name"], "nothing has changed"
    return 0


if __name__ == "__main__":
    sys.exit(main())
