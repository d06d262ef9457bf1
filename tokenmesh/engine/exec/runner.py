"""TorchRunner: a step is prepare, forward, sample, in this order, on the compute thread."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from tokenmesh.engine.api.tokens import TokenLogprobs
from tokenmesh.engine.exec.apply import apply_rows
from tokenmesh.engine.exec.arena import NO_ARENA, Arena
from tokenmesh.engine.exec.branches import Branches
from tokenmesh.engine.exec.compute_thread import ComputeHere, ComputeThread, Task
from tokenmesh.engine.exec.drafted_states import DraftedStates
from tokenmesh.engine.exec.drafter import Drafter
from tokenmesh.engine.exec.inputs import StepInputs, build_inputs
from tokenmesh.engine.exec.placeholders import within_vocabulary
from tokenmesh.engine.exec.rows import HostRows
from tokenmesh.engine.layers.step import HostStep
from tokenmesh.engine.models.api import LanguageModel, Taps
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.plan import NewRow, StepPlan, StepResult
from tokenmesh.engine.runner import NO_IMAGES, HostImages
from tokenmesh.engine.sampling.logprobs import prompt_logprobs
from tokenmesh.engine.sampling.sampler import Draws, RowSampler
from tokenmesh.kernels import huge_pages


class TorchTrace:
    """Implements `profiling.Trace`. Steps run on other threads, so all threads are recorded."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )

    def start(self) -> None:
        self._profile.start()

    def write(self, path: Path) -> None:
        """See `Trace.write`: Chrome's format, gzip for a path that ends in .gz."""
        self._profile.stop()
        self._profile.export_chrome_trace(str(path))


@dataclass(frozen=True, slots=True)
class StepLogits:
    """It holds what `forward` leaves for `sample`."""

    sampled: torch.Tensor | None
    """float32 [N + D, vocab] in the order of StepInputs.last_tokens; None when no row samples."""
    prompt: dict[int, list[TokenLogprobs]]
    alignments: dict[int, list[int]] = field(default_factory=dict)
    hidden: torch.Tensor | None = None
    """[T, hidden] final states of all tokens; None in a step that no drafter reads."""
    taps: torch.Tensor | None = None
    """See `Taps.states`; None where the drafter reads none."""


class TorchRunner:
    """One model, what it keeps, and the rows of the requests that run on it.

    Only the compute thread touches rows, sampling state and store, so every step finds them as the
    step before it left them.
    """

    def __init__(
        self,
        model: LanguageModel,
        store: KvStore,
        rows: HostRows,
        sampler: RowSampler,
        *,
        is_async: bool,
        arena: Arena = NO_ARENA,
        drafter: Drafter | None = None,
        branches: Branches | None = None,
    ) -> None:
        """is_async: launches return at once, and a separate thread carries them out. arena: of the
        host tier. branches: of drafts; their blocks are the store's last ones."""
        self.has_own_device = False
        self.num_lanes = 1
        # what a recording's encoder left is too large to be copied in each step
        self.takes_drafts = not store.has_states or model.write_cross is None
        self.max_proposed = 0 if drafter is None else drafter.max_proposed
        self.drafter = drafter
        self._branches = branches
        self.num_blocks = store.num_blocks if branches is None else branches.first_block
        self.windows = store.grouping.windows
        self.has_states = store.has_states
        self.has_pages = store.has_pages
        self.num_saved_states = store.num_saved
        self._arena, self.shared_arena = arena
        self.images = NO_IMAGES if self._arena is None else HostImages(*self._arena.shape)
        self._model = model
        self._store = store
        store.clear_blocks(torch.zeros(1, dtype=torch.int64))
        self._rows = rows
        self._sampler = sampler
        self._logits = torch.empty(0, 0)
        """These are the logits of the step that drew for the most rows."""
        self._compute = ComputeThread() if is_async else ComputeHere()

    def launch(self, plan: StepPlan) -> Task:
        return self._compute.submit(partial(self.carry_out, plan))

    @torch.inference_mode()
    def carry_out(self, plan: StepPlan) -> StepResult:
        """The whole step; blocks. The parts of it are for callers in inference mode: entering it
        takes as long as some of them."""
        inputs = self.prepare(plan)
        if plan.scheduled:
            self._fill(plan)
        copied = self._copy_states(plan)
        logits = self.forward(inputs, is_followed=self._is_followed(plan))
        if plan.saves or plan.host_saves:
            self._save(plan)
        result = self.sample(inputs, logits)
        taken = {} if self._branches is None else self._branches.settle(result.tokens)
        if inputs is not None and logits.hidden is not None:
            result.drafts = self._propose(plan, inputs.step, result.tokens, logits, taken)
        if copied is not None and (again := copied.take_back(result)):
            self.forward(build_inputs(again, self._rows, self._store.page_size))
        return result

    def _propose(
        self,
        plan: StepPlan,
        step: HostStep,
        drawn: dict[int, list[int]],
        logits: StepLogits,
        taken: Mapping[int, int],
    ) -> dict[int, list[int]]:
        """Let the drafter read a followed step; see `Drafter.propose`."""
        assert self.drafter is not None
        assert logits.hidden is not None
        return self.drafter.propose(plan, step, drawn, logits.hidden, logits.taps, taken)

    def _save(self, plan: StepPlan) -> None:
        """Copy states, and blocks to the host tier, once everything of the step is computed."""
        for saved in plan.saves:
            self._store.save_state(saved.row, saved.slot)
        if plan.host_saves:
            assert self._arena is not None
            blocks, slots = torch.tensor(plan.host_saves).T
            self._store.copy_out(blocks, self._arena, slots)

    def _copy_states(self, plan: StepPlan) -> DraftedStates | None:
        return DraftedStates(self._store, plan) if self.has_states and plan.has_drafts else None

    def _is_followed(self, plan: StepPlan) -> bool:
        """Return whether a drafter reads any of the step."""
        if self.drafter is None:
            return False
        self.drafter.note_rows(plan)
        return any(entry.is_followed for entry in plan.scheduled)

    @property
    def model(self) -> LanguageModel:
        return self._model

    @torch.inference_mode()
    def states(
        self, token_ids: list[int], layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states of a text, without a request: final states [T, hidden] and those before
        some layers [T, layers, hidden]. It writes over the first blocks, so nothing else may
        run."""
        count, store = len(token_ids), self._store
        tables = torch.arange(1, 2 + count // store.page_size)[None]
        step = HostStep(
            starts=[0],
            counts=[count],
            numbers=[0],
            all_tables=tables,
            page_size=store.page_size,
            token_lengths=range(1, count + 1),
            windowed_tables=[tables] * (len(store.grouping.windows) - 1),
        )
        hidden = self._model.embed(torch.tensor(token_ids))
        taps = Taps(layers, hidden.new_empty(count, len(layers), hidden.shape[1]))
        return self._model.forward(hidden, step, store, taps), taps.states

    @property
    def arena(self) -> torch.Tensor | None:
        """The memory of the host tier."""
        return self._arena

    def drop_model(self) -> None:
        """Let go of the weights; nothing may be launched before `take_model`."""
        del self._model
        self._logits = torch.empty(0, 0)
        if self.drafter is not None:
            self.drafter.drop_model()

    def take_model(self, model: LanguageModel) -> None:
        """The same model again, loaded anew; what drafts for it is loaded now."""
        if self.drafter is not None:
            self.drafter.take_model(model)
        self._model = model

    def prepare(self, plan: StepPlan) -> StepInputs | None:
        """Apply the plan's row changes; None when it computes nothing."""
        apply_rows(plan, self._rows, self._remove, self._add)
        if not plan.num_rows:
            return None
        scheduled = self._rows.next_tokens(plan.decodes) + plan.scheduled
        if self._branches is not None:
            scheduled = self._branches.spread(scheduled)
        return build_inputs(scheduled, self._rows, self._store.page_size)

    def _remove(self, number: int) -> None:
        self._rows.remove(number)
        self._sampler.remove(number)
        if self._model.aligner is not None:
            self._model.aligner.drop(number)

    def _add(self, given: NewRow) -> None:
        new = within_vocabulary(given, self._model.facts.vocab_size)
        self._rows.add(given, self._model.positions_of)
        self._sampler.add(new)
        if new.state is not None:
            self._store.load_state(new.row, new.state)
        elif self.has_states:
            self._store.clear_row(new.row)
        row = self._rows[new.row]
        if row.states is not None:
            assert self._model.write_cross is not None
            self._model.write_cross(row.states, self._store, new.row)
            row.states = None
        rule = new.sampling.speech
        if rule is not None and rule.align_states and self._model.aligner is not None:
            self._model.aligner.begin(new.row, rule.align_from, rule.align_states)

    def _fill(self, plan: StepPlan) -> None:
        """Blocks that come from the host tier, before anything reads them."""
        fills = [fill for entry in plan.scheduled for fill in entry.fills]
        if fills:
            assert self._arena is not None
            blocks, slots = torch.tensor(fills).T
            self._store.copy_in(blocks, self._arena, slots)

    def forward(self, inputs: StepInputs | None, *, is_followed: bool = False) -> StepLogits:
        """Write the step's keys and values; compute logits only where a token is drawn.
        is_followed: keep the states that the drafter reads."""
        if inputs is None:
            return StepLogits(sampled=None, prompt={})
        hidden = self._model.embed(inputs.token_ids, inputs.patches)
        taps = self._taps(hidden) if is_followed else None
        hidden = whole = self._model.forward(hidden, inputs.step, self._store, taps)
        prompt = {
            span.row: prompt_logprobs(self._model.logits, hidden[span.tokens], span)
            for span in inputs.prompt_spans
        }
        sampled = None
        if inputs.sampled_rows:
            if inputs.last_tokens is not None:
                hidden = hidden.index_select(0, inputs.last_tokens)
            sampled = self._logits_of(hidden)
        found = StepLogits(sampled, prompt, self._alignments(inputs))
        if not is_followed:
            return found
        return replace(found, hidden=whole, taps=None if taps is None else taps.states)

    def _taps(self, hidden: torch.Tensor) -> Taps | None:
        """Room for what the drafter reads within the layers; None: nothing."""
        layers = () if self.drafter is None else self.drafter.model.taps
        if not layers:
            return None
        return Taps(layers, hidden.new_empty(len(hidden), len(layers), hidden.shape[1]))

    def _logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """In the memory of an earlier step's, which has been drawn from.

        Pages of 4 KiB that were never touched cost more than the product: 20 ms for 32 rows of
        150,000 numbers inside a virtual machine. On the heap larger ones would leave holes.
        """
        if not self._logits.numel():
            self._logits = self._model.logits(hidden)
            return self._logits
        wanted, (there, width) = hidden.shape[0], self._logits.shape
        if wanted > there:
            self._logits = huge_pages.empty((wanted, width), self._logits.dtype)
        room = self._logits if wanted >= there else self._logits[:wanted]
        return self._model.logits(hidden, room)

    def _alignments(self, inputs: StepInputs) -> dict[int, list[int]]:
        """Those of rows whose prompt is complete."""
        aligner, step, found = self._model.aligner, inputs.step, dict[int, list[int]]()
        if aligner is None:
            return found
        for number, start, count in zip(step.numbers, step.starts, step.counts, strict=True):
            if start + count >= self._rows[number].num_prompt:
                states = aligner.take(number)
                if states is not None:
                    found[number] = states
        return found

    def sample(self, inputs: StepInputs | None, logits: StepLogits) -> StepResult:
        """Draw a token for each row that samples, and one more after each draft that is right."""
        if inputs is None:
            return StepResult()
        result = StepResult(
            prompt_logprobs=logits.prompt,
            errors=dict(inputs.errors),
            alignments=logits.alignments,
        )
        if logits.sampled is not None:
            drafted = inputs.drafted
            if self.drafter is not None:
                drafted = self.drafter.with_probs(drafted)
            draws = self._sampler.draw(inputs.sampled_rows, logits.sampled, drafted)
            result.errors |= draws.errors
            result.non_retryable |= draws.non_retryable
            self._note_draws(draws, result)
        for number, error in result.errors.items():
            self._rows.fail(number, error)
        return result

    def _note_draws(self, draws: Draws, result: StepResult) -> None:
        for number, drawn in draws.draws_by_row.items():
            token_ids = [draw.token_id for draw in drawn]
            self._rows[number].token_ids += token_ids
            result.tokens[number] = token_ids
            logprobs = [draw.logprobs for draw in drawn if draw.logprobs is not None]
            if logprobs:
                result.logprobs[number] = logprobs
