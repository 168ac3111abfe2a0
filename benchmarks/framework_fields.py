"""Writes the table of config fields that exports are checked against, from Megatron Core's and DeepSpeed's sources.

    python benchmarks/framework_fields.py MEGATRON_FOLDER DEEPSPEED_FOLDER > tests/data/framework_fields.json

The folders are where ``pip install --no-deps --target FOLDER megatron-core==0.16.1`` (``deepspeed==0.19.8``) put them,
or unpacked source archives. Sources are parsed, not imported. Prints one JSON document: for each class its fields with
their annotations, and DeepSpeed's top-level keys.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
import re
import sys


MEGATRON = {
    "ModelParallelConfig": "megatron/core/model_parallel_config.py",
    "TransformerConfig": "megatron/core/transformer/transformer_config.py",
    "DistributedDataParallelConfig": "megatron/core/distributed/distributed_data_parallel_config.py",
}
DEEPSPEED = {
    "DeepSpeedZeroConfig": "deepspeed/runtime/zero/config.py",
    "TPTrainingConfig": "deepspeed/runtime/tensor_parallel/config.py",
    "CompileConfig": "deepspeed/compile/config.py",
}


def fields(path: Path, name: str) -> dict[str, str]:
    """Annotated fields of one class: annotation by name; DeepSpeed's aliases stand in for names."""
    tree = ast.parse(path.read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    result = {}
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            call = node.value if isinstance(node.value, ast.Call) else None
            alias = next((k.value.value for k in call.keywords if k.arg == "alias"), None) if call else None
            result[alias or node.target.id] = ast.unparse(node.annotation)
    return result


def constants(path: Path) -> list[str]:
    """Lower-case texts that DeepSpeed's constants name: its top-level keys are among them."""
    tree = ast.parse(path.read_text())
    texts = {
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    return sorted(text for text in texts if re.fullmatch(r"[a-z][a-z0-9_]+", text))


def version(folder: Path, package: str) -> str:
    """Version of what lies in a folder, from its metadata or its source archive's name."""
    names = [path.name for path in folder.glob(f"{package}-*")] + [folder.name]
    found = [re.search(rf"{package}-(\d[\w.]*\d)", name) for name in names]
    return next(match[1] for match in found if match)


def main() -> int:
    """Print the table."""
    megatron, deepspeed = (Path(folder) for folder in sys.argv[1:3])
    top = constants(deepspeed / "deepspeed/runtime/constants.py")
    document = {
        "megatron": {
            "source": f"megatron-core {version(megatron, 'megatron_core')}",
            "classes": {name: fields(megatron / file, name) for name, file in MEGATRON.items()},
        },
        "deepspeed": {
            "source": f"deepspeed {version(deepspeed, 'deepspeed')}",
            "classes": {name: fields(deepspeed / file, name) for name, file in DEEPSPEED.items()},
            "keys": sorted(
                {*top, "zero_optimization", "tensor_parallel", "pipeline", "compile", "activation_checkpointing"}
            ),
        },
    }
    print(json.dumps(document, indent=1, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
