"""The closed word lists that the practice draws from.

Small on purpose: a few million parameters learn in an hour to combine words that they know, not
to copy any letters there are. What is held out of training are combinations.
"""

from __future__ import annotations

from random import Random

_NAMES = """Ada Alan Grace Linus Maria John Anna Peter Emma Noah Olivia Liam Mia Lucas Clara Leo
Nora Oscar Sam Alex Max Tom Bob Alice Carol David Sarah Daniel James Mary"""
_CITIES = """Paris London Berlin Rome Madrid Lisbon Vienna Prague Oslo Stockholm Helsinki Dublin
Athens Cairo Delhi Mumbai Tokyo Seoul Sydney Toronto Boston Chicago Seattle Munich Zurich Milan"""
_WORDS = """apple banana cherry lemon bread butter cheese sugar salt soup rice cat dog bird fish
horse cow sheep mouse lion tiger red green blue white black sun moon star cloud rain snow river
lake tree flower stone water fire house door window table chair clock book paper word school city
road car bus train boat music song game team hello world token mesh worker gateway test code noon
level radar planet rocket robot cup hat coffee tea"""
_FIELDS = "name age city color size price count title score level year id"


class Vocabulary:
    """The lists; `testing` says which combinations of them are wanted."""

    def __init__(self, testing: bool) -> None:
        self.testing = testing
        self.names = _NAMES.split()
        self.cities = _CITIES.split()
        self.words = _WORDS.split()
        self.fields = _FIELDS.split()

    def word(self, rng: Random) -> str:
        """A listed word."""
        return rng.choice(self.words)

    def name(self, rng: Random) -> str:
        """A person's name."""
        return rng.choice(self.names)

    def city(self, rng: Random) -> str:
        """A city's name."""
        return rng.choice(self.cities)


TRAINING = Vocabulary(testing=False)
TESTING = Vocabulary(testing=True)
