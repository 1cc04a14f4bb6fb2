"""Random programs of a notebook, cell by cell, and what comes of each command that nbguard prints, followed as printed.

A program is a seed. Each runs in a process of its own, and each command in a fork of it, so that all meet the same state.
Whatever the libraries have made is frozen before: each look then goes through the program's own objects alone.
By hand: `python -m tests.zoo.programs FIRST COUNT` prints what went wrong, a line of JSON each.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import random
import re
import signal
import sys
import tempfile
import traceback
import types
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

CELLS = 12
"""Cells of a program."""
_SECONDS = 3000
_WIDE = 768
_UNSEEN = 65_536
"""Bytes of a graph's own tensors that may come back besides: what is frozen hides who holds them."""
_NOT_FOLLOWED = (types.ModuleType, type, str, int, types.CodeType, types.FrameType)
_OF_PLANS = ("plan", "target", "kept")
"""Sources of commands whose promise counts the cycles that the collector takes, as each `%reset_gpu NAME` does."""
_WARM_UP = (
    "m = make(); opt = torch.optim.Adam(m.parameters()); step(m, opt)",
    "x = m(torch.ones(2, 768)).sum(); x",
    "broken(x)",
    "m = make()",
    "%reset_gpu --park m",
    "%reset_gpu --unpark",
    "%reset_gpu x",
    "%reset_gpu",
    "no_such_name",
)
"""Cells that import whatever a program's may import."""

_PRELUDE = f"""
import copy
import torch
from torch import nn
def make(): return nn.Sequential(nn.Linear({_WIDE}, {_WIDE}), nn.Linear({_WIDE}, 8))
def step(net, opt):
    opt.zero_grad(); net(torch.ones(2, {_WIDE})).sum().backward(); opt.step()
def broken(thing):
    batch = torch.ones(700_000)
    raise ValueError('broken')
class Exp: pass
"""


@dataclass(frozen=True)
class Command:
    """Lines that nbguard printed after a cell, and the bytes that they promise; None: it did not say."""

    source: str  # where it stood
    lines: tuple[str, ...]
    frees: int | None = None


class Program:
    """A random program: yields one cell after the other, each of which can run after those before it."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.kinds: dict[str, str] = {}

    def cells(self) -> Iterator[str]:
        """Yield the cells; `self.kinds` are the names bound so far, by what they are bound to."""
        for _ in range(CELLS):
            yield self.dice.choice(self._possible())()

    def _of(self, *kinds: str) -> list[str]:
        return [name for name, kind in self.kinds.items() if kind in kinds]

    def _bind(self, name: str, kind: str, expression: str) -> str:
        self.kinds[name] = kind
        return f"{name} = {expression}"

    def _new(self, kind: str) -> str:
        return self.dice.choice({"tensor": "xyzw", "net": "mn", "list": "kl"}[kind])

    def _possible(self) -> list[Callable[[], str]]:
        pick, of, bind = self.dice.choice, self._of, self._bind
        found: list[Callable[[], str]] = [
            lambda: bind(self._new("tensor"), "tensor", "torch.randn(1_000_000)"),
            lambda: bind(self._new("net"), "net", "make()"),
            lambda: bind("losses", "losses", "[]"),
        ]
        if tensors := of("tensor"):
            found += [
                lambda: bind("best", "tensor", pick(tensors)),
                lambda: bind("row", "tensor", f"{pick(tensors)}[3:]"),
                lambda: bind(self._new("list"), "list", f"[{pick(tensors)}, {pick(tensors)}, torch.randn(500_000)]"),
                lambda: bind("d", "dict", f"{{'a': {pick(tensors)}, 'b': torch.randn(500_000), 'lr': 0.1}}"),
                lambda: f"exp = Exp(); exp.x = {pick(tensors)}" if not self.kinds.update(exp="object") else "",
                lambda: bind("f", "code", f"lambda q={pick(tensors)}: q"),
                lambda: f"{pick(tensors)}",
                lambda: f"{pick(tensors)}[5:]",
                lambda: f"broken({pick(tensors)})",
            ]
        if lists := of("list"):
            found += [
                lambda: f"{(name := pick(lists))} = {name}[:1]",
                lambda: f"{pick(lists)}.append(torch.randn(500_000))",
                lambda: bind("best", "tensor", f"{pick(lists)}[0]"),
            ]
        if nets := of("net"):
            found += [
                lambda: bind("opt", "opt", f"torch.optim.Adam({(net := pick(nets))}.parameters()); step({net}, opt)"),
                lambda: bind("opt", "opt", f"torch.optim.SGD({pick(nets)}[1].parameters(), lr=0.1)"),
                lambda: bind("opt", "opt", f"torch.optim.Adam([*{(net := pick(nets))}.parameters()]); step({net}, opt)"),
                lambda: (
                    f"for p in {pick(nets)}[0].parameters(): p.requires_grad_(False)"
                    if not self.kinds.update(p="tensor")
                    else ""
                ),
                lambda: bind("parts", "parts", f"list({pick(nets)}.parameters())"),
                lambda: bind("body", "part", f"{pick(nets)}[0]"),
                lambda: bind("ema", "net", f"copy.deepcopy({pick(nets)})"),
                lambda: bind("other", "net", f"nn.Sequential({pick(nets)}[0], nn.Linear({_WIDE}, 8))"),
                lambda: bind("saved", "state", f"{pick(nets)}.state_dict()"),
                lambda: bind("saved", "state", f"copy.deepcopy({pick(nets)}.state_dict())"),
                lambda: bind("call", "handle", f"{pick(nets)}.forward"),
                lambda: bind("out", "tensor", f"{pick(nets)}(torch.ones(700, {_WIDE}))"),
                lambda: f"{pick(nets)}(torch.ones(2, {_WIDE})).sum()",
                lambda: f"{pick(nets)}",
                lambda: f"broken({pick(nets)})",
                lambda: (
                    f"{pick(nets)}.load_state_dict(saved)"
                    if self.kinds.get("saved") == "state"
                    else bind("saved", "state", f"{pick(nets)}.state_dict()")
                ),
                lambda: bind("runs", "runs", f"{{'a': {pick(nets)}, 'n': 3}}"),
            ]
            if of("losses"):
                found += [lambda: f"losses.append({pick(nets)}(torch.ones(2, {_WIDE})).sum())"] * 2
        if of("parts"):
            found += [lambda: "parts = parts[:1]"] * 2
        if of("opt") and nets:
            found.append(
                lambda: bind("checkpoint", "state", f"{{'model': {pick(nets)}.state_dict(), 'opt': opt.state_dict()}}")
            )
        if of("opt"):
            found.append(lambda: bind("state", "state", "opt.state_dict()"))
        if self.kinds:
            found += [lambda: self._delete(pick([*self.kinds]))] * 3
            found += [lambda: f"%reset_gpu {pick([*self.kinds])}", lambda: f"%reset_gpu --park {pick([*self.kinds])}"]
        found += [lambda: "%reset_gpu --unpark", lambda: "%reset_gpu", lambda: "import gc; gc.collect(); None"]
        return found

    def _delete(self, name: str) -> str:
        del self.kinds[name]
        return f"del {name}"


def names_in(lines: tuple[str, ...]) -> set[str]:
    """Return the names of the notebook that stand in a command."""
    words = [word for line in lines for word in re.split(r"[^\w\[\]'\".]+", line.removeprefix("%reset_gpu")) if word]
    return {found.group() for word in words if (found := re.match(r"[A-Za-z]\w*", word))}


def start_shell() -> Any:
    """Return a new shell of this process, with nbguard loaded and the prelude run."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    for cell in (_PRELUDE, "%load_ext nbguard"):
        run_cell(shell, cell)
    return shell


def run_cell(shell: Any, source: str) -> str:
    """Run a cell and return what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        shell.run_cell(source, store_history=True)
    return out.getvalue()


def _json(analysis: Any) -> str:
    """Return the holders of a report as its JSON has them."""
    from nbguard.memory.reports.report import build_report

    text = build_report(analysis).json_bundle()
    return json.dumps(_holders_in(next(iter(text.values()))))


def _holders_in(data: Any) -> Any:
    found = json.loads(data) if isinstance(data, str) else data
    return found["devices"][0]["holders"]


class Trial:
    """One program in this process, in a shell that has run nothing yet."""

    def __init__(self, shell: Any, seed: int) -> None:
        self.shell, self.seed = shell, seed
        self.wrong, self.followed, self.told = list[str](), 0, set[Command]()
        self.source: list[str] = []

    def run(self) -> dict[str, Any]:
        """Run the program, and each command after each cell; return what went wrong."""
        program = Program(self.seed)
        for cell in program.cells():
            self.source.append(cell)
            self._cell(cell)
            for name in [name for name in program.kinds if name not in self.shell.user_ns]:
                del program.kinds[name]  # a cleanup or an error took it
            self._follow_all(program.dice.choice([*program.kinds, ""]))
        return {"seed": self.seed, "followed": self.followed, "wrong": self.wrong}

    def _cell(self, source: str) -> str:
        return run_cell(self.shell, source)

    def _follow_all(self, name: str) -> None:
        for command in {(command.lines, command.frees): command for command in self._printed(name)}.values():
            self.followed += 1
            problem = _in_a_fork(lambda command=command: self._followed(command))  # type: ignore[misc]
            if problem:
                self.wrong.append(f"seed {self.seed}: {'; '.join(self.source)}\n    {command}\n    {problem}")

    def _printed(self, name: str) -> list[Command]:
        """Return the commands that nbguard prints here: of new notices and findings, of plans for all and for one name."""
        import nbguard
        from nbguard.memory.cleanup.plan.plan import Plan, Request
        from nbguard.memory.cleanup.plan.planner import plan_cleanup
        from nbguard.memory.reports.report import build_report
        from nbguard.memory.scan.scan import Notebook, scan
        from nbguard.memory.scan.targets import resolve_targets

        found: list[Command] = []
        for notice in (notice for notice in nbguard.notices() if notice.advice):
            found += [Command("notice", tuple(line.command for line in notice.advice), notice.frees)]
        notebook = Notebook.current()
        analysis = scan(notebook).analysis
        said_so = [(finding.kind, finding.advice) for finding in build_report(analysis).findings]
        found += [Command(kind, (line.command,), line.frees) for kind, line in said_so if line.command.startswith("%reset_gpu")]
        found = [command for command in found if command not in self.told]
        self.told.update(found)
        if not name:
            everything = plan_cleanup(analysis.facts, Request(everything=True))
            return [*found, Command("plan", ("%reset_gpu --all",), everything.promised)]
        targets = resolve_targets((name,), notebook.namespace, notebook.out, notebook.hidden)
        plan = plan_cleanup(analysis.facts, Request(targets=targets))
        figures = self._figures(analysis, name, plan.promised)
        if len(set(figures.values())) > 1:
            self.wrong.append(f"seed {self.seed}: {'; '.join(self.source)}\n    {name} has more than one figure: {figures}")
        found.append(Command("target", (f"%reset_gpu {name}",), figures["row"]))
        found += [Command("kept", (kept.instead.command,), kept.instead.frees) for kept in plan.kept if kept.instead.command]
        try:
            parking = nbguard.park(name, dry_run=True)
        except nbguard.NbguardError as refused:
            said = str(refused)
        else:
            assert isinstance(parking, Plan)
            said = " ".join(parking.skipped)
            found.append(Command("park", (f"%reset_gpu --park {name}",), parking.promised))
        return [*found, *(Command("park", (line,)) for line in re.findall(r"`(%reset_gpu --park [^`]*)`", said))]

    def _figures(self, analysis: Any, name: str, planned: int) -> dict[str, int]:
        """Return what the release of a name frees, by each surface."""
        import nbguard
        from nbguard.frontend.sidebar.protocol.memory_state import build_memory_state
        from nbguard.memory.cleanup.plan.parking import holders_of
        from nbguard.memory.reports.report import build_report

        rows = [row for row in build_report(analysis).devices[0].holders if name in row.names]
        if not rows or len(rows[0].names) > 1:  # all names of one object have one row, and go together
            return {"row": planned}
        heap, _ = build_memory_state(analysis, "b00t", 1, t=0.0, seconds=0.0, cell=None)
        shown = next(row for row in heap.holders if (row.label, row.kind) == (rows[0].label, rows[0].kind))
        found = {"row": rows[0].frees, "plan": planned, "magic": nbguard.plan(name).promised}
        found |= {"json": next(row["frees"] for row in json.loads(_json(analysis)) if row["label"] == name)}
        with contextlib.suppress(nbguard.TargetError):
            found["why"] = nbguard.why(name).frees
        card = [row for row in analysis.devices[0].once(holders_of) if row.names == (name,)]
        found["card"] = card[0].frees
        if not shown.together:
            return found | {"panel": shown.frees}
        together = nbguard.plan(*rows[0].together.targets).promised
        both = {rows[0].together.frees, shown.frees, nbguard.why(name).together.frees, together}
        return found | {"together": found["row"] if len(both) == 1 else -1}

    def _followed(self, command: Command) -> str:
        """Run a command as printed; return what it did that it should not have, or an empty string."""
        is_plan = command.source in _OF_PLANS or all(line.startswith("%reset_gpu ") for line in command.lines)
        if not is_plan and command.lines != ("%reset_gpu",):
            gc.collect()  # what waits for the collector comes back by no target's doing
        named = {*self.shell.user_ns} if "--all" in command.lines[0] else names_in(command.lines)
        before = _living_bytes()
        sums = {name: _sums(value) for name, value in self._own(named)}
        ready = [name for name in sums if not self._step(name, dry=True)]
        texts = [self._cell(line) for line in command.lines]
        if any("UsageError:" in text or "Traceback" in text for text in texts):
            return f"it failed: {texts[-1].strip()[-300:]}"
        if not is_plan:  # a plan for targets leaves other cycles to the collector
            gc.collect()
        freed = before - _living_bytes()
        if command.frees is not None and not 0 <= freed - command.frees <= _UNSEEN:
            return f"promised {command.frees}, freed {freed}: {texts[-1].strip()}"
        if "--park" in command.lines[0]:  # values are there meanwhile, and a model that is parked says so
            lost = self._lost(sums)
            errors = [error for name in ready if (error := self._step(name, dry=True)) and "ParkedError" not in error]
            self._cell("%reset_gpu --unpark")
            if lost or errors:
                return f"while parked, it took something of {lost}, {errors}"
        if lost := self._lost(sums):
            return f"it took something of {lost}"
        errors = [f"{name} does not run any more: {error}" for name in ready if (error := self._step(name))]
        return "; ".join(errors)

    def _lost(self, sums: dict[str, list[int]]) -> list[str]:
        now = dict(self._own(set()))
        return [name for name, known in sums.items() if name not in now or _sums(now[name]) != known]

    def _own(self, but: set[str]) -> list[tuple[str, Any]]:
        hidden = self.shell.user_ns_hidden
        return [
            (name, value)
            for name, value in self.shell.user_ns.items()
            if not name.startswith("_") and hidden.get(name) is not value and name not in but and name not in ("In", "Out")
        ]

    def _step(self, name: str, *, dry: bool = False) -> str:
        """Let a model or an optimizer of this name do its next step; return the error, if there is one."""
        import torch

        thing = self.shell.user_ns[name]
        is_net = isinstance(thing, torch.nn.Module)
        if not is_net and not isinstance(thing, torch.optim.Optimizer):
            return "nothing to run"
        try:
            if is_net:
                with torch.no_grad():
                    thing(torch.ones(2, _WIDE))
            elif not dry:
                thing.step()
            else:
                for hook in thing._optimizer_step_pre_hooks.values():  # of one that is parked
                    hook(thing, (), {})
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


def _sums(value: Any) -> list[int]:
    """Return a checksum of each tensor that an object leads to, written apart from nbguard's own walk."""
    import torch

    modules = _namespaces_of_modules()
    seen, todo, sums = set[int](), [value], []
    while todo:
        obj = todo.pop()
        if id(obj) in seen or id(obj) in modules or isinstance(obj, _NOT_FOLLOWED):
            continue
        seen.add(id(obj))
        if isinstance(obj, torch.Tensor):
            todo += [obj.grad_fn, obj.grad if obj.is_leaf else None, obj._base]
            data = obj.detach().contiguous()  # no array is made of it: its storage would know that for ever
            sums.append(zlib.crc32((ctypes.c_char * data.nbytes).from_address(data.data_ptr())) if data.nbytes else 0)
        todo += gc.get_referents(obj)
    return sorted(sums)


def _living_bytes() -> int:
    """Return the bytes of all tensors that live and are not parked, counted apart from nbguard's own walk."""
    import torch

    from nbguard.memory.scan.parked import parked_addresses

    seen, storages = set[Any](), dict[int, int]()
    todo: list[Any] = [obj for obj in gc.get_objects() if isinstance(obj, torch.Tensor)]
    while todo:
        obj = todo.pop()
        if isinstance(obj, torch.Tensor):
            storage = obj.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            todo += [obj.grad_fn, obj.grad if obj.is_leaf else None]
        elif obj is not None and obj not in seen:
            seen.add(obj)
            todo += [node for node, _ in obj.next_functions]
            for name in dir(obj):
                if name.startswith("_saved_") or name == "variable":
                    with contextlib.suppress(RuntimeError):  # what it has saved is freed
                        saved = getattr(obj, name)
                        todo += [
                            part for part in (saved if type(saved) is tuple else (saved,)) if isinstance(part, torch.Tensor)
                        ]
    return sum(nbytes for address, nbytes in storages.items() if address not in parked_addresses())


@functools.cache
def _namespaces_of_modules() -> set[int]:
    return {id(vars(module)) for module in list(sys.modules.values()) if type(module) is types.ModuleType}


def _in_a_fork(act: Callable[[], Any]) -> Any:
    """Return what `act` returns in a fork of this process, or how that ended."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            signal.alarm(_SECONDS)
            answer = act()
        except BaseException:
            answer = traceback.format_exc()
        with os.fdopen(write, "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(text) if text else f"the process ended with status {status}"


def run_programs(first: int, count: int) -> Iterator[Any]:
    """Run programs and yield what came of each: a fork of this process, which has imported what they need."""
    import torch._dynamo  # the first optimizer imports it

    torch.set_num_threads(1)
    folder = tempfile.TemporaryDirectory(prefix="nbguard-programs-")
    os.environ["IPYTHONDIR"] = folder.name
    for name in _in_a_fork(_imported):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what the libraries have made leads to nothing of a program's: looking at half a million objects takes long
    gc.unfreeze = lambda: None
    gc.disable()  # among so few objects it would collect all of them all the time
    gc.get_freeze_count = lambda: 0  # it counts by going through all of them, and programs are to freeze nothing
    shell = start_shell()
    gc.collect()
    _namespaces_of_modules()
    for seed in range(first, first + count):
        yield _in_a_fork(Trial(shell, seed).run)
    folder.cleanup()


def _imported() -> list[str]:
    shell = start_shell()
    for cell in _WARM_UP:
        run_cell(shell, cell)
    return [*sys.modules]


if __name__ == "__main__":
    for result in run_programs(int(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(result), flush=True)
