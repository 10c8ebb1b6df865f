"""Models of transformers from their configs, on the meta device."""

import json

import pytest
import torch

from tests.cli._commands import printed

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
