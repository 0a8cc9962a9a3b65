"""Everything that can be checked before work starts, and what a job will do."""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from services.common.errors import ConfigError
from services.common.ids import JobId, make_job_id
from services.common.models import check_model, load_architecture, resolve_model
from services.job.cluster import check_port, cluster_address
from services.job.commit import Commit, read_commit
from services.job.config import JobConfig
from services.job.recorder import check_wandb
from services.proxy.listener import check_tls
from services.proxy.parsing.load import describe_parsers
from services.rollout.harness import check_harness
from services.rollout.sandbox import require_sandbox
from services.rollout.scoring.config import FunctionScoring, HarborScoring
from services.rollout.scoring.evaluate import check_scoring, describe
from services.rollout.tasks import load_task_set
from services.rollout.types import Task
from services.scheduler.options import JobOptions
from services.trainer.tree.adapters import Adapter, adapter_for
from services.trainer.tree.plan import ModeChoice
from services.trajectory.store.check import check_store, describe_store


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked job, ready to start."""

    job_id: JobId
    config: JobConfig
    folder: Path
    model_path: Path
    train_tasks: tuple[Task, ...]
    heldout_tasks: tuple[Task, ...]
    options: JobOptions
    commit: Commit | None
    """The checkpoint that a resumed job starts from."""

    @property
    def checkpoints(self) -> Path:
        return checkpoints_of(self.folder)

    def table(self) -> Table:
        """What the job will do, for people."""
        config = self.config
        table = Table(box=None, show_header=False)
        table.add_column(style="bold")
        table.add_column()
        sandbox = config.rollout.sandbox.kind
        harness = config.rollout.harness.command[0] if config.rollout.harness.command else "mini-swe-agent"
        scheduler = config.scheduler
        table.add_row("job", f"{self.job_id} in {self.folder}")
        table.add_row("model", f"{config.model.path} ({self.model_path}), trained {config.trainer.tune.kind}")
        table.add_row("tasks", f"{len(self.train_tasks)} to train on, {len(self.heldout_tasks)} held out")
        table.add_row("harness", f"{harness}, sandbox: {sandbox}")
        table.add_row("answers", describe_parsers(self.model_path, config.proxy))
        table.add_row("scorer", describe(config.rollout.scoring))
        table.add_row("store", describe_store(config.trajectory.store))
        table.add_row("cells", f"{config.rollout.cells.num_cells} (cell-0 is the core)")
        table.add_row(
            "steps",
            f"{config.trainer.steps} of {scheduler.groups_per_step} groups of {scheduler.group_size} runs, "
            f"weights published every {scheduler.steps_per_burst}",
        )
        if self.commit is not None:
            table.add_row("resumes", f"at step {self.commit.resume.step} from {self.commit.checkpoint}")
        return table


def checkpoints_of(folder: Path) -> Path:
    """Where a job's checkpoints are."""
    return folder / "trainer" / "checkpoints"


def plan_job(config: JobConfig, config_path: Path, *, resume: bool) -> Plan:
    """Check all that can be known now. Raises ``ConfigError`` or ``MachineError``; starts and writes nothing
    but the cache of built-in models."""
    base = config_path.resolve().parent
    train_tasks = _load_tasks(config, base, config.tasks.train)
    heldout_tasks = _load_tasks(config, base, config.tasks.heldout) if config.tasks.heldout else ()
    config = _with_absolute_paths(config, base)
    check_tls(config.proxy)
    require_sandbox(config.rollout.sandbox)
    check_harness(config.rollout.harness)
    check_scoring(config.rollout.scoring)
    check_wandb(config.output.wandb_project)
    if not cluster_address(config.ray):  # in a cluster others listen, and actors lie on any node
        check_store(config.trajectory.store)
        check_page_dir(config.trainer.tree.page_dir)
        check_port(config.proxy.host, config.proxy.port, "proxy.host", "proxy.port")
        check_port(config.scheduler.grpc_host, config.scheduler.grpc_port, "scheduler.grpc_host", "scheduler.grpc_port")
    model_path = resolve_model(_model_path(config.model.path, base))
    check_model(model_path)
    check_mode(config.trainer.tree.mode, adapter_for(load_architecture(model_path)))

    output = _from(Path.cwd(), config.output.dir)
    check_output(output)
    commit = None
    if resume:
        folder = _newest_job(output, config.name)
        job_id = JobId(folder.name)
        commit = _commit_of(folder)
    else:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        job_id = make_job_id(config.name, stamp, secrets.token_hex(2))
        folder = output / job_id
    options = JobOptions.from_config(
        config.scheduler,
        job_id=job_id,
        num_cells=config.rollout.cells.num_cells,
        task_names=tuple(task.name for task in train_tasks),
        eval_task_names=tuple(task.name for task in heldout_tasks) if config.eval.every else (),
        steps=config.trainer.steps,
        max_concurrent_runs=config.rollout.harness.max_concurrent_runs,
        checkpoint_every=config.trainer.checkpoint_every,
        eval_every=config.eval.every,
        eval_at_start=bool(config.eval.every),
        eval_group_size=config.eval.group_size,
        seed=config.seed,
    )
    config = _with_own_store(config, job_id)
    return Plan(job_id, config, folder, model_path, train_tasks, heldout_tasks, options, commit)


def _load_tasks(config: JobConfig, base: Path, folder: str) -> tuple[Task, ...]:
    needs_verifier = isinstance(config.rollout.scoring, HarborScoring)
    return tuple(load_task_set(_from(base, folder), needs_verifier=needs_verifier))


def _model_path(name: str, base: Path) -> str:
    """A folder may be named relative to the configuration file; a built-in name stays what it is."""
    return str(base / name) if (base / name).is_dir() else name


def _from(base: Path, path: str | Path) -> Path:
    """A path of the configuration, absolute: ``~`` is the home folder, a relative one starts at ``base``."""
    try:
        return (base / Path(path).expanduser()).resolve()
    except RuntimeError as error:
        raise ConfigError(f"{path}: {error}", "Write the whole path.") from None


def check_output(output: Path) -> None:
    """Raise ``ConfigError`` unless job folders, and the link to the newest, can be made in ``output``."""
    hint = "Set output.dir to a folder that you may write to."
    there = next(path for path in (output, *output.parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"output.dir: {there} is not a folder.", hint)
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"output.dir: {output} cannot be written.", hint)
    latest = output / "latest"
    if latest.exists() and not latest.is_symlink():
        raise ConfigError(f"{latest} is not a link to the newest job.", "Move it away, or set output.dir elsewhere.")


def check_page_dir(folder: Path | None) -> None:
    """Raise ``ConfigError`` unless page files can be made in a folder."""
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"trainer.tree.page_dir: {folder} is no folder that can be written.",
            "Make it on a fast local disk, or leave page_dir out.",
        )


def check_mode(mode: ModeChoice, adapter: Adapter) -> None:
    """Raise ``ConfigError`` for a model whose trees cannot be packed, where they have to be."""
    if mode is ModeChoice.PACK and not adapter.is_attention_only:
        raise ConfigError(
            "trainer.tree.mode: pack does not serve a model whose layers are not all attention.",
            "Set it to walk or auto.",
        )


def _with_absolute_paths(config: JobConfig, base: Path) -> JobConfig:
    """Paths of the services are relative to the configuration file; their processes run elsewhere."""
    harness = config.rollout.harness
    absolute = harness.model_copy(
        update={
            "config_dir": str(_from(base, harness.config_dir)) if harness.config_dir else "",
            "readonly_paths": tuple(str(_from(base, path)) for path in harness.readonly_paths),
        }
    )
    scoring = config.rollout.scoring
    if isinstance(scoring, FunctionScoring):
        folders = tuple(str(_from(base, path)) for path in scoring.python_path)
        scoring = scoring.model_copy(update={"python_path": folders})
    rollout = config.rollout.model_copy(update={"harness": absolute, "scoring": scoring})
    files = {name: str(_from(base, path)) for name in ("tls_cert", "tls_key") if (path := getattr(config.proxy, name))}
    trainer = config.trainer
    if trainer.tree.page_dir is not None:
        tree = trainer.tree.model_copy(update={"page_dir": _from(base, trainer.tree.page_dir)})
        trainer = trainer.model_copy(update={"tree": tree})
    proxy = config.proxy.model_copy(update=files)
    return config.model_copy(update={"rollout": rollout, "proxy": proxy, "trainer": trainer})


def _with_own_store(config: JobConfig, job_id: JobId) -> JobConfig:
    """SQLite files belong to one job: where jobs share a folder, each has its own in it."""
    store = config.trajectory.store
    if not store.url.startswith("sqlite:"):
        return config
    store = store.model_copy(update={"url": f"{store.url.rstrip('/')}/{job_id}"})
    return config.model_copy(update={"trajectory": config.trajectory.model_copy(update={"store": store})})


def _commit_of(folder: Path) -> Commit:
    """The commit that a job is resumed from. Raises ``ConfigError`` if there is none, or its checkpoint is gone."""
    commit = read_commit(folder)
    if commit is None:
        raise ConfigError(f"{folder} has no checkpoint to resume from.", "Start it anew without --resume.")
    checkpoint = checkpoints_of(folder) / commit.checkpoint
    if not checkpoint.is_dir():
        raise ConfigError(f"the checkpoint {checkpoint} is gone.", "Put it back, or start anew without --resume.")
    return commit


def _newest_job(output: Path, name: str) -> Path:
    """The newest job folder of this name, of those that have a checkpoint if any has."""
    found = []
    for path in output.glob(f"{name}-*/job.json"):
        job = json.loads(path.read_text(encoding="utf-8"))
        if job["name"] == name:
            found.append(((path.parent / "commit.json").exists(), job["created_at_s"], path.parent))
    if not found:
        raise ConfigError(f"no job named {name!r} in {output} to resume.", "Start it without --resume.")
    return max(found)[-1]
