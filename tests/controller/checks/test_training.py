"""Checks of training: what the trainer refuses, what nothing reads, and schedules that end too early or too late."""

import pytest

from conf.schema.config import Config
from conf.schema.training.optimizer import ConstantSchedule, DecaySchedule, PiecewiseSchedule, Schedule
from controller.checks.training import schedule_ends_late, warmup_leaves_updates
from tests.composed import config_of as config
from tests.controller.checks.test_checks import GCP, GRPO, LM, SAMPLERS, words

SAMPLER_POD = [*GRPO, "loop.async_depth=2", "loop.sampler.pods=1", "loop.sampler.tpu=v5litepod-1"]
MOE = [*LM, "model=qwen3_30b_a3b", "model.experts.count=100"]
ONES = ",".join(["1.0"] * 8)
LONGROPE = "model.rope_scaling={kind:longrope,original_max_position_embeddings:8,attention_factor:1.0,"
LONGROPE += f"short_factor:[{ONES}],long_factor:[{ONES}]}}"
MAHA = "model.attention_form=maha"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([*LM, "logging.log_interval=10000"], "log_interval: warning logging.log_interval: the run has "),
        (
            [*LM, "optimizer.lr=1"],
            "unusual: warning optimizer.lr: 1 is very high; usual are 1e-6 to 0.1; is a minus",
        ),
        (
            [*LM, "optimizer.weight_decay=10"],
            "unusual: warning optimizer.weight_decay: 10 is very high; usual are 0 to",
        ),
        ([*GRPO, "loop.temperature=100"], "unusual: warning loop.temperature: 100 is very high; usual are 0.5 to 1.5"),
        ([*GRPO, "loop.kl_coef=4"], "unusual: warning loop.kl_coef: 4 is very high; usual are 0 to 0.1"),
        ([*GRPO, "mesh.tensor=16", "mesh.data=1"], "weights_split: error model.num_heads: "),
        (
            [*MOE, "mesh.expert=16"],
            "weights_split: error model.experts.count: 100 does not split evenly over mesh.expert=",
        ),
        (
            [*LM, "model=gemma4_26b_a4b", "model.experts.inner_dim=701", "mesh.tensor=2"],
            "weights_split: error model.experts.inner_dim: 701 does not split evenly over mesh.tensor=2; change",
        ),
        ([*MOE, "mesh.fsdp=16", "mesh.expert=2"], "mesh: error mesh: -1 x 16 x 1 x 2 does not match the 16 devices"),
        (
            [*MOE, "mesh.fsdp=2", "mesh.expert=2", "model.dim=2050"],
            "weights_split: error model.dim: 2050 does not split evenly over mesh.fsdp=2 x mesh.expert=2; change ",
        ),
        (
            [*MOE, "mesh.expert=8", "loop.total_batch_tokens=1024"],
            "batch_split: error loop.total_batch_tokens: 8 rows",
        ),
        ([*LM, "mesh.expert=2"], "refused: error mesh.expert: the axis is for experts, and the model has none; use 1"),
        (
            [*GRPO, "loop.sampler.mesh={data: 3, fsdp: 1, tensor: 1}"],
            "mesh: error loop.sampler.mesh: 3 x 1 x 1 does not match the 16 devices of v5litepod-16",
        ),
        (
            [*GRPO, "loop.sampler.mesh={data: 1, fsdp: 1, tensor: 16}"],
            "weights_split: error model.num_heads: ",
        ),
        ([*GRPO, "loop.prompts_per_step=3"], "batch_split: error loop.prompts_per_step: 3 prompts cannot be split"),
        (["+experiment=trm_sudoku", "loop.batch_size=500"], "batch_split: error loop.batch_size: 500 puzzles cannot b"),
        (["+experiment=trm_sudoku", "model=tiny"], "model_kind: error model.kind: loop.kind=puzzle cannot train a"),
        (
            [*GRPO, "model=llama3_1b", "model.num_kv_heads=32", "model.attention_pattern=G", MAHA],
            "attention_form: error model.attention_form: maha cannot generate, which loop=grpo needs; use loop=lm or ",
        ),
        (["+experiment=nash_mhc_small", "loop.text_samples.interval=5"], "attention_form: error model.attention_form:"),
        (["+experiment=nash_mhc_small", "data.packing=documents"], "attention_form: error model.attention_form: maha"),
        ([*GRPO, "data=jsonl", "data.path=x"], "model_kind: error data.kind: loop.kind=grpo cannot read"),
        ([*LM[:1], "data=arithmetic", *LM[3:]], "model_kind: error data.kind: loop.kind=lm cannot read"),
        ([*LM, "model=trm"], "model_kind: error model.kind: loop.kind=lm cannot train a trm; use loop=puzzle with "),
        ([*GRPO, "model=tiny", LONGROPE], "refused: error loop.max_new_tokens: rows of "),
        (
            [*GRPO, "model.max_seq_len=32"],
            "refused: error loop.max_new_tokens: with loop.max_prompt_length, their sum, 60",
        ),
        ([*LM, "model.max_seq_len=64"], "refused: error loop.seq_len: 128 exceeds model.max_seq_len, 64"),
        (
            [*LM, "model=gpt2", "loop.text_samples={interval: 10, prompts: [a], max_new_tokens: 1024, temperature: 0}"],
            "refused: error loop.text_samples.max_new_tokens: a prompt of 1 tokens plus 1024 exceeds model.max",
        ),
        (
            [*GRPO, "model.lora={r: 1, lora_alpha: 1, target_modules: [q_proj]}"],
            "refused: error model.lora.target_modules.0: 'q_proj' matches no matrix; choices: layers.query, ",
        ),
        (
            [*LM, 'optimizer.param_groups=[{match: "layers.*"}, {match: "*bias*", weight_decay: 0.0}]'],
            "refused: error optimizer.param_groups.1.match: '*bias*' matches no weight of the model; its weights: ",
        ),
        *(
            (
                [*GRPO, f"optimizer.param_groups={groups}"],
                "refused: error optimizer.param_groups: freezes every weight (lr_scale 0), so nothing is learned",
            )
            for groups in (
                '[{match: "*", lr_scale: 0}]',
                '[{match: embedding, lr_scale: 0}, {match: "*", lr_scale: 0.0}]',
            )
        ),
        *(
            (
                [*loop, f"checkpoint.best={{metric: {metric}, mode: {mode}}}"],
                f"refused: error checkpoint.best.mode: {mode} keeps the worst {metric}; use m",
            )
            for loop, metric, mode in ((GRPO, "eval_accuracy", "min"), (LM, "eval_loss", "max"))
        ),
        (
            ["+experiment=trm_sudoku", "optimizer.param_groups=[{match: lm_head}]"],
            "refused: error optimizer.param_groups.0.match: 'lm_head' matches no weight of the model; its weights: em",
        ),
        (
            [*GRPO, "checkpoint.best={metric: eval_loss, mode: min}"],
            "refused: error checkpoint.best.metric: eval_loss is not evaluated; choices: eval_accuracy",
        ),
        (
            [*LM, "checkpoint.best={metric: eval_accuracy, mode: max}"],
            "refused: error checkpoint.best.metric: eval_accuracy is not evaluated; choices: eval_loss, eval_bits_per",
        ),
        ([*GRPO, "model.attention=cudnn"], "refused: error model.attention: cudnn is a kernel of gpu, and this is tpu"),
        (["+experiment=quickstart", "model.attention=splash"], "refused: error model.attention: splash is a kernel of"),
        (
            [*GRPO, "loop.eval_prompts=901"],
            "refused: error loop.eval_prompts: only 900 held-out prompts exist, not 901",
        ),
        (
            [*GRPO, "loop.test_prompts=901"],
            "refused: error loop.test_prompts: only 900 held-out prompts exist, not 901",
        ),
        ([*GRPO, "loop=dpo", "loop.group_size=2"], "refused: error loop.loss_type: dpo reads the column 'rejected'"),
        (
            [
                *LM,
                "data.bos=null",
                "loop.text_samples={interval: 10, prompts: [''], max_new_tokens: 4, temperature: 0}",
            ],
            "refused: error loop.text_samples.prompts: a prompt is empty",
        ),
        ([*GRPO, "loop.replay_routes=true"], "refused: error loop.replay_routes: the model has no experts; use false"),
        ([*GRPO, "loop=sft", "loop.replay_routes=true"], "refused: error loop.replay_routes: sft samples nothing; u"),
        ([*GRPO, "data.tokenizer=characters"], "refused: error data.tokenizer: characters requires a text, not questi"),
        ([*LM, "data.tokenizer=characters"], "refused: error data.tokenizer: characters requires a text, not jsonl; u"),
        ([*GRPO, "loop.environment.options={a: 3}"], "unread: warning loop.environment.options: has no effect: loop.e"),
        ([*GRPO, "loop.environment.max_turns=3"], "unread: warning loop.environment.max_turns: has no effect: loop.en"),
        ([*GRPO, "loop.environment.sandbox.processes=9"], "unread: warning loop.environment.sandbox.processes: has no"),
        (
            ["+experiment=calculator", "loop.rewards={format: 1.0}"],
            "unread: warning loop.rewards: has no effect: loop.environment.name=calculator gives the reward",
        ),
        ([*GRPO, "loop.overlong_buffer_fraction=0.5"], "unread: warning loop.overlong_buffer_fraction: has no effect"),
        (
            [*GRPO, "loop.rollout_correction.rollout_rs_threshold=3"],
            "unread: warning loop.rollout_correction.rollout_rs_threshold: has no effect: loop.rollout_correction.rol",
        ),
        (
            [*GRPO, "loop.test_samples_per_prompt=null", "loop.test_prompts=7"],
            "unread: warning loop.test_prompts: has no effect: loop.test_samples_per_prompt is null",
        ),
        ([*GRPO, "model.hyper.streams=2"], "unread: warning model.hyper: has no effect: model.residual is plain"),
        (
            [*GRPO, "model.maha={scales: 2}"],
            "unread: warning model.maha: has no effect: model.attention_form is causal",
        ),
        (
            [*LM, "optimizer.param_groups=[{match: embedding, lr: 1e-4, lr_scale: 0.1}]"],
            "unread: warning optimizer.param_groups.0.lr_scale: also multiplies the group's lr, to 1e-05; set one",
        ),
        (
            [*LM, "optimizer.param_groups=[{match: embedding, lr: 1e-4, lr_scale: 0}]"],
            "unread: warning optimizer.param_groups.0.lr: has no effect: lr_scale 0 freezes these weights",
        ),
        (
            [*GRPO, "logging.profile={after: 80, updates: 3}"],
            "unread: warning logging.profile.after: has no effect: the run has 80 updates",
        ),
        (
            [*GCP, "tpu.fallback_zones=[us-central1-a]"],
            "unread: warning tpu.fallback_zones: has no effect: us-central1-a is tpu.zone itself",
        ),
        *(
            (
                [*GCP, f"recovery.policy.{word}"],
                f"unread: warning recovery.policy.{name}: has no effect: recovery.max_p",
            )
            for name, word in (
                ("program_error", "program_error=replace_node"),
                ("disk_full", "disk_full=restart_worker"),
            )
        ),
        *(
            ([*GRPO, f"loop.length_buckets={buckets}"], "unread: warning loop.length_buckets: has no effect: an update")
            for buckets in ("[60]", "[1000,2000]")
        ),
        (
            [*GCP, "recovery.policy.hung=move_zone"],
            "unread: warning recovery.policy.hung: has no effect: move_zone needs another zone in tpu.fallback_zones",
        ),
        ([*GCP, "tpu.reservation=r"], "unread: warning tpu.reservation: has no effect: tpu.capacity is spot; for"),
        ([*GCP, "tpu.boot_disk_gb=300"], "unread: warning tpu.boot_disk_gb: has no effect: it is for Compute Engine"),
        (
            [*GCP, "tpu.valid_until_hours=48", "tpu.provisioner=node"],
            "unread: warning tpu.valid_until_hours: has no effect: no request is queued; tpu.create_timeout_minutes",
        ),
        (
            [*GCP, "network=default", "network.cidr=10.1.0.0/20"],
            "unread: warning network.cidr: has no effect: in a network of mode auto Google chooses the ranges",
        ),
        (
            [*GCP, "cleanup.bastion_max_days=1"],
            "unread: warning cleanup.bastion_max_days: has no effect: recovery.driver is laptop, so there is no ba",
        ),
        (
            [*GCP, "checkpoint.save_interval=5"],
            "unread: note checkpoint.save_interval: has no effect: only the bundled trainer reads it",
        ),
        (
            [*GCP, "cloud.driver_machine=e2-small"],
            "unread: note cloud.driver_machine: has no effect: recovery.driver is",
        ),
        ([*GCP, "notify.events=[end]"], "unread: warning notify.events: has no effect: neither notify.webhook nor"),
        (
            [*GRPO, "loop.steps=300"],
            "schedule: note optimizer.schedule.horizon_steps: the learning rate stays at 10% of its peak after 80",
        ),
        ([*GRPO, "loop.micro_batch_size=3"], "batch_split: error loop.micro_batch_size: the "),
        ([*GRPO, "loop.async_depth=2", "loop.sampler.workers=4"], "sampler_workers: error loop.sampler.workers: 4 wou"),
        ([*SAMPLERS], "sampler_workers: error loop.sampler.workers: has run on emulated pods only: libtpu joins all"),
        ([*GRPO, "loop.async_depth=2", "loop.sampler.pods=1"], "sampler_pods: error loop.sampler.tpu: v5litepod-16"),
        ([*SAMPLER_POD, "budget.usd_per_hour=2"], "sampler_pods: error loop.sampler.tpu: budget.usd_per_hour w"),
        ([*SAMPLER_POD, "recovery.driver=bastion"], "sampler_pods: error loop.sampler.pods: a bastion does not drive"),
        ([*SAMPLER_POD, "tpu.adopt=true", "tpu.name=mine"], "sampler_pods: error loop.sampler.pods: samplers need"),
        ([*SAMPLER_POD, "tpu=v5litepod_8", "tpu.data_disk_gb=100"], "sampler_pods: error loop.sampler.pods: they have"),
        ([*SAMPLER_POD, "tpu.fallback_zones=[us-west4-a]"], "sampler_pods: error loop.sampler.pods: samplers reach"),
        ([*SAMPLER_POD, "loop.sampler.tpu=v4-8"], "sampler_pods: error loop.sampler.tpu: us-central1-a has no"),
        (
            [*SAMPLER_POD, f"tpu.name={'p' * 60}"],
            f"sampler_pods: error loop.sampler.pods: the name {'p' * 60}-sampler-1 is longer than 63 characters",
        ),
        ([*SAMPLER_POD, "cloud=here"], "sampler_pods: error loop.sampler.pods: cloud=here has no pods to"),
        ([*SAMPLER_POD], "stale_samples: warning loop.rollout_correction: nothing corrects for the age of the"),
        ([*SAMPLERS], "stale_samples: warning loop.rollout_correction: nothing corrects for the age of the samples"),
        (
            [*GRPO, "loop.sampler.min_p=0.1", "loop.rollout_correction.rollout_is=token"],
            "sampler_logprobs: warning loop.sampler: its tokens are not drawn from the policy itself, and loop.roll",
        ),
        (
            [*GRPO, "loop.sampler.presence_penalty=0.5", "loop.old_logprobs=sampler"],
            "sampler_logprobs: warning loop.sampler: its tokens are not drawn from the policy itself, and loop.old_",
        ),
        (
            [*GRPO, "data.chat_template_kwargs={enable_thinking: false}"],
            "unread: warning data.chat_template_kwargs: has no effect: only a model's own template has variables",
        ),
        ([*LM], "data_path: error data.path: x does not exist on the workers, nor here; . has "),
        ([*LM, "program.setup=[[fetch]]"], "data_path: warning data.path: x does not exist on the workers, nor"),
        ([*GRPO, "data.tokenizer=/home/me/tokenizer.json"], "data_path: warning data.tokenizer: /home/me/tokenizer.js"),
        ([*GRPO, "model.weights=/home/me/gemma"], "data_path: warning model.weights: /home/me/gemma does not exist"),
        ([*GRPO, "model.weights=gemma"], "data_path: error model.weights: gemma does not exist on the workers, nor"),
        ([*LM, "data.streams=3"], "streams: error data.streams: 3 streams do not divide the 32 rows of a batch evenly"),
        (
            [*GRPO, "optimizer.schedule.final_fraction=0", "optimizer.schedule.horizon_steps=50"],
            "schedule: warning optimizer.schedule.horizon_steps: the learning rate is 0 after 50",
        ),
        ([*GRPO, "optimizer.schedule.final_fraction=0.01"], "schedule: warning optimizer.schedule.horizon_steps: the"),
        ([*GRPO, "tpu.capacity=spot", "checkpoint.save_interval=120"], "checkpoints: warning checkpoint.save_interval"),
        (
            [*GRPO, "loop.rewards={answer_match: -1, format: 0}"],
            "no_reward: warning loop.rewards: no weight is above 0, so nothing is rewarded",
        ),
        (
            [*GRPO, "loop.rewards={answer_match: 0, format: 0}"],
            "no_reward: warning loop.rewards: all weights are 0, so",
        ),
        (["+experiment=gemma2b_gsm8k", "model.weights=null"], "random_weights: warning model.weights: the policy star"),
    ],
)
def test_what_is_wrong_names_its_key(overrides: list[str], said: str) -> None:
    found = words(*overrides)
    assert any(line.startswith(said) for line in found), found


@pytest.mark.parametrize("loss", ["loop=sft", "loop.environment.name=calculator"])
def test_what_reads_no_reward_may_have_none(loss: str) -> None:
    assert not [line for line in words(*GRPO, loss, "loop.rewards={answer_match: 0}") if line.startswith("no_reward")]


@pytest.mark.parametrize(
    "overrides",
    [
        [*GRPO, "loop.rollout_correction.rollout_is_threshold=3"],  # the effective sample size is of truncated weights
        ["+experiment=quickstart", "model.attention=splash", "model.implementation=mine:Family"],
        [*GCP, "network=default"],
        [*LM, "logging.log_interval=5", "optimizer.lr=0.5"],
        [*LM, "optimizer.lr=1", "optimizer.schedule={kind: piecewise, points: [[0, 3e-4], [90, 0.0]]}"],
        [*LM, "optimizer=custom", "optimizer.rule=optax.contrib:prodigy", "optimizer.lr=1"],
        [*GRPO, "loop.steps=3", "logging.log_interval=10"],
        ["+experiment=quickstart", "loop.steps=10", "logging.log_interval=20"],
        [*GCP, "tpu=v6e_8", "tpu.boot_disk_gb=300", "tpu.valid_until_hours=48"],
        [*GCP, "tpu.capacity=[reserved,spot]", "tpu.reservation=r"],
    ],
)
def test_keys_that_are_read_or_never_asked_for_are_not_commented_on(overrides: list[str]) -> None:
    assert not [line for line in words(*overrides) if line.startswith(("unread", "refused", "log_i", "unusual"))]


def with_schedule(found: Config, schedule: Schedule) -> Config:
    assert found.optimizer is not None
    return found.model_copy(update={"optimizer": found.optimizer.model_copy(update={"schedule": schedule})})


def test_a_learning_rate_of_points_ends_too() -> None:
    points = PiecewiseSchedule(kind="piecewise", points=((0, 1.0), (59, 0.0)))
    [finding] = schedule_ends_late(with_schedule(config(*GRPO), points))
    assert str(finding).startswith("optimizer.schedule.points: the learning rate is 0 after 59 of")


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["+experiment=quickstart"], 80),
        (["+experiment=gemma2b_gsm8k"], 2000),
        (["+experiment=gemma2b_gsm8k", "loop=dpo", "loop.group_size=2", "loop.kl_coef=0.1"], 2000),
        (["+experiment=sft_gsm8k"], None),
        (["+experiment=lm_3b_v6e8"], 100_000),
        (["+experiment=trm_sudoku_v4_32"], 195_312),
        ([*LM[:4], "loop=custom", "loop.run=loops:run", "loop.steps=21", "optimizer=lion"], 21),
    ],
)
def test_the_warmup_of_every_loop_leaves_it_updates(overrides: list[str], steps: int | None) -> None:
    """It may take a quarter of the run: the baseline of the TRM study takes 2,000 of 8,138 updates."""
    real = config(*overrides, "cloud=gcp", "cloud.project=acme")
    assert real.loop is not None
    total = real.loop.steps
    assert total == (steps or total)

    def said(warmup: int, found: Config = real) -> list[str]:
        kinds = (
            ConstantSchedule(kind="constant", warmup_steps=warmup),
            DecaySchedule(kind="cosine", warmup_steps=warmup, horizon_steps=9 * total, final_fraction=0.1),
            PiecewiseSchedule(kind="piecewise", points=((0, 0.0), (max(1, warmup), 1.0), (9 * total, 0.5))),
        )
        texts = [[f"{f.severity} {f}" for f in warmup_leaves_updates(with_schedule(found, kind))] for kind in kinds]
        assert texts[0] == texts[1] == [line.replace(".points", ".warmup_steps") for line in texts[2]]
        return texts[0]

    assert said(0) == said(total // 4) == []
    [long] = said(total // 4 + 1)
    assert long.startswith(f"warning optimizer.schedule.warmup_steps: the warm-up takes {total // 4 + 1} of the run's ")
    assert said(total - 1)[0].startswith("warning")
    for warmup in (total, 8 * total):
        [endless] = said(warmup)
        assert endless.startswith("error optimizer.schedule.warmup_steps: the learning rate still rises when the run e")
    emulated = real.model_copy(update={"cloud": config("cloud=local", *GCP).cloud})
    assert said(total, emulated)[0].startswith("warning"), "nothing is billed"
    assert said(total, real.model_copy(update={"loop": real.loop.model_copy(update={"steps": 20})})) == []


def test_a_schedule_that_begins_at_its_peak_has_no_warmup() -> None:
    points = PiecewiseSchedule(kind="piecewise", points=((70, 1.0), (79, 0.5)))
    assert [*warmup_leaves_updates(with_schedule(config(*GRPO), points))] == []
