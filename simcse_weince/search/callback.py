"""The search cross-entropy of held-out pairs, logged while an encoder trains."""

import warnings
from collections.abc import Sequence
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from simcse_weince.search.kernels import CosineRows, SmallPoolWarning, search_cross_entropy


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
        """Keep the texts."""
        if not len(anchors) == len(positives) >= 2 or len(pool) < 2:
            raise ValueError("anchors and positives must be two or more of equal number, and pool two or more")
        self.trainer, self.temperature, self.batch_size = trainer, temperature, batch_size
        self.texts, self.pairs = [*anchors, *positives, *pool], len(anchors)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Encode the texts with the model as it is and log."""
        model: Any = kwargs["model"]
        modes = [(module, module.training) for module in model.modules()]
        try:
            vectors = model.encode(self.texts, batch_size=self.batch_size, normalize_embeddings=True,
                                   convert_to_tensor=True, show_progress_bar=False).float().cpu()  # fmt: skip
        finally:
            for module, training in modes:
                module.training = training
        anchors, positives, pool = vectors.split([self.pairs, self.pairs, len(vectors) - 2 * self.pairs])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SmallPoolWarning)  # at every step; the sample size is logged
            found = search_cross_entropy((anchors * positives).sum(1).clamp(-1, 1), CosineRows(anchors, pool),
                                         tau=self.temperature)  # fmt: skip
        figures = {"eval_search_cross_entropy": found.value, "eval_search_cross_entropy_se": found.se,
                   "eval_search_sample_size": found.ess_median}  # fmt: skip
        kwargs["metrics"].update(figures)
        self.trainer.log(figures)
