"""`--engines`: the memory of the engines of an ipyparallel cluster, and their cleanup, the plan of each shown first."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from nbguard.errors import NbguardError
from nbguard.frontend.notebook.bundle import display_bundle

if TYPE_CHECKING:
    from nbguard.frontend.cluster.analysis.cleanup import EnginesCleanup
    from nbguard.frontend.cluster.analysis.engines import EnginesReport


def engines_report(namespace: Mapping[str, object]) -> EnginesReport:
    """Return the memory of the engines of the notebook's cluster.

    Raises:
        NbguardError: no name, or more than one, leads to a client of a cluster, or it has no engines.
    """
    from nbguard.frontend.cluster.engines import engines

    return engines(_client(namespace))


def engines_cleanup(
    namespace: Mapping[str, object], targets: Collection[str], choices: Mapping[str, Any], *, dry_run: bool
) -> EnginesCleanup:
    """Return the plans of the engines of the notebook's cluster; without `dry_run` show them, and return their outcomes.

    Raises:
        NbguardError: as `engines_report`.
    """
    from nbguard.frontend.cluster.cleanup import plan_engines, release_engines

    client = _client(namespace)
    plans = plan_engines(client, targets, choices)
    if dry_run:
        return plans
    display_bundle(plans.mimebundle())
    return release_engines(client, plans, targets, choices)


def _client(namespace: Mapping[str, object]) -> Any:
    from nbguard.frontend.cluster.inquiry import clients_in

    clients = clients_in(namespace)
    if not clients:
        raise NbguardError("no name here is the client of a cluster: make one, as in  rc = ipyparallel.Client()")
    if len(clients) > 1:
        names = list(clients)
        raise NbguardError(f"{', '.join(names)} are clients of clusters: ask one, as in  nbguard.engines({names[-1]})")
    return next(iter(clients.values()))
