"""The folder of a training run, of sentences or of images: who may write there, and how an earlier run goes on."""

import json
import logging
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from simcse_weince.errors import InputError, first_line
from simcse_weince.outputs import versions, write_text

logger = logging.getLogger(__name__)

_CONFIG_NAME = "training_config.yaml"
_LOCK_NAME = ".lock"
# What makes a folder look like that of a finished run.
_RESULTS = ("run.json", "modules.json", "model*.safetensors*", "projection_head.safetensors", TRAINER_STATE_NAME,
            "train_results.json", "all_results.json")  # fmt: skip


class LogCallback(TrainerCallback):
    """Writes each entry of the training log as one line through logging, where there is no progress bar to write to."""

    _UNTOLD = ("runtime", "per_second", "total_flos", "epoch")

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Log the numbers with four digits, less those that say nothing about the training."""
        numbers = {name: value for name, value in (logs or {}).items() if not name.endswith(self._UNTOLD)}
        if state.is_local_process_zero and numbers:
            told = ", ".join(f"{name.removeprefix('eval_')} {value:.4g}" for name, value in numbers.items())
            logger.info("step %d: %s", state.global_step, told)


class Patience(EarlyStoppingCallback):
    """Early stopping whose count of evaluations is that of the whole run; the host's starts anew on resume."""

    def is_over(self, args: TrainingArguments, state: TrainerState) -> bool:
        """Count again, by the scores in the log, and tell whether the run has ended."""
        scores = [entry[args.metric_for_best_model] for entry in state.log_history
                  if entry["step"] and args.metric_for_best_model in entry]  # fmt: skip
        best, count = -math.inf, 0
        for index, score in enumerate(scores):  # a score that is undefined is no better than any
            better = score > best and score - best > (self.early_stopping_threshold or 0)
            count = 0 if better or not index else count + 1
            best = score if score > best else best
        self.early_stopping_patience_counter = count
        return count >= self.early_stopping_patience

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Take up the count; the host looks for a note of it, which another run's checkpoint need not have."""
        super().on_train_begin(args, state, control, **kwargs)
        self.is_over(args, state)
        notes: Any = state.stateful_callbacks  # a mapping, other than the host annotates
        notes.setdefault(type(self).__name__, self.state())


def check_trackers(arguments: TrainingArguments) -> None:
    """Find out now whether the trackers of ``report_to`` are there; the host does so after the encoder is loaded.

    Raises:
        InputError: One is unknown, or its package is not installed.
    """
    try:
        for callback in get_reporting_integration_callbacks(arguments.report_to):
            callback()
    except (ValueError, ImportError, RuntimeError) as error:
        raise InputError(f"--report_to: {first_line(error)}") from error


def checkpoint_to_resume(arguments: Any, start: str | None) -> Path | None:
    """The checkpoint that ``resume_from_checkpoint`` names: a folder, or "last" for the newest complete one; or None.

    Args:
        arguments: Training arguments with ``overwrite_output_dir``.
        start: The encoder that a new run starts from, a folder or an id; None for random weights.

    Raises:
        InputError: There is none; or a new run would write over an earlier one without ``overwrite_output_dir``, or
            over the encoder that it starts from.
    """
    output_dir, wish = Path(arguments.output_dir), str(arguments.resume_from_checkpoint or "no")
    if any(place.exists() and not place.is_dir() for place in (output_dir, *output_dir.parents)):
        raise InputError(f"{output_dir}: --output_dir is, or is below, a file; name a folder")
    last, checkpoint = wish.lower() in ("true", "last", "auto", "yes", "1"), None
    if last:
        checkpoint = last_complete_checkpoint(output_dir)
        if checkpoint is None:
            logger.warning("%s holds no complete checkpoint: starting from the beginning", output_dir.name)
    elif wish.lower() not in ("false", "no", "0"):
        checkpoint = Path(wish)
        if not is_complete_checkpoint(checkpoint):
            raise InputError(f"{wish}: not a complete checkpoint; name one, or use --resume_from_checkpoint last")
    damaged = [path for path in checkpoint.rglob("*") if not _is_whole(path)] if checkpoint else []
    if checkpoint and damaged:
        raise InputError(
            f"{damaged[0]} is damaged; remove {checkpoint.name}, and --resume_from_checkpoint last goes on from the "
            "checkpoint before it, or from the beginning"
        )
    if _of_this_run(checkpoint, output_dir):
        return checkpoint
    if (earlier := _would_be_lost(output_dir, last)) and not arguments.overwrite_output_dir:
        goes_on = "continue it with --resume_from_checkpoint last, " if last_complete_checkpoint(output_dir) else ""
        raise InputError(
            f"{output_dir}: holds an earlier run or model ({earlier}); {goes_on}replace it with "
            "--overwrite_output_dir, or choose another --output_dir"
        )
    source = Path(start or "").resolve()
    cleared = source.parent if source.name.startswith(PREFIX_CHECKPOINT_DIR) else source
    if start and source.exists() and cleared == output_dir.resolve():
        raise InputError(f"{start}: a new run would clear away the encoder it starts from; choose another --output_dir")
    return checkpoint


def _would_be_lost(output_dir: Path, last: bool) -> str | None:
    """The name of something in the folder that a new run would clear away or write over, of whatever it is the work."""
    checkpoints = [*_checkpoints(output_dir).values()]
    if last and (output_dir / _CONFIG_NAME).exists():
        # A run that was killed before its first checkpoint was whole starts again, as a study that was killed does.
        # Checkpoints without an optimizer, of --save_only_model, are whole but for that.
        found = [*output_dir.glob("run.json"), *(path for path in checkpoints if _has_state(path))]
    else:
        patterns = (*_RESULTS, "config.json", "README.md")
        found = [*checkpoints, *(path for pattern in patterns for path in output_dir.glob(pattern))]
    return found[0].name if found else None


def _is_whole(path: Path) -> bool:
    """Whether a file of weights or states ends where it should: the hosts find out only after the encoder is built."""
    if path.suffix in (".pt", ".pth"):
        return zipfile.is_zipfile(path)
    try:
        if path.suffix == ".safetensors":
            safe_open(path, "pt")  # reads the header, and compares the length of the file with it
    except SafetensorError:
        return False
    return True


def _of_this_run(checkpoint: Path | None, output_dir: Path) -> bool:
    return checkpoint is not None and checkpoint.resolve().parent == output_dir.resolve()


def check_same_run(checkpoint: Path, chosen: Mapping[str, Any], belongs: Callable[[str], bool]) -> None:
    """A checkpoint goes on with its own encoder, loss and batches, or the result is of no run at all.

    Args:
        checkpoint: Folder of the checkpoint, beside the configuration of its run.
        chosen: The options of the run that is to go on, less those at their defaults.
        belongs: Tells the options that must not change.

    Raises:
        InputError: Such an option has changed.
    """
    try:
        before = yaml.safe_load((checkpoint.parent / _CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        before = None
    if not isinstance(before, dict):
        logger.warning("%s: nothing tells which run this is of, so nothing is compared", checkpoint.name)
        return
    for name in sorted(filter(belongs, {*map(str, before), *chosen})):
        if not _is_same(str(before.get(name)), str(chosen.get(name))):
            raise InputError(
                f"{checkpoint}: was written with --{name} {before.get(name, 'by default')}, not "
                f"{chosen.get(name, 'by default')}; resume with the same, or start in another --output_dir"
            )


def _is_same(before: str, now: str) -> bool:
    """Whether an option has not changed; of a folder that was given by an absolute path only the name was kept."""
    if before.rpartition("/")[2] != now.rpartition("/")[2]:
        return False
    return before == now or "/" not in before or "/" not in now or Path(now).exists()


def saved_options(folder: str | Path) -> dict[str, Any]:
    """The options of the training that wrote a folder; none if it holds no ``training_config.yaml``.

    Raises:
        InputError: the file is damaged.
    """
    path = Path(folder, _CONFIG_NAME)
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not YAML ({first_line(error)}); mend it, or remove it and give options") from error
    if not isinstance(options or {}, dict):
        raise InputError(f"{path}: holds no options; mend it, or remove it and give options")
    return options or {}


@contextmanager
def only_writer(arguments: TrainingArguments) -> Iterator[None]:
    """Keep a second run out of ``output_dir``; the lock is the system's, so a killed run leaves none.

    Raises:
        InputError: Another run is writing there.
    """
    if arguments.process_index:
        yield
        return
    output_dir = Path(str(arguments.output_dir))
    output_dir.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(output_dir / _LOCK_NAME).acquire(timeout=0)
    except Timeout:
        raise InputError(f"{output_dir}: another run is writing there; choose another --output_dir") from None
    with held:
        yield


def push(trainer: Trainer) -> None:
    """Upload the finished folder if the arguments say so; after the block of `only_writer`, whose lock is no result."""
    if trainer.args.push_to_hub:
        Path(str(trainer.args.output_dir), _LOCK_NAME).unlink(missing_ok=True)
        trainer.push_to_hub()


def try_out(trainer: Trainer) -> None:
    """Make batches, optimizer and schedule, and drop them: what the host refuses only then must cost no earlier run.

    Raises:
        InputError: An option does not go with another, with the encoder, or with what is installed.
    """
    try:
        with torch.random.fork_rng():
            trainer.get_train_dataloader()
            trainer.create_optimizer_and_scheduler(num_training_steps=max(trainer.args.max_steps, 1))
    except Exception as error:  # of any kind, from the parsers of a dozen options
        raise InputError(f"an option cannot be used here: {first_line(error)}") from error
    trainer.optimizer = trainer.lr_scheduler = None


def prepare(output_dir: Path, chosen: Mapping[str, Any], checkpoint: Path | None) -> None:
    """Write the options, where nothing is left that a killed run has half-written.

    Nor, unless a run goes on from its ``checkpoint``, what the run before has left: if this one dies, weights of that
    one beside these options would pass for its result.
    """
    new = not _of_this_run(checkpoint, output_dir)
    leftovers = [*output_dir.glob(".saving-*"), *output_dir.glob("checkpoint-*/.saving-*")]
    for folder in leftovers + ([*_checkpoints(output_dir).values()] if new else []):
        shutil.rmtree(folder)
    for path in [path for pattern in _RESULTS for path in output_dir.glob(pattern)] if new else []:
        path.unlink()
    write_text(output_dir / _CONFIG_NAME, yaml.safe_dump(chosen))


def train_or_resume(trainer: Trainer, checkpoint: Path | None) -> None:
    """Train, or go on from a checkpoint, and leave the encoder that is to be saved in the trainer.

    Raises:
        InputError: The training diverged.
    """
    if trainer.args.disable_tqdm:
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(LogCallback())
    if checkpoint is None:
        trainer.save_metrics("train", trainer.train().metrics)
    else:
        logger.info("resuming from %s", checkpoint.name)
        trainer.args.eval_on_start = False
        state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]
        over = any(
            isinstance(one, Patience) and one.is_over(trainer.args, state) for one in trainer.callback_handler.callbacks
        )
        if not over and state.global_step < steps:
            trainer.save_metrics("train", trainer.train(resume_from_checkpoint=str(checkpoint)).metrics)
        else:
            # Stopped after its last step, perhaps before it was saved: another step would make it another run.
            logger.info("%s is the end of the run: nothing is left to train", checkpoint.name)
            trainer.state = state
            best = checkpoint.parent / Path(state.best_model_checkpoint or checkpoint.name).name
            trainer._load_from_checkpoint(str(best if trainer.args.load_best_model_at_end else checkpoint))
    if trainer.state.best_model_checkpoint is not None:
        trainer.state.best_model_checkpoint = Path(trainer.state.best_model_checkpoint).name
    model: Any = trainer.model
    if not all(torch.isfinite(weight).all() for weight in model.parameters()):
        raise InputError("the training diverged: weights are not finite, and are not saved; lower --learning_rate")


def provenance(arguments: TrainingArguments, weights: str) -> dict[str, Any]:
    """With what a run was made; ``weights`` is the precision of its steps where no other was asked for."""
    return {
        "versions": versions(),
        "seed": arguments.seed,
        "device": str(arguments.device),
        "processes": arguments.world_size,
        "precision": "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else weights,
    }


def _has_state(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end: the state is written last."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def is_complete_checkpoint(folder: Path) -> bool:
    """Whether a training can go on from this folder; a run that is killed while saving leaves a partial one."""
    return _has_state(folder) and all((folder / name).is_file() for name in (OPTIMIZER_NAME, SCHEDULER_NAME))


def last_complete_checkpoint(output_dir: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint that a training can go on from, or None."""
    checkpoints = _checkpoints(Path(output_dir))
    complete = [step for step, folder in checkpoints.items() if is_complete_checkpoint(folder)]
    return checkpoints[max(complete)] if complete else None


def _checkpoints(output_dir: Path) -> dict[int, Path]:
    """The checkpoints by their steps, half-written ones too; other folders of such a name are not ours."""
    folders = {folder.name.rpartition("-")[2]: folder for folder in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    return {int(step): folder for step, folder in folders.items() if step.isdecimal() and folder.is_dir()}
