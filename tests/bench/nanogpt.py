"""nanoGPT's model and update (https://github.com/karpathy/nanoGPT, train.py and model.py) written out in torch, at its
CPU setting for tinyshakespeare: what `tests.bench.lm` compares with. Needs torch, and nothing of this project.

    python tests/bench/nanogpt.py input.txt [--steps 200] [--threads 2] [--evaluate]

Prints one JSON object: tokens per second, CPU seconds of all threads per update, and with --evaluate the loss over the
whole validation part.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

LAYERS, HEADS, DIM, BLOCK, BATCH, STEPS = 4, 4, 128, 64, 12, 2000
LR, FINAL_LR, WARMUP = 1e-3, 1e-4, 100


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (DIM,), self.weight, None, 1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = Norm(), Norm()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        query, key, value = self.qkv(self.norm_1(x)).split(DIM, dim=2)
        heads = [part.view(rows, length, HEADS, DIM // HEADS).transpose(1, 2) for part in (query, key, value)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).contiguous().view(rows, length, DIM))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, DIM), nn.Embedding(BLOCK, DIM)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), Norm()
        self.head = nn.Linear(DIM, vocab, bias=False)
        self.tokens.weight = self.head.weight
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                into_stream = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * LAYERS) if into_stream else 0.02)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def learning_rate(step: int) -> float:
    if step < WARMUP:
        return LR * (step + 1) / (WARMUP + 1)
    done = (step - WARMUP) / (STEPS - WARMUP)
    return FINAL_LR + 0.5 * (1 + math.cos(math.pi * done)) * (LR - FINAL_LR)


def batch(data: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - BLOCK, (BATCH,))
    x = torch.stack([torch.from_numpy(data[i : i + BLOCK].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + BLOCK].astype(np.int64)) for i in starts])
    return x, y


@torch.no_grad()
def full_loss(model: Gpt, data: np.ndarray) -> float:
    """Mean loss over all whole windows of a text that do not overlap."""
    count = (len(data) - 1) // BLOCK
    x, y = (torch.from_numpy(data[i : i + count * BLOCK].astype(np.int64)).view(count, BLOCK) for i in (0, 1))
    sums = [model(a, b).item() * len(a) for a, b in zip(x.split(64), y.split(64), strict=True)]
    return sum(sums) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evaluate", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1337)
    text = options.text.read_text()
    ids = {char: i for i, char in enumerate(sorted(set(text)))}
    data = np.array([ids[char] for char in text], np.uint16)
    cut = int(0.9 * len(data))
    model = Gpt(len(ids))
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": 0.1},
        {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99))
    began, began_cpu, warm = 0.0, 0.0, min(20, options.steps // 2)
    for step in range(options.steps):
        if step == warm:
            began, began_cpu = time.perf_counter(), time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = model(*batch(data[:cut]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    timed = options.steps - warm
    result = {
        "tokens_per_second": timed * BATCH * BLOCK / (time.perf_counter() - began),
        "cpu_seconds_per_update": (time.process_time() - began_cpu) / timed,
    }
    if options.evaluate:
        result["eval_loss"] = full_loss(model, data[cut:])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
