"""What a study found, over seeds: a summary for JSON, and from it tables as Markdown and a page with learning curves.

Only what is complete counts: an arm enters with all its report seeds, and a setting with all its own, or not at all. A
collapsed encoder has no score: its arm is shown without a mean, and compared with none.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

from simcse_weince.outputs import shareable
from simcse_weince.page import Page, label, new_figure
from simcse_weince.study.plan import Study, lookup
from simcse_weince.study.statistics import holm, paired_difference, spread

Table = tuple[str, list[str], list[list[str]]]
_NEEDED = ("seeds_for_half_a_point", "seeds_for_a_point")
_SPREAD = ["mean", "sd", "95 % interval"]
_MADE_WITH = ("versions", "device", "processes", "precision")


def summarize(study: Study) -> dict[str, Any]:
    """Everything that a study has found so far, in points, ready for JSON.

    Returns:
        ``settings``: the dev score of each arm's settings, and which is chosen. ``scores``: by title the ``arms`` and
        their paired ``differences`` to the baselines, with p after Holm's correction over the ``comparisons`` of the
        title: all that the study will have, so that no difference counts as shown because others are not there yet.
        ``curves``: by name in the training log, and arm, mean and standard deviation at each step. ``incomplete``:
        arm -> finished seeds. ``seconds`` of all runs, and ``seconds_of_a_run``, the mean of report runs.
        ``made_with``: versions, device, precision and a hash of all data of the report runs; more than one if they
        differ.
    """
    complete: dict[str, list[dict[str, Any]]] = {}
    incomplete, settings, seconds = {}, [], 0.0
    for arm in study.arms:
        chosen = study.chosen(arm)
        for setting in study.settings(arm):
            records = [record for run in study.trials("settings", arm, setting) if (record := study.record(run))]
            seconds += sum(record["seconds"] for record in records)
            if records and len(records) == len(study.seeds["settings"]):
                told = {"arm": arm, "setting": shareable(setting), "chosen": setting == chosen}
                settings.append({**told, **_spread([record["select"] for record in records], study.scale)})
        runs = study.trials("report", arm, chosen or {})
        records = [record for run in runs if chosen is not None and (record := study.record(run))]
        if len(records) == len(runs):
            complete[arm] = records
            seconds += sum(record["seconds"] for record in records)
        else:
            incomplete[arm] = f"{len(records)} of {len(runs)}"
    finished = [record for records in complete.values() for record in records]
    report = [record["seconds"] for record in finished]
    made_with = {json.dumps(_made_with(record), sort_keys=True) for record in finished}
    return {
        "study": study.output_dir.resolve().name, "settings": settings,
        "scores": {title: _score(study, place, complete) for title, place in study.scores.items()},
        "curves": {name: _curves(name, complete) for name in study.curves}, "incomplete": incomplete,
        "made_with": [json.loads(text) for text in sorted(made_with)],
        "seconds": seconds, "seconds_of_a_run": sum(report) / len(report) if report else None,
    }  # fmt: skip


def _made_with(record: dict[str, Any]) -> dict[str, Any]:
    """What has to be the same for runs to be compared."""
    run = record["run"]
    data = [
        [file.get("sha256") or file.get("name") for file in run.get("corpus", {}).get("files", [])],  # or a stream
        {role: part.get("sha256") for role, part in run.get("images", {}).items()},
        {role: pairs.get("files") for role, pairs in run.get("graded_pairs", {}).items()},
        [task.get("files") for result in record["evaluations"].values() for task in result.get("tasks", [])],
    ]
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    return {**{key: run.get(key) for key in _MADE_WITH}, "data": digest}


def _spread(scores: Sequence[float | None], scale: float) -> dict[str, Any]:
    """The `spread` in points; of which nothing is known but the number where a seed has no score."""
    known = [scale * score for score in scores if score is not None]
    return spread(known) if len(known) == len(scores) else {**spread([0.0]), "n": len(scores), "mean": None}


def _score(study: Study, place: str, complete: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    arms: dict[str, dict[str, Any]] = {}
    for arm, records in complete.items():
        scores = [lookup({**record["run"], **record["evaluations"]}, place) for record in records]
        each = [None if score is None else study.scale * score for score in scores]
        arms[arm] = {"setting": records[0]["setting"], **_spread(scores, study.scale), "each": each}
    planned = [(arm, baseline) for number, baseline in enumerate(study.baselines)
               for arm in study.arms if arm not in study.baselines[: number + 1]]  # fmt: skip
    known = {arm: one["each"] for arm, one in arms.items() if one["mean"] is not None}
    differences = [
        {"arm": arm, "baseline": baseline, **paired_difference(known[arm], known[baseline], len(planned))}
        for arm, baseline in planned
        if arm in known and baseline in known
    ]
    missing = [1.0] * (len(planned) - len(differences))
    for difference, p in zip(differences, holm([one["p"] for one in differences] + missing), strict=False):
        difference["p_holm"] = p
    return {"arms": arms, "differences": differences, "comparisons": len(planned)}


def _curves(name: str, complete: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    curves = {}
    for arm, records in complete.items():
        runs = [{entry["step"]: entry[name] for entry in record["curve"] if entry.get(name) is not None}
                for record in records]  # fmt: skip
        if steps := sorted(set.intersection(*map(set, runs))):
            points = [spread([run[step] for run in runs]) for step in steps]
            # Six digits, as many as the logs have.
            rounded = {key: [point[key] and float(f"{point[key]:.6g}") for point in points] for key in ("mean", "sd")}
            curves[arm] = {"steps": steps, **rounded}
    return curves


def verdict(summary: dict[str, Any]) -> str:
    """In a few sentences: what the first score shows, what it cannot show, and what it would take."""
    title, score = next(iter(summary["scores"].items()))
    differences, comparisons, text = score["differences"], score["comparisons"], []
    if summary["incomplete"]:
        text.append(f"Not finished: {', '.join(summary['incomplete'])}.")
    if len(made := summary["made_with"]) > 1:
        differ = [name for name in made[0] if any(one[name] != made[0][name] for one in made)]
        text.append(f"The runs were not made alike: they differ in {', '.join(differ).replace('_', ' ')}.")
    text += [
        f"{title}: {arm} has no score in {one['each'].count(None)} of {one['n']} seeds, so it is compared with none."
        for arm, one in score["arms"].items()
        if one["mean"] is None
    ]
    if not differences:
        return " ".join([*text, "There is no difference to test: it takes an arm and a baseline that have all scores."])
    shown = [f"{one['arm']} {one['mean']:+.2f} to {one['baseline']}" for one in differences if one["p_holm"] <= 0.05]
    seeds, smallest = differences[0]["n"], min(1.0, comparisons * 2.0 ** (1 - differences[0]["n"]))
    found = f"{title}: {len(shown)} of {comparisons} differences are shown, by p after Holm of at most 0.05"
    text.append(f"{found}: {'; '.join(shown)}." if shown else f"{found}.")
    if smallest > 0.05:
        text.append(f"With {seeds} seed{'s' * (seeds > 1)} that p cannot be below {smallest:.2g}, so "
                    "read the intervals or add seeds.")  # fmt: skip
    if seeds > 1:
        widest = max(differences, key=lambda one: one["sd"])
        both = 2 * summary["seconds_of_a_run"]
        half, whole = (f"{widest[name]} seeds ({_hours(widest[name] * both)} of runs)" for name in _NEEDED)
        spread_of = f"At the widest spread, {widest['arm']} to {widest['baseline']}"
        text.append(f"{spread_of}, two arms need {half} to show 0.5 points and {whole} for 1.0.")
    return " ".join(text)


def _hours(seconds: float) -> str:
    """Two digits, also of hundreds of hours."""
    return f"{float(f'{seconds / 3600:.2g}'):g} hours"


def tables(summary: dict[str, Any]) -> list[Table]:
    """The summary as titles, headers and rows of formatted cells; without those that have no row."""
    result: list[Table] = []
    for title, score in summary["scores"].items():
        rows = [[arm, *_cells(one), " ".join("-" if value is None else f"{value:.2f}" for value in one["each"])]
                for arm, one in score["arms"].items()]  # fmt: skip
        result.append((title, ["arm", "setting", *_SPREAD, "each seed"], rows))
        rows = [[f"{one['arm']} - {one['baseline']}", *_cells(one, "+"), f"{one['p']:.3g}", f"{one['p_holm']:.3g}",
                 *(str(one[name] or "-") for name in _NEEDED)] for one in score["differences"]]  # fmt: skip
        header = ["same seeds", *_SPREAD, "p", "p, Holm", "seeds for 0.5", "seeds for 1.0"]
        result.append((f"{title}: paired differences", header, rows))
    rows = [[one["arm"], *_cells(one), "chosen" if one["chosen"] else ""] for one in summary["settings"]]
    result.append(("Settings, by the dev score of other seeds", ["arm", "setting", *_SPREAD, ""], rows))
    result.append(("Not complete", ["arm", "seeds"], [list(item) for item in summary["incomplete"].items()]))
    return [table for table in result if table[2]]


def _cells(one: dict[str, Any], sign: str = "") -> list[str]:
    setting = (
        [", ".join(f"{name} {value}" for name, value in one["setting"].items()) or "-"] if "setting" in one else []
    )
    if one["sd"] is None:
        return [*setting, "-" if one["mean"] is None else f"{one['mean']:{sign}.2f}", "-", "-"]
    interval = f"{one['low']:{sign}.2f} to {one['high']:{sign}.2f}"
    return [*setting, f"{one['mean']:{sign}.2f}", f"{one['sd']:.2f}", interval]


def to_markdown(summary: dict[str, Any]) -> str:
    """Verdict and tables, the columns aligned so that a terminal shows them as well."""
    parts = [f"# {summary['study']}", verdict(summary)]
    for title, header, rows in tables(summary):
        header, *rows = ([" ".join(cell.replace("|", r"\|").split()) for cell in row] for row in (header, *rows))
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [header, ["-" * width for width in widths], *rows]
        parts += [f"## {title}", "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)]
    return "\n\n".join([*parts, f"All runs took {_hours(summary['seconds'])}."]) + "\n"


def write_page(summary: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write verdict, tables and learning curves, with bands of one standard deviation, as a self-contained page."""
    page = Page(summary["study"], verdict(summary))
    for title, header, rows in tables(summary):
        page.heading(title)
        page.table(header, rows)
    page.heading("During training")
    for name, curves in summary["curves"].items():
        figure = new_figure()
        axes = figure.subplots()
        axes.set(xlabel="step", ylabel=label(name))
        for arm, curve in curves.items():
            axes.plot(curve["steps"], curve["mean"], label=label(arm))
            bands = [(mean - (sd or 0), mean + (sd or 0)) for mean, sd in zip(curve["mean"], curve["sd"], strict=True)]
            axes.fill_between(curve["steps"], *zip(*bands, strict=True), alpha=0.15)
        if curves:
            axes.legend()
            page.figure(
                figure, f"{name} by step, a line for each arm", "Mean and standard deviation over seeds", "curve"
            )
    page.write(path)
