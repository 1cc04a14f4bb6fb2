"""`%reset_gpu --park` on CUDA: the allocator gets back what was promised, and everything returns to its device as it was."""

from __future__ import annotations

import pytest

from nbguard.units import format_bytes
from tests.cuda.conftest import Notebook, counters, report, reset

MIB = 1024**2
_HASH = """
import hashlib
def every(run):
    net, opt = run
    found = [*net.parameters(), *(p.grad for p in net.parameters())]
    return found + [t for state in opt.state.values() for t in state.values() if t.numel() > 1]
def fill(run):
    for number, t in enumerate(every(run)):
        t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(number)))
def digest(run): return hashlib.sha1(b''.join(t.detach().cpu().numpy().tobytes() for t in every(run))).hexdigest()
"""

_RUNNING_FIT = """
class Slow(Callback):
    def after_batch(self): started.set(); go.wait(60)
started, go = threading.Event(), threading.Event()
items = [(torch.ones(512), torch.ones(512))] * 8
dls = DataLoaders(DataLoader(items, bs=4, num_workers=0), DataLoader(items, bs=4, num_workers=0), device='cuda')
learn = Learner(dls, Net(), loss_func=nn.MSELoss(), cbs=Slow())
l2 = Learner(dls, learn.model, loss_func=nn.MSELoss())
learn.remove_cb(ProgressCallback)
worker = threading.Thread(target=learn.fit, args=(1,)); worker.start(); started.wait(60)
"""


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_parked_bytes_leave_and_come_back_exactly(notebook: Notebook, conf: str) -> None:
    kernel = notebook(conf=conf)
    kernel.run(_HASH).ok()
    kernel.run("run = train(); rest = mib(5); view = run[0].body.weight[7:]").ok()
    kernel.run("with torch.no_grad(): fill(run)").ok()
    kernel.run("before = digest(run)").ok()
    allocated, reserved = counters(kernel)

    planned = reset(kernel, "--park run view --dry-run")
    assert counters(kernel) == (allocated, reserved)
    outcome = reset(kernel, "--park run view")

    assert outcome["plan"]["promised"] == planned["promised"] == outcome["realised"] == allocated - counters(kernel)[0]
    assert outcome["plan"]["reserved"] == planned["reserved"] == reserved - counters(kernel)[1]
    assert outcome["realised"] > 4 * 8 * MIB  # weights, gradients and two moments
    assert kernel.value("{str(t.device) for t in every(run)} | {str(view.device)}") == {"cpu"}
    assert kernel.value("digest(run) == before")
    assert [f["advice"]["command"] for f in report(kernel)["findings"] if f["kind"] == "parked"] == ["%reset_gpu --unpark run"]
    failed = kernel.run("run[0](torch.ones(1, 512).cuda())")
    assert failed.error is not None
    assert failed.error[0] == "ParkedError"
    reset(kernel)  # that error's frames

    said = kernel.run("%reset_gpu --unpark run").ok().text
    assert "run is back on cuda:0" in said
    assert kernel.value("{str(t.device) for t in every(run)}") == {"cuda:0"}
    assert kernel.value("digest(run) == before")
    assert kernel.value("view.data_ptr() - run[0].body.weight.data_ptr()") == 7 * 512 * 4
    assert counters(kernel)[0] == allocated
    kernel.run("loss = run[0](torch.ones(3, 512).cuda()).sum(); loss.backward(); run[1].step()").ok()


_IN_SEGMENTS = """
def in_segments(address):
    segments = torch.cuda.memory_snapshot()
    return any(s["address"] <= address < s["address"] + s["total_size"] for s in segments if s["total_size"])
def live_pages(places):  # bytes of these places that the allocator still has: a snapshot lists no page that it gave back
    return sum(size for at, size in places if in_segments(at))
"""


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_the_plan_says_what_the_device_gets_back_and_what_stays_stranded(notebook: Notebook, conf: str) -> None:
    kernel = notebook(conf=conf)
    kernel.run(_IN_SEGMENTS).ok()
    kernel.run("run, rest = [], []\nfor _ in range(24): run.append(mib(8)); rest.append(mib(1.5))").ok()
    kernel.run("alone = mib(40); places = [(t.data_ptr(), t.nbytes) for t in (*run, alone)]").ok()
    free = kernel.value("torch.cuda.mem_get_info()[0]")

    text = kernel.run("%reset_gpu --park run alone --dry-run").ok().text
    planned = reset(kernel, "--park run alone --dry-run")
    outcome = reset(kernel, "--park run alone")

    back = kernel.value("torch.cuda.mem_get_info()[0]") - free
    assert outcome["realised"] == planned["promised"] == (24 * 8 + 40) * MIB
    assert outcome["plan"]["reserved"] == planned["reserved"] == back
    assert outcome["plan"]["stranded"] == planned["stranded"] > 150 * MIB
    if not conf:  # whole segments come back, which tells by the addresses alone
        assert planned["stranded"] == kernel.value("live_pages(places)") == planned["promised"] - back
    assert f"{format_bytes(planned['stranded'])} stays with PyTorch: other tensors share its segments" in text


def test_each_device_gets_its_own_back(notebook: Notebook) -> None:
    kernel = notebook(devices=2)
    kernel.run("pair = [mib(3), mib(9, 'cuda:1')]").ok()
    reset(kernel, "--park pair")
    assert [counters(kernel, device)[0] for device in (0, 1)] == [0, 0]

    assert "cuda:0 and cuda:1" in kernel.run("%reset_gpu --unpark").ok().text
    assert kernel.value("[str(t.device) for t in pair]") == ["cuda:0", "cuda:1"]


def test_what_comes_back_later_than_the_rest_works_again(notebook: Notebook) -> None:
    """One device has room and the other has not: both are asked for, one comes back, and later the other."""
    kernel = notebook(devices=2)
    kernel.run("net = nn.Sequential(nn.Linear(512, 512).to('cuda:0'), nn.Linear(512, 512).to('cuda:1'))").ok()
    for full, empty in ((0, 1), (1, 0)):
        reset(kernel, "--park net")
        kernel.run(f"torch.cuda.set_per_process_memory_fraction(1e-6, {full})").ok()
        assert "out of memory" in kernel.run("%reset_gpu --unpark net").ok().text
        assert kernel.run(f"net[{full}](torch.ones(1, 512))").error == (
            "ParkedError",
            "net is parked in host memory: `%reset_gpu --unpark net` brings it back",
        )
        kernel.run(f"net[{empty}](torch.ones(1, 512).to('cuda:{empty}'));").ok()
        kernel.run(f"torch.cuda.set_per_process_memory_fraction(1.0, {full})").ok()
        kernel.run("%reset_gpu --unpark net").ok()
        kernel.run("for n in (0, 1): net[n](torch.ones(1, 512).to(f'cuda:{n}'))").ok()
        assert not kernel.value("[m for m in net if m._forward_pre_hooks]")


def test_what_the_user_has_moved_back_is_parked_no_more(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("run, rest = train(), mib(2); allocated = torch.cuda.memory_allocated()").ok()
    reset(kernel, "--park run rest")

    kernel.run("for p in run[0].parameters(): p.data = p.data.cuda()\ny = run[0](torch.ones(1, 512).cuda())").ok()
    assert "nothing is parked" not in kernel.run("%reset_gpu --unpark run").ok().text  # the optimizer's state was
    assert kernel.run("%gpumem").ok().text.count("--unpark") == 1
    kernel.run("rest = rest.cuda(); del y, p").ok()
    assert "nothing is parked" in kernel.run("%reset_gpu --unpark").stderr
    assert kernel.value("torch.cuda.memory_allocated() == allocated")


_LEARNER = """
from fastai.basics import *
from fastai.callback.schedule import *
from fastai.callback.progress import ProgressCallback
items = [(torch.full((8,), float(number)), torch.tensor([number % 2.])) for number in range(16)]
dls = DataLoaders.from_dsets(items, items, bs=4, num_workers=0, device='cuda')
model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
learn = Learner(dls, model, loss_func=nn.MSELoss(), path=Path('.'))
learn.remove_cb(ProgressCallback); learn.logger = noop
learn.fit(1)
parallel = nn.DataParallel(learn.model)
def every():
    tensors = [*learn.model.parameters(), *learn.model.buffers()]
    states = [t for p in learn.opt.state.values() for t in p.values() if isinstance(t, torch.Tensor)]
    return tensors + states
def state(): return [(t.device.type, t.detach().cpu().numpy().tobytes()) for t in every()]
x = torch.ones(4, 8).cuda()
"""

_USES = [
    "learn.fit(1)",
    "learn.fit_one_cycle(1)",
    "learn.get_preds()",
    "learn.validate()",
    "learn.predict(items[0][0])",
    "learn.lr_find(show_plot=False)",
    "learn.show_results()",
    "learn.model(x)",
    "learn.model[2](torch.ones(4, 64).cuda())",
    "parallel(x)",
    "learn.model.cuda()",
    "parallel.to('cuda')",
    "learn.model.to_empty(device='cuda')",
    "nn.DataParallel(learn.model)",
    "Learner(dls, learn.model, loss_func=nn.MSELoss()).fit(1)",
]


@pytest.mark.slow
def test_a_parked_learner_does_nothing_and_says_how_to_bring_it_back(notebook: Notebook) -> None:
    """Seen: fit() failed of a device, and get_preds() moved the model back without the optimizer's state."""
    kernel = notebook(fastai=True)
    kernel.run(_LEARNER).ok()
    alone = reset(kernel, "--park learn --dry-run")
    assert any("parallel needs it too" in sentence for sentence in alone["skipped"])
    reset(kernel, "--park learn parallel")
    kernel.run("before = state()").ok()
    assert kernel.value("{device for device, _ in before}") == {"cpu"}
    for use in _USES:
        kind, message = kernel.run(use).error or ("", "")
        assert kind == "ParkedError", use
        assert message.endswith("learn is parked in host memory: `%reset_gpu --unpark learn` brings it back"), use
        assert kernel.value("state() == before"), use
    kernel.run("learn.model.cpu().float().eval(); assert state() == before").ok()
    kernel.run("import copy; copy.deepcopy(learn.model).cuda()(x); nn.Linear(8, 1).cuda()(x);").ok()  # of its own: free to move

    kernel.run("%reset_gpu --unpark learn").ok()
    assert kernel.value("[bits for _, bits in state()] == [bits for _, bits in before]")
    assert kernel.value("{device for device, _ in state()}") == {"cuda"}
    assert kernel.value("type(nn.Module._apply).__name__") == "function"
    for use in [use for use in _USES if not any(word in use for word in ("show_results", "to_empty", "predict", "lr_find"))]:
        kernel.run(use).ok()


_DISTRIBUTED = """
import torch.distributed as dist
dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())
net, calls = Net().cuda(), []
ddp = nn.parallel.DistributedDataParallel(net)
def count(state, bucket):
    calls.append(bucket); done = torch.futures.Future(); done.set_result(bucket.buffer()); return done
ddp.register_comm_hook(None, count)
def step(): calls.clear(); ddp(torch.ones(2, 512).cuda()).sum().backward(); return len(calls)
"""


def test_what_hangs_on_a_parameters_gradient_goes_on_working(notebook: Notebook) -> None:
    """A move to another device gives a parameter a new end of its graphs: hooks on the former would never run again."""
    kernel = notebook()
    kernel.run(_DISTRIBUTED).ok()
    assert kernel.value("step()") > 0
    for name in ("ddp", "net"):
        refused = kernel.run(f"%reset_gpu --park {name}").stderr
        assert f"{name} cannot be parked" in refused
        assert "gradients are synchronised" in refused
    assert kernel.value("step()") > 0

    kernel.run("p, hits = nn.Parameter(torch.ones(9).cuda()), []").ok()
    kernel.run("end = p.expand_as(p).grad_fn.next_functions[0][0]; hook = end.register_hook(lambda *_: hits.append(1))").ok()
    kernel.run("p.register_hook(lambda _: hits.append(2))").ok()
    kernel.run("p.register_post_accumulate_grad_hook(lambda _: hits.append(3))").ok()
    assert "a hook on its gradient" in kernel.run("%reset_gpu --park p").stderr
    kernel.run("hook.remove(); p.sum().backward()").ok()
    reset(kernel, "--park p")
    kernel.run("%reset_gpu --unpark p").ok()
    kernel.run("p.sum().backward()").ok()
    assert kernel.value("hits") == [2, 3] * 2


def test_without_room_nothing_comes_back(notebook: Notebook) -> None:
    kernel = notebook(bytes=1024 * MIB, context=100 * MIB)
    kernel.run("runs = [mib(300), mib(300)]").ok()
    reset(kernel, "--park runs")
    kernel.run("other = mib(600)").ok()

    refused = kernel.run("%reset_gpu --unpark runs")
    assert "would not fit" in refused.stderr
    assert kernel.value("{str(t.device) for t in runs}") == {"cpu"}
    kernel.run("del other").ok()
    kernel.run("%reset_gpu --unpark runs").ok()
    assert kernel.value("{str(t.device) for t in runs}") == {"cuda:0"}


def test_a_host_without_room_refuses(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("run = train(); import resource, psutil").ok()
    kernel.run("resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**24, -1))").ok()
    before = counters(kernel)

    cell = kernel.run("%reset_gpu --park run")

    assert "host memory has room for" in cell.text
    assert counters(kernel) == before
    kernel.run("resource.setrlimit(resource.RLIMIT_AS, (-1, -1))").ok()
    reset(kernel, "--park run")
    assert counters(kernel)[0] < before[0]


def test_a_cuda_graph_forbids_it(notebook: Notebook) -> None:
    """A captured graph replays with addresses: moving what it was captured with would let it write into foreign memory."""
    kernel = notebook()
    kernel.run("x = mib(4); g = torch.cuda.CUDAGraph()").ok()
    kernel.run("with torch.cuda.graph(g): y = x + 1").ok()

    assert "the CUDA graph g replays with the addresses" in kernel.run("%reset_gpu --park x").stderr
    kernel.run("del g, y").ok()
    kernel.run("%reset_gpu --park x").ok()
    assert kernel.value("str(x.device)") == "cpu"


def test_a_fit_that_runs_is_not_disturbed(notebook: Notebook) -> None:
    kernel = notebook(fastai=True)
    kernel.run("from fastai.basics import *\nfrom fastai.callback.progress import ProgressCallback\nimport threading").ok()
    kernel.run(_RUNNING_FIT).ok()

    assert "a fit is running on learn" in kernel.run("%reset_gpu --park learn").stderr
    kernel.run("go.set(); worker.join()").ok()
    only = reset(kernel, "--park learn")
    assert any("l2 needs it too" in each for each in only["plan"]["skipped"])  # the model they share stays
    assert kernel.value("{str(p.device) for p in l2.model.parameters()}") == {"cuda:0"}
    reset(kernel, "--park learn l2")
    assert kernel.value("{str(p.device) for p in l2.model.parameters()}") == {"cpu"}
    kernel.run("%reset_gpu --unpark").ok()
    kernel.run("l2.remove_cb(ProgressCallback); l2.fit(1)").ok()
