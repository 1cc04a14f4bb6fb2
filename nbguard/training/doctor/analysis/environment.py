"""Facts of the machine, the process and the libraries, read once, without importing or initialising anything."""

from __future__ import annotations

from dataclasses import dataclass, field

from nbguard.memory.core.oom_facts import HostFacts

Capability = tuple[int, int]
"""The compute capability of an NVIDIA GPU: (9, 0) for an H100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFact:
    """A GPU as the driver names it."""

    name: str
    capability: Capability | None = None  # `nvmlDeviceGetCudaComputeCapability`; None if the driver does not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts:
    """The NVIDIA driver, as NVML and /proc tell."""

    version: str = ""  # such as 580.65.06; empty without one, or it does not answer
    cuda: tuple[int, int] | None = None  # newest CUDA that it runs (`nvmlSystemGetCudaDriverVersion_v2`)
    gpus: tuple[GpuFact, ...] = ()
    reason: str = ""  # why it is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """PyTorch as it is imported in this process."""

    version: str  # torch.__version__
    cuda: str = ""  # torch.version.cuda: it was built for this CUDA; empty for none
    hip: str = ""  # torch.version.hip, likewise of ROCm
    architectures: tuple[str, ...] = ()  # `torch._C._cuda_getArchFlags`: sm_90, compute_90, …
    cudnn_built: tuple[int, ...] | None = None  # version that it was compiled against
    cudnn_loaded: tuple[int, ...] | None = None  # version that is loaded
    nccl: tuple[int, ...] | None = None  # version of NCCL that it was built with
    threads: int = 1  # torch.get_num_threads()
    matmul_precision: str = "highest"  # torch.get_float32_matmul_precision()
    has_context: bool = False  # torch.cuda.is_initialized()
    is_bad_fork: bool = False  # a child of a process that had initialised CUDA


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Limits of this process; None stands for no limit, or one that cannot be read."""

    open_files: int | None = None  # RLIMIT_NOFILE, the soft one
    open_files_most: int | None = None  # the hard one, which the process may raise it to
    locked_memory: int | None = None  # bytes, RLIMIT_MEMLOCK
    processes: int | None = None  # the smaller of RLIMIT_NPROC and the container's pids.max


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolkit:
    """A folder that has, or is said to have, a CUDA toolkit."""

    home: str
    has_nvcc: bool = False  # bin/nvcc
    has_headers: bool = False  # include/cuda_runtime.h, or that of a target
    version: tuple[int, ...] | None = None  # of nvcc; None if it does not tell
    newest_gcc: int | None = None  # major version beyond which its headers refuse GCC


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerFacts:
    """The C++ compiler that PyTorch would take: that of CXX, else c++."""

    path: str
    is_gcc: bool = True
    version: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolkitFacts:
    """CUDA toolkits of the machine, and the compiler; all empty where there is no toolkit."""

    toolkits: tuple[Toolkit, ...] = ()  # the first is that which PyTorch would take
    is_given: bool = False  # by CUDA_HOME or CUDA_PATH
    compiler: CompilerFacts | None = None
    numbered: tuple[int, ...] = ()  # major versions of GCC on PATH by their own names, such as g++-12; from the newest down


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFacts:
    """All that tier 0 looks at."""

    python: str  # version
    system: str  # such as Linux-6.1-x86_64
    torch: TorchFacts | None  # None if PyTorch is not imported
    driver: DriverFacts
    host: HostFacts
    limits: ProcessLimits
    cores: int  # CPU cores that this process may use, by its affinity and its container's quota
    variables: tuple[tuple[str, str], ...] = ()  # of the environment, those that CUDA, PyTorch, NCCL and OpenMP read
    modules: frozenset[str] = field(default_factory=frozenset)  # of `WATCHED`, those that are imported
    libraries: tuple[tuple[str, str], ...] = ()  # (libcudnn, path) of CUDA's libraries that are mapped into the process
    openmp: tuple[str, ...] = ()  # paths of Intel's and LLVM's OpenMP runtimes that are
    toolkit: ToolkitFacts = field(default_factory=ToolkitFacts)
    has_infiniband: bool = False  # /sys/class/infiniband has a device
    has_driver_open: bool = False  # /dev/nvidia-uvm is open: CUDA's driver has been initialised in this process
    has_accelerator_state: bool = False  # accelerate's shared state exists: an Accelerator was made
    cuda_line: str = ""  # the line of the user's that initialised CUDA, where nbguard saw it

    @property
    def variable(self) -> dict[str, str]:
        """Return the variables by name."""
        return dict(self.variables)


WATCHED = ("apex", "apex.amp", "horovod", "accelerate")
"""Modules whose presence matters."""

PREFIXES = (
    "CUDA_",
    "CUDNN_",
    "CUBLAS_",
    "NCCL_",
    "TORCH_",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "KMP_",
    "GLOO_",
    "LD_LIBRARY_PATH",
    "HIP_",
)
"""Beginnings of the names of variables that are read. No other variable is."""
