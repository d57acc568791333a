"""Many processes as one: rows of a batch that is spread over processes, gathered with the gradient of the whole batch.

Each process computes the loss of its own rows against rows of all processes. The gradient of a gathered row returns to
the process that holds it, summed over all that used it, and DistributedDataParallel averages the gradients of the
weights over processes. So if the loss of a process is the mean over its rows, times :attr:`Shard.weight`, then the
weights receive the gradient of the mean over all rows: the same as one process with the whole batch.

Two other ways that are in use do not give that gradient (lightly issue 1528, open_clip issue 616): gathering without
gradient loses the part of the other processes, and gathering with a backward that keeps only a process's own slice
changes even its direction.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor


class Shard(NamedTuple):
    """The rows that this process holds of a batch spread over all processes.

    Attributes:
        sizes: number of rows on each process, by rank; they may differ.
        rank: the rank of this process.
    """

    sizes: tuple[int, ...]
    rank: int = 0

    @classmethod
    def of(cls, rows: int, device: torch.device, *alike: int) -> "Shard":
        """Ask all processes of the default group how many rows each holds; all must call this.

        This waits for the device, the only thing here that does: without the sizes of the others a gather of unequal
        batches would hang or mix up rows. Without a process group it asks nobody.

        Args:
            rows: number of rows of this process.
            device: where the embeddings are, because a process group may be unable to talk about anything else.
            alike: whatever else must be the same on all processes for their gathers to meet, e.g. a count of columns.

        Raises:
            ValueError: on every process, if ``alike`` differs or a process has no rows.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls((rows,))
        mine = torch.tensor([rows, *alike], device=device)
        others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(others, mine)
        sizes, *rest = torch.stack(others).T.tolist()
        if min(sizes) < 1 or any(len(set(values)) > 1 for values in rest):
            raise ValueError(
                "processes cannot gather batches of different kinds (every process needs rows, and the same columns; "
                "with several data sets set accelerator_config={'split_batches': True}, or do not gather): "
                f"rows by rank {sizes}, {rest} differ or are 0"
            )
        return cls(tuple(sizes), dist.get_rank())

    @property
    def total(self) -> int:
        """Rows of all processes together."""
        return sum(self.sizes)

    @property
    def offset(self) -> int:
        """Index of this process's first row among the rows of all."""
        return sum(self.sizes[: self.rank])

    @property
    def weight(self) -> float:
        """Turns a mean over this process's rows into its part of a mean over all rows; 1 where sizes are equal."""
        return self.sizes[self.rank] * len(self.sizes) / self.total

    def all_gather(self, local: Tensor) -> Tensor:
        """Rows of all processes in rank order; their gradients return to where they came from, summed.

        Args:
            local: (k * N, ...) for the N rows of this process and any k, e.g. k views end to end.

        Returns:
            (k * total, ...); ``local`` itself if there is one process.
        """
        if len(self.sizes) == 1:
            return local
        k = len(local) // self.sizes[self.rank]
        missing = k * max(self.sizes) - len(local)
        padded = F.pad(local, (0, 0) * (local.ndim - 1) + (0, missing)) if missing else local
        # The default of this function is the group that existed when it was imported.
        parts = differentiable.all_gather(padded, group=dist.group.WORLD)
        return torch.cat([part[: k * size] for part, size in zip(parts, self.sizes, strict=True)])

    def own(self, gathered: Tensor) -> Tensor:
        """The rows of this process among gathered ones: the inverse of :meth:`all_gather`."""
        k = len(gathered) // self.total
        return gathered.narrow(0, k * self.offset, k * self.sizes[self.rank])
