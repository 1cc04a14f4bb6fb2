"""Who may be ended: only what everything speaks for. Whatever else is known, some are never an orphan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbguard.memory.cleanup.plan.orphans import diagnose
from nbguard.memory.core.processes import DeviceProcess, Kernel, Process, Surroundings, connection_of, is_kernel, pids_text

ME = Surroundings(pid=500, ancestors=frozenset({1, 400}), owner=("1000", "1000", "1000"))
SPAWNED = (
    "/env/bin/python",
    "-c",
    "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5, pipe_handle=7)",
    "--multiprocessing-fork",
)
FORKSERVER = ("python3", "-c", "from multiprocessing.forkserver import main; main(8, 9, ['__main__'], **{})")
KERNEL = ("/env/bin/python", "-m", "ipykernel_launcher", "-f", "/run/kernel-1.json")
COMPILER = ("/env/bin/python", "/env/lib/python3.11/site-packages/torch/_inductor/compile_worker/__main__.py", "--parent=77")
INIT = ("/sbin/init",)
ORPHAN = DeviceProcess(
    process=Process(900, 100.0),
    ancestors=(1,),
    owner=ME.owner,
    command=SPAWNED,
    parent_command=INIT,
    is_forked=False,
    is_session_leader=False,
    has_clients=False,
    is_elsewhere=False,
    devices=(("GPU 0", 1 << 30),),
)
FORK = replace(ORPHAN, command=KERNEL, is_forked=True, connection=True)
LEFT_KERNEL = replace(ORPHAN, command=KERNEL, connection=False)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (ORPHAN, "a multiprocessing worker whose parent died"),
        (replace(ORPHAN, command=FORKSERVER, is_forked=True), "a multiprocessing worker whose parent died"),
        (replace(ORPHAN, command=COMPILER), "a torch.compile worker whose parent died"),
        (
            replace(ORPHAN, parent_command=("systemd", "--user"), ancestors=(800, 1), is_adopted=True),
            "a multiprocessing worker",
        ),
        (replace(ORPHAN, parent_command=("python", "-m", "jupyterlab"), is_adopted=True), "a multiprocessing worker"),
        (replace(ORPHAN, parent_command=("tini", "--", "jupyter", "lab")), "a multiprocessing worker"),
        (replace(ORPHAN, parent_command=None, ancestors=(), is_parent_gone=True), "a multiprocessing worker"),
        (replace(ORPHAN, devices=(), holds_files=True), "a multiprocessing worker"),
        (FORK, "forked by a dead kernel"),
        (LEFT_KERNEL, "a kernel whose server and connection file are gone"),
    ],
)
def test_orphans(found: DeviceProcess, reason: str) -> None:
    diagnosed = diagnose(found, ME)

    assert diagnosed.is_orphan, diagnosed.reason
    assert reason in diagnosed.reason


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (replace(ORPHAN, process=Process(500, 1.0)), "this kernel"),
        (replace(ORPHAN, process=Process(400, 1.0)), "this kernel was started by it"),
        (replace(ORPHAN, ancestors=(600, 500, 400, 1), parent_command=INIT), "started by this kernel"),
        (replace(ORPHAN, owner=("0", "0", "0")), "another user's"),
        (replace(ORPHAN, owner=("1000", "0", "0")), "another user's"),
        (replace(ORPHAN, owner=None), "another user's"),
        (replace(ORPHAN, is_elsewhere=True), "in another container"),
        (replace(ORPHAN, is_elsewhere=None), "in another container"),
        (replace(ORPHAN, is_defunct=True), "has ended already"),
        (replace(ORPHAN, devices=()), "not on a device"),
        (replace(ORPHAN, command=()), "its command cannot be read"),
        (replace(ORPHAN, parent_command=None), "its parent cannot be read"),
        (replace(ORPHAN, ancestors=(700, 1), parent_command=("python", "train.py")), "its parent lives (parent 700, python)"),
        (replace(ORPHAN, parent_command=("python", "train.py")), "its parent lives"),  # a container's first process
        (replace(ORPHAN, parent_command=("/bin/sh", "/env/bin/jupyter-lab")), "its parent lives"),
        (replace(ORPHAN, ancestors=(700, 1), parent_command=("bash",)), "its parent lives (parent 700, bash)"),
        (replace(ORPHAN, command=("python", "train.py")), "`!kill 900` ends it"),
        (replace(ORPHAN, command=("python", "train.py"), is_forked=True), "a program of its own"),
        (replace(ORPHAN, command=("python", "train.py", "--note", SPAWNED[2])), "a program of its own"),
        (replace(ORPHAN, command=("bash", "-c", SPAWNED[2])), "a program of its own"),
        (replace(LEFT_KERNEL, connection=True), "a live kernel: its connection file is there"),
        (replace(LEFT_KERNEL, connection=None), "a live kernel"),
        (replace(LEFT_KERNEL, has_clients=True), "a live kernel: somebody is connected"),
        (replace(LEFT_KERNEL, has_clients=None), "a live kernel"),
        (replace(LEFT_KERNEL, is_forked=None), "a live kernel"),
        (replace(LEFT_KERNEL, ancestors=(44, 1), parent_command=("jupyter-lab",)), "a live kernel (parent 44, jupyter-lab)"),
        (replace(FORK, is_session_leader=True), "a live kernel"),
        (replace(FORK, command=("python", "train.py", "-f", "/x/settings.json")), "perhaps a live kernel"),
        (replace(LEFT_KERNEL, command=("python", "train.py", "-f", "/x/settings.json")), "perhaps a live kernel"),
        (replace(LEFT_KERNEL, command=("julia", "kernel.jl", "/run/kernel-1.json")), "perhaps a live kernel"),
    ],
)  # fmt: skip
def test_everything_else_is_left_alone(found: DeviceProcess, reason: str) -> None:
    diagnosed = diagnose(found, ME)

    assert not diagnosed.is_orphan
    assert reason in diagnosed.reason


FORGED = ("init", "systemd", "tini", "dumb-init", "docker-init", "catatonit", "s6-svscan", "launchd", "conmon", "/sbin/init")


@pytest.mark.parametrize("found", [ORPHAN, FORK, LEFT_KERNEL])
@pytest.mark.parametrize("is_adopted", [False, None])
def test_no_name_of_a_parent_makes_an_orphan(found: DeviceProcess, is_adopted: bool | None) -> None:
    """F22 of the red team: any program may call itself init, and any may be a container's first process."""
    for name in FORGED:
        for command in ((name,), (name, "train.py"), (name, "--user")):
            its = replace(found, ancestors=(700, 1), parent_command=command, is_adopted=is_adopted)
            assert not diagnose(its, ME).is_orphan
            first = replace(found, parent_command=command, is_adopted=is_adopted, is_contained=True)
            assert not diagnose(first, ME).is_orphan
    for command in (("my-notebooks",), ("train.py: epoch 3",), ("/app/server", "--embedded"), ("python", "-m", "jupyterlab")):
        first = replace(found, parent_command=command, is_adopted=is_adopted)
        assert not any(diagnose(replace(first, is_contained=contained), ME).is_orphan for contained in (False, True))


def test_a_fork_of_a_kernel_that_lives_stays_and_one_of_a_kernel_before_the_restart_goes() -> None:
    before = replace(ME, kernels=(Kernel(Process(700, 50.0), "/run/kernel-1.json"),))
    after = replace(ME, kernels=(Kernel(Process(1200, 150.0), "/run/kernel-1.json"),))
    another = replace(ME, kernels=(Kernel(Process(700, 50.0), "/run/kernel-2.json"),))

    assert diagnose(FORK, before).reason == "of a live kernel (pid 700)"
    assert not diagnose(FORK, before).is_orphan
    assert diagnose(FORK, after).is_orphan
    assert diagnose(FORK, another).is_orphan


_ids = st.sampled_from([1, 2, 400, 500, 700, 900])
_maybe = st.sampled_from([None, True, False])
_commands = st.sampled_from([(), SPAWNED, FORKSERVER, KERNEL, COMPILER, ("python", "train.py"), ("bash",), INIT])
_processes = st.builds(
    DeviceProcess,
    process=st.builds(Process, _ids, st.floats(1, 200)),
    ancestors=st.lists(_ids, max_size=4).map(tuple),
    owner=st.sampled_from([None, ME.owner, ("0",) * 3, ("1000", "0", "0"), ()]),
    command=_commands,
    parent_command=st.one_of(st.none(), _commands),
    is_parent_gone=st.booleans(),
    is_adopted=_maybe,
    is_contained=st.booleans(),
    is_forked=_maybe,
    is_session_leader=_maybe,
    has_clients=_maybe,
    connection=_maybe,
    is_elsewhere=_maybe,
    is_defunct=st.booleans(),
    devices=st.sampled_from([(), (("GPU 0", None),), (("GPU 0", 7),)]),
    holds_files=st.booleans(),
)
_kernels = st.lists(st.builds(Kernel, st.builds(Process, _ids, st.floats(1, 200)), st.just("/run/kernel-1.json"))).map(tuple)
_arounds = st.builds(
    Surroundings,
    pid=st.just(500),
    ancestors=st.just(frozenset({1, 400})),
    owner=st.sampled_from([("1000",) * 3, ("0",) * 3, ()]),
    kernels=_kernels,
)


@given(_processes, _arounds)
def test_never_a_live_kernel_an_ancestor_a_descendant_or_another_users(found: DeviceProcess, around: Surroundings) -> None:
    diagnosed = diagnose(found, around)

    assert diagnosed.reason
    if diagnosed.is_orphan:
        assert found.process.pid != around.pid
        assert found.process.pid not in around.ancestors
        assert around.pid not in found.ancestors
        assert found.owner
        assert set(found.owner) == set(around.owner)
        assert found.devices or found.holds_files
        assert found.is_elsewhere is False
        assert found.is_parent_gone or found.is_adopted or (found.ancestors[0] == 1 and not found.is_contained)
        assert not found.is_defunct
        if is_kernel(found.command) and not found.is_forked:
            assert found.connection is False
            assert found.has_clients is False
        if is_kernel(found.command) and found.is_forked:
            assert all(kernel.process.started > found.process.started for kernel in around.kernels)


@given(_processes)
def test_what_is_not_known_never_speaks_for_an_orphan(found: DeviceProcess) -> None:
    """Taking any piece of knowledge away never turns what is left alone into an orphan."""
    if diagnose(found, ME).is_orphan:
        return
    known = (
        "owner",
        "parent_command",
        "is_adopted",
        "is_forked",
        "is_session_leader",
        "has_clients",
        "connection",
        "is_elsewhere",
    )
    for name in known:
        less = diagnose(replace(found, **{name: None}), ME)
        assert not less.is_orphan, (name, less.reason)


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (KERNEL, "/run/kernel-1.json"),
        (("python", "-m", "ipykernel_launcher", "--f=/run/k.json"), "/run/k.json"),
        (("python", "-m", "ipykernel", "--IPKernelApp.connection_file=/run/k.json"), "/run/k.json"),
        (("python", "-Xfrozen_modules=off", "/env/ipykernel_launcher.py", "-f", "/run/k.json"), "/run/k.json"),
    ],
)
def test_kernels_by_their_command(command: tuple[str, ...], file: str) -> None:
    assert is_kernel(command)
    assert connection_of(command) == file
    assert not is_kernel(("python", "train.py", *command[-2:]))


def test_pids_in_words() -> None:
    assert [pids_text(pids) for pids in ((), (3,), (4, 3), (3, 4, 5), (3, 5, 9))] == [
        "", "pid 3", "pids 3, 4", "pids 3–5", "pids 3, 5, 9",
    ]  # fmt: skip
