"""Run a study: what is missing and nothing twice, on all devices, until every record is there."""

import fcntl
import json
import logging
import math
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import yaml
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from simcse_weince.errors import InputError
from simcse_weince.outputs import shareable, write_json, write_text
from simcse_weince.study.plan import PHASES, Run, Study, lookup

logger = logging.getLogger(__name__)

# What the record of a first-phase run takes from run.json, beside the dev score: no test score outlives such a run.
_PROVENANCE = ("versions", "seed", "device", "processes", "precision", "arguments", "corpus", "images", "tokens")


def run_study(study: Study, *, parallel: int = 1, shard: tuple[int, int] = (1, 1), keep_models: bool = False) -> None:
    """Train and evaluate every run of a study whose record is missing.

    Each run is a process of its own (``accelerate launch`` where the study asks for several devices). A killed study
    goes on where it stopped: finished runs are records, a begun one resumes from its last checkpoint, and a training
    that outlived the kill is waited for. Failed runs are reported, and repeated at the next start.

    Args:
        study: From `read_study`. Its folder gets ``study.yaml``, a JSON per run under ``settings`` and ``report`` and,
            while they run, encoders and logs under ``work``.
        parallel: Runs at a time; the devices are dealt out to them, and a large one can take several small runs.
        shard: (i, n): every n-th run from the i-th on, for n machines with one shared folder. Report runs whose
            setting other shards choose are left for a later start.
        keep_models: Keep ``work``, with the encoder of every reported run and its checkpoints.

    Raises:
        InputError: Runs failed, or the record of a run of this study was made with other options.
    """
    slots: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
    for slot in _slots(parallel, study.processes):
        slots.put(slot)
    mine = slice(shard[0] - 1, None, shard[1])
    planned = [run for phase in PHASES for run in study.runs(phase)[mine]]
    found = sum(run is not None and study.record(run) is not None for run in planned)
    seconds: list[float] = []
    failed: list[str] = []
    stop = threading.Event()
    content = shareable({name: value for name, value in vars(study).items() if name != "output_dir"})
    content["evaluations"] = study.made_by("report")["evaluations"]
    content["arms"] = {arm: {"preset": None, **options} for arm, options in content["arms"].items()}
    write_text(study.output_dir / "study.yaml", yaml.safe_dump(content, sort_keys=False))

    def work(run: Run) -> None:
        slot, start = slots.get(), time.perf_counter()
        try:
            if not stop.is_set():
                _finish(study, run, {**os.environ, **slot}, keep_models)
                seconds.append(time.perf_counter() - start)
                bar.update()
                done, total = found + len(seconds), len(planned)
                left = tqdm.format_interval(statistics.mean(seconds) * (total - done) / parallel)
                logger.info("%s: %.0f s; %d of %d runs, about %s left", run.name, seconds[-1], done, total, left)
        except subprocess.CalledProcessError as error:
            failed.append(run.name)
            logger.warning("%s failed with exit code %d:\n%s", run.name, error.returncode, error.output)
            # Interrupted, or the very first run, as when a file is missing. One that the machine kills, as for its
            # memory, is alone in that.
            if error.returncode in (-signal.SIGINT, -signal.SIGTERM, 130) or not found + len(seconds):
                stop.set()
        except BaseException:
            stop.set()
            raise
        finally:
            slots.put(slot)

    bar = tqdm(total=len(planned), initial=found, desc=study.output_dir.name, smoothing=0, disable=None)
    with logging_redirect_tqdm(), bar:
        for phase in PHASES:
            missing = [run for run in study.runs(phase)[mine] if run and study.record(run) is None]
            with ThreadPoolExecutor(parallel) as pool:
                try:
                    list(pool.map(work, missing))
                except BaseException:
                    stop.set()
                    raise
    if failed:
        raise InputError(
            f"{study.output_dir}: {len(failed)} runs failed ({', '.join(failed)}); read log.txt of each under work, "
            "and start the study again"
        )
    if waiting := study.runs("report")[mine].count(None):
        logger.warning("%d runs wait for settings that other shards choose: start this shard again after them", waiting)


def _slots(parallel: int, processes: int) -> list[dict[str, str]]:
    """The environment of each of the runs that share this machine: its devices, or its part of the cores."""
    if not torch.cuda.is_available():
        threads = max(1, (os.cpu_count() or 1) // (parallel * processes))
        # The second is what makes several processes on CPUs find one another.
        return [
            {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)), "ACCELERATE_USE_CPU": "true"}
        ] * parallel
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    if processes > len(devices):
        raise InputError(f"a run of this study needs {processes} devices, and this machine shows {len(devices)}")
    dealt = [devices[number % len(devices)] for number in range(parallel * processes)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(dealt[slot * processes :][:processes])} for slot in range(parallel)]


def _launcher(processes: int) -> list[str]:
    python = [sys.executable, "-m"]
    if processes == 1:
        return python
    # On CPUs too, where --cpu would start one process unless there is MPI. Port 0 is any free one, for runs at once.
    return [
        *python,
        *f"accelerate.commands.launch --multi_gpu --num_processes={processes} --main_process_port=0 -m".split(),
    ]


def _finish(study: Study, run: Run, environment: Mapping[str, str], keep_models: bool) -> None:
    """Bring one run to its record, from whatever a killed study left of it."""
    folder, start = study.output_dir / "work" / run.phase / run.name, time.perf_counter()
    encoder, options_file = folder / "encoder", folder / "options.yaml"
    options = f"# {study.command}, processes: {study.processes}\n{yaml.safe_dump(run.options)}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock, (folder / "log.txt").open("a", encoding="utf-8") as log:

        def call(launcher: list[str], *arguments: str) -> None:
            # The process holds the lock too: one that outlives a killed study is not started a second time.
            command = [*launcher, "simcse_weince.cli", *arguments]
            code = subprocess.run(command, stdout=log, stderr=log, env=environment, pass_fds=[lock.fileno()]).returncode
            if code:
                last = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
                raise subprocess.CalledProcessError(code, command, "\n".join(last))

        fcntl.flock(lock, fcntl.LOCK_EX)
        if study.record(run) is not None:
            return
        if not (encoder / "run.json").exists() or options_file.read_text(encoding="utf-8") != options:
            if options_file.exists() and _shared(options_file.read_text(encoding="utf-8")) != _shared(options):
                shutil.rmtree(encoder, ignore_errors=True)  # begun with other options: nothing of it counts
            (encoder / "run.json").unlink(missing_ok=True)
            write_text(options_file, options)
            call(_launcher(study.processes), study.command, "--config", str(options_file),
                 "--output_dir", str(encoder), "--resume_from_checkpoint", "last")  # fmt: skip
        trained = json.loads((encoder / "run.json").read_text(encoding="utf-8"))
        history = json.loads((encoder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
        select, evaluations = lookup(trained, study.select), {}
        for title, place in study.scores.items():
            if place.partition(".")[0] not in study.evaluations:  # the first run tells of a place that no run has
                lookup(trained, place, f"score {title!r} of {run.name}")
        if run.phase == "settings":
            trained = {name: trained[name] for name in _PROVENANCE if name in trained}
        else:
            last = max(
                encoder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), default=encoder
            )
            for name, command in study.evaluations.items():
                words = run.words(command, run=encoder, last=last)
                call([sys.executable, "-m"], *words, "--output", str(folder / f"{name}.json"))
                evaluations[name] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
            for title, place in study.scores.items():
                lookup({**trained, **evaluations}, place, f"score {title!r} of {run.name}")
        record = {
            "phase": run.phase, "arm": run.arm, "setting": shareable(run.setting), "seed": run.seed,
            "made_by": study.made_by(run.phase), "options": shareable(run.options), "select": select, "run": trained,
            "evaluations": evaluations, "curve": _curve(history), "seconds": time.perf_counter() - start,
        }  # fmt: skip
        write_json(study.record_path(run), record)
        # With the lock, for another study that waits for this run; it may write its log meanwhile.
        if not keep_models or run.phase == "settings":
            shutil.rmtree(folder, ignore_errors=True)


def _shared(options: str) -> Any:
    """What a begun run must have in common with the one that goes on."""
    return options.partition("\n")[0], shareable(yaml.safe_load(options))


def _curve(log: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The training log without times and without the summary of a session; what is not finite becomes None."""
    times = ("runtime", "per_second", "total_flos")
    return [
        {
            name: value if value is not None and math.isfinite(value) else None
            for name, value in entry.items()
            if not name.endswith(times)
        }
        for entry in log
        if "train_loss" not in entry  # the mean since the last resume
    ]
