"""Job files: every wrong input is answered with the line, what was found and what is allowed."""

from __future__ import annotations

import pytest

from search_space.errors import JobError
from search_space.job import Job
from search_space.job_file import line_of
from search_space.job_file import load_job
from search_space.job_file import parse_job
from search_space.job_template import render_job
from tuner.cli.start import embedded_job


MODEL = '[model]\ntorchtitan = "llama3:llama3_8b"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MODEL + "[serch]\n", ["job:3", "'serch'", "did you mean 'search'", "recipe"]),
        (MODEL + "[search]\ntensor_paralel = [1]\n", ["job:4", "tensor_paralel", "did you mean 'tensor_parallel'"]),
        (MODEL + "[recipe]\nseq_len = 'long'\n", ["job:4", "recipe.seq_len", "integer", "'long'", "tokens"]),
        (MODEL + "[measure]\nsteps = -5\n", ["job:4", "measure.steps", "-5", "greater than or equal to 2"]),
        (MODEL + "[search]\nac = ['some']\n", ["job:3", "activation_checkpoint", "'some'", "selective"]),
        (MODEL + "[search]\ntp = []\n", ["job:3", "tensor_parallel", "empty"]),
        (MODEL + "[baseline]\nfoo = 1\n", ["job:3", "'foo'", "tensor_parallel"]),
        ("[model]\ntorchtitan = 'llama3'\n", ["job:1", "module:function", "'llama3'"]),
        ("[model]\nlayers = 4\n", ["job:1", "hidden, heads, ffn, vocab"]),
        (MODEL + "[recipe]\nseq_len = 100\nglobal_batch_tokens = 150\n", ["150", "multiple", "100"]),
        (MODEL + "[recipe]\nglobal_batch_seqs = 1\nglobal_batch_tokens = 150\n", ["not both"]),
        (MODEL + "[search]\nenv = ['default', 'fast']\n", ["fast", "[env.fast]"]),
        ("[model\n", ["line 1"]),
        ("", ["model", "missing"]),
    ],
)
def test_wrong_job_names_line_found_and_allowed(text: str, words: list[str]) -> None:
    with pytest.raises(JobError) as error:
        parse_job(text)
    for word in words:
        assert word in str(error.value)


def test_missing_file_says_what_to_do() -> None:
    with pytest.raises(JobError, match="tune init"):
        load_job("no-such.toml")


def test_short_and_long_knob_names_and_scalars() -> None:
    job = parse_job(MODEL + "[search]\ntp = [1, 2, 2]\nmicro_batch = 4\ncompile = 'on'\n[baseline]\ntp = 2\ndp = 4\n")
    assert job.search.knobs == {"tensor_parallel": (1, 2), "micro_batch": (4,), "compile": (True,)}
    assert job.baseline == {"tensor_parallel": 2, "dp": 4}


def test_job_survives_its_own_json() -> None:
    job = parse_job(MODEL + "[search]\ntp = [1, 2]\nac = 'full'\n[measure]\nsteps = 7\n")
    assert Job.model_validate_json(job.model_dump_json()) == job


def test_every_field_is_described() -> None:
    for name, section in Job.model_fields.items():
        assert section.description, name
        for key, field in getattr(section.annotation, "model_fields", {}).items():
            assert field.description, f"{name}.{key}"


def test_embedded_job_is_the_debug_model() -> None:
    assert embedded_job().model.torchtitan == "llama3:llama3_debugmodel"


@pytest.mark.parametrize("gpu", [None, "NVIDIA H100 80GB HBM3"])
@pytest.mark.parametrize("model", [None, "llama3:llama3_8b"])
def test_template_is_a_valid_job(gpu: str | None, model: str | None) -> None:
    job = parse_job(render_job(model, gpu, 8))
    assert job.cluster.gpus_per_node == 8
    assert job.model.torchtitan == (model or "llama3:llama3_debugmodel")


def test_line_of_nested_and_dotted_keys() -> None:
    text = "[model]\n\n[env.fast]\nNCCL = '1'\nmodel.x = 1\n"
    assert line_of(text, ["model"]) == 1
    assert line_of(text, ["env", "fast", "NCCL"]) == 4
    assert line_of(text, ["nothing"]) is None
