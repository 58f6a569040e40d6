import os, sys
sys.path[:] = [place for place in sys.path if place]
left, text = int(sys.argv[1]), b""
while left > len(text):
    part = os.read(0, left - len(text))
    if not part:
        sys.exit(1)
    text += part
exec(compile(text, "mainbrella-contexts", "exec"))
