"""The diagnosis: what it says of encoders whose tail is known, and that the page and the files hold it."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import vonmises_fisher

from simcse_weince.cli import main
from simcse_weince.criterion import Weince
from simcse_weince.extremes.link_choice import LinkChoice
from simcse_weince.extremes.pot import PotFit
from simcse_weince.extremes.report import diagnose, read_verdict
from simcse_weince.extremes.scores import encode_images
from simcse_weince.vision.backbones import VisionEncoder, build_backbone
from simcse_weince.vision.views import ViewOptions, evaluation_view
from tests.test_page import CHROMIUM, Reader, open_in_chromium


@pytest.fixture(scope="module")
def sphere(tmp_path_factory):
    """Uniform points on the sphere in 6 dimensions, and positives near them: cosines end at 1 with shape -2/5."""
    folder = tmp_path_factory.mktemp("sphere")
    rng = np.random.default_rng(0)
    points = rng.standard_normal((1200, 6)).astype(np.float32)
    np.save(folder / "points.npy", points)
    np.save(folder / "positives.npy", points + 0.5 * rng.standard_normal(points.shape).astype(np.float32))
    return folder


@pytest.fixture(scope="module")
def outcome(sphere):
    """The command run once with all its outputs."""
    files = ["--report", sphere / "page.html", "--json", sphere / "numbers.json", "--plots", sphere / "plots"]
    arguments = [sphere / "points.npy", sphere / "positives.npy", "--bootstrap", 50, *files]
    assert main(["diagnose", *map(str, arguments)]) == 0
    return json.loads((sphere / "numbers.json").read_text()), (sphere / "page.html").read_text(encoding="utf-8")


def test_dg01_points_on_a_sphere_have_their_shape_and_endpoint(outcome):
    """The shape of cosines of uniform points is -2 / (d - 1), the endpoint 1; a free location gave the wrong sign."""
    pot = outcome[0]["diagnoses"][0]["pot"]
    assert pot["shape"] == pytest.approx(-0.4, abs=0.06)
    assert pot["endpoint"] == pytest.approx(1, abs=0.02)
    assert pot["intervals"] == "bootstrap over both members of the pairs" and pot["domain"] == "weibull"


def test_a_pair_of_rows_is_one_observation(outcome):
    found = outcome[0]["diagnoses"][0]
    assert found["measures"]["pairs compared"] == 1200 * 1199 / 2
    assert found["pot"]["excesses"] == pytest.approx(1200 * 1199 / 200, rel=0.01) and found["pot"]["ties"] < 70


def test_the_verdict_stands_first_with_the_setting(outcome):
    numbers, text = outcome
    reader = Reader(text)
    words = " ".join(reader.words)
    verdict, setting = (numbers["diagnoses"][0][name] for name in ("verdict", "setting"))
    assert verdict.startswith("These data support the correction") and setting.startswith("--loss weince")
    assert words.index("These data support") < words.index("Setting:") < words.index("Does the tail end?")
    assert numbers["versions"]["simcse-weince"] and numbers["seed"] == 0


def test_every_figure_has_a_text_alternative_and_is_a_file(outcome, sphere):
    alternatives = [attributes["alt"] for tag, attributes in Reader(outcome[1]).tags if tag == "img"]
    assert len(alternatives) == 7 and all(len(text) > 20 for text in alternatives)
    names = [path.name.split("-")[1] for path in sorted((sphere / "plots").iterdir())]
    assert names == ["histogram", "quantiles", "stability", "mean_excess", "blend", "shape", "links"]


def test_nothing_tells_where_the_files_were(outcome, sphere):
    assert str(sphere) not in outcome[1] and str(sphere) not in json.dumps(outcome[0])


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_page_opens_in_a_browser_without_console_error_or_request(outcome, tmp_path):
    (tmp_path / "page.html").write_text(outcome[1], encoding="utf-8")
    requests, log, dom = open_in_chromium(tmp_path)
    assert requests == ["/page.html"] and "CONSOLE" not in log and dom.count("<img") == 7


def test_dg05_the_exponential_is_fitted_on_its_own(outcome):
    pot = outcome[0]["diagnoses"][0]["pot"]
    assert pot["exponential_scale"] == pytest.approx(pot["scale"] / (1 - pot["shape"]), rel=0.02)  # the mean excess
    assert pot["exponential_scale"] < 0.8 * pot["scale"] and pot["likelihood_ratio"] > 100


# ---- little or strange data ----


def test_dg03_too_few_excesses_are_said_and_the_thresholds_listed():
    rows = np.random.default_rng(1).standard_normal((40, 6)).astype(np.float32)
    found = diagnose("few", rows, tail_quantile=0.99, bootstrap=20)
    assert re.search(r"\d+ of \d+ scores are above the threshold and a fit needs 50", found.verdict)
    assert found.setting.startswith("none") and len(found.stability) == 9
    assert all(row["reason"] for row in found.stability if row["shape"] is None)
    json.dumps(found.to_json(), allow_nan=False)


def test_dg06_an_encoder_that_collapsed_gets_no_parameters(tmp_path, capsys):
    np.save(tmp_path / "one_point.npy", np.ones((300, 4), np.float32) + 1e-9)
    page = tmp_path / "page.html"
    assert main(["diagnose", str(tmp_path / "one_point.npy"), "--report", str(page)]) == 0
    assert "Nothing can be said about the tail. The 1000 largest of 44850 scores are equal." in capsys.readouterr().out
    assert page.exists()


def test_the_quantile_that_a_refusal_names_is_not_refused(tmp_path, capsys):
    np.save(tmp_path / "few.npy", np.random.default_rng(1).standard_normal((40, 6)).astype(np.float32))
    words = ["diagnose", str(tmp_path / "few.npy"), "--bootstrap", "2"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "8 of 780 scores are above the threshold" in said
    assert main([*words, "--quantile", re.search(r"a quantile of at most (\S+) leaves", said)[1]]) == 0
    assert "Nothing can be said" not in capsys.readouterr().out


@pytest.mark.parametrize("rows", [2, 3, 5, 20])
def test_few_rows_are_called_few_and_not_equal(rows):
    found = diagnose("few", np.random.default_rng(2).standard_normal((rows, 6)).astype(np.float32), bootstrap=2)
    assert f"of {rows * (rows - 1) // 2} scores are above the threshold" in found.verdict
    assert "too few rows" in found.verdict and "equal" not in found.verdict


def test_equal_embeddings_are_no_negatives_of_each_other():
    rows = np.random.default_rng(2).standard_normal((300, 6)).astype(np.float32)
    found = diagnose("twice", np.concatenate([rows, rows[:50]]), bootstrap=20)
    assert found.measures["pairs left out as duplicates"] == 50
    assert found.measures["uniformity"] == diagnose("once", rows, bootstrap=2).measures["uniformity"]
    assert diagnose("collapsed", np.ones((300, 4), np.float32), bootstrap=2).measures["uniformity"] == pytest.approx(0)
    assert found.scores.hardest.max() < 1


def test_equal_rows_are_no_negatives_among_views_either(sphere, tmp_path):
    for name in ("points", "positives"):
        rows = np.load(sphere / f"{name}.npy")[:200]
        np.save(tmp_path / f"once_{name}.npy", rows)
        np.save(tmp_path / f"twice_{name}.npy", np.concatenate([rows, rows]))
    found = []
    for times in ("once", "twice"):
        words = [str(tmp_path / f"{times}_{name}.npy") for name in ("points", "positives")]
        assert main(["diagnose", *words, "--bootstrap", "2", "--json", str(tmp_path / "n.json")]) == 0
        found.append(json.loads((tmp_path / "n.json").read_text())["diagnoses"][0]["measures"])
    once, twice = found
    for name in ("mean cosine of a positive", "share of positives nearer than every negative"):
        assert twice[name] == pytest.approx(once[name], abs=1e-6) and once[name] > 0.1


def test_two_positives_of_an_anchor_are_no_negatives_of_it():
    """The anchors of a batch are masked as in training."""
    rows = np.random.default_rng(4).standard_normal((60, 6)).astype(np.float32)
    near = rows + 0.01
    keys = torch.arange(60)
    found = []
    for first_keys in (keys, keys // 2):
        first, second = rows.copy(), near.copy()
        first[1::2], second[1::2] = (
            first[::2],
            second[::2],
        )  # each anchor twice
        views = (first, second, first_keys, keys + 100)
        found.append(diagnose("x", rows, views=views, batch_size=60, bootstrap=2).anchors["likelihood"][0])
    assert not np.allclose(*found)
    same = [(first, second, keys // 2, second_keys) for second_keys in (None, keys // 2)]
    found_same = [diagnose("x", rows, views=views, bootstrap=2).anchors["regression"] for views in same]
    np.testing.assert_array_equal(*found_same)
    criterion = Weince(evidence="likelihood")
    mask = (keys[:, None] // 2 != keys[None, :] // 2) | torch.eye(60, dtype=torch.bool)
    expected = criterion.anchor_statistics(torch.tensor(first), torch.tensor(second), keep=mask).blend
    np.testing.assert_allclose(np.sort(found[1]), np.sort(expected), atol=1e-6)


def test_positives_that_a_softmax_chose_do_not_ask_for_the_shortfall_link():
    """Positives from a von Mises-Fisher distribution around their anchors: which one is whose follows a softmax.

    One in eight is not among the 64 nearest of a thousand. As losers against 63 that only look hard they made lambda 1.
    """
    rng, d, slope = np.random.default_rng(0), 12, 12.0
    anchors = rng.normal(size=(1000, d))
    anchors /= np.linalg.norm(anchors, axis=1, keepdims=True)
    pole = np.eye(d)[0]
    around = vonmises_fisher(pole, slope).rvs(1000, random_state=rng)
    mirror = anchors - pole  # the reflection that takes the pole to the anchor
    mirror /= np.linalg.norm(mirror, axis=1, keepdims=True)
    positives = around - 2 * (around * mirror).sum(1, keepdims=True) * mirror
    views = (torch.as_tensor(anchors).float(), torch.as_tensor(positives).float(), None, None)
    found = diagnose("softmax", views[0], views=views, bootstrap=20)
    share = found.measures["share of positives among the 64 nearest, by which the link is judged"]
    assert 0.8 < share < 0.95 and found.link.anchors <= round(share * 1000)
    assert found.link.p_value > 0.01 and found.link.slopes["softmax"] == pytest.approx(slope, rel=0.1)


@pytest.mark.parametrize(("count", "rank", "shown"), [(200, 64, 1), (200, 65, 0), (20, 20, 1)])
def test_a_positive_among_the_64_nearest_judges_the_link(count, rank, shown):
    """Every positive is of the same rank; where there are fewer candidates than 64, all are among them."""
    angles = torch.arange(count) * 2 * np.pi / count
    points = torch.stack([angles.cos(), angles.sin()], dim=1).double()
    # Beside its anchor, on the circle: a negative on either side is nearer, one pair for each step.
    turn = torch.tensor((rank // 2 + (0.4 if rank % 2 else -0.1)) * 2 * np.pi / count)
    spun = points @ torch.tensor([[turn.cos(), turn.sin()], [-turn.sin(), turn.cos()]]).double()
    lifted = torch.cat([points, torch.zeros(count, 1)], dim=1)
    found = diagnose("circle", lifted, views=(lifted, torch.cat([spun, torch.zeros(count, 1)], dim=1), None, None),
                     bootstrap=2)  # fmt: skip
    assert found.measures["share of positives among the 64 nearest, by which the link is judged"] == shown


def test_figures_are_needed_for_a_page_alone(sphere, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("simcse_weince.commands.shared_options.find_spec", lambda name: None)
    monkeypatch.setattr("simcse_weince.extremes.report.build_page", None)
    words = ["diagnose", str(sphere / "points.npy"), "--bootstrap", "2", "--max_samples", "300"]
    assert main([*words, "--json", str(tmp_path / "n.json")]) == 0 and (tmp_path / "n.json").exists()
    assert capsys.readouterr().out.startswith("These data ")
    for drawn in (["--report", "page.html"], ["--plots", "plots"]):
        assert main([*words, *drawn]) == 2
        assert "matplotlib is not installed; pip install 'simcse-weince[report]'" in capsys.readouterr().err


def test_checkpoints_of_one_name_are_told_apart(sphere, tmp_path, capsys):
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        np.save(tmp_path / run / "best.npy", np.load(sphere / "points.npy")[:200])
    words = [str(tmp_path / "one/best.npy"), "--compare", str(tmp_path / "two/best.npy"), "--bootstrap", "2"]
    assert main(["diagnose", *words]) == 0
    assert [line[:14] for line in capsys.readouterr().out.splitlines()[::2]] == ["one/best.npy: ", "two/best.npy: "]


def test_batches_are_of_the_training_size_and_layout():
    vectors = torch.randn(150, 8, generator=torch.Generator().manual_seed(0))
    views = (vectors, vectors + 0.1, None, None)
    for layout, count in (("cross_view", 128), ("both_views", 256)):  # 22 rows do not fill a batch of 64
        found = diagnose("x", vectors, views=views, batch_size=64, layout=layout, bootstrap=2)
        assert all(values.shape == (2, count) for values in found.anchors.values())
    other = diagnose("x", vectors, views=views, batch_size=64, layout=layout, bootstrap=2, seed=1)
    assert not np.array_equal(other.anchors["regression"], found.anchors["regression"])


def test_thresholds_of_the_mean_excess_are_those_of_all_pairs():
    vectors = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    found = diagnose("x", vectors, bootstrap=2)
    life = {round(row["quantile"], 4): row["threshold"] for row in found.residual_life}
    stability = {row["quantile"]: row["threshold"] for row in found.stability}
    assert life[0.99] == pytest.approx(stability[0.99]) and min(life) == 0.9


def test_views_that_do_not_fit_are_said():
    rows = np.random.default_rng(3).standard_normal((60, 6)).astype(np.float32)
    for second, message in ((rows[:50], "must be shaped like anchors"), (rows * np.nan, "two rows with a direction")):
        with pytest.raises(ValueError, match=message):
            diagnose("x", rows, views=(rows, second, None, None), bootstrap=2)


@pytest.mark.parametrize("value", [np.nan, np.inf, 0])
def test_rows_without_a_direction_are_left_out_of_every_number(tmp_path, value, recwarn):
    rows = np.random.default_rng(3).standard_normal((300, 6)).astype(np.float32)
    np.save(tmp_path / "good.npy", np.delete(rows, 5, axis=0))
    np.save(tmp_path / "positives.npy", np.delete(rows, 5, axis=0) + 0.1)
    np.save(tmp_path / "more_positives.npy", rows + 0.1)
    rows[5] = value
    np.save(tmp_path / "bad.npy", rows)
    found = []
    for names in (("good.npy", "positives.npy"), ("bad.npy", "more_positives.npy")):
        files = ["--json", str(tmp_path / "n.json"), "--report", str(tmp_path / "page.html")]
        assert main(["diagnose", *(str(tmp_path / name) for name in names), "--bootstrap", "2", *files]) == 0
        found.append(json.loads((tmp_path / "n.json").read_text())["diagnoses"][0]["measures"])
    assert [numbers.pop("rows left out") for numbers in found] == [0, 1]
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]


@pytest.mark.parametrize("dtype", [np.longdouble, np.float16, ">f4"])
def test_embeddings_of_any_floating_type_are_read(tmp_path, dtype):
    np.save(tmp_path / "x.npy", np.random.default_rng(4).standard_normal((60, 6)).astype(dtype))
    assert main(["diagnose", str(tmp_path / "x.npy"), "--bootstrap", "2"]) == 0


def test_the_first_rows_of_a_npy_are_used(sphere, tmp_path):
    words = [str(sphere / "points.npy"), str(sphere / "positives.npy"), "--bootstrap", "2", "--max_samples", "200"]
    assert main(["diagnose", *words, "--json", str(tmp_path / "n.json")]) == 0
    found = json.loads((tmp_path / "n.json").read_text())["diagnoses"][0]
    share = found["measures"]["share of positives among the 64 nearest, by which the link is judged"]
    assert found["measures"]["anchors"] == 200 and found["link"]["anchors"] == round(200 * share) > 190


# ---- encoders ----


def sentences(tmp_path, pairs):
    words = "man woman dog cat house river city train water year world parcel lamp rain music people".split()
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(words, 6)) for _ in range(200)]
    path = tmp_path / ("pairs.tsv" if pairs else "text.txt")
    rows = ["sent0\tsent1", *(f"{line}\t{line} still" for line in lines)] if pairs else lines
    path.write_text("\n".join(rows) + "\n")
    return str(path)


@pytest.mark.parametrize("pairs", [False, True])
def test_two_encoders_stand_side_by_side(tmp_path, tiny_bert, pairs, capsys):
    files = ["--report", str(tmp_path / "page.html"), "--json", str(tmp_path / "numbers.json")]
    arguments = [tiny_bert, sentences(tmp_path, pairs), "--compare", tiny_bert, "--bootstrap", "20", *files]
    options = ["--pooler_type", "avg", "--device", "cpu", "--cache_dir", str(tmp_path), "--view_anchors", "150"]
    assert main(["diagnose", *arguments, *options]) == 0
    numbers = json.loads((tmp_path / "numbers.json").read_text())["diagnoses"]
    assert numbers[0] == numbers[1] and numbers[0]["name"] == "tiny_bert"
    share = numbers[0]["measures"]["share of positives among the 64 nearest, by which the link is judged"]
    assert numbers[0]["measures"]["anchors"] == 200 and share > 0.9
    assert numbers[0]["link"]["anchors"] == round(share * (200 if pairs else 150))
    assert 0 < numbers[0]["measures"]["alignment"] < 1
    text = (tmp_path / "page.html").read_text()
    assert text.count("tiny_bert: Blend of") == 4 and '<th scope="col" class="number">tiny_bert</th>' in text


def test_dg06_an_encoder_without_dropout_has_no_views_and_rounding_is_no_tail(tmp_path):
    """The first token of random weights is nearly the same vector for every text: cosines differ by rounding alone."""
    from tests.tiny_models import write_tiny_bert

    model = write_tiny_bert(tmp_path / "still", dropout=0.0)
    arguments = [model, sentences(tmp_path, False), "--json", str(tmp_path / "n.json"), "--bootstrap", "20"]
    assert main(["diagnose", *arguments, "--device", "cpu", "--cache_dir", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "n.json").read_text())["diagnoses"][0]
    assert found["link"] is None and found["pot"]["shape"] is None


@pytest.fixture(scope="module")
def image_encoder(tmp_path_factory):
    """A small encoder with a trained head, and 120 training and 10 test images, of which the first two are equal."""
    folder = tmp_path_factory.mktemp("images")
    torch.manual_seed(0)
    encoder = VisionEncoder(build_backbone("resnet18", image_size=8, width=0.125), 8, projection_size=16)
    encoder.save_pretrained(folder / "encoder")
    pixels = np.random.default_rng(0).integers(0, 256, (130, 8, 8, 3), dtype=np.uint8)
    pixels[1] = pixels[0]
    labels = np.arange(130) % 3
    np.savez(folder / "i.npz", x_train=pixels[:120], y_train=labels[:120], x_test=pixels[120:], y_test=labels[120:])
    return folder


def test_an_encoder_of_images_is_diagnosed_by_its_projections(image_encoder, tmp_path):
    words = [str(image_encoder / "encoder"), "--images", str(image_encoder / "i.npz"), "--json", str(tmp_path / "n")]
    assert main(["diagnose", *words, "--bootstrap", "20", "--view_anchors", "60", "--device", "cpu"]) == 0
    found = json.loads((tmp_path / "n").read_text())["diagnoses"][0]
    assert found["name"] == "encoder" and found["link"]["anchors"] == 60
    assert found["measures"]["anchors"] == 120 and found["measures"]["pairs left out as duplicates"] == 1


def test_an_encoder_that_stores_no_image_size_is_told_it(image_encoder, tmp_path, capsys):
    build_backbone("resnet18", image_size=8, width=0.125).save_pretrained(tmp_path / "bare")
    words = ["diagnose", str(tmp_path / "bare"), "--images", str(image_encoder / "i.npz"), "--bootstrap", "2"]
    assert main(words) == 2
    assert "Name it with --image_size" in capsys.readouterr().err
    assert main([*words, "--image_size", "8", "--view_anchors", "20", "--device", "cpu"]) == 0


def test_the_largest_seed_draws_views(image_encoder):
    encoder = VisionEncoder.from_pretrained(image_encoder / "encoder")
    pixels = torch.zeros((2, 3, 8, 8), dtype=torch.uint8)
    assert encode_images(encoder, pixels, ViewOptions(), view_seed=2 * (2**63 - 1) + 1).shape == (2, 16)


def test_images_are_embedded_as_the_criterion_sees_them(image_encoder):
    encoder, options = VisionEncoder.from_pretrained(image_encoder / "encoder"), ViewOptions(normalize=[[0.5] * 3] * 2)
    pixels = torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8)
    whole = encode_images(encoder, pixels, options, batch_size=7)
    seen = evaluation_view(pixels, 8, options.normalize)
    torch.testing.assert_close(whole, encoder.eval()(seen).detach(), rtol=1e-4, atol=1e-6)
    first, again, second = (encode_images(encoder, pixels, options, view_seed=seed) for seed in (4, 4, 5))
    assert torch.equal(first, again) and not torch.allclose(first, second) and not torch.allclose(first, whole)
    encoder.head_is_trained = False
    assert encode_images(encoder, pixels, options).shape == (20, 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a MODEL and DATA, a MODEL and --images, or a .npy"),
        (["{tiny_bert}", "text.txt", "--images", "i.npz"], "--images i.npz: leave out DATA"),
        (["x.npy", "--images", "i.npz"], "name encoders of images, not a .npy"),
        (["{tiny_bert}", "--images", "i.npz"], "a BertModel takes input_ids, not images"),
        (["{tiny_bert}"], "name the sentences to look at, as DATA"),
        (["missing.npy"], "missing.npy: no array can be read there"),
        (["{flat}"], "shape (3,); give floats in 2 dimensions"),
        (["{zeros}"], "two rows with a direction, got 0"),
        (["x.npy", "--quantile", "0.5"], "--quantile 0.5 is not between 0.9 and 0.9995"),
        (["x.npy", "--report", "{folder}"], "cannot be written there"),
        (["x.npy", "--report", "new", "--json", "./new"], "--report and --json would be one file"),
        (["x.npy", "--device", "cpu", "--split", "test"], "--split, --device: without effect on a .npy"),
        (["x.npy", "--text_column", "a"], "--text_column: without effect on a .npy"),
        (["{tiny_bert}", "--images", "i.npz", "--pooler_type", "cls"], "--pooler_type: without effect on images"),
        (["{tiny_bert}", "text.txt", "--image_size", "8"], "--image_size: without effect on sentences"),
        (["MODEL", "text.txt", "--noise_floor"], "MODEL, DATA: without effect on --noise_floor"),
        (["--noise_floor", "--images", "i.npz"], "--images: without effect on --noise_floor"),
        (["x.npy", "--seed", str(2**63)], "--seed: 9223372036854775808 is too large"),
        (["{huge}"], "huge.npy: no array can be read there"),
        (["{archive}"], "archive.npy: no array can be read there"),
        (["{points}", "{zeros}"], "zeros.npy: holds (3, 4), not the positive of each row of"),
        (["x.npy", "p.npy", "--compare", "y.npy"], "a .npy stands beside other .npy alone, and without positives"),
        (["x.npy", "--compare", "{tiny_bert}"], "a .npy stands beside other .npy alone"),
        (["{tiny_bert}", "text.txt", "--compare", "x.npy"], "a .npy stands beside other .npy alone"),
    ],
)
def test_unusable_input_is_one_sentence(tmp_path, tiny_bert, capsys, arguments, message):
    np.save(tmp_path / "flat.npy", np.ones(3, np.float32))
    np.save(tmp_path / "zeros.npy", np.zeros((3, 4), np.float32))
    np.save(tmp_path / "points.npy", np.random.default_rng(0).standard_normal((60, 4), np.float32))
    with open(tmp_path / "huge.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (10**11, 1000)})
    np.savez(tmp_path / "archive.npz", np.ones((3, 4)))
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    names = ("flat", "zeros", "points", "huge", "archive")
    places = {"tiny_bert": tiny_bert, "folder": tmp_path} | {name: tmp_path / f"{name}.npy" for name in names}
    assert main(["diagnose", *(word.format(**places) for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


# ---- the verdict ----

FIT = PotFit(n=10_000, excesses=1000, ties=0, at_cap=0, non_finite=0, threshold=0.6, cap=1.0, confidence=0.95,
             intervals="bootstrap over both members of the pairs", estimable=True, shape=-0.4,
             shape_interval=(-0.45, -0.35), scale=0.16, endpoint=1.0, endpoint_interval=(0.97, 1.03))  # fmt: skip
LINK = LinkChoice(anchors=1000, left_out=0, held_out_anchors=300, estimable=True, blend=0.4,
                  blend_interval=(0.3, 0.5), p_value=1e-6)  # fmt: skip
ROWS = [{"high": -0.3}, {"high": -0.2}, {"high": 0.1}, {"high": None}]


@pytest.mark.parametrize(
    ("fit", "link", "support", "tail", "setting"),
    [
        ({}, LINK, "support the correction.", "it is the cap", "--evidence likelihood"),
        ({}, None, "support the correction in part.", "Without positives", "--evidence likelihood"),
        ({"endpoint": 0.8, "endpoint_interval": (0.75, 0.85)}, replace(LINK, p_value=0.5),
         "do not support", "an end at 0.80", "--loss infonce"),
        ({"endpoint": 0.8, "endpoint_interval": (0.75, 0.85)}, LINK, "in part", "before the cap",
         "--gate 0.40 --shape 20 --temperature 0.05"),
        ({"endpoint": 1.3, "endpoint_interval": (1.2, 1.5)}, None, "do not support", "too little", "infonce"),
        ({"shape": 0.0, "shape_interval": (-0.1, 0.1)}, None, "do not support", "cannot be told", "infonce"),
        ({"shape": 0.3, "shape_interval": (0.2, 0.4)}, None, "do not support", "near-duplicates", "infonce"),
        ({"shape_interval": None, "reason": "All 9 scores are equal."}, LINK, "Nothing can be said", "All 9", "none"),
    ],
)  # fmt: skip
def test_the_verdict_follows_from_the_numbers(fit, link, support, tail, setting):
    verdict, found = read_verdict(replace(FIT, **fit), link, ROWS)
    assert support in verdict and tail in verdict and setting in found


def test_the_verdict_counts_the_thresholds_that_agree():
    assert "2 of 3 thresholds agree" in read_verdict(FIT, LINK, ROWS)[0]


def test_the_verdict_says_where_no_generalised_pareto_distribution_fits():
    said = "they say more than the interval"
    assert [said in read_verdict(replace(FIT, goodness_p=p), LINK, ROWS)[0] for p in (0.005, 0.5)] == [True, False]


def test_the_suggested_setting_is_the_nested_link():
    """With shape 1 / temperature the logit of the criterion is ((1 - g) s - g log(1 - s)) / temperature."""
    import torch

    from simcse_weince.links import blended_link_and_slope

    s = torch.linspace(-1, 0.99, 50, dtype=torch.float64)
    nested = ((1 - 0.4) * s - 0.4 * (1 - s + 1e-4).log()) / 0.05
    torch.testing.assert_close(blended_link_and_slope(s, 0.4, 20.0, 0.05)[0], nested)


def test_the_noise_floor_has_a_page_of_its_own(tmp_path, capsys):
    page, numbers = tmp_path / "page.html", tmp_path / "floor.json"
    assert main(["diagnose", "--noise-floor", "--report", str(page), "--json", str(numbers)]) == 0
    assert "stays at its squared bias" in capsys.readouterr().out
    record = json.loads(numbers.read_text())
    last = record["noise_floor"]["rows"][-1]
    assert last["softmax_mse"] == pytest.approx(last["softmax_closed"], rel=0.2)
    assert {row["domain"]: row["link"] for row in record["trichotomy"]}["weibull"] == "shortfall"
    assert len([tag for tag, _ in Reader(page.read_text()).tags if tag == "table"]) == 2
