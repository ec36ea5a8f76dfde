"""Project: you have permission to use it, and it has billing and quota."""

from collections.abc import Iterator

from conf.schema.config import Config
from controller.context import Context
from controller.core.finding import Issue, check
from controller.gcp.errors import ForbiddenError, ServiceDisabledError
from controller.plan.samplers import describe_samplers, num_sampler_pods, sampler_config
from controller.resources.pod.planes import ask_planes


@check("credentials", "warning", "cloud", live=True)
def has_credentials(config: Config, context: Context) -> Iterator[Issue]:
    """Requests need application-default credentials, which `gcloud auth login` alone does not create."""
    if not context.google.has_credentials:
        yield Issue(
            "no Google credentials, so nothing was checked; run `gcloud auth login` and `gcloud auth "
            "application-default login`, or set cloud=local"
        )


@check("billing", "error", "cloud.project", live=True)
def billing_is_enabled(config: Config, context: Context) -> Iterator[Issue]:
    """A project without billing rejects every TPU, and the error does not mention billing."""
    name = f"projects/{context.project}"
    try:
        answer = context.google.call("cloudbilling", "projects.getBillingInfo", name=name)
    except (ForbiddenError, ServiceDisabledError):
        return  # few users can see billing, and none need to
    if not answer.get("billingEnabled"):
        yield Issue(
            f"{context.project} has no billing account; run `gcloud billing projects link {context.project} "
            "--billing-account=ACCOUNT` (`gcloud billing accounts list` shows yours)"
        )


@check("tpu_permission", "error", "tpu.zone", also="warning", live=True)
def tpus_may_be_listed(config: Config, context: Context) -> Iterator[Issue]:
    """Without permission to list TPUs in a zone you cannot create one; the error has three possible causes."""
    yield from ask_planes(config, lambda checks: checks.listing(config, context))


@check("quota", "error", "tpu.zone", "loop.sampler.pods", also=("warning", "note"), live=True)
def quota_suffices(config: Config, context: Context) -> Iterator[Issue]:
    """TPU quota is set per generation, zone and capacity tier, and starts at 0 almost everywhere. Compute Engine has
    another pool, per region.
    """
    yield from ask_planes(config, lambda checks: checks.quota(config, context))
    if sampler := sampler_config(config):
        is_alike = sampler.topology.generation == config.topology.generation
        chips = num_sampler_pods(config) * sampler.topology.chips + (config.topology.chips if is_alike else 0)
        for issue in ask_planes(sampler, lambda checks: checks.quota(sampler, context, chips)):
            yield issue._replace(message=f"with the pods of samplers: {issue.message}", key="loop.sampler.pods")


@check("compute_quota", "error", "tpu.external_ip", also="warning", live=True)
def compute_quota_suffices(config: Config, context: Context) -> Iterator[Issue]:
    """Each worker takes a VM and, with an external address, an address of the region. New projects have 4 to 8."""
    if config.tpu.adopt:
        return
    workers = config.topology.workers + num_sampler_pods(config)
    wanted = {"INSTANCES": workers + (config.recovery.driver == "bastion")}
    if config.external_ip:
        wanted["IN_USE_ADDRESSES"] = workers
    slices = f"{config.tpu.accelerator_type}{describe_samplers(config, ' with ')}"
    more = "raise cloud.quotas" if config.cloud.kind == "local" else "request more (IAM & Admin > Quotas)"
    remedy = {"INSTANCES": more, "IN_USE_ADDRESSES": f"set tpu.external_ip=false, or {more}"}
    for region in config.regions:
        quotas = context.google.call("compute", "regions.get", project=context.project, region=region).get("quotas", [])
        for quota in quotas:
            metric, limit = quota.get("metric"), quota.get("limit", 0)
            if metric in wanted and wanted[metric] > limit:
                yield Issue(
                    f"{slices} needs {wanted[metric]} of Compute quota {metric} in {region}, "
                    f"which is {limit:.0f}; {remedy[metric]}",
                    severity="error" if len(config.regions) == 1 else "warning",
                )
