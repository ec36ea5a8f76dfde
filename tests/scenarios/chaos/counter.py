"""A program that counts, in lock step on all workers as SPMD programs do, with checkpoints and one result.

Its "parameters" are one 64-bit number that depends on every step: a step that was lost, or done twice, shows.
"""

import json
import os
import time
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

STEPS, SAVE_EVERY, TIMEOUT_SECONDS = 6, 2, 400
HOST, BUCKET = os.environ.get("STORAGE_EMULATOR_HOST"), os.environ.get("SLIPWAY_BUCKET", "").removeprefix("gs://")
RUN, ATTEMPT = f"runs/{os.environ.get('SLIPWAY_RUN_ID')}", os.environ.get("SLIPWAY_ATTEMPT")
WORKER, WORKERS = int(os.environ.get("TPU_WORKER_ID", "0")), len(os.environ.get("TPU_WORKER_HOSTNAMES", "").split(","))


def storage_request(path: str, data: bytes | None = None) -> bytes:
    """As a client of Cloud Storage does: what may pass is tried again."""
    for _ in range(TIMEOUT_SECONDS):
        try:
            with urlopen(Request(f"{HOST}/{path}", data=data, method="GET" if data is None else "POST")) as answer:
                return answer.read()
        except HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                raise
        except (HTTPException, OSError):
            pass
        time.sleep(0.05)
    raise TimeoutError(path.partition("?")[0])


def write_object(name: str, content: str) -> None:
    storage_request(
        f"upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={quote(f'{RUN}/{name}', safe='')}", content.encode()
    )


def read_object(name: str) -> str:
    return storage_request(f"storage/v1/b/{BUCKET}/o/{quote(f'{RUN}/{name}', safe='')}?alt=media").decode()


def list_objects(prefix: str) -> list[str]:
    found = json.loads(storage_request(f"storage/v1/b/{BUCKET}/o?prefix={quote(f'{RUN}/{prefix}', safe='')}"))
    return [item["name"].removeprefix(f"{RUN}/") for item in found.get("items", [])]


def barrier(step: int) -> None:
    """A collective: it does not return while one of the workers is missing."""
    write_object(f"beats/{step:02d}-{ATTEMPT}-{WORKER}", "")
    while len(list_objects(f"beats/{step:02d}-{ATTEMPT}-")) < WORKERS:
        time.sleep(0.02)


def main() -> None:
    done = max((int(name.split("/")[1]) for name in list_objects("checkpoints/") if name.endswith("/done")), default=0)
    value = int(read_object(f"checkpoints/{done}/value"), 16) if done else 1
    print("begins after step", done, flush=True)
    barrier(done)
    for step in range(done + 1, STEPS + 1):
        time.sleep(0.03)
        barrier(step)
        value = (value * 6364136223846793005 + step) % 2**64
        if step % SAVE_EVERY == 0 and WORKER == 0:
            write_object(f"checkpoints/{step}/value", f"{value:016x}")
            write_object(f"checkpoints/{step}/done", "")
        print("step", step, flush=True)
    write_object(f"final/{WORKER}", f"{value:016x}")
    Path(os.environ["SLIPWAY_RUN_DIR"], "summary.json").write_text(json.dumps({"value": f"{value:016x}"}))


if __name__ == "__main__":
    main()
