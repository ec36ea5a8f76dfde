"""Nash-MHC's forms in NumPy and float64, token by token, from the formulas of docs/nash-mhc.md.

A decoder of the Llama family (RMSNorm, SwiGLU, rotary positions, no biases) with `model.residual` and
`model.attention_form`; nothing of the trainer is used.
"""

import itertools
from typing import Any

import numpy as np

from conf.schema.training.model import Model

Tree = dict[str, Any]


def hidden_states(params: Tree, cfg: Model, tokens: np.ndarray) -> np.ndarray:
    """After the final norm, [T, D], for the tokens of one row [T]."""
    n = cfg.hyper.streams if cfg.residual in ("mhc", "mhc_lite") else 1
    state = np.stack([np.float64(params["embedding"])[tokens]] * n)  # [n, T, D]
    for i in range(cfg.num_layers):
        layer = {name: np.float64(stacked[i]) for name, stacked in params["layers"].items()}

        def attention(x: np.ndarray, w: Tree = layer) -> np.ndarray:
            return attend(rms(x, w["attention_norm"], cfg), w, cfg)

        def mlp(x: np.ndarray, w: Tree = layer) -> np.ndarray:
            x = rms(x, w["mlp_norm"], cfg)
            gate = x @ w["gate"]
            return (gate * sigmoid(gate) * (x @ w["up"])) @ w["down"]

        for branch in (attention, mlp):
            state = connect(state, layer, branch.__name__, cfg, branch)
    return rms(state.mean(axis=0), np.float64(params["final_norm"]), cfg)


def rms(x: np.ndarray, gain: np.ndarray | float, cfg: Model) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + cfg.norm_eps) * gain


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


def sinkhorn(logits: np.ndarray, iterations: int) -> np.ndarray:
    matrix = np.exp(logits)
    for _ in range(iterations):
        matrix = matrix / matrix.sum(axis=0, keepdims=True)
        matrix = matrix / matrix.sum(axis=1, keepdims=True)
    return matrix


def connect(state: np.ndarray, layer: Tree, name: str, cfg: Model, branch: Any) -> np.ndarray:
    if cfg.residual == "plain":
        return state + branch(state[0])[None]
    if cfg.residual == "nash_hc":
        matrix = sinkhorn(layer[f"{name}_mixing_logits"], cfg.hyper.sinkhorn_iterations)
        kept, added = state[0] @ matrix.T, branch(state[0]) @ (np.eye(cfg.dim) - matrix).T
        return ((kept + added) * layer[f"{name}_layer_scale"])[None]
    n, length, dim = state.shape
    read, write, mixed = np.zeros((length, n)), np.zeros((length, n)), np.zeros((length, n, n))
    a1, a2, a3 = layer[f"{name}_streams_scale"]
    b1, b2, b3 = np.split(layer[f"{name}_streams_bias"], [n, 2 * n])
    for t in range(length):
        whole = rms(state[:, t].reshape(n * dim), 1.0, cfg) @ layer[f"{name}_streams"]
        p, q, r = np.split(whole, [n, 2 * n])
        read[t], write[t] = sigmoid(a1 * p + b1), 2 * sigmoid(a2 * q + b2)
        if cfg.residual == "mhc":
            mixed[t] = sinkhorn((a3 * r + b3).reshape(n, n), cfg.hyper.sinkhorn_iterations)
        else:
            orders = itertools.permutations(range(n))
            mixed[t] = sum(share * np.eye(n)[[*o]] for share, o in zip(softmax(a3 * r + b3), orders, strict=True))
    added = branch(np.einsum("tn,ntd->td", read, state))
    return np.einsum("tij,jtd->itd", mixed, state) + np.einsum("ti,td->itd", write, added)


def attend(x: np.ndarray, layer: Tree, cfg: Model) -> np.ndarray:
    value = np.einsum("td,dhk->thk", x, layer["value"])
    first = one_attention(x, value, np.arange(len(x)), layer["query"], layer["key"], layer, cfg)
    if cfg.attention_form == "causal":
        return first
    outs, scaled = [first], x
    flat = value.reshape(len(x), cfg.dim)
    for scale in range(1, cfg.maha.scales):
        scaled, flat = downsample(scaled, layer[f"downsample_{scale}"]), downsample(flat, layer[f"downsample_{scale}"])
        positions = np.arange(len(scaled)) * 2**scale
        values = flat.reshape(len(flat), cfg.num_heads, cfg.head_dim)
        out = one_attention(scaled, values, positions, layer[f"query_{scale}"], layer[f"key_{scale}"], layer, cfg)
        outs.append(np.stack([out[t // 2**scale] for t in range(len(x))]))
    return np.stack([weigh([out[t] for out in outs], layer, cfg) for t in range(len(x))])


def weigh(outs: list[np.ndarray], layer: Tree, cfg: Model) -> np.ndarray:
    """One position's weighted sum of what the scales found."""
    if cfg.maha.aggregation == "convex":
        return sum(share * out for share, out in zip(softmax(layer["scale_logits"]), outs, strict=True))
    shares = np.full(len(outs), 1 / len(outs))
    for _ in range(cfg.maha.nash_iterations):
        agreed = sum(share * out for share, out in zip(shares, outs, strict=True))
        shares = softmax(-np.array([np.sqrt(((out - agreed) ** 2).sum() + 1e-8) for out in outs]))
    return sum(share * out for share, out in zip(shares, outs, strict=True))


def downsample(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """A convolution of width 3 and stride 2 whose window ends at the position: kernel [3 D, D]."""
    padded = np.concatenate([np.zeros((2, x.shape[1])), x])
    return np.stack([padded[j : j + 3].reshape(-1) @ kernel for j in range(0, len(x), 2)])


def one_attention(
    x: np.ndarray, value: np.ndarray, positions: np.ndarray, query: np.ndarray, key: np.ndarray, layer: Tree, cfg: Model
) -> np.ndarray:
    query, key = (rotate(np.einsum("td,dhk->thk", x, weight), positions, cfg) for weight in (query, key))
    shared = query.shape[1] // key.shape[1]
    out = np.zeros_like(query)
    for head in range(query.shape[1]):
        for t in range(len(x)):
            scores = key[: t + 1, head // shared] @ query[t, head] / np.sqrt(cfg.head_dim)
            out[t, head] = softmax(scores) @ value[: t + 1, head // shared]
    return np.einsum("thk,hkd->td", out, layer["output"])


def rotate(x: np.ndarray, positions: np.ndarray, cfg: Model) -> np.ndarray:
    half = cfg.head_dim // 2
    angles = positions[:, None, None] * cfg.rope_theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)
