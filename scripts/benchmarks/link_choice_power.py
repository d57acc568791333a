"""Does choose_link recognise the law that drew the winners? Power, size and coverage, the noise floor, the trichotomy.

    python scripts/benchmarks/link_choice_power.py [--repeats 200] [--anchors 2000]

1. Winners among 16 candidates drawn from each law, at the same difficulty: share of samples in which each link is
   chosen, share in which the softmax is rejected against the nested link at 5 %, and share of intervals of lambda that
   hold its true value.
2. Mean squared error of log-odds against the number of winners, beside the closed forms.
3. Noise of each domain of attraction: divergence of the winners' shares from the best fit of each link.
"""

import argparse
from collections import Counter

import numpy as np

from simcse_weince.extremes import choose_link, noise_floor, trichotomy


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--anchors", type=int, default=2000)
    options = parser.parse_args()

    links = ("softmax", "power", "shortfall", "nested")
    print(f"{'winners drawn from':28}" + "".join(f"{link:>11}" for link in links) + "   p < 0.05   lambda held")
    laws = {
        "softmax, theta 8": (lambda s, g: 8 * s, 0.0),
        "power, alpha 4": (lambda s, g: 4 * np.log(s), None),
        "shortfall, beta 1.5": (lambda s, g: 1.5 * g, 1.0),
        "nested, theta 4, lambda 1/3": (lambda s, g: 4 * (s * 2 / 3 + g / 3), 1 / 3),
    }
    for name, (logits, blend) in laws.items():
        chosen: Counter[str | None] = Counter()
        rejected = held = 0
        for seed in range(options.repeats):
            rng = np.random.default_rng(seed)
            s = rng.beta(2, 1.5, (options.anchors, 16))
            winner = (logits(s, -np.log(1 - s + 1e-4)) + rng.gumbel(size=s.shape)).argmax(1)
            found = choose_link(s, winner, seed=seed)
            chosen[found.best] += 1
            rejected += found.p_value is not None and found.p_value < 0.05
            low, high = found.blend_interval or (1.0, 0.0)
            held += blend is not None and low <= blend <= high
        shares = "".join(f"{chosen[link] / options.repeats:11.3f}" for link in links)
        covered = "" if blend is None else f"{held / options.repeats:14.3f}"
        print(f"{name:28}{shares}{rejected / options.repeats:11.3f}{covered}", flush=True)

    floor = noise_floor(repeats=10_000)
    print(f"\nlog-odds {floor.log_odds:.3f}, c = {floor.fisher_constant:.3f}, squared bias {floor.squared_bias:.5f}")
    print(f"{'n':>7}{'shortfall':>12}{'+-':>10}{'closed':>10}{'n * error':>11}{'softmax':>12}{'+-':>10}{'closed':>10}")
    for row in floor.rows:
        n = int(row["n"])
        print(f"{n:7d}{row['shortfall_mse']:12.5f}{row['shortfall_se']:10.5f}{row['shortfall_closed']:10.5f}", end="")
        print(f"{n * row['shortfall_mse']:11.3f}", end="")
        print(f"{row['softmax_mse']:12.5f}{row['softmax_se']:10.5f}{row['softmax_closed']:10.5f}")

    print(f"\n{'domain':10}{'shares of the winners':36}" + "".join(f"{link:>12}" for link in links[:3]))
    for row in trichotomy():
        shares = ", ".join(f"{share:.4f}" for share in row["shares"])
        print(f"{row['domain']:10}{shares:36}" + "".join(f"{row[link]['divergence']:12.6f}" for link in links[:3]))


if __name__ == "__main__":
    main()
