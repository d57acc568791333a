"""The trainer: SentenceTransformerTrainer plus what SimCSE needs and the host leaves open; the part images share."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.base.data_collator import BaseDataCollator
from sentence_transformers.sentence_transformer.losses import AdaptiveLayerLoss
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput

from simcse_weince.errors import InputError
from simcse_weince.outputs import replacing_files_of
from simcse_weince.sentence.arguments import DEFAULT_METRIC
from simcse_weince.sentence.dropout import cpu_dropout
from simcse_weince.sentence.encoder import keeping_modes
from simcse_weince.sentence.first_token import first_token_only
from simcse_weince.sentence.sts import STSEvaluator

logger = logging.getLogger(__name__)

# What a checkpoint holds beside the encoder: buffers of the loss and the train-only head.
_LOSS_STATE_NAME = "loss_state.safetensors"


class LossStatsCallback(TrainerCallback):
    """What `SimCSETrainer` does for a loss of this package, for a plain ``SentenceTransformerTrainer``.

    ``trainer.add_callback(LossStatsCallback(trainer))``, after the trainer is made. The statistics of the loss reach
    every tracker and ``trainer_state.json``, as entries of their own beside those of the host. Each checkpoint holds
    what the loss keeps from batch to batch, and a train-only head; both are restored with the best model, and on resume
    from a checkpoint in ``args.output_dir``.

    Args:
        trainer: The trainer that the callback is added to.
    """

    def __init__(self, trainer: SentenceTransformerTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> TrainerControl:
        """Log the statistics where the host is about to log: in its ``on_log`` it is too late for the trackers."""
        if control.should_log:
            self.trainer.log(loss_stats(self.trainer.loss))
            control.should_log = True  # each log withdraws the wish for one
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Write what the loss keeps into the checkpoint."""
        if args.should_save:
            _save_loss_state(self.trainer, Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Restore what the loss keeps when a run goes on."""
        if state.global_step:
            _load_loss_state(self.trainer, Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Restore what the loss kept when the model was best."""
        if args.load_best_model_at_end and state.best_model_checkpoint:
            _load_loss_state(self.trainer, Path(state.best_model_checkpoint))


class LossTrainer(Trainer):
    """A trainer with a ``loss`` whose statistics join the training log, and its state the checkpoints."""

    loss: Any

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the statistics of the loss to a training log; a loss that is not finite ends the training."""
        if not math.isfinite(logs.get("loss", 0)):
            raise InputError(
                f"the loss is {logs['loss']} at step {self.state.global_step}: lower --learning_rate, or use another "
                "precision; the checkpoints before are kept"
            )
        super().log({**logs, **loss_stats(self.loss)} if "loss" in logs else logs, start_time)
        # One log may be of a last batch of one row. Said once: at the second of those in a row.
        last = [entry["loss"] for entry in self.state.log_history if "loss" in entry][-3:]
        if "loss" in logs and last[-2:] == [0, 0] and last != [0, 0, 0]:
            logger.warning(
                "the loss is 0 and nothing is learned: no anchor has a negative left (masked_candidates in the log; "
                "raise per_device_train_batch_size or give other data), or temperature is too low"
            )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            _save_loss_state(self, Path(output_dir))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # The host would upload a pickle of the arguments, with the token in it, and what only a checkpoint holds.
        if "checkpoint" in self.args.hub_strategy:
            logger.warning("%s stays here: only what is finished is pushed", Path(checkpoint_folder).name)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # The host hands a model on under FSDP alone, and sentence-transformers' trainer takes none.
        super()._load_from_checkpoint(resume_from_checkpoint, *([] if model is None else [model]))
        _load_loss_state(self, Path(resume_from_checkpoint))


class SimCSETrainer(LossTrainer, SentenceTransformerTrainer):
    """A SentenceTransformerTrainer for one or more text columns; same arguments, with these differences.

    * The statistics of the loss (``loss.stats()``) join the training log, and with it every tracker and
      ``trainer_state.json`` (sentence-transformers issue 3080).
    * Evaluation runs in the precision of the weights, not under the autocast of training, so that a score during
      training equals the score of the saved folder.
    * Checkpoints hold the state of the loss and of a train-only head; both are restored on resume and with the best
      model (sentence-transformers issues 3756 and 3344). The saved model never holds them.
    * A model is written to a temporary folder and moved into place; no pickled arguments are written.
    * ``args.push_to_hub`` uploads what is saved at the end, as with ``hub_strategy="end"``, and no checkpoint.
    * The default ``metric_for_best_model`` of `SimCSEArguments` is the Spearman correlation of an `STSEvaluator`.
    * ``args.max_seq_length`` and ``args.pad_to_max_length`` of `SimCSEArguments` shape the training batches only.
    * Where the first token is pooled the last layer is computed for it alone, see `first_token_only`, and on a CPU
      dropout is drawn more cheaply, see `cpu_dropout`; not with ``args.torch_compile``. The loss is given sentence
      embeddings, and token embeddings of the first token at most.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if (self.args.metric_for_best_model or "").removeprefix("eval_") == DEFAULT_METRIC:
            evaluators = [self.evaluator, *getattr(self.evaluator, "evaluators", [])]
            names = [f"eval_{one.primary_metric}" for one in evaluators if isinstance(one, STSEvaluator)]
            if not names and self.args.load_best_model_at_end:
                raise ValueError(
                    f"metric_for_best_model={DEFAULT_METRIC!r} is a score of an STSEvaluator; name one of your "
                    "evaluator's, or set load_best_model_at_end=False"
                )
            self.args.metric_for_best_model = names[0] if names else None

    def get_data_collator(self, model: Any, args: Any, processing_class: Any = None) -> BaseDataCollator:
        """The host's collator, padding to the full length where the arguments say so."""
        collator = super().get_data_collator(model=model, args=args, processing_class=processing_class)
        if getattr(args, "pad_to_max_length", False):
            padding = {"text": {"padding": "max_length"}}
            collator.preprocess_fn = partial(collator.preprocess_fn, processing_kwargs=padding)
        return collator

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the host's; backward too, where cached losses and gradient checkpointing run the encoder once more."""
        if self.args.torch_compile:
            return super().training_step(*args, **kwargs)
        losses = self.loss.values() if isinstance(self.loss, dict) else [self.loss]
        modules = (module for loss in losses if isinstance(loss, nn.Module) for module in loss.modules())
        # It asks for all layers, but no longer where gradient checkpointing runs them once more.
        whole = any(isinstance(module, AdaptiveLayerLoss) for module in modules)
        shortcut = nullcontext() if whole else first_token_only(self.model)
        with shortcut, cpu_dropout() if self.args.device.type == "cpu" else nullcontext():
            return super().training_step(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate without the autocast that accelerate puts around the forward, and restore the training mode."""
        with keeping_modes(self.model), self.without_autocast():
            return super().evaluation_loop(*args, **kwargs)

    @contextmanager
    def without_autocast(self) -> Iterator[None]:
        """Call the encoder in the precision of its weights for the duration of the block."""
        under_autocast = self.model.__dict__.pop("forward", None)
        try:
            yield
        finally:
            if under_autocast is not None:
                self.model.__dict__["forward"] = under_autocast

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        # transformers 5.24 asks this of its own `_save` and calls it in every process; sentence-transformers 6.2 does
        # not ask, so that processes would move and delete each other's files.
        if not self.args.should_save:
            return
        with replacing_files_of(str(output_dir or self.args.output_dir)) as temporary:
            super()._save(str(temporary), state_dict)
            # A pickle that nothing reads: the arguments are in the run's own files.
            (temporary / TRAINING_ARGS_NAME).unlink(missing_ok=True)


def loss_stats(loss: Any) -> dict[str, float]:
    """The statistics of a loss of this package, also inside a wrapper such as ``MatryoshkaLoss``; six digits.

    Args:
        loss: A loss, or the dict of losses of a trainer with several data sets; each name is then prefixed by the data
            set's, as in ``quora_blend``. Other losses have no statistics.
    """
    if isinstance(loss, dict):
        return {f"{data}_{name}": value for data, one in loss.items() for name, value in loss_stats(one).items()}
    while not hasattr(loss, "stats") and isinstance(getattr(loss, "loss", None), nn.Module):
        loss = loss.loss
    return {name: float(f"{value:.6g}") for name, value in loss.stats().items()} if hasattr(loss, "stats") else {}


def _loss_state(trainer: Any) -> dict[str, Tensor]:
    """Live tensors that belong to the training but not to the encoder that is saved."""
    model: Any = getattr(trainer.model, "_orig_mod", trainer.model)
    # By identity, not by name: wrappers and cached losses hold the encoder under names of their own.
    encoder = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    losses = trainer.loss if isinstance(trainer.loss, dict) else {"loss": trainer.loss}
    state = {
        f"{name}.{key}": tensor
        for name, loss in losses.items()
        for key, tensor in loss.state_dict(keep_vars=True).items()
        if id(tensor) not in encoder
    }
    head = getattr(model, "train_only_head", None)
    if head is not None:
        state.update({f"train_only_head.{key}": tensor for key, tensor in head.state_dict(keep_vars=True).items()})
    return state


def _save_loss_state(trainer: Any, folder: Path) -> None:
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in _loss_state(trainer).items()}
    if state:
        save_file(state, folder / _LOSS_STATE_NAME)


def _load_loss_state(trainer: Any, folder: Path) -> None:
    expected, path = _loss_state(trainer), folder / _LOSS_STATE_NAME
    if not expected:
        return
    if not path.is_file():
        logger.warning("%s has no %s: %s start anew", folder.name, path.name, ", ".join(expected))
        return
    saved = load_file(path)
    if saved.keys() != expected.keys():
        raise InputError(f"{path}: holds {', '.join(saved)}, not {', '.join(expected)} of this run; start it anew")
    for name, tensor in expected.items():
        tensor.data.copy_(saved[name])
