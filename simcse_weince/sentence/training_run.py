"""One training run from arguments to a saved encoder with its reports: every check first, then the trainer."""

import json
import logging
import math
import os
from collections import Counter
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.data_collator import DEFAULT_LABEL_COLUMNS
from torch import nn
from transformers import set_seed

from simcse_weince import run_folder
from simcse_weince.errors import InputError
from simcse_weince.losses import (
    CachedInfoNCELoss,
    CachedWeinceLoss,
    HardnessWeightedLoss,
    InfoNCELoss,
    ReleasedWeinceLoss,
    WeinceLoss,
    text_keys,
)
from simcse_weince.outputs import write_json
from simcse_weince.sentence.arguments import (
    DEFAULT_METRIC,
    DataArguments,
    LossArguments,
    ModelArguments,
    SimCSEArguments,
    TrainingGroups,
)
from simcse_weince.sentence.corpus import Corpus, read_corpus
from simcse_weince.sentence.encoder import (
    SimCSEEncoder,
    build_encoder,
    check_dropout,
    position_limit,
    read_model_config,
)
from simcse_weince.sentence.pairs import TASKS, GradedPairs, load_sts, read_pairs
from simcse_weince.sentence.sts import STSEvaluator, evaluate_model
from simcse_weince.sentence.trainer import SimCSETrainer

logger = logging.getLogger(__name__)

_LOSSES: dict[str, type[InfoNCELoss]] = {"infonce": InfoNCELoss, "weince": WeinceLoss, "released": ReleasedWeinceLoss}
_CACHED_LOSSES = {"infonce": CachedInfoNCELoss, "weince": CachedWeinceLoss}
# Texts whose token ids are looked at before training; enough to see a corpus of boilerplate, in under a second.
_TOKEN_SAMPLE = 5000
# Columns that the host's collator does not encode.
_NO_TEXT = (*DEFAULT_LABEL_COLUMNS, "dataset_name")
# A last score this far below the best one means that the run went on too long (SimCSE issue 62).
_FALLEN = 0.02
# Options that a checkpoint goes on with, or the result is of no run at all.
_OF_THE_RUN = {item.name for group in (ModelArguments, LossArguments) for item in fields(group)} - {
    "cache_dir", "mini_batch_size",
} | {
    "per_device_train_batch_size", "gradient_accumulation_steps", "max_seq_length", "seed", "optim",
    "max_train_samples", "text_column", "encoding", "dedupe", "skip_bad", "streaming", "dataset_name", "dataset_split",
    "dataset_config_name", "data_seed", "batch_sampler", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "optim_args", "max_grad_norm", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
    "eval_file", "metric_for_best_model", "prompts",
}  # fmt: skip


@dataclass(frozen=True)
class TrainingResult:
    """What a run achieved: Spearman correlations in [-1, 1] (None where not measured) and where the best one was.

    `test_before` and `test_after` are of the encoder before training and of the one that was saved.
    """

    steps: int
    best_step: int | None
    dev_name: str | None
    dev_before: float | None
    dev_best: float | None
    dev_last: float | None
    test_name: str | None
    test_before: float | None
    test_after: float | None


def train(groups: TrainingGroups) -> TrainingResult:
    """Train an encoder, save it in ``output_dir`` and report what was read, measured and reached.

    Written to ``output_dir``: the encoder (a sentence-transformers folder), checkpoints, ``trainer_state.json``,
    ``train_results.json``, ``corpus_report.json``, ``training_config.yaml`` (the options, for ``--config``) and
    ``run.json`` (versions, seed, device, data hashes, scores).

    Args:
        groups: What comes from `parse_training_arguments`.

    Raises:
        InputError: Something about the input is unusable; found before the first step, most of it before the encoder
            is loaded. Or the training diverged.
        RuntimeError: The saved encoder, loaded again, does not have the score that it was saved for.
    """
    model_arguments, data_arguments, loss_arguments, arguments, options = groups
    output_dir = Path(str(arguments.output_dir))
    _check_launch(arguments)
    run_folder.check_trackers(arguments)
    checkpoint = run_folder.checkpoint_to_resume(arguments, model_arguments.model_name_or_path)
    dev, test = _graded_pairs(data_arguments, model_arguments.cache_dir, arguments)
    arguments.metric_for_best_model = _metric_name(arguments, dev)
    corpus = _read_corpus(data_arguments, model_arguments.cache_dir, arguments)
    negatives = _check_batches(corpus, arguments, loss_arguments)
    loss_options = _loss_options(loss_arguments)
    _check_model(model_arguments, arguments)
    if checkpoint is not None:
        run_folder.check_same_run(checkpoint, options, _OF_THE_RUN.__contains__)
        _check_same_corpus(checkpoint, corpus)

    with run_folder.only_writer(arguments):
        set_seed(arguments.seed)
        encoder = _build(model_arguments, arguments)
        sample = [row[corpus.report.columns[0]] for row in islice(corpus.dataset, _TOKEN_SAMPLE)]
        single = len(corpus.report.columns) == 1
        if single:
            check_dropout(encoder, sample[:16], arguments.max_seq_length)
        tokens = _token_report(encoder, sample, arguments.max_seq_length)
        if single and tokens["redundant"] == len(sample) - 1 < _TOKEN_SAMPLE - 1 and loss_arguments.mask_duplicates:
            raise InputError(
                f"{corpus.report.files[0].name}: all texts have equal tokens at --max_seq_length "
                f"{arguments.max_seq_length}, and none is another's negative; raise it, or give other texts"
            )
        loss = _build_loss(encoder, loss_arguments, loss_options, arguments)
        trainer = _build_trainer(encoder, corpus, dev, arguments, loss)
        main_process = trainer.is_world_process_zero()
        if main_process:
            run_folder.prepare(output_dir, options, checkpoint)
            corpus.report.save(output_dir)
        test_before = _spearman(encoder, test, arguments) if test and main_process else None
        run_folder.train_or_resume(trainer, checkpoint)
        if test and main_process:
            with trainer.without_autocast():  # the score that the model card shows
                STSEvaluator(test, "sts-test" if test.name == "stsb" else "test", arguments.eval_batch_size)(encoder)
        trainer.save_model(_internal_call=True)  # pushed below, with what says how it was made
        trainer.save_state()

        scores = _dev_scores(trainer)
        best = max((step for step in scores if step > 0), key=lambda step: scores[step], default=None)
        saved = _load_saved(output_dir, model_arguments, arguments, encoder.dtype) if main_process else None
        result = TrainingResult(
            steps=trainer.state.global_step,
            best_step=best,
            dev_name=_title(dev) if dev else None,
            dev_before=scores.get(0),
            dev_best=None if best is None else scores[best],
            dev_last=scores.get(trainer.state.global_step),
            test_name=_title(test) if test else None,
            test_before=test_before,
            test_after=_spearman(saved, test, arguments) if test and saved is not None else None,
        )
        if saved is not None:
            run = {
                **run_folder.provenance(arguments, str(encoder.dtype)),
                "arguments": options,
                "corpus": corpus.report.to_dict(),
                "tokens": tokens,
                "negatives_per_anchor": negatives,
                "graded_pairs": {
                    role: {"name": pairs.name, "split": pairs.split, "pairs": len(pairs), "files": pairs.files}
                    for role, pairs in (("dev", dev), ("test", test))
                    if pairs
                },
                "result": asdict(result),
            }
            write_json(output_dir / "run.json", run)
            _check_saved(saved, result, dev, arguments)
            _warn_of_decline(result)
    if main_process:
        run_folder.push(trainer)
    return result


# ---- checks before the encoder is loaded ----


def _check_launch(arguments: SimCSEArguments) -> None:
    """Say things once for all processes, and say it where the launcher has started fewer than were asked for."""
    if arguments.process_index:
        logging.getLogger("simcse_weince").setLevel(logging.ERROR)
    if arguments.fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true":  # the host encodes on one process only
        raise InputError("FSDP is not supported here: use --gradient_checkpointing or --mini_batch_size to save memory")
    # Without MPI, `accelerate launch --cpu --num_processes 2` prepares for two processes and starts one.
    if "ACCELERATE_USE_CPU" in os.environ and "MASTER_PORT" in os.environ and arguments.world_size == 1:
        logger.warning("accelerate starts one process on CPUs without MPI: use `torchrun --nproc_per_node 2 ...` for 2")


def _check_same_corpus(checkpoint: Path, corpus: Corpus) -> None:
    try:
        read = json.loads((checkpoint.parent / "corpus_report.json").read_text(encoding="utf-8"))
        before = [(file["bytes"], file.get("sha256", "")) for file in read["files"]]  # no hash of a stream
    except (OSError, ValueError, LookupError, TypeError):
        return
    if before != [(file.bytes, file.sha256) for file in corpus.report.files]:
        raise InputError(f"{checkpoint}: was written while training on other sentences; resume with the same corpus")


def _graded_pairs(
    data: DataArguments, cache_dir: str | None, arguments: SimCSEArguments
) -> tuple[GradedPairs | None, GradedPairs | None]:
    """Read the pairs to select and to report with, before anything that takes time."""
    wants_dev = arguments.eval_strategy != "no"
    how: dict[str, Any] = {"encoding": data.encoding, "skip_bad": data.skip_bad}
    if data.data_dir and not Path(data.data_dir).is_dir():
        raise InputError(f"{data.data_dir}: --data_dir is no folder; name the one with the STS data, or leave it out")
    try:
        dev = read_pairs(data.eval_file, **how) if data.eval_file else None
        if dev is None and wants_dev:
            dev = load_sts("stsb", "dev", data.data_dir, cache_dir)
        test = read_pairs(data.test_file, **how) if data.test_file else None
        if test is None and wants_dev and not data.eval_file:
            test = load_sts("stsb", "test", data.data_dir, cache_dir)
    except InputError as error:
        if data.eval_file or data.data_dir:
            raise
        raise InputError(
            f"{error}; or select on your own pairs with --eval_file, or not at all with --eval_strategy no"
        ) from error
    if wants_dev and dev and len(set(dev.scores)) < 2:
        raise InputError(f"{dev.name}: all scores are equal, so no checkpoint can be the best one; use other pairs")
    if dev and test and set(dev.files.values()) & set(test.files.values()):
        logger.warning("the best checkpoint is selected on the pairs that the result is reported on: it is optimistic")
    return (dev if wants_dev else None), test


def _title(pairs: GradedPairs) -> str:
    return f"{TASKS.get(pairs.name, pairs.name)} {pairs.split}".strip()


def _dev_name(dev: GradedPairs) -> str:
    return "sts-dev" if dev.name == "stsb" else "dev"


def _metric_name(arguments: SimCSEArguments, dev: GradedPairs | None) -> str | None:
    """Resolve the metric that selects the best checkpoint, which the host would look for only after an evaluation."""
    if dev is None:
        return None
    wish = (arguments.metric_for_best_model or DEFAULT_METRIC).removeprefix("eval_")
    names = {f"{_dev_name(dev)}_{kind}_cosine": kind for kind in ("spearman", "pearson")}
    for name, kind in names.items():
        if wish in (name, kind, f"{kind}_cosine", f"stsb_{kind}", f"sts-dev_{kind}_cosine"):
            return f"eval_{name}"
    known = ", ".join([*names, "stsb_spearman", "stsb_pearson"])
    raise InputError(f"--metric_for_best_model {wish} is not a metric of this run; choose one of {known}")


def _read_corpus(data: DataArguments, cache_dir: str | None, arguments: SimCSEArguments) -> Corpus:
    if data.streaming and arguments.max_steps <= 0:
        raise InputError("--streaming does not know the length of the corpus; set --max_steps")
    if data.streaming and data.dedupe:
        raise InputError("--dedupe looks at all sentences and does not go with --streaming")
    for file in data.train_file or []:
        if not Path(file).exists():
            raise InputError(f"{file}: --train_file does not exist; for a Hugging Face data set use --dataset_name")
    # One process of a machine reads and writes the cache; the others then find it.
    with arguments.main_process_first(desc="reading the corpus"):
        return read_corpus(
            data.train_file or str(data.dataset_name),
            text_columns=data.text_column,
            encoding=data.encoding,
            dedupe=data.dedupe,
            skip_bad=data.skip_bad,
            max_samples=data.max_train_samples,
            streaming=data.streaming,
            config_name=data.dataset_config_name,
            split=data.dataset_split,
            cache_dir=cache_dir,
            use_cache=data.corpus_cache,
        )


def _check_batches(corpus: Corpus, arguments: SimCSEArguments, loss: LossArguments) -> int:
    """Every anchor needs negatives, and every process a batch; return the negatives of an anchor in a full batch."""
    batch, known = arguments.per_device_train_batch_size, isinstance(corpus.dataset, Dataset)
    for column in corpus.report.columns:
        if column in _NO_TEXT:
            name = corpus.report.files[0].name
            raise InputError(f"{name}: column {column}: sentence-transformers takes this name for no text; rename it")
    if len(list(islice(corpus.dataset, 2))) < 2:
        name = corpus.report.files[0].name
        raise InputError(f"{name}: 1 sentence is not enough, it has no negatives; give at least 2")
    if corpus.report.distinct == 1 and loss.mask_duplicates:
        raise InputError(f"{corpus.report.files[0].name}: all sentences are equal, and none is another's negative")
    if loss.loss == "released" and len(corpus.report.columns) > 2:
        raise InputError(
            "--loss released compares two views and takes no hard negatives; name two columns with --text_column"
        )
    rows = batch * (arguments.world_size if loss.gather_across_devices else 1)
    candidates = max(len(corpus.report.columns) - 1, 1)
    if rows * candidates < 2:
        raise InputError(
            "--per_device_train_batch_size 1 leaves no negatives, and gradient accumulation adds none; use 32 or more"
        )
    if arguments.gradient_accumulation_steps > 1:
        logger.warning(
            "--gradient_accumulation_steps adds no negatives: each anchor still sees those of its own batch of %d",
            batch,
        )
    if known:
        needed = batch * arguments.world_size
        if len(corpus.dataset) < needed and (arguments.dataloader_drop_last or arguments.world_size > 1):
            raise InputError(
                f"{len(corpus.dataset)} sentences are fewer than one batch of {needed}; "
                "lower --per_device_train_batch_size"
            )
        if len(corpus.dataset) < batch:
            logger.warning("only %d sentences for a batch of %d: every step sees them all", len(corpus.dataset), batch)
        rows = min(rows, len(corpus.dataset))
    return 2 * rows - 2 if loss.loss == "released" else rows * candidates - 1


def _loss_options(arguments: LossArguments) -> dict[str, Any]:
    """Options of the criterion, tried out now: a wrong one must not wait for the encoder."""
    options = arguments.options_of(arguments.loss)
    if arguments.mini_batch_size is not None and arguments.loss not in _CACHED_LOSSES:
        raise InputError(f"--mini_batch_size goes with --loss {' or '.join(_CACHED_LOSSES)}, not {arguments.loss}")
    try:
        if arguments.loss == "mnrl-hardness":
            HardnessWeightedLoss(None, **options)  # type: ignore[arg-type]  # only the numbers matter here
        else:
            _LOSSES[arguments.loss].criterion_class(**options)
    except (ValueError, TypeError) as error:
        raise InputError(f"loss options: {error}") from error
    return options


def _check_model(model: ModelArguments, arguments: SimCSEArguments) -> None:
    config = read_model_config(
        str(model.model_name_or_path),
        cache_dir=model.cache_dir,
        revision=model.model_revision,
        trust_remote_code=model.trust_remote_code,
    )
    limit = position_limit(config)
    if arguments.max_seq_length < 3 or (limit and arguments.max_seq_length > limit):
        raise InputError(
            f"--max_seq_length {arguments.max_seq_length} is not from 3"
            + (f" to {limit}, this model's limit" if limit else " up")
        )


# ---- with the encoder, before the first step ----


def _build(model: ModelArguments, arguments: SimCSEArguments) -> SimCSEEncoder:
    options = asdict(model)
    encoder = build_encoder(options.pop("model_name_or_path"), device=str(arguments.device), **options)
    if encoder.dtype == torch.float16:
        # Adam's steps vanish in float16 weights, and the gradient scaler of --fp16 refuses them.
        logger.warning("the weights are float16: training them as float32")
        encoder.float()
    return encoder


def _token_report(encoder: SentenceTransformer, texts: list[str], max_length: int) -> dict[str, int]:
    """Count, among the first texts, those that are cut and those whose token ids repeat after the cut."""
    counts: Counter[int] = Counter()
    truncated = 0
    for start in range(0, len(texts), 256):
        batch = texts[start : start + 256]
        # One token more than is kept tells which are cut, without padding thousands of texts to the longest.
        features = encoder.preprocess(batch, max_length=max_length + 1)
        flattened = features.get("cu_seq_lens_q")  # as flash attention takes them
        lengths = features["attention_mask"].sum(1) if flattened is None else flattened.diff()
        truncated += int((lengths > max_length).sum())
        keys = text_keys(encoder.preprocess(batch, max_length=max_length))
        counts.update([] if keys is None else keys.tolist())
    repeated = [count for count in counts.values() if count > 1]
    report = {
        "texts": len(texts),
        "truncated": truncated,
        "with_equal_ids": sum(repeated),
        "redundant": sum(repeated) - len(repeated),
    }
    logger.info(
        "of the first %d texts %d are cut at %d tokens; %d have equal token ids (%d redundant)",
        report["texts"], report["truncated"], max_length, report["with_equal_ids"], report["redundant"],
    )  # fmt: skip
    return report


def _build_loss(
    encoder: SimCSEEncoder, loss: LossArguments, options: dict[str, Any], arguments: SimCSEArguments
) -> nn.Module:
    if loss.loss == "mnrl-hardness":
        gather = loss.gather_across_devices and arguments.world_size > 1  # the host warns where there is nothing to
        return HardnessWeightedLoss(encoder, gather_across_devices=gather, **options)
    host: dict[str, Any] = {
        "mask_duplicates": loss.mask_duplicates,
        "gather_across_devices": loss.gather_across_devices,
        "group_by_length": False if arguments.pad_to_max_length else None,
    }
    if loss.mini_batch_size is None:
        return _LOSSES[loss.loss](encoder, **host, **options)
    return _CACHED_LOSSES[loss.loss](encoder, mini_batch_size=loss.mini_batch_size, **host, **options)


def _build_trainer(
    encoder: SimCSEEncoder, corpus: Corpus, dev: GradedPairs | None, arguments: SimCSEArguments, loss: nn.Module
) -> SimCSETrainer:
    callbacks: list[Any] = []
    if arguments.early_stopping_patience is not None:
        callbacks.append(run_folder.Patience(arguments.early_stopping_patience, arguments.early_stopping_threshold))
    try:
        trainer = SimCSETrainer(
            model=encoder,
            args=arguments,
            train_dataset=corpus.dataset,
            loss=loss,
            evaluator=STSEvaluator(dev, _dev_name(dev), arguments.eval_batch_size) if dev else None,
            callbacks=callbacks,
        )
    except (ValueError, ImportError, RuntimeError, OSError) as error:
        # What the host finds out only now: an unknown tracker, a missing package, a hub that cannot be reached.
        raise InputError(" ".join(str(error).split())) from error
    run_folder.try_out(trainer)
    return trainer


# ---- after the last step ----


def _spearman(model: SentenceTransformer, pairs: GradedPairs, arguments: SimCSEArguments) -> float | None:
    """The score alone: an evaluator would write it into the model card."""
    results = evaluate_model(model, [pairs], batch_size=arguments.eval_batch_size, bootstrap=0)
    return results.tasks[0].correlations["all"].spearman


def _load_saved(
    output_dir: Path, model: ModelArguments, arguments: SimCSEArguments, dtype: torch.dtype | None
) -> SentenceTransformer:
    """Load the saved folder as anyone would, with the options that it needs and in the type that was trained."""
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": model.attn_implementation}
    return SentenceTransformer(
        str(output_dir),
        device=str(arguments.device),
        local_files_only=True,
        trust_remote_code=model.trust_remote_code,
        model_kwargs={name: value for name, value in options.items() if value is not None},
    )


def _dev_scores(trainer: SimCSETrainer) -> dict[int, float]:
    """Step -> score of every evaluation that has one, those before a resume included."""
    metric = str(trainer.args.metric_for_best_model)
    entries = [entry for entry in trainer.state.log_history if math.isfinite(entry.get(metric, math.nan))]
    return {int(entry["step"]): entry[metric] for entry in entries}


def _check_saved(
    saved: SentenceTransformer, result: TrainingResult, dev: GradedPairs | None, arguments: SimCSEArguments
) -> None:
    """Hold the saved encoder against the score that it was saved for (sentence-transformers issue 3344)."""
    claimed = result.dev_best if arguments.load_best_model_at_end else result.dev_last
    if dev and claimed is not None:
        evaluator = STSEvaluator(dev, _dev_name(dev), arguments.eval_batch_size)
        found = evaluator(saved)[str(arguments.metric_for_best_model).removeprefix("eval_")]
        if not abs(found - claimed) <= 1e-4:
            raise RuntimeError(
                f"the saved encoder scores {found:.4f} on {dev.name}, not the {claimed:.4f} of its training"
            )


def _warn_of_decline(result: TrainingResult) -> None:
    if result.dev_best is None:
        return
    logger.info("best score %.4f at step %s of %d", result.dev_best, result.best_step, result.steps)
    if result.dev_last is not None and result.dev_last < result.dev_best - _FALLEN:
        logger.warning(
            "the last score %.4f is far below the best: train shorter or with a lower --learning_rate", result.dev_last
        )
    if result.dev_before is not None and result.dev_best < result.dev_before:
        logger.warning(
            "training made this encoder worse: %.4f before, %.4f at best; keep the one you started from",
            result.dev_before, result.dev_best,
        )  # fmt: skip
