"""Plans on a CUDA device: the budget is what `torch.cuda.max_memory_allocated` says."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recollect
from recollect.planning.planner import Planner
from recollect.planning.simulate import simulate, simulate_plain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

WIDTH, TOKENS = 512, 512


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 3, 8, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, depth=8, dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss(y):
    return y.float().square().mean()


@pytest.fixture(params=[0.0, 0.1], ids=["plain", "dropout"])
def made(request):
    torch.manual_seed(0)
    model = Decoder(dropout=request.param).cuda().bfloat16()
    x = torch.randn(16, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    return model, x


def run(model, x, seed=3):
    torch.manual_seed(seed)
    loss(model(x)).backward()


def peak(model, x):
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run(model, x)
    found = torch.cuda.max_memory_allocated()
    model.zero_grad()
    return found


@pytest.mark.parametrize("offload", [False, "auto"], ids=["here", "offload"])
def test_the_peak_obeys_ten_budgets(made, offload):
    model, x = made
    frontier = recollect.frontier(model, x, loss=loss, offload=offload)
    low, high = frontier.least, frontier.plain_peak
    assert low < 0.7 * high
    last = float("inf")
    for n in range(10):
        budget = low + (high - low) * n // 9
        plan = frontier.plan_for(budget)
        with plan.applied(model):
            found = [peak(model, x) for _ in range(3)]
        assert max(found) <= budget
        assert plan.predicted_peak == pytest.approx(max(found), rel=0.03)
        assert plan.predicted_time <= last
        last = plan.predicted_time


@pytest.mark.parametrize("offload", [False, "auto"], ids=["here", "offload"])
def test_gradients_are_those_of_plain(made, offload, monkeypatch):
    model, x = made
    # Attention's usual backward adds up in any order.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        twin = copy.deepcopy(model)
        run(twin, x)
        plan = recollect.plan(model, x, 0.6, loss=loss, offload=offload)
        plan.apply(model)
        for _ in range(3):
            model.zero_grad()
            run(model, x)
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(ours.grad, theirs.grad)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_simulator_knows_what_offload_takes(made):
    model, x = made
    planner = Planner(model, x, loss)
    plain = simulate_plain(planner.graph).peak
    assert plain == pytest.approx(planner.plain_peak, rel=0.001)
    sent = [s for s in planner.solver.frontier() if s.schedule.away]
    assert sent
    for solution in sent[:: max(1, len(sent) // 4)]:
        simulated = simulate(planner.graph, solution.schedule).peak
        assert planner._measured(solution.schedule) == pytest.approx(simulated, rel=0.03)


def test_an_optimizer_counts_and_is_left_alone(made):
    model, x = made
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())
    plan = recollect.plan(model, x, 0.8, loss=loss, optimizer=optimizer)
    assert not optimizer.state
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    plan.apply(model)
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        run(model, x)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.cuda.max_memory_allocated() <= plan.budget


def test_a_model_that_does_not_fit_is_predicted_and_then_fits():
    torch.manual_seed(0)
    model = Decoder(depth=12).cuda().bfloat16()
    x = torch.randn(16, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    base = torch.cuda.memory_allocated()
    free, total = torch.cuda.mem_get_info()
    plain = recollect.frontier(model, x, loss=loss).plain_peak
    torch.cuda.empty_cache()
    limit = base + (plain - base) * 2 // 3
    torch.cuda.set_per_process_memory_fraction(limit * 1.15 / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            run(model, torch.randn(24, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16))
        model.zero_grad()
        torch.cuda.empty_cache()
        large = torch.randn(24, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
        plan = recollect.plan(model, large, limit, loss=loss)
        assert plan.plain_peak > limit
        plan.apply(model)
        for _ in range(3):
            assert peak(model, large) <= limit
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert free <= total
