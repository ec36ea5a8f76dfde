"""Updates of TinyRecursiveModels' PyTorch code, for `tests.bench.peers.trm`. Needs torch, einops, pydantic and a clone.

    python tests/bench/peers/trm_torch.py CLONE mlp|attention BATCH

pretrain.py and its optimizer need CUDA, so AdamATan2 and the average of the weights are written out here. It does an
update per line of its standard input, and prints seconds and CPU seconds as JSON.
"""

import json
import sys
import time

import torch

LR, WEIGHT_DECAY, BETAS, EMA = 1e-4, 1.0, (0.9, 0.95), 0.999


def main(clone: str, mixer: str, batch_size: int) -> None:
    sys.path.insert(0, clone)
    from models.losses import ACTLossHead
    from models.recursive_reasoning.trm import TinyRecursiveReasoningModel_ACTV1 as Model

    config = {
        "batch_size": batch_size, "seq_len": 81, "puzzle_emb_ndim": 512, "num_puzzle_identifiers": 1, "vocab_size": 11,
        "H_cycles": 3, "L_cycles": 6, "H_layers": 0, "L_layers": 2, "hidden_size": 512, "expansion": 4, "num_heads": 8,
        "pos_encodings": "none" if mixer == "mlp" else "rope", "halt_max_steps": 16, "halt_exploration_prob": 0.1,
        "forward_dtype": "float32", "mlp_t": mixer == "mlp", "puzzle_emb_len": 16, "no_ACT_continue": True,
    }  # fmt: skip
    head = ACTLossHead(Model(config), "stablemax_cross_entropy").train()
    weights = list(head.parameters())
    state = {name: [torch.zeros_like(w) for w in weights] for name in ("m", "v")}
    state["average"] = [w.detach().clone() for w in weights]
    made, carry = torch.Generator().manual_seed(0), None
    for step, _ in enumerate(sys.stdin, 1):
        began, cpu = time.perf_counter(), time.process_time()
        cells = torch.randint(1, 11, (2, batch_size, 81), generator=made, dtype=torch.int32)
        batch = {"inputs": cells[0], "labels": cells[1].long()}
        batch["puzzle_identifiers"] = torch.zeros(batch_size, dtype=torch.int32)
        carry = head.initial_carry(batch) if carry is None else carry
        carry, loss, _, _, _ = head(carry=carry, batch=batch, return_keys=[])
        (loss / batch_size).backward()
        optimize(weights, state, step)
        head.zero_grad()
        taken = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
        print(json.dumps(taken), flush=True)


@torch.no_grad()
def optimize(weights: list[torch.Tensor], state: dict[str, list[torch.Tensor]], step: int) -> None:
    """AdamATan2 and the average."""
    gradients = [w.grad for w in weights]
    torch._foreach_mul_(weights, 1 - LR * WEIGHT_DECAY)
    torch._foreach_lerp_(state["m"], gradients, 1 - BETAS[0])
    torch._foreach_lerp_(state["v"], torch._foreach_mul(gradients, gradients), 1 - BETAS[1])
    for w, m, v in zip(weights, state["m"], state["v"], strict=True):
        w.sub_(torch.atan2(m, (v / (1 - BETAS[1] ** step)).sqrt()), alpha=LR / (1 - BETAS[0] ** step))
    torch._foreach_lerp_(state["average"], weights, 1 - EMA)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
