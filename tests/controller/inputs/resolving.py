"""Assets of a config, resolved in a test's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conf.schema.infra.assets import Asset
from controller.inputs.assets import ResolvedAsset, resolve_asset
from controller.inputs.hash_cache import HashCache


def held(tmp_path: Path, root: Path | None = None, **fields: Any) -> ResolvedAsset:
    with HashCache(tmp_path / "hashes.json") as hashes:
        return resolve_asset("dataset", "d", Asset.model_validate(fields), root or tmp_path, tmp_path, hashes)
