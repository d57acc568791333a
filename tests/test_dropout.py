"""Dropout on a CPU: distribution, gradient and random state of torch's own, in encoders and in attention."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from scipy import stats
from torch import Tensor, nn

from simcse_weince import CachedInfoNCELoss, InfoNCELoss, SimCSEArguments, SimCSETrainer
from simcse_weince.sentence.dropout import _Dropout, cpu_dropout
from simcse_weince.sentence.encoder import build_encoder


def dropped(values: Tensor, probability: float) -> Tensor:
    with cpu_dropout():
        return F.dropout(values, probability)


@pytest.mark.parametrize("probability", [0.003, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_binomial(probability: float):
    torch.manual_seed(0)
    count = 400_001  # no multiple of the four that are drawn at a time
    zeros = int((dropped(torch.ones(count), probability) == 0).sum())
    assert stats.binomtest(zeros, count, probability).pvalue > 1e-3


def test_neighbours_are_dropped_independently():
    torch.manual_seed(0)
    kept = dropped(torch.ones(400_000), 0.3) != 0
    for distance in (1, 2, 3, 4, 5):
        together = (kept[:-distance] & kept[distance:]).float().mean().item()
        assert together == pytest.approx(0.49, abs=0.004)


def test_the_expectation_is_unchanged_to_rounding():
    """The scale is that of the probability that is drawn, not of the one that was asked for."""
    for probability in (0.1, 0.25, 0.3333):
        values = dropped(torch.ones(64), probability).unique()
        drawn = round(probability * 2**16) / 2**16
        assert abs(drawn - probability) <= 2**-17
        assert values.max().item() == pytest.approx(1 / (1 - drawn), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradient_is_that_of_the_mask(dtype: torch.dtype):
    values = torch.randn(50, 7, dtype=dtype).add(3).requires_grad_()
    output = dropped(values, 0.4)
    assert output.dtype == dtype and output.shape == values.shape
    (gradient,) = torch.autograd.grad(output.sum(), values)
    torch.testing.assert_close(gradient * values, output)


def test_the_state_is_that_of_torch():
    """What replays and resumes is the generator of torch: the same state, the same masks."""
    state = torch.get_rng_state()
    first = dropped(torch.ones(100), 0.5)
    second = dropped(torch.ones(100), 0.5)
    torch.set_rng_state(state)
    assert dropped(torch.ones(100), 0.5).equal(first) and not second.equal(first)


def test_nothing_changes_where_nothing_is_dropped():
    values = torch.randn(9)
    with cpu_dropout():
        assert F.dropout(values, 0.5, training=False).equal(values)
        assert F.dropout(values, 0.0).equal(values)
        assert F.dropout(values, 1.0).equal(torch.zeros(9))
        assert nn.Dropout(0.5).eval()(values).equal(values)
        assert F.dropout(torch.empty(0), 0.5).shape == (0,)


def test_after_the_block_dropout_is_that_of_torch_also_when_the_block_failed():
    own = F.dropout, F.scaled_dot_product_attention
    with cpu_dropout():
        assert F.dropout is not own[0] and F.scaled_dot_product_attention is not own[1]
    assert (F.dropout, F.scaled_dot_product_attention) == own
    with pytest.raises(RuntimeError, match="in the block"), cpu_dropout():
        raise RuntimeError("in the block")
    assert (F.dropout, F.scaled_dot_product_attention) == own


@pytest.mark.parametrize("kind", ["bool", "float", "none"])
def test_attention_is_that_of_torch(kind: str):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, 8, dtype=torch.float64) for _ in range(3))
    allowed = torch.rand(2, 1, 5, 5) > 0.4
    allowed[..., 0] = True
    mask: Any = {"bool": allowed, "float": torch.zeros(2, 1, 5, 5).double().masked_fill(~allowed, -1e9), "none": None}[
        kind
    ]
    scale = None if kind == "none" else 0.3  # by default one over the root of the width
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    with cpu_dropout():
        means = torch.stack(
            [
                F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=0.1, scale=scale)
                for _ in range(4000)
            ]
        )
    # The mean over masks is attention without dropout; its error is known from the spread.
    error = means.std(0) / 4000**0.5
    assert ((means.mean(0) - expected) / error).abs().max() < 5
    assert not means[0].equal(means[1])


def test_a_row_that_may_attend_to_nothing_is_finite():
    query = torch.randn(1, 1, 2, 4, requires_grad=True)
    with cpu_dropout():
        output = F.scaled_dot_product_attention(
            query, query, query, attn_mask=torch.tensor([[True, True], [False, False]]), dropout_p=0.5
        )
    output.sum().backward()
    assert output.isfinite().all() and query.grad is not None and query.grad.isfinite().all()


@pytest.mark.parametrize("options", [{"is_causal": True}, {"dropout_p": 0.0}])
def test_other_attention_is_left_to_torch(options: dict[str, Any]):
    query = torch.randn(1, 2, 4, 8)
    torch.manual_seed(0)
    expected = F.scaled_dot_product_attention(query, query, query, **{"dropout_p": 0.2, **options})
    torch.manual_seed(0)
    with cpu_dropout():
        found = F.scaled_dot_product_attention(query, query, query, **{"dropout_p": 0.2, **options})
    assert found.equal(expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_dropout_of_an_encoder_is_drawn_cheaply(attention: str, tiny_bert: str):
    encoder = build_encoder(tiny_bert, pooler_type="avg", attn_implementation=attention, device="cpu").train()
    features = encoder.preprocess(["the dog runs", "a red house in the city"])
    with torch.profiler.profile() as profile, cpu_dropout():
        encoder(features)["sentence_embedding"].sum().backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert "aten::bernoulli_" not in counts
    # Embeddings, and in each of two layers attention and two projections.
    assert counts["aten::random_"] == 7


def one_step(folder: Path, encoder: Any, loss: nn.Module, **options: Any) -> SimCSETrainer:
    arguments = SimCSEArguments(
        output_dir=str(folder), max_steps=1, per_device_train_batch_size=4, eval_strategy="no", save_strategy="no",
        report_to="none", use_cpu=True, logging_steps=1, **options,
    )  # fmt: skip
    texts = Dataset.from_dict({"text": ["the dog runs", "a red house", "music in the city", "four people"]})
    trainer = SimCSETrainer(model=encoder, args=arguments, train_dataset=texts, loss=loss)
    trainer.train()
    return trainer


@pytest.mark.parametrize("loss_class", [InfoNCELoss, CachedInfoNCELoss])
def test_the_trainer_draws_cheaply_in_every_forward(
    loss_class: type, tiny_bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drawn, own = [], _Dropout.apply
    monkeypatch.setattr(_Dropout, "apply", lambda values, p: drawn.append(p) or own(values, p))
    encoder = build_encoder(tiny_bert, pooler_type="avg", device="cpu")
    one_step(tmp_path, encoder, loss_class(encoder))
    # One forward of both views; cached losses embed each view on its own, once without gradient and once, in the
    # backward, with it.
    assert drawn == [0.1] * (7 if loss_class is InfoNCELoss else 28)


@pytest.mark.parametrize("pooler_type", ["avg", "cls_before_pooler"])
def test_cached_losses_replay_the_dropout_in_the_trainer(pooler_type: str, tiny_bert: str, tmp_path: Path):
    encoder = build_encoder(tiny_bert, pooler_type=pooler_type, device="cpu")
    passes: dict[bool, list[Tensor]] = {False: [], True: []}
    encoder.register_forward_hook(
        lambda _module, _inputs, output: passes[torch.is_grad_enabled()].append(output["sentence_embedding"].detach())
    )
    one_step(tmp_path, encoder, CachedInfoNCELoss(encoder, mini_batch_size=2))
    assert len(passes[False]) == 4
    for first, again in zip(passes[False], passes[True], strict=True):
        torch.testing.assert_close(first, again)


@pytest.mark.parametrize("pooler_type", ["avg", "cls_before_pooler"])
def test_gradient_checkpointing_repeats_the_dropout(pooler_type: str, tiny_bert: str, tmp_path: Path):
    norms = []
    for checkpointing in (False, True):
        encoder = build_encoder(tiny_bert, pooler_type=pooler_type, device="cpu")
        trainer = one_step(tmp_path, encoder, InfoNCELoss(encoder), gradient_checkpointing=checkpointing)
        norms.append(next(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry))
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
