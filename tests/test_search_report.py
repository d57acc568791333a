"""The report on a model whose answers are known, and the command on a tiny encoder and on bad input."""

import dataclasses
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from simcse_weince.cli import main
from simcse_weince.errors import InputError
from simcse_weince.search import SoftmaxLink, VonMisesFisherModel, kernels, risk, search_cross_entropy
from simcse_weince.search.report import (
    SearchReport,
    check_index,
    draw,
    format_report,
    measure_search,
    retrieval_figures,
    sections,
    verdict,
    write_page,
)

MODEL = VonMisesFisherModel(8, 6, SoftmaxLink(0.2))


def unit(vectors: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vectors, dim=1)


def embeddings(n: int, size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uniform anchors, von Mises-Fisher positives of MODEL around them, uniform pool."""
    generator = torch.Generator().manual_seed(seed)
    anchors, sideways, pool = (unit(torch.randn(m, 8, generator=generator)) for m in (n, n, size))
    cosine = torch.from_numpy(MODEL.sample(n, 1, seed)[0])[:, None].float()
    sideways = unit(sideways - (sideways * anchors).sum(1, keepdim=True) * anchors)
    return anchors, cosine * anchors + (1 - cosine**2).sqrt() * sideways, pool


@pytest.fixture(scope="module")
def report() -> SearchReport:
    return measure_search(*embeddings(400, 600), temperature=0.2, tolerance=0.05, max_k=1024)


def test_report_finds_what_a_solvable_model_knows(report: SearchReport) -> None:
    exact = np.array([MODEL.bias(int(k)) for k in report.bias.k])
    assert report.bias.k.tolist() == [2**power for power in range(11)]
    assert (np.abs(report.bias.bias - exact) < 4 * report.bias.se).all()
    assert abs(report.cross_entropy.value - MODEL.ce) < 4 * report.cross_entropy.se
    smallest = next(k for k in range(1, 10_000) if abs(MODEL.bias(k)) <= 0.05)
    assert 0.7 * smallest < report.recommendation.k_plug < 1.8 * smallest
    assert report.best is not None and report.best.tau == pytest.approx(1 / 6, rel=0.15)
    assert report.links is not None and report.links.link == ["SoftmaxLink", "WeibullLink"]
    assert report.links.params[0]["tau"] == report.best.tau
    assert report.links.diff_to_first[1] > 2 * report.links.diff_se[1]  # the softmax link is the true one
    assert report.warnings[0].startswith("WeibullLink: exponent") and "1/k law fails" in report.warnings[0]
    assert report.warnings[1:] == [
        "beyond k = 600, the size of the pool, the curve takes the pool for the whole corpus"
    ]


def test_the_verdict_does_not_call_a_number_that_bounds_one_side_enough(report: SearchReport) -> None:
    advice = dataclasses.replace(report.recommendation, k_plug=None, k_asymptotic=10**8, k_safe_upper=1)
    assert "takes about 100,000,000 negatives" in verdict(dataclasses.replace(report, recommendation=advice))


@pytest.mark.parametrize(("at", "words"), [(0.01, ", the coldest that this pool can tell."), (0.5, "0.5."), (
    1e3, "1e+03, the hottest tried: they find the positives no nearer than random candidates.")])  # fmt: skip
def test_the_verdict_tells_the_cold_from_the_hot_end(report: SearchReport, at: float, words: str) -> None:
    best = risk.TemperatureFit(at, 0.0, 0.0, at_bound=at != 0.5)
    assert verdict(dataclasses.replace(report, best=best)).endswith(words)


def test_positives_farther_than_random_candidates_are_not_blamed_on_the_pool() -> None:
    anchors, positives, pool = embeddings(40, 200)
    assert "no nearer than random candidates" in verdict(measure_search(anchors, -positives, pool, max_k=4))


def test_the_cold_end_of_the_search_is_not_blamed_on_the_pool(report: SearchReport) -> None:
    """Embeddings without a direction of their own, as of an untrained BERT: any temperature is as good."""
    assert report.best is not None
    ess = np.full_like(report.sweep.ess, 30.0)
    best, sweep = dataclasses.replace(report.best, at_bound=True), dataclasses.replace(report.sweep, ess=ess)
    cold = dataclasses.replace(report, best=best, sweep=sweep)
    assert verdict(cold).endswith(", the coldest tried.")


def test_the_shortfall_link_stands_at_its_best_exponent(report: SearchReport) -> None:
    """As the softmax does, whose temperature is searched for: a grid would charge its coarseness to one of them."""
    assert report.links is not None
    anchors, positives, pool = embeddings(400, 600)
    pos, neg = (anchors * positives).sum(1).clamp(-1, 1), kernels.CosineRows(anchors, pool)
    best = report.links.params[1]["beta"]
    values = [search_cross_entropy(pos, neg, link=kernels.WeibullLink(best * factor)) for factor in (1.0, 0.97, 1.03)]
    assert values[0].value == pytest.approx(report.links.ce[1])
    assert all(values[0].value <= other.value or other.ess_median < 30 for other in values[1:])


def test_every_number_of_the_report_is_printed_drawn_and_written(report: SearchReport, tmp_path: Path) -> None:
    text = format_report(report)
    for found in (verdict(report), f"{report.recommendation.k_safe_upper:,}", f"{report.cross_entropy.value:.4f}"):
        assert found in text
    assert all(title in text and row[0] in text for title, _, _, rows in sections(report) for row in rows)
    record = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert record["recommendation"]["k_plug"] == report.recommendation.k_plug and record["bias"]["k"][-1] == 1024
    assert "bias_k" not in record["sweep"]  # nobody asked for it
    assert "per_anchor" not in record["bias"] and "log_Z" not in record["cross_entropy"]
    pytest.importorskip("matplotlib")
    left, right = draw(report).axes
    assert left.get_xlabel() == "negatives" and right.get_xlabel() == "temperature"
    write_page(report, str(tmp_path / "page.html"), "some-model", ["A note."])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(part in page for part in ("Search with some-model", "A note.", "Warning: beyond k", "data:image/png"))


def test_a_collapsed_encoder_finds_nothing_and_ends_in_no_traceback() -> None:
    """Every cosine is 1 up to rounding, so that no candidate has a shortfall of which a tail could be made."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(1, 384, generator=generator)).expand(200, 384).contiguous()
    found = measure_search(rows[:40], rows[:40], rows, max_k=4)
    assert found.retrieval == dict.fromkeys(found.retrieval, 0)  # a tie is no hit
    assert found.cross_entropy.value == pytest.approx(0, abs=1e-6)
    assert not any("outscores the whole pool" in remark for remark in found.warnings)


def test_the_json_has_every_column_of_the_sweep(report: SearchReport) -> None:
    record = report.to_dict()
    assert len(record["sweep"]["chi2"]) == len(record["sweep"]["tau"]) and "chi2" not in record["cross_entropy"]


def test_numbers_that_nobody_could_run_are_short() -> None:
    anchors = torch.eye(8)[:1].expand(40, 8)
    found = measure_search(anchors[:10], anchors[:10], -anchors, temperature=0.0034, max_k=4)
    assert found.recommendation.k_safe_upper > 1e100
    assert all(len(cell) < 30 for *_, rows in sections(found) for row in rows[:4] for cell in row[:2])
    assert len(verdict(found)) < 400


def test_a_small_cold_pool_with_an_anchor_in_it_warns_and_names_no_temperature() -> None:
    anchors, positives, pool = embeddings(40, 20)
    found = measure_search(anchors, positives, torch.cat([pool, anchors[:1]]), temperature=0.02, max_k=4)
    assert any("remove it" in remark for remark in found.warnings)
    assert any("effective sample size" in remark for remark in found.warnings)
    assert found.best is None and found.links is None and "too small to tell the best temperature" in verdict(found)


def test_the_hottest_temperature_is_measured() -> None:
    found = measure_search(*embeddings(40, 200), temperature=1e300, max_k=4)
    assert found.recommendation.k_worst_case == 1 and found.cross_entropy.value == pytest.approx(0, abs=1e-9)


def test_retrieval_figures_are_those_of_a_plain_ranking() -> None:
    anchors, positives, pool = embeddings(60, 300, seed=1)
    rank = 1 + (anchors @ pool.T > (anchors * positives).sum(1, keepdim=True)).sum(1).numpy()
    found = retrieval_figures(anchors, positives, pool)
    for k in (1, 10, 100):
        assert found[f"recall@{k}"] == pytest.approx((rank <= k).mean())
    assert found["MRR@10"] == pytest.approx(np.where(rank <= 10, 1 / rank, 0).mean())
    assert found["nDCG@10"] == pytest.approx(np.where(rank <= 10, 1 / np.log2(rank + 1), 0).mean())


def test_faiss_through_datasets_finds_the_same_and_an_approximate_index_overlooks_some() -> None:
    pytest.importorskip("faiss")
    anchors, positives, pool = embeddings(60, 2000, seed=1)
    exact = retrieval_figures(anchors, positives, pool)
    assert retrieval_figures(anchors, positives, pool, "Flat") == pytest.approx(exact)
    coarse = retrieval_figures(anchors, positives, pool, "IVF40,Flat")
    assert all(coarse[name] >= value for name, value in exact.items()) and coarse["recall@100"] > exact["recall@100"]


@pytest.mark.parametrize(
    ("factory", "reason"),
    [("IVF400,Flat", "Number of training points"), ("IVF0,Flat", "nprobe"), ("PQ5", "multiple of")],
)
def test_an_index_that_this_pool_cannot_have_is_named_before_anything_is_measured(
    factory: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss")
    check_index(factory)  # of another pool it can be one
    monkeypatch.setattr(kernels, "search_cross_entropy", None)
    with pytest.raises(InputError, match=f"faiss_index {factory}: .*{reason}.*exact search"):
        measure_search(*embeddings(40, 200), max_k=4, faiss_index=factory)


WORDS = "red blue green cat dog man woman house river city train door year lamp water music".split()
SENTENCES = [f"the {one} and the {other}" for one in WORDS for other in WORDS if one != other]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    pairs = "".join(f"a {word} is here\there is a {word}\t{4 + i % 2}\n" for i, word in enumerate(WORDS * 2))
    contents = {
        "graded.tsv": "sentence1\tsentence2\tscore\n" + pairs,
        "pairs.tsv": "anchor\tpositive\n" + "".join(f"a {word} is here\there is a {word}\n" for word in WORDS),
        "three.tsv": "anchor\tpositive\tnegative\n" + "a\tb\tc\n" * 12,
        "few.tsv": "anchor\tpositive\n" + "a\tb\n" * 3,
        "holes.tsv": "anchor\tpositive\n" + "a\tb\n" * 2 + "a\t\n" * 9,
        "latin.txt": "caf\udce9\n" * 20,
        "pool.txt": "\n".join([*SENTENCES, "A CAT is  here"]) + "\n",
        "tiny.txt": "one\ntwo\n",
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    return {name: str(tmp_path / name) for name in contents}


def test_command_measures_a_model_and_writes_its_files(
    tiny_bert: str, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("matplotlib")
    outputs = {
        name: str(tmp_path / f"out.{end}") for name, end in (("json", "json"), ("plot", "png"), ("report", "html"))
    }
    flags = [word for name, path in outputs.items() for word in (f"--{name}", path)]
    shared_flags = ["--temperature", "0.2", "--max-k", "64", "--device", "cpu", "--cache_dir", str(tmp_path / "cache")]
    assert main(["search", tiny_bert, files["pairs.tsv"], "--pool", files["pool.txt"], *shared_flags, *flags]) == 0
    printed = capsys.readouterr().out
    assert "How many negatives" in printed and "recall@10" in printed
    record = json.loads(Path(outputs["json"]).read_text())
    assert record["model"] == "tiny_bert" and record["pairs"] == 16 and record["data"]["pool"] == ["pool.txt"]
    assert record["data"]["equal_to_a_pair"] == 1 and record["pool"] == len(SENTENCES)  # equal by its token ids
    assert str(tmp_path) not in Path(outputs["json"]).read_text() + Path(outputs["report"]).read_text()
    assert Path(outputs["plot"]).read_bytes().startswith(b"\x89PNG")

    # Without a pool it is the sentences of the pairs that score less, of which half are in pairs that are kept.
    assert main(["search", tiny_bert, files["graded.tsv"], "--min_score", "5", *shared_flags]) == 2
    assert "16 pool sentences are left" in capsys.readouterr().err
    assert main(["search", tiny_bert, files["graded.tsv"], "--min_score", "5", "--pool", files["pool.txt"],
                 "--max_pool", "100", "--max_pairs", "12", *shared_flags]) == 0  # fmt: skip
    assert capsys.readouterr().out.startswith("12 pairs, pool of ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pairs.tsv"], "give --pool CORPUS"),
        (["pairs.tsv", "--pool", "missing.txt"], "missing.txt"),
        (["graded.tsv", "--min_score", "4", "--pool_column", "x"], "--pool_column goes with --pool"),
        (["few.tsv", "--pool", "pool.txt"], "3 pairs to search with, needed are 10"),
        (["three.tsv", "--pool", "pool.txt"], "pairs have two"),
        (["graded.tsv", "--min_score", "6", "--pool", "pool.txt"], "0 pairs to search with"),
        (["graded.tsv", "--min_score", "4", "--text_columns", "a", "b"], "does not go with --min_score"),
        (["pairs.tsv", "--pool", "pool.txt", "--temperature", "0"], "--temperature must be a positive number"),
        (["pairs.tsv", "--pool", "pool.txt", "--temperature", "0.001"], "at least 0.0034"),
        (["pairs.tsv", "--pool", "pool.txt", "--tolerance", "nan"], "--tolerance must be a positive number"),
        (["pairs.tsv", "--pool", "pool.txt", "--tolerance", "1e-300"], "--tolerance must be at least 1e-12"),
        (["pairs.tsv", "--pool", "pool.txt", "--max_k", "0"], "max_k"),
        (["pairs.tsv", "--pool", "pool.txt", "--max_k", str(2**60)], "--max_k must be at most 2^53"),
        (["pairs.tsv", "--pool", "pool.txt", "--json", "/"], "--json cannot be written"),
        (["graded.tsv", "--min_score=-inf", "--pool", "pool.txt"], "--min_score must be a finite number"),
        (["pairs.tsv", "--pool", "three.tsv"], "name one with --pool_column: 'anchor'"),
        (["pairs.tsv", "--pool", "latin.txt"], "such as --encoding latin-1"),
        (["holes.tsv", "--pool", "pool.txt"], "drop such rows with --skip_bad"),
        (["holes.tsv", "--pool", "pool.txt", "--skip_bad"], "2 pairs to search with"),
        (["latin.txt", "--pool", "latin.txt", "--encoding", "latin-1"], "pairs have two"),
    ],
)
def test_bad_input_is_one_sentence_before_a_model_is_loaded(
    files: dict[str, str], arguments: list[str], words: str, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    given = [files.get(word, word) for word in arguments]
    assert main(["search", "no-such-model", *given, "--cache_dir", str(tmp_path / "cache")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert words in error and "no-such-model" not in error


def test_an_index_that_no_pool_can_have_is_refused_before_a_model_is_loaded(
    files: dict[str, str], capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("faiss")
    assert main(["search", "m", files["pairs.tsv"], "--pool", files["pool.txt"], "--faiss_index", "Foo"]) == 2
    assert "faiss_index Foo: could not parse index string" in capsys.readouterr().err


def test_pool_smaller_than_a_sample_is_refused(tiny_bert: str, files: dict[str, str], tmp_path: Path,
                                               capsys: pytest.CaptureFixture) -> None:  # fmt: skip
    arguments = [files["pairs.tsv"], "--pool", files["tiny.txt"], "--cache_dir", str(tmp_path / "cache")]
    assert main(["search", tiny_bert, *arguments]) == 2
    assert "2 pool sentences are left" in capsys.readouterr().err


def test_benchmark_of_the_rate_shows_a_constant_beside_the_naive_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("matplotlib")
    script = Path(__file__).resolve().parents[1] / "scripts" / "benchmarks" / "search_rate.py"
    sizes = ["--anchors", "200", "--pool", "600"]
    monkeypatch.setattr(sys, "argv", [str(script), *sizes, "--plot", str(tmp_path / "rate.png")])
    runpy.run_path(str(script), run_name="__main__")
    rows = [[float(cell) for cell in line.split()] for line in capsys.readouterr().out.splitlines()[1:-1]]
    k, exact, estimate, error, scaled, naive = np.array(rows).T
    np.testing.assert_allclose(scaled[-3:], scaled[-1], rtol=0.02)  # k * bias is constant
    assert (np.diff(scaled) > 0).all() and (np.abs(estimate - exact) < 2 * error).all()
    np.testing.assert_allclose(naive[-1] / naive[-2], 0.5, rtol=0.01)  # k grew fourfold
    assert (estimate < naive / 1000).all() and (tmp_path / "rate.png").stat().st_size > 1000


def test_pairs_are_read_from_the_real_stsb_file(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = [str(shared / "data" / "stsb" / "sts-test.csv"), "--min_score", "5", "--max_pool", "200"]
    assert main(["search", str(tmp_path / "no-such-model"), *arguments]) == 2
    assert "no-such-model" in capsys.readouterr().err  # the data were read, the model is what is missing


def test_cross_entropy_of_the_report_is_that_of_the_function(report: SearchReport) -> None:
    anchors, positives, pool = embeddings(400, 600)
    direct = search_cross_entropy((anchors * positives).sum(1), anchors @ pool.T, tau=0.2)
    assert direct.value == pytest.approx(report.cross_entropy.value, abs=1e-6)


def test_a_pool_that_every_positive_outscores_decides_nothing_and_says_so() -> None:
    anchors, _, pool = embeddings(40, 200)
    found = measure_search(anchors, anchors, pool, temperature=0.02, max_k=4)
    assert found.retrieval["recall@1"] == 1 and "every positive outscores the whole pool" in found.warnings[-1]
    assert found.recommendation.k_plug is None and "no batch that can be run" in verdict(found)
    assert found.best is not None and found.best.at_bound and "the coldest that this pool can tell" in verdict(found)
