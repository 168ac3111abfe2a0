"""A Megatron command line as a baseline."""

from __future__ import annotations

from collections.abc import Sequence
import re
from typing import Any

from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.model import ModelShape
from search_space.pool import canonical
from tuner.export.imported import Imported
from tuner.export.megatron import block_parameters_of
from tuner.export.read_shell import script


SWITCHES = {
    "sequence-parallel",
    "group-query-attention",
    "swiglu",
    "untie-embeddings-and-output-weights",
    "disable-bias-linear",
    "add-qkv-bias",
    "qk-layernorm",
    "moe-grouped-gemm",
    "bf16",
    "fp16",
    "use-distributed-optimizer",
    "use-megatron-fsdp",
    "use-custom-fsdp",
    "overlap-grad-reduce",
    "overlap-param-gather",
    "tp-comm-overlap",
    "recompute-activations",
}
"""Flags that take no value."""

READ = {
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
    "num-virtual-stages-per-pipeline-rank",
    "num-layers-per-virtual-pipeline-stage",
    "micro-batch-size",
    "global-batch-size",
    "seq-length",
    "encoder-seq-length",
    "seed",
    "fp8-format",
    "recompute-granularity",
    "recompute-method",
    "recompute-num-layers",
    "recompute-modules",
    "data-parallel-sharding-strategy",
    "num-distributed-optimizer-instances",
    "ddp-bucket-size",
    "num-layers",
    "hidden-size",
    "ffn-hidden-size",
    "num-attention-heads",
    "num-query-groups",
    "kv-channels",
    "vocab-size",
    "padded-vocab-size",
    "make-vocab-size-divisible-by",
    "max-position-embeddings",
    "normalization",
    "position-embedding-type",
    "num-experts",
    "moe-router-topk",
    "moe-ffn-hidden-size",
    "moe-shared-expert-intermediate-size",
    "moe-layer-freq",
}
"""Flags with a value that mean something here."""

LAUNCH = {"nproc-per-node", "nproc_per_node", "nnodes", "nnode"}
"""Flags of the launcher that say how many devices there are."""

LAUNCHER = {
    "node-rank",
    "node_rank",
    "master-addr",
    "master_addr",
    "master-port",
    "master_port",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
}
"""Other flags of the launcher."""

ZERO = {"no_shard": 1, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO stage by ``--data-parallel-sharding-strategy``."""

VARIABLES = re.compile(r"^((?:CUDA|NCCL|TORCH|PYTORCH|NVTE|OMP)_[A-Z0-9_]+)(?:=(\S+))?$")
"""Environment variables that belong to the configuration; with a value as they stand before a command."""


def read(text: str, devices: int | None = None, framework: str = "megatron") -> Imported:
    """Read a script or a file of arguments.

    Args:
        text: the file.
        devices: devices of the job, where the file does not say it.
        framework: whose knobs the candidate is to be in; with ``torchtitan`` data parallelism becomes its nearest kind.

    Raises:
        UserError: no Megatron flag is in it, a value is none, or the degrees do not divide the devices.
    """
    return _Reader(text).imported(devices, framework)


class _Reader:
    """The flags of one file, and what became of each."""

    def __init__(self, text: str) -> None:
        found, values = script(text)
        self.flags, self.launch, self.ignored, self.env = _parse(found)
        self.env |= {name: value for name, value in values.items() if VARIABLES.match(name) and "$" not in value}
        self.assumed: list[str] = []
        self.missing: list[str] = []
        if not {"tensor-model-parallel-size", "micro-batch-size", "num-layers", "global-batch-size"} & set(self.flags):
            raise UserError(
                "import: no Megatron flag found (looked for --tensor-model-parallel-size, --micro-batch-size, "
                "--num-layers)"
            )

    def number(self, name: str, default: int | None = None) -> int | None:
        """A flag's whole number."""
        if name not in self.flags:
            return default
        text = str(self.flags[name]).replace("_", "")
        if not text.isdigit():
            raise UserError(f"import: --{name} {self.flags[name]!r} is no whole number; set the variable in the file")
        return int(text)

    def positive(self, name: str) -> int:
        """A degree: at least 1."""
        found = self.number(name, 1)
        if not found:
            raise UserError(f"import: --{name} 0, needs at least 1")
        return found

    def on(self, name: str) -> bool:
        """Whether a switch is set."""
        return name in self.flags

    def imported(self, devices: int | None, framework: str) -> Imported:
        """The file in our words."""
        model = self.model()
        nodes, per_node = self.cluster(devices)
        knobs = self.knobs(model)
        others = knobs["tensor_parallel"] * knobs["pipeline_parallel"] * knobs["context_parallel"]
        batch = self.number("global-batch-size")
        if nodes is None or per_node is None:
            self.missing.append("[cluster] gpus_per_node and nodes; data-parallel ranks follow from them (--gpus N)")
            dp = 1
        else:
            dp, rest = divmod(nodes * per_node, others)
            if rest or not dp:
                raise UserError(
                    f"import: tensor × pipeline × context parallel = {others} does not divide {nodes * per_node} "
                    "devices"
                )
        if batch is None:
            batch = knobs["micro_batch"] * dp
            self.assumed.append(f"global batch {batch}: no --global-batch-size, so one micro-batch a rank")
        knobs |= self.sharding(dp, framework)
        seq_len = self.number("seq-length", self.number("encoder-seq-length"))
        for what, value in (("[recipe] seq_len", seq_len), ("[model] layers, hidden, …", model or None)):
            if value is None:
                self.missing.append(what)
        self.missing.append('[cluster] gpu, such as "H100-SXM"')
        if self.on("fp16"):
            self.assumed.append("fp16 is read as bf16: the same arithmetic rate and bytes")
        return Imported(
            kind="megatron",
            framework=framework,
            candidate=canonical(Candidate.from_json(knobs)),
            devices_per_node=per_node,
            nodes=nodes,
            seq_len=seq_len,
            global_batch_seqs=batch,
            precision="bf16" if self.on("bf16") or self.on("fp16") else "fp32",
            seed=self.number("seed"),
            model=model,
            env=self.env,
            ignored=tuple(self.ignored),
            assumed=tuple(self.assumed),
            missing=tuple(self.missing),
        )

    def cluster(self, devices: int | None) -> tuple[int | None, int | None]:
        """(nodes, devices per node)."""
        stated = [self.launch.get(name) for name in ("nproc-per-node", "nnodes")]
        per_node = int(stated[0]) if stated[0] and stated[0].isdigit() else None
        # An elastic launch states min:max.
        last = (stated[1] or "").split(":")[-1]
        nodes = int(last) if last.isdigit() else None
        if devices is not None:
            each = min(per_node or 8, devices)
            if devices % each:
                raise UserError(f"import: --gpus {devices} is no whole number of nodes of {each}")
            return devices // each, each
        if per_node and nodes is None and stated[1] is None:
            nodes = 1
        return (nodes, per_node) if nodes and per_node else (None, None)

    def model(self) -> dict[str, Any]:
        """``[model]`` as numbers; empty when the file lacks layers, width or heads."""
        layers, hidden, heads = (self.number(name) for name in ("num-layers", "hidden-size", "num-attention-heads"))
        if not layers or not hidden or not heads:
            return {}
        gated = self.on("swiglu")
        ffn = self.number("ffn-hidden-size") or (int((4 * hidden * 2 / 3) / 64) * 64 if gated else 4 * hidden)
        vocab = self.number("vocab-size", self.number("padded-vocab-size"))
        if not vocab:
            vocab = 128256
            self.assumed.append("vocabulary 128256: no --vocab-size (the tokenizer knows it)")
        grouped = self.on("group-query-attention") or "num-query-groups" in self.flags
        model: dict[str, Any] = {
            "name": "imported",
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "kv_heads": self.number("num-query-groups", 1) if grouped else heads,
            "head_dim": self.number("kv-channels", hidden // heads),
            "ffn": ffn,
            "vocab": vocab,
            "gated_mlp": gated,
            "tied_embeddings": not self.on("untie-embeddings-and-output-weights"),
        }
        if self.on("qk-layernorm"):
            model["qk_norm"] = True
        if "num-experts" in self.flags:
            each = self.number("moe-ffn-hidden-size") or ffn
            shared = self.number("moe-shared-expert-intermediate-size", 0) or 0
            dense = re.match(r"\(?\[0\]\*(\d+)", str(self.flags.get("moe-layer-freq", "")))
            model |= {
                "experts": self.number("num-experts"),
                "experts_active": self.number("moe-router-topk", 2),
                "expert_ffn": each,
                "shared_experts": shared // each,
                "dense_layers": int(dense[1]) if dense else 0,
            }
        return model

    def knobs(self, model: dict[str, Any]) -> dict[str, Any]:
        """All knobs but the data-parallel ones."""
        tp, pp = self.positive("tensor-model-parallel-size"), self.positive("pipeline-model-parallel-size")
        virtual = self.number("num-virtual-stages-per-pipeline-rank", 1) or 1
        each = self.number("num-layers-per-virtual-pipeline-stage")
        if each and model:
            virtual = max(1, model["layers"] // pp // each)
        knobs: dict[str, Any] = {
            "tensor_parallel": tp,
            "pipeline_parallel": pp,
            "virtual_stages": virtual if pp > 1 else 1,
            "schedule": "Interleaved1F1B" if virtual > 1 and pp > 1 else "1F1B",
            "context_parallel": self.positive("context-parallel-size"),
            "expert_parallel": self.positive("expert-model-parallel-size"),
            "micro_batch": self.positive("micro-batch-size"),
            "float8": "fp8-format" in self.flags,
            "async_tp": self.on("tp-comm-overlap"),
            "loss_chunks": 1,
        }
        if tp > 1 and not self.on("sequence-parallel"):
            self.assumed.append(
                "sequence parallelism on: here it comes with tensor parallelism; the file leaves it off"
            )
        return knobs | self.checkpointing() | self.bucket(model, tp)

    def checkpointing(self) -> dict[str, Any]:
        """Recompute flags as a kind of checkpointing."""
        granularity = str(
            self.flags.get("recompute-granularity", "selective" if self.on("recompute-activations") else "")
        )
        if granularity == "full":
            count = self.number("recompute-num-layers", 1) or 1
            if self.flags.get("recompute-method") == "block":
                return {"activation_checkpoint": "first_n", "first_n": count}
            if count > 1:
                self.assumed.append(f"groups of {count} recomputed layers are read as every layer by itself")
            return {"activation_checkpoint": "full"}
        if granularity == "selective":
            modules = str(self.flags.get("recompute-modules", "core_attn"))
            if modules != "core_attn":
                self.assumed.append(f"recomputed modules {modules} are read as selective")
            return {"activation_checkpoint": "selective"}
        return {"activation_checkpoint": "none"}

    def bucket(self, model: dict[str, Any], tp: int) -> dict[str, Any]:
        """Gradient bucket as blocks."""
        elements = self.number("ddp-bucket-size")
        if not elements:
            return {}
        if not model:
            self.ignored.append("--ddp-bucket-size (the model's shape is not in the file)")
            return {}
        shape = ModelShape.from_json(model)
        return {"fsdp_bucket": max(1, round(elements * tp / block_parameters_of(shape)))}

    def sharding(self, dp: int, framework: str) -> dict[str, Any]:
        """Data-parallel knobs."""
        sharded = self.on("use-megatron-fsdp") or self.on("use-custom-fsdp")
        strategy = str(self.flags.get("data-parallel-sharding-strategy", "no_shard"))
        if sharded and strategy not in ZERO:
            raise UserError(f"import: --data-parallel-sharding-strategy {strategy!r}; known are {', '.join(ZERO)}")
        stage = ZERO[strategy] if sharded else 1 if self.on("use-distributed-optimizer") else 0
        copies = self.positive("num-distributed-optimizer-instances")
        if dp % copies:
            raise UserError(f"import: {copies} optimizer instances do not divide {dp} data-parallel ranks")
        if framework != "torchtitan":
            if copies > 1:
                self.assumed.append(f"{copies} optimizer instances are read as one")
            return {"data_parallel_replicate": dp, "data_parallel_shard": 1, "zero_stage": stage}
        if stage == 0:
            return {"data_parallel_replicate": dp}
        if stage == 1:
            self.assumed.append("the distributed optimizer (ZeRO-1) is nearest to sharding without resharding (ZeRO-2)")
        return {
            "data_parallel_replicate": copies,
            "data_parallel_shard": dp // copies,
            "reshard_after_forward": "always" if stage == 3 else "never",
        }


def _parse(found: Sequence[str]) -> tuple[dict[str, str | None], dict[str, str], list[str], dict[str, str]]:
    """(Megatron flags, launcher flags, what is ignored, environment variables before the command)."""
    flags: dict[str, str | None] = {}
    launch: dict[str, str] = {}
    ignored: list[str] = []
    env: dict[str, str] = {}
    for at, word in enumerate(found):
        variable = VARIABLES.match(word)
        if variable and variable[2]:
            env[variable[1]] = variable[2]
            continue
        if not re.match(r"--[A-Za-z]", word):
            continue
        name, equals, value = word[2:].partition("=")
        following = found[at + 1] if at + 1 < len(found) else None
        # A value may begin with one dash (a negative number), never with two.
        own: str | None = value if equals else following if following and not following.startswith("--") else None
        plain = name.replace("_", "-")
        if plain in LAUNCH or name in LAUNCH:
            if own:
                launch[{"nnode": "nnodes"}.get(plain, plain)] = own
        elif name in LAUNCHER:
            continue
        elif plain in SWITCHES:
            flags[plain] = None
        elif plain in READ:
            if own is None:
                raise UserError(f"import: --{plain} has no value")
            flags[plain] = own
        else:
            ignored.append(f"--{name}" + (f" {own}" if own and not re.match(r"[./]|.*\.py$", own) else ""))
    return flags, launch, list(dict.fromkeys(ignored)), env
