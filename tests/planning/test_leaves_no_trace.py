"""`plan`, `fit`, `frontier` and `explain` leave everything as it was, or say what they cannot."""

from __future__ import annotations

import copy
import ctypes
import io
import itertools
import os
import queue
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import recollect
from recollect.planning.recording import record
from recollect.planning.recording.record import profile_step
from recollect.planning.recording.step import TrainingStep
from recollect.state import snapshot
from tests._support import assert_identical, sampled
from tests.planning._habits import HABITS, TRAINING, Net, Trained

pytestmark = [
    pytest.mark.usefixtures("no_bound"),
    # What forward makes once, such as a table, is made again by the first step under a plan.
    pytest.mark.filterwarnings("ignore:this step is not the one:recollect.PlanWarning"),
]

#: How many random trainings are tried.
CASES = int(os.environ.get("RECOLLECT_CASES", "12"))
STEPS = 3


def built(names: list[str], seed: int = 0, optimizer: str | None = "adam") -> Trained:
    """A training with some habits, the same for the same arguments."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    dice = random.Random(seed)
    trained = Trained(Net(dice.choice([16, 24]), dice.choice([2, 3])))
    if optimizer == "adam":
        trained.optimizer = torch.optim.Adam(trained.model.parameters(), lr=0.01)
    elif optimizer == "sgd":
        parameters = trained.model.parameters()
        trained.optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    for name in names:
        HABITS[name](trained)
    return trained


def batch_of(trained: Trained) -> Tensor:
    return torch.randn(128, trained.model.norm.normalized_shape[0])


def loss(out: Tensor) -> Tensor:
    return out.float().square().mean()


def train(trained: Trained, steps: int = STEPS) -> list[Tensor]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        value = loss(trained.model(batch_of(trained)))
        value.backward()
        if trained.optimizer is not None:
            trained.optimizer.step()
            trained.optimizer.zero_grad()
        losses.append(value.detach())
    return losses


def state(trained: Trained) -> Any:
    """All there is to see."""
    model, optimizer = trained.model, trained.optimizer
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found = {
        "tensors": tensors,
        "gradients": [p.grad for p in model.parameters()],
        "versions": [tensor._version for _, tensor in tensors],
        "memory": [tensor.data_ptr() for _, tensor in tensors],
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "step": None if optimizer is None else sorted(vars(optimizer)),
        "watched": {name: look() for name, look in trained.watched.items()},
        "torch": torch.get_rng_state(),
        "random": random.getstate(),
        "numpy": [str(part) for part in np.random.get_state()],
        "modes": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
        "dtype": torch.get_default_dtype(),
    }
    return copy.deepcopy(found)


def compared(trained: Trained) -> Any:
    """What must be the same in two trainings."""
    found = state(trained)
    return {key: found[key] for key in found if key not in ("versions", "memory")}


def looked_at(trained: Trained, x: Tensor, check: Callable[[str], None]) -> recollect.Plan:
    """Call everything that runs a step or a forward, with a ``check`` after each."""
    options: Any = {"loss": loss, "optimizer": trained.optimizer}
    frontier = recollect.frontier(trained.model, x, **options)
    check("frontier")
    least = frontier.least
    check("Frontier.least")
    # Blocks of a device's allocator are larger. And what a habit leaves in a cycle of references
    # may be there in one recording, and collected before the next.
    spare = 1 << 16 if x.is_cuda else 1 << 10
    budget = (least + frontier.plain_peak) // 2 + spare
    plan = recollect.plan(trained.model, x, budget, **options)
    check("plan")
    recollect.explain(trained.model, x)
    check("explain")
    return plan


def assert_no_trace(
    names: list[str], seed: int = 0, optimizer: str | None = "adam", steps_before: int = 1
) -> None:
    """Nothing changes, and training goes on as if nothing had been."""
    planned = built(names, seed, optimizer)
    try:
        train(planned, steps_before)
        x = batch_of(planned)
        before = state(planned)
        plan = looked_at(planned, x, lambda after: assert_same(state(planned), before, after))
        plan.apply(planned.model)
        losses = train(planned)
        after = compared(planned)
    finally:
        for cleanup in planned.cleanups:
            cleanup()
    twin = built(names, seed, optimizer)
    try:
        train(twin, steps_before)
        batch_of(twin)
        assert_same(losses, train(twin), "losses")
        assert_same(after, compared(twin), "training")
    finally:
        for cleanup in twin.cleanups:
            cleanup()


def assert_same(actual: Any, expected: Any, what: str) -> None:
    try:
        assert_identical(actual, expected)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


@pytest.mark.parametrize("steps_before", sampled([0, 2], usual=[2]))
@pytest.mark.parametrize("name", HABITS)
def test_one_habit(name: str, steps_before: int) -> None:
    assert_no_trace([name], steps_before=steps_before)


@pytest.mark.parametrize("seed", range(CASES))
def test_random_habits(seed: int) -> None:
    """``RECOLLECT_CASES=2000 pytest -k random_habits`` tries as many."""
    dice = random.Random(seed)
    others = [name for name in HABITS if name not in TRAINING]
    names = dice.sample(others, dice.randint(1, 6)) + dice.sample(TRAINING, dice.randint(0, 1))
    dice.shuffle(names)
    names.sort(key=lambda name: name.startswith("average"))  # of all parameters that there are
    optimizer = dice.choice(["adam", "sgd", None])
    assert_no_trace(names, seed, optimizer, steps_before=dice.randint(0, 3))


#: Some that write to tensors, in each way.
WRITERS = [
    "adam_in_backward",
    "descent_by_hand_in_backward",
    "weights_clipped_in_a_hook",
    "weights_given_other_memory",
    "average_of_torch",
    "large_tensor_attribute",
    "closures_of_hooks",
    "statistics",
]


@pytest.mark.parametrize("name", WRITERS)
def test_large_tensors_are_copied_when_they_are_written_to(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "LARGE", 0)
    assert_no_trace([name], optimizer=None)


@pytest.mark.parametrize("name", WRITERS)
def test_a_model_that_does_not_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step runs under a plan alone: nobody has seen what it writes to."""

    def does_not_fit(step: Any, link: Any) -> Any:
        step.run()
        raise torch.OutOfMemoryError

    planned = built([name])
    x = batch_of(planned)
    before = state(planned)
    monkeypatch.setattr(record, "profile_step", does_not_fit)
    with pytest.MonkeyPatch.context() as patch:
        # On tensors without values most habits do not run: the step is predicted without them.
        patch.setattr(record, "predict_step", lambda *_: _profile_of_twin(name))
        frontier = recollect.frontier(planned.model, x, loss=loss, optimizer=planned.optimizer)
    assert_same(state(planned), before, "frontier")
    assert frontier.least
    assert_same(state(planned), before, "least")


def _profile_of_twin(name: str) -> Any:
    with torch.random.fork_rng():
        twin = built([name])
        step = TrainingStep(twin.model, (batch_of(twin),), {}, loss, twin.optimizer)
        with step.undone(logs_writes=True):
            return profile_step(step)


def test_parameters_that_nobody_writes_to_are_not_copied() -> None:
    trained = built([], optimizer=None)
    x = batch_of(trained)
    step = TrainingStep(trained.model, (x,), {}, loss, None)
    with step.undone(logs_writes=True):
        step.run_first()
        storages = step._snapshot._tensor_snapshot._storages
    assert [key for key, memory in storages.items() if memory.copy is not None] == [x.data_ptr()]


def test_what_only_ops_can_find_is_put_back() -> None:
    """A tensor in a queue, which is not looked into."""
    trained = built([], optimizer=None)
    hidden: queue.Queue[Tensor] = queue.Queue()
    total = torch.zeros(3)
    hidden.put(total)
    trained.in_forward(lambda x: hidden.queue[0].add_(x.detach().mean()))
    total.add_(1)
    looked_at(trained, batch_of(trained), lambda _: None)
    assert_identical(total, torch.ones(3))
    assert total._version == 1


def test_gradients_that_are_there_stay() -> None:
    trained = built([])
    loss(trained.model(batch_of(trained))).backward()
    given = [p.grad for p in trained.model.parameters()]
    values = [g.clone() for g in given]
    looked_at(trained, batch_of(trained), lambda _: None)
    assert all(p.grad is g for p, g in zip(trained.model.parameters(), given, strict=True))
    assert_identical(given, values)


def test_a_graph_from_before_can_go_backward() -> None:
    trained = built(["adam_in_backward", "average_by_hand", "statistics"])
    value = loss(trained.model(batch_of(trained)))
    looked_at(trained, batch_of(trained), lambda _: None)
    value.backward()


def test_attributes_of_the_model_are_those_from_before() -> None:
    trained = built([])
    before = {name: dict(vars(each)) for name, each in trained.model.named_modules()}
    looked_at(trained, batch_of(trained), lambda _: None)
    after = {name: dict(vars(each)) for name, each in trained.model.named_modules()}
    assert after == before


def test_under_inference_mode() -> None:
    trained = built(["adam_in_backward", "closures_of_hooks", "statistics"])
    x = batch_of(trained)
    before = state(trained)
    with torch.inference_mode():
        looked_at(trained, x, lambda _: None)
    assert_same(state(trained), before, "inference mode")


def test_gradients_freed_in_backward_are_not_counted() -> None:
    """The hooks run: a step that frees each gradient as it comes takes less memory."""
    plain, freeing = built([], optimizer=None), built(["descent_by_hand_in_backward"])
    x = batch_of(plain)[:2]
    peaks = [recollect.frontier(t.model, x, loss=loss).plain_peak for t in (plain, freeing)]
    weights = [p.numel() * 4 for p in plain.model.parameters()]
    assert peaks[1] < peaks[0] - max(weights)


def test_state_of_the_loss_is_put_back() -> None:
    trained, losses, total = built([], optimizer=None), [], torch.zeros(())

    def noting(out: Tensor) -> Tensor:
        losses.append(len(losses))
        total.add_(1)
        return loss(out)

    recollect.frontier(trained.model, batch_of(trained), loss=noting).plan_for(1.0)
    assert losses == []
    assert_identical(total, torch.zeros(()))


# --- when something goes wrong --------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", range(1, 9))
def test_an_exception_leaves_no_trace(fails_at: int) -> None:
    names = ["adam_in_backward", "closures_of_hooks", "autocast_around_forward", "streams"]
    trained = built(names)
    calls = io.StringIO()  # a log, which is not put back

    def fail(_: Tensor) -> None:
        calls.write(".")
        if len(calls.getvalue()) == fails_at:
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(False)
            torch.set_autocast_enabled("cpu", False)
            raise ValueError("in the midst of it")

    trained.in_forward(fail)
    x = batch_of(trained)
    before = state(trained)
    with pytest.raises(ValueError, match="in the midst of it"):
        recollect.frontier(trained.model, x, loss=loss).least  # noqa: B018 - which runs the step
    assert_same(state(trained), before, "exception")


def test_a_generator_is_not_used_up_but_named() -> None:
    trained = built([], optimizer=None)
    items = (n for n in range(100))
    x = batch_of(trained)
    hook = trained.model.blocks[0].register_forward_hook(lambda *_: next(items) and None)
    with pytest.raises(
        TypeError, match=r"model\.blocks\.0\._forward_hooks.*: items is an iterator"
    ):
        recollect.frontier(trained.model, x, loss=loss)
    assert next(items) == 0
    hook.remove()
    trained.model.items = items  # which nobody uses
    looked_at(trained, x, lambda _: None)
    assert next(trained.model.items) == 1


def test_what_no_op_wrote_to_a_parameter_is_named() -> None:
    trained = built([], optimizer=None)
    address = trained.model.blocks[1].weight.data_ptr()

    def write(_: Tensor) -> None:
        ctypes.c_float.from_address(address).value += 1

    trained.in_forward(write)
    with pytest.raises(recollect.CheckpointError, match=r"put back: model\.blocks\.1\.weight\."):
        recollect.frontier(trained.model, batch_of(trained), loss=loss)


def test_what_a_later_step_first_writes_to_is_named() -> None:
    trained = built([], optimizer=None)
    weight, calls = trained.model.blocks[0].weight, itertools.count()

    def write(_: Tensor) -> None:
        if next(calls) == 3:
            weight.data.mul_(0.5)

    trained.in_forward(write)
    with pytest.raises(recollect.CheckpointError, match=r"put back: model\.blocks\.0\.weight\."):
        recollect.frontier(trained.model, batch_of(trained), loss=loss)


def test_more_than_can_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "LIMIT", 5)
    trained = built([], optimizer=None)
    with pytest.warns(recollect.PlanWarning, match="can be reached from the model") as caught:
        recollect.frontier(trained.model, batch_of(trained), loss=loss).plan_for(1.0)
    assert [warning.filename for warning in caught] == [__file__]


def test_an_iterator_in_a_batch() -> None:
    with pytest.raises(TypeError, match="an argument is an iterator"):
        recollect.plan(Net(), ([iter([torch.ones(2, 24)])],), 0.5)


# --- libraries ------------------------------------------------------------------------------------


def _prepared() -> tuple[Trained, Any]:
    accelerate = pytest.importorskip("accelerate")
    trained = built(["closures_of_hooks"])
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    trained.model, trained.optimizer = accelerator.prepare(trained.model, trained.optimizer)
    return trained, accelerator


@pytest.mark.usefixtures("accelerate")
def test_after_prepare_of_accelerate() -> None:
    planned, _ = _prepared()
    train(planned)
    x = batch_of(planned)
    before = state(planned)
    check = lambda after: assert_same(state(planned), before, after)  # noqa: E731
    plan = looked_at(planned, x, check)
    plan.apply(planned.model)
    losses = train(planned)
    twin, _ = _prepared()
    train(twin)
    assert_same(losses, train(twin), "losses")
    assert_same(compared(planned)["tensors"], compared(twin)["tensors"], "training")


def _trained_by_trainer(folder: Path, planned: bool) -> list[Tensor]:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    tokens = torch.randint(0, 32, (8, 16))
    batch = {"input_ids": tokens[:4], "labels": tokens[:4]}
    data = [{"input_ids": each, "labels": each} for each in tokens]
    if planned:
        before = state(Trained(model))
        frontier = recollect.frontier(model, batch)
        plan = frontier.plan_for((frontier.least + frontier.plain_peak) // 2 + 64)
        assert_same(state(Trained(model)), before, "frontier")
        plan.apply(model)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=3,
        bf16=True,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    assert not torch.is_autocast_enabled("cpu")
    return [parameter.detach().clone() for parameter in model.parameters()]


# Another batch than planned (the trainer adds an argument) may be told, and other libraries frown.
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_in_half_precision(tmp_path: Path) -> None:
    assert_identical(_trained_by_trainer(tmp_path, True), _trained_by_trainer(tmp_path, False))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*TRAINING, *WRITERS])
def test_on_a_device(name: str) -> None:
    trained = built([])
    trained.model.cuda()
    trained.optimizer = torch.optim.Adam(trained.model.parameters())
    HABITS[name](trained)
    trained.model.cuda()
    x = batch_of(trained).cuda()
    before = state(trained)
    looked_at(trained, x, lambda after: assert_same(state(trained), before, after))


class _Defaults(dict[str, Any]):
    """A dict whose keys are attributes, and whatever else is asked for is None: many have one."""

    __getattr__ = dict.get


class _Loads:
    """Reads what it is about when somebody asks how large that is."""

    @property
    def nbytes(self) -> int:
        raise AssertionError("nobody was to ask")


def test_nothing_is_asked_of_what_is_looked_into() -> None:
    trained = built([])
    trained.model.options, trained.model.data = _Defaults(rate=0.1), _Loads()
    recollect.plan(trained.model, batch_of(trained), 0.9, loss=loss)
    assert trained.model.options == {"rate": 0.1}
