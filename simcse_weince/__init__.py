"""WEINCE: InfoNCE corrected per anchor by extreme-value statistics, for sentences and images."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see of _PUBLIC
    from simcse_weince.criterion import InfoNCE as InfoNCE, ReleasedWeince as ReleasedWeince, Weince as Weince
    from simcse_weince.extremes.link_choice import choose_link as choose_link
    from simcse_weince.extremes.pot import fit_pot as fit_pot
    from simcse_weince.losses import (
        CachedInfoNCELoss as CachedInfoNCELoss,
        CachedWeinceLoss as CachedWeinceLoss,
        InfoNCELoss as InfoNCELoss,
        WeinceLoss as WeinceLoss,
    )
    from simcse_weince.search import recommend_k as recommend_k, risk_curve as risk_curve
    from simcse_weince.sentence.arguments import SimCSEArguments as SimCSEArguments
    from simcse_weince.sentence.sts import STSEvaluator as STSEvaluator
    from simcse_weince.sentence.trainer import LossStatsCallback as LossStatsCallback, SimCSETrainer as SimCSETrainer
    from simcse_weince.tail import TailStatistics as TailStatistics
    from simcse_weince.vision.trainer import VisionTrainer as VisionTrainer

__version__ = "0.1.0"

# Public name -> module that defines it. Loaded on first use, so that a plain import stays cheap.
_PUBLIC = {
    "InfoNCE": "simcse_weince.criterion",
    "Weince": "simcse_weince.criterion",
    "ReleasedWeince": "simcse_weince.criterion",
    "TailStatistics": "simcse_weince.tail",
    "WeinceLoss": "simcse_weince.losses",
    "InfoNCELoss": "simcse_weince.losses",
    "CachedWeinceLoss": "simcse_weince.losses",
    "CachedInfoNCELoss": "simcse_weince.losses",
    "SimCSETrainer": "simcse_weince.sentence.trainer",
    "LossStatsCallback": "simcse_weince.sentence.trainer",
    "SimCSEArguments": "simcse_weince.sentence.arguments",
    "STSEvaluator": "simcse_weince.sentence.sts",
    "VisionTrainer": "simcse_weince.vision.trainer",
    "fit_pot": "simcse_weince.extremes.pot",
    "choose_link": "simcse_weince.extremes.link_choice",
    "risk_curve": "simcse_weince.search",
    "recommend_k": "simcse_weince.search",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names without importing them."""
    return sorted(__all__)
