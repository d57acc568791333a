"""The criteria against the authors' numbers, a slow twin written from the formula, and their limits."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from simcse_weince import InfoNCE, ReleasedWeince, Weince
from simcse_weince.criterion import _largest
from tests import reference

CASES = ["text_temperature", "vision_temperature", "clustered_margin6", "large_tail"]
OPTION_NAMES = {
    "select_q": "pivot_quantile",
    "select_kappa_rho": "hardness_sharpness",
    "select_kappa_aic": "evidence_sharpness",
    "select_aic_margin": "evidence_margin",
    "select_tail_frac": "tail_fraction",
    "select_min_tail_points": "min_tail_size",
}


def views(count, dim=8, columns=2, seed=0, dtype=torch.float64, noise=0.6):
    """Columns of embeddings (N, d) whose rows are near one another."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(count, dim, generator=generator, dtype=torch.float64)
    spread = torch.randn(columns, count, dim, generator=generator, dtype=torch.float64)
    return [column.to(dtype) for column in centre + noise * spread]


@pytest.fixture(scope="module", params=CASES)
def published(request, shared):
    """One case of the reference: its numbers, and its arrays under their short names."""
    folder = shared / "reference"
    case = next(c for c in json.loads((folder / "weince_reference.json").read_text()) if c["name"] == request.param)
    with np.load(folder / "weince_reference.npz", allow_pickle=False) as archive:
        prefix = request.param + "_"
        arrays = {name.removeprefix(prefix): torch.tensor(archive[name]) for name in archive if name.startswith(prefix)}
    case["options"] = {OPTION_NAMES[name]: value for name, value in case["options"].items()}
    return case, arrays


class TestPublishedValues:
    """weince_reference: the authors' class, executed in float32."""

    @staticmethod
    def criterion(case, **options):
        return Weince(case["temperature"], layout="both_views", floor=1e-6, **case["options"], **options)

    @pytest.mark.parametrize("gate", ["both", "hardness", "evidence"])
    def test_losses(self, published, gate):
        case, arrays = published
        loss = self.criterion(case, gate=gate, shape=1.0)(arrays["first"], arrays["second"])
        assert loss.item() == pytest.approx(case[f"loss_{gate}"], rel=1e-5)

    def test_infonce(self, published):
        case, arrays = published
        loss = InfoNCE(case["temperature"], layout="both_views")(arrays["first"], arrays["second"])
        assert loss.item() == pytest.approx(case["loss_infonce"], rel=1e-5, abs=1e-7)

    def test_pure_weibull(self, published):
        case, arrays = published
        loss = self.criterion(case, gate=1.0, shape=4.0)(arrays["first"], arrays["second"])
        # The reference clamps at 1e-6 what we raise by 1e-6: beta * 1e-6 / shortfall in a logit, whatever the loss.
        assert loss.item() == pytest.approx(case["loss_weibull_beta4"], rel=1e-5, abs=4e-6)

    def test_gradient_norms(self, published):
        case, arrays = published
        first, second = (arrays[view].requires_grad_() for view in ("first", "second"))
        gradients = torch.autograd.grad(self.criterion(case, shape=1.0)(first, second), (first, second))
        assert gradients[0].norm().item() == pytest.approx(case["grad_norm_first_view"], rel=1e-4)
        assert gradients[1].norm().item() == pytest.approx(case["grad_norm_second_view"], rel=1e-4)

    def test_statistics(self, published):
        case, arrays = published
        tail = self.criterion(case).anchor_statistics(arrays["first"], arrays["second"])
        for found, name in ((tail.shape_raw, "beta_hat"), (tail.r_squared, "r_squared"), (tail.hardness, "rho")):
            torch.testing.assert_close(found, torch.tensor(case[name]), rtol=1e-4, atol=0)
        torch.testing.assert_close(tail.evidence, torch.tensor(case["delta_aic"]), rtol=1e-3, atol=0)
        torch.testing.assert_close(tail.blend, torch.tensor(case["blend"]), rtol=1e-4, atol=1e-6)
        assert tail.pivot.item() == pytest.approx(case["rho_pivot"], rel=1e-4)
        assert tail.tail_points == case["tail_points"]
        assert torch.equal(tail.shape, tail.shape_raw.clamp(0.5, 16))

    def test_released_objective(self, published):
        case, arrays = published
        criterion = ReleasedWeince(case["temperature"], **case["options"])
        old = 4.0
        for step, expected in enumerate(case["released_objective"]):
            batch = arrays[f"step{step}_first"], arrays[f"step{step}_second"]
            pooled = criterion._pooled_fit(criterion._survey(criterion.compare(*batch)[0])[0], "regression")
            assert pooled.shape.item() == pytest.approx(expected["beta_hat_batch"], rel=1e-4)
            assert pooled.r_squared.item() == pytest.approx(expected["r_squared_batch"], rel=1e-4)
            assert criterion(*batch).item() == pytest.approx(expected["loss"], rel=1e-5)
            assert criterion.shape_average.item() == pytest.approx(expected["beta_ema"], rel=1e-5)
            assert criterion.shape_average.item() != old
            old = criterion.shape_average.item()


GRID = [
    {},
    {"evidence": "likelihood"},
    {"gate": "hardness", "shape": "shrunk", "min_tail_size": 12},
    {
        "gate": "evidence",
        "evidence": "likelihood",
        "shape": "shrunk",
        "evidence_margin": -1.0,
        "evidence_sharpness": 0.3,
    },
    {"gate": 0.4, "shape": 2.0, "floor": 1e-6},
    {"gate": 1.0, "shape_bounds": (2.0, 4.0)},
    {"shape": 0.0, "pivot": 0.3, "hardness_sharpness": 3.0},
    {"shape": 1.0, "pivot_quantile": 0.9, "tail_fraction": 0.5, "min_tail_size": 8},
]


def assert_like_the_twin(criterion, options, embeddings, keep=None):
    """Losses and statistics of a criterion with ``reduction="none"`` against tests/reference.py."""
    table = reference.rows(embeddings[0], embeddings[1], embeddings[2:], criterion.layout, keep)
    expected = reference.weince(table, criterion.temperature, **options)
    torch.testing.assert_close(criterion(*embeddings, keep=keep), torch.tensor(expected.losses, dtype=torch.float64))
    tail = criterion.anchor_statistics(*embeddings, keep=keep)
    for name in ("blend", "shape", "shape_raw", "hardness", "evidence", "r_squared", "pivot"):
        value = torch.tensor(getattr(expected, name), dtype=torch.float64)
        torch.testing.assert_close(getattr(tail, name), value, rtol=1e-7, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


class TestSlowTwin:
    """Double loops in float64, over sizes, temperatures, layouts and options."""

    @pytest.mark.parametrize("options", GRID)
    @pytest.mark.parametrize(
        ("layout", "count", "columns", "temperature"),
        [("cross_view", 40, 2, 0.05), ("cross_view", 12, 4, 0.5), ("columns", 11, 3, 0.05), ("both_views", 24, 2, 0.1)],
    )
    def test_values(self, options, layout, count, columns, temperature):
        criterion = Weince(temperature, layout=layout, reduction="none", **options)
        assert_like_the_twin(criterion, options, views(count, columns=columns))

    @pytest.mark.parametrize("options", GRID)
    @pytest.mark.parametrize(("layout", "columns"), [("cross_view", 4), ("both_views", 2)])
    def test_masks(self, options, layout, columns):
        embeddings = views(20, columns=columns, seed=3)
        anchors, candidates = (40, 40) if layout == "both_views" else (20, 60)
        keep = torch.rand(anchors, candidates, generator=torch.Generator().manual_seed(5)) > 0.4
        keep[0] = False
        keep[1, 6:] = False
        criterion = Weince(0.05, layout=layout, reduction="none", **options)
        assert_like_the_twin(criterion, options, embeddings, keep)

    @pytest.mark.parametrize("layout", ["cross_view", "both_views"])
    @pytest.mark.parametrize("count", [1, 2, 5, 6, 9, 10, 11])
    def test_small_batches(self, layout, count):
        for options in GRID:
            assert_like_the_twin(Weince(layout=layout, reduction="none", **options), options, views(count))

    @pytest.mark.parametrize("temperature", [0.001, 0.05, 1.0])
    def test_infonce(self, temperature):
        for layout, columns in (("cross_view", 2), ("columns", 4), ("both_views", 2)):
            embeddings = views(15, columns=columns)
            table = reference.rows(*embeddings[:2], embeddings[2:], layout)
            losses = InfoNCE(temperature, layout=layout, reduction="none")(*embeddings)
            expected = torch.tensor(reference.infonce(table, temperature), dtype=torch.float64)
            torch.testing.assert_close(losses, expected)
            torch.testing.assert_close(InfoNCE(temperature, layout=layout)(*embeddings), expected.mean())


class TestGradients:
    @pytest.mark.parametrize(
        "criterion",
        [
            InfoNCE(0.2),
            InfoNCE(0.2, layout="both_views"),
            Weince(0.2, gate=0.4, shape=2.0),
            Weince(0.2, gate=1.0, shape=3.0, chunk_size=2),
            Weince(0.2, gate=0.4, shape=2.0, layout="both_views", reduction="none"),
            # Its running average is an input of the loss that moves: these bounds pin it.
            ReleasedWeince(0.2, gate=0.4, top_m=2, floor=1e-3, shape_bounds=(4.0, 4.0)),
        ],
        ids=lambda criterion: type(criterion).__name__,
    )
    def test_gradcheck(self, criterion):
        embeddings = [e.requires_grad_() for e in views(5, dim=4)]
        assert torch.autograd.gradcheck(criterion, embeddings)

    def test_gradcheck_with_masks_and_hard_negatives(self):
        embeddings = [e.requires_grad_() for e in views(4, dim=3, columns=4)]
        keep = torch.rand(4, 12, generator=torch.Generator().manual_seed(0)) > 0.4
        criterion = Weince(0.2, gate=0.4, shape=2.0)
        assert torch.autograd.gradcheck(lambda *e: criterion(*e, keep=keep), embeddings)

    @pytest.mark.parametrize("criterion_class", [InfoNCE, Weince, ReleasedWeince])
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_a_mask_made_slice_by_slice_is_the_mask(self, criterion_class, reduction):
        for layout, columns in (("cross_view", 3), ("both_views", 2)):
            shape = (80, 80) if layout == "both_views" else (40, 80)
            keep, asked = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.3, []
            results = []
            for mask in (keep, lambda rows, keep=keep, asked=asked: asked.append(rows) or keep[rows]):
                embeddings = [e.requires_grad_() for e in views(40, columns=columns)]
                criterion = criterion_class(layout=layout, chunk_size=7, reduction=reduction)
                loss = criterion(*embeddings, keep=mask)
                results.append([loss, *torch.autograd.grad(loss.square().sum(), embeddings)])
            assert asked[0] == slice(0, 7)
            torch.testing.assert_close(*results)

    def test_one_loss_per_anchor_has_the_gradient_of_each(self):
        """For the mean the gradient is made with the loss, for single losses afterwards: both must be the same."""
        weight = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for chunk_size in (None, 7):
            embeddings = [e.requires_grad_() for e in views(40)]
            mean = torch.autograd.grad(Weince(chunk_size=chunk_size)(*embeddings), embeddings)
            losses = Weince(chunk_size=chunk_size, reduction="none")(*embeddings)
            torch.testing.assert_close(torch.autograd.grad(losses.mean(), embeddings, retain_graph=True), mean)
            alone = [torch.autograd.grad(loss, embeddings, retain_graph=True) for loss in losses]
            sums = [sum(w * g[view] for w, g in zip(weight, alone, strict=True)) for view in (0, 1)]
            torch.testing.assert_close(torch.autograd.grad((weight * losses).sum(), embeddings), tuple(sums))

    def test_a_second_derivative_is_refused(self):
        embeddings = [e.requires_grad_() for e in views(12)]
        for reduction in ("mean", "none"):
            with pytest.raises(RuntimeError, match="no second derivative"):
                torch.autograd.grad(Weince(reduction=reduction)(*embeddings).sum(), embeddings, create_graph=True)

    @pytest.mark.parametrize("layout", ["cross_view", "both_views"])
    def test_statistics_carry_no_gradient(self, layout):
        embeddings = [e.requires_grad_() for e in views(40)]
        criterion = Weince(layout=layout)
        tail = criterion.anchor_statistics(*embeddings)
        found = torch.autograd.grad(criterion(*embeddings), embeddings)

        first, second = (F.normalize(e, dim=1) for e in embeddings)
        anchors, candidates = (first, second) if layout == "cross_view" else [torch.cat([first, second])] * 2
        cosine, blend, shape = anchors @ candidates.T, tail.blend[:, None], tail.shape[:, None]
        logits = (1 - blend) * cosine / 0.05 - blend * shape * (1 - cosine + 1e-4).log()
        positive = torch.arange(len(anchors))
        if layout == "both_views":
            positive = (positive + 40) % 80
            logits = logits.masked_fill(torch.eye(80, dtype=torch.bool), -torch.inf)
        expected = torch.autograd.grad(F.cross_entropy(logits, positive), embeddings)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        assert not any(value.requires_grad for value in tail if isinstance(value, torch.Tensor))


class TestLimits:
    @pytest.mark.parametrize("layout", ["cross_view", "both_views"])
    def test_ln15_blend_0_is_infonce_to_the_last_bit(self, layout):
        first, second = views(16, dtype=torch.float32)
        first[3] = first[2]
        second[3] = second[2] = first[2]
        results = []
        for criterion in (InfoNCE(layout=layout), Weince(layout=layout, gate=0.0)):
            embeddings = [e.clone().requires_grad_() for e in (first, second)]
            loss = criterion(*embeddings)
            results.append([loss, *torch.autograd.grad(loss, embeddings)])
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)

    @pytest.mark.parametrize("columns", [2, 4])
    def test_infonce_is_multiple_negatives_ranking(self, columns):
        losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
        embeddings = views(16, columns=columns, dtype=torch.float32)
        theirs = losses.MultipleNegativesRankingLoss(model=torch.nn.Identity(), scale=20.0)
        loss = theirs.compute_loss_from_embeddings(embeddings, None)
        assert InfoNCE(0.05)(*embeddings).item() == pytest.approx(loss.item(), rel=1e-6)
        assert Weince(0.05, gate=0.0)(*embeddings).item() == pytest.approx(loss.item(), rel=1e-6)

    def test_blend_1_is_the_closed_form(self):
        first, second = views(6)
        cosine = F.normalize(first, dim=1) @ F.normalize(second, dim=1).T
        weight = (1 - cosine + 1e-4) ** -3.0
        expected = -(weight.diagonal() / weight.sum(1)).log()
        torch.testing.assert_close(Weince(gate=1.0, shape=3.0, reduction="none")(first, second), expected)

    @pytest.mark.parametrize("temperature", [0.01, 0.5])
    def test_blend_1_has_no_temperature(self, temperature):
        embeddings = views(40)
        assert torch.equal(Weince(temperature, gate=1.0)(*embeddings), Weince(gate=1.0)(*embeddings))

    def test_shape_0_is_infonce_at_the_matched_temperature(self):
        embeddings = views(20)
        matched = Weince(0.05, gate=0.4, shape=0.0)(*embeddings)
        torch.testing.assert_close(matched, InfoNCE(0.05 / 0.6)(*embeddings))

    @pytest.mark.parametrize("layout", ["cross_view", "both_views"])
    def test_permuting_the_batch_permutes_the_losses(self, layout):
        first, second = views(40)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
        criterion = Weince(layout=layout, reduction="none")
        rows = order if layout == "cross_view" else torch.cat([order, order + 40])
        torch.testing.assert_close(criterion(first[order], second[order]), criterion(first, second)[rows])

    def test_lengths_of_embeddings_do_not_matter(self):
        first, second = views(40)
        torch.testing.assert_close(Weince()(3.0 * first, 1e-3 * second), Weince()(first, second))

    @pytest.mark.parametrize("evidence", ["regression", "likelihood"])
    def test_a_masked_candidate_changes_nothing(self, evidence):
        """Neither its value nor whether it exists: mask one hard-negative column, replace it, leave it out."""
        first, second, hard, other = views(40, columns=4)
        keep = torch.ones(40, 120, dtype=torch.bool)
        keep[:, 80:] = False
        results = []
        for columns, mask in (([hard, other], keep), ([hard, first], keep), ([hard], None)):
            embeddings = [first.clone().requires_grad_(), second, *columns]
            loss = Weince(evidence=evidence, reduction="none")(*embeddings, keep=mask)
            tail = Weince(evidence=evidence).anchor_statistics(*embeddings, keep=mask)
            results.append([loss, *torch.autograd.grad(loss.sum(), embeddings[0]), *tail[:7]])
        for result in results[1:]:
            for one, other_one in zip(results[0], result, strict=True):
                torch.testing.assert_close(one, other_one)

    def test_a_masked_positive_is_kept(self):
        first, second = views(12)
        keep = torch.ones(12, 12, dtype=torch.bool)
        expected = Weince()(first, second)
        assert torch.equal(Weince()(first, second, keep=keep.fill_diagonal_(False)), expected)

    def test_anchors_without_negatives_stay_out_of_the_pivot(self):
        first, second = views(30)
        keep = torch.ones(30, 30, dtype=torch.bool)
        keep[:8] = False
        tail = Weince().anchor_statistics(first, second, keep=keep)
        assert tail.pivot == tail.hardness[8:].sort().values[round(0.2 * 21)]
        assert all(value.isfinite().all() for value in tail[:7])
        losses = Weince(reduction="none")(first, second, keep=keep)
        assert (losses[:8] == 0).all() and (losses[8:] > 0).all()

    @pytest.mark.parametrize("layout", ["cross_view", "both_views"])
    @pytest.mark.parametrize("options", [{}, {"shape": "shrunk"}, {"evidence": "likelihood", "pivot": 0.2}])
    @pytest.mark.parametrize("chunk_size", [1, 7, 39, 500])
    def test_chunks_change_nothing(self, layout, options, chunk_size):
        keep = torch.rand(*(2 * [40 if layout == "cross_view" else 80])) > 0.2
        results = []
        for size in (None, chunk_size):
            embeddings = [e.requires_grad_() for e in views(40)]
            criterion = Weince(layout=layout, chunk_size=size, **options)
            loss = criterion(*embeddings, keep=keep)
            results.append([loss, *torch.autograd.grad(loss, embeddings), *criterion.stats().values()])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)

    def test_released_objective_in_chunks(self):
        results = []
        for size in (None, 9):
            embeddings = [e.requires_grad_() for e in views(40)]
            criterion = ReleasedWeince(chunk_size=size)
            loss = criterion(*embeddings)
            results.append([loss, *torch.autograd.grad(loss, embeddings), criterion.shape_average])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)

    def test_released_objective_without_correction_is_infonce_with_its_top_terms(self):
        embeddings = views(40)
        plain = ReleasedWeince(0.5, gate=0.0, weibull_weight=0.0, softmax_weight=0.0)(*embeddings)
        assert torch.equal(plain, InfoNCE(0.5, layout="both_views")(*embeddings))
        everyone = ReleasedWeince(0.5, gate=0.0, weibull_weight=0.0, softmax_weight=1.0, top_m=1000)(*embeddings)
        torch.testing.assert_close(everyone, 2 * plain)


class TestDirections:
    ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")

    @pytest.mark.parametrize("columns", [2, 3])
    def test_each_direction_has_its_own_tail(self, columns):
        first, second, *hard = views(40, columns=columns)
        symmetric = Weince(directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction")
        expected = (Weince()(first, second, *hard) + Weince()(second, first)) / 2
        torch.testing.assert_close(symmetric(first, second, *hard), expected)
        tail = symmetric.anchor_statistics(first, second, *hard)
        assert symmetric.stats()["shape"] == pytest.approx(tail.shape.mean().item(), rel=1e-6)
        torch.testing.assert_close(tail.shape, Weince().anchor_statistics(first, second, *hard).shape)

    def test_a_joint_denominator_has_one_tail_without_any_copy_of_the_positive(self):
        first, second, hard = views(12, columns=3)
        criterion = Weince(directions=self.ALL, reduction="none")
        units = [F.normalize(column, dim=1) for column in (first, second, hard)]
        docs = torch.cat(units[1:])
        table, extra = [], []
        for i in range(12):
            others = [j for j in range(12) if j != i]
            two = [j for j in range(24) if j % 12 != i]
            scores = [units[0][i] @ docs.T, units[0][i] @ units[0].T, units[1][i] @ units[0].T, units[1][i] @ docs.T]
            negatives = [scores[0][[*others, *range(12, 24)]], scores[1][others], scores[2][others], scores[3][two]]
            table.append(reference.Row(scores[0][i].item(), torch.cat(negatives).tolist()))
            extra.append(scores[2][i].item())
        expected = reference.weince(table, 0.05)
        tail = criterion.anchor_statistics(first, second, hard)
        for name in ("blend", "shape", "hardness", "evidence"):
            torch.testing.assert_close(getattr(tail, name), torch.tensor(getattr(expected, name), dtype=torch.float64))
        # The second copy of the positive is in the denominator: loss = log(exp(l) + 1) for the loss l without it.
        assert extra == pytest.approx([row.positive for row in table])
        losses = torch.tensor(expected.losses, dtype=torch.float64)
        torch.testing.assert_close(criterion(first, second, hard), losses.exp().add(1).log())

    def test_own_negatives_only(self):
        first, second, *hard = views(20, columns=14)
        criterion = Weince(own_negatives_only=True, reduction="none", min_tail_size=4)
        units = [F.normalize(column, dim=1) for column in (first, second, *hard)]
        cosine = [(units[0] * unit).sum(1).tolist() for unit in units[1:]]
        table = [reference.Row(cosine[0][i], [column[i] for column in cosine[1:]]) for i in range(20)]
        expected = reference.weince(table, 0.05, min_tail_size=4)
        losses = torch.tensor(expected.losses, dtype=torch.float64)
        torch.testing.assert_close(criterion(first, second, *hard), losses)
        assert criterion.stats()["masked_candidates"] == 0 and criterion.most_negatives == 12
        keep = torch.ones(20, 260, dtype=torch.bool)
        keep[3] = False
        assert criterion(first, second, *hard, keep=keep)[3] == 0

    def test_wrong_combinations_name_their_argument(self):
        symmetric = ("query_to_doc", "doc_to_query")
        for name, options in (
            ("directions", {"directions": ("doc_to_query",)}),
            ("directions", {"directions": ("query_to_doc", "doc_to_dog")}),
            ("directions", {"directions": ()}),
            ("directions", {"directions": symmetric, "layout": "both_views"}),
            ("directions", {"directions": symmetric, "own_negatives_only": True}),
            ("partition_mode", {"directions": self.ALL, "partition_mode": "per_direction"}),
            ("partition_mode", {"partition_mode": "both"}),
            ("own_negatives_only", {"own_negatives_only": True, "layout": "both_views"}),
        ):
            with pytest.raises(ValueError, match=name):
                Weince(**options)


def test_large_batches_are_chunked_by_themselves(monkeypatch):
    results = []
    for limit, fewest, rows_at_once in ((1 << 24, 256, 40), (300, 1, 3), (300, 16, 16)):
        monkeypatch.setattr("simcse_weince.criterion.ANCHORS_AT_ONCE", fewest)
        monkeypatch.setattr("simcse_weince.criterion.COSINES_AT_ONCE", limit)
        monkeypatch.setattr("simcse_weince.criterion.COSINES_IN_CACHE", limit)
        embeddings = [e.requires_grad_() for e in views(40, columns=3)]
        criterion, rows = Weince(shape="shrunk"), []
        link = criterion._link
        monkeypatch.setattr(criterion, "_link", lambda cosine, w, f=link, r=rows: r.append(len(cosine)) or f(cosine, w))
        loss = criterion(*embeddings)
        results.append([loss, *torch.autograd.grad(loss, embeddings), *criterion.stats().values()])
        assert rows[0] == rows_at_once
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


@pytest.mark.parametrize("size", [1, 7, 40])
def test_the_hardest_negatives_are_those_of_topk(size):
    values = torch.randn(9, 40).round(decimals=1)  # with ties
    values[0, 3:], values[1, 5], values[2] = -torch.inf, torch.nan, 0.5
    expected = values.topk(size).values
    torch.testing.assert_close(_largest(values, size), expected, rtol=0, atol=0, equal_nan=True)
