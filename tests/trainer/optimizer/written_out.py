"""One update of nanochat's Muon and AdamW, of January 2026, in NumPy and float64, matrix by matrix: the reference.

A matrix is [outputs, inputs], as torch has it.
"""

import numpy as np

COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


class ReferenceMuon:
    """Of one matrix."""

    def __init__(self, lr: float, weight_decay: float) -> None:
        self.lr, self.weight_decay = lr, weight_decay
        self.buffer = self.second = 0.0

    def step(self, weight: np.ndarray, gradient: np.ndarray, done: int, lr_share: float, decay_share: float):
        """The weight after one more update. done: updates before it."""
        momentum = 0.85 + 0.1 * min(done / 300, 1)
        self.buffer = momentum * self.buffer + (1 - momentum) * gradient
        x = (1 - momentum) * gradient + momentum * self.buffer

        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / (np.linalg.norm(x) * 1.02 + 1e-6)
        for a, b, c in COEFFICIENTS:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x.T if tall else x

        axis = 1 if x.shape[0] >= x.shape[1] else 0
        mean = (x**2).mean(axis=axis, keepdims=True)
        self.second = 0.95 * self.second + 0.05 * mean
        size = np.maximum(self.second, 1e-10) ** -0.5
        before, after = (np.sqrt(part.sum() * x.shape[axis]) for part in (mean, mean * size**2))
        x = x * size * before / after

        lr = self.lr * lr_share * max(1.0, x.shape[0] / x.shape[1]) ** 0.5
        keeps_sign = x * weight >= 0
        return weight - lr * x - lr * self.weight_decay * decay_share * weight * keeps_sign


class ReferenceAdam:
    """Of one array, with betas 0.8 and 0.95 and no weight decay."""

    def __init__(self, lr: float) -> None:
        self.lr = lr
        self.first = self.second = 0.0

    def step(self, weight: np.ndarray, gradient: np.ndarray, done: int, lr_share: float):
        """The weight after one more update. done: updates before it."""
        self.first = 0.8 * self.first + 0.2 * gradient
        self.second = 0.95 * self.second + 0.05 * gradient**2
        bias1, bias2 = 1 - 0.8 ** (done + 1), 1 - 0.95 ** (done + 1)
        return weight - self.lr * lr_share * (self.first / bias1) / (np.sqrt(self.second / bias2) + 1e-10)
