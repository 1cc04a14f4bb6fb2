"""Releases, each with the line that cuts a way from a root where least is lost, also by emptying caches of functions."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from nbguard.memory.core import advice
from nbguard.memory.core.advice import NONE, Advice, is_python
from nbguard.memory.core.facts import EXPERIMENT_KINDS, Graph, Root
from nbguard.memory.core.references.graph import BASE, CONTEXT, STALE_KINDS, Edge, path_text, reach, shortest_paths, storages_of
from nbguard.memory.core.references.shown_paths import (
    ANY,
    HOOK,
    WAITING,
    is_callback,
    last_reference,
    place_to_cut,
    reference_to_cut,
    way_without,
    ways_written,
)

# --- The line that takes a name's tensors off their autograd graphs, and leaves their values


_CONTAINERS = {"list": "list", "dict": "dict", "defaultdict": "dict", "OrderedDict": "dict"}
"""Containers that take other values for all that they have, by the names of their classes."""
_MOST_TENSORS = 1000
"""Most tensors that one line detaches where they are."""
_FEW_DETACHED = 3
"""Most of them that it names one by one."""


def detached(graph: Graph, root: Root, along: Collection[Root] = ()) -> Advice:
    """Return the line that detaches a tensor with a name, or all tensors of a container; `NONE` if there is no such line.

    `along`: roots of names that the same line detaches, which may lead to these tensors as well.

    A container has a line for its values only if each of them is a tensor; of others, such as a list of dicts, the tensors
    are detached where they are. Tensors that something else leads to keep their graphs, so nothing of these is cut.
    """
    if root.kind != "name" or len(root.nodes) != 1:
        return NONE
    number = root.nodes[0]
    node = graph.nodes[number]
    container = _CONTAINERS.get(node.type_name, "")
    tensors = node.children if container else root.nodes
    is_all = root.what == f"{node.type_name} of {len(tensors) + len(node.repeated)}"  # else numbers, or tensors elsewhere
    if any(graph.nodes[n].kind != "tensor" for n in tensors) or (container and not is_all):
        return _in_place(graph, root)
    others = [each for other in graph.roots if other is not root and other not in along for each in other.nodes]
    shared = reach(graph, others, {(number, n) for n in tensors} if container else set[Edge]())
    cut = {edge for n in tensors if n not in shared for edge in _graph_edges(graph, n)}
    return advice.detach(root.label, container, frozenset(cut)) if cut else NONE


def _graph_edges(graph: Graph, tensor: int) -> set[Edge]:
    """Return the references of a tensor that has a graph, which a detached one has no more; none of one without."""
    children = graph.nodes[tensor].children
    return {(tensor, child) for child in children} if any(graph.nodes[child].kind == "graph" for child in children) else set()


def _in_place(graph: Graph, root: Root) -> Advice:
    """Return the line that detaches the tensors behind a name where they are, which no view allows.

    If one of the tensors has another holder, there is no such line, since that holder would lose its graph, too.
    """
    graphs = {n for n, node in enumerate(graph.nodes) if node.kind == "graph"}
    reached = reach(graph, root.nodes, blocked=graphs)
    tensors = {n for n in reached if graph.nodes[n].kind == "tensor" and _graph_edges(graph, n)}
    others = reach(graph, (each for other in graph.roots if other is not root for each in other.nodes))
    is_fixed = any(label.startswith(BASE) for n in tensors for label in graph.nodes[n].labels)
    if not tensors or len(tensors) > _MOST_TENSORS or is_fixed or tensors & others:
        return NONE
    ways = shortest_paths(graph, root, tensors, graphs)
    texts = [path_text(graph, root, ways[n]) for n in sorted(tensors) if n in ways]
    written = _written(texts) if len(texts) == len(tensors) and all(map(is_python, texts)) else ""
    cut = frozenset(edge for n in tensors for edge in _graph_edges(graph, n))
    return advice.detach_in_place(written, cut) if written else NONE


def _written(texts: Sequence[str]) -> str:
    """Return code that detaches tensors by their paths: one by one, or by a key that counts from one to the next."""
    if len(texts) <= _FEW_DETACHED:
        return "; ".join(f"{text}.detach_()" for text in texts)
    for key in re.finditer(r"\[\d+\]", texts[0]):
        before, after = texts[0][: key.start()], texts[0][key.end() :]
        pattern = re.compile(re.escape(before) + r"\[(\d+)\]" + re.escape(after))
        numbers = {int(found[1]) for text in texts if (found := pattern.fullmatch(text))}
        first, last = min(numbers), max(numbers)
        if len(numbers) == len(texts) == last - first + 1:
            counted = f"range({last + 1})" if not first else f"range({first}, {last + 1})"
            return f"[{before}[n]{after}.detach_() for n in {counted}]"
    return ""


# --- Caches of functions (`functools.lru_cache`): the references that emptying them removes, and whether that frees anything.


_TYPE = "_lru_cache_wrapper"
_WRAPPED = ".__wrapped__"
"""How the function behind a cache is written: it stays, with all that it leads to."""


def is_function_cache(graph: Graph, node: int) -> bool:
    """Return whether a node is a function with a cache."""
    return graph.nodes[node].type_name == _TYPE


def cached_edges(graph: Graph, node: int) -> frozenset[Edge]:
    """Return the references from a function's cache to the arguments and results that it keeps, not to the function itself."""
    wrapped = {child for child, label in graph.nodes[node].references if label == _WRAPPED}
    spaces = {child for child in graph.nodes[node].children if _leads_to_function(graph, child)}
    return frozenset((node, child) for child in graph.nodes[node].children if child not in wrapped | spaces)


def _leads_to_function(graph: Graph, node: int) -> bool:
    return any(label == _WRAPPED for label in graph.nodes[node].labels)


def caches_worth_emptying(
    graph: Graph, gone: Set[int], cut: Set[Edge], of_interest: Set[int] | None
) -> dict[int, frozenset[Edge]]:
    """Return the caches of functions that alone keep memory alive, once these roots and references are gone, by node.

    Each comes with the references that emptying it removes. A cache that only keeps things needed elsewhere is left out: the
    function would have to compute again, for nothing. With `of_interest`, only caches that lead to one of these nodes count.
    """
    every = {n: cached_edges(graph, n) for n in range(len(graph.nodes)) if is_function_cache(graph, n)}
    if not any(every.values()):
        return {}
    entries = [node for number, root in enumerate(graph.roots) if number not in gone for node in root.nodes]
    staying = storages_of(graph, reach(graph, entries, cut | frozenset().union(*every.values())))
    alive = reach(graph, entries, cut)
    worth = {}
    for node, edges in every.items():
        below = reach(graph, (child for _, child in edges), cut) if node in alive else set()
        if of_interest is not None and not below & of_interest:
            continue
        if storages_of(graph, below) - staying:
            worth[node] = edges
    return worth


_MOST = 20
"""Lines that are made for one root."""
_MOST_CACHES = 4
"""Caches that one line empties."""
_FEW = 2
"""Paths that a line names one by one."""
_FIXED = ("tuple", "frozenset", "mappingproxy", "partial", "method", "builtin_function_or_method", "generator")
_PENDING = "pending_work_items"
"""How an executor of processes, and the thread that serves it, name the work that waits or runs."""
_RESETS = ("reset", "reset_all")
"""Methods of a metric that let go of the values which it has collected."""
_FINALIZER = "_Info"
"""The entry of each finalizer in the registry of `weakref.finalize`."""
_EXECUTORS = frozenset({"ThreadPoolExecutor", "ProcessPoolExecutor", "_ReusablePoolExecutor"})
"""Keep work that waits in a queue of their own, which their threads have as well: deleting the executor lets nothing go.

The last is joblib's (loky).
"""
_EMPTIED = frozenset({"dict", "list", "set", "OrderedDict", "defaultdict", "deque"})
"""Containers of a library or a class that are emptied by `clear()`."""
_OF_LOGGING = (".handlers", ".filters")
"""Lists of a logger's own."""
_NEVER_EMPTIED = frozenset(sys.stdlib_module_names) | {"IPython", "ipykernel", "matplotlib", "numpy", "torch", "traitlets"}
"""Libraries whose registries others live by: the loggers, the modules, the magics."""


def release_of_way(graph: Graph, root: Root, way: tuple[int, ...]) -> Advice:
    """Return the line that cuts a way from a root where least is lost: before the experiment, or the thing itself."""
    if root.kind == "out":
        return advice.release_output(root.label)
    if root.kind in STALE_KINDS:
        return advice.release_stale()
    if root.kind == "frame":
        return advice.WAIT
    if (value := _value_of_context(graph, root, way)) is not None:
        return value
    if (ending := _end_of_waiting(graph, root, way)) is not None:
        return ending
    if root.ended_by:
        return replace(advice.end_registration(root.ended_by), ends=root.label)
    if root.registry == "logger":
        return _of_logger(graph, root, way)
    if root.registry == "atexit":
        return advice.unregister(root.label)
    if root.registry == "thread":
        return advice.ONLY_WITH_THREAD
    if root.thread:
        return _end_of_thread(graph, way)
    if not root.is_shown:
        is_maybe_queued = all(graph.nodes[number].kind == "tensor" for number in root.nodes)
        return advice.UNSEEN_TENSORS if is_maybe_queued else advice.ONLY_WITH_KERNEL
    if (root.kind in ("name", "module") or root.module) and (cleared := _cleared(graph, root, way)):
        return cleared
    if root.kind in ("name", "module"):
        return _deleted(graph, root, way)
    return _emptied_cache(graph, root, way) or _released(graph, root, way)


def releases_of_root(graph: Graph, root: Root) -> tuple[Advice, ...]:
    """Return the lines that leave a root without memory, as far as there are any, each where least is lost."""
    cut, lines = set[Edge](), list[Advice]()
    for _ in range(_MOST):
        carriers = {node for node in reach(graph, root.nodes, cut) if graph.nodes[node].storages}
        way = way_without(graph, root, carriers, cut)
        line = release_of_way(graph, root, way) if way else advice.NONE
        if not line.is_code or (line.cut and line.cut <= cut):
            break
        lines.append(line)
        if not line.cut:
            break
        cut |= line.cut
    return tuple(lines)


def release_of_alike(graph: Graph, root: Root) -> Advice | None:
    """Return the line that lets go of all the models that a root keeps in places written alike; None where these are few.

    A study keeps one model for each trial: the models go, the study with its results stays.
    """
    models = {n for n, node in enumerate(graph.nodes) if node.kind in ("learner", "model")}
    lines = [line for line in releases_of_root(graph, root) if line.targets and any(child in models for _, child in line.cut)]
    line = joined(graph, lines) if len(lines) > _FEW else None
    return line if line is not None and len(line.targets) == 1 else None


def joined(graph: Graph, lines: Sequence[Advice], frees: int | None = None) -> Advice:
    """Return one line for several that are `alike`, with all their targets or one after the other.

    Many that differ by one key are one, `study.trials[*].model`, where that stands for them and for nothing else.
    """
    if not lines[0].targets or len(lines) == 1:
        return replace(advice.in_sequence(lines), frees=frees)
    targets = tuple(dict.fromkeys(text for line in lines for text in line.targets))
    cut = frozenset[Edge]().union(*(line.cut for line in lines))
    for pattern in _patterns(targets) if len(targets) > _FEW else ():
        edges = {last_reference(graph, root, way) for root, way in ways_written(graph, pattern)}
        if cut == edges:
            targets = (pattern,)
            break
    return replace(advice.release_names(targets, frees), cut=cut, ends=lines[0].ends if len(lines) == 1 else "")


def alike(lines: Sequence[Advice]) -> Sequence[Advice]:
    """Return the lines that can be one with the first, which have targets, too, or empty caches, or it alone."""
    if lines[0].targets:
        return [line for line in lines if line.targets]
    caches = [line for line in lines if line.effect == advice.EMPTIES_CACHE]
    return caches if lines[0] in caches and len(caches) <= _MOST_CACHES else lines[:1]


def _patterns(targets: Sequence[str]) -> Iterator[str]:
    """Yield the first of some paths with one of its keys left open, where all others are that path with another key."""
    for key in re.finditer(r"\[[^\[\]]*\]", targets[0]):
        before, after = targets[0][: key.start()], targets[0][key.end() :]
        if all(text.startswith(before) and text.endswith(after) for text in targets):
            yield before + ANY + after


def _cleared(graph: Graph, root: Root, way: tuple[int, ...]) -> Advice | None:
    """Return the line that empties the cache of a function on the way, or the container of a library or a class."""
    for place, number in enumerate(way):
        text, node = path_text(graph, root, way[: place + 1]), graph.nodes[number]
        if not is_python(text):
            return None
        if is_function_cache(graph, number):
            return replace(advice.empty_cache_of(root.module, text), cut=cached_edges(graph, number))
        if node.own_end and (own := _own_end(graph, root, way, place)) is not None:
            return own
        cut = frozenset((number, child) for child in node.children)
        if node.type_name in _EXECUTORS and root.kind in ("name", "module") and not root.module:
            line = advice.cancel_work(text, node.type_name)
            queue = _waiting_work(graph, number)
            return replace(line, cut=queue) if queue else None
        is_of_class = any(graph.nodes[n].type_name == "type" for n in way[:place])
        is_written = place == 0 or bool(dict(graph.nodes[way[place - 1]].references).get(number))
        is_needed = root.module.partition(".")[0] in _NEVER_EMPTIED
        is_private = root.kind == "library" and ("._" in text or is_needed)
        if node.type_name in _EMPTIED and is_written and cut and (is_of_class or root.kind == "library") and not is_private:
            if place == 0 and root.is_class:  # the attributes of the class itself
                continue
            return replace(advice.empty_container(root.module, text), cut=cut)
    return None


def _of_logger(graph: Graph, root: Root, way: tuple[int, ...]) -> Advice:
    """Return the line that takes away the things on a logger or its handler; the logger and its handlers stay."""
    for place, number in enumerate(way):
        text, node = path_text(graph, root, way[: place + 1]), graph.nodes[number]
        is_written = place == 0 or bool(dict(graph.nodes[way[place - 1]].references).get(number))
        if not is_python(text) or not is_written or text.endswith(_OF_LOGGING):
            continue
        if node.type_name in _EMPTIED:
            return replace(advice.empty_container(root.module, text), cut=frozenset((number, child) for child in node.children))
        if place and number == way[place_to_cut(graph, way)] and can_delete(graph, root, way[: place + 1]):
            return replace(advice.delete_attribute(root.module, text), cut=frozenset({(way[place - 1], number)}))
    return advice.ONLY_ITS_ATTRIBUTES


def _own_end(graph: Graph, root: Root, way: tuple[int, ...], place: int) -> Advice | None:
    """Return the line that has an object on a way let go of the things it piles up, or None where it has no such method."""
    owner, method = way[place], graph.nodes[way[place]].own_end
    text = path_text(graph, root, way[: place + 1])
    steps = list(zip(way[place:], way[place + 1 :], strict=False))
    if method in _RESETS:
        if not any(graph.nodes[node].type_name == "list" for node in way[place:]):
            return None
        own = reach(graph, (owner, *(child for child, label in graph.nodes[owner].references if not label)))
        states = {n for n in own if graph.nodes[n].type_name == "list"}
        cut = frozenset((state, child) for state in states for child in graph.nodes[state].children)
        return replace(advice.call_own_end(root.module, text, method), cut=cut)
    keys = [label[1:-1] for parent, child in steps if (label := dict(graph.nodes[parent].references)[child])[:2] == "['"]
    if not keys:
        return None
    below = reach(graph, (owner,))
    cut = frozenset((n, c) for n in below for c, label in graph.nodes[n].references if label == f"[{keys[0]}]")
    return replace(advice.call_own_end(root.module, text, method, keys[0]), cut=cut)


def metric_reset(graph: Graph, root: Root, way: tuple[int, ...]) -> Advice | None:
    """Return the line that resets the first metric on a way which keeps its values in lists, or None where there is none."""
    metrics = (place for place, node in enumerate(way) if graph.nodes[node].own_end in _RESETS)
    return next((line for place in metrics if (line := _own_end(graph, root, way, place)) is not None), None)


def _waiting_work(graph: Graph, executor: int) -> frozenset[Edge]:
    """Return the references from an executor's queues, and its threads', to work that waits."""
    below = reach(graph, (executor,))
    queues = {n for n in below if graph.nodes[n].type_name == "SimpleQueue"}
    queues |= {child for n in below for child, label in graph.nodes[n].references if label.endswith(_PENDING)}
    return frozenset((queue, child) for queue in queues for child in graph.nodes[queue].children)


def _value_of_context(graph: Graph, root: Root, way: tuple[int, ...]) -> Advice | None:
    """Return the line that gives a variable another value in a context that something keeps; None where none is on the way."""
    at = [place for place, node in enumerate(way) if graph.nodes[node].type_name == "Context"]
    if not at or not root.is_shown or root.registry == "thread":
        return None
    edges = zip(way[at[-1] :], way[at[-1] + 1 :], strict=False)
    edge = next((edge for edge in edges if dict(graph.nodes[edge[0]].references)[edge[1]].startswith(CONTEXT)), None)
    if edge is None:
        return None
    text = path_text(graph, root, way[: way.index(edge[1]) + 1])
    return replace(advice.let_go((text,)), cut=frozenset({edge}))


def _end_of_waiting(graph: Graph, root: Root, way: tuple[int, ...]) -> Advice | None:
    """Return the line that cancels the task or timer on a way; None where there is none.

    A task that is cancelled keeps its last error, and with it its variables: a name of it goes, too.
    """
    waiting = {node: each for each in graph.roots if each.registry in WAITING for node in each.nodes}
    place = next((place for place, node in enumerate(way) if node in waiting), None)
    if place is None or root.kind not in ("name", "module", "library"):
        return None
    node = way[place]
    text = path_text(graph, root, way[: place + 1]) if root.kind == "name" else ""
    if root.kind == "library":
        text = next((each.label for each in graph.roots if each.kind == "name" and each.nodes == (node,)), "")
    elif place and not can_delete(graph, root, way[: place + 1]):
        text = ""
    cut = frozenset((node, child) for child in graph.nodes[node].children)
    return replace(advice.cancel(waiting[node].ended_by, text, is_task=waiting[node].registry == "task"), cut=cut)


def _end_of_thread(graph: Graph, way: tuple[int, ...]) -> Advice:
    """Return the line that ends a thread's hold: it shuts down the named executor that the thread belongs to, if any."""
    for pool in graph.roots:
        executor = pool.nodes[0]
        if pool.kind != "name" or graph.nodes[executor].type_name not in _EXECUTORS:
            continue
        below = reach(graph, (executor,))
        work = _waiting_work(graph, executor)
        if any(edge in work for edge in pairwise(way)):
            return replace(advice.cancel_work(pool.label, graph.nodes[executor].type_name), cut=work)
        if way[0] in below:
            return replace(
                advice.end_threads(pool.label), cut=frozenset((way[0], child) for child in graph.nodes[way[0]].children)
            )
    return advice.ONLY_WITH_THREAD


def _emptied_cache(graph: Graph, root: Root, way: tuple[int, ...]) -> Advice | None:
    """Return the advice that empties the caches of functions behind a root where a way goes through one, else None.

    The way cannot be written. A model with two such methods is in both caches.
    """
    if not any(is_function_cache(graph, number) for number in way):
        return None
    caches = [number for number in reach(graph, root.nodes) if is_function_cache(graph, number)]
    return replace(advice.empty_caches(), cut=frozenset[Edge]().union(*(cached_edges(graph, number) for number in caches)))


def _released(graph: Graph, root: Root, way: tuple[int, ...]) -> Advice:
    """Return the command that takes one reference on a way away, by the path as a report shows it."""
    edge = reference_to_cut(graph, root, way)
    if edge is None:
        return advice.ONLY_WITH_KERNEL
    is_needed = root.module.partition(".")[0] in _NEVER_EMPTIED
    last = graph.nodes[edge[1]]
    is_users = last.kind in EXPERIMENT_KINDS or last.kind == "tensor"
    if is_needed and not is_callback(last) and not is_users:  # the objects that it lives by itself, such as threads that run
        return advice.NONE
    text = path_text(graph, root, way[: way.index(edge[1]) + 1])
    if graph.nodes[edge[1]].type_name == _FINALIZER:
        return replace(advice.detach_finalizer(text), cut=frozenset({edge}))
    return replace(advice.let_go((text,)), cut=frozenset({edge}))


def _deleted(graph: Graph, root: Root, way: tuple[int, ...]) -> Advice:
    """Return the line that deletes the thing on the way whose loss costs least."""
    pool = next((place for place, n in enumerate(way) if graph.nodes[n].type_name in _EXECUTORS), None)
    entry = place_to_cut(graph, way) if pool is None else pool  # a pool cannot do without its own objects
    while entry and not can_delete(graph, root, way[: entry + 1]):
        entry -= 1
    text = path_text(graph, root, way[: entry + 1])
    cut = frozenset({(way[entry - 1], way[entry])}) if entry else frozenset[Edge]()
    return replace(advice.release_names((text,)), cut=cut, ends="" if entry else root.label)


def can_delete(graph: Graph, root: Root, way: tuple[int, ...]) -> bool:
    """Say whether `del` can take the last step of a way.

    It takes nothing out of a tuple, an array or a closure. A private attribute of a library's object stays, such as the `_mgr`
    of a pandas DataFrame, because the object would be broken without it. A list that has the thing twice would still have it.
    A hook goes as often as it is registered.
    """
    owner = graph.nodes[way[-2]]
    label = dict(owner.references).get(way[-1], "")
    is_kept = owner.is_fixed or (owner.is_foreign and label.startswith("._"))
    if label in ("", ".__self__") or is_kept or owner.type_name in _FIXED or not _is_step(label):
        return False
    text = path_text(graph, root, way)
    is_left = way[-1] in owner.repeated and not HOOK.search(text)
    return not is_left and is_python(f"del {text}")


@lru_cache(maxsize=1000)
def _is_step(label: str) -> bool:
    """Return whether Python has a syntax for this step. It has none for the thousands of steps through an autograd graph."""
    return is_python(f"del x{label}")
