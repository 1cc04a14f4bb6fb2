"""Objects that run code, raise or block when looked at the usual way: nbguard looks by type, so nothing of it happens."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel
from tests.zoo.cases import PRELUDE

_HOSTILE = """
import types
launched = []
def boom(name):
    def method(self, *args, **kw):
        launched.append(name)
        raise SystemError(name)
    return method
class Proxy:
    __class__ = property(boom('__class__'))
    __slots__ = ('inside', '__weakref__')
for name in ('__getattr__', '__eq__', '__len__', '__repr__', '__str__', '__bool__', '__iter__', '__getitem__', '__contains__', '__dir__',
             '__instancecheck__', '__sizeof__', '__reduce__', '__format__', '__index__', '__call__'):
    setattr(Proxy, name, boom(name))
Proxy.__hash__ = lambda self: 7
proxy = Proxy.__new__(Proxy); Proxy.inside.__set__(proxy, torch.ones(1000)); track('inside', torch.ones(0))
class Lazy:
    @property
    def __dict__(self): launched.append('dict'); raise SystemError
    @property
    def model(self): launched.append('model'); return 1
    def __getattribute__(self, name): launched.append(name); return object.__getattribute__(self, name)
lazy = Lazy()
class Meta(type):
    def __getattribute__(cls, name): launched.append(('meta', name)); return type.__getattribute__(cls, name)
    def __instancecheck__(cls, obj): launched.append('instancecheck'); return False
    def __subclasscheck__(cls, sub): launched.append('subclasscheck'); return False
class Odd(metaclass=Meta):
    weights = torch.ones(500)
odd = Odd()
class Keys(dict):
    def __getitem__(self, key): launched.append('getitem'); return dict.__getitem__(self, key)
    def __iter__(self): launched.append('iter'); return dict.__iter__(self)
    def items(self): launched.append('items'); return dict.items(self)
    def values(self): launched.append('values'); return dict.values(self)
    def get(self, *a): launched.append('get'); return dict.get(self, *a)
keys = Keys(a=torch.ones(300))
class Sub(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None): launched.append(str(func)); return super().__torch_function__(func, types, args, kwargs or {})
    @property
    def shape(self): launched.append('shape'); return ()
    @property
    def device(self): launched.append('device'); raise SystemError
sub = torch.ones(200).as_subclass(Sub)
class Strange:
    def __hash__(self): launched.append('hash'); return 1
    def __eq__(self, other): launched.append('eq'); return True
odd_keys = {Strange(): torch.ones(50)}
class Judge(type):
    pass
for name in ('__eq__', '__ne__', '__hash__', '__call__', '__instancecheck__', '__subclasscheck__', '__bool__', '__len__', '__repr__', '__str__',
             '__iter__', '__contains__', '__getitem__', '__dir__', '__or__', '__ror__', '__lt__', '__format__', '__subclasses__', '__set_name__'):
    setattr(Judge, name, boom('metaclass ' + name))
make = type.__call__
class Word(str):
    __str__ = __repr__ = __eq__ = __format__ = __len__ = boom('name of a class')
    __hash__ = str.__hash__
Judged = type.__new__(Judge, 'Judged', (), {})
judged = make(Judged); judged.t = torch.ones(700)
judged_list = make(type.__new__(Judge, 'JudgedList', (list,), {}), [torch.ones(10)])
judged_dict = make(type.__new__(Judge, 'JudgedDict', (dict,), {}), a=torch.ones(10))
judged_tensor = torch.Tensor._make_subclass(type.__new__(type('JudgeTensor', (Judge, type(torch.Tensor)), {}), 'JudgedTensor', (torch.Tensor,), {}), torch.ones(20))
judged_module = make(type.__new__(Judge, 'JudgedModule', (torch.nn.Linear,), {}), 10, 10)
judged_error = make(type.__new__(Judge, 'JudgedError', (Exception,), {})); judged_error.t = torch.ones(10)
judged_slots = make(type.__new__(Judge, 'JudgedSlots', (), {'__slots__': ('t',)})); judged_slots.t = torch.ones(10)
judged_many = [make(Judged) for _ in range(500)]
judged_attributes = types.SimpleNamespace(a=judged_list, b={Judged.__name__: judged_many})
judged_word = make(type(Word('JudgedWord'), (), {})); judged_word.t = torch.ones(10)
class Reader:
    def __get__(self, obj, cls=None): launched.append('descriptor'); raise SystemError
    def __set__(self, obj, value): pass
    def __set_name__(self, cls, name): pass
class Read: t = Reader(); __len__ = Reader(); model = Reader()
read = Read(); read.__dict__['inside'] = torch.ones(10)
class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, dispatch_sizes_strides_policy='sizes', dispatch_device=True, dispatch_layout=True)
        made.inner = inner
        return made
    @classmethod
    def __torch_dispatch__(cls, func, *rest): launched.append(str(func)); raise SystemError
wrapper = Wrapper(torch.ones(40))
cells = [proxy, lazy, Odd, odd, keys, sub, odd_keys]
launched.clear()
"""


@pytest.fixture
def notebook(kernel: Kernel) -> Kernel:
    kernel.run(PRELUDE).ok()
    kernel.run("%load_ext nbguard").ok()
    kernel.run(_HOSTILE).ok()
    return kernel


@pytest.mark.parametrize(
    "line",
    [
        "%gpumem",
        "%gpumem --json",
        "%gpumem why proxy",
        "%gpumem why sub",
        "%gpumem why judged",
        "%gpumem why wrapper",
        "%gpumem map",
        "%gpumem cells on",
        "%reset_gpu --dry-run judged_dict['a'] judged_module",
        "del judged, judged_list, judged_module, judged_tensor, judged_error, judged_word, wrapper, read",
        "judged = judged_many = 1",
        "%reset_gpu --dry-run",
        "%reset_gpu",
        "%reset_gpu --dry-run keys['a']",
    ],
)
def test_looking_runs_none_of_their_code(notebook: Kernel, line: str) -> None:
    notebook.run("launched.clear()").ok()

    notebook.run(line).ok()

    assert notebook.value("launched") == []


def test_they_are_holders_like_any_other(notebook: Kernel) -> None:
    text = notebook.run("%gpumem -n 40").ok().text

    assert "3.91 KiB" in text  # proxy.inside, 1000 floats: found through its slot
    assert "proxy" in text


def test_freeing_one_by_name_frees_it_and_nothing_else(notebook: Kernel) -> None:
    notebook.run("del cells; track('a', keys['a']); launched.clear()").ok()

    text = notebook.run("%reset_gpu keys").ok().text

    assert "freed 1.17 KiB of 1.17 KiB promised" in text
    assert notebook.value("(launched, 'proxy' in globals(), builtins._tracked['a'][0]())") == ([], True, True)
