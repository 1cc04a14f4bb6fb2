"""Whether extensions with CUDA code, such as Apex, would build here, by toolkit, PyTorch's build, compiler, driver."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from nbguard.training.doctor.analysis.diagnosis import Check, CheckFinding, checked, not_checked
from nbguard.training.doctor.analysis.environment import CompilerFacts, EnvironmentFacts, Toolkit
from nbguard.training.doctor.analysis.gpu_checks import NO_TORCH, dotted, major

_NAME = "CUDA toolkit"
_ONLY = "matters only to extensions that are compiled here, such as Apex or flash-attn"


def toolkit_checks(facts: EnvironmentFacts) -> tuple[Check, ...]:
    """Return the check of the toolkit that PyTorch would compile an extension with."""
    return (_toolkit(facts),)


def _toolkit(facts: EnvironmentFacts) -> Check:
    torch, toolkits = facts.torch, facts.toolkit.toolkits
    if torch is None:
        return not_checked("environment", _NAME, NO_TORCH)
    if not torch.cuda:
        return not_checked("environment", _NAME, "this PyTorch is built without CUDA")
    if not toolkits:
        return checked("environment", _NAME, f"none, so nothing like Apex can be compiled; PyTorch {torch.version} needs none")
    taken, compiler = toolkits[0], facts.toolkit.compiler
    nvcc = f"nvcc {dotted(taken.version)}" if taken.has_nvcc else "no nvcc"
    built_by = "no C++ compiler" if compiler is None else f"{compiler.path} {dotted(compiler.version)}"
    driver = f"; the driver runs CUDA up to {dotted(facts.driver.cuda)}" if facts.driver.cuda else ""
    evidence = f"{nvcc} in {taken.home}, {built_by}; PyTorch is built for CUDA {torch.cuda}{driver}"
    return checked("environment", _NAME, evidence, *_findings(facts, taken, torch.cuda))


def _findings(facts: EnvironmentFacts, taken: Toolkit, cuda: str) -> Iterator[CheckFinding]:
    whose = "CUDA_HOME" if facts.toolkit.is_given else "the toolkit that PyTorch finds"
    other = _other(facts, cuda)
    if not _is_whole(taken):
        which, lacks = (" that use CUDA's headers", "cuda_runtime.h") if taken.has_nvcc else ("", "bin/nvcc")
        yield _finding(f"extensions{which} cannot be compiled because {whose}, {taken.home}, has no {lacks}", _ONLY, other)
    elif taken.version is not None and taken.version[0] != major(cuda):
        nvcc = dotted(taken.version)
        what = f"extensions cannot be compiled because nvcc is of CUDA {nvcc} and this PyTorch is built for {cuda}"
        yield _finding(what, f"PyTorch refuses another major version; it {_ONLY}", other)
    else:
        yield from _driver(facts, taken)
    yield from _compiler(facts.toolkit.compiler, facts.toolkit.numbered, taken)


def _driver(facts: EnvironmentFacts, taken: Toolkit) -> Iterator[CheckFinding]:
    """Yield that portable code of this nvcc is newer than the driver. Machine code of the same major version runs."""
    newest, gpu = facts.driver.cuda, next((gpu for gpu in facts.driver.gpus if gpu.capability), None)
    if newest is None or taken.version is None or gpu is None or taken.version[:2] <= newest:
        return
    yield _finding(
        f"extensions that hold portable code (PTX) cannot start, because nvcc is newer than the driver's CUDA {dotted(newest)}",
        f"nvcc {dotted(taken.version)}, driver {facts.driver.version}; 'unsupported toolchain' is the error. It {_ONLY}",
        f'export TORCH_CUDA_ARCH_LIST="{dotted(gpu.capability)}"   # before the build: code for {gpu.name} alone',
    )


def _compiler(compiler: CompilerFacts | None, numbered: tuple[int, ...], taken: Toolkit) -> Iterator[CheckFinding]:
    if compiler is None:
        yield _finding("extensions cannot be compiled because there is no C++ compiler", _ONLY, "# apt-get install g++")
        return
    limit, version = taken.newest_gcc, compiler.version
    if not compiler.is_gcc or limit is None or version is None or version[0] <= limit:
        return
    older = next((number for number in numbered if number <= limit), None)
    yield _finding(
        f"extensions cannot be compiled because nvcc takes GCC up to {limit}, and the compiler is GCC {version[0]}",
        f"{compiler.path} {dotted(version)}; it {_ONLY}",
        f"# apt-get install g++-{limit}, then export CC=gcc-{limit} CXX=g++-{limit}"
        if older is None
        else f"export CC=gcc-{older} CXX=g++-{older}   # before the build",
    )


def _other(facts: EnvironmentFacts, cuda: str) -> str:
    """Return the line that takes another toolkit of this machine, of PyTorch's own version if there is one."""
    fitting = [
        each for each in facts.toolkit.toolkits[1:] if _is_whole(each) and each.version and each.version[0] == major(cuda)
    ]
    best = next((each for each in fitting if each.version and dotted(each.version[:2]) == cuda), None)
    taken = best or next(iter(fitting), None)
    if taken is None:
        return f"# install the CUDA toolkit {cuda} as well, then export CUDA_HOME with its folder"
    home = shlex.quote(taken.home)
    return f'export CUDA_HOME={home} PATH={home}/bin:"$PATH"   # before the build'


def _is_whole(toolkit: Toolkit) -> bool:
    return toolkit.has_nvcc and toolkit.has_headers


def _finding(what: str, evidence: str, command: str) -> CheckFinding:
    return CheckFinding(severity="note", what=what, evidence=evidence, command=command)
