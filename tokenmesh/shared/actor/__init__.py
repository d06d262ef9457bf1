"""Actors: a mailbox, handlers marked `@handles`, and a supervisor. Start reading in runtime.py."""

from tokenmesh.shared.actor.actor import Actor, handles
from tokenmesh.shared.actor.context import Context
from tokenmesh.shared.actor.limits import ActorLimits
from tokenmesh.shared.actor.runtime import ActorRuntime
from tokenmesh.shared.actor.supervisor import Supervisor

__all__ = ["Actor", "ActorLimits", "ActorRuntime", "Context", "Supervisor", "handles"]
