"""The search cross-entropy of held-out pairs, logged while an encoder trains."""

import warnings
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from simcse_weince.search.kernels import CosineRows, SmallPoolWarning, search_cross_entropy
from simcse_weince.sentence.encoder import encode_distinct


class SearchCallback(TrainerCallback):
    """Log the search cross-entropy of held-out pairs, in nats, with its standard error, whenever a trainer evaluates.

    Unlike the loss it does not depend on the batch size: batches of any size are compared with one another. The
    figures ``eval_search_cross_entropy``, ``eval_search_cross_entropy_se`` and ``eval_search_sample_size`` (below 30
    the pool is too small for the temperature) are logged and can choose the best checkpoint, by
    ``metric_for_best_model="eval_search_cross_entropy"`` and ``greater_is_better=False``.

        trainer.add_callback(SearchCallback(trainer, anchors, positives, pool, temperature=0.05))

    Args:
        trainer: A SentenceTransformerTrainer.
        anchors: Held-out texts, at least 2.
        positives: Their positives, in the same order.
        pool: Texts like those that will be searched, none of them an anchor or a positive.
        temperature: That of the loss.
        batch_size: Texts encoded at a time.
    """

    def __init__(
        self, trainer: Trainer, anchors: Sequence[str], positives: Sequence[str], pool: Sequence[str], *,
        temperature: float = 0.05, batch_size: int = 128,
    ) -> None:  # fmt: skip
        if not len(anchors) == len(positives) >= 2 or len(pool) < 2:
            raise ValueError("anchors and positives must be two or more of equal number, and pool two or more")
        self.trainer, self.temperature, self.batch_size = trainer, temperature, batch_size
        self.texts = (anchors, positives, pool)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Encode the texts with the model as it is and log."""
        model: Any = kwargs["model"]
        vectors = encode_distinct(model, chain(*self.texts), self.batch_size, normalize_embeddings=True)
        anchors, positives, pool = (torch.from_numpy(vectors(side)).float() for side in self.texts)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SmallPoolWarning)  # at every step; the sample size is logged
            found = search_cross_entropy((anchors * positives).sum(1).clamp(-1, 1), CosineRows(anchors, pool),
                                         tau=self.temperature)  # fmt: skip
        figures = {"eval_search_cross_entropy": found.value, "eval_search_cross_entropy_se": found.se,
                   "eval_search_sample_size": found.ess_median}  # fmt: skip
        kwargs["metrics"].update(figures)
        self.trainer.log(figures)
