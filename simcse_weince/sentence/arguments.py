"""Dataclasses that are the flags, the YAML keys and the saved configuration of a training run, all at once."""

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers import TrainingArguments
from transformers.training_args import ParallelMode

from simcse_weince.configuration import check_numbers, check_training_numbers, option, parse_groups
from simcse_weince.errors import InputError
from simcse_weince.sentence.encoder import PoolerType

logger = logging.getLogger(__name__)

# A score of an STSEvaluator by whatever name it has.
DEFAULT_METRIC = "stsb_spearman"


@dataclass
class ModelArguments:
    """The encoder to start from."""

    model_name_or_path: str | None = option(None, "Hugging Face id or folder of the encoder to start from")
    pooler_type: PoolerType | None = option(
        None, "How token vectors become a sentence vector; default: as the model stores it, else cls_before_pooler"
    )
    mlp_only_train: bool = option(False, "The MLP of --pooler_type cls acts in training only and is not saved")
    dropout: float | None = option(None, "Dropout probability set throughout the backbone; default: the model's own")
    tokenizer_name: str | None = option(None, "Another tokenizer than the model's own")
    torch_dtype: str | None = option(None, "Type of the weights (float32, bfloat16); default: as stored")
    attn_implementation: str | None = option(None, "sdpa, eager or flash_attention_2; default: transformers' choice")
    cache_dir: str | None = option(None, "Where downloads and read corpora are kept; default: the Hugging Face cache")
    model_revision: str | None = option(None, "Branch, tag or commit on the hub")
    trust_remote_code: bool = option(False, "Allow model code from the hub to run")


@dataclass
class DataArguments:
    """The sentences to train on and the graded pairs to measure with."""

    train_file: list[str] | None = option(
        None, "Sentences: .txt .csv .tsv .jsonl .parquet (also .gz), a folder of these, a Wikipedia dump"
    )
    dataset_name: str | None = option(None, "Hugging Face data set id to train on, instead of --train_file")
    dataset_config_name: str | None = option(None, "Configuration of --dataset_name")
    dataset_split: str = option("train", "Split of --dataset_name")
    text_column: list[str] | None = option(
        None, "Column of the sentences; several: anchor, positive, hard negatives, in this order"
    )
    encoding: str = option("utf-8", "Encoding of the text files")
    max_train_samples: int | None = option(None, "Train on the first so many sentences")
    dedupe: bool = option(False, "Drop exact repetitions of a sentence")
    skip_bad: bool = option(False, "Drop unusable rows of tables and count them, instead of refusing the file")
    streaming: bool = option(False, "Read while training, in the order of the files: shuffled ones (needs --max_steps)")
    corpus_cache: bool = option(True, "Keep the read corpus on disk, found again by its content")
    data_dir: str | None = option(None, "Folder with STS data in either layout; default: the hub")
    eval_file: str | None = option(None, "Graded pairs to select the best checkpoint with, instead of STS-B dev")
    test_file: str | None = option(None, "Graded pairs for the score before and after, instead of STS-B test")


@dataclass
class TailArguments:
    """How the blend of a text or an image run is estimated; names and defaults are those of `simcse_weince.Weince`."""

    gate: str = option("both", "Blend weight: both, hardness, evidence, or a fixed number in [0, 1]")
    evidence: Literal["regression", "likelihood"] = option("regression", "How Weibull and Gumbel tails are compared")
    tail_fraction: float = option(0.10, "Share of the negatives that make the tail")
    min_tail_size: int = option(32, "Smallest number of negatives in the tail")
    pivot: float | None = option(None, "Absolute shortfall at which the hardness gate is half open; default: quantile")
    pivot_quantile: float = option(0.2, "Quantile of the hardness over the batch that sets the pivot")
    hardness_sharpness: float = option(10.0, "Slope of the hardness gate")
    evidence_sharpness: float = option(1.0, "Slope of the evidence gate")
    evidence_margin: float = option(2.0, "Evidence at which its gate is half open")

    def options_of(self, loss: str) -> dict[str, Any]:
        """Options of a criterion, fixed numbers converted; InputError for one that belongs to another."""
        of_the_host = ("loss", "mask_duplicates", "gather_across_devices", "mini_batch_size")
        own = {item.name: item.default for item in fields(self) if item.name not in of_the_host}
        given = {name for name, default in own.items() if getattr(self, name) != default}
        known = {"infonce": {"temperature"}, "mnrl-hardness": {"temperature", "hardness_strength"}}.get(
            loss, own.keys() - {"hardness_strength"}
        )
        for name in sorted(given - known):
            raise InputError(f"--{name} means nothing with --loss {loss}; remove it or choose another --loss")
        # The released objective has defaults of its own, which what is not given leaves alone.
        names = given | {"temperature"} if loss == "released" else known
        options = {name: value for name in names if (value := getattr(self, name)) is not None}
        for name in {"gate", "shape"} & options.keys():
            with suppress(ValueError):  # a word is checked by the criterion
                options[name] = float(options[name])
        return options


@dataclass
class LossArguments(TailArguments):
    """The criterion; names and defaults are those of `simcse_weince.Weince`."""

    loss: Literal["weince", "infonce", "released", "mnrl-hardness"] = option(
        "weince", "Criterion; released: that of the authors' script, mnrl-hardness: sentence-transformers' own"
    )
    temperature: float = option(0.05, "Divides the cosines of the softmax part")
    shape: str | None = option(None, "Tail shape: anchor, shrunk, or a number; default: anchor, for released 1.0")
    floor: float | None = option(None, "Added to the shortfall; default: 1e-4, for released 1e-6")
    hardness_strength: float = option(9.0, "Weight of the negatives' cosines in mnrl-hardness")
    mask_duplicates: bool = option(True, "Equal token ids after truncation are not each other's negatives")
    gather_across_devices: bool = option(True, "Compare with the candidates of all processes, not only one's own")
    mini_batch_size: int | None = option(None, "Embed so many rows at a time (GradCache): large batches, little memory")


@dataclass
class SimCSEArguments(SentenceTransformerTrainingArguments):
    """Training arguments of sentence-transformers with the defaults of unsupervised SimCSE.

    Differences: batch 64, learning rate 3e-5, one epoch, evaluation before step 0 and every 125 steps, a checkpoint at
    every evaluation, the best one on dev STS-B kept. Without a GPU float16 becomes bfloat16, or float32 on a CPU that
    only emulates bfloat16. Plain ``python`` on several GPUs uses one of them instead of ``DataParallel``, whose shards
    would see too few negatives.
    """

    output_dir: str | None = option(None, "Folder of the trained encoder, its checkpoints and its reports")
    max_seq_length: int = option(32, "Training sentences are cut to so many tokens; evaluation uses the model's limit")
    pad_to_max_length: bool = option(False, "Pad every batch to --max_seq_length (for compiled graphs)")
    per_device_train_batch_size: int = option(64, "Sentences of a batch on each device")
    per_device_eval_batch_size: int = option(128, "Sentences of a batch in evaluation")
    learning_rate: float = option(3e-5, "Peak learning rate")
    num_train_epochs: float = option(1.0, "Passes over the corpus")
    eval_strategy: str = option("steps", "When to evaluate: steps, epoch or no")
    eval_steps: float | None = option(125, "Steps between evaluations")
    eval_on_start: bool = option(True, "Evaluate before step 0")
    save_steps: float = option(0, "Steps between checkpoints; 0, and with --load_best_model_at_end: as --eval_steps")
    save_total_limit: int | None = option(2, "Checkpoints to keep beside the best one")
    load_best_model_at_end: bool = option(True, "Save the checkpoint with the best --metric_for_best_model")
    metric_for_best_model: str | None = option(DEFAULT_METRIC, "Score that chooses the best checkpoint")
    logging_steps: float = option(25, "Steps between log lines")
    logging_nan_inf_filter: bool = option(False, "Hide a loss that is not finite, which else ends the training")
    overwrite_output_dir: bool = option(False, "Allow an --output_dir that already holds a run")
    early_stopping_patience: int | None = option(None, "Stop after so many evaluations without a better score")
    early_stopping_threshold: float = option(0.0, "Smallest improvement that counts for early stopping")

    def __post_init__(self) -> None:
        """Fill what depends on other arguments or on this machine."""
        if not self.output_dir:
            raise InputError("--output_dir is missing")
        if not 0 <= (self.warmup_ratio or 0) <= 1:  # the host makes it warmup_steps, where 3 would be three steps
            raise InputError(f"--warmup_ratio {self.warmup_ratio} is not between 0 and 1")
        fit_to_cpu(self)
        if self.eval_strategy == "no":
            self.load_best_model_at_end = False
            self.eval_on_start = False
            self.metric_for_best_model = None
        if self.load_best_model_at_end:
            if self.save_strategy not in ("steps", self.eval_strategy):
                logger.warning("the best evaluation needs its checkpoint: --save_strategy is that of evaluations; for "
                               "none use --no_load_best_model_at_end")  # fmt: skip
            self.save_strategy = self.eval_strategy
        every = (self.eval_steps or self.logging_steps) if self.eval_strategy == "steps" else 500
        if self.load_best_model_at_end and self.eval_strategy == "steps" and self.save_steps not in (0, every):
            # The host remembers the best evaluation whether or not there is a checkpoint of it to go back to.
            logger.warning("the best evaluation needs its checkpoint: --save_steps is that of evaluations, %g", every)
            self.save_steps = every
        self.save_steps = self.save_steps or every
        if self.disable_tqdm is None:
            self.disable_tqdm = not sys.stderr.isatty()
        super().__post_init__()
        loading: Any = self.accelerator_config
        if loading.dispatch_batches is None:
            # Else one process reads a stream and hands batches out, which fails for texts of different lengths.
            loading.dispatch_batches = False
        if self.parallel_mode == ParallelMode.NOT_DISTRIBUTED:
            logger.warning("using one of %d GPUs; start with `accelerate launch` to use them all", self.n_gpu)
            self._n_gpu = 1

    @property
    def max_length(self) -> int:
        """The name under which sentence-transformers' trainer looks for the length of training texts."""
        return self.max_seq_length


def fit_to_cpu(arguments: TrainingArguments) -> None:
    """Where there is no GPU: train on the CPU, in a precision that it has, and say so."""
    # transformers refuses bfloat16 on a machine without a GPU unless it is told that the CPU is meant.
    arguments.use_cpu = arguments.use_cpu or not torch.accelerator.is_available()
    if not arguments.use_cpu:
        return
    arguments.dataloader_pin_memory = False
    if arguments.fp16:
        arguments.fp16, arguments.bf16 = False, has_fast_bfloat16()
        logger.warning("--fp16 needs a GPU; using %s instead", "bfloat16" if arguments.bf16 else "float32")
    elif arguments.bf16 and not has_fast_bfloat16():
        logger.warning("this CPU has no bfloat16 arithmetic: without --bf16 training is several times faster")


def has_fast_bfloat16() -> bool:
    """Whether bfloat16 saves time on this CPU; where it is emulated a matrix product takes tens of times longer."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class TrainingGroups(NamedTuple):
    """The options of a training run, and in ``chosen`` those that are not at their defaults."""

    model: ModelArguments
    data: DataArguments
    loss: LossArguments
    training: SimCSEArguments
    chosen: dict[str, Any]


def parse_training_arguments(arguments: Sequence[str], prog: str | None = None) -> TrainingGroups:
    """Parse the command line of a training run as :func:`~simcse_weince.configuration.parse_groups` does."""
    usage = "%(prog)s [FILE.yaml] --model_name_or_path MODEL --train_file FILE --output_dir DIR [options]"
    kinds = (ModelArguments, DataArguments, LossArguments, SimCSEArguments)
    groups = TrainingGroups(*parse_groups(kinds, arguments, prog, usage))
    data = groups.data
    if not groups.model.model_name_or_path:
        raise InputError("--model_name_or_path is missing")
    if bool(data.train_file) == bool(data.dataset_name):
        raise InputError("give the sentences with either --train_file or --dataset_name")
    if data.train_file and (data.dataset_config_name or data.dataset_split != "train"):
        raise InputError("--dataset_config_name and --dataset_split belong to --dataset_name, not to --train_file")
    if data.text_column and len(set(data.text_column)) < len(data.text_column):
        raise InputError(f"--text_column names a column twice: {' '.join(data.text_column)}")
    check_training_numbers(groups.training)
    check_numbers(groups.training, {"early_stopping_patience": 1})
    check_numbers(data, {"max_train_samples": 1})
    check_numbers(groups.loss, {"mini_batch_size": 1})
    if groups.training.early_stopping_patience is not None and groups.training.eval_strategy == "no":
        raise InputError("--early_stopping_patience needs evaluations; remove --eval_strategy no")
    return groups
