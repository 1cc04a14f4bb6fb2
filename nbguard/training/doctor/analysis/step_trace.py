"""The bits of one step, as hashes in the order of their making, and the first place where two steps differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import comb
from statistics import median
from typing import ClassVar, Literal

from nbguard.memory.core.advice import make_deterministic, undo_deterministic
from nbguard.render.html import Block, Line, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.texts import before_start, joined
from nbguard.training.doctor.analysis.diagnosis import Check, CheckFinding, checked, not_checked
from nbguard.units import counted, format_time

Direction = Literal["forward", "loss", "backward", "gradient", "update", "buffer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One tensor of a step."""

    direction: Direction
    path: str  # of the module, as in `named_modules`; of a gradient, an update and a buffer, the tensor's full name
    side: Literal["in", "out", ""]  # of the module's tensors
    tensor: int  # number of the tensor within the step: an output of one module is the input of the next
    bits: bytes  # hash of its bytes, shape and type


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """The first place where two steps from one state differ."""

    path: str  # of the module; empty for the model itself, outside of its parts
    direction: Direction
    others: tuple[str, ...] = ()  # modules that get the same tensor and can each be the reason


def first_difference(one: Sequence[StepEvent], other: Sequence[StepEvent]) -> StepDifference | None:
    """Return the module and the pass where two steps first differ, or None if all their bits are the same."""
    for place, (event, twin) in enumerate(zip(one, other, strict=False)):
        if _key(event) != _key(twin):
            return StepDifference(path=event.path, direction=event.direction)
        if event.bits != twin.bits:
            if event.direction == "forward":
                return StepDifference(path=event.path if event.side == "out" else parent(event.path), direction="forward")
            if event.direction == "backward":
                return _backward(one, other, place)
            return StepDifference(path=_owner(event), direction=event.direction)
    if len(one) != len(other):
        last = min(len(one), len(other)) - 1
        return StepDifference(path=one[last].path, direction=one[last].direction)
    return None


def _backward(one: Sequence[StepEvent], other: Sequence[StepEvent], place: int) -> StepDifference:
    """Return the difference of a backward pass whose first differing gradient is that of one tensor.

    The gradient of a tensor is made by the modules that had the tensor as an input. Where none had, the code between the
    modules made it. Of a module and its parts that had the same tensor the innermost is meant; of several, the one whose
    own parameters have other gradients, too.
    """
    first = one[place]
    consumers = [event.path for event in one if _is_input(event, first.tensor)]
    innermost = [path for path in consumers if not any(_is_inside(inner, path) for inner in consumers)]
    if not innermost:
        return StepDifference(path=parent(first.path), direction="backward")
    other_gradients = {
        parent(event.path)
        for event, twin in zip(one, other, strict=False)
        if event.direction == "gradient" and event.bits != twin.bits
    }
    likely = [path for path in innermost if any(owner == path or owner.startswith(f"{path}.") for owner in other_gradients)]
    chosen = likely or innermost
    return StepDifference(path=chosen[0], direction="backward", others=tuple(chosen[1:]))


def _is_inside(inner: str, outer: str) -> bool:
    """Say whether a module is a part of another."""
    return inner != outer and (not outer or inner.startswith(f"{outer}."))


def _is_input(event: StepEvent, tensor: int) -> bool:
    return event.direction == "backward" and event.side == "in" and event.tensor == tensor


def _key(event: StepEvent) -> tuple[str, str, str]:
    return event.direction, event.path, event.side


def _owner(event: StepEvent) -> str:
    return parent(event.path) if event.direction in ("gradient", "update", "buffer") else event.path


def parent(path: str) -> str:
    """Return the path of the module that has this part; empty for the model itself."""
    return path.rpartition(".")[0]


def module_name(path: str) -> str:
    """Return a module as the user writes it: `model[3].norm` for the path `3.norm`."""
    parts = (f"[{part}]" if part.isdigit() else f".{part}" for part in path.split(".") if part)
    return "model" + "".join(parts)


# --- Checks of determinism, of a tried step, of loaders, seeds and switches, and the state of `%nbguard fix determinism`.


# --- The state of `%nbguard fix determinism` as a result, and as it is shown.


Mode = Literal["off", "warn only", "on"]
"""Of torch.use_deterministic_algorithms."""

_SURE = 0.95
"""Probability that the interval of a slow-down holds the true one."""
_MARGIN = 0.1
"""Half of an interval, as a share of the step: a slow-down that is known less well is no figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """A step without and in deterministic mode, each run some times in turn. Times are of both passes."""

    plain: int  # nanoseconds, the median
    deterministic: int | None = None  # nanoseconds, the median; None if an operation has no deterministic implementation
    change: float | None = None  # deterministic / plain - 1, the median of the pairs; None if it is not known well enough
    margin: float | None = None  # half of the 95 % interval of `change`; None for too few pairs for one
    refused: tuple[str, ...] = ()  # operations without a deterministic implementation

    @classmethod
    def of(cls, plain: Sequence[int], deterministic: Sequence[int], refused: tuple[str, ...] = ()) -> StepTimes:
        """Return the times of a step that was run in pairs, one run of each kind in a pair."""
        middle = round(median(plain))
        if refused or not deterministic:
            return cls(plain=middle, refused=refused)
        ratios = sorted(slow / fast for fast, slow in zip(plain, deterministic, strict=True))
        rank, ratio = _rank(len(ratios)), median(ratios)
        margin = None if rank is None else (ratios[-1 - rank] - ratios[rank]) / 2
        change = ratio - 1 if margin is not None and margin <= _MARGIN * ratio else None
        return cls(plain=middle, deterministic=round(median(deterministic)), change=change, margin=margin)


def _rank(count: int) -> int | None:
    """Return the place in sorted values at which an interval of their median begins; None if they are too few for one."""
    place, outside = None, 0.0
    for below in range(count // 2):
        outside += 2 * comb(count, below) / 2**count
        if outside > 1 - _SURE:
            break
        place = below
    return place


@dataclass(frozen=True, slots=True, kw_only=True)
class Deterministic(Result):
    """The settings that make a run repeat."""

    kind: ClassVar[str] = "deterministic"
    view: ClassVar[str] = "nbguard.training.doctor.analysis.step_trace:deterministic_blocks"
    label: ClassVar[str] = "Deterministic computing"

    is_on: bool  # the settings are in force
    seed: int  # of all generators
    mode: Mode = "off"  # off after the undoing
    loaders: tuple[str, ...] = ()  # loaders with a generator of their own now
    generators: tuple[str, ...] = ()  # generators of the model's own that were seeded
    has_hash_seed: bool = False  # PYTHONHASHSEED was set when Python started
    times: StepTimes | None = None  # None if no Learner was given to measure it with

    def timed(self, times: StepTimes | None) -> Deterministic:
        """Return it with a measured slow-down."""
        return replace(self, times=times)


def deterministic_blocks(state: Deterministic) -> Iterator[Block]:
    """Yield the settings, the slow-down, and how to undo it."""
    if not state.is_on:
        yield Title("determinism: all settings are restored")
        return
    yield Title(f"the kernel computes deterministically from seed {state.seed} on", "strong")
    rows = [
        ("generators", f"Python's, numpy's and torch's are seeded{''.join(f'; {name}' for name in state.generators)}"),
        ("algorithms", f"torch.use_deterministic_algorithms: {state.mode}; cudnn.benchmark off"),
        ("loaders", ", ".join(state.loaders) or "none was given; " + make_deterministic("learn").code + " seeds them"),
        ("sets", "PYTHONHASHSEED is set" if state.has_hash_seed else "not fixed; set PYTHONHASHSEED=0 " + before_start()),
        ("slow-down", _slow_down(state.times)),
    ]
    yield Table(rows=tuple(TableRow(cells=row) for row in rows))
    yield Line("to undo all of this: " + undo_deterministic().code, "dim")


def _slow_down(times: StepTimes | None) -> str:
    if times is None:
        return "not measured: " + make_deterministic("learn").code + " measures it"
    if times.refused:
        names = ", ".join(times.refused)
        return f"not measured: {names} has no deterministic implementation and will raise; --warn-only lets it pass"
    if times.change is None:
        return f"not measurable: the steps of {format_time(times.plain)} differ more from run to run than the modes do"
    return f"{slow_down(times)}: a step took {format_time(times.plain)}, now {format_time(times.deterministic or 0)}"


def slow_down(times: StepTimes) -> str:
    """Return a slow-down with its interval, as in +3 % ± 2; empty where none is known."""
    if times.change is None or times.margin is None:
        return ""
    return f"{round(100 * times.change):+d} % ± {max(1, round(100 * times.margin))}"


Cure = Literal["deterministic mode", "one thread", "none"]
_PASSES = {
    "forward": "the forward pass",
    "backward": "the backward pass",
    "loss": "the loss function",
    "gradient": "the gradients of its parameters",
    "update": "the optimizer's step",
    "buffer": "a buffer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFact:
    """An operation of PyTorch's."""

    name: str  # such as aten.index_put_, or as PyTorch's message names it
    module: str = ""  # path of the module whose forward pass ran; empty if none did, as in the backward pass
    line: str = ""  # the user's line that called it, as In[7], line 3 in forward()
    layers: tuple[str, ...] = ()  # paths of the layers that call it in the backward pass, by their class
    is_default: bool = False  # it has a deterministic implementation, which only the strict mode takes

    @property
    def way(self) -> DeterministicWay | None:
        """Return the deterministic replacement; None if none is known."""
        return next((way for way in WAYS if self.name.startswith(way.operation)), None)


@dataclass(frozen=True, slots=True)
class DeterministicWay:
    """Replacements of an operation that has no deterministic implementation on a GPU."""

    operation: str  # the beginning of its name
    layer: str  # class of torch.nn that calls it; empty: a function does
    code: str  # of Python, with x for the input
    where: str = ""  # it computes the same; empty: everywhere


_WINDOWS = "x.unfold(2, k, s).unfold(3, k, s).unfold(4, k, s)"
_PARTS = "x.unflatten(-1, (n, -1)).unflatten(-3, (n, -1))"
_DIVIDES = "if the output n divides the input"
_REFLECTED = "torch.cat([x[..., 1:p + 1].flip(-1), x, x[..., -p - 1:-1].flip(-1)], -1)"
WAYS = (
    DeterministicWay("adaptive_max_pool2d", "AdaptiveMaxPool2d", f"{_PARTS}.amax((-3, -1))", _DIVIDES),
    DeterministicWay("adaptive_avg_pool2d", "AdaptiveAvgPool2d", f"{_PARTS}.mean((-3, -1))", _DIVIDES),
    DeterministicWay(
        "adaptive_avg_pool3d", "AdaptiveAvgPool3d", f"{_PARTS}.unflatten(-5, (n, -1)).mean((-5, -3, -1))", _DIVIDES
    ),
    DeterministicWay("max_pool3d", "MaxPool3d", f"{_WINDOWS}.amax((-3, -2, -1))", "without padding"),
    DeterministicWay("avg_pool3d", "AvgPool3d", f"{_WINDOWS}.mean((-3, -2, -1))", "without padding"),
    DeterministicWay("reflection_pad1d", "ReflectionPad1d", _REFLECTED),
    DeterministicWay("reflection_pad3d", "ReflectionPad3d", _REFLECTED, "done for each dimension"),
    DeterministicWay(
        "upsample_linear1d",
        "Upsample",
        'torch.nn.functional.interpolate(x.unsqueeze(-2), scale_factor=(1, s), mode="bilinear").squeeze(-2)',
    ),
    DeterministicWay("nll_loss2d", "", "torch.nn.functional.cross_entropy(x.movedim(1, -1).flatten(0, -2), target.flatten())"),
    DeterministicWay(
        "max_unpooling2d",
        "MaxUnpool2d",
        "x.new_zeros(*x.shape[:2], h * w).scatter(-1, i.flatten(-2), x.flatten(-2)).unflatten(-1, (h, w))",
    ),
    DeterministicWay("embedding_bag_backward_cuda_max", "EmbeddingBag", "torch.nn.functional.embedding(x, weight).amax(1)"),
    DeterministicWay("median CUDA", "", "x.sort().values[..., (x.shape[-1] - 1) // 2]", "along the last dimension"),
    DeterministicWay("put_", "", "x.flatten().index_put((i,), values).view_as(x)"),
    DeterministicWay("_bincount_cuda", "", "torch.zeros(n, device=x.device).index_add(0, x, weights)", "with n bins"),
)
"""Tried with PyTorch 2.13, where each gives the same values, and in deterministic mode none of them warns in either pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenState:
    """Something that a step changes, that changes the next step, and that no checkpoint saves."""

    name: str  # as the user would write it: model.noise.generator
    kind: str  # generator, attribute, variable, list, tensor, …


@dataclass(frozen=True, slots=True, kw_only=True)
class DeterminismFacts:
    """A step that was tried several times from one state."""

    runs: int
    tensors: int  # that were compared in each run
    times: StepTimes  # of both passes
    mode: Mode = "off"  # that the fit would run in
    difference: StepDifference | None = None  # the first place where runs differ; None if they do not
    cure: Cure | None = None  # with this the runs agree; "none": with nothing that was tried
    refused: str = ""  # the operation without an implementation in deterministic mode
    operation: OperationFact | None = None  # the first with other bits from the same
    is_pythons: bool = False  # the difference came from Python: a number, a clock, a generator out of sight
    known: tuple[OperationFact, ...] = ()  # operations that PyTorch says have no deterministic implementation
    hidden: tuple[HiddenState, ...] = ()  # state that changes the bits of the next step
    suspects: tuple[str, ...] = ()  # where runs differ: state that is there and cannot be put back
    threads: int = 1
    notes: tuple[str, ...] = ()  # the parts left out


def step_checks(facts: DeterminismFacts, learn: str = "learn") -> tuple[Check, ...]:
    """Return the checks of a step that was tried."""
    seen = f"{facts.runs} runs of one step from one state, {counted(facts.tensors, 'tensor')} compared by their bytes"
    cost = slow_down(facts.times)
    time = f"{format_time(facts.times.plain)} each{f'; deterministic mode: {cost}' if cost else ''}"
    hidden = counted(len(facts.hidden), "place") if facts.hidden else "a step leaves no state that changes the next"
    known = ", ".join(sorted({fact.name for fact in facts.known})) or "PyTorch has a deterministic way for each"
    if facts.known and facts.mode == "warn only":
        known += " (no deterministic implementation; the mode only warns, and the bits agreed here)"
    return (
        checked("determinism", "one step", f"{seen}; {time}", *_difference(facts, learn)),
        checked("determinism", "operations", known, *_known(facts, learn)),
        checked("determinism", "hidden state", hidden, *_hidden(facts, learn)),
    )


def _where(path: str) -> str:
    return f"`{module_name(path)}`" if path else "the model's own forward code"


def _difference(facts: DeterminismFacts, learn: str) -> Iterator[CheckFinding]:
    difference = facts.difference
    if difference is None:
        return
    others = f" (or {', '.join(f'`{module_name(path)}`' for path in difference.others)})" if difference.others else ""
    if difference.direction in ("loss", "update"):
        place = _PASSES[difference.direction]
    else:
        place = f"{_where(difference.path)}{others} in {_PASSES[difference.direction]}"
    yield CheckFinding(
        severity="problem",
        what=f"the same step gives different bits each time, first in {place}",
        evidence=_reason(facts),
        command=_command(facts, learn),
    )


def _reason(facts: DeterminismFacts) -> str:
    """Return why the runs differ, as far as it was tried."""
    operation = facts.operation
    if operation is None:
        named = ""
    else:
        where = ", ".join(part for part in (operation.module and module_name(operation.module), operation.line) if part)
        named = f"{operation.name}{f' ({where})' if where else ''}"
    if facts.cure == "deterministic mode":
        return f"{named or 'an operation'} gives the same bits in PyTorch's deterministic mode"
    if facts.refused:
        return f"{facts.refused} has no deterministic implementation" + (f"; the bits first differ in {named}" if named else "")
    if facts.cure == "one thread":
        return f"{named or 'an operation'} gives the same bits with one thread instead of {facts.threads}"
    if facts.is_pythons:
        tail = f"; it may be {', '.join(facts.suspects[:3])}" if facts.suspects else ""
        return (
            f"Python gives {named or 'an operation'} different numbers in each run, although all generators were restored{tail}"
        )
    return f"{named or 'the cause was not found'}; deterministic mode does not help"


def _command(facts: DeterminismFacts, learn: str) -> str:
    if facts.cure == "deterministic mode":
        return make_deterministic(learn).command
    if facts.cure == "one thread":
        return "torch.set_num_threads(1)"
    if facts.refused:
        line = facts.operation.line if facts.operation is not None else ""
        way = OperationFact(name=facts.refused).way
        by = way.code if way is not None else "a deterministic operation"
        return f"# replace {facts.refused}{f' at {line}' if line else ''} by {by}"
    line = facts.operation.line if facts.operation is not None else ""
    return f"# draw it from torch's generator, which a seed reaches{f': {line}' if line else ''}"


def _known(facts: DeterminismFacts, learn: str) -> Iterator[CheckFinding]:
    if facts.difference is not None and facts.refused:
        return  # it is the finding of the step
    if facts.mode == "warn only":
        return  # the possible remedies are applied
    for fact in facts.known:
        layers = [f"`{module_name(path)}`" for path in fact.layers[:3]]
        where = ", ".join(part for part in (fact.module and f"`{module_name(fact.module)}`", fact.line, *layers) if part)
        if fact.is_default and facts.mode == "on":
            continue
        if fact.is_default:
            yield CheckFinding(
                severity="note",
                what=f"{fact.name} takes a nondeterministic algorithm" + (f": {where}" if where else ""),
                evidence="its bits agreed here, and deterministic mode takes another algorithm",
                command=make_deterministic(learn).command,
            )
            continue
        yield CheckFinding(
            severity="problem" if facts.mode == "on" else "advice",
            what=f"{fact.name} has no deterministic implementation" + (f": {where}" if where else ""),
            evidence="deterministic mode is on, so each fit raises here"
            if facts.mode == "on"
            else "its bits agreed here, but PyTorch does not promise that and raises in deterministic mode",
            command=_instead(fact, make_deterministic(learn, warn_only=True).command),
        )


def _instead(fact: OperationFact, otherwise: str) -> str:
    """Return the deterministic replacement, if it is known, and the command that lets the operation pass."""
    if fact.way is None:
        return otherwise
    where = f", {fact.way.where}" if fact.way.where else ""
    return joined("\n", (f"# {fact.way.code}   computes the same{where}", otherwise))


def _hidden(facts: DeterminismFacts, learn: str) -> Iterator[CheckFinding]:
    for state in facts.hidden:
        if state.kind == "generator":
            yield CheckFinding(
                severity="advice",
                what=f"{state.name} is a separate generator that global seeds do not affect",
                evidence="its state changes the next step, and no checkpoint saves it",
                command=make_deterministic(learn).command,
            )
        else:
            yield CheckFinding(
                severity="advice",
                what=(
                    f"{state.name} changes in each step and affects the next, but `state_dict` does not save this {state.kind}"
                ),
                evidence="the bits agree only when it is restored, so a fit from a checkpoint gives other results",
                command=f"# make {state.name} a buffer: self.register_buffer(…), or get_extra_state and set_extra_state",
            )


def no_step(reason: str) -> tuple[Check, ...]:
    """Return the checks of a step that could not be tried."""
    return tuple(not_checked("determinism", name, reason) for name in ("one step", "operations", "hidden state"))
