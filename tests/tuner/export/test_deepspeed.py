"""DeepSpeed JSON: back to the candidate, and only keys that DeepSpeed's own model has."""

from __future__ import annotations

from enum import IntEnum
import json
from pathlib import Path
import typing
from typing import Any

from pydantic import ConfigDict
from pydantic import TypeAdapter
import pytest

from search_space.errors import UserError
from search_space.job_file import parse_job
from tests.tuner.export.sampled import COUNT
from tests.tuner.export.sampled import spoken
from tests.tuner.export.sampled import subjects
from tuner.export.deepspeed import document
from tuner.export.deepspeed import export
from tuner.export.read_deepspeed import parse
from tuner.export.read_deepspeed import read
from tuner.export.targets import without_comments


TABLE = json.loads((Path(__file__).parents[2] / "data" / "framework_fields.json").read_text())["deepspeed"]
SECTIONS = {
    "zero_optimization": "DeepSpeedZeroConfig",
    "tensor_parallel": "TPTrainingConfig",
    "compile": "CompileConfig",
}


@pytest.mark.parametrize("framework", ["torchtitan", "deepspeed"])
@pytest.mark.parametrize("comments", [True, False])
def test_there_and_back(framework: str, comments: bool) -> None:
    for subject in subjects(framework):
        made = export(subject)
        text = made.text if comments else without_comments("deepspeed", made.text)
        if not comments:
            json.loads(text)
        gaps = {gap.knob for gap in made.gaps}
        if {"context_parallel", "expert_parallel"} & gaps:
            continue
        # Sharding that the pipeline engine refuses is named; its ranks still come back.
        gaps -= {"data_parallel_shard"} if "data_parallel_replicate" not in gaps else set()
        found = read(text, framework=framework, shape=subject.setting.shape)
        wanted, got = spoken(subject, gaps, found.candidate)
        assert got == wanted, f"{subject.candidate.label()} came back as {found.candidate.label()}"
        assert found.global_batch_seqs == 256 and found.precision == "bf16"
        assert found.candidate.data_parallel == subject.candidate.data_parallel
    assert len(subjects(framework)) == COUNT >= 100


@pytest.mark.parametrize("framework", ["torchtitan", "deepspeed"])
def test_every_key_is_deepspeeds_and_of_its_type(framework: str) -> None:
    names = vars(typing) | {"ZeroStageEnum": IntEnum("ZeroStageEnum", {f"s{i}": i for i in range(4)}, start=0)}
    for subject in subjects(framework):
        values = document(subject)
        assert set(values) <= set(TABLE["keys"])
        for section, owner in SECTIONS.items():
            for key, value in values.get(section, {}).items():
                annotation = TABLE["classes"][owner][key]
                config = None if "Enum" in annotation else ConfigDict(strict=True)
                TypeAdapter(eval(annotation, names), config=config).validate_python(value)


def test_deepspeeds_own_model_accepts_it() -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

    for subject in [*subjects("torchtitan"), *subjects("deepspeed")]:
        values = document(subject)
        config.DeepSpeedZeroConfig(**values["zero_optimization"])
        TPTrainingConfig(**values.get("tensor_parallel", {}))
        # One process stands for all: its world has one rank.
        values["train_batch_size"] = values["train_micro_batch_size_per_gpu"] * values["gradient_accumulation_steps"]
        values.pop("compile", None)
        DeepSpeedConfig(values)


HAND: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "gradient_clipping": 1.0,
}


def test_a_file_as_people_write_them() -> None:
    text = "// ours\n" + json.dumps(HAND, indent=1)[:-1] + ",  # a trailing comma\n}"
    found = read(text)
    assert found.candidate.data_parallel_replicate == 8 and found.candidate.zero_stage == 2
    assert set(found.ignored) == {"gradient_clipping", "zero_optimization.offload_optimizer"}
    assert any("fp16" in line for line in found.assumed)
    assert parse(text)["gradient_clipping"] == 1.0
    with pytest.raises(UserError, match="model"):
        parse_job(found.job_text())  # the model is to be set, as the file says


def test_a_file_that_leaves_all_to_its_launcher() -> None:
    """As the Hugging Face trainer takes them."""
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    }
    found = read(json.dumps(auto), devices=8, shape=subjects("deepspeed")[0].setting.shape)
    assert found.candidate.zero_stage == 3 and found.candidate.data_parallel == 8 and found.candidate.fsdp_bucket == 1
    assert found.precision is None and any("precision" in line for line in found.missing)


def test_sizes_that_the_file_leaves_open() -> None:
    auto = HAND | {"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}
    assert any("--gpus" in line for line in read(json.dumps(auto)).missing)
    found = read(json.dumps(auto), devices=16)
    assert found.candidate.data_parallel == 16 and found.global_batch_seqs == 32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_batch_size": 65}, "no multiple"),
        ({"train_batch_size": -1}, "whole number"),
        ({"zero_optimization": {"stage": 4}}, "0 to 3"),
        ({"zero_optimization": 3}, "an object is needed"),
        ({"tensor_parallel": {"autotp_size": "two"}}, "whole number"),
    ],
)
def test_contradictions_are_said(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read(json.dumps(HAND | change))


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": 1}'])
def test_what_is_no_deepspeed_file_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="import"):
        read(text)


def test_devices_that_contradict_the_batch_are_refused() -> None:
    with pytest.raises(UserError, match="one of them is wrong"):
        read(json.dumps(HAND), devices=16)


def test_slashes_inside_texts_are_no_comments() -> None:
    assert parse('{"a": "http://x", "b": "#1"} // c')["a"] == "http://x"
