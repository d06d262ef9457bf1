"""The Lua scripts of this folder: each answers from one place what all gateways together did."""

from importlib.resources import files

from tokenmesh.shared.redis import Redis, Script


class Scripts:
    """Made once for a gateway."""

    def __init__(self, redis: Redis) -> None:
        self.admit = _script(redis, "admit")
        self.settle = _script(redis, "settle")
        self.renew = _script(redis, "renew")
        self.uploads = _script(redis, "uploads")
        self.forget = _script(redis, "forget")


def _script(redis: Redis, name: str) -> Script:
    return redis.script(_source("common") + _source(name))


def _source(name: str) -> str:
    return files(__package__).joinpath(f"{name}.lua").read_text("utf-8")
