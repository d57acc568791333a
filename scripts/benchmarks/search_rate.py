"""Does the loss approach the search objective at 1/k? A table on a model whose answer is known.

    python scripts/benchmarks/search_rate.py [--anchors 2000] [--pool 2000] [--plot rate.png]

Points of the sphere in 16 dimensions with von Mises-Fisher positives: the bias estimated from one sample of embeddings,
times k, tends to a constant. Beside it the exact bias and the naive bound, which falls with 1/sqrt(k): the spread
of the denominator, (e^(2/tau) - 1) / (2 sqrt(k)), plus the share of the positive, e^(2/tau) / k.
"""

import argparse
import math

import numpy as np

from simcse_weince.search import SoftmaxLink, VonMisesFisherModel, bias_curve

TAU = 0.1


def naive_bound(k: "int | np.ndarray") -> "float | np.ndarray":
    """What bounding the deviation of the mean of k exponentials in [e^(-1/tau), e^(1/tau)] alone would give."""
    return math.expm1(2 / TAU) / (2 * np.sqrt(k)) + math.exp(2 / TAU) / k


def main() -> None:
    """Print the table and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anchors", type=int, default=2000)
    parser.add_argument("--pool", type=int, default=2000)
    parser.add_argument("--plot", help="PNG file")
    options = parser.parse_args()

    model = VonMisesFisherModel(16, 10, SoftmaxLink(TAU))
    sample = model.sample(options.anchors, options.pool, 0)
    curve = bias_curve(*sample, [4**i for i in range(9)], tau=TAU, offset="log_k", max_anchors=options.anchors)
    exact = [model.bias(k, "log_k") for k in curve.k.tolist()]
    print(f"{'k':>7}{'exact bias':>12}{'estimate':>12}{'+-':>9}{'k * estimate':>14}{'naive bound':>13}")
    for k, truth, bias, se in zip(curve.k.tolist(), exact, curve.bias, curve.se, strict=True):
        print(f"{k:7d}{truth:12.5f}{bias:12.5f}{1.96 * se:9.5f}{k * bias:14.3f}{naive_bound(k):13.3g}")
    print(f"limit of k * bias: exact {model.cA:.3f}, estimate {curve.cA:.3f} +- {1.96 * curve.cA_se:.3f}")

    if options.plot:
        from simcse_weince.page import new_figure

        figure = new_figure(7, 4.5)
        axes = figure.subplots()
        axes.loglog(curve.k, exact, color="black", label="exact")
        axes.errorbar(curve.k, curve.bias, 1.96 * curve.se, fmt="o", label="estimate, 95 % interval")
        axes.loglog(curve.k, model.cA / curve.k, ":", color="black", label=f"{model.cA:.2f} / k")
        axes.loglog(curve.k, naive_bound(curve.k), "--", color="tab:red", label="naive bound, 1 / sqrt(k)")
        axes.set(xlabel="negatives", ylabel="nats", title="Loss less log k less search cross-entropy")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(options.plot, dpi=150)


if __name__ == "__main__":
    main()
