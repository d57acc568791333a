"""One vision run from arguments to a saved encoder with its scores: every check first, then the trainer."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import set_seed

from simcse_weince import run_folder
from simcse_weince.errors import InputError
from simcse_weince.outputs import replacing, write_json
from simcse_weince.vision.arguments import ImageArguments, VisionGroups
from simcse_weince.vision.backbones import BACKBONES, VisionEncoder, build_backbone
from simcse_weince.vision.datasets import ImageSet, load_images
from simcse_weince.vision.probe import Labelled, ProbeOptions, extract_features, run_probes
from simcse_weince.vision.trainer import VisionTrainer, knn_split
from simcse_weince.vision.views import TwoViews

_IMAGES_NAME = "images_report.json"
# What may differ when a checkpoint goes on; another encoder, loss, batch or set of images would make it no run at all.
_FREE = ("num_train_epochs", "max_steps", "log", "eval", "save", "report", "run_name", "trackio", "push",
         "hub", "dataloader_num", "disable", "probe", "knn", "bank", "test", "ddp", "use_cpu",
         "include_num")  # fmt: skip


def train(groups: VisionGroups) -> dict[str, Any]:
    """Train an encoder, save it in ``output_dir`` and score its frozen features.

    Written there: the backbone (a transformers folder that ``AutoModel`` loads) and its projection head, checkpoints,
    ``trainer_state.json``, ``train_results.json``, ``images_report.json`` (what is read, with hashes),
    ``training_config.yaml`` (the options, for ``--config``) and
    ``run.json``.

    Returns:
        The content of ``run.json`` (versions, seed, device, hashes of the images, scores); its "result" has one number
        for each score, the mean over the seeds of the probe. Empty on all processes but the first.

    Raises:
        InputError: Something about the input is unusable, found before the first step; or the training diverged.
    """
    arguments, chosen = groups.training, groups.chosen
    output_dir = Path(str(arguments.output_dir))
    start = groups.encoder.model_name_or_path
    run_folder.check_trackers(arguments)
    checkpoint = run_folder.checkpoint_to_resume(arguments, None if start in BACKBONES else start)
    if checkpoint is not None:
        run_folder.check_same_run(checkpoint, chosen, lambda name: not name.startswith(_FREE) and name != "project")
    criterion, view_options = groups.loss.criterion(), groups.images.view_options()
    with arguments.main_process_first(desc="reading the images"):
        bank, test = load_labelled(groups.images)
        split = arguments.train_split
        images = bank if split == groups.images.bank_split else _load(groups.images, split)
    parts = {role: _provenance(part) for role, part in (("train", images), ("bank", bank), ("test", test))}
    if checkpoint is not None:
        _check_same_images(checkpoint, parts["train"])
    needed = arguments.per_device_train_batch_size * arguments.world_size
    if len(images.images) < needed:
        raise InputError(
            f"{groups.images.images}: {len(images.images)} images are fewer than a batch of {needed}; lower "
            "--per_device_train_batch_size"
        )
    rows = needed if groups.loss.gather_across_devices else arguments.per_device_train_batch_size
    if arguments.eval_strategy != "no":
        knn_split(bank, arguments.knn_images)  # finds out now that it cannot
    size = groups.images.image_size or images.images.shape[-1]
    views = TwoViews(view_options, size)
    with run_folder.only_writer(arguments):
        set_seed(arguments.seed)
        try:
            backbone = build_backbone(start, image_size=size, width=groups.encoder.width)
            encoder = VisionEncoder(backbone, size, groups.encoder.projection_size)
            trainer = VisionTrainer(
                encoder, arguments, views=views, criterion=criterion, train_dataset=images,
                eval_dataset=bank, gather=groups.loss.gather_across_devices, normalize=view_options.normalize,
            )  # fmt: skip
        except (ValueError, ImportError, RuntimeError) as error:
            # What is found out only now: a width of a loaded encoder, a missing package.
            raise InputError(" ".join(str(error).split())) from error
        run_folder.try_out(trainer)
        if trainer.is_world_process_zero():
            run_folder.prepare(output_dir, chosen, checkpoint)
            write_json(output_dir / _IMAGES_NAME, parts)
        run_folder.train_or_resume(trainer, checkpoint)
        trainer.save_model()
        trainer.save_state()
        if not trainer.is_world_process_zero():
            return {}
        record = {
            **run_folder.provenance(arguments, "float32"),
            "arguments": chosen,
            "images": parts,
            "negatives_per_anchor": 2 * rows - 2,
            "steps": trainer.state.global_step,
            **score(encoder, bank, test, groups.probes, view_options.normalize, arguments.per_device_eval_batch_size),
        }
        write_json(output_dir / "run.json", record)
    run_folder.push(trainer)
    return record


def _check_same_images(checkpoint: Path, images: dict[str, Any]) -> None:
    try:
        before = json.loads((checkpoint.parent / _IMAGES_NAME).read_text(encoding="utf-8"))["train"]["sha256"]
    except (OSError, ValueError, LookupError, TypeError):
        return
    if before != images["sha256"]:
        raise InputError(f"{checkpoint}: was written while training on other images; resume with the same")


def load_labelled(images: ImageArguments) -> tuple[ImageSet, ImageSet]:
    """The bank and the test images.

    Raises:
        InputError: one of them has no labels, or they have different classes.
    """
    bank, test = _load(images, images.bank_split), _load(images, images.test_split)
    seen: list[set[int]] = []
    for split, part in ((images.bank_split, bank), (images.test_split, test)):
        if part.labels is None or int(part.labels.min()) < 0:
            raise InputError(f"{images.images}: {split} has no labels, which the probes need")
        seen.append(set(part.labels.tolist()))
    if bank.classes != test.classes:
        raise InputError(f"{images.images}: the classes of {images.bank_split} and {images.test_split} differ")
    if unknown := sorted(seen[1] - seen[0]):
        listed = ", ".join(str(bank.classes[label] if bank.classes else label) for label in unknown[:5])
        raise InputError(
            f"{images.images}: {images.bank_split} has no image of {listed}, which {images.test_split} has; no probe "
            "can learn that"
        )
    return bank, test


def score(
    encoder: VisionEncoder,
    bank: ImageSet,
    test: ImageSet,
    options: ProbeOptions,
    normalize: Any = None,
    batch_size: int = 512,
    features: str | None = None,
) -> dict[str, Any]:
    """Probe the frozen features of labelled images: all "scores" of `run_probes`, and their means as "result".

    ``features`` is a folder that gets features and labels of both parts as .npy.
    """
    parts: list[Labelled] = []
    for role, images in (("train", bank), ("test", test)):
        values = extract_features(encoder, images.images, normalize=normalize, batch_size=batch_size)
        parts.append(Labelled(values, torch.as_tensor(images.labels, device=values.device)))
        for name, array in (("features", parts[-1].features), ("labels", parts[-1].labels)) if features else ():
            with replacing(Path(str(features), f"{role}_{name}.npy")) as temporary:
                np.save(temporary, array.cpu().numpy(), allow_pickle=False)
    scores = run_probes(parts[0], parts[1], options)
    means = {f"{probe}_{name}": summary["mean"] for probe, found in scores.items()
             for name, summary in found["scores"].items()}  # fmt: skip
    return {"scores": scores, "result": means}


def _load(images: ImageArguments, split: str) -> ImageSet:
    return load_images(str(images.images), split, image_size=images.image_size, cache_dir=images.cache_dir)


def _provenance(images: ImageSet) -> dict[str, Any]:
    digest = hashlib.sha256()
    for part in images.images.split(4096):
        digest.update(part.contiguous().numpy())  # planes of STL-10 lie by columns
    return {"name": images.name, "images": len(images.images), "sha256": digest.hexdigest()}
