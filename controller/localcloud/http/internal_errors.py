"""What fails in the emulated cloud by a mistake of ours: in the log, and in the state for whoever looks there."""

from __future__ import annotations

import asyncio
import logging
import traceback

from controller.localcloud.http.errors import ApiError
from controller.localcloud.store import Store

ERROR_KIND = "mistake"


def record_error(store: Store, name: str, error: BaseException) -> None:
    """Writes down what failed under the name of what was being done, with the traceback."""
    logging.error("%s failed", name, exc_info=error)
    store.put(ERROR_KIND, name, {"traceback": "".join(traceback.format_exception(error))})


def record_task_error(store: Store, task: asyncio.Task[None]) -> None:
    """As `record`, when a task has ended, if it failed."""
    if not task.cancelled() and (error := task.exception()):
        record_error(store, task.get_name(), error)


def internal_error(error: BaseException) -> ApiError:
    """What a client is told of it."""
    return ApiError(500, f"Internal error of the emulated cloud: {error!r}; see server.log in its state folder")
