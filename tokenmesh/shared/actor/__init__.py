"""Actors: a mailbox, handlers marked `@handles`, background tasks. Start in runtime.py."""

from tokenmesh.shared.actor.actor import Actor, BackgroundTasks, Context, handles
from tokenmesh.shared.actor.runtime import ActorRuntime

__all__ = ["Actor", "ActorRuntime", "BackgroundTasks", "Context", "handles"]
