"""Training runs beside one another: scores, learning curves, statistics of the loss, and what was set differently."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simcse_weince.outputs import read_json, shown_names
from simcse_weince.page import Page, label, new_figure

_NO_CURVES = ("epoch", "step", "total_flos", "runtime", "per_second", "train_loss")
_WHERE_THINGS_ARE = ("output_dir", "logging_dir", "run_name", "cache_dir")
_SHAPES = {
    "run.json": {"arguments": dict, "result": dict.fromkeys(("dev_best", "dev_last"), float | int | None)},
    "trainer_state.json": {"log_history": [{"step": int}]},
}
_REMEDY = "name the --output_dir of a finished training run"


@dataclass(frozen=True)
class TrainingRun:
    """What a training left in its folder.

    Attributes:
        name: Name of the folder.
        options: The options that were set.
        result: Its scores, plain values by name.
        history: Entries of the training log, each with its "step".
    """

    name: str
    options: dict[str, Any]
    result: dict[str, Any]
    history: list[dict[str, Any]]

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Each logged number as (step, value), NaN left out."""
        found: dict[str, list[tuple[int, float]]] = {}
        for entry in self.history:
            for name, value in entry.items():
                if not name.endswith(_NO_CURVES) and isinstance(value, (int, float)) and value == value:
                    found.setdefault(name.removeprefix("eval_"), []).append((int(entry["step"]), float(value)))
        return found


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[TrainingRun]:
    """Read finished runs of ``simcse-weince train`` and ``vision-train``, each once.

    Folders of equal names are told apart by as many of their parents as it takes.

    Raises:
        InputError: A folder holds no finished run, or a damaged one.
    """
    paths = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    runs = []
    for path, name in zip(paths, shown_names([*map(str, paths)]), strict=True):
        record, state = (read_json(path / name, shape, _REMEDY) for name, shape in _SHAPES.items())
        result = {key: value for key, value in record["result"].items() if value is not None}
        runs.append(TrainingRun(name, record["arguments"], result, state["log_history"]))
    return runs


def differences(runs: Sequence[TrainingRun]) -> list[list[str]]:
    """Rows of option name and its value in each run, for the options that differ; "default" where none was set."""
    names = sorted({name for run in runs for name in run.options} - set(_WHERE_THINGS_ARE))
    rows = [[name, *(str(run.options.get(name, "default")) for run in runs)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def scores(runs: Sequence[TrainingRun]) -> list[list[Any]]:
    """Rows of a number's name and its value in each run."""
    names = dict.fromkeys(name for run in runs for name in run.result)
    return [[name, *(run.result.get(name) for run in runs)] for name in names]


def build_comparison(runs: Sequence[TrainingRun]) -> Page:
    """The page: scores, differences, and a figure of each logged number with one line per run."""
    names = [run.name for run in runs]
    page = Page("Runs: " + ", ".join(names), _reading(runs))
    page.heading("Scores")
    page.table(["", *names], scores(runs))
    page.heading("What was set differently")
    if rows := differences(runs):
        page.table(["option", *names], rows)
    else:
        page.text("Nothing but the place of the output.")
    curves = [run.curves() for run in runs]
    series = dict.fromkeys(name for each in curves for name in each)
    varied = [name for name in series if len({value for each in curves for _, value in each.get(name, ())}) > 1]
    first = [name for name in varied if name == "loss" or "spearman" in name or "accuracy" in name]
    for heading, group in (("Learning curves", first), ("Statistics", sorted(set(varied) - set(first)))):
        if group:
            page.heading(heading)
        for name in group:
            figure = new_figure()
            axes, lasts = figure.subplots(), []
            for run, each in zip(runs, curves, strict=True):
                if points := each.get(name):
                    axes.plot(*zip(*points, strict=True), marker=".", label=label(run.name))
                    lasts.append(f"{run.name} {points[-1][1]:.4g}")
            axes.set(xlabel="step", ylabel=label(name))
            axes.legend()
            caption = f"{name} over the steps; the last value: {', '.join(lasts)}"
            page.figure(figure, caption, caption, name)
    return page


def _reading(runs: Sequence[TrainingRun]) -> str:
    lines = []
    for key, kind in (("dev_best", "dev"), ("test_after", "test")):
        found = {run.name: run.result[key] for run in runs if isinstance(run.result.get(key), float)}
        if found:
            best = max(found, key=lambda name: found[name])
            lines.append(f"{best} has the highest {kind} score, {found[best]:.4f}.")
    for run in runs:
        best_score, last = run.result.get("dev_best"), run.result.get("dev_last")
        if best_score is not None and last is not None and last < best_score - 0.02:
            lines.append(f"{run.name} fell from {best_score:.4f} at step {run.result.get('best_step')} to {last:.4f}.")
    if lines:
        lines.append("One run of a setting says little about it: seeds alone scatter by about 0.01.")
    return "\n".join(lines)
