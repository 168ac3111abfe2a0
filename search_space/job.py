"""The job description: everything a study is asked for, as typed data with units and defaults."""

from __future__ import annotations

import re
from typing import Any
from typing import Literal

from pydantic import BaseModel
from pydantic import ConfigDict
from pydantic import Field
from pydantic import field_serializer
from pydantic import field_validator
from pydantic import model_validator

from search_space.knobs import BY_NAME
from search_space.knobs import knob_value
from search_space.redact import is_secret_name
from search_space.redact import without_password


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Section(BaseModel):
    """Base of all job sections: unknown keys are refused, values do not change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=False)


class ModelSection(Section):
    """What is trained. Give one of: torchtitan, huggingface, or a shape as numbers."""

    torchtitan: str | None = None
    """torchtitan module and config function, `module:function`; your own module included"""

    path: str | None = None
    """folder that holds your own module (put first on the import path of the training processes only)"""

    huggingface: str | None = None
    """path of a Hugging Face config.json"""

    name: str | None = None
    """name for reports when the model is given as numbers"""

    layers: int | None = Field(default=None, ge=1)
    """transformer blocks (count)"""

    hidden: int | None = Field(default=None, ge=1)
    """width of the residual stream (elements)"""

    heads: int | None = Field(default=None, ge=1)
    """query heads (count)"""

    kv_heads: int | None = Field(default=None, ge=1)
    """key/value heads (count); absent: as many as heads"""

    head_dim: int | None = Field(default=None, ge=1)
    """elements per head; absent: hidden / heads"""

    ffn: int | None = Field(default=None, ge=1)
    """width of the feed-forward layer (elements)"""

    vocab: int | None = Field(default=None, ge=1)
    """vocabulary (tokens)"""

    gated_mlp: bool = True
    """three feed-forward matrices (SwiGLU) instead of two"""

    tied_embeddings: bool = False
    """input embedding and output head share one matrix"""

    qk_norm: bool = False
    """normalised queries and keys (Qwen3)"""

    experts: int = Field(default=0, ge=0)
    """routed experts per layer (count); 0: dense"""

    experts_active: int = Field(default=0, ge=0)
    """routed experts each token uses (count)"""

    expert_ffn: int = Field(default=0, ge=0)
    """width of one expert (elements)"""

    shared_experts: int = Field(default=0, ge=0)
    """experts every token uses (count)"""

    dense_layers: int = Field(default=0, ge=0)
    """leading dense layers of a mixture-of-experts model (count)"""

    @field_validator("name")
    @classmethod
    def _printable(cls, name: str | None) -> str | None:
        if name is not None and not name.isprintable():
            raise ValueError("a name stands in files and on screens: printable characters only")
        return name

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        numbers = self.layers is not None
        given = [self.torchtitan is not None, self.huggingface is not None, numbers]
        if sum(given) != 1 and not (self.torchtitan is not None and numbers):
            raise ValueError(
                "give exactly one of torchtitan, huggingface, or a shape (layers, hidden, heads, ffn, vocab)"
            )
        if numbers:
            missing = [key for key in ("hidden", "heads", "ffn", "vocab") if getattr(self, key) is None]
            if missing:
                raise ValueError(f"a shape needs {', '.join(missing)} too")
        if self.torchtitan is not None and not re.fullmatch(r"[\w./-]+:[A-Za-z_]\w*", self.torchtitan):
            raise ValueError(f"torchtitan needs module:function such as llama3:llama3_8b, found {self.torchtitan!r}")
        return self


class ClusterSection(Section):
    """Where it runs. Absent keys are detected on this machine."""

    gpu: str | None = None
    """kind of device, a name of the hardware table, or cpu; absent: detected"""

    gpus_per_node: int | None = Field(default=None, ge=1, le=1024)
    """devices on one node (count); on a machine without a GPU a device is a CPU slot"""

    nodes: int = Field(default=1, ge=1, le=100_000)
    """nodes (count)"""

    wait_s: float = Field(default=120, ge=0)
    """longest wait for a running Ray cluster's nodes, and for a trial's devices (seconds); waiting costs no budget"""

    hbm_gib: float | None = Field(default=None, gt=0)
    """usable memory of one device (GiB); overrides the table"""

    nvlink_gb_s: float | None = Field(default=None, gt=0)
    """bandwidth inside the node, one direction, per device (GB/s)"""

    nic_gb_s: float | None = Field(default=None, gt=0)
    """network bandwidth between nodes, one direction, per device (GB/s)"""

    peak_tflops: float | None = Field(default=None, gt=0)
    """dense peak of one device at the recipe's precision (TFLOP/s)"""


class RecipeSection(Section):
    """Fixed by the training recipe, never tuned."""

    seq_len: int | None = Field(default=None, ge=2)
    """tokens in one sequence; absent: as the torchtitan function says"""

    global_batch_tokens: int | None = Field(default=None, ge=1)
    """tokens in one optimizer step over all devices; give this or global_batch_seqs"""

    global_batch_seqs: int | None = Field(default=None, ge=1)
    """sequences in one optimizer step over all devices"""

    precision: Literal["bf16", "fp32"] = "bf16"
    """compute precision of matrix products"""

    seed: int = Field(default=42, ge=0)
    """seed of initial weights and data order"""

    data: Literal["config", "synthetic"] = "config"
    """config: the data loader of the torchtitan function; synthetic: a deterministic token source, no download"""

    @model_validator(mode="after")
    def _one_batch(self) -> RecipeSection:
        if self.global_batch_tokens is not None and self.global_batch_seqs is not None:
            raise ValueError("give global_batch_tokens or global_batch_seqs, not both")
        tokens, seq_len = self.global_batch_tokens, self.seq_len
        if tokens is not None and seq_len is not None and tokens % seq_len:
            raise ValueError(f"global_batch_tokens {tokens} is no multiple of seq_len {seq_len}")
        return self


class SearchSection(Section):
    """Which knobs may take which values; a knob that is absent may take every legal value."""

    framework: Literal["torchtitan", "megatron", "deepspeed"] = "torchtitan"
    """whose accounts the ledger follows when planning"""

    allow_numeric_changes: bool = False
    """let float8 and the like into the pool (they need loss parity)"""

    sampler: Literal["ours", "ledger", "tpe", "gp", "random"] = "ours"
    """how the next candidate is chosen"""

    parallel_trials: int = Field(default=0, ge=0)
    """trials at once (count); 0: as many as gangs fit on separate nodes"""

    ratio_share: float | None = Field(default=None, ge=0, lt=1)
    """share of the budget for contrasts whose ratios carry over; absent: 0.15 if [extrapolate] has a target, else 0"""

    max_trials: int = Field(default=0, ge=0)
    """stop after so many trials, baseline included; 0: no limit but the budget"""

    knobs: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    """allowed values by knob name"""

    @model_validator(mode="before")
    @classmethod
    def _collect_knobs(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        values = dict(data)
        if "knobs" in values and not isinstance(values["knobs"], dict):
            raise ValueError("knobs is no key of its own; write each knob under [search]")
        knobs = dict(values.pop("knobs", {}))
        for key in list(values):
            if key in cls.model_fields:
                continue
            if key in BY_NAME:
                knobs[BY_NAME[key].name] = values.pop(key)
        return {**values, "knobs": knobs}

    @field_validator("knobs", mode="before")
    @classmethod
    def _typed_values(cls, knobs: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
        typed: dict[str, tuple[Any, ...]] = {}
        for name, values in knobs.items():
            if name not in BY_NAME:
                raise ValueError(f"unknown knob {name!r}")
            allowed = values if isinstance(values, (list, tuple)) else [values]
            if not allowed:
                raise ValueError(f"knob {name}: the list of allowed values is empty")
            typed[name] = tuple(dict.fromkeys(knob_value(BY_NAME[name], value) for value in allowed))
        return typed


class MeasureSection(Section):
    """How a trial is measured."""

    steps: int = Field(default=100, ge=2)
    """steady steps in the measured window (count)"""

    warmup_steps: int = Field(default=10, ge=1)
    """steps before the window (count)"""

    memory_margin: float = Field(default=0.0, ge=0, lt=1)
    """share of device memory that a candidate must leave free, beyond what the ledger counts"""

    trace: bool = True
    """take a profiler trace of one step after the window"""

    rehearse: bool = False
    """hold devices and keep records, but train nothing: report what the ledger predicts"""

    stop_confidence: float = Field(default=0.95, gt=0.5, le=1)
    """a search trial stops once it cannot be the winner at this confidence; 1: never"""

    tight_pct: float = Field(default=0, ge=0)
    """a trial ends before `steps` once its median's interval is within this half-width (percent); 0: never"""

    canary_s: float = Field(default=3600, ge=0)
    """wall time after which the baseline is measured again: has the machine changed? (seconds); 0: never"""

    probe: bool = True
    """measure devices, links and the network for a few seconds before the first trial, charged to the budget"""

    control: bool = True
    """trials that are compared over hours begin with 3 s of our own training steps: a slower machine shows in them"""

    startup_s: float = Field(default=0, ge=0)
    """upper bound of a trial's start-up (seconds); 0: learned, from a default for this kind of device"""

    timeout_s: float = Field(default=0, ge=0)
    """upper bound of one trial (seconds of wall time); 0: from the budget and the predicted cost"""


class BudgetSection(Section):
    """What may be spent."""

    gpu_hours: float | None = Field(default=None, gt=0, lt=1e9)
    """device-hours for the whole study; --budget on the command line wins"""

    confirm_share: float = Field(default=0.2, ge=0, lt=1)
    """share kept for confirming the winner against the baseline"""

    ablate: bool = True
    """undo the winner's changes one at a time with what confirmation leaves, and drop those that buy nothing"""


class ExtrapolateSection(Section):
    """What the winner is meant for, where that is not the cluster it is found on."""

    gpus: int | None = Field(default=None, ge=1)
    """devices of the target (count); absent: nothing is extrapolated"""

    model: str | None = None
    """name of the target's model; absent: the job's own"""

    @property
    def planned(self) -> bool:
        """Whether a target is named."""
        return self.gpus is not None or self.model is not None


class RecordsSection(Section):
    """Where records go."""

    mlflow_uri: str | None = None
    """MLflow tracking server, user and password in MLFLOW_TRACKING_USERNAME, _PASSWORD; absent: in the study folder"""

    experiment: str = "ledgertune"
    """MLflow experiment"""

    upload_cap_mib: float = Field(default=200.0, ge=0)
    """largest file that is uploaded to MLflow (MiB); larger ones stay in the study folder, with a note in the run"""

    storage: str | None = None
    """shared database postgresql://user@host/name (password: PGPASSWORD or ~/.pgpass); absent: a file in the study"""

    commit_to: str | None = None
    """repository that receives the winner's branch; absent: one inside the study folder"""

    @field_serializer("mlflow_uri", "storage")
    def _without_password(self, value: str | None) -> str | None:
        """What is written of a job, job.json above all, holds no password."""
        return without_password(value) if value is not None else None


class Job(Section):
    """One job: the whole description of a study."""

    model: ModelSection
    """what is trained"""

    cluster: ClusterSection = ClusterSection()
    """where it runs"""

    recipe: RecipeSection = RecipeSection()
    """what the training recipe fixes"""

    search: SearchSection = SearchSection()
    """which knobs may take which values"""

    measure: MeasureSection = MeasureSection()
    """how a trial is measured"""

    budget: BudgetSection = BudgetSection()
    """what may be spent"""

    extrapolate: ExtrapolateSection = ExtrapolateSection()
    """what the winner is meant for, where that is not the cluster it is found on"""

    baseline: dict[str, Any] = Field(default_factory=dict)
    """the configuration run today, as knob values; absent: the torchtitan function as it is"""

    records: RecordsSection = RecordsSection()
    """where records go"""

    env: dict[str, dict[str, str]] = Field(default_factory=dict)
    """named environment lists for the `env` knob"""

    @property
    def ratio_share(self) -> float:
        """Share of the budget for designed contrasts."""
        if self.search.ratio_share is not None:
            return self.search.ratio_share
        return 0.15 if self.extrapolate.planned else 0.0

    @model_validator(mode="after")
    def _allocator_options_agree(self) -> Job:
        """Two allocator options that are fine alone let reserved memory grow with every step when combined."""
        for name, values in self.env.items():
            for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
                text = values.get(variable, "")
                if "max_split_size_mb" in text and "expandable_segments:True" in text:
                    raise ValueError(
                        f"env.{name}.{variable} = {text!r}: max_split_size_mb together with expandable_segments:True "
                        "makes reserved memory grow from step to step; keep one of the two"
                    )
        return self

    @field_validator("env")
    @classmethod
    def _env_holds_no_secrets(cls, env: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        """Variables of a job are written into records; the environment of `tune` reaches the ranks and is not."""
        odd = [f"env.{name}.{key}" for name, values in env.items() for key in values if not _VARIABLE.fullmatch(key)]
        if odd:
            raise ValueError(f"{', '.join(map(repr, odd))}: a variable's name is letters, digits and underscores")
        secret = [f"env.{name}.{key}" for name, values in env.items() for key in values if is_secret_name(key)]
        if secret:
            raise ValueError(
                f"{', '.join(secret)}: a job is written into records, so it holds no secrets; "
                "set the variable where `tune` (or Ray's nodes) starts, the ranks inherit it"
            )
        return env

    @model_validator(mode="after")
    def _env_lists_exist(self) -> Job:
        named = set(self.search.knobs.get("env", ())) | {self.baseline.get("env", "default")}
        missing = sorted(named - {"default", *self.env})
        if missing:
            raise ValueError(f"env {', '.join(missing)}: no such list; write it under [env.{missing[0]}]")
        return self

    @field_validator("baseline")
    @classmethod
    def _typed_baseline(cls, values: dict[str, Any]) -> dict[str, Any]:
        typed: dict[str, Any] = {}
        for key, value in values.items():
            if key == "dp":
                typed["dp"] = knob_value(BY_NAME["dps"], value)
            elif key in BY_NAME:
                typed[BY_NAME[key].name] = knob_value(BY_NAME[key], value)
            else:
                raise ValueError(f"unknown knob {key!r}; known are {', '.join(sorted(BY_NAME))}")
        return typed
