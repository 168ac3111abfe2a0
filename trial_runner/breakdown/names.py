"""What a name in a trace means: kernels by kind of work, collectives by kind, launches, data loading.

The tables are data: each row is a kind and the pattern of the names that mean it. Names of kernels change with every
release of the vendors' libraries; a name that no row knows is counted and shown, never taken for something else.
"""

from __future__ import annotations

from functools import lru_cache
import re


COMMUNICATION = "communication"
GEMM = "gemm"
ATTENTION = "attention"
COPY = "copy"

_KERNELS = [
    (
        COMMUNICATION,
        r"nccl(dev)?kernel|^nccl|rccl|msccl|oneccl|nvshmem|deep_ep::|mori::|cross_device_reduce|multimem_(all|one)|"
        r"(one|two)_shot_all_?reduce|symm_mem.*(reduce|gather|barrier)|allreduce_fusion|lamport",
    ),
    (
        "convolution",
        r"fprop|dgrad|wgrad|conv(?!ert)|winograd|implicit_?gemm|scudnn|hcudnn|igemm_(fwd|bwd|wrw)|miopensp3asm|"
        r"cudnn.*(infer|training)_",
    ),
    (ATTENTION, r"flash|fmha|attn|attention|sdpa|\bmha_|paged_kv|mla_(decode|prefill)"),
    (
        GEMM,
        r"gemm(?!_gpu)|nvjet|cijk_|cutlass|xmma|wgmma|s16816|tensorop|cublas(?!lt::splitk)|hipblas|rocblas|matmul|"
        r"triton_(tem|mm)_fused_.*mm|_mm_kernel|\bmm_kernel|ck::.*(contraction|xdlops)|gemv|gemmk1|dot_kernel|splitk",
    ),
    ("optimizer", r"multi_tensor_apply|adamw?|lamb_|adagrad|fusedoptimizer|lpnorm|foreach"),
    ("normalisation", r"norm|\bbn_|::bn_|bnfwd|bnbwd"),
    ("softmax", r"softmax|logsumexp"),
    ("loss", r"loss|cross_entropy|nll"),
    ("embedding", r"embed|fbgemm_gpu|indexselect|index_select|pooled"),
    ("quantisation", r"quant|fp8|amax|mxfp|nvfp4"),
    ("experts", r"moe|expert|topk|router|permute_tokens|grouped"),
    ("rotary", r"rotary|rope"),
    ("activation", r"silu|gelu|relu|swiglu|act_and_mul|sigmoid|dropout"),
    ("triton", r"triton_|^_?[a-z0-9_]+_kernel(_[0-9a-z]+)*$"),
    ("sort", r"\bcub::|rocprim|hipcub|thrust|radix|sort|scan|histogram|cumsum|cumprod|unique"),
    ("random", r"distribution_|philox|curand|rocrand|random|bernoulli"),
    (COPY, r"copy|memcpy|memset|fill|catarray|transpose|permute|nchwto|nhwcto|tensor_?fold|split_with_sizes|chunk_cat"),
    ("reduction", r"reduc|lastblock|sum_kernel|max_kernel|epilogue::impl"),
    ("pooling", r"pool|upsample|interpolate"),
    ("fourier", r"fft|gcgemm"),
    (
        "elementwise",
        r"elementwise|vectorized|at::native|at_cuda_detail|cudafunctor|triu|tril|arange|gather|scatter|index",
    ),
    ("library", r"cudnn|miopen|cask|rocfft|hiptensor|cutensor|cusparse|magma"),
]
"""Kernel kinds in the order of asking, with patterns of lower-case names."""

_KERNEL_PATTERNS = [(kind, re.compile(pattern)) for kind, pattern in _KERNELS]


@lru_cache(maxsize=65536)
def kernel_kind(name: str) -> str | None:
    """Kind of a device kernel by its name; None when no row of the table knows it."""
    lowered = name.lower()
    for kind, pattern in _KERNEL_PATTERNS:
        if pattern.search(lowered):
            return kind
    return None


P2P = "p2p"
UNKNOWN_COLLECTIVE = "unknown"

_COLLECTIVES = [
    ("all_to_all", ("alltoall", "a2a")),
    ("all_reduce", ("allreduce",)),
    ("reduce_scatter", ("reducescatter",)),
    ("all_gather", ("allgather",)),
    (P2P, ("sendrecv", "send", "recv", "isend", "p2p", "coalesced")),
    ("broadcast", ("broadcast",)),
    ("barrier", ("barrier",)),
    ("gather", ("gather",)),
    ("scatter", ("scatter",)),
    ("reduce", ("reduce",)),
]


@lru_cache(maxsize=65536)
def collective_kind(name: str) -> str:
    """Kind of communication from any spelling (kernel, annotation, operator, `Collective name`); else ``unknown``."""
    text = name.lower()
    if "nccl" in text and "(" in text:
        text = text[: text.index("(")]
    for noise in ("_", " ", "-", "nccldevkernel", "ncclkernel", "base"):
        text = text.replace(noise, "")
    for kind, spellings in _COLLECTIVES:
        if any(spelling in text for spelling in spellings):
            return kind
    return UNKNOWN_COLLECTIVE


_COMM_OPERATOR = re.compile(
    r"^(gloo:|nccl:|mpi:|ucc:|xccl:|c10d::|_c10d_functional|c10d_functional|record_param_comms)"
)
_WAIT_OPERATOR = re.compile(r"wait_tensor|::wait\b|:wait\b|^work_wait")
_LAUNCH = re.compile(
    r"^(cuda|cu|hip|ze|musa|mu)\w*(launch)\w*|^urEnqueueKernelLaunch|^zeCommandListAppendLaunchKernel|"
    r"^(ze|ur|sycl)\w*kernel\w*|^hipExt\w*Launch\w*",
    re.IGNORECASE,
)
_NOT_LAUNCH = re.compile(r"hostfunc", re.IGNORECASE)
_LOADER = re.compile(
    r"dataloader.*(__next__|_next_data|iter)|data_?loader|__next__|dataloading|data_loading|next_batch|get_batch|"
    r"fetch_batch|load_batch|batch_generator",
    re.IGNORECASE,
)
_LOADER_FRAME = re.compile(r"\): (__next__|_next_data|next_batch|get_batch|fetch_batch|load_batch|batch_generator)$")
_CHECKPOINT = re.compile(r"recompute|checkpoint\.py.*(unpack_hook|recompute_fn)|##\s*recomp", re.IGNORECASE)
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function")
_OPTIMIZER = re.compile(r"^Optimizer\.(step|zero_grad)#")


@lru_cache(maxsize=65536)
def is_comm_operator(name: str) -> bool:
    """Whether a CPU-side event is communication: gloo or NCCL annotations, c10d operators."""
    return bool(_COMM_OPERATOR.match(name))


@lru_cache(maxsize=65536)
def is_wait(name: str) -> bool:
    """Whether a CPU-side event only waits for communication."""
    return bool(_WAIT_OPERATOR.search(name))


@lru_cache(maxsize=65536)
def is_launch(name: str) -> bool:
    """Whether a runtime or driver call puts kernels on a device: CUDA, HIP, Level Zero; graphs included."""
    return bool(_LAUNCH.match(name)) and not _NOT_LAUNCH.search(name)


@lru_cache(maxsize=65536)
def is_graph_launch(name: str) -> bool:
    """Whether a runtime call replays a whole graph of kernels."""
    return "graphlaunch" in name.lower()


@lru_cache(maxsize=65536)
def is_loader(name: str) -> bool:
    """Whether a CPU-side event is the training loop asking for its next batch."""
    return bool(_LOADER.search(name))


@lru_cache(maxsize=65536)
def is_checkpoint(name: str) -> bool:
    """Whether a CPU-side event marks a forward that runs again inside backward."""
    return bool(_CHECKPOINT.search(name))


@lru_cache(maxsize=65536)
def is_backward(name: str) -> bool:
    """Whether a CPU-side event is one node of the backward pass."""
    return bool(_BACKWARD.match(name))


@lru_cache(maxsize=65536)
def is_optimizer(name: str) -> bool:
    """Whether an annotation is the optimizer's step."""
    return bool(_OPTIMIZER.match(name))


_METADATA_OPERATORS = frozenset(
    "aten::" + name
    for name in (
        "empty empty_like empty_strided as_strided view _unsafe_view reshape t transpose permute expand expand_as "
        "unsqueeze squeeze detach detach_ alias slice select narrow split chunk unbind resolve_conj resolve_neg "
        "result_type view_as unflatten flatten _reshape_alias is_nonzero set_ resize_ lift_fresh item "
        "_local_scalar_dense to new_empty new_empty_strided size stride numel view_as_complex view_as_real"
    ).split()
)


@lru_cache(maxsize=65536)
def is_cpu_work(name: str) -> bool:
    """Whether a CPU operator without children computes something, as a kernel does on a device.

    Operators that only describe memory (views, allocations), wrappers of the backward engine and communication do not.
    """
    if name in _METADATA_OPERATORS or is_comm_operator(name) or is_wait(name) or is_loader(name):
        return False
    return ("::" in name and not is_backward(name)) or name.startswith(("triton", "cpp_fused", "graph_"))


@lru_cache(maxsize=65536)
def is_compiled_graph(name: str) -> bool:
    """Whether an annotation is the run of a graph that the compiler made."""
    return name.startswith("## Call CompiledFxGraph")


@lru_cache(maxsize=65536)
def is_loader_frame(name: str) -> bool:
    """Whether a Python frame such as ``dataloader.py(630): __next__`` fetches a batch; by its function alone."""
    return bool(_LOADER_FRAME.search(name))


@lru_cache(maxsize=65536)
def is_kept_python(name: str) -> bool:
    """Whether a Python stack frame says something that the breakdown uses."""
    return is_loader_frame(name) or is_checkpoint(name)
