"""A pool of processes that talk through gloo, started once for all tests of a session; tests send it functions."""

import atexit
import functools
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HANG = timedelta(seconds=60)
"""A collective that waits longer fails."""


def run_distributed(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``function(rank, *arguments)`` returns on each of 1 to 4 processes, in a process group of its own.

    The function must be importable (defined at the top of a module); an exception is re-raised here as RuntimeError.
    """
    pipes = [_process(rank) for rank in range(world_size)]
    with tempfile.TemporaryDirectory() as folder:
        for rank, pipe in enumerate(pipes):
            pipe.send((Path(folder) / "store", rank, world_size, function, arguments))
        answers = [pipe.recv() if pipe.poll(2 * HANG.total_seconds()) else (False, "no answer") for pipe in pipes]
    failures = [f"rank {rank}: {answer}" for rank, (fine, answer) in enumerate(answers) if not fine]
    if failures:
        raise RuntimeError("\n".join(failures))
    return [answer for _, answer in answers]


@contextmanager
def launched(rank: int) -> Iterator[None]:
    """Within a function of `run_distributed`: accelerate finds what a launcher would have left for this process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": dist.get_world_size(), "LOCAL_WORLD_SIZE": 2}
    ours = {**{name: str(value) for name, value in ranks.items()}, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    before = dict(os.environ)
    os.environ.update(ours)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


@functools.cache
def _process(rank: int) -> Any:
    """Our end of the pipe to a process of the pool, started when it is first needed."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    atexit.register(process.kill)
    return ours


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    while True:
        store, rank, world_size, function, arguments = pipe.recv()
        try:
            dist.init_process_group("gloo", f"file://{store}", timeout=HANG, rank=rank, world_size=world_size)
            dist.barrier()  # a function that fails at once must not close connections that others are still opening
            answer = (True, function(rank, *arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(answer)
