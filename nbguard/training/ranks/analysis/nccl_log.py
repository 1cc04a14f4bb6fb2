"""Important parts of a rank's NCCL log, in a sentence each: warnings with a known cause, and a slow way between hosts."""

from __future__ import annotations

import re

from nbguard.render.words import clean

_MOST = 5
_KNOWN: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (
            r"Duplicate GPU detected : rank (\d+) and rank (\d+) both on CUDA device (\w+)",
            "ranks {0} and {1} use the same GPU ({2}): call `torch.cuda.set_device(int(os.environ['LOCAL_RANK']))` first",
        ),
        (
            r"failed to extend /dev/shm|Error while creating shared memory segment|posix_fallocate failed : No space",
            "NCCL's buffers have no room in /dev/shm; give the container more (`--shm-size=8g`, or `--ipc=host`)",
        ),
        (
            r"Error while attaching to shared memory segment",
            "a rank cannot open another rank's shared memory; run all ranks of a host in one container, or with `--ipc=host`",
        ),
        (
            r"ibv_modify_qp failed with error ([\w ]+)",
            "InfiniBand or RoCE does not connect ({0}): see `NCCL_IB_HCA` and `NCCL_IB_GID_INDEX`, or try `NCCL_IB_DISABLE=1`",
        ),
        (
            r"ibv_reg_mr\w{0,20} failed with error ([\w ]+)",
            "memory cannot be registered for InfiniBand ({0}): `ulimit -l unlimited` where the ranks are launched",
        ),
        (
            r"NET/IB : Got completion from peer (\S+?)<\d+> with (?:status|error|opcode)\D*(\d+)",
            "a message over InfiniBand to {0} was lost (status {1}) because the peer ended or the link is broken",
        ),
        (
            r"[Nn]o socket interface found",
            "no network interface fits; name one that is up in `NCCL_SOCKET_IFNAME`",
        ),
        (
            r"(?:[Cc]onnect to|Call to connect) \S* ?(?:returned|failed)[ :]+([\w ]+)",
            "a rank does not reach another ({0}): a firewall, or an interface that only one host has (`NCCL_SOCKET_IFNAME`)",
        ),
        (
            r"Connection closed by (?:remote )?peer (\S+?)<\d+>",
            "the peer {0} closed its connection because its rank ended first; see its output",
        ),
        (
            r"Message truncated : received (\d+) bytes instead of (\d+)",
            "a rank received {0} bytes instead of {1} because the ranks call collectives of different sizes",
        ),
        (
            r"Cuda failure (?:\d+ )?'([^']+)'",
            "CUDA failed in NCCL: {0}",
        ),
    )
)
_CHANNEL, _BY_SOCKET = "NCCL INFO Channel ", " via NET/Socket"
_LONGEST = 2000
"""Characters of a line that are read: NCCL's have some 200."""
_NO_IB = re.compile(r"NET/IB : No device found")


def nccl_notes(text: str) -> tuple[str, ...]:
    """Return the notes on a log of NCCL (`NCCL_DEBUG=WARN` or `INFO`), each kind of trouble once."""
    notes: dict[str, str] = {}
    goes_by_socket = False
    for whole_line in text.splitlines():
        line = whole_line[:_LONGEST]
        goes_by_socket = goes_by_socket or _BY_SOCKET in line.partition(_CHANNEL)[2]
        if "NCCL WARN" not in line:
            continue
        for pattern, words in _KNOWN:
            match = None if words in notes else pattern.search(line)
            if match:
                notes[words] = clean(words.format(*(group or "" for group in match.groups())), 200)
    if goes_by_socket:
        why = ": no InfiniBand device is found" if _NO_IB.search(text) else ""
        notes["socket"] = f"between hosts NCCL uses TCP sockets, which are many times slower{why}"
    return tuple(notes.values())[:_MOST]
