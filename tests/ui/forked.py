"""What a Jupyter server starts as a kernel: asks for a forked one, and lives, hears signals and ends as it does.

python -I -S forked.py SOCKET CONNECTION_FILE [OPTION of the kernel: ignored]…
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path


def main(address: str, connection: str) -> None:
    """Have the kernel forked and return when it is gone."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(address)
        peer.sendall(json.dumps({"connection": connection, "cwd": str(Path.cwd())}).encode())
        pid = int(peer.recv(64))

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    with contextlib.suppress(ProcessLookupError):
        kernel = os.pidfd_open(pid)
        select.select([kernel], [], [])


main(*sys.argv[1:3])
