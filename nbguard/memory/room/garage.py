"""The garage: models that do not fit a device together take turns on it, within a budget.

A parked model comes back when it is called, moved or asked for its parameters, or when its optimizer steps. The models that
were used longest ago make way for it, as parking moves them, with their gradients and the state of their optimizers.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nbguard.errors import NbguardError, NoTorchError, ParkedError, in_one_line
from nbguard.memory.cleanup.apply.apply import alone
from nbguard.memory.cleanup.apply.guards import ARRIVALS, Moves, stand_aside, stand_in
from nbguard.memory.cleanup.apply.parking import park, unpark
from nbguard.memory.cleanup.apply.released_names import Interrupts
from nbguard.memory.core import advice
from nbguard.memory.room.device import RoomDevice, device_now
from nbguard.memory.room.turns import COMPILED, BudgetState, ModelTurn, TakenTurn, Taker, reason_to_stay, takers_of
from nbguard.memory.scan.heap.kinds import attribute_of
from nbguard.memory.scan.parked import PARKED, Parked, fixed_storages, parked_facts, parked_storages
from nbguard.memory.scan.roots.frames import OPTIMIZED, frame_locals, running_frames
from nbguard.memory.scan.scan import Notebook, Scan
from nbguard.units import MiB, parse_bytes

_PATIENCE = 60.0
"""Seconds that a call waits for a cleanup in another thread."""
_LEAST_MEASURED = MiB
_TICKS = itertools.count(1)


def switch(size: int | str | None, namespace: dict[str, Any] | None = None) -> BudgetState:
    """Set the budget to `size` bytes, or end it with `off`; return the state afterwards, or, with None, as it is.

    Raises:
        NbguardError: `size` is no size; nothing was changed.
        NoTorchError: PyTorch is not imported yet.
    """
    if "torch" not in sys.modules:
        raise NoTorchError
    if size == "off":
        for garage in _ON:
            garage.end()
        _ON.clear()
    elif size is not None:
        try:
            nbytes = parse_bytes(size) if isinstance(size, str) else size
        except ValueError:
            raise NbguardError(f"{size!r} is neither a size nor off: write  " + advice.budget().command) from None
        for garage in _ON:
            garage.end()
        _ON[:] = [Garage(nbytes, namespace)]
        _ON[0].start()
    return _ON[0].state() if _ON else BudgetState()


_ON: list[Garage] = []


def garage_now() -> Garage | None:
    """Return the garage of the budget that is on, if any."""
    return _ON[0] if _ON else None


def end_on(device: RoomDevice) -> None:
    """End the budget of a device that is gone."""
    for garage in [each for each in _ON if each.is_on(device)]:
        garage.end()
        _ON.remove(garage)


class Garage:
    """Keeps the models on a device within a budget.

    Attributes:
        turns: models that came back, and those that made way, since `begin`.
    """

    def __init__(self, budget: int, namespace: dict[str, Any] | None) -> None:
        self._on = device_now()
        self.device = self._on.name
        self._budget = budget
        self._namespace = namespace
        self._uses: dict[int, _Use] = {}
        self._steps: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Any], int]] = weakref.WeakKeyDictionary()
        self._handle: Any = None
        self._is_on = True
        self._before: list[tuple[weakref.ref[Any], int]] = []
        self._returned = (0, 0.0)  # bytes and seconds of the returns so far
        self.turns: list[TakenTurn] = []

    def start(self) -> None:
        """Have the models that are there make way for each other from now on."""
        ARRIVALS.append(self._arrives)
        stand_in("_apply", Moves)
        self._handle = sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(self._stepped)
        with self._still():
            scanned, takers = self._look()
            for taker in takers:  # between cells no step is under way
                self._settle(scanned, taker)
            self._told(self._make_way(scanned, takers, 0))

    def end(self) -> None:
        """Park no more. Models that are parked still come back when they are used."""
        ARRIVALS.clear()
        stand_aside()
        self._is_on, self._namespace = False, None  # what is parked leads here
        self._handle.remove()
        for use in self._uses.values():
            use.handle.remove()
        self._uses.clear()

    def is_on(self, device: RoomDevice) -> bool:
        """Say whether its models take turns on a device."""
        return self._on is device

    def begin(self) -> None:
        """Forget the turns so far, at the start of a cell."""
        self.turns = []

    def keep(self) -> None:
        """Park the models beyond the budget that a cell has left."""
        allocated = self._on.allocated()
        if allocated is None or allocated > self._budget:
            with contextlib.suppress(KeyboardInterrupt), self._still():
                self._told(self._make_way(*self._look(), 0))

    def give_way(self, is_enough: Callable[[], bool]) -> int:
        """Park idle models, those used longest ago first, until there is enough room; return their bytes."""
        with contextlib.suppress(KeyboardInterrupt), self._still():
            parked = self._parked(*self._look(), lambda _: is_enough())
            self._told(parked)
            return sum(taker.nbytes for taker in parked)
        return 0

    def state(self) -> BudgetState:
        """Return the budget, and the models that take turns."""
        scanned, takers = self._look()
        busy, fixed, settled = self._facts_for(scanned)
        rate = self._rate()
        waiting: dict[str, int] = {}
        for parked in self._waiting():
            waiting[parked.label] = waiting.get(parked.label, 0) + sum(parked_storages(parked).values())
        models = [
            ModelTurn(
                name=taker.name,
                nbytes=taker.nbytes,
                parked=False,
                reason=reason_to_stay(scanned.facts, taker, fixed, busy, settled),
            )
            for taker in takers
        ]
        models += [
            ModelTurn(name=name, nbytes=nbytes, parked=True, seconds=None if rate is None else nbytes / rate)
            for name, nbytes in waiting.items()
        ]
        return BudgetState(
            device=self.device,
            budget=self._budget,
            here=sum(taker.nbytes for taker in takers),
            models=tuple(sorted(models, key=lambda model: -model.nbytes)),
        )

    # --- turns

    def _wake(self, label: str) -> None:
        """Bring a parked model back, before it is used.

        Raises:
            ParkedError: the device has no room for it, whatever makes way.
        """
        if self._on.is_capturing:
            raise ParkedError(f"{label} is parked, and nothing can move while a CUDA graph is captured: call it once before")
        with self._still():
            waiting = [parked for parked in self._waiting() if parked.label == label]
            if not waiting:  # another thread has brought it back meanwhile
                return
            nbytes = sum(sum(parked_storages(parked).values()) for parked in waiting)
            try:
                for is_last in (False, True):
                    self._told(self._way_for(nbytes, of_all=is_last))
                    if self._interrupts.happened:
                        return
                    began = time.perf_counter()
                    try:
                        self._bring_back(label)
                        break
                    except NbguardError:  # free memory may lie in pieces: all that is idle makes way then
                        if is_last:
                            raise
            except Exception as error:  # noqa: BLE001 - whatever it is, the call must not go on without its parameters
                raise ParkedError(f"{label} is parked, and cannot come back: {in_one_line(error)}") from None
            seconds = None if self._on.home is not None else time.perf_counter() - began
            if seconds is not None and nbytes >= _LEAST_MEASURED:
                self._returned = self._returned[0] + nbytes, self._returned[1] + seconds
            self.turns.append(TakenTurn(name=label, nbytes=nbytes, seconds=seconds))

    def _bring_back(self, label: str) -> None:
        with self._on.default_stream():
            unpark([label], _never, whole=True)

    def _arrives(self, module: Any, device: str) -> None:
        """Make way for a module that is about to move to the device, and note its uses from now on."""
        if device != self.device:
            return
        with contextlib.suppress(Exception):  # the move is the user's; a failure of it is, too
            self._note(module)
            module_of: Any = sys.modules["torch"].nn.Module
            tensors = {id(t): t for t in itertools.chain(module_of.parameters(module), module_of.buffers(module))}
            coming = sum(t.nbytes for t in tensors.values() if str(t.device) != self.device)
            allocated = self._on.allocated()
            if coming and (allocated is None or allocated + coming > self._budget or coming > self._on.room()):
                with self._still():
                    self._told(self._way_for(coming))

    def _way_for(self, nbytes: int, *, of_all: bool = False) -> list[Taker]:
        """Make way for so many bytes, or park all that is idle; return the parked ones. Garbage goes first.

        Other threads park nothing, as the tensors that the main thread computes with may not move under it.
        """
        if not self._is_on or threading.current_thread() is not threading.main_thread():
            return []
        if nbytes > self._on.room():
            gc.collect()
        scanned, takers = self._look()
        return self._parked(scanned, takers, lambda _: False) if of_all else self._make_way(scanned, takers, nbytes)

    def _told(self, parked: list[Taker]) -> None:
        if parked:
            self.turns.append(TakenTurn(parked=tuple(each.name for each in parked)))

    def _make_way(self, scanned: Scan, takers: tuple[Taker, ...], nbytes: int) -> list[Taker]:
        """Park models until the others and `nbytes` more are within the budget and the device has room."""
        here = sum(taker.nbytes for taker in takers)

        def is_enough(gone: int) -> bool:
            return here - gone + nbytes <= self._budget and (not nbytes or nbytes <= self._on.room())

        return self._parked(scanned, takers, is_enough)

    def _parked(self, scanned: Scan, takers: tuple[Taker, ...], is_enough: Callable[[int], bool]) -> list[Taker]:
        """Park idle models, those used longest ago first, until `is_enough(bytes of the parked)`; return them."""
        parked: list[Taker] = []
        busy = fixed = settled = None
        former: set[str] = set()  # names of models that are parked already, and live on elsewhere
        for taker in sorted(takers, key=self._last_use):
            if is_enough(sum(each.nbytes for each in parked)) or self._interrupts.happened:
                break
            if fixed is None or busy is None or settled is None:
                busy, fixed, settled = self._facts_for(scanned)
                former = {fact.label for fact in parked_facts()}
            if reason_to_stay(scanned.facts, taker, fixed, busy, settled):
                continue
            if taker.name in former:
                continue
            if park(taker.name, taker.storages, scanned.tracker, _never, self._wake, self._on.home):
                with contextlib.suppress(NbguardError):
                    unpark([taker.name], _never)  # a part of it could not be moved: all of it stays
            else:
                parked.append(taker)
            sys.modules["torch"].clear_autocast_cache()
            self._on.empty_cache()
        return parked

    @contextlib.contextmanager
    def _still(self) -> Iterator[None]:
        """Let nothing come between: an interrupt waits until each model is either there or parked."""
        with Interrupts() as interrupts:
            self._interrupts = interrupts
            with alone(_PATIENCE):
                yield
        if interrupts.happened:
            raise KeyboardInterrupt

    # --- what there is

    def _look(self) -> tuple[Scan, tuple[Taker, ...]]:
        scanned = self._on.look(Notebook.current(self._namespace))
        takers = takers_of(scanned.facts, self.device)
        self._uses = {key: use for key, use in self._uses.items() if use.module() is not None}
        for taker in takers:
            for ref in taker.tops:
                known = scanned.tracker.objects.get(ref)
                module = None if known is None else known()
                if module is not None:
                    self._note(module)
        return scanned, takers

    def _facts_for(self, scanned: Scan) -> tuple[dict[int, str], dict[int, str], set[tuple[str, int]]]:
        """Return busy objects, storages that cannot move, and gradients that are used, for `reason_to_stay`."""
        busy = dict.fromkeys(_at_work(), "it is in use by code that runs")
        for number, weak in scanned.tracker.objects.items():
            if attribute_of(weak(), "_compiled_call_impl") is not None:
                busy[number] = COMPILED
        if scanned.facts.has_compiled and COMPILED not in busy.values():
            names = {node.type_name for node in scanned.facts.graph.nodes}
            if "OptimizedModule" not in names:
                busy |= dict.fromkeys(scanned.tracker.objects, "compiled code may use it (torch.compile)")
        settled = set[tuple[str, int]]()
        for ref, version in (*self._steps.values(), *self._before):
            gradient = ref()
            if gradient is not None and gradient._version == version:
                settled.add(self._on.key(gradient.untyped_storage()))
        return busy, fixed_storages(scanned.tracker), settled

    def _waiting(self) -> list[Parked]:
        return [parked for parked in PARKED if parked.wake is not None]

    def _rate(self) -> float | None:
        nbytes, seconds = self._returned
        return nbytes / seconds if nbytes and seconds else None

    # --- uses

    def _note(self, module: Any) -> None:
        """Note the calls of a module from now on."""
        use = self._uses.get(id(module))
        if use is not None and use.module() is module:
            return
        torch: Any = sys.modules["torch"]
        hook = _Used()
        with contextlib.suppress(RuntimeError):  # a scripted module takes no hooks of Python's
            handle = torch.nn.Module.register_forward_pre_hook(module, hook)
            self._uses[id(module)] = _Use(weakref.ref(module), hook, handle)

    def _last_use(self, taker: Taker) -> tuple[int, int]:
        uses = (self._uses.get(ref) for ref in taker.tops)
        return max((use.hook.tick for use in uses if use is not None), default=0), taker.cell

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        """Note the first gradient that a step has used, as it was then."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    self._steps[optimizer] = weakref.ref(gradient), gradient._version
                    return

    def _settle(self, scanned: Scan, taker: Taker) -> None:
        """Take the gradients of a model for used."""
        tensors = scanned.tracker.tensors or {}
        for number in taker.gradients:
            for ref in tensors.get(number, ()):
                gradient = None if ref is None else ref()
                if gradient is not None:
                    self._before.append((weakref.ref(gradient), gradient._version))
                    return


class _Used:
    """Notes when a module was called last. In a pickle or a copy it does nothing."""

    def __init__(self) -> None:
        self.tick = 0

    def __call__(self, *_: Any) -> None:
        if not sys.modules["torch"].compiler.is_compiling():
            self.tick = next(_TICKS)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (dict.get, {})  # called with (module, args) it gives args back


@dataclass(eq=False, slots=True)
class _Use:
    module: weakref.ref[Any]
    hook: _Used
    handle: Any


def _never() -> bool:
    return False


def _at_work() -> Iterable[int]:
    """Return the ids of the objects that a running function is a method of, in any thread."""
    for _, frame in running_frames():
        code = frame.f_code
        if code.co_flags & OPTIMIZED and not str(frame.f_globals.get("__name__")).startswith("nbguard."):
            values = frame_locals(frame)
            for name in ("self", *code.co_varnames[: min(1, code.co_argcount)]):
                if name in values:
                    yield id(values[name])
