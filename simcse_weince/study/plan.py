"""A study file, the runs that follow from it, and the records that these runs leave.

A study has two phases. In the first, "settings", each arm is trained with every setting of its grid on seeds of its
own, and the setting with the best mean on dev is chosen. Only with that one the seeds of the second, "report", are
trained and tested. Records of the first phase hold no test score, so none can be looked at while there is a choice.
"""

import inspect
import itertools
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from simcse_weince.commands import COMMANDS
from simcse_weince.errors import InputError
from simcse_weince.outputs import has_shape, read_json, shareable

PHASES = ("settings", "report")

# The arms that any comparison needs: the correction, its parts, and what could explain its gain without it.
PRESETS: dict[str, dict[str, Any]] = {
    "infonce": {"loss": "infonce"},
    # InfoNCE at the temperature that the blend gives each anchor, temperature / (1 - blend), and nothing else.
    "infonce-matched": {"loss": "weince", "shape": 0.0},
    "weince": {"loss": "weince"},
    "weince-likelihood": {"loss": "weince", "evidence": "likelihood"},
    "weince-released": {"loss": "released"},
    "infonce-released": {"loss": "released", "gate": 0.0},
    # A blend of 1 leaves no temperature: fixed here, it is not part of the grid.
    "weibull": {"loss": "weince", "gate": 1.0, "temperature": 0.05},
    "mnrl-hardness": {"loss": "mnrl-hardness"},
}

# Of the record of a run, what is read of it.
_RECORD = {
    "setting": dict, "options": dict, "select": float | int | None, "run": dict, "evaluations": dict,
    "curve": [{"step": int}], "seconds": float | int,
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One training: `options` are those of its command, but for the output folder."""

    phase: str
    arm: str
    setting: dict[str, Any]
    seed: int
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of its record, which no other run of the phase has and which can be shared."""
        chosen = [f"{name}={value}" for name, value in shareable(self.setting).items()]
        return "-".join([self.arm, *chosen, f"seed={self.seed}"]).replace("/", "_")

    def words(self, command: str, **places: Path) -> list[str]:
        """The words of an evaluation's command, with options and `places` filled in."""
        return [word.format(**{**self.options, **places}) for word in shlex.split(command)]


@dataclass(frozen=True)
class Study:
    """A study file.

    Attributes:
        output_dir: Folder of the records; relative to where the study is started.
        arms: Name -> options, or a list of names. The options of the preset of that name, or of the one that ``preset``
            names, are filled in; ``grid`` replaces the study's.
        seeds: "report" and, for a grid, "settings": two lists without a common seed.
        scores: Title -> dotted place in ``run.json`` or in an evaluation, such as ``suite.average_spearman.all``; the
            first is the one that the verdict is about.
        options: Options of every run.
        settings_options: Instead of these while settings are chosen, such as fewer steps.
        command: "train", "vision-train", or any command with ``--config``, ``--output_dir``, ``--seed`` and
            ``--resume_from_checkpoint last`` that leaves a ``run.json`` and a ``trainer_state.json``.
        processes: Devices of one run, by ``accelerate launch``; each adds a batch of its own.
        grid: Option -> values to choose from, for every arm that does not fix the option.
        select: Place in ``run.json`` of the dev score, higher is better, that the choice is made by.
        curves: Names in the training log that are shown as learning curves.
        baselines: Arms that the others are compared with; by default the first.
        scale: Factor from scores to points.
        evaluations: Name -> command on the trained encoder, with ``{run}`` for its folder, ``{last}`` for its last
            checkpoint and ``{option}`` for any option of the run.
    """

    output_dir: Path
    arms: dict[str, dict[str, Any]]
    seeds: dict[str, list[int]]
    scores: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)
    settings_options: dict[str, Any] = field(default_factory=dict)
    command: str = "train"
    processes: int = 1
    grid: dict[str, list[Any]] = field(default_factory=dict)
    select: str = "result.dev_best"
    curves: list[str] = field(default_factory=lambda: ["eval_sts-dev_spearman_cosine"])
    baselines: list[str] = field(default_factory=list)
    scale: float = 100
    evaluations: dict[str, str] = field(default_factory=dict)

    def settings(self, arm: str) -> list[dict[str, Any]]:
        """Every combination of the arm's grid; the empty one for an arm that has nothing to choose."""
        own = self.arms[arm]
        grid = own.get("grid", {name: values for name, values in self.grid.items() if name not in own})
        return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]

    def trials(self, phase: str, arm: str, setting: dict[str, Any]) -> list[Run]:
        """The runs of an arm with one setting, a seed each."""
        first = self.settings_options if phase == "settings" else {}
        options = {**self.options, **first, **self.arms[arm], **setting}
        options.pop("grid", None)
        return [Run(phase, arm, setting, seed, {**options, "seed": seed}) for seed in self.seeds.get(phase, [])]

    def runs(self, phase: str) -> list[Run | None]:
        """The runs of a phase, seed by seed, so that half a study is one with fewer seeds.

        None stands for a run whose setting is not chosen yet: the numbering is the same at any time.
        """
        columns: list[list[Run | None]] = []
        for arm in self.arms:
            if phase == "report":
                chosen = self.chosen(arm)
                runs = self.trials(phase, arm, chosen or {})
                columns.append([None if chosen is None else run for run in runs])
            elif len(settings := self.settings(arm)) > 1:
                columns += [[*self.trials(phase, arm, setting)] for setting in settings]
        return [run for row in zip(*columns, strict=True) for run in row]

    def chosen(self, arm: str) -> dict[str, Any] | None:
        """The setting with the best mean on dev, the first of equals; None while first-phase runs are missing."""
        settings, means = self.settings(arm), []
        for setting in settings if len(settings) > 1 else []:
            records = [self.record(run) for run in self.trials("settings", arm, setting)]
            scores = [record["select"] for record in records if record]
            if len(scores) < len(records):
                return None
            means.append(-math.inf if None in scores else sum(scores))  # a collapsed encoder has no score
        return settings[means.index(max(means)) if means else 0]

    def made_by(self, phase: str) -> dict[str, Any]:
        """What else than its options makes a record of a phase, in a form that can be shared."""
        evaluations = {
            name: shlex.join("=".join(shareable(word.split("="))) for word in shlex.split(command))
            for name, command in self.evaluations.items()
        }
        own = {"select": self.select} if phase == "settings" else {"evaluations": evaluations}
        return {"command": self.command, "processes": self.processes, **own}

    def record_path(self, run: Run) -> Path:
        """Where the record of a run is kept."""
        return self.output_dir / run.phase / f"{run.name}.json"

    def record(self, run: Run) -> dict[str, Any] | None:
        """The record of a run, or None if it is not finished.

        Raises:
            InputError: It is damaged, or was made with other options, evaluations or another `select`.
        """
        path = self.record_path(run)
        if not path.exists():
            return None
        record = read_json(path, _RECORD, "remove it, and the study makes it again")
        made_by = self.made_by(run.phase)
        # Older records say the number of processes alone.
        before = record.get("made_by") or {"processes": record.get("processes", self.processes)}
        differ = [name for name, value in before.items() if made_by.get(name) != value]
        if shareable(record["options"]) != shareable(run.options):
            differ.insert(0, "options")
        if differ:
            raise InputError(f"{path}: was made with other {' and '.join(differ)}; use another output_dir")
        return record


def lookup(record: Any, place: str, of: str = "a record") -> float | None:
    """The number at a dotted place of nested mappings and lists, such as ``result.dev_best``; None if undefined.

    Raises:
        InputError: There is no such place, or no number there.
    """
    try:
        for part in place.split("."):
            record = record[int(part)] if isinstance(record, list) else record[part]
        return None if record is None else float(record)
    except (LookupError, TypeError, ValueError):
        raise InputError(f"{of} has no number at {place}; name a place in run.json or an evaluation") from None


def read_study(
    path: str | Path, *, output_dir: str | Path | None = None, options: Mapping[str, Any] | None = None
) -> Study:
    """Read a study from its YAML file, whose keys are the attributes of `Study`, or from the folder of its records.

    Args:
        path: The file or the folder.
        output_dir: Instead of the one in the file.
        options: Added to those in the file, and winning over them.

    Raises:
        InputError: It cannot be read, or is no study; names the file and the key.
    """
    path = Path(path)
    if path.is_dir():
        path, output_dir = path / "study.yaml", output_dir or path
    try:
        content = load_yaml(path.read_text(encoding="utf-8-sig"))
        content["output_dir"] = Path(output_dir or content.get("output_dir") or "")
        if content["output_dir"] == Path():
            raise ValueError("has no output_dir; name one with --output_dir, or the folder of the study")
        for name in ("options", "settings_options"):
            if not has_shape(own := content.get(name) or {}, dict[str, Any]):
                raise ValueError(f"{name} must be dict[str, Any], not {own!r}")
            content[name] = {**own, **(options or {})}
        content["arms"] = _with_presets(content["arms"])
        study = Study(**content)
        _check(study)
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not UTF-8; save it so") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    except (yaml.YAMLError, AttributeError, LookupError, TypeError) as error:
        keys = ", ".join(item.name for item in fields(Study))
        raise InputError(f"{path}: is no study ({' '.join(str(error).split())}); its keys are {keys}") from error
    return replace(study, baselines=study.baselines or list(study.arms)[:1])


class _Loader(yaml.SafeLoader):
    """Leaves a date text: options have none, and JSON could not hold it."""

    yaml_implicit_resolvers = {
        letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def load_yaml(text: str) -> Any:
    """Read YAML as options are meant, without dates.

    Raises:
        ValueError: A key is given twice, of which YAML would keep the last; names the line.
        yaml.YAMLError: It is no YAML.
    """
    nodes = [yaml.compose(text, _Loader)]
    read = set()
    for node in nodes:  # grows meanwhile
        if id(node) in read:
            continue
        read.add(id(node))
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, value in node.value:
                if isinstance(key.value, str) and (key.tag, key.value) in seen:
                    raise ValueError(f"line {key.start_mark.line + 1}: {key.value} is given twice")
                seen.add((key.tag, str(key.value)))
                nodes.append(value)
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
    return yaml.load(text, _Loader)


def _with_presets(arms: Any) -> dict[str, dict[str, Any]]:
    if not arms or not isinstance(arms, list | dict):
        raise ValueError(f"arms must be a list of names, or options by name, not {arms!r}")
    if len(set(arms)) < len(arms):
        raise ValueError("an arm is twice among arms")
    return {arm: _with_preset(arm, (arms[arm] if isinstance(arms, dict) else None) or {}) for arm in arms}


def _with_preset(arm: str, own: dict[str, Any]) -> dict[str, Any]:
    preset = own.get("preset", arm)
    if preset is None:  # as a study saves its arms, with all their options
        return {name: value for name, value in own.items() if name != "preset"}
    if preset not in PRESETS and ("preset" in own or not own):
        raise ValueError(f"arm {arm}: no preset {preset} among {', '.join(PRESETS)}, and no options")
    return {**PRESETS.get(preset, {}), **{name: value for name, value in own.items() if name != "preset"}}


def _check(study: Study) -> None:
    values = [(item.name, item.type, getattr(study, item.name)) for item in fields(Study)]
    own = [("grid", dict[str, list[Any]], arm["grid"]) for arm in study.arms.values() if "grid" in arm]
    for name, kind, value in [*values, *own]:
        if not has_shape(value, kind):
            kind = inspect.formatannotation(kind).replace("typing.", "")
            raise ValueError(f"{name} must be {kind}, not {value!r}")
    if not math.isfinite(study.scale) or not study.scale:
        raise ValueError(f"scale must be a finite number other than 0, not {study.scale}")
    if study.processes < 1:
        raise ValueError(f"processes must be at least 1, not {study.processes}")
    seeds = [seed for phase in PHASES for seed in study.seeds.get(phase, [])]
    if wrong := [seed for seed in seeds if not 0 <= seed < 2**32]:
        raise ValueError(f"seed {wrong[0]} is not between 0 and {2**32 - 1}")
    if not study.arms or not study.scores or not study.seeds.get("report") or study.seeds.keys() - set(PHASES):
        raise ValueError("it needs arms, scores and seeds, and seeds has report and settings")
    if len(set(seeds)) < len(seeds):
        raise ValueError("a seed is used twice, but settings are chosen on other seeds than those that are reported")
    if not study.seeds.get("settings") and any(len(study.settings(arm)) > 1 for arm in study.arms):
        raise ValueError("a grid needs seeds of its own, under seeds: settings")
    if study.seeds.get("settings") and "test" in study.select:
        raise ValueError(f"select: {study.select} is a score on test; settings are chosen on dev")
    if len(set(study.baselines)) < len(study.baselines):
        raise ValueError("an arm is twice among baselines")
    if unknown := set(study.baselines) - study.arms.keys():
        raise ValueError(f"baselines names no arm: {', '.join(sorted(unknown))}")
    if empty := [arm for arm in study.arms if not study.settings(arm)]:
        raise ValueError(f"the grid of {empty[0]} has an option without values")
    grids = {"grid": {name for arm in study.arms for one in study.settings(arm) for name in one}}
    given = {"options": study.options, "settings_options": study.settings_options}
    for place, names in {**grids, **given, **{f"arm {arm}": own for arm, own in study.arms.items()}}.items():
        if reserved := sorted({"seed", "output_dir"} & {*names}):
            raise ValueError(f"{place}: {' and '.join(reserved)} is set by the study itself")
        if place in given and "grid" in names:
            raise ValueError(f"{place}: grid is a key of the study or of an arm, not an option")
    runs = [run for arm in study.arms for setting in study.settings(arm) for phase in PHASES
            for run in study.trials(phase, arm, setting)]  # fmt: skip
    try:
        json.dumps([run.options for run in runs], allow_nan=False)
    except ValueError:
        raise ValueError("an option is not a finite number, or holds itself, which a record could not hold") from None
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        twice = max(names, key=names.count)
        raise ValueError(f"two runs have the name {twice}: files in a grid must differ by more than their folders")
    for run, (name, command) in itertools.product(runs, study.evaluations.items()):
        try:
            run.words(command, run=Path("run"), last=Path("last"))
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise ValueError(f"evaluation {name}: {command!r} cannot be filled in for {run.arm} ({error})") from error
    for name in study.evaluations:
        if name == "result":
            raise ValueError("evaluation result: the scores of run.json have this name; choose another")
        if not name.isidentifier():
            raise ValueError(f"evaluation {name}: its name must be letters, digits and _")
    commands = {f"evaluation {name}": text.partition(" ")[0] for name, text in study.evaluations.items()}
    for name, first in {"command": study.command, **commands}.items():
        if first not in COMMANDS:
            raise ValueError(f"{name}: there is no command {first!r} among {', '.join(COMMANDS)}")
