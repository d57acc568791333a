"""Several processes are one: losses, statistics, gradients and state of a batch spread over gloo processes."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from simcse_weince import InfoNCE, ReleasedWeince, Weince
from simcse_weince.criterion import DIRECTIONS
from simcse_weince.gather import Shard
from tests.distributed import run_distributed

SPLITS = [(64, 64), (32, 32, 32, 32), (40, 88), (60, 5, 31, 32)]


def features(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Inputs (columns, rows, 16) of a linear encoder, in which rows are near one another."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(1, rows, 16, generator=generator, dtype=torch.float64)
    return centre + 0.6 * torch.randn(columns, rows, 16, generator=generator, dtype=torch.float64)


def linear_encoder() -> nn.Linear:
    encoder = nn.Linear(16, 8, bias=False, dtype=torch.float64)
    torch.nn.init.orthogonal_(encoder.weight, generator=torch.Generator().manual_seed(1))
    return encoder


def cut(whole: torch.Tensor, sizes: tuple[int, ...], rank: int, dim: int) -> torch.Tensor:
    return whole.split(sizes, dim=dim)[rank]


def train(rank, criterion, inputs, sizes, keep=None, dtype=torch.float64):
    """Loss, gradient after DDP's mean, statistics of this rank's anchors, `stats()` and buffers."""
    encoder, criterion = linear_encoder().to(dtype), copy.deepcopy(criterion)
    model = DistributedDataParallel(encoder) if len(sizes) > 1 else encoder
    inputs = cut(inputs, sizes, rank, 1).to(dtype)
    keep = None if keep is None else cut(keep, sizes, rank, 0)
    shard = Shard.of(len(inputs[0]), torch.device("cpu")) if len(sizes) > 1 else None
    embeddings = model(inputs).unbind(0)
    loss = criterion(*embeddings, keep=keep, shard=shard)
    loss.backward()
    tail = None
    if isinstance(criterion, Weince):
        tail = criterion.anchor_statistics(*(e.detach() for e in embeddings), keep=keep, shard=shard)
    return loss.detach(), encoder.weight.grad, tail, criterion.stats(), dict(criterion.state_dict())


@pytest.mark.parametrize("sizes", SPLITS)
@pytest.mark.parametrize(
    ("criterion", "columns", "masked"),
    [
        (InfoNCE(), 2, False),
        (InfoNCE(layout="both_views"), 2, False),
        (Weince(), 2, False),
        (Weince(shape="shrunk", evidence="likelihood"), 3, True),
        (Weince(chunk_size=7), 4, True),
        (Weince(layout="both_views"), 2, False),
        (Weince(directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"), 3, False),
        (Weince(directions=DIRECTIONS, shape="shrunk", chunk_size=11), 3, False),
        (Weince(own_negatives_only=True, min_tail_size=4), 14, False),
        (ReleasedWeince(0.05, layout="cross_view"), 3, False),
        (ReleasedWeince(0.1, chunk_size=9), 2, False),
    ],
    ids=lambda value: f"{type(value).__name__}-{value.layout}" if isinstance(value, InfoNCE) else None,
)
def test_dd02_dd03_processes_are_one_batch(criterion, columns, masked, sizes):
    inputs = features(128, columns)
    keep = torch.rand(128, 128 * (columns - 1), generator=torch.Generator().manual_seed(3)) > 0.3 if masked else None
    loss, gradient, tail, stats, state = train(0, criterion, inputs, (128,), keep)
    ranks = run_distributed(len(sizes), train, criterion, inputs, sizes, keep)
    assert sum(rank[0] for rank in ranks).item() / len(sizes) == pytest.approx(loss.item(), abs=1e-9)
    for _, found, _, found_stats, found_state in ranks:
        torch.testing.assert_close(found, gradient, rtol=1e-7, atol=1e-10)
        assert found_stats == pytest.approx(stats, rel=1e-5, abs=1e-6) and found_stats == ranks[0][3]
        torch.testing.assert_close(found_state, state)
    if tail is None:
        return
    views = 2 if criterion.layout == "both_views" else 1
    for name in ("blend", "shape", "shape_raw", "hardness", "evidence", "r_squared"):
        halves = [getattr(rank[2], name).chunk(views) for rank in ranks]
        together = torch.cat([half[view] for view in range(views) for half in halves])
        torch.testing.assert_close(together, getattr(tail, name), rtol=1e-7, atol=1e-7)
    for rank in ranks:
        torch.testing.assert_close(rank[2].pivot, tail.pivot)
        assert rank[2].tail_points == tail.tail_points


@pytest.mark.parametrize("columns", [2, 3, 4])
def test_compliance_11_dd02_float32_loss_is_the_same_to_1e_6(columns):
    inputs = features(128, columns)
    loss, gradient, *_ = train(0, Weince(), inputs, (128,), dtype=torch.float32)
    for sizes in SPLITS[:2]:
        ranks = run_distributed(len(sizes), train, Weince(), inputs, sizes, None, torch.float32)
        assert sum(rank[0] for rank in ranks).item() / len(sizes) == pytest.approx(loss.item(), abs=1e-6)
        for _, found, *_ in ranks:
            assert torch.cosine_similarity(found.flatten(), gradient.flatten(), dim=0) > 1 - 1e-6
            assert found.norm().item() == pytest.approx(gradient.norm().item(), rel=1e-5)


@pytest.mark.parametrize("criterion", [Weince(), Weince(layout="both_views", shape="shrunk")])
def test_an_uneven_last_batch_of_one(criterion):
    inputs = features(5, 2)
    loss, gradient, *_ = train(0, criterion, inputs, (5,))
    ranks = run_distributed(2, train, criterion, inputs, (4, 1))
    assert sum(rank[0] for rank in ranks).item() / 2 == pytest.approx(loss.item(), abs=1e-9)
    torch.testing.assert_close([rank[1] for rank in ranks], [gradient] * 2)


def test_dd02_three_processes_and_what_a_local_loss_would_give():
    """The comparison notices a gather without gradient, whose gradient has another scale and direction."""
    inputs, sizes = features(90, 2), (30, 30, 30)
    _, gradient, *_ = train(0, InfoNCE(), inputs, (90,))
    for rank in run_distributed(3, train, InfoNCE(), inputs, sizes):
        torch.testing.assert_close(rank[1], gradient, rtol=1e-7, atol=1e-10)
    for found in run_distributed(3, without_gradient_of_others, inputs, sizes):
        assert (found - gradient).norm() > 0.05 * gradient.norm()


def without_gradient_of_others(rank, inputs, sizes):
    encoder = linear_encoder()
    first, second = DistributedDataParallel(encoder)(cut(inputs, sizes, rank, 1)).unbind(0)
    gathered = [torch.empty_like(second) for _ in sizes]
    dist.all_gather(gathered, second.detach())
    others = torch.cat([other for index, other in enumerate(gathered) if index != rank])
    cosine = nn.functional.normalize(first) @ nn.functional.normalize(torch.cat([second, others])).T
    nn.functional.cross_entropy(cosine / 0.05, torch.arange(len(first))).backward()
    return encoder.weight.grad


def shard_of(rank, sizes, *alike):
    shard = Shard.of(sizes[rank], torch.device("cpu"), *alike)
    local = torch.arange(2 * sizes[rank]) + 100 * rank
    gathered = shard.all_gather(local)
    assert torch.equal(shard.own(gathered), local)
    return shard, shard.total, shard.offset, gathered.tolist()


def test_rows_arrive_in_rank_order_with_unequal_sizes():
    answers = run_distributed(3, shard_of, (2, 1, 3))
    assert [answer[0] for answer in answers] == [Shard((2, 1, 3), rank) for rank in range(3)]
    assert [answer[1:3] for answer in answers] == [(6, 0), (6, 2), (6, 3)]
    expected = [0, 1, 2, 3, 100, 101, 200, 201, 202, 203, 204, 205]
    assert all(answer[3] == expected for answer in answers)
    assert sum(answer[0].weight for answer in answers) == 3


def test_dd05_batches_of_different_kinds_are_an_error_on_every_rank():
    for function in (shard_of_other_columns, shard_without_rows):
        with pytest.raises(RuntimeError) as error:
            run_distributed(2, function)
        assert str(error.value).count("cannot gather batches of different kinds") == 2


def shard_of_other_columns(rank):
    Shard.of(4, torch.device("cpu"), 2 + rank)


def shard_without_rows(rank):
    Shard.of(rank, torch.device("cpu"))


def test_one_process_needs_no_group():
    assert Shard.of(5, torch.device("cpu"), 2) == Shard((5,))
    with pytest.raises(ValueError, match="shard"):
        Weince()(torch.randn(4, 8), torch.randn(4, 8), shard=Shard((5,)))


def three_steps(rank, sizes):
    criterion = ReleasedWeince()
    for seed in range(3):
        first, second = cut(features(80, 2, seed), sizes, rank, 1)
        criterion(first, second, shard=Shard.of(sizes[rank], torch.device("cpu")))
        with torch.no_grad():
            criterion(second, second, shard=Shard.of(sizes[rank], torch.device("cpu")))
    return criterion.state_dict()["shape_average"].item()


@pytest.mark.parametrize("sizes", [(40, 40), (10, 20, 25, 25)])
def test_dd11_running_average_is_equal_on_all_ranks(sizes):
    averages = run_distributed(len(sizes), three_steps, sizes)
    assert len(set(averages)) == 1
    assert averages[0] == pytest.approx(three_steps(0, (80,)), rel=1e-6) and averages[0] != 4.0


def test_dd11_local_statistics_would_differ():
    averages = run_distributed(2, three_local_steps, (40, 40))
    assert averages[0] != averages[1]


def three_local_steps(rank, sizes):
    criterion = ReleasedWeince()
    for seed in range(3):
        criterion(*cut(features(80, 2, seed), sizes, rank, 1))
    return criterion.shape_average.item()
