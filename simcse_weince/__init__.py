"""WEINCE: InfoNCE corrected per anchor by extreme-value statistics, for sentences and images."""

from importlib import import_module

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


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names without importing them."""
    return sorted(__all__)
