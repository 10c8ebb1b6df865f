"""Whole models as one region of the replay engine, against plain autograd, bit for bit.

Nothing in a model is edited. It trains with dropout on for three steps with batches of one shape,
so that the first call records and two are checked, and for one step with another shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect
from recollect import policy
from recollect.replay import engine
from recollect.replay import recording_cache as library
from tests._support import assert_identical, collector_off, sampled

pytestmark = pytest.mark.filterwarnings(
    # What a library of models deprecates, of its own or of torch's, is not our subject.
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    # Not every model has an attention kernel, and with dropout there is none for the CPU.
    r"ignore:the policy's attention\(\) matched nothing",
)

Batch = dict[str, Any]
Wrap = Callable[[nn.Module], nn.Module]

KEEP = policy.matmuls() | policy.attention()
KEEPING = pytest.mark.parametrize("keep", [None, KEEP], ids=["nothing", "matmuls"])


def plain(model: nn.Module) -> nn.Module:
    return model


def replayed(keep: Any = None) -> Wrap:
    return functools.partial(recollect.checkpointed, engine="replay", policy=keep)


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test after which a call still holds something, without the garbage collector."""
    alive: WeakSet[Any] = WeakSet()

    class Rematerializer(engine.Rematerializer):
        __slots__ = ()

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            alive.add(self)

    monkeypatch.setattr(engine, "Rematerializer", Rematerializer)
    with collector_off():
        yield
        assert len(alive) == 0


@dataclass(frozen=True)
class Case:
    """A model, and what it trains with."""

    make: Callable[[], nn.Module]
    #: A batch of the usual size, or of another one.
    batch: Callable[[bool], Batch]
    #: The loss, of what the model returns.
    loss: Callable[[Any], Tensor] = lambda out: out.loss
    #: Why calls differ from the recording, if they may.
    differs: str | None = None
    autocast: bool = False


def train(case: Case, wrap: Wrap) -> tuple[list[Any], list[Any]]:
    """What four steps of training come to, and the recordings that stood after each."""
    torch.manual_seed(0)
    model = wrap(case.make().train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps, recordings = [], []
    for number in range(4):
        torch.manual_seed(100 + number)
        batch = case.batch(number == 3)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            loss = case.loss(model(**batch))
        recordings.append(recordings_of(model))
        loss.backward()
        steps.append(
            {
                "loss": loss.detach(),
                "gradients": {name: p.grad for name, p in model.named_parameters()},
                "buffers": {name: b.clone() for name, b in model.named_buffers()},
                "random": torch.get_rng_state(),
            }
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return steps, recordings


def recordings_of(model: nn.Module) -> list[Any]:
    """The recording of each signature that ``model`` was called with."""
    slots = library._entries.get(model, {}).values()
    assert all(entry.fallback is None for entry in slots)
    return [entry.recording for entry in slots]


def assert_trains_alike(case: Case, expected: list[Any], keep: Any) -> None:
    """A model trains as without checkpointing, and its calls are checked against the first."""
    steps, recordings = train(case, replayed(keep))
    for actual, wanted in zip(steps, expected, strict=True):
        assert_identical(actual, wanted)
    first, *later = recordings
    as_recorded = [first[0] is not None and each[0] is first[0] for each in later]
    if case.differs is None:
        assert as_recorded == [True, True, True]
        assert first[0].reason is None  # recorded to the end
        assert len(later[2]) == 2  # another shape is another recording
    else:
        assert as_recorded[:2] != [True, True], "no longer differs"


# --- architectures of transformers ----------------------------------------------------------------

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "attention_dropout": 0.1, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
TWO_SIDED = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "dropout": 0.1,
    "attention_dropout": 0.1,
}
PICTURES = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}


SPEECH = {
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "conv_dim": (16, 16),
    "conv_kernel": (8, 4),
    "conv_stride": (4, 2),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 2,
}


def text(is_other: bool, *, padded: bool = True) -> Batch:
    """Token numbers, the last of which in some rows are padding."""
    shape = (3, 7) if is_other else (2, 12)
    tokens = torch.randint(1, 64, shape)
    if not padded:
        return {"input_ids": tokens, "labels": tokens.clone()}
    mask = torch.ones_like(tokens)
    mask[-1, -2:] = 0
    return {
        "input_ids": tokens.masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }


def unpadded(is_other: bool) -> Batch:
    return text(is_other, padded=False)


def text_to_text(is_other: bool) -> Batch:
    batch = text(is_other)
    batch["labels"] = torch.randint(1, 64, (batch["input_ids"].shape[0], 5))
    return batch


def picture(is_other: bool) -> Batch:
    count = 3 if is_other else 2
    return {"pixel_values": torch.randn(count, 3, 16, 16), "labels": torch.randint(3, (count,))}


def picture_and_text(is_other: bool) -> Batch:
    batch = text(is_other)
    del batch["labels"]
    pictures = torch.randn(batch["input_ids"].shape[0], 3, 16, 16)
    return {**batch, "pixel_values": pictures, "return_loss": True}


def sound(is_other: bool) -> Batch:
    return {
        "input_values": torch.randn(2, 500 if is_other else 400),
        "labels": torch.randint(1, 32, (2, 3)),
    }


def spectrum(is_other: bool) -> Batch:
    return {
        "input_features": torch.randn(3 if is_other else 2, 8, 40),
        "labels": torch.randint(1, 64, (3 if is_other else 2, 6)),
    }


def model(name: str, batch: Callable[[bool], Batch], differs: str | None = None, **config: Any):
    """A model of transformers, of random weights."""
    return name, batch, differs, config


ARCHITECTURES = {
    "llama": model("LlamaForCausalLM", text, **GROUPED),
    "llama-eager": model("LlamaForCausalLM", text, attn_implementation="eager", **GROUPED),
    # Without a mask and dropout there is an attention kernel for the CPU.
    "llama-kernel": model("LlamaForCausalLM", unpadded, **GROUPED | {"attention_dropout": 0.0}),
    "gpt2": model("GPT2LMHeadModel", text, n_embd=32, n_layer=2, n_head=4, vocab_size=64),
    "gpt-neox": model(
        "GPTNeoXForCausalLM", text, hidden_dropout=0.1, attention_dropout=0.1, **SMALL
    ),
    "qwen2": model("Qwen2ForCausalLM", text, **GROUPED),
    "qwen3": model("Qwen3ForCausalLM", text, head_dim=8, **GROUPED),
    "gemma2": model("Gemma2ForCausalLM", text, head_dim=8, sliding_window=4, **GROUPED),
    "phi": model("PhiForCausalLM", text, resid_pdrop=0.1, embd_pdrop=0.1, **GROUPED),
    "bert": model("BertForMaskedLM", text, **SMALL),
    "roberta": model("RobertaForMaskedLM", text, pad_token_id=0, **SMALL),
    "distilbert": model(
        "DistilBertForMaskedLM", text, vocab_size=64, dim=32, hidden_dim=48, n_layers=2, n_heads=4
    ),
    "t5": model(
        "T5ForConditionalGeneration",
        text_to_text,
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "bart": model(
        "BartForConditionalGeneration",
        text_to_text,
        activation_dropout=0.1,
        max_position_embeddings=64,
        **TWO_SIDED,
    ),
    "bart-layerdrop": model(
        "BartForConditionalGeneration",
        text_to_text,
        "draws which layers it runs",
        encoder_layerdrop=0.5,
        decoder_layerdrop=0.5,
        **TWO_SIDED,
    ),
    "mixtral": model(
        "MixtralForCausalLM",
        text,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_jitter_noise=0.1,
        **GROUPED,
    ),
    "qwen2-moe": model(
        "Qwen2MoeForCausalLM",
        text,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        **GROUPED,
        **EXPERTS,
    ),
    "olmoe": model("OlmoeForCausalLM", text, **GROUPED, **EXPERTS),
    "olmoe-eager": model(
        "OlmoeForCausalLM",
        text,
        "each expert takes as many tokens as the router sends",
        experts_implementation="eager",
        **GROUPED,
        **EXPERTS,
    ),
    "mamba": model(
        "MambaForCausalLM",
        unpadded,
        vocab_size=64,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
    ),
    "vit": model("ViTForImageClassification", picture, **SMALL, **PICTURES, num_labels=3),
    "clip": model(
        "CLIPModel",
        picture_and_text,
        text_config={**SMALL, "attention_dropout": 0.1, "eos_token_id": 2},
        vision_config={**SMALL, "image_size": 16, "patch_size": 4, "attention_dropout": 0.1},
        projection_dim=16,
    ),
    "convnext": model(
        "ConvNextForImageClassification",
        picture,
        hidden_sizes=[8, 16],
        depths=[2, 2],
        num_stages=2,
        patch_size=2,
        drop_path_rate=0.3,
        layer_scale_init_value=0.1,
        num_labels=3,
    ),
    "swin": model(
        "SwinForImageClassification",
        picture,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.3,
        num_labels=3,
        **PICTURES | {"patch_size": 2},
    ),
    "wav2vec2": model(
        "Wav2Vec2ForCTC",
        sound,
        "labels are chosen by a mask: the second call is recorded to see whether as many are",
        layerdrop=0.0,
        **SMALL | {"vocab_size": 32},
        **SPEECH,
        ctc_zero_infinity=True,
    ),
    "whisper": model(
        "WhisperForConditionalGeneration",
        spectrum,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **TWO_SIDED,
    ),
}


def architecture(name: str) -> Case:
    transformers = pytest.importorskip("transformers")
    kind, batch, differs, config = ARCHITECTURES[name]
    model_class = getattr(transformers, kind)

    def make() -> nn.Module:
        return model_class._from_config(model_class.config_class(**config))

    return Case(make, batch, differs=differs)


@functools.cache
def plain_architecture(name: str) -> list[Any]:
    return train(architecture(name), plain)[0]


@KEEPING
@pytest.mark.parametrize("name", sampled(ARCHITECTURES, usual=("llama", "t5", "mixtral", "vit")))
def test_architecture(name: str, keep: Any) -> None:
    assert_trains_alike(architecture(name), plain_architecture(name), keep)


# --- networks written here ------------------------------------------------------------------------


class Residual(nn.Module):
    """In-place ReLU, and the sum with the skip in place as well."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.down = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.down is None else self.down(x)
        return self.relu(out)


def resnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        *(nn.MaxPool2d(2), Residual(8, 8), Residual(8, 16, 2), Residual(16, 16)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 5)),
    )


def frozen_resnet() -> nn.Module:
    """As for fine-tuning: the stem and its statistics stand still."""
    net = resnet()
    for parameter in net[:4].parameters():
        parameter.requires_grad_(False)
    net[1].train = lambda mode=True: nn.Module.train(net[1], False)
    return net


class Squeeze(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            *(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, 4, 1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(4, width, 1), nn.Hardsigmoid(inplace=True)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.gate(x)) if not x.requires_grad else x * self.gate(x)


class Inverted(nn.Module):
    """Wide inside, a filter of its own for each channel."""

    def __init__(self, width: int, act: Callable[..., nn.Module]) -> None:
        super().__init__()
        wide = 2 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), act(inplace=True)),
            nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False),
            *(nn.BatchNorm2d(wide), act(inplace=True), Squeeze(wide)),
            *(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width, momentum=0.01)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def mobilenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish(inplace=True)),
        *(Inverted(8, nn.ReLU6), Inverted(8, nn.Hardswish), Inverted(8, nn.SiLU)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 16), nn.Hardswish(inplace=True)),
        *(nn.Dropout(0.2, inplace=True), nn.Linear(16, 5)),
    )


class Dense(nn.Module):
    def __init__(self, width: int, count: int, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                *(nn.BatchNorm2d(width + 4 * n, momentum=momentum), nn.ReLU(inplace=True)),
                nn.Conv2d(width + 4 * n, 4, 3, 1, 1, bias=False),
            )
            for n in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            new = F.dropout(layer(torch.cat(features, 1)), 0.2, self.training)
            features.append(new)
        return torch.cat(features, 1)


def densenet(momentum: float | None = 0.1) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 1, 1), Dense(8, 3, momentum), nn.Conv2d(20, 8, 1), nn.AvgPool2d(2)),
        *(Dense(8, 2, momentum), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)),
    )


def double(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(inputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)),
        *(nn.Conv2d(outputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)),
    )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = double(3, 4), double(4, 8), double(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.up2, self.up1 = double(16, 4), double(8, 4)
        self.last = nn.Conv2d(4, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        bottom = F.dropout2d(self.bottom(F.max_pool2d(second, 2)), 0.3, self.training)
        out = self.up2(torch.cat([self.up(bottom), second], 1))
        out = F.interpolate(out, scale_factor=2, mode="bilinear", align_corners=False)
        return self.last(self.up1(torch.cat([out, first], 1))).mean((2, 3))


class SegNet(nn.Module):
    """Goes back up by the places where the largest were."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = double(3, 8), double(8, 8)
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.unpool = nn.MaxUnpool2d(2)
        self.last = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        down, places = self.pool(self.down(x))
        return self.last(self.up(self.unpool(F.relu_(down), places))).mean((2, 3))


def norms() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 1, 1), nn.GroupNorm(2, 8), nn.LeakyReLU(0.1, inplace=True)),
        *(nn.Conv2d(8, 8, 3, 1, 1), nn.InstanceNorm2d(8, affine=True), nn.Dropout2d(0.3)),
        *(nn.ELU(inplace=True), nn.Conv2d(8, 8, 3, 1, 1)),
        *(nn.InstanceNorm2d(8, track_running_stats=True), nn.PReLU(), nn.LocalResponseNorm(3)),
        *(nn.RReLU(inplace=True), nn.AlphaDropout(0.2), nn.AdaptiveMaxPool2d(2), nn.Flatten()),
        *(nn.LayerNorm(32), nn.RMSNorm(32), nn.FeatureAlphaDropout(0.2), nn.Linear(32, 5)),
    )


def normed_weights() -> nn.Module:
    """Weights that are computed, one of them with a state that every forward moves on."""
    parametrizations = nn.utils.parametrizations
    return nn.Sequential(
        *(parametrizations.spectral_norm(nn.Conv2d(3, 8, 3)), nn.ReLU(inplace=True)),
        *(parametrizations.weight_norm(nn.Conv2d(8, 8, 3)), nn.ReLU(inplace=True)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        parametrizations.spectral_norm(nn.Linear(8, 5)),
    )


class Shift(nn.Module):
    """Writes to parts of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 8, 3, 1, 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        out = torch.zeros_like(x)
        out[:-1, :2] = x[1:, :2].exp()
        out[1:, 2:4] = x[:-1, 2:4].tanh()
        out[:, 4:] = x[:, 4:]
        out[:, ::2].mul_(2).add_(out[:, 1::2])
        out[out > 0.9] = 0.1
        return self.last((out * out).amax((2, 3)))


class Selection(nn.Module):
    """Goes on with those values alone that are large."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        chosen = x.movedim(1, -1)[x.amax(1) > 1]
        return self.last(x.mean((2, 3))) + chosen.exp().mean()


class Stochastic(nn.Module):
    """Leaves out blocks: in Python, by a number it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(Residual(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if torch.rand(()) < 0.5:
                x = block(x)
        return self.last(x.mean((2, 3)))


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(inplace=True))
        self.mean, self.spread = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)
        self.decode, self.last = nn.ConvTranspose2d(4, 3, 2, 2), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encode(x)
        mean, spread = self.mean(hidden), self.spread(hidden)
        drawn = torch.distributions.Normal(mean, spread.exp()).rsample()
        error = (self.decode(drawn) - x).square().mean()
        return self.last(drawn.mean((2, 3))) + error


class Codebook(nn.Module):
    """Puts the nearest of its words for each vector, and moves the words, which are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3, 2), nn.Linear(4, 5)
        self.register_buffer("words", torch.randn(6, 4))
        self.register_buffer("counts", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.conv(x).movedim(1, -1)
        flat = vectors.reshape(-1, 4)
        nearest = torch.cdist(flat, self.words).argmin(1)
        with torch.no_grad():
            chosen = F.one_hot(nearest, 6).float()
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.words.lerp_(chosen.t() @ flat / self.counts[:, None], 0.1)
        words = self.words[nearest].view_as(vectors)
        through = vectors + (words - vectors).detach()
        return self.last(through.mean((1, 2))) + (vectors - words.detach()).square().mean()


class Queue(nn.Module):
    """Compares with what it was called with before, and remembers what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 8, 3, 2), nn.Linear(12, 5)
        self.register_buffer("queue", torch.randn(12, 8))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        keys = F.normalize(self.conv(x).mean((2, 3)))
        out = self.last(keys @ self.queue.clone().t())
        with torch.no_grad():
            places = (self.place + torch.arange(len(keys))) % 12
            self.queue[places] = keys
            self.place.add_(len(keys)).remainder_(12)
        return out


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * s * (1 + x * (1 - s))


class Custom(nn.Module):
    """A function with a backward of its own, and a Fourier transform."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5)
        self.filter = nn.Parameter(torch.randn(8, 1, 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        x = Swish.apply(self.norm(self.conv(x)))
        x = torch.fft.irfft2(torch.fft.rfft2(x) * self.filter, s=x.shape[-2:])
        return self.last(Swish.apply(x).mean((2, 3)))


class Forces(nn.Module):
    """Takes a gradient in its forward, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
        self.last = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(x, 3)[:, 0].flatten(1).requires_grad_()
        energy = self.energy(x).sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.last(slope) + energy


class Graph(nn.Module):
    """Messages along edges, and an embedding that keeps its rows short by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, max_norm=1.0)
        self.message, self.last = nn.Linear(16, 8), nn.Linear(8, 5)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 1], [1, 2, 3, 0, 3]]))

    def forward(self, x: Tensor) -> Tensor:
        nodes = self.embed(x.flatten(1)[:, :4].mul(5).long().abs().remainder(20)).flatten(0, 1)
        source, target = self.edges
        for _ in range(2):
            pairs = torch.cat([nodes[source], nodes[target]], -1)
            new = torch.zeros_like(nodes).index_add_(0, target, self.message(pairs).relu_())
            new.scatter_reduce_(0, target[:, None].expand(-1, 8), nodes[source], "amax")
            nodes = nodes + F.dropout(new, 0.1, self.training)
        return self.last(nodes.view(len(x), 4, 8).mean(1))


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(6, 8, 3, 2, 1), nn.BatchNorm1d(8)
        self.lstm = nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.gru = nn.GRU(12, 8, 2, batch_first=True, dropout=0.2)
        self.cell, self.last = nn.GRUCell(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardtanh_(self.norm(self.conv(x.flatten(2)[..., :24].repeat(1, 2, 1))))
        out, _ = self.gru(self.lstm(x.transpose(1, 2))[0])
        hidden = out.new_zeros(len(out), 8)
        for step in out.unbind(1):
            hidden = self.cell(step, hidden)
        return self.last(hidden)


class Packed(nn.Module):
    """Sequences of unequal length."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 6, 2, batch_first=True, dropout=0.2), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)[:, :24].reshape(-1, 6, 4)
        lengths = torch.arange(len(x), 0, -1).clamp_(max=6)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        out, lengths = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.last(out[torch.arange(len(x)), lengths - 1])


class Translator(nn.Module):
    """torch's own transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(
            *(16, 2, 2, 2, 32), dropout=0.1, batch_first=True, activation="gelu"
        )
        self.last = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2)[..., :48].reshape(len(x), 9, 16)
        mask = nn.Transformer.generate_square_subsequent_mask(9)
        return self.last(self.body(x, x.flip(1), tgt_mask=mask, tgt_is_causal=True).mean(1))


def images(is_other: bool) -> Batch:
    size = (2, 3, 16, 8) if is_other else (4, 3, 8, 8)
    return {"input": torch.randn(size), "labels": torch.randint(5, (size[0],))}


def channels_last(is_other: bool) -> Batch:
    batch = images(is_other)
    return {**batch, "input": batch["input"].to(memory_format=torch.channels_last)}


class Classified(nn.Module):
    """A network and its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(input), labels, label_smoothing=0.1)


def network(make: Callable[[], nn.Module], batch: Any = images, **rest: Any) -> Case:
    return Case(lambda: Classified(make()), batch, lambda loss: loss, **rest)


NETWORKS = {
    "resnet": network(resnet),
    "resnet-channels-last": network(
        lambda: resnet().to(memory_format=torch.channels_last), channels_last
    ),
    "resnet-autocast": network(resnet, autocast=True),
    "resnet-frozen": network(frozen_resnet),
    "mobilenet": network(mobilenet),
    "densenet": network(densenet),
    "densenet-averaging": network(
        lambda: densenet(None), differs="BatchNorm's factor is another number at every call"
    ),
    "unet": network(UNet),
    "segnet": network(SegNet),
    "norms": network(norms),
    "normed-weights": network(normed_weights),
    "shift": network(Shift),
    "selection": network(Selection, differs="a mask chooses how many values it goes on with"),
    "stochastic-depth": network(Stochastic, differs="draws which blocks it runs"),
    "vae": network(Vae),
    "codebook": network(Codebook),
    "queue": network(Queue),
    "custom-function": network(Custom),
    "forces": network(Forces),
    "graph": network(Graph),
    "speech": network(Speech),
    "speech-packed": network(Packed),
    "translator": network(Translator),
    "translator-autocast": network(Translator, autocast=True),
}


USUAL_NETWORKS = (
    *("resnet", "unet", "densenet-averaging", "selection", "stochastic-depth"),
    *("vae", "custom-function", "forces", "speech-packed", "translator-autocast"),
)


@functools.cache
def plain_network(name: str) -> list[Any]:
    return train(NETWORKS[name], plain)[0]


@KEEPING
@pytest.mark.parametrize("name", sampled(NETWORKS, usual=USUAL_NETWORKS))
def test_network(name: str, keep: Any) -> None:
    assert_trains_alike(NETWORKS[name], plain_network(name), keep)


# --- other ways to train --------------------------------------------------------------------------


class Trainer:
    """Calls a model, and writes down what comes of it."""

    def __init__(self, case: Case, wrap: Wrap) -> None:
        torch.manual_seed(0)
        self.case = case
        self.model = wrap(case.make().train())
        self.seen: list[Any] = []

    def loss(self, seed: int, **changes: Any) -> Tensor:
        torch.manual_seed(seed)
        out = self.model(**self.case.batch(False) | changes)
        return self.case.loss(out)

    def note(self, *values: Any) -> None:
        gradients = {
            name: None if p.grad is None else p.grad.clone()
            for name, p in self.model.named_parameters()
        }
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        self.seen.append((*values, gradients, buffers))

    def step(self, seed: int, **changes: Any) -> None:
        loss = self.loss(seed, **changes)
        self.model.zero_grad()
        loss.backward()
        self.note(loss.detach())


def gathering(trainer: Trainer) -> None:
    """Several forwards before their backwards, which come in another order."""
    trainer.step(0)
    losses = [trainer.loss(seed) for seed in range(1, 4)]
    for loss in losses[1], losses[2], losses[0]:
        loss.backward()
        trainer.note(loss.detach())


def repeating(trainer: Trainer) -> None:
    """Several backwards of one forward, some through a part of it."""
    for seed in range(3):
        loss = trainer.loss(seed)
        loss.backward(retain_graph=True)
        trainer.note()
        some = [p for p in trainer.model.parameters() if p.requires_grad][::3]
        trainer.note(torch.autograd.grad(loss, some, retain_graph=True, allow_unused=True))
        loss.backward()
        trainer.note()


def evaluating(trainer: Trainer) -> None:
    """Evaluation in between, with grad and without."""
    for seed in range(3):
        trainer.step(seed)
        trainer.model.eval()
        trainer.step(seed)
        with torch.no_grad():
            trainer.note(trainer.loss(seed))
        trainer.model.train()


def dropping(trainer: Trainer) -> None:
    """Forwards whose backward never comes."""
    for seed in range(4):
        loss = trainer.loss(seed)
        if seed % 2:
            loss.backward()
        trainer.note(loss.detach())


def tinkering(trainer: Trainer) -> None:
    """The model is changed between its calls."""
    model = trainer.model
    trainer.step(0)
    trainer.step(1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.4
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    trainer.step(2)
    trainer.step(3)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    model.get_parameter(names[0]).requires_grad_(False)
    trainer.step(4)
    trainer.step(5)
    owner, _, name = names[-1].rpartition(".")
    new = nn.Parameter(torch.randn_like(model.get_parameter(names[-1])))
    setattr(model.get_submodule(owner), name, new)
    trainer.step(6)
    trainer.step(7)
    model.load_state_dict({name: value + 0.01 for name, value in model.state_dict().items()})
    trainer.step(8)


def widening(trainer: Trainer) -> None:
    """Another precision halfway."""
    trainer.step(0)
    trainer.step(1)
    with torch.autocast("cpu", torch.bfloat16):
        trainer.step(2)
        trainer.step(3)
    trainer.model.bfloat16()
    changes = {
        name: value.bfloat16()
        for name, value in trainer.case.batch(False).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    trainer.step(4, **changes)
    trainer.step(5, **changes)


def failing(trainer: Trainer) -> None:
    """A call that raises halfway."""
    trainer.step(0)
    trainer.step(1)
    last = [m for m in trainer.model.modules() if isinstance(m, nn.Linear)][-1]
    for seed in 2, 3:
        handle = last.register_forward_pre_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            trainer.loss(seed)
        handle.remove()
        trainer.step(seed)


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def hooking(trainer: Trainer) -> None:
    """Hooks that look at activations, and at gradients, and change them."""
    linears = [m for m in trainer.model.modules() if isinstance(m, nn.Linear)]
    seen: list[Tensor] = []
    trainer.step(0)
    linears[-1].register_forward_hook(lambda _m, _args, out: seen.append(out.detach().mean()))
    linears[-1].register_forward_hook(lambda _m, _args, out: out * 2)
    linears[-1].register_full_backward_hook(lambda _m, _into, out: seen.append(out[0].mean()))
    for seed in range(1, 4):
        trainer.step(seed)
    trainer.note(seen)


WAYS = [gathering, repeating, evaluating, dropping, tinkering, widening, failing, hooking]


def case_of(name: str) -> Case:
    return NETWORKS[name] if name in NETWORKS else architecture(name)


def assert_alike(case: Case, way: Callable[[Trainer], None], wrap: Wrap) -> None:
    expected, actual = Trainer(case, plain), Trainer(case, wrap)
    way(expected)
    way(actual)
    assert_identical(actual.seen, expected.seen)


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        pytest.param("olmoe", None, id="olmoe", marks=pytest.mark.slow),
        pytest.param("resnet", None, id="resnet"),
        pytest.param("speech", KEEP, id="speech", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_way_of_training(way: Callable[[Trainer], None], name: str, keep: Any) -> None:
    assert_alike(case_of(name), way, replayed(keep))


def padding(trainer: Trainer) -> None:
    """Now a row is padded, at one end or the other, now none: the model looks, and branches."""
    for seed, place in enumerate([None, None, 0, -1, -1, None, -1]):
        mask = torch.ones(2, 12, dtype=torch.long)
        if place is not None:
            mask[0, place] = 0
        trainer.step(seed, attention_mask=mask)


def remembering(trainer: Trainer) -> None:
    """The second call goes on from keys and values that the first has made."""
    for seed in range(3):
        torch.manual_seed(seed)
        tokens = torch.randint(1, 64, (2, 12))
        first = trainer.model(input_ids=tokens[:, :6], use_cache=True)
        cache = first.past_key_values
        loss = trainer.loss(
            seed, input_ids=tokens[:, 6:], labels=tokens[:, 6:], past_key_values=cache
        )
        trainer.model.zero_grad()
        (loss + first.logits.mean()).backward()
        trainer.note(loss.detach())


def looking(trainer: Trainer) -> None:
    """The loss is of everything that the model returns."""
    for seed in range(3):
        torch.manual_seed(seed)
        out = trainer.model(**trainer.case.batch(False), output_hidden_states=True)
        trainer.model.zero_grad()
        (out.logits.square().mean() + sum(h.sin().mean() for h in out.hidden_states)).backward()
        trainer.note([h.detach() for h in out.hidden_states])


@pytest.mark.parametrize(
    ("way", "name"), [(padding, "llama"), (remembering, "llama-kernel"), (looking, "llama")]
)
def test_way_of_using_a_language_model(way: Callable[[Trainer], None], name: str) -> None:
    assert_alike(architecture(name), way, replayed())


def checkpointing(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable()
    return model


def test_a_model_that_checkpoints_by_itself() -> None:
    """By torch's function, in its own forward."""
    steps, recordings = train(architecture("llama"), lambda m: replayed()(checkpointing(m)))
    expected, _ = train(architecture("llama"), checkpointing)
    assert_identical(steps, expected)
    assert recordings[2][0] is recordings[0][0]


@pytest.mark.parametrize(
    ("inner", "outer"),
    [("replay", None), ("replay", "replay"), ("replay", "rerun"), ("rerun", "replay")],
)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "LlamaDecoderLayer"),
        pytest.param("bart", "BartDecoderLayer", marks=pytest.mark.slow),
        ("unet", "Sequential"),
    ],
)
def test_blocks_as_regions(name: str, kind: str, inner: str, outer: str | None) -> None:
    def wrap(model: nn.Module) -> nn.Module:
        for block in [m for m in model.modules() if type(m).__name__ == kind]:
            recollect.checkpointed(block, engine=inner)
        return model if outer is None else recollect.checkpointed(model, engine=outer)

    expected = plain_network(name) if name in NETWORKS else plain_architecture(name)
    assert_identical(train(case_of(name), wrap)[0], expected)
