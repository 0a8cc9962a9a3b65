"""Runs a plan over a forest: states are captured once, branches replayed, and gradients pushed back exactly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.errors import ConfigError
from services.trainer.tree.adapters import Adapter
from services.trainer.tree.forest import Forest, Segment
from services.trainer.tree.head import backward_through_head, target_scores
from services.trainer.tree.layers import LayerRecompute
from services.trainer.tree.packed import Attention, predicting_states
from services.trainer.tree.parallel import ParallelContext
from services.trainer.tree.plan import Chunk, Mode, Plan, Visit, VisitKind
from services.trainer.tree.ranks import Ranks
from services.trainer.tree.resume import Progress, step_digest
from services.trainer.tree.states import ChunkContext, Page
from services.trainer.tree.store import StateKey, StateStore, StoreBudget

HIDDEN = "hidden"
"""Part of the store that holds the last hidden state of a chunk; its layer is the number of layers."""

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From indices into the forest's targets ``[m]``, their log-probabilities ``[m]`` and entropies ``[m]`` to the slope of
the loss at the log-probabilities ``[m]``."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Of every target of a forest, under the weights as they are. Without gradient."""

    logprobs: Tensor
    """[M] Natural logarithms."""
    entropy: Tensor
    """[M] Nats."""


@dataclass(slots=True)
class _Step:
    """One pass over a plan."""

    forest: Forest
    plan: Plan
    store: StateStore
    inner: frozenset[int]
    """Chunks with a chunk below them."""
    pushed: frozenset[int]
    """Chunks whose gradient is pushed back after what is below them."""
    ranks: Ranks | None = None
    """That share each chunk."""
    graphs: dict[int, tuple[ChunkContext, Tensor]] = field(default_factory=dict)

    def part(self, index: int) -> Chunk:
        """The tokens of a chunk that are here; there may be none."""
        chunk = self.plan.chunks[index]
        if self.ranks is None:
            return chunk
        part = self.ranks.part(chunk.num_tokens)
        return replace(
            chunk, first=chunk.first + part.start, start=chunk.start + part.start, num_tokens=part.stop - part.start
        )

    def segment_of(self, chunk: Chunk) -> Segment:
        return self.forest.segments[chunk.segment]

    def page(self, index: int) -> Page:
        chunk = self.plan.chunks[index]
        return Page(index, chunk.start, chunk.num_tokens, index in self.pushed)

    def path(self, index: int) -> list[Page]:
        """The pages before a chunk, oldest first."""
        path: list[Page] = []
        index = self.plan.chunks[index].parent
        while index >= 0:
            path.append(self.page(index))
            index = self.plan.chunks[index].parent
        return path[::-1]

    def targets(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """The targets that a chunk, or a part of it, predicts: indices into the forest's arrays, and rows of the chunk
        (-1: the boundary before it)."""
        segment = self.segment_of(chunk)
        offsets = torch.from_numpy(segment.predecessors).long()
        first = chunk.first if chunk.first else -1
        index = torch.nonzero((offsets >= first) & (offsets < chunk.first + chunk.num_tokens))[:, 0]
        rows = offsets[index] - chunk.first
        return index + segment.first_target, rows.clamp_min(-1)


class Executor:
    """A model, and how its forests are trained. The gradient of every parameter adds up in its ``grad``."""

    def __init__(
        self,
        model: Any,
        adapter: Adapter,
        *,
        budget: StoreBudget,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        pack_attention: Attention = "nodes",
        keep_choices: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """``keep_choices``: remember what was chosen without gradient (experts, keys) in ``choices``. ``group``: the
        ranks that share each chunk of a walk (context parallelism). Each then gets a share of every gradient, to be
        summed over them, and is asked for the objective of its own targets only; all are to be given the same calls.
        """
        self.model = model
        self.choices: dict[StateKey, Tensor] = {}
        self._budget = budget
        self._autocast = autocast
        self._pack_attention = pack_attention
        self._keeps_choices = keep_choices
        self._ranks = Ranks(group) if group is not None else None
        self._anchor = torch.zeros((), device=model.device, requires_grad=True)
        self._num_layers: int = model.config.get_text_config().num_hidden_layers
        self._layers = LayerRecompute(model, autocast)
        self._is_random = False
        adapter.install(model)

    def train(
        self,
        forest: Forest,
        plan: Plan,
        temperature: float,
        objective: Objective,
        *,
        progress: Progress | None = None,
    ) -> None:
        """One forward and backward of a forest by a plan of chunks.

        ``temperature``: that of the sampling. A target's objective is asked for once, when its gradient is taken.
        ``progress``, of a walk: save it between visits without kept graphs, and go on from what was saved; the
        gradients then are those of the saved step, whatever the parameters' ``grad`` held before.

        Raises:
            ConfigError: ranks cannot share such a step.
            TrainingError: another rank is gone.
        """
        self._check_shared(plan, progress)
        if plan.mode is Mode.PACK:
            self._train_packed(forest, plan, temperature, objective)
            return
        with self._step(forest, plan) as step:
            digest = "" if progress is None else step_digest(forest, plan, temperature, self.model)
            done = 0 if progress is None else progress.restore(digest, self.model, step.store)
            for number, visit in enumerate(plan.visits[done:], done + 1):
                with self._together(f"visit {number} of {len(plan.visits)} ({visit.kind} of chunk {visit.chunk})"):
                    self._visit(step, visit, temperature, objective)
                if progress is not None and not step.graphs:
                    is_last = number == len(plan.visits)
                    progress.note(number, digest, self.model, step.store, is_last=is_last)

    @torch.no_grad()
    def score(self, forest: Forest, plan: Plan, temperature: float) -> Scores:
        """The scores of all targets, by the same plan without gradients; on every rank that shares the chunks.

        Raises:
            ConfigError, TrainingError: as ``train``.
        """
        self._check_shared(plan)
        if plan.mode is Mode.PACK:
            rows = predicting_states(self.model, forest, self._pack_attention, self._autocast)
            ids = self._ids(forest, slice(None))
            return Scores(*target_scores(rows, self._head, ids, temperature, plan.head_rows, self._autocast))
        num_targets = len(forest.target_ids)
        device = self.model.device
        logprobs = torch.zeros(num_targets, device=device, dtype=self._score_dtype)
        entropy = torch.zeros_like(logprobs)
        with self._step(forest, replace(plan, keep_attended=False)) as step:  # nothing is evaluated again
            for visit in plan.visits:
                if visit.kind in (VisitKind.CAPTURE, VisitKind.REPLAY):
                    with self._together(f"the scoring of chunk {visit.chunk}"):
                        context, hidden = self._evaluate(step, visit.chunk, is_recorded=False)
                    index, rows = self._rows(step, visit.chunk, context, hidden)
                    if len(index):
                        scored = target_scores(
                            rows, self._head, self._ids(forest, index), temperature, plan.head_rows, self._autocast
                        )
                        logprobs[index.to(device)], entropy[index.to(device)] = scored
                else:
                    step.store.release(visit.chunk)
        if self._ranks is not None:
            with self._together("the exchange of scores"):
                logprobs, entropy = self._ranks.sum(torch.stack((logprobs, entropy)))
        return Scores(logprobs, entropy)

    def _train_packed(self, forest: Forest, plan: Plan, temperature: float, objective: Objective) -> None:
        """The whole forest in one forward and backward."""
        rows = predicting_states(self.model, forest, self._pack_attention, self._autocast)
        targets = torch.arange(len(rows))
        _push_back([rows], [self._backward_through_head(rows, forest, plan, targets, temperature, objective)])

    # -- visits -------------------------------------------------------------------------------------------------------

    def _visit(self, step: _Step, visit: Visit, temperature: float, objective: Objective) -> None:
        match visit.kind:
            case VisitKind.CAPTURE:
                self._capture(step, visit.chunk, keep_graph=visit.keep_graph)
            case VisitKind.REPLAY | VisitKind.BACKWARD:
                self._push(step, visit.chunk, temperature, objective)
                step.store.release(visit.chunk)
            case VisitKind.RELEASE:
                step.store.release(visit.chunk)

    def _capture(self, step: _Step, index: int, *, keep_graph: bool) -> None:
        with torch.set_grad_enabled(keep_graph):
            context, hidden = self._evaluate(step, index, is_recorded=keep_graph)
        if keep_graph:
            step.graphs[index] = context, hidden

    def _push(self, step: _Step, index: int, temperature: float, objective: Objective) -> None:
        """Push the gradient of a chunk's targets, and what was collected for its states, through the chunk."""
        is_kept = index in step.graphs
        context, hidden = step.graphs.pop(index) if is_kept else self._evaluate(step, index, is_recorded=True)
        context.begin_backward()
        with context.active():
            targets, rows = self._rows(step, index, context, hidden)
            roots, slopes = [hidden], [torch.zeros_like(hidden)]  # also without targets: states wait for their gradient
            if len(targets):
                roots.append(rows)
                slopes.append(
                    self._backward_through_head(rows, step.forest, step.plan, targets, temperature, objective)
                )
            _push_back(roots, slopes)

    def _backward_through_head(
        self, rows: Tensor, forest: Forest, plan: Plan, targets: Tensor, temperature: float, objective: Objective
    ) -> Tensor:
        """Gradient at the hidden states ``[m, hidden]`` that predict ``targets``."""
        return backward_through_head(
            rows.detach(),
            self._head,
            self._ids(forest, targets),
            temperature,
            plan.head_rows,
            lambda part, logprobs, entropy: objective(targets[part], logprobs, entropy),
            self._autocast,
        )

    def _evaluate(self, step: _Step, index: int, *, is_recorded: bool) -> tuple[ChunkContext, Tensor]:
        """Send a chunk through the model. Its last hidden states are ``[1, T, hidden]``."""
        chunk = step.plan.chunks[index]
        context = self._context(step, index, is_recorded=is_recorded)
        first = chunk.first + context.start - chunk.start
        ids = step.segment_of(chunk).token_ids[first : first + context.num_tokens]
        input_ids = torch.from_numpy(ids).long().to(self.model.device)[None]
        positions = torch.arange(context.start, context.start + context.num_tokens, device=self.model.device)[None]
        recompute = (
            self._layers.active(context) if is_recorded and step.plan.recompute_layers else contextlib.nullcontext()
        )
        with context.active(), recompute, self._random_as_before(context), self._autocast():
            output = self.model.base_model(
                input_ids=input_ids, position_ids=positions, past_key_values=context, use_cache=True
            )
        hidden = output.last_hidden_state
        hidden = context.leave(self._num_layers, HIDDEN, hidden[:, -1:], hidden, only_at_end=True)
        context.finish_forward()
        if self._keeps_choices:
            self.choices.update(context.choices)
        return context, hidden

    def _context(self, step: _Step, index: int, *, is_recorded: bool) -> ChunkContext:
        make = ChunkContext if self._ranks is None else partial(ParallelContext, self._ranks)
        return make(
            step.store,
            step.path(index),
            step.page(index),
            is_recorded=is_recorded,
            is_inner=index in step.inner,
            anchor=self._anchor,
            autocast=self._autocast,
            keep_attended=step.plan.keep_attended,
        )

    def _rows(self, step: _Step, index: int, context: ChunkContext, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The chunk's targets and the hidden states that predict them ``[m, hidden]``."""
        targets, offsets = step.targets(step.part(index))
        if not len(targets) or offsets[0] >= 0:
            return targets, hidden[0][offsets.to(hidden.device)]
        boundary = context.read(self._num_layers, HIDDEN)
        if boundary is None:
            raise ValueError("the first token of a root is a target, but nothing predicts it")
        return targets, torch.cat([boundary[0], hidden[0][offsets[1:].to(hidden.device)]])

    @contextlib.contextmanager
    def _random_as_before(self, context: ChunkContext) -> Iterator[None]:
        """Dropout falls in a recomputation as it fell when the chunk was first evaluated."""
        if not self._is_random:
            yield
            return
        on_gpu = self.model.device.type == "cuda"
        now = torch.cuda.get_rng_state(self.model.device).cpu() if on_gpu else torch.get_rng_state()
        then = context.chosen(-1, "random", lambda: now).cpu()
        if torch.equal(now, then):
            yield
            return
        with torch.random.fork_rng([self.model.device] if on_gpu else []):
            if on_gpu:
                torch.cuda.set_rng_state(then, self.model.device)
            else:
                torch.set_rng_state(then)
            yield

    # -- the step -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _step(self, forest: Forest, plan: Plan) -> Iterator[_Step]:
        self.choices = {}
        self._is_random = _has_dropout(self.model)
        store = StateStore(self.model.device, self._store_budget(plan))
        try:
            yield _Step(
                forest,
                plan,
                store,
                inner=frozenset(chunk.parent for chunk in plan.chunks if chunk.parent >= 0),
                pushed=frozenset(visit.chunk for visit in plan.visits if visit.kind is VisitKind.BACKWARD),
                ranks=self._ranks,
            )
        finally:
            store.close()

    def _check_shared(self, plan: Plan, progress: Progress | None = None) -> None:
        if self._ranks is None:
            return
        if plan.mode is Mode.PACK:
            raise ConfigError("ranks cannot share a packed forest.", "Set trainer.tree.mode to walk.")
        if progress is not None:
            raise ConfigError(
                "the progress of a step that ranks share cannot be saved.", "Do without it, or use a single rank."
            )

    @contextlib.contextmanager
    def _together(self, task: str) -> Iterator[None]:
        """What ranks do together: it is named if one of them is lost, and over when all has arrived."""
        if self._ranks is None:
            yield
            return
        self._ranks.task = task
        yield
        self._ranks.settle()

    def _store_budget(self, plan: Plan) -> StoreBudget:
        """What the plan leaves of the device for states; on a CPU that is the host."""
        limit = plan.predicted.store_limit_bytes
        if limit is None:
            return self._budget
        if self.model.device.type == "cpu":
            return replace(self._budget, host_bytes=limit)
        return replace(self._budget, device_bytes=limit)

    def _ids(self, forest: Forest, index: Tensor | slice) -> Tensor:
        return torch.from_numpy(forest.target_ids).long()[index].to(self.model.device)

    @property
    def _head(self) -> Any:
        return self.model.get_output_embeddings()

    @property
    def _score_dtype(self) -> torch.dtype:
        return torch.float64 if self.model.dtype == torch.float64 else torch.float32


def _push_back(roots: Sequence[Tensor], slopes: Sequence[Tensor]) -> None:
    """Nothing in front of the head has a gradient where only the head is trained."""
    pushed = [index for index, root in enumerate(roots) if root.requires_grad]
    if pushed:
        torch.autograd.backward([roots[index] for index in pushed], [slopes[index] for index in pushed])


def _has_dropout(model: Any) -> bool:
    return any(isinstance(module, torch.nn.Dropout) and module.training and module.p > 0 for module in model.modules())
