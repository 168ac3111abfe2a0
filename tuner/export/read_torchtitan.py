"""A torchtitan config module as a baseline: imported in a child process, code beside the config read as text."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from search_space.candidate import Candidate
from search_space.candidate import LOOPED_SCHEDULES
from search_space.candidate import V_SCHEDULES
from search_space.errors import UserError
from search_space.pool import canonical
from trial_runner.recipe.base import BaseFunction
from trial_runner.recipe.base import describe
from tuner.export.imported import Imported


CALLS = {
    "blocks_in_groups": (1, "fsdp_bucket"),
    "prefetch_forward": (1, "forward_prefetch"),
    "FirstBlocksAC": (0, "first_n"),
}
"""Calls in exported modules that carry a knob: position of the argument, knob."""


PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}
"""A recipe's precision by torchtitan's name."""


def read(path: Path, function: str | None = None, devices: int | None = None, user_path: str | None = None) -> Imported:
    """Read a module.

    Args:
        path: the Python file.
        function: its config function; None where it defines one only.
        devices: devices of the job, where the data-parallel degree is left open.
        user_path: folder of further modules that it imports; absent: the file's own.

    Raises:
        UserError: the file has no config function or several, or the child process cannot import it.
    """
    text = path.read_text(encoding="utf-8")
    tree = _tree(path, text)
    name = function or _only_function(path, tree)
    if not path.stem.isidentifier():
        raise UserError(f"import: {path.name} cannot be imported by name; rename it to letters, digits and underscores")
    base = describe(f"{path.stem}:{name}", user_path or str(path.resolve().parent))
    return imported(base, code_knobs(tree), devices, f"{path.stem}:{name}", str(path.resolve().parent))


def _tree(path: Path, text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise UserError(f"import: {path.name} line {error.lineno}: {error.msg}") from None


def _only_function(path: Path, tree: ast.Module) -> str:
    """The one function that takes no argument."""
    names = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and not (node.args.args or node.args.kwonlyargs or node.args.vararg or node.args.kwarg)
    ]
    if len(names) != 1:
        found = ", ".join(names) or "none"
        raise UserError(f"import: {path.name} has {len(names)} config functions ({found}); choose one with --function")
    return names[0]


def code_knobs(tree: ast.Module) -> dict[str, Any]:
    """Knobs that no config field holds, from the calls that carry them."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id in CALLS:
            position, knob = CALLS[node.func.id]
            if len(node.args) > position and isinstance(node.args[position], ast.Constant):
                found[knob] = node.args[position].value  # type: ignore[attr-defined]
        if node.func.id == "sync_last_only":
            found["accumulate_without_sync"] = True
    if "first_n" in found:
        found["activation_checkpoint"] = "first_n"
    return found


def imported(
    base: BaseFunction, code: dict[str, Any], devices: int | None, target: str, folder: str | None
) -> Imported:
    """The facts of a config function in our words."""
    knobs: dict[str, Any] = dict(base.knobs)
    knobs |= code
    assumed = list(base.warnings)
    missing = ['[cluster] gpu, such as "H100-SXM"']
    piped = knobs["pipeline_parallel"] > 1
    knobs["micro_batch"] = base.knobs["pipeline_microbatch"] if piped else base.local_batch
    if piped:
        knobs["virtual_stages"] = _virtual(knobs, base.knobs.get("listed_stages") or 0, assumed)
    others = (
        knobs["tensor_parallel"]
        * knobs["pipeline_parallel"]
        * knobs["context_parallel"]
        * knobs["data_parallel_replicate"]
    )
    if knobs["data_parallel_shard"] == -1:
        if devices is None:
            missing.append("devices (--gpus N): data_parallel_shard_degree is -1, all that is left")
            knobs["data_parallel_shard"] = 1
        else:
            shard, rest = divmod(devices, others)
            if rest or not shard:
                raise UserError(
                    f"import: the other degrees multiply to {others}, which does not divide {devices} devices"
                )
            knobs["data_parallel_shard"] = shard
    candidate = canonical(Candidate.from_json(knobs))
    total = candidate.num_devices
    if devices is not None and devices != total:
        raise UserError(f"import: --gpus {devices}, but the function's degrees multiply to {total}")
    each = min(8, total)
    if total % each == 0:
        assumed.append(f"{each} devices a node")
    batch = base.global_batch if base.global_batch > 0 else base.local_batch * candidate.data_parallel
    return Imported(
        kind="torchtitan",
        framework="torchtitan",
        candidate=candidate,
        devices_per_node=each if total % each == 0 else None,
        nodes=total // each if total % each == 0 else None,
        seq_len=base.seq_len,
        global_batch_seqs=batch,
        precision=PRECISIONS.get(base.knobs.get("mixed_precision", "")),
        model={"torchtitan": target, "path": folder},
        assumed=tuple(assumed),
        missing=tuple(missing),
    )


def _virtual(knobs: dict[str, Any], listed: int, assumed: list[str]) -> int:
    """Stages of each pipeline rank."""
    if listed:
        return max(1, listed // knobs["pipeline_parallel"])
    if knobs["schedule"] in (*LOOPED_SCHEDULES, *V_SCHEDULES):
        assumed.append("two stages a pipeline rank: the function lists none")
        return 2
    return 1
