"""Room made on the fake device: by the command on the card, under interrupts, and not of what has its address elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.cuda.conftest import PRELUDE, counters
from tests.kernels import Kernel

MIB = 1024**2
_COMB = """
from tests.room.programs import sign, signature
def comb(count, size=64, live=16):
    whole = [mib(size) for _ in range(count)]; del whole
    teeth = [mib(live) for _ in range(count * size // live)]
    return teeth[:: size // live]
"""


@pytest.fixture
def on_device(fake_cuda_run: Callable[..., str]) -> Callable[..., Any]:
    """`on_device(code)` returns what code prints last, as data; the device has 1 GiB, `comb` leaves it in pieces."""

    def run(code: str, **settings: object) -> Any:
        printed = fake_cuda_run(
            f"{PRELUDE}\nimport json, nbguard\n{_COMB}\n{code}",
            bytes=1024 * MIB,
            context=0,
            TORCH_CPP_LOG_LEVEL="ERROR",
            **settings,
        )
        return json.loads(printed.splitlines()[-1])

    return run


def test_the_plan_the_allocator_and_every_byte_agree(on_device: Callable[..., Any]) -> None:
    found = on_device("from tests.room.programs import run; print(json.dumps(run(5, 8)))")

    assert found["failures"] == []
    assert found["counts"]["made"] > 0
    assert found["counts"]["refused"] > 0


_REFUSED = """
teeth = comb(15)
out = {}
def stays(what): out[what] = [nbguard.make_room('500MiB', dry_run=True).state, dict(nbguard.make_room('900MiB').stays)]
class UnownedMemory:
    def __init__(self, owner): self.owner = owner
stays('nothing')
exported = [torch.utils.dlpack.to_dlpack(t) for t in teeth[:9]]
stays('dlpack'); del exported
foreign = [UnownedMemory(t) for t in teeth[:9]]
stays('cupy'); del foreign
import threading
go = threading.Event()
def work(mine): go.wait(60)
thread = threading.Thread(target=work, args=(teeth[:9],)); thread.start()
stays('thread'); go.set(); thread.join(); del thread
raw = torch.cuda.caching_allocator_alloc(40 * 2**20)
stays('unknown'); torch.cuda.caching_allocator_delete(raw)
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool): kept = mib(8)
stays('pool'); del kept, pool
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): static = mib(2)
made = nbguard.make_room('400MiB')
out['graph'] = [made.state, made.reason]
print(json.dumps(out))
"""


def test_what_has_its_address_elsewhere_stays_and_is_named(on_device: Callable[..., Any]) -> None:
    found = on_device(_REFUSED)

    assert found["nothing"] == ["planned", {}]
    for what, words in (("dlpack", "outside Python"), ("cupy", "CuPy"), ("thread", "uses it")):
        state, stays = found[what]
        assert state == "refused", what
        assert [nbytes for why, nbytes in stays.items() if words in why] == [9 * 16 * MIB], (what, stays)
    assert [nbytes for why, nbytes in found["unknown"][1].items() if "nothing of Python's" in why] == [40 * MIB]
    assert found["pool"][0] == "planned", "a pool of its own stays as it is, and the rest moves"
    assert found["graph"][0] == "refused"
    assert "CUDA graph graph" in found["graph"][1]


def test_expandable_segments_do_it_themselves(on_device: Callable[..., Any]) -> None:
    code = "x = mib(30); made = nbguard.make_room('2GiB'); print(json.dumps([made.state, made.reason]))"
    state, reason = on_device(code, conf="expandable_segments:True")

    assert state == "refused"
    assert "expandable segments" in reason


_NO_PLACE = """
from nbguard.memory.cleanup.apply.parking import park_left
from nbguard.memory.room.device import CudaDevice, Traveller
from nbguard.memory.room.make_room import move_out_and_back
teeth = comb(15)
for number, t in enumerate(teeth): sign(t, number)
signs = [signature(t) for t in teeth]
view, version = teeth[0][5:9], teeth[0]._version
moving = lambda: [Traveller(t.untyped_storage(), 0) for t in teeth]
device = CudaDevice(0)
out = {}
def fails(): raise ValueError('no')
trip = move_out_and_back(device, moving(), fails)
out['raises'] = [trip.error, len(trip.left), [signature(t) for t in teeth] == signs]
taken = []
def takes_all():
    while True: taken.append(mib(2))
trip = move_out_and_back(device, moving(), takes_all)
left = len(trip.left)
gone = {id(each.storage): each.host for each in trip.left}
ways = [([t for t in teeth + [view] if t.untyped_storage()._cdata == each.storage._cdata], each.host) for each in trip.left]
parked = park_left('make-room', 'cuda:0', ways)
out['no place'] = [left, parked, {str(t.device) for t in teeth} == {'cpu'}, [signature(t) for t in teeth] == signs]
taken.clear(); del trip, gone, ways
back = nbguard.unpark('make-room')
out['back'] = [back.nbytes, {str(t.device) for t in [*teeth, view]} == {'cuda:0'}, [signature(t) for t in teeth] == signs]
same = view.untyped_storage()._cdata == teeth[0].untyped_storage()._cdata
out['view'] = [same, view.storage_offset(), teeth[0]._version == version]
print(json.dumps(out))
"""


def test_what_has_no_place_any_more_is_parked_and_comes_back(on_device: Callable[..., Any]) -> None:
    found = on_device(_NO_PLACE)

    assert found["raises"] == ["ValueError: no", 0, True]
    assert found["no place"] == [15, 15 * 16 * MIB, True, True]
    assert found["back"] == [15 * 16 * MIB, True, True]
    assert found["view"] == [True, 5, True]


_INTERRUPTED = """
import os, random, signal, threading
teeth = comb(15)
for number, t in enumerate(teeth): sign(t, number)
signs, states, seen = [signature(t) for t in teeth], set(), True
r = random.Random(3)
for turn in range(12):
    timer = threading.Timer(r.uniform(0, 0.15), os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start(); states.add(nbguard.make_room('400MiB').state); timer.join(); blocks = mib(1)
    except KeyboardInterrupt: states.add('raised')
    try: timer.join()
    except KeyboardInterrupt: pass
    seen = seen and [signature(t) for t in teeth] == signs
    blocks = None
print(json.dumps([seen, sorted(states), torch.cuda.memory_allocated() // 2**20]))
"""


def test_an_interrupt_loses_nothing(on_device: Callable[..., Any]) -> None:
    seen, states, allocated = on_device(_INTERRUPTED)

    assert seen
    assert states
    assert allocated == 15 * 16


def test_the_command_on_the_card_lets_the_cell_through(fake_cuda_kernel: Callable[..., Kernel]) -> None:
    kernel = fake_cuda_kernel(fastai=False, bytes=1024 * MIB, context=0)
    kernel.run(PRELUDE).ok()
    kernel.run("%load_ext nbguard").ok()
    kernel.run(_COMB + "teeth = comb(15); emb = teeth[3].view(torch.float32).requires_grad_(); emb.grad = emb.detach()").ok()
    kernel.run("for number, t in enumerate(teeth): sign(t, number)\nbefore = [signature(t) for t in teeth]").ok()

    failed = kernel.run("x = mib(300)")
    assert failed.error is not None
    card = json.loads(kernel.run("%gpumem oom --json").ok().text)
    (fix,) = [fix for fix in card["fixes"] if any("make-room" in line for line in fix["commands"])]
    assert (fix["verdict"], fix["nbytes"]) == ("rerun", 300 * MIB)
    answer = next(line for line in kernel.run("%gpumem oom").ok().text.splitlines() if "make-room" in line)
    assert "frees" not in answer, "a move gives nothing back"

    allocated = counters(kernel)[0]
    planned = json.loads(kernel.run(f"{fix['commands'][-1]} --dry-run --json").ok().text)
    assert (planned["state"], counters(kernel)[0]) == ("planned", allocated)
    for command in fix["commands"]:
        kernel.run(command).ok()
    assert counters(kernel)[0] == allocated
    assert kernel.value("[signature(t) for t in teeth] == before")
    kernel.run("x = mib(300)").ok()
    for line, words in (("", "SIZE"), ("300", "no unit"), ("3MiB --device 7", "no device")):
        failed = kernel.run(f"%gpumem make-room {line}")
        assert failed.error is not None
        assert words in failed.error[1]
    assert "--dry-run" in kernel.run("%gpumem make-room?").ok().stdout
