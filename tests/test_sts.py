"""The STS suite: figures that match by-hand ones, undefined ones that say so, and an evaluator without side effects."""

import json
import random
import time

import numpy as np
import pytest
import scipy.spatial.distance
import scipy.stats
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.model_card import generate_model_card
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from simcse_weince.errors import InputError
from simcse_weince.sentence.pairs import TASKS, GradedPairs, concatenate, load_sts, read_pairs
from simcse_weince.sentence.sts import (
    STSEvaluator,
    alignment,
    bootstrap_intervals,
    correlate_parts,
    evaluate_model,
    format_table,
    load_suite,
    pairwise_cosines,
    parse_tasks,
    spearman_pearson,
    uniformity,
)
from tests.tiny_models import write_tiny_bert

SENTENCES = (
    "a red door", "the blue house by the river", "the cat sleeps", "rain falls on the city", "two men and a dog",
    "she plays music", "it is still raining", "the train arrived first", "a lamp", "one two three four five six",
)  # fmt: skip


def graded(scores=None, name="own.tsv"):
    first = [SENTENCES[i] for i in range(10)] + [SENTENCES[0]]
    second = [SENTENCES[(3 * i + 1) % 10] for i in range(10)] + [SENTENCES[0]]
    values = np.linspace(0, 5, 11) if scores is None else np.asarray(scores, dtype=np.float64)
    return GradedPairs(name, first, second, values, {name: "0" * 64})


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return SentenceTransformer(write_tiny_bert(tmp_path_factory.mktemp("tiny") / "bert"), device="cpu")


# ---- correlations ----


def test_correlations_are_those_of_scipy():
    generator = np.random.default_rng(0)
    gold, predicted = generator.integers(0, 6, 200).astype(float), generator.normal(size=200)
    found = spearman_pearson(gold, predicted)
    assert found.spearman == pytest.approx(scipy.stats.spearmanr(gold, predicted)[0])
    assert found.pearson == pytest.approx(scipy.stats.pearsonr(gold, predicted)[0])
    assert found.reason == ""


@pytest.mark.parametrize(
    "gold, predicted, reason",
    [
        ([2.5, 2.5, 2.5], [0.1, 0.2, 0.3], "constant gold"),
        ([1, 2, 3], [0.0, 0.0, 0.0], "constant predictions"),
        ([1, 2, 3], [1.0, 1.0 - 1e-7, 1.0 + 1e-7], "constant predictions"),
        ([1, 2, 3], [0.1, np.nan, 0.3], "values that are not finite"),
        ([1], [0.1], "fewer than two pairs"),
    ],
)
def test_ev01_an_undefined_correlation_is_none_with_its_reason(gold, predicted, reason):
    found = spearman_pearson(gold, predicted)
    assert (found.spearman, found.pearson, found.reason) == (None, None, reason)
    assert bootstrap_intervals(np.array(gold), np.array(predicted)) == {"spearman": None, "pearson": None}


def test_ev04_scores_as_text_are_refused_and_as_numbers_give_the_right_rank(case_inputs):
    gold = read_pairs(case_inputs / "sts_string_scores.jsonl").scores
    assert spearman_pearson(gold, [1, 2, 3, 4, 5, 6]).spearman == pytest.approx(0.085714, abs=1e-6)
    with pytest.raises(ValueError, match="gold must hold numbers"):
        spearman_pearson(["1.0", "2", "10"], [1, 2, 3])
    with pytest.raises(ValueError, match="one equal length"):
        spearman_pearson([1, 2, 3], [1, 2])


def test_ev02_three_protocols_match_hand_computed_values():
    # Part one: Spearman 1 over 3 pairs. Part two, scored higher but predicted lower: -1 over 4 pairs.
    gold = np.array([1.0, 2, 3, 10, 11, 12, 13])
    predicted = np.array([0.5, 0.6, 0.7, 0.4, 0.3, 0.2, 0.1])
    found = correlate_parts(gold, predicted, (("one", slice(0, 3)), ("two", slice(3, 7))))
    # Joined: ranks 1..7 against 5 6 7 4 3 2 1, squared differences 16 * 3 + 0 + 4 + 16 + 36.
    assert found["all"].spearman == pytest.approx(1 - 6 * 104 / (7 * 48))
    assert found["mean"].spearman == pytest.approx(0)
    assert found["wmean"].spearman == pytest.approx((3 * 1 + 4 * -1) / 7)
    assert found["wmean"].pearson == pytest.approx(-1 / 7)
    single = correlate_parts(gold, predicted)
    assert single["mean"] == single["wmean"] == single["all"] == found["all"]


def test_ev02_one_undefined_part_leaves_the_joined_figure_defined():
    gold = np.array([1.0, 2, 3, 4, 4, 4])
    found = correlate_parts(gold, np.arange(6.0), (("one", slice(0, 3)), ("two", slice(3, 6))))
    assert found["all"].spearman is not None
    assert found["mean"].spearman is None and found["mean"].reason == "constant gold in two"


def test_bootstrap_equals_resampling_with_scipy():
    generator = np.random.default_rng(1)
    gold = generator.integers(0, 4, 30).astype(float)
    predicted = np.round(gold + generator.normal(size=30), 0)
    found = bootstrap_intervals(gold, predicted, resamples=120, seed=7)
    generator, rank, linear = np.random.default_rng(7), [], []
    for rows in (50, 50, 20):
        for pick in generator.integers(0, 30, size=(rows, 30)):
            rank.append(scipy.stats.spearmanr(gold[pick], predicted[pick])[0])
            linear.append(scipy.stats.pearsonr(gold[pick], predicted[pick])[0])
    np.testing.assert_allclose(found["spearman"], np.percentile(rank, (2.5, 97.5)), rtol=1e-12)
    np.testing.assert_allclose(found["pearson"], np.percentile(linear, (2.5, 97.5)), rtol=1e-12)
    assert found == bootstrap_intervals(gold, predicted, resamples=120, seed=7)
    assert found != bootstrap_intervals(gold, predicted, resamples=120, seed=8)


def test_too_few_pairs_have_no_interval(encoder):
    for pairs, has_one in ((9, False), (10, True)):
        values = np.arange(pairs, dtype=np.float64)
        assert (bootstrap_intervals(values, values)["spearman"] is not None) == has_one
    few = graded()
    few = GradedPairs("few.tsv", few.first[:9], few.second[:9], few.scores[:9], few.files)
    table = format_table(evaluate_model(encoder, [few]))
    assert "too few pairs for an interval" in table and "[" not in table.split("few.tsv, all")[1]
    assert "too few" not in format_table(evaluate_model(encoder, [graded()]))


def test_only_what_is_shown_is_explained(encoder):
    low = graded(np.linspace(0, 3, 11))
    table = format_table(evaluate_model(encoder, [low], bootstrap=0))
    assert "alignment" not in table and "uniformity: log" in table and "Wang and Isola" in table


def test_bootstrap_interval_covers_the_truth():
    """Of 95 % intervals for a known correlation about 95 % hold it."""
    generator = np.random.default_rng(2)
    truth, held = 0.6, 0
    for seed in range(200):
        x = generator.normal(size=150)
        y = truth * x + np.sqrt(1 - truth**2) * generator.normal(size=150)
        low, high = bootstrap_intervals(x, y, resamples=200, seed=seed)["pearson"]
        held += low <= truth <= high
    assert 175 <= held <= 199


def test_bootstrap_of_a_large_set_takes_under_a_second():
    generator = np.random.default_rng(3)
    gold, predicted = generator.integers(0, 51, 5000) / 10, generator.normal(size=5000).astype(np.float32)
    begin = time.process_time()
    assert bootstrap_intervals(gold, predicted)["spearman"]
    assert time.process_time() - begin < 1


# ---- cosines, alignment, uniformity ----


def test_equal_sentences_tie_exactly():
    vectors = np.random.default_rng(4).normal(size=(500, 64)).astype(np.float32)
    cosines = pairwise_cosines(vectors, 3 * vectors)
    assert cosines.dtype == np.float32 and set(cosines.tolist()) == {1.0}
    assert pairwise_cosines(np.zeros((1, 4)), np.ones((1, 4))).tolist() == [0.0]


def test_cosines_have_all_digits_of_float32():
    generator = np.random.default_rng(4)
    first, second = (generator.normal(size=(200, 64)).astype(np.float32) for _ in range(2))
    pairs = zip(first.astype(float), second.astype(float), strict=True)  # scipy takes a norm in the type of its vector
    exact = [1 - scipy.spatial.distance.cosine(*pair) for pair in pairs]
    np.testing.assert_allclose(pairwise_cosines(first, second), exact, rtol=1e-7)


def test_alignment_and_uniformity_are_those_of_wang_and_isola():
    generator = np.random.default_rng(5)
    x, y = generator.normal(size=(1300, 8)), generator.normal(size=(1300, 8))
    unit_x, unit_y = (torch.nn.functional.normalize(torch.from_numpy(v), dim=1) for v in (x, y))
    assert alignment(x, y) == pytest.approx((unit_x - unit_y).norm(dim=1).pow(2).mean().item())
    assert alignment(x, y, alpha=1) == pytest.approx((unit_x - unit_y).norm(dim=1).mean().item())
    assert uniformity(x) == pytest.approx(torch.pdist(unit_x).pow(2).mul(-2).exp().mean().log().item())
    assert uniformity(x, t=3) == pytest.approx(torch.pdist(unit_x).pow(2).mul(-3).exp().mean().log().item())
    assert uniformity(np.ones((3, 4))) == pytest.approx(0)
    assert alignment(x[:0], y[:0]) is None and uniformity(x[:1]) is None


def test_geometry_takes_pairs_above_four_and_distinct_sentences(encoder):
    pairs = graded([4.0, 4.1, 5.0, *[0.0] * 7, 1.0])
    result = evaluate_model(encoder, [pairs], bootstrap=0).tasks[0]
    first, second = (encoder.encode(side[1:3]) for side in (pairs.first, pairs.second))
    assert result.alignment == pytest.approx(alignment(first, second), rel=1e-4)
    assert result.uniformity == pytest.approx(uniformity(encoder.encode(list(SENTENCES))), rel=1e-3)
    assert evaluate_model(encoder, [graded([2.5] * 11)], bootstrap=0).tasks[0].alignment is None


# ---- evaluation ----


def test_every_distinct_sentence_is_encoded_once(encoder, monkeypatch):
    seen = []
    real = encoder.encode
    monkeypatch.setattr(
        encoder, "encode", lambda sentences, **kwargs: seen.extend(sentences) or real(sentences, **kwargs)
    )
    evaluate_model(encoder, [graded(), graded(name="other.tsv")], batch_size=2, bootstrap=0)
    assert sorted(seen) == sorted(SENTENCES)


def test_ev03_figures_do_not_depend_on_the_scale(encoder, case_inputs):
    sets = [read_pairs(case_inputs / f"sts_scale{scale}.tsv") for scale in ("05", "01")]
    fives, ones = evaluate_model(encoder, sets).tasks
    assert fives.correlations["all"].spearman == ones.correlations["all"].spearman
    assert fives.correlations["all"].pearson == pytest.approx(ones.correlations["all"].pearson, abs=1e-12)
    assert fives.intervals["spearman"] == ones.intervals["spearman"]
    assert fives.alignment == ones.alignment


def test_ev01_undefined_is_null_in_the_json_and_named_in_the_table(encoder, case_inputs):
    results = evaluate_model(encoder, [read_pairs(case_inputs / "sts_constant_scores.tsv")])
    text = json.dumps(results.to_json(), allow_nan=False)
    correlation = json.loads(text)["tasks"][0]["correlations"]["all"]
    assert correlation == {"spearman": None, "pearson": None, "reason": "constant gold"}
    assert "sts_constant_scores.tsv, all, 6 pairs: undefined (constant gold)" in format_table(results)


def test_ev01_a_collapsed_model_is_undefined_not_zero(tmp_path, caplog):
    model = SentenceTransformer(write_tiny_bert(tmp_path / "bert"), device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    evaluator = STSEvaluator(graded())
    metrics = evaluator(model)
    assert np.isnan(metrics["sts-dev_spearman_cosine"]) and metrics["sts-dev_uniformity"] <= 0
    assert evaluator.undefined == "undefined (constant predictions)"
    assert "sts-dev: the correlations are undefined (constant predictions)" in caplog.text


def test_ev01_a_model_that_is_not_finite_leaves_no_nan_in_the_json(tmp_path):
    model = SentenceTransformer(write_tiny_bert(tmp_path / "bert"), device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(float("nan"))
    results = evaluate_model(model, [graded()])
    json.dumps(results.to_json(), allow_nan=False)
    assert results.tasks[0].correlations["all"].reason == "values that are not finite"
    assert results.tasks[0].uniformity is None


@pytest.mark.parametrize("undefined_at", [(0,), (1,), (0, 1)])
def test_ev01_the_trainer_never_selects_an_undefined_score(tmp_path, encoder, undefined_at):
    class Scripted(STSEvaluator):
        calls = 0

        def __call__(self, model, *args, **kwargs):
            constant = self.calls in undefined_at
            self.pairs = graded([2.5] * 11) if constant else graded()
            Scripted.calls += 1
            return super().__call__(model, *args, **kwargs)

    evaluator = Scripted(graded())
    trainer = SentenceTransformerTrainer(
        model=encoder,
        args=SentenceTransformerTrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=2, learning_rate=0.0, eval_strategy="steps",
            eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True, report_to="none",
            metric_for_best_model=f"eval_{evaluator.primary_metric}", greater_is_better=True, use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"anchor": SENTENCES[:4], "positive": SENTENCES[4:8]}),
        loss=MultipleNegativesRankingLoss(encoder),
        evaluator=evaluator,
    )  # fmt: skip
    trainer.train()
    assert evaluator.calls == 2
    assert trainer.state.best_global_step == {(0,): 2, (1,): 1, (0, 1): None}[undefined_at]


def test_ev06_table_and_json_name_split_file_and_pairs(encoder, shared):
    sets = [load_sts("stsb", "dev", shared / "data" / "stsb"), load_sts("sts13", data_dir=shared / "data")]
    sets = [GradedPairs(s.name, s.first[:40], s.second[:40], s.scores[:40], s.files, s.split) for s in sets]
    results = evaluate_model(encoder, [*sets, concatenate("own", [graded(), graded(name="b.tsv")])], bootstrap=50)
    table = format_table(results).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line.startswith("|")]
    assert cells[0] == [*("STS12 STS13 STS14 STS15 STS16 STSBenchmark SICKRelatedness Avg.".split())]
    dev, year = (100 * result.correlations["all"].spearman for result in results.tasks[:2])
    assert cells[1] == ["-", f"{year:.2f}", "-", "-", "-", f"{dev:.2f}", "-", "-"]
    text = "\n".join(table)
    assert f"STSBenchmark dev, all, 40 pairs: Spearman {dev:.2f} [" in text and "files: sts-dev.csv" in text
    assert "own, all, 22 pairs: " in text and "files: own.tsv, b.tsv (own.tsv 11, b.tsv 11)" in text
    assert "protocol all: all pairs of a set joined" in text and "alignment: mean of" in text
    assert "own, wmean, 22 pairs: Spearman" in format_table(results, "wmean")

    report = json.loads(json.dumps(results.to_json(), allow_nan=False))
    assert report["tasks"][0]["split"] == "dev" and report["tasks"][0]["pairs"] == 40
    assert len(report["tasks"][0]["files"]["sts-dev.csv"]) == 64
    assert report["seed"] == 0 and report["configuration"]["max_seq_length"] == 64
    assert {"torch", "transformers", "sentence-transformers", "python"} <= report["versions"].keys()
    assert str(shared) not in json.dumps(report)


def test_average_needs_all_seven_sets(encoder):
    seven = [graded(name=task) for task in TASKS]
    results = evaluate_model(encoder, seven, bootstrap=0)
    assert results.average() == pytest.approx(results.tasks[0].correlations["all"].spearman)
    assert evaluate_model(encoder, seven[:6], bootstrap=0).average() is None


def test_ev07_a_bfloat16_model_keeps_its_figures(tmp_path, shared):
    pairs = load_sts("stsb", "dev", shared / "data")
    pairs = GradedPairs("dev", pairs.first[::5], pairs.second[::5], pairs.scores[::5], pairs.files)
    folder = write_tiny_bert(tmp_path / "bert")
    single, half = (SentenceTransformer(folder, device="cpu").to(dtype) for dtype in (torch.float32, torch.bfloat16))
    exact, rounded = (evaluate_model(model, [pairs], bootstrap=0).tasks[0] for model in (single, half))
    assert rounded.correlations["all"].spearman == pytest.approx(exact.correlations["all"].spearman, abs=0.01)


def test_ev10_missing_data_fail_before_anything_is_encoded(tmp_path):
    begin = time.monotonic()
    with pytest.raises(InputError, match="sts12 is not there"):
        load_suite(data_dir=tmp_path)
    assert time.monotonic() - begin < 2


def test_tasks_are_named_by_commas():
    assert parse_tasks("STSb, sickr,stsb") == ["stsb", "sickr"]
    assert parse_tasks("sts") == list(TASKS)
    with pytest.raises(InputError, match="unknown STS task 'sts99'"):
        parse_tasks("stsb,sts99")


def test_tk03_a_sentence_longer_than_the_model_is_truncated(encoder):
    long = "the cat sleeps " + "alpha beta " * 1000
    pairs = GradedPairs("long", [long, *SENTENCES[:5]], [*SENTENCES[1:6], long], np.arange(6.0), {"long": "0"})
    during = STSEvaluator(pairs)(encoder)["sts-dev_spearman_cosine"]
    after = evaluate_model(encoder, [pairs]).tasks[0].correlations["all"].spearman
    assert during == after and np.isfinite(during)


def test_tk07_figures_do_not_depend_on_the_batch_size(encoder):
    found = [STSEvaluator(graded(), batch_size=size)(encoder)["sts-dev_spearman_cosine"] for size in (1, 7, 64)]
    assert found[0] == found[1] == found[2]


def test_tr02_evaluation_restores_modes_and_random_states(encoder):
    encoder.train()
    frozen = encoder[0].auto_model.encoder.layer[1].eval()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    first, second = (STSEvaluator(graded())(encoder) for _ in range(2))
    assert first == second
    assert encoder.training and encoder[0].auto_model.embeddings.dropout.training and not frozen.training
    assert states[:2] == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    assert torch.equal(states[2], torch.get_rng_state())
    features = encoder.preprocess(list(SENTENCES))
    views = [encoder(dict(features))["sentence_embedding"] for _ in range(2)]
    assert torch.nn.functional.cosine_similarity(*views).max() < 0.999
    encoder.eval()
    STSEvaluator(graded())(encoder)
    assert not encoder.training


def test_evaluator_metrics_and_model_card(encoder):
    evaluator = STSEvaluator(graded(), name="dev")
    assert evaluator.primary_metric == "dev_spearman_cosine"
    metrics = evaluator(encoder, None, 1.0, 25)
    expected = evaluate_model(encoder, [graded()]).tasks[0]
    assert metrics == {
        "dev_spearman_cosine": expected.correlations["all"].spearman,
        "dev_pearson_cosine": expected.correlations["all"].pearson,
        "dev_alignment": expected.alignment,
        "dev_uniformity": expected.uniformity,
    }
    assert encoder.model_card_data.eval_results_dict[evaluator] == metrics
    assert encoder.model_card_data.training_logs[-1]["dev_spearman_cosine"] == metrics["dev_spearman_cosine"]
    STSEvaluator(graded([1.0] * 11), name="flat")(encoder)
    card = generate_model_card(encoder)
    assert "**undefined (constant gold)**" in card and f"{metrics['dev_spearman_cosine']:.4f}" in card


@pytest.mark.usefixtures("untouched_network")
def test_pk05_a_local_folder_needs_no_network(encoder, shared):
    pairs = load_sts("stsb", "test", shared / "data" / "stsb")
    pairs = GradedPairs("stsb", pairs.first[:20], pairs.second[:20], pairs.scores[:20], pairs.files, "test")
    assert evaluate_model(encoder, [pairs]).tasks[0].pairs == 20


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["stsb", "senteval"])
def test_a_real_encoder_has_its_known_figures(minilm, shared, folder):
    sets = [load_sts("stsb", split, shared / "data" / folder) for split in ("dev", "test")]
    results = evaluate_model(SentenceTransformer(minilm, device="cpu"), sets, bootstrap=0)
    assert [100 * result.correlations["all"].spearman for result in results.tasks] == pytest.approx(
        [86.72, 82.03], abs=0.02
    )
