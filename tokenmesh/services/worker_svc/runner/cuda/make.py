"""make_cuda_runner: a model and its store on a GPU -> a runner."""

from tokenmesh.kernels.triton_start import CannotCompileError, start_triton
from tokenmesh.services.worker_svc.models.api import Model, ModelFacts
from tokenmesh.services.worker_svc.models.keeps import KvStore
from tokenmesh.services.worker_svc.runner.cuda.limits import CudaLimits
from tokenmesh.services.worker_svc.runner.cuda.runner import CudaRunner
from tokenmesh.services.worker_svc.runner.cuda.torch_device import TorchDevice
from tokenmesh.services.worker_svc.sampling.device_sampler import DeviceSampler
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError


def check_shapes(facts: ModelFacts, settings: WorkerSettings) -> None:
    """Raises ConfigError for what does not run on a GPU."""
    if settings.batch_invariant:
        raise ConfigError(
            "batch_invariant does not hold on a GPU, where splits and matrix products depend on "
            "the batch; leave it out or set worker.device to cpu",
            param="worker.batch_invariant",
        )
    problem = facts.gpu_problem()
    if problem is not None:
        raise ConfigError(
            f"{facts.architecture}: {problem}; set worker.device to cpu", param="worker.device"
        )
    if settings.block_size & (settings.block_size - 1):
        raise ConfigError(
            f"block_size is {settings.block_size}; on a GPU it is a power of two",
            param="worker.block_size",
        )


def check_compiler() -> None:
    """Raises ConfigError where kernels cannot be compiled."""
    try:
        start_triton()
    except CannotCompileError as error:
        raise ConfigError(str(error), param="worker.device") from error


def make_cuda_runner(
    model: Model,
    store: KvStore,
    eos_token_ids: frozenset[int],
    settings: WorkerSettings,
    max_model_len: int,
) -> CudaRunner:
    """Without graphs yet: see `CudaRunner.make_graphs`."""
    device = store.device
    sampler = DeviceSampler(
        settings.max_num_seqs,
        model.facts.vocab_size,
        eos_token_ids,
        device,
        settings.grammar_step_s,
    )
    limits = CudaLimits.of(settings, max_model_len)
    return CudaRunner(model, store, sampler, TorchDevice(device), limits)
