"""Runs a planned job: places the actors of the five services, follows the job, leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from rich.console import Console

from services.common.errors import JobError, NotFoundError, TidegateError
from services.common.ids import RunId, make_cell_id, shard_of
from services.common.names import (
    RAY_NAMESPACE,
    mailbox_actor,
    rollout_actor,
    runner_actor,
    scheduler_actor,
    shard_actor,
)
from services.common.remote import cause_of, one_line
from services.job.cluster import check_resources, ray_cluster
from services.job.commit import with_best
from services.job.config import training_cells
from services.job.folder import job_folder
from services.job.link import ANSWER_TIMEOUT_S, START_TIMEOUT_S, SchedulerLink, answer
from services.job.performer import ClusterPerformer, Surroundings
from services.job.plan import Plan
from services.job.process import peak_memory, signals_interrupt
from services.job.progress import Progress
from services.job.proxy import ProxyPlace, end_proxy, reserved_place, serve_running, start_proxy
from services.job.report import (
    make_summary,
    plot_reward,
    read_metrics,
    step_line_of,
    summary_table,
    what_runs_say,
    write_json,
)
from services.proxy.deployment import ProxySettings
from services.rollout.actor import Runner
from services.rollout.cell import RolloutCell
from services.rollout.engine import engine_env
from services.rollout.scoring.evaluate import ScoringSetup, judge_key, judge_spending
from services.rollout.types import Sampling
from services.scheduler.actor import JobScheduler
from services.scheduler.events import TrainingFailed
from services.scheduler.hands import FINISH_TIMEOUT_S
from services.scheduler.types import JobStatus, ResumeState
from services.trainer.cell import run_training
from services.trainer.checkpoint import drop_newer
from services.trainer.mailbox import Mailbox
from services.trainer.rank import TrainingSpec
from services.trajectory.actor import TrajectoryShard
from services.trajectory.outcome import OUTCOME_TABLE
from services.trajectory.store import list_runs

_EXIT_CODES = {JobStatus.FINISHED: 0, JobStatus.FAILED: 1, JobStatus.CANCELLED: 130}
_MAX_CELL_RESTARTS = 3
_MAX_SHARD_RESTARTS = 100
_MAX_SCHEDULER_RESTARTS = 10
_MAX_INLINE_BYTES = 50_000  # half of what Ray still sends along with an actor's specification


def run_job(plan: Plan, console: Console) -> int:
    """Run a job to its end; returns the process's exit code."""
    started = time.monotonic()
    snapshot: dict[str, Any] = {}
    with job_folder(plan), signals_interrupt(), peak_memory() as peak:
        try:
            with (
                ray_cluster(plan.config.ray) as own_cluster,
                serve_running(own_cluster=own_cluster),
                reserved_place(plan.config.proxy) as place,
            ):
                if own_cluster:
                    check_resources(plan.config, ray.cluster_resources())
                _Job(plan, place, console).run(snapshot)
            code = _EXIT_CODES[JobStatus(snapshot["status"])]
        except KeyboardInterrupt:
            code = _EXIT_CODES[JobStatus.CANCELLED]
            reason = "interrupted before it could end in good order"
            snapshot.update(status=JobStatus.CANCELLED, reason=reason)
        except (TidegateError, RayError) as error:  # RayError: an actor that the driver asked is gone
            code = exit_code_of(error)
            snapshot.update(status=JobStatus.FAILED, reason=one_line(error))
        _conclude(plan, console, snapshot, time.monotonic() - started, peak())
        return code


def exit_code_of(error: Exception) -> int:
    """The exit code of a job that an error ended: that of the error tree, 1 for anything else."""
    cause = cause_of(error)
    return cause.exit_code if isinstance(cause, TidegateError) else TidegateError.exit_code


class _Job:
    """The actors of one job, from their start to their end."""

    def __init__(self, plan: Plan, place: ProxyPlace, console: Console) -> None:
        self._plan = plan
        self._config = plan.config
        self._place = place
        self._console = console
        self._token = plan.config.scheduler.grpc_token or secrets.token_urlsafe(32)
        self._resume = plan.commit.resume if plan.commit else None
        self._start_id = secrets.token_hex(8)
        self._key_secret = secrets.token_hex(32)
        self._arguments: list[Any] = []
        self._actors: list[Any] = []
        self._cells: list[Any] = []
        self._trainings: list[Any] = []
        """The core's first."""
        self._told_of_budget = False

    def run(self, snapshot: dict[str, Any]) -> None:
        """Start everything, follow the job, end everything. ``snapshot`` takes the newest one, whatever happens."""
        with Progress(self._console, self._plan.job_id, self._config.trainer.steps) as progress:
            try:
                progress.note(f"starting shards, cells, trainer and proxy; their logs: {_session_logs()}")
                scheduler = self._start(progress)
                progress.note(f"harnesses reach the proxy at {self._place.harness_url}")
                self._follow(scheduler, progress, snapshot)
            finally:
                self._end()

    # -- start --------------------------------------------------------------------------------------------------------

    def _start(self, progress: Progress) -> SchedulerLink:
        plan, config, job_id = self._plan, self._config, self._plan.job_id
        if plan.commit is not None:
            drop_newer(plan.checkpoints, plan.commit.resume.step)
            self._resume = with_best(plan.commit.resume, plan.checkpoints)
        self._start_shards()
        self._start_cells()
        self._start_training()
        num_runners = self._start_runners()
        self._await_shards()
        scheduler = SchedulerLink(self._start_scheduler(num_runners), progress.note)
        address = scheduler.start()
        self._write_access(address)
        settings = ProxySettings(
            job_id=job_id,
            config=self._place.config,
            model_name=config.name,
            num_shards=config.trajectory.num_shards,
            scheduler_address=address,
            scheduler_token=self._token,
            model_path=str(plan.model_path),
        )
        start_proxy(settings, self._place)
        return scheduler

    def _actor(self, kind: type, name: str, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        settings = {"num_cpus": 0, "name": name, "namespace": RAY_NAMESPACE, "max_concurrency": 1000, **(options or {})}
        handle = ray.remote(kind).options(**settings).remote(*args, **kwargs)
        self._actors.append(handle)
        return handle

    def _held(self, argument: Any) -> Any:
        """An argument of an actor that may be made again. Ray lets go of a large one after the first time, unless
        somebody holds a reference to it."""
        if len(ray.cloudpickle.dumps(argument)) < _MAX_INLINE_BYTES:
            return argument
        self._arguments.append(ray.put(argument))
        return self._arguments[-1]

    def _start_shards(self) -> None:
        plan, config = self._plan, self._config
        sampling = config.rollout.sampling
        for index in range(config.trajectory.num_shards):
            shard = self._actor(
                TrajectoryShard,
                shard_actor(plan.job_id, index),
                plan.job_id,
                index,
                config.trajectory,
                str(plan.folder / "trajectory"),
                str(plan.model_path),
                self._sampling(None),
                config.rollout.engine.max_model_len,
                as_ref=ray.put,
                drop_equal_rewards=config.scheduler.on_equal_rewards == "drop",
                eval_sampling=self._sampling(sampling.eval_temperature),
                key_secret=self._key_secret,
                options={"max_restarts": _MAX_SHARD_RESTARTS, "max_task_retries": -1},  # its store holds all it knows
            )
            if self._resume is not None:
                self._resume = _recover(shard, index, config.trajectory.num_shards, self._resume)

    def _await_shards(self) -> None:
        """A shard that cannot open its store ends the job here, with the reason."""
        for index in range(self._config.trajectory.num_shards):
            shard = ray.get_actor(shard_actor(self._plan.job_id, index), RAY_NAMESPACE)
            answer(shard.run_summaries.remote(limit=1), f"shard {index}", START_TIMEOUT_S)

    def _sampling(self, temperature: float | None) -> Sampling:
        sampling = self._config.rollout.sampling
        chosen = sampling.temperature if temperature is None else temperature
        return Sampling(temperature=chosen, max_tokens=sampling.max_tokens, seed=self._config.seed)

    def _start_cells(self) -> None:
        plan, config = self._plan, self._config
        for index in range(config.rollout.cells.num_cells):
            cell_id = make_cell_id(index)
            cell = self._actor(
                RolloutCell,
                rollout_actor(plan.job_id, cell_id),
                plan.job_id,
                cell_id,
                config.rollout,
                str(plan.model_path),
                self._token,
                options={
                    "num_cpus": config.rollout.cells.cpus_per_cell,
                    "num_gpus": config.rollout.cells.gpus_per_cell,
                    "max_restarts": _MAX_CELL_RESTARTS,
                    "runtime_env": {"env_vars": engine_env(config.rollout, index)},
                },
            )
            self._cells.append(cell)

    def _start_training(self) -> None:
        """A mailbox and a group of ranks for each cell that trains; a satellite's end is no end of the job."""
        plan, config = self._plan, self._config
        for cell_id in training_cells(config):
            is_core = cell_id == make_cell_id(0)
            mailbox_name = mailbox_actor(plan.job_id, cell_id)
            self._actor(
                Mailbox,
                mailbox_name,
                config.trainer.step_timeout_s,
                shares_micro_steps=config.trainer.tree.context_parallel,
            )
            spec = TrainingSpec(
                mailbox_name=mailbox_name,
                model_path=str(plan.model_path),
                config=config.trainer,
                checkpoint_dir=str(plan.checkpoints) if is_core else "",
                engine_dtype=config.rollout.engine.dtype,
                transfer_protocol=config.trainer.transfer_protocol,
                host=config.trainer.transfer_host,
                seed=config.seed,
            )
            training = ray.remote(num_cpus=0, max_retries=0)(run_training)
            self._trainings.append(training.remote(spec, str(plan.folder / "trainer" / "ray")))

    def _start_runners(self) -> int:
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        rollout = self._config.rollout
        scoring = ScoringSetup(rollout.scoring, str(self._plan.folder), judge_key(rollout.scoring))
        for index, node in enumerate(nodes):
            strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=True)
            self._actor(
                Runner,
                runner_actor(self._plan.job_id, index),
                rollout.harness,
                rollout.sandbox,
                keep_workspaces=self._config.output.keep_workspaces,
                scoring=scoring,
                run_timeout_s=rollout.run_timeout_s,
                options={"max_restarts": -1, "scheduling_strategy": strategy},
            )
        return len(nodes)

    def _start_scheduler(self, num_runners: int) -> Any:
        plan, config = self._plan, self._config
        surroundings = Surroundings(
            job_id=plan.job_id,
            config=config,
            folder=str(plan.folder),
            proxy_url=self._place.harness_url,
            grpc_token=self._token,
            train_tasks=plan.train_tasks,
            heldout_tasks=plan.heldout_tasks,
            num_runners=num_runners,
            ready=self._resume.ready if self._resume else (),
        )
        return self._actor(
            JobScheduler,
            scheduler_actor(plan.job_id),
            self._held(plan.options),
            performer_factory=self._held(lambda: ClusterPerformer(surroundings)),
            resume=self._held(self._resume),
            job_dir=str(plan.folder),
            start_id=self._start_id,
            grpc_host=config.scheduler.grpc_host,
            grpc_port=config.scheduler.grpc_port,
            grpc_token=self._token,
            options={"max_restarts": _MAX_SCHEDULER_RESTARTS},  # its journal holds all it knows
        )

    def _write_access(self, address: str) -> None:
        path = self._plan.folder / "grpc-token"
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self._token + "\n")
        (self._plan.folder / "grpc-address").write_text(address + "\n", encoding="utf-8")
        (self._plan.folder / "proxy-url").write_text(self._place.harness_url + "\n", encoding="utf-8")

    # -- follow -------------------------------------------------------------------------------------------------------

    def _follow(self, scheduler: SchedulerLink, progress: Progress, snapshot: dict[str, Any]) -> None:
        deadline, last_step = None, None
        while True:
            try:
                snapshot.update(scheduler.wait_done(1.0))
                if snapshot["step"] > (last_step["step"] if last_step else 0):
                    last_step = step_line_of(read_metrics(self._plan.folder), snapshot["step"])
                progress.show(snapshot, self._sampled_tokens(), last_step)
                self._notice_spent_budget(progress)
                if snapshot["done"]:
                    return
                self._notice_dead_training(scheduler)
                if deadline is not None and time.monotonic() > deadline:
                    raise JobError(f"the job did not end within {self._cancel_timeout_s:.0f} s of being cancelled.")
            except KeyboardInterrupt:
                if deadline is not None:
                    raise
                progress.note("cancelling: saving what was trained (once more to stop at once)")
                deadline = time.monotonic() + self._cancel_timeout_s
                scheduler.cancel("interrupted by the user")

    @property
    def _cancel_timeout_s(self) -> float:
        """The step in flight may end, a checkpoint is saved, and what runs is ended."""
        return 2 * self._config.trainer.step_timeout_s + 2 * FINISH_TIMEOUT_S

    def _sampled_tokens(self) -> int:
        """Tokens that the living cells sampled since they started."""
        done, _ = ray.wait([cell.status.remote() for cell in self._cells], num_returns=len(self._cells), timeout=1.0)
        total = 0
        for ref in done:
            with contextlib.suppress(ray.exceptions.RayError, TidegateError):
                total += ray.get(ref).generated_tokens
        return total

    def _notice_spent_budget(self, progress: Progress) -> None:
        spending = judge_spending(self._config.rollout.scoring, self._plan.folder)
        if spending is not None and spending["num_refused"] and not self._told_of_budget:
            self._told_of_budget = True
            progress.note(
                f"the judge's budget is spent (${spending['spent_usd']:.4g} of ${spending['max_cost_usd']:g}): runs "
                "without a score are left out; raise rollout.scoring.max_cost_usd"
            )

    def _notice_dead_training(self, scheduler: SchedulerLink) -> None:
        core = self._trainings[0]
        done, _ = ray.wait([core], timeout=0)
        if not done:
            return
        try:
            ray.get(core)
            reason = "the training ranks ended by themselves"
        except ray.exceptions.RayError as error:
            reason = one_line(error)
        scheduler.post(TrainingFailed(reason))

    # -- end ----------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        end_proxy(self._plan.job_id)
        for actor in reversed(self._actors):
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        for training in self._trainings:
            with contextlib.suppress(Exception):
                ray.cancel(training, force=True)


def _recover(shard: Any, index: int, num_shards: int, resume: ResumeState) -> ResumeState:
    """Bring a shard's store to the commit record: what is ready there and here stays, the rest is dispatched anew."""
    name = f"shard {index}"
    results = answer(shard.recover.remote(resume.step), name, START_TIMEOUT_S)
    recovered = {result.group_id for result in results}
    mine = {
        group.spec.group_id for group in resume.ready if shard_of(RunId(group.spec.run_ids[0]), num_shards) == index
    }
    for group_id in recovered - mine:
        reason = "not in the checkpoint from which the job was resumed"
        answer(shard.drop_group.remote(group_id, reason), name, ANSWER_TIMEOUT_S)
    lost = mine - recovered
    return replace(resume, ready=tuple(group for group in resume.ready if group.spec.group_id not in lost))


def _conclude(plan: Plan, console: Console, snapshot: dict[str, Any], wall_s: float, peak_rss_bytes: int) -> None:
    """Write what remains and show it."""
    try:
        runs = list_runs(str(plan.folder / "trajectory"))
    except NotFoundError:  # it failed before a run was stored
        runs = []
    outcomes = Counter(run.outcome for run in runs if run.outcome is not None)
    scored = sum(count for outcome, count in outcomes.items() if OUTCOME_TABLE[outcome].counted)
    summary = make_summary(
        job_id=plan.job_id,
        status=str(snapshot["status"]),
        reason=snapshot["reason"],
        folder=plan.folder,
        snapshot=snapshot,
        runs={
            "finished": scored,
            "failed": sum(outcomes.values()) - scored,
            "outcomes": {str(outcome): count for outcome, count in outcomes.most_common()},
            "output_tokens": sum(run.num_output_tokens for run in runs),
        },
        wall_s=wall_s,
        peak_rss_bytes=peak_rss_bytes,
    )
    if (spending := judge_spending(plan.config.rollout.scoring, plan.folder)) is not None:
        summary["judge"] = spending
    write_json(plan.folder / "summary.json", summary)
    plot_reward(plan.folder, plan.job_id)
    console.print(summary_table(summary, plan.folder))
    if snapshot["status"] == JobStatus.FAILED:
        message = Console(stderr=True)
        message.print(f"error: {snapshot['reason']}", style="red", markup=False, highlight=False, soft_wrap=True)
        if hint := what_runs_say(runs, plan.folder):
            message.print(hint, markup=False, highlight=False, soft_wrap=True)


def _session_logs() -> Path:
    return Path(ray._private.worker._global_node.get_logs_dir_path())
