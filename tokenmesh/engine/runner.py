"""The door between the engine and what computes: a runner, and the launch of one plan."""

from typing import Final, NamedTuple, Protocol

from tokenmesh.engine.plan import StepPlan, StepResult


class HostImages(NamedTuple):
    """Host memory for images of blocks."""

    slots: int = 0
    """0: there is no host tier."""
    num_bytes: int = 0
    """This is the size of one image."""


NO_IMAGES: Final = HostImages()


class Launch(Protocol):
    """A step on its way."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for the step's end, at most so long; whether it has ended. Raises nothing."""

    def result(self) -> StepResult:
        """Return what came out, once the step has ended; blocks. Raises what the step raised."""


class Runner(Protocol):
    """One model on one device. All calls come from the engine thread.

    Launches take effect one after the other, in their order: row changes, KV writes, draws. So a
    row or a block that an earlier launch still uses may be given away in a later one.
    """

    num_blocks: int
    """Size of the KV pool in blocks, the null block 0 included."""
    windows: tuple[int | None, ...]
    """These are the windows of each KV group, see `KvGroups`: None for the first, then one window
    for all others."""
    has_states: bool
    """It tells whether rows keep something that the blocks of a shared prefix do not bring."""
    has_pages: bool
    """It tells whether layers keep something in blocks."""
    num_saved_states: int
    """Slots for copies of what rows keep, see `SavedStates`; 0: it cannot be copied."""
    takes_drafts: bool
    """It tells whether a plan may have `ScheduledRow.drafts`; the engine checks it once, at its
    start."""
    max_proposed: int
    """Most tokens that its own drafter proposes for a row in a step, see `StepResult.drafts`; 0: it
    has none."""
    images: HostImages
    """It holds what it can copy blocks to, and from there back."""
    has_own_device: bool
    """It tells whether steps run on hardware that the engine thread does not need."""
    num_lanes: int
    """It computes so many steps at a time, as a pipeline of stages does. Rows are divided into as
    many lanes: steps of different lanes have no row in common. 1: one step after the other."""

    def launch(self, plan: StepPlan) -> Launch:
        """Queue a step behind those in flight and return at once. Raises nothing: `result` does.

        The plan may want a token computed that a step in flight has yet to draw: whatever a row
        drew last stays with the runner. A row that failed gets any token. A step that raises takes
        those with it that were launched on top before its result was taken: they do nothing and
        raise as well, since they rest on row changes that may not have happened.
        """


def depth_of(runner: Runner, async_scheduling: bool | None) -> int:
    """Steps that may be in flight when another one is launched."""
    if runner.num_lanes > 1:
        return runner.num_lanes - 1
    is_async = runner.has_own_device if async_scheduling is None else async_scheduling
    return 1 if is_async else 0


class FinishedLaunch:
    """A launch that had ended before it returned."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self, timeout_s: float) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result
