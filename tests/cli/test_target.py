"""``MODULE:FUNCTION`` and configs of transformers: what they make, and what is refused."""

import json
import sys
from pathlib import Path

import pytest
import torch

import recollect
from recollect.cli import main
from tests.cli._commands import JOB, printed, refused


@pytest.mark.parametrize("target", ["job:pair", "job.py:pair", "package.train:pair"])
def test_modules_by_name_and_by_path(capsys, target):
    assert main(["explain", target]) == 0
    assert "held after forward" in capsys.readouterr().out


def test_a_file_finds_its_neighbours_and_takes_the_place_of_no_module(capsys, folder, monkeypatch):
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "neighbour.py").write_text(JOB)
    (elsewhere / "json.py").write_text("from neighbour import pair")
    assert main(["explain", str(elsewhere / "json.py") + ":pair"]) == 0
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("job.py", "should name a module and a function in it, such as train.py:build"),
        ("job:", "should name a module and a function"),
        (":pair", "should name a module and a function"),
        ("jobs:pair", "MODULE: there is no module 'jobs'"),
        ("package.trains:pair", "MODULE: there is no module 'package.trains'"),
        ("jobs.py:pair", "MODULE: there is no file jobs.py"),
        ("job:pairs", "FUNCTION: there is no pairs in job. Did you mean pair? It has make_model"),
        ("job:number", "FUNCTION: number in job should be a function, but is of type int"),
        ("job:model", "FUNCTION: model in job should be a function, but is of type Sequential"),
        ("job:needs", "needs width. Give them defaults"),
        (
            "job:triple",
            "triple in job returns a value of type tuple of length 3. Have it  return model, batch",
        ),
        ("job:make_model", "make_model in job returns a value of type Sequential"),
        ("job:swapped", "returns a Tensor as model, which should be an nn.Module"),
        ("job:without_batch", "returns a dict without 'batch'"),
        ("job:misspelt", "the unknown key 'optimiser'"),
        ("job:wrong_loss", "as loss, which should be a function of the output"),
        ("job:wrong_optimizer", "as optimizer, which should be a torch.optim.Optimizer"),
    ],
)
def test_targets_that_cannot_be_used(capsys, target, said):
    error = refused(capsys, "frontier", target)
    assert error.startswith("recollect frontier: error: ")
    assert said in error


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("job:pair", "make_batch, which should be a function from a size to a batch"),
        ("job:as_dict", "a dict without 'make_batch'. Have it  return model, make_batch"),
        ("job:make_model", "return model, make_batch"),
        ("transformers:LlamaConfig", "is a config, and does not say how batches grow"),
    ],
)
def test_targets_without_a_function_that_makes_batches(capsys, target, said):
    error = refused(capsys, "largest", target, "--budget", "1MiB")
    assert error.startswith("recollect largest: error: ")
    assert said in error


def test_a_model_that_cannot_be_planned_is_said_in_a_sentence(capsys):
    error = refused(capsys, "frontier", "job:frozen", code=1)
    assert "no parameter of this Sequential requires a gradient" in error


@pytest.mark.parametrize("target", ["job:broken", "job:broken_forward"])
def test_errors_of_the_code_of_the_user_stay_what_they_are(target):
    with pytest.raises(ValueError, match="not ours") as caught:
        main(["plan", target, "--budget", "0.5"])
    ours = Path(recollect.__file__).parent
    shown = [str(entry.path) for entry in caught.traceback]
    assert sum(path.startswith(str(ours)) for path in shown) <= 2  # where it was called
    assert shown[-1].endswith("job.py")


def test_a_module_that_imports_what_is_not_there_shows_where():
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        main(["explain", "imports:build"])


def test_a_file_that_cannot_be_run_is_forgotten():
    with pytest.raises(ModuleNotFoundError):
        main(["explain", "imports.py:build"])
    assert "imports" not in sys.modules


pytest.importorskip("transformers")

SMALL = [
    f"--set={setting}"
    for setting in (
        "hidden_size=32",
        "intermediate_size=64",
        "num_hidden_layers=2",
        "num_attention_heads=2",
        "num_key_value_heads=2",
        "vocab_size=64",
    )
]


def planned(capsys, *more):
    """What `plan --json` says of a small Llama."""
    given = ("plan", "transformers:LlamaConfig", *SMALL, "--batch=4x32", "--json", "--budget=0.95")
    code, out, err = printed(capsys, *given, *more)
    assert (code, err) == (0, "")
    return json.loads(out)


def test_a_model_is_planned_without_weights(capsys):
    figures = planned(capsys)
    assert figures["device"] == "meta"
    assert figures["model"] == "LlamaForCausalLM"
    assert figures["measured_peak"] is None
    is_cpu = not torch.cuda.is_available()
    assert ("Times are those of this machine's CPU" in "".join(figures["notes"])) is is_cpu
    parameters = 2 * 64 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert figures["peak_parts"]["parameters, optimizer state"] >= 4 * parameters


def test_dtype_and_optimizer_count(capsys):
    plain = planned(capsys)["plain_peak"]
    assert planned(capsys, "--dtype=bfloat16")["plain_peak"] < plain
    assert planned(capsys, "--optimizer=AdamW")["plain_peak"] > plain


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["transformers:LlamaConfg", "--batch=2x8"], "Did you mean LlamaConfig?"),
        (["transformers:LlammaConfig", "--batch=2x8"], "Did you mean LlamaConfig?"),
        (["transformers:LlamaConfig"], "--batch: sequences and their length are missing"),
        (["transformers:LlamaConfig", "--batch=2x8", "--set=hiden_size=8"], "hidden_size?"),
        (["transformers:LlamaConfig", "--batch=2x8", "--set=hidden_size"], "NAME=VALUE"),
        (["transformers:LlamaConfig", "--batch=2x8", "--dtype=bfloat61"], "Did you mean bfloat16?"),
        (["transformers:LlamaConfig", "--batch=2x8", "--optimizer=adamw"], "Did you mean AdamW?"),
        (
            ["transformers:ViTConfig", "--batch=2x8"],
            "ViTConfig is not the config of a language model",
        ),
        (["job.py:pair", "--batch=2x8"], "--batch is for a config of transformers"),
        (["some/Llama-3-8B", "--batch=2x8"], "Llama-3-8B. Name the class of the model's config"),
    ],
)
def test_mistakes_are_said_in_a_sentence(capsys, given, said):
    code, out, err = printed(capsys, "plan", *given, "--budget=0.9")
    assert (code, out) == (2, "")
    assert said in err


def test_a_batch_is_two_numbers(capsys):
    _, _, err = printed(
        capsys, "plan", "transformers:LlamaConfig", "--batch=8*2048", "--budget=1.0"
    )
    assert "such as 8x2048" in err
