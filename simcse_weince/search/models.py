"""Models whose InfoNCE risk is known exactly: the ground truth of the estimators.

A finite corpus, and points of the sphere whose positives follow a von Mises-Fisher law. Expectations of logarithms come
from ``log s = int_0^inf (e^-t - e^-ts) dt/t``, exact to about 1e-12 for any number of negatives.
"""

import math

import numpy as np
import torch
from scipy.stats import vonmises_fisher
from torch import Tensor

from simcse_weince.search.bounds import log_uniform_normaliser, uniform_quadrature
from simcse_weince.search.kernels import (
    STEP,
    Link,
    Offset,
    expected_log,
    laplace_grid,
    laplace_transform,
    log_transform,
    negatives_count,
    offset_of,
)


class _SolvableModel:
    """Moments and risk from ``logits`` (x, y), the ``corpus`` law over y, and the law of the ``positive`` (x, y).

    All are float64. ``anchor_law`` (x,) weighs the anchors; ``log_z`` (x,) and ``density`` (x, y) are those of the
    search kernel relative to the corpus.

    Attributes:
        ce: Search cross-entropy, the limit of the risk less its offset.
        Er: Mean density of the search kernel at the positive.
        Ev: Mean chi-square of the search kernel from the corpus.
        cA: Limit of ``k * (risk - log k - CE)``.
        cB: Limit of ``k * (risk - log(k + 1) - CE)``.
        kl_m_pi: Information between anchor and positive, ``KL(M || pi)``: no cross-entropy is below minus it.
    """

    kl_m_pi: float

    def __init__(self, logits: Tensor, corpus: Tensor, positive: Tensor, anchor_law: Tensor) -> None:
        self.logits, self.corpus, self.positive, self.anchor_law = logits, corpus, positive, anchor_law
        self.log_z = (logits + corpus.log()).logsumexp(1)
        self.density = (logits - self.log_z[:, None]).exp()
        self.ce = self._mean(self.log_z - (positive * logits).sum(1))
        self.Er = self._mean((positive * self.density).sum(1))
        self._set_chi2(self._mean(self._moment(2)))

    def _set_chi2(self, chi2: float) -> None:
        self.Ev, self.cA, self.cB = chi2, self.Er - chi2 / 2, self.Er - chi2 / 2 - 1

    def _mean(self, per_anchor: Tensor) -> float:
        return float(self.anchor_law @ per_anchor)

    def _moment(self, power: int) -> Tensor:
        return ((self.density - 1) ** power) @ self.corpus

    @property
    def c2A(self) -> float:
        """Second coefficient: ``risk - log k - CE = cA / k + c2A / k^2 + ...``."""
        r, v = self.density, self._moment(2)
        inner = (self.positive * (-(r**2) / 2 + r * v[:, None])).sum(1)
        return self._mean(inner + self._moment(3) / 3 - 0.75 * v**2)

    def bias(self, k: int, offset: Offset = "log_k1") -> float:
        """``risk - offset - CE``, computed without that subtraction for "log_k" and "log_k1"."""
        raw = self._mean(self._expected_log(negatives_count(k), with_positive=True))
        return raw + math.log(k) - offset_of(k, offset)

    def risk(self, k: int) -> float:
        """InfoNCE risk with k negatives, without offset."""
        return self.ce + self.bias(k, "none")

    def decoupled_bias(self, k: int) -> float:
        """The bias where the positive is not in the denominator: ``risk - log k - CE``, never positive."""
        return self._mean(self._expected_log(negatives_count(k), with_positive=False))

    def _expected_log(self, k: int, with_positive: bool) -> Tensor:
        # Items of negligible weight must not stretch the grid.
        heavy = self.density[:, self.corpus > 1e-30]
        nodes = laplace_grid(float(heavy.min()), float(heavy.max()) + k)
        transform = laplace_transform(self.density, nodes, lambda e: e @ self.corpus)
        factor = laplace_transform(self.density, nodes, lambda e: (e * self.positive).sum(1)) + 1
        return expected_log(log_transform(transform), factor if with_positive else None, nodes, k)


class DiscreteModel(_SolvableModel):
    """A corpus of m items.

    Args:
        pi: Corpus law (m,), every item possible; anchors and negatives follow it.
        M: Law of the positive given the anchor (m, m), rows sum to 1.
        logits: Logits (m, m). Samples are then these logits: use ``SoftmaxLink(1)`` and ``unbounded=True``.
        emb: Unit vectors (m, d) instead, with ``link``.
        link: Link of the cosines of ``emb``.

    Attributes:
        weight: Density of the positive relative to the corpus, (m, m).
        chi2_m: Mean chi-square of the positive's law from the corpus.
        cE: Limit of ``K * (expected_search_ce(K) - log K - CE)``.
    """

    def __init__(
        self, pi: np.ndarray, M: np.ndarray, logits: np.ndarray | None = None, emb: np.ndarray | None = None,
        link: Link | None = None,
    ) -> None:  # fmt: skip
        """Check the laws and compute the logits."""
        corpus, positive = (torch.as_tensor(np.asarray(law, np.float64)) for law in (pi, M))
        m = len(corpus)
        if (logits is None) == (emb is None) or (emb is None) != (link is None):
            raise ValueError("give either logits, or emb and link")
        if positive.shape != (m, m) or bool((corpus <= 0).any()) or bool((positive < 0).any()):
            raise ValueError("pi must be positive (m,) and M not negative (m, m)")
        if float((positive.sum(1) - 1).abs().max()) > 1e-9 or abs(float(corpus.sum()) - 1) > 1e-9:
            raise ValueError("pi and every row of M must sum to 1")
        vectors = torch.as_tensor(np.asarray(logits if emb is None else emb, np.float64))
        self.similarity = vectors if emb is None else (vectors @ vectors.T).clamp(-1, 1)
        if self.similarity.shape != (m, m):
            raise ValueError(f"logits or emb must describe {m} items")
        super().__init__(self.similarity if link is None else link.logit(self.similarity), corpus, positive, corpus)
        self.weight = positive / corpus
        self.kl_m_pi = self._mean(torch.special.xlogy(positive, self.weight).sum(1))
        self.chi2_m = self._mean((self.weight - 1) ** 2 @ corpus)
        centred = self.logits - (positive * self.logits).sum(1, keepdim=True)
        self.cE = -self.Ev / 2 + self._mean((positive * centred * self.weight).sum(1))

    def expected_search_ce(self, K: int) -> float:
        """Expected cross-entropy between relevance and search on K unseen items, relevance being the density of M.

        A list without any relevant item counts as uniform relevance.
        """
        negatives_count(K, "K")
        w, item = self.weight, self.corpus
        possible = w > 0
        nodes = laplace_grid(float(w[possible].min()), float(w.max()) + K)
        rest = laplace_transform(w, nodes, lambda e: e @ item) + 1
        term = torch.stack([(item * w * self.logits * (-t * w).exp()).sum(1) for t in nodes])
        match = K * STEP * (nodes[:, None] * term * rest ** (K - 1)).sum(0)
        nothing = (~possible).double() @ item
        irrelevant = ((~possible) * self.logits) @ item * nothing ** (K - 1)
        return self._mean(math.log(K) + self.log_z + self._expected_log(K, with_positive=False) - match - irrelevant)

    def sample(self, n: int, N: int, seed: int = 0, shared_pool: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Similarities of n anchors to a positive each (n,) and to N pool items (n, N)."""
        rng, m = np.random.default_rng(seed), len(self.corpus)
        law, similarity = self.corpus.numpy(), self.similarity.numpy()
        anchors = rng.choice(m, n, p=law)
        matches = (rng.random((n, 1)) > self.positive.numpy()[anchors].cumsum(1)).sum(1).clip(max=m - 1)
        pool = rng.choice(m, (1 if shared_pool else n, N), p=law)
        return similarity[anchors, matches], similarity[anchors[:, None], pool]


class VonMisesFisherModel(_SolvableModel):
    """Uniform points of the sphere in d dimensions; the positive of x is von Mises-Fisher around it.

    Args:
        d: Dimension, at least 2.
        kappa: Concentration of the positive.
        link: Link of the cosine. Softmax at ``tau = 1 / kappa`` is the true kernel.
    """

    def __init__(self, d: int, kappa: float, link: Link) -> None:
        self.d, self.kappa, self.link = d, kappa, link
        self.shape = (d - 1) / 2
        exponent = link.theta_t
        if exponent >= self.shape:
            raise ValueError(f"a shortfall exponent of at least (d - 1) / 2 = {self.shape} has no finite normaliser")
        slack = 2 * kappa + 4 * (link.theta_s + exponent)
        odds, log_weights = uniform_quadrature(d, slack, min(2 * exponent, (exponent + self.shape) / 2))
        half_gap = torch.from_numpy(odds).sigmoid()
        cosine = 1 - 2 * half_gap
        law, log_match = torch.from_numpy(log_weights), log_uniform_normaliser(d, kappa)
        positive = (law + kappa * cosine - log_match).exp()[None]
        super().__init__(link.logit(cosine, 2 * half_gap)[None], law.exp(), positive, torch.ones(1).double())
        self.kl_m_pi = kappa * float(positive[0] @ cosine) - log_match
        if 2 * exponent >= self.shape:
            self._set_chi2(math.inf)

    def sample(self, n: int, N: int, seed: int = 0, shared_pool: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Cosines of n anchors to a positive each (n,) and to N pool items (n, N)."""
        rng = np.random.default_rng(seed)
        axis = np.eye(self.d)[0]
        # By symmetry the cosine with the positive does not depend on where the anchor is.
        if self.kappa:
            pos = vonmises_fisher(axis, self.kappa).rvs(n, random_state=rng)[:, 0]
        else:
            pos = 1 - 2 * rng.beta(self.shape, self.shape, n)
        if not shared_pool:
            return pos, 1 - 2 * rng.beta(self.shape, self.shape, (n, N))
        points = rng.normal(size=(n + N, self.d))
        points /= np.linalg.norm(points, axis=1, keepdims=True)
        return pos, (points[:n] @ points[n:].T).clip(-1, 1)
