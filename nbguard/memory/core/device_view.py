"""Views as blocks of a device's memory, its processes, this machine's GPUs, the simulated device, the allocator's history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from nbguard.memory.core import advice
from nbguard.memory.core.advice import least_of_rows
from nbguard.memory.core.analysis import DevicePart, Part
from nbguard.memory.core.facts import ProcessFact
from nbguard.memory.core.gpu_models import GpuReading, Gpus
from nbguard.memory.core.processes import DeviceProcess, DiagnosedProcess, Zombies, basename, connection_of, pids_text
from nbguard.memory.core.recording import ENTRY_BYTES, Recording
from nbguard.memory.core.references.explain import Path, Why
from nbguard.memory.core.references.holders import Holder
from nbguard.memory.core.requests import Pool
from nbguard.memory.core.simulated import Simulated, SimulationState, assumptions_line
from nbguard.render.html import Bar, Block, Line, Section, Slice, Table, TableRow, Title
from nbguard.texts import BEHIND_MORE, Text, joined
from nbguard.units import counted, format_bytes, format_column, signed, unit_of

# --- The paths that keep something alive as a compact tree: their common steps are written once.


_WIDEST = 200
"""Characters of a line of the tree."""
_LONGEST = 48
"""Characters of a way that the sentence has as a whole."""
_FEW = 4
"""Keepers that the sentence names."""
_WITH_ARTICLE = ("last error",)
"""Roots that are called by a noun."""


@dataclass(slots=True)
class _Node:
    text: str
    below: dict[str, _Node] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)
    ends: bool = False  # whether a path ends here


def why_blocks(why: Why) -> Iterator[Block]:
    """Yield the answer in a sentence, and the tree of the ways unless the one way is in the sentence."""
    yield Title(why_sentence(why), "strong")
    if why.nbytes or why.deleted is None:
        yield Section(why.name, why.what, " · ".join(_figures(why)))
    if len(why.paths) > 1 or why.more or any(len(path.steps) > 1 or not path.advice.is_code for path in why.paths):
        yield Table(rows=tuple(branches(why)), code=(0, 3), chips=(2,), widest=_WIDEST)


def why_sentence(why: Why) -> str:
    """Return the answer in a sentence, with the keeper of the thing and the line that lets it go."""
    left = f"{format_bytes(why.nbytes)} of it is still in memory"
    how = f"released by `{why.released_by}`" if why.released_by else "deleted"
    gone = f"`{why.name}` was {how} {'after' if why.is_between_cells else 'in'} In[{why.deleted}]"
    if why.deleted is None:
        keepers = _keepers(why) if why.paths else f"None of your names leads to `{why.name}`"
    elif not why.nbytes:
        return f"{gone}, and nothing of it is left in memory."
    elif not why.paths:
        return f"{gone}, but {left}, and none of your names leads to it."
    else:
        keepers = f"{gone}, but {left}: {_keepers(why)}"
    code = joined(", then ", (line.code for line in why.release))
    if not code:
        return f"{keepers}{_without_release(why)}."
    frees = f"frees {format_bytes(why.released)}" if why.released is not None else "lets go of it"
    return f"{keepers}; " + code + f" {frees}."


def _keepers(why: Why) -> str:
    """Return the subject and the verb: only the name `losses` (assigned in In[1]) keeps it."""
    first = sorted(why.paths, key=lambda path: path.text != why.name)
    own = list({path.steps[0]: path for path in reversed(first) if not path.storages_only}.values())[::-1]
    known = {path.steps[0] for path in own}
    sharing = {path.steps[0]: path for path in reversed(first) if path.steps[0] not in known}
    if len(own) + len(sharing) == 1 and not why.more:
        (path,) = own or sharing.values()
        words = f"only {'the name ' if path.text.isidentifier() else ''}{_keeper(path, 'assigned in ')}"
        verbs = ("keep it", "share its memory") if _is_plural([path]) else ("keeps it", "shares its memory")
        words += f" {verbs[0 if own else 1]}"
    else:
        groups = ((own, "keep it", "keeps it"), (list(sharing.values())[::-1], "share its memory", "shares its memory"))
        shown = ((_listed([*map(_keeper, paths)]), many if _is_plural(paths) else one) for paths, many, one in groups if paths)
        parts = [" ".join(each) for each in shown]
        words = ", and ".join(parts)
    return words if why.deleted is not None else words[0].upper() + words[1:]


def _is_plural(paths: Sequence[Path]) -> bool:
    return len(paths) > 1 or paths[0].steps[0].endswith("cycles")


def _keeper(path: Path, since: str = "") -> str:
    """Return a root and the cell that it stems from; a name with the place of the thing in it, unless that is long."""
    root = path.steps[0].strip()
    if not (root.isidentifier() or root.startswith("Out[")):
        return f"the {root}" if root in _WITH_ARTICLE else root
    whole = path.text if len(path.text) <= _LONGEST else root
    return f"`{whole}`" if path.cell is None or root.startswith("Out[") else f"`{whole}` ({since}In[{path.cell}])"


def _listed(words: Sequence[str]) -> str:
    """Return words as a list; of many, the first few and the number of the others."""
    if len(words) > _FEW:
        words = [*words[: _FEW - 1], f"{len(words) - _FEW + 1} others"]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _without_release(why: Why) -> str:
    """Return why there is no line, where the ways say so."""
    effects = {path.advice.effect for path in why.paths if not path.advice.is_code and path.advice.effect}
    return f"; it is {next(iter(effects))}" if len(effects) == 1 and next(iter(effects)).startswith("freed") else ""


def _figures(why: Why) -> Iterator[str]:
    """Yield the figures of a name: those of its row in the report."""
    if why.together.command:
        yield _with_others(why.together, [text for text in why.together.targets if text != why.name])
    elif why.frees is not None:
        yield f"frees now {format_bytes(why.frees)}"
    yield f"reaches {format_bytes(why.nbytes)}"


def _with_others(line: advice.Advice, names: Sequence[str]) -> str:
    """Return the bytes that a line frees with these names, or with a function's cache where there are none."""
    return f"with {', '.join(names) or 'the cache that keeps it'}: {format_bytes(line.frees or 0)}"


def branches(why: Why) -> Iterator[TableRow]:
    """Yield the lines of the tree: path, cell, stale, and the line that cuts the path."""
    roots: dict[str, _Node] = {}
    for path in why.paths:
        level = roots
        for place, step in enumerate(path.steps):
            node = level.setdefault(step, _Node(step))
            node.paths.append(path)
            node.ends |= place == len(path.steps) - 1
            level = node.below
    for label, count in why.more:
        roots[label].below[""] = _Node(f"{count} more")
    yield from _lines(list(roots.values()), "", is_root=True)


def _lines(nodes: Sequence[_Node], rails: str, *, is_root: bool = False, above: str = "") -> Iterator[TableRow]:
    """Yield the lines of nodes and of those below; a way to release that stands `above` already is not repeated."""
    for place, node in enumerate(map(_joined, nodes)):
        is_last = place == len(nodes) - 1
        ways = {path.advice.command for path in node.paths}
        release = next(iter(ways)) if len(ways) == 1 else ""
        cells = (node.text.strip(), *(_root_cells(node.paths) if is_root else ("", "")))
        yield TableRow(
            cells=(*cells, "" if release == above else release),
            rails=f"{rails}{'└─' if is_last else '├─'} ",
        )
        below = list(node.below.values())
        yield from _lines(below, f"{rails}{'   ' if is_last else '│  '}", above=release or above)


def _joined(node: _Node) -> _Node:
    """Return a node with the only one below it in the same line, as long as there is only one."""
    text = node.text
    while len(node.below) == 1 and not node.ends:
        (node,) = node.below.values()
        text += node.text
    return _Node(text, node.below, node.paths, node.ends)


def _root_cells(paths: Sequence[Path]) -> tuple[str, str]:
    """Return the cell of a root (and whether the root leads to the memory only), and whether it is stale."""
    first = paths[0]
    words = [f"In[{first.cell}]"] if first.cell is not None else []
    words += ["its memory"] if not first.stale and all(path.storages_only for path in paths) else []
    return ", ".join(words), "stale" if first.stale else ""


# --- The simulated device in words, as blocks of its state, and a line after each cell.


def state_blocks(state: SimulationState, *, whole: bool = False) -> Iterator[Block]:
    """Yield whether a device is simulated, its figures, and how many assumptions they rest on; these too if `whole`."""
    yield Title(state.words, "strong")
    yield from map(Line, _sentences_of_simulated(state.figures))
    rows = tuple(TableRow(cells=(f"assumed: {text}",)) for text in state.figures.assumptions)
    line = assumptions_line(len(rows))
    yield Table(rows=rows, fold=line.replace("`", ""), brief=None if whole else Line(line, "dim"))


def _sentences_of_simulated(figures: Simulated) -> Iterator[str]:
    context = f" · CUDA context {format_bytes(figures.context)}" if figures.context else ""
    yield f"PyTorch {figures.torch_version} · settings: {figures.settings or 'defaults'}{context}"
    yield f"allocated {format_bytes(figures.allocated)} (peak {format_bytes(figures.peak_allocated)})"
    yield f"reserved {format_bytes(figures.reserved)} (peak {format_bytes(figures.peak_reserved)})"
    space = figures.fragmentation
    yield f"releasable {format_bytes(space.releasable)}, stranded {format_bytes(space.stranded)}"
    if figures.ooms:
        yield f"ran out of memory {figures.ooms}×"
    if figures.broken:
        yield figures.broken


def cell_line(before: Simulated, after: Simulated, cell: int) -> str:
    """Return the changes of a cell to the simulated device in one line."""
    head = f"In[{cell}]  simulated {format_bytes(after.capacity)}: allocated {signed(after.allocated - before.allocated)}"
    parts = [f"{head} → {format_bytes(after.allocated)}"]
    if after.peak_allocated > max(before.peak_allocated, after.allocated):
        parts.append(f"new peak {format_bytes(after.peak_allocated)}")
    reserved = f"reserved {format_bytes(after.reserved)}"
    if after.peak_reserved > after.reserved:
        reserved += f" (peak {format_bytes(after.peak_reserved)})"
    parts.append(reserved)
    if after.ooms > before.ooms:
        parts.append(f"ran out of memory {after.ooms - before.ooms}×: " + advice.OOM.command)
    if after.broken and not before.broken:
        parts.append(after.broken)
    return joined(" · ", parts)


# --- The state of the allocator's history as blocks.


def recording_blocks(recording: Recording) -> Iterator[Block]:
    """Yield the state, and the cost and use of the history while it is kept."""
    yield Title(_state(recording))
    if recording.state in ("on", "waiting"):
        most = format_bytes((recording.entries or 0) * ENTRY_BYTES)
        yield Line(f"some 2 µs an allocation, and up to {most} of host memory per device")
        moments, whatif = advice.MOMENTS.command, advice.WHATIF.command
        snapshot, off = advice.SNAPSHOT_FILE.command, advice.RECORD_OFF.command
        shown = moments + " shows its moments · " + whatif + " replays it"
        yield Line(shown + " · " + snapshot + " keeps it · " + off + " ends it")


def _state(recording: Recording) -> str:
    entries = f"{recording.entries or 0:,}"
    match recording.state:
        case "on":
            since = "" if recording.changed or recording.since is None else f" since In[{recording.since}]"
            return f"recording{since}: the allocator's last {entries} entries by device, with the line of each allocation"
        case "waiting":
            return f"recording begins with the first use of CUDA: the allocator's last {entries} entries by device"
        case "theirs":
            return (
                "Something else records PyTorch's history, so nbguard leaves it alone. "
                + advice.SNAPSHOT.command
                + " and "
                + advice.WHATIF.command
                + " use it; "
                "torch.cuda.memory._record_memory_history(None) ends it"
            )
        case "off":
            return "recording is off, and its history is deleted" if recording.changed else "nothing is being recorded"


# --- Processes on the GPUs as blocks, each with its diagnosis, and how to end the orphans.


def zombies_blocks(zombies: Zombies) -> Iterator[Block]:
    """Yield the processes on the GPUs, orphans first, then the sentences on them."""
    if zombies.diagnosed:
        yield Table(rows=tuple(map(process_row, zombies.diagnosed)), figures=(3,))
    yield from map(Line, _sentences(zombies))


def process_row(diagnosed: DiagnosedProcess) -> TableRow:
    """Return a process with its diagnosis as a row."""
    process = diagnosed.found
    started = datetime.fromtimestamp(process.process.started).strftime("%Y-%m-%d %H:%M")
    diagnosis = f"{'orphan' if diagnosed.is_orphan else 'left alone'}: {diagnosed.reason}"
    return TableRow(cells=(f"pid {process.process.pid}", f"since {started}", who(process), _bytes(diagnosed), diagnosis))


def who(process: DeviceProcess) -> str:
    """Return a kernel's notebook, else the command of a process, with the user in front where it is another one.

    A cell that is too narrow loses its end, so the notebook's folder comes after its name.
    """
    path = process.identity.notebook if connection_of(process.command) else ""
    name = basename(path)
    folder = path.removesuffix(name).rstrip("/\\")
    words = f"{name} in {folder}" if folder else name or " ".join(process.command) or "(command not readable)"
    return f"{process.identity.user}: {words}" if process.identity.user else words


def _bytes(diagnosed: DiagnosedProcess) -> str:
    if diagnosed.found.used is not None:
        return format_bytes(diagnosed.found.used)
    return "keeps the device open" if diagnosed.found.holds_files else "? (the driver does not say)"


def _sentences(zombies: Zombies) -> Iterator[str]:
    """Yield sentences on the ended processes, or on how to end the orphans."""
    if zombies.unavailable:
        yield zombies.unavailable
    if not zombies.diagnosed and not zombies.interrupted:
        yield "no process other than this kernel was found on a GPU"
    elif zombies.diagnosed and not zombies.orphans:
        yield "no orphan of yours among the processes on the GPUs: there is nothing to end"
    elif zombies.orphans and not zombies.asked:
        pids = [orphan.process.pid for orphan in zombies.orphans]
        known = [orphan.used for orphan in zombies.orphans if orphan.used is not None]
        back = f", {format_bytes(sum(known))} of device memory" if known else ""
        them = "them" if len(pids) > 1 else "it"
        yield f"{counted(len(pids), 'orphan')} ({pids_text(pids)}{back}): " + advice.END_ZOMBIES.code + f" ends {them}"
    if zombies.ended:
        yield f"ended and gone: {pids_text(zombies.ended)}"
    for pid, reason in zombies.remaining:
        yield f"still there: pid {pid}: {reason}"
    if zombies.interrupted:
        yield "interrupted: run " + advice.ZOMBIES.command + " to see what is left"


# --- The GPUs of this machine as blocks, a line for each, then the processes on them.


_NAMES = ("GPU", "name", "used", "free", "total")
_PROCESS_NAMES = ("GPU", "pid", "since", "notebook or command", "used", "")


def gpus_blocks(gpus: Gpus, limit: int = 0) -> Iterator[Block]:  # noqa: ARG001 - of every view
    """Yield the GPUs, then the processes on them."""
    if gpus.gpus:
        yield Section("GPUs", gpus.driver)
        yield Table(names=_NAMES, rows=tuple(map(_row, gpus.gpus)), figures=(2, 3, 4))
        if rows := tuple(_process_rows(gpus)):
            yield Section("Processes on them")
            yield Table(names=_PROCESS_NAMES, rows=rows, figures=(4,))
        else:
            yield Line("no process is on them that this user can see")
    if not gpus.gpus:
        yield Title("No NVIDIA GPU found on this machine", "strong")
    if gpus.unavailable:
        yield Line(gpus.unavailable)


def _process_rows(gpus: Gpus) -> Iterator[TableRow]:
    """Yield a row for each process on each GPU, the largest first, then for those that only keep a GPU open."""
    diagnosed = {each.found.process.pid: each for each in gpus.processes}
    listed = set()
    for gpu in gpus.gpus:
        for process in sorted(gpu.processes, key=lambda process: -(process.used or 0)):
            listed.add(process.pid)
            used = "?" if process.used is None else format_bytes(process.used)
            since, who, diagnosis = _process_words(diagnosed.get(process.pid), process)
            yield TableRow(cells=(str(gpu.index), str(process.pid), since, who, used, diagnosis))
    for each in gpus.processes:
        if each.found.process.pid not in listed:
            _, since, who, used, diagnosis = process_row(each).cells
            yield TableRow(cells=("?", str(each.found.process.pid), since.removeprefix("since "), who, used, diagnosis))


def _process_words(diagnosed: DiagnosedProcess | None, process: ProcessFact) -> tuple[str, str, str]:
    """Return (since when it runs, whose it is, the diagnosis) of a process; it may be one that this user cannot see."""
    if diagnosed is not None:
        _, since, who, _, diagnosis = process_row(diagnosed).cells
        return since.removeprefix("since "), who, diagnosis
    if process.identity is not None:
        return "", process.identity.words, ""
    return "", "(not visible here)", ""


def _row(gpu: GpuReading) -> TableRow:
    name = gpu.name if gpu.capability is None else f"{gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]})"
    sizes = (gpu.used, gpu.total - gpu.used, gpu.total)
    return TableRow(cells=(str(gpu.index), name, *map(format_bytes, sizes)))


_COLOURS: dict[str, tuple[str, str]] = {
    DevicePart.CONTEXT: ("ctx", "█"),
    DevicePart.ALLOCATED: ("used", "█"),
    DevicePart.RELEASABLE: ("rel", "▒"),
    DevicePart.CACHED: ("rel", "▒"),
    DevicePart.STRANDED: ("strand", "▓"),
    DevicePart.GRAPH_POOLS: ("strand", "▓"),
    DevicePart.PENDING: ("strand", "▓"),
    DevicePart.FREE: ("", " "),
    DevicePart.SPILLED: ("", " "),  # the bar is the device, and it lies outside
}
"""The colour of each part of a device, and its character in a terminal; all others share one."""
_OTHER = ("other", "░")
_ALWAYS_SHOWN = frozenset({DevicePart.ALLOCATED, DevicePart.FREE})
_OPENS = Text(advice.ALL_HOLDERS.code, "")
"""The command that shows all holders; a result of Python has them all."""
_POOLS_SHOWN = 8
_NAMED = 4
"""Holders whose names stand in one cell."""


def parts_bar(parts: Sequence[Part], whole: int | None = None, label: str = "") -> Bar:
    """Return the parts of a device as a bar; `whole` is its size, where that is known: a terminal draws it then, too.

    Empty parts are left out, but for allocated and free memory.
    """
    shown = [part for part in parts if part.nbytes or part.name in _ALWAYS_SHOWN]
    slices = []
    for part, figure in zip(shown, part_figures(shown), strict=True):
        colour, mark = _COLOURS.get(part.name, _OTHER)
        slices.append(Slice(name=part.label, figure=figure, amount=part.nbytes, colour=colour, mark=mark, note=part.note))
    return Bar(slices=tuple(slices), whole=whole, label=label, is_drawn_as_text=whole is not None)


def part_figures(parts: Sequence[Part]) -> list[str]:
    """Return the bytes of parts in the unit of their sum, so that the figures add up."""
    return format_column([part.nbytes for part in parts], unit_of(sum(part.nbytes for part in parts)))


def holder_rows(holders: Sequence[Holder], allocated: int, limit: int | None, opens: str = _OPENS) -> list[TableRow]:
    """Return at most `limit` rows, the rest in one, small holders in one, and the total: the figures add up to the total.

    Without a limit all have a row, the small ones too. `opens` is the command that does this.
    """
    least = 0 if limit is None else least_of_rows(holder.retained for holder in holders)
    large = [holder for holder in holders if holder.shown >= least]
    if len(holders) - len(large) == 1:
        large = list(holders)  # a line for one small holder alone would only hide its name
    shown, more = large[:limit], large[len(large) if limit is None else limit :]
    known = set(map(id, large))
    small = [holder for holder in holders if id(holder) not in known]
    unit = unit_of(allocated)
    sums = [sum(holder.retained for holder in rest) for rest in (more, small)]
    figures = format_column([*(holder.retained for holder in shown), *sums], unit)
    rows = [holder_row(holder, figure, unit) for holder, figure in zip(shown, figures, strict=False)]
    if more:
        names = ", ".join(holder.label for holder in more[:_NAMED]) + (", …" if len(more) > _NAMED else "")
        chip = stale_words(sum(holder.stale_bytes for holder in more), is_all=all(holder.stale for holder in more))
        rows.append(TableRow(cells=(f"{len(more)} more", figures[-2], "", "", chip, names + BEHIND_MORE)))
    if small:
        holding = counted(len(small), "small holder")
        rows.append(TableRow(cells=(holding, figures[-1], "", "", "", opens)))
    return [*rows, total_row(allocated)]


def total_row(allocated: int) -> TableRow:
    """Return the row below all holders."""
    return TableRow(cells=("allocated", *format_column([allocated], unit_of(allocated)), "", "", "", ""), kind="sum")


def holder_row(holder: Holder, figure: str, unit: tuple[int, str]) -> TableRow:
    """Return a holder's row: `figure` is the bytes that it frees, `unit` the unit of the column."""
    name = holder.path if holder.stale and holder.path else holder.label
    reaches = "" if holder.is_shared or not holder.roots else format_column([holder.reaches], unit)[0]
    since = f"In[{holder.cell}]" if holder.cell is not None else ""
    what = f"{_words_on(holder)} (at least)" if holder.at_least else _words_on(holder)
    cells = (name, figure, reaches, since, stale_words(holder.stale_bytes, is_all=holder.stale), what)
    return TableRow(cells=cells, hint=command_of(holder.names, holder.kind, holder.stale))


def _words_on(holder: Holder) -> str:
    """Return the words on a holder and on all that its release takes along, needed or stale."""
    line = holder.together
    if holder.is_shared:
        return f"shared, together {format_bytes(line.frees or 0)}  " + line.code if line.command else holder.what
    if line.command:
        others = [*holder.others[:_NAMED], *["…"] * (len(holder.others) > _NAMED)]
        return f"{_with_others(line, others)} · {holder.what}"
    if line.effect:
        return f"{line.effect.replace('`', '')} · {holder.what}"
    if holder.frees > holder.retained:
        return f"with its stale memory: {format_bytes(holder.frees)} · {holder.what}"
    return holder.what


def stale_words(nbytes: int, *, is_all: bool) -> str:
    """Return the stale part of a row in words, that is, all of it, so many bytes of it, or nothing."""
    return "stale" if is_all else f"{format_bytes(nbytes)} stale" if nbytes else ""


def holder_table(rows: Sequence[TableRow], figure: str = "frees now") -> Table:
    """Return rows of holders and their total as a table; `figure` is the heading of their bytes."""
    names = ("held by", figure, "reaches", "since", "", "what")
    return Table(names=names, rows=tuple(rows), figures=(1, 2), code=(0,), chips=(4,))


def command_of(names: Sequence[str], kind: str, stale: bool) -> str:
    """Return the command that releases a holder by these of its names; empty where there is none."""
    if stale:
        return advice.release_stale().command
    return advice.release_names(names).command if kind in ("name", "out") else ""


def pool_table(pools: Sequence[Pool]) -> Table | None:
    """Return the allocator's pools as a table with its total; None where nothing is free in any.

    The columns between `reserved` and `largest free` add up to it along a row, every one to its total down the column.
    """
    spaces = [pool.space for pool in pools]
    if all(space.reserved == space.allocated for space in spaces):
        return None
    shown = {pool.name: [pool.space] for pool in pools[:_POOLS_SHOWN]}
    if rest := spaces[_POOLS_SHOWN:]:
        shown[f"{len(rest)} more"] = rest
    parts = {name: name for name in ("reserved", "allocated", "releasable", "stranded")}
    rare = {"kept": "graph pools", "pending": "pending"}
    parts |= {name: title for name, title in rare.items() if any(getattr(space, name) for space in spaces)}
    unit = unit_of(max(space.reserved for space in spaces))
    columns: list[list[str]] = []
    for name in parts:
        amounts = [sum(getattr(space, name) for space in group) for group in shown.values()]
        columns.append([*format_column(amounts, unit), *format_column([sum(amounts)], unit)])
    largest = [max(space.largest_free for space in group) for group in shown.values()]
    columns.append([*(format_column([nbytes], unit)[0] for nbytes in largest), ""])
    *rows, total = zip([*shown, "all pools"], *columns, strict=True)
    return Table(
        names=("cache", *parts.values(), "largest free"),
        rows=(*(TableRow(cells=cells) for cells in rows), TableRow(cells=total, kind="sum")),
        figures=range(1, len(parts) + 2),
        fold="the cache, by pool and stream",
    )
