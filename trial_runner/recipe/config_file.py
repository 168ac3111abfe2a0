"""Candidate to a Python file with a torchtitan config function: importable, diffable, reviewable."""

from __future__ import annotations

from dataclasses import dataclass
import json
import re
import textwrap

from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.stages import stage_modules
from trial_runner.recipe.base import BaseFunction
from trial_runner.recipe.parallelize_code import extra_code


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the recipe fixes, in torchtitan's terms."""

    seq_len: int
    """Tokens in one sequence."""

    global_batch_seqs: int
    """Sequences in one optimizer step."""

    precision: str
    """``bf16`` or ``fp32``."""


def microbatches(candidate: Candidate, recipe: Recipe) -> int:
    """Micro-batches of one data-parallel rank in one optimizer step: B / (d·b).

    Raises:
        UserError: the batch does not divide.
    """
    count, rest = divmod(recipe.global_batch_seqs, candidate.data_parallel * candidate.micro_batch)
    if rest or not count:
        raise UserError(
            f"global batch {recipe.global_batch_seqs} is no multiple of data-parallel ranks "
            f"{candidate.data_parallel} × micro_batch {candidate.micro_batch}"
        )
    return count


def function_name(base: BaseFunction, suffix: str) -> str:
    """A Python name for a function derived from ``base``."""
    return re.sub(r"\W", "_", f"{base.function}_{suffix}")


def docstring(text: str) -> str:
    """``text`` as the docstring of a Python file."""
    return '"""' + text.strip().replace("\\", "\\\\").replace('"""', "'''") + '\n"""'


def render(candidate: Candidate, base: BaseFunction, recipe: Recipe, *, function: str, header: str | None) -> str:
    """The text of the config file.

    The function calls the user's own and sets recipe and knobs on what it returns; everything else stays as the
    user wrote it.

    Args:
        candidate: the knobs.
        base: the user's config function.
        recipe: sequence length, global batch, precision.
        function: name of the function to write.
        header: docstring of the file: study, trial, versions, evidence; None: the file without one.

    Raises:
        UserError: the global batch does not divide, or the function has float8 layers that the candidate has not.
    """
    knobs, imports = _knob_lines(candidate, base, recipe)
    imports[base.module] = f"{base.function} as base"
    extra = extra_code(candidate, microbatches(candidate, recipe))
    from_imports = sorted({f"from {module} import {name}" for module, name in imports.items()})
    import_lines = [line for line in extra.imports if "torch" not in line]
    import_lines += [line for line in extra.imports if "torch" in line and line not in from_imports] + from_imports
    precision = {"bf16": "bfloat16", "fp32": "float32"}[recipe.precision]
    recipe_lines = [
        f"config.training.seq_len = {recipe.seq_len}",
        f"config.training.global_batch_size = {recipe.global_batch_seqs}",
        f'config.training.mixed_precision_param = "{precision}"',
    ]
    body = [
        f'"""{base.function} with {candidate.label()}."""',
        "config = base()",
        "# recipe: fixed, never tuned",
        *recipe_lines,
        "# knobs",
        *knobs,
        *extra.lines,
        "return config",
    ]
    return "\n".join(
        [
            *([] if header is None else [docstring(header)]),
            "",
            *import_lines,
            "",
            "",
            *([extra.code, ""] if extra.code else []),
            f"def {function}():",
            textwrap.indent("\n".join(body), "    "),
            "",
        ]
    )


def _knob_lines(candidate: Candidate, base: BaseFunction, recipe: Recipe) -> tuple[list[str], dict[str, str]]:
    """Assignments for the knobs, and the imports they need."""
    count = microbatches(candidate, recipe)
    pipelined = candidate.pipeline_parallel > 1
    local_batch = candidate.micro_batch * count if pipelined else candidate.micro_batch
    parallel = {
        "data_parallel_replicate_degree": candidate.data_parallel_replicate,
        "data_parallel_shard_degree": candidate.data_parallel_shard,
        "tensor_parallel_degree": candidate.tensor_parallel,
        "pipeline_parallel_degree": candidate.pipeline_parallel,
        "context_parallel_degree": candidate.context_parallel,
        "expert_parallel_degree": candidate.expert_parallel,
        "fsdp_reshard_after_forward": candidate.reshard_after_forward,
    }
    lines = [f"config.training.local_batch_size = {local_batch}"]
    lines += [f"config.parallelism.{name} = {json.dumps(value)}" for name, value in parallel.items()]
    if pipelined:
        stages = stage_modules(base.shape.layers, candidate.num_stages)
        modules = "[\n" + "".join(f"    {json.dumps(stage)},\n" for stage in stages) + "]"
        lines += [
            f"config.parallelism.pipeline_parallel_schedule = {json.dumps(candidate.schedule)}",
            f"config.parallelism.pipeline_parallel_microbatch_size = {candidate.micro_batch}",
            f"config.parallelism.module_fqns_per_model_part = {modules}",
            "config.training.disable_cuda_graphs = True  # not supported with a pipeline",
        ]
    imports: dict[str, str] = {}
    if candidate.activation_checkpoint != base.knobs.get("activation_checkpoint") or (
        candidate.activation_checkpoint == "memory_budget" and candidate.memory_budget != base.knobs["memory_budget"]
    ):
        ac_line, imports = _checkpoint_line(candidate)
        lines.append(ac_line)
    if candidate.symm_mem != base.knobs.get("symm_mem", False):
        lines.append(f"config.parallelism.enable_fsdp_symm_mem = {candidate.symm_mem}")
    lines.append(f"config.compile.enable = {candidate.compile}")
    lines.append(f"config.compile.enable_async_tensor_parallel = {candidate.async_tp}")
    if candidate.compile and not base.knobs.get("compile"):
        lines.append('config.compile.components = ["model", "loss"]')
    if candidate.loss_chunks != base.knobs.get("loss_chunks", candidate.loss_chunks):
        lines.append(f"config.loss.num_chunks = {candidate.loss_chunks}")
    if base.knobs.get("float8") and not candidate.float8:
        raise UserError(f"{base.function} converts its layers to float8 itself; float8 = off needs a function without")
    if candidate.float8 and not base.knobs.get("float8"):
        imports["torchtitan.components.quantization"] = "Float8LinearConverter"
        lines.append(
            f"Float8LinearConverter.Config(model_compile_enabled={candidate.compile}).build()"
            ".convert(config.model_spec.model)"
        )
    return lines, imports


def _checkpoint_line(candidate: Candidate) -> tuple[str, dict[str, str]]:
    module = "torchtitan.distributed.activation_checkpoint"
    match candidate.activation_checkpoint:
        case "none":
            return "config.activation_checkpoint = None", {}
        case "selective":
            return "config.activation_checkpoint = SelectiveAC.Config()", {module: "SelectiveAC"}
        case "full":
            return "config.activation_checkpoint = FullAC.Config()", {module: "FullAC"}
        case "memory_budget":
            call = f"MemoryBudgetAC.Config(memory_budget={candidate.memory_budget:g})"
            return f"config.activation_checkpoint = {call}", {module: "MemoryBudgetAC"}
    return "config.activation_checkpoint = None", {}
