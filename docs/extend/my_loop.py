"""Loop: fit a line by gradient descent, over all devices, and resume from its own checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec


def fit_line(experiment, mesh, log, *, slope: float = 2.0):
    """Train for `loop.steps` updates. Every process runs this function."""
    saved = epath.Path(experiment.dir) / "line.txt"
    step, weight = map(float, saved.read_text().split()) if saved.exists() else (0.0, 0.0)
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    x = jax.device_put(np.arange(1, mesh.size + 1, dtype=np.float32), rows)

    @jax.jit
    def update(w):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((w * x - slope * x) ** 2))(w)
        return w - experiment.optimizer.lr * gradient, loss

    log.resume(int(step))
    for done in range(int(step) + 1, experiment.loop.steps + 1):
        weight, loss = update(weight)
        log.log(done, "train", loss=float(loss), steps_total=experiment.loop.steps)
        if done % experiment.checkpoint.save_interval == 0 and jax.process_index() == 0:
            saved.parent.mkdir(parents=True, exist_ok=True)
            saved.write_text(f"{done} {float(weight)}")
    log.summarize(slope=float(weight))
