"""What is no tensor of Python's: workspaces, graph pools, pinned host memory, memory that is not the allocator's."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from nbguard.memory.allocator.model.settings import parse_version
from tests.cuda.conftest import Notebook, counters, holders, parts, report, reset
from tests.kernels import Kernel

MIB = 1024**2
_KEEPS_FAILED = parse_version(version("torch")) < (2, 14)
"""The pool of a capture that failed never comes back before PyTorch 2.14."""
GRAPH = (
    "g = torch.cuda.CUDAGraph(); static = mib(4)\nwith torch.cuda.graph(g): out = static * 2; scratch = mib(40)\ndel scratch"
)


def _kernel_with_workspaces(notebook: Notebook, **settings: object) -> Kernel:
    kernel = notebook(**settings)
    kernel.run("net, opt = train(); clear = torch._C._cuda_clearCublasWorkspaces; before = torch.cuda.memory_allocated()").ok()
    kernel.run("clear(); kept = before - torch.cuda.memory_allocated(); net(torch.randn(64, 512).cuda()).sum().backward()").ok()
    if not kernel.value("kept"):
        pytest.skip("this PyTorch keeps no workspaces between calls")
    return kernel


@pytest.mark.parametrize(("arch", "nbytes"), [("8.0", 8519680), ("9.0", 32 * MIB)])
def test_cublas_workspaces_are_named(notebook: Notebook, arch: str, nbytes: int) -> None:
    kernel = _kernel_with_workspaces(notebook, arch=arch)

    found = holders(report(kernel)["devices"][0])
    text = kernel.run("%gpumem").ok().text

    assert found["cuBLAS workspaces"] % nbytes == 0
    assert found["cuBLAS workspaces"] > 0
    assert "that PyTorch keeps for matrix products" in text
    kernel.run("torch._C._cuda_clearCublasWorkspaces()").ok()
    assert "cuBLAS workspaces" not in holders(report(kernel)["devices"][0])


def test_a_workspace_configured_otherwise_is_known_too(notebook: Notebook) -> None:
    kernel = _kernel_with_workspaces(notebook, CUBLAS_WORKSPACE_CONFIG=":16:8")

    assert holders(report(kernel)["devices"][0])["cuBLAS workspaces"] % (128 * 1024) == 0


def test_a_graphs_pool_is_named_and_comes_back_with_it(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run(GRAPH).ok()
    _, reserved = counters(kernel)

    (device,) = report(kernel)["devices"]
    text = kernel.run("%gpumem").ok().text

    pools = {pool["name"]: pool["space"] for pool in device["pools"]}
    assert pools["CUDAGraph g · large blocks"]["kept"] == parts(device)["graph pools"] >= 40 * MIB
    assert "CUDAGraph g" in text
    plan = reset(kernel, "--dry-run g out")
    outcome = reset(kernel, "g out")
    assert outcome["realised"] == outcome["plan"]["promised"]
    assert 40 * MIB <= plan["reserved"] <= reserved - counters(kernel)[1] <= plan["reserved_at_most"]
    more = plan["reserved_at_most"] - plan["reserved"]
    assert more in (0, 2 * MIB), "the generator's two numbers for graphs go with the last one: they may free a small segment"


def test_a_graph_in_a_class_is_named_by_its_path(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("class Runner: pass\nr = Runner()\n" + GRAPH + "; r.graph = g; del g").ok()

    names = [pool["name"] for pool in report(kernel)["devices"][0]["pools"]]

    assert "CUDAGraph r.graph · large blocks" in names


def test_an_emptied_cache_gives_back_what_a_forgotten_graph_leaves(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run(GRAPH + "\ncycle = [g]; cycle.append(cycle); del g, cycle").ok()
    _, reserved = counters(kernel)

    plan = reset(kernel, "--dry-run")
    reset(kernel)

    back = reserved - counters(kernel)[1]
    assert plan["reserved"] <= back == plan["reserved_at_most"], "without its graph nothing tells whether a pool is in use"
    assert back >= 40 * MIB


def test_a_mem_pool_is_kept_by_its_object(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("pool = torch.cuda.MemPool()\nwith torch.cuda.use_mem_pool(pool): x = mib(30)\ndel x").ok()
    _, reserved = counters(kernel)

    assert parts(report(kernel)["devices"][0])["graph pools"] == 30 * MIB
    assert reset(kernel)["plan"]["reserved"] == 0
    assert counters(kernel)[1] == reserved
    assert reset(kernel, "pool")["plan"]["reserved"] == 30 * MIB
    assert counters(kernel)[1] == reserved - 30 * MIB


FAIL = """
def fail(graph, **options):
    '''Let a capture fail, as a value is read in it.'''
    try:
        with torch.cuda.graph(graph, **options): x = mib(40); static.sum().item()
    except Exception: sys.last_value = sys.last_exc = sys.last_traceback = None
import sys; static = mib(1); static.sum().item(); torch.cuda.empty_cache()
"""


def _given_back(kernel: Kernel, line: str = "") -> tuple[int, int, int]:
    """Clean up; return the bytes that the device is promised (at least, at most), and those that it gets."""
    planned = reset(kernel, f"--dry-run {line}")
    _, before = counters(kernel)
    plan = reset(kernel, line)["plan"]
    assert (plan["reserved"], plan["reserved_at_most"]) == (planned["reserved"], planned["reserved_at_most"])
    return plan["reserved"], plan["reserved_at_most"], before - counters(kernel)[1]


def test_the_pool_of_a_failed_capture_is_promised_to_nobody(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run(FAIL + "g = torch.cuda.CUDAGraph(); fail(g)").ok()
    kernel.run("del g").ok()

    least, most, back = _given_back(kernel)
    again = _given_back(kernel)
    kernel.run("torch.cuda.empty_cache()").ok()

    assert least == 0
    assert most >= 40 * MIB
    assert back == 0 if _KEEPS_FAILED else 40 * MIB <= back <= most
    assert again == (0, 0, 0)
    kept = parts(report(kernel)["devices"][0]).get("graph pools", 0)
    assert kept >= 40 * MIB if _KEEPS_FAILED else kept == 0
    assert "would go back" not in kernel.run("%reset_gpu --dry-run").ok().text


@pytest.mark.parametrize(
    "lose", ["del g", "import gc; cycle = [g]; cycle.append(cycle); del g, cycle", "g.reset()"], ids=["name", "cycle", "reset"]
)
def test_a_dead_graphs_pool_comes_back_within_what_is_said(notebook: Notebook, lose: str) -> None:
    kernel = notebook()
    kernel.run(GRAPH).ok()
    reset(kernel)  # an empty cache leaves the pool of a graph that is alive, which says nothing about the pool
    kernel.run(lose).ok()

    least, most, back = _given_back(kernel)

    assert least <= back <= most
    assert back >= 40 * MIB
    assert _given_back(kernel) == (0, 0, 0)


def test_a_dead_mem_pool_comes_back_within_what_is_said(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("pool = torch.cuda.MemPool()\nwith torch.cuda.use_mem_pool(pool): x, y = mib(30), mib(40)\ndel y, pool").ok()

    first = _given_back(kernel)
    kernel.run("del x").ok()
    second = _given_back(kernel)

    for least, most, back in (first, second):
        assert least <= back <= most
    assert second[2] == 30 * MIB


@pytest.mark.parametrize("pool", ["torch.cuda.MemPool().id", "torch.cuda.graph_pool_handle()"])
def test_a_capture_that_failed_in_anothers_pool_keeps_it(notebook: Notebook, pool: str) -> None:
    """The pool has an owner that is known, and does not come back with it."""
    kernel = notebook()
    own = "own = torch.cuda.MemPool(); pool = own.id" if "MemPool" in pool else f"pool = {pool}"
    kernel.run(FAIL + own).ok()
    kernel.run("g = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g, pool=pool): out = mib(30)\ndel out").ok()
    kernel.run("failed = torch.cuda.CUDAGraph(); fail(failed, pool=pool)").ok()
    names = "g own failed" if "MemPool" in pool else "g"

    first, second = _given_back(kernel, names), _given_back(kernel)

    assert first[0] <= first[2] <= first[1]
    if _KEEPS_FAILED:
        assert first[2] <= 2 * MIB, "numbers of the generator for graphs"
    assert second == (0, 0, 0)


def test_a_failed_captures_pool_is_no_room_for_a_request(notebook: Notebook) -> None:
    """Of what the device could give, that of the pool does not count: the request that is said to fit does."""
    kernel = notebook(bytes=1024 * MIB)
    kernel.run(FAIL + "g = torch.cuda.CUDAGraph(); fail(g); x = mib(200)").ok()

    kernel.run("from nbguard.memory.scan.scan import Notebook, scan").ok()
    largest = kernel.value("scan(Notebook.current(None)).analysis.devices[0].largest.flushed")
    kernel.run(f"big = torch.empty({largest}, dtype=torch.uint8, device='cuda')").ok()


SHARED_POOL = """
r.graph, other, own = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), torch.cuda.MemPool()
with torch.cuda.graph(r.graph): scratch = mib(40)
del scratch
with torch.cuda.graph(other, pool=r.graph.pool()): scratch = mib(4)
with torch.cuda.use_mem_pool(own): scratch = mib(40)
del scratch
"""


def test_each_pool_has_a_line_that_lets_it_go(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("class Runner: pass\nr = Runner()\n" + GRAPH + SHARED_POOL).ok()

    def lines() -> dict[str, str]:
        found = [finding for finding in report(kernel)["findings"] if finding["kind"] == "pool"]
        return {finding["sentence"].partition(" keeps")[0]: finding["advice"]["command"] for finding in found}

    told = lines()

    assert told == {
        "CUDAGraph g": "%reset_gpu g",
        "CUDAGraph r.graph": "%reset_gpu r.graph other",
        "MemPool own": "%reset_gpu own",
    }
    for command in told.values():
        _, before = counters(kernel)
        kernel.run(command).ok()
        assert before - counters(kernel)[1] >= 40 * MIB, command
    assert kernel.value("out.shape == (4 * 2**20,)"), "a tensor with a name stays"

    kernel.run("del out\n" + FAIL + "f = torch.cuda.CUDAGraph(); fail(f)").ok()
    assert list(lines().values()) == ["%reset_gpu"]
    kernel.run("%reset_gpu").ok()
    assert list(lines().values()) == [""]
    assert "freed only with the kernel" in kernel.run("%gpumem").ok().text


def test_streams_have_blocks_of_their_own(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("x = mib(30); side = torch.cuda.Stream()\nwith torch.cuda.stream(side): y = mib(12); z = mib(3); del z").ok()

    pools = {pool["name"]: pool["space"] for pool in report(kernel)["devices"][0]["pools"]}

    stream = f"large blocks · stream {kernel.value('side.cuda_stream'):#x}"
    assert pools["large blocks"]["allocated"] == 30 * MIB
    assert pools[stream]["allocated"] == 12 * MIB
    assert pools[stream]["releasable"] + pools[stream]["stranded"] == pools[stream]["reserved"] - 12 * MIB
    assert pools[stream]["largest_free"] > 0


def test_pinned_host_memory_has_a_row_of_its_own(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("x = mib(1); host = torch.empty(8 * 2**20, dtype=torch.uint8).pin_memory()").ok()
    kernel.run("gone = torch.empty(4 * 2**20, dtype=torch.uint8).pin_memory(); del gone").ok()

    answer = report(kernel)
    text = kernel.run("%gpumem").ok().text

    assert answer["pinned"] == {"active": 8 * MIB, "reserved": 12 * MIB}
    assert "pinned host memory 12 MiB: 8 MiB in use, 4 MiB kept for later" in text
    assert parts(answer["devices"][0])["allocated"] == MIB


def test_pinned_memory_that_torch_miscounts_is_no_figure(notebook: Notebook) -> None:
    """Up to torch 2.12 a freed block stays in the count of what is in use; here the counter is read as there."""
    kernel = notebook()
    kernel.run("""
x = mib(1); told = torch.cuda.host_memory_stats
def miscounted(): return told() | {"active_bytes.current": 92 + told()["allocated_bytes.current"], "active_bytes.freed": 0}
torch.cuda.host_memory_stats = miscounted
gone = torch.empty(4 * 2**20, dtype=torch.uint8).pin_memory(); del gone
""").ok()

    text, planned = kernel.run("%gpumem").ok().text, kernel.run("%reset_gpu --hard --dry-run").ok().text
    outcome = reset(kernel, "--hard")

    assert report(kernel)["pinned"] is None
    assert "pinned host memory 4 MiB (not of the device): this PyTorch does not tell how much of it is in use" in text
    assert "how much of 4 MiB that is, this PyTorch does not tell" in planned
    assert "-" not in text.partition("pinned host memory")[2].partition("\n")[0]
    assert outcome["host"] == 4 * MIB


def test_the_few_bytes_that_each_read_of_a_value_pins_are_not_mentioned(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("x = mib(1); x[0].item()").ok()

    assert report(kernel)["pinned"]["reserved"] > 0
    assert "pinned" not in kernel.run("%gpumem").ok().text
    assert "pinned" not in kernel.run("%reset_gpu --hard --dry-run").ok().text


def test_memory_of_others_is_not_counted_as_the_allocators(notebook: Notebook) -> None:
    """A tensor over memory that a library has taken from the driver itself, as CuPy's through DLPack."""
    kernel = notebook()
    kernel.run(
        """
x = mib(1)
address = ctypes.c_void_p()
assert fake.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(30 << 20)) == 0
class Foreign:
    __cuda_array_interface__ = {"shape": (30 << 20,), "typestr": "|u1", "data": (address.value, False), "version": 3}
foreign = torch.as_tensor(Foreign(), device="cuda")
"""
    ).ok()

    (device,) = report(kernel)["devices"]
    text = kernel.run("%gpumem").ok().text

    assert holders(device) == {"x": MIB, "foreign": 0}
    assert device["allocated"] == counters(kernel)[0] == MIB
    assert "1 tensor lies outside PyTorch's allocator" in text
