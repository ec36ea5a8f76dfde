"""Which builds of assets can run near the bucket: those that need nothing of this machine but the shipped code."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from conf.schema.config import Config
from controller.inputs.assets import BuildRecipe, ResolvedAsset, files_below, path_exists
from controller.inputs.code import CodeSnapshot, UnfetchedSnapshot
from controller.inputs.requirements import Requirements
from controller.resources.uploads.builds import OWN

OUTSIDE = re.compile(r"(?:^|[\s\"'=])(~[^\s\"':;]*|\.\./[^\s\"':;]*|/(?!dev/|usr/|bin/|tmp/|proc/)[^\s\"':;]+)")
"""A path of this machine in a word, which may be a script for a shell."""
MODULES = "trainer."


def with_bounds(config: Config, asset: ResolvedAsset, code: CodeSnapshot, requirements: Requirements) -> ResolvedAsset:
    """Return the asset with what binds its build to a machine."""
    recipe = asset.recipe
    if recipe is None:
        return asset
    vm_bound = ""
    if config.env.packages == "image" and config.cloud.kind != "local":
        vm_bound = "env.packages=image is about the image of TPU VMs"
    elif requirements.git:
        vm_bound = "env.requirements names git repositories, which are built for the pod"
    bound = next(_bounds(config, recipe, code), "")
    return replace(asset, recipe=replace(recipe, bound=bound, vm_bound=bound or vm_bound))


def _bounds(config: Config, recipe: BuildRecipe, code: CodeSnapshot) -> Iterator[str]:
    """Yield why a build can run on this machine only."""
    if recipe.argv[0] == OWN:
        if not recipe.argv[1:2] or not recipe.argv[1].startswith(MODULES):
            yield f"`{' '.join(recipe.argv[:2])}` is a verb of this machine"
        elif config.program.kind != "trainer":
            yield f"{recipe.argv[1]} is not in the code that program=command ships"
    for word in (*recipe.argv, *recipe.inputs):
        if found := OUTSIDE.search(word):
            yield f"it names {found[1]}, a path of this machine"
    if isinstance(code, UnfetchedSnapshot):
        return
    named = [
        word for word in dict.fromkeys((*recipe.argv[1:], *recipe.inputs)) if word and not Path(word).is_absolute()
    ]
    for word in named:
        path = recipe.root / word
        if path_exists(path) and path.resolve() != recipe.root.resolve():
            shipped = {file.resolve() for file in code.paths.values()}
            left = next((file for file in files_below(path) if file.resolve() not in shipped), None)
            if left is not None:
                yield f"it reads {left.relative_to(recipe.root)}, which is not among the shipped files"
