"""The search cross-entropy that is logged while a tiny encoder trains."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

from simcse_weince.losses import InfoNCELoss
from simcse_weince.search import search_cross_entropy
from simcse_weince.search.callback import SearchCallback

WORDS = "red blue green cat dog man woman house river city train door year lamp water music".split()
ANCHORS = [f"the {word} is here" for word in WORDS[:8]]
POSITIVES = [f"here is the {word}" for word in WORDS[:8]]
POOL = [f"{one} and {other}" for one in WORDS for other in WORDS if one != other]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_cross_entropy_of_held_out_pairs_is_logged_and_chooses_the_checkpoint(tiny_bert: str, tmp_path: Path) -> None:
    model = SentenceTransformer(tiny_bert, device="cpu")
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            str(tmp_path / "run"),
            max_steps=4,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="eval_search_cross_entropy",
            greater_is_better=False,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Dataset.from_dict({"anchor": POOL, "positive": POOL}),
        loss=InfoNCELoss(model),
        evaluator=EmbeddingSimilarityEvaluator(ANCHORS, POSITIVES, [i / 7 for i in range(8)]),
    )
    trainer.add_callback(SearchCallback(trainer, ANCHORS, POSITIVES, POOL, temperature=0.2))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_search_cross_entropy" in entry]
    assert [entry["step"] for entry in logged] == [2, 4]
    values = [entry["eval_search_cross_entropy"] for entry in logged]
    assert values[0] != values[1] and trainer.state.best_metric == min(values)
    assert all(entry["eval_search_cross_entropy_se"] > 0 < entry["eval_search_sample_size"] for entry in logged)
    a, b, c = (model.encode(texts, convert_to_tensor=True) for texts in (ANCHORS, POSITIVES, POOL))
    cosine = torch.nn.functional.cosine_similarity
    found = search_cross_entropy(cosine(a, b), cosine(a[:, None], c[None], dim=2), tau=0.2)
    assert found.value == pytest.approx(min(values), abs=1e-4)  # the best model was loaded


def test_modes_of_modules_are_kept_and_texts_are_checked(tiny_bert: str) -> None:
    model = SentenceTransformer(tiny_bert, device="cpu").train()
    logged: list[dict] = []
    trainer = type("Trainer", (), {"log": staticmethod(logged.append)})()
    metrics: dict = {}
    SearchCallback(trainer, ANCHORS, POSITIVES, POOL).on_evaluate(None, None, None, model=model, metrics=metrics)
    assert logged == [metrics] and all(module.training for module in model.modules())
    for wrong in ((ANCHORS, POSITIVES[:3], POOL), (ANCHORS[:1], POSITIVES[:1], POOL), (ANCHORS, POSITIVES, POOL[:1])):
        with pytest.raises(ValueError, match="two or more"):
            SearchCallback(trainer, *wrong)
