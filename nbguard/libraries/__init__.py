"""Libraries of other people that train, each described in one file of this folder.

A description is data: it names classes by module, so that they are recognised without an import, and nothing of the library
itself is loaded, looked at or run from here. Every rule of the rooms reads these descriptions, and none asks for one library
by name. A new file with a `LIBRARY` is all that a new library needs. A library may ship its own, by an entry point.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Literal, get_type_hints

from nbguard.plain_data import is_of


@dataclass(frozen=True, slots=True)
class ExperimentPart:
    """An attribute of an experiment that has one of its parts."""

    attribute: str
    kind: Literal["model", "optimizer", "loader"]
    maker: str = ""  # attribute with the function or class that makes it; its name is shown where there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMethod:
    """A method that runs the passes of one batch, from the model's call to its backward pass at least."""

    module: str  # of its class
    owner: str  # name of its class
    name: str
    computed: tuple[str, ...] = ()  # attributes of its object that have results of the batch
    given: tuple[str, ...] = ()  # attributes of its object that have the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentClass:
    """A class whose objects train a model, such as a Learner or a Trainer."""

    modules: tuple[str, ...]  # where the class may be found, by the names in `sys.modules`
    name: str  # of the class
    parts: tuple[ExperimentPart, ...]
    loops: tuple[str, ...] = ()  # modules of the functions that run a fit, with the experiment as their `self`
    leftovers: Mapping[str, object] = field(default_factory=dict)
    """Attributes that an interrupted fit leaves, with the values that the library gives them at the end of a fit."""

    callback_leftovers: tuple[str, ...] = ()  # the same, of a callback that the experiment has: `progress.pbar`
    harmless: frozenset[str] = frozenset()  # of both: those that a fit which ended well leaves, too
    zero_gradients: str = ""  # its own call that frees the gradients between fits; empty if that is its model's `zero_grad()`
    fit: str = ""  # name of its method that fits, in `loops`; empty where its memory cannot be predicted
    cancel: tuple[str, str] = ("", "")  # (module, name) of the exception that ends a fit, and that the library catches
    step: StepMethod | None = None  # its own method that runs the passes of a batch
    guard: Literal["", "callback", "itself", "model"] = ""
    """Guard that lets its fits go on after they ran out of memory: a callback of its own, or a guard around it or its model."""

    is_learner: bool = False  # has a Learner's attributes and callbacks; the training wing copies and tries it by these


DEFAULT_EXPERIMENT = ExperimentClass(modules=(), name="", parts=(ExperimentPart("model", "model"),))
"""Description of an experiment without other known facts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """A part of an object that its description in one line names or counts."""

    path: tuple[str | int, ...]  # attributes, keys and indices that lead to it from the object
    unit: str = ""  # of its elements, which are counted; empty if its class is named
    dimension: int | None = None  # of a tensor, which is counted instead of elements
    has_names: bool = False  # its keys are named, too


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLeak:
    """Memory that versions of a library keep by mistake, and where it has been reported."""

    package: str  # as pip names it
    versions: str  # that keep it, as pip writes them: `<1.4`
    holder: str  # label of the root that has it: `accelerate.state.GradientState`
    keeps: str  # the memory, after "keeps"
    fixed: str = ""  # first version without it, or empty
    report: str = ""  # its address

    @property
    def words(self) -> str:
        """Return the sentence on it, without an end."""
        cure = f", fixed in {self.fixed}" if self.fixed else ""
        return f"known: {self.package} {self.versions} keeps {self.keeps}{cure} ({self.report})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePool:
    """A library's own pool of GPU memory, and the ways to have it smaller."""

    release: str = ""  # line of Python that gives unused memory back; empty if only the end of the process does
    setting: str = ""  # environment variable with the value that makes it take what it needs; empty without one


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryWork:
    """An activity of a library besides training, known by its functions."""

    files: tuple[str, ...]  # parts of the paths of the library's code
    functions: tuple[str, ...]  # ends of their names
    what: str  # subject of "takes 3 s"
    change: str  # the setting that makes it take less
    rank: int  # the lowest decides where several fit: an evaluation may save, and logs


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRepair:
    """A class that no exporter takes, with the cure."""

    reason: str  # why it cannot be exported, and what to do
    replacement: str = ""  # class of torch.nn that computes the same, built without arguments; empty without one
    setting: tuple[str, bool] | None = None  # (name in the model's `config`, value) without which it is not returned


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library as the rooms know it."""

    name: str  # as its users write it
    packages: tuple[str, ...]  # import names of it and of its companions: their code is not the user's
    loop_packages: tuple[str, ...] = ()  # those of them that run the training loop, and call the user's code
    distributions: tuple[str, ...] = ()  # as pip names them: those that may change the results of a run
    experiments: tuple[ExperimentClass, ...] = ()
    steps: tuple[StepMethod, ...] = ()  # methods of its other objects that run the passes of a batch
    model_parts: Mapping[str, str] = field(default_factory=dict)
    """Attribute with the part of a model whose outputs lead with the batch, by the name of the model's base class; `*` for
    models whose parts are called one by one."""

    kinds: tuple[tuple[str, str, str], ...] = ()  # (module, class, kind of node) of its other classes
    details: Mapping[tuple[str, str], tuple[Detail, ...]] = field(default_factory=dict)
    """Parts that the description of an object names, by (module, class); those that it lacks are left out."""

    known_leaks: tuple[KnownLeak, ...] = ()
    emptied_by: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Its own line that frees kept memory, by (module, name) of a registry's class, of a global, or of a thread's function."""

    pool: DevicePool = DevicePool()
    own_optimizers: tuple[tuple[str, str], ...] = ()  # (module, class) of optimizers that are none of PyTorch's
    single_optimizer: tuple[str, str] = ("", "")  # (module that steps an optimizer for each parameter, the way to one for all)
    training_functions: frozenset[str] = frozenset()  # names of functions that only run in a training loop
    work: tuple[LibraryWork, ...] = ()
    hook_files: tuple[str, ...] = ()  # beginnings of the paths of its hooks, which stand between a module and a user's function
    loader_files: tuple[str, ...] = ()  # parts of the paths of code that only leads to transforms and data sets
    module_repairs: Mapping[str, ExportRepair] = field(default_factory=dict)  # by the full name of a module's class
    output_repairs: Mapping[str, ExportRepair] = field(default_factory=dict)  # by the full name of an output's class
    is_locking: bool = False  # an error in a move of its model leaves a lock taken: the next fit would wait for ever
    divides_as: str = ""  # its name in a sentence on loaders that give each rank its own part of the data; empty if none does
    variables: tuple[str, ...] = ()  # beginnings of the names of its environment variables
    launchers: tuple[str, ...] = ()  # its programs that start processes of Python
    calling_modules: tuple[str, ...] = ()  # modules, with those below, that call the user's code in a fit
    shared_state: tuple[str, str] = ("", "")  # (module, class) that keeps state which all launched processes must make again
    settings: Mapping[str, str] = field(default_factory=dict)
    """Its own words for a change (`clip`, `accumulate`, `freeze`, `clear gradients`), for a `fit` and for its `metrics`."""


ENTRY_POINTS = "nbguard.libraries"
"""Libraries ship descriptions of themselves by entry points of this group, as in `toylib = "toylib_nbguard:LIBRARY"`."""


@cache
def libraries() -> tuple[Library, ...]:
    """Return the descriptions of all libraries: nbguard's, by the names of their files, then those that libraries ship.

    A library's own takes the place of nbguard's of the same name.
    """
    names = (module.name for module in pkgutil.walk_packages(__path__, f"{__name__}.") if not module.ispkg)
    own = [importlib.import_module(name).LIBRARY for name in sorted(names, key=lambda name: name.rpartition(".")[2])]
    shipped = _shipped()
    replaced = {library.name.lower() for library in shipped}
    return (*(library for library in own if library.name.lower() not in replaced), *shipped)


def _shipped() -> list[Library]:
    """Return the descriptions that installed libraries ship; of one that is not valid, warn and go on without it."""
    from importlib.metadata import entry_points

    found = []
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            if "." in entry.module:
                raise ValueError(
                    f"{entry.module} is in a package, which would be imported: give the description a module of its own"
                )
            found.append(_checked(entry.load()))
        except Exception as error:  # noqa: BLE001 - whatever a stranger's module raises
            warnings.warn(
                f"nbguard ignored the library description {entry.value} ({type(error).__name__}: {error})", stacklevel=2
            )
    return found


def _checked(library: object) -> Library:
    """Return a description whose fields have their types, down to the last name; raise TypeError for any other object."""
    if type(library) is not Library:
        raise TypeError(f"a {type(library).__name__} is no nbguard.libraries.Library")
    hints = get_type_hints(Library)
    for each in fields(Library):
        if not is_of(hints[each.name], getattr(library, each.name)):
            raise TypeError(f"{each.name} is no {each.type}")
    return library


@cache
def experiments() -> tuple[ExperimentClass, ...]:
    """Return the classes of all libraries whose objects train a model."""
    return tuple(experiment for library in libraries() for experiment in library.experiments)


@cache
def class_kinds() -> tuple[tuple[str, str, str], ...]:
    """Return (module, class, kind of node) of all classes that are known; experiments are of the kind `learner`."""
    return tuple(
        one
        for library in libraries()
        for one in (
            *((module, each.name, "learner") for each in library.experiments for module in each.modules),
            *library.kinds,
        )
    )


@cache
def attributes_of_kind(kind: str) -> tuple[str, ...]:
    """Return the attributes of experiments for a part of a kind, each once."""
    return tuple(dict.fromkeys(part.attribute for each in experiments() for part in each.parts if part.kind == kind))


@cache
def harmless_leftovers() -> frozenset[str]:
    """Return the leftovers on experiments that a fit which ended well leaves, too."""
    return frozenset[str]().union(*(each.harmless for each in experiments()))


@cache
def packages() -> tuple[str, ...]:
    """Return the import names of all libraries."""
    return tuple(package for library in libraries() for package in library.packages)


@cache
def loop_packages() -> tuple[str, ...]:
    """Return the import names of those that run a training loop."""
    return tuple(package for library in libraries() for package in library.loop_packages)


@cache
def single_optimizers() -> dict[str, str]:
    """Return the way to one optimizer for all parameters, by the module of a library that steps one for each."""
    return dict(library.single_optimizer for library in libraries() if library.single_optimizer[0])


@cache
def hook_files() -> tuple[str, ...]:
    """Return the beginnings of the paths of the libraries' hooks."""
    return tuple(file for library in libraries() for file in library.hook_files)


@cache
def loader_files() -> tuple[str, ...]:
    """Return parts of the paths of the libraries' code that only leads to transforms, data sets and collate functions."""
    return tuple(file for library in libraries() for file in library.loader_files)


@cache
def distributions() -> frozenset[str]:
    """Return the names, as pip has them, of the packages that may change a run's results."""
    return frozenset(name for library in libraries() for name in library.distributions)


@cache
def locking_packages() -> frozenset[str]:
    """Return the import names of packages where an error in a move of a model leaves a lock taken."""
    return frozenset(package for library in libraries() if library.is_locking for package in library.loop_packages)


@cache
def learner_packages() -> tuple[str, ...]:
    """Return the import names of the libraries that have a Learner."""
    with_learner = (library for library in libraries() if any(each.is_learner for each in library.experiments))
    return tuple(package for library in with_learner for package in library.loop_packages)


@cache
def launchers() -> tuple[str, ...]:
    """Return the libraries' programs that start processes of Python."""
    return tuple(program for library in libraries() for program in library.launchers)


@cache
def variable_prefixes() -> tuple[str, ...]:
    """Return the beginnings of the names of the libraries' environment variables, which have no secrets."""
    return tuple(prefix for library in libraries() for prefix in library.variables)


@cache
def calling_modules() -> tuple[str, ...]:
    """Return the modules, each with those below it, that call the user's code in a fit."""
    return tuple(module for library in libraries() for module in library.calling_modules)


@cache
def steps() -> tuple[StepMethod, ...]:
    """Return the methods of objects other than experiments that run the passes of a batch."""
    return tuple(step for library in libraries() for step in library.steps)


@cache
def model_parts() -> dict[str, str]:
    """Return the attributes with the parts of models that lead with the batch, by the names of the models' base classes."""
    return {name: attribute for library in libraries() for name, attribute in library.model_parts.items()}


@cache
def details() -> Mapping[tuple[str, str], tuple[Detail, ...]]:
    """Return the parts that descriptions of objects name, by (module, class)."""
    return {name: own for library in libraries() for name, own in library.details.items()}


@cache
def known_leaks() -> Mapping[str, tuple[KnownLeak, ...]]:
    """Return the leaks that are known, by the labels of their holders."""
    found: dict[str, tuple[KnownLeak, ...]] = {}
    for library in libraries():
        for leak in library.known_leaks:
            found[leak.holder] = (*found.get(leak.holder, ()), leak)
    return found


@cache
def emptied_by() -> Mapping[tuple[str, str], str]:
    """Return the libraries' own lines that free kept memory, by (module, name) of the class, global or function."""
    return {name: line for library in libraries() for name, line in library.emptied_by.items()}


def own_optimizers() -> tuple[tuple[str, str], ...]:
    """Return (module, class) of the libraries' optimizers that are none of PyTorch's."""
    return tuple(own for library in libraries() for own in library.own_optimizers)


def shared_states() -> tuple[tuple[str, str], ...]:
    """Return (module, class) of the states that all launched processes must make again."""
    return tuple(library.shared_state for library in libraries() if any(library.shared_state))


@cache
def training_functions() -> frozenset[str]:
    """Return the names of the libraries' functions that only run in a training loop."""
    return frozenset[str]().union(*(library.training_functions for library in libraries()))


def library_work(functions: Collection[tuple[str, str]]) -> LibraryWork | None:
    """Return the work that functions of a library, each by file and name, belong to."""
    fitting = [
        work
        for library in libraries()
        for work in library.work
        if any(part in file and name.endswith(work.functions) for part in work.files for file, name in functions)
    ]
    return min(fitting, key=lambda work: work.rank, default=None)


def module_repair(name: str) -> ExportRepair | None:
    """Return the cure for a class of modules that no exporter takes, by its full name; None if none is known."""
    return next((library.module_repairs[name] for library in libraries() if name in library.module_repairs), None)


def output_repair(name: str) -> ExportRepair | None:
    """Return the cure for a class of outputs that no exporter takes, by its full name; None if none is known."""
    return next((library.output_repairs[name] for library in libraries() if name in library.output_repairs), None)


def dividing_libraries() -> tuple[str, ...]:
    """Return the names of libraries whose loaders give each rank its own part of the data, of those with a Learner first."""
    own = (library for library in libraries() if library.divides_as)
    return tuple(library.divides_as for library in sorted(own, key=lambda library: not library.experiments))


def setting(change: str, **values: object) -> str:
    """Return the words for a change of the first library that has some; empty where none has."""
    own = (library.settings[change] for library in libraries() if change in library.settings)
    return next(own, "").format(**values)


def in_own_words(change: str, **values: object) -> str:
    """Return how each library calls a change, for a sentence: ` (fastai: …)`; empty where none has words for it."""
    said = [f"{each.name}: {each.settings[change].format(**values)}" for each in libraries() if change in each.settings]
    return f" ({'; '.join(said)})" if said else ""
