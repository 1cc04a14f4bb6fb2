"""`nbguard.deterministic`: everything that makes a run repeat is set, and undone again."""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from nbguard.errors import UndiagnosableError
from nbguard.memory.scan.heap.kinds import attribute_of, mro_of
from nbguard.training.doctor.analysis.step_trace import Deterministic

_MOST = 2**32
"""Seeds lie below this: numpy takes no larger ones."""


class DeterministicSwitch:
    """Sets seeds, switches and loaders when it is made, and puts all of them back by `undo`; also as a context manager.

    Loaders are held weakly. The generators go back to where they were, so that a run after `undo` is as if none had been.
    """

    def __init__(self, seed: int, learn: Any = None, *, warn_only: bool = False) -> None:
        refuse_unsettable(seed)
        torch: Any = sys.modules["torch"]
        from nbguard.memory.scan.devices.generators import LibraryGenerators
        from nbguard.training.doctor.determinism.seeds import loaders_of
        from nbguard.training.doctor.subject import subject_of

        self.seed = seed
        self._undo: list[Callable[[], object]] = []
        loaders = [] if learn is None else _loaders(learn, loaders_of, subject_of)
        generators = LibraryGenerators()
        self._undo.append(generators.restore)
        try:
            self._set_switches(torch, warn_only)
            self._seed_libraries(torch)
            own = [] if learn is None or _is_loader(torch, learn) else self._seed_own(learn, subject_of)
            seeded = [name for number, loader in enumerate(loaders) for name in self._seed_loader(torch, loader, number)]
        except BaseException:
            self.undo()
            raise
        self.state: Deterministic = Deterministic(
            is_on=True,
            seed=seed,
            mode="warn only" if warn_only else "on",
            loaders=tuple(seeded),
            generators=tuple(own),
            has_hash_seed=not sys.flags.hash_randomization,
        )

    def __enter__(self) -> DeterministicSwitch:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def undo(self) -> Deterministic:
        """Put everything back that was set, the last first."""
        from nbguard.training.doctor.determinism.seeds import SEEDED

        SEEDED.pop(self, None)
        while self._undo:
            self._undo.pop()()
        return Deterministic(is_on=False, seed=self.seed)

    def _set_switches(self, torch: Any, warn_only: bool) -> None:
        cudnn = torch.backends.cudnn
        before = cudnn.benchmark, cudnn.deterministic
        mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

        def restore() -> None:
            cudnn.benchmark, cudnn.deterministic = before
            torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])

        self._undo.append(restore)
        cudnn.benchmark, cudnn.deterministic = False, True
        torch.use_deterministic_algorithms(True, warn_only=warn_only)

    def _seed_libraries(self, torch: Any) -> None:
        """Seed Python's, numpy's and torch's generators; of a device that nobody has opened the seed waits for that."""
        random.seed(self.seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(self.seed)
        torch.manual_seed(self.seed)

    def _seed_own(self, learn: Any, subject_of: Callable[[Any], Any]) -> list[str]:
        """Seed the generators that the model has of its own; return their names."""
        from nbguard.training.doctor.determinism.kept_state import KeptState
        from nbguard.training.doctor.determinism.seeds import SEEDED, seed_generator, state_of

        model = subject_of(learn).model
        names: list[str] = []
        for name, generator in KeptState([("model", model)], [*model.parameters(), *model.buffers()]).generators:
            kept = state_of(generator)
            if kept is not None:
                state, put = kept
                self._undo.append(partial(put, state))
                seed_generator(generator, self.seed + len(names) + 1)
                SEEDED.setdefault(self, set()).add(id(generator))
                names.append(name)
        return names

    def _seed_loader(self, torch: Any, loader: Any, number: int) -> list[str]:
        """Give a loader a generator with a seed: fastai's has one that it made, torch's takes one."""
        from nbguard.training.doctor.determinism.seeds import has_generator, sampler_of

        reference = weakref.ref(loader)
        inner = attribute_of(loader, "fake_l")
        attributes = {"rng": random.Random(self.seed + number)} if inner is not None else {}  # noqa: S311 - no secret
        target = inner if inner is not None else loader
        before = {name: attribute_of(loader, name) for name in attributes}
        own = attribute_of(target, "generator")
        sampler: Any = None if inner is not None else sampler_of(loader)
        draws = has_generator(sampler) is not None
        sampler_own = attribute_of(sampler, "generator") if draws else None
        generator = torch.Generator().manual_seed(self.seed + number)

        def restore() -> None:
            alive = reference()
            if alive is None:
                return
            for name, value in before.items():
                object.__setattr__(alive, name, value)
            _set(attribute_of(alive, "fake_l") or alive, own)
            if draws:
                sampler.generator = sampler_own

        self._undo.append(restore)
        for name, value in attributes.items():
            object.__setattr__(loader, name, value)
        _set(target, generator)
        if draws:
            sampler.generator = generator
        return [("the training loader", "the validation loader")[number]] if number < 2 else []


def refuse_unsettable(seed: Any) -> None:
    """Refuse settings that cannot be made, before any is.

    Raises:
        UndiagnosableError: the seed is none, or there is no PyTorch whose switches could be set.
    """
    if "torch" not in sys.modules:
        raise UndiagnosableError("PyTorch is not imported in this kernel, so there is nothing to set")
    if type(seed) is not int or not 0 <= seed < _MOST:
        raise UndiagnosableError(f"a seed is a whole number from 0 to {_MOST - 1}, not {seed!r}")


def _set(loader: Any, generator: Any) -> None:
    """Give a loader a generator, the source of its workers' seeds."""
    object.__setattr__(loader, "generator", generator)


def _loaders(learn: Any, loaders_of: Callable[[Any], list[Any]], subject_of: Callable[[Any], Any]) -> list[Any]:
    """Return the loaders of a Learner, or the one that was given itself."""
    torch: Any = sys.modules["torch"]
    if _is_loader(torch, learn):
        return [learn]
    return loaders_of(subject_of(learn))


def _is_loader(torch: Any, obj: Any) -> bool:
    return torch.utils.data.DataLoader in mro_of(type(obj))


def deterministic(seed: int = 0, learn: Any = None, *, warn_only: bool = False) -> DeterministicSwitch:
    """Make the following code repeatable by seeds, deterministic algorithms, cuDNN's switches and loaders, until `undo()`.

    Use it as a context manager, `with nbguard.deterministic(42, learn): learn.fit(1)`, or keep the returned object.

    Args:
        seed: of Python's, numpy's and torch's generators, 0 to 2**32 - 1.
        learn: a Learner whose loaders get generators of their own, so that other draws do not change their order; also
            the generators that its model has of its own are seeded. If None, the libraries' generators alone.
        warn_only: whether an operation that has no deterministic implementation only warns, instead of raising.

    Raises:
        NbguardError: the seed is none, or `learn` is no Learner.
    """
    return DeterministicSwitch(seed, learn, warn_only=warn_only)
