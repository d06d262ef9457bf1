"""TorchRunner: a step is prepare, forward, sample, in this order, on the compute thread."""

from dataclasses import dataclass
from functools import partial

import torch

from tokenmesh.services.worker_svc.engine.placeholders import within_vocabulary
from tokenmesh.services.worker_svc.engine.plan import StepPlan, StepResult
from tokenmesh.services.worker_svc.models.native.decoder import Decoder
from tokenmesh.services.worker_svc.runner.compute_thread import ComputeHere, ComputeThread, Task
from tokenmesh.services.worker_svc.runner.inputs import StepInputs, build_inputs
from tokenmesh.services.worker_svc.runner.prompt_logprobs import prompt_logprobs
from tokenmesh.services.worker_svc.runner.rows import Rows
from tokenmesh.services.worker_svc.sampling.sampler import Sampler
from tokenmesh.shared.messages.tokens import TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What `forward` leaves for `sample`."""

    sampled: torch.Tensor | None
    """float32 [N, vocab] in the order of StepInputs.sampled_rows; None when nobody samples."""
    prompt: dict[int, list[TokenLogprobs]]


class TorchRunner:
    """One decoder, its KV pool, and the rows of the requests that run on it.

    Only the compute thread touches rows, sampling state and pool, so every step finds them as the
    step before it left them.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: torch.Tensor,
        rows: Rows,
        sampler: Sampler,
        *,
        is_async: bool,
    ) -> None:
        """is_async: launches return at once, and a thread of their own carries them out.

        pool is [layers, 2, blocks, kv_heads, page_size, head_dim]; block 0 is the null block.
        """
        self.has_own_device = False
        self.num_blocks = pool.shape[2]
        self._block_size = pool.shape[4]
        self._decoder = decoder
        self._pool = pool
        self._pool[:, :, 0] = 0
        self._rows = rows
        self._sampler = sampler
        self._compute = ComputeThread() if is_async else ComputeHere()

    def launch(self, plan: StepPlan) -> Task:
        """See `Runner.launch`."""
        return self._compute.submit(partial(self.carry_out, plan))

    def carry_out(self, plan: StepPlan) -> StepResult:
        """The whole step; blocks."""
        inputs = self.prepare(plan)
        logits = self.forward(inputs)
        return self.sample(inputs, logits)

    def drop_decoder(self) -> None:
        """Let go of the weights; nothing may be launched before `take_decoder`."""
        del self._decoder

    def take_decoder(self, decoder: Decoder) -> None:
        """The same model again, loaded anew."""
        self._decoder = decoder

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> StepInputs | None:
        """Apply the plan's row changes; None when it computes nothing."""
        for number in plan.removed_rows:
            self._rows.remove(number)
            self._sampler.remove(number)
        for each in plan.new_rows:
            new = within_vocabulary(each, self._decoder.config.vocab_size)
            self._rows.add(new)
            self._sampler.add(new)
        fresh = [self._rows.append_block(number, block) for number, block in plan.grown]
        for entry in plan.scheduled:
            if entry.new_blocks:
                fresh += self._rows.append_blocks(entry, self._block_size)
        if fresh and self._decoder.program is None:
            # torch multiplies masked keys by zero: what an earlier request left must be finite
            self._pool.index_fill_(2, torch.tensor(fresh), 0)
        if not plan.num_rows:
            return None
        scheduled = self._rows.next_tokens(plan.decodes) + plan.scheduled
        return build_inputs(scheduled, self._rows, self._decoder, self._pool.shape[1:])

    @torch.inference_mode()
    def forward(self, inputs: StepInputs | None) -> StepLogits:
        """Write the step's keys and values; compute logits only where a token is drawn."""
        if inputs is None:
            return StepLogits(sampled=None, prompt={})
        hidden = self._decoder.embed(inputs.token_ids, inputs.patches)
        hidden = self._decoder.forward(hidden, inputs.step, self._pool)
        prompt = {
            span.row: prompt_logprobs(self._decoder, hidden[span.tokens], span)
            for span in inputs.prompt_spans
        }
        sampled = None
        if inputs.sampled_rows:
            if inputs.last_tokens is not None:
                hidden = hidden.index_select(0, inputs.last_tokens)
            sampled = self._decoder.logits(hidden)
        return StepLogits(sampled=sampled, prompt=prompt)

    @torch.inference_mode()
    def sample(self, inputs: StepInputs | None, logits: StepLogits) -> StepResult:
        """Draw one token for each row that samples."""
        if inputs is None:
            return StepResult()
        result = StepResult(prompt_logprobs=logits.prompt, errors=dict(inputs.errors))
        if logits.sampled is not None:
            draws = self._sampler.draw(inputs.sampled_rows, logits.sampled)
            result.errors |= draws.errors
            result.hopeless |= draws.hopeless
            for number, draw in draws.draw_by_row.items():
                self._rows[number].token_ids.append(draw.token_id)
                result.tokens[number] = draw.token_id
                if draw.logprobs is not None:
                    result.logprobs[number] = draw.logprobs
        for number, error in result.errors.items():
            self._rows.fail(number, error)
        return result
