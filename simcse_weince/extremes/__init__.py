"""Is the endpoint there? Extreme-value diagnostics of the scores of an encoder."""

from simcse_weince.extremes.link_choice import LinkChoice, choose_link
from simcse_weince.extremes.noise_floor import NoiseFloor, noise_floor, trichotomy
from simcse_weince.extremes.pot import PotFit, fit_pot, mean_residual_life, threshold_stability

__all__ = ["LinkChoice", "NoiseFloor", "PotFit", "choose_link", "fit_pot"]
__all__ += ["mean_residual_life", "noise_floor", "threshold_stability", "trichotomy"]
