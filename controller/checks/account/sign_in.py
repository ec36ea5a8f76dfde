"""Sign-in: Google knows you and the project, APIs can be enabled, and this machine's clock and SSH key are right."""

import os
from collections.abc import Iterator
from contextlib import suppress

from conf.schema.config import Config
from controller.config.run_yaml import bucket_name
from controller.context import Context
from controller.core.errors import CloudError, ConfigError
from controller.core.finding import Issue, check
from controller.core.text import format_duration
from controller.gcp.credentials import NO_PROJECT, absent_file, missing_project
from controller.gcp.google_errors import (
    ForbiddenError,
    GoogleError,
    NoCredentialsError,
    NotFoundError,
    ServiceDisabledError,
)
from controller.plan.project_steps import shared_resources
from controller.resources.services import Services
from controller.ssh.login import KEY_FILE_NAME, public_key_line

CLOCK_SECONDS = 60.0
"""An error of this machine's clock that is worth a warning."""
COMMON_PERMISSIONS = ("resourcemanager.projects.get", "serviceusage.services.use", "storage.buckets.list")
ASK = "projects.testIamPermissions"


@check("credentials", "warning", "cloud", also="error", live=True, of_pods=True)
def has_credentials(config: Config, context: Context) -> Iterator[Issue]:
    """Requests need application-default credentials, which `gcloud auth login` alone does not create. A login can also
    expire, lack a scope, or count against a project that you may not use.
    """
    if not context.google.has_credentials:
        yield Issue(
            absent_file()
            or "no Google credentials, so nothing was checked; run `gcloud auth application-default login` (and "
            "`gcloud auth login` for the commands of gcloud), or set cloud=local"
        )
        return
    try:
        held_in_project(context)
    except NoCredentialsError as error:
        yield Issue(str(error), severity="error")
    except (ForbiddenError, NotFoundError, ServiceDisabledError):
        return  # `project` reports it, or `up` enables the API


@check("project", "error", "cloud.project", live=True, of_pods=True)
def project_is_there(config: Config, context: Context) -> Iterator[Issue]:
    """A project that is misspelt, deleted or another person's answers every request with a lack of permission."""
    if context.project == NO_PROJECT:
        yield Issue(missing_project(context.project))
        return
    yours = f"`gcloud projects list` shows yours, `gcloud projects describe {context.project}` this one"
    try:
        state = context.google.call("cloudresourcemanager", "projects.get", projectId=context.project)
        if state.get("lifecycleState", "ACTIVE") != "ACTIVE":
            yield Issue(f"{context.project} is being deleted; `gcloud projects undelete {context.project}` restores it")
    except (ForbiddenError, NotFoundError) as error:
        with suppress(ForbiddenError, NotFoundError):
            if held_in_project(context):
                return  # a custom role may lack the right to see it
        yield Issue(f"{context.project} does not exist, or you have no access to it ({error.message}); {yours}")


def held_in_project(context: Context) -> list[str]:
    """Return which of a few permissions the caller holds; anyone whom Google knows may ask."""
    body = {"permissions": list(COMMON_PERMISSIONS)}
    answer = context.google.call("cloudresourcemanager", ASK, resource=context.project, body=body)
    return answer.get("permissions", [])


@check("apis", "error", "cloud.apis", live=True, of_pods=True)
def apis_can_be_enabled(config: Config, context: Context) -> Iterator[Issue]:
    """`up` enables the APIs that are off, if you may."""
    wanted = next(one for one in shared_resources(config, bucket_name(config, "")) if isinstance(one, Services))
    try:
        enabled = wanted.observe(context, {}).apis
    except CloudError as error:
        if isinstance(error, GoogleError):
            raise
        yield Issue(str(error))  # the API that enables others is off
        return
    missing = [api for api in wanted.apis if api not in enabled]
    if not missing:
        return
    body = {"permissions": ["serviceusage.services.enable"]}
    if not context.google.call("cloudresourcemanager", ASK, resource=context.project, body=body).get("permissions"):
        command = f"gcloud services enable {' '.join(missing)} --project={context.project}"
        yield Issue(f"{', '.join(missing)}: off, and you may not enable them; ask an admin to run `{command}`")


@check("clock", "warning", "cloud", live=True, of_pods=True)
def clock_is_right(config: Config, context: Context) -> Iterator[Issue]:
    """Google rejects what a clock that is minutes wrong has signed, and times in records would mislead."""
    ahead = context.google.seconds_ahead(context.project)
    if abs(ahead) > CLOCK_SECONDS:
        how = "fast" if ahead > 0 else "slow"
        yield Issue(
            f"this machine's clock is {format_duration(abs(ahead))} {how}; `sudo timedatectl set-ntp true` sets it, on "
            "macOS `sudo sntp -sS time.apple.com`"
        )


@check("ssh_key", "error", "run.state_dir", live=True, of_pods=True)
def ssh_key_can_be_read(config: Config, context: Context) -> Iterator[Issue]:
    """A damaged key, or one that others may read, would be refused when the first worker of a billed pod is reached."""
    folder = context.ssh_login.key_dir
    file = folder / KEY_FILE_NAME
    if not os.path.lexists(file):
        return  # it is made on first use
    try:
        public_key_line(folder, "")
    except ConfigError as error:
        yield Issue(str(error))
        return
    if mode := file.stat().st_mode & 0o077:
        yield Issue(f"{file} can be used by others (mode {0o600 | mode:o}), so ssh refuses it; run `chmod 600 {file}`")
