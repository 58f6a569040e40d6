"""Plays a person at a terminal: the shell verb under a pseudo-terminal, and what is typed and seen.

Usage: person.py PROGRAM MACHINE
"""

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

program, machine = sys.argv[1:3]

def size(fd, rows, cols):
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

def begin(*words):
    pid, fd = pty.fork()
    if pid == 0:
        os.execv(program, [program, *words])
    size(fd, 31, 97)
    rest.pop(fd, None)
    return pid, fd

# What came after that which was waited for, in the same read: it is the next one's.
rest = {}

def see(fd, text, seconds=40):
    seen, end = rest.pop(fd, b""), time.time() + seconds
    while text not in seen:
        assert time.time() < end, (text, seen)
        if select.select([fd], [], [], 0.2)[0]:
            try:
                data = os.read(fd, 65536)
            except OSError:
                data = b""
            assert data, (text, seen)
            seen += data
    at = seen.index(text) + len(text)
    rest[fd] = seen[at:]
    return seen[:at]

def end(pid, fd):
    try:
        while os.read(fd, 65536):
            pass
    except OSError:
        pass
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

pid, fd = begin("shell", machine, "--", "/bin/bash", "--norc", "-i")
see(fd, b"# ")
os.write(fd, b"PS1='re''ady> '\r")
see(fd, b"ready> ")
os.write(fd, b"stty size; tty\r")
see(fd, b"/dev/pts/")
size(fd, 44, 111)
# The new size arrives when it does; a person would look again, too.
for again in range(20):
    os.write(fd, b"stty size; echo loo''ked\r")
    if b"44 111" in see(fd, b"looked\r\n"):
        break
    time.sleep(0.5)
else:
    raise AssertionError("the terminal has its old size")
os.write(fd, b"echo be''gun; sleep 300\r")
see(fd, b"begun\r\n")
time.sleep(1)
os.write(fd, b"\x03")
os.write(fd, b"echo code=$?\r")
see(fd, b"code=130")
see(fd, b"ready> ")
os.write(fd, b"export KEPT=marker; echo s''et\r")
see(fd, b"set\r\n")
os.write(fd, b"\x1d")
said = see(fd, b"comes back")
assert b"--attach " in said and end(pid, fd) == 0

listed = json.loads(subprocess.check_output([program, "--json", "jobs", machine]))
job = listed["executions"][0]["id"]
assert listed["executions"][0]["state"] == "running"
pid, fd = begin("shell", machine, "--attach", job[:20])
see(fd, b"ready> ")
os.write(fd, b"echo $KEPT again\r")
see(fd, b"marker again")
os.write(fd, b"exit 7\r")
assert end(pid, fd) == 7
pid, fd = begin("shell", machine)
see(fd, b"# ")
os.write(fd, b"echo $TERM; exit 3\r")
see(fd, b"xterm-test\r\n")
assert end(pid, fd) == 3
pid, fd = begin("shell", machine, "--", "/no/such/program")
assert end(pid, fd) == 127
print("played")
