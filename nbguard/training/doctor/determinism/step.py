"""One training step on copies of parameters and buffers, with a hash of every tensor that the modules exchange."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from nbguard.errors import UndiagnosableError
from nbguard.memory.scan.heap.kinds import attribute_of
from nbguard.training.doctor.analysis.step_trace import StepEvent
from nbguard.training.doctor.determinism.batch import TrialBatch
from nbguard.training.doctor.determinism.digests import digest, tensors_in
from nbguard.training.doctor.subject import TrialSubject


class StepRunner:
    """Runs a subject's step any number of times from the same parameters and buffers, which it never touches."""

    def __init__(self, subject: TrialSubject, batch: TrialBatch) -> None:
        self._subject = subject
        self._batch = batch
        self.paths: dict[int, Any] = {id(module): path for path, module in subject.model.named_modules()}
        self._resets = _resets(subject)
        self._amp = autocast_of(subject)
        self.optimizer_note: str = ""  # why no step of the optimizer was made

    def _copies(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return copies of parameters and of buffers, each once, and a copy for every name in every module.

        Raises:
            UndiagnosableError: a parameter has no data yet.
        """
        model = self._subject.model
        by_id: dict[int, torch.Tensor] = {}
        parameters: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            if isinstance(parameter, nn.parameter.UninitializedTensorMixin):
                raise UndiagnosableError(f"{name} has no shape yet: call the model on one batch first")
            parameters[name] = by_id[id(parameter)] = parameter.detach().clone().requires_grad_(parameter.requires_grad)
        buffers: dict[str, torch.Tensor] = {}
        for name, buffer in model.named_buffers():
            buffers[name] = by_id[id(buffer)] = buffer.detach().clone()
        names = {
            f"{path}.{name}" if path else name: by_id[id(tensor)]
            for path, module in model.named_modules()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        }
        return parameters, buffers, names

    def run(self, observe: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext) -> list[StepEvent]:
        """Run the step and return the hashes of its tensors, in their order. `observe` is entered around both passes."""
        events = _Events(self.paths)
        with observe():
            parameters, _, gradients = self._passes(events)
        for name, gradient in gradients.items():
            events.add("gradient", name, "", gradient)
        for name, updated in self._step(parameters, gradients).items():
            events.add("update", name, "", updated)
        return events.events

    def timed(self) -> Callable[[], Any]:
        """Return a function that runs both passes and hashes nothing, for a clock."""
        return lambda: self._passes(None)

    def _passes(self, events: _Events | None) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Run the forward and the backward pass; return copies of the parameters, the buffers, and the gradients."""
        parameters, buffers, names = self._copies()
        batch = self._batch.cloned()

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            with events.listening() if events else contextlib.nullcontext(), self._amp():
                yield

        own = frozenset(map(id, names.values()))
        call = _Step(self._subject.model, self._resets, around, lambda outputs: self._loss(outputs, batch.targets), own)
        copies = {f"model.{name}": tensor for name, tensor in names.items()}
        try:
            with torch.enable_grad(), _uncompiled():
                loss = torch.func.functional_call(call, copies, batch.inputs, batch.named_inputs, tie_weights=False)
        finally:
            if events is not None:
                events.let_go()
        gradients = {name: tensor.grad for name, tensor in parameters.items() if tensor.grad is not None}
        for tensor in parameters.values():
            tensor.grad = None
        if events is not None:
            events.add("loss", "", "", loss)
            events.drain()
            for name, buffer in buffers.items():
                events.add("buffer", name, "", buffer)
        return parameters, buffers, gradients

    def _loss(self, outputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        """Return the loss: the user's, the model's own, or the sum of the outputs."""
        subject = self._subject
        own = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
        if subject.loss is not None and targets:
            value = subject.loss(_in_full(outputs) if self._amp is not contextlib.nullcontext else outputs, *targets)
        elif isinstance(own, torch.Tensor):
            value = own
        else:
            floats = [tensor.float().sum() for tensor in tensors_in(outputs) if tensor.is_floating_point()]
            if not floats:
                raise UndiagnosableError("the model returns no tensor of floating point numbers: there is no step to try")
            value = torch.stack(floats).sum()
        with torch._C.DisableTorchFunctionSubclass():
            plain: torch.Tensor = value.mean() if value.dim() else value
        return plain

    def _step(self, parameters: dict[str, Any], gradients: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Make a step of a new optimizer like the user's on the copies; return the parameters after it."""
        if not gradients:
            self.optimizer_note = "no parameter has a gradient"
            return {}
        try:
            optimizer = _optimizer(self._subject, parameters)
            if optimizer is None:
                self.optimizer_note = "no optimizer was given"
                return {}
            for name, gradient in gradients.items():
                parameters[name].grad = gradient
            optimizer.step()
        except Exception as error:  # noqa: BLE001 - an optimizer that cannot be made anew is a reason, not an error
            self.optimizer_note = f"the optimizer could not be recreated on copies: {type(error).__name__}"
            return {}
        return parameters


class _Step(nn.Module):  # type: ignore[misc]
    """Both passes of a step as a fit makes them, so that all of it runs on the copies.

    That goes for code before the call, too, and for modules that a backward pass calls again: checkpoints, reversible layers.
    """

    def __init__(
        self,
        model: nn.Module,
        resets: bool,
        around: Callable[[], contextlib.AbstractContextManager[None]],
        loss: Callable[[Any], torch.Tensor],
        own: frozenset[int],
    ) -> None:
        super().__init__()
        self.model = model
        self._resets = resets
        self._around = around  # of the forward pass
        self._loss = loss  # of the model's outputs
        self._own = own  # ids of the copies

    def forward(self, *inputs: Any, **named: Any) -> torch.Tensor:
        """Reset the model, if the fit does so before it begins, call it, and run the backward pass; return the loss."""
        with self._around():
            if self._resets:
                self.model.reset()
            loss = self._loss(self.model(*inputs, **named))
        if loss.requires_grad:
            others = [leaf for leaf in _leaves(loss) if id(leaf) not in self._own]
            before = [leaf.grad for leaf in others]
            for leaf in others:  # such as those of a loss with parameters: the gradients of its own stay as they are
                leaf.grad = None
            try:
                loss.backward()
            finally:
                for leaf, gradient in zip(others, before, strict=True):
                    leaf.grad = gradient
        return loss.detach()


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Run code compiled by `torch.compile` as it was written, since to compile it again for each run would take minutes."""
    stance = getattr(torch.compiler, "set_stance", None)  # since 2.6
    with contextlib.nullcontext() if stance is None or "torch._dynamo" not in sys.modules else stance("force_eager"):
        yield


def _leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors into which a backward pass writes gradients."""
    leaves: list[torch.Tensor] = []
    nodes, seen = [loss.grad_fn], {None}
    while nodes:
        node: Any = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return leaves


class _Events:
    """Hashes the tensors that go into and come out of modules, and their gradients, by hooks on all modules at once.

    Such hooks are the process's, not the modules': those that the user has put up stay as they are.
    """

    def __init__(self, paths: dict[int, str]) -> None:
        self.events: list[StepEvent] = []
        self._paths = paths
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # tensors, until both passes have run: their ids stay theirs
        self._gradients: list[tuple[str, str, int, bytes]] = []

    def add(self, direction: Any, path: str, side: Any, tensor: torch.Tensor, number: int = -1) -> None:
        """Hash a tensor."""
        self.events.append(StepEvent(direction=direction, path=path, side=side, tensor=number, bits=digest(tensor)))

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to the modules of the model."""
        module = nn.modules.module
        handles = [
            module.register_module_forward_pre_hook(lambda one, args: self._pass(one, "in", args)),
            module.register_module_forward_hook(lambda one, _, output: self._pass(one, "out", output)),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def let_go(self) -> None:
        """Keep no tensor any more: its hook leads here, and so to itself, which is a cycle that Python cannot collect."""
        self._alive.clear()

    def drain(self) -> None:
        """Take over the gradients that have come, in their order."""
        for path, side, number, bits in self._gradients:
            self.events.append(StepEvent(direction="backward", path=path, side=side, tensor=number, bits=bits))  # type: ignore[arg-type]

    def _pass(self, module: Any, side: str, value: Any) -> None:
        path = self._paths.get(id(module))
        if path is None:
            return
        for tensor in tensors_in(value):
            number = self._numbers.setdefault(id(tensor), len(self._numbers))
            self._alive.append(tensor)
            self.add("forward", path, side, tensor, number)
            if tensor.requires_grad:
                with contextlib.suppress(RuntimeError):  # of a kind whose gradient cannot be listened to
                    tensor.register_hook(self._gradient(path, side, number))

    def _gradient(self, path: str, side: str, number: int) -> Callable[[Any], None]:
        def listen(gradient: torch.Tensor) -> None:
            self._gradients.append((path, side, number, digest(gradient)))

        return listen


def _in_full(outputs: Any) -> Any:
    """Return outputs in float32, as a Learner's mixed precision hands them to the loss."""
    return outputs.float() if isinstance(outputs, torch.Tensor) and outputs.is_floating_point() else outputs


def _resets(subject: TrialSubject) -> bool:
    """Say whether the fit resets the model's state before it begins: a Learner's ModelResetter does so."""
    callbacks = (attribute_of(subject.learn, "cbs") if subject.learn is not None else None) or ()
    return any(type(callback).__name__ == "ModelResetter" for callback in callbacks) and hasattr(subject.model, "reset")


def autocast_of(subject: TrialSubject) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return the autocast of a Learner's mixed precision; it does nothing where the model is on a CPU, as in a fit."""
    for callback in (attribute_of(subject.learn, "cbs") if subject.learn is not None else None) or ():
        if type(callback).__name__ == "MixedPrecision":
            mode = getattr(attribute_of(callback, "amp_mode"), "value", "fp16")
            dtype = torch.bfloat16 if mode == "bf16" else torch.float16
            return lambda: torch.autocast("cuda", dtype=dtype, enabled=torch.cuda.is_initialized())
    return contextlib.nullcontext


def _optimizer(subject: TrialSubject, parameters: dict[str, torch.Tensor]) -> Any:
    """Return an optimizer like the user's on copies of the parameters; None if there is none to go by."""
    copies = {id(own): parameters[name] for name, own in subject.model.named_parameters()}
    if subject.learn is not None:
        groups = subject.learn.splitter(subject.model)
        groups = [list(groups)] if groups and isinstance(groups[0], torch.Tensor) else [list(group) for group in groups]
        new = subject.learn.opt_func([[copies[id(own)] for own in group] for group in groups], lr=subject.learn.lr)
        if subject.optimizer is not None:
            for own, hypers in zip(new.hypers, subject.optimizer.hypers, strict=True):
                own.update(hypers)
        return new
    if not isinstance(subject.optimizer, torch.optim.Optimizer):
        return None
    old = subject.optimizer
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": [copies[id(p)] for p in group["params"]]}
        for group in old.param_groups
    ]
    new = type(old)(groups)
    for own, state in old.state.items():
        new.state[copies[id(own)]] = copy.deepcopy(state)
    return new
