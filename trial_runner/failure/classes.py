"""Failure classes as data: the texts that tell each, what it teaches, how often it is tried again, what to do."""

from __future__ import annotations

from dataclasses import dataclass
import re


MEMORY, SIBLINGS, CANDIDATE, NOTHING = "memory", "siblings", "candidate", "nothing"
"""What a failure teaches: that all candidates needing as much memory fail; that all candidates sharing the known fault
or risk fail; that this candidate fails; nothing about candidates."""


@dataclass(frozen=True, kw_only=True)
class FailureClass:
    """One class of failures."""

    kind: str
    """Name."""

    pattern: str = ""
    """Regular expression over an error's type and text; empty when other signs tell it (exit codes, silence)."""

    secondary: bool = False
    """Whether such an error is usually the echo of a peer's death, so a primary one on another rank wins."""

    teaches: str = CANDIDATE
    """What it teaches."""

    retries: int = 0
    """How often the same candidate is tried again, charged like every trial."""

    stops_study: bool = False
    """Whether going on is pointless: every other candidate would meet the same."""

    why: str
    """Reason for what it teaches and how often it is retried."""

    advice: str
    """What the user can do."""


CLASSES = (
    FailureClass(
        kind="host_out_of_memory",
        pattern=r"(?<!OutOf)MemoryError|Cannot allocate memory|DefaultCPUAllocator|std::bad_alloc|oom-kill|OOMKilled|"
        r"node running low on memory",
        why="the host or its container limit is too small for this candidate's ranks",
        advice="raise the container's memory limit, lower data loader workers or the candidate's host memory",
    ),
    FailureClass(
        kind="out_of_memory",
        pattern=r"OutOfMemoryError|CUDA out of memory|HIP out of memory",
        teaches=MEMORY,
        why="the tensors do not fit; whatever needs as much or more fails too",
        advice="weaker micro-batch, stronger checkpointing or more sharding",
    ),
    FailureClass(
        kind="out_of_memory_fragmentation",
        why="memory reserved but unused would have held the request: a matter of the allocator, not of the candidate",
        advice="set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (and no max_split_size_mb beside it)",
    ),
    FailureClass(
        kind="out_of_memory_inconsistent",
        why="more was free than was asked for: a limit or another process, not the size of the candidate",
        advice="look for a memory fraction set in the program, a container limit, or another process on the device",
    ),
    FailureClass(
        kind="out_of_memory_outside",
        pattern=r"(?i)(?:nccl|rccl)[^\n]*(?:out of memory|calloc)|(?:calloc|cudaMalloc)[^\n]*\bfail[^\n]*nccl|"
        r"CUDA error: out of memory|(?:calloc|alloc)\S* (?:of )?\d+ bytes[^\n]*fail|Failed to CUDA calloc",
        why="a library asked the device past the allocator: communicators, workspaces, context",
        advice="leave more memory free (measure.memory_margin), or fewer process groups",
    ),
    FailureClass(
        kind="dirty_device",
        teaches=NOTHING,
        retries=1,
        stops_study=True,
        why="another process holds the device's memory; the candidate had no fair chance",
        advice="free the named node of foreign processes, or leave it out",
    ),
    FailureClass(
        kind="shared_memory",
        pattern=r"/dev/shm|shared memory.{0,40}(?:insufficient|No space|limit)|bus error.*shm|shm_open|Bus error",
        stops_study=True,
        why="the machine's shared memory is too small, whatever the candidate",
        advice="raise /dev/shm (docker --shm-size, an emptyDir of medium Memory on Kubernetes)",
    ),
    FailureClass(
        kind="disk_full",
        pattern=r"No space left on device|Disk quota exceeded|is over 9\d% full",
        teaches=NOTHING,
        stops_study=True,
        why="records can no longer be written",
        advice="free the disk of the study folder, then `tune resume`",
    ),
    FailureClass(
        kind="checkpoint_mismatch",
        pattern=r"CheckpointError|trying to save (?:more|fewer|a different number of) tensors during recomputation|"
        r"recomputed values for the following tensors have different metadata",
        teaches=SIBLINGS,
        why="activation checkpointing and compilation disagree in this framework version; deterministic",
        advice="checkpoint inside the compiled region, another checkpointing policy, or a newer PyTorch",
    ),
    FailureClass(
        kind="kernel_alignment",
        pattern=r"multiples? of 16 bytes|strides? .{0,40}(?:multiple|divisible).{0,10}16|"
        r"trailing dimension .{0,40}divisible by 16|_scaled_(?:grouped_)?mm.{0,80}(?:align|divisible)",
        teaches=SIBLINGS,
        why="a kernel wants aligned sizes that this layout does not give; deterministic",
        advice="leave the layer in bf16, or other expert- and tensor-parallel degrees",
    ),
    FailureClass(
        kind="compile_cache",
        pattern=r"cubin\.tmp|pickle data was truncated|(?:torchinductor|triton)[^\n]*FileNotFoundError|"
        r"FileNotFoundError[^\n]*(?:torchinductor|triton|inductor)",
        teaches=NOTHING,
        retries=1,
        why="several processes wrote or read one entry of the compile cache at once",
        advice="none needed when the retry runs; a cache folder of its own for every node avoids it",
    ),
    FailureClass(
        kind="illegal_access",
        pattern=r"illegal memory access|unspecified launch failure|device-side assert",
        retries=1,
        why="a kernel touched memory that is not its own: a kernel fault, or broken hardware when it moves around",
        advice="if different configurations meet it, the environment is broken: driver, library versions, device",
    ),
    FailureClass(
        kind="hardware_fault",
        pattern=r"NVRM: Xid|fell off the bus|uncorrectable ECC|NVLink error",
        teaches=NOTHING,
        retries=1,
        why="the device itself reported a fault",
        advice="take the node out and look at its kernel log",
    ),
    FailureClass(
        kind="compile_error",
        pattern=r"torch\._dynamo|torch\._inductor|BackendCompilerFailed|InductorError",
        teaches=SIBLINGS,
        why="compilation of this graph fails every time",
        advice="compile off for this layout; the rank's log names the operator",
    ),
    FailureClass(
        kind="nan_loss",
        pattern=r"Loss is not finite|loss is nan",
        why="the loss left the numbers with this configuration",
        advice="compare against the baseline's losses; a numeric change is the first suspect",
    ),
    FailureClass(
        kind="data_error",
        pattern=r"DataloaderExhausted|DatasetNotFound|tokenizer|dataset|load_dataset",
        teaches=NOTHING,
        stops_study=True,
        why="the data cannot be read, whatever the candidate",
        advice='mend the data loader or its path; recipe.data = "synthetic" measures without it',
    ),
    FailureClass(
        kind="collective_timeout",
        pattern=r"Timed out waiting|collective operation timeout|WorkNCCL.*[Tt]imeout|Watchdog caught",
        secondary=True,
        retries=1,
        why="a rank fell silent inside a collective: often the network's fault, sometimes the candidate's",
        advice="look at the silent rank's log and node",
    ),
    FailureClass(
        kind="peer_lost",
        pattern=r"Connection closed by peer|Connection reset by peer|Broken pipe|NCCL remote error|ncclRemoteError|"
        r"socket .{0,30}closed",
        secondary=True,
        retries=1,
        why="a peer went away and left no error of its own",
        advice="look at the other ranks' logs",
    ),
    FailureClass(
        kind="rendezvous",
        pattern=r"EADDRINUSE|address already in use|DistNetworkError|DistStoreError",
        teaches=NOTHING,
        retries=2,
        why="the ranks did not find each other; another port or another moment may do",
        advice="check that the nodes reach each other's free ports",
    ),
    FailureClass(
        kind="bad_launch",
        pattern=r"(?i)unrecognized (?:arguments|options)|no such option|unknown (?:flag|option|argument)\b|"
        r"error: (?:argument|the following arguments)|Invalid value for .?--",
        teaches=NOTHING,
        stops_study=True,
        why="the program does not know an option it was started with; every other trial would be started the same way",
        advice="see the rank's log for the option; this framework version or the job's config function brings it",
    ),
    FailureClass(
        kind="framework_invalid",
        pattern=r"ValueError|AssertionError|NotImplementedError|must be divisible|is invalid for input|"
        r"Expecting \d+ arg_mbs",
        teaches=SIBLINGS,
        why="the framework refuses this configuration; deterministic",
        advice="a rule is missing: the framework's own words are the reason shown",
    ),
    FailureClass(
        kind="framework_bug",
        teaches=SIBLINGS,
        why="a known fault of this framework version; deterministic",
        advice="see the fault's own advice, or another framework version",
    ),
    FailureClass(
        kind="environment_degraded",
        teaches=NOTHING,
        retries=1,
        stops_study=True,
        why="the trial ran over another transport than the study's other trials, so its time compares with nothing",
        advice="mend the node's network (RDMA device, container privileges), or start a study on this transport",
    ),
    FailureClass(
        kind="hang_first_step",
        why="no first step within the deadline; such shapes hang again",
        advice="the rank's log shows the last collective; odd sequence lengths under sequence parallelism hang",
    ),
    FailureClass(
        kind="hang",
        retries=1,
        why="steps came and then stopped; may be the node's fault",
        advice="look at the silent rank's log and node",
    ),
    FailureClass(
        kind="timeout",
        retries=1,
        why="the allowance ran out; a shared machine may have been slow",
        advice="raise measure.timeout_s or measure.startup_s",
    ),
    FailureClass(
        kind="rank_killed",
        retries=1,
        why="something outside ended a rank",
        advice="look for the kernel's out-of-memory killer and for operators",
    ),
    FailureClass(
        kind="preempted",
        pattern=r"(?i)preempt(?:ed|ion)|SpotInstance|node is being drained|DeadlineExceeded: drain",
        teaches=NOTHING,
        retries=2,
        why="the scheduler took the node back",
        advice="none needed; `tune resume` goes on when the devices are back",
    ),
    FailureClass(
        kind="node_lost",
        teaches=NOTHING,
        retries=1,
        why="a node of the gang stopped answering",
        advice="check the node; it is used again when Ray sees it alive",
    ),
    FailureClass(
        kind="agent_lost",
        teaches=NOTHING,
        retries=1,
        why="the node's agent died, not the candidate",
        advice="look at the node's Ray logs",
    ),
    FailureClass(
        kind="start_failed",
        teaches=NOTHING,
        retries=1,
        why="the gang could not be started",
        advice="look at the node's Ray logs",
    ),
    FailureClass(
        kind="not_runnable",
        why="the candidate cannot be written as a config function",
        advice="see the text; the knob it names cannot be set for this model",
    ),
    FailureClass(kind="exception", why="an error that no class names", advice="see the rank's log"),
    FailureClass(kind="unknown", why="no rank said why", advice="see the ranks' logs"),
    FailureClass(
        kind="stopped",
        teaches=NOTHING,
        why="stopped from outside",
        advice="`tune resume` goes on",
    ),
    FailureClass(
        kind="interrupted",
        teaches=NOTHING,
        why="the study was interrupted while it ran",
        advice="`tune resume` goes on",
    ),
    FailureClass(
        kind="no_devices",
        teaches=NOTHING,
        why="the devices were not had in time; nothing ran",
        advice="free devices, then `tune resume`",
    ),
    FailureClass(
        kind="driver_lost",
        teaches=NOTHING,
        why="the tuner died while it ran",
        advice="`tune resume` goes on",
    ),
)
"""The classes, patterns asked in this order; the first whose pattern is found names the failure."""

BY_KIND = {item.kind: item for item in CLASSES}
"""Classes by name."""


def failure_class(kind: str) -> FailureClass:
    """The class called ``kind``; ``unknown`` for a name of another version."""
    return BY_KIND.get(kind, BY_KIND["unknown"])


def classify(text: str) -> FailureClass | None:
    """The first class whose pattern occurs in ``text``."""
    return next((item for item in CLASSES if item.pattern and re.search(item.pattern, text)), None)
