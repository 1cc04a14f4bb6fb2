"""Following printed advice: each line is run as it stands, and must give back what it says.

Every command that a kernel of the tests prints is collected and followed, each in a fork of that kernel, so that the test
itself goes on with the state that it has made (`follow_printed`): on the fake device, which goes on in a fork as well, in a
thorough run. A GPU does not: tests there follow by themselves.
"""

from __future__ import annotations

import re

from nbguard.memory.core import advice
from tests.fake_cuda.launch import DEVICE_NAME
from tests.kernels import Cell, Kernel
from tests.thorough import THOROUGH

_LOOK = "__import__('sys').modules['nbguard.memory.scan.scan']"
_GRAPH = f"{_LOOK}.scan({_LOOK}.Notebook(shell=get_ipython(), namespace=get_ipython().user_ns)).facts.graph"
_UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}

_COMMAND = re.compile(r"`(%(?:reset_gpu|gpumem|nbguard)[^`\n]*)`|  (%(?:reset_gpu|gpumem|nbguard)[^`\n]*)$", re.MULTILINE)
_CODE = re.compile("`([^`]+)`")
_PYTHON = re.compile(
    r"`(import [^`\n]+|[^`\s=]+\.(?:(?:clear|cache_clear|zero_grad)\(\)|shutdown\([^`\n]*\))"
    r"|[^`\s=]+ = (?:None|[^`\n]*clone\(\)))`"
)
"""Lines of Python that `memory.core.advice` makes. Only the kernel knows whether one that is shown is meant to be run."""
_WITH_A_WORD = {advice.WHY.command, advice.SNAPSHOT.command}  # a name or a file's name is to be added
_FIXED = sorted(
    {
        line.command
        for line in vars(advice).values()
        if isinstance(line, advice.Advice) and line.command.startswith("%") and not line.command.endswith("NAME")
    }
    - _WITH_A_WORD,
    key=len,
    reverse=True,
)
_IN_A_SENTENCE = re.compile(rf"(?<![`\w])({'|'.join(map(re.escape, _FIXED))})(?=[\s,;:.)]|$)(?! [-\w])", re.MULTILINE)
"""Commands without a name of the user's, where they stand in brackets or in a table."""
_FOLLOWED: set[str] = set()
"""Commands that have been followed in this run of the tests, without their names: once each, in a thorough run all."""
_PLACEHOLDERS = ("NAME", "FILE", "TARGETS", "PID")

# In the kernel: each line or group of lines that the text shows, followed in a fork, and the bytes that are free then.
_FOLLOW = '''
def _follow_printed(text, commands, fake):
    import gc, io, json, os, select, signal, sys
    import nbguard
    from nbguard.memory.reports.notices.view import notice_line
    from nbguard.memory.scan.scan import Notebook, scan
    shell = __import__('IPython').get_ipython()
    def told():
        """Yield the lines of each notice that the text shows, the bytes that they promise together, and those it is about."""
        for notice in nbguard.notices():
            if notice.advice and notice_line(notice) in text:
                yield tuple(notice.command.splitlines()), notice.frees, notice.nbytes - notice.view_nbytes
    def reported():
        """Yield the same of a report's findings and of a card: to ask for them looks at the heap."""
        report, card = nbguard.report(), nbguard.oom()
        for finding in report.findings:
            yield (finding.advice.command,), finding.advice.frees, 0
        for fix in () if card is None else card.fixes:
            yield fix.commands, None, 0
    def run(lines):
        if '%reset_gpu' not in lines:  # which promises what the collector frees, too
            gc.collect()
        before = scan(Notebook(shell=shell, namespace=shell.user_ns))
        for line in lines:
            result = shell.run_cell(line, store_history=True)
            error = result.error_before_exec or result.error_in_exec
            if error is not None:
                return {'lines': lines, 'error': f'{type(error).__name__}: {error}'}
        gc.collect()
        nbytes = sum(before.facts.graph.storages[n].nbytes for n in before.tracker.expired())
        if not any(line.startswith('%') for line in lines):  # of a view its copy stays
            nbytes -= bytes_beside(before, scan(Notebook(shell=shell, namespace=shell.user_ns)))
        return {'lines': lines, 'freed': nbytes}
    def bytes_beside(before, after):
        """Return the bytes that have come since."""
        dead = before.tracker.expired()
        known = {(s.device, s.address) for n, s in enumerate(before.facts.graph.storages) if n not in dead}
        return sum(s.nbytes for s in after.facts.graph.storages if (s.device, s.address) not in known)
    def in_a_fork(act):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(60)
                sys.stdout = sys.stderr = io.StringIO()
                sys.modules['torch'].cuda._is_in_bad_fork = lambda: False  # the fake device is memory of this process
                os.write(writing, json.dumps(act()).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, 'rb') as pipe:
            answer = pipe.read()
        os.waitpid(pid, 0)
        return json.loads(answer) if answer else None
    cuda = sys.modules['torch'].cuda
    if cuda.is_initialized() and not cuda.get_device_name().startswith(fake):
        return []
    def followed():
        return {line for lines, _, _ in shown if len(lines) == 1 for line in lines}
    def is_shown(group):
        return group[0] and all(f'`{line}`' in text for line in group[0])
    shown = list(told())
    if set(commands) - {line for lines, _, _ in shown for line in lines}:
        shown += in_a_fork(lambda: list(filter(is_shown, reported()))) or []
    shown += [((command,), None, 0) for command in commands if command not in followed()]
    return [dict(in_a_fork(lambda lines=lines: run(lines)) or {'lines': lines, 'error': 'it died'}, frees=frees, about=about)
            for lines, frees, about in shown]
'''


def follow_printed(kernel: Kernel, cell: Cell) -> None:
    """Run every command that a cell has shown, in a fork of its kernel: none fails, and each frees what it promises."""
    text = cell.text + "\n" + cell.stdout
    magics = [first or second.strip() for first, second in _COMMAND.findall(text)]
    shown = dict.fromkeys([*magics, *_IN_A_SENTENCE.findall(text), *_PYTHON.findall(text)])
    commands = [command for command in shown if not any(word in command.split() for word in _PLACEHOLDERS)]
    if text.startswith("{") or ("`" not in text and not commands):
        return
    shapes = {re.sub(r"(?<![-%])\b\w[\w.'\"\[\]]*", "·", code) for code in (*_CODE.findall(text), *commands)}
    if shapes <= _FOLLOWED and not THOROUGH:
        return
    _FOLLOWED.update(shapes)
    if not kernel.value("'torch' in __import__('sys').modules and 'nbguard' in get_ipython().extension_manager.loaded"):
        return
    kernel.run_silently(f"exec({_FOLLOW!r}, __import__('builtins').__dict__)")
    for result in kernel.value(f"_follow_printed({text!r}, {commands!r}, {DEVICE_NAME!r})"):
        assert "error" not in result, (result, text)
        assert result["frees"] in (None, result["freed"]), (result, text)
        assert result["freed"] >= result["about"], (result, text)


def follow(kernel: Kernel, command: str) -> int:
    """Run the lines of a command and return the bytes that tensors hold less than before."""
    before = held(kernel)
    for line in command.splitlines():
        kernel.run(line).ok()
    kernel.run_silently("__import__('gc').collect()")
    return before - held(kernel)


def held(kernel: Kernel) -> int:
    """Return the bytes that all tensors hold."""
    nbytes: int = kernel.value(f"sum(storage.nbytes for storage in {_GRAPH}.storages)")
    return nbytes


def promised(sentence: str) -> float:
    """Return the first amount of bytes that a sentence names; it is rounded to three digits."""
    amount = re.search(r"(?:frees |of )(\d+(?:\.\d+)?) ([KMG]?i?B)", sentence)
    assert amount is not None, sentence
    return float(amount[1]) * _UNITS[amount[2]]


def follow_finding(kernel: Kernel, finding: tuple[str, str]) -> None:
    """Run a finding's command: it frees what the sentence says, to the three digits that it shows."""
    sentence, command = finding
    expected = promised(sentence.partition("`")[2].partition("`")[2] if "frees" in sentence else sentence)
    freed = follow(kernel, command)
    assert abs(freed - expected) <= 0.005 * max(expected, 1024**2), (sentence, command, freed)
