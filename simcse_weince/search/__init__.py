"""How far a number of negatives is from the similarity search it stands for: estimators, bounds, solvable models."""

from simcse_weince.search.bounds import (
    averaged_sensitivity,
    bias_bounds,
    bias_bounds_data,
    capacity_uniform,
    chi2_bound,
    continuity_bound,
    density_bounds,
    generalization_bound,
    kl_bound,
    loss_range,
    tv_bound,
)
from simcse_weince.search.kernels import (
    CosineRows,
    HeavyTailWarning,
    NestedLink,
    SelfMatchWarning,
    SmallPoolWarning,
    SoftmaxLink,
    WeibullLink,
    as_link,
    infonce_loss,
    relevance_cross_entropy,
    search_cross_entropy,
    shortfall_tail_index,
)
from simcse_weince.search.models import DiscreteModel, VonMisesFisherModel
from simcse_weince.search.risk import (
    bias_curve,
    compare_links,
    extrapolate_risk,
    gap_curve,
    optimal_temperature,
    recommend_k,
    risk_curve,
    temperature_sweep,
)

__all__ = [
    "CosineRows", "DiscreteModel", "HeavyTailWarning", "NestedLink", "SelfMatchWarning", "SmallPoolWarning",
    "SoftmaxLink", "VonMisesFisherModel", "WeibullLink", "as_link", "averaged_sensitivity", "bias_bounds",
    "bias_bounds_data", "bias_curve", "capacity_uniform", "chi2_bound", "compare_links", "continuity_bound",
    "density_bounds", "extrapolate_risk", "gap_curve", "generalization_bound", "infonce_loss", "kl_bound", "loss_range",
    "optimal_temperature", "recommend_k", "relevance_cross_entropy", "risk_curve", "search_cross_entropy",
    "shortfall_tail_index", "temperature_sweep", "tv_bound",
]  # fmt: skip
