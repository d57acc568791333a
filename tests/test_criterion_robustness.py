"""The criteria where people have been hurt: precision, duplicates, blank rows, tiny batches, memory, device waits."""

import contextlib
import copy
import gc
import logging
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from simcse_weince import InfoNCE, ReleasedWeince, Weince
from tests.test_criterion import views

CRITERIA = [
    InfoNCE(),
    InfoNCE(layout="both_views"),
    Weince(),
    Weince(layout="both_views"),
    Weince(evidence="likelihood", shape="shrunk"),
    Weince(gate=1.0, shape=4.0),
    Weince(pivot=0.05, shape=1.0),
    ReleasedWeince(0.05),
    ReleasedWeince(layout="cross_view"),
]
every_criterion = pytest.mark.parametrize("criterion", CRITERIA, ids=lambda c: f"{type(c).__name__}-{c.layout}")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def run(criterion, first, second):
    """Loss and the gradients of both views; the criterion itself stays as it is."""
    first, second = first.detach().clone().requires_grad_(), second.detach().clone().requires_grad_()
    loss = copy.deepcopy(criterion)(first, second)
    loss.backward()
    return loss.detach(), first.grad, second.grad


@every_criterion
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_ln01_duplicate_sentence_bf16(criterion, dtype, autocast):
    first, second = views(16, 32, dtype=torch.float32)
    first[1], second[1] = first[0], second[0]
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        for pair in ((first, second), (first, first)):
            for embeddings in (pair, [view.to(dtype) for view in pair]):
                results = run(criterion, *embeddings)
                assert all(value.isfinite().all() for value in results)
                with torch.autocast("cpu", enabled=False):
                    exact = run(criterion, *(view.float() for view in embeddings))
                torch.testing.assert_close(results[0], exact[0], rtol=1e-6, atol=1e-6)


@every_criterion
@pytest.mark.parametrize("dtype", DTYPES)
def test_ln03_every_dtype(criterion, dtype):
    loss, *gradients = run(criterion, *views(16, 16, dtype=dtype))
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.isfinite() and all(g.isfinite().all() and g.dtype == dtype for g in gradients)


def test_one_float64_view_makes_the_loss_float64():
    first, second = views(16)
    assert Weince()(first.float(), second).dtype == torch.float64


@every_criterion
@pytest.mark.parametrize("dtype", DTYPES)
def test_ln04_gradient_of_a_near_duplicate_has_no_cliff(criterion, dtype, case_inputs):
    near = torch.tensor(np.load(case_inputs / "emb_near_cap.npy", allow_pickle=False))
    background = torch.randn(40, near.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    background = torch.nn.functional.normalize(background, dim=1)
    first = torch.cat([near[:1], background]).to(dtype)
    norms = []
    for other in near[1:]:
        # Row 0 has a positive at a right angle or so, and `other` among its negatives.
        second = torch.cat([background[:1], other[None], background[1:]]).to(dtype)
        loss, *gradients = run(criterion, first, second)
        assert loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients)
        norms.append(gradients[0][0].norm().item())
        # The same pair as anchor and positive.
        second = torch.cat([other[None], background]).to(dtype)
        assert all(value.isfinite().all() for value in run(criterion, first, second))
    assert max(norms) < 1e3
    # In 16 bit most of these pairs are equal; with the authors' floor of 1e-6 the gradient sinks from 1e-8 to 0.
    if dtype in (torch.float32, torch.float64) and not isinstance(criterion, ReleasedWeince):
        assert all(0.1 < one / other < 10 for one, other in zip(norms, norms[1:], strict=False))


def test_ln05_negatives_beyond_the_cap_are_at_distance_0():
    first = torch.randn(64, 768, generator=torch.Generator().manual_seed(0))
    tail = Weince(min_tail_size=10).anchor_statistics(first, first[torch.arange(64).roll(1)])
    assert (tail.hardness == 1e-6).all()
    assert all(value.isfinite().all() for value in tail[:7])


@every_criterion
@pytest.mark.parametrize("dtype", DTYPES)
def test_ln06_zero_row_has_no_direction_and_no_gradient(criterion, dtype, case_inputs):
    first = torch.tensor(np.load(case_inputs / "emb_zero_row.npy", allow_pickle=False)).to(dtype)
    second = first + 0.3 * torch.randn(first.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for views_ in ((first, second), (second, first), (first, first), (torch.zeros_like(first),) * 2):
        loss, *gradients = run(criterion, *views_)
        assert loss.isfinite()
        for view, gradient in zip(views_, gradients, strict=True):
            assert gradient.abs().max() < 1e3
            assert (gradient[view.norm(dim=1) == 0] == 0).all()


@every_criterion
def test_ln06_a_row_that_is_nearly_zero_has_none_either(criterion):
    """From a norm of SMALLEST_NORM up a row has its direction, whatever the scale of the others."""
    first, second = views(16, 32, dtype=torch.float32)
    unit = torch.nn.functional.normalize(first[3], dim=0)
    for norm, counts in ((0.99e-6, False), (1.01e-6, True)):
        short = first.clone()
        short[3] = norm * unit
        loss, gradient, _ = run(criterion, short, second)
        assert (gradient[3].norm() > 0) == counts
        whole = first.clone() if counts else first.index_fill(0, torch.tensor([3]), 0.0)
        assert loss == pytest.approx(run(criterion, whole, second)[0].item(), rel=1e-4)


def test_ln06_zero_rows_are_counted(case_inputs):
    first = torch.tensor(np.load(case_inputs / "emb_zero_row.npy", allow_pickle=False))
    criterion = InfoNCE()
    for views_, count in (
        ((first, first), 1),
        ((first + 1, first), 1),
        ((first + 1, first + 1), 0),
        ((0 * first,) * 2, len(first)),
    ):
        criterion(*views_)
        assert criterion.stats()["zero_norm_rows"] == count


@pytest.mark.parametrize("kind", [InfoNCE, Weince, ReleasedWeince])
@pytest.mark.parametrize("temperature", [0, -1, float("nan"), float("inf"), None, "0.05", True])
def test_ln07_temperature_is_checked(kind, temperature):
    with pytest.raises(ValueError, match="temperature"):
        kind(temperature=temperature)


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "layout": ["two_views", None],
        "gate": ["all", -0.1, 1.1, float("nan"), True, None],
        "evidence": ["aic", None],
        "shape": ["pooled", -1.0, float("nan"), None],
        "floor": [0, -1e-4, float("nan")],
        "tail_fraction": [0, 1.5, float("nan")],
        "min_tail_size": [0, 2.5, None],
        "pivot": [0, -0.1, 2.5, "auto"],
        "pivot_quantile": [-0.1, 1.1, float("nan")],
        "hardness_sharpness": [-1, float("inf")],
        "evidence_sharpness": [-1, float("nan")],
        "evidence_margin": [float("nan"), "2"],
        "shape_bounds": [(4, 2), (0, 2), (1,), 3, (1, float("inf"))],
        "chunk_size": [0, 1.5],
        "reduction": ["sum", None],
        "weibull_weight": [-1],
        "softmax_weight": [float("nan")],
        "top_m": [0, 2.5],
    }.items(),
)
def test_ln07_every_option_is_checked(name, values):
    for value in values:
        with pytest.raises(ValueError, match=name):
            ReleasedWeince(**{name: value})


def test_ln07_small_temperature_is_stable():
    for criterion in (InfoNCE(1e-3), Weince(1e-3), ReleasedWeince(1e-3)):
        assert all(value.isfinite().all() for value in run(criterion, *views(40, dtype=torch.float32)))


@pytest.mark.parametrize("chunk_size", [None, 5])
@pytest.mark.parametrize(
    "keep",
    [
        lambda rows: torch.ones(12, 12)[rows],
        lambda rows: torch.ones(13, 12, dtype=torch.bool),
        lambda rows: torch.ones(12, 20, dtype=torch.bool)[rows],
        lambda rows: torch.ones(1, 12, dtype=torch.bool),
    ],
)
def test_what_a_function_keeps_is_checked(keep, chunk_size):
    first, second = torch.randn(2, 12, 8)
    with pytest.raises(ValueError, match=r"keep must be a bool tensor of shape \("):
        Weince(chunk_size=chunk_size)(first, second, keep=keep)


def test_no_more_cosines_are_held_than_asked_for():
    criterion = Weince(chunk_size=5)
    comparison = criterion.compare(*torch.randn(2, 12, 8))[0]
    assert criterion._survey(comparison, keep_cosines=True)[1] == []


def test_what_needs_no_tail_is_not_said_to_have_none(caplog):
    criterion = Weince(gate=0.4, shape=2.0)
    criterion(*torch.randn(2, 5, 8))
    assert criterion.stats()["anchors_without_tail"] == 5 and criterion.stats()["blend"] == pytest.approx(0.4)
    assert not caplog.text


def test_wrong_tensors_are_named():
    first, second, hard = views(8, columns=3)
    for arguments, keep, name in (
        ((first[:, :4], second), None, "second"),
        ((first, second[:7]), None, "second"),
        ((first, second, hard[:3]), None, "negatives"),
        ((first[0], second[0]), None, "first"),
        ((first[:0], second[:0]), None, "first"),
        ((first.long(), second), None, "first"),
        ((first, second), torch.ones(8, 7, dtype=torch.bool), "keep"),
        ((first, second), torch.ones(8, 8), "keep"),
    ):
        with pytest.raises(ValueError, match=name):
            Weince()(*arguments, keep=keep)
    with pytest.raises(ValueError, match="negatives"):
        Weince(layout="both_views")(first, second, hard)


@every_criterion
def test_ln08_one_sentence_has_loss_0(criterion):
    criterion = copy.deepcopy(criterion)
    before = copy.deepcopy(criterion.state_dict())
    first, second = (view.requires_grad_() for view in views(1))
    loss = criterion(first, second)
    loss.backward()
    assert loss.item() == 0
    assert (first.grad == 0).all() and (second.grad == 0).all()
    assert before == criterion.state_dict()
    assert all(np.isfinite(value) for value in criterion.stats().values())


@pytest.mark.parametrize(
    "options", [{}, {"gate": "hardness"}, {"gate": "evidence", "evidence": "likelihood"}, {"gate": 1.0}]
)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 10, 11])
def test_ln09_too_few_negatives_give_infonce(options, count, caplog):
    criterion, embeddings = Weince(min_tail_size=4, **options), views(count)
    blend = criterion.anchor_statistics(*embeddings).blend
    with caplog.at_level(logging.WARNING, "simcse_weince"):
        loss = criterion(*embeddings)
        assert [criterion.stats()["anchors_without_tail"] for _ in range(3)] == [count if count <= 10 else 0] * 3
    if count <= 10:
        assert (blend == 0).all()
        assert torch.equal(loss, InfoNCE()(*embeddings))
        assert sum("plain InfoNCE" in message for message in caplog.messages) == 1
    else:
        assert (blend > 0).all()
        assert not caplog.messages


def test_ln09_masks_count_too():
    first, second = views(40)
    keep = torch.ones(40, 40, dtype=torch.bool)
    keep[0, 10:] = False
    keep[1, 11:] = False
    assert Weince().anchor_statistics(first, second, keep=keep).blend[:3].gt(0).tolist() == [False, True, True]


@every_criterion
@pytest.mark.parametrize("repeat", [1, 8])
def test_ln10_collapse(criterion, repeat, case_inputs, caplog):
    criterion = copy.deepcopy(criterion)
    before = copy.deepcopy(criterion.state_dict())
    identical = torch.tensor(np.load(case_inputs / "emb_identical.npy", allow_pickle=False)).repeat(repeat, 1)
    assert all(value.isfinite().all() for value in run(criterion, identical, identical))
    with caplog.at_level(logging.WARNING, "simcse_weince"):
        criterion(identical, identical)
        stats = [criterion.stats() for _ in range(3)][0]
    assert stats["negative_cosine"] > 0.999
    assert sum("collapsed" in message for message in caplog.messages) == 1
    assert before == criterion.state_dict()
    if isinstance(criterion, Weince) and isinstance(criterion.gate, str):
        assert stats["blend"] == 0


@every_criterion
def test_la01_one_object_takes_every_batch_size(criterion):
    for count in (16, 7, 1, 33):
        assert run(criterion, *views(count))[0].isfinite()


MEMORY = """
import resource, sys, torch
from simcse_weince import Weince
torch.set_num_threads(1)
first, second = (torch.randn(512, 768, requires_grad=True) for _ in range(2))
Weince(layout=sys.argv[1])(first[:8], second[:8]).backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
Weince(layout=sys.argv[1])(first, second).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize("layout", ["cross_view", "both_views"])
def test_la02_memory_is_that_of_a_matmul(layout):
    pytest.importorskip("resource")
    done = subprocess.run([sys.executable, "-c", MEMORY, layout], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 200


class Waits(TorchDispatchMode):
    """Fails on every operation after which a device must be waited for."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal.default")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        assert not any(word in name for word in self.FORBIDDEN), f"{name} waits for the device"
        if name.startswith("aten._to_copy"):
            assert (kwargs or {}).get("device") in (None, args[0].device), "a copy to another device"
        # A bool index is a hidden nonzero.
        indices = args[1] if name.startswith("aten.index") and len(args) > 1 and isinstance(args[1], list) else []
        assert not any(index is not None and index.dtype == torch.bool for index in indices), "a bool index waits"
        return func(*args, **(kwargs or {}))


@every_criterion
@pytest.mark.parametrize("masked", [False, True])
def test_la03_forward_never_waits_for_the_device(criterion, masked, monkeypatch):
    criterion = copy.deepcopy(criterion)
    embeddings = [view.requires_grad_() for view in views(16)]
    keep = torch.rand(*(2 * [32 if criterion.layout == "both_views" else 16])) > 0.2 if masked else None

    def refuse(*_):
        raise AssertionError("the device is waited for")

    with monkeypatch.context() as patch, Waits():
        # What a device does; a CPU, for which nobody waits, selects with numpy.
        patch.setattr("simcse_weince.criterion.is_compiling", lambda: True)
        for method in ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__"):
            patch.setattr(torch.Tensor, method, refuse)
        loss = criterion(*embeddings, keep=keep)
    assert loss.isfinite()


def test_la03_the_guard_notices():
    for wait in (lambda t: t.item(), lambda t: t[t > 0], lambda t: bool(t.sum() > 0), lambda t: t.nonzero()):
        with pytest.raises(AssertionError), Waits():
            wait(torch.ones(1))


@pytest.mark.parametrize("criterion", [Weince(), Weince(layout="both_views", evidence="likelihood"), ReleasedWeince()])
@pytest.mark.parametrize("masked", [False, True])
def test_la03_compiles_to_one_graph(criterion, masked):
    torch.compiler.reset()
    first, second = (view.requires_grad_() for view in views(16, dtype=torch.float32))
    keep = torch.rand(*(2 * [32 if criterion.layout == "both_views" else 16])) > 0.2 if masked else None
    eager, compiled = copy.deepcopy(criterion), copy.deepcopy(criterion)
    expected = eager(first, second, keep=keep)
    loss = torch.compile(compiled, fullgraph=True, backend="aot_eager")(first, second, keep=keep)
    torch.testing.assert_close(loss, expected)
    for one, other in zip(*(torch.autograd.grad(value, (first, second)) for value in (loss, expected)), strict=True):
        torch.testing.assert_close(one, other)
    assert compiled.stats() == pytest.approx(eager.stats(), rel=1e-4)
    assert list(compiled.buffers()) == list(eager.buffers())


def test_la05_evaluation_changes_no_buffer():
    criterion, embeddings = ReleasedWeince(), views(40)
    assert list(criterion.state_dict()) == ["shape_average"]
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            assert criterion(*embeddings).isfinite()
    criterion.anchor_statistics(*embeddings)
    assert criterion.shape_average == 4.0
    criterion(*embeddings)
    assert criterion.shape_average != 4.0


def test_released_average_survives_saving_and_a_poor_fit():
    criterion = ReleasedWeince()
    criterion(*views(40))
    restored = ReleasedWeince()
    restored.load_state_dict(criterion.state_dict())
    assert restored.shape_average == criterion.shape_average
    # Two tight clusters: log rank against log shortfall is no line.
    clusters = torch.eye(2).repeat(20, 4) + 1e-3 * torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    fit = restored._pooled_fit(restored._survey(restored.compare(clusters, clusters.roll(1, 1))[0])[0], "regression")
    assert fit.r_squared < 0.85
    restored(clusters, clusters.roll(1, 1))
    assert restored.shape_average == criterion.shape_average


@pytest.mark.parametrize("criterion", [InfoNCE(), Weince(), ReleasedWeince()])
def test_tr10_memory_is_flat_over_200_calls(criterion):
    criterion = copy.deepcopy(criterion)

    def calls(count):
        for _ in range(count):
            criterion(*(view.requires_grad_() for view in views(32, dtype=torch.float32))).backward()
        gc.collect()

    def tensors():
        return sum(type(thing) is torch.Tensor for thing in gc.get_objects())

    calls(3)
    alive = tensors()
    tracemalloc.start()
    calls(1)
    before = tracemalloc.get_traced_memory()[0]
    calls(200)
    growth = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert growth < 1e5
    assert tensors() <= alive
    assert all(value.grad_fn is None for value in criterion._last.values())


def test_dd01_a_part_of_the_batch_is_not_taken_for_the_whole():
    with pytest.raises(RuntimeError, match="nn.DataParallel gives each device a part of the batch"):
        InfoNCE()._replicate_for_data_parallel()(*views(8))


def test_stats_are_means_of_the_last_call():
    criterion, (first, second) = Weince(layout="both_views"), views(40)
    second[5] = first[3] + 0.01 * second[5]  # a near negative
    assert criterion.stats() == {}
    keep = torch.ones(80, 80, dtype=torch.bool)
    keep[0, [3, 5, 40, 0]] = False  # of these, 40 is the positive and 0 the anchor itself
    criterion(first, second, keep=keep)
    stats = criterion.stats()
    tail = criterion.anchor_statistics(first, second, keep=keep)
    for name in ("blend", "shape", "hardness", "evidence", "r_squared", "pivot"):
        assert stats[name] == pytest.approx(getattr(tail, name).mean().item(), rel=1e-5)
    unit = torch.nn.functional.normalize(torch.cat([first, second]), dim=1)
    cosine = unit @ unit.T
    assert stats["positive_cosine"] == pytest.approx(cosine[range(40), range(40, 80)].mean().item(), rel=1e-5)
    keep &= ~torch.eye(80, dtype=torch.bool) & ~torch.eye(80, dtype=torch.bool).roll(40, 1)
    mean = (cosine * keep).sum(1) / keep.sum(1)
    assert stats["negative_cosine"] == pytest.approx(mean.mean().item(), abs=1e-6)
    assert stats["near_negatives"] == pytest.approx((((1 - cosine < 0.05) & keep).sum(1) / keep.sum(1)).mean().item())
    potential = ((4 * cosine - 4).exp() * keep).sum(1) / keep.sum(1)
    assert stats["uniformity"] == pytest.approx(potential.mean().log().item(), rel=1e-5)
    assert stats["blend_above_half"] == (tail.blend > 0.5).float().mean().item()
    assert stats["effective_temperature"] == pytest.approx(criterion.temperature / (1 - stats["blend"]), rel=1e-6)
    assert stats["masked_candidates"] == 2
    assert stats["zero_norm_rows"] == stats["anchors_without_tail"] == 0
    assert set(stats) >= set(InfoNCE().stats()) and all(isinstance(value, float) for value in stats.values())


@every_criterion
def test_backward_may_run_under_autocast(criterion):
    """Also where it makes a second pass over the cosines, for one loss per anchor."""
    criterion = copy.deepcopy(criterion)
    criterion.reduction = "none"
    gradients = []
    for enabled in (False, True):
        first, second = (view.requires_grad_() for view in views(16, 32, dtype=torch.float32))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            copy.deepcopy(criterion)(first, second).mean().backward()
        gradients.append(torch.stack([first.grad, second.grad]))
    assert gradients[0].equal(gradients[1])
